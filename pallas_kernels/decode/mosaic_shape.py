"""The static shape of the decode kernel: which codes of a word are which operands of its steps.

A u16 word of codes ANDed with a mask and read as float16 is code * factor * 2^-24 exactly: the
subnormals and the first binades are one linear grid. So one AND makes two operands, and the factors
go into the other operand (``packing.reads``). Which channel or token is which k is free as long as
both operands agree: lane t of a row reads one contiguous piece of each plane of its words, and no
operand is ever shuffled.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from pallas_kernels.format import waterfill_middles, waterfill_segments
from pallas_kernels.packing import BLOCKS, KeyCodec, Read, layout, reads

HEADS = 8  # columns of a tensor-core step
WARPS = 4
GRID = 2.0**24  # codes are read as multiples of 2^-24
# The reference of a warp is set so that the largest p * scale_v * factor is 2^10: float16 then
# holds 2^6 more before it overflows and 2^34 less before it is lost (design section 5).
TOP = 10
TINY = 2.0**-34  # added to V scales: a page of scale 0 still bounds p (its codes are all 0)
MASKED = -1e30
LOWEST = -1e25  # the reference where nothing is visible: exp2(MASKED - LOWEST) = 0


@dataclasses.dataclass(frozen=True)
class Piece:
    """What a lane holds of one plane of a token's key words.

    ``place`` and ``channel`` are pairs (a, b): of lane t, a (t >> 1) + b (t & 1).
    """

    start: int  # bytes before the plane
    registers: int  # of two words each
    place: tuple[int, int]  # of the lane's words in the plane, bytes
    channel: tuple[int, int]  # that its first word holds, counted from the block's first
    shared: bool  # with the lane beside it: the even one takes low bytes, the odd one high ones


@dataclasses.dataclass(frozen=True)
class Operand:
    """A register of a lane's words as 2 elements of a step, the codes of one field of a block."""

    piece: int
    register: int
    read: Read
    channel: int  # the first of lane 0's two
    segment: int  # of the block, which has a scale of its own


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
    def segments(self) -> int:
        """Of the channels, each with a scale."""
        return 1 if self.codec == "uniform" else 3

    @property
    def middles(self) -> tuple[float, ...]:
        """The middle of the codes of each water-filled segment."""
        return waterfill_middles(self.key_bits)

    @property
    def key_factor(self) -> int:
        """The largest factor of a field: q is multiplied by key_factor / factor."""
        return max(operand.read.factor for operand in key_operands(self))

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

    def key_steps(self) -> tuple[tuple[Operand, Operand | None], ...]:
        """Tensor-core steps of the scores, each in one segment.

        None: the step has one half too many, whose query is 0.
        """
        steps: list[tuple[Operand, Operand | None]] = []
        for segment in range(self.segments):
            halves: list[Any] = [x for x in key_operands(self) if x.segment == segment]
            halves += [None] * (len(halves) % 2)
            steps += zip(halves[::2], halves[1::2], strict=True)
        return tuple(steps)


def segment_of(codec: KeyCodec, block: int) -> int:
    """The segment of a block's channels."""
    if codec == "uniform":
        return 0
    return [block < part.stop for _, part in waterfill_segments(BLOCKS)].index(True)


@functools.cache
def key_pieces(shape: Shape) -> tuple[Piece, ...]:
    """A lane's share of every plane: a quarter, and at least a register.

    A half plane of 64 channels has one word per lane. Two lanes read the same register of it then.
    """
    pieces, start = [], 0
    for plane in layout(shape.codec, shape.key_bits):
        size = shape.head_dim // (8 if plane.half else 4)  # bytes
        own = size // 4
        if own >= 4:
            pieces.append(Piece(start, own // 4, (2 * own, own), (own, own // 2), False))
        else:
            pieces.append(Piece(start, 1, (4, 0), (2, shape.head_dim // 16), True))
        start += size
    return tuple(pieces)


@functools.cache
def key_operands(shape: Shape) -> tuple[Operand, ...]:
    """Every register of codes that a lane multiplies, in the order of the blocks."""
    planes, block = layout(shape.codec, shape.key_bits), shape.head_dim // BLOCKS
    found = [
        Operand(
            number,
            register,
            read,
            read.block * block + 2 * register + read.high * block // 2,
            segment_of(shape.codec, read.block),
        )
        for number, (piece, plane) in enumerate(zip(key_pieces(shape), planes, strict=True))
        for read in reads(plane, high=not piece.shared)
        for register in range(piece.registers)
    ]
    return tuple(sorted(found, key=lambda x: (x.read.block, x.read.above)))


def query_channels(shape: Shape) -> np.ndarray:
    """i32[steps, 4 (t), 2 (half), 2]: the channel of each k of a step; -1 where there is none."""
    steps = shape.key_steps()
    channel, pieces = np.full((len(steps), 4, 2, 2), -1), key_pieces(shape)
    for step, halves in enumerate(steps):
        for half, operand in enumerate(halves):
            if operand is not None:
                pair, odd = pieces[operand.piece].channel
                for t in range(4):
                    first = operand.channel + pair * (t >> 1) + odd * (t & 1)
                    channel[step, t, half] = first, first + 1
    return channel
