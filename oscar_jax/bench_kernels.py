"""Kernel times of a dispatch on a GPU, by CUPTI, also of kernels inside CUDA graphs."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.mosaic.gpu import profiler

# Products with the model's weights: ours, XLA's fusions and cuBLAS.
PRODUCT = re.compile(r"linear_kernel|gemm|gemv|_dot|nvjet|cublas|cutlass|splitK", re.IGNORECASE)
NAMED = 14  # kernels that a row lists

Timings = Sequence[tuple[str, float]]  # (kernel, milliseconds) in the order of their launches


def trace(dispatch: Callable[[], Any]) -> Timings:
    """Every kernel of one call, which must have run before.

    Raises:
        RuntimeError: CUPTI saw none.
    """
    extension = profiler.mosaic_gpu_lib._mosaic_gpu_ext
    extension._cupti_init()
    try:
        jax.block_until_ready(dispatch())
    finally:
        timings = extension._cupti_get_timings(True)
    if not timings:
        raise RuntimeError("CUPTI saw no kernel: is another profiler attached?")
    return timings


def products_ms(timings: Timings) -> float:
    return sum(ms for name, ms in timings if PRODUCT.search(name))


def table(timings: Timings, steps: int) -> list[dict[str, Any]]:
    """The kernels that take most, per step."""
    by_name: dict[str, list[float]] = {}
    for name, ms in timings:
        by_name.setdefault(name, []).append(ms)
    longest = sorted(by_name.items(), key=lambda item: -sum(item[1]))[:NAMED]
    return [
        {
            "kernel": name[:80],
            "launches": len(times) / steps,
            "us": round(1e3 * sum(times) / len(times), 2),
            "ms_per_step": round(sum(times) / steps, 4),
        }
        for name, times in longest
    ]
