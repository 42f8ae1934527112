"""Blocks over the BF16 tokens of a row: sink, tail, and the BF16 pages between if there are any.

Used by the INT2 kernel for its windows, and as a kernel of its own for BF16 caches: a grid of
(splits, KV heads times head groups, rows), one warpgroup per block, each with an equal share of the
row's tiles of 16 tokens (``mosaic_tiles``). Blocks store (out, max, sum) partials in float32.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Int32

from pallas_kernels.decode import mosaic_interpret as interpreted
from pallas_kernels.decode import mosaic_state
from pallas_kernels.decode import mosaic_tiles as tiles
from pallas_kernels.decode.mosaic_ends import Heads
from pallas_kernels.decode.mosaic_shape import HEADS, LOWEST, WARPS
from pallas_kernels.decode.mosaic_state import State
from pallas_kernels.decode.mosaic_tiles import ROWS, Tokens
from pallas_kernels.format import PAGE
from pallas_kernels.lanes import program
from pallas_kernels.layout import LayerKV, Tables, Windows

# Every access that needs ordering is ordered in the bodies: the programs read what the barriers
# guard, and write only scratch behind barriers of their own.
PARAMS = plgpu.CompilerParams(
    approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
)


@dataclasses.dataclass(frozen=True)
class StreamConfig:
    """How the kernel for BF16 pages is cut.

    Args:
        splits: blocks that share the tokens of one row and KV head.
        stages: tiles per warp in shared memory or on their way there.
    """

    splits: int
    stages: int = 3

    def __post_init__(self) -> None:
        for name in ("splits", "stages"):
            if getattr(self, name) < 1:
                raise ValueError(f"StreamConfig.{name}={getattr(self, name)}: must be at least 1")


def block_heads(heads: Heads, groups: int) -> tuple[Any, Any, Any]:
    """(KV head, first query head, number of query heads) of this block."""
    head = lax.axis_index("head")
    kv_head = lax.div(head, jnp.int32(groups))
    block = head - kv_head * groups
    first = kv_head * heads.group + block * heads.size
    return kv_head, first, jnp.minimum(heads.size, heads.group - block * heads.size)


@dataclasses.dataclass(frozen=True)
class Stream:
    """The part of a kernel body that attends to BF16 tokens."""

    tokens: Tokens
    interpret: bool

    @property
    def _state(self) -> int:
        return mosaic_state.state_registers(self.tokens.v_head_dim)

    def queries(self, q_ref: Any, first: Any, count: Any) -> Any:
        """Heads ``first`` to ``first + count`` of q [N, D], as B operands."""
        tokens = self.tokens
        if self.interpret:
            head = first + jnp.minimum(jnp.arange(HEADS), count - 1)
            return q_ref[...].astype(jnp.float32)[head]
        size = 2 * tokens.query_terms * tokens.steps

        bf16 = q_ref.dtype == jnp.bfloat16

        def run(ops: Any, pointers: Any, scalars: Any, _: Any) -> Any:
            return [tiles.load_queries(ops, tokens, pointers[0], scalars[0], scalars[1], bf16)]

        return program(run, refs=[q_ref], scalars=[first, count], results=[(jnp.int32, size)])[0]

    def over(
        self,
        q: Any,
        sources: list[Any],
        stage: tuple[Any, Any],
        start: Any,
        stop: Any,
        length: Any,
    ) -> Any:
        """The state after tiles ``start`` to ``stop`` of the row's stream.

        Args:
            sources: sink K and V [S, .], ring K and V [ring, .]; with BF16 pages also the head's
                first page in the pools, K and V [T, .], and the row's block table.
            stage: shared memory for ``tokens.stages`` tiles per warp, of K and of V.
        """
        tokens = self.tokens
        paged = PAGE * tokens.windows.visible_pages(length)
        skip = jnp.int32(0) if tokens.page_bytes is not None else paged
        turns = lax.div(jnp.maximum(stop - start, 0) + WARPS - 1, jnp.int32(WARPS))
        if self.interpret:

            def visit(i: Any, state: Any) -> Any:
                return self._interpreted(
                    i * WARPS + start, stop, length, skip, paged, q, sources, state
                )

            return lax.fori_loop(
                0, turns, visit, interpreted.empty_state(tokens.v_head_dim, LOWEST)
            )

        def fetch(turn: Any, slot: Any) -> None:
            def run(ops: Any, pointers: Any, scalars: Any, _: Any) -> Any:
                first, slot, stop, length, skip, paged = scalars
                tiles.fetch(
                    ops,
                    tokens,
                    pointers[:-2],
                    tuple(pointers[-2:]),
                    ops.iadd(first, ops.warp),
                    slot,
                    (stop, length, skip, paged),
                )
                return []

            scalars = [start + turn * WARPS, slot, stop, length, skip, paged]
            program(run, refs=[*sources, *stage], scalars=[jnp.int32(x) for x in scalars])

        def step(turn: Any, state: Any) -> Any:
            slot = lax.rem(turn, jnp.int32(tokens.stages))

            def run(ops: Any, pointers: Any, scalars: Any, arrays: Any) -> Any:
                first, slot, stop, length, skip = scalars
                tile = ops.iadd(first, ops.warp)
                _, count = tiles.visible_rows(ops, tokens, tile, stop, length, skip)
                ops.await_copies(tokens.stages - 1)
                new = tiles.step(
                    ops, tokens, tuple(pointers), slot, count, arrays[0], State.of(arrays[1])
                )
                ops.sync_warp()  # every lane has read the tile
                return [new.registers()]

            size = 2 * tokens.query_terms * tokens.steps
            state = program(
                run,
                refs=stage,
                scalars=[start + turn * WARPS, slot, stop, length, skip],
                arrays=[(q, size), (state, self._state)],
                results=[(jnp.float32, self._state)],
            )[0]
            fetch(turn + tokens.stages, slot)
            return state

        for i in range(tokens.stages):
            fetch(i, i)
        state = lax.fori_loop(0, turns, step, self._empty())

        def drain(ops: Any, *_: Any) -> Any:
            ops.await_copies(0)
            return []

        program(drain, refs=[])
        return state

    def _empty(self) -> Any:
        def run(ops: Any, *_: Any) -> Any:
            return [State.empty(ops, self.tokens.v_head_dim, LOWEST).registers()]

        return program(run, refs=[], results=[(jnp.float32, self._state)])[0]

    def _interpreted(
        self,
        tile: Any,
        stop: Any,
        length: Any,
        skip: Any,
        paged: Any,
        q: Any,
        sources: list[Any],
        state: Any,
    ) -> Any:
        """Four tiles, which are all of the sink, of one page or of the ring."""
        windows, place = self.tokens.windows, tile * ROWS + jnp.arange(WARPS * ROWS)
        position = place + jnp.where(place < windows.sink, 0, skip)
        beyond = position - windows.sink
        visible = (position < length) & (place < stop * ROWS)
        keys, values = (
            jnp.where(
                (beyond < 0)[:, None],
                sources[i][...][jnp.clip(position, 0, windows.sink - 1)],
                sources[2 + i][...][jnp.maximum(beyond, 0) % windows.ring],
            )
            for i in range(2)
        )
        if self.tokens.page_bytes is not None:
            in_page = (beyond >= 0) & (beyond < paged) & visible
            page = sources[6][jnp.where(in_page[0], lax.div(beyond[0], jnp.int32(PAGE)), 0)]
            page = jnp.where(in_page[0], page, 0)
            row = jnp.where(in_page, beyond % PAGE, 0)
            keys, values = (
                jnp.where(in_page[:, None], pool[page, kv_head][row], near)
                for (pool, kv_head), near in zip(sources[4:6], (keys, values), strict=True)
            )
        return interpreted.tile_step(keys, values, visible, q * self.tokens.scale, state)

    def finish(self, state: Any, columns: int, scratch: Any, small: Any, out: Any, ml: Any) -> None:
        """Join the warps and store the block's partial result."""
        if self.interpret:
            out[...], ml[...] = interpreted.finish(state, self.tokens.v_head_dim, columns)
            return

        def run(ops: Any, pointers: Any, _: Any, arrays: Any) -> Any:
            mosaic_state.finish(ops, State.of(arrays[0]), 1.0, False, columns, *pointers)
            return []

        program(run, refs=[scratch, small, out, ml], arrays=[(state, self._state)])


