"""Packed pages to float16 tiles in shared memory, on the machine of ``lanes``.

A tile is an operand of wgmma, [rows, columns] with contiguous columns and the 128-byte swizzle:

    key tile     [tokens, D]    row r of a page is token  16 j + 2 i + e,  r = 16 i + 2 j + e
    value tile   [Dv, tokens]   column c of a page is that same token,     c = 16 i + 2 j + e

A pair of words (32 bits: words 2 i and 2 i + 1, e tells them apart) holds 16 codes that are 8 apart
in i; in this order they become 16 neighbours of a tile, two stores of 16 bytes. Codes wider than 2
bits lie in one such pair of each plane (``packing``). The tokens of a page may be in any order as
long as scores and values agree, and channels in any order as long as keys and queries do
(``channel_order``), so nothing else pays for it.

    code      ((word >> shift) & mask | 0x6400) read as float16 is 1024 + code * factor, exactly
    element   (that - 1024) * (scale / factor) + minimum, one rounding to float16
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from pallas_kernels.decode.mosaic_shape import segment_of
from pallas_kernels.format import PAGE, KeyCodec, waterfill_middles
from pallas_kernels.packing import layout, reads

ATOM = 1024  # bytes of 8 rows of 64 columns: the unit of the swizzle
BOTH = 0x10001  # a 16-bit constant in both halves of a register
EXPONENT = 0x6400  # float16 1024: the codes below are units of its last place
MINUS_1024 = 0xE400


@dataclasses.dataclass(frozen=True)
class Code:
    """Where a block's code is among a pair's words: the OR of its fields.

    ``fields``: (plane, shift, mask), each of which leaves the field's code times ``factor``.
    """

    block: int
    factor: int
    fields: tuple[tuple[int, int, int], ...]


@functools.cache
def codes_of(codec: KeyCodec, bits: int) -> tuple[Code, ...]:
    """The 8 codes of a word, those of a half plane in its low byte."""
    found: dict[int, Code] = {}
    for number, plane in enumerate(layout(codec, bits)):
        for read in reads(plane, high=not plane.half):
            own = Code(read.block, read.factor, ((number, read.shift, read.mask),))
            other = found.get(read.block)
            if other is not None:  # the rest of a code: its field is moved to where this one fits
                (at, shift, mask), left = other.fields[0], own.factor // other.factor
                moved = at, shift - left.bit_length() + 1, mask * left
                own = Code(read.block, own.factor, (*own.fields, moved))
            found[read.block] = own
    return tuple(found[block] for block in sorted(found))


@dataclasses.dataclass(frozen=True)
class Tiles:
    """The static shape of a step: a whole page, or ``halves`` = 2 steps of 64 tokens each."""

    head_dim: int
    v_head_dim: int
    codec: KeyCodec
    halves: int = 1
    key_bits: int = 2
    value_bits: int = 2

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return PAGE // self.halves

    @property
    def query_chunks(self) -> int:
        """Tiles of rows that X_Q^T takes (each of two terms)."""
        return max(1, self.head_dim // self.tokens)

    @property
    def output_chunks(self) -> int:
        """Tiles of columns that X_O^T takes."""
        return max(1, self.v_head_dim // self.tokens)

    @property
    def output_steps(self) -> list[tuple[int, int]]:
        """(chunk, term of X_O) in the order of use: high output with both, low with the high."""
        chunks = range(self.output_chunks)
        return [(c, term) for c in chunks for term in (0, 1)] + [(c, 0) for c in chunks]

    @property
    def key_pairs(self) -> int:
        """Pairs of words of one token that a thread unpacks: all, or half with 64 tokens."""
        return self.head_dim // 16 // self.halves

    @property
    def key_codes(self) -> tuple[Code, ...]:
        return codes_of(self.codec, self.key_bits)

    @property
    def value_codes(self) -> tuple[Code, ...]:
        return codes_of("uniform", self.value_bits)

    @property
    def page_bytes(self) -> tuple[int, int]:
        """Of the words of a page's keys and values."""
        return (
            PAGE * self.head_dim * self.key_bits // 8,
            PAGE * self.v_head_dim * self.value_bits // 8,
        )


def places(at: Any, words: int) -> Any:
    """Which element of an axis packed in ``words`` words is at place ``at`` of a tile.

    >>> [places(c, 16) for c in range(6)]
    [0, 1, 16, 17, 32, 33]
    """
    return at % 16 // 2 * words + at // 16 * 2 + at % 2


