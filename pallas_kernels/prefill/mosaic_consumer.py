"""The pages' kernel: a warpgroup that computes attention of 64 query rows over unpacked tiles."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.layout import Windows
from pallas_kernels.merge import MASKED
from pallas_kernels.prefill.mosaic_registers import computed, times_rows
from pallas_kernels.prefill.mosaic_ring import Tiled
from pallas_kernels.prefill.mosaic_tiles import Tiles
from pallas_kernels.prefill.mosaic_wgmma import (
    LOWEST,
    ROW,
    ROWS,
    filled,
    over,
    position_of,
    scores,
    store,
    visible_pages,
    weighted,
)

QUERY_UNIT = 16.0  # queries are stored times this, against float16's least numbers


@dataclasses.dataclass(frozen=True)
class Consumer:
    """Scores, online softmax and output, with both transforms.

    Args:
        group: query heads per KV head. unit: scale log2(e).
    """

    tiles: Tiles
    windows: Windows
    group: int
    unit: float
    interpret: bool

    def visible(self, row: Any, length: Any, new: Any) -> Any:
        """Pages seen by row (position, head) ``row`` of the chunk; past q_lens as the last one."""
        return visible_pages(position_of(row, self.group, length, new) + 1, self.windows)

    @property
    def parts(self) -> list[Any]:
        """Columns of the output by accumulator: one of 256 needs more registers than a thread of
        four warpgroups begins with."""
        size = min(128, self.tiles.v_head_dim)
        return [pl.ds(at, size) for at in range(0, self.tiles.v_head_dim, size)]

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

    def __call__(
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
