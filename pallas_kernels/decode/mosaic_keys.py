"""The keys of a warp's tokens: their words as operands, and the scores of a tile of 16 tokens."""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_kernels.decode import mosaic_bytes
from pallas_kernels.decode.mosaic_shape import Operand, Shape, key_operands, key_pieces


def query_entries(shape: Shape) -> int:
    """Pairs of registers that hold a query for one tile: of every step, or of every source."""
    if mosaic_bytes.as_bytes(shape):
        return len(mosaic_bytes.sources(shape))
    return len(shape.key_steps())


def load_steps(ops: Any, shape: Shape, pointer: Any) -> list[list[Any]]:
    """B operands of every entry, packed as [entries][32 lanes][2 registers].

    If ``paired``, those for columns 0 to 3 (the others are 0), then the same for columns 4 to 7.
    """
    lanes = [ops.lane, ops.xor(ops.lane, 16)][: shape.together]
    entries = range(query_entries(shape))
    return [ops.load(pointer, ops.imul(lane, 8), 2, i * 256) for lane in lanes for i in entries]


def lane_number(ops: Any, pair: tuple[int, int], size: int = 1) -> Any:
    """``size`` times a pair of ``mosaic_shape.Piece`` for this lane."""
    a, b = pair
    if a == 2 * b:
        return ops.imul(ops.t, b * size)
    even, odd = ops.shr(ops.t, 1), ops.iand(ops.t, 1)
    return ops.iadd(ops.imul(even, a * size), ops.imul(odd, b * size))


def load_constants(ops: Any, shape: Shape, pointer: Any) -> list[list[Any]]:
    """f32[4][8]: the scale of the scores, then one constant per segment; for this lane's heads."""
    at = ops.imul(ops.iand(ops.t, 1) if shape.paired else ops.t, 8)
    return [
        [ops.bits_f32(x) for x in ops.load(pointer, ops.iadd(at, 32 * row), 2)] for row in range(4)
    ]


@dataclasses.dataclass(frozen=True)
class Keys:
    """An iteration's keys in shared memory and the query that they are multiplied by.

    Args:
        words, metadata: pointers. q, constants: of ``load_steps`` and ``load_constants``.
        second: if ``paired``, which of two tiles this lane weighs.
    """

    ops: Any
    shape: Shape
    words: Any
    metadata: Any
    q: list[list[Any]]
    constants: list[list[Any]]
    second: Any

    def scores(self, group: int, reference: list[Any], token: Any) -> list[Any]:
        """Scores minus the reference of a tile's tokens g and g + 8: [h][e] at 2 h + e."""
        ops, shape = self.ops, self.shape
        sums = self._sums(self._tiles(group, token))
        out = []
        for h in range(2):
            own = ops.iadd(token, ops.imul(self.second, 16))
            (meta,) = ops.load(self.metadata, ops.imul(own, 4), 1, shape.metadata_offset(group, h))
            units = self.constants[0] if mosaic_bytes.as_bytes(shape) else self.constants[0][:1]
            scaled = [self._scales(meta, unit) for unit in units]  # as bytes: a unit for each head
            for e in range(2):
                scales = scaled[e % len(scaled)]
                x = ops.fneg(reference[e])
                if shape.codec == "uniform":
                    x = ops.fma(self.constants[1][e], scales[1], x)
                for segment, total in enumerate(sums):
                    x = ops.fma(total[2 * h + e], scales[segment], x)
                out.append(x)
        return out

    def _tiles(self, group: int, token: Any) -> list[list[list[list[Any]]]]:
        """Words of tokens g and g + 8 of the group's tiles: the registers of every piece."""
        ops, shape = self.ops, self.shape
        width = shape.head_dim * shape.key_bits // 8  # bytes of one token's words
        own = ops.imul(token, width)
        places = [ops.iadd(own, lane_number(ops, x.place)) for x in key_pieces(shape)]

        def words(row: int) -> list[list[Any]]:
            held = []
            for piece, at in zip(key_pieces(shape), places, strict=True):
                plus = row * width + piece.start
                registers = ops.load(self.words, at, piece.registers, plus)
                if piece.shared:
                    places_down = ops.imul(ops.iand(ops.t, 1), 8)
                    registers = [ops.shr(x, places_down) for x in registers]
                held.append(registers)
            return held

        tiles = range(group * shape.together, (group + 1) * shape.together)
        return [[words(16 * tile + 2 * h) for h in range(2)] for tile in tiles]

    def _row_operands(self, words: list[list[Any]]) -> Any:
        """A function of an ``Operand`` that makes it of one token's words."""
        ops = self.ops
        needed = sorted({(x.piece, x.read.shift) for x in key_operands(self.shape)})
        shifted = {
            (piece, shift): [ops.shr(x, shift) for x in words[piece]] if shift else words[piece]
            for piece, shift in needed
        }

        def operand(source: Operand) -> Any:
            read = source.read
            held = shifted[source.piece, read.shift][source.register]
            return ops.iand(held, read.mask | read.mask << 16)

        return operand

    def _sums(self, tiles: list[list[list[list[Any]]]]) -> list[list[Any]]:
        """Sums of one tile of 16 tokens or of two, [segments][4], in units of the scores' scale."""
        ops, shape, constants = self.ops, self.shape, self.constants
        if mosaic_bytes.as_bytes(shape):
            return [mosaic_bytes.sums(ops, shape, tiles, self.q)]
        zero = ops.const_f(0.0)
        if shape.codec == "uniform":
            sums = [[zero] * 4]
        else:  # the middle of the codes is taken off before the first step
            sums = [[*constants[1 + s], *constants[1 + s]] for s in range(shape.segments)]
        steps = shape.key_steps()
        for index, words in enumerate(tiles):
            rows = [self._row_operands(row) for row in words]
            for step, (a, b) in enumerate(steps):
                first = [row(a) for row in rows]
                second = [row(b) for row in rows] if b is not None else first  # q is 0 there
                operand = [first[0], first[1], second[0], second[1]]
                query = self.q[index * len(steps) + step]
                sums[a.segment] = ops.mma_f16(sums[a.segment], operand, query)
        return sums

    def _scales(self, meta: Any, unit: Any) -> list[Any]:
        """A token's scales times the scores' unit, per segment; uniform: and its minimum."""
        ops = self.ops
        if self.shape.codec == "uniform":
            return [ops.fmul(ops.f16_lo(meta), unit), ops.f16_lo(ops.shr(meta, 16))]
        stored = (ops.iand(ops.shr(meta, 9), 0x7F80), meta, ops.iand(ops.shr(meta, 17), 0x7F80))
        return [ops.fmul(ops.f16_lo(x), unit) for x in stored]
