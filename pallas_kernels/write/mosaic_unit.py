"""A unit of the write kernel: two pages of one KV head on their way from the source to the pools.

``ops`` are the instructions of one warpgroup (``mosaic_instructions.Instructions`` emits them; the
tests run the same functions on NumPy arrays of 128 threads). A *unit* is two pages, of K or of V,
as 4 tiles of 64 rows (tokens): warps 0 and 1 work on the first page, 2 and 3 on the second. In
tile a, rows g (h = 0) and g + 8 (h = 1) of warp w, with lanes 4g + t, are the tokens

    8 (w % 2) + g + 16 (2a + h)

so one lane meets all 8 tokens of a value word, and neighbouring lanes write neighbouring words. A
tile's rows are transformed (``mosaic_transform``); a row's statistics, codes, words and metadata
come from its 4 lanes' D / 4 sums each (``mosaic_codes``).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from pallas_kernels.format import PAGE
from pallas_kernels.write import mosaic_codes as codes
from pallas_kernels.write.mosaic_shape import SHIFT, TERMS, THREADS, TILES, UNIT, Side
from pallas_kernels.write.mosaic_transform import copied_rows, copy_rows, operands, shifted


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
            ``mosaic_transform.prepare`` left it; buffer, shared memory of this warpgroup; counts
            i32[2], rows that saturated float16 and rows that are not finite.
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
        refs: those of ``locate`` and of ``Unit``; matrix as ``mosaic_transform.prepare`` left it.
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
