"""Attention on the paged cache, for any JAX model: ``oscar_attention`` and ``oscar_prefill``."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from oscar_jax.cache import (
    PagedKV,
    PagePlan,
    append_kv,
    due_pages,
    page_ids,
    replace_layer,
    row_lengths,
    transform_of,
)
from oscar_jax.rotation import Rotation
from oscar_jax.sliding import decode_window, prefill_window
from pallas_kernels.decode import decode
from pallas_kernels.format import PAGE
from pallas_kernels.layout import PageJobs
from pallas_kernels.prefill import prefill
from pallas_kernels.write import write


def _refuse(**features: Any) -> None:
    for name, value in features.items():
        if value is not None:
            where = "init_cache(sliding_windows=...)" if name == "sliding_window" else "nothing"
            raise NotImplementedError(
                f"{name}={value!r} is not supported: the cache's layer decides what a query sees, "
                f"and {where} makes one that sees this"
            )


def oscar_attention(
    q: Float[Array, "B Q N D"],
    cache: PagedKV,
    layer: int,
    rotation: Rotation | None,
    *,
    lengths: Array | int,
    q_lens: Array | int | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    attention_sinks: Array | None = None,
    implementation: str | None = None,
) -> Float[Array, "B Q N Dv"]:
    """softmax(scale q K^T) V, where a query at position t sees BF16 sink, INT2 pages, BF16 tail.

    [0, S) sink | [S, S + T m(t+1)) pages | [S + T m(t+1), t] tail, m(n) = max(0, (n - S - R) // T).
    In a layer with a sliding window W it sees [t - W + 1, t] instead, all of it BF16.
    Source: OSCAR, arXiv 2605.17757, with the window rule of ``docs/design.md``.

    Args:
        q: queries after RoPE; their keys and values are already appended (``append_kv``). At most
            L + 1 per row: for longer chunks use ``oscar_prefill``.
        cache, layer: the cache, and which of its layers (a Python int).
        rotation: the transforms of the layers with pages; None only for a BF16 cache.
        lengths: i32[B] or a number: cached tokens of each row, the newest query's key included.
        q_lens: valid queries per row, default Q. Query i is at lengths - q_lens + i; results past
            q_lens are finite and meaningless.
        scale: default D ** -0.5.
        implementation: None picks the best that serves the input; or "xla".

    Returns:
        [B, Q, N, Dv] in q's dtype.

    Raises:
        ValueError: shapes disagree, too many queries, or no rotation for an INT2 cache.
        NotImplementedError: a sliding window (``init_cache`` makes such layers), soft-caps or
            learned sinks are asked for, or the named implementation does not serve this input.

    >>> from oscar_jax import KVConfig, Rotation, append_kv, init_cache
    >>> cache = init_cache(KVConfig(), layers=1, kv_heads=1, head_dim=64, batch=1, max_tokens=512)
    >>> rotation = Rotation.hadamard(layers=1, kv_heads=1, head_dim=64)
    >>> x = jnp.ones((1, 1, 1, 64))
    >>> cache = append_kv(cache, 0, x, 3 * x, lengths=1)
    >>> float(oscar_attention(x, cache, 0, rotation, lengths=1)[0, 0, 0, 0])
    3.0
    """
    _refuse(
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        attention_sinks=attention_sinks,
    )
    n, new = row_lengths(cache, lengths, q_lens, q.shape[1])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    window = cache.window(layer)
    if window is not None:
        return decode_window(q, window, cache.tables, lengths=n, q_lens=new, scale=scale)
    index = cache.paged(layer)
    transform, codec = transform_of(cache, rotation, index)
    return decode(
        q,
        cache.layers[index],
        transform,
        cache.tables,
        lengths=n,
        q_lens=new,
        windows=cache.windows,
        codec=codec,
        scale=scale,
        implementation=implementation,
    )


def oscar_prefill(
    q: Float[Array, "B Q N D"],
    k: Float[Array, "B Q K D"],
    v: Float[Array, "B Q K Dv"],
    cache: PagedKV,
    layer: int,
    rotation: Rotation | None,
    *,
    lengths: Array | int,
    q_lens: Array | int | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    attention_sinks: Array | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B Q N Dv"], PagedKV]:
    """A chunk of any length: write its complete pages, attend, append; one layer.

    What a query sees is the same as in ``oscar_attention``, so one call over a prompt, several
    calls over its pieces, and one call per token give the same pages and the same outputs.

    Args:
        q, k, v: the chunk after RoPE. lengths, q_lens, scale, implementation: as in
            ``oscar_attention``; rows past q_lens are padding.

    Returns:
        (outputs [B, Q, N, Dv] in q's dtype, the cache with the chunk in it)

    Raises:
        ValueError, NotImplementedError: as ``oscar_attention``, but Q may be any number.
    """
    _refuse(
        sliding_window=sliding_window,
        logits_soft_cap=logits_soft_cap,
        attention_sinks=attention_sinks,
    )
    n, new = row_lengths(cache, lengths, q_lens, q.shape[1])
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    windows, tables, window = cache.windows, cache.tables, cache.window(layer)
    if window is not None:
        out = prefill_window(q, k, v, window, tables, lengths=n, q_lens=new, scale=scale)
        return out, append_kv(cache, layer, k, v, lengths=n, q_lens=new)
    index = cache.paged(layer)
    store = cache.layers[index]
    transform, codec = transform_of(cache, rotation, index)
    start = n - new - windows.band  # position of the band's first row
    recent = start[:, None] + jnp.arange(windows.band)  # [B, R + T]
    rows = (recent - windows.sink) % windows.ring

    def band(tail: Array, x: Array) -> Array:
        """[B, K, R + T + Q, D]: the ring's newest rows in position order, then the chunk."""
        old = jnp.take_along_axis(tail[tables.slot], rows[:, None, :, None], axis=2)
        return jnp.concatenate([old, x.astype(jnp.bfloat16).swapaxes(1, 2)], 2)

    band_k, band_v = band(store.tail_k, k), band(store.tail_v, v)
    plan = due_pages(cache, lengths=n, q_lens=new, queries=q.shape[1])
    jobs = _chunk_jobs(cache, plan, start)
    store, found = write(
        store, band_k, band_v, transform, jobs, codec=codec, implementation=implementation
    )
    cache = dataclasses.replace(replace_layer(cache, layer, store), faults=cache.faults + found)
    cache = append_kv(cache, layer, k, v, lengths=n, q_lens=new)
    out = prefill(
        q,
        band_k,
        band_v,
        cache.layers[index],
        transform,
        tables,
        lengths=n,
        q_lens=new,
        windows=windows,
        codec=codec,
        scale=scale,
        implementation=implementation,
    )
    return out, cache


def _chunk_jobs(cache: PagedKV, plan: PagePlan, start: Array) -> PageJobs:
    """The plan's pages as rows of the band that begins at position ``start``."""
    position = cache.windows.sink + PAGE * jnp.maximum(plan.page, 0)
    return PageJobs(row=plan.row, offset=position - start[plan.row], page_id=page_ids(cache, plan))
