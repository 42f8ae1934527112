"""What one warp does with BF16 tokens: tiles of 16 that it copies into shared memory itself.

Sink, tail and BF16 pages are one stream of tokens in the order of their positions, cut into tiles
of 16. Warps share nothing: each copies its tiles ahead (``cp.async``) and waits for itself alone.
A row that is not visible is filled with zeros by the copy, so that no operand needs a mask.

A tile lies in shared memory as 16 rows whose pieces of 16 bytes are permuted (piece c of row r is
at c ^ (r & 7)), which ``ldmatrix`` reads without bank conflicts: as it is for the keys, transposed
for the values. Tensor-core steps and the state are those of the packed pages.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_kernels.decode.mosaic_shape import MASKED, WARPS
from pallas_kernels.decode.mosaic_state import State
from pallas_kernels.format import PAGE
from pallas_kernels.layout import Windows

ROWS = 16  # tokens of a tile
# BF16 weights have float32's exponents: the reference may be far below the maximum, as long as the
# sums of 2^(score - reference) stay finite. It is renewed beyond this (log2).
SLACK = 60.0


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The static shape of a stream.

    Args:
        page_bytes: from one BF16 page of K and of V to the next in their pools; None: the stream
            is sink and tail only, and skips the positions of the (INT2) pages.
        query_terms: 1 for BF16 queries, 2 for float32 queries (a sum of two BF16 numbers).
        stages: tiles per warp in shared memory or on their way there.
        scale: of the scores, with log2(e).
    """

    head_dim: int
    v_head_dim: int
    windows: Windows
    page_bytes: tuple[int, int] | None
    query_terms: int
    stages: int
    scale: float

    @property
    def steps(self) -> int:
        """Tensor-core steps of the scores of a tile."""
        return self.head_dim // 16


def tile_bytes(dim: int) -> int:
    return ROWS * 2 * dim


def load_queries(
    ops: Any, tokens: Tokens, pointer: Any, first: Any, count: Any, bf16: bool
) -> list[Any]:
    """B operands of ``count`` heads of q [N, D] from ``first`` on: [terms][steps][2], flat.

    The columns of heads that do not exist repeat the last one.
    """
    size = 2 if bf16 else 4
    head = ops.iadd(first, ops.imin(ops.g, ops.iadd(count, -1)))
    at = ops.imul(ops.iadd(ops.imul(head, tokens.head_dim), ops.imul(ops.t, 2)), size)
    places = [(16 * step + 8 * half) * size for step in range(tokens.steps) for half in range(2)]
    if bf16:
        return [ops.load(pointer, at, 1, plus)[0] for plus in places]
    high, rest = [], []
    for plus in places:
        x = [ops.bits_f32(v) for v in ops.load(pointer, at, 2, plus)]
        high.append(ops.pack_bf16(*x))
        rest.append(_remainder(ops, x, high[-1]))
    return high + rest


def _remainder(ops: Any, x: list[Any], packed: Any) -> Any:
    """What rounding to BF16 took from a pair, as BF16."""
    kept = ops.bits_f32(ops.shl(packed, 16)), ops.bits_f32(ops.iand(packed, -65536))
    return ops.pack_bf16(*(ops.fadd(v, ops.fneg(k)) for v, k in zip(x, kept, strict=True)))


