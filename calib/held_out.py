"""The real codec's error on text that the fit has not seen.

Per layer and KV head, with k^, v^ the rows that come back out of INT2 pages and only (query, page)
pairs that decoding would really combine (page j is visible to the query at position t iff
j < m(t + 1), ``docs/design.md``):

    key error     sum (e - mean e)^2 / sum (l - mean l)^2,   l = q.k,  e = q.k^ - q.k
    value error   sum |p (v^ - v)|^2 / sum |p v|^2,          p = softmax(l / sqrt(D))
    output error  sum |p^ v^ - p v|^2 / sum |p v|^2

The means run over the keys of one query: what all keys share, softmax does not see. In the first
two only page tokens take part. The output error is the damage as served: p runs over everything a
query sees, and p^, v^ differ from p, v in the pages alone. With p^ v and p v^ in the place of p^ v^
it is what a layer's keys and its values do alone: its sensitivity. Sums run over queries and the
heads of the group; they are kept per query, so that a report can split them by text and position.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from calib.positions import turned
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

KINDS = 5  # of error: see ``Errors``


@dataclasses.dataclass(frozen=True)
class HeldOut:
    """Rows of held-out sequences: all keys and values, and a sample of the queries.

    Args:
        positions: i32[Q], where in its sequence each sampled query stands.
        queries: per layer [B, Q, N, D], post-RoPE.
        keys, values: per layer [B, T, K, D] and [B, T, K, Dv] from position 0 on.
        windows: which tokens a page holds and who sees it.
        domains: of each sequence, for reports.
    """

    positions: np.ndarray
    queries: tuple[np.ndarray, ...]
    keys: tuple[np.ndarray, ...]
    values: tuple[np.ndarray, ...]
    windows: KVConfig
    domains: tuple[str, ...] = ()

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

    def at_offset(self, offset: int, frequencies: Sequence[np.ndarray]) -> HeldOut:
        """The same text as it would be stored ``offset`` tokens later, sink and windows with it.

        Queries and keys turn alike, so that exact attention does not change; which directions a
        page has to store does.

        Args:
            offset: tokens. frequencies: per layer f32[D/2], radians per token.
        """

        def moved(rows: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...]:
            return tuple(
                np.asarray(
                    turned(jnp.asarray(x), jnp.full(x.shape[:2], offset), jnp.asarray(f))
                ).astype(x.dtype)
                for x, f in zip(rows, frequencies, strict=True)
            )

        return dataclasses.replace(self, queries=moved(self.queries), keys=moved(self.keys))


def sample_positions(length: int, windows: KVConfig, count: int = 64) -> np.ndarray:
    """Up to ``count`` query positions, evenly spaced over those that see at least one page."""
    first = windows.sink + windows.recent + PAGE - 1
    if length <= first:
        raise ValueError(f"length={length}: a sequence of at least {first + 1} tokens has a page")
    return np.unique(np.linspace(first, length - 1, count).astype(np.int32))


@dataclasses.dataclass(frozen=True)
class Errors:
    """Relative errors of every layer and KV head.

    Args:
        sums: f64[layers, kind, 2, B, Q, kv_heads]: noise and signal of the key, the value and the
            output error, and of the output error by keys and by values alone, per sequence and
            query.
        saturated: rows that did not fit float16 metadata.
    """

    sums: np.ndarray
    saturated: int

    @property
    def key(self) -> np.ndarray:
        """f64[layers, kv_heads]"""
        return self._ratio(0)

    @property
    def value(self) -> np.ndarray:
        return self._ratio(1)

    @property
    def output(self) -> np.ndarray:
        return self._ratio(2)

    @property
    def key_mean(self) -> float:
        """Geometric mean over layers and heads; heads without error (dead ones) left out."""
        return _geometric_mean(self.key)

    @property
    def value_mean(self) -> float:
        return _geometric_mean(self.value)

    @property
    def output_mean(self) -> float:
        return _geometric_mean(self.output)

    @property
    def sensitivity(self) -> tuple[tuple[float, float], ...]:
        """Of each layer, its heads together: the output error by keys and by values alone."""
        noise, signal = np.moveaxis(self.sums[:, 3:].sum((3, 4, 5)), 2, 0)  # each [layers, 2]
        share = np.where(signal > 0, noise / np.where(signal > 0, signal, 1.0), 0.0)
        return tuple((float(keys), float(values)) for keys, values in share)

    def of(
        self, *, sequences: np.ndarray | None = None, queries: np.ndarray | None = None
    ) -> Errors:
        """The errors on some sequences (bool[B]) or of some queries (bool[Q]) alone."""
        sums = self.sums
        if sequences is not None:
            sums = sums[:, :, :, sequences]
        if queries is not None:
            sums = sums[:, :, :, :, queries]
        return Errors(sums, self.saturated)

    def _ratio(self, kind: int) -> np.ndarray:
        noise, signal = np.moveaxis(self.sums[:, kind].sum((2, 3)), 1, 0)  # each [layers, kv_heads]
        return np.where(signal > 0, noise / np.where(signal > 0, signal, 1.0), 0.0)


def measure(rotation: Rotation, held_out: HeldOut) -> Errors:
    """What the codec costs on these rows, by the module's formulas."""
    layers = [measure_layer(rotation, held_out, layer) for layer in range(rotation.layers)]
    return Errors(np.stack([sums for sums, _ in layers]), sum(count for _, count in layers))


