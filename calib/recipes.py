"""Closed forms that turn second moments into transforms, and their names.

A recipe is BASE[+centre][+waterfill][+gain][+clip][+optr]. A base is a basis B per side; the
transform is B M with a mixing M that spreads what is left over the channels: a Hadamard H, or with
``+waterfill`` one Hadamard per segment of equal bits, H(D/8), H(5D/8), H(D/4).

    identity        B_K = I,       B_V = I, no mixing, no clip: naive INT2
    hadamard        B_K = I,       B_V = I                          (QuaRot, arXiv 2404.00456)
    oscar-shared    B_K = U,       B_V = U_V, covariances averaged over the layer's KV heads
    oscar           B_K = U,       B_V = U_V, per KV head           (OSCAR, arXiv 2605.17757)
    stretch         B_K = A^1/2 E, B_V = U_V, per KV head

U are the eigenvectors of the query covariance C and U_V those of the value target. With S the
second moment of the stored keys, A = S^-1/2 (S^1/2 C S^1/2)^1/2 S^-1/2 is what makes
A^1/2 S A^1/2 = A^-1/2 C A^-1/2 = E diag(z) E^T: in its channels a key's energy equals what an error
of it costs the logits. Of all invertible X it has the least tr(X^T S X) tr(X^-1 C X^-T), the row
scale squared times the damage per unit of it (``calib.fit.predictor``).

Every basis is ordered by *descending* eigenvalue. Uniform codes: H's first row is constant, so the
leading direction becomes an offset common to the whole row, which min/max stores in the 16-bit
``min`` instead of in the codes. Water-filled codes: the leading eighth gets 4 bits, the last
quarter 1 bit. OSCAR's bit-reversal P only matters for quantisation groups smaller than a row; a row
is one group here, and P changes nothing.

    +centre      subtract the key mean per KV head before the transform; without it S is the
                 uncentred second moment, because that is what the pages then store
    +waterfill   4, 2 and 1 bits over the ordered channels in the same bytes; needs +centre and an
                 ordered basis
    +gain        a stored row is lengthened by <x, x> / <x, x^>: rounding shrinks inner products,
                 which perplexity does not see and retrieval does
    +clip        the clip ratios of every layer searched on text of its own (``calib.per_layer``);
                 needs +gain, because a narrower clip alone has less error and loses retrieval
    +k3, +k4     keys of 3 or 4 bits, and
    +v4          values of 4 bits, where 2 are not enough; not clipped (``Codec.with_bits``). The
                 transforms are those of 2 bits
    +optr        an orthogonal factor per head on top of all that, learned from rows of the model
                 through the codec (``calib.optr``)

A further base is one entry of ``RECIPES``: a function of ``HeadStatistics`` per side, the codec
it prepares, and whether heads share it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from pallas_kernels.format import Codec, KeyCodec, hadamard

ValueTarget = Literal["proxy", "attention"]
WIDTHS: Mapping[str, Mapping[str, int]] = {"k3": {"key": 3}, "k4": {"key": 4}, "v4": {"value": 4}}
MODIFIERS = ("centre", "waterfill", "gain", "clip", *WIDTHS, "optr")


@dataclasses.dataclass(frozen=True)
class HeadStatistics:
    """What one KV head's transforms may depend on, float64.

    Args:
        key: S [D, D], damped: the second moment of the rows that X_K transforms.
        query: C [D, D], damped.
        value: [Dv, Dv], the value target ("proxy" or "attention").
    """

    key: np.ndarray
    query: np.ndarray
    value: np.ndarray


Basis = Callable[[HeadStatistics], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the transforms of one KV head come from its statistics.

    Args:
        name: of the base, as on the command line.
        keys, values: HeadStatistics to the bases B_K [D, D] and B_V [Dv, Dv], channels as columns.
        shared: average the statistics over the layer's KV heads first.
        fitted: the bases depend on the statistics (a dead head then gets a Hadamard).
        mixed: the basis is followed by a Hadamard.
        centred: subtract the key mean.
        codec: how the transformed rows become codes.
        clipped: the codec's clip ratios are searched per layer.
        learned: ``calib.optr`` refines the closed form; see ``closed_form``.
    """

    name: str
    keys: Basis
    values: Basis
    shared: bool = False
    fitted: bool = True
    mixed: bool = True
    centred: bool = False
    codec: Codec = Codec()
    clipped: bool = False
    learned: bool = False

    @property
    def full_name(self) -> str:
        key, value = self.codec.bits
        on: tuple[bool, ...] = (
            self.centred,
            self.codec.key == "waterfill",
            self.codec.gain,
            self.clipped,
        )
        on += (key == 3, key == 4, value == 4, self.learned)  # WIDTHS, optr
        return "+".join([self.name, *(m for m, used in zip(MODIFIERS, on, strict=True) if used)])

    @property
    def closed_form(self) -> Recipe:
        """What ``fit`` makes of moments alone: the recipe without +optr."""
        return dataclasses.replace(self, learned=False)

    @property
    def fallback(self) -> Recipe:
        """The plain recipe of the same codec: Hadamard, or OSCAR where channels have an order."""
        base = RECIPES["oscar" if self.codec.key == "waterfill" else "hadamard"]
        return dataclasses.replace(base, centred=self.centred, codec=self.codec)

    def key_transform(self, head: HeadStatistics) -> np.ndarray:
        """X_K [D, D] = B_K M, not yet normalised."""
        basis = self.keys(head)
        return basis @ mixing(len(basis), self.codec.key) if self.mixed else basis

    def value_transform(self, head: HeadStatistics) -> np.ndarray:
        """X_V [Dv, Dv] = B_V H, not yet normalised."""
        basis = self.values(head)
        return basis @ hadamard(len(basis)) if self.mixed else basis


