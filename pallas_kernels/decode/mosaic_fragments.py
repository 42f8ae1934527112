"""What one warp of the decode kernel does with its registers, written against a small machine.

Every function takes ``ops``: the instructions of one warpgroup (``lanes.Lanes`` emits them;
the tests run the same functions on NumPy arrays of 128 threads). Heads sit on the narrow side of
the tensor-core step, 8 of them, so that a step's 16 rows are tokens (scores) or channels (output):

    S^T[16 tokens, 8 heads]   += K[16 tokens, 16 channels]    q^T[16 channels, 8 heads]
    O^T[16 channels, 8 heads] += V^T[16 channels, 16 tokens]  P^T[16 tokens, 8 heads]

with mma.m16n8k16. Lane 4g + t holds, of A: rows g and g + 8, k = 2t, 2t+1 and 2t+8, 2t+9; of B: the
same k of column g; of the sums: rows g and g + 8 of columns 2t and 2t + 1.

A u16 word of codes ANDed with a mask and read as float16 is code * factor * 2^-24 exactly: the
subnormals and the first binades are one linear grid. So one AND makes two operands, and the factors
go into the other operand. Which channel or token is which k is free as long as both operands agree:
lane t of a row reads one contiguous piece of it, and no operand is ever shuffled.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from pallas_kernels.format import PAGE, KeyCodec

HEADS = 8  # columns of a tensor-core step
WARPS = 4
GRID = 2.0**24  # codes are read as multiples of 2^-24
# The reference of a warp is set so that the largest p * scale_v * factor is 2^10: float16 then
# holds 2^6 more before it overflows and 2^34 less before it is lost (design section 5).
TOP = 10
TINY = 2.0**-34  # added to V scales: a page of scale 0 still bounds p (its codes are all 0)
MASKED = -1e30
LOWEST = -1e25  # the reference where nothing is visible: exp2(MASKED - LOWEST) = 0

# (shift of the word, mask, factor, segment) of every block of D/8 channels, and with 4-bit keys the
# plane whose words hold it (``pallas_kernels.packing``)
UNIFORM_BLOCKS = tuple((8 * (j // 4), 3 << 2 * (j % 4), 4 ** (j % 4), 0) for j in range(8))
WATERFILL_BLOCKS = (
    (0, 0x000F, 1, 0),
    (0, 0x0030, 16, 1),
    (0, 0x00C0, 64, 1),
    (0, 0x0300, 256, 1),
    (10, 0x0003, 1, 1),
    (10, 0x000C, 4, 1),
    (10, 0x0010, 16, 2),
    (10, 0x0020, 32, 2),
)
NIBBLES = tuple((8 * (j // 2), 0xF << 4 * (j % 2), 16 ** (j % 2)) for j in range(4))
WIDE_BLOCKS: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "uniform": tuple((*nibble, 0) for nibble in NIBBLES * 2),
    "waterfill": (
        (0, 0x003F, 1, 0),
        (0, 0x03C0, 64, 1),
        *((*nibble, 1) for nibble in NIBBLES),
        (10, 0x0007, 1, 2),
        (10, 0x0038, 8, 2),
    ),
}
WIDE_PLANES = {"uniform": (0, 0, 0, 0, 1, 1, 1, 1), "waterfill": (0, 0, 1, 1, 1, 1, 0, 0)}


@dataclasses.dataclass(frozen=True)
class Shape:
    """The static shape of a kernel. ``warps_per_page`` warps share a page, each its tokens.

    ``paired``: for groups of up to 4 heads, which fill half of the 8 columns of a step. Columns 4
    to 7 are then the same heads on other tokens: two tiles of 16 tokens are scored into one set of
    sums, each with a query that is 0 in the other's columns, so that a lane weighs half as many
    tokens. Every column keeps a softmax of its own; ``finish`` adds the halves.
    """

    head_dim: int
    v_head_dim: int
    codec: KeyCodec
    warps_per_page: int
    paired: bool = False
    key_bits: int = 2
    value_bits: int = 2

    @property
    def pages(self) -> int:
        """Pages in one iteration of a block of 4 warps."""
        return WARPS // self.warps_per_page

    @property
    def tiles(self) -> int:
        """Tiles of 16 tokens of a page that one warp scores."""
        return 8 // self.warps_per_page

    @property
    def together(self) -> int:
        """Tiles that are scored into one set of sums."""
        return 2 if self.paired else 1

    @property
    def value_masks(self) -> int:
        """Codes of a V word that are read with different masks (a shift serves the others)."""
        return min(8 // self.value_bits, self.tiles)

    @property
    def blocks(self) -> tuple[tuple[int, int, int, int], ...]:
        if self.key_bits == 4:
            return WIDE_BLOCKS[self.codec]
        return UNIFORM_BLOCKS if self.codec == "uniform" else WATERFILL_BLOCKS

    @property
    def planes(self) -> tuple[int, ...]:
        """The plane of every block: 2-bit keys have one."""
        return WIDE_PLANES[self.codec] if self.key_bits == 4 else (0,) * 8

    @property
    def segments(self) -> int:
        return 1 + self.blocks[-1][3]

    @property
    def middles(self) -> tuple[float, float, float]:
        """The middle of the codes of each water-filled segment."""
        head, middle, tail = (
            (2**bits - 1) / 2 for bits in (self.key_bits + 2, self.key_bits, self.key_bits - 1)
        )
        return head, middle, tail

    @property
    def key_factor(self) -> int:
        """The largest factor of a block: q is multiplied by key_factor / factor."""
        return max(factor for _, _, factor, _ in self.blocks)

    @property
    def key_registers(self) -> int:
        """32-bit registers (two words each) that a lane holds of one token's key, per plane."""
        return self.head_dim // 64

    @property
    def value_factor(self) -> float:
        """Factor of the first mask's p * scale_v, chosen so that its top is 2^TOP."""
        return 2.0**TOP

    @property
    def out_scale(self) -> float:
        """What the output's sums are multiplied by: 2^24 over the first mask's factor."""
        return GRID / self.value_factor

    def key_steps(self) -> tuple[tuple[tuple[int, int], tuple[int, int] | None, int], ...]:
        """Tensor-core steps of the scores: (block, register) twice, and the segment.

        None: the step has one half too many, whose query is 0.
        """
        steps: list[Any] = []
        for segment in range(self.segments):
            halves: list[Any] = [
                (block, register)
                for block in range(8)
                if self.blocks[block][3] == segment
                for register in range(self.key_registers)
            ]
            for i in range(0, len(halves), 2):
                steps.append((halves[i], (halves[i + 1 : i + 2] or [None])[0], segment))
        return tuple(steps)


