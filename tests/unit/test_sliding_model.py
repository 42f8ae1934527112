"""A model with window layers through evaluation and calibration: tiny, random, float32."""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from calib.collect import blockwise_causal_attention, collect_moments, collect_rows
from oscar_jax.config import KVConfig, ModelConfig
from oscar_jax.evaluation.scorer import Scorer
from oscar_jax.models import Decoder, causal_attend

LENGTH = 460  # one page is visible
TINY = ModelConfig(
    architecture="gemma3_text",
    vocab_size=259,
    hidden_size=64,
    intermediate_size=96,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    max_position_embeddings=2048,
    tie_word_embeddings=False,
    qk_norm=True,
    sliding_window=40,
    global_every=3,
    rope_theta_local=1e4,
)


def lively(name: str, shape: tuple[int, ...]) -> jax.Array:
    """Weights large enough that the next token depends on what attention reads."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    size = 0.2 if name.endswith("norm.weight") else 2.0 / shape[-1] ** 0.5
    size *= 0.1 if "embed" in name else 1  # the model multiplies embeddings by 8
    return jnp.asarray(size * rng.normal(size=shape), jnp.float32)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder(TINY, lively)


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 259, LENGTH).astype(np.int32)


Seen = tuple[jax.Array, jax.Array, jax.Array, jax.Array]  # q, k, v, and what attention gave


@pytest.fixture(scope="module")
def exact(decoder: Decoder, tokens: np.ndarray) -> tuple[jax.Array, tuple[Seen, ...]]:
    """Hidden states of the model with exact attention, and what every layer's attention saw."""
    graphdef, weights = nnx.split(decoder)
    plain = causal_attend(TINY)

    def attend(seen: tuple, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> Any:
        out, _ = plain(None, layer, q, k, v)
        return out, (*seen, (q, k, v, out))

    @jax.jit
    def run(weights: Any, tokens: jax.Array) -> Any:
        return nnx.merge(graphdef, weights).hidden(tokens, jnp.arange(LENGTH)[None], attend, ())

    return run(weights, jnp.asarray(tokens[None]))


def test_bf16_pages_and_rings_give_the_model_with_exact_attention(
    decoder: Decoder, tokens: np.ndarray, exact: tuple[jax.Array, tuple[Seen, ...]]
) -> None:
    scored = Scorer(decoder, KVConfig()).hidden(tokens, None)
    assert np.abs(exact[0]).mean() > 0.5
    # keys and values are rounded to BF16 once, in the cache
    assert np.abs(np.asarray(scored - exact[0][0])).mean() < 0.01


def test_calibration_sees_the_layers_with_pages_alone_and_through_the_models_own_attention(
    decoder: Decoder, tokens: np.ndarray, exact: tuple[jax.Array, tuple[Seen, ...]]
) -> None:
    q, k, v, out = exact[1][0]
    np.testing.assert_allclose(blockwise_causal_attention(q, k, v, 40), out, atol=3e-6)
    keys = np.asarray(exact[1][2][1])[0, 64:]  # of the layer with pages, beyond the sink
    moments = collect_moments(decoder, [tokens], sink=64)
    assert len(moments.layers) == 1
    np.testing.assert_allclose(moments.statistics(0).mean, keys.mean(0), atol=1e-4)
    rows = collect_rows(decoder, [tokens], KVConfig())
    assert len(rows.keys) == 1
    np.testing.assert_allclose(rows.keys[0][0, 64:], keys, atol=1e-4)
