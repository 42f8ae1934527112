"""Writing whole pages on Hopper GPUs, in one launch of a Pallas Mosaic GPU kernel."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32

from pallas_kernels.device import SHARED_BYTES, device_multiprocessors
from pallas_kernels.format import Codec
from pallas_kernels.layout import LayerKV, PageJobs, Transform
from pallas_kernels.write import mosaic_kernel
from pallas_kernels.write.mosaic_kernel import Config, shared_bytes
from pallas_kernels.write.mosaic_shape import UNIT, Side

HEAD_DIMS = (64, 128, 256)
UNCLIPPED = 0.7  # what a page costs, of the time of one whose rows are clipped


def sides_of(head_dim: int, v_head_dim: int, codec: Codec) -> tuple[Side, Side]:
    """Keys and values as the programs take them."""
    return (
        Side(head_dim, codec.key, codec.clip_k, codec.gain, codec.key_bits),
        Side(v_head_dim, None, codec.clip_v, bits=codec.value_bits),
    )


def heuristic(sides: tuple[Side, Side], *, jobs: int, kv_heads: int, sm_count: int) -> Config:
    """One block per multiprocessor, shared out to keys and values by what their pages cost."""
    cost = [(UNCLIPPED if side.rank is None else 1.0) * side.dim for side in sides]
    blocks = max(2, sm_count // kv_heads)
    units = max(1, -(-jobs // UNIT))
    keys = min(max(1, round(blocks * cost[0] / sum(cost))), blocks - 1)
    streamed = any(side.streamed for side in sides)
    warpgroups = 2 if streamed else 4  # 128 numbers of a thread's two rows take 255 registers
    while shared_bytes(sides, warpgroups) > SHARED_BYTES - 2048:
        warpgroups -= 1
    return Config(min(units, keys), min(units, blocks - keys), warpgroups)


def unsupported(layer: LayerKV, transform: Transform | None) -> str | None:
    """Why this implementation does not serve an input, or None."""
    if not layer.is_packed or transform is None:
        return "the pages are BF16, it writes packed pages"
    for name, size in (("head_dim", layer.sink_k.shape[3]), ("v_head_dim", layer.v_head_dim)):
        if size not in HEAD_DIMS:
            return f"{name}={size}, it serves {HEAD_DIMS}"
    return None


@functools.partial(jax.jit, static_argnames=("codec", "config", "interpret"))
def write(
    layer: LayerKV,
    source_k: Float[Array, "X K H D"],
    source_v: Float[Array, "X K H Dv"],
    transform: Transform | None,
    jobs: PageJobs,
    *,
    codec: Codec | None,
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[LayerKV, Int32[Array, "2"]]:
    """See ``pallas_kernels.write.api.write``.

    Args:
        config: how the kernel is cut; None takes ``heuristic``.
        interpret: Pallas' interpret parameters, for machines without a GPU.

    Raises:
        NotImplementedError: the input, or the machine, is not served.
    """
    reason = unsupported(layer, transform)
    sm_count = device_multiprocessors(wgmma=True)
    if reason is None and sm_count is None and interpret is None:
        reason = "it needs a Hopper GPU (compute capability 9.x, wgmma)"
    if reason is not None or transform is None or codec is None:
        raise NotImplementedError(
            f"implementation='mosaic_gpu' of write: {reason}; use implementation='xla'"
        )
    if not len(jobs.page_id):
        return layer, jnp.zeros(2, jnp.int32)
    sides = sides_of(layer.sink_k.shape[3], layer.v_head_dim, codec)
    if config is None:
        config = heuristic(
            sides, jobs=len(jobs.page_id), kv_heads=source_k.shape[1], sm_count=sm_count or 132
        )
    source_k, source_v = (x.astype(jnp.bfloat16) for x in (source_k, source_v))
    pools, counts = mosaic_kernel.launch(
        layer,
        source_k,
        source_v,
        transform,
        jobs,
        codec=codec,
        sides=sides,
        config=config,
        interpret=interpret,
    )
    return dataclasses.replace(layer, **pools), counts
