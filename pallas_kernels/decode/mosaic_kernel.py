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

from pallas_kernels.decode import mosaic_ends as ends
from pallas_kernels.decode import mosaic_fragments as fragments
from pallas_kernels.decode import mosaic_interpret as interpreted
from pallas_kernels.decode.mosaic_ends import Heads
from pallas_kernels.decode.mosaic_fragments import HEADS, LOWEST, WARPS, Shape, State
from pallas_kernels.decode.mosaic_lanes import program
from pallas_kernels.format import PAGE
from pallas_kernels.layout import LayerKV, Tables, Transform, Windows

WINDOW_ROWS = 16 * WARPS
# Every access that needs ordering is ordered in the bodies: the programs read what the barriers
# guard, and write only scratch behind barriers of their own.
PARAMS = plgpu.CompilerParams(
    approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
)


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
    head_groups: int
    interpret: bool

    # ------------------------------------------------------------------------------- registers

    def load_registers(self, ref: Any, steps: int) -> Any:
        """B operands of a row and head group, kept in registers."""
        if self.interpret:
            return ref[...]

        def run(ops: Any, pointers: Any, _: Any, __: Any) -> Any:
            held = fragments.load_steps(ops, pointers[0], steps)
            return [[x for pair in held for x in pair]]

        return program(run, refs=[ref], results=[(jnp.int32, 2 * steps)])[0]

    def load_constants(self, ref: Any) -> Any:
        if self.interpret:
            return ref[...].reshape(4, HEADS)

        def run(ops: Any, pointers: Any, _: Any, __: Any) -> Any:
            return [[x for row in fragments.load_constants(ops, pointers[0]) for x in row]]

        return program(run, refs=[ref], results=[(jnp.float32, 8)])[0]

    @property
    def _state(self) -> int:
        return fragments.state_registers(self.shape.v_head_dim)

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
        steps = len(shape.key_steps())

        def run(ops: Any, pointers: Any, scalars: Any, arrays: Any) -> Any:
            queries, rows, old = arrays
            pairs = [queries[2 * i : 2 * i + 2] for i in range(steps)]
            consts = [rows[2 * i : 2 * i + 2] for i in range(4)]
            page, _ = ops.divmod_warp(shape.warps_per_page)
            valid, first = ops.less(page, scalars[0]), ops.less(scalars[1], 1)
            new = fragments.page_step(
                ops, shape, tuple(pointers), pairs, consts, State.of(old), valid, first
            )
            return [new.registers()]

        return program(
            run,
            refs=stage,
            scalars=[left, index],
            arrays=[(q, 2 * steps), (constants, 8), (state, self._state)],
            results=[(jnp.float32, self._state)],
        )[0]

    def window_step(
        self, keys: Any, values: Any, tile: Any, length: Any, ring: bool, q: Any, state: Any
    ) -> Any:
        """64 rows of the sink or the ring; which of them are visible follows from the length."""
        windows, shape = self.windows, self.shape
        rows = windows.ring if ring else windows.sink
        first = windows.first_tail(length)
        turns = 1 + -(-(windows.sink + 1) // windows.ring)  # keeps the remainder's operand >= 0
        if self.interpret:
            place = tile * WINDOW_ROWS + jnp.arange(WINDOW_ROWS)
            row = jnp.minimum(place, rows - 1)
            newest = length - 1
            if ring:
                past = (newest - windows.sink - row + turns * windows.ring) % windows.ring
                visible = (place < rows) & (newest - past >= first)
            else:
                visible = row < length
            return interpreted.window_step(
                keys[...], values[...], row, visible, q, shape.head_dim, state
            )
        steps = shape.head_dim // 16

        def run(ops: Any, pointers: Any, scalars: Any, arrays: Any) -> Any:
            queries, old = arrays
            tile, length, first = scalars
            pairs = [queries[2 * i : 2 * i + 2] for i in range(2 * steps)]
            base = ops.iadd(ops.imul(tile, WINDOW_ROWS), ops.imul(ops.warp, 16))
            newest = ops.iadd(length, -1)

            def visible_row(place: Any) -> tuple[Any, Any]:
                row = ops.imin(place, rows - 1)
                if not ring:
                    return row, ops.less(row, length)
                ahead = ops.isub(ops.iadd(newest, turns * windows.ring - windows.sink), row)
                position = ops.isub(newest, ops.urem(ahead, ops.const_i(windows.ring)))
                shown = ops.less(ops.iadd(first, -1), position)
                return row, ops.and_(ops.less(place, rows), shown)

            own = [ops.iadd(base, ops.g), ops.iadd(ops.iadd(base, ops.g), 8)]
            twice = ops.iadd(base, ops.imul(ops.t, 2))
            own += [ops.iadd(twice, i) for i in (0, 1, 8, 9)]
            new = fragments.window_step(
                ops,
                shape.head_dim,
                shape.v_head_dim,
                pointers[0],
                pointers[1],
                [visible_row(place) for place in own],
                (pairs[:steps], pairs[steps:]),
                State.of(old),
            )
            return [new.registers()]

        return program(
            run,
            refs=[keys, values],
            scalars=[tile, length, first],
            arrays=[(q, 4 * steps), (state, self._state)],
            results=[(jnp.float32, self._state)],
        )[0]

    def finish(self, state: Any, pages: bool, scratch: Any, small: Any, out: Any, ml: Any) -> None:
        """Join the warps and store the block's partial result."""
        shape = self.shape
        if self.interpret:
            out[...], ml[...] = interpreted.finish(state, shape.v_head_dim)
            return
        channel = fragments.page_channel if pages else fragments.window_channel
        scale = shape.out_scale if pages else 1.0

        def run(ops: Any, pointers: Any, _: Any, arrays: Any) -> Any:
            fragments.finish(ops, State.of(arrays[0]), channel, scale, *pointers)
            return []

        program(run, refs=[scratch, small, out, ml], arrays=[(state, self._state)])

    # ------------------------------------------------------------------------------------ blocks

    def __call__(
        self,
        q_ref: Any,  # f16[B, H, steps 128], H = KV heads times head groups
        constants_ref: Any,  # f32[B, H, 32]
        q_window_ref: Any,  # bf16[B, H, 2 steps 128]
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
        out_ref: Any,  # f32[B, H, splits, Dv 8]
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
            slot, sink = slot_ref[row], sink_ref[row]
            state = self.over_windows(
                split,
                length,
                self.load_registers(q_window_ref.at[row, head], self.shape.head_dim // 8),
                (sink_k_ref.at[sink, kv_head], sink_v_ref.at[sink, kv_head]),
                (tail_k_ref.at[slot, kv_head], tail_v_ref.at[slot, kv_head]),
            )
            self.finish(state, False, v_stage, small, out, ml)

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
                self.load_registers(q_ref.at[row, head], len(self.shape.key_steps())),
                self.load_constants(constants_ref.at[row, head]),
            )
            self.finish(state, True, v_stage, small, out, ml)

    def over_windows(
        self, split: Any, length: Any, q: Any, sink: tuple[Any, Any], ring: tuple[Any, Any]
    ) -> Any:
        """Every window_splits-th tile of 64 rows, the sink's tiles before the ring's."""
        count = self.config.window_splits
        sink_tiles = self.windows.sink // WINDOW_ROWS
        ring_tiles = -(-self.windows.ring // WINDOW_ROWS)
        state = self.empty(LOWEST)
        for refs, tiles, of_ring in ((sink, sink_tiles, False), (ring, ring_tiles, True)):
            start = split - (sink_tiles % count if of_ring else 0)
            start = jnp.where(start < 0, start + count, start)
            turns = lax.div(tiles - start + count - 1, jnp.int32(count))

            def step(
                i: Any, state: Any, refs: Any = refs, start: Any = start, r: Any = of_ring
            ) -> Any:
                return self.window_step(refs[0], refs[1], start + i * count, length, r, q, state)

            state = lax.fori_loop(0, turns, step, state)
        return state

    def over_pages(
        self,
        split: Any,
        pages: Any,
        page_id: Callable[[Any], Any],
        pools: list[Any],
        stages: tuple[Any, ...],
        barriers: Any,
        q: Any,
        constants: Any,
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

        for i in range(config.stages):
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
    q_window: Array,
    layer: LayerKV,
    tables: Tables,
    lengths: Int32[Array, " B"],
    *,
    shape: Shape,
    windows: Windows,
    config: Config,
    head_groups: int,
    interpret: Any = None,
) -> tuple[Array, Array]:
    """Results of every block: out f32[B, H, splits, Dv 8], and max and sum f32[B, H, splits, 16].

    Args:
        operands, constants, q_window: of ``mosaic_gpu.pack_query`` and ``pack_window_query``, flat,
            [B, H, .] with H = KV heads times head groups.
    """
    lines = lambda x: x.reshape(*x.shape[:2], -1, 256)  # noqa: E731 - a TMA box's longest row
    k_pages, v_pages = lines(layer.k_pages), lines(layer.v_pages)
    splits, ring = config.window_splits + config.splits, (config.stages, config.pages)
    batch, heads = operands.shape[:2]
    kernel = plgpu.kernel(
        Body(shape, config, windows, head_groups, interpret is not None).__call__,
        out_type=[
            jax.ShapeDtypeStruct((batch, heads, splits, n), jnp.float32)
            for n in (layer.v_head_dim * HEADS, 2 * HEADS)
        ],
        scratch_types=[
            plgpu.SMEM((*ring, *k_pages.shape[2:]), jnp.uint16),
            plgpu.SMEM((*ring, *v_pages.shape[2:]), jnp.uint16),
            plgpu.SMEM((*ring, PAGE), jnp.uint32),
            plgpu.SMEM((*ring, PAGE), jnp.uint32),
            plgpu.SMEM((2 * WARPS * HEADS,), jnp.float32),
            plgpu.Barrier(num_arrivals=4 * config.pages, num_barriers=config.stages),
        ],
        grid=(splits, heads, batch),
        grid_names=("split", "head", "row"),
        compiler_params=PARAMS,
        interpret=interpret,
    )
    out, ml = kernel(
        operands,
        constants,
        q_window,
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


def _block_heads(heads: Heads, groups: int) -> tuple[Any, Any, Any]:
    """(KV head, first query head, number of query heads) of this block."""
    head = lax.axis_index("head")
    kv_head = lax.div(head, jnp.int32(groups))
    block = head - kv_head * groups
    first = kv_head * heads.group + block * heads.size
    return kv_head, first, jnp.minimum(heads.size, heads.group - block * heads.size)


def _scratch(sizes: tuple[int, ...]) -> list[Any]:
    return [plgpu.SMEM((size // 4,), jnp.float32) for size in sizes]


def prepare(
    q: Array, transform: Transform, *, shape: Shape, heads: Heads, groups: int, scale: float
) -> tuple[Array, Array, Array, Array]:
    """(operands, constants, q_window) for ``partials`` and the pages' shift f32[B, H, 8].

    Args:
        q: [B, 1, N, D] in BF16 or float32, not yet scaled. scale: with log2(e).
    """
    batch, kv_heads = q.shape[0], transform.mu.shape[0]
    blocks, bf16 = kv_heads * groups, q.dtype == jnp.bfloat16

    def body(q_ref: Any, x_ref: Any, mu_ref: Any, *rest: Any) -> None:
        kv_head, first, count = _block_heads(heads, groups)
        row = lax.axis_index("row")
        outputs = [ref.at[row, lax.axis_index("head")] for ref in rest[:4]]

        def run(ops: Any, pointers: Any, scalars: Any, _: Any) -> Any:
            inputs, scratch, outs = pointers[:3], pointers[3:6], pointers[6:]
            ends.prepare(
                ops,
                shape,
                heads,
                scale,
                bf16,
                scalars,
                tuple(inputs),
                tuple(scratch),
                tuple(outs),
            )
            return []

        inputs = [q_ref.at[row, 0], x_ref.at[kv_head], mu_ref.at[kv_head]]
        program(run, refs=[*inputs, *rest[4:], *outputs], scalars=[first, count])

    out = lambda n, dtype: jax.ShapeDtypeStruct((batch, blocks, n), dtype)  # noqa: E731
    sizes = (shape.head_dim * HEADS * 4, ends.matrix_scratch(heads), ends.SMALL)
    kernel = plgpu.kernel(
        body,
        out_type=[
            out(len(shape.key_steps()) * 128, jnp.float16),
            out(4 * HEADS, jnp.float32),
            out(2 * shape.head_dim * HEADS, jnp.bfloat16),
            out(HEADS, jnp.float32),
        ],
        scratch_types=_scratch(sizes),
        grid=(blocks, batch),
        grid_names=("head", "row"),
        compiler_params=PARAMS,
    )
    packed = kernel(q, transform.x_q, transform.mu)
    return packed[0], packed[1], packed[2], packed[3]


def join(
    out: Array,
    ml: Array,
    shift: Array,
    x_o: Array,
    *,
    heads: Heads,
    groups: int,
    window_splits: int,
    dtype: Any,
) -> Array:
    """The attention output [B, 1, N, Dv] from every block's partial result."""
    batch, blocks, splits = ml.shape[:3]
    dim = x_o.shape[-1]

    def body(*refs: Any) -> None:
        out_ref, ml_ref, shift_ref, x_ref, result_ref, *scratch = refs
        kv_head, first, count = _block_heads(heads, groups)
        row, head = lax.axis_index("row"), lax.axis_index("head")

        def run(ops: Any, pointers: Any, scalars: Any, _: Any) -> Any:
            ends.join(
                ops,
                dim,
                heads,
                (window_splits, splits),
                dtype == jnp.bfloat16,
                scalars,
                tuple(pointers[:4]),
                tuple(pointers[5:]),
                pointers[4],
            )
            return []

        inputs = [ref.at[row, head] for ref in (out_ref, ml_ref, shift_ref)]
        program(
            run,
            refs=[*inputs, x_ref.at[kv_head], result_ref.at[row, 0], *scratch],
            scalars=[first, count],
        )

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, 1, blocks // groups * heads.group, dim), dtype),
        scratch_types=_scratch(ends.join_scratch(dim, heads, splits)),
        grid=(blocks, batch),
        grid_names=("head", "row"),
        compiler_params=PARAMS,
    )
    return kernel(out, ml, shift, x_o)
