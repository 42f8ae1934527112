"""What a warpgroup of the write kernel does with its registers, against a small machine.

``ops`` are the instructions of one warpgroup (``mosaic_instructions.Instructions`` emits them; the
tests run the same functions on NumPy arrays of 128 threads). A *unit* is two pages of one KV head,
of K or of V, as 4 tiles of 64 rows (tokens): warps 0 and 1 work on the first page, 2 and 3 on the
second. In tile a, rows g (h = 0) and g + 8 (h = 1) of warp w, with lanes 4g + t, are the tokens

    8 (w % 2) + g + 16 (2a + h)

so one lane meets all 8 tokens of a value word, and neighbouring lanes write neighbouring words.

    k, as stored  ->  times a power of two of its own, exact in float16
    k X           ->  wgmma with X as a sum of two float16 terms (22 bits), sums in float32; X is in
                      shared memory, or comes through it in pieces (``Side.streamed``)
    (k - mu) X    ->  minus mu X, which the block has computed once, in float32
    a row's statistics, codes, words and metadata, from its 4 lanes' D / 4 sums each

Which channel is which k is free, so a lane reads 16 bytes of a row at a time; which channel is
which column is free too, so a lane's key words lie side by side.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from pallas_kernels.format import PAGE, KeyCodec, waterfill_segments
from pallas_kernels.packing import BLOCKS, Plane, layout
from pallas_kernels.write import mosaic_codes as codes

THREADS = 128
TERMS = 2  # float16 numbers that one number of X is the sum of
TILES = 4  # of 64 rows in a unit
SCAN = 32  # rows of X that are on their way at a time
UNIT = 2  # pages in a unit
K_EXPONENT = 7  # a row's norm is 2^7 .. 2^8.5 in float16, X's largest 2^2 .. 2^3: sums of products
X_EXPONENT = 2  # stay below 2^15.5 and nothing is lost above 2^-20 of the row's norm
MOST_SCALE = 24  # a row is enlarged by at most 2^24
RESIDENT = 128  # the largest head_dim whose X stays in shared memory
PIECE_STEPS = 2  # steps of 16 rows in a piece of a streamed X, of one term
STAGES = 4  # pieces in shared memory, or on their way there
SHIFT = 16  # bytes before -mu X, or values' words, in a warpgroup's own shared memory


@dataclasses.dataclass(frozen=True)
class Side:
    """Keys or values: what the programs are specialised for.

    Args:
        codec: of the keys; None for values, which are uniform and channel-major.
        clip: order statistic as in ``format.Codec``; water-filled keys are never clipped.
        bits: of a code, on average.
    """

    dim: int
    codec: KeyCodec | None
    clip: float
    gain: bool = False
    bits: int = 2

    @property
    def keys(self) -> bool:
        return self.codec is not None

    @property
    def pairs(self) -> int:
        """Pairs of words that a lane has of a plane of one token's key."""
        return self.dim // 64

    @property
    def planes(self) -> tuple[Plane, ...]:
        """Of the words of a token's key."""
        return layout(self.codec or "uniform", self.bits)

    @property
    def segments(self) -> tuple[tuple[int, slice], ...]:
        """(bits, eighths of the channels) of a row's head, middle and tail."""
        return waterfill_segments(BLOCKS, self.bits)

    @property
    def widths(self) -> tuple[int, ...]:
        """Bits of the codes of every eighth of the channels."""
        if self.codec != "waterfill":
            return (self.bits,) * BLOCKS
        return tuple(bits for bits, eighths in self.segments for _ in range(BLOCKS)[eighths])

    @property
    def columns(self) -> int:
        """Groups of 8 columns."""
        return self.dim // 8

    @property
    def rank(self) -> int | None:
        """The threshold is the rank-th largest magnitude of a row; None: no clip."""
        if self.codec == "waterfill" or self.clip >= 1:
            return None
        return self.dim - int(self.clip * self.dim)

    @property
    def page_bytes(self) -> int:
        """Words of one page and head."""
        return PAGE * self.dim * self.bits // 8

    @property
    def streamed(self) -> bool:
        """Whether X comes in pieces, of which both warpgroups take each for a tile of their own."""
        return self.dim > RESIDENT

    @property
    def pieces(self) -> int:
        """Of a streamed X."""
        return TERMS * self.dim // (16 * PIECE_STEPS)

    @property
    def matrix_bytes(self) -> int:
        """Shared memory that X takes, or the pieces of a streamed one."""
        rows = STAGES * 16 * PIECE_STEPS if self.streamed else TERMS * self.dim
        return rows * self.dim * 2

    @property
    def buffer_bytes(self) -> int:
        """Shared memory in which a warpgroup keeps a tile's sums, to pick single ones from, and
        then the next tile's rows, copied while this one is encoded."""
        return 64 * self.dim * (2 if self.rank is None else 4)

    @property
    def own_bytes(self) -> int:
        """Shared memory that a warpgroup has for itself: X's power of two, -mu X by column, and
        scratch of ``prepare``; then, for values, the words of a unit, 16 bytes of them a lane."""
        words = 0 if self.keys else self.columns * THREADS * 4
        return SHIFT + max(words, 12 * self.dim + 16)

    def channel(self, column: Any) -> Any:
        """The channel of a column of the transformed row, for NumPy arrays."""
        if not self.keys:
            return column
        e, t, tile = column % 2, column // 2 % 4, column // 8
        block, pair = tile // self.pairs, tile % self.pairs
        return self.dim // 8 * block + 2 * self.pairs * t + 2 * pair + e


