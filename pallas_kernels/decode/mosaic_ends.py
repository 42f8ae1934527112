"""Before and after the decode kernel: the query's transform and packing, and the merge.

One warpgroup per row and block of heads, as register programs (see ``mosaic_fragments``). XLA does
the same with a dozen launches of 1 to 5 us each, as long as a whole step of a short sequence.
Products with X_Q and X_O are float32 fused multiply-adds.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from pallas_kernels.decode import mosaic_bytes
from pallas_kernels.decode.mosaic_keys import lane_number
from pallas_kernels.decode.mosaic_shape import HEADS, MASKED, WARPS, Shape, key_pieces

THREADS = 128
EARLY_ROWS = 32  # 128 registers
SMALL = 4 * WARPS * HEADS * 4  # bytes of scratch for sums across warps
ALONE = 64  # partial results on their way to a block of one head at once: a register each


@dataclasses.dataclass(frozen=True)
class Heads:
    """Which query heads a block holds: ``size`` of the ``group`` heads of a KV head, or fewer."""

    group: int
    size: int

    @property
    def used(self) -> int:
        """Columns worth computing: 4 or 8."""
        return 4 if self.size <= 4 else 8


def matrix_scratch(columns: int) -> int:
    """Bytes that ``_times_matrix`` needs for 1, 4 or 8 columns: every thread's sums."""
    return THREADS * columns * 4 * 4


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


