"""Architecture numbers of a decoder, and how a Hugging Face ``config.json`` states them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

ARCHITECTURES = ("qwen3", "llama", "qwen2")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """YaRN (Peng et al., arXiv 2309.00071) as Hugging Face's ``rope_scaling`` states it."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: 0.1 ln(factor) + 1
    truncate: bool = True  # round the ramp's ends to whole channels


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's rule: long wavelengths divided by ``factor``, short ones kept, a ramp between."""

    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float
    high_freq_factor: float


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture numbers of one decoder-only transformer (Qwen3, Llama, SmolLM2, Qwen2.5).

    Raises:
        ValueError: a size that is not positive, heads that are no multiple of KV heads, or an odd
            ``head_dim`` (RoPE rotates pairs).
        NotImplementedError: an architecture that is not one of ``ARCHITECTURES``.
    """

    architecture: str  # "qwen3" | "llama" | "qwen2"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    qk_norm: bool = False  # Qwen3: RMSNorm over head_dim on q and k before RoPE
    qkv_bias: bool = False  # Qwen2.5
    rope_scaling: RopeScaling | Llama3Scaling | None = None

    def __post_init__(self) -> None:
        if self.architecture not in ARCHITECTURES:
            raise NotImplementedError(
                f"architecture={self.architecture!r} is not supported: one of {ARCHITECTURES} is"
            )
        for field in _SIZES:
            value = getattr(self, field)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{field}={value!r}: must be a positive integer")
        for field in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, field)
            if not isinstance(value, int | float) or not value > 0:
                raise ValueError(f"{field}={value!r}: must be a positive number")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: must be even, RoPE rotates pairs")

    @property
    def context_length(self) -> int:
        """Positions the model is made for, in tokens; YaRN's factor counted.

        Published YaRN settings keep ``max_position_embeddings`` at the unscaled length (Qwen3) or
        state the scaled one (others), so it is the larger of the two.
        """
        if isinstance(self.rope_scaling, RopeScaling):
            scaled = self.rope_scaling.factor * self.rope_scaling.original_max_position_embeddings
            return max(self.max_position_embeddings, int(scaled))
        return self.max_position_embeddings

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> ModelConfig:
        """The numbers in a Hugging Face ``config.json``, already parsed.

        Only numbers are read: ``auto_map`` and whatever code it names are ignored. ``head_dim``
        null or missing is ``hidden_size // num_attention_heads``. Both spellings of RoPE settings
        are understood: ``rope_theta`` with ``rope_scaling``, and ``rope_parameters``.

        Raises:
            ValueError: a missing or senseless number.
            NotImplementedError: something that would change the result and is not implemented
                (sliding windows, partial RoPE, other RoPE types, other activations, biases that
                the supported models do not have, quantised weights), named with its value.
        """
        architecture = config.get("model_type")
        if architecture not in ARCHITECTURES:
            raise NotImplementedError(
                f"model_type={architecture!r} is not supported: one of {ARCHITECTURES} is"
            )
        _refuse_unsupported(config)
        hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
        theta, scaling = _rope(config)
        return cls(
            architecture=architecture,
            vocab_size=_integer(config, "vocab_size"),
            hidden_size=hidden,
            intermediate_size=_integer(config, "intermediate_size"),
            num_layers=_integer(config, "num_hidden_layers"),
            num_heads=heads,
            num_kv_heads=_integer(config, "num_key_value_heads", heads),
            head_dim=_integer(config, "head_dim", hidden // heads),
            rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
            rope_theta=theta,
            max_position_embeddings=_integer(config, "max_position_embeddings"),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qk_norm=architecture == "qwen3",
            qkv_bias=architecture == "qwen2",
            rope_scaling=scaling,
        )


_SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_position_embeddings",
)


def _integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"config.json: {key}={value!r}: must be a positive integer")
    return value


def _number(config: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"config.json: {key}={value!r}: must be a positive number")
    return float(value)


def _refuse_unsupported(config: Mapping[str, Any]) -> None:
    """Refuses by name what would silently give other numbers than the model was trained for."""

    def refuse(key: str, reason: str) -> None:
        raise NotImplementedError(f"config.json: {key}={config.get(key)!r}: {reason}")

    windowed = config.get("use_sliding_window")
    if windowed or (windowed is None and config.get("sliding_window")):
        key = "use_sliding_window" if windowed else "sliding_window"
        refuse(key, "sliding-window layers are not supported, only full attention")
    for kind in config.get("layer_types") or ():
        if kind != "full_attention":
            refuse("layer_types", f"{kind!r} layers are not supported, only 'full_attention'")
    if config.get("attention_bias") and config["model_type"] != "qwen2":
        refuse("attention_bias", "must be false: only Qwen2.5's q, k and v biases are supported")
    if config.get("mlp_bias"):
        refuse("mlp_bias", "must be false: biases in the MLP are not supported")
    if config.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", "must be 'silu'")
    if config.get("quantization_config"):
        refuse("quantization_config", "quantised checkpoints are not supported, only 16 or 32 bit")
    rope = config.get("rope_parameters") or {}
    partial = config.get("partial_rotary_factor", rope.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise NotImplementedError(
            f"config.json: partial_rotary_factor={partial!r}: RoPE over a part of head_dim is not "
            "supported, it must be 1.0 or absent"
        )


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | Llama3Scaling | None]:
    """``rope_theta`` and the scaling rule; transformers 5 moved both into ``rope_parameters``."""
    rope = dict(config.get("rope_scaling") or {})
    rope.update(config.get("rope_parameters") or {})
    theta = _number(
        {"rope_theta": rope.get("rope_theta", config.get("rope_theta"))}, "rope_theta", 1e4
    )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("default", None):
        return theta, None
    limit = _integer(config, "max_position_embeddings")
    original = _integer(rope, "original_max_position_embeddings", limit)
    if kind == "yarn":
        factor = _number(rope, "factor", limit / original)
        return theta, RopeScaling(
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=_number(rope, "beta_fast", 32.0),
            beta_slow=_number(rope, "beta_slow", 1.0),
            attention_factor=_yarn_attention_factor(rope, factor),
            truncate=bool(rope.get("truncate", True)),
        )
    if kind == "llama3":
        return theta, Llama3Scaling(
            factor=_number(rope, "factor"),
            original_max_position_embeddings=original,
            low_freq_factor=_number(rope, "low_freq_factor"),
            high_freq_factor=_number(rope, "high_freq_factor"),
        )
    raise NotImplementedError(
        f"config.json: rope_type={kind!r} is not supported: 'default', 'yarn' and 'llama3' are"
    )


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float | None:
    """The stated factor; with both mscales their ratio, as DeepSeek's configs mean it."""
    if rope.get("attention_factor") is not None:
        return _number(rope, "attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        log = 0.1 * math.log(factor) if factor > 1 else 0.0
        return (_number(rope, "mscale") * log + 1) / (_number(rope, "mscale_all_dim") * log + 1)
    return None
