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
        """B operands of every tile, of the weights of tokens g and g + 8 of every group."""
        ops, weights = self.ops, []
        for group in range(self.shape.tiles // self.shape.together):
            both = [ops.movmatrix(x) for x in packed[2 * group : 2 * group + 2]]
            if not self.shape.paired:
                weights.append(both)
                continue
            masks = [ops.isub(ops.shr(ops.g, 2), 1), ops.isub(ops.const_i(0), ops.shr(ops.g, 2))]
            weights += [[ops.iand(x, mask) for x in both] for mask in masks]
        return weights

    def add(self, page: Any, part: Any, weights: list[list[Any]], out: list[list[Any]]) -> None:
        """out += V^T P^T over this warp's tokens; code j of a word belongs to tile j of the page.

        At 4 bits a word holds four codes and a channel two planes of words: tiles 0 to 3, 4 to 7.
        """
        ops, shape = self.ops, self.shape
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
                        ops.load(self.words, ops.iadd(at, (16 * mt + 8 * h) * stride + offset), 2)
                        for h in range(2)
                    ]
                    if shape.tiles < codes:  # the warps of a page share its words
                        places = ops.imul(ops.iand(first, codes - 1), bits)
                        rows = [[ops.shr(x, places) for x in row] for row in rows]
                elif tile % codes == codes // 2:
                    rows = [[ops.shr(x, 8) for x in row] for row in rows]
                mask = (2**bits - 1) << bits * (tile % shape.value_masks)
                (a0, a2), (a1, a3) = [[ops.iand(x, mask | mask << 16) for x in row] for row in rows]
                out[mt] = ops.mma_f16(out[mt], [a0, a1, a2, a3], weights[tile])
