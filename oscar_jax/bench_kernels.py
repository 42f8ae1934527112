"""Kernel times of a dispatch on a GPU, from JAX's profiler."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

# Products with the model's weights: ours, XLA's fusions and cuBLAS.
PRODUCT = re.compile(r"linear_kernel|gemm|gemv|_dot|nvjet|cublas|cutlass|splitK", re.IGNORECASE)
NAMED = 14  # kernels that a row lists

Timings = Sequence[tuple[str, float]]  # (kernel, milliseconds) in the order of their launches


def trace(dispatch: Callable[[], Any]) -> Timings:
    """Every kernel of one call, which must have run before.

    Raises:
        RuntimeError: the profile holds no kernel.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = options.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(dispatch())
        (file,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(file))
    events = [
        (event.start_ns, event.name, event.duration_ns / 1e6)
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if (line.name or "").startswith("Stream")
        for event in line.events
    ]
    if not events:
        raise RuntimeError(f"no kernel in the profile: {[p.name for p in profile.planes]}")
    return [(name, ms) for _, name, ms in sorted(events)]


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
