"""Streamed moments: exact sums, in any chunking, with padding and sinks left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calib.covariance import Moments
from calib.sums import Total

KV_HEADS, GROUP, HEAD_DIM, V_HEAD_DIM = 2, 3, 8, 4
HEADS = KV_HEADS * GROUP

Rows = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # q, k, v, attention output


def rows(tokens: int, seed: int = 0, batch: int = 1) -> Rows:
    """q, k, v and attention output, [B, Q, heads, D], float32."""
    rng = np.random.default_rng(seed)
    sizes = [(HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, V_HEAD_DIM), (HEADS, V_HEAD_DIM)]
    q, k, v, o = (rng.standard_normal((batch, tokens, *size)).astype(np.float32) for size in sizes)
    return q, k + rng.standard_normal((KV_HEADS, HEAD_DIM)).astype(np.float32), v, o


def zeros(layers: int = 1) -> Moments:
    return Moments.zeros(layers=layers, kv_heads=KV_HEADS, head_dim=HEAD_DIM, v_head_dim=V_HEAD_DIM)


def add(moments: Moments, tensors: Sequence[np.ndarray], layer: int = 0, **mask: Any) -> Moments:
    q, k, v, o = map(jnp.asarray, tensors)
    return moments.update(layer, q, k, v, o, **mask)


def grouped(x: np.ndarray) -> np.ndarray:
    """[B, Q, N, D] to f64[rows, K, G, D]."""
    return x.astype(np.float64).reshape(-1, KV_HEADS, x.shape[2] // KV_HEADS, x.shape[-1])


def test_the_value_target_of_the_published_code_has_its_hand_checked_numbers() -> None:
    # U78: weights k (Q^T Q / n) k^T normalised to mean 1 are [2, 1/2, 1/2]
    q = jnp.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])[None, :, None]
    k = jnp.array([[2.0, 0.0], [0.0, 1.0], [1.0, 0.0]])[None, :, None]
    v = jnp.array([[1.0, 0.0], [0.0, 2.0], [1.0, 1.0]])[None, :, None]
    scores = np.array(q[0, :, 0] @ k[0, :, 0].T) / np.sqrt(2)
    causal = np.where(np.tri(3, dtype=bool), np.exp(scores), 0)
    softmax = causal / causal.sum(-1, keepdims=True)
    attn_out = (softmax @ np.array(v[0, :, 0]))[None, :, None].astype(np.float32)

    moments = Moments.zeros(layers=1, kv_heads=1, head_dim=2)
    moments = moments.update(0, q, k, v, jnp.asarray(attn_out))
    statistics = moments.statistics(0)

    assert float(moments.layers[0].weight.high[0]) / 3 == pytest.approx(4 / 3)  # mean weight
    np.testing.assert_allclose(statistics.proxy[0], [[5 / 6, 1 / 6], [1 / 6, 5 / 6]], atol=1e-6)
    np.testing.assert_allclose(  # (SV)^T SV, the other form; a sum where ours is a mean
        3 * statistics.attention[0], [[1.67, 1.00], [1.00, 2.35]], atol=5e-3
    )


def test_every_statistic_is_its_formula() -> None:
    q, k, v, o = rows(200, batch=2)
    statistics = add(zeros(), (q, k, v, o)).statistics(0)
    queries, keys, values, outputs = (
        grouped(q),
        grouped(k)[:, :, 0],
        grouped(v)[:, :, 0],
        grouped(o),
    )
    n = len(keys)
    assert statistics.tokens == n == 400
    mean = keys.mean(0)
    covariance = np.einsum("rkgd,rkge->kde", queries, queries) / n
    weight = np.einsum("rkd,kde,rke->rk", keys, covariance, keys)
    expected = {
        "mean": mean,
        "key": np.einsum("rkd,rke->kde", keys - mean, keys - mean) / n,
        "query": covariance,
        "value": np.einsum("rkd,rke->kde", values, values) / n,
        "proxy": np.einsum("rk,rkd,rke->kde", weight / weight.mean(0), values, values) / n,
        "attention": np.einsum("rkgd,rkge->kde", outputs, outputs) / n,
    }
    for name, want in expected.items():
        np.testing.assert_allclose(getattr(statistics, name), want, rtol=1e-5, atol=1e-6)


def test_query_head_h_belongs_to_kv_head_h_over_g() -> None:
    q, k, v, o = rows(50)
    q = np.zeros_like(q)
    q[:, :, GROUP] = 1.0  # the first query head of KV head 1
    statistics = add(zeros(), (q, k, v, o)).statistics(0)
    np.testing.assert_array_equal(statistics.query[0], np.zeros((HEAD_DIM, HEAD_DIM)))
    np.testing.assert_array_equal(statistics.query[1], np.ones((HEAD_DIM, HEAD_DIM)))


def test_chunks_add_up_to_the_whole_text() -> None:
    q, k, v, o = rows(256)
    whole = add(zeros(), (q, k, v, o)).statistics(0)
    moments = zeros()
    update = jax.jit(add)
    for start in range(0, 256, 32):
        moments = update(moments, [x[:, start : start + 32] for x in (q, k, v, o)])
    chunked = moments.statistics(0)
    for name in ("mean", "key", "query", "value", "attention"):
        np.testing.assert_allclose(
            getattr(chunked, name), getattr(whole, name), rtol=1e-6, atol=1e-6
        )
    # the running query covariance weights early tokens a little differently
    drift = np.linalg.norm(chunked.proxy - whole.proxy) / np.linalg.norm(whole.proxy)
    assert 0 < drift < 0.05


def test_masked_tokens_count_nowhere_even_when_they_are_nan() -> None:
    q, k, v, o = rows(96, batch=2)
    mask = np.ones((2, 96), bool)
    mask[:, :64] = False  # the sink
    mask[1, 80:] = False  # padding
    kept = add(zeros(), [x.reshape(1, -1, *x.shape[2:])[:, mask.ravel()] for x in (q, k, v, o)])
    for x in (q, k, v, o):
        x[~mask] = np.nan
    masked = add(zeros(), (q, k, v, o), mask=jnp.asarray(mask)).statistics(0)
    assert masked.tokens == 32 + 16
    for name in ("mean", "key", "query", "value", "proxy", "attention"):
        np.testing.assert_allclose(
            getattr(masked, name), getattr(kept.statistics(0), name), rtol=1e-5, atol=1e-6
        )


def test_merged_moments_are_those_of_both_texts() -> None:
    first, second = rows(100, seed=1), rows(60, seed=2)
    both = [np.concatenate(pair, axis=1) for pair in zip(first, second, strict=True)]
    whole = add(zeros(), both).statistics(0)
    merged = add(zeros(), first).merge(add(zeros(), second)).statistics(0)
    assert merged.tokens == 160
    for name in ("mean", "key", "query", "value", "attention"):
        np.testing.assert_allclose(
            getattr(merged, name), getattr(whole, name), rtol=1e-5, atol=2e-6
        )
    empty_first = zeros().merge(add(zeros(), first)).statistics(0)
    np.testing.assert_array_equal(empty_first.key, add(zeros(), first).statistics(0).key)


def test_a_large_key_bias_does_not_cost_the_covariance_its_digits() -> None:
    # K-bias models: |k| about 300, spread 1; the mean of squares is 90,000 +- 1
    q, k, v, o = rows(4096)
    k = (k + 300.0).astype(np.float32)
    moments = zeros()
    update = jax.jit(add)
    for start in range(0, 4096, 512):
        moments = update(moments, [x[:, start : start + 512] for x in (q, k, v, o)])
    keys = k[0].astype(np.float64)
    centred = keys - keys.mean(0)
    want = np.einsum("rkd,rke->kde", centred, centred) / len(keys)
    np.testing.assert_allclose(moments.statistics(0).key, want, atol=1e-5)


def test_a_total_keeps_what_float32_would_drop() -> None:
    add_one = jax.jit(Total.add)
    total = add_one(Total.zeros(1), jnp.asarray([1e8], jnp.float32))
    plain, quarter = total.high, jnp.asarray([0.25], jnp.float32)
    for _ in range(1000):
        total, plain = add_one(total, quarter), plain + quarter
    assert plain.tolist() == [1e8]  # each 0.25 is below half a unit in the last place
    assert total.float64().tolist() == [1e8 + 250]


def test_layers_are_kept_apart() -> None:
    moments = add(zeros(layers=3), rows(20), layer=1)
    assert [moments.statistics(layer).tokens for layer in range(3)] == [0, 20, 0]


@pytest.mark.parametrize(("index", "name"), list(enumerate(["q", "k", "v", "attn_out"])))
def test_nan_is_refused_naming_layer_and_tensor(index: int, name: str) -> None:
    moments = add(zeros(layers=2), rows(20))
    bad = rows(20)
    bad[index][0, 3] = np.nan
    with pytest.raises(ValueError, match=f"layer 1: {name} held values that are not finite"):
        add(moments, bad, layer=1).check_finite()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v, o: (q[..., :4], k, v, o), r"q of layer 0 has shape \(1, 20, 6, 4\)"),
        (lambda q, k, v, o: (q, k[:, :, :1], v, o), r"k of layer 0 .* must be \(1, 20, 2, 8\)"),
        (lambda q, k, v, o: (q, k, v[:, :10], o), r"v of layer 0 .* must be \(1, 20, 2, 4\)"),
        (lambda q, k, v, o: (q, k, v, q), r"attn_out of layer 0 .* must be \(1, 20, 6, 4\)"),
        (lambda q, k, v, o: (q[:, :, :5], k, v, o[:, :, :5]), "q has 5 heads"),
    ],
)
def test_shapes_that_disagree_are_refused_by_name(change, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=message):
        add(zeros(), change(*rows(20)))


def test_a_layer_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"layer=2: these moments have layers 0\.\.1"):
        add(zeros(layers=2), rows(4), layer=2)
    with pytest.raises(ValueError, match="mask has shape"):
        add(zeros(), rows(4), mask=jnp.ones((1, 5), bool))
    with pytest.raises(ValueError, match="other has 1 layers: must be 2"):
        zeros(layers=2).merge(zeros())
    with pytest.raises(ValueError, match="kv_heads=0"):
        Moments.zeros(layers=1, kv_heads=0, head_dim=8)
