"""Prefill on Hopper GPUs: packed pages by ``mosaic_pages``, sink and band by ``mosaic_windows``.

queries     grouped by KV head: rows (position, head of the group)
pages       per share of the packed pages the normalised output and the logarithm of the sum
windows     sink and band (or BF16 pages in place of the step before) on top of that
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.decode.xla import group_heads, ungroup_heads
from pallas_kernels.device import SHARED_BYTES, device_multiprocessors
from pallas_kernels.format import Codec
from pallas_kernels.layout import LayerKV, Tables, Transform, Windows
from pallas_kernels.prefill import mosaic_pages, mosaic_windows
from pallas_kernels.prefill.mosaic_pages import Config
from pallas_kernels.prefill.mosaic_tiles import Tiles
from pallas_kernels.prefill.mosaic_wgmma import BLOCK_ROWS

HEAD_DIMS = (64, 128, 256)
ROOM = SHARED_BYTES - 1024  # of a block, its barriers and some alignment beside it
LOG2_E = math.log2(math.e)


def unsupported(q: Any, layer: LayerKV, windows: Windows) -> str | None:
    """Why this implementation does not serve an input, or None."""
    for name, size in (("head_dim", q.shape[3]), ("v_head_dim", layer.v_head_dim)):
        if size not in HEAD_DIMS:
            return f"{name}={size}, it serves {HEAD_DIMS}"
    if windows.sink % mosaic_windows.KEYS:
        return f"sink={windows.sink}, it needs a multiple of {mosaic_windows.KEYS}"
    return None


def tiles_of(head_dim: int, v_head_dim: int, codec: Codec) -> Tiles:
    """Steps of 64 tokens where an accumulator of 256 columns leaves no registers for 128."""
    halves = 2 if max(head_dim, v_head_dim) > 128 else 1
    return Tiles(head_dim, v_head_dim, codec.key, halves, *codec.bits)


def heuristic(*, blocks: int, table_pages: int, sm_count: int, tiles: Tiles) -> Config:
    """Pages are split so that all multiprocessors have work, and no wave is nearly empty.

    ``blocks`` of 128 rows; a block costs its pages and two more, one fits a multiprocessor.
    """
    best = (math.inf, 1)
    for splits in range(1, max(1, min(16, table_pages // 4)) + 1):
        waves = -(-blocks * splits // sm_count)
        best = min(best, (waves * (-(-table_pages // splits) + 2), splits))
    pages = 3
    while pages > 1 and mosaic_pages.shared_bytes(tiles, Config(pages=pages)) > ROOM:
        pages -= 1
    return Config(splits=best[1], pages=pages)


@functools.partial(jax.jit, static_argnames=("windows", "codec", "scale", "config", "interpret"))
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
    config: Config | None = None,
    interpret: Any = None,
) -> Float[Array, "B Q N Dv"]:
    """See ``pallas_kernels.prefill.api.prefill``.

    Args:
        config: how the pages' kernel is cut; default: ``heuristic``. interpret:
            plgpu.InterpretGPUParams.
    """
    reason = unsupported(q, layer, windows)
    if reason is not None:
        raise NotImplementedError(f"mosaic_gpu does not serve this: {reason}; use 'xla'")
    if interpret is None and device_multiprocessors(wgmma=True) is None:
        raise NotImplementedError(
            "mosaic_gpu needs a GPU of compute capability 9.x (wgmma), which this is not traced "
            "for; use 'xla'"
        )
    batch, queries, heads, head_dim = q.shape
    kv_heads = layer.sink_k.shape[1]
    group = heads // kv_heads
    rows = -(-queries * group // BLOCK_ROWS) * BLOCK_ROWS
    exists = (jnp.arange(queries) < q_lens[:, None])[..., None, None]
    half = q.dtype == jnp.bfloat16
    grouped = group_heads(jnp.where(exists, q, 0), kv_heads)
    grouped = grouped if half else grouped.astype(jnp.float32)
    grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, rows - queries * group), (0, 0)))
    far = None
    if layer.is_packed and transform is not None and codec is not None:
        tiles = tiles_of(head_dim, layer.v_head_dim, codec)
        config = config or heuristic(
            blocks=rows // BLOCK_ROWS * kv_heads * batch,
            table_pages=tables.block_table.shape[1],
            sm_count=device_multiprocessors(wgmma=True) or 132,
            tiles=tiles,
        )
        far = mosaic_pages.attention(
            grouped,
            layer,
            transform,
            tables.block_table,
            lengths,
            q_lens,
            tiles=tiles,
            windows=windows,
            config=config,
            group=group,
            scale=scale * LOG2_E,
            interpret=interpret,
        )
    sink_k, sink_v = layer.sink_k[tables.sink], layer.sink_v[tables.sink]
    short = -band_k.shape[2] % mosaic_windows.ALIGNED
    band_k, band_v = (jnp.pad(x, ((0, 0), (0, 0), (0, short), (0, 0))) for x in (band_k, band_v))
    position = (lengths - q_lens - windows.band)[:, None] + jnp.arange(band_v.shape[2])
    # A weight of 0 times a NaN is NaN: rows that no query sees are set to 0.
    of_band = (position >= windows.sink) & (position < lengths[:, None])
    of_sink = jnp.arange(windows.sink) < lengths[:, None]
    keep = lambda x, mask: jnp.where(mask[:, None, :, None], x, 0).astype(jnp.bfloat16)  # noqa: E731
    high = lax.reduce_precision(grouped, 8, 7)
    terms = [grouped] if half else [high, grouped - high]
    out = mosaic_windows.attention(
        jnp.stack(terms).astype(jnp.bfloat16),
        (sink_k, keep(sink_v, of_sink)),
        (band_k.astype(jnp.bfloat16), keep(band_v, of_band)),
        None if far is not None else (layer.k_pages, layer.v_pages),
        far,
        tables.block_table,
        lengths,
        q_lens,
        windows=windows,
        group=group,
        scale=scale * LOG2_E,
        dtype=jnp.bfloat16 if half else jnp.float32,
        interpret=interpret,
    )
    return ungroup_heads(out[:, :, : queries * group], queries).astype(q.dtype)
