"""The device that JAX computes on: what must be set before it starts, and what it has left."""

from __future__ import annotations

import os

import jax

GPU_MEMORY_FRACTION = "0.92"


def prepare() -> None:
    """Settings that the GPU backend reads from the environment when it starts.

    XLA takes 75 % of a GPU's memory by default; a server has it to itself, and what is left out is
    lost to the cache. A variable that is set already is left alone.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", GPU_MEMORY_FRACTION)


def is_gpu() -> bool:
    """Programs run on a GPU by default."""
    return jax.default_backend() == "gpu"


def free_bytes() -> int:
    """Memory that a new allocation may take: of the first device, or of the host on a CPU."""
    device = jax.local_devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats:
        return stats["bytes_limit"] - stats["bytes_in_use"]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def peak_bytes() -> int | None:
    """The most memory that was in use on the first device so far; None on a CPU."""
    stats = jax.local_devices()[0].memory_stats()
    return stats.get("peak_bytes_in_use") if stats else None
