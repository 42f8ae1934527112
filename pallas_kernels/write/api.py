"""The write op: validates once, picks an implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxtyping import Array, Float, Int32

from pallas_kernels.decode.api import check_transform, pick
from pallas_kernels.format import PAGE, Codec
from pallas_kernels.layout import LayerKV, PageJobs, Transform
from pallas_kernels.write import xla

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {"xla": xla.write}


def write(
    layer: LayerKV,
    source_k: Float[Array, "X K H D"],
    source_v: Float[Array, "X K H Dv"],
    transform: Transform | None,
    jobs: PageJobs,
    *,
    codec: Codec,
    implementation: str | None = None,
) -> tuple[LayerKV, Int32[Array, "2"]]:
    """Encode whole pages and put them into the pool: codes of (k - mu) X_K and v X_V.

    Args:
        source_k, source_v: post-RoPE keys and values; the tail rings (decode) or the band of a
            chunk in position order (prefill). Rounded to BF16 before anything else.
        transform: None only for BF16 pages, which are stored as they are.
        jobs: which T source rows become which page.

    Returns:
        The layer with the pages in place, and i32[2]: rows whose metadata saturated float16, and
        rows that were not finite.

    Raises:
        ValueError: shapes disagree.
    """
    kv_heads, head_dim = layer.sink_k.shape[1], layer.sink_k.shape[3]
    for name, x, dim in (("k", source_k, head_dim), ("v", source_v, layer.v_head_dim)):
        if x.ndim != 4 or x.shape[1] != kv_heads or x.shape[3] != dim or x.shape[2] < PAGE:
            raise ValueError(
                f"source_{name} has shape {x.shape}: must be [X, {kv_heads}, >= {PAGE}, {dim}]"
            )
    check_transform(layer, transform)
    run = pick(IMPLEMENTATIONS, implementation, "write")
    return run(layer, source_k, source_v, transform, jobs, codec=codec)
