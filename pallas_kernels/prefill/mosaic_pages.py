"""Attention of a chunk's queries over packed pages: the kernel's body and its launch.

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
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int32

from pallas_kernels.format import PAGE
from pallas_kernels.layout import LayerKV, Transform, Windows
from pallas_kernels.prefill import mosaic_tiles
from pallas_kernels.prefill.mosaic_consumer import Consumer
from pallas_kernels.prefill.mosaic_producer import Producer
from pallas_kernels.prefill.mosaic_ring import Config, Tiled
from pallas_kernels.prefill.mosaic_tiles import Tiles
from pallas_kernels.prefill.mosaic_wgmma import BLOCK_ROWS, CONSUMERS, PARAMS, ROWS, TILED

# A block of 512 threads starts with 128 registers each, which the warpgroups share out anew.
CONSUMER_REGISTERS, PRODUCER_REGISTERS = 208, 48


@dataclasses.dataclass(frozen=True)
class Body:
    """The static part of the kernel."""

    consumer: Consumer
    config: Config

    def share(self, block: Any, split: Any, length: Any, new: Any) -> tuple[Any, Any]:
        """(first, count) of the pages of a block: none where it has no query that exists."""
        last = self.consumer.visible(block * BLOCK_ROWS + BLOCK_ROWS - 1, length, new)
        last = jnp.where(lax.div(block * BLOCK_ROWS, jnp.int32(self.consumer.group)) < new, last, 0)
        share = lax.div(last + self.config.splits - 1, jnp.int32(self.config.splits))
        first = split * share
        return first, jnp.clip(last - first, 0, share)

    def __call__(
        self,
        q_ref: Any,  # [B, K, M, D], M a multiple of 128
        x_q_ref: Any,  # f16[K, 2, D, D], X_Q^T in two terms, rows in ``channel_order``
        x_o_ref: Any,  # f16[K, 2, Dv, max(Dv, tokens)], X_O^T in two terms
        mu_ref: Any,  # f32[K, D]
        k_ref: Any,  # u16[P, K, b T D/4096, 256]
        v_ref: Any,  # u16[P, K, b T Dv/4096, 256]
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
            self.consumer(
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
            run = Producer(of_keys, self.consumer.tiles, self.config, self.consumer.interpret)
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
    page = sum(tiles.page_bytes) + PAGE * 8
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
    body = Body(Consumer(tiles, windows, group, scale, interpret is not None), config)
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
