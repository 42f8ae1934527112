"""Attention of a chunk's queries over INT2 pages: the kernel's body and its launch.

A block has 128 query rows of one KV head, three warpgroups and a share of the row's pages:

    block table -> page ids -> bulk copies of words and metadata into a ring of pages
        -> warpgroup 2 unpacks them into float16 tiles (``mosaic_tiles``), a ring of steps
            -> warpgroups 0 and 1, 64 rows each: scores, online softmax, output (wgmma)

A page is unpacked once for the 128 rows. Rows are (position, head of the group), so a block spans
128 / G positions and all its rows see the same pages but for the last ones: a page that a row does
not see yet has the row's maximum taken as infinite, so its weights are 0.

Barriers (all of a ring's length): ``arrived`` a page's bytes are there; ``keys``, ``values`` a tile
is written; ``keys_free``, ``values_free`` both consumers have read it.
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
from jaxtyping import Array, Float, Int32

from pallas_kernels import format as fmt
from pallas_kernels.format import PAGE, Codec
from pallas_kernels.lanes import program
from pallas_kernels.layout import LayerKV, Windows
from pallas_kernels.merge import MASKED
from pallas_kernels.prefill import mosaic_tiles
from pallas_kernels.prefill.mosaic_tiles import Tiles

ROWS = 64  # of a consumer: the rows of a wgmma
CONSUMERS = 2
BLOCK_ROWS = ROWS * CONSUMERS
# A block of 384 threads starts with 168 registers each, which the warpgroups share out anew.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 208, 88
LOWEST = -1e25  # the maximum of a row that has seen nothing: exp2(MASKED - LOWEST) = 0
QUERY_UNIT = 16.0  # queries are stored times this, against float16's least numbers
TILED: Any = (
    plgpu.TilingTransform((8, 64)),  # type: ignore[abstract]
    plgpu.SwizzleTransform(128),  # type: ignore[abstract]
)
PARAMS = plgpu.CompilerParams(
    approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
)
ROW = plgpu.Layout.WGMMA.reduce(1)


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


def scores(q: Any, k: Any, interpret: bool) -> Any:
    """q k^T in float32."""
    if interpret:
        product = lax.dot_general(
            q[...].astype(jnp.float32),
            k[...].astype(jnp.float32),
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST,
        )
        plgpu.commit_smem()  # loads before a later copy; wgmma is ordered by its own wait
        return product

    def run(sums: Any) -> Any:
        plgpu.wgmma(sums, q, k.transpose((1, 0)))
        return sums[...]

    return pl.run_scoped(run, plgpu.ACC((q.shape[0], k.shape[0]), jnp.float32))


def weighted(out: Any, p: Any, v: Any, interpret: bool, transposed: bool) -> Any:
    """out + p v; v is [tokens, Dv], or [Dv, tokens] if ``transposed``."""
    if interpret:
        product = lax.dot_general(
            p.astype(jnp.float32),
            v[...].astype(jnp.float32),
            (((1,), (1 if transposed else 0,)), ((), ())),
            precision=lax.Precision.HIGHEST,
        )
        plgpu.commit_smem()
        return out + product

    def run(sums: Any) -> None:
        plgpu.wgmma(sums, p, v.transpose((1, 0)) if transposed else v)

    return pl.run_state(run)(plgpu.ACC.init(out))


def store(ref: Any, value: Any) -> None:
    """Store registers to global memory as they lie, not in whole cache lines.

    jax 0.11 always does; jax 0.12 refuses to unless asked by a function that 0.11 does not have.
    """
    if hasattr(plgpu, "store"):
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def filled(shape: tuple[int, ...], value: float, layout: Any) -> Any:
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def over(x: Any, shape: tuple[int, ...]) -> Any:
    """A number per row, over the row."""
    return lax.broadcast_in_dim(x, shape, [0])


def visible_pages(n: Any, windows: Windows) -> Any:
    """``Windows.visible_pages`` in operations that a kernel's row vectors have."""
    past = jnp.maximum(n - windows.sink - windows.recent, 0)
    return lax.shift_right_arithmetic(past, jnp.full_like(past, PAGE.bit_length() - 1))


