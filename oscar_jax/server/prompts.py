"""From what a client wrote to token ids that fit; run by worker threads, not the event loop."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from oscar_jax.engine.request import SamplingParams
from oscar_jax.models.tokenizer import Tokenizer
from oscar_jax.server.errors import ApiError, invalid
from oscar_jax.server.protocol import (
    COMPLETION_MAX_TOKENS,
    ChatRequest,
    CompletionRequest,
    Generation,
)

# Text longer than this many characters per token of the context is refused without tokenising it:
# tokenising is slow enough (about 1 MB/s) that a few megabytes of it would be an attack.
CHARACTERS_PER_TOKEN = 64


@dataclasses.dataclass(frozen=True)
class Planned:
    """One prompt and the settings of its choices."""

    prompt: tuple[int, ...]
    choices: list[SamplingParams]


def plan_completion(
    request: CompletionRequest, tokenizer: Tokenizer, max_model_len: int
) -> list[Planned]:
    """The prompts of ``/v1/completions`` as token ids; see :func:`_planned` for max_tokens.

    Raises:
        ApiError: 400 for a prompt without tokens, an id outside the vocabulary, or too long.
    """
    prompts = []
    for prompt in request.prompt:
        if isinstance(prompt, str):
            _refuse_endless(len(prompt), "prompt", max_model_len)
            prompts.append(tokenizer.encode(prompt))
        else:
            last = tokenizer.vocab_size - 1
            if any(not 0 <= id <= last for id in prompt):
                raise invalid(f"prompt: token ids must lie in 0 to {last}", "prompt")
            prompts.append(prompt)
    wanted = COMPLETION_MAX_TOKENS if request.max_tokens is None else request.max_tokens
    return [_planned(request, ids, wanted, "prompt", max_model_len) for ids in prompts]


def plan_chat(request: ChatRequest, tokenizer: Tokenizer, max_model_len: int) -> list[Planned]:
    """The conversation of ``/v1/chat/completions``, rendered by the model's own template.

    Raises:
        ApiError: 400 for a conversation that the template refuses, or one that is too long.
    """
    messages = [message.rendered() for message in request.messages]
    characters = sum(len(message["content"]) for message in messages)
    _refuse_endless(characters, "messages", max_model_len)
    try:
        ids = tokenizer.chat(messages, **request.template_options())
    except ValueError as error:
        raise invalid(f"messages: {error}", "messages") from None
    wanted = request.max_tokens or request.max_completion_tokens or max_model_len
    return [_planned(request, ids, wanted, "messages", max_model_len)]


def _planned(
    request: Generation, ids: Sequence[int], wanted: int, param: str, max_model_len: int
) -> Planned:
    """max_tokens is cut to what the context leaves: the answer then ends with "length"."""
    if not ids:
        raise invalid(f"{param}: holds no tokens; at least one is needed", param)
    room = max_model_len - len(ids)
    if room < 1:
        raise _too_long(f"{len(ids)} tokens", param, max_model_len)
    return Planned(tuple(ids), request.sampling(min(wanted, room)))


def _refuse_endless(characters: int, param: str, max_model_len: int) -> None:
    if characters > CHARACTERS_PER_TOKEN * max_model_len:
        raise _too_long(f"{characters} characters", param, max_model_len)


def _too_long(size: str, param: str, max_model_len: int) -> ApiError:
    return invalid(
        f"This model's context holds {max_model_len} tokens, prompt and answer together; "
        f"the {param} has {size}, so at most {max_model_len - 1} tokens of prompt fit.",
        param,
        "context_length_exceeded",
    )
