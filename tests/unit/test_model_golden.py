"""The decoder's logits equal those of Hugging Face transformers."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from oscar_jax.config import ModelConfig, RopeScaling
from oscar_jax.models import Decoder, Loaded, causal_attend, rope
from oscar_jax.models.gguf import GGUFFile
from oscar_jax.models.weights import SafetensorsDirectory, build_decoder, weights_hash

GOLDEN = Path(__file__).parents[1] / "golden"
KINDS = ["qwen3_tied", "qwen3_untied", "llama", "qwen2_bias", "yarn", "gemma3"]


def config_of(kind: str) -> ModelConfig:
    return ModelConfig.from_hf(json.loads((GOLDEN / "hf" / kind / "config.json").read_text()))


def decoder_of(kind: str, config: ModelConfig) -> Decoder:
    return build_decoder(config, SafetensorsDirectory(GOLDEN / "hf" / kind), jnp.float32)


def logits(decoder: Decoder, tokens: np.ndarray) -> np.ndarray:
    graphdef, weights = nnx.split(decoder)

    @jax.jit
    def run(weights: nnx.State, tokens: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, weights)
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        h, _ = model.hidden(tokens, positions, causal_attend(model.config), None)
        return model.logits(h)

    return np.asarray(run(weights, jnp.asarray(tokens)))


@pytest.mark.parametrize("kind", KINDS)
def test_float32_logits_equal_the_reference(kind: str) -> None:
    golden = np.load(GOLDEN / "hf" / f"{kind}.npz")
    ours = logits(decoder_of(kind, config_of(kind)), golden["tokens"])
    assert ours.dtype == np.float32
    assert np.abs(golden["logits"]).max() > 3  # far above the tolerance
    np.testing.assert_allclose(ours, golden["logits"], rtol=0, atol=2e-4)


def perturbed(kind: str, change: Callable[[ModelConfig], ModelConfig]) -> float:
    golden = np.load(GOLDEN / "hf" / f"{kind}.npz")
    ours = logits(decoder_of(kind, change(config_of(kind))), golden["tokens"])
    return float(np.abs(ours - golden["logits"]).max())


def test_the_comparison_notices_a_missing_scaling_rule_a_wrong_theta_and_a_wrong_eps() -> None:
    assert perturbed("yarn", lambda c: dataclasses.replace(c, rope_scaling=None)) > 0.1
    assert perturbed("llama", lambda c: dataclasses.replace(c, rope_theta=1e4)) > 0.1
    assert perturbed("qwen3_tied", lambda c: dataclasses.replace(c, rms_norm_eps=1e-3)) > 2e-4
    assert perturbed("qwen2_bias", lambda c: c) < 2e-4


@pytest.mark.parametrize(
    "change",
    [
        dict(sliding_window=25),
        dict(global_every=3),
        dict(rope_theta_local=1e6),
        dict(rope_scaling=None),
        dict(query_scalar=None),
    ],
    ids=str,
)
def test_the_comparison_notices_every_setting_of_gemma_3(change: dict[str, Any]) -> None:
    assert perturbed("gemma3", lambda c: dataclasses.replace(c, **change)) > 0.01


def test_yarn_attention_factor_is_folded_into_cos_and_sin() -> None:
    def without_factor(config: ModelConfig) -> ModelConfig:
        assert isinstance(config.rope_scaling, RopeScaling)
        flat = dataclasses.replace(config.rope_scaling, attention_factor=1.0)
        return dataclasses.replace(config, rope_scaling=flat)

    assert perturbed("yarn", without_factor) > 0.05


@pytest.mark.parametrize("name", json.loads((GOLDEN / "rope.json").read_text()))
def test_frequencies_equal_the_reference_for_published_rope_settings(name: str) -> None:
    golden = json.loads((GOLDEN / "rope.json").read_text())[name]
    config = ModelConfig.from_hf(
        dict(
            model_type="llama",
            vocab_size=16,
            hidden_size=256,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            head_dim=golden["head_dim"],
            max_position_embeddings=131072,
            rope_parameters=golden["rope_parameters"],
        )
    )
    frequencies, factor = rope.frequencies(config)
    assert frequencies.dtype == np.float32
    np.testing.assert_allclose(frequencies, golden["frequencies"], rtol=2e-6)
    assert factor == pytest.approx(golden["factor"], rel=1e-7)


def test_smollm2_from_gguf_equals_another_loader_of_the_same_file(smollm2_file: GGUFFile) -> None:
    golden = np.load(GOLDEN / "smollm2_logits.npz")
    decoder = build_decoder(smollm2_file.config, smollm2_file, jnp.float32)
    ours = logits(decoder, golden["tokens"])[0]
    np.testing.assert_allclose(
        np.take_along_axis(ours, golden["ids"], axis=-1), golden["logits"], rtol=0, atol=1e-3
    )
    assert (ours.argmax(-1) == golden["ids"][:, 0]).all()


def test_a_multimodal_file_gives_its_text_model(tmp_path: Path) -> None:
    place = GOLDEN / "hf" / "gemma3"
    tensors = load_file(place / "model.safetensors")
    for prefix, suffix in (
        ("language_model.model.", "model."),
        ("model.language_model.", "model."),
    ):
        named = {name.replace(suffix, prefix, 1): value for name, value in tensors.items()}
        named["vision_tower.patch.weight"] = np.zeros(3, np.float32)
        save_file(named, tmp_path / "model.safetensors")
        whole = build_decoder(config_of("gemma3"), SafetensorsDirectory(tmp_path), jnp.bfloat16)
        assert weights_hash(whole) == weights_hash(decoder_of("gemma3", config_of("gemma3")))


def test_bfloat16_stays_near_the_float32_reference(smollm2: Loaded) -> None:
    golden = np.load(GOLDEN / "smollm2_logits.npz")
    ours = logits(smollm2.decoder, golden["tokens"])[0]
    error = np.take_along_axis(ours, golden["ids"], axis=-1) - golden["logits"]
    assert np.sqrt(np.mean(error**2)) < 0.15


def test_smollm2_names_the_capital_of_france(smollm2: Loaded) -> None:
    ids = smollm2.tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    graphdef, weights = nnx.split(smollm2.decoder)

    @jax.jit
    def choose(weights: nnx.State, tokens: jax.Array, last: jax.Array) -> jax.Array:
        model = nnx.merge(graphdef, weights)
        h, _ = model.hidden(tokens, jnp.arange(64)[None], causal_attend(model.config), None)
        return model.logits(h[0, last]).argmax()

    answer: list[int] = []
    while len(answer) < 16 and not smollm2.tokenizer.eos_ids & set(answer):
        padded = np.zeros((1, 64), np.int32)
        padded[0, : len(ids) + len(answer)] = ids + answer
        answer.append(int(choose(weights, padded, np.int32(len(ids) + len(answer) - 1))))
    assert smollm2.tokenizer.decode(answer) == "The capital of France is Paris."
