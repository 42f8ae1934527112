"""Closed forms that turn second moments into transforms, and their names.

A recipe is NAME or NAME+centre. ``+centre`` subtracts the key mean per KV head before the transform
(a measured factor of 2 to 3 in KL on every rotation); without it S below is the uncentred second
moment of the keys, because that is what the pages then store.

    identity        X_K = I,   X_V = I, no clip: naive INT2
    hadamard        X_K = H,   X_V = H                       (QuaRot, arXiv 2404.00456)
    oscar-shared    X_K = U H, X_V = U_V H, covariances averaged over the layer's KV heads
    oscar           X_K = U H, X_V = U_V H, per KV head       (OSCAR, arXiv 2605.17757)

U are the eigenvectors of the query covariance C and U_V those of the value target, by *descending*
eigenvalue: H's first row is constant, so the leading direction becomes an offset common to the
whole row, which min/max stores in the 16-bit ``min`` instead of in the codes. OSCAR's bit-reversal
P only matters for quantisation groups smaller than a row; a row is one group here, and P changes
nothing.

A further recipe is one entry of ``RECIPES``: a function of ``HeadStatistics`` per side, the codec
whose channel order it prepares, and whether heads share it. A recipe that is learned from rows
starts from such a base and refines it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

from pallas_kernels.format import Codec, hadamard

ValueTarget = Literal["proxy", "attention"]
CENTRE = "+centre"


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


Transform = Callable[[HeadStatistics], np.ndarray]


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How the transforms of one KV head come from its statistics.

    Args:
        name: as on the command line, without "+centre".
        keys, values: HeadStatistics to X_K [D, D] and X_V [Dv, Dv], before normalisation.
        shared: average the statistics over the layer's KV heads first.
        fitted: the transforms depend on the statistics (a dead head then gets a Hadamard).
        centred: subtract the key mean.
        codec: how the transformed rows become codes.
    """

    name: str
    keys: Transform
    values: Transform
    shared: bool = False
    fitted: bool = True
    centred: bool = False
    codec: Codec = Codec()

    @property
    def full_name(self) -> str:
        return self.name + CENTRE * self.centred


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


def _identity_keys(head: HeadStatistics) -> np.ndarray:
    return np.eye(len(head.key))


def _identity_values(head: HeadStatistics) -> np.ndarray:
    return np.eye(len(head.value))


def _hadamard_keys(head: HeadStatistics) -> np.ndarray:
    return hadamard(len(head.key))


def _hadamard_values(head: HeadStatistics) -> np.ndarray:
    return hadamard(len(head.value))


def _oscar_keys(head: HeadStatistics) -> np.ndarray:
    return descending_eigh(head.query)[1] @ hadamard(len(head.query))


def _oscar_values(head: HeadStatistics) -> np.ndarray:
    return descending_eigh(head.value)[1] @ hadamard(len(head.value))


HADAMARD = Recipe("hadamard", _hadamard_keys, _hadamard_values, fitted=False)
RECIPES: Mapping[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "identity",
            _identity_keys,
            _identity_values,
            fitted=False,
            codec=Codec(clip_k=1.0, clip_v=1.0),
        ),
        HADAMARD,
        Recipe("oscar-shared", _oscar_keys, _oscar_values, shared=True),
        Recipe("oscar", _oscar_keys, _oscar_values),
    )
}


def recipe(name: str) -> Recipe:
    """The recipe of a command-line name.

    >>> recipe("oscar+centre").centred
    True

    Raises:
        ValueError: no such recipe.
    """
    base, centre, rest = name.partition(CENTRE)
    if base not in RECIPES or rest:
        known = ", ".join(RECIPES)
        raise ValueError(f"recipe={name!r}: must be one of {known}, each with or without {CENTRE}")
    return dataclasses.replace(RECIPES[base], centred=bool(centre))
