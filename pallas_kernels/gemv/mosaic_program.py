"""The register programs of the product kernel: one warpgroup, 16 rows of the weight at a time.

S[16 weight rows, 8 rows of x] += W[16, 16] X^T[16, 8] by mma m16n8k16 (A = weight, B = x). A thread
reads 16 bytes of each of its two weight rows at once, 8 columns where the instruction's fragment
has four pieces of 2: the sum over columns may take them in any order, as long as x is read the
same way. The four warps take a quarter of a tile's columns each and are added at the end, always
in the same order. ``ops`` is ``lanes.Lanes``, or a warpgroup in NumPy in the tests.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

THREADS, WARPS = 128, 4
UNIT = 16  # rows of the weight
MOST_ROWS = 8  # of x: the N of the instruction
STATE = 8  # accumulator registers: two sets, so that half of the instructions wait for each other
SUMS = WARPS * UNIT * MOST_ROWS * 4  # bytes of scratch to add the warps


@dataclasses.dataclass(frozen=True)
class Shape:
    """What is static in a product: x [rows, width], tiles of 16 by ``columns``.

    ``gated``: the upper 8 rows of a unit belong to the gate, the lower 8 to what it multiplies.
    """

    rows: int
    width: int
    columns: int
    outs: int
    gated: bool = False
    eps: float | None = None  # of the norm; None: x is BF16 and taken as it is
    residual: bool = False


def prologue(ops: Any, shape: Shape, x: Any, gain: Any, scratch: Any, out: Any) -> None:
    """x, normed if it is to be, as BF16 [rows, width] in shared memory.

    Args:
        x: f32 (with eps) or BF16 [rows, width] in global memory. gain: BF16 [width], or None.
        scratch: f32[4] per warp of shared memory.
    """
    pieces = shape.width // (4 * THREADS)
    for row in range(shape.rows):
        at = ops.imul(ops.thread, 8)
        if shape.eps is None:
            for i in range(pieces):
                plus = row * shape.width * 2 + i * 8 * THREADS
                ops.store(out, ops.iadd(at, plus), ops.load(x, at, 2, plus))
            continue
        values = []
        for i in range(pieces):
            plus = row * shape.width * 4 + i * 16 * THREADS
            held = ops.load(x, ops.imul(ops.thread, 16), 4, plus)
            values.append([ops.bits_f32(v) for v in held])
        total = ops.const_f(0.0)
        for value in values:
            for v in value:
                total = ops.fma(v, v, total)
        for distance in (16, 8, 4, 2, 1):
            total = ops.fadd(total, ops.shfl_xor(total, distance))
        ops.store(scratch, ops.imul(ops.warp, 4), [total])
        ops.barrier()
        parts = [ops.bits_f32(v) for v in ops.load(scratch, ops.const_i(0), 4)]
        ops.barrier()  # read by all, before the next row's
        total = ops.fadd(ops.fadd(parts[0], parts[1]), ops.fadd(parts[2], parts[3]))
        mean = ops.fma(total, ops.const_f(1.0 / shape.width), ops.const_f(shape.eps))
        scale = ops.ex2(ops.fmul(ops.lg2(mean), ops.const_f(-0.5)))
        for i, value in enumerate(values):
            plus = row * shape.width * 2 + i * 8 * THREADS
            gains = []
            for pair in ops.load(gain, at, 2, i * 8 * THREADS):
                gains += [ops.bits_f32(ops.shl(pair, 16)), ops.bits_f32(ops.iand(pair, -65536))]
            normed = [ops.fmul(g, ops.fmul(v, scale)) for g, v in zip(gains, value, strict=True)]
            packed = [ops.pack_bf16(normed[0], normed[1]), ops.pack_bf16(normed[2], normed[3])]
            ops.store(out, ops.iadd(at, plus), packed)
    ops.barrier()


def tile(ops: Any, shape: Shape, weight: Any, x: Any, first: Any, state: list[Any]) -> list[Any]:
    """``state`` plus the product of a tile BF16 [16, columns] in shared memory.

    Args:
        x: of ``prologue``. first: the tile's first column, i32.
    """
    columns = shape.columns
    lane = ops.iadd(ops.imul(ops.warp, columns // WARPS * 2), ops.imul(ops.t, 32))
    at = ops.iadd(ops.imul(ops.g, columns * 2), lane)
    row = ops.imin(ops.g, shape.rows - 1)  # columns of the sums that nobody reads
    at_x = ops.iadd(ops.iadd(ops.imul(row, shape.width * 2), ops.imul(first, 2)), lane)
    sums = [state[:4], state[4:]]
    for block in range(columns // (64 * WARPS)):
        for half in range(2):
            plus = block * 128 + half * 16
            upper = ops.load(weight, at, 4, plus)
            lower = ops.load(weight, at, 4, plus + 8 * columns * 2)
            right = ops.load(x, at_x, 4, plus)
            for i in (0, 2):
                left = [upper[i], lower[i], upper[i + 1], lower[i + 1]]
                sums[half] = ops.mma_bf16(sums[half], left, right[i : i + 2])
    return sums[0] + sums[1]


def finish(
    ops: Any, shape: Shape, unit: Any, state: list[Any], scratch: Any, residual: Any, out: Any
) -> None:
    """Add the warps, and store the unit's outputs.

    Args:
        unit: which of the weight's units. scratch: ``SUMS`` bytes of shared memory.
        residual: f32 [rows, outs], or None. out: f32 [rows, outs]; BF16 [rows, outs] if gated.
    """
    sums = [ops.fadd(a, b) for a, b in zip(state[:4], state[4:], strict=True)]
    twice = ops.imul(ops.t, 2)
    at = ops.imul(ops.iadd(ops.imul(ops.warp, MOST_ROWS), twice), UNIT * 4)
    at = ops.iadd(at, ops.imul(ops.g, 4))
    for i, value in enumerate(sums):
        ops.store(scratch, ops.iadd(at, (i & 1) * UNIT * 4 + (i >> 1) * 32), [value])
    ops.barrier()
    line = ops.imul(ops.thread, 4)  # of scratch: row of x, then row of the unit

    def total(plus: int) -> Any:
        parts = [
            ops.bits_f32(ops.load(scratch, line, 1, w * UNIT * MOST_ROWS * 4 + plus)[0])
            for w in range(WARPS)
        ]
        return ops.fadd(ops.fadd(parts[0], parts[1]), ops.fadd(parts[2], parts[3]))

    row, place = ops.shr(ops.thread, 4), ops.iand(ops.thread, UNIT - 1)
    exists = ops.less(row, shape.rows)
    if not shape.gated:
        index = ops.iadd(ops.imul(ops.imin(row, shape.rows - 1), shape.outs), place)
        index = ops.imul(ops.iadd(index, ops.imul(unit, UNIT)), 4)
        value = total(0)
        if shape.residual:
            value = ops.fadd(ops.bits_f32(ops.load(residual, index, 1)[0]), value)
        ops.store(out, index, [value], where=exists)
        return
    half = UNIT // 2
    line = ops.iadd(ops.imul(row, UNIT * 4), ops.imul(ops.iand(place, half - 1), 4))
    gate, up = total(0), total(half * 4)
    one_more = ops.fadd(ops.ex2(ops.fmul(gate, ops.const_f(-math.log2(math.e)))), ops.const_f(1.0))
    value = ops.fmul(ops.fmul(gate, ops.rcp(one_more)), up)
    pair = ops.pack_bf16(value, ops.shfl_xor(value, 1))
    first = ops.and_(ops.less(ops.iand(place, 1), 1), ops.less(place, half))
    index = ops.iadd(ops.imul(ops.imin(row, shape.rows - 1), shape.outs), place)
    index = ops.imul(ops.iadd(index, ops.imul(unit, half)), 2)
    ops.store(out, index, [pair], where=ops.and_(exists, first))
