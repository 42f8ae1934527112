"""The write kernel's body and launch: blocks, jobs and loops around the register programs.

A grid of (splits, KV heads): the first ``key_splits`` blocks of a head encode keys, the others
values, so a block brings one X into shared memory, once, and works through every ``splits``-th unit
of two pages with it. Its warpgroups take units in turn and meet at one barrier only, after X.

    source rows, global memory -> registers -> (k - mu) X -> codes -> words, straight to the pools

The pools are references that the kernel writes in place.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32

from pallas_kernels.format import Codec
from pallas_kernels.lanes import program
from pallas_kernels.layout import LayerKV, PageJobs, Transform
from pallas_kernels.write import mosaic_fragments as fragments
from pallas_kernels.write import mosaic_interpret as interpreted
from pallas_kernels.write.mosaic_fragments import UNIT, Place, Side
from pallas_kernels.write.mosaic_instructions import Instructions

PARAMS = plgpu.CompilerParams(
    approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
)


@dataclasses.dataclass(frozen=True)
class Config:
    """How a kernel is cut.

    Args:
        key_splits, value_splits: blocks that share the pages of one KV head's keys, or values.
        warpgroups: of a block, 1 to 4; each works on a unit of two pages of its own.
    """

    key_splits: int
    value_splits: int
    warpgroups: int = 4

    def __post_init__(self) -> None:
        for name in ("key_splits", "value_splits"):
            if getattr(self, name) < 1:
                raise ValueError(f"Config.{name}={getattr(self, name)}: must be at least 1")
        if not 1 <= self.warpgroups <= 4:
            raise ValueError(f"Config.warpgroups={self.warpgroups}: must be 1 to 4")


def shared_bytes(sides: tuple[Side, Side], warpgroups: int) -> int:
    """Shared memory of a block."""
    largest = lambda name: max(getattr(side, name) for side in sides)  # noqa: E731
    own = largest("buffer_bytes") + largest("own_bytes")
    return largest("matrix_bytes") + warpgroups * own


@dataclasses.dataclass(frozen=True)
class Body:
    """The static part of the kernel, and which of two ways its registers are run in."""

    sides: tuple[Side, Side]
    place: Place
    config: Config
    codec: Codec
    interpret: bool

    def __call__(
        self,
        page_id: Any,  # i32[J]
        row: Any,  # i32[J]
        offset: Any,  # i32[J]
        source_k: Any,  # bf16[X, K, H, D]
        rows_k: Any,  # source_k, or f32[J, K, T, D] transformed (``Side.given``)
        rows_v: Any,  # bf16[X, K, H, Dv], or f32[J, K, T, Dv] transformed
        x_k: Any,  # f32[K, D, D]
        mu: Any,  # f32[K, D]
        x_v: Any,  # f32[K, Dv, Dv]
        k_pages: Any,  # u16[P, K, T, D/8], written in place, as the next three
        v_pages: Any,  # u16[P, K, Dv, T/8]
        k_meta: Any,  # u32[P, K, T]
        v_meta: Any,  # u32[P, K, T]
        counts: Any,  # i32[splits, K, warpgroups, 2]
        matrix: Any,  # f16[TERMS Dmax^2]
        own: Any,  # f32[warpgroups, .], ``Side.own_bytes``
        buffer: Any,  # f32[warpgroups, .]
        ready: Any,  # X is in shared memory
    ) -> None:
        split, head = lax.axis_index("split"), lax.axis_index("head")
        warpgroup = lax.axis_index("warpgroup")
        found = counts.at[split, head, warpgroup]
        self.start_counts(found)
        shared = dict(
            page_id=page_id,
            row=row,
            offset=offset,
            keys=source_k,
            counts=found,
            matrix=matrix,
            own=own.at[warpgroup],
            buffer=buffer.at[warpgroup],
        )
        of_keys = split < self.config.key_splits

        @pl.when(of_keys)
        def _() -> None:
            refs = dict(shared, source=rows_k, pages=k_pages, meta=k_meta, x=x_k, mu=mu)
            self.run(self.sides[0], split, self.config.key_splits, head, warpgroup, refs, ready)

        @pl.when(jnp.logical_not(of_keys))
        def _() -> None:
            refs = dict(shared, source=rows_v, pages=v_pages, meta=v_meta, x=x_v, mu=mu)
            first = split - self.config.key_splits
            self.run(self.sides[1], first, self.config.value_splits, head, warpgroup, refs, ready)

    def run(
        self,
        side: Side,
        first: Any,
        splits: int,
        head: Any,
        warpgroup: Any,
        refs: dict[str, Any],
        ready: Any,
    ) -> None:
        """Every ``splits``-th unit from ``first`` on, if one of them has a page to write."""
        jobs, groups = self.place.jobs, self.config.warpgroups
        units = -(-jobs // UNIT)
        mine = lax.div(units - first + splits - 1, jnp.int32(splits))

        def page(unit: Any, i: Any) -> Any:
            job = unit * UNIT + i
            return jnp.where(job < jobs, refs["page_id"][jnp.minimum(job, jobs - 1)], -1)

        def wanted(unit: Any) -> Any:
            return jnp.maximum(page(unit, 0), page(unit, 1)) >= 0

        def looking(i: Any) -> Any:
            inside = jnp.minimum(first + splits * i, units - 1)
            return jnp.logical_and(i < mine, jnp.logical_not(wanted(inside)))

        start = lax.while_loop(looking, lambda i: i + 1, jnp.int32(0))

        @pl.when(start < mine)
        def _() -> None:
            if not side.given:
                with jax.named_scope("matrix"):
                    self.prepare(side, head, warpgroup, refs)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(ready)
                    plgpu.barrier_wait(ready)

            def step(unit: Any) -> Any:
                with jax.named_scope("unit"):
                    pl.when(wanted(unit))(lambda: self.write_unit(side, unit, head, refs))
                return unit + splits * groups

            lax.while_loop(lambda unit: unit < units, step, first + splits * (start + warpgroup))

    # ------------------------------------------------------------------------------- registers

    def start_counts(self, counts: Any) -> None:
        if self.interpret:
            counts[...] = jnp.zeros(2, jnp.int32)
            return

        def run(ops: Any, pointers: Any, *_: Any) -> Any:
            zero = ops.const_i(0)
            ops.store(pointers[0], zero, [zero, zero])
            return []

        program(run, refs=[counts])

    def prepare(self, side: Side, head: Any, warpgroup: Any, refs: dict[str, Any]) -> None:
        """This warpgroup's part of X, and all of its own shared memory."""
        share = self.config.warpgroups
        x, mu = refs["x"].at[head], refs["mu"].at[head]
        if self.interpret:
            interpreted.prepare(side, x, mu, refs["matrix"], refs["own"], warpgroup, share)
            return

        def run(_: Any, pointers: Any, scalars: Any, __: Any) -> Any:
            x, mu, matrix, held = pointers
            fragments.prepare(Instructions(), side, x, mu, matrix, held, scalars[0], share)
            return []

        program(run, refs=[x, mu, refs["matrix"], refs["own"]], scalars=[warpgroup])

    def write_unit(self, side: Side, unit: Any, head: Any, refs: dict[str, Any]) -> None:
        if self.interpret:
            interpreted.write_unit(side, self.place, self.codec, unit, head, refs)
            return
        names = [name for name in refs if name not in ("x", "mu")]

        def run(_: Any, pointers: Any, scalars: Any, __: Any) -> Any:
            held = dict(zip(names, pointers, strict=True))
            fragments.write_unit(Instructions(), side, self.place, scalars[0], scalars[1], held)
            return []

        program(run, refs=[refs[name] for name in names], scalars=[unit, head])


