"""Products of a warpgroup and what the prefill kernels share around them.

Row vectors are f32[64] in ``ROW``, accumulators f32[64, .] in ``Layout.WGMMA``. ``scores`` and
``weighted`` are wgmma on a GPU and jnp in interpret mode, which does not know wgmma with an operand
in registers; copies, barriers and masks around them are the same in both.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.format import PAGE
from pallas_kernels.layout import Windows

ROWS = 64  # of a consumer: the rows of a wgmma
CONSUMERS = 2
BLOCK_ROWS = ROWS * CONSUMERS
LOWEST = -1e25  # the maximum of a row that has seen nothing: exp2(MASKED - LOWEST) = 0
TILED: Any = (
    plgpu.TilingTransform((8, 64)),  # type: ignore[abstract]
    plgpu.SwizzleTransform(128),  # type: ignore[abstract]
)
PARAMS = plgpu.CompilerParams(
    approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
)
ROW = plgpu.Layout.WGMMA.reduce(1)


def scores(q: list[Any], k: Any, interpret: bool) -> Any:
    """The sum of q k^T over the terms of q, float32."""
    if interpret:
        product = sum(
            lax.dot_general(
                term[...].astype(jnp.float32),
                k[...].astype(jnp.float32),
                (((1,), (1,)), ((), ())),
                precision=lax.Precision.HIGHEST,
            )
            for term in q
        )
        plgpu.commit_smem()  # loads before a later copy; wgmma is ordered by its own wait
        return product

    def run(sums: Any) -> Any:
        for term in q:
            plgpu.wgmma(sums, term, k.transpose((1, 0)))
        return sums[...]

    return pl.run_scoped(run, plgpu.ACC((q[0].shape[0], k.shape[0]), jnp.float32))


def weighted(out: Any, p: Any, v: Any, interpret: bool, transposed: bool) -> Any:
    """out + p v; v is [tokens, Dv], or [Dv, tokens] if ``transposed``."""
    if interpret:
        product = lax.dot_general(
            p[...].astype(jnp.float32),
            v[...].astype(jnp.float32),
            (((1,), (1 if transposed else 0,)), ((), ())),
            precision=lax.Precision.HIGHEST,
        )
        plgpu.commit_smem()
        return out + product

    def run(sums: Any) -> None:
        plgpu.wgmma(sums, p, v.transpose((1, 0)) if transposed else v)

    return pl.run_state(run)(plgpu.ACC.init(out))


def store(ref: Any, value: Any) -> None:
    """Store registers to global memory as they lie, not in whole cache lines.

    jax 0.11 always does; jax 0.12 refuses to unless asked by a function that 0.11 does not have.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def filled(shape: tuple[int, ...], value: float, layout: Any) -> Any:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def over(x: Any, shape: tuple[int, ...]) -> Any:
    """A number per row, over the row."""
    return lax.broadcast_in_dim(x, shape, [0])


def position_of(row: Any, group: int, length: Any, new: Any) -> Any:
    """Of row (position, head of the group) ``row`` of a chunk; past q_lens the last one's."""
    query = jnp.minimum(lax.div(row, jnp.int32(group)), jnp.maximum(new - 1, 0))
    return length - new + query


def visible_pages(n: Any, windows: Windows) -> Any:
    """``Windows.visible_pages`` in operations that a kernel's row vectors have."""
    past = jnp.maximum(n - windows.sink - windows.recent, 0)
    return lax.div(past, jnp.int32(PAGE))
