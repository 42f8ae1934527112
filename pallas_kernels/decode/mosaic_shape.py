"""The static shape of the decode kernel: which codes of a word are which operands of its steps.

A u16 word of codes ANDed with a mask and read as float16 is code * factor * 2^-24 exactly: the
subnormals and the first binades are one linear grid. So one AND makes two operands, and the factors
go into the other operand. Which channel or token is which k is free as long as both operands agree:
lane t of a row reads one contiguous piece of it, and no operand is ever shuffled.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from pallas_kernels.format import KeyCodec

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

    def metadata_offset(self, group: int, h: int) -> int:
        """Bytes from the metadata of the warp's first token to that of a group's row g or g + 8."""
        return 4 * (16 * group * self.together + 2 * h)

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
