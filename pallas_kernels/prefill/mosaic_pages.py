"""Attention of a chunk's queries over INT2 pages: the kernel's body and its launch.

A block has 128 query rows of one KV head, four warpgroups and a share of the row's pages:

    block table -> page ids -> bulk copies of words and metadata into a ring of pages
        -> warpgroup 2 (keys) and 3 (values) unpack them into float16 tiles (``mosaic_tiles``)
            -> warpgroups 0 and 1, 64 rows each: scores, online softmax, output (wgmma)

A page is unpacked once for the 128 rows. Rows are (position, head of the group), so a block spans
128 / G positions and all its rows see the same pages but for the last ones: a page that a row does
not see yet has the row's maximum taken as infinite, so its weights are 0.

The transforms are tiles like the pages': X_Q^T goes before the keys and makes the query operand,
X_O^T comes after the values and takes the output out of the transformed space. Both are the sum of
two float16 numbers, so neither product adds an error to speak of.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.format import PAGE
from pallas_kernels.layout import LayerKV, Transform, Windows
from pallas_kernels.merge import MASKED
from pallas_kernels.prefill import mosaic_tiles
from pallas_kernels.prefill.mosaic_producer import Producer
from pallas_kernels.prefill.mosaic_registers import computed, times_rows
from pallas_kernels.prefill.mosaic_ring import Config, Tiled
from pallas_kernels.prefill.mosaic_tiles import Tiles
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
    scores,
    store,
    visible_pages,
    weighted,
)

# A block of 512 threads starts with 128 registers each, which the warpgroups share out anew.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 208, 48
QUERY_UNIT = 16.0  # queries are stored times this, against float16's least numbers


@dataclasses.dataclass(frozen=True)
class Body:
    """The static part of the kernel."""

    tiles: Tiles
    windows: Windows
    config: Config
    group: int
    unit: float  # scale log2(e)
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

    @property
    def parts(self) -> list[Any]:
        """Columns of the output by accumulator: one of 256 needs more registers than a thread of
        four warpgroups begins with."""
        size = min(128, self.tiles.v_head_dim)
        return [pl.ds(at, size) for at in range(0, self.tiles.v_head_dim, size)]

    # --------------------------------------------------------------------------------- consumers

    def transformed(self, q: Any, q_tile: Any, tiles: Tiled) -> None:
        """q X_Q times the scale, as float16 into ``q_tile``; X_Q in two float16 terms."""
        size = self.tiles.head_dim // self.tiles.query_chunks
        q = q.astype(jnp.float16)
        parts = []
        for chunk in range(self.tiles.query_chunks):
            part = filled((ROWS, size), 0.0, plgpu.Layout.WGMMA)
            for term in range(2):
                step = jnp.int32(2 * chunk + term)
                tile = tiles.wait(step)
                tile = tile if size == self.tiles.tokens else tile.at[pl.ds(0, size)]
                part = weighted(part, q, tile, self.interpret, transposed=True)
                tiles.release(step)
            parts.append((part * (self.unit * QUERY_UNIT)).astype(jnp.float16))
        for chunk, part in enumerate(parts):
            whole = size == self.tiles.head_dim
            target = q_tile if whole else q_tile.at[:, pl.ds(chunk * size, size)]
            target[...] = part
        plgpu.commit_smem()

    def attend(
        self,
        row: Any,
        first: Any,
        count: Any,
        length: Any,
        new: Any,
        q: Any,
        keys: Tiled,
        values: Tiled,
    ) -> tuple[list[Any], Any, Any]:
        """(out, max, sum) of 64 rows, the first of which is ``row``, over the block's pages."""
        halves, before = self.tiles.halves, 2 * self.tiles.query_chunks
        shape = (ROWS, self.tiles.tokens)
        rows = row + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=ROW)
        visible = self.visible(rows, length, new)
        steps = count * halves

        def weights(s: Any, i: Any, m: Any) -> tuple[Any, Any, Any, Any]:
            """(weights, their sums, new maxima, factor of what was summed so far) of step i."""
            seen = first + lax.div(i, jnp.int32(halves)) < visible
            top = jnp.where(seen, s.max(1) * (1 / QUERY_UNIT), LOWEST)
            new_m = jnp.maximum(m, top)
            reference = jnp.where(seen, new_m, -MASKED)
            p = jnp.exp2(s * (1 / QUERY_UNIT) - over(reference, shape))
            return p, p.sum(1), new_m, jnp.exp2(m - new_m)

        def step(i: Any, carry: Any) -> Any:
            """Values of step i and keys of step i + 1: its softmax hides behind the values."""
            out, m, l, p = carry
            k_tile = keys.wait(before + i + 1)

            def softmax(s: Any) -> tuple[Any, ...]:
                keys.release(before + i + 1)
                new_p, total, new_m, shrink = weights(s, i + 1, m)
                if not self.interpret:
                    computed(total)
                return new_p, new_m, l * shrink + total, shrink

            like = (filled(shape, 0.0, plgpu.Layout.WGMMA), m, l, l)
            out, (p, m, l, shrink) = self.products(
                out, p, lambda: values.wait(i), q, k_tile, softmax, like
            )
            values.release(i)
            p = p.astype(jnp.float16)
            return [self.shrunk(x, shrink) for x in out], m, l, p

        s = scores([q], keys.wait(jnp.int32(before)), self.interpret)
        keys.release(jnp.int32(before))
        p, l, m, _ = weights(s, jnp.int32(0), filled((ROWS,), LOWEST, ROW))
        out = [filled((ROWS, part.size), 0.0, plgpu.Layout.WGMMA) for part in self.parts]
        out, m, l, p = lax.fori_loop(0, steps - 1, step, (out, m, l, p.astype(jnp.float16)))
        out = self.add(out, p, values.wait(steps - 1))
        values.release(steps - 1)
        return out, m, l

    def products(
        self,
        out: list[Any],
        p: Any,
        v: Callable[[], Any],
        q: Any,
        k: Any,
        then: Callable[[Any], tuple[Any, ...]],
        like: tuple[Any, ...],
    ) -> tuple[list[Any], tuple[Any, ...]]:
        """(out + p v, then(q k^T)): ``then`` runs when the scores are there, beside the rest.

        Args:
            like: arrays of the shapes and layouts that ``then`` returns.
        """
        if self.interpret:
            result = then(scores([q], k, True))
            return self.add(out, p, v()), result

        def run(refs: Any) -> None:
            sums, results = refs

            def start(s: Any) -> Any:
                plgpu.wgmma(s, q, k.transpose((1, 0)))
                tile = v()
                for part, columns in zip(sums, self.parts, strict=True):
                    rows = tile if len(sums) == 1 else tile.at[columns]
                    plgpu.wgmma(part, p, rows.transpose((1, 0)))
                return plgpu.wgmma_accumulator_load(s, wait_n=len(sums))

            s = pl.run_scoped(start, plgpu.ACC((ROWS, self.tiles.tokens), jnp.float32))
            for ref, value in zip(results, then(s), strict=True):
                ref[...] = value

        return pl.run_state(run)(([plgpu.ACC.init(x) for x in out], like))

    def shrunk(self, out: Any, factor: Any) -> Any:
        """Rows times their factors, most of which are 1 after some pages."""
        if self.interpret:
            return out * over(factor, out.shape)
        return times_rows(out, factor)

    def add(self, out: list[Any], p: Any, tile: Any) -> list[Any]:
        """out + p v, by parts of the columns."""
        rows = [tile] if len(out) == 1 else [tile.at[part] for part in self.parts]
        return [
            weighted(x, p, v, self.interpret, transposed=True)
            for x, v in zip(out, rows, strict=True)
        ]

    def back(self, out: list[Any], l: Any, scratch: Any, values: Tiled, steps: Any) -> list[Any]:
        """(out / l) X_O: both in two float16 terms, the product of the low ones left out."""
        size = self.tiles.v_head_dim // self.tiles.output_chunks
        factor = 1 / jnp.where(l > 0, l, 1.0)
        out = [x * over(factor, x.shape) for x in out]
        high = [x.astype(jnp.float16) for x in out]
        low = [
            (x - h.astype(jnp.float32)).astype(jnp.float16) for x, h in zip(out, high, strict=True)
        ]
        result = [filled(x.shape, 0.0, plgpu.Layout.WGMMA) for x in out]
        for number, (chunk, _) in enumerate(self.tiles.output_steps):
            if number in (0, 2 * self.tiles.output_chunks):
                plgpu.commit_smem()  # all warps have read the queries, then the high terms
                for x, part in zip(low if number else high, self.parts, strict=True):
                    target = scratch if len(out) == 1 else scratch.at[:, part]
                    target[...] = x
                plgpu.commit_smem()
            tile = values.wait(steps + number)
            tile = tile if size == self.tiles.tokens else tile.at[:, pl.ds(0, size)]
            whole = size == self.tiles.v_head_dim
            term = scratch if whole else scratch.at[:, pl.ds(chunk * size, size)]
            result = self.add(result, term, tile)
            values.release(steps + number)
        return result

    def consume(
        self,
        at: tuple[Any, Any, Any],
        row: Any,
        first: Any,
        count: Any,
        length: Any,
        new: Any,
        q_ref: Any,
        mu_ref: Any,
        q_tile: Any,
        keys: Tiled,
        values: Tiled,
        out_ref: Any,
        lse_ref: Any,
    ) -> None:
        """64 rows of a block, the first of which is ``row``: queries in, result out."""
        split, batch, head = at
        mine = pl.ds(row, ROWS)
        out_ref, lse_ref = (x.at[split, batch, head, mine] for x in (out_ref, lse_ref))
        dims = self.tiles.head_dim, self.tiles.v_head_dim
        q_tile, scratch = (q_tile if d == max(dims) else q_tile.at[:, pl.ds(0, d)] for d in dims)

        @pl.when(count > 0)
        def _() -> None:
            q = plgpu.load(q_ref.at[batch, head, mine], layout=plgpu.Layout.WGMMA, optimized=False)
            self.transformed(q, q_tile, keys)
            mu = plgpu.load(mu_ref.at[head], layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
            shift = (q.astype(jnp.float32) * lax.broadcast_in_dim(mu, q.shape, [1])).sum(1)
            out, m, l = self.attend(row, first, count, length, new, q_tile, keys, values)
            steps = count * self.tiles.halves
            result = self.back(out, l, scratch, values, steps)
            for x, part in zip(result, self.parts, strict=True):
                store(out_ref if len(result) == 1 else out_ref.at[:, part], x)
            lse = m + shift * self.unit + jnp.log2(jnp.where(l > 0, l, 1.0))
            store(lse_ref, jnp.where(l > 0, lse, LOWEST))

        @pl.when(count == 0)
        def _() -> None:
            for part in self.parts:
                none = filled((ROWS, part.size), 0.0, plgpu.Layout.WGMMA)
                store(out_ref if part.size == dims[1] else out_ref.at[:, part], none)
            store(lse_ref, filled((ROWS,), LOWEST, ROW))

    def __call__(
        self,
        q_ref: Any,  # [B, K, M, D], M a multiple of 128
        x_q_ref: Any,  # f16[K, 2, D, D], X_Q^T in two terms, rows in ``channel_order``
        x_o_ref: Any,  # f16[K, 2, Dv, max(Dv, tokens)], X_O^T in two terms
        mu_ref: Any,  # f32[K, D]
        k_ref: Any,  # u16[P, K, T D/2048, 256]
        v_ref: Any,  # u16[P, K, T Dv/2048, 256]
        k_meta_ref: Any,  # u32[P, K, T]
        v_meta_ref: Any,  # u32[P, K, T]
        table_ref: Any,  # i32[B, MP]
        length_ref: Any,  # i32[B]
        new_ref: Any,  # i32[B]
        out_ref: Any,  # f32[splits, B, K, M, Dv]
        lse_ref: Any,  # f32[splits, B, K, M]
        *scratch: Any,
    ) -> None:
        q_tiles, k_words, v_words, k_meta, v_meta, k_tiles, v_tiles, *barriers = scratch
        k_arrived, v_arrived, k_full, v_full, k_free, v_free = barriers
        block, head, row = (lax.axis_index(name) for name in ("block", "head", "row"))
        split, warpgroup = lax.axis_index("split"), lax.axis_index("warpgroup")
        keys = Tiled(k_tiles, k_full, k_free, self.config.stages)
        values = Tiled(v_tiles, v_full, v_free, self.config.stages)

        def work() -> tuple[Any, Any, Any, Any]:
            """(length, new, first, count), by every role: shared, they would be spilled."""
            length, new = length_ref[row], new_ref[row]
            return length, new, *self.share(block, split, length, new)

        @pl.when(warpgroup < CONSUMERS)
        def _() -> None:
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            length, new, first, count = work()
            self.consume(
                (split, row, head),
                block * BLOCK_ROWS + warpgroup * ROWS,
                first,
                count,
                length,
                new,
                q_ref,
                mu_ref,
                q_tiles.at[warpgroup],
                keys,
                values,
                out_ref,
                lse_ref,
            )

        def produce(of_keys: bool, pools: tuple[Any, Any], matrix: Any, *rings: Any) -> None:
            plgpu.set_max_registers(PRODUCER_REGISTERS, action="decrease")
            _, _, first, count = work()
            run = Producer(of_keys, self.tiles, self.config, self.interpret)
            mine = tuple(ref.at[:, head] for ref in pools)
            pages = first, count, lambda i: table_ref[row, i]
            pl.when(count > 0)(lambda: run(*pages, mine, matrix.at[head], *rings))

        @pl.when(warpgroup == CONSUMERS)
        def _() -> None:
            produce(True, (k_ref, k_meta_ref), x_q_ref, (k_words, k_meta), k_arrived, keys)

        @pl.when(warpgroup == CONSUMERS + 1)
        def _() -> None:
            produce(False, (v_ref, v_meta_ref), x_o_ref, (v_words, v_meta), v_arrived, values)


def shared_bytes(tiles: Tiles, config: Config) -> int:
    """Shared memory of a block, but for its barriers."""
    dims = tiles.head_dim + tiles.v_head_dim
    page = PAGE * (dims // 4 + 8)
    return (
        BLOCK_ROWS * max(tiles.head_dim, tiles.v_head_dim) * 2
        + config.pages * page
        + config.stages * tiles.tokens * dims * 2
    )


def two_terms(x: Float[Array, "K D E"]) -> Float[Array, "K 2 E D"]:
    """The transpose as the sum of two float16 numbers each: 22 bits."""
    x = x.swapaxes(-1, -2)
    high = lax.reduce_precision(x, 5, 10)
    return jnp.stack([high, x - high], 1).astype(jnp.float16)


def attention(
    q: Float[Array, "B K M D"],
    layer: LayerKV,
    transform: Transform,
    block_table: Int32[Array, "B MP"],
    lengths: Int32[Array, " B"],
    q_lens: Int32[Array, " B"],
    *,
    tiles: Tiles,
    windows: Windows,
    config: Config,
    group: int,
    scale: float,
    interpret: Any = None,
) -> tuple[Array, Array]:
    """(out f32[splits, B, K, M, Dv], lse f32[splits, B, K, M]) over each split's pages.

    The output is normalised and out of the transformed space, lse is the base-2 logarithm of the
    sum of weights (q.mu is in it), -1e25 where a row sees no page of the split.

    Args:
        q: rows (position, head of the group), padded to a multiple of 128, BF16 or float32; they
            are rounded to float16.
        scale: softmax scale times log2(e).
    """
    lines = lambda x: x.reshape(*x.shape[:2], -1, 256)  # noqa: E731 - a TMA box's longest row
    k_pages, v_pages = lines(layer.k_pages), lines(layer.v_pages)
    batch, kv_heads, rows, _ = q.shape
    stages, pages = config.stages, config.pages
    partial = (config.splits, batch, kv_heads, rows)
    widest = max(tiles.head_dim, tiles.v_head_dim)
    body = Body(tiles, windows, config, group, scale, interpret is not None)
    x_q = transform.x_q[..., mosaic_tiles.channel_order(tiles.head_dim)]
    # A tile is copied whole: with fewer channels than it has columns, X_O^T is padded.
    short = max(0, tiles.tokens - tiles.v_head_dim)
    x_o = jnp.pad(transform.x_o, ((0, 0), (0, short), (0, 0)))
    kernel = plgpu.kernel(
        body.__call__,
        out_type=[
            jax.ShapeDtypeStruct((*partial, tiles.v_head_dim), jnp.float32),
            jax.ShapeDtypeStruct(partial, jnp.float32),
        ],
        scratch_types=[
            plgpu.SMEM((CONSUMERS, ROWS, widest), jnp.float16, transforms=TILED),
            plgpu.SMEM((pages, *k_pages.shape[2:]), jnp.uint16),
            plgpu.SMEM((pages, *v_pages.shape[2:]), jnp.uint16),
            plgpu.SMEM((pages, PAGE), jnp.uint32),
            plgpu.SMEM((pages, PAGE), jnp.uint32),
            plgpu.SMEM((stages, tiles.tokens, tiles.head_dim), jnp.float16, transforms=TILED),
            plgpu.SMEM((stages, tiles.v_head_dim, tiles.tokens), jnp.float16, transforms=TILED),
            plgpu.Barrier(num_arrivals=2, num_barriers=pages),
            plgpu.Barrier(num_arrivals=2, num_barriers=pages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_barriers=stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
        ],
        grid=(rows // BLOCK_ROWS, kv_heads, batch, config.splits),
        grid_names=("block", "head", "row", "split"),
        num_threads=CONSUMERS + 2,
        thread_name="warpgroup",
        compiler_params=PARAMS,
        interpret=interpret,
    )
    out, lse = kernel(
        q,
        two_terms(x_q),
        two_terms(x_o),
        transform.mu,
        k_pages,
        v_pages,
        layer.k_meta,
        layer.v_meta,
        block_table,
        lengths,
        q_lens,
    )
    return out, lse
