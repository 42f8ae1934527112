"""Prompts that ask for a strict format behind a long text, and what a valid answer is.

A prompt is the model's own chat template around the rules, a long text (so that pages are seen), a
few requests with their answers, and the request. Tools are given to the template where it renders
them, and described in the first message where it ignores them.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from oscar_jax.models import Tokenizer

Valid = Callable[[str], bool]

# Sentences to be turned into a JSON object: the keys with their types, examples with their answers,
# and sentences that are asked for.
EXTRACTIONS: tuple[tuple[Mapping[str, type], tuple[tuple[str, str], ...], tuple[str, ...]], ...] = (
    (
        {"name": str, "age": int, "city": str},
        (
            (
                "Anna is 34 and lives in Oslo.",
                '{"name": "Anna", "age": 34, "city": "Oslo"}',
            ),
            (
                "In Cairo we met Omar, who is 51 years old.",
                '{"name": "Omar", "age": 51, "city": "Cairo"}',
            ),
        ),
        (
            "Maria, 27, moved to Lisbon last year.",
            "Peter has lived in Dublin for all of his 63 years.",
            "At 19, Yuki left Kyoto and now works in Osaka.",
            "My neighbour in Lima is called Rosa and is 45.",
        ),
    ),
    (
        {"item": str, "count": int, "paid": bool},
        (
            (
                "Three lamps were ordered and paid for.",
                '{"item": "lamp", "count": 3, "paid": true}',
            ),
            (
                "The 12 chairs have not been paid for yet.",
                '{"item": "chair", "count": 12, "paid": false}',
            ),
        ),
        (
            "We still owe the money for 5 tables.",
            "Seven books were bought and paid in full.",
            "The bill for 20 windows is open.",
            "She paid for the two bicycles at once.",
        ),
    ),
)

# What a user says, and the call that answers it: the tool and its arguments.
CALL_EXAMPLES: tuple[tuple[str, str], ...] = (
    (
        "What is the weather in Paris?",
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
    ),
    (
        "Tell tom@example.com that dinner is ready.",
        '<tool_call>\n{"name": "send_email", "arguments": {"to": "tom@example.com", '
        '"text": "Dinner is ready."}}\n</tool_call>',
    ),
    (
        "Find pages about old maps.",
        '<tool_call>\n{"name": "search_web", "arguments": {"query": "old maps"}}\n</tool_call>',
    ),
)
CALLS: tuple[tuple[str, str], ...] = (
    ("How warm is it in Cairo right now?", "get_weather"),
    ("Write to bob@example.com that the meeting is at noon.", "send_email"),
    ("Search the web for the history of the bicycle.", "search_web"),
    ("Will it rain in Lima?", "get_weather"),
    ("Send an email to anna@example.com that says hello.", "send_email"),
    ("Find pages about growing tomatoes.", "search_web"),
    ("What is the weather in Oslo?", "get_weather"),
    ("Look up who invented the telescope.", "search_web"),
)
TOOLS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("get_weather", "The weather of a city, now.", ("city",)),
    ("send_email", "Sends an email.", ("to", "text")),
    ("search_web", "Pages that match a query.", ("query",)),
)
CALL_RULES = (
    "You answer with one call of a tool and nothing else, in the form\n"
    '<tool_call>\n{"name": NAME, "arguments": {KEY: VALUE}}\n</tool_call>'
)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A request as ids, and the test of an answer's text.

    Args:
        kind: "json" or "tool call". request: what is asked, in words.
    """

    kind: str
    request: str
    ids: tuple[int, ...]
    valid: Valid


