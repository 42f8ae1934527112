"""The tiny Llama that tests of several suites run: two layers, three queries to a KV head."""

from __future__ import annotations

from typing import Any

from oscar_jax.config import ModelConfig

TINY = ModelConfig(
    architecture="llama",
    vocab_size=259,
    hidden_size=96,
    intermediate_size=128,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
)


def hf_config(config: ModelConfig) -> dict[str, Any]:
    """What a Hugging Face ``config.json`` says of a Llama."""
    return {
        "model_type": config.architecture,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_word_embeddings,
    }
