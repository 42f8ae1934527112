"""The pages' kernel: a warpgroup that fetches pages of keys or of values and unpacks them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import format as fmt
from pallas_kernels.format import PAGE, Codec
from pallas_kernels.lanes import program
from pallas_kernels.packing import words_per_row
from pallas_kernels.prefill import mosaic_tiles
from pallas_kernels.prefill.mosaic_ring import Config, Tiled
from pallas_kernels.prefill.mosaic_tiles import Tiles
from pallas_kernels.prefill.mosaic_wgmma import TILED


@dataclasses.dataclass(frozen=True)
class Producer:
    """Of keys, or of values."""

    keys: bool
    tiles: Tiles
    config: Config
    interpret: bool

    def unpack(self, words: Any, meta: Any, tile: Any, half: Any) -> None:
        """One tile of a page."""
        shape = self.tiles
        if self.interpret:
            tokens = mosaic_tiles.places(half * shape.tokens + jnp.arange(shape.tokens), PAGE // 8)
            if self.keys:
                held = words[...].reshape(PAGE, words_per_row(shape.head_dim, shape.key_bits))
                codec = Codec(key=shape.codec, key_bits=shape.key_bits)
                x = fmt.decode_key_pages(held, meta[...], codec)[tokens]
                x = x[:, mosaic_tiles.places(jnp.arange(shape.head_dim), shape.head_dim // 8)]
            else:
                held = words[...].reshape(shape.v_head_dim, words_per_row(PAGE, shape.value_bits))
                x = fmt.decode_value_pages(held, meta[...])[tokens].T
            tile[...] = x.astype(jnp.float16)
            return

        def run(ops: Any, pointers: Any, scalars: Any, _: Any) -> list[Any]:
            make = mosaic_tiles.key_tile if self.keys else mosaic_tiles.value_tile
            make(ops, shape, pointers[0], pointers[1], pointers[2], scalars[0])
            return []

        program(run, refs=[words, meta, tile], scalars=[half], transforms=[(), (), TILED])

    def __call__(
        self,
        first: Any,
        count: Any,
        page_id: Callable[[Any], Any],
        pools: tuple[Any, Any],
        matrix: Any,
        ring: tuple[Any, Any],
        arrived: Any,
        tiles: Tiled,
    ) -> None:
        """Fetch this block's pages and unpack each into its steps.

        Args:
            pools, ring: words and metadata, of this KV head in memory and of each page in shared
                memory. matrix: f16[2 terms, ., .], whose tiles go before the keys or after the
                values. tiles: the ring of tiles to fill.
        """
        depth, halves = self.config.pages, self.tiles.halves
        last = jnp.maximum(first + count - 1, 0)
        before = 2 * self.tiles.query_chunks if self.keys else 0

        def id_of(index: Any) -> Any:
            return page_id(jnp.minimum(first + index, last))

        def copy(own: int, page: Any, slot: Any) -> None:
            plgpu.copy_gmem_to_smem(pools[own].at[page], ring[own].at[slot], arrived.at[slot])

        def fetch(page: Any, slot: Any) -> None:
            """A warp per copy, for an issue slot less in the others; one thread when interpreted
            (an emulated warp needs one of its own, and there are not that many)."""
            if self.interpret:
                copy(0, page, slot)
                copy(1, page, slot)
                return

            @plgpu.warp_map
            def _(warp: Any) -> None:
                for own in range(2):
                    pl.when(warp == own)(functools.partial(copy, own, page, slot))

        for i in range(depth):
            pl.when(i < count)(functools.partial(lambda i: fetch(id_of(jnp.int32(i)), i), i))
        if self.keys:
            size = self.tiles.head_dim // self.tiles.query_chunks
            for step in range(before):
                rows = pl.ds(step // 2 * size, size)
                tile = tiles.next(jnp.int32(step))
                target = tile if size == self.tiles.tokens else tile.at[pl.ds(0, size)]
                full = tiles.full.at[tiles.stage(jnp.int32(step))]
                plgpu.copy_gmem_to_smem(matrix.at[step % 2, rows], target, full)

        def page(i: Any, ahead: Any) -> Any:
            """``ahead``: the id of the page to fetch now, read a page ago."""
            slot = lax.rem(i, jnp.int32(depth))
            plgpu.barrier_wait(arrived.at[slot])
            for half in range(halves):
                step = before + i * halves + half
                tile = tiles.next(step)
                words, meta = (x.at[slot] for x in ring)
                self.unpack(words, meta, tile, jnp.int32(half))
                plgpu.commit_smem()  # the tile is written; at the last one the page is read
                plgpu.barrier_arrive(tiles.full.at[tiles.stage(step)])
            pl.when(i + depth < count)(lambda: fetch(ahead, slot))
            return id_of(i + depth + 1)

        lax.fori_loop(0, count, page, id_of(jnp.int32(depth)))
        steps = before + count * halves
        if not self.keys:
            for chunk, term in self.tiles.output_steps:
                tile = tiles.next(steps)
                columns = pl.ds(chunk * self.tiles.tokens, self.tiles.tokens)
                full = tiles.full.at[tiles.stage(steps)]
                plgpu.copy_gmem_to_smem(matrix.at[term, :, columns], tile, full)
                steps += 1
        tiles.drain(steps)