def query_channels(shape: Shape) -> np.ndarray:
    """i32[steps, 4 (t), 2 (half), 2]: the channel of each k of a step; -1 where there is none."""
    words = shape.head_dim // 8
    steps = shape.key_steps()
    channel = np.full((len(steps), 4, 2, 2), -1)
    for step, (a, b, _) in enumerate(steps):
        for half, source in enumerate((a, b)):
            if source is None:
                continue
            block, register = source
            for t in range(4):
                word = t * (words // 4) + 2 * register + np.arange(2)
                channel[step, t, half] = block * words + word
    return channel


@dataclasses.dataclass
class State:
    """A warp's running softmax: reference m, sums l and of V's minima, outputs; 2 heads a lane."""

    m: list[Any]  # [2], equal in all lanes g
    l: list[Any]  # [2], this lane's tokens only
    minima: list[Any]  # [2], this lane's tokens only
    out: list[list[Any]]  # [Dv / 16][4]: row g or g + 8, head

    @classmethod
    def empty(cls, ops: Any, v_head_dim: int, reference: float) -> State:
        zero = ops.const_f(0.0)
        out = [[zero] * 4 for _ in range(v_head_dim // 16)]
        return cls([ops.const_f(reference)] * 2, [zero] * 2, [zero] * 2, out)

    def registers(self) -> list[Any]:
        return [*self.m, *self.l, *self.minima, *(x for row in self.out for x in row)]

    @classmethod
    def of(cls, registers: list[Any]) -> State:
        rows = registers[6:]
        out = [rows[i : i + 4] for i in range(0, len(rows), 4)]
        return cls(registers[:2], registers[2:4], registers[4:6], out)


def state_registers(v_head_dim: int) -> int:
    return 6 + v_head_dim // 4


def load_steps(ops: Any, shape: Shape, pointer: Any) -> list[list[Any]]:
    """B operands of every step, packed by the host as [steps][32 lanes][2 registers].

    If ``paired``, those for columns 0 to 3 (the others are 0), then the same for columns 4 to 7.
    """
    lanes = [ops.lane, ops.xor(ops.lane, 16)][: shape.together]
    steps = range(len(shape.key_steps()))
    return [ops.load(pointer, ops.imul(lane, 8), 2, s * 256) for lane in lanes for s in steps]


def load_constants(ops: Any, shape: Shape, pointer: Any) -> list[list[Any]]:
    """f32[4][8]: the scale of the scores, then one constant per segment; for this lane's heads."""
    at = ops.imul(ops.iand(ops.t, 1) if shape.paired else ops.t, 8)
    return [
        [ops.bits_f32(x) for x in ops.load(pointer, ops.iadd(at, 32 * row), 2)] for row in range(4)
    ]


# ----------------------------------------------------------------------------------------- pages


def _down(ops: Any, x: Any, places: int) -> Any:
    return ops.shr(x, places)


def _row_operands(ops: Any, shape: Shape, words: list[Any]) -> Any:
    """A function (block, register) -> operand of one token's words, plane after plane."""
    held = {
        plane: words[plane * shape.key_registers : (plane + 1) * shape.key_registers]
        for plane in sorted(set(shape.planes))
    }
    shifted = {
        (plane, shift): [_down(ops, x, shift) for x in held[plane]] if shift else held[plane]
        for plane, (shift, _, _, _) in sorted(zip(shape.planes, shape.blocks, strict=True))
    }

    def operand(source: tuple[int, int]) -> Any:
        block, register = source
        shift, mask, _, _ = shape.blocks[block]
        return ops.iand(shifted[shape.planes[block], shift][register], mask | mask << 16)

    return operand


def _scores(
    ops: Any,
    shape: Shape,
    tiles: list[list[list[Any]]],
    q: list[list[Any]],
    constants: list[list[Any]],
) -> list[list[Any]]:
    """Sums of one tile of 16 tokens or of two, [segments][4], in units of the scores' scale."""
    zero = ops.const_f(0.0)
    if shape.codec == "uniform":
        sums = [[zero] * 4]
    else:  # the middle of the codes is taken off before the first step
        sums = [[*constants[1 + s], *constants[1 + s]] for s in range(shape.segments)]
    steps = shape.key_steps()
    for index, words in enumerate(tiles):
        rows = [_row_operands(ops, shape, row) for row in words]
        for step, (a, b, segment) in enumerate(steps):
            first = [row(a) for row in rows]
            second = [row(b) for row in rows] if b is not None else first  # q is 0 there
            operand = [first[0], first[1], second[0], second[1]]
            query = q[index * len(steps) + step]
            sums[segment] = ops.mma_f16(sums[segment], operand, query)
    return sums


def _key_scales(ops: Any, shape: Shape, meta: Any, unit: Any) -> list[Any]:
    """A token's scales times the scores' unit, per segment; uniform: and its minimum."""
    if shape.codec == "uniform":
        return [ops.fmul(ops.f16_lo(meta), unit), ops.f16_lo(ops.shr(meta, 16))]
    stored = (ops.iand(ops.shr(meta, 9), 0x7F80), meta, ops.iand(ops.shr(meta, 17), 0x7F80))
    return [ops.fmul(ops.f16_lo(x), unit) for x in stored]


def page_step(
    ops: Any,
    shape: Shape,
    pointers: tuple[Any, ...],
    q: list[list[Any]],
    constants: list[list[Any]],
    state: State,
    left: Any,
    started: Any,
) -> State:
    """One page per ``warps_per_page`` warps: scores, weights, output; no other warp is waited for.

    The exact running maximum costs a reduction per page. A *reference* below which float16 can hold
    everything does as well: a lane that sees p * scale_v leave float16 asks for a new one, and only
    then does the warp reduce, rescale and redo the page's weights.

    Args:
        pointers: the iteration's K words, V words, K and V metadata in shared memory.
        left: pages of the iteration that exist. started: whether there is a reference.
    """
    keys, values, key_meta, value_meta = pointers
    page, part = ops.divmod_warp(shape.warps_per_page)
    valid = ops.less(page, left)
    row = ops.iadd(ops.imul(ops.shr(ops.g, 1), 4), ops.iand(ops.g, 1))  # of the first of 2 tokens
    token = ops.iadd(ops.iadd(row, ops.imul(part, 16 * shape.tiles)), ops.imul(page, PAGE))
    width = shape.head_dim * shape.key_bits // 8  # bytes of one token's words
    plane = shape.head_dim // 4  # and of a plane of them

    together, step = shape.together, 2**shape.value_bits
    # Of its two tiles a lane weighs the first in columns 0 to 3 and the second in columns 4 to 7.
    second = ops.shr(ops.t, 1) if shape.paired else ops.const_i(0)

    def scored(group: int, reference: list[Any], token: Any) -> list[Any]:
        """Scores minus the reference of a tile's tokens g and g + 8: [h][e] at 2 h + e."""
        at = ops.iadd(ops.imul(token, width), ops.imul(ops.t, plane // 4))
        tiles = range(group * together, (group + 1) * together)
        words = [
            [
                [
                    word
                    for p in sorted(set(shape.planes))
                    for word in ops.load(
                        keys, at, shape.key_registers, (16 * tile + 2 * h) * width + p * plane
                    )
                ]
                for h in range(2)
            ]
            for tile in tiles
        ]
        sums = _scores(ops, shape, words, q, constants)
        out = []
        for h in range(2):
            scales = _key_scales(ops, shape, metadata(key_meta, group, h, token), constants[0][0])
            for e in range(2):
                x = ops.fneg(reference[e])
                if shape.codec == "uniform":
                    x = ops.fma(constants[1][e], scales[1], x)
                for segment, total in enumerate(sums):
                    x = ops.fma(total[2 * h + e], scales[segment], x)
                out.append(x)
        return out

    def metadata(memory: Any, group: int, h: int, token: Any) -> Any:
        """The word of token g or g + 8 of this lane's tile of a group."""
        own = ops.iadd(token, ops.imul(second, 16))
        return ops.load(memory, ops.imul(own, 4), 1, 4 * (16 * group * together + 2 * h))[0]

    def factor(group: int) -> float:
        """Of the mask of a group's first tile; the second's is 2^value_bits below it."""
        return shape.value_factor / step ** (group * together % shape.value_masks)

    def by_tile(first: float, other: float) -> Any:
        if not shape.paired:
            return ops.const_f(first)
        return ops.select(ops.less(second, 1), ops.const_f(first), ops.const_f(other))

    def scales_and_minima(group: int, token: Any) -> list[tuple[Any, Any]]:
        """V scale times the factor of the tile's mask, and V minimum, of tokens g and g + 8."""
        times = by_tile(factor(group), factor(group) / step)
        least = ops.const_f(shape.value_factor * TINY)
        out = []
        for h in range(2):
            meta = metadata(value_meta, group, h, token)
            scale = ops.fma(ops.f16_lo(meta), times, least)
            out.append((scale, ops.f16_lo(ops.shr(meta, 16))))
        return out

    def separately(
        visit: Callable[[int, list[Any]], list[Any]], held: list[Any], more: int
    ) -> list[Any]:
        """``held`` after a visit of every group, which appends to it ``more`` zeros otherwise.

        Water-filled keys: a branch between the halves of the groups, on what is the same for both.
        Without it the compiler computes the sums of all groups side by side, in registers that a
        third block per multiprocessor needs (198 instead of 162 at 128 channels). Uniform keys have
        a third of these sums and are faster side by side.
        """
        groups = range(shape.tiles // together)
        if shape.codec == "uniform":
            for group in groups:
                held = visit(group, held)
            return held
        for some in (groups[: len(groups) // 2], groups[len(groups) // 2 :]):

            def run(some: range = some, held: list[Any] = held) -> list[Any]:
                for group in some:
                    held = visit(group, held)
                return held

            exist = ops.less(ops.iadd(token, 16 * together * some.start), ops.imul(left, PAGE))
            held = ops.if_(exist, run, [*held, *[ops.const_i(0)] * (more * len(some))])
        return held

    def weigh(reference: list[Any], l: list[Any], low: list[Any], token: Any) -> list[Any]:
        """Weights onto l and the minima's sums: [l, l, low, low, packed p * scale_v ...]."""

        def visit(group: int, old: list[Any]) -> list[Any]:
            scores, held = scored(group, reference, token), scales_and_minima(group, token)
            l, low, packed = old[:2], old[2:4], old[4:]
            for h, (scale, minimum) in enumerate(held):
                scaled = []
                for e in range(2):
                    p = ops.ex2(scores[2 * h + e])
                    l[e] = ops.fadd(l[e], p)
                    low[e] = ops.fma(p, minimum, low[e])
                    scaled.append(ops.fmul(p, scale))
                packed.append(ops.pack_f16(*scaled))
            return [*l, *low, *packed]

        return separately(visit, [*l, *low], 2)

    reference = [ops.select(valid, m, ops.const_f(-MASKED)) for m in state.m]
    count = 2 * shape.tiles // together  # registers of packed weights

    def under_reference() -> list[Any]:
        weighed = weigh(reference, state.l, state.minima, token)
        total = weighed[4]
        for x in weighed[5:]:
            total = ops.add_f16x2(total, x)
        # bit 15 of a half is set by adding 2^10 exactly where its exponent is all ones: inf or NaN
        return [*weighed, ops.iand(ops.iadd(total, 0x04000400), 0x80008000 - (1 << 32))]

    # A block's first page has no reference yet, and is weighed once, not twice.
    unknown = [*state.l, *state.minima, *[ops.const_i(0)] * count, ops.const_i(1)]
    *weighed, overflow = ops.if_(started, under_reference, unknown)
    renew = ops.any_warp(ops.nonzero(overflow))

    def again() -> list[Any]:
        """Everything once more, rather than registers that hold the scores until now."""
        hidden = ops.opaque(token)
        zero = [ops.const_f(0.0)] * 2

        def visit(group: int, tops: list[Any]) -> list[Any]:
            scores, held = scored(group, zero, hidden), scales_and_minima(group, hidden)
            log = math.log2(factor(group))
            unfold = by_tile(-log, shape.value_bits - log)
            for h, (scale, _) in enumerate(held):
                weight = ops.fadd(ops.lg2(scale), unfold)
                tops = [ops.fmax(tops[e], ops.fadd(scores[2 * h + e], weight)) for e in range(2)]
            return tops

        tops = separately(visit, [ops.const_f(MASKED)] * 2, 0)
        new, shrink = [], []
        for e in range(2):
            for distance in (4, 8, 16):
                tops[e] = ops.fmax(tops[e], ops.shfl_xor(tops[e], distance))
            old = ops.select(started, state.m[e], ops.const_f(LOWEST))
            new.append(ops.select(valid, ops.fmax(tops[e], old), old))
            shrink.append(ops.ex2(ops.fadd(old, ops.fneg(new[e]))))
        scale = lambda pair: [ops.fmul(x, c) for x, c in zip(pair, shrink, strict=True)]  # noqa: E731
        use = [ops.select(valid, m, ops.const_f(-MASKED)) for m in new]
        values = weigh(use, scale(state.l), scale(state.minima), ops.opaque(hidden))
        out = [ops.fmul(x, shrink[i % 2]) for row in state.out for i, x in enumerate(row)]
        return [*new, *values, *out]

    kept = [*state.m, *weighed, *(x for row in state.out for x in row)]
    chosen = ops.if_(renew, again, kept)
    packed, chosen = chosen[6 : 6 + count], chosen[:6] + chosen[6 + count :]
    state = State.of(chosen)
    weights = []
    for group in range(shape.tiles // together):
        both = [ops.movmatrix(x) for x in packed[2 * group : 2 * group + 2]]
        if not shape.paired:
            weights.append(both)
            continue
        masks = [ops.isub(ops.shr(ops.g, 2), 1), ops.isub(ops.const_i(0), ops.shr(ops.g, 2))]
        weights += [[ops.iand(x, mask) for x in both] for mask in masks]
    _add_values(ops, shape, values, page, part, weights, state.out)
    return state


def _add_values(
    ops: Any, shape: Shape, values: Any, page: Any, part: Any, weights: Any, out: list[list[Any]]
) -> None:
    """out += V^T P^T over this warp's tokens; code j of a word belongs to tile j of the page.

    At 4 bits a word holds four codes and a channel two planes of words: tiles 0 to 3 and 4 to 7.
    """
    bits, codes = shape.value_bits, 16 // shape.value_bits  # of a word
    stride = 16 * bits  # bytes of a channel's words
    at = ops.iadd(
        ops.iadd(ops.imul(page, shape.v_head_dim * stride), ops.imul(ops.g, stride)),
        ops.imul(ops.t, 8),
    )
    first = ops.imul(part, shape.tiles)  # the page's tile that this warp begins with
    if bits == 4 and shape.warps_per_page > 1:
        at = ops.iadd(at, ops.imul(ops.shr(first, 2), 32))
    for mt in range(shape.v_head_dim // 16):
        rows: list[list[Any]] = []
        for tile in range(shape.tiles):
            if tile % codes == 0:
                offset = 32 * (tile // codes)
                rows = [
                    ops.load(values, ops.iadd(at, (16 * mt + 8 * h) * stride + offset), 2)
                    for h in range(2)
                ]
                if shape.tiles < codes:  # the warps of a page share its words
                    places = ops.imul(ops.iand(first, codes - 1), bits)
                    rows = [[ops.shr(x, places) for x in row] for row in rows]
            elif tile % codes == codes // 2:
                rows = [[_down(ops, x, 8) for x in row] for row in rows]
            mask = (2**bits - 1) << bits * (tile % shape.value_masks)
            (a0, a2), (a1, a3) = [[ops.iand(x, mask | mask << 16) for x in row] for row in rows]
            out[mt] = ops.mma_f16(out[mt], [a0, a1, a2, a3], weights[tile])


# ----------------------------------------------------------------------------------------- merge


def finish(
    ops: Any,
    state: State,
    scale: float,
    paired: bool,
    columns: int,
    scratch: Any,
    small: Any,
    out: Any,
    out_ml: Any,
) -> None:
    """Join the four warps and store out f32[columns, Dv] and max and sum f32[2, 8] of this block.

    Args:
        scale: of the outputs' sums. paired: whether columns c and c + 4 are the same head's.
        columns: 4 or 8, of which the outputs are stored.
        scratch: f32[4, Dv, 8] and small: f32[2, 4, 8] in shared memory; every earlier reader of
            them is past its last read when the first barrier here is passed.
    """
    v_head_dim = 16 * len(state.out)
    l, minima = [list(state.l), list(state.minima)]
    for pair in (l, minima):
        for e in range(2):
            for distance in (4, 8, 16):
                pair[e] = ops.fadd(pair[e], ops.shfl_xor(pair[e], distance))
    pair_at = ops.imul(ops.t, 8)
    own = ops.iadd(ops.imul(ops.warp, 4 * HEADS), pair_at)
    ops.barrier()
    ops.store(small, own, state.m)
    ops.barrier()
    halves = [0, 16] if paired else [0]  # what a column's bytes are XORed with

    def joined(memory: Any, at: Any, stride: int, first: int, combine: Any) -> list[Any]:
        """A pair of columns over all warps and halves, in pairs of equal distance."""
        parts = [
            [ops.bits_f32(x) for x in ops.load(memory, ops.xor(at, half), 2, (first + w) * stride)]
            for half in halves
            for w in range(WARPS)
        ]
        while len(parts) > 1:
            parts = [
                [combine(*x) for x in zip(*parts[i : i + 2], strict=True)]
                for i in range(0, len(parts), 2)
            ]
        return parts[0]

    top = joined(small, pair_at, 4 * HEADS, 0, ops.fmax)
    shrink = [ops.ex2(ops.fadd(state.m[e], ops.fneg(top[e]))) for e in range(2)]
    ops.store(
        small, ops.iadd(own, 4 * HEADS * WARPS), [ops.fmul(l[e], shrink[e]) for e in range(2)]
    )
    plane = v_head_dim * HEADS * 4
    base = ops.imul(ops.warp, plane)
    for mt, row in enumerate(state.out):
        for h in range(2):
            value = [
                ops.fmul(ops.fma(row[2 * h + e], ops.const_f(scale), minima[e]), shrink[e])
                for e in range(2)
            ]
            at = ops.iadd(ops.imul(ops.iadd(ops.g, 16 * mt + 8 * h), HEADS * 4), pair_at)
            ops.store(scratch, ops.iadd(base, at), value)
    ops.barrier()
    for i in range(v_head_dim * columns // 2 // 128):  # a channel of a pair of columns each
        index = ops.iadd(ops.thread, 128 * i)
        pair = ops.shr(index, v_head_dim.bit_length() - 1)
        channel = ops.iand(index, v_head_dim - 1)
        at = ops.iadd(ops.imul(channel, HEADS * 4), ops.imul(pair, 8))
        place = ops.imul(ops.iadd(ops.imul(pair, 2 * v_head_dim), channel), 4)
        for e, value in enumerate(joined(scratch, at, plane, 0, ops.fadd)):
            ops.store(out, ops.iadd(place, e * v_head_dim * 4), [value])
    total = joined(small, pair_at, 4 * HEADS, WARPS, ops.fadd)
    ops.store(out_ml, pair_at, top)  # every warp and lane g stores the same
    ops.store(out_ml, ops.iadd(pair_at, 4 * HEADS), total)
