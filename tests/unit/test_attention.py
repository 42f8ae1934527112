"""The doors of the attention ops: refusals by name, shapes, scales, and joining of segments."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax import (
    Codec,
    KVConfig,
    PagedKV,
    Rotation,
    append_kv,
    due_pages,
    init_cache,
    oscar_attention,
    oscar_prefill,
    write_pages,
)
from pallas_kernels.decode import mosaic_gpu as decode_gpu
from pallas_kernels.decode.api import check_queries
from pallas_kernels.layout import query_positions
from pallas_kernels.merge import MASKED, Partial, merge, normalise, softmax_weights
from pallas_kernels.packing import KEY_BITS, VALUE_BITS
from pallas_kernels.prefill import mosaic_gpu as prefill_gpu
from pallas_kernels.write import mosaic_gpu as write_gpu

ROTATION = Rotation.hadamard(layers=1, kv_heads=2, head_dim=64)


def cache_of(tokens: int = 0, **options: Any) -> PagedKV:
    cache = init_cache(
        KVConfig(**options), layers=1, kv_heads=2, head_dim=64, batch=1, max_tokens=500
    )
    if tokens:
        rng = np.random.default_rng(0)
        k, v = (jnp.asarray(x, jnp.float32) for x in rng.normal(size=(2, 1, tokens, 2, 64)))
        cache = append_kv(cache, 0, k, v, lengths=tokens)
    return cache


def queries(count: int = 1, heads: int = 4, head_dim: int = 64) -> Any:
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.normal(size=(1, count, heads, head_dim)), jnp.float32)


@pytest.mark.parametrize(
    "feature",
    [
        dict(sliding_window=1024),
        dict(logits_soft_cap=30.0),
        dict(attention_sinks=jnp.zeros(4)),
    ],
    ids=lambda feature: next(iter(feature)),
)
def test_what_the_windows_cannot_express_is_refused_by_name(feature: dict[str, Any]) -> None:
    """U29, in prefill and in decode."""
    name, q = next(iter(feature)), queries()
    with pytest.raises(NotImplementedError, match=f"{name}=.* the cache's layer decides"):
        oscar_attention(q, cache_of(), 0, ROTATION, lengths=1, **feature)
    with pytest.raises(NotImplementedError, match=f"{name}=.* the cache's layer decides"):
        oscar_prefill(q, q[:, :, :2], q[:, :, :2], cache_of(), 0, ROTATION, lengths=1, **feature)


@pytest.mark.parametrize(
    ("q", "message"),
    [
        (jnp.zeros((1, 4, 64)), r"q has shape \(1, 4, 64\): must be \[B, Q, N, D\]"),
        (queries(head_dim=128), "q has head_dim 128, the cache 64: must be equal"),
        (queries(heads=3), "q has 3 heads: must be a multiple of the cache's 2"),
        (jnp.zeros((2, 1, 4, 64)), "batch sizes differ: q 2, block_table 1"),
    ],
)
def test_queries_of_another_cache_are_refused(q: Any, message: str) -> None:
    cache = cache_of()
    with pytest.raises(ValueError, match=message):
        check_queries(q, cache.layers[0], ROTATION.layer(0), Codec(), cache.tables, jnp.array([1]))


def test_a_bf16_layer_among_packed_ones_is_the_layer_of_a_bf16_cache() -> None:
    """Prefill over three pages and a decode step, in both layers of one cache and in two caches."""
    rng = np.random.default_rng(2)
    q, k, v = (
        jnp.asarray(rng.normal(size=(1, 601, heads, 64)), jnp.float32) for heads in (4, 2, 2)
    )

    def run(codecs: tuple[Codec | None, Codec | None]) -> list[Any]:
        rotation = Rotation.hadamard(layers=2, kv_heads=2, head_dim=64, codec=codecs)
        cache = init_cache(
            layers=2, kv_heads=2, head_dim=64, batch=1, max_tokens=700, codecs=codecs
        )
        out = []
        for layer in (0, 1):
            first, cache = oscar_prefill(
                q[:, :600], k[:, :600], v[:, :600], cache, layer, rotation, lengths=600
            )
            cache = append_kv(cache, layer, k[:, 600:], v[:, 600:], lengths=601)
            last = oscar_attention(q[:, 600:], cache, layer, rotation, lengths=601)
            out.append(np.concatenate([first, last], 1))
        return out

    mixed, packed, plain = run((None, Codec())), run((Codec(), Codec())), run((None, None))
    assert (mixed[0] == plain[0]).all()
    assert (mixed[1] == packed[1]).all()
    assert 0.05 < np.abs(packed[0] - plain[0])[:, 448:].max() < 1


@pytest.mark.parametrize("bits", [(k, v) for k in KEY_BITS for v in VALUE_BITS], ids=str)
def test_the_kernels_serve_every_width_that_pages_can_have(bits: tuple[int, int]) -> None:
    codecs = (Codec().with_bits(key=bits[0], value=bits[1]),)
    rotation = Rotation.hadamard(layers=1, kv_heads=2, head_dim=64, codec=codecs)
    cache = init_cache(layers=1, kv_heads=2, head_dim=64, batch=1, max_tokens=500, codecs=codecs)
    store, transform, q = cache.layers[0], rotation.layer(0), queries()
    assert store.bits == bits
    assert decode_gpu.unsupported(q, store, transform, cache.windows) is None
    assert prefill_gpu.unsupported(q, store, cache.windows) is None
    assert write_gpu.unsupported(store, transform) is None


def test_pages_of_another_width_than_the_codecs_are_refused() -> None:
    wide = Rotation.hadamard(layers=1, kv_heads=2, head_dim=64, codec=Codec(key_bits=4))
    with pytest.raises(ValueError, match=r"values of \(2, 2\) bits, .* codec \(4, 2\): make the"):
        oscar_attention(queries(), cache_of(), 0, wide, lengths=1)


def test_more_queries_than_the_ring_holds_back_are_sent_to_prefill() -> None:
    cache = cache_of(20)
    assert oscar_attention(queries(17), cache, 0, ROTATION, lengths=20).shape == (1, 17, 4, 64)
    with pytest.raises(ValueError, match=r"18 queries per row: .* at most 17; use prefill"):
        oscar_attention(queries(18), cache, 0, ROTATION, lengths=20)


@pytest.mark.parametrize("name", ["lengths", "q_lens"])
def test_lengths_of_another_batch_are_refused(name: str) -> None:
    arguments: dict[str, Any] = dict(lengths=20) | {name: jnp.array([1, 2])}
    with pytest.raises(ValueError, match=rf"{name} has shape \(2,\): must be a number or .*\(1,\)"):
        oscar_attention(queries(), cache_of(20), 0, ROTATION, **arguments)


def test_a_rotation_of_another_shape_is_refused_in_every_op() -> None:
    q, cache = queries(), cache_of(192)
    kv = q[:, :, :2]
    for wrong in (
        Rotation.hadamard(layers=1, kv_heads=1, head_dim=64),
        Rotation.hadamard(layers=1, kv_heads=2, head_dim=64, v_head_dim=128),
    ):
        for op in (
            lambda r: oscar_attention(q, cache, 0, r, lengths=192),
            lambda r: oscar_prefill(q, kv, kv, cache, 0, r, lengths=193),
            lambda r: write_pages(cache, r, due_pages(cache, lengths=192)),
        ):
            with pytest.raises(
                ValueError, match=r"the cache needs \(2, 64, 64\) and \(2, 64, 64\)"
            ):
                op(wrong)


def test_an_int2_cache_without_a_rotation_is_refused() -> None:
    q = queries()
    with pytest.raises(ValueError, match=r"needs a rotation; pass Rotation\.identity"):
        oscar_attention(q, cache_of(), 0, None, lengths=1)
    with pytest.raises(ValueError, match=r"needs a rotation; pass Rotation\.identity"):
        oscar_prefill(q, q[:, :, :2], q[:, :, :2], cache_of(), 0, None, lengths=1)


@pytest.mark.parametrize("op", ["decode", "prefill"])
def test_an_implementation_that_does_not_exist_is_refused_with_those_that_do(op: str) -> None:
    q = queries()
    with pytest.raises(NotImplementedError, match=r"implementation='cuda' of .* does not exist"):
        if op == "decode":
            oscar_attention(q, cache_of(), 0, ROTATION, lengths=1, implementation="cuda")
        else:
            kv = q[:, :, :2]
            oscar_prefill(q, kv, kv, cache_of(), 0, ROTATION, lengths=1, implementation="cuda")


def test_the_default_scale_is_one_over_the_root_of_d() -> None:
    cache, q = cache_of(20), queries()
    default = oscar_attention(q, cache, 0, ROTATION, lengths=20)
    assert (default == oscar_attention(q, cache, 0, ROTATION, lengths=20, scale=0.125)).all()
    other = oscar_attention(q, cache, 0, ROTATION, lengths=20, scale=0.25)
    assert np.allclose(
        other, oscar_attention(2 * q, cache, 0, ROTATION, lengths=20), rtol=1e-5, atol=1e-6
    )
    assert np.abs(np.asarray(other - default)).max() > 0.01


def test_outputs_have_the_dtype_of_the_queries_and_float32_inside() -> None:
    dtype = jnp.bfloat16
    cache, q = cache_of(200), queries().astype(dtype)
    out = oscar_attention(q, cache, 0, ROTATION, lengths=200)
    assert out.dtype == dtype
    exact = oscar_attention(q.astype(jnp.float32), cache, 0, ROTATION, lengths=200)
    assert (out == exact.astype(dtype)).all()


def test_a_row_without_tokens_gives_zero() -> None:
    out = oscar_attention(queries(), cache_of(), 0, ROTATION, lengths=0)
    assert (out == 0).all()


def test_a_lone_token_is_its_own_value() -> None:
    q = queries()
    v = q[:, :, :2]
    out, _ = oscar_prefill(q, v, v, cache_of(), 0, ROTATION, lengths=1)
    want = np.repeat(np.asarray(v.astype(jnp.bfloat16), np.float32), 2, axis=2)
    assert (np.asarray(out) == want).all()


def test_query_positions_count_back_from_the_length_and_padding_repeats_the_last() -> None:
    found = query_positions(jnp.array([10, 10, 3]), jnp.array([4, 2, 0]), 4)
    assert found.tolist() == [[6, 7, 8, 9], [8, 9, 9, 9], [3, 3, 3, 3]]


# ---------------------------------------------------------------------------------------- merge


def test_merging_segments_equals_one_softmax_over_all_keys() -> None:
    """Base-2 logits 0 .. 9 in three segments, one of them with nothing visible."""
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, 10)
    values = rng.normal(size=(10, 4))
    weights = 2.0**logits
    want = weights @ values / weights.sum()

    def part(rows: slice, visible: bool = True) -> Partial:
        mask = jnp.full(len(logits[rows]), visible)
        w, top, total = softmax_weights(jnp.asarray(logits[rows], jnp.float32), mask)
        return Partial(w @ jnp.asarray(values[rows], jnp.float32), top, total)

    hidden = part(slice(0, 3), visible=False)
    assert (float(hidden.sum), float(hidden.max), float(jnp.abs(hidden.out).max())) == (
        0.0,
        np.float32(MASKED),
        0.0,
    )
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        parts = [part(slice(0, 6)), part(slice(6, 10)), hidden]
        got = normalise(merge(*(parts[i] for i in order)))
        assert np.allclose(got, want, rtol=1e-6)
    assert (normalise(merge(hidden, hidden)) == 0).all()


def test_masked_logits_may_be_nan_or_infinite() -> None:
    logits = jnp.array([1.0, jnp.nan, jnp.inf, 1.0])
    weights, top, total = softmax_weights(logits, jnp.array([True, False, False, True]))
    assert weights.tolist() == [1, 0, 0, 1]
    assert (float(top), float(total)) == (1.0, 2.0)
