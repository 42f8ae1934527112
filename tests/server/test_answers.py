"""The two generation routes on a real engine: shapes, choices, usage, limits of the context."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.server.client import (
    MAX_MODEL_LEN,
    MODEL,
    Server,
    error_of,
    events_of,
    run,
)

# What the byte-level tokenizer makes of a chat of one user message, beside the message's bytes.
CHAT_TOKENS = len("\n") + 1 + len("user") + 1 + len("\n") + 1 + len("assistant") + len("\n")


def texts(events: list[dict[str, Any]], chat: bool) -> dict[int, str]:
    """The joined increments of each choice of a stream."""
    joined: dict[int, str] = {}
    for event in events:
        for choice in event["choices"]:
            piece = choice["delta"].get("content") or "" if chat else choice["text"]
            joined[choice["index"]] = joined.get(choice["index"], "") + piece
    return joined


def test_a_completion_has_openais_shape_and_true_counts(server: Server) -> None:
    body = server.complete(prompt="abc", max_tokens=5).json()
    Completion.model_validate(body)
    assert body["id"].startswith("cmpl-") and body["model"] == MODEL
    (choice,) = body["choices"]
    assert (choice["index"], choice["finish_reason"]) == (0, "length")
    assert body["usage"] == {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}


def test_a_chat_completion_has_openais_shape_and_true_counts(server: Server) -> None:
    body = server.chat("hello", max_tokens=5).json()
    ChatCompletion.model_validate(body)
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    prompt = CHAT_TOKENS + len("hello")
    assert body["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": 5,
        "total_tokens": prompt + 5,
    }


@pytest.mark.parametrize("stop", [None, "a"])
def test_a_stream_joins_to_the_text_that_is_not_streamed(server: Server, stop: str | None) -> None:
    common: dict[str, Any] = {"temperature": 1, "seed": 5, "max_tokens": 40, "stop": stop}
    whole = server.complete(**common).json()["choices"][0]
    events = events_of(server.complete(**common, stream=True))
    assert texts(events, chat=False)[0] == whole["text"]
    reasons = [event["choices"][0]["finish_reason"] for event in events]
    assert reasons[-1] == whole["finish_reason"] and set(reasons[:-1]) <= {None}
    assert not any("usage" in event for event in events)

    whole = server.chat(**common).json()["choices"][0]
    events = events_of(server.chat(**common, stream=True))
    assert texts(events, chat=True)[0] == whole["message"]["content"]
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert not any("role" in event["choices"][0]["delta"] for event in events[1:])
    for event in events:
        ChatCompletionChunk.model_validate(event)


def test_usage_comes_in_the_last_event_only_and_only_if_asked_for(server: Server) -> None:
    for ask in (server.complete, server.chat):
        whole = ask(max_tokens=6).json()
        events = events_of(ask(max_tokens=6, stream=True, stream_options={"include_usage": True}))
        assert [event["usage"] for event in events[:-1]] == [None] * (len(events) - 1)
        assert events[-1]["choices"] == []
        assert events[-1]["usage"] == whole["usage"]


def test_n_choices_differ_repeat_with_the_seed_and_are_counted_together(server: Server) -> None:
    common: dict[str, Any] = {"n": 3, "seed": 1, "temperature": 1.0, "max_tokens": 8}
    for ask, chat in ((server.complete, False), (server.chat, True)):
        body = ask(**common).json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
        said = [c["message"]["content"] if chat else c["text"] for c in body["choices"]]
        assert len(set(said)) == 3
        assert body["usage"]["completion_tokens"] == 24
        alone = ask(**(common | {"n": 1})).json()
        assert body["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
        first = alone["choices"][0]
        assert said[0] == (first["message"]["content"] if chat else first["text"])
        streamed = texts(events_of(ask(**common, stream=True)), chat)
        assert [streamed[index] for index in range(3)] == said


def test_a_list_of_prompts_gives_each_prompt_its_choices_in_order(server: Server) -> None:
    prompts = ["one", "two!", "three"]
    body = server.complete(prompt=prompts).json()
    alone = [server.complete(prompt=prompt).json() for prompt in prompts]
    assert [c["text"] for c in body["choices"]] == [b["choices"][0]["text"] for b in alone]
    assert [c["index"] for c in body["choices"]] == [0, 1, 2]
    assert body["usage"]["prompt_tokens"] == 3 + 4 + 5
    double = server.complete(prompt=["one", "two!"], n=2, temperature=1, seed=3).json()
    assert [c["index"] for c in double["choices"]] == [0, 1, 2, 3]
    assert double["usage"]["prompt_tokens"] == 7


def test_token_arrays_are_prompts_too(server: Server) -> None:
    tokenizer = server.service.serving.tokenizer  # type: ignore[union-attr]
    ids = tokenizer.encode("one")
    by_text = server.complete(prompt=["one", "one"]).json()
    by_ids = server.complete(prompt=[ids, ids]).json()
    assert by_text["choices"] == by_ids["choices"] and by_text["usage"] == by_ids["usage"]
    assert server.complete(prompt=ids).json()["choices"][0] == by_text["choices"][0]
    for wrong in (-1, tokenizer.vocab_size, 10**30):
        error = error_of(server.complete(prompt=[1, wrong]))
        assert error["param"] == "prompt" and "0 to 258" in error["message"]


@pytest.mark.parametrize("prompt", ["", [""], [], [[]], ["a", ""]])
def test_a_prompt_without_tokens_is_400_and_the_next_request_is_served(
    server: Server, prompt: Any
) -> None:
    response = server.complete(prompt=prompt)
    assert response.status_code == 400
    assert error_of(response)["param"] == "prompt"
    assert server.complete().status_code == 200


def test_empty_chats_are_400_and_empty_content_is_a_prompt(server: Server) -> None:
    assert server.chat(messages=[]).status_code == 400
    response = server.chat("")
    assert response.status_code == 200
    assert response.json()["usage"]["prompt_tokens"] == CHAT_TOKENS


def test_max_tokens_may_be_null_or_absent(server: Server) -> None:
    for value in ({}, {"max_tokens": None}):
        body = {"model": MODEL, "prompt": "test", "temperature": 0, "ignore_eos": True} | value
        answer = server.post("/v1/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 16  # OpenAI's default for completions
    for value in ({}, {"max_tokens": None}, {"max_completion_tokens": None}):
        messages = [{"role": "user", "content": "x" * 900}]
        body = {"model": MODEL, "messages": messages, "temperature": 0, "ignore_eos": True} | value
        answer = server.post("/v1/chat/completions", json=body).json()
        assert answer["usage"]["total_tokens"] == MAX_MODEL_LEN  # chat: all that is left
        assert answer["choices"][0]["finish_reason"] == "length"
    short = server.chat(max_tokens=None, max_completion_tokens=3).json()
    assert short["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_max_tokens_beyond_the_context_is_cut_to_what_is_left(server: Server, stream: bool) -> None:
    options = {"include_usage": True} if stream else None
    wish = {
        "max_tokens": 1_000_000,
        "ignore_eos": True,
        "stream": stream,
        "stream_options": options,
    }
    for response in (server.complete(prompt="x" * 950, **wish), server.chat("x" * 950, **wish)):
        last = events_of(response)[-1] if stream else response.json()
        assert last["usage"]["total_tokens"] == MAX_MODEL_LEN
        if not stream:
            assert last["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [MAX_MODEL_LEN, MAX_MODEL_LEN + 1, 10 * MAX_MODEL_LEN])
def test_a_prompt_beyond_the_context_is_400_with_both_counts(
    server: Server, length: int, stream: bool
) -> None:
    before = server.service.metrics.exposition()
    for response, tokens in (
        (server.complete(prompt="x" * length, stream=stream), length),
        (server.chat("x" * length, stream=stream), length + CHAT_TOKENS),
    ):
        assert response.status_code == 400
        error = error_of(response)
        assert error["code"] == "context_length_exceeded"
        assert error["type"] == "invalid_request_error"
        assert str(tokens) in error["message"] and str(MAX_MODEL_LEN) in error["message"]
    after = server.service.metrics.exposition()
    assert b"oscar:request_success_total{" not in after  # nothing reached the engine
    assert before.count(b"\n") <= after.count(b"\n")


def test_the_longest_prompt_that_fits_gets_one_token(server: Server) -> None:
    answer = server.complete(prompt="x" * (MAX_MODEL_LEN - 1), max_tokens=None).json()
    assert answer["usage"]["total_tokens"] == MAX_MODEL_LEN
    chat = server.chat("x" * (MAX_MODEL_LEN - 1 - CHAT_TOKENS), max_tokens=9).json()
    assert chat["usage"]["completion_tokens"] == 1


def test_text_far_beyond_the_context_is_refused_without_tokenising_it(server: Server) -> None:
    response = server.complete(prompt="x" * (64 * MAX_MODEL_LEN + 1))
    error = error_of(response)
    assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
    assert "65537 characters" in error["message"]


def test_a_greedy_request_repeats_and_is_the_same_beside_others(server: Server) -> None:
    """Short, long, and next to strangers; three times each."""
    for prompt in ("Is it?", "This is a deterministic long-context prefix. " * 12):
        alone = [server.complete(prompt=prompt, max_tokens=16).json()["choices"] for _ in range(3)]
        assert alone[0] == alone[1] == alone[2]

        async def crowd(prompt: str = prompt) -> list[httpx.Response]:
            async with server.client() as http:
                ask = [
                    http.post(
                        "/v1/completions",
                        json={
                            "model": MODEL,
                            "prompt": text,
                            "max_tokens": 16,
                            "temperature": temperature,
                        },
                    )
                    for text, temperature in ((prompt, 0), ("y" * 300, 1), (prompt, 0), ("z", 1))
                ]
                return list(await asyncio.gather(*ask))

        first, _, third, _ = run(crowd())
        assert first.json()["choices"] == third.json()["choices"] == alone[0]


def test_stop_strings_and_stop_ids_end_an_answer_and_do_not_leak(server: Server) -> None:
    plain = server.complete(temperature=1, seed=2, max_tokens=200, ignore_eos=True).json()
    text = plain["choices"][0]["text"]
    word = text[40:43]
    common: dict[str, Any] = {"temperature": 1, "seed": 2, "max_tokens": 200, "ignore_eos": True}
    (cut,) = server.complete(**common, stop=[word]).json()["choices"]
    assert cut["finish_reason"] == "stop"
    assert cut["text"] == text[: text.index(word)]
    (kept,) = server.complete(**common, stop=word, include_stop_str_in_output=True).json()[
        "choices"
    ]
    assert kept["text"] == text[: text.index(word) + 3]
    tokenizer = server.service.serving.tokenizer  # type: ignore[union-attr]
    letter = next(character for character in text if character.isascii())
    (by_id,) = server.complete(**common, stop_token_ids=tokenizer.encode(letter)).json()["choices"]
    assert by_id["finish_reason"] == "stop"
    assert by_id["text"] == text[: text.index(letter)]


def test_min_tokens_keeps_stop_ids_away_until_then(server: Server) -> None:
    everything = list(range(8))  # eight of 259 ids: one is drawn soon
    common: dict[str, Any] = {"temperature": 2, "seed": 4, "max_tokens": 900, "ignore_eos": True}
    early = server.complete(**common, stop_token_ids=everything).json()
    late = server.complete(**common, stop_token_ids=everything, min_tokens=300).json()
    assert early["usage"]["completion_tokens"] < 300 < late["usage"]["completion_tokens"]
    assert late["choices"][0]["finish_reason"] == "stop"
