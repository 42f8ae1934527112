"""Reading a Hugging Face config.json and the shipped configs/*.yaml."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from oscar_jax.config import (
    CONFIGS,
    HubSource,
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    RopeScaling,
    model_entry,
    model_names,
    read_entry,
)
from oscar_jax.models.gguf import GGUFFile


def qwen3(**changes: Any) -> dict[str, Any]:
    """Qwen3-0.6B's config.json as published, with changes; a value of ... removes the key."""
    config: dict[str, Any] = {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "initializer_range": 0.02,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    config.update(changes)
    return {key: value for key, value in config.items() if value is not ...}


def test_a_published_config_gives_the_shipped_architecture() -> None:
    assert ModelConfig.from_hf(qwen3()) == model_entry("qwen3-0.6b").architecture


def test_qwen3_32b_has_more_head_channels_than_hidden_ones() -> None:
    config = model_entry("qwen3-32b").architecture
    assert (config.num_heads * config.head_dim, config.hidden_size) == (8192, 5120)


@pytest.mark.parametrize(("given", "head_dim"), [(32, 32), (None, 16), (..., 16)])
def test_head_dim_is_the_explicit_one_or_hidden_over_heads(given: Any, head_dim: int) -> None:
    sizes = dict(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    assert ModelConfig.from_hf(qwen3(**sizes, head_dim=given)).head_dim == head_dim


def test_kv_heads_default_to_all_heads_and_biases_and_norms_follow_the_family() -> None:
    llama = ModelConfig.from_hf(qwen3(model_type="llama", num_key_value_heads=...))
    assert (llama.num_kv_heads, llama.qk_norm, llama.qkv_bias) == (16, False, False)
    qwen2 = ModelConfig.from_hf(qwen3(model_type="qwen2"))
    assert (qwen2.qk_norm, qwen2.qkv_bias) == (False, True)


@pytest.mark.parametrize(
    "spelling",
    [
        dict(
            rope_scaling={
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            }
        ),
        dict(rope_scaling={"type": "yarn", "factor": 4, "original_max_position_embeddings": 32768}),
        dict(
            rope_theta=...,
            rope_scaling=...,
            rope_parameters={
                "rope_theta": 1e6,
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            },
        ),
    ],
)
def test_every_spelling_of_yarn_is_understood_and_lengthens_the_context(
    spelling: dict[str, Any],
) -> None:
    config = ModelConfig.from_hf(qwen3(**spelling))
    assert config.rope_theta == 1e6
    assert config.rope_scaling == RopeScaling(4.0, 32768)
    assert (config.max_position_embeddings, config.context_length) == (40960, 131072)


def test_llama3_scaling_is_read_with_its_four_numbers() -> None:
    rope = dict(
        rope_type="llama3",
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    )
    config = ModelConfig.from_hf(qwen3(model_type="llama", rope_scaling=rope))
    assert config.rope_scaling == Llama3Scaling(32.0, 8192, 1.0, 4.0)
    assert config.rope_scaling == model_entry("llama-3.2-1b").architecture.rope_scaling
    assert config.context_length == config.max_position_embeddings


GEMMA3_4B: dict[str, Any] = {  # the hub's file: what it leaves out is the usual
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model"},
}


def test_gemma_3_states_its_windows_two_thetas_and_the_linear_rule() -> None:
    config = ModelConfig.from_hf(GEMMA3_4B)
    assert (config.architecture, config.vocab_size) == ("gemma3_text", 262_208)
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    assert (config.rope_theta, config.rope_theta_local) == (1e6, 1e4)
    assert config.rope_scaling == LinearScaling(8.0)
    assert config.context_length == 131_072
    assert config.sliding_windows[:7] == (1024,) * 5 + (None, 1024)
    assert config.sliding_windows.count(None) == 5  # 34 layers, every sixth
    assert config.tie_word_embeddings
    assert config.qk_norm
    text = GEMMA3_4B["text_config"] | {"query_pre_attn_scalar": 168, "head_dim": 128}
    large = ModelConfig.from_hf(text)  # as 27B states them
    assert (large.query_scalar, config.query_scalar) == (168, None)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(use_bidirectional_attention=True), "use_bidirectional_attention=True"),
        (dict(final_logit_softcapping=30.0), "final_logit_softcapping=30.0"),
        (dict(hidden_activation="silu"), "hidden_activation='silu'"),
        (dict(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "'dynamic'"),
        (
            dict(num_hidden_layers=2, layer_types=["full_attention", "sliding_attention"]),
            "layer_types=",
        ),
    ],
)
def test_what_gemma_3_would_do_differently_is_refused_by_name(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(NotImplementedError) as refusal:
        ModelConfig.from_hf(GEMMA3_4B["text_config"] | changes)
    assert named in str(refusal.value)


def test_a_part_of_the_window_settings_is_refused() -> None:
    config = model_entry("gemma3-270m").architecture
    with pytest.raises(ValueError, match="'global_every': None"):
        dataclasses.replace(config, global_every=None)


def test_a_window_that_is_named_but_not_used_loads() -> None:
    config = qwen3(sliding_window=4096, use_sliding_window=False, layer_types=["full_attention"])
    assert ModelConfig.from_hf(config) == ModelConfig.from_hf(qwen3())


def test_code_that_a_config_names_is_not_even_looked_at() -> None:
    config = qwen3(auto_map={"AutoModelForCausalLM": "modeling_evil.EvilForCausalLM"})
    assert ModelConfig.from_hf(config) == ModelConfig.from_hf(qwen3())


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(use_sliding_window=True, sliding_window=1024), "use_sliding_window=True"),
        (dict(use_sliding_window=..., sliding_window=1024), "sliding_window=1024"),
        (dict(layer_types=["full_attention", "sliding_attention"]), "'sliding_attention'"),
        (dict(partial_rotary_factor=0.25), "partial_rotary_factor=0.25"),
        (dict(rope_parameters={"partial_rotary_factor": 0.5}), "partial_rotary_factor=0.5"),
        (dict(rope_scaling={"rope_type": "longrope"}), "'longrope'"),
        (dict(rope_scaling={"type": "linear", "factor": 2.0}), "'linear'"),
        (dict(model_type="qwen3_moe"), "'qwen3_moe'"),
        (dict(model_type=...), "model_type=None"),
        (dict(attention_bias=True), "attention_bias=True"),
        (dict(mlp_bias=True), "mlp_bias=True"),
        (dict(hidden_act="gelu"), "hidden_act='gelu'"),
        (dict(quantization_config={"quant_method": "awq"}), "quantization_config"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(NotImplementedError) as refusal:
        ModelConfig.from_hf(qwen3(**changes))
    assert named in str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (dict(num_hidden_layers=...), "num_hidden_layers=None"),
        (dict(vocab_size=0), "vocab_size=0"),
        (dict(hidden_size="1024"), "hidden_size='1024'"),
        (dict(num_key_value_heads=3), "num_kv_heads=3"),
        (dict(head_dim=63), "head_dim=63"),
        (dict(rms_norm_eps=-1.0), "rms_norm_eps=-1.0"),
        (dict(rope_scaling={"rope_type": "llama3", "factor": 8.0}), "low_freq_factor=None"),
    ],
)
def test_senseless_numbers_are_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError) as refusal:
        ModelConfig.from_hf(qwen3(**changes))
    assert named in str(refusal.value)


