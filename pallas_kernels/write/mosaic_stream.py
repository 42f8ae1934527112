"""X in pieces, for head_dims whose X is too large for shared memory.

A piece is 32 rows of one of X's two terms: 16 KiB at head_dim 256, of 256 KiB. It comes into a ring
of four by a bulk copy, from a layout that XLA makes before the launch, and both warpgroups of a
block multiply a tile of their own with it. So 128 rows share what a piece costs, and a tile waits
for the slower warpgroup. The smallest term goes first.

    full[stage]: the copy is there.   free[stage]: every warpgroup is done with the piece.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float16

from pallas_kernels.write.mosaic_shape import STAGES, Side
from pallas_kernels.write.mosaic_transform import X_EXPONENT

LINE = 256  # numbers: the longest row of a bulk copy's box


def by_column(side: Side, x: Any, back: bool = False) -> Any:
    """The last axis in ``Side.channel``'s order; ``back``: from it."""
    if not side.keys:
        return x
    split = (8, side.pairs, 4, 2) if back else (8, 4, side.pairs, 2)
    return x.reshape(*x.shape[:-1], *split).swapaxes(-2, -3).reshape(x.shape)


def by_step(x: Any, back: bool = False) -> Any:
    """X's rows in the order of ``operand_channels``; ``back``: from it."""
    *heads, _, columns = x.shape
    split = (-1, 2, 2, 4, 2) if back else (-1, 4, 2, 2, 2)
    order = (0, 3, 1, 2, 4) if back else (0, 2, 3, 1, 4)
    axes = (*range(len(heads)), *(len(heads) + i for i in order), len(heads) + 5)
    return x.reshape(*heads, *split, columns).transpose(axes).reshape(x.shape)


def operands(
    sides: Sequence[Side], xs: Sequence[Float[Array, "K D D"]], mu: Float[Array, "K Dk"]
) -> tuple[Float16[Array, "SK pieces lines 256"], Float[Array, "SK 4+D"]]:
    """X of all streamed sides as ``Stream`` takes it, and what goes with it into a warpgroup's own
    shared memory: the heads of the first side, then those of the second.

    All together, as each of XLA's kernels costs a launch: four, for one side or both.

    Returns:
        Pieces of X times a power of two that makes its largest number 4 to 8, each as B of
        ``wgmma_f16``; and the inverse of that power, three numbers that mean nothing, and for keys
        -mu X in the same scale by column.
    """
    dim, zero = sides[0].dim, jnp.float32(0)
    pairs = list(zip(sides, xs, strict=True))
    x = jnp.concatenate(xs)
    means = [mu if side.keys else jnp.zeros(x.shape[:2]) for side, x in pairs]
    tops, sums = lax.reduce(
        (jnp.abs(x), jnp.concatenate(means)[:, :, None] * x),
        (zero, zero),
        lambda a, b: (jnp.maximum(a[0], b[0]), a[1] + b[1]),
        (1,),
    )  # [S K, D]
    shift = -jnp.concatenate(
        [by_column(s, y) for s, y in zip(sides, jnp.split(sums, len(sides)), strict=True)]
    )
    exponent = lax.bitcast_convert_type(tops.max(1), jnp.int32) >> 23
    biased = jnp.clip(254 + X_EXPONENT - exponent, 1, 253)
    both = jnp.stack([biased, 254 - biased])[..., None] << 23
    power, inverse = lax.bitcast_convert_type(both, jnp.float32)  # [S K, 1]
    held = jnp.concatenate([by_step(by_column(side, x)) for side, x in pairs]) * power[..., None]
    held = held.reshape(len(x), dim // 8, 8, dim).swapaxes(2, 3)  # [S K, D / 8, D, 8]
    high = lax.reduce_precision(held, 5, 10)
    terms = jnp.stack([held - high, high], 1).astype(jnp.float16)
    first = jnp.broadcast_to(inverse, (len(x), 4))
    return (
        terms.reshape(len(x), sides[0].pieces, -1, LINE),
        jnp.concatenate([first, shift * power], 1),
    )


@dataclasses.dataclass(frozen=True)
class Stream:
    """The ring of pieces. ``pieces`` is a multiple of its stages: a piece's stage is its own.

    Args:
        matrix: f16[pieces, lines, 256], in global memory. ring: f16[stages lines, 256].
        full, free: barriers of each stage, one arrival and one of every warpgroup.
        leads: whether this warpgroup is the one that has pieces copied.
    """

    matrix: Any
    ring: Any
    full: Any
    free: Any
    leads: Any

    @property
    def pieces(self) -> int:
        return int(self.matrix.shape[0])

    def _stage(self, piece: int) -> Any:
        lines = self.matrix.shape[1]
        return self.ring.at[pl.ds(piece % STAGES * lines, lines)]

    def _copy(self, piece: int) -> None:
        full = self.full.at[piece % STAGES]
        plgpu.copy_gmem_to_smem(self.matrix.at[piece], self._stage(piece), full)

    def start(self) -> None:
        """All stages but the last begin to fill; the last is free."""

        @pl.when(self.leads)
        def _() -> None:
            for piece in range(STAGES - 1):
                self._copy(piece)

        plgpu.barrier_arrive(self.free.at[STAGES - 1])

    def visit(self, use: Callable[[int, Any], None]) -> None:
        """All of X, once: ``use`` each piece. The piece before is replaced meanwhile, with the one
        of the next turn in the end: the other warpgroup has had the time of a piece to be done."""
        for piece in range(self.pieces):
            plgpu.barrier_wait(self.full.at[piece % STAGES])
            use(piece, self._stage(piece))
            plgpu.barrier_arrive(self.free.at[piece % STAGES])

            @pl.when(self.leads)
            def _(ahead: int = piece + STAGES - 1) -> None:
                plgpu.barrier_wait(self.free.at[ahead % STAGES])
                self._copy(ahead % self.pieces)

    def pass_by(self, turns: int) -> None:
        """``turns`` times all of X, for a warpgroup that has no use for it."""
        lax.fori_loop(0, turns, lambda *_: self.visit(lambda *_: None), None)

    def end(self) -> None:
        """What is on its way arrives before the block ends."""
        for stage in range(STAGES - 1):
            plgpu.barrier_wait(self.full.at[stage])

        @pl.when(self.leads)
        def _() -> None:
            plgpu.barrier_wait(self.free.at[STAGES - 1])
