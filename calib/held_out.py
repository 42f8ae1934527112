"""The real codec's error on text that the fit has not seen.

Per layer and KV head, with k^, v^ the rows that come back out of INT2 pages and only (query, page)
pairs that decoding would really combine (page j is visible to the query at position t iff
j < m(t + 1), ``docs/design.md``):

    key error    sum (e - mean e)^2 / sum (l - mean l)^2,   l = q.k,  e = q.k^ - q.k
    value error  sum |p (v^ - v)|^2 / sum |p v|^2,          p = softmax(l / sqrt(D))

The means run over the keys of one query: what all keys share, softmax does not see. Sums run over
queries and the heads of the group.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from oscar_jax.config import KVConfig
from oscar_jax.rotation import Rotation
from pallas_kernels.format import (
    PAGE,
    Codec,
    decode_key_pages,
    decode_value_pages,
    encode_key_pages,
    encode_value_pages,
)


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Rows of held-out sequences: all keys and values, and a sample of the queries.

    Args:
        positions: i32[Q], where in its sequence each sampled query stands.
        queries: per layer [B, Q, N, D], post-RoPE.
        keys, values: per layer [B, T, K, D] and [B, T, K, Dv] from position 0 on.
        windows: which tokens a page holds and who sees it.
    """

    positions: np.ndarray
    queries: tuple[np.ndarray, ...]
    keys: tuple[np.ndarray, ...]
    values: tuple[np.ndarray, ...]
    windows: KVConfig

    def __post_init__(self) -> None:
        windows = self.windows
        first = windows.sink + windows.recent + PAGE - 1
        last = self.keys[0].shape[1] - 1
        if len(self.positions) == 0 or self.positions.min() < first or self.positions.max() > last:
            raise ValueError(
                f"positions={self.positions}: held-out queries must stand at {first}..{last}, "
                "where at least one page is visible"
            )

    @property
    def stored(self) -> slice:
        """The tokens that lie in pages at the end of a sequence."""
        windows, length = self.windows, self.keys[0].shape[1]
        pages = (length - windows.sink - windows.recent) // PAGE
        return slice(windows.sink, windows.sink + pages * PAGE)

    @property
    def visible(self) -> np.ndarray:
        """bool[Q, T]: which of the ``stored`` tokens each sampled query sees."""
        windows, stored = self.windows, self.stored
        seen = (self.positions + 1 - windows.sink - windows.recent) // PAGE  # m(t + 1)
        return np.arange(stored.stop - stored.start) < PAGE * seen[:, None]


def sample_positions(length: int, windows: KVConfig, count: int = 64) -> np.ndarray:
    """Up to ``count`` query positions, evenly spaced over those that see at least one page."""
    first = windows.sink + windows.recent + PAGE - 1
    if length <= first:
        raise ValueError(f"length={length}: a sequence of at least {first + 1} tokens has a page")
    return np.unique(np.linspace(first, length - 1, count).astype(np.int32))


@dataclasses.dataclass(frozen=True)
class Errors:
    """Relative errors f64[layers, kv_heads], and how many rows did not fit float16 metadata."""

    key: np.ndarray
    value: np.ndarray
    saturated: int

    @property
    def key_mean(self) -> float:
        """Geometric mean over layers and heads; heads without error (dead ones) left out."""
        return _geometric_mean(self.key)

    @property
    def value_mean(self) -> float:
        return _geometric_mean(self.value)


def measure(rotation: Rotation, held_out: HeldOut) -> Errors:
    """What the codec costs on these rows, by the module's formulas."""
    stored, visible = held_out.stored, jnp.asarray(held_out.visible)
    key_error, value_error, saturated = [], [], 0
    for layer in range(rotation.layers):
        codec, kv_heads = rotation.codecs[layer], held_out.keys[layer].shape[2]
        if codec is None:  # BF16 pages give back what the model was given
            key_error.append(np.zeros(kv_heads))
            value_error.append(np.zeros(kv_heads))
            continue
        transforms = [getattr(rotation, side)[layer] for side in ("x_k", "x_q", "x_v", "x_o", "mu")]
        errors = _layer_error(
            held_out.queries[layer],
            held_out.keys[layer][:, stored],
            held_out.values[layer][:, stored],
            visible,
            *transforms,
            codec=codec,
        )
        key_error.append(np.asarray(errors[0], np.float64))
        value_error.append(np.asarray(errors[1], np.float64))
        saturated += int(errors[2])
    return Errors(np.array(key_error), np.array(value_error), saturated)


def _geometric_mean(x: np.ndarray) -> float:
    return float(np.exp(np.log(x[x > 0]).mean())) if (x > 0).any() else 0.0


@jax.jit(static_argnames="codec")
def _layer_error(
    q: Float[Array, "B Q N D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K Dv"],
    visible: Array,
    x_k: Array,
    x_q: Array,
    x_v: Array,
    x_o: Array,
    mu: Array,
    *,
    codec: Codec,
) -> tuple[Float[Array, " K"], Float[Array, " K"], Int[Array, ""]]:
    with jax.default_matmul_precision("highest"):
        k, v = (x.astype(jnp.float32).swapaxes(1, 2) for x in (k, v))  # [B, K, T, D]
        batch, length, heads, head_dim = q.shape
        kv_heads = k.shape[1]
        q = q.astype(jnp.float32).reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
        paged = lambda x: x.reshape(*x.shape[:2], -1, PAGE, x.shape[-1])  # noqa: E731
        keys = encode_key_pages(paged((k - mu[:, None]) @ x_k), codec)
        values = encode_value_pages(paged(v @ x_v), codec)
        k_hat = decode_key_pages(keys.words, keys.meta, codec).reshape(k.shape)
        v_hat = decode_value_pages(values.words, values.meta).reshape(v.shape) @ x_o

        logits = jnp.einsum("bqkgd,bktd->bkgqt", q, k)
        turned = jnp.einsum("bqkgd,kde->bqkge", q, x_q)
        offset = jnp.einsum("bqkgd,kd->bkgq", q, mu)[..., None]
        noise = jnp.einsum("bqkge,bkte->bkgqt", turned, k_hat) + offset - logits
        variance = lambda x: _variance(x, visible)  # noqa: E731
        key_error = _ratio(variance(noise), variance(logits))

        scores = jnp.where(visible, logits * head_dim**-0.5, -jnp.inf)
        weights = jax.nn.softmax(scores, axis=-1)
        energy = lambda x: (  # noqa: E731
            jnp.einsum("bkgqt,bktd->bkgqd", weights, x) ** 2
        ).sum((0, 2, 3, 4))
        return key_error, _ratio(energy(v_hat - v), energy(v)), keys.saturated + values.saturated


def _variance(x: Float[Array, "B K G Q T"], visible: Array) -> Float[Array, " K"]:
    count = visible.sum(-1, keepdims=True)
    mean = jnp.where(visible, x, 0).sum(-1, keepdims=True) / count
    return jnp.where(visible, (x - mean) ** 2, 0).sum((0, 2, 3, 4))


def _ratio(error: Array, signal: Array) -> Array:
    """error / signal; a dead head (0/0) has no error."""
    return jnp.where(signal > 0, error / jnp.where(signal > 0, signal, 1), 0.0)
