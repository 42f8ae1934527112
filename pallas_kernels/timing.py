"""What the kernels' benchmarks share: times of the device, its bandwidth, options and reports."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def prepare() -> None:
    """Settings that XLA reads before its first computation; those of the user are left alone.

    Kernels of a CUDA graph are not timed one by one, and torch needs memory beside jax.
    """
    os.environ.setdefault("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


@jax.jit
def _busy(x: Any) -> Any:
    """One kernel of a few milliseconds: behind it the host gets ahead of the device."""
    for _ in range(160):
        x = jnp.sin(x) + 0.5
    return x


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A launch as the profiler saw it; times in milliseconds."""

    name: str
    start: float
    duration: float


def trace(dispatch: Callable[[], Any]) -> list[Kernel]:
    """Every kernel of one call, which must have run before, in order of their starts (CUPTI's).

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
    kernels = [
        Kernel(event.name, event.start_ns / 1e6, event.duration_ns / 1e6)
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if (line.name or "").startswith("Stream")
        for event in line.events
    ]
    if not kernels:
        raise RuntimeError(f"no kernel in the profile: {[p.name for p in profile.planes]}")
    return sorted(kernels, key=lambda kernel: kernel.start)


def kernel_times(calls: Iterable[Callable[[], Any]]) -> tuple[float, dict[str, float]]:
    """Microseconds from the start of a call's first kernel to the end of its last, and per kernel.

    Medians. Kernels may overlap (programmatic dependent launches), so the times per kernel may add
    up to more than the call; what the device idles between them counts.
    """
    runs, wait = list(calls), jnp.ones(48 << 20, jnp.float32)
    jax.block_until_ready([_busy(wait), *(run() for run in runs[:2])])
    kernels = trace(lambda: [_busy(wait), *(run() for run in runs)])[1:]
    if not kernels or len(kernels) % len(runs):
        raise RuntimeError(f"{len(kernels)} kernels in {len(runs)} calls: not the same each")
    per_call = len(kernels) // len(runs)
    starts, durations = (
        1e3 * np.array([getattr(x, name) for x in kernels]).reshape(len(runs), per_call)
        for name in ("start", "duration")
    )
    names = [f"{i} {kernel.name}"[:60] for i, kernel in enumerate(kernels[:per_call])]
    each = np.median(durations, 0).round(2).tolist()
    span = (starts + durations).max(1) - starts[:, 0]
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


def parser(module: str, description: str) -> argparse.ArgumentParser:
    """With the options that every one of them has."""
    options = argparse.ArgumentParser(
        prog=f"python -m {module}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    options.add_argument("--out", type=Path, help="where the JSON goes, written after every row")
    options.add_argument("--check-only", action="store_true", help="compare, and time nothing")
    options.add_argument("--rows", type=int, nargs="*", help="indices of the cases to time")
    options.add_argument("--checks", type=int, nargs="*", help="indices of the checks to make")
    options.add_argument("--plot", type=Path, help="draw this JSON and do nothing else")
    return options


def passed(report: dict[str, Any], checks: Iterable[dict[str, Any]]) -> bool:
    """Put the checks' rows into the report, say them, and whether all of them passed."""
    report["checks"] = []
    for row in checks:
        report["checks"].append(row)
        print(row, flush=True)
    good = all(row["passed"] for row in report["checks"])
    if not good:
        print("a check failed: nothing is timed", file=sys.stderr)
    return good


def picked(cases: Sequence[Any], indices: Sequence[int] | None) -> list[Any]:
    """The cases of these indices, or all."""
    return list(cases) if indices is None else [cases[i] for i in indices]


def describe() -> dict[str, Any]:
    """Commit, device, versions and time of this process, as a report begins.

    BENCH_COMMIT in the environment names the commit of sources that lie outside a checkout.
    """
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