def visible_rows(ops: Any, tokens: Tokens, tile: Any, stop: Any, length: Any, skip: Any) -> Any:
    """(position of the tile's first token, how many of its rows are visible; maybe more than 16).

    Args:
        skip: tokens in pages that the stream leaves out after the sink.
    """
    in_sink = ops.less(tile, tokens.windows.sink // ROWS)
    position = ops.imul(tile, ROWS)
    position = ops.select_i(in_sink, position, ops.iadd(position, skip))
    rows = ops.isub(length, position)
    return position, ops.select_i(ops.less(tile, stop), rows, ops.const_i(0))


def fetch(
    ops: Any,
    tokens: Tokens,
    pointers: list[Any],
    stage: tuple[Any, Any],
    tile: Any,
    slot: Any,
    limits: tuple[Any, Any, Any, Any],
) -> None:
    """Start the copies of a warp's tile and close their group.

    Args:
        pointers: sink K and V, ring K and V of the row and head; with pages also their pools' first
            page of the head, K and V, and the row's block table.
        stage: shared memory of K and of V. slot: the warp's stage.
        limits: the stream's end (in tiles), the length, tokens left out, tokens in pages.
    """
    windows = tokens.windows
    stop, length, skip, paged = limits
    position, count = visible_rows(ops, tokens, tile, stop, length, skip)
    beyond = ops.iadd(position, -windows.sink)  # of the sink
    in_sink = ops.less(beyond, 0)
    row = ops.select_i(in_sink, position, ops.urem(beyond, ops.const_i(windows.ring)))
    turn = ops.select_i(in_sink, ops.const_i(windows.sink), ops.const_i(windows.ring))
    sources = [ops.choose(in_sink, pointers[i], pointers[2 + i]) for i in range(2)]
    if tokens.page_bytes is not None:
        in_page = ops.and_(ops.less(-1, beyond), ops.less(beyond, paged))
        in_page = ops.and_(in_page, ops.less(0, count))
        index = ops.select_i(in_page, ops.shr(beyond, PAGE.bit_length() - 1), ops.const_i(0))
        (page,) = ops.load(pointers[6], ops.imul(index, 4), 1)
        page = ops.select_i(in_page, page, ops.const_i(0))
        for i, size in enumerate(tokens.page_bytes):
            own = ops.advance(pointers[4 + i], page, size)
            sources[i] = ops.choose(in_page, own, sources[i])
        row = ops.select_i(in_page, ops.iand(beyond, PAGE - 1), row)
        turn = ops.select_i(in_page, ops.const_i(PAGE), turn)
    place = ops.iadd(ops.imul(slot, WARPS), ops.warp)
    dims = (tokens.head_dim, tokens.v_head_dim)
    for dim, source, memory in zip(dims, sources, stage, strict=True):
        chunks = dim // 8  # of 16 bytes in a row
        at_once = 32 // chunks
        chunk = ops.iand(ops.lane, chunks - 1)
        first = ops.shr(ops.lane, chunks.bit_length() - 1)
        lane_at = ops.iadd(ops.imul(first, 2 * dim), ops.imul(ops.xor(chunk, first), 16))
        base, chunk_at = ops.imul(place, tile_bytes(dim)), ops.imul(chunk, 16)
        first_row, left = ops.iadd(row, first), ops.isub(count, first)
        own = ops.advance(source, ops.iadd(ops.imul(first_row, 2 * dim), chunk_at), 1)
        for i in range(0, ROWS, at_once):
            plus = 2 * dim * i
            if windows.ring % ROWS:  # else no tile goes beyond the ring's end
                wrapped = ops.iadd(first_row, i)
                wrapped = ops.umin(wrapped, ops.isub(wrapped, turn))
                offset = ops.iadd(ops.imul(wrapped, 2 * dim), chunk_at)
                own = ops.advance(source, ops.iadd(offset, -plus), 1)
            target = ops.iadd(base, ops.xor(lane_at, 16 * (i & 7)))
            ops.copy_async(memory, target, own, ops.less(i, left), plus)
    ops.commit_copies()


def step(
    ops: Any,
    tokens: Tokens,
    stage: tuple[Any, Any],
    slot: Any,
    count: Any,
    q: list[Any],
    state: State,
) -> State:
    """A warp's tile onto its softmax state: ``count`` of 16 rows, which have arrived."""
    place = ops.iadd(ops.imul(slot, WARPS), ops.warp)
    lane, low = ops.lane, ops.iand(ops.lane, 7)
    at_k = ops.iadd(
        ops.imul(ops.iand(lane, 15), 2 * tokens.head_dim),
        ops.imul(ops.xor(ops.shr(lane, 4), low), 16),
    )
    token = ops.iadd(ops.imul(ops.shr(lane, 4), 8), low)
    at_v = ops.iadd(
        ops.imul(token, 2 * tokens.v_head_dim),
        ops.imul(ops.xor(ops.iand(ops.shr(lane, 3), 1), low), 16),
    )
    base_k = ops.imul(place, tile_bytes(tokens.head_dim))
    base_v = ops.imul(place, tile_bytes(tokens.v_head_dim))

    zero = ops.const_f(0.0)
    chains = [[zero] * 4, [zero] * 4]  # two, so that a step need not wait for the one before
    for i in range(tokens.steps):
        keys = ops.ldmatrix(stage[0], ops.iadd(base_k, ops.xor(at_k, 32 * i)), False)
        for term in range(tokens.query_terms):
            pair = 2 * (term * tokens.steps + i)
            chain = (i + term) % 2
            chains[chain] = ops.mma_bf16(chains[chain], keys, q[pair : pair + 2])
    sums = [ops.fadd(x, y) for x, y in zip(*chains, strict=True)]
    shown = [ops.less(ops.iadd(ops.g, 8 * h), count) for h in range(2)]
    scale = ops.const_f(tokens.scale)

    def against(reference: list[Any]) -> list[Any]:
        return [
            ops.select(
                shown[h],
                ops.fma(sums[2 * h + e], scale, ops.fneg(reference[e])),
                ops.const_f(MASKED),
            )
            for h in range(2)
            for e in range(2)
        ]

    scores = against(state.m)
    largest = ops.fmax(ops.fmax(scores[0], scores[1]), ops.fmax(scores[2], scores[3]))
    too_low = ops.positive(ops.fadd(largest, ops.const_f(-SLACK)))

    def again() -> list[Any]:
        alone = against([zero, zero])
        new, shrink = [], []
        for e in range(2):
            top = ops.fmax(alone[e], alone[2 + e])
            for distance in (4, 8, 16):
                top = ops.fmax(top, ops.shfl_xor(top, distance))
            new.append(ops.fmax(top, state.m[e]))
            shrink.append(ops.ex2(ops.fadd(state.m[e], ops.fneg(new[e]))))
        l = [ops.fmul(x, c) for x, c in zip(state.l, shrink, strict=True)]
        out = [ops.fmul(x, shrink[i % 2]) for row in state.out for i, x in enumerate(row)]
        return [*new, *l, *state.minima, *out, *against(new)]

    kept = [*state.registers(), *scores]
    chosen = ops.if_(ops.any_warp(too_low), again, kept)
    state, scores = State.of(chosen[:-4]), chosen[-4:]
    weights = [ops.ex2(x) for x in scores]
    l = [ops.fadd(state.l[e], ops.fadd(weights[e], weights[2 + e])) for e in range(2)]
    pairs = [weights[2 * h : 2 * h + 2] for h in range(2)]
    high = [ops.pack_bf16(*pair) for pair in pairs]
    rest = [_remainder(ops, pair, packed) for pair, packed in zip(pairs, high, strict=True)]
    terms = [[ops.movmatrix(x) for x in pair] for pair in (high, rest)]
    out = []
    for i, row in enumerate(state.out):
        values = ops.ldmatrix(stage[1], ops.iadd(base_v, ops.xor(at_v, 32 * i)), True)
        for weight in terms:
            row = ops.mma_bf16(row, values, weight)
        out.append(row)
    return State(state.m, l, state.minima, out)