def test_every_shipped_model_reads_and_knows_its_source() -> None:
    names = "llama-3.2-1b qwen2.5-0.5b qwen3-0.6b qwen3-1.7b qwen3-14b qwen3-32b qwen3-4b qwen3-8b"
    assert model_names() == ["gemma3-270m", *names.split(), "smollm2-135m"]
    entry = model_entry("qwen3-8b")
    assert entry.source == HubSource("Qwen/Qwen3-8B", "main")
    assert entry.kv == {"sink": 64, "recent": 256}
    assert not entry.architecture.tie_word_embeddings
    assert model_entry("qwen3-4b").architecture.tie_word_embeddings
    assert model_entry("smollm2-135m").rotation == CONFIGS / "rotations" / "smollm2-135m"


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("smollm2-135m", 0.1345),
        ("gemma3-270m", 0.268),
        ("qwen2.5-0.5b", 0.494),
        ("qwen3-0.6b", 0.596),
        ("llama-3.2-1b", 1.236),
        ("qwen3-1.7b", 1.72),
        ("qwen3-4b", 4.02),
        ("qwen3-8b", 8.19),
        ("qwen3-14b", 14.77),
        ("qwen3-32b", 32.76),
    ],
)
def test_the_architectures_add_up_to_the_published_parameter_counts(
    name: str, billions: float
) -> None:
    c = model_entry(name).architecture
    embeddings = c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)
    attention = 2 * c.hidden_size * c.head_dim * (c.num_heads + c.num_kv_heads)
    layer = attention + 3 * c.hidden_size * c.intermediate_size
    assert (embeddings + c.num_layers * layer) / 1e9 == pytest.approx(billions, rel=2e-3)


def test_the_shipped_smollm2_numbers_are_those_in_its_gguf(smollm2_file: GGUFFile) -> None:
    assert smollm2_file.config == model_entry("smollm2-135m").architecture


@pytest.mark.parametrize("name", ["qwen3-80b", "../configs/qwen3-8b", "/etc/passwd", ""])
def test_a_name_that_is_not_shipped_never_becomes_a_path(name: str) -> None:
    with pytest.raises(ValueError) as refusal:
        model_entry(name)
    assert f"model {name!r} is not known" in str(refusal.value)


def test_near_names_are_suggested() -> None:
    with pytest.raises(ValueError, match="did you mean qwen3-8b"):
        model_entry("Qwen3-8")


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("license:", "licence:", "unknown key 'licence'"),
        ("license: Apache-2.0\n", "", "'license' is missing"),
        ("  num_heads: 32\n", "", "architecture: 'num_heads' is missing"),
        ("num_heads: 32", "num_heads: many", "num_heads='many': must be of type int"),
        ("num_heads: 32", "num_heads: true", "num_heads=True: must be of type int"),
        ("qk_norm: true", "qk_norm: 1", "qk_norm=1: must be of type bool"),
        ("sink: 64", "sink: 65", "KVConfig.sink=65"),
        ("sink: 64", "sinks: 64", "kv: unknown key 'sinks'"),
        ("kind: hub", "kind: torrent", "source.kind='torrent'"),
        ("kind: hub", "kind: wheel", "source.wheels=None"),
        ("architecture: qwen3", "architecture: mamba", "architecture='mamba'"),
        ("license: Apache-2.0", "license: [", "while parsing"),
    ],
)
def test_a_wrong_yaml_is_refused_with_file_and_key(
    tmp_path: Path, before: str, after: str, named: str
) -> None:
    text = (CONFIGS / "qwen3-8b.yaml").read_text()
    assert before in text
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace(before, after))
    with pytest.raises(ValueError) as refusal:
        read_entry(path)
    assert str(path) in str(refusal.value)
    assert named in str(refusal.value)


def test_a_right_yaml_of_ones_own_reads(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text((CONFIGS / "qwen3-8b.yaml").read_text())
    assert read_entry(path) == dataclasses.replace(model_entry("qwen3-8b"), name="mine")
