"""The decode kernel's body and its launches: copies, barriers and loops around register programs.

A grid of (splits, KV heads times head groups, rows) with one warpgroup per block. The first
``window_splits`` blocks of a row and head read its BF16 sink and tail, the others an equal share
of its INT2 pages each. Bytes of a page and head move once:

    block table -> page ids -> 4 bulk copies per page (K and V words, K and V metadata) into a ring
    of shared-memory stages -> registers of the warps that own the page (``mosaic_fragments``)

No warp waits for another inside an iteration: a page's scores never leave the registers of its
warps, so the only barrier is the one before a stage is overwritten. Blocks store (out, max, sum)
partials in float32.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32

from pallas_kernels.decode import mosaic_interpret as interpreted
from pallas_kernels.decode import mosaic_keys, mosaic_state
from pallas_kernels.decode.mosaic_ends import Heads
from pallas_kernels.decode.mosaic_fragments import page_step
from pallas_kernels.decode.mosaic_shape import HEADS, WARPS, Shape
from pallas_kernels.decode.mosaic_state import State
from pallas_kernels.decode.mosaic_stream import PARAMS, Stream, block_heads
from pallas_kernels.decode.mosaic_tiles import ROWS, Tokens
from pallas_kernels.format import PAGE
from pallas_kernels.lanes import program
from pallas_kernels.layout import LayerKV, Tables, Windows


@dataclasses.dataclass(frozen=True)
class Config:
    """How a kernel is cut.

    Args:
        splits: blocks that share the pages of one row and KV head.
        window_splits: blocks that share its sink and tail.
        stages: iterations whose pages are in shared memory or on their way there.
        warps_per_page: 1, 2 or 4; a block works on 4 / warps_per_page pages at a time.
    """

    splits: int
    window_splits: int = 1
    stages: int = 2
    warps_per_page: int = 1

    def __post_init__(self) -> None:
        for name in ("splits", "window_splits", "stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"Config.{name}={getattr(self, name)}: must be at least 1")
        if self.warps_per_page not in (1, 2, 4):
            raise ValueError(f"Config.warps_per_page={self.warps_per_page}: must be 1, 2 or 4")
        if self.stages * self.pages < WARPS:
            raise ValueError(
                f"Config.stages={self.stages} of {self.pages} pages: the merge of the warps needs "
                f"room for {WARPS} pages"
            )

    @property
    def pages(self) -> int:
        """Pages per iteration of a block."""
        return WARPS // self.warps_per_page


@dataclasses.dataclass(frozen=True)
class Body:
    """The static part of the kernel: shapes, and which of two ways its registers are run in."""

    shape: Shape
    config: Config
    windows: Windows
    heads: Heads
    head_groups: int
    stream: Stream
    interpret: bool

    # ------------------------------------------------------------------------------- registers

    def load_registers(self, ref: Any) -> Any:
        """B operands of a row and head group, kept in registers."""
        if self.interpret:
            return ref[...]

        def run(ops: Any, pointers: Any, _: Any, __: Any) -> Any:
            held = mosaic_keys.load_steps(ops, self.shape, pointers[0])
            return [[x for pair in held for x in pair]]

        return program(run, refs=[ref], results=[(jnp.int32, self._query)])[0]

    def load_constants(self, ref: Any) -> Any:
        if self.interpret:
            return ref[...].reshape(4, HEADS)

        def run(ops: Any, pointers: Any, _: Any, __: Any) -> Any:
            return [
                [x for row in mosaic_keys.load_constants(ops, self.shape, pointers[0]) for x in row]
            ]

        return program(run, refs=[ref], results=[(jnp.float32, 8)])[0]

    @property
    def _query(self) -> int:
        return 2 * self.shape.together * mosaic_keys.query_entries(self.shape)

    @property
    def _state(self) -> int:
        return mosaic_state.state_registers(self.shape.v_head_dim)

    def empty(self, reference: float) -> Any:
        dim = self.shape.v_head_dim
        if self.interpret:
            return interpreted.empty_state(dim, reference)

        def run(ops: Any, *_: Any) -> Any:
            return [State.empty(ops, dim, reference).registers()]

        return program(run, refs=[], results=[(jnp.float32, self._state)])[0]

    def page_step(
        self, stage: tuple[Any, ...], q: Any, constants: Any, state: Any, left: Any, index: Any
    ) -> Any:
        """One iteration: ``left`` pages are left, ``index`` iterations are done."""
        shape = self.shape
        if self.interpret:
            held = tuple(ref[...] for ref in stage)
            return interpreted.page_step(shape, held, q, constants, state, left)

        def run(ops: Any, pointers: Any, scalars: Any, arrays: Any) -> Any:
            queries, rows, old = arrays
            pairs = [queries[i : i + 2] for i in range(0, self._query, 2)]
            consts = [rows[2 * i : 2 * i + 2] for i in range(4)]
            left, started = scalars[0], ops.less(0, scalars[1])
            new = page_step(
                ops, shape, tuple(pointers), pairs, consts, State.of(old), left, started
            )
            return [new.registers()]

        return program(
            run,
            refs=stage,
            scalars=[left, index],
            arrays=[(q, self._query), (constants, 8), (state, self._state)],
            results=[(jnp.float32, self._state)],
        )[0]

    def finish(self, state: Any, scratch: Any, small: Any, out: Any, ml: Any) -> None:
        """Join the warps and store the block's partial result."""
        shape, columns = self.shape, self.heads.used
        if self.interpret:
            out[...], ml[...] = interpreted.finish(state, shape.v_head_dim, columns)
            return

        def run(ops: Any, pointers: Any, _: Any, arrays: Any) -> Any:
            mosaic_state.finish(
                ops, State.of(arrays[0]), shape.out_scale, shape.paired, columns, *pointers
            )
            return []

        program(run, refs=[scratch, small, out, ml], arrays=[(state, self._state)])

    # ------------------------------------------------------------------------------------ blocks

    def await_prepared(self) -> None:
        """Until the launch before, which packs the query, has ended: this one starts with it."""
        if not self.interpret:
            plgpu.griddepcontrol_wait()
            plgpu.griddepcontrol_launch_dependents()

    def __call__(
        self,
        q_ref: Any,  # f16[B, H, steps 128], H = KV heads times head groups
        constants_ref: Any,  # f32[B, H, 32]
        query_ref: Any,  # [B, 1, N, D]
        k_ref: Any,  # u16[P, K, T D/2048, 256]
        v_ref: Any,  # u16[P, K, T Dv/2048, 256]
        k_meta_ref: Any,  # u32[P, K, T]
        v_meta_ref: Any,  # u32[P, K, T]
        sink_k_ref: Any,  # bf16[NS, K, S, D]
        sink_v_ref: Any,  # bf16[NS, K, S, Dv]
        tail_k_ref: Any,  # bf16[slots, K, ring, D]
        tail_v_ref: Any,  # bf16[slots, K, ring, Dv]
        table_ref: Any,  # i32[B, MP]
        length_ref: Any,  # i32[B]
        slot_ref: Any,  # i32[B]
        sink_ref: Any,  # i32[B]
        out_ref: Any,  # f32[B, H, splits, columns Dv]
        ml_ref: Any,  # f32[B, H, splits, 16]
        k_stage: Any,
        v_stage: Any,
        k_meta_stage: Any,
        v_meta_stage: Any,
        small: Any,  # f32[64]
        barriers: Any,
    ) -> None:
        split, head, row = (lax.axis_index(name) for name in ("split", "head", "row"))
        kv_head = lax.div(head, jnp.int32(self.head_groups))
        length = length_ref[row]
        out, ml = out_ref.at[row, head, split], ml_ref.at[row, head, split]
        in_windows = split < self.config.window_splits

        @pl.when(in_windows)
        def _() -> None:
            stream, near = self.stream, self.config.window_splits
            slot, sink = slot_ref[row], sink_ref[row]
            _, first, count = block_heads(self.heads, self.head_groups)
            seen = length - PAGE * self.windows.visible_pages(length)
            total = lax.div(seen + ROWS - 1, jnp.int32(ROWS))
            share = lax.div(total + near * WARPS - 1, jnp.int32(near * WARPS)) * WARPS
            state = stream.over(
                stream.queries(query_ref.at[row, 0], first, count),
                [
                    sink_k_ref.at[sink, kv_head],
                    sink_v_ref.at[sink, kv_head],
                    tail_k_ref.at[slot, kv_head],
                    tail_v_ref.at[slot, kv_head],
                ],
                (k_stage, v_stage),
                split * share,
                jnp.minimum((split + 1) * share, total),
                length,
            )
            self.await_prepared()  # nothing may be written while its launch still reads
            stream.finish(state, self.heads.used, v_stage, small, out, ml)

        @pl.when(jnp.logical_not(in_windows))
        def _() -> None:
            stages = (k_stage, v_stage, k_meta_stage, v_meta_stage)
            pools = [ref.at[:, kv_head] for ref in (k_ref, v_ref, k_meta_ref, v_meta_ref)]
            state = self.over_pages(
                split - self.config.window_splits,
                self.windows.visible_pages(length),
                lambda index: table_ref[row, index],
                pools,
                stages,
                barriers,
                lambda: (
                    self.load_registers(q_ref.at[row, head]),
                    self.load_constants(constants_ref.at[row, head]),
                ),
            )
            self.finish(state, v_stage, small, out, ml)

    def over_pages(
        self,
        split: Any,
        pages: Any,
        page_id: Callable[[Any], Any],
        pools: list[Any],
        stages: tuple[Any, ...],
        barriers: Any,
        query: Callable[[], tuple[Any, Any]],
    ) -> Any:
        """This split's pages, in order, ``config.pages`` at a time."""
        config, at_once = self.config, self.config.pages
        share = lax.div(pages + config.splits - 1, jnp.int32(config.splits))
        share = lax.div(share + at_once - 1, jnp.int32(at_once)) * at_once
        start = split * share
        mine = jnp.clip(pages - start, 0, share)
        turns = lax.div(mine + at_once - 1, jnp.int32(at_once))

        def fetch_page(turn: Any, slot: Any, u: int) -> None:
            """Copies of page u of an iteration; past the end the last page, whose weight is 0."""
            last = jnp.maximum(start + mine - 1, 0)
            page = page_id(jnp.minimum(start + turn * at_once + u, last))
            for pool, stage in zip(pools, stages, strict=True):
                plgpu.copy_gmem_to_smem(pool.at[page], stage.at[slot, u], barriers.at[slot])

        def fetch(turn: Any, slot: Any) -> None:
            """Every warp issues the copies of one page: 70 instructions each, not 270."""

            @plgpu.warp_map
            def _(warp: Any) -> None:
                for u in range(at_once):
                    pl.when(warp == u)(functools.partial(fetch_page, turn, slot, u))

        # The query's way is short only as long as few copies are before it.
        pl.when(turns > 0)(functools.partial(fetch, 0, 0))
        self.await_prepared()
        q, constants = query()
        for i in range(1, config.stages):
            pl.when(i < turns)(functools.partial(fetch, i, i))

        def step(i: Any, state: Any) -> Any:
            slot = lax.rem(i, jnp.int32(config.stages))
            plgpu.barrier_wait(barriers.at[slot])
            stage = tuple(ref.at[slot] for ref in stages)
            state = self.page_step(stage, q, constants, state, mine - i * at_once, i)
            plgpu.commit_smem()  # every warp has read the stage

            @pl.when(i + config.stages < turns)
            def _() -> None:
                fetch(i + config.stages, slot)

            return state

        return lax.fori_loop(0, turns, step, self.empty(0.0))


