"""How the pages' kernel is cut, and the rings of tiles between its warpgroups."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclasses.dataclass(frozen=True)
class Config:
    """How the pages' kernel is cut.

    Args:
        splits: blocks that share the pages of the same rows.
        pages: pages in shared memory or on their way there. stages: steps of unpacked tiles.
    """

    splits: int = 1
    pages: int = 3
    stages: int = 2

    def __post_init__(self) -> None:
        for name in ("splits", "pages", "stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"Config.{name}={getattr(self, name)}: must be at least 1")


@dataclasses.dataclass(frozen=True)
class Tiled:
    """A ring of tiles between a producer and the consumers; a step's tile is that of its stage."""

    tiles: Any
    full: Any  # barriers: the tile is written
    free: Any  # barriers: both consumers have read it
    stages: int

    def stage(self, step: Any) -> Any:
        return lax.rem(step, jnp.int32(self.stages))

    def next(self, step: Any) -> Any:
        """The tile to write, when the consumers are done with what it held."""
        stage = self.stage(step)
        pl.when(step >= self.stages)(lambda: plgpu.barrier_wait(self.free.at[stage]))
        return self.tiles.at[stage]

    def wait(self, step: Any) -> Any:
        """The tile to read, when it is written."""
        plgpu.barrier_wait(self.full.at[self.stage(step)])
        return self.tiles.at[self.stage(step)]

    def release(self, step: Any) -> None:
        plgpu.barrier_arrive(self.free.at[self.stage(step)])

    def drain(self, steps: Any) -> None:
        """Every phase of a barrier is waited for before a block ends."""

        @pl.loop(jnp.maximum(steps - self.stages, 0), steps)
        def _(step: Any) -> None:
            plgpu.barrier_wait(self.free.at[self.stage(step)])
