"""Long generations: does a small error per token grow, and when does the text part ways?

The model with BF16 pages goes on from the first ``PROMPT`` tokens of a text for N tokens, drawn
with fixed noise (``Sampling``) or greedily. A quantised cache is then fed the same tokens, and
says at each of them

    KL       of its next-token distribution to the BF16 one
    choice   which token it would write next, with the same noise

Up to its first other choice a free-running generation from the quantised cache *is* this text, so
that position is where the two part ways: nothing has to be generated twice. In bfloat16 prefill
and decode round differently, and a near-tie of BF16 itself may fall the other way; so choices in
prefill are compared with BF16's own in prefill, and with the text only at one query per step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Array

from oscar_jax.evaluation.scorer import Sampling, Scorer, Scores
from oscar_jax.evaluation.statistics import standard_error
from oscar_jax.rotation import Rotation

PROMPT = 512  # tokens of text before the generated ones; pages are seen from 448 on
BORDERS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)  # of the bands, in generated tokens


def generate(
    scorer: Scorer, texts: Mapping[str, np.ndarray], sampling: Sampling, count: int
) -> np.ndarray:
    """i32[domains, PROMPT + count]: what BF16 pages write after each domain's first text."""
    prompts = [sequences[0][:PROMPT] for sequences in texts.values()]
    written = scorer.generate(prompts, None, steps=count, sampling=sampling)
    return np.stack([np.concatenate(pair) for pair in zip(prompts, written, strict=True)])


def generated(length: int) -> np.ndarray:
    """The positions from which each generated token of a sequence is predicted."""
    return np.arange(PROMPT - 1, length - 1)


def score(
    scorer: Scorer,
    rotation: Rotation | None,
    sequences: np.ndarray,
    exact: Sequence[Array],
    chosen: Sequence[np.ndarray],
    sampling: Sampling,
    *,
    per_step: bool = False,
    moved: Callable[[], object] = lambda: None,
) -> tuple[list[Scores], list[np.ndarray]]:
    """Per row of ``sequences`` the scores of its generated tokens, and where its choice differs.

    Args:
        exact: hidden states of the same rows with BF16 pages. chosen: what those choose at each
            of the ``generated`` positions.
        per_step: one query per step for the generated tokens, not prefill: what serving does.

    Returns:
        (Scores at the positions before each generated token, bool[count] of other choices)
    """
    positions = generated(sequences.shape[1])
    stepped = None
    if per_step and rotation is not None:
        stepped = scorer.stepped(sequences, rotation, PROMPT - 1)
    scores, differs = [], []
    for row, tokens in enumerate(sequences):
        if rotation is None:
            h, reference, shift, wanted = exact[row], exact[row], 0, chosen[row]
        elif stepped is not None:
            h, reference, shift = stepped[row], exact[row][PROMPT - 1 :], PROMPT - 1
            wanted = tokens[positions + 1]  # BF16 wrote them at one query per step, too
        else:
            h, reference, shift = scorer.hidden(tokens, rotation), exact[row], 0
            wanted = chosen[row]
        scores.append(scorer.compare(reference, h, tokens[shift:], positions - shift))
        own = scorer.predict(h, positions - shift, sampling, row, first=shift)
        differs.append(own != wanted)
        moved()
    return scores, differs


def summary(scores: Sequence[Scores], differs: Sequence[np.ndarray]) -> dict[str, Any]:
    """JSON values: KL and agreement per band of generated tokens, and where each row parts ways.

    ``parted`` is the number of generated tokens before the first other choice; where there is none
    it is null. ``choices`` is the share of positions at which the choice is the same.
    """
    count = len(differs[0])
    inner = [border for border in BORDERS if border < count]
    per_row = [float(one.kl.mean()) for one in scores]
    bands = {}
    for low, high in zip([0, *inner], [*inner, count], strict=True):
        kl = [float(one.kl[low:high].mean()) for one in scores]
        same = [float(1 - one[low:high].mean()) for one in differs]
        bands[f"{low}-{high}"] = {
            "kl": float(np.mean(kl)),
            "kl_se": standard_error(kl),
            "choices": float(np.mean(same)),
        }
    return {
        "tokens": count,
        "kl": float(np.mean(per_row)),
        "kl_se": standard_error(per_row),
        "per_sequence": per_row,
        "choices": float(1 - np.mean(differs)),
        "parted": [int(one.argmax()) if one.any() else None for one in differs],
        "bands": bands,
    }
