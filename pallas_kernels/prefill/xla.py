"""Prefill attention of a chunk, in plain JAX: the specification.

The pages of the chunk are written first; then query t sees the pages j < m(t+1), the sink, and a
band of fewer than R + T keys that ends at itself. The band of a block of queries is one slice of
the keys in position order, so no [Q, Q] product is ever formed.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.decode.xla import (
    group_heads,
    per_query,
    segment,
    transformed_pages,
    ungroup_heads,
)
from pallas_kernels.format import Codec
from pallas_kernels.layout import LayerKV, Tables, Transform, Windows, query_positions
from pallas_kernels.merge import merge, normalise

QUERY_BLOCK = 128


@functools.partial(jax.jit, static_argnames=("windows", "codec", "scale"))
def prefill(
    q: Float[Array, "B Q N D"],
    band_k: Float[Array, "B K H D"],
    band_v: Float[Array, "B K H Dv"],
    layer: LayerKV,
    transform: Transform | None,
    tables: Tables,
    *,
    lengths: Int32[Array, " B"],
    q_lens: Int32[Array, " B"],
    windows: Windows,
    codec: Codec | None,
    scale: float,
) -> Float[Array, "B Q N Dv"]:
    """See ``pallas_kernels.prefill.api.prefill``."""
    batch, queries, heads = q.shape[:3]
    kv_heads = band_k.shape[1]
    group = heads // kv_heads
    block = min(queries, QUERY_BLOCK)
    blocks = -(-queries // block)
    padding = blocks * block - queries
    sink_k, sink_v = layer.sink_k[tables.sink], layer.sink_v[tables.sink]
    band_k, band_v = (jnp.pad(x, ((0, 0), (0, 0), (0, padding), (0, 0))) for x in (band_k, band_v))
    t_all = query_positions(lengths, q_lens, blocks * block)
    q = jnp.pad(q, ((0, 0), (0, padding), (0, 0), (0, 0)))
    start = lengths - q_lens - windows.band  # position of the band's first row

    def visit(i: Array) -> Array:
        at = i * block
        t = lax.dynamic_slice_in_dim(t_all, at, block, 1)[..., None]  # [B, block, 1]
        part = lax.dynamic_slice_in_dim(q, at, block, 1).astype(jnp.float32)
        grouped = group_heads(part * (scale * math.log2(math.e)), kv_heads)
        width = windows.band + block
        keys = lax.dynamic_slice_in_dim(band_k, at, width, 2)
        values = lax.dynamic_slice_in_dim(band_v, at, width, 2)
        position = (start[:, None] + at + jnp.arange(width))[:, None]  # [B, 1, width]
        tail = (position >= windows.first_tail(t + 1)) & (position <= t)
        sink = jnp.broadcast_to(jnp.arange(windows.sink) <= t, (batch, block, windows.sink))
        pages = jnp.repeat(windows.visible_pages(t[..., 0] + 1), group, axis=1)
        parts = (
            segment(grouped, sink_k, sink_v, per_query(sink, group)),
            transformed_pages(grouped, layer, transform, tables.block_table, pages, codec),
            segment(grouped, keys, values, per_query(tail, group)),
        )
        return ungroup_heads(normalise(merge(*parts)), block).astype(q.dtype)

    out = lax.map(visit, jnp.arange(blocks))  # [blocks, B, block, N, Dv]
    return out.swapaxes(0, 1).reshape(batch, blocks * block, heads, -1)[:, :queries]
