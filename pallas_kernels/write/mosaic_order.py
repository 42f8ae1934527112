"""Order statistics of rows whose numbers lie in four lanes' registers.

Sorting is out of reach: 11 of 128 magnitudes cost a sorting network 6 to 8 instructions a number.
So a row's squares become 8-bit numbers (any map that keeps the order will do: it only finds the few
numbers worth a look), those are transposed into bit planes of 32 numbers a lane, and the rank-th
largest is found bit by bit with population counts. What shares its 8 bits is then picked from
shared memory and compared in full, so the threshold is exact.
"""

from __future__ import annotations

import math
from typing import Any

BITS = 8
LARGEST = 254.0  # of the 8-bit numbers, before they are rounded
GROUP = 4  # numbers in a register of bytes
SET = 32  # numbers in a bit plane
THREADS = 128


def quad(ops: Any, combine: Any, x: Any) -> Any:
    """x combined over a row's 4 lanes."""
    for distance in (1, 2):
        x = combine(x, ops.shfl_xor(x, distance))
    return x


def squares(ops: Any, row: list[Any]) -> Any:
    """The sum of this lane's squares."""
    sums = [ops.const_f(0.0)] * 2
    for i, x in enumerate(row):
        sums[i % 2] = ops.fma(x, x, sums[i % 2])
    return ops.fadd(*sums)


def extremes(ops: Any, rows: list[list[Any]]) -> list[tuple[Any, Any, Any]]:
    """(largest, smallest, whether all are finite) of each row.

    As integers, floats of either sign have the right order among the numbers that are not negative
    (signed) and the reverse one among the negative (unsigned, above all others), and integers have
    an instruction that compares three. Rows without one of the two are done again as floats. NaN
    and inf are above all others of their sign.
    """
    found = []
    for row in rows:
        top = low = ops.f32_bits(row[0])
        for x in row[1:]:
            top, low = ops.imax(top, ops.f32_bits(x)), ops.umax(low, ops.f32_bits(x))
        found += [quad(ops, ops.imax, top), quad(ops, ops.umax, low)]
    one_sign = [
        ops.or_(ops.less(top, 0), ops.less(ops.const_i(-1), low))
        for top, low in (found[:2], found[2:])
    ]

    def as_floats() -> list[Any]:
        out = []
        for row in rows:
            top = low = row[0]
            for x in row[1:]:
                top, low = ops.fmax(top, x), ops.fmin(low, x)
            out += [quad(ops, ops.fmax, top), quad(ops, ops.fmin, low)]
        return out

    infinite = 0x7F800000
    finite = [
        ops.and_(ops.less(top, infinite), ops.less(ops.umax(low, least), infinite - (1 << 31)))
        for least in (ops.const_i(-(1 << 31)),)
        for top, low in (found[:2], found[2:])
    ]
    plain = [ops.bits_f32(x) for x in found]
    found = ops.if_(ops.any_warp(ops.or_(*one_sign)), as_floats, plain)
    return [(found[0], found[1], finite[0]), (found[2], found[3], finite[1])]