def token_order() -> np.ndarray:
    """The token of each row of a page's key tile, and of each column of its value tile."""
    return places(np.arange(PAGE), PAGE // 8)


def channel_order(head_dim: int) -> np.ndarray:
    """The channel of each column of a key tile, and so of the query operand."""
    return places(np.arange(head_dim), head_dim // 8)


def _halves(ops: Any, x: Any, y: Any, which: int) -> Any:
    """Low (0) or high (1) halves of two registers as one."""
    return ops.prmt(x, y, 0x7632 if which else 0x5410)


def _times(ops: Any, x: Any, factor: float) -> Any:
    """A pair of halves times a constant that float16 holds."""
    if factor == 1:
        return x
    bits = int(np.float16(factor).view(np.uint16))
    return ops.mul_f16x2(x, ops.const_i(bits * BOTH))


def _unpack(
    ops: Any, pair: list[Any], codes: tuple[Code, ...], scales: list[Any], minima: list[Any]
) -> list[list[Any]]:
    """16 elements of a pair of words of every plane: two stores of 4 registers."""
    needed = sorted({(plane, shift) for code in codes for plane, shift, _ in code.fields})
    shifted = {
        (plane, shift): ops.shr(pair[plane], shift) if shift else pair[plane]
        for plane, shift in needed
    }
    exponent, offset = ops.const_i(EXPONENT * BOTH), ops.const_i(MINUS_1024 * BOTH)
    out = []
    for code, scale, minimum in zip(codes, scales, minima, strict=True):
        element = exponent
        for plane, shift, mask in code.fields:
            element = ops.and_or(shifted[plane, shift], mask * BOTH, element)
        out.append(ops.fma_f16x2(ops.add_f16x2(element, offset), scale, minimum))
    return [out[:4], out[4:]]


def _key_metadata(ops: Any, shape: Tiles, meta: Any) -> tuple[list[Any], list[Any]]:
    """(scale / factor, minimum) of a token's 8 blocks, each twice in a register."""
    if shape.codec == "uniform":
        scales, minima = [_halves(ops, meta, meta, 0)], [_halves(ops, meta, meta, 1)]
    else:
        e5m3 = lambda at: ops.iand(ops.shr(meta, at - 7), 0x7F80)  # noqa: E731 - float16 bits
        stored = (e5m3(16), meta, e5m3(24))
        scales = [_halves(ops, x, x, 0) for x in stored]
        middles = waterfill_middles(shape.key_bits)
        minima = [_times(ops, x, -c) for x, c in zip(scales, middles, strict=True)]
    made: dict[tuple[int, int], Any] = {}
    blocks = [(x.factor, segment_of(shape.codec, x.block)) for x in shape.key_codes]
    for factor, segment in blocks:
        if (factor, segment) not in made:
            made[factor, segment] = _times(ops, scales[segment], 1 / factor)
    return [made[block] for block in blocks], [minima[segment] for _, segment in blocks]


def _key_words(ops: Any, shape: Tiles, words: Any, token: Any, part: Any) -> list[list[Any]]:
    """Pairs of words of one token, each with one of every plane; ``part``: which half of them."""
    row = shape.head_dim * shape.key_bits // 8  # bytes
    own, pairs, start, planes = ops.imul(token, row), shape.key_pairs, 0, []
    for plane in layout(shape.codec, shape.key_bits):
        source = own if plane.half else ops.iadd(own, ops.imul(part, 4 * pairs))
        count = shape.head_dim // 32 if plane.half else pairs
        size = math.gcd(4, count, row // 4)  # a load's alignment
        held = [
            x for k in range(0, count, size) for x in ops.load(words, source, size, start + 4 * k)
        ]
        if plane.half:  # the first half of the pairs are low bytes, the second one the high bytes
            if shape.halves == 1:
                held += [ops.shr(x, 8) for x in held]
            else:
                down = ops.imul(part, 8)
                held = [ops.shr(x, down) for x in held]
        planes.append(held)
        start += shape.head_dim // (8 if plane.half else 4)
    return [list(pair) for pair in zip(*planes, strict=True)]


def key_tile(ops: Any, shape: Tiles, words: Any, meta: Any, tile: Any, half: Any) -> None:
    """The key tile of a step: a row of a thread, or with 64 tokens half a row.

    Eight neighbouring lanes have the eight rows of a swizzle atom, so that their stores go to
    different banks; the lower bits of i follow those of j so that their loads nearly do.

    Args:
        words, meta: the page's, in shared memory. half: i32, which half of the page (0 if whole).
    """
    bit = lambda x, at: ops.iand(ops.shr(x, at), 1)  # noqa: E731
    lane, warp = ops.lane, ops.iand(ops.warp, 3)  # of this warpgroup
    e, low = bit(lane, 0), ops.iand(ops.shr(lane, 1), 3)
    i = ops.ixor(low, ops.shr(lane, 3))  # 0 .. 3
    j = ops.iadd(low, ops.imul(bit(warp, 1), 4))
    place = i  # i counted from the step's first token
    part = ops.const_i(0)
    if shape.halves == 1:
        i = place = ops.iadd(i, ops.imul(bit(warp, 0), 4))
    else:
        i = ops.iadd(i, ops.imul(half, 4))
        part = ops.ixor(bit(warp, 0), bit(lane, 1))
    token = ops.iadd(ops.iadd(ops.imul(j, 16), ops.imul(i, 2)), e)
    row = ops.iadd(ops.iadd(ops.imul(place, 16), ops.imul(j, 2)), e)
    pairs = shape.key_pairs
    held = _key_words(ops, shape, words, token, part)
    scales, minima = _key_metadata(ops, shape, ops.load(meta, ops.imul(token, 4), 1)[0])
    in_atom = ops.iand(row, 7)
    target = ops.iadd(
        ops.iadd(
            ops.imul(ops.shr(row, 3), ATOM * shape.head_dim // 64),
            ops.imul(part, ATOM * (pairs // 4)),
        ),
        ops.imul(in_atom, 128),
    )
    first = ops.imul(in_atom, 16)
    if pairs < 4:  # half a row of an atom
        first = ops.ixor(first, ops.imul(part, 64))
    chunks = [ops.iadd(target, ops.ixor(first, ops.const_i(16 * c))) for c in range(8)]
    for k, pair in enumerate(held):
        for h, four in enumerate(_unpack(ops, pair, shape.key_codes, scales, minima)):
            ops.store(tile, chunks[(2 * k + h) % 8], four, plus=ATOM * (k // 4))


def value_tile(ops: Any, shape: Tiles, words: Any, meta: Any, tile: Any, half: Any) -> None:
    """The value tile of a step; a thread has one i, so it keeps the metadata of its 16 tokens."""
    in_atom = ops.iand(ops.lane, 7)
    place = ops.shr(ops.lane, 3)  # i counted from the step's first token
    warp = ops.iand(ops.warp, 3)  # of this warpgroup
    if shape.halves == 1:
        upper = ops.ixor(ops.iand(ops.shr(ops.lane, 2), 1), ops.iand(warp, 1))
        group, groups = ops.shr(warp, 1), 2  # of 8 channels
        i = ops.iadd(place, ops.imul(upper, 4))
        atom = upper
    else:
        group, groups = warp, 4
        i = ops.iadd(place, ops.imul(half, 4))
        atom = ops.const_i(0)
    scales, minima, codes = [], [], shape.value_codes
    for j in range(8):
        one, other = ops.load(meta, ops.imul(i, 8), 2, 64 * j)
        scales.append(_times(ops, _halves(ops, one, other, 0), 1 / codes[j].factor))
        minima.append(_halves(ops, one, other, 1))
    channel = ops.iadd(ops.imul(group, 8), in_atom)
    row = PAGE * shape.value_bits // 8  # bytes of a channel, PAGE / 4 of each plane
    source = ops.iadd(ops.imul(channel, row), ops.imul(i, 4))
    atoms = shape.tokens // 64
    target = ops.iadd(
        ops.imul(ops.iadd(ops.imul(group, atoms), atom), ATOM), ops.imul(in_atom, 128)
    )
    chunks = [
        ops.iadd(target, ops.imul(ops.ixor(ops.iadd(ops.imul(place, 2), h), in_atom), 16))
        for h in range(2)
    ]
    for n in range(shape.v_head_dim // (8 * groups)):
        pair = [
            ops.load(words, source, 1, n * groups * 8 * row + start)[0]
            for start in range(0, row, PAGE // 4)
        ]
        for h, four in enumerate(_unpack(ops, pair, codes, scales, minima)):
            ops.store(tile, chunks[h], four, plus=n * groups * atoms * ATOM)
