"""The same tokens put into a cache in different ways, through the public functions."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from oscar_jax import (
    PagedKV,
    Rotation,
    append_kv,
    due_pages,
    oscar_attention,
    oscar_prefill,
    write_pages,
)
from pallas_kernels.format import PAGE
from tests.kernels.cases import Case, Sequences, int32, poisoned_cache, transforms


@functools.partial(jax.jit, static_argnames=("layer", "implementation"), donate_argnames="cache")
def prefill(
    cache: PagedKV,
    rotation: Rotation | None,
    q: Any,
    k: Any,
    v: Any,
    lengths: Any,
    q_lens: Any,
    layer: int = 0,
    implementation: str | None = None,
) -> tuple[jax.Array, PagedKV]:
    return oscar_prefill(
        q,
        k,
        v,
        cache,
        layer,
        rotation,
        lengths=lengths,
        q_lens=q_lens,
        implementation=implementation,
    )


@functools.partial(jax.jit, static_argnames=("write", "implementation"), donate_argnames="cache")
def decode_steps(
    cache: PagedKV,
    rotation: Rotation | None,
    q: Any,
    k: Any,
    v: Any,
    start: Any,
    count: Any,
    write: bool = True,
    implementation: str | None = None,
) -> tuple[jax.Array, PagedKV]:
    """One compiled call of q.shape[1] steps; row b takes the first count[b] of them after start[b]
    tokens and is frozen then. ``write``: pages are written in the step in which they complete.
    """

    def step(cache: PagedKV, x: Any) -> tuple[PagedKV, jax.Array]:
        i, q, k, v = x
        n, new = start + jnp.minimum(i + 1, count), (i < count).astype(jnp.int32)
        cache = append_kv(cache, 0, k, v, lengths=n, q_lens=new)
        out = oscar_attention(
            q, cache, 0, rotation, lengths=n, q_lens=new, implementation=implementation
        )
        if write:
            plan = due_pages(cache, lengths=n, q_lens=new)
            cache = write_pages(cache, rotation, plan, implementation=implementation)
        return cache, out[:, 0]

    rows = [jnp.asarray(x).swapaxes(0, 1)[:, :, None] for x in (q, k, v)]
    cache, out = jax.lax.scan(step, cache, (jnp.arange(rows[0].shape[0]), *rows))
    return out.swapaxes(0, 1), cache


@functools.partial(jax.jit, static_argnames=("queries", "implementation"), donate_argnames="cache")
def write_due(
    cache: PagedKV,
    rotation: Rotation | None,
    lengths: Any,
    queries: int,
    implementation: str | None = None,
) -> PagedKV:
    """All pages that the newest ``queries`` tokens of every row completed, in bulk."""
    plan = due_pages(cache, lengths=lengths, queries=queries)
    return write_pages(cache, rotation, plan, implementation=implementation)


@functools.partial(jax.jit, static_argnames="implementation", donate_argnames="cache")
def decode_several(
    cache: PagedKV,
    rotation: Rotation | None,
    q: Any,
    k: Any,
    v: Any,
    lengths: Any,
    q_lens: Any,
    implementation: str | None = None,
) -> tuple[jax.Array, PagedKV]:
    """A decode step with several new tokens per row."""
    cache = append_kv(cache, 0, k, v, lengths=lengths, q_lens=q_lens)
    out = oscar_attention(
        q, cache, 0, rotation, lengths=lengths, q_lens=q_lens, implementation=implementation
    )
    plan = due_pages(cache, lengths=lengths, q_lens=q_lens, queries=q.shape[1])
    return out, write_pages(cache, rotation, plan, implementation=implementation)


@functools.partial(jax.jit, static_argnames="implementation", donate_argnames="cache")
def fill(
    cache: PagedKV,
    rotation: Rotation | None,
    k: Any,
    v: Any,
    lengths: Any,
    implementation: str | None = None,
) -> PagedKV:
    """Keys [B, n, K, D] and values, a page's worth at a time; nothing attends."""

    def step(cache: PagedKV, x: Any) -> tuple[PagedKV, None]:
        start, k, v = x
        n, new = jnp.minimum(lengths, start + PAGE), jnp.clip(lengths - start, 0, PAGE)
        cache = append_kv(cache, 0, k, v, lengths=n, q_lens=new)
        plan = due_pages(cache, lengths=n, q_lens=new, queries=PAGE)
        return write_pages(cache, rotation, plan, implementation=implementation), None

    short = -k.shape[1] % PAGE
    blocks = [
        jnp.pad(x, ((0, 0), (0, short), (0, 0), (0, 0)))
        .reshape(x.shape[0], -1, PAGE, *x.shape[2:])
        .swapaxes(0, 1)
        for x in (k, v)
    ]
    starts = PAGE * jnp.arange(blocks[0].shape[0])
    return jax.lax.scan(step, cache, (starts, *blocks))[0]


@functools.partial(jax.jit, static_argnames="implementation")
def attend(
    cache: PagedKV,
    rotation: Rotation | None,
    q: Any,
    lengths: Any,
    implementation: str | None = None,
) -> jax.Array:
    return oscar_attention(q, cache, 0, rotation, lengths=lengths, implementation=implementation)


@dataclasses.dataclass(frozen=True)
class Run:
    """Outputs [B, n, N, Dv], meaningless past a row's length, and the cache afterwards."""

    out: np.ndarray
    cache: PagedKV


def in_one_call(
    case: Case,
    data: Sequences,
    implementation: str,
    lengths: tuple[int, ...] | None = None,
    cache: PagedKV | None = None,
) -> Run:
    """One prefill call over the first ``lengths`` (default: all) tokens of every row."""
    n = int32(case.lengths if lengths is None else lengths)
    out, cache = prefill(
        poisoned_cache(case) if cache is None else cache,
        transforms(case),
        data.q,
        data.k,
        data.v,
        n,
        n,
        implementation=implementation,
    )
    return Run(np.asarray(out), cache)


def in_pieces(case: Case, data: Sequences, implementation: str) -> Run:
    """Calls of up to case.piece tokens, another number for every row and call; NaN pads them."""
    rng = np.random.default_rng(3)
    cache, rotation, lengths = poisoned_cache(case), transforms(case), np.array(case.lengths)
    done, out = np.zeros_like(lengths), np.full((*data.q.shape[:3], case.value_dim), np.nan)
    while (done < lengths).any():
        new = np.minimum(rng.choice([1, case.piece // 2, case.piece], len(done)), lengths - done)
        part, cache = prefill(
            cache,
            rotation,
            *data.window(done, case.piece),
            int32(done + new),
            int32(new),
            implementation=implementation,
        )
        for row, (start, count) in enumerate(zip(done, new, strict=True)):
            out[row, start : start + count] = np.asarray(part)[row, :count]
        done = done + new
    return Run(out, cache)


def token_by_token(
    case: Case, data: Sequences, implementation: str, lengths: tuple[int, ...] | None = None
) -> Run:
    """Every token a decode step, all steps in one compiled scan; ``lengths``: of the rows."""
    out, cache = decode_steps(
        poisoned_cache(case),
        transforms(case),
        data.q,
        data.k,
        data.v,
        int32([0] * len(case.lengths)),
        int32(case.lengths if lengths is None else lengths),
        implementation=implementation,
    )
    return Run(np.asarray(out), cache)


def newest(data: Sequences, lengths: tuple[int, ...]) -> np.ndarray:
    """The query [B, 1, N, D] of every row's newest token."""
    return data.window(np.array(lengths) - 1, 1)[0]
