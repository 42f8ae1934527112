"""The write kernel's body and launch: blocks, jobs and loops around the register programs.

A grid of (splits, KV heads): the first ``key_splits`` blocks of a head encode keys, the others
values, so a block brings one X into shared memory, once, and works through every ``splits``-th unit
of two pages with it. Its warpgroups take units in turn and meet at one barrier only, after X.
Where X is streamed they go through it together, a unit each (``mosaic_stream``).

    source rows, global memory -> registers -> (k - mu) X -> codes -> words, straight to the pools

The pools are references that the kernel writes in place.
"""

from __future__ import annotations

import dataclasses
import functools
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
from pallas_kernels.write import mosaic_interpret as interpreted
from pallas_kernels.write import mosaic_transform as transform
from pallas_kernels.write.mosaic_instructions import Instructions
from pallas_kernels.write.mosaic_shape import STAGES, TILES, UNIT, Side
from pallas_kernels.write.mosaic_stream import LINE, Stream, operands
from pallas_kernels.write.mosaic_unit import Place, Unit, locate, write_unit

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
        source_v: Any,  # bf16[X, K, H, Dv]
        x_k: Any,  # f32[K, D, D], or ``mosaic_stream.operands`` of all sides that are streamed
        held_k: Any,  # f32[K, D], mu; or the same
        x_v: Any,  # f32[K, Dv, Dv], or the same as x_k
        held_v: Any,
        k_pages: Any,  # u16[P, K, T, bits D/16], written in place, as the next three
        v_pages: Any,  # u16[P, K, Dv, bits T/16]
        k_meta: Any,  # u32[P, K, T]
        v_meta: Any,  # u32[P, K, T]
        counts: Any,  # i32[splits, K, warpgroups, 2]
        matrix: Any,  # f16[., 256], ``Side.matrix_bytes``
        own: Any,  # f32[warpgroups, .], ``Side.own_bytes``
        buffer: Any,  # f32[warpgroups, .]
        ready: Any,  # X is in shared memory
        full: Any,  # of each stage, see ``Stream``
        free: Any,
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
        of_keys, barriers = split < self.config.key_splits, (ready, full, free)

        @pl.when(of_keys)
        def _() -> None:
            refs = dict(shared, source=source_k, pages=k_pages, meta=k_meta, x=x_k, held=held_k)
            self.run(self.sides[0], split, self.config.key_splits, head, warpgroup, refs, barriers)

        @pl.when(jnp.logical_not(of_keys))
        def _() -> None:
            refs = dict(shared, source=source_v, pages=v_pages, meta=v_meta, x=x_v, held=held_v)
            first, splits = split - self.config.key_splits, self.config.value_splits
            self.run(self.sides[1], first, splits, head, warpgroup, refs, barriers)

    def run(
        self,
        side: Side,
        first: Any,
        splits: int,
        head: Any,
        warpgroup: Any,
        refs: dict[str, Any],
        barriers: tuple[Any, Any, Any],
    ) -> None:
        """Every ``splits``-th unit from ``first`` on, if one of them has a page to write."""
        groups, units = self.config.warpgroups, -(-self.place.jobs // UNIT)
        mine = lax.div(units - first + splits - 1, jnp.int32(splits))
        wanted = functools.partial(self.wanted, refs["page_id"])

        def looking(i: Any) -> Any:
            inside = jnp.minimum(first + splits * i, units - 1)
            return jnp.logical_and(i < mine, jnp.logical_not(wanted(inside)))

        start = first + splits * lax.while_loop(looking, lambda i: i + 1, jnp.int32(0))
        ready, full, free = barriers

        @pl.when(start < units)
        def _() -> None:
            if side.streamed:
                self.run_streamed(side, start, splits, head, warpgroup, refs, (full, free))
                return
            self.prepare(side, head, warpgroup, refs)
            plgpu.commit_smem()
            plgpu.barrier_arrive(ready)
            plgpu.barrier_wait(ready)

            def step(unit: Any) -> Any:
                pl.when(wanted(unit))(lambda: self.write_unit(side, unit, head, refs))
                return unit + splits * groups

            lax.while_loop(lambda unit: unit < units, step, start + splits * warpgroup)

    def wanted(self, page_id: Any, unit: Any) -> Any:
        """Whether a unit has a page to write; one past the last has not."""
        pages = []
        for i in range(UNIT):
            job = unit * UNIT + i
            held = page_id[jnp.minimum(job, self.place.jobs - 1)]
            pages.append(jnp.where(job < self.place.jobs, held, -1))
        return functools.reduce(jnp.maximum, pages) >= 0

    def run_streamed(
        self,
        side: Side,
        start: Any,
        splits: int,
        head: Any,
        warpgroup: Any,
        refs: dict[str, Any],
        barriers: tuple[Any, Any],
    ) -> None:
        """``run`` from the first unit that has a page: a unit for each warpgroup at a time."""
        groups, units = self.config.warpgroups, -(-self.place.jobs // UNIT)
        # Streamed values are behind streamed keys.
        behind = not side.keys and self.sides[0].streamed
        index = head + self.place.kv_heads * behind
        stream = Stream(refs["x"].at[index], refs["matrix"], *barriers, warpgroup == 0)
        self.keep_held(side, refs["held"].at[index], refs["own"])
        stream.start()

        def turn(base: Any) -> Any:
            theirs = [self.wanted(refs["page_id"], base + splits * i) for i in range(groups)]

            @pl.when(functools.reduce(jnp.logical_or, theirs))
            def _() -> None:
                unit = base + splits * warpgroup
                mine = self.wanted(refs["page_id"], unit)
                pl.when(mine)(lambda: self.write_streamed(side, unit, head, refs, stream))
                pl.when(jnp.logical_not(mine))(lambda: stream.pass_by(TILES))

            return base + splits * groups

        lax.while_loop(lambda base: base < units, turn, start)
        stream.end()

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
        x, mu = refs["x"].at[head], refs["held"].at[head]
        if self.interpret:
            interpreted.prepare(side, x, mu, refs["matrix"], refs["own"], warpgroup, share)
            return

        def run(_: Any, pointers: Any, scalars: Any, __: Any) -> Any:
            x, mu, matrix, held = pointers
            transform.prepare(Instructions(), side, x, mu, matrix, held, scalars[0], share)
            return []

        program(run, refs=[x, mu, refs["matrix"], refs["own"]], scalars=[warpgroup])

    def keep_held(self, side: Side, held: Any, own: Any) -> None:
        """``prepare`` of a streamed side."""
        if self.interpret:
            own[: held.shape[0]] = held[...]
            return

        def run(_: Any, pointers: Any, *__: Any) -> Any:
            transform.keep_held(Instructions(), side, *pointers)
            return []

        program(run, refs=[held, own])

    def write_unit(self, side: Side, unit: Any, head: Any, refs: dict[str, Any]) -> None:
        if self.interpret:
            interpreted.write_unit(side, self.place, self.codec, unit, head, refs)
            return
        names = [name for name in refs if name not in ("x", "held")]

        def run(_: Any, pointers: Any, scalars: Any, __: Any) -> Any:
            held = dict(zip(names, pointers, strict=True))
            write_unit(Instructions(), side, self.place, scalars[0], scalars[1], held)
            return []

        program(run, refs=[refs[name] for name in names], scalars=[unit, head])

    def write_streamed(
        self, side: Side, unit: Any, head: Any, refs: dict[str, Any], stream: Stream
    ) -> None:
        """``write_unit`` with an X that the block's warpgroups go through together."""
        if self.interpret:
            interpreted.write_streamed(side, self.place, self.codec, unit, head, refs, stream)
            return
        names = [name for name in refs if name not in ("x", "held", "matrix")]
        held = [refs[name] for name in names]
        i32, f32 = jnp.int32, jnp.float32

        def unit_of(pointers: Any, located: list[Any]) -> Unit:
            named = dict(zip(names, pointers, strict=True))
            return Unit(Instructions(), side, self.place, located, named)

        def begin(_: Any, pointers: Any, scalars: Any, __: Any) -> Any:
            named = dict(zip(names, pointers, strict=True))
            unit, head = scalars
            located = locate(Instructions(), self.place, unit, head, named)
            unit_of(pointers, located).begin()
            return [located]

        def load(_: Any, pointers: Any, *__: Any) -> Any:
            ops = Instructions()
            steps, scales, inverses = transform.operands(
                ops, transform.copied_rows(ops, side, pointers[0])
            )
            return [[x for step in steps for x in step], scales + inverses]

        def encode(_: Any, pointers: Any, scalars: Any, arrays: Any) -> Any:
            located, factors, sums = arrays
            unit_of(pointers, located).encode(scalars[0], sums, factors[:2], factors[2:])
            return []

        def finish(_: Any, pointers: Any, __: Any, arrays: Any) -> Any:
            unit_of(pointers, arrays[0]).finish()
            return []

        words, numbers = side.dim // 4, side.dim // 2
        (located,) = program(begin, refs=held, scalars=[unit, head], results=[(i32, 4)])

        def tile(i: Any, _: Any) -> None:
            rows, factors = program(load, refs=[refs["buffer"]], results=[(i32, words), (f32, 4)])
            sums: list[Any] = []

            def multiply(piece: int, stage: Any) -> None:
                def run(_: Any, pointers: Any, __: Any, arrays: Any) -> Any:
                    return [transform.product(Instructions(), side, piece, pointers[0], *arrays)]

                arrays = [(rows, words), *((x, numbers) for x in sums)]
                sums[:] = program(run, refs=[stage], arrays=arrays, results=[(f32, numbers)])

            stream.visit(multiply)
            arrays = [(located, 4), (factors, 4), (sums[0], numbers)]
            program(encode, refs=held, scalars=[TILES - 1 - i], arrays=arrays)

        lax.fori_loop(0, TILES, tile, None)
        program(finish, refs=held, arrays=[(located, 4)])


def launch(
    layer: LayerKV,
    source_k: Array,
    source_v: Array,
    transform: Transform,
    jobs: PageJobs,
    *,
    codec: Codec,
    sides: tuple[Side, Side],
    config: Config,
    interpret: Any = None,
) -> tuple[dict[str, Array], Int32[Array, "2"]]:
    """The four pools with the pages in place, and the counts."""
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
            plgpu.SMEM((largest("matrix_bytes") // (2 * LINE), LINE), jnp.float16),
            plgpu.SMEM((groups, largest("own_bytes") // 4), jnp.float32),
            plgpu.SMEM((groups, largest("buffer_bytes") // 4), jnp.float32),
            plgpu.Barrier(num_arrivals=groups),
            plgpu.Barrier(num_barriers=STAGES),
            plgpu.Barrier(num_arrivals=groups, num_barriers=STAGES),
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
    xs = transform.x_k, transform.x_v
    matrices = [(x, transform.mu) for x in xs]
    streamed = [i for i, side in enumerate(sides) if side.streamed]
    if streamed:
        both = operands([sides[i] for i in streamed], [xs[i] for i in streamed], transform.mu)
        matrices = [both if i in streamed else matrices[i] for i in range(2)]
    counts = kernel(
        page_id,
        row,
        offset,
        source_k,
        source_v,
        *(x for pair in matrices for x in pair),
        *pools.values(),
    )
    return {name: jax.freeze(ref) for name, ref in pools.items()}, counts.sum((0, 1, 2))
