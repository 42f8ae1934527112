"""The cache of one layer as the kernels see it: arrays, tables, windows and transforms.

With S sink, R recent, T page tokens and n cached tokens (the newest included) there are

    m(n) = max(0, (n - S - R) // T)

visible pages. The query at position t sees, in decode and in prefill alike,

    [0, S) sink, BF16  |  [S, S + T m(t+1)) pages  |  [S + T m(t+1), t] tail, BF16, < R + T tokens

so what a query sees depends on its position alone.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, BFloat16, Float, Int32, UInt32

from pallas_kernels.format import PAGE


@dataclasses.dataclass(frozen=True)
class Windows:
    """S, R and L in tokens; the tail is a ring of R + T + L rows, row (p - S) mod (R + T + L)."""

    sink: int = 64
    recent: int = 256
    lookahead: int = 16

    @property
    def ring(self) -> int:
        """Rows of the tail ring."""
        return self.recent + PAGE + self.lookahead

    @property
    def band(self) -> int:
        """The most BF16 tokens before a query that it sees outside the sink: R + T."""
        return self.recent + PAGE

    def visible_pages(self, n: Int32[Array, "*s"]) -> Int32[Array, "*s"]:
        """m(n), the pages seen by the query at position n - 1."""
        return jnp.maximum(0, (n - self.sink - self.recent) // PAGE)

    def complete_pages(self, n: Int32[Array, "*s"]) -> Int32[Array, "*s"]:
        """Pages whose T tokens all exist among n tokens; a page is visible R tokens later."""
        return jnp.maximum(0, (n - self.sink) // PAGE)

    def first_tail(self, n: Int32[Array, "*s"]) -> Int32[Array, "*s"]:
        """S + T m(n), the first tail position seen by the query at position n - 1."""
        return self.sink + PAGE * self.visible_pages(n)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerKV:
    """One layer's pools. Packed pages carry metadata; BF16 pages have k_meta = v_meta = None."""

    k_pages: Array  # u16[P, K, T, bits D/16], or bf16[P, K, T, D]
    v_pages: Array  # u16[P, K, Dv, bits T/16], or bf16[P, K, T, Dv]
    k_meta: UInt32[Array, "P K T"] | None
    v_meta: UInt32[Array, "P K T"] | None
    sink_k: BFloat16[Array, "NS K S D"]
    sink_v: BFloat16[Array, "NS K S Dv"]
    tail_k: BFloat16[Array, "slots K ring D"]
    tail_v: BFloat16[Array, "slots K ring Dv"]

    @property
    def is_packed(self) -> bool:
        return self.k_meta is not None

    @property
    def v_head_dim(self) -> int:
        return self.sink_v.shape[-1]

    @property
    def bits(self) -> tuple[int, int]:
        """Bits of a key and of a value number in a page, metadata apart: (16, 16) in BF16."""
        head_dim, v_head_dim = self.sink_k.shape[-1], self.v_head_dim
        return (
            16 * math.prod(self.k_pages.shape[2:]) // (PAGE * head_dim),
            16 * math.prod(self.v_pages.shape[2:]) // (PAGE * v_head_dim),
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tables:
    """Which pages, ring and sink each row of the batch owns.

    ``block_table[b, j]`` is the pool index of page j of row b; entries past the pages that were
    written may hold anything, they are never used unmasked.
    """

    block_table: Int32[Array, "B MP"]
    slot: Int32[Array, " B"]
    sink: Int32[Array, " B"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Transform:
    """One layer's transforms, float32 (see ``oscar_jax.rotation``)."""

    x_k: Float[Array, "K D D"]
    x_q: Float[Array, "K D D"]
    x_v: Float[Array, "K Dv Dv"]
    x_o: Float[Array, "K Dv Dv"]
    mu: Float[Array, "K D"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageJobs:
    """Pages to write: T source rows each, from ``offset`` on (modulo the source's length).

    A job with a negative ``page_id`` is skipped and costs nothing.
    """

    row: Int32[Array | np.ndarray, " J"]  # which row of the source
    offset: Int32[Array | np.ndarray, " J"]
    page_id: Int32[Array | np.ndarray, " J"]  # pool index


def query_positions(
    lengths: Int32[Array, " B"], q_lens: Int32[Array, " B"], queries: int
) -> Int32[Array, "B Q"]:
    """Position of query i of a row: lengths - q_lens + i; padding past q_lens repeats the last."""
    step = jnp.minimum(jnp.arange(queries), jnp.maximum(q_lens[:, None] - 1, 0))
    return (lengths - q_lens)[:, None] + step