def mixing(size: int, codec: KeyCodec) -> np.ndarray:
    """M f64[size, size]: a Hadamard over the row, or one per segment of equal bits.

    >>> (mixing(64, "waterfill") != 0).sum(0)[[0, 8, 63]].tolist()
    [8, 40, 16]
    """
    if codec == "uniform":
        return hadamard(size)
    out, first = np.zeros((size, size)), 0
    for width in (size // 8, 5 * size // 8, size // 4):
        own = slice(first, first + width)
        out[own, own] = hadamard(width)
        first += width
    return out


def descending_eigh(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eigenvalues f64[D], largest first, and eigenvectors f64[D, D] as columns.

    Symmetrised first; negative eigenvalues, which only rounding makes, become 0. Signs are fixed so
    that each column's entry of largest magnitude is positive (the first such entry, within 1e-9 of
    the largest: two machines must not disagree on a tie).

    >>> values, vectors = descending_eigh(np.diag([1.0, 3.0, 2.0]))
    >>> values.tolist(), vectors[:, 0].tolist()
    ([3.0, 2.0, 1.0], [0.0, 1.0, 0.0])
    """
    matrix = np.asarray(matrix, np.float64)
    values, vectors = np.linalg.eigh((matrix + matrix.T) / 2)
    order = np.argsort(-values, kind="stable")
    values, vectors = np.maximum(values[order], 0.0), vectors[:, order]
    size = np.abs(vectors)
    first = np.argmax(size >= size.max(0) - 1e-9, axis=0)
    return values, vectors * np.where(vectors[first, np.arange(len(first))] < 0, -1.0, 1.0)


def damped(matrix: np.ndarray, damping: float) -> np.ndarray:
    """M / (tr M / D) + damping I; M itself when its trace is 0."""
    size = matrix.shape[-1]
    trace = np.trace(matrix) / size
    return matrix if trace == 0 else matrix / trace + damping * np.eye(size)


def power(matrix: np.ndarray, exponent: float) -> np.ndarray:
    """M^exponent of a symmetric M with positive eigenvalues.

    >>> power(np.diag([4.0, 9.0]), -0.5).round(3).tolist()
    [[0.5, 0.0], [0.0, 0.333]]
    """
    values, vectors = descending_eigh(matrix)
    return (vectors * values**exponent) @ vectors.T


def _plain_keys(head: HeadStatistics) -> np.ndarray:
    return np.eye(len(head.key))


def _plain_values(head: HeadStatistics) -> np.ndarray:
    return np.eye(len(head.value))


def _oscar_keys(head: HeadStatistics) -> np.ndarray:
    return descending_eigh(head.query)[1]


def _oscar_values(head: HeadStatistics) -> np.ndarray:
    return descending_eigh(head.value)[1]


def _stretch_keys(head: HeadStatistics) -> np.ndarray:
    root, inverse = power(head.key, 0.5), power(head.key, -0.5)
    half = power(inverse @ power(root @ head.query @ root, 0.5) @ inverse, 0.5)  # A^1/2
    return half @ descending_eigh(half @ head.key @ half)[1]


RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "identity",
            _plain_keys,
            _plain_values,
            fitted=False,
            mixed=False,
            codec=Codec(clip_k=1.0, clip_v=1.0),
        ),
        Recipe("hadamard", _plain_keys, _plain_values, fitted=False),
        Recipe("oscar-shared", _oscar_keys, _oscar_values, shared=True),
        Recipe("oscar", _oscar_keys, _oscar_values),
        Recipe("stretch", _stretch_keys, _oscar_values),
    )
}


def with_widths(name: str, key_bits: int, value_bits: int) -> str:
    """The name of the recipe with codes of these widths.

    >>> with_widths("oscar+centre", 3, 2), with_widths("auto", 4, 4), with_widths("oscar", 2, 2)
    ('oscar+centre+k3', 'auto+k4+v4', 'oscar')

    Raises:
        ValueError: a width that no codec has.
    """
    Codec(key_bits=key_bits, value_bits=value_bits)  # refuses what does not exist
    wanted = {"key": key_bits, "value": value_bits}
    widths = [m for m, of in WIDTHS.items() if all(wanted[side] == b for side, b in of.items())]
    return "+".join([name, *widths])


def recipe(name: str) -> Recipe:
    """The recipe of a command-line name; modifiers in any order.

    >>> recipe("stretch+gain+centre").full_name
    'stretch+centre+gain'

    Raises:
        ValueError: no such recipe, +waterfill where nothing orders the channels, or +clip without
            +gain.
    """
    base, *modifiers = name.split("+")
    if base not in RECIPES or len(set(modifiers)) < len(modifiers) or set(modifiers) - {*MODIFIERS}:
        raise ValueError(
            f"recipe={name!r}: must be one of {', '.join(RECIPES)}, with any of "
            f"{', '.join('+' + modifier for modifier in MODIFIERS)}"
        )
    found = RECIPES[base]
    if "waterfill" in modifiers and not ("centre" in modifiers and found.fitted):
        raise ValueError(
            f"recipe={name!r}: +waterfill needs +centre and channels in order of worth; use oscar "
            "or stretch with +centre"
        )
    if {"k3", "k4"} <= set(modifiers):
        raise ValueError(f"recipe={name!r}: keys have one width; use +k3 or +k4")
    if "clip" in modifiers and "gain" not in modifiers:
        raise ValueError(
            f"recipe={name!r}: +clip needs +gain; alone it lowers the error and destroys recall"
        )
    codec = dataclasses.replace(
        found.codec,
        key="waterfill" if "waterfill" in modifiers else "uniform",
        gain="gain" in modifiers,
    )
    for modifier in set(modifiers) & {*WIDTHS}:
        codec = codec.with_bits(**WIDTHS[modifier])
    return dataclasses.replace(
        found,
        centred="centre" in modifiers,
        codec=codec,
        clipped="clip" in modifiers,
        learned="optr" in modifiers,
    )