def _bytes(ops: Any, row: list[Any], largest: Any) -> list[Any]:
    """8-bit numbers in the order of the row's magnitudes, 4 a register.

    float16 x / largest sqrt(254), squared, plus 1024: then the low byte is the rounded square.
    Pairs r and r + 8 of 16 share register r, so that a bit of a plane (``_planes``) lies at
    16 (place in the pair) + the pair: ``_pick`` computes an address of it.
    """
    shrink = ops.fmul(ops.rcp(largest), ops.const_f(math.sqrt(LARGEST)))
    shrink = ops.pack_f16_finite(shrink, shrink)
    magic = ops.const_i(0x64006400)  # 1024
    halves = []
    for i in range(0, len(row), 2):
        x = ops.mul_f16x2(ops.pack_f16_finite(row[i], row[i + 1]), shrink)
        halves.append(ops.fma_f16x2(x, x, magic))
    size = min(len(halves) // 2, 8)
    firsts = [i for i in range(len(halves)) if i // size % 2 == 0]
    return [ops.prmt(halves[i], halves[i + size], 0x6240) for i in firsts]


def _planes(ops: Any, held: list[Any]) -> list[Any]:
    """Bit b of byte k of register r moves to bit r of byte k of register b, for 8 registers."""
    for distance, mask in ((4, 0x0F0F0F0F), (2, 0x33333333), (1, 0x55555555)):
        out = list(held)
        for r in range(8):
            if r & distance:
                continue
            a, b = held[r], held[r + distance]
            out[r] = ops.or_(ops.iand(a, mask), ops.iand(ops.shl(b, distance), ~mask))
            out[r + distance] = ops.or_(ops.iand(ops.shr(a, distance), mask), ops.iand(b, ~mask))
        held = out
    return held


def _keep(ops: Any, rows: list[list[Any]], buffer: Any) -> None:
    """All numbers into this thread's own places of shared memory: a pair of both rows at a time,
    which is how the tensor core leaves them in consecutive registers."""
    own = ops.imul(ops.thread, 16)
    for i in range(0, len(rows[0]), 2):
        pairs = [x for row in rows for x in row[i : i + 2]]
        ops.store(buffer, ops.iadd(own, i * THREADS * 8), pairs)


def kth_largest(
    ops: Any, rows: list[list[Any]], largest: list[Any], finite: list[Any], rank: int, buffer: Any
) -> list[Any]:
    """The rank-th largest magnitude of each of two rows; meaningless for one that is not finite.

    Args:
        rows: this lane's numbers. largest: the rows' largest magnitudes.
        buffer: shared memory of this warpgroup for both rows' numbers.
    """
    groups = len(rows[0]) // GROUP
    sets = -(-groups // 8)
    _keep(ops, rows, buffer)
    planes = []
    for row, size in zip(rows, largest, strict=True):
        held = _bytes(ops, row, size)
        held += [ops.const_i(0)] * (8 * sets - groups)
        planes.append([_planes(ops, held[8 * s : 8 * s + 8]) for s in range(sets)])
    candidates = [[ops.const_i(-1 if groups >= 8 else 0x0F0F0F0F)] * sets for _ in rows]
    # Two rows' counts in one register, and 2^15 minus what is needed: bit 15 of a half of their sum
    # tells whether enough numbers have the bit, and prmt makes masks of it.
    missing = ops.const_i((0x8000 - rank) * 0x10001 - (1 << 32))
    for bit in reversed(range(BITS)):
        hits = [
            [ops.iand(c, plane[bit]) for c, plane in zip(candidates[h], planes[h], strict=True)]
            for h in range(2)
        ]
        low, high = (_total(ops, [ops.popc(x) for x in row]) for row in hits)
        both = quad(ops, ops.iadd, ops.iadd(low, ops.imul(high, 1 << 16)))
        total = ops.iadd(both, missing)
        enough = [ops.prmt(total, total, selector) for selector in (0x9999, 0xBBBB)]
        candidates = [
            [
                ops.iand(c, ops.xor(ops.xor(plane[bit], enough[h]), -1))
                for c, plane in zip(candidates[h], planes[h], strict=True)
            ]
            for h in range(2)
        ]
        fewer = ops.xor(ops.prmt(total, total, 0xBB99), -1)
        missing = ops.iadd(missing, ops.iand(both, fewer))  # the rank is below all that have it
    need = [ops.isub(ops.const_i(0x8000), ops.iand(missing, 0xFFFF))]
    need.append(ops.isub(ops.const_i(0x8000), ops.shr(missing, 16)))
    return _among(ops, groups, candidates, need, finite, buffer)


def _total(ops: Any, values: list[Any]) -> Any:
    total = values[0]
    for x in values[1:]:
        total = ops.iadd(total, x)
    return total


def _left(ops: Any, masks: list[Any]) -> Any:
    """Whether there is a candidate in one of the masks."""
    both = masks[0]
    for mask in masks[1:]:
        both = ops.or_(both, mask)
    return ops.nonzero(both)


def _pick(
    ops: Any, groups: int, h: int, masks: list[Any], buffer: Any
) -> tuple[Any, Any, list[Any]]:
    """(whether there is a candidate, the magnitude of one, the masks without it)."""
    mask, first, rest = masks[0], ops.const_i(8 * h), []
    for s, other in enumerate(masks[1:], 1):
        empty = ops.less(ops.popc(mask), 1)
        mask = ops.select_i(empty, other, mask)
        first = ops.select_i(empty, ops.const_i(8 * h + 16 * s * THREADS * 16), first)
    place = ops.iand(ops.top_bit(mask), SET - 1)
    pair = ops.iand(place, 15)
    if groups < 8:
        high = ops.iand(ops.shr(place, 3), 1)
        pair = ops.iadd(ops.iand(place, groups - 1), ops.imul(high, groups))
    at = ops.iadd(ops.imul(pair, THREADS * 16), ops.imul(ops.shr(place, 4), 4))
    at = ops.iadd(ops.iadd(at, ops.imul(ops.thread, 16)), first)
    x = ops.fabs(ops.bits_f32(ops.load(buffer, at, 1)[0]))
    without = ops.xor(ops.shl(ops.const_i(1), place), -1)
    taken = ops.less(ops.const_i(0), 1)  # whether the sets before were empty
    for own in masks:
        rest.append(ops.select_i(taken, ops.iand(own, without), own))
        taken = ops.and_(taken, ops.less(ops.popc(own), 1))
    return _left(ops, masks), x, rest


def _merged(ops: Any, x: list[Any], y: list[Any]) -> list[Any]:
    """The three largest of two lists of two or three numbers, each in order."""
    first = ops.fmax(x[0], y[0])
    second = ops.fmax(ops.fmin(x[0], y[0]), ops.fmax(x[1], y[1]))
    third = ops.fmax(ops.fmin(x[0], y[1]), ops.fmin(x[1], y[0]))
    for more in (x, y):
        if len(more) > 2:
            third = ops.fmax(third, more[2])
    return [first, second, third]


def _among(
    ops: Any,
    groups: int,
    candidates: list[list[Any]],
    need: list[Any],
    finite: list[Any],
    buffer: Any,
) -> list[Any]:
    """The need-th largest of each row's candidates.

    Nearly always there are few: no more than two in a lane, of which one of the three largest is
    it. Among 64 rows of normal numbers and for the 11th of 128, one is harder in 10 % of all cases
    (with two largest ones it was 35 %, and all warps wait for the one that takes longer).
    """
    none = ops.const_f(-1.0)
    quick, hard = [], []
    for h in range(2):
        pair, masks = [], candidates[h]
        for _ in range(2):
            exists, x, masks = _pick(ops, groups, h, masks, buffer)
            pair.append(ops.select(exists, x, none))
        top = [ops.fmax(*pair), ops.fmin(*pair)]
        for distance in (1, 2):
            top = _merged(ops, top, [ops.shfl_xor(x, distance) for x in top[: 1 + distance]])
        third = ops.select(ops.less(need[h], 3), top[1], top[2])
        quick.append(ops.select(ops.less(need[h], 2), top[0], third))
        many = ops.or_(_left(ops, masks), ops.less(ops.const_i(3), need[h]))
        hard.append(ops.and_(finite[h], many))
    return ops.if_(
        ops.any_warp(ops.or_(*hard)),
        lambda: _among_many(ops, groups, candidates, need, finite, buffer),
        quick,
    )


def _among_many(
    ops: Any,
    groups: int,
    candidates: list[list[Any]],
    need: list[Any],
    finite: list[Any],
    buffer: Any,
) -> list[Any]:
    """The same for any number of candidates: the largest are taken out until need is met."""
    zero, none, sets = ops.const_i(0), ops.const_f(-1.0), len(candidates[0])

    def take(state: list[Any]) -> tuple[list[Any], Any]:
        bounds, needs, found, todo = (state[2 * i : 2 * i + 2] for i in range(4))

        def look(inner: list[Any]) -> tuple[list[Any], Any]:
            """One more candidate of this lane; its largest below the bound, and how many equal."""
            masks = [inner[:sets], inner[sets : 2 * sets]]
            tops, ties = inner[2 * sets :][:2], inner[2 * sets + 2 :]
            for h in range(2):
                exists, x, masks[h] = _pick(ops, groups, h, masks[h], buffer)
                counts = ops.and_(exists, ops.less_f(x, bounds[h]))
                larger = ops.and_(counts, ops.less_f(tops[h], x))
                equal = ops.and_(counts, ops.equal_f(tops[h], x))
                more = ops.select_i(equal, ops.iadd(ties[h], 1), ties[h])
                ties[h] = ops.select_i(larger, ops.const_i(1), more)
                tops[h] = ops.select(larger, x, tops[h])
            flat = [x for row in masks for x in row]
            return [*flat, *tops, *ties], ops.any_warp(_left(ops, flat))

        flat = [x for row in candidates for x in row]
        inner = ops.repeat(look, [*flat, none, none, zero, zero])
        tops, ties = inner[2 * sets :][:2], inner[2 * sets + 2 :]
        for h in range(2):
            top = quad(ops, ops.fmax, tops[h])
            ties[h] = ops.select_i(ops.equal_f(tops[h], top), ties[h], zero)
            count = quad(ops, ops.iadd, ties[h])
            short = ops.and_(ops.less(count, needs[h]), ops.nonzero(count))  # NaN ends it too
            found[h] = ops.select(todo[h], top, found[h])
            bounds[h] = ops.select(todo[h], top, bounds[h])
            needs[h] = ops.select_i(todo[h], ops.isub(needs[h], count), needs[h])
            todo[h] = ops.and_(todo[h], short)
        return [*bounds, *needs, *found, *todo], ops.any_warp(ops.or_(*todo))

    infinite = [ops.const_f(math.inf)] * 2
    state = ops.repeat(take, [*infinite, *need, *[ops.const_f(0.0)] * 2, *finite])
    return state[4:6]
