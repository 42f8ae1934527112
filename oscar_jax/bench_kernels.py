"""Kernel times of a dispatch on a GPU, from JAX's profiler."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from typing import Any

from pallas_kernels.timing import Kernel, trace

__all__ = ["Kernel", "alone", "breakdown", "trace"]

# Products with the model's weights: ours, XLA's fusions and cuBLAS.
PRODUCT = re.compile(r"linear_kernel|gemm|gemv|_dot|nvjet|cublas|splitK", re.IGNORECASE)
# The attention: every other kernel of ours but two, and cuDNN's.
ATTENTION = re.compile(
    r"^(?!rotate_|append_|linear_).*mosaic_gpu_kernel|cudnn|flash|fmha|sdpa", re.IGNORECASE
)
NAMED = 14  # kernels that a row lists


def alone(kernels: Sequence[Kernel]) -> list[float]:
    """Each kernel's milliseconds after the end of all before it: launches may overlap."""
    end, times = float("-inf"), []
    for kernel in kernels:
        own_end = kernel.start + kernel.duration
        times.append(max(0.0, own_end - max(kernel.start, end)))
        end = max(end, own_end)
    return times


def breakdown(kernels: Sequence[Kernel], steps: int) -> dict[str, Any]:
    """Milliseconds of a step by what its kernels do, and the kernels that take most.

    ``kernels_ms`` is the sum of ``products_ms`` (with the norms, gates and residuals that are in
    the same launch), ``attention_ms`` and ``rest_ms``.
    """
    sums = dict(products_ms=0.0, attention_ms=0.0, rest_ms=0.0)
    by_name: dict[str, list[tuple[float, float]]] = {}
    for kernel, own in zip(kernels, alone(kernels), strict=True):
        part = "products_ms" if PRODUCT.search(kernel.name) else "rest_ms"
        part = "attention_ms" if ATTENTION.search(kernel.name) else part
        sums[part] += own / steps
        by_name.setdefault(kernel.name, []).append((kernel.duration, own))
    longest = sorted(by_name.items(), key=lambda item: -sum(own for _, own in item[1]))[:NAMED]
    table = [
        {
            "kernel": name[:80],
            "launches": len(times) / steps,
            "us": round(1e3 * statistics.median(duration for duration, _ in times), 2),
            "ms_per_step": round(sum(own for _, own in times) / steps, 4),
        }
        for name, times in longest
    ]
    launches = len(kernels) / steps
    return {"kernels_ms": sum(sums.values()), **sums, "launches": launches, "kernels": table}