@dataclasses.dataclass(frozen=True)
class Body:
    """The static part of the kernel."""

    tiles: Tiles
    windows: Windows
    config: Config
    group: int
    interpret: bool

    # -------------------------------------------------------------------------------- positions

    def visible(self, row: Any, length: Any, new: Any) -> Any:
        """Pages seen by row (position, head) ``row`` of the chunk; past q_lens as the last one."""
        query = jnp.minimum(lax.div(row, jnp.int32(self.group)), jnp.maximum(new - 1, 0))
        return visible_pages(length - new + query + 1, self.windows)

    def share(self, block: Any, split: Any, length: Any, new: Any) -> tuple[Any, Any]:
        """(first, count) of the pages of a block: none where it has no query that exists."""
        last = self.visible(block * BLOCK_ROWS + BLOCK_ROWS - 1, length, new)
        last = jnp.where(lax.div(block * BLOCK_ROWS, jnp.int32(self.group)) < new, last, 0)
        share = lax.div(last + self.config.splits - 1, jnp.int32(self.config.splits))
        first = split * share
        return first, jnp.clip(last - first, 0, share)

    # ------------------------------------------------------------------------------- dequantiser

    def unpack(self, words: Any, meta: Any, tile: Any, half: Any, keys: bool) -> None:
        """One tile of a page."""
        shape = self.tiles
        if self.interpret:
            tokens = mosaic_tiles.places(half * shape.tokens + jnp.arange(shape.tokens), PAGE // 8)
            if keys:
                held = words[...].reshape(PAGE, shape.head_dim // 8)
                x = fmt.decode_key_pages(held, meta[...], Codec(key=shape.codec))[tokens]
                x = x[:, mosaic_tiles.places(jnp.arange(shape.head_dim), shape.head_dim // 8)]
            else:
                held = words[...].reshape(shape.v_head_dim, PAGE // 8)
                x = fmt.decode_value_pages(held, meta[...])[tokens].T
            tile[...] = x.astype(jnp.float16)
            return

        def run(ops: Any, pointers: Any, scalars: Any, _: Any) -> list[Any]:
            make = mosaic_tiles.key_tile if keys else mosaic_tiles.value_tile
            make(ops, shape, pointers[0], pointers[1], pointers[2], scalars[0])
            return []

        program(run, refs=[words, meta, tile], scalars=[half], transforms=[(), (), TILED])

    def dequantise(
        self,
        first: Any,
        count: Any,
        page_id: Callable[[Any], Any],
        pools: list[Any],
        ring: tuple[Any, ...],
        tiles: tuple[Any, Any],
        barriers: tuple[Any, ...],
    ) -> None:
        """Fetch this block's pages and unpack each into ``halves`` steps."""
        arrived, keys, values, keys_free, values_free = barriers
        depth, stages, halves = self.config.pages, self.config.stages, self.tiles.halves
        last = jnp.maximum(first + count - 1, 0)

        def id_of(index: Any) -> Any:
            return page_id(jnp.minimum(first + index, last))

        def fetch(page: Any, slot: Any) -> None:
            for pool, stage in zip(pools, ring, strict=True):
                plgpu.copy_gmem_to_smem(pool.at[page], stage.at[slot], arrived.at[slot])

        def fetch_first(i: int) -> None:
            fetch(id_of(jnp.int32(i)), i)

        for i in range(depth):
            pl.when(i < count)(functools.partial(fetch_first, i))

        def page(i: Any, ahead: Any) -> Any:
            """``ahead``: the id of the page to fetch now, read a page ago."""
            slot = lax.rem(i, jnp.int32(depth))
            k_words, v_words, k_meta, v_meta = (x.at[slot] for x in ring)
            plgpu.barrier_wait(arrived.at[slot])
            for half in range(halves):
                step = i * halves + half
                stage = lax.rem(step, jnp.int32(stages))
                for full, free, words, meta, tile, of_keys in (
                    (keys, keys_free, k_words, k_meta, tiles[0], True),
                    (values, values_free, v_words, v_meta, tiles[1], False),
                ):

                    @pl.when(step >= stages)
                    def _(free: Any = free, stage: Any = stage) -> None:
                        plgpu.barrier_wait(free.at[stage])

                    self.unpack(words, meta, tile.at[stage], jnp.int32(half), of_keys)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(full.at[stage])

            @pl.when(i + depth < count)
            def _() -> None:
                fetch(ahead, slot)

            return id_of(i + depth + 1)

        lax.fori_loop(0, count, page, id_of(jnp.int32(depth)))
        steps = count * halves

        @pl.loop(jnp.maximum(steps - stages, 0), steps)
        def _(step: Any) -> None:
            """Every phase of a barrier is waited for before the block ends."""
            stage = lax.rem(step, jnp.int32(stages))
            plgpu.barrier_wait(keys_free.at[stage])
            plgpu.barrier_wait(values_free.at[stage])

    # --------------------------------------------------------------------------------- consumers

    def attend(
        self,
        row: Any,
        first: Any,
        count: Any,
        length: Any,
        new: Any,
        q: Any,
        tiles: tuple[Any, Any],
        barriers: tuple[Any, ...],
    ) -> tuple[Any, Any, Any]:
        """(out, max, sum) of 64 rows, the first of which is ``row``, over the block's pages."""
        _, keys, values, keys_free, values_free = barriers
        halves, stages = self.tiles.halves, self.config.stages
        shape = (ROWS, self.tiles.tokens)
        rows = row + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
        visible = self.visible(rows, length, new)

        def step(i: Any, carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            out, m, l = carry
            stage = lax.rem(i, jnp.int32(stages))
            seen = first + lax.div(i, jnp.int32(halves)) < visible
            plgpu.barrier_wait(keys.at[stage])
            s = scores(q, tiles[0].at[stage], self.interpret)
            plgpu.barrier_arrive(keys_free.at[stage])
            top = jnp.where(seen, s.max(1) * (1 / QUERY_UNIT), LOWEST)
            new_m = jnp.maximum(m, top)
            reference = jnp.where(seen, new_m, -MASKED)
            p = jnp.exp2(s * (1 / QUERY_UNIT) - over(reference, shape))
            shrink = jnp.exp2(m - new_m)
            l = l * shrink + p.sum(1)
            out = out * over(shrink, out.shape)
            p = p.astype(jnp.float16)
            plgpu.barrier_wait(values.at[stage])
            out = weighted(out, p, tiles[1].at[stage], self.interpret, transposed=True)
            plgpu.barrier_arrive(values_free.at[stage])
            return out, new_m, l

        empty = (
            filled((ROWS, self.tiles.v_head_dim), 0.0, plgpu.Layout.WGMMA),
            filled((ROWS,), LOWEST, ROW),
            filled((ROWS,), 0.0, ROW),
        )
        return lax.fori_loop(0, count * halves, step, empty)

    def __call__(
        self,
        q_ref: Any,  # f16[B, K, M, D], M a multiple of 128
        k_ref: Any,  # u16[P, K, T D/2048, 256]
        v_ref: Any,  # u16[P, K, T Dv/2048, 256]
        k_meta_ref: Any,  # u32[P, K, T]
        v_meta_ref: Any,  # u32[P, K, T]
        table_ref: Any,  # i32[B, MP]
        length_ref: Any,  # i32[B]
        new_ref: Any,  # i32[B]
        out_ref: Any,  # f32[splits, B, K, M, Dv]
        max_ref: Any,  # f32[splits, B, K, M]
        sum_ref: Any,  # f32[splits, B, K, M]
        *scratch: Any,
    ) -> None:
        q_tiles, k_words, v_words, k_meta, v_meta, k_tiles, v_tiles, *barriers = scratch
        *of_rings, of_query = barriers
        block, head, row = (lax.axis_index(name) for name in ("block", "head", "row"))
        split, group = lax.axis_index("split"), lax.axis_index("warpgroup")
        length, new = length_ref[row], new_ref[row]
        first, count = self.share(block, split, length, new)
        tiles, rings = (k_tiles, v_tiles), tuple(of_rings)

        @pl.when(group < CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            at = block * BLOCK_ROWS + group * ROWS
            mine = pl.ds(at, ROWS)
            q = q_tiles.at[group]
            plgpu.copy_gmem_to_smem(q_ref.at[row, head, mine], q, of_query.at[group])
            plgpu.barrier_wait(of_query.at[group])
            out, m, l = self.attend(at, first, count, length, new, q, tiles, rings)
            store(out_ref.at[split, row, head, mine], out)
            store(max_ref.at[split, row, head, mine], m)
            store(sum_ref.at[split, row, head, mine], l)

        @pl.when(group == CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            pools = [ref.at[:, head] for ref in (k_ref, v_ref, k_meta_ref, v_meta_ref)]
            ring = (k_words, v_words, k_meta, v_meta)
            self.dequantise(first, count, lambda i: table_ref[row, i], pools, ring, tiles, rings)


def shared_bytes(tiles: Tiles, config: Config) -> int:
    """Shared memory of a block, but for its barriers."""
    dims = tiles.head_dim + tiles.v_head_dim
    page = PAGE * (dims // 4 + 8)
    return (
        BLOCK_ROWS * tiles.head_dim * 2
        + config.pages * page
        + config.stages * tiles.tokens * dims * 2
    )


def partials(
    q: Float[Array, "B K M D"],
    layer: LayerKV,
    block_table: Int32[Array, "B MP"],
    lengths: Int32[Array, " B"],
    q_lens: Int32[Array, " B"],
    *,
    tiles: Tiles,
    windows: Windows,
    config: Config,
    group: int,
    interpret: Any = None,
) -> tuple[Array, Array, Array]:
    """(out, max, sum) f32[splits, B, K, M, .] over each split's pages, in the transformed space.

    Args:
        q: float16 queries times scale log2(e) X_Q and ``QUERY_UNIT``, channels in
            ``mosaic_tiles.channel_order``; row (position, head of the group), padded to 128.
    """
    lines = lambda x: x.reshape(*x.shape[:2], -1, 256)  # noqa: E731 - a TMA box's longest row
    k_pages, v_pages = lines(layer.k_pages), lines(layer.v_pages)
    batch, kv_heads, rows, _ = q.shape
    stages, pages = config.stages, config.pages
    partial = (config.splits, batch, kv_heads, rows)
    body = Body(tiles, windows, config, group, interpret is not None)
    kernel = plgpu.kernel(
        body.__call__,
        out_type=[
            jax.ShapeDtypeStruct((*partial, tiles.v_head_dim), jnp.float32),
            *(jax.ShapeDtypeStruct(partial, jnp.float32) for _ in "ml"),
        ],
        scratch_types=[
            plgpu.SMEM((CONSUMERS, ROWS, tiles.head_dim), jnp.float16, transforms=TILED),
            plgpu.SMEM((pages, *k_pages.shape[2:]), jnp.uint16),
            plgpu.SMEM((pages, *v_pages.shape[2:]), jnp.uint16),
            plgpu.SMEM((pages, PAGE), jnp.uint32),
            plgpu.SMEM((pages, PAGE), jnp.uint32),
            plgpu.SMEM((stages, tiles.tokens, tiles.head_dim), jnp.float16, transforms=TILED),
            plgpu.SMEM((stages, tiles.v_head_dim, tiles.tokens), jnp.float16, transforms=TILED),
            plgpu.Barrier(num_arrivals=4, num_barriers=pages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            plgpu.Barrier(num_barriers=CONSUMERS),
        ],
        grid=(rows // BLOCK_ROWS, kv_heads, batch, config.splits),
        grid_names=("block", "head", "row", "split"),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=PARAMS,
        interpret=interpret,
    )
    out, m, l = kernel(
        q, k_pages, v_pages, layer.k_meta, layer.v_meta, block_table, lengths, q_lens
    )
    return out, m, l
