"""X in pieces, for head_dims whose X is too large for shared memory.

A piece is 32 rows of one of X's two terms: 16 KiB at head_dim 256, of 256 KiB. It comes into a ring
of four by a bulk copy, from a layout that XLA makes before the launch, and both warpgroups of a
block multiply a tile of their own with it. So 128 rows share what a piece costs, and a tile waits
for the slower warpgroup. The smallest term goes first.

    full[stage]: the copy is there.   free[stage]: every warpgroup is done with the piece.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float16

from pallas_kernels.write.mosaic_fragments import STAGES, X_EXPONENT, Side, operand_channels

LINE = 256  # numbers: the longest row of a bulk copy's box


def pieces_of(
    side: Side, x: Float[Array, "K D D"], mu: Float[Array, "K D"] | None
) -> tuple[Float16[Array, "K pieces lines 256"], Float[Array, "K N"]]:
    """X as ``Stream`` takes it, and what a warpgroup's own shared memory begins with.

    Returns:
        Pieces of X times a power of two that makes its largest number 4 to 8, each as B of
        ``wgmma_f16``; and the inverse of that power, three numbers that mean nothing, and for keys
        -mu X in the same scale by column.
    """
    heads, dim = x.shape[:2]
    exponent = lax.bitcast_convert_type(jnp.abs(x).max((1, 2)), jnp.int32) >> 23
    biased = jnp.clip(254 + X_EXPONENT - exponent, 1, 253)
    both = jnp.stack([biased, 254 - biased]) << 23
    power, inverse = lax.bitcast_convert_type(both, jnp.float32)
    columns = side.channel(np.arange(dim))
    held = (x * power[:, None, None])[:, operand_channels(dim).reshape(-1)][:, :, columns]
    held = held.reshape(heads, dim // 8, 8, dim).swapaxes(2, 3)  # [K, D / 8, D, 8]
    high = lax.reduce_precision(held, 5, 10)
    terms = jnp.stack([held - high, high], 1).astype(jnp.float16)
    first = jnp.broadcast_to(inverse[:, None], (heads, 4))
    if mu is not None:
        means = jnp.einsum("kd,kde->ke", mu, x, precision=lax.Precision.HIGHEST)
        first = jnp.concatenate([first, -(means * power[:, None])[:, columns]], 1)
    return terms.reshape(heads, side.pieces, -1, LINE), first


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

    def end(self) -> None:
        """What is on its way arrives before the block ends."""
        for stage in range(STAGES - 1):
            plgpu.barrier_wait(self.full.at[stage])

        @pl.when(self.leads)
        def _() -> None:
            plgpu.barrier_wait(self.free.at[STAGES - 1])
