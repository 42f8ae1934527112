"""Perplexity, KL to the BF16 cache and agreement of the first token, by domain and position."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array

from oscar_jax.config import KVConfig
from oscar_jax.evaluation.scorer import Scorer, Scores
from oscar_jax.evaluation.statistics import standard_error
from oscar_jax.rotation import Rotation
from pallas_kernels.format import PAGE

BORDERS = (768, 1280, *(2**power for power in range(11, 21)))


def first_position(windows: KVConfig) -> int:
    """The first position that sees a page: S + R + T - 1.

    >>> first_position(KVConfig())
    447
    """
    return windows.sink + windows.recent + PAGE - 1


def scored_positions(length: int, windows: KVConfig, stride: int) -> np.ndarray:
    """Every so many positions of a sequence from the one behind the first that sees a page.

    Raises:
        ValueError: the sequence is too short for a page to be seen.
    """
    first = first_position(windows)
    positions = np.arange(first + 1, length - 1, stride)
    if len(positions) == 0:
        raise ValueError(
            f"length={length}: must be more than {first + 2} tokens for a page to be seen"
        )
    return positions


def bands(length: int, windows: KVConfig) -> list[tuple[int, int]]:
    """Half-open ranges of positions that results are also given for.

    >>> bands(2048, KVConfig())
    [(448, 768), (768, 1280), (1280, 2048)]
    """
    first = first_position(windows) + 1
    inner = [border for border in BORDERS if first < border < length]
    return list(zip([first, *inner], [*inner, length], strict=True))


def score(
    scorer: Scorer,
    rotation: Rotation | None,
    texts: Mapping[str, np.ndarray],
    exact: Mapping[str, Sequence[Array]],
    positions: np.ndarray,
    moved: Callable[[], object] = lambda: None,
) -> dict[str, list[Scores]]:
    """Scores of every sequence i32[n, T] of every domain.

    Args:
        exact: hidden states of the same sequences with BF16 pages; they are what ``rotation`` None
            is scored by. moved: called after each sequence.
    """
    domains: dict[str, list[Scores]] = {}
    for domain, sequences in texts.items():
        domains[domain] = []
        for reference, tokens in zip(exact[domain], sequences, strict=True):
            h = reference if rotation is None else scorer.hidden(tokens, rotation)
            domains[domain].append(scorer.compare(reference, h, tokens, positions))
            moved()
    return domains


def summary(
    domains: Mapping[str, Sequence[Scores]], positions: np.ndarray, windows: KVConfig, length: int
) -> dict[str, Any]:
    """JSON values per domain: means over sequences with errors, per sequence, and per band."""
    out = {}
    for domain, sequences in domains.items():
        parts = {
            f"{low}-{high}": (positions >= low) & (positions < high)
            for low, high in bands(length, windows)
        }
        out[domain] = _means([scores.mean() for scores in sequences]) | {
            "bands": {
                name: _means([scores.part(chosen).mean() for scores in sequences])
                for name, chosen in parts.items()
                if chosen.any()
            }
        }
    return out


def _means(sequences: Sequence[tuple[float, float, float]]) -> dict[str, Any]:
    nll, kl, top1 = (list(column) for column in zip(*sequences, strict=True))
    return {
        "perplexity": float(np.exp(np.mean(nll))),
        "nll_se": standard_error(nll),
        "kl": float(np.mean(kl)),
        "kl_se": standard_error(kl),
        "top1": float(np.mean(top1)),
        "top1_se": standard_error(top1),
        "per_sequence": {"nll": nll, "kl": kl, "top1": top1},
    }
