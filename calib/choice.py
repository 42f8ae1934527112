"""Which recipe to serve a model with: measured in the running model, not predicted.

The closed forms rank transforms by the noise of the logits. They do not see what rounding does to
inner products as a whole, and neither does KL: codes of the same KL differ by a factor of four in
recall. So the candidates run on held-out text through the real pages, and are asked for spans that
lie inside them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from oscar_jax.config import KVConfig
from oscar_jax.evaluation.recall import recall_fits
from oscar_jax.evaluation.rows import BF16
from oscar_jax.evaluation.statistics import standard_error
from oscar_jax.evaluation.suite import Settings, Suite
from oscar_jax.models import Loaded
from oscar_jax.rotation import Rotation

AUTO = "auto"
# Best first on every model measured so far; the last is the published recipe, centred.
CANDIDATES = ("stretch+centre+waterfill+gain", "stretch+centre+gain", "oscar+centre")
STRIDE = 4  # every fourth position is scored


def candidates(recipe: str) -> tuple[str, ...]:
    """The recipes that a name stands for: with "auto", every candidate, of the widths asked for.

    >>> candidates("auto+k3")[0], candidates("oscar")
    ('stretch+centre+waterfill+gain+k3', ('oscar',))
    """
    base, *widths = recipe.split("+")
    return tuple("+".join([name, *widths]) for name in (CANDIDATES if base == AUTO else (base,)))


@dataclasses.dataclass(frozen=True)
class Check:
    """What a recipe costs the running model on held-out text.

    Args:
        kl: KL to the BF16 cache in nats, mean over positions, per sequence.
        recall: share of tokens of a repeated span that are predicted, per span; empty where the
            sequences are too short to ask.
    """

    kl: tuple[float, ...]
    recall: tuple[float, ...]

    @property
    def mean_kl(self) -> float:
        return float(np.mean(self.kl))

    @property
    def mean_recall(self) -> float | None:
        return float(np.mean(self.recall)) if self.recall else None


def check(
    loaded: Loaded,
    rotations: Mapping[str, Rotation],
    held_out: Sequence[np.ndarray],
    windows: KVConfig,
) -> dict[str, Check]:
    """Every rotation on the same sequences i32[T] and spans, BF16 pages first."""
    settings = Settings(stride=STRIDE, recall=len(held_out))
    suite = Suite(loaded, windows, {"held out": np.stack(held_out)}, settings)
    can_recall = recall_fits(len(held_out[0]), loaded.tokenizer, windows)
    checks = {}
    for name, rotation in {BF16: None, **rotations}.items():
        kl = suite.run("kl", rotation)["domains"]["held out"]["per_sequence"]["kl"]
        spans = suite.run("recall", rotation)["recall_per_span"] if can_recall else ()
        checks[name] = Check(tuple(kl), tuple(spans))
    return checks


def choose(checks: Mapping[str, Check]) -> tuple[str, str]:
    """(recipe, reason): the least KL, unless another recalls more by two standard errors.

    >>> low, high = Check((0.02,), (0.1, 0.2, 0.1)), Check((0.03,), (0.5, 0.7, 0.6))
    >>> choose({"a": low, "b": high})[0]
    'b'
    """
    names = [name for name in checks if name != BF16]
    best = min(names, key=lambda name: checks[name].mean_kl)
    reason = f"least KL of {len(names)} ({checks[best].mean_kl:.4f})"
    for name in names if checks[best].recall else ():
        gain = np.subtract(checks[name].recall, checks[best].recall)  # paired by span
        if gain.mean() > max(0.0, 2 * standard_error(gain.tolist())):
            reason = (
                f"recalls {checks[name].mean_recall:.0%} of the spans where {best} with less KL "
                f"recalls {checks[best].mean_recall:.0%}"
            )
            best = name
    return best, reason
