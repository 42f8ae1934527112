"""Layers with a sliding window: the same outputs however a text is cut, nothing else is read."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax import (
    Codec,
    KVConfig,
    PagedKV,
    Rotation,
    append_kv,
    init_cache,
    oscar_attention,
    oscar_prefill,
    truncate,
    write_pages,
)
from oscar_jax.accounting import CacheShape
from oscar_jax.cache import PagePlan

WINDOW, LOOKAHEAD, TOKENS = 12, 4, 43  # the ring of 16 rows turns almost three times
PAGED = 1  # the middle one of three layers
ROTATION = Rotation.hadamard(layers=1, kv_heads=2, head_dim=64)


def empty(batch: int = 1, max_tokens: int = 700) -> PagedKV:
    return init_cache(
        KVConfig(lookahead=LOOKAHEAD),
        layers=3,
        kv_heads=2,
        head_dim=64,
        batch=batch,
        max_tokens=max_tokens,
        sliding_windows=(WINDOW, None, WINDOW + 1),
    )


def text(tokens: int = TOKENS, batch: int = 1) -> tuple[Any, Any, Any]:
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(batch, tokens, heads, 64)) for heads in (4, 2, 2))
    return tuple(jnp.asarray(x, jnp.bfloat16) for x in (q, k, v))  # type: ignore[return-value]


def by_the_formula(window: int, row: int = 0, batch: int = 1) -> np.ndarray:
    """softmax over the window of every token, float64."""
    q, k, v = (np.asarray(x, np.float64)[row] for x in text(batch=batch))
    k, v = (np.repeat(x, 2, axis=1) for x in (k, v))  # a KV head serves two query heads
    out = np.zeros_like(q)
    for t in range(len(q)):
        seen = slice(max(0, t - window + 1), t + 1)
        logits = np.einsum("nd,tnd->nt", q[t], k[seen]) / 8
        weights = np.exp(logits - logits.max(1, keepdims=True))
        out[t] = np.einsum("nt,tnd->nd", weights / weights.sum(1, keepdims=True), v[seen])
    return out


def in_pieces(sizes: list[int], layer: int, cache: PagedKV) -> tuple[np.ndarray, PagedKV]:
    """A text through one layer, a piece of one token by append and attention."""
    q, k, v = (x.astype(jnp.float32) for x in text())
    outs, n = [], 0
    for size in sizes:
        a, b, c = (x[:, n : n + size] for x in (q, k, v))
        n += size
        if size == 1:
            cache = append_kv(cache, layer, b, c, lengths=n)
            out = oscar_attention(a, cache, layer, None, lengths=n)
        else:
            out, cache = oscar_prefill(a, b, c, cache, layer, None, lengths=n)
        outs.append(np.asarray(out[0]))
    return np.concatenate(outs), cache


def test_one_shot_pieces_and_single_tokens_give_the_formula_and_the_same_ring() -> None:
    longer, _ = in_pieces([TOKENS], 2, empty())
    np.testing.assert_allclose(longer, by_the_formula(WINDOW + 1), atol=2e-6)
    whole, cache = in_pieces([TOKENS], 0, empty())
    np.testing.assert_allclose(whole, by_the_formula(WINDOW), atol=2e-6)
    for sizes in ([20, 23], [1] * TOKENS):
        outs, other = in_pieces(sizes, 0, empty())
        np.testing.assert_allclose(outs, whole, atol=1e-6)
        for ours, theirs in zip(cache.sliding, other.sliding, strict=True):
            np.testing.assert_array_equal(ours.ring_k, theirs.ring_k)
            np.testing.assert_array_equal(ours.ring_v, theirs.ring_v)


def test_a_window_one_longer_is_noticed() -> None:
    assert np.abs(by_the_formula(WINDOW) - by_the_formula(WINDOW + 1)).max() > 0.1


def test_rows_that_no_query_sees_may_hold_nan() -> None:
    """Ring rows that were never written, and the padding of a chunk."""
    cache = empty(batch=2)
    spoiled = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache.sliding)
    cache = dataclasses.replace(cache, sliding=spoiled)
    q, k, v = (x.astype(jnp.float32) for x in text(batch=2))
    a, b, c = (x.at[1, 30:].set(jnp.nan) for x in (q, k, v))
    lengths = jnp.array([TOKENS, 30])
    out, cache = oscar_prefill(a, b, c, cache, 0, None, lengths=lengths, q_lens=lengths)
    np.testing.assert_allclose(out[0], by_the_formula(WINDOW, 0, 2), atol=2e-6)
    np.testing.assert_allclose(out[1, :30], by_the_formula(WINDOW, 1, 2)[:30], atol=2e-6)
    # row 0 rests, row 1 goes on
    a, b, c = (x[:, 30:31] for x in (q, k, v))
    now, new = jnp.array([TOKENS, 31]), jnp.array([0, 1])
    cache = append_kv(cache, 0, b, c, lengths=now, q_lens=new)
    out = oscar_attention(a, cache, 0, None, lengths=now, q_lens=new)
    np.testing.assert_allclose(out[1, 0], by_the_formula(WINDOW, 1, 2)[30], atol=2e-6)
    assert np.isfinite(out).all()


def test_truncating_by_the_lookahead_is_exact_and_further_is_refused() -> None:
    whole, cache = in_pieces([TOKENS], 0, empty())
    back = TOKENS - LOOKAHEAD
    cache = truncate(cache, back)
    q, k, v = (x.astype(jnp.float32)[:, back:] for x in text())
    wrong = append_kv(cache, 0, -k, -v, lengths=TOKENS)  # other tokens, forgotten again
    cache = append_kv(truncate(wrong, back), 0, k, v, lengths=TOKENS)
    out = oscar_attention(q, cache, 0, None, lengths=TOKENS)
    np.testing.assert_allclose(out[0], whole[back:], atol=1e-6)
    with pytest.raises(ValueError, match=f"cannot be truncated to {back - 1}"):
        truncate(cache, back - 1)


def test_the_layer_with_pages_among_window_layers_is_that_of_a_cache_without_any() -> None:
    """A page is written and a step sees it; the rotation has one entry."""
    rng = np.random.default_rng(1)
    q, k, v = (
        jnp.asarray(rng.normal(size=(1, 451, heads, 64)), jnp.float32) for heads in (4, 2, 2)
    )

    def run(cache: PagedKV, layer: int) -> tuple[Any, Any]:
        cache = append_kv(cache, layer, k[:, :450], v[:, :450], lengths=450)
        first_page = PagePlan(np.zeros(1, np.int32), np.zeros(1, np.int32))
        cache = write_pages(cache, ROTATION, first_page)
        assert np.asarray(cache.layers[0].k_pages[0]).any()
        cache = append_kv(cache, layer, k[:, 450:], v[:, 450:], lengths=451)
        last = oscar_attention(q[:, 450:], cache, layer, ROTATION, lengths=451)
        return last, cache.layers[0].k_pages

    plain = init_cache(
        KVConfig(lookahead=LOOKAHEAD), layers=1, kv_heads=2, head_dim=64, batch=1, max_tokens=700
    )
    for ours, theirs in zip(
        jax.tree.leaves(run(empty(), PAGED)), jax.tree.leaves(run(plain, 0)), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)


def test_bytes_are_those_of_the_arrays_and_a_window_counts_as_bf16_on_both_sides() -> None:
    """A window layer of 12 tokens holds min(n, 12) tokens of 2 x 2 x 64 numbers in BF16."""
    cache = empty(batch=3)
    held = CacheShape.of_cache(cache)
    assert held == CacheShape.of(
        KVConfig(lookahead=LOOKAHEAD),
        layers=3,
        kv_heads=2,
        head_dim=64,
        v_head_dim=64,
        sliding_windows=(WINDOW, None, WINDOW + 1),
    )
    pages = cache.layers[0].k_pages.shape[0]
    assert held.allocated_bytes(pages=pages, slots=3) == sum(
        x.nbytes for x in jax.tree.leaves((cache.layers, cache.sliding))
    )
    token = 2 * 2 * 64 * 2
    assert held.live_bytes(10) == 10 * 3 * token == held.bf16_bytes(10)
    plain = CacheShape(1, 2, 64, windows=held.windows)
    assert held.live_bytes(600) == plain.live_bytes(600) + (12 + 13) * token
    assert held.bf16_bytes(600) == (600 + 12 + 13) * token
    assert 1 < held.compression(600) < plain.compression(600)


@pytest.mark.parametrize("windows", [(24, None), (24, None, 0), (24, 24, 24)])
def test_sliding_windows_that_do_not_fit_are_refused(windows: tuple[int | None, ...]) -> None:
    with pytest.raises(ValueError, match=r"sliding_windows=.*one per layer \(3\)"):
        init_cache(
            layers=3, kv_heads=2, head_dim=64, batch=1, max_tokens=64, sliding_windows=windows
        )


def test_wrong_rows_too_many_queries_and_a_rotation_of_all_layers_are_refused() -> None:
    cache, (q, k, v) = empty(), text()
    with pytest.raises(ValueError, match=r"must be \(1, 43, 2, 64\) and \(1, 43, 2, 64\)"):
        append_kv(cache, 0, k[:, :, :1], v[:, :, :1], lengths=TOKENS)
    with pytest.raises(ValueError, match="6 queries per row: at most L \\+ 1 = 5"):
        oscar_attention(q[:, :6], cache, 0, None, lengths=6)
    rotation = Rotation.hadamard(layers=3, kv_heads=2, head_dim=64)
    with pytest.raises(ValueError, match="rotation has 3 layers: must be one per layer with pages"):
        oscar_attention(q[:, :1], cache, PAGED, rotation, lengths=1)
    with pytest.raises(ValueError, match="codecs names 3 layers"):
        init_cache(
            layers=3,
            kv_heads=2,
            head_dim=64,
            batch=1,
            max_tokens=64,
            codecs=[Codec()] * 3,
            sliding_windows=(WINDOW, None, WINDOW),
        )
