"""Running sums on the device that keep what float32 would lose."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

HIGHEST = lax.Precision.HIGHEST  # TF32 or bf16 products would drown small eigenvalues


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Total:
    """A running sum as the unevaluated pair high + low of float32 arrays (Knuth's two-sum)."""

    high: Float[Array, "*s"]
    low: Float[Array, "*s"]

    @classmethod
    def zeros(cls, *shape: int) -> Total:
        return cls(jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32))

    def add(self, x: Float[Array, "*s"]) -> Total:
        total = self.high + x
        carried = total - self.high
        lost = (self.high - (total - carried)) + (x - carried)  # exactly what rounding dropped
        return Total(total, self.low + lost)

    def merge(self, other: Total) -> Total:
        return self.add(other.high).add(other.low)

    def float64(self) -> np.ndarray:
        return np.asarray(self.high, np.float64) + np.array(self.low, np.float64)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeySums:
    """First and second moments of keys; ``pivot`` is subtracted before anything is summed.

    Keys with a large common offset (K-bias models reach hundreds) would lose their covariance in
    float32: E[k k^T] - mu mu^T cancels. The pivot, the first chunk's mean, keeps the sums small.
    """

    pivot: Float[Array, "K D"]
    k: Total  # [K, D]       sum (k - pivot)
    kk: Total  # [K, D, D]   sum (k - pivot)^T (k - pivot)

    @classmethod
    def zeros(cls, kv_heads: int, head_dim: int) -> KeySums:
        return cls(
            jnp.zeros((kv_heads, head_dim), jnp.float32),
            Total.zeros(kv_heads, head_dim),
            Total.zeros(kv_heads, head_dim, head_dim),
        )

    def add(self, keys: Array, counted: Array, before: Array) -> KeySums:
        """Add keys f32[R, K, D], 0 where ``counted`` bool[R] is not set; ``before`` came first."""
        mean = keys.sum(0) / jnp.maximum(counted.sum(), 1)
        pivot = jnp.where(before == 0, mean, self.pivot)
        shifted = jnp.where(counted[:, None, None], keys - pivot, 0.0)
        return KeySums(
            pivot, self.k.add(shifted.sum(0)), self.kk.add(second_moment(shifted, shifted))
        )

    def merge(self, other: KeySums, mine: Array, others: Array) -> KeySums:
        """The sums of both, of ``mine`` and ``others`` keys; the other's move to this pivot."""
        pivot = jnp.where(mine == 0, other.pivot, self.pivot)
        step = other.pivot - pivot  # other's k - pivot = (k - other.pivot) + step
        n = others.astype(jnp.float32)
        cross = other.k.high[:, :, None] * step[:, None, :]  # [K, D, D]
        square = n * step[:, :, None] * step[:, None, :]
        return KeySums(
            pivot,
            self.k.merge(other.k).add(n * step),
            self.kk.merge(other.kk).add(cross).add(cross.swapaxes(1, 2)).add(square),
        )

    def mean_and_covariance(self, n: int) -> tuple[np.ndarray, np.ndarray]:
        """mu f64[K, D] and the centred covariance f64[K, D, D] of ``n`` keys."""
        offset = self.k.float64() / n
        covariance = self.kk.float64() / n - offset[:, :, None] * offset[:, None, :]
        return np.asarray(self.pivot, np.float64) + offset, covariance


def second_moment(x: Float[Array, "R K D"], y: Float[Array, "R K E"]) -> Float[Array, "K D E"]:
    """sum over rows of x^T y, per head."""
    return jnp.einsum("rkd,rke->kde", x, y, precision=HIGHEST)