def strict_prompts(
    tokenizer: Tokenizer, contexts: Sequence[str], count: int
) -> tuple[list[Prompt], str]:
    """``count`` prompts, JSON objects and tool calls in turn over the contexts, and a remark.

    Raises:
        NotImplementedError: the model has no chat template (a base model): nothing says how it
            would be asked.
    """
    try:
        plain = tokenizer.chat([{"role": "user", "content": "x"}])
    except ValueError as error:
        raise NotImplementedError(str(error)) from None
    schema = [tool_schema(*tool) for tool in TOOLS]
    knows_tools = tokenizer.chat([{"role": "user", "content": "x"}], tools=schema) != plain
    prompts = []
    for index in range(count):
        turn, context = index // 2, contexts[index // 2 % len(contexts)]
        if index % 2 == 0:
            keys, examples, sentences = EXTRACTIONS[turn % len(EXTRACTIONS)]
            asked = sentences[turn // len(EXTRACTIONS) % len(sentences)]
            rules = object_rules(keys)
            kind, tools, valid = "json", None, valid_object(keys)
        else:
            asked, name = CALLS[turn % len(CALLS)]
            examples, rules = CALL_EXAMPLES, CALL_RULES if knows_tools else described_tools()
            kind, valid = "tool call", valid_call(name)
            tools = schema if knows_tools else None
        ids = tokenizer.chat(_messages(rules, context, examples, asked), tools=tools)
        prompts.append(Prompt(kind, asked, tuple(ids), valid))
    remark = "tools by the chat template" if knows_tools else "tools in the first message"
    return prompts, remark


def object_rules(keys: Mapping[str, type]) -> str:
    """What an answer must be.

    >>> object_rules({"name": str, "age": int})
    'You answer with one JSON object and nothing else: "name" (string), "age" (integer).'
    """
    names = {str: "string", int: "integer", bool: "true or false"}
    wanted = ", ".join(f'"{key}" ({names[kind]})' for key, kind in keys.items())
    return f"You answer with one JSON object and nothing else: {wanted}."


def described_tools() -> str:
    """The rules of a call, and the tools in words."""
    tools = (f"{name}({', '.join(keys)}): {about}" for name, about, keys in TOOLS)
    return "\n".join([CALL_RULES, "The tools:", *tools])


def _messages(
    rules: str, context: str, examples: Sequence[tuple[str, str]], asked: str
) -> list[dict[str, str]]:
    """Rules and text are part of the first request: some templates know no system message."""
    turns = [*examples, (asked, "")]
    turns[0] = (
        f"{rules}\n\nA text that you may ignore:\n\n{context}\n\n{turns[0][0]}",
        turns[0][1],
    )
    messages = []
    for request, answer in turns:
        messages.append({"role": "user", "content": request})
        messages.append({"role": "assistant", "content": answer})
    return messages[:-1]


def tool_schema(name: str, about: str, arguments: Sequence[str]) -> dict[str, Any]:
    """A tool in the form that chat templates know, with string arguments only."""
    return {
        "type": "function",
        "function": {
            "name": name,
            "description": about,
            "parameters": {
                "type": "object",
                "properties": {key: {"type": "string"} for key in arguments},
                "required": list(arguments),
            },
        },
    }


def valid_object(keys: Mapping[str, type]) -> Valid:
    """Whether a text is one JSON object with exactly these keys and types, and nothing else.

    >>> test = valid_object({"name": str, "age": int})
    >>> test(' {"name": "Ann", "age": 2}\\n'), test('{"name": "Ann"}'), test("Ann")
    (True, False, False)
    """

    def valid(answer: str) -> bool:
        found = _json(answer)
        return (
            isinstance(found, dict)
            and found.keys() == keys.keys()
            # JSON's true is no integer, Python's is
            and all(type(found[key]) is kind for key, kind in keys.items())
        )

    return valid


def valid_call(name: str) -> Valid:
    """Whether a text is one call of this tool, its arguments strings and none missing or unknown.

    >>> valid_call("get_weather")(CALL_EXAMPLES[0][1])
    True
    >>> valid_call("search_web")(CALL_EXAMPLES[0][1])
    False
    """
    arguments = next(keys for tool, _, keys in TOOLS if tool == name)

    def valid(answer: str) -> bool:
        tagged = re.fullmatch(r"\s*<tool_call>(.*)</tool_call>\s*", answer, re.DOTALL)
        call = _json(tagged[1]) if tagged else None
        if not isinstance(call, dict) or call.keys() != {"name", "arguments"}:
            return False
        given = call["arguments"]
        return (
            call["name"] == name
            and isinstance(given, dict)
            and given.keys() == set(arguments)
            and all(isinstance(value, str) for value in given.values())
        )

    return valid


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
