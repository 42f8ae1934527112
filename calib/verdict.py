"""Whether a rotation is good enough to serve, in plain words, by what was measured.

The limits are this project's own measurements on SmolLM2-135M
(``benchmarks/results/cpu-evaluate-smollm2-135m.json``), put beside what is published of the same
recipes on large models:

    recipe, 2-bit keys             KL             recall / that of BF16
    stretch, water-filled, gain    0.007 - 0.010  68 %   (the one that ships)
    OSCAR, centred                 0.036 - 0.051  22 %
    OSCAR                          0.080 - 0.108  17 %   1 to 6 points of reasoning benchmarks lost,
                                                         retrieval at 64K from 86 to 23
    Hadamard (QuaRot)              0.094 - 0.126  16 %   no benchmark survives on a 4B

DAMAGED lies between the centred and the published OSCAR in KL, and above both in recall. SAFE in KL
is a little over the best recipe. SAFE in recall is more than 2-bit keys reach on SmolLM2: a fit
below it has something to gain from 3-bit keys.

Both limits of KL hold at the end of the context too, where the same text is stored in other
directions (``calib.positions``): SmolLM2's fit to all 8,192 positions has 0.013 there, one to 0 to
2,047 alone 0.21 to 0.25, and both have less than 0.01 at the start.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from calib.choice import Check, Later
from calib.study import in_words

Level = Literal["safe", "use 3-bit keys", "do not"]
SAFE_KL, SAFE_RECALL = 0.015, 0.75  # nats; share of what BF16 recalls
DAMAGED_KL, DAMAGED_RECALL = 0.06, 0.25
_LEVELS: tuple[Level, ...] = get_args(Level)  # from good to bad


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A level and the sentence that says why."""

    level: Level
    reason: str


def judge(
    rotation: Check, exact: Check, later: Later | None = None, positions: int | None = None
) -> Verdict:
    """By KL and, where it was asked for, recall beside that of BF16 pages; the worse end decides.

    Args:
        later: the same rotation at the end of the context, if ``rotation`` is not all of it.
        positions: the longest sequence that was fitted to; None: the text as it stands.

    >>> judge(Check((0.01,), (0.3,)), Check((0.0,), (0.5,))).level
    'use 3-bit keys'
    """
    start = _at_start(rotation, exact)
    if later is None:
        return start
    kl = later.mean_kl
    found = f"KL {kl:.4f} where the same text stands {later.offset:,} tokens later"
    if kl <= SAFE_KL:
        return Verdict(start.level, f"{start.reason}. {found}")
    own: Level = "do not" if kl > DAMAGED_KL else "use 3-bit keys"
    level = max(start.level, own, key=_LEVELS.index)
    remedy = _for_later(later, positions)
    if level != start.level:
        return Verdict(level, f"{found} (safe is {SAFE_KL}): {remedy}. At the start {start.reason}")
    return Verdict(level, f"{start.reason}. {found}: {remedy}")


def _for_later(later: Later, positions: int | None) -> str:
    """What to do about a KL that is too large at the end of the context."""
    if (positions or later.length) >= later.end:
        return (
            "the fit has these positions already, so use 3-bit keys (--key-bits 3), or fit to fewer"
            " (--positions) and serve no longer context than that"
        )
    fitted = "as they stand in the text" if positions is None else in_words(positions)
    return (
        f"the fit is to positions {fitted}, the context {later.end:,} tokens: calibrate with "
        f"--positions {later.end}, or serve at most {positions or later.length:,} tokens"
    )


def _at_start(rotation: Check, exact: Check) -> Verdict:
    """The verdict on text from position 0 on."""
    kl, recall = rotation.mean_kl, _share(rotation, exact)
    found = f"KL {kl:.4f}"
    if recall is not None:
        found += f" and {recall:.0%} of the spans that BF16 recalls"
    if kl > DAMAGED_KL or (recall is not None and recall < DAMAGED_RECALL):
        return Verdict(
            "do not",
            f"{found}: as far from BF16 as recipes that are known to lose benchmarks (KL over "
            f"{DAMAGED_KL}, or under {DAMAGED_RECALL:.0%} of BF16's recall)",
        )
    if kl <= SAFE_KL and (recall is None or recall >= SAFE_RECALL):
        limits = f"within {SAFE_KL} nats"
        if recall is None:
            limits += "; the text was too short to ask for recall"
        else:
            limits += f" and at least {SAFE_RECALL:.0%} of BF16's recall"
        return Verdict("safe", f"{found}: {limits}")
    return Verdict(
        "use 3-bit keys",
        f"{found}: text stays fluent, but "
        + (
            f"verbatim retrieval from the pages suffers (safe is {SAFE_RECALL:.0%} of BF16's)"
            if kl <= SAFE_KL
            else f"the next token changes visibly (safe is a KL of {SAFE_KL})"
        )
        + "; serve 2 bits only where that does not matter",
    )


def _share(rotation: Check, exact: Check) -> float | None:
    if rotation.mean_recall is None or not exact.mean_recall:
        return None
    return rotation.mean_recall / exact.mean_recall
