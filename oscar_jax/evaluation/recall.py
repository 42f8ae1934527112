"""Whether a model still finds what lies in the pages: retrieval, which perplexity does not see."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence

import numpy as np

from oscar_jax.config import KVConfig
from oscar_jax.models import Tokenizer
from pallas_kernels.format import PAGE

SPANS, SPAN = 4, 64  # random spans of a recall sequence, and their length in tokens
FIRST_SPAN, SPAN_STEP = 150, 300  # where the spans lie: inside the pages when they are asked for


@dataclasses.dataclass(frozen=True)
class RecallSequence:
    """Prose with random spans early on, which its end repeats in another order.

    Args:
        tokens: i32[T]. positions: i32[SPANS, SPAN - 1], from which each span's next token can only
            be known by finding the span; its first token is given.
    """

    tokens: np.ndarray
    positions: np.ndarray


def word_tokens(tokenizer: Tokenizer) -> np.ndarray:
    """Ids that are one lower-case word of at least three letters with its leading space.

    Raises:
        ValueError: the vocabulary has too few of them for a probe.
    """
    words = [
        token
        for token in range(tokenizer.vocab_size)
        if re.fullmatch(r" [a-z]{3,}", tokenizer.decode([token]))
    ]
    if len(words) < SPANS * SPAN:
        raise ValueError(f"the tokenizer has {len(words)} whole words: a recall probe needs more")
    return np.array(words, np.int32)


def recall_fits(length: int, windows: KVConfig) -> bool:
    """Whether the spans lie wholly inside pages when a sequence of ``length`` asks for them."""
    asked = length - SPANS * SPAN
    visible = windows.sink + PAGE * ((asked + 1 - windows.sink - windows.recent) // PAGE)
    return windows.sink <= FIRST_SPAN and visible >= FIRST_SPAN + SPAN_STEP * (SPANS - 1) + SPAN


def recall_sequences(
    texts: Sequence[np.ndarray], words: np.ndarray, windows: KVConfig, seed: int
) -> list[RecallSequence]:
    """One probe per text i32[T]: spans written over it early, and again over its last tokens.

    Raises:
        ValueError: T is too short for the spans to be wholly inside pages when they are asked for.
    """
    rng = np.random.default_rng(seed)
    probes = []
    for text in texts:
        tokens, asked = text.copy(), len(text) - SPANS * SPAN
        starts = FIRST_SPAN + SPAN_STEP * np.arange(SPANS)
        if not recall_fits(len(text), windows):
            raise ValueError(
                f"sequences of {len(text)} tokens are too short for recall: its spans, up to "
                f"position {starts[-1] + SPAN}, must lie in pages"
            )
        spans = rng.choice(words, (SPANS, SPAN))
        for start, span in zip(starts, spans, strict=True):
            tokens[start : start + SPAN] = span
        order = rng.permutation(SPANS)
        tokens[asked:] = spans[order].reshape(-1)
        positions = asked + SPAN * np.arange(SPANS)[:, None] + np.arange(SPAN - 1)
        probes.append(RecallSequence(tokens, positions))
    return probes
