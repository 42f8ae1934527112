"""The prefill op: validates once, picks an implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.decode.api import check_queries, pick
from pallas_kernels.format import Codec
from pallas_kernels.layout import LayerKV, Tables, Transform, Windows
from pallas_kernels.prefill import mosaic_gpu, xla

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "xla": xla.prefill,
    "mosaic_gpu": mosaic_gpu.prefill,
}


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
    implementation: str | None = None,
) -> Float[Array, "B Q N Dv"]:
    """The same attention as ``decode``, for a chunk of any length whose pages are written.

    Args:
        q: queries of positions lengths - q_lens + i.
        band_k, band_v: BF16 keys and values in position order, H = R + T + Q rows, the first at
            position lengths - q_lens - (R + T): the recent tokens before the chunk, then the
            chunk. Rows before position S may hold anything.
        layer: sink and pages up to date with the chunk; the ring is not read.
        implementation: None takes "mosaic_gpu" for packed and BF16 pages of 64, 128 and 256
            channels where the computation is lowered for a Hopper GPU (compute capability 9.x),
            "xla" everywhere else.

    Raises:
        ValueError: shapes disagree.
        NotImplementedError: the named implementation does not serve this input.
    """
    check_queries(q, layer, transform, codec, tables, lengths)
    want = windows.band + q.shape[1]
    if band_k.shape[2] != want or band_v.shape[2] != want:
        raise ValueError(
            f"band_k has {band_k.shape[2]} rows and band_v {band_v.shape[2]}: must be "
            f"R + T + Q = {want}"
        )
    keywords: dict[str, Any] = dict(
        lengths=lengths, q_lens=q_lens, windows=windows, codec=codec, scale=scale
    )
    arrays = (q, band_k, band_v, layer, transform, tables)
    if (
        implementation is None
        and mosaic_gpu.unsupported(q, layer, windows) is None
        and mosaic_gpu.device_multiprocessors(wgmma=True) is not None
    ):
        return lax.platform_dependent(
            *arrays,
            cuda=lambda *x: mosaic_gpu.prefill(*x, **keywords),
            default=lambda *x: xla.prefill(*x, **keywords),
        )
    return pick(IMPLEMENTATIONS, implementation, "prefill")(*arrays, **keywords)
