"""What a client asks of the engine and what it gets back; plain data, no device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens, and when to stop.

    temperature 0 is greedy. top_k 0 and top_p 1 and min_p 0 filter nothing. ``seed`` fixes the
    noise: token at position p draws from fold_in(key(seed), p), whatever the batch or slot.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0


@dataclasses.dataclass(frozen=True)
class Output:
    """One event of a request's stream; ``text`` and ``token_ids`` are what is new."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    error: str | None = None  # only with finish_reason "error"


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt with its settings; ``emit`` is called from the engine's thread, in order."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    emit: Callable[[Output], None]
