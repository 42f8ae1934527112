"""The specification of attention on the paged cache, in plain JAX: any queries, any codec.

Nothing the size of the dequantised cache exists at any time: a loop over tiles of a few pages
gathers their words, multiplies the codes and folds scale and min outside the product.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int32

from pallas_kernels import format as fmt
from pallas_kernels.format import PAGE, Codec
from pallas_kernels.layout import LayerKV, Tables, Transform, Windows, query_positions
from pallas_kernels.merge import (
    MASKED,
    Partial,
    merge,
    normalise,
    row_sum,
    softmax_weights,
)
from pallas_kernels.packing import unpack_transposed

HIGHEST = lax.Precision.HIGHEST
# Pages per tile. The same for every batch size that fits the bytes, so that a row's sums are made
# in the same order, bit for bit, whoever shares its batch. 3 to 5 are equally fast on 2 cores.
TILE_PAGES = 4
TILE_BYTES = 64 << 20  # of dequantised codes
einsum = functools.partial(jnp.einsum, precision=HIGHEST, preferred_element_type=jnp.float32)


def group_heads(x: Float[Array, "B Q N D"], kv_heads: int) -> Float[Array, "B K M D"]:
    """Queries by the KV head they read: query head h reads h // G; row i of M = Q G is (q, g)."""
    b, q, n, d = x.shape
    x = x.reshape(b, q, kv_heads, n // kv_heads, d)
    return x.swapaxes(1, 2).reshape(b, kv_heads, -1, d)


def ungroup_heads(x: Float[Array, "B K M D"], queries: int) -> Float[Array, "B Q N D"]:
    """The inverse of ``group_heads``."""
    b, k, m, d = x.shape
    x = x.reshape(b, k, queries, m // queries, d).swapaxes(1, 2)
    return x.reshape(b, queries, -1, d)


def per_query(mask: Array, group: int) -> Array:
    """[B, Q, n] for each of the G heads of a KV head: [B, 1, Q G, n]."""
    return jnp.repeat(mask, group, axis=1)[:, None]


def segment(
    q: Float[Array, "B K M D"],
    keys: Float[Array, "B K n D"],
    values: Float[Array, "B K n Dv"],
    visible: Bool[Array, "B #K M n"],
) -> Partial:
    """Attention over BF16 keys and values; rows that no query sees may hold NaN."""
    used = visible.any((1, 2))[:, None, :, None]  # [B, 1, n, 1]
    keys = jnp.where(used, keys, 0).astype(jnp.float32)
    values = jnp.where(used, values, 0).astype(jnp.float32)
    weights, top, total = softmax_weights(einsum("bkmd,bknd->bkmn", q, keys), visible)
    return Partial(einsum("bkmn,bknd->bkmd", weights, values), top, total)


# ---------------------------------------------------------------------------------------- pages


def _packed_logits(q: Array, words: Array, meta: Array, codec: Codec) -> Array:
    """q . k^ of a tile without dequantising: scale (q . code) + min sum(q), per segment."""
    codes = unpack_transposed(words, codec.key, codec.key_bits)  # [B, c, K, D, T]
    q = jnp.broadcast_to(q[:, None], (*words.shape[:2], *q.shape[1:]))  # [B, c, K, M, D]
    if codec.key == "uniform":
        scale, minimum = fmt.unpack_uniform_meta(meta)  # [B, c, K, T]
        product = einsum("bckmd,bckdt->bckmt", q, codes)
        total = row_sum(q)[..., None]
        return product * scale[..., None, :] + total * minimum[..., None, :]
    logits = jnp.zeros(())
    segments = fmt.waterfill_segments(q.shape[-1], codec.key_bits)
    for (bits, channels), scale in zip(segments, fmt.unpack_waterfill_meta(meta), strict=True):
        part = q[..., channels]
        product = einsum("bckmd,bckdt->bckmt", part, codes[..., channels, :])
        centre = row_sum(part)[..., None] * ((2**bits - 1) / 2)
        logits += (product - centre) * scale[..., None, :]
    return logits


def _packed_output(weights: Array, words: Array, meta: Array, bits: int) -> Array:
    """sum_t p_t v^_t of a tile: the scale goes into p, min is a rank-one term."""
    scale, minimum = fmt.unpack_uniform_meta(meta)  # [B, c, K, T]
    codes = unpack_transposed(words, "uniform", bits)  # [B, c, K, T, Dv]
    product = einsum("bckmt,bcktd->bckmd", weights * scale[..., None, :], codes)
    rank_one = row_sum(weights * minimum[..., None, :])[..., None]
    return _sum_pages(product + rank_one)


def _sum_pages(x: Array) -> Array:
    """Sum over the pages of a tile, [B, c, ...] to [B, ...], in order (see ``row_sum``)."""
    return functools.reduce(jnp.add, [x[:, i] for i in range(x.shape[1])])


def _tile_pages(q: Array, layer: LayerKV, table_pages: int) -> int:
    batch, kv_heads, _, head_dim = q.shape
    page = batch * kv_heads * PAGE * max(head_dim, layer.v_head_dim) * 4
    return max(1, min(TILE_BYTES // page, TILE_PAGES, table_pages))


def page_attention(
    q: Float[Array, "B K M D"],
    layer: LayerKV,
    block_table: Int32[Array, "B MP"],
    pages: Int32[Array, "B M"],
    codec: Codec | None,
) -> Partial:
    """Attention over the first ``pages[b, i]`` pages of row b, in the pages' transformed space.

    Args:
        q: queries times scale log2(e) X_Q, float32. pages: visible pages per query.
    """
    tile = _tile_pages(q, layer, block_table.shape[1])
    last = block_table.shape[1] - 1
    most = pages.max(-1)  # [B]

    def visit(i: Array, carry: Partial) -> Partial:
        index = i * tile + jnp.arange(tile)
        ids = jnp.where(index < most[:, None], block_table[:, jnp.minimum(index, last)], 0)
        visible = (index < pages[..., None])[:, :, :, None]  # [B, M, c, 1]
        visible = jnp.broadcast_to(visible, (*visible.shape[:3], PAGE))
        visible = visible.swapaxes(1, 2)[:, :, None]  # [B, c, 1, M, T]
        used = (index < most[:, None])[:, :, None, None]  # [B, c, 1, 1]
        k, v = layer.k_pages[ids], layer.v_pages[ids]
        if layer.k_meta is not None and layer.v_meta is not None and codec is not None:
            k_meta = jnp.where(used, layer.k_meta[ids], 0)
            v_meta = jnp.where(used, layer.v_meta[ids], 0)
            logits = _packed_logits(q, k, k_meta, codec)
        else:
            k, v = (jnp.where(used[..., None], x, 0).astype(jnp.float32) for x in (k, v))
            logits = einsum("bkmd,bcktd->bckmt", q, k)
        logits = jnp.where(visible, logits, MASKED)
        top = jnp.maximum(carry.max, logits.max((1, 4)))
        weights = jnp.where(visible, jnp.exp2(logits - top[:, None, ..., None]), 0.0)
        if layer.v_meta is not None and codec is not None:
            out = _packed_output(weights, v, v_meta, codec.value_bits)
        else:
            out = _sum_pages(einsum("bckmt,bcktd->bckmd", weights, v))
        shrink = jnp.exp2(carry.max - top)
        return Partial(
            carry.out * shrink[..., None] + out,
            top,
            carry.sum * shrink + _sum_pages(row_sum(weights)),
        )

    shape = q.shape[:-1]
    start = Partial(
        jnp.zeros((*shape, layer.v_head_dim)), jnp.full(shape, MASKED), jnp.zeros(shape)
    )
    return lax.fori_loop(0, (most.max() + tile - 1) // tile, visit, start)


def transformed_pages(
    q: Float[Array, "B K M D"],
    layer: LayerKV,
    transform: Transform | None,
    block_table: Int32[Array, "B MP"],
    pages: Int32[Array, "B M"],
    codec: Codec | None,
) -> Partial:
    """``page_attention`` between the transforms: q X_Q in, q.mu onto the maximum, X_O out."""
    if not layer.is_packed or transform is None:
        return page_attention(q, layer, block_table, pages, codec)
    part = page_attention(
        einsum("bkmd,kde->bkme", q, transform.x_q), layer, block_table, pages, codec
    )
    shift = einsum("bkmd,kd->bkm", q, transform.mu)
    top = jnp.where(part.sum > 0, part.max + shift, MASKED)
    return Partial(einsum("bkmd,kde->bkme", part.out, transform.x_o), top, part.sum)


# --------------------------------------------------------------------------------------- decode


def ring_positions(lengths: Int32[Array, " B"], windows: Windows) -> Int32[Array, "B ring"]:
    """The newest position below ``lengths`` that each ring row holds; before S it holds none."""
    newest = lengths[:, None] - 1
    rows = jnp.arange(windows.ring)
    return newest - (newest - windows.sink - rows) % windows.ring


@functools.partial(jax.jit, static_argnames=("windows", "codec", "scale"))
def decode(
    q: Float[Array, "B Q N D"],
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
    """See ``pallas_kernels.decode.api.decode``."""
    queries, kv_heads = q.shape[1], layer.sink_k.shape[1]
    group = q.shape[2] // kv_heads
    t = query_positions(lengths, q_lens, queries)[..., None]  # [B, Q, 1]
    grouped = group_heads(q.astype(jnp.float32) * (scale * math.log2(math.e)), kv_heads)

    sink = jnp.broadcast_to(jnp.arange(windows.sink) <= t, (*t.shape[:2], windows.sink))
    position = ring_positions(lengths, windows)[:, None]  # [B, 1, ring]
    first = windows.first_tail(t + 1)
    tail = (position >= first) & (position <= t)
    pages = jnp.repeat(windows.visible_pages(t[..., 0] + 1), group, axis=1)
    parts = (
        segment(
            grouped, layer.sink_k[tables.sink], layer.sink_v[tables.sink], per_query(sink, group)
        ),
        transformed_pages(grouped, layer, transform, tables.block_table, pages, codec),
        segment(
            grouped, layer.tail_k[tables.slot], layer.tail_v[tables.slot], per_query(tail, group)
        ),
    )
    return ungroup_heads(normalise(merge(*parts)), queries).astype(q.dtype)