def measure_layer(
    rotation: Rotation, held_out: HeldOut, layer: int, codec: Codec | None = None
) -> tuple[np.ndarray, int]:
    """``Errors.sums`` [kind, 2, B, Q, kv_heads] of one layer, and how many rows saturated.

    Args:
        codec: what to store the rows with instead of the rotation's own codec.
    """
    codec = codec or rotation.codecs[layer]
    if codec is None:  # BF16 pages
        kv_heads, (batch, queries) = rotation.x_k[layer].shape[0], held_out.queries[layer].shape[:2]
        return np.zeros((KINDS, 2, batch, queries, kv_heads)), 0
    length, paging = held_out.keys[layer].shape[1], held_out.stored
    paged = np.zeros((len(held_out.positions), length), bool)
    paged[:, paging] = held_out.visible
    x_k, x_q, x_v, x_o, mu = (
        getattr(rotation, side)[layer] for side in ("x_k", "x_q", "x_v", "x_o", "mu")
    )
    keys, values = held_out.keys[layer], held_out.values[layer]
    of_keys, of_values = _sides(codec)
    k_hat, k_saturated = _stored_keys(keys[:, paging], x_k, mu, codec=of_keys)
    v_hat, v_saturated = _stored_values(values[:, paging], x_v, x_o, codec=of_values)
    sums = _layer_sums(
        held_out.queries[layer],
        keys,
        values,
        k_hat,
        v_hat,
        jnp.asarray(paged),
        jnp.asarray(np.arange(length)[None] <= held_out.positions[:, None]),
        x_q,
        mu,
        paging=(paging.start, paging.stop),
    )
    return np.asarray(sums, np.float64), int(k_saturated) + int(v_saturated)


def _sides(codec: Codec) -> tuple[Codec, Codec]:
    """The codec with what either side does not read at its default: one program for all of those.

    >>> _sides(Codec(clip_k=0.9))[1] == _sides(Codec(clip_k=0.8))[1]
    True
    """
    plain = Codec()
    keys = dataclasses.replace(codec, clip_v=plain.clip_v, value_bits=plain.value_bits)
    if codec.key == "waterfill":  # has no clip
        keys = dataclasses.replace(keys, clip_k=plain.clip_k)
    return keys, Codec(clip_v=codec.clip_v, value_bits=codec.value_bits)


def _geometric_mean(x: np.ndarray) -> float:
    return float(np.exp(np.log(x[x > 0]).mean())) if (x > 0).any() else 0.0


# Two small functions that depend on the codec and a large one that does not: a search over codecs
# compiles the small ones alone.
@jax.jit(static_argnames="codec")
def _stored_keys(
    k: Float[Array, "B T K D"], x_k: Array, mu: Array, *, codec: Codec
) -> tuple[Float[Array, "B K T D"], Int[Array, ""]]:
    """What comes back out of pages of these keys, still transformed, and how many saturated."""
    with jax.default_matmul_precision("highest"):
        rows = (k.astype(jnp.float32).swapaxes(1, 2) - mu[:, None]) @ x_k
        keys = encode_key_pages(rows.reshape(*rows.shape[:2], -1, PAGE, rows.shape[-1]), codec)
        return decode_key_pages(keys.words, keys.meta, codec).reshape(rows.shape), keys.saturated


