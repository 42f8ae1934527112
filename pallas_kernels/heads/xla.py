"""The specification of ``rotate`` and ``append`` in plain JAX."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.gemv.xla import rms_norm
from pallas_kernels.layout import LayerKV, Tables, Windows


def rotate_pairs(
    x: Float[Array, "B Q N D"], cos: Float[Array, "B Q 1 H"], sin: Float[Array, "B Q 1 H"]
) -> Float[Array, "B Q N D"]:
    """(a cos - b sin, b cos + a sin) with a, b the halves of each head; float32."""
    a, b = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def rotate(
    y: Float[Array, "B Q all D"],
    cos: Float[Array, "B Q 1 H"],
    sin: Float[Array, "B Q 1 H"],
    q_gain: Float[Array, " D"] | None,
    k_gain: Float[Array, " D"] | None,
    *,
    heads: int,
    eps: float,
    dtype: Any,
) -> tuple[Array, Array, Array]:
    """See ``pallas_kernels.heads.api.rotate``."""
    kv_heads = (y.shape[2] - heads) // 2
    q, k, v = jnp.split(y, (heads, heads + kv_heads), axis=2)
    if q_gain is not None and k_gain is not None:
        q, k = rms_norm(q, q_gain, eps), rms_norm(k, k_gain, eps)
    q, k = rotate_pairs(q, cos, sin), rotate_pairs(k, cos, sin)
    return q.astype(dtype), k.astype(dtype), v.astype(dtype)


def append(
    layer: LayerKV,
    k: Float[Array, "B Q K D"],
    v: Float[Array, "B Q K Dv"],
    tables: Tables,
    *,
    lengths: Int32[Array, " B"],
    q_lens: Int32[Array, " B"],
    windows: Windows,
) -> LayerKV:
    """See ``pallas_kernels.heads.api.append``."""
    k, v = k.astype(jnp.bfloat16), v.astype(jnp.bfloat16)
    index = jnp.arange(k.shape[1])
    position = (lengths - q_lens)[:, None] + index  # [B, Q]
    live = index < q_lens[:, None]
    in_sink = live & (position < windows.sink)
    newest = position >= lengths[:, None] - windows.ring
    in_ring = live & (position >= windows.sink) & newest
    sink_row = jnp.where(in_sink, position, windows.sink)  # out of range: dropped
    ring_row = jnp.where(in_ring, (position - windows.sink) % windows.ring, windows.ring)

    def put(pool: Array, owner: Array, row: Array, x: Array) -> Array:
        return pool.at[owner[:, None], :, row].set(x, mode="drop")

    return dataclasses.replace(
        layer,
        sink_k=put(layer.sink_k, tables.sink, sink_row, k),
        sink_v=put(layer.sink_v, tables.sink, sink_row, v),
        tail_k=put(layer.tail_k, tables.slot, ring_row, k),
        tail_v=put(layer.tail_v, tables.slot, ring_row, v),
    )
