"""Layers that see a window of the newest tokens only: a BF16 ring, no pages, no transforms.

With window W and lookahead L such a layer keeps the newest W + L tokens of every slot, position p
in row p mod (W + L). The query at position t sees the positions t - W + 1 to t that exist, in
decode and in prefill alike.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Int32

from pallas_kernels.decode.xla import group_heads, per_query, segment, ungroup_heads
from pallas_kernels.layout import Tables, query_positions
from pallas_kernels.merge import normalise

QUERY_BLOCK = 128


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowKV:
    """One window layer's rings; ``window`` is static: tokens a query sees, its own included."""

    ring_k: BFloat16[Array, "slots K ring D"]
    ring_v: BFloat16[Array, "slots K ring Dv"]
    window: int = dataclasses.field(metadata=dict(static=True))

    @property
    def ring(self) -> int:
        """Rows of the ring: W + L."""
        return self.ring_k.shape[2]

    @property
    def lookahead(self) -> int:
        """L: how far beyond the window a ring reaches."""
        return self.ring - self.window


def sliding_by_layer(layers: int, sliding_windows: Sequence[int | None] | None) -> dict[int, int]:
    """The model layers that have a sliding window, in order, with its tokens.

    Raises:
        ValueError: not one entry per layer, not a positive number, or a window everywhere.
    """
    given = (None,) * layers if sliding_windows is None else tuple(sliding_windows)
    found = {layer: window for layer, window in enumerate(given) if window is not None}
    if len(given) != layers or len(found) == layers or any(w < 1 for w in found.values()):
        raise ValueError(
            f"sliding_windows={given}: must be one per layer ({layers}), each a positive number of "
            "tokens or None, and None at least once: without pages nothing is left to compress"
        )
    return found


def init_sliding(
    sliding: Mapping[int, int],
    *,
    lookahead: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    slots: int,
) -> tuple[WindowKV, ...]:
    """Zeroed rings of W + L rows for ``slots`` sequences, per layer of ``sliding_by_layer``."""

    def rings(window: int, size: int) -> Array:
        return jnp.zeros((slots, kv_heads, window + lookahead, size), jnp.bfloat16)

    return tuple(
        WindowKV(rings(window, head_dim), rings(window, v_head_dim or head_dim), window)
        for window in sliding.values()
    )


def append_window(
    layer: WindowKV,
    k: Float[Array, "B Q K D"],
    v: Float[Array, "B Q K Dv"],
    tables: Tables,
    *,
    lengths: Int32[Array, " B"],
    q_lens: Int32[Array, " B"],
) -> WindowKV:
    """The layer with every row's newest tokens in its ring; see ``cache.append_kv``."""
    index = jnp.arange(k.shape[1])
    position = (lengths - q_lens)[:, None] + index  # [B, Q]
    kept = (index < q_lens[:, None]) & (position >= lengths[:, None] - layer.ring)
    row = jnp.where(kept, position % layer.ring, layer.ring)  # out of range: dropped

    def put(pool: Array, x: Array) -> Array:
        return pool.at[tables.slot[:, None], :, row].set(x.astype(pool.dtype), mode="drop")

    return dataclasses.replace(layer, ring_k=put(layer.ring_k, k), ring_v=put(layer.ring_v, v))


@functools.partial(jax.jit, static_argnames="scale")
def decode_window(
    q: Float[Array, "B Q N D"],
    layer: WindowKV,
    tables: Tables,
    *,
    lengths: Int32[Array, " B"],
    q_lens: Int32[Array, " B"],
    scale: float,
) -> Float[Array, "B Q N Dv"]:
    """Attention of at most L + 1 newest tokens, which are in the ring already.

    Raises:
        ValueError: more queries than that.
    """
    if q.shape[1] > layer.lookahead + 1:
        raise ValueError(
            f"{q.shape[1]} queries per row: at most L + 1 = {layer.lookahead + 1} in one call; use "
            "oscar_prefill for longer chunks"
        )
    newest = lengths[:, None] - 1
    position = newest - (newest - jnp.arange(layer.ring)) % layer.ring  # [B, ring]
    t = query_positions(lengths, q_lens, q.shape[1])
    return _attend(
        q, layer.ring_k[tables.slot], layer.ring_v[tables.slot], position, t, layer.window, scale
    )


@functools.partial(jax.jit, static_argnames="scale")
def prefill_window(
    q: Float[Array, "B Q N D"],
    k: Float[Array, "B Q K D"],
    v: Float[Array, "B Q K Dv"],
    layer: WindowKV,
    tables: Tables,
    *,
    lengths: Int32[Array, " B"],
    q_lens: Int32[Array, " B"],
    scale: float,
) -> Float[Array, "B Q N Dv"]:
    """Attention of a chunk of any length that is not in the ring yet.

    A block of queries reads one slice of W + block keys in position order, so that no [Q, Q]
    product is ever formed.
    """
    batch, queries = q.shape[:2]
    block = min(queries, QUERY_BLOCK)
    blocks = -(-queries // block)
    after = ((0, 0), (0, blocks * block - queries), (0, 0), (0, 0))
    start = lengths - q_lens - layer.window  # position of the first key below
    rows = (start[:, None] + jnp.arange(layer.window)) % layer.ring

    def band(ring: Array, x: Array) -> Array:
        """[B, K, W + Q, D]: the ring's newest W rows in position order, then the chunk."""
        old = jnp.take_along_axis(ring[tables.slot], rows[:, None, :, None], axis=2)
        return jnp.concatenate([old, jnp.pad(x, after).astype(ring.dtype).swapaxes(1, 2)], 2)

    keys, values = band(layer.ring_k, k), band(layer.ring_v, v)
    t_all = query_positions(lengths, q_lens, blocks * block)
    padded = jnp.pad(q, after)

    def visit(i: Array) -> Array:
        at, width = i * block, layer.window + block
        position = start[:, None] + at + jnp.arange(width)  # [B, width]
        return _attend(
            lax.dynamic_slice_in_dim(padded, at, block, 1),
            lax.dynamic_slice_in_dim(keys, at, width, 2),
            lax.dynamic_slice_in_dim(values, at, width, 2),
            position,
            lax.dynamic_slice_in_dim(t_all, at, block, 1),
            layer.window,
            scale,
        )

    out = lax.map(visit, jnp.arange(blocks))  # [blocks, B, block, N, Dv]
    return out.swapaxes(0, 1).reshape(batch, blocks * block, *out.shape[3:])[:, :queries]


def _attend(
    q: Float[Array, "B Q N D"],
    keys: Float[Array, "B K n D"],
    values: Float[Array, "B K n Dv"],
    position: Int32[Array, "B n"],
    t: Int32[Array, "B Q"],
    window: int,
    scale: float,
) -> Float[Array, "B Q N Dv"]:
    """Queries at positions t over keys at ``position``; below 0 there is no key."""
    kv_heads, group = keys.shape[1], q.shape[2] // keys.shape[1]
    at, newest = position[:, None], t[..., None]
    visible = (at >= 0) & (at <= newest) & (at > newest - window)  # [B, Q, n]
    grouped = group_heads(q.astype(jnp.float32) * (scale * math.log2(math.e)), kv_heads)
    part = segment(grouped, keys, values, per_query(visible, group))
    return ungroup_heads(normalise(part), q.shape[1]).astype(q.dtype)
