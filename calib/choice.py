"""Which recipe to serve a model with: measured in the running model, not predicted.

The closed forms rank transforms by the noise of the logits. They do not see what rounding does to
inner products as a whole, and neither does KL: codes of the same KL differ by a factor of four in
recall. So the likeliest candidates run on held-out text through the real pages, and are asked for
spans that lie inside them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from calib.positions import as_if_later
from oscar_jax.config import KVConfig
from oscar_jax.evaluation.recall import recall_fits
from oscar_jax.evaluation.rows import BF16
from oscar_jax.evaluation.statistics import paired_difference
from oscar_jax.evaluation.suite import Settings, Suite
from oscar_jax.models import Loaded
from oscar_jax.rotation import Rotation

AUTO = "auto"
MIXED = "per layer"
# Best first on every model measured so far; the last is the published basis, centred.
CANDIDATES = (
    "stretch+centre+waterfill+gain",
    "stretch+centre+gain+clip",
    "oscar+centre+gain+clip",
)
FINALISTS = 2  # single recipes that run in the model: those with the least output error
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


@dataclasses.dataclass(frozen=True)
class Later:
    """What a recipe costs the running model where the held-out text stands later.

    Args:
        offset: tokens that the text is moved by. length: of its sequences.
        kl: as in ``Check``.
    """

    offset: int
    length: int
    kl: tuple[float, ...]

    @property
    def mean_kl(self) -> float:
        return float(np.mean(self.kl))

    @property
    def end(self) -> int:
        """Tokens of a context that ends with this text."""
        return self.offset + self.length


class Checker:
    """A model on held-out sequences i32[T], through real pages.

    Args:
        loaded: the model, in the dtype it is served in.
        sequences: one or more of one length, long enough to see a page.
        windows: as served.
    """

    def __init__(self, loaded: Loaded, sequences: Sequence[np.ndarray], windows: KVConfig):
        settings = Settings(stride=STRIDE, recall=len(sequences))
        self._suite = Suite(loaded, windows, {"held out": np.stack(sequences)}, settings)
        self._length = len(sequences[0])
        self._can_recall = recall_fits(self._length, loaded.tokenizer, windows)

    def check(self, rotation: Rotation | None) -> Check:
        """KL to BF16 pages and recall; of the BF16 pages themselves for None."""
        recall = self._suite.run("recall", rotation)["recall_per_span"] if self._can_recall else ()
        return Check(self._kl(rotation), tuple(recall))

    def check_later(
        self, rotation: Rotation, end: int, frequencies: Sequence[np.ndarray]
    ) -> Later | None:
        """KL where the text is the last of a context of ``end`` tokens; None if it is all of it.

        Args:
            frequencies: per layer of ``rotation`` f32[D/2], radians per token.
        """
        offset = end - self._length
        if offset <= 0:
            return None
        return Later(offset, self._length, self._kl(as_if_later(rotation, offset, frequencies)))

    def _kl(self, rotation: Rotation | None) -> tuple[float, ...]:
        return tuple(self._suite.run("kl", rotation)["domains"]["held out"]["per_sequence"]["kl"])


def choose(checks: Mapping[str, Check]) -> tuple[str, str]:
    """(recipe, reason) out of single recipes and, if it was checked, their mix per layer.

    Of the single ones that with the least KL, unless another recalls more by two standard errors.
    The mix replaces it only if it is clearly better, by two standard errors of the difference, in
    KL or in recall, and not worse in the other.

    >>> low, high = Check((0.02,), (0.1, 0.2, 0.1)), Check((0.03,), (0.5, 0.7, 0.6))
    >>> choose({"a": low, "b": high})[0]
    'b'
    """
    singles = [name for name in checks if name not in (BF16, MIXED)]
    best = min(singles, key=lambda name: checks[name].mean_kl)
    reason = f"least KL of {len(singles)} ({checks[best].mean_kl:.4f})"
    for name in singles if checks[best].recall else ():
        if _clearly_more(checks[name].recall, checks[best].recall):
            reason = (
                f"recalls {checks[name].mean_recall:.0%} of the spans where {best} with less KL "
                f"recalls {checks[best].mean_recall:.0%}"
            )
            best = name
    if MIXED not in checks:
        return best, reason
    mixed, single = checks[MIXED], checks[best]
    less_kl, more_recall = single.mean_kl - mixed.mean_kl, 0.0
    if mixed.mean_recall is not None and single.mean_recall is not None:
        more_recall = mixed.mean_recall - single.mean_recall
    clear = _clearly_more(single.kl, mixed.kl) or _clearly_more(mixed.recall, single.recall)
    numbers = f"KL {mixed.mean_kl:.4f} against {single.mean_kl:.4f} of {best} in every layer"
    if mixed.mean_recall is not None and single.mean_recall is not None:
        numbers += f", recall {mixed.mean_recall:.0%} against {single.mean_recall:.0%}"
    if clear and less_kl >= 0 and more_recall >= 0:
        return MIXED, f"chosen per layer by the output error, and better in the model: {numbers}"
    return best, f"{reason}; choosing per layer is not clearly better: {numbers}"


def _clearly_more(values: Sequence[float], others: Sequence[float]) -> bool:
    """By two standard errors of the paired difference."""
    if not values:
        return False
    gap, error = paired_difference(values, others)
    return gap > max(0.0, 2 * error)
