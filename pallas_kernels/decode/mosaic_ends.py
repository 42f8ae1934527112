"""Before and after the decode kernel: the query's transform and packing, and the merge.

One warpgroup per row and block of heads, as register programs (see ``mosaic_fragments``). XLA does
the same with a dozen launches of 1 to 5 us each, as long as a whole step of a short sequence.
Products with X_Q and X_O are float32 fused multiply-adds.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from pallas_kernels.decode.mosaic_fragments import HEADS, MASKED, WARPS, Shape

THREADS = 128
EARLY_ROWS = 32  # 128 registers
SMALL = 4 * WARPS * HEADS * 4  # bytes of scratch for sums across warps


@dataclasses.dataclass(frozen=True)
class Heads:
    """Which query heads a block holds: ``size`` of the ``group`` heads of a KV head, or fewer."""

    group: int
    size: int

    @property
    def used(self) -> int:
        """Columns worth computing: 4 or 8."""
        return 4 if self.size <= 4 else 8


def matrix_scratch(heads: Heads) -> int:
    """Bytes that ``_times_matrix`` needs: every thread's sums."""
    return THREADS * heads.used * 4 * 4


@dataclasses.dataclass(frozen=True)
class Matrix:
    """f32[dim, dim] in global memory, of which a thread multiplies 4 columns of some rows.

    ``early`` are its first rows, read before anything else so that their way overlaps the rest.
    """

    dim: int
    pointer: Any
    early: list[list[Any]]

    @classmethod
    def rows(cls, ops: Any, dim: int, pointer: Any) -> list[list[Any]]:
        """The first rows of a thread's share."""
        at = cls.first(ops, dim)
        rows = range(min(EARLY_ROWS, cls.share(dim)))
        return [ops.load(pointer, at, 4, row * dim * 4) for row in rows]

    @staticmethod
    def share(dim: int) -> int:
        """Rows of a thread: dim / 4 threads take the columns, the others the next rows."""
        return dim * dim // 4 // THREADS

    @classmethod
    def first(cls, ops: Any, dim: int) -> Any:
        """Byte offset of this thread's first row and column."""
        part = ops.shr(ops.thread, (dim // 4).bit_length() - 1)
        column = ops.iand(ops.thread, dim // 4 - 1)
        return ops.iadd(ops.imul(part, cls.share(dim) * dim * 4), ops.imul(column, 16))

    def row(self, ops: Any, row: int) -> list[Any]:
        if row < len(self.early):
            held = self.early[row]
        else:
            held = ops.load(self.pointer, self.first(ops, self.dim), 4, row * self.dim * 4)
        return [ops.bits_f32(x) for x in held]


def _columns(ops: Any, heads: Heads, dim: int) -> list[tuple[Any, Any, Any]]:
    """(number, head, first column) of the groups of 4 outputs that this thread has."""
    groups = dim // 4
    total = heads.used * groups
    out = []
    for i in range(-(-total // THREADS)):
        index = ops.iand(ops.iadd(ops.thread, i * THREADS), total - 1)
        head = ops.shr(index, groups.bit_length() - 1)
        out.append((index, head, ops.imul(ops.iand(index, groups - 1), 4)))
    return out


def _times_matrix(
    ops: Any, heads: Heads, x: Any, matrix: Matrix, scratch: Any
) -> list[tuple[Any, Any, list[Any]]]:
    """x^T matrix for f32 x[dim, 8] in shared memory and matrix[dim, dim] in global memory.

    A thread takes 4 columns and an equal part of the rows; the parts are added through
    ``scratch``. Returns (head, first of 4 columns, 4 sums) of what this thread adds up.
    """
    dim = matrix.dim
    groups = dim // 4  # of 4 columns
    parts, rows = THREADS // groups, matrix.share(dim)
    column = ops.iand(ops.thread, groups - 1)
    part = ops.shr(ops.thread, groups.bit_length() - 1)
    zero = ops.const_f(0.0)
    sums = [[zero] * 4 for _ in range(heads.used)]
    at_x = ops.imul(part, rows * HEADS * 4)
    for row in range(rows):
        values = matrix.row(ops, row)
        for quad in range(heads.used // 4):
            held = ops.load(x, at_x, 4, (row * HEADS + 4 * quad) * 4)
            for i, weight in enumerate(held):
                head = 4 * quad + i
                sums[head] = [
                    ops.fma(ops.bits_f32(weight), v, s)
                    for v, s in zip(values, sums[head], strict=True)
                ]
    plane = heads.used * dim * 4
    own = ops.iadd(ops.imul(part, plane), ops.imul(column, 16))
    for head in range(heads.used):
        ops.store(scratch, ops.iadd(own, head * dim * 4), sums[head])
    ops.barrier()
    out = []
    for index, head, first in _columns(ops, heads, dim):
        at = ops.imul(index, 16)
        added = [ops.bits_f32(v) for v in ops.load(scratch, at, 4)]
        for other in range(1, parts):
            more = ops.load(scratch, at, 4, other * plane)
            added = [ops.fadd(a, ops.bits_f32(b)) for a, b in zip(added, more, strict=True)]
        out.append((head, first, added))
    return out


def _across(ops: Any, value: Any, combine: Any, small: Any, slot: int) -> Any:
    """A value combined over the threads of equal index modulo 8."""
    for distance in (8, 16):
        value = combine(value, ops.shfl_xor(value, distance))
    own = ops.imul(ops.iand(ops.lane, HEADS - 1), 4)
    base = slot * WARPS * HEADS * 4
    ops.store(small, ops.iadd(ops.iadd(own, ops.imul(ops.warp, HEADS * 4)), base), [value])
    ops.barrier()
    parts = [ops.bits_f32(ops.load(small, own, 1, base + w * HEADS * 4)[0]) for w in range(WARPS)]
    return combine(combine(parts[0], parts[1]), combine(parts[2], parts[3]))


def _power_of_two(ops: Any, exponent: Any) -> Any:
    return ops.bits_f32(ops.shl(ops.iadd(exponent, 127), 23))


def prepare(
    ops: Any,
    shape: Shape,
    heads: Heads,
    scale: float,
    bf16: bool,
    block: list[Any],
    inputs: tuple[Any, ...],
    scratch: tuple[Any, ...],
    outputs: tuple[Any, ...],
    rows: list[list[Any]],
) -> None:
    """``mosaic_gpu.pack_query`` of q X_Q, and q.mu.

    Args:
        block: the first query head of the block, and how many of its heads exist.
        inputs: q [N, D] of the row, X_Q f32[D, D] and mu f32[D] of the KV head.
        scratch: f32[D, 8], ``matrix_scratch`` and ``SMALL`` bytes of shared memory.
        outputs: operands, constants f32[4, 8], shift f32[8]. rows: ``Matrix.rows`` of X_Q.
    """
    q_ref, x_q, mu = inputs
    first_head, count = block
    q, sums, small = scratch
    out, out_constants, out_shift = outputs
    dim = shape.head_dim
    matrix = Matrix(dim, x_q, rows)
    zero = ops.const_f(0.0)
    ops.barrier()  # the row before is done with the scratch
    for i in range(dim // 32):  # pairs of channels
        index = ops.iadd(ops.thread, i * THREADS)
        head = ops.shr(index, (dim // 2).bit_length() - 1)
        pair = ops.iand(index, dim // 2 - 1)
        exists = ops.less(head, count)
        row = ops.iadd(first_head, ops.select_i(exists, head, ops.const_i(0)))
        place = ops.iadd(ops.imul(row, dim), ops.imul(pair, 2))
        if bf16:
            (both,) = ops.load(q_ref, ops.imul(place, 2), 1)
            values = [ops.bits_f32(ops.shl(both, 16)), ops.bits_f32(ops.iand(both, -65536))]
        else:
            values = [ops.bits_f32(x) for x in ops.load(q_ref, ops.imul(place, 4), 2)]
        for e in range(2):
            scaled = ops.select(exists, ops.fmul(values[e], ops.const_f(scale)), zero)
            at = ops.iadd(ops.imul(pair, 2 * HEADS * 4), ops.imul(head, 4))
            ops.store(q, ops.iadd(at, e * HEADS * 4), [scaled])
    ops.barrier()

    own = ops.imul(ops.iand(ops.thread, HEADS - 1), 4)
    part = ops.imul(ops.shr(ops.thread, 3), dim // 16)
    shift = zero
    for i in range(dim // 16):
        channel = ops.iadd(part, i)
        x = ops.bits_f32(ops.load(q, ops.iadd(ops.imul(channel, HEADS * 4), own), 1)[0])
        shift = ops.fma(x, ops.bits_f32(ops.load(mu, ops.imul(channel, 4), 1)[0]), shift)
    shift = _across(ops, shift, ops.fadd, small, 0)
    ops.store(out_shift, own, [shift])

    turned = _times_matrix(ops, heads, q, matrix, sums)
    largest = zero
    for head, column, values in turned:
        at = ops.imul(ops.iadd(ops.imul(head, dim), column), 4)
        ops.store(q, at, values)  # every thread is past its last read of q
        for x in values:
            largest = ops.fmax(largest, ops.fmax(x, ops.fneg(x)))
    for distance in (1, 2, 4):
        largest = ops.fmax(largest, ops.shfl_xor(largest, distance))
    largest = _across(ops, largest, ops.fmax, small, 1)

    exponent = ops.iadd(ops.shr(ops.f32_bits(largest), 23), -126)
    exponent = ops.imax(ops.imin(exponent, 60), -60)  # largest < 2^exponent
    to_grid = _power_of_two(ops, ops.isub(ops.const_i(6), exponent))
    unit = ops.iadd(exponent, 18 - int(math.log2(shape.key_factor)))
    used = ops.less(ops.g, heads.used)
    row_at = ops.imul(ops.select_i(used, ops.g, ops.const_i(0)), dim * 4)
    width = dim // 8
    totals = [zero] * shape.segments
    for step, (a, b, segment) in enumerate(shape.key_steps()):
        words = []
        for source in (a, b):
            if source is None:
                words.append(ops.const_i(0))
                continue
            code_block, register = source
            ratio = shape.blocks[code_block][2] / shape.key_factor
            at = ops.iadd(row_at, ops.imul(ops.t, width))
            pair = ops.load(q, at, 2, (code_block * width + 2 * register) * 4)
            grid = ops.fmul(to_grid, ops.const_f(1 / ratio))
            x = [ops.select(used, ops.fmul(ops.bits_f32(v), grid), zero) for v in pair]
            word = ops.pack_f16(*x)
            for half in (word, ops.shr(word, 16)):
                totals[segment] = ops.fma(ops.f16_lo(half), ops.const_f(ratio), totals[segment])
            words.append(word)
        ops.store_bits(out, ops.iadd(ops.imul(ops.lane, 8), step * 256), words)
    for i, total in enumerate(totals):
        for distance in (1, 2):
            total = ops.fadd(total, ops.shfl_xor(total, distance))
        totals[i] = ops.fmul(total, _power_of_two(ops, ops.iadd(exponent, -6)))
    constants = [_power_of_two(ops, unit)]
    if shape.codec == "uniform":
        constants += [totals[0], zero, zero]
    else:
        inverse = _power_of_two(ops, ops.isub(ops.const_i(0), unit))
        constants += [
            ops.fmul(ops.fmul(x, inverse), ops.const_f(-middle))
            for x, middle in zip(totals, shape.middles, strict=True)
        ]
    for i, value in enumerate(constants):
        ops.store(out_constants, ops.iadd(ops.imul(ops.g, 4), i * HEADS * 4), [value])


def join_scratch(v_head_dim: int, heads: Heads, splits: int, turned: bool) -> tuple[int, ...]:
    """Bytes of shared memory: scales, small sums, BF16 output; the pages' output, its product's."""
    side = v_head_dim * HEADS * 4
    own = (splits * HEADS * 4, SMALL, side)
    return (*own, side, matrix_scratch(heads)) if turned else own


def join(
    ops: Any,
    v_head_dim: int,
    heads: Heads,
    all_splits: tuple[int, int],
    bf16: bool,
    block: list[Any],
    inputs: tuple[Any, ...],
    scratch: tuple[Any, ...],
    out: Any,
    rows: list[list[Any]],
) -> None:
    """All splits of one block of heads: merged, the pages' part times X_O, normalised.

    Args:
        all_splits: of BF16 tokens, which come first, and of these and INT2 pages together.
        block: the first query head of the block, and how many of its heads exist.
        inputs: partial outputs f32[splits, Dv, used] and f32[splits, 2, 8] (max, sum); with INT2
            pages also their shift f32[8] and X_O f32[Dv, Dv].
        out: the row's [N, Dv], BF16 or float32. rows: ``Matrix.rows`` of X_O, if there is one.
    """
    partial, ml, *turn = inputs
    first_head, count = block
    window_splits, splits = all_splits
    scales, small, windows, *turning = scratch
    dim, zero = v_head_dim, ops.const_f(0.0)
    matrix = Matrix(dim, turn[1], rows) if turn else None
    ops.barrier()  # the row before is done with the scratch
    own = ops.imul(ops.iand(ops.thread, HEADS - 1), 4)
    part = ops.shr(ops.thread, 3)  # 16 threads share the splits of a head
    shift = ops.bits_f32(ops.load(turn[0], own, 1)[0]) if turn else zero
    held = []
    for i in range(-(-splits // 16)):
        split = ops.iadd(part, 16 * i)
        exists = ops.less(split, splits)
        at = ops.iadd(ops.imul(ops.imin(split, splits - 1), 2 * HEADS * 4), own)
        top = ops.bits_f32(ops.load(ml, at, 1)[0])
        l = ops.select(exists, ops.bits_f32(ops.load(ml, at, 1, HEADS * 4)[0]), zero)
        far = ops.select(ops.less(split, window_splits), zero, shift)
        seen = ops.positive(l)
        held.append((split, exists, ops.select(seen, ops.fadd(top, far), ops.const_f(MASKED)), l))
    top = ops.const_f(MASKED)
    for _, _, m, _ in held:
        top = ops.fmax(top, m)
    top = _across(ops, top, ops.fmax, small, 0)
    total = zero
    for split, exists, m, l in held:
        factor = ops.ex2(ops.fadd(m, ops.fneg(top)))
        total = ops.fma(l, factor, total)
        at = ops.iadd(ops.imul(split, HEADS * 4), own)
        ops.store(scales, at, [factor], exists)
    total = _across(ops, total, ops.fadd, small, 1)  # its barrier also orders the scales
    inverse = ops.rcp(ops.select(ops.positive(total), total, ops.const_f(1.0)))
    ops.store(small, ops.iadd(own, 2 * WARPS * HEADS * 4), [inverse])

    quads = dim * heads.used // 4  # of 4 heads of one channel
    for i in range(-(-quads // THREADS)):
        index = ops.iand(ops.iadd(ops.thread, i * THREADS), quads - 1)
        at = ops.imul(index, 16)
        target_at = ops.imul(index, 16 * HEADS // heads.used)
        scale_at = ops.const_i(0) if heads.used == 4 else ops.imul(ops.iand(index, 1), 16)
        targets = [(windows, range(window_splits))]
        if turn:
            targets.append((turning[0], range(window_splits, splits)))
        for target, some in targets:
            added = [zero] * 4
            for split in some:
                x = ops.load(partial, at, 4, split * dim * heads.used * 4)
                w = ops.load(scales, scale_at, 4, split * HEADS * 4)
                added = [
                    ops.fma(ops.bits_f32(a), ops.bits_f32(b), c)
                    for a, b, c in zip(x, w, added, strict=True)
                ]
            ops.store(target, target_at, added)
    ops.barrier()
    if matrix is None:
        places = _columns(ops, heads, dim)
        turned = [(head, column, [zero] * 4) for _, head, column in places]
    else:
        turned = _times_matrix(ops, heads, turning[0], matrix, turning[1])
    for head, column, values in turned:
        near = ops.iadd(ops.imul(column, HEADS * 4), ops.imul(head, 4))
        factor = ops.bits_f32(ops.load(small, ops.imul(head, 4), 1, 2 * WARPS * HEADS * 4)[0])
        result = [
            ops.fmul(
                ops.fadd(x, ops.bits_f32(ops.load(windows, near, 1, e * HEADS * 4)[0])), factor
            )
            for e, x in enumerate(values)
        ]
        place = ops.iadd(ops.imul(ops.iadd(first_head, head), dim), column)
        exists = ops.less(head, count)
        if bf16:
            words = [ops.pack_bf16(*result[:2]), ops.pack_bf16(*result[2:])]
            ops.store_bits(out, ops.imul(place, 2), words, exists)
        else:
            ops.store(out, ops.imul(place, 4), result, exists)
