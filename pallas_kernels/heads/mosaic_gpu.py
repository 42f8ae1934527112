"""``rotate`` and ``append`` of one token per row, as one launch each on Hopper and newer GPUs.

XLA makes ten kernels of a microsecond of them; a layer of an 8B model takes a hundred microseconds.
A warp has a head: lane i its channels i D/32 and following, so that the other half of a rotated
pair is 16 lanes away.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.device import device_multiprocessors
from pallas_kernels.lanes import program
from pallas_kernels.layout import LayerKV, Tables, Windows

WARPS, LANES = 4, 32
HEAD_DIMS = (64, 128, 256)
PARAMS = plgpu.CompilerParams(
    approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
)


def unsupported(queries: int, dims: tuple[int, ...], dtype: Any) -> str | None:
    """Why these kernels do not serve an input, or None."""
    if queries != 1:
        return f"{queries} tokens per row, it serves 1"
    if dtype != jnp.bfloat16:
        return f"heads in {jnp.dtype(dtype).name}, it makes bfloat16"
    for size in dims:
        if size not in HEAD_DIMS:
            return f"head_dim={size}, it serves {HEAD_DIMS}"
    return None


def _refuse(reason: str | None) -> None:
    if reason is None and device_multiprocessors() is None:
        reason = "it needs a GPU of compute capability 9.0 or newer"
    if reason is not None:
        raise NotImplementedError(f"mosaic_gpu does not serve this: {reason}; use 'xla'")


# ------------------------------------------------------------------------------------- programs


@dataclasses.dataclass(frozen=True)
class Shape:
    """Heads of a row: queries, keys and values of the same ``dim``; ``eps`` None: no norm."""

    heads: int
    kv_heads: int
    dim: int
    eps: float | None

    @property
    def total(self) -> int:
        return self.heads + 2 * self.kv_heads


def rotate_program(
    ops: Any, shape: Shape, block: Any, inputs: tuple[Any, ...], outputs: tuple[Any, ...]
) -> None:
    """Heads 4 ``block`` to 4 ``block`` + 3 of a row.

    Args:
        inputs: of the row: y f32[total, dim], cos and sin f32[dim/2]; gains BF16[dim] with eps.
        outputs: of the row: q [heads, dim], k and v [kv_heads, dim], BF16.
    """
    y, cos, sin, *gains = inputs
    own = shape.dim // LANES  # channels of a lane
    head = ops.iadd(ops.imul(block, WARPS), ops.warp)
    is_query = ops.less(head, shape.heads)
    plain = ops.less(ops.const_i(shape.heads + shape.kv_heads - 1), head)  # a value, or past them
    row = ops.imin(head, shape.total - 1)
    at = ops.iadd(ops.imul(row, shape.dim * 4), ops.imul(ops.lane, own * 4))

    def load(pointer: Any, offset: Any, count: int) -> list[Any]:
        size = min(count, 4)
        return [x for i in range(0, count, size) for x in ops.load(pointer, offset, size, 4 * i)]

    x = [ops.bits_f32(v) for v in load(y, at, own)]
    angle = ops.imul(ops.iand(ops.lane, LANES // 2 - 1), own * 4)
    turns = [[ops.bits_f32(v) for v in load(p, angle, own)] for p in (cos, sin)]
    one = ops.const_f(1.0)
    if shape.eps is not None:
        total = ops.const_f(0.0)
        for value in x:
            total = ops.fma(value, value, total)
        for distance in (16, 8, 4, 2, 1):
            total = ops.fadd(total, ops.shfl_xor(total, distance))
        mean = ops.fma(total, ops.const_f(1.0 / shape.dim), ops.const_f(shape.eps))
        scale = ops.select(plain, one, ops.ex2(ops.fmul(ops.lg2(mean), ops.const_f(-0.5))))
        both = [load(p, ops.imul(ops.lane, own * 2), own // 2) for p in gains]
        for i, pair in enumerate(zip(*both, strict=True)):
            chosen = ops.select_i(is_query, *pair)
            halves = ops.shl(chosen, 16), ops.iand(chosen, -65536)
            for e, half in enumerate(halves):
                gain = ops.select(plain, one, ops.bits_f32(half))
                x[2 * i + e] = ops.fmul(gain, ops.fmul(x[2 * i + e], scale))
    first = ops.less(ops.lane, LANES // 2)
    out = []
    for value, c, s in zip(x, *turns, strict=True):
        other = ops.shfl_xor(value, LANES // 2)
        s = ops.select(first, ops.fneg(s), s)
        out.append(ops.select(plain, value, ops.fma(value, c, ops.fmul(other, s))))
    packed = [ops.pack_bf16(out[i], out[i + 1]) for i in range(0, own, 2)]
    firsts = (0, shape.heads, shape.heads + shape.kv_heads, shape.total)
    for index, pointer in enumerate(outputs):
        low, high = firsts[index : index + 2]
        mine = ops.and_(ops.less(ops.const_i(low - 1), head), ops.less(head, high))
        place = ops.imul(ops.iadd(head, -low), shape.dim * 2)
        ops.store(pointer, ops.iadd(place, ops.imul(ops.lane, own * 2)), packed, where=mine)


def append_program(
    ops: Any,
    windows: Windows,
    dims: tuple[int, int],
    scalars: tuple[Any, ...],
    inputs: tuple[Any, ...],
    outputs: tuple[Any, ...],
) -> None:
    """One head of a row: warp 0 its key, warp 1 its value, 16 bytes a lane at a time.

    Args:
        scalars: tokens of the row, and how many of them are new (0 or 1).
        inputs: k [D], v [Dv]. outputs: sink_k, sink_v, tail_k, tail_v of the row's head, [rows, D].
    """
    length, new = scalars
    position = ops.isub(length, new)
    live = ops.less(ops.const_i(0), new)
    in_sink = ops.less(position, windows.sink)
    in_ring = ops.less(ops.const_i(windows.sink - 1), position)
    ahead = ops.imax(ops.iadd(position, -windows.sink), 0)
    ring_row = ops.urem(ahead, ops.const_i(windows.ring))
    sink_row = ops.imin(position, windows.sink - 1)
    at = ops.imul(ops.lane, 16)
    for side, dim in enumerate(dims):
        mine = ops.and_(ops.less(ops.warp, side + 1), ops.less(ops.const_i(side - 1), ops.warp))
        mine = ops.and_(ops.and_(mine, live), ops.less(ops.lane, dim // 8))
        held = ops.load(inputs[side], ops.imin(at, dim * 2 - 16), 4)
        for pointer, row, here in (
            (outputs[side], sink_row, in_sink),
            (outputs[2 + side], ring_row, in_ring),
        ):
            place = ops.iadd(ops.imul(row, dim * 2), at)
            ops.store(pointer, place, held, where=ops.and_(mine, here))


# -------------------------------------------------------------------------------------- launches


@functools.partial(jax.jit, static_argnames=("heads", "eps", "dtype"))
def rotate(
    y: Float[Array, "B Q all D"],
    cos: Float[Array, "B Q 1 H"],
    sin: Float[Array, "B Q 1 H"],
    q_gain: Float[Array, " D"] | None,
    k_gain: Float[Array, " D"] | None,
    *,
    heads: int,
    eps: float,
    dtype: Any,
) -> tuple[Array, Array, Array]:
    """See ``pallas_kernels.heads.api.rotate``; one token per row."""
    batch, queries, total, dim = y.shape
    _refuse(unsupported(queries, (dim,), dtype))
    normed = q_gain is not None and k_gain is not None
    shape = Shape(heads, (total - heads) // 2, dim, eps if normed else None)

    def rotate_kernel(*refs: Any) -> None:
        row = lax.axis_index("row")
        *inputs, q, k, v = refs
        own = [inputs[0].at[row], inputs[1].at[row], inputs[2].at[row], *inputs[3:]]
        outs = [ref.at[row] for ref in (q, k, v)]

        def run(ops: Any, pointers: Any, scalars: Any, _: Any) -> list[Any]:
            rotate_program(ops, shape, scalars[0], tuple(pointers[:-3]), tuple(pointers[-3:]))
            return []

        program(run, refs=[*own, *outs], scalars=[lax.axis_index("block")])

    out = lambda n: jax.ShapeDtypeStruct((batch, n, dim), jnp.bfloat16)  # noqa: E731
    kernel = plgpu.kernel(
        rotate_kernel,
        out_type=[out(shape.heads), out(shape.kv_heads), out(shape.kv_heads)],
        grid=(-(-total // WARPS), batch),
        grid_names=("block", "row"),
        compiler_params=PARAMS,
    )
    angles = [x.reshape(batch, dim // 2) for x in (cos, sin)]
    gains = [g.astype(jnp.bfloat16) for g in (q_gain, k_gain) if g is not None and normed]
    q, k, v = kernel(y.reshape(batch, total, dim), *angles, *gains)
    return q[:, None], k[:, None], v[:, None]


@functools.partial(jax.jit, static_argnames=("windows",))
def append(
    layer: LayerKV,
    k: Float[Array, "B Q K D"],
    v: Float[Array, "B Q K Dv"],
    tables: Tables,
    *,
    lengths: Int32[Array, " B"],
    q_lens: Int32[Array, " B"],
    windows: Windows,
) -> LayerKV:
    """See ``pallas_kernels.heads.api.append``; one token per row."""
    batch, queries, kv_heads, dim = k.shape
    dims = (dim, v.shape[-1])
    _refuse(unsupported(queries, dims, jnp.bfloat16))
    names = ("sink_k", "sink_v", "tail_k", "tail_v")
    pools = [jax.new_ref(getattr(layer, name)) for name in names]

    def append_kernel(*refs: Any) -> None:
        k, v, lengths, q_lens, slot, sink, *stores = refs
        row, head = lax.axis_index("row"), lax.axis_index("head")
        owners = (sink[row], sink[row], slot[row], slot[row])
        outs = [ref.at[owner, head] for ref, owner in zip(stores, owners, strict=True)]

        def run(ops: Any, pointers: Any, scalars: Any, _: Any) -> list[Any]:
            append_program(
                ops, windows, dims, tuple(scalars), tuple(pointers[:2]), tuple(pointers[2:])
            )
            return []

        program(
            run,
            refs=[k.at[row, 0, head], v.at[row, 0, head], *outs],
            scalars=[lengths[row], q_lens[row]],
        )

    kernel = plgpu.kernel(
        append_kernel,
        out_type=(),
        grid=(kv_heads, batch),
        grid_names=("head", "row"),
        compiler_params=PARAMS,
    )
    k, v = k.astype(jnp.bfloat16), v.astype(jnp.bfloat16)
    kernel(k, v, lengths, q_lens, tables.slot, tables.sink, *pools)
    return dataclasses.replace(
        layer, **{name: jax.freeze(pool) for name, pool in zip(names, pools, strict=True)}
    )
