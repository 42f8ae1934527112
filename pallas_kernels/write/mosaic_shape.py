"""The static shape of the write kernel: what its programs are specialised for, and their memory.

Which channel is which column of a transformed row is free, so a lane's key words lie side by side
(``Side.channel``); which channel is which k of a step is free too (``mosaic_transform``).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from pallas_kernels.format import PAGE, KeyCodec, waterfill_segments
from pallas_kernels.packing import BLOCKS, Plane, layout

THREADS = 128
TERMS = 2  # float16 numbers that one number of X is the sum of
TILES = 4  # of 64 rows in a unit
UNIT = 2  # pages in a unit
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
