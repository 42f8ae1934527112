"""What the kernels' benchmarks share: times of the device, its bandwidth, and reports.

Imported before the first computation: it sets two flags that XLA reads once, then.
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Kernels of a CUDA graph are not timed one by one; and torch needs memory beside jax.
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


@jax.jit
def _busy(x: Any) -> Any:
    """One kernel of a few milliseconds: behind it the host gets ahead of the device."""
    for _ in range(160):
        x = jnp.sin(x) + 0.5
    return x


def kernel_times(calls: Iterator[Callable[[], Any]]) -> tuple[float, dict[str, float]]:
    """Microseconds from the start of a call's first kernel to the end of its last, and per kernel.

    Medians, by CUPTI's time stamps. Kernels may overlap (programmatic dependent launches), so the
    times per kernel may add up to more than the call; what the device idles between them counts.
    """
    runs, wait = list(calls), jnp.ones(48 << 20, jnp.float32)
    jax.block_until_ready([_busy(wait), *(run() for run in runs[:2])])
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        try:
            jax.block_until_ready([_busy(wait), *(run() for run in runs)])
        finally:
            jax.profiler.stop_trace()
        (path,) = Path(folder).rglob("*.xplane.pb")
        trace = jax.profiler.ProfileData.from_file(str(path))
    kernels = sorted(
        (event.start_ns, event.start_ns + event.duration_ns, event.name)
        for plane in trace.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    )[1:]
    if not kernels or len(kernels) % len(runs):
        raise RuntimeError(f"{len(kernels)} kernels in {len(runs)} calls: not the same each")
    per_call = len(kernels) // len(runs)
    times = np.array([x[:2] for x in kernels]).reshape(len(runs), per_call, 2) / 1e3
    names = [f"{i} {name}"[:60] for i, (_, _, name) in enumerate(kernels[:per_call])]
    each = np.median(times[..., 1] - times[..., 0], 0).round(2).tolist()
    span = times[..., 1].max(1) - times[:, 0, 0]
    return float(np.median(span)), dict(zip(names, each, strict=True))


def read_bandwidth(gigabytes: int = 8) -> float:
    """TB/s of a kernel that copies an array into shared memory and does nothing with it."""
    rows, stages, blocks = gigabytes << 16, 6, 132 * 2  # rows of 16 KiB
    data = jax.random.bits(jax.random.key(0), (rows, 16, 256), jnp.uint32)

    def body(source: Any, out: Any, stage: Any, barriers: Any) -> None:
        block = lax.axis_index("block")
        turns = rows // blocks
        fetch = lambda i, slot: plgpu.copy_gmem_to_smem(  # noqa: E731
            source.at[block + i * blocks], stage.at[slot], barriers.at[slot]
        )
        for i in range(stages):
            fetch(i, i)

        def step(i: Any, carry: Any) -> Any:
            slot = lax.rem(i, jnp.int32(stages))
            plgpu.barrier_wait(barriers.at[slot])

            @pl.when(i + stages < turns)
            def _() -> None:
                fetch(i + stages, slot)

            return carry

        lax.fori_loop(0, turns, step, 0)
        out[block] = turns

    kernel = jax.jit(
        plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((blocks,), jnp.int32),
            scratch_types=[
                plgpu.SMEM((stages, 16, 256), jnp.uint32),
                plgpu.Barrier(num_barriers=stages),
            ],
            grid=(blocks,),
            grid_names=("block",),
        )
    )
    us, _ = kernel_times(functools.partial(kernel, data) for _ in range(8))
    return rows // blocks * blocks * 16 * 256 * 4 / us / 1e6


def describe() -> dict[str, Any]:
    """Commit, device, versions and time of this process, as a report begins."""
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    device = jax.devices()[0]
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
    return {
        "commit": os.environ.get("BENCH_COMMIT", commit) or "unknown",
        "device": device.device_kind,
        "versions": versions,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def save(report: dict[str, Any], path: Path | None) -> None:
    """Write what was measured so far: called after every row, so that nothing is lost."""
    if path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(report, indent=1) + "\n")
