"""Whether a rotation is good enough to serve, in plain words, by what was measured.

The limits are this project's own measurements on SmolLM2-135M
(``benchmarks/results/cpu-evaluate-smollm2-135m.json``), put beside what is published of the same
recipes on large models:

    recipe, 2-bit keys             KL             recall / that of BF16
    stretch, water-filled, gain    0.008 - 0.011  62 %
    OSCAR, centred                 0.036 - 0.051  23 %
    OSCAR                          0.080 - 0.108  19 %   1 to 6 points of reasoning benchmarks lost,
                                                         retrieval at 64K from 86 to 23
    Hadamard (QuaRot)              0.094 - 0.126  14 %   no benchmark survives on a 4B

DAMAGED lies between the centred and the published OSCAR in KL, and above both in recall. SAFE in KL
is the upper end of the best recipe. SAFE in recall is what one more bit of the keys reaches on
SmolLM2 (three quarters of BF16's): a 2-bit fit below it has something to gain from 3-bit keys.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from calib.choice import Check

Level = Literal["safe", "use 3-bit keys", "do not"]
SAFE_KL, SAFE_RECALL = 0.015, 0.75  # nats; share of what BF16 recalls
DAMAGED_KL, DAMAGED_RECALL = 0.06, 0.25


@dataclasses.dataclass(frozen=True)
class Verdict:
    """A level and the sentence that says why."""

    level: Level
    reason: str


def judge(rotation: Check, exact: Check) -> Verdict:
    """By KL and, where it was asked for, recall beside that of BF16 pages.

    >>> judge(Check((0.01,), (0.3,)), Check((0.0,), (0.5,))).level
    'use 3-bit keys'
    """
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
