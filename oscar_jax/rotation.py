"""The transforms that stand between a model's keys and values and the INT2 pages.

Row convention, per layer and KV head: a page stores codes of (k - mu) X_K and v X_V; attention
reads it with the query q X_Q, adds q.mu back to the logits, and multiplies the pages' output by
X_O, where

    X_Q = X_K^-T,   X_O = X_V^-1.

An orthogonal rotation (OSCAR, arXiv 2605.17757, section 3) is the special case X_Q = X_K.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.format import Codec, hadamard
from pallas_kernels.layout import Transform

CONDITION_LIMIT = 1e3


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Rotation:
    """Per-layer transforms of a model's cache, float32; ``codecs`` is static.

    Args:
        x_k, x_q: per layer f32[K, D, D], the key and the query side.
        x_v, x_o: per layer f32[K, Dv, Dv], the value and the output side.
        mu: per layer f32[K, D], the key mean that is subtracted before X_K.
        codecs: per layer, how the transformed rows become codes; None: that layer's pages are BF16
            and its transforms are not used.
    """

    x_k: tuple[Float[Array, "K D D"], ...]
    x_q: tuple[Float[Array, "K D D"], ...]
    x_v: tuple[Float[Array, "K Dv Dv"], ...]
    x_o: tuple[Float[Array, "K Dv Dv"], ...]
    mu: tuple[Float[Array, "K D"], ...]
    codecs: tuple[Codec | None, ...] = dataclasses.field(metadata=dict(static=True))

    @property
    def layers(self) -> int:
        return len(self.x_k)

    @classmethod
    def from_transforms(
        cls,
        x_k: Sequence[np.ndarray],
        x_v: Sequence[np.ndarray],
        mu: Sequence[np.ndarray] | None = None,
        codec: Codec | Sequence[Codec | None] = Codec(),
    ) -> Rotation:
        """Build from the stored sides alone; X_Q and X_O are inverted here, in float64.

        Args:
            x_k: per layer [K, D, D]; x_v: per layer [K, Dv, Dv]; mu: per layer [K, D] or None.
            codec: one for all layers, or one per layer (None: BF16 pages).

        Raises:
            ValueError: an entry is not finite, shapes disagree, or a condition number is over 1e3.

        >>> rotation = Rotation.hadamard(layers=1, kv_heads=2, head_dim=64)
        >>> bool(np.allclose(rotation.x_k[0], rotation.x_q[0], atol=1e-6))
        True
        """
        keys = _once(_checked, x_k, [f"x_k of layer {i}" for i in range(len(x_k))])
        values = _once(_checked, x_v, [f"x_v of layer {i}" for i in range(len(x_v))])
        if len(keys) != len(values):
            raise ValueError(f"x_k has {len(keys)} layers and x_v {len(values)}: must be equal")
        means = [np.zeros(x.shape[:2]) for x in keys] if mu is None else [np.asarray(m) for m in mu]
        for i, (x, y, m) in enumerate(zip(keys, values, means, strict=True)):
            if x.shape[0] != y.shape[0] or m.shape != x.shape[:2]:
                raise ValueError(
                    f"layer {i}: x_k {x.shape}, x_v {y.shape}, mu {m.shape}: must be "
                    "[K, D, D], [K, Dv, Dv] and [K, D]"
                )
            if not np.isfinite(m).all():
                raise ValueError(f"mu of layer {i} holds values that are not finite")
        codecs = (codec,) * len(keys) if isinstance(codec, Codec) else tuple(codec)
        if len(codecs) != len(keys):
            raise ValueError(f"codec names {len(codecs)} layers, x_k {len(keys)}: must be equal")
        if mu is None and any(one is not None and one.key == "waterfill" for one in codecs):
            raise ValueError("Codec.key='waterfill' needs centred keys: pass mu")
        as32 = lambda arrays: tuple(jax.device_put(np.array(a, np.float32)) for a in arrays)  # noqa: E731
        return cls(
            x_k=as32(keys),
            x_q=as32(x.swapaxes(-1, -2) for x in _once(np.linalg.inv, keys)),
            x_v=as32(values),
            x_o=as32(_once(np.linalg.inv, values)),
            mu=as32(means),
            codecs=codecs,
        )

    @classmethod
    def identity(
        cls,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        codec: Codec | Sequence[Codec | None] = Codec(clip_k=1.0, clip_v=1.0),
    ) -> Rotation:
        """No transform and no clip: naive INT2, the baseline for all others."""
        size = v_head_dim or head_dim
        keys = np.broadcast_to(np.eye(head_dim), (kv_heads, head_dim, head_dim))
        values = np.broadcast_to(np.eye(size), (kv_heads, size, size))
        return cls.from_transforms([keys] * layers, [values] * layers, codec=codec)

    @classmethod
    def hadamard(
        cls,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        codec: Codec | Sequence[Codec | None] = Codec(),
    ) -> Rotation:
        """The data-free normalised Hadamard matrix on both sides (QuaRot, arXiv 2404.00456)."""
        x_k = np.broadcast_to(hadamard(head_dim), (kv_heads, head_dim, head_dim))
        size = v_head_dim or head_dim
        x_v = np.broadcast_to(hadamard(size), (kv_heads, size, size))
        return cls.from_transforms([x_k] * layers, [x_v] * layers, codec=codec)

    def layer(self, index: int) -> Transform:
        """One layer's transforms, as the kernels take them."""
        return Transform(
            self.x_k[index], self.x_q[index], self.x_v[index], self.x_o[index], self.mu[index]
        )

    def check_matches(self, *, layers: int, kv_heads: int, head_dim: int, v_head_dim: int) -> None:
        """Raise ValueError unless the transforms fit a cache of this shape, naming both."""
        want = (layers, kv_heads, head_dim, v_head_dim)
        have = (self.layers, *self.x_k[0].shape[:2], self.x_v[0].shape[-1])
        if want != have:
            raise ValueError(
                f"rotation has (layers, kv_heads, head_dim, v_head_dim) = {have}, the model {want}"
            )

    def check_inverses(self, tolerance: float = 1e-3) -> None:
        """Raise ValueError unless X_K X_Q^T = I and X_V X_O = I on every layer and head."""
        for layer in range(self.layers):
            x_k, x_q, x_v, x_o = (
                np.asarray(side[layer], np.float64)
                for side in (self.x_k, self.x_q, self.x_v, self.x_o)
            )
            for name, product in (
                ("x_k and x_q", x_k @ x_q.swapaxes(-1, -2)),
                ("x_v and x_o", x_v @ x_o),
            ):
                error = np.abs(product - np.eye(product.shape[-1])).max()
                if not error <= tolerance:
                    raise ValueError(
                        f"layer {layer}: {name} are not inverse to each other (max error "
                        f"{error:.2e}, at most {tolerance:.0e}): attention would read noise"
                    )

    def condition(self) -> float:
        """The largest condition number of any transform."""
        return float(max(np.linalg.cond(np.asarray(x)).max() for x in (*self.x_k, *self.x_v)))


def _once(
    function: Callable[..., np.ndarray], arrays: Sequence[np.ndarray], *more: Sequence[Any]
) -> list[np.ndarray]:
    """The function of each array, computed once for one that several layers share."""
    done: dict[int, np.ndarray] = {}
    for x, *rest in zip(arrays, *more, strict=True):
        if id(x) not in done:
            done[id(x)] = function(x, *rest)
    return [done[id(x)] for x in arrays]


def _checked(x: np.ndarray, name: str) -> np.ndarray:
    x = np.asarray(x, np.float64)
    if x.ndim != 3 or x.shape[-1] != x.shape[-2]:
        raise ValueError(f"{name} has shape {x.shape}: must be [K, D, D]")
    if not np.isfinite(x).all():
        raise ValueError(f"{name} holds values that are not finite")
    condition = np.linalg.cond(x).max()
    if not condition <= CONDITION_LIMIT:
        raise ValueError(
            f"{name} has condition number {condition:.3g}: at most {CONDITION_LIMIT:.0g} "
            "(its inverse would amplify quantisation noise)"
        )
    return x