def mean_of(ops: Any, dim: int, mu: Any) -> list[Any]:
    """The channels of a mean that a thread multiplies: dim / 16, read early too."""
    at = ops.imul(ops.shr(ops.thread, 3), dim // 4)
    return [x for i in range(dim // 64) for x in ops.load(mu, at, 4, 16 * i)]


def _pairs(ops: Any, dim: int) -> list[tuple[Any, Any]]:
    """(head of the block, pair of its channels) of what a thread reads of the query."""
    own = [ops.iadd(ops.thread, i * THREADS) for i in range(dim // 32)]
    return [(ops.shr(i, (dim // 2).bit_length() - 1), ops.iand(i, dim // 2 - 1)) for i in own]


def query_words(ops: Any, dim: int, bf16: bool, block: list[Any], q: Any) -> list[Any]:
    """A thread's share of a row's query [N, D]: dim / 32 registers of BF16 pairs, or twice that."""
    first, count = block
    found = []
    for head, pair in _pairs(ops, dim):
        row = ops.iadd(first, ops.select_i(ops.less(head, count), head, ops.const_i(0)))
        place = ops.iadd(ops.imul(row, dim), ops.imul(pair, 2))
        found += ops.load(q, ops.imul(place, 2), 1) if bf16 else ops.load(q, ops.imul(place, 4), 2)
    return found


def _columns(ops: Any, count: int, dim: int) -> list[tuple[Any, Any, Any]]:
    """(number, column, first channel) of the groups of 4 outputs that this thread has."""
    groups = dim // 4
    total = count * groups
    out = []
    for i in range(-(-total // THREADS)):
        index = ops.iand(ops.iadd(ops.thread, i * THREADS), total - 1)
        head = ops.shr(index, groups.bit_length() - 1)
        out.append((index, head, ops.imul(ops.iand(index, groups - 1), 4)))
    return out


def _times_matrix(
    ops: Any, count: int, x: Any, matrix: Matrix, scratch: Any
) -> list[tuple[Any, Any, list[Any]]]:
    """x matrix for f32 x[count, dim] in shared memory and matrix[dim, dim] in global memory.

    A thread takes 4 channels of the product and an equal part of the rows; the parts are added
    through ``scratch``. Returns (column, first of 4 channels, 4 sums) of what this thread adds up.
    """
    dim = matrix.dim
    groups = dim // 4  # of 4 channels
    parts, rows = THREADS // groups, matrix.share(dim)
    channel = ops.iand(ops.thread, groups - 1)
    part = ops.shr(ops.thread, groups.bit_length() - 1)
    sums = [[ops.const_f(0.0)] * 4 for _ in range(count)]
    at_x = ops.imul(part, rows * 4)
    for first in range(0, rows, 4):
        values = [matrix.row(ops, first + i) for i in range(4)]
        for column in range(count):
            weights = ops.load(x, at_x, 4, (column * dim + first) * 4)
            for weight, row in zip(weights, values, strict=True):
                sums[column] = [
                    ops.fma(ops.bits_f32(weight), v, s)
                    for v, s in zip(row, sums[column], strict=True)
                ]
    plane = count * dim * 4
    own = ops.iadd(ops.imul(part, plane), ops.imul(channel, 16))
    for column in range(count):
        ops.store(scratch, ops.iadd(own, column * dim * 4), sums[column])
    ops.barrier()
    out = []
    for index, column, first in _columns(ops, count, dim):
        at = ops.imul(index, 16)
        added = [ops.bits_f32(v) for v in ops.load(scratch, at, 4)]
        for other in range(1, parts):
            more = ops.load(scratch, at, 4, other * plane)
            added = [ops.fadd(a, ops.bits_f32(b)) for a, b in zip(added, more, strict=True)]
        out.append((column, first, added))
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


def _pack_halves(
    ops: Any, shape: Shape, used: Any, row_at: Any, largest: Any, q: Any, out: Any
) -> list[Any]:
    """The block's queries as float16 operands; lane g's constants [4]."""
    zero = ops.const_f(0.0)
    exponent = ops.iadd(ops.shr(ops.f32_bits(largest), 23), -126)
    exponent = ops.imax(ops.imin(exponent, 60), -60)  # largest < 2^exponent
    to_grid = _power_of_two(ops, ops.isub(ops.const_i(6), exponent))
    unit = ops.iadd(exponent, 18 - int(math.log2(shape.key_factor)))
    totals = [zero] * shape.segments
    for step, halves in enumerate(shape.key_steps()):
        words = []
        for operand in halves:
            if operand is None:
                words.append(ops.const_i(0))
                continue
            segment, ratio = operand.segment, operand.read.factor / shape.key_factor
            channel = key_pieces(shape)[operand.piece].channel
            at = ops.iadd(row_at, lane_number(ops, channel, 4))
            pair = ops.load(q, at, 2, operand.channel * 4)
            grid = ops.fmul(to_grid, ops.const_f(1 / ratio))
            x = [ops.select(used, ops.fmul(ops.bits_f32(v), grid), zero) for v in pair]
            word = ops.pack_f16(*x)
            words.append(word)
            if operand.read.above:  # a code in two fields is counted once
                continue
            for half in (word, ops.shr(word, 16)):
                totals[segment] = ops.fma(ops.f16_lo(half), ops.const_f(ratio), totals[segment])
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
    return constants


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
    means: list[Any],
    query: list[Any],
) -> None:
    """``mosaic_gpu.pack_query`` of q X_Q, and q.mu.

    Args:
        block: the first query head of the block, and how many of its heads exist.
        inputs: q [N, D] of the row and X_Q f32[D, D] of the KV head.
        scratch: f32[8, D], ``matrix_scratch`` and ``SMALL`` bytes of shared memory.
        outputs: operands, constants f32[4, 8], shift f32[8]. rows: ``Matrix.rows`` of X_Q.
        means: ``mean_of`` the KV head's mu. query: ``query_words``, or nothing: to be read here.
    """
    q_ref, x_q = inputs
    _, count = block
    q, sums, small = scratch
    out, out_constants, out_shift = outputs
    dim = shape.head_dim
    matrix = Matrix(dim, x_q, rows)
    zero = ops.const_f(0.0)
    ops.barrier()  # the row before is done with the scratch
    words = query or query_words(ops, dim, bf16, block, q_ref)
    for i, (head, _) in enumerate(_pairs(ops, dim)):
        if bf16:
            both = words[i]
            values = [ops.bits_f32(ops.shl(both, 16)), ops.bits_f32(ops.iand(both, -65536))]
        else:
            values = [ops.bits_f32(x) for x in words[2 * i : 2 * i + 2]]
        exists = ops.less(head, count)
        scaled = [ops.select(exists, ops.fmul(x, ops.const_f(scale)), zero) for x in values]
        ops.store(q, ops.imul(ops.iadd(ops.thread, i * THREADS), 8), scaled)
    ops.barrier()

    head = ops.iand(ops.thread, HEADS - 1)
    own = ops.imul(head, 4)
    part = ops.imul(ops.shr(ops.thread, 3), dim // 4)  # bytes of the channels of ``means``
    at, shift = ops.iadd(ops.imul(head, dim * 4), part), zero
    held = [x for i in range(dim // 64) for x in ops.load(q, at, 4, 16 * i)]
    for x, mean in zip(held, means, strict=True):
        shift = ops.fma(ops.bits_f32(x), ops.bits_f32(mean), shift)
    shift = _across(ops, shift, ops.fadd, small, 0)
    ops.store(out_shift, own, [shift])

    turned = _times_matrix(ops, heads.used, q, matrix, sums)
    used = ops.less(ops.g, heads.used)
    row_at = ops.imul(ops.select_i(used, ops.g, ops.const_i(0)), dim * 4)
    for head, column, values in turned:
        at = ops.imul(ops.iadd(ops.imul(head, dim), column), 4)
        ops.store(q, at, values)  # every thread is past its last read of q
    if mosaic_bytes.as_bytes(shape):
        ops.barrier()
        constants = mosaic_bytes.pack(ops, shape, used, row_at, q, out)
    else:
        largest = zero
        for _, _, values in turned:
            for x in values:
                largest = ops.fmax(largest, ops.fmax(x, ops.fneg(x)))
        for distance in (1, 2, 4):
            largest = ops.fmax(largest, ops.shfl_xor(largest, distance))
        largest = _across(ops, largest, ops.fmax, small, 1)
        constants = _pack_halves(ops, shape, used, row_at, largest, q, out)
    for i, value in enumerate(constants):
        ops.store(out_constants, ops.iadd(ops.imul(ops.g, 4), i * HEADS * 4), [value])


def join_scratch(v_head_dim: int, columns: int, splits: int, turned: bool) -> tuple[int, ...]:
    """Bytes of shared memory: scales, small sums, BF16 output; the pages' output, its product's."""
    side = v_head_dim * columns * 4
    own = (splits * HEADS * 4, SMALL, side)
    return (*own, side, matrix_scratch(columns)) if turned else own


def join(
    ops: Any,
    v_head_dim: int,
    heads: Heads,
    alone: bool,
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
        alone: whether this is one head of the block and not all of them.
        all_splits: of BF16 tokens, which come first, and of these and INT2 pages together.
        block: the first query head of the block, how many of its heads exist, and the one that is
            alone or 0.
        inputs: partial outputs f32[splits, used, Dv] and f32[splits, 2, 8] (max, sum); with INT2
            pages also their shift f32[8] and X_O f32[Dv, Dv].
        out: the row's [N, Dv], BF16 or float32. rows: ``Matrix.rows`` of X_O, if there is one.
    """
    partial, ml, *turn = inputs
    first_head, count, first_column = block
    window_splits, splits = all_splits
    scales, small, windows, *turning = scratch
    dim, zero = v_head_dim, ops.const_f(0.0)
    matrix = Matrix(dim, turn[1], rows) if turn else None
    columns = 1 if alone else heads.used
    width = 1 if alone else 4  # channels of a thread's outputs
    units = columns * dim // width
    places = []
    for i in range(-(-units // THREADS)):
        index = ops.iand(ops.iadd(ops.thread, i * THREADS), units - 1)
        column = ops.iadd(ops.shr(index, (dim // width).bit_length() - 1), first_column)
        at = ops.imul(ops.iadd(ops.imul(first_column, dim // width), index), 4 * width)
        places.append((ops.imul(index, 4 * width), ops.imul(column, 4), at))

    def part_of(split: int, at: Any) -> list[Any]:
        return ops.load(partial, at, width, split * dim * heads.used * 4)

    early = {}  # on their way while the scales are computed
    if alone and len(places) * splits <= ALONE:
        early = {(s, i): part_of(s, x[2]) for i, x in enumerate(places) for s in range(splits)}
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

    targets = [(windows, range(window_splits))]
    if turn:
        targets.append((turning[0], range(window_splits, splits)))
    for i, (target_at, scale_at, at) in enumerate(places):
        for target, some in targets:
            added = [zero] * width
            for split in some:
                x = early[split, i] if early else part_of(split, at)
                weight = ops.bits_f32(ops.load(scales, scale_at, 1, split * HEADS * 4)[0])
                added = [ops.fma(ops.bits_f32(a), weight, c) for a, c in zip(x, added, strict=True)]
            ops.store(target, target_at, added)
    ops.barrier()
    if matrix is None:
        turned = [(c, at, [zero] * 4) for _, c, at in _columns(ops, columns, dim)]
    else:
        turned = _times_matrix(ops, columns, turning[0], matrix, turning[1])
    for column, channel, values in turned:
        near = ops.load(windows, ops.imul(ops.iadd(ops.imul(column, dim), channel), 4), 4)
        head = ops.iadd(column, first_column)
        factor = ops.bits_f32(ops.load(small, ops.imul(head, 4), 1, 2 * WARPS * HEADS * 4)[0])
        result = [
            ops.fmul(ops.fadd(x, ops.bits_f32(w)), factor)
            for x, w in zip(values, near, strict=True)
        ]
        place = ops.iadd(ops.imul(ops.iadd(first_head, head), dim), channel)
        exists = ops.less(head, count)
        if bf16:
            words = [ops.pack_bf16(*result[:2]), ops.pack_bf16(*result[2:])]
            ops.store_bits(out, ops.imul(place, 2), words, exists)
        else:
            ops.store(out, ops.imul(place, 4), result, exists)
