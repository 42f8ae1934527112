"""The write op: validates once, picks an implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.decode.api import check_pages, pick
from pallas_kernels.format import PAGE, Codec
from pallas_kernels.layout import LayerKV, PageJobs, Transform
from pallas_kernels.write import mosaic_gpu, xla

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "xla": xla.write,
    "mosaic_gpu": mosaic_gpu.write,
}


def write(
    layer: LayerKV,
    source_k: Float[Array, "X K H D"],
    source_v: Float[Array, "X K H Dv"],
    transform: Transform | None,
    jobs: PageJobs,
    *,
    codec: Codec | None,
    implementation: str | None = None,
) -> tuple[LayerKV, Int32[Array, "2"]]:
    """Encode whole pages and put them into the pool: codes of (k - mu) X_K and v X_V.

    Args:
        source_k, source_v: post-RoPE keys and values; the tail rings (decode) or the band of a
            chunk in position order (prefill). Rounded to BF16 before anything else.
        transform, codec: None only for BF16 pages, which are stored as they are.
        jobs: which T source rows become which page; no page twice.
        implementation: None takes "mosaic_gpu" for packed pages of head_dim 64, 128 and 256 where
            the computation is lowered for a Hopper GPU (compute capability 9.x), "xla" else.

    Returns:
        The layer with the pages in place (in the same memory, where it is donated or not used
        again), and i32[2]: rows whose metadata saturated float16, and rows that were not finite.

    Raises:
        ValueError: shapes disagree.
        NotImplementedError: the named implementation does not serve this input.
    """
    kv_heads, head_dim = layer.sink_k.shape[1], layer.sink_k.shape[3]
    for name, x, dim in (("k", source_k, head_dim), ("v", source_v, layer.v_head_dim)):
        if x.ndim != 4 or x.shape[1] != kv_heads or x.shape[3] != dim or x.shape[2] < PAGE:
            raise ValueError(
                f"source_{name} has shape {x.shape}: must be [X, {kv_heads}, >= {PAGE}, {dim}]"
            )
    check_pages(layer, transform, codec)
    arrays = (layer, source_k, source_v, transform, jobs)
    if (
        implementation is None
        and mosaic_gpu.unsupported(layer, transform) is None
        and mosaic_gpu.device_multiprocessors(wgmma=True) is not None
    ):
        # One branch is left after lowering for one platform, so the pools are not copied.
        return lax.platform_dependent(
            *arrays,
            cuda=lambda *x: mosaic_gpu.write(*x, codec=codec),
            default=lambda *x: xla.write(*x, codec=codec),
        )
    run = pick(IMPLEMENTATIONS, implementation, "write")
    return run(*arrays, codec=codec)
