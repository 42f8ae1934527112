"""A row's codes and metadata from its transformed numbers, as register programs.

Both codecs of ``pallas_kernels.format`` are code = floor(N clamp(x a + b, 0, 1) + 1/2) with
N = 2^bits - 1: two fused multiply-adds, the first of which clamps for nothing. A word grows as a
float from its highest place down, word + 1.5 2^(23 + place), whose last bit stands for 2^place: the
second multiply-add scales the fraction by N 2^place, rounds it to a code and puts that into its
place. An addition then moves the word to the next place. All of it runs on the full-rate pipe; an
AND with an OR for each code kept the half-rate one busy. Places are those of ``packing.layout``.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from pallas_kernels.format import E5M3_MAX, FLOAT16_MAX, GAIN_RANGE, MAX_STEPS
from pallas_kernels.packing import Field, Plane
from pallas_kernels.write.mosaic_order import extremes, kth_largest, quad, squares
from pallas_kernels.write.mosaic_shape import Side

# Added to b: a number whose level is a whole one gets it, however 1/scale was rounded.
TIE = 2.0**-22
META_PLACES = (16, 0, 24)  # of the scales of head, middle and tail


@dataclasses.dataclass
class Row:
    """This lane's share of an encoded row.

    Args:
        level: (a, b) per bits.
        clip: (least, most, whether a code depends on it): x is not clamped to them yet.
    """

    x: list[Any]
    level: dict[int, tuple[Any, Any]]
    meta: Any
    saturated: Any
    finite: Any
    clip: tuple[Any, Any, Any] | None = None


def _saturate(ops: Any, x: Any) -> tuple[Any, Any]:
    """(x clamped to float16's finite range, whether that changed it)."""
    limit = ops.const_f(FLOAT16_MAX)
    clamped = ops.fmin(ops.fmax(x, ops.const_f(-FLOAT16_MAX)), limit)
    return clamped, ops.less_f(limit, ops.fabs(x))


def _reciprocal(ops: Any, x: Any) -> Any:
    """1 / x, nearly rounded; 0 unless x is positive."""
    one = ops.const_f(1.0)
    safe = ops.select(ops.positive(x), x, one)
    guess = ops.rcp(safe)
    better = ops.fma(guess, ops.fma(ops.fneg(safe), guess, one), guess)
    return ops.select(ops.positive(x), better, ops.const_f(0.0))


def _over(ops: Any, x: Any, divisor: int) -> Any:
    """x / divisor, rounded to nearest."""
    inverse = ops.const_f(1 / divisor)
    guess = ops.fmul(x, inverse)
    return ops.fma(ops.fma(ops.const_f(-float(divisor)), guess, x), inverse, guess)


def _fraction(ops: Any, row: Row, bits: int, x: Any) -> Any:
    return ops.fma_sat(x, *row.level[bits])


def _number(ops: Any, fraction: Any, bits: int) -> Any:
    """The code as a float."""
    magic = 2.0**23
    code = ops.fma(fraction, ops.const_f(2.0**bits - 1), ops.const_f(magic))
    return ops.fadd(code, ops.const_f(-magic))


def _magic(place: int) -> float:
    """What a float of 24 bits is added to for its last bit to stand for 2^place."""
    return 1.5 * 2.0 ** (23 + place)


# Where the four nibbles of a value word start: each ``value_nibbles`` adds the bits of _magic(0),
# and the sum of them, shifted by 0, 4, 8 and 12 bits, is this times -2^16.
VALUE_START = -(0x4B40 * 0x1111 & 0xFFFF)


def _placed(ops: Any, word: Any, fraction: Any, bits: int, place: int, last: int | None) -> Any:
    """A word plus ``_magic(place)`` with the code of a fraction at bit ``place``.

    Args:
        word: the codes of higher places plus ``_magic(last)``; anything where there are none.
        last: the place before this one in the word, further up; None: this one is the first.
    """
    magic = ops.const_f(_magic(place))
    if last is not None:
        magic = ops.fadd(word, ops.const_f(_magic(place) - _magic(last)))
    # To the nearest, which TIE keeps from being the even one.
    return ops.fma(fraction, ops.const_f(float((2**bits - 1) << place)), magic)


def _gain(ops: Any, energy: Any, product: Any) -> Any:
    """``format._gain`` of the two sums."""
    least, most = (ops.const_f(x) for x in GAIN_RANGE)
    some = ops.positive(product)
    one = ops.const_f(1.0)
    ratio = ops.divide(energy, ops.select(some, product, one))
    ratio = ops.fmin(ops.fmax(ratio, least), most)
    return ops.select(some, ratio, ops.select(ops.positive(energy), most, one))


def uniform(
    ops: Any,
    side: Side,
    rows: list[list[Any]],
    inverses: list[Any],
    buffer: Any,
    then: Callable[[], None],
) -> list[Row]:
    """``format.encode_uniform`` of two rows; numbers times ``inverses`` are the true ones.

    ``then`` is run as soon as nothing is read from the buffer any more.
    """
    bounds, thresholds, top_code = extremes(ops, rows), None, 2**side.bits - 1
    if side.rank is not None:
        largest = [ops.fmax(top, ops.fneg(low)) for top, low, _ in bounds]
        finite = [x[2] for x in bounds]
        thresholds = kth_largest(ops, rows, largest, finite, side.rank, buffer)
    then()
    found = []
    for h, (x, inverse) in enumerate(zip(rows, inverses, strict=True)):
        top, low, is_finite = bounds[h]
        if thresholds is not None:
            top = ops.fmin(top, thresholds[h])
            low = ops.fmax(low, ops.fneg(thresholds[h]))
        true_low = ops.fmul(low, inverse)
        spread = ops.fadd(ops.fmul(top, inverse), ops.fneg(true_low))
        scale, big = _saturate(ops, _over(ops, spread, top_code))
        least, big_least = _saturate(ops, true_low)
        meta = ops.pack_f16(scale, least)
        step, base = ops.f16_lo(meta), ops.f16_lo(ops.shr(meta, 16))
        per_step = _over(ops, _reciprocal(ops, step), top_code)
        a = ops.fmul(inverse, per_step)
        b = ops.fma(ops.fneg(base), per_step, ops.const_f(TIE))
        row = Row(x, {side.bits: (a, b)}, meta, ops.or_(big, big_least), is_finite)
        if thresholds is not None:
            row.clip = low, top, _clip_matters(ops, side.bits, row, low, top, step)
        if side.gain:
            row.x = _of_clipped(ops, [row], lambda clamped: clamped[0])
            row.clip = None
            _apply_gain(ops, side.bits, row, x, inverse, step, base)
        found.append(row)
    return found


def _clip_matters(ops: Any, bits: int, row: Row, low: Any, top: Any, step: Any) -> Any:
    """Whether clamping x to low .. top changes a code: where the extremes' codes are not the least
    and the largest, because the stored minimum is far from the true one by steps of the scale."""
    half = 0.498 / (2**bits - 1)  # of a step, and a little less
    late = ops.less_f(_fraction(ops, row, bits, top), ops.const_f(1 - half))
    early = ops.less_f(ops.const_f(half), _fraction(ops, row, bits, low))
    return ops.and_(ops.positive(step), ops.or_(late, early))


def _of_clipped(
    ops: Any, rows: list[Row], make: Callable[[list[list[Any]]], list[Any]]
) -> list[Any]:
    """``make`` of the rows' numbers, done again with clamped ones where a code depends on it."""
    plain, clips = make([row.x for row in rows]), [row.clip for row in rows if row.clip is not None]
    if not clips:
        return plain

    def clamped() -> list[Any]:
        return make(
            [
                [ops.fmin(ops.fmax(x, low), top) for x in row.x]
                for row, (low, top, _) in zip(rows, clips, strict=True)
            ]
        )

    matters = functools.reduce(ops.or_, (matters for _, _, matters in clips))
    return ops.if_(ops.any_warp(matters), clamped, plain)


def _apply_gain(
    ops: Any, bits: int, row: Row, x: list[Any], inverse: Any, step: Any, base: Any
) -> None:
    """Multiply the stored scale and minimum by <x, x> / <x, x^>; x is unclipped."""
    zero = ops.const_f(0.0)
    plain, weighed = [zero] * 2, [zero] * 2
    for i, (value, clipped) in enumerate(zip(x, row.x, strict=True)):
        code = _number(ops, _fraction(ops, row, bits, clipped), bits)
        plain[i % 2] = ops.fadd(plain[i % 2], value)
        weighed[i % 2] = ops.fma(value, code, weighed[i % 2])
    energy = quad(ops, ops.fadd, squares(ops, x))
    total, dot = (quad(ops, ops.fadd, ops.fadd(*sums)) for sums in (plain, weighed))
    product = ops.fma(base, total, ops.fmul(step, dot))
    factor = _gain(ops, ops.fmul(energy, inverse), product)
    scale, big = _saturate(ops, ops.fmul(step, factor))
    least, big_least = _saturate(ops, ops.fmul(base, factor))
    row.meta = ops.pack_f16(scale, least)
    row.saturated = ops.or_(row.saturated, ops.or_(big, big_least))


def _eighths(side: Side, x: list[Any], eighths: slice) -> list[Any]:
    """This lane's numbers of some eighths of the channels."""
    size = len(x) // 8
    return x[eighths.start * size : eighths.stop * size]


def _stored(ops: Any, scale: Any, middle: bool) -> tuple[Any, Any, Any]:
    """``format._store_scale``: (stored bits, the float32 they mean, saturated)."""
    clamped, big = _saturate(ops, scale)
    half = ops.iand(ops.pack_f16(clamped, clamped), 0xFFFF)
    if middle:
        return half, ops.f16_lo(half), big
    byte = ops.imin(ops.shr(ops.iadd(half, 0x40), 7), E5M3_MAX)
    return byte, ops.f16_lo(ops.shl(byte, 7)), big


def waterfill(ops: Any, side: Side, rows: list[list[Any]], inverses: list[Any]) -> list[Row]:
    """``format.encode_waterfill`` of two rows."""
    found = []
    for x, inverse in zip(rows, inverses, strict=True):
        never = ops.less(ops.const_i(1), 0)
        row = Row(x, {}, ops.const_i(0), never, ops.less(ops.const_i(0), 1))
        for (bits, eighths), place in zip(side.segments, META_PLACES, strict=True):
            part = _eighths(side, x, eighths)
            count = 4 * len(part)
            if bits >= 4:
                top = ops.fabs(part[0])
                for value in part[1:]:
                    top = ops.fmax(top, ops.fabs(value))
                true = ops.fmul(quad(ops, ops.fmax, top), inverse)
                scale = ops.divide(true, ops.const_f(2 ** (bits - 1) - 0.5))
            elif bits > 1:
                total = quad(ops, ops.fadd, squares(ops, part))
                mean = ops.fmul(total, ops.const_f(1 / count))
                scale = ops.fmul(ops.fmul(ops.sqrt(mean), inverse), ops.const_f(MAX_STEPS[bits]))
            else:
                total = ops.fabs(part[0])
                for value in part[1:]:
                    total = ops.fadd(total, ops.fabs(value))
                total = quad(ops, ops.fadd, total)
                scale = ops.fmul(ops.fmul(total, inverse), ops.const_f(2 / count))
            if bits < 4:  # one NaN or inf in a key makes all channels so
                row.finite = ops.and_(row.finite, ops.less_f(total, ops.const_f(math.inf)))
            stored, step, big = _stored(ops, scale, place == 0)
            a = ops.fmul(ops.fmul(inverse, _reciprocal(ops, step)), ops.const_f(1 / (2**bits - 1)))
            row.level[bits] = a, ops.const_f(0.5 + TIE)
            if side.gain:
                factor = _segment_gain(ops, row, bits, part, step, inverse)
                stored, _, big = _stored(ops, ops.fmul(step, factor), place == 0)
            row.meta = ops.or_(row.meta, ops.shl(stored, place))
            row.saturated = ops.or_(row.saturated, big)
        found.append(row)
    return found


def _segment_gain(ops: Any, row: Row, bits: int, part: list[Any], step: Any, inverse: Any) -> Any:
    """<x, x> / <x, x^> of one segment."""
    zero, middle = ops.const_f(0.0), ops.const_f(-(2**bits - 1) / 2)
    dot = zero
    for value in part:
        code = _number(ops, _fraction(ops, row, bits, value), bits)
        dot = ops.fma(value, ops.fadd(code, middle), dot)
    energy = quad(ops, ops.fadd, squares(ops, part))
    return _gain(ops, ops.fmul(energy, inverse), ops.fmul(quad(ops, ops.fadd, dot), step))


def key_words(ops: Any, side: Side, rows: list[Row]) -> list[list[list[Any]]]:
    """This lane's words of each row's token, two a register, plane by plane. Those of a half plane
    mean something in lanes 4g and 4g + 1 only."""
    pairs, planes = side.pairs, side.planes

    def make(numbers: list[list[Any]]) -> list[Any]:
        return [
            word
            for row, x in zip(rows, numbers, strict=True)
            for plane in planes
            for word in _plane_words(ops, side, row, x, plane)
        ]

    made = _of_clipped(ops, rows, make)
    words = [made[i : i + pairs] for i in range(0, len(made), pairs)]
    return [
        _joined(ops, planes, words[i : i + len(planes)]) for i in range(0, len(words), len(planes))
    ]


def _plane_words(ops: Any, side: Side, row: Row, x: list[Any], plane: Plane) -> list[Any]:
    """The codes of this lane's channels, two channels a register: a code in two fields is whole in
    its lower one, which is the highest of its plane."""
    count, last = 2 * side.pairs, None
    words: list[Any] = [None] * count
    for field in reversed(plane.fields):
        if field.above:
            continue
        bits = side.widths[field.block]
        for i in range(count):
            fraction = _fraction(ops, row, bits, x[count * field.block + i])
            words[i] = _placed(ops, words[i], fraction, bits, field.at, last)
        last = field.at
    held = [ops.f32_bits(word) for word in words]
    return [ops.prmt(held[i], held[i + 1], 0x5410) for i in range(0, count, 2)]


def _joined(ops: Any, planes: tuple[Plane, ...], words: list[list[Any]]) -> list[list[Any]]:
    """The upper bits of codes in two fields to their own plane; of half planes, whose channels i
    and i + D/16 two lanes have, the low byte of this lane's and that of the other's."""
    out = [list(held) for held in words]
    for p, plane in enumerate(planes):
        for field in plane.fields:
            if field.above:
                whole, at = _lower_field(planes, field)
                mask = ((2**field.bits - 1) << at + field.above) * 0x10001
                shift = field.at - at - field.above
                for i, word in enumerate(words[whole]):
                    out[p][i] = ops.iadd(out[p][i], ops.shl(ops.iand(word, mask), shift))
    for p, plane in enumerate(planes):
        if plane.half:
            out[p] = [ops.prmt(x, ops.shfl_xor(x, 2), 0x6240) for x in out[p]]
    return out


def _lower_field(planes: tuple[Plane, ...], upper: Field) -> tuple[int, int]:
    """Which plane has the lower bits of a code, and from which bit on."""
    return next(
        (p, field.at)
        for p, plane in enumerate(planes)
        for field in plane.fields
        if field.block == upper.block and not field.above
    )


def value_nibbles(ops: Any, side: Side, rows: list[Row]) -> list[Any]:
    """Codes of tokens g and g + 8 of a tile in bits 0-3 (channel 2t) and 16-19 (2t + 1), plus the
    bits of ``_magic(0)``."""

    def make(numbers: list[list[Any]]) -> list[Any]:
        words, last = [None] * side.columns, None
        for e in (1, 0):
            for h in (1, 0):
                place = 2 * h + 16 * e
                for column in range(side.columns):
                    fraction = _fraction(ops, rows[h], 2, numbers[h][2 * column + e])
                    words[column] = _placed(ops, words[column], fraction, 2, place, last)
                last = place
        return [ops.f32_bits(word) for word in words]

    return _of_clipped(ops, rows, make)


def value_bytes(ops: Any, side: Side, rows: list[Row]) -> list[Any]:
    """4-bit codes of tokens g and g + 8 of a tile in bits 0-7 (channel 2t) and 16-23 (2t + 1); the
    other bits mean nothing. A float does not reach both channels."""

    def make(numbers: list[list[Any]]) -> list[Any]:
        out = []
        for column in range(side.columns):
            both = []
            for e in range(2):
                word, last = None, None
                for h in (1, 0):
                    fraction = _fraction(ops, rows[h], 4, numbers[h][2 * column + e])
                    word = _placed(ops, word, fraction, 4, 4 * h, last)
                    last = 4 * h
                both.append(ops.f32_bits(word))
            out.append(ops.prmt(*both, 0x5410))
        return out

    return _of_clipped(ops, rows, make)
