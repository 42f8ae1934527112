"""A model with window layers through evaluation and calibration: tiny, random, float32."""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calib.collect import blockwise_causal_attention, collect_moments, collect_rows
from calib.fit import fit
from oscar_jax.config import KVConfig, ModelConfig
from oscar_jax.evaluation.scorer import Scorer
from oscar_jax.models import Decoder, causal_attend

LENGTH = 512
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


def test_bf16_pages_and_rings_give_the_model_with_exact_attention(
    decoder: Decoder, tokens: np.ndarray
) -> None:
    scored = Scorer(decoder, KVConfig()).hidden(tokens, None)
    positions = jnp.arange(LENGTH)[None]
    exact, _ = decoder.hidden(jnp.asarray(tokens[None]), positions, causal_attend(TINY), None)
    # keys and values are rounded to BF16 once, in the cache
    assert np.abs(np.asarray(scored - exact[0])).mean() < 0.01
    full = causal_attend(model_without_windows())
    other, _ = decoder.hidden(jnp.asarray(tokens[None]), positions, full, None)
    assert np.abs(np.asarray(other - exact)).mean() > 0.3


def model_without_windows() -> ModelConfig:
    return ModelConfig(**{**vars(TINY), "global_every": 1})


def test_calibration_sees_the_layers_with_pages_alone_and_through_the_models_own_attention(
    decoder: Decoder, tokens: np.ndarray
) -> None:
    seen = {}
    exact = causal_attend(TINY)

    def attend(state: None, layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple:
        seen[layer] = q, k, v
        return exact(state, layer, q, k, v)

    decoder.hidden(jnp.asarray(tokens[None]), jnp.arange(LENGTH)[None], attend, None)
    q, k, v = seen[0]
    np.testing.assert_allclose(
        blockwise_causal_attention(q, k, v, 40), exact(None, 0, q, k, v)[0], atol=3e-6
    )
    keys = np.asarray(seen[2][1])[0, 64:]  # beyond the sink
    moments = collect_moments(decoder, [tokens], sink=64)
    assert len(moments.layers) == 1
    np.testing.assert_allclose(moments.statistics(0).mean, keys.mean(0), atol=1e-4)
    rows = collect_rows(decoder, [tokens], KVConfig())
    assert len(rows.keys) == 1
    np.testing.assert_allclose(rows.keys[0][0, 64:], keys, atol=1e-4)
    rotation, _ = fit(moments, "stretch+centre+waterfill+gain", force=True)
    assert rotation.layers == 1
    two_bits = Scorer(decoder, KVConfig()).hidden(tokens, rotation)
    assert np.isfinite(two_bits).all()
