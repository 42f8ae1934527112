"""A warp's running softmax, and how those of four warps become a block's partial result."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_kernels.decode.mosaic_shape import HEADS, WARPS


@dataclasses.dataclass
class State:
    """A warp's running softmax: reference m, sums l and of V's minima, outputs; 2 heads a lane."""

    m: list[Any]  # [2], equal in all lanes g
    l: list[Any]  # [2], this lane's tokens only
    minima: list[Any]  # [2], this lane's tokens only
    out: list[list[Any]]  # [Dv / 16][4]: row g or g + 8, head

    @classmethod
    def empty(cls, ops: Any, v_head_dim: int, reference: float) -> State:
        zero = ops.const_f(0.0)
        out = [[zero] * 4 for _ in range(v_head_dim // 16)]
        return cls([ops.const_f(reference)] * 2, [zero] * 2, [zero] * 2, out)

    def registers(self) -> list[Any]:
        return [*self.m, *self.l, *self.minima, *(x for row in self.out for x in row)]

    @classmethod
    def of(cls, registers: list[Any]) -> State:
        rows = registers[6:]
        out = [rows[i : i + 4] for i in range(0, len(rows), 4)]
        return cls(registers[:2], registers[2:4], registers[4:6], out)


def state_registers(v_head_dim: int) -> int:
    return 6 + v_head_dim // 4


def finish(
    ops: Any,
    state: State,
    scale: float,
    paired: bool,
    columns: int,
    scratch: Any,
    small: Any,
    out: Any,
    out_ml: Any,
) -> None:
    """Join the four warps and store out f32[columns, Dv] and max and sum f32[2, 8] of this block.

    Args:
        scale: of the outputs' sums. paired: whether columns c and c + 4 are the same head's.
        columns: 4 or 8, of which the outputs are stored.
        scratch: f32[4, Dv, 8] and small: f32[2, 4, 8] in shared memory; every earlier reader of
            them is past its last read when the first barrier here is passed.
    """
    v_head_dim = 16 * len(state.out)
    l, minima = [list(state.l), list(state.minima)]
    for pair in (l, minima):
        for e in range(2):
            for distance in (4, 8, 16):
                pair[e] = ops.fadd(pair[e], ops.shfl_xor(pair[e], distance))
    pair_at = ops.imul(ops.t, 8)
    own = ops.iadd(ops.imul(ops.warp, 4 * HEADS), pair_at)
    ops.barrier()
    ops.store(small, own, state.m)
    ops.barrier()
    halves = [0, 16] if paired else [0]  # what a column's bytes are XORed with

    def joined(memory: Any, at: Any, stride: int, first: int, combine: Any) -> list[Any]:
        """A pair of columns over all warps and halves, in pairs of equal distance."""
        parts = [
            [ops.bits_f32(x) for x in ops.load(memory, ops.xor(at, half), 2, (first + w) * stride)]
            for half in halves
            for w in range(WARPS)
        ]
        while len(parts) > 1:
            parts = [
                [combine(*x) for x in zip(*parts[i : i + 2], strict=True)]
                for i in range(0, len(parts), 2)
            ]
        return parts[0]

    top = joined(small, pair_at, 4 * HEADS, 0, ops.fmax)
    shrink = [ops.ex2(ops.fadd(state.m[e], ops.fneg(top[e]))) for e in range(2)]
    ops.store(
        small, ops.iadd(own, 4 * HEADS * WARPS), [ops.fmul(l[e], shrink[e]) for e in range(2)]
    )
    plane = v_head_dim * HEADS * 4
    base = ops.imul(ops.warp, plane)
    for mt, row in enumerate(state.out):
        for h in range(2):
            value = [
                ops.fmul(ops.fma(row[2 * h + e], ops.const_f(scale), minima[e]), shrink[e])
                for e in range(2)
            ]
            at = ops.iadd(ops.imul(ops.iadd(ops.g, 16 * mt + 8 * h), HEADS * 4), pair_at)
            ops.store(scratch, ops.iadd(base, at), value)
    ops.barrier()
    for i in range(v_head_dim * columns // 2 // 128):  # a channel of a pair of columns each
        index = ops.iadd(ops.thread, 128 * i)
        pair = ops.shr(index, v_head_dim.bit_length() - 1)
        channel = ops.iand(index, v_head_dim - 1)
        at = ops.iadd(ops.imul(channel, HEADS * 4), ops.imul(pair, 8))
        place = ops.imul(ops.iadd(ops.imul(pair, 2 * v_head_dim), channel), 4)
        for e, value in enumerate(joined(scratch, at, plane, 0, ops.fadd)):
            ops.store(out, ops.iadd(place, e * v_head_dim * 4), [value])
    total = joined(small, pair_at, 4 * HEADS, WARPS, ops.fadd)
    ops.store(out_ml, pair_at, top)  # every warp and lane g stores the same
    ops.store(out_ml, ops.iadd(pair_at, 4 * HEADS), total)