def launch(
    layer: LayerKV,
    source_k: Array,
    rows: tuple[Array, Array],
    transform: Transform,
    jobs: PageJobs,
    *,
    codec: Codec,
    sides: tuple[Side, Side],
    config: Config,
    interpret: Any = None,
) -> tuple[dict[str, Array], Int32[Array, "2"]]:
    """The four pools with the pages in place, and the counts.

    Args:
        rows: per side the source, or where ``Side.given`` the transformed rows of every job.
    """
    kv_heads, groups = source_k.shape[1], config.warpgroups
    splits = config.key_splits + config.value_splits
    page_id, row, offset = (
        jnp.asarray(x, jnp.int32) for x in (jobs.page_id, jobs.row, jobs.offset)
    )
    place = Place(page_id.shape[0], source_k.shape[2], kv_heads, source_k.shape[3])
    largest = lambda name: max(getattr(side, name) for side in sides)  # noqa: E731
    kernel = plgpu.kernel(
        Body(sides, place, config, codec, interpret is not None).__call__,
        out_type=jax.ShapeDtypeStruct((splits, kv_heads, groups, 2), jnp.int32),
        scratch_types=[
            plgpu.SMEM((max(64, largest("matrix_bytes") // 2),), jnp.float16),
            plgpu.SMEM((groups, largest("own_bytes") // 4), jnp.float32),
            plgpu.SMEM((groups, max(4, largest("buffer_bytes") // 4)), jnp.float32),
            plgpu.Barrier(num_arrivals=groups),
        ],
        grid=(splits, kv_heads),
        grid_names=("split", "head"),
        num_threads=groups,
        thread_name="warpgroup",
        compiler_params=PARAMS,
        interpret=interpret,
    )
    names = ("k_pages", "v_pages", "k_meta", "v_meta")
    pools = {name: jax.new_ref(getattr(layer, name)) for name in names}
    counts = kernel(
        page_id,
        row,
        offset,
        source_k,
        *rows,
        transform.x_k,
        transform.mu,
        transform.x_v,
        *pools.values(),
    )
    return {name: jax.freeze(ref) for name, ref in pools.items()}, counts.sum((0, 1, 2))