def partials(
    q: Array,
    layer: LayerKV,
    tables: Tables,
    lengths: Int32[Array, " B"],
    *,
    windows: Windows,
    config: StreamConfig,
    heads: Heads,
    groups: int,
    scale: float,
    interpret: Any = None,
) -> tuple[Array, Array]:
    """Results of all blocks: out f32[B, H, splits, columns Dv], max and sum f32[B, H, splits, 16].

    Args:
        q: [B, 1, N, D] in BF16 or float32, not yet scaled. scale: with log2(e).
    """
    kv_heads, splits = layer.sink_k.shape[1], config.splits
    tokens = Tokens(
        q.shape[-1],
        layer.v_head_dim,
        windows,
        (kv_heads * PAGE * q.shape[-1] * 2, kv_heads * PAGE * layer.v_head_dim * 2),
        1 if q.dtype == jnp.bfloat16 else 2,
        config.stages,
        scale,
    )
    stream = Stream(tokens, interpret is not None)
    batch, blocks = q.shape[0], kv_heads * groups

    def body(
        q_ref: Any,  # [B, 1, N, D]
        k_ref: Any,  # bf16[P, K, T, D]
        v_ref: Any,  # bf16[P, K, T, Dv]
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
        small: Any,  # f32[64]
    ) -> None:
        if not stream.interpret:
            plgpu.griddepcontrol_launch_dependents()
        split, head, row = (lax.axis_index(name) for name in ("split", "head", "row"))
        kv_head, first, count = block_heads(heads, groups)
        length, slot, sink = length_ref[row], slot_ref[row], sink_ref[row]
        total = lax.div(length + ROWS - 1, jnp.int32(ROWS))
        share = lax.div(total + splits * WARPS - 1, jnp.int32(splits * WARPS)) * WARPS
        start = split * share
        pools = [ref.at[0, kv_head] for ref in (k_ref, v_ref)]
        if stream.interpret:
            pools = [(ref, kv_head) for ref in (k_ref, v_ref)]
        sources = [
            sink_k_ref.at[sink, kv_head],
            sink_v_ref.at[sink, kv_head],
            tail_k_ref.at[slot, kv_head],
            tail_v_ref.at[slot, kv_head],
            *pools,
            table_ref.at[row],
        ]
        state = stream.over(
            stream.queries(q_ref.at[row, 0], first, count),
            sources,
            (k_stage, v_stage),
            start,
            jnp.minimum(start + share, total),
            length,
        )
        stream.finish(
            state,
            heads.used,
            v_stage,
            small,
            out_ref.at[row, head, split],
            ml_ref.at[row, head, split],
        )

    shared = tokens.stages * WARPS * ROWS
    kernel = plgpu.kernel(
        body,
        out_type=[
            jax.ShapeDtypeStruct((batch, blocks, splits, n), jnp.float32)
            for n in (layer.v_head_dim * heads.used, 2 * HEADS)
        ],
        scratch_types=[
            plgpu.SMEM((shared * tokens.head_dim,), jnp.uint16),
            plgpu.SMEM((shared * tokens.v_head_dim,), jnp.uint16),
            plgpu.SMEM((2 * WARPS * HEADS,), jnp.float32),
        ],
        grid=(splits, blocks, batch),
        grid_names=("split", "head", "row"),
        compiler_params=PARAMS,
        interpret=interpret,
    )
    out, ml = kernel(
        q,
        layer.k_pages,
        layer.v_pages,
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
