"""Attention of a chunk's queries over BF16 rows, joined with what the INT2 pages gave.

A block has 128 query rows (position, head of the group) of one KV head, two warpgroups of 64 rows
and one that fetches tiles of 64 keys and values:

    sink            rows 0 .. S of the row's sink
    pages           BF16 pages by the block table (a cache without INT2)
    band            the recent tokens and the chunk, from the first that any row of the block sees

Every tile of sink and band is masked by position. Value rows that no query sees must be finite.
The result of the INT2 pages is where the running softmax begins.
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
from jaxtyping import Array, BFloat16, Int32

from pallas_kernels.format import PAGE
from pallas_kernels.layout import Windows
from pallas_kernels.merge import MASKED
from pallas_kernels.prefill.mosaic_wgmma import (
    BLOCK_ROWS,
    CONSUMERS,
    LOWEST,
    PARAMS,
    ROW,
    ROWS,
    TILED,
    filled,
    over,
    position_of,
    scores,
    store,
    visible_pages,
    weighted,
)

KEYS = 64  # of a tile
ALIGNED = 8  # rows of a swizzle atom
PAGE_TILES = PAGE // KEYS


@dataclasses.dataclass(frozen=True)
class Plan:
    """Which tiles a block reads: of the sink, of BF16 pages, of the band from row ``first`` on."""

    sink: Any
    pages: Any
    first: Any  # row of the band
    band: Any
    start: Any  # position of the band's row 0

    @property
    def tiles(self) -> Any:
        return self.sink + self.pages + self.band


@dataclasses.dataclass(frozen=True)
class Body:
    """The static part of the kernel.

    ``paged``: BF16 pages are read too. ``splits``: results of INT2 pages to begin with. ``terms``:
    BF16 numbers that a query is the sum of.
    """

    windows: Windows
    group: int
    unit: float  # scale log2(e)
    stages: int
    band_rows: int
    v_head_dim: int
    paged: bool
    splits: int
    terms: int
    interpret: bool

    def position(self, row: Any, length: Any, new: Any) -> Any:
        return position_of(row, self.group, length, new)

    def first_tail(self, position: Any) -> Any:
        return self.windows.sink + PAGE * visible_pages(position + 1, self.windows)

    def plan(self, block: Any, length: Any, new: Any) -> Plan:
        """The tiles of a block; none where it has no query that exists."""
        windows = self.windows
        begin = self.position(block * BLOCK_ROWS, length, new)
        end = self.position(block * BLOCK_ROWS + BLOCK_ROWS - 1, length, new)  # the last position
        exists = lax.div(block * BLOCK_ROWS, jnp.int32(self.group)) < new
        start = length - new - windows.band
        # Copies into swizzled tiles begin at multiples of 8 rows; rows before the tail are masked.
        first = lax.div(self.first_tail(begin) - start, jnp.int32(ALIGNED)) * ALIGNED
        tiles = lambda rows: lax.div(jnp.maximum(rows, 0) + KEYS - 1, jnp.int32(KEYS))  # noqa: E731
        sink = tiles(jnp.minimum(end + 1, windows.sink))
        pages = visible_pages(end + 1, windows) * PAGE_TILES if self.paged else jnp.int32(0)
        band = tiles(end - start + 1 - first)
        none = lambda x: jnp.where(exists, x, 0)  # noqa: E731
        return Plan(none(sink), none(pages), first, none(band), start)

    def band_row(self, plan: Plan, tile: Any) -> Any:
        """The band's row at which tile ``tile`` of it begins: the last tile ends with the band."""
        row = jnp.minimum(plan.first + tile * KEYS, self.band_rows - KEYS)
        return pl.multiple_of(row, ALIGNED)

    # ------------------------------------------------------------------------------------ roles

    def fetch(
        self,
        at: tuple[Any, Any],
        plan: Plan,
        page_id: Callable[[Any], Any],
        sources: tuple[tuple[Any, Any], ...],
        ring: tuple[Any, Any],
        barriers: tuple[Any, ...],
    ) -> None:
        """Copy the tiles in order into the ring.

        Args:
            at: (row of the batch, KV head). sources: keys and values of each kind.
        """
        (sink, pages, band), (full, free) = sources, barriers

        def copy(i: Any, slot: Any) -> None:
            def tile(pair: tuple[Any, Any], first: Any, row: Any) -> None:
                for source, target in zip(pair, ring, strict=True):
                    rows = source.at[first, at[1], pl.ds(row, KEYS)]
                    plgpu.copy_gmem_to_smem(rows, target.at[slot], full.at[slot])

            pl.when(i < plan.sink)(lambda: tile(sink, at[0], i * KEYS))
            if self.paged:

                @pl.when((i >= plan.sink) & (i < plan.sink + plan.pages))
                def _() -> None:
                    page, part = (
                        f(i - plan.sink, jnp.int32(PAGE_TILES)) for f in (lax.div, lax.rem)
                    )
                    tile(pages, page_id(page), part * KEYS)

            near = i - plan.sink - plan.pages
            pl.when(near >= 0)(lambda: tile(band, at[0], self.band_row(plan, near)))

        for i in range(self.stages):
            pl.when(i < plan.tiles)(functools.partial(copy, jnp.int32(i), i))

        @pl.loop(0, plan.tiles)
        def _(i: Any) -> None:
            slot = lax.rem(i, jnp.int32(self.stages))
            plgpu.barrier_wait(free.at[slot])
            pl.when(i + self.stages < plan.tiles)(lambda: copy(i + self.stages, slot))

    def begin(self, far_ref: Any, lse_ref: Any, at: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        """(out, max, sum) of the INT2 pages: a result counts as one key of logit lse."""
        out = filled((ROWS, self.v_head_dim), 0.0, plgpu.Layout.WGMMA)
        m, l = filled((ROWS,), LOWEST, ROW), filled((ROWS,), 0.0, ROW)
        for split in range(self.splits):
            load = functools.partial(plgpu.load, optimized=False)
            far = load(far_ref.at[split, *at], layout=plgpu.Layout.WGMMA)
            lse = load(lse_ref.at[split, *at], layout=ROW)
            if split == 0:
                out, m, l = far, lse, l + 1
                continue
            new_m = jnp.maximum(m, lse)
            shrink, weight = jnp.exp2(m - new_m), jnp.exp2(lse - new_m)
            out = out * over(shrink, out.shape) + far * over(weight, out.shape)
            m, l = new_m, l * shrink + weight
        return out, m, l

    def attend(
        self,
        row: Any,
        plan: Plan,
        length: Any,
        new: Any,
        q: Any,
        start: tuple[Any, Any, Any],
        ring: tuple[Any, Any],
        barriers: tuple[Any, ...],
    ) -> tuple[Any, Any, Any]:
        """(out, max, sum) of 64 rows, the first of which is ``row``, from ``start`` on."""
        full, free = barriers
        shape = (ROWS, KEYS)
        rows = row + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
        position = self.position(rows, length, new)
        tail = self.first_tail(position)
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)

        def step(i: Any, carry: Any, low: Any, high: Any, base: Any) -> Any:
            """Tile i; keys of position base + column with low <= it <= high are visible."""
            out, m, l = carry
            slot = lax.rem(i, jnp.int32(self.stages))
            plgpu.barrier_wait(full.at[slot])
            s = scores(q, ring[0].at[slot], self.interpret) * self.unit
            seen = (column >= over(low - base, shape)) & (column <= over(high - base, shape))
            s = jnp.where(seen, s, MASKED)
            new_m = jnp.maximum(m, s.max(1))
            p = jnp.exp2(s - over(new_m, shape))
            shrink = jnp.exp2(m - new_m)
            l = l * shrink + p.sum(1)
            out = out * over(shrink, out.shape)
            out = weighted(
                out, p.astype(jnp.bfloat16), ring[1].at[slot], self.interpret, transposed=False
            )
            plgpu.barrier_arrive(free.at[slot])
            return out, new_m, l

        none = jnp.full_like(position, -(2**30))

        def over_sink(i: Any, carry: Any) -> Any:
            return step(i, carry, none, position, i * KEYS)

        def over_pages(i: Any, carry: Any) -> Any:
            base = self.windows.sink + (i - plan.sink) * KEYS
            return step(i, carry, none, tail - 1, base)

        def over_band(i: Any, carry: Any) -> Any:
            tile = i - plan.sink - plan.pages
            first = plan.start + plan.first + tile * KEYS  # before it: the tile before, once more
            base = plan.start + self.band_row(plan, tile)
            return step(i, carry, jnp.maximum(tail, first), position, base)

        state = lax.fori_loop(0, plan.sink, over_sink, start)
        far = plan.sink + plan.pages
        if self.paged:
            state = lax.fori_loop(plan.sink, far, over_pages, state)
        return lax.fori_loop(far, plan.tiles, over_band, state)

    def __call__(self, *refs: Any) -> None:
        (
            q_ref,  # bf16[terms, B, K, M, D], M a multiple of 128
            sink_k_ref,  # bf16[B, K, S, D]
            sink_v_ref,  # bf16[B, K, S, Dv]
            k_ref,  # bf16[P, K, T, D], if paged
            v_ref,  # bf16[P, K, T, Dv], if paged
            band_k_ref,  # bf16[B, K, H, D]
            band_v_ref,  # bf16[B, K, H, Dv]
            table_ref,  # i32[B, MP]
            length_ref,  # i32[B]
            new_ref,  # i32[B]
            far_ref,  # f32[splits, B, K, M, Dv], if splits
            lse_ref,  # f32[splits, B, K, M], if splits
            out_ref,  # [B, K, M, Dv]
            q_tiles,
            k_tiles,
            v_tiles,
            full,
            free,
            of_query,
        ) = refs
        block, head, row = (lax.axis_index(name) for name in ("block", "head", "row"))
        warpgroup = lax.axis_index("warpgroup")
        length, new = length_ref[row], new_ref[row]
        plan = self.plan(block, length, new)
        ring, barriers = (k_tiles, v_tiles), (full, free)

        @pl.when(warpgroup < CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(232, action="increase")
            at = block * BLOCK_ROWS + warpgroup * ROWS
            mine = pl.ds(at, ROWS)
            q = [q_tiles.at[term, warpgroup] for term in range(self.terms)]
            for term, tile in enumerate(q):
                rows = q_ref.at[term, row, head, mine]
                plgpu.copy_gmem_to_smem(rows, tile, of_query.at[warpgroup])
            state = self.begin(far_ref, lse_ref, (row, head, mine))
            plgpu.barrier_wait(of_query.at[warpgroup])
            out, _, l = self.attend(at, plan, length, new, q, state, ring, barriers)
            factor = 1 / jnp.where(l > 0, l, 1.0)
            result = (out * over(factor, out.shape)).astype(out_ref.dtype)
            store(out_ref.at[row, head, mine], result)

        @pl.when(warpgroup == CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(40, action="decrease")
            sources = ((sink_k_ref, sink_v_ref), (k_ref, v_ref), (band_k_ref, band_v_ref))
            self.fetch((row, head), plan, lambda i: table_ref[row, i], sources, ring, barriers)


def attention(
    q: BFloat16[Array, "terms B K M D"],
    sink: tuple[Array, Array],
    band: tuple[Array, Array],
    pages: tuple[Array, Array] | None,
    far: tuple[Array, Array] | None,
    block_table: Int32[Array, "B MP"],
    lengths: Int32[Array, " B"],
    q_lens: Int32[Array, " B"],
    *,
    windows: Windows,
    group: int,
    scale: float,
    dtype: Any,
    interpret: Any = None,
) -> Array:
    """The normalised output [B, K, M, Dv] of sink, BF16 pages (if any), band and ``far``.

    Args:
        q: rows (position, head of the group), padded to 128; one term, or two for float32.
        sink, band: keys [B, K, S, D] and [B, K, H, D] with their values, H a multiple of 8.
        far: out and lse of ``mosaic_pages.attention``.
        scale: softmax scale times log2(e).
    """
    terms, batch, kv_heads, rows, head_dim = q.shape
    v_head_dim = sink[1].shape[-1]
    stages = 1 if terms * head_dim == 512 else 2  # what shared memory holds beside the queries
    body = Body(
        windows,
        group,
        scale,
        stages,
        band[0].shape[2],
        v_head_dim,
        pages is not None,
        0 if far is None else far[0].shape[0],
        terms,
        interpret is not None,
    )
    arrays = [q, *sink, *(pages or ()), *band, block_table, lengths, q_lens]
    arrays += far or ()

    def call(*refs: Any) -> None:
        given = iter(refs)
        take = lambda n, there=True: [next(given) if there else None for _ in range(n)]  # noqa: E731
        body(*take(3), *take(2, body.paged), *take(5), *take(2, body.splits > 0), *given)

    kernel = plgpu.kernel(
        call,
        out_type=jax.ShapeDtypeStruct((batch, kv_heads, rows, v_head_dim), dtype),
        scratch_types=[
            plgpu.SMEM((terms, CONSUMERS, ROWS, head_dim), jnp.bfloat16, transforms=TILED),
            plgpu.SMEM((stages, KEYS, head_dim), jnp.bfloat16, transforms=TILED),
            plgpu.SMEM((stages, KEYS, v_head_dim), jnp.bfloat16, transforms=TILED),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=terms, num_barriers=CONSUMERS),
        ],
        grid=(rows // BLOCK_ROWS, kv_heads, batch),
        grid_names=("block", "head", "row"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=PARAMS,
        interpret=interpret,
    )
    return kernel(*arrays)
