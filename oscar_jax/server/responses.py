"""What the server answers, in OpenAI's shapes.

The models are our own and small: the fields that are filled and no others, so that the server does
not need the ``openai`` client at run time. The tests read every answer with that client.
"""

from __future__ import annotations

import time
from typing import Literal

from pydantic import BaseModel, model_serializer

FinishReason = Literal["stop", "length"]  # a request that failed gets an error instead


class Usage(BaseModel):
    """Token counts of a whole request: each prompt counted once, the choices summed."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int) -> Usage:
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
        )


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: None = None
    finish_reason: FinishReason | None


class Completion(BaseModel):
    """Answer of ``/v1/completions``, and one event of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int  # seconds since 1970
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ChatMessage(BaseModel):
    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    index: int
    message: ChatMessage
    logprobs: None = None
    finish_reason: FinishReason | None


class ChatCompletion(BaseModel):
    """Answer of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class ChatDelta(BaseModel):
    """The role comes once, in a choice's first event; then the increments of its text."""

    role: Literal["assistant"] | None = None
    content: str | None = None

    @model_serializer
    def _without_what_is_not_new(self) -> dict[str, str]:
        return {name: value for name, value in self if value is not None}


class ChatDeltaChoice(BaseModel):
    index: int
    delta: ChatDelta
    logprobs: None = None
    finish_reason: FinishReason | None = None


class ChatCompletionChunk(BaseModel):
    """One event of the stream of ``/v1/chat/completions``."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatDeltaChoice]
    usage: Usage | None = None


class Model(BaseModel):
    """An entry of ``/v1/models``; ``max_model_len`` is in tokens, prompt and answer together."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: Literal["oscar-jax"] = "oscar-jax"
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


def now() -> int:
    """Seconds since 1970, as OpenAI's ``created``."""
    return int(time.time())
