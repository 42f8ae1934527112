"""The values of a warp's tokens: what weights are multiplied by before they are packed, products.

A word holds codes of several tokens of one channel, each read with a mask of its own. The masks'
factors go into the weights, from 2^TOP of the first mask downwards.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_kernels.decode.mosaic_shape import TINY, Shape


@dataclasses.dataclass(frozen=True)
class Values:
    """An iteration's values in shared memory.

    Args:
        words, metadata: pointers. second: if ``paired``, which of two tiles this lane weighs.
    """

    ops: Any
    shape: Shape
    words: Any
    metadata: Any
    second: Any

    def factor(self, group: int) -> float:
        """Of the mask of a group's first tile; the second's is 2^value_bits below it."""
        shape = self.shape
        codes = 2 ** (shape.value_bits * (group * shape.together % shape.value_masks))
        return shape.value_factor / codes

    def by_tile(self, first: float, other: float) -> Any:
        ops = self.ops
        if not self.shape.paired:
            return ops.const_f(first)
        return ops.select(ops.less(self.second, 1), ops.const_f(first), ops.const_f(other))

    def scales_and_minima(self, group: int, token: Any) -> list[tuple[Any, Any]]:
        """V scale times the factor of the tile's mask, and V minimum, of tokens g and g + 8."""
        ops, shape, factor = self.ops, self.shape, self.factor(group)
        times = self.by_tile(factor, factor / 2**shape.value_bits)
        least = ops.const_f(shape.value_factor * TINY)
        out = []
        for h in range(2):
            own = ops.iadd(token, ops.imul(self.second, 16))
            (meta,) = ops.load(self.metadata, ops.imul(own, 4), 1, shape.metadata_offset(group, h))
            scale = ops.fma(ops.f16_lo(meta), times, least)
            out.append((scale, ops.f16_lo(ops.shr(meta, 16))))
        return out

    def operands(self, packed: list[Any]) -> list[list[Any]]:
        """B operands of every tile, from the weights of tokens g and g + 8 of every group.

        A tile's less the next one's where its A operand holds the next one's in ``add``.
        """
        ops, n = self.ops, self.shape.value_masks
        both = [ops.movmatrix(x) for x in packed]
        pairs = [both[i : i + 2] for i in range(0, len(both), 2)]
        if not self.shape.paired:
            return [
                pair
                if tile % n == n - 1
                else [ops.sub_f16x2(x, y) for x, y in zip(pair, pairs[tile + 1], strict=True)]
                for tile, pair in enumerate(pairs)
            ]
        upper, weights = ops.less(3, ops.g), []  # columns 4 to 7: of the second of two tiles
        sign, zero = ops.const_i(0x80008000 - (1 << 32)), ops.const_i(0)
        flip = ops.select_i(upper, sign, zero)
        for group, pair in enumerate(pairs):
            weights.append([ops.xor(x, flip) for x in pair])
            if (2 * group + 1) % n == n - 1:
                following = [zero, zero]
            else:
                following = [ops.xor(x, sign) for x in pairs[group + 1]]
            weights.append(
                [ops.select_i(upper, x, y) for x, y in zip(pair, following, strict=True)]
            )
        return weights

    def add(self, page: Any, part: Any, weights: list[list[Any]], out: list[list[Any]]) -> None:
        """out += V^T P^T over this warp's tokens; code j of a word belongs to tile j of the page.

        The codes of a byte are read with masks from its lowest bit on, the last one with none: an
        operand holds the codes below its own too, which the weights take off again.

        At 4 bits a word holds four codes and a channel two planes of words: tiles 0 to 3, 4 to 7.
        """
        ops, shape = self.ops, self.shape
        bits, codes, n = shape.value_bits, 16 // shape.value_bits, shape.value_masks
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
            held, others_above = rows, True
            for tile in range(shape.tiles):
                if tile % codes == 0:
                    offset = 32 * (tile // codes)
                    rows = [
                        ops.load(self.words, ops.iadd(at, (16 * mt + 8 * h) * stride + offset), 2)
                        for h in range(2)
                    ]
                if tile % n == 0:
                    held, others_above = self._from_lowest_bit(rows, tile, first)
                a = held
                if tile % n < n - 1 or others_above:
                    mask = 2 ** (bits * (tile % n + 1)) - 1
                    a = [[ops.iand(x, mask | mask << 16) for x in row] for row in held]
                (a0, a2), (a1, a3) = a
                out[mt] = ops.mma_f16(out[mt], [a0, a1, a2, a3], weights[tile])

    def _from_lowest_bit(
        self, rows: list[list[Any]], tile: int, first: Any
    ) -> tuple[list[list[Any]], bool]:
        """Words whose halves begin with a tile's codes, and whether others lie above its byte's."""
        ops, shape = self.ops, self.shape
        bits, codes, n = shape.value_bits, 16 // shape.value_bits, shape.value_masks
        shared = shape.tiles < codes  # the warps of a page share its words
        if tile % codes == 0 and not shared:
            return rows, True
        place = ops.imul(ops.iand(first, codes - 1), bits) if shared else ops.const_i(0)
        if n * bits < 8:
            return [[ops.shr(x, place) for x in row] for row in rows], True
        byte = ops.iadd(ops.shr(place, 3), tile // n % 2)
        selector = ops.iadd(ops.imul(byte, 0x0101), 0x4240)  # the byte of both halves, and zeros
        return [[ops.prmt(x, ops.const_i(0), selector) for x in row] for row in rows], False