def operand_channels(dim: int) -> np.ndarray:
    """i32[steps, 2, 8]: the channel at place k of half a step of 16, as ``operands`` holds them."""
    step, half, t, e = np.ogrid[: dim // 16, :2, :4, :2]
    channel = 32 * (step // 2) + 8 * t + 4 * (step % 2) + 2 * half + e
    return channel.reshape(dim // 16, 2, 8)


# --------------------------------------------------------------------------------- the transform


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


# ---------------------------------------------------------------------------------------- units


@dataclasses.dataclass(frozen=True)
class Place:
    """Where units come from and go to.

    Args:
        jobs: how many. length: rows H of the source; a page may wrap around. kv_heads: K.
        key_dim: D of the keys.
    """

    jobs: int
    length: int
    kv_heads: int
    key_dim: int


def _holds_bad(ops: Any, row: Any, dim: int) -> Any:
    """Whether a row of BF16 numbers holds NaN or inf, for its 4 lanes alike."""
    bad = ops.const_i(0)
    for c in range(dim // 32):
        for x in ops.load(row, ops.imul(ops.t, 16), 4, 64 * c):
            for half in (x, ops.shr(x, 16)):
                exponent = ops.iand(half, 0x7F80)
                bad = ops.imax(bad, exponent)
    for distance in (1, 2):
        bad = ops.imax(bad, ops.shfl_xor(bad, distance))
    return ops.less(ops.const_i(0x7F7F), bad)


def _count(
    ops: Any, saturated: list[Any], finite: list[Any], valid: Any, counts: Any, others: Any
) -> None:
    """Add a tile's saturated rows, and its rows that are not finite unless ``others()``, which
    tells whether the row's key is not finite either and is counted with the keys."""
    zero, one = ops.const_i(0), ops.const_i(1)
    first = ops.and_(valid, ops.less(ops.t, 1))
    flag = lambda x: ops.select_i(ops.and_(first, x), one, zero)  # noqa: E731
    clamped = [flag(x) for x in saturated]
    bad = [ops.isub(flag(first), flag(x)) for x in finite]
    total = ops.iadd(ops.iadd(*clamped), ops.iadd(*bad))

    def add() -> None:
        rest = bad
        if others is not None:
            rest = [ops.select_i(x, zero, y) for x, y in zip(others(), bad, strict=True)]
        ops.add_to(counts, zero, ops.iadd(*clamped))
        ops.add_to(counts, ops.const_i(4), ops.iadd(*rest))

    ops.when(ops.any_warp(ops.nonzero(total)), add)


def _load_words(ops: Any, count: int, own: Any) -> list[Any]:
    """This thread's value words, from shared memory: in registers, they would be spilled."""
    at = ops.imul(ops.thread, 16)
    return [x for i in range(count // 4) for x in ops.load(own, at, 4, SHIFT + i * THREADS * 16)]


def _store_words(ops: Any, words: list[Any], own: Any) -> None:
    for i in range(len(words) // 4):
        at = ops.iadd(ops.imul(ops.thread, 16), SHIFT + i * THREADS * 16)
        ops.store(own, at, words[4 * i : 4 * i + 4])


def _add_to_words(ops: Any, nibbles: list[Any], own: Any) -> None:
    """A tile's codes below those of the tiles before it."""
    words = _load_words(ops, len(nibbles), own)
    added = [ops.iadd(ops.imul(x, 16), y) for x, y in zip(words, nibbles, strict=True)]
    _store_words(ops, added, own)


def _add_bytes_to_words(ops: Any, fresh: list[Any], own: Any) -> None:
    """The same of two tiles; what is older falls out."""
    words = _load_words(ops, len(fresh), own)
    joined = [ops.prmt(x, y, 0x6240) for x, y in zip(fresh, words, strict=True)]
    _store_words(ops, joined, own)


def locate(ops: Any, place: Place, unit: Any, head: Any, refs: dict[str, Any]) -> list[Any]:
    """Of this warp's page of a unit: 1 if it is to be written or 0, page and head in the pools, the
    first of the source's rows of that head, and the page's place in them."""
    job = ops.iadd(ops.imul(unit, UNIT), ops.shr(ops.warp, 1))
    at = ops.imul(ops.imin(job, place.jobs - 1), 4)
    page, source_row, offset = (ops.load(refs[x], at, 1)[0] for x in ("page_id", "row", "offset"))
    valid = ops.and_(ops.less(job, place.jobs), ops.less(ops.const_i(-1), page))
    zero = ops.const_i(0)
    page, source_row, offset = (ops.select_i(valid, x, zero) for x in (page, source_row, offset))
    offset = ops.urem(offset, ops.const_i(place.length))
    first = ops.imul(ops.iadd(ops.imul(source_row, place.kv_heads), head), place.length)
    target = ops.iadd(ops.imul(page, place.kv_heads), head)
    return [ops.select_i(valid, ops.const_i(1), zero), target, first, offset]


@dataclasses.dataclass(frozen=True)
class Unit:
    """Two pages on their way from the source to words and metadata in the pools.

    Args:
        located: what ``locate`` found.
        refs: source bf16[X, K, H, D]; keys bf16[X, K, H, D]; pages and meta, the pools; own as
            ``prepare`` left it; buffer, shared memory of this warpgroup; counts i32[2], rows that
            saturated float16 and rows that are not finite.
    """

    ops: Any
    side: Side
    place: Place
    located: list[Any]
    refs: dict[str, Any]

    @property
    def valid(self) -> Any:
        return self.ops.nonzero(self.located[0])

    def pools(self) -> list[Any]:
        """Pointers to the page's words and metadata, computed anew: held, they would be spilled."""
        here = self.ops.opaque(self.located[1])
        sizes = ("pages", self.side.page_bytes), ("meta", PAGE * 4)
        return [self.ops.advance(self.refs[name], here, size) for name, size in sizes]

    @property
    def word(self) -> Any:
        """Of the first token."""
        return self.ops.imul(self.ops.iand(self.ops.warp, 1), 8)

    def tokens(self, tile: Any) -> list[Any]:
        ops = self.ops
        token = ops.iadd(ops.iadd(self.word, ops.g), ops.imul(tile, 32))
        return [token, ops.iadd(token, 16)]

    def rows_of(self, source: Any, tile: Any, dim: int) -> list[Any]:
        ops, found = self.ops, []
        _, _, first, offset = self.located
        length, zero = self.place.length, ops.const_i(0)
        for token in self.tokens(tile):
            row = ops.iadd(offset, token)
            row = ops.isub(row, ops.select_i(ops.less(row, length), zero, ops.const_i(length)))
            found.append(ops.advance(source, ops.iadd(first, row), dim * 2))
        return found

    def fetch(self, tile: Any) -> None:
        rows = self.rows_of(self.refs["source"], tile, self.side.dim)
        copy_rows(self.ops, self.side, rows, self.refs["buffer"])

    def fetch_next(self, tile: Any) -> None:
        """The next tile's rows, once the buffer has been looked at and long before they are needed.

        A loop of no or one turn: out of a mere condition the compiler takes the copies, and puts
        them behind all of the codes.
        """

        def turn(_: Any, state: list[Any]) -> list[Any]:
            self.fetch(self.ops.iadd(tile, -1))
            return state

        self.ops.loop(self.ops.opaque(self.ops.imin(tile, 1)), turn, [])

    def begin(self) -> None:
        self.fetch(self.ops.const_i(TILES - 1))
        if not self.side.keys and self.side.bits == 2:
            fresh = [self.ops.const_i(codes.VALUE_START)] * self.side.columns
            _store_words(self.ops, fresh, self.refs["own"])

    def encode(self, tile: Any, sums: list[Any], scales: list[Any], inverses: list[Any]) -> None:
        """A tile's sums of products with X, to words and metadata; tiles come downwards, as words
        grow from their top."""
        ops, side, refs, valid = self.ops, self.side, self.refs, self.valid
        rows = shifted(ops, side, sums, scales, refs["own"])
        (unit,) = ops.load(refs["own"], ops.const_i(0), 1)
        inverses = [ops.fmul(x, ops.bits_f32(unit)) for x in inverses]
        following = functools.partial(self.fetch_next, tile)
        if side.codec == "waterfill":
            following()
            found = codes.waterfill(ops, side, rows, inverses)
        else:
            found = codes.uniform(ops, side, rows, inverses, refs["buffer"], following)
        pages, meta = self.pools()
        for token, row in zip(self.tokens(tile), found, strict=True):
            where = ops.and_(valid, ops.less(ops.t, 1))
            ops.store(meta, ops.imul(token, 4), [row.meta], where)
        if side.keys:
            self.put_keys(pages, tile, found)
        elif side.bits == 2:
            _add_to_words(ops, codes.value_nibbles(ops, side, found), refs["own"])
        else:
            _add_bytes_to_words(ops, codes.value_bytes(ops, side, found), refs["own"])
            even = ops.less(ops.iand(tile, 1), 1)
            ops.when(even, lambda: self.put_values(ops.imul(ops.shr(tile, 1), PAGE // 4)))
        finite = [row.finite for row in found]
        saturated = [ops.and_(row.saturated, row.finite) for row in found]

        def keys_are_bad() -> list[Any]:
            dim = self.place.key_dim
            return [_holds_bad(ops, row, dim) for row in self.rows_of(refs["keys"], tile, dim)]

        _count(ops, saturated, finite, valid, refs["counts"], None if side.keys else keys_are_bad)

    def put_keys(self, pages: Any, tile: Any, rows: list[codes.Row]) -> None:
        """Words of a tile's tokens, plane by plane, into their page."""
        ops, side = self.ops, self.side
        words = codes.key_words(ops, side, rows)
        for token, planes in zip(self.tokens(tile), words, strict=True):
            row = ops.imul(token, side.dim * side.bits // 8)
            at, first = ops.iadd(row, ops.imul(ops.t, 4 * side.pairs)), 0
            for plane, held in zip(side.planes, planes, strict=True):
                where = self.valid
                if plane.half:
                    where = ops.and_(where, ops.less(ops.t, 2))
                ops.store(pages, ops.iadd(at, first) if first else at, held, where)
                first += side.dim // 4

    def put_values(self, first: Any = None) -> None:
        """A plane of values' words into their page, from byte ``first`` of every channel's on."""
        ops, (pages, _) = self.ops, self.pools()
        for tile, x in enumerate(_load_words(ops, self.side.columns, self.refs["own"])):
            channel = ops.iadd(ops.g, 8 * tile)
            token = ops.imul(ops.iadd(self.word, ops.imul(ops.t, 2)), 2)
            at = ops.iadd(ops.imul(channel, PAGE * self.side.bits // 8), token)
            at = at if first is None else ops.iadd(at, first)
            ops.store(pages, at, [ops.movmatrix(x)], self.valid)

    def finish(self) -> None:
        """Values' words, which are complete with the last tile."""
        if not self.side.keys and self.side.bits == 2:
            self.put_values()


def write_unit(
    ops: Any, side: Side, place: Place, unit: Any, head: Any, refs: dict[str, Any]
) -> None:
    """Two pages with an X that is in shared memory.

    Args:
        refs: those of ``locate`` and of ``Unit``; matrix as ``prepare`` left it.
    """
    pages = Unit(ops, side, place, locate(ops, place, unit, head, refs), refs)

    def visit(i: Any, state: list[Any]) -> list[Any]:
        raw = copied_rows(ops, side, refs["buffer"])
        steps, scales, inverses = operands(ops, raw)
        sums = ops.wgmma_f16(steps, refs["matrix"], side.dim, TERMS)
        pages.encode(ops.isub(ops.const_i(TILES - 1), i), sums, scales, inverses)
        return state

    pages.begin()
    ops.loop(TILES, visit, [])
    pages.finish()