def partials(
    operands: Array,
    constants: Array,
    q: Array,
    layer: LayerKV,
    tables: Tables,
    lengths: Int32[Array, " B"],
    *,
    shape: Shape,
    windows: Windows,
    config: Config,
    heads: Heads,
    groups: int,
    scale: float,
    interpret: Any = None,
) -> tuple[Array, Array]:
    """Results of all blocks: out f32[B, H, splits, columns Dv], max and sum f32[B, H, splits, 16].

    Args:
        operands, constants: of ``mosaic_gpu.pack_query``, flat, [B, H, .] with H = KV heads times
            head groups.
        q: [B, 1, N, D] in BF16 or float32, not yet scaled. scale: with log2(e).
    """
    tokens = Tokens(
        shape.head_dim,
        shape.v_head_dim,
        windows,
        None,
        1 if q.dtype == jnp.bfloat16 else 2,
        max(1, config.stages * config.pages // WARPS),
        scale,
    )
    lines = lambda x: x.reshape(*x.shape[:2], -1, 256)  # noqa: E731 - a TMA box's longest row
    k_pages, v_pages = lines(layer.k_pages), lines(layer.v_pages)
    splits, ring = config.window_splits + config.splits, (config.stages, config.pages)
    batch, blocks = operands.shape[:2]
    stream = Stream(tokens, interpret is not None)
    kernel = plgpu.kernel(
        Body(shape, config, windows, heads, groups, stream, stream.interpret).__call__,
        out_type=[
            jax.ShapeDtypeStruct((batch, blocks, splits, n), jnp.float32)
            for n in (layer.v_head_dim * heads.used, 2 * HEADS)
        ],
        scratch_types=[
            plgpu.SMEM((*ring, *k_pages.shape[2:]), jnp.uint16),
            plgpu.SMEM((*ring, *v_pages.shape[2:]), jnp.uint16),
            plgpu.SMEM((*ring, PAGE), jnp.uint32),
            plgpu.SMEM((*ring, PAGE), jnp.uint32),
            plgpu.SMEM((2 * WARPS * HEADS,), jnp.float32),
            plgpu.Barrier(num_arrivals=4 * config.pages, num_barriers=config.stages),
        ],
        grid=(splits, blocks, batch),
        grid_names=("split", "head", "row"),
        compiler_params=PARAMS,
        interpret=interpret,
    )
    out, ml = kernel(
        operands,
        constants,
        q,
        k_pages,
        v_pages,
        layer.k_meta,
        layer.v_meta,
        layer.sink_k,
        layer.sink_v,
        layer.tail_k,
        layer.tail_v,
        tables.block_table,
        lengths,
        tables.slot,
        tables.sink,
    )
    return out, ml