@jax.jit(static_argnames="codec")
def _stored_values(
    v: Float[Array, "B T K Dv"], x_v: Array, x_o: Array, *, codec: Codec
) -> tuple[Float[Array, "B K T Dv"], Int[Array, ""]]:
    """What comes back out of pages of these values, and how many saturated."""
    with jax.default_matmul_precision("highest"):
        rows = v.astype(jnp.float32).swapaxes(1, 2) @ x_v
        pages = rows.reshape(*rows.shape[:2], -1, PAGE, rows.shape[-1])
        values = encode_value_pages(pages, codec)
        v_hat = decode_value_pages(values.words, values.meta).reshape(rows.shape)
        return v_hat @ x_o, values.saturated


@jax.jit(static_argnames="paging")
def _layer_sums(
    q: Float[Array, "B Q N D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K Dv"],
    k_hat: Float[Array, "B K P D"],
    v_hat: Float[Array, "B K P Dv"],
    paged: Bool[Array, "Q T"],
    causal: Bool[Array, "Q T"],
    x_q: Array,
    mu: Array,
    *,
    paging: tuple[int, int],
) -> Float[Array, "5 2 B Q K"]:
    """``paging``: first and last + 1 of the P tokens in pages; ``paged``: what a query sees."""
    with jax.default_matmul_precision("highest"):
        k, v = (x.astype(jnp.float32).swapaxes(1, 2) for x in (k, v))  # [B, K, T, D]
        batch, length, heads, head_dim = q.shape
        kv_heads = k.shape[1]
        q = q.astype(jnp.float32).reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
        pages = slice(*paging)
        logits = jnp.einsum("bqkgd,bktd->bkgqt", q, k)
        read = jnp.einsum("bqkgd,kde->bqkge", q, x_q)
        offset = jnp.einsum("bqkgd,kd->bkgq", q, mu)[..., None]
        noise = jnp.einsum("bqkge,bkte->bkgqt", read, k_hat) + offset - logits[..., pages]
        seen = paged[:, pages]
        key_sums = _variance(noise, seen), _variance(logits[..., pages], seen)

        softmax = lambda x, mask: jax.nn.softmax(  # noqa: E731
            jnp.where(mask, x * head_dim**-0.5, -jnp.inf), axis=-1
        )
        energy = lambda weights, x: (  # noqa: E731
            jnp.einsum("bkgqt,bktd->bkgqd", weights, x) ** 2
        ).sum((2, 4))
        change = v_hat - v[:, :, pages]
        among_pages = softmax(logits[..., pages], seen)
        value_sums = energy(among_pages, change), energy(among_pages, v[:, :, pages])

        exact = softmax(logits, causal)
        moved = jnp.where(seen, noise, 0.0)
        served = softmax(logits.at[..., pages].add(moved), causal)
        among = lambda weights: jnp.where(seen, weights[..., pages], 0.0)  # noqa: E731
        by_keys = jnp.einsum("bkgqt,bktd->bkgqd", served - exact, v)
        both = by_keys + jnp.einsum("bkgqt,bktd->bkgqd", among(served), change)
        total = energy(exact, v)
        output_sums = (
            ((both**2).sum((2, 4)), total),
            ((by_keys**2).sum((2, 4)), total),
            (energy(among(exact), change), total),
        )
        sums = jnp.stack([jnp.stack(pair) for pair in (key_sums, value_sums, *output_sums)])
        return sums.swapaxes(-1, -2)


def _variance(x: Float[Array, "B K G Q T"], visible: Array) -> Float[Array, "B K Q"]:
    count = visible.sum(-1, keepdims=True)
    mean = jnp.where(visible, x, 0).sum(-1, keepdims=True) / count
    return jnp.where(visible, (x - mean) ** 2, 0).sum((2, 4))
