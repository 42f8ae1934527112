"""(k - mu) X of a tile of 64 rows, as register programs of a warpgroup.

    k, as stored  ->  times a power of two of its own, exact in float16
    k X           ->  wgmma with X as a sum of two float16 terms (22 bits), sums in float32; X is in
                      shared memory, or comes through it in pieces (``Side.streamed``)
    (k - mu) X    ->  minus mu X, which the block has computed once, in float32

``ops`` are the instructions of one warpgroup (``mosaic_instructions.Instructions`` emits them; the
tests run the same functions on NumPy arrays of 128 threads). Lane 4g + t of a warp has rows g and
g + 8 of its 16. Which channel is which k is free, so a lane reads 16 bytes of a row at a time.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pallas_kernels.write.mosaic_shape import PIECE_STEPS, SHIFT, THREADS, Side

SCAN = 32  # rows of X that are on their way at a time
K_EXPONENT = 7  # a row's norm is 2^7 .. 2^8.5 in float16, X's largest 2^2 .. 2^3: sums of products
X_EXPONENT = 2  # stay below 2^15.5 and nothing is lost above 2^-20 of the row's norm
MOST_SCALE = 24  # a row is enlarged by at most 2^24


def operand_channels(dim: int) -> np.ndarray:
    """i32[steps, 2, 8]: the channel at place k of half a step of 16, as ``operands`` holds them."""
    step, half, t, e = np.ogrid[: dim // 16, :2, :4, :2]
    channel = 32 * (step // 2) + 8 * t + 4 * (step % 2) + 2 * half + e
    return channel.reshape(dim // 16, 2, 8)


def _biased(ops: Any, exponent: Any) -> Any:
    """float32 2^(exponent - 127)."""
    return ops.bits_f32(ops.shl(exponent, 23))


def _clamp(ops: Any, x: Any, least: int, most: int) -> Any:
    return ops.imax(ops.imin(x, most), least)


def _channel(ops: Any, side: Side, column: Any) -> Any:
    """``Side.channel`` of a register."""
    if not side.keys:
        return column
    words = side.dim // 8
    pair = ops.iand(ops.shr(column, 3), side.pairs - 1)
    block = ops.shr(column, words.bit_length() - 1)
    t = ops.iand(ops.shr(column, 1), 3)
    inner = ops.iadd(ops.imul(t, 2 * side.pairs), ops.iadd(ops.imul(pair, 2), ops.iand(column, 1)))
    return ops.iadd(ops.imul(block, words), inner)


def prepare(
    ops: Any, side: Side, x: Any, mu: Any, matrix: Any, held: Any, own: Any, share: int
) -> None:
    """X into shared memory as float16 terms, -mu X and the power of two that X was divided by.

    Args:
        x: f32[D, D] and mu: f32[D] (keys only) in global memory.
        matrix: B of ``wgmma_f16``; this warpgroup writes every ``share``-th 8 rows of X, from
            ``own`` on. held: the warpgroup's own shared memory (``Side.own_bytes``).
    """
    dim, zero = side.dim, ops.const_f(0.0)
    parts = THREADS // dim  # threads that share a column
    column = ops.iand(ops.thread, dim - 1)
    part = ops.shr(ops.thread, dim.bit_length() - 1)
    channel = ops.imul(_channel(ops, side, column), 4)
    rows = dim // parts

    def scan(i: Any, state: list[Any]) -> list[Any]:
        top, *sums = state
        row = ops.iadd(ops.imul(part, rows), ops.imul(i, SCAN))
        at = ops.iadd(ops.imul(row, dim * 4), channel)
        if side.keys:
            means = [v for c in range(SCAN // 4) for v in ops.load(mu, ops.imul(row, 4), 4, 16 * c)]
        values = [ops.bits_f32(ops.load(x, at, 1, r * dim * 4)[0]) for r in range(SCAN)]
        for r, value in enumerate(values):
            top = ops.fmax(top, ops.fabs(value))
            if side.keys:  # 8 sums: short chains round less
                sums[r % 8] = ops.fma(ops.bits_f32(means[r]), value, sums[r % 8])
        return [top, *sums]

    top, *sums = ops.loop(rows // SCAN, scan, [zero] * 9)
    while len(sums) > 1:
        sums = [ops.fadd(a, b) for a, b in zip(sums[::2], sums[1::2], strict=True)]
    for distance in (1, 2, 4, 8, 16):
        top = ops.fmax(top, ops.shfl_xor(top, distance))
    tops, scratch = SHIFT + 4 * dim, SHIFT + 4 * dim + 16
    ops.store(held, ops.iadd(ops.imul(ops.warp, 4), tops), [top])
    ops.store(held, ops.iadd(ops.imul(ops.thread, 4), scratch), sums)
    ops.barrier()
    zero_i = ops.const_i(0)
    for found in ops.load(held, zero_i, 4, tops):
        top = ops.fmax(top, ops.bits_f32(found))
    biased = ops.isub(ops.const_i(254 + X_EXPONENT), ops.shr(ops.f32_bits(top), 23))
    biased = _clamp(ops, biased, 1, 253)
    to_grid = _biased(ops, biased)
    total = zero
    for i in range(parts):
        at = ops.imul(column, 4)
        total = ops.fadd(total, ops.bits_f32(ops.load(held, at, 1, scratch + 4 * i * dim)[0]))
    shift = ops.fneg(ops.fmul(total, to_grid))
    ops.store(held, ops.iadd(ops.imul(column, 4), SHIFT), [shift])
    ops.store(held, zero_i, [_biased(ops, ops.isub(ops.const_i(254), biased))])

    octets = dim // 8

    for i in range(-(-octets // (share * parts))):
        octet = ops.iadd(ops.imul(ops.iadd(own, i * share), parts), part)
        exists = ops.less(octet, octets)
        octet = ops.imin(octet, octets - 1)
        row = ops.iadd(ops.imul(ops.shr(octet, 2), 32), ops.imul(ops.iand(octet, 1), 2))
        row = ops.iadd(row, ops.imul(ops.iand(ops.shr(octet, 1), 1), 4))
        at = ops.iadd(ops.imul(row, dim * 4), channel)
        high, low = [], []
        for t in range(4):
            pair = [ops.load(x, at, 1, (8 * t + e) * dim * 4)[0] for e in range(2)]
            pair = [ops.fmul(ops.bits_f32(v), to_grid) for v in pair]
            word = ops.pack_f16(*pair)
            rest = [
                ops.fadd(v, ops.fneg(ops.f16_lo(half)))
                for v, half in zip(pair, (word, ops.shr(word, 16)), strict=True)
            ]
            high.append(word)
            low.append(ops.pack_f16(*rest))
        place = ops.imul(ops.iadd(ops.imul(octet, dim), column), 16)
        ops.store(matrix, place, high, exists)
        ops.store(matrix, ops.iadd(place, dim * dim * 2), low, exists)


def keep_held(ops: Any, side: Side, given: Any, held: Any) -> None:
    """What ``mosaic_stream.operands`` gives beside the pieces, into the warpgroup's own memory."""
    at, exists = ops.imul(ops.thread, 16), ops.less(ops.thread, 1 + side.keys * side.dim // 4)
    at = ops.select_i(exists, at, ops.const_i(0))
    ops.store(held, at, ops.load(given, at, 4), exists)
    ops.barrier()


def copy_rows(ops: Any, side: Side, rows: list[Any], buffer: Any) -> None:
    """Have this lane's BF16 pairs of rows g and g + 8, D / 8 words of each, copied to the thread's
    own places of shared memory, for ``copied_rows``."""
    always, pieces = ops.less(ops.const_i(0), 1), side.dim // 32
    for h, row in enumerate(rows):
        source = ops.advance(row, ops.t, 16)
        for c in range(pieces):
            place = (h * pieces + c) * THREADS * 16 - 64 * c
            at = ops.iadd(ops.imul(ops.thread, 16), place)
            ops.copy_async(buffer, at, source, always, 64 * c)
    ops.commit_copies()


def copied_rows(ops: Any, side: Side, buffer: Any) -> list[Any]:
    """The registers of both rows, once the copies are there. No other thread reads them."""
    ops.await_copies(0)
    at, pieces = ops.imul(ops.thread, 16), side.dim // 16
    return [x for i in range(pieces) for x in ops.load(buffer, at, 4, i * THREADS * 16)]


def operands(ops: Any, raw: list[Any]) -> tuple[list[list[Any]], list[Any], list[Any]]:
    """(A of every step in float16, each row's power of two, and its inverse).

    BF16 has 8 bits where float16 has 11: a product with a power of two is exact. Above 2^64 the
    squares overflow; such a row then shrinks by 2^57, and counts as not finite above 2^72.
    """
    half, zero, one = len(raw) // 2, ops.const_i(0), ops.const_i(0x3F803F80)
    scales, inverses, held = [], [], []
    for h in range(2):
        row = raw[h * half : (h + 1) * half]
        totals = [zero] * 2  # of squares, in BF16: 3 % off at most
        for i, x in enumerate(row):
            totals[i % 2] = ops.fma_bf16x2(x, x, totals[i % 2])
        total = ops.fma_bf16x2(totals[0], one, totals[1])
        for distance in (1, 2):
            total = ops.fma_bf16x2(total, one, ops.shfl_xor(total, distance))
        top = ops.imax(ops.iand(total, 0x7FFF), ops.iand(ops.shr(total, 16), 0x7FFF))
        root = ops.shr(ops.iadd(top, 1 << 7), 8)  # its exponent is this - 64
        biased = ops.isub(ops.const_i(127 + 64 + K_EXPONENT), root)
        biased = _clamp(ops, biased, 1, 127 + MOST_SCALE)
        scales.append(_biased(ops, biased))
        inverses.append(_biased(ops, ops.isub(ops.const_i(254), biased)))
        low, high = ops.imul(biased, 1 << 7), ops.imul(biased, 1 << 23)  # and 0 in the other half
        held.append(
            [
                ops.pack_f16(
                    ops.bits_f32(ops.shl(ops.fma_bf16x2(x, low, zero), 16)),
                    ops.bits_f32(ops.fma_bf16x2(x, high, zero)),
                )
                for x in row
            ]
        )
    steps = [
        [held[0][2 * s], held[1][2 * s], held[0][2 * s + 1], held[1][2 * s + 1]]
        for s in range(half // 2)
    ]
    return steps, scales, inverses


def product(
    ops: Any, side: Side, piece: int, stage: Any, rows: list[Any], sums: list[Any] | None = None
) -> list[Any]:
    """A tile's sums of products with X up to and with a piece, from those with the pieces before.

    Args:
        rows: A of every step, as ``operands`` makes it, one step after the other.
    """
    first = piece * PIECE_STEPS % (side.dim // 16)
    steps = [rows[4 * i : 4 * i + 4] for i in range(first, first + PIECE_STEPS)]
    return ops.wgmma_f16(steps, stage, side.dim, 1, sums)


def shifted(ops: Any, side: Side, sums: list[Any], scales: list[Any], held: Any) -> list[list[Any]]:
    """A tile's transformed rows g and g + 8, D / 4 numbers each (2 of every 8 columns), of the sums
    of products with X."""
    rows: list[list[Any]] = [[], []]
    for tile in range(side.columns):
        shift = None
        if side.keys:
            shift = ops.load(held, ops.imul(ops.t, 8), 2, SHIFT + 32 * tile)
        for h in range(2):
            for e in range(2):
                x = sums[4 * tile + 2 * h + e]
                if shift is not None:
                    x = ops.fma(ops.bits_f32(shift[e]), scales[h], x)
                rows[h].append(x)
    return rows
