"""Architecture numbers of a decoder, and how a Hugging Face ``config.json`` states them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

ARCHITECTURES = ("qwen3", "llama", "qwen2", "gemma3_text")


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
class LinearScaling:
    """Every frequency divided by ``factor`` (the larger Gemma 3 models, in their global layers)."""

    factor: float


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture numbers of one decoder-only transformer (Qwen3, Llama, Qwen2.5, Gemma 3, ...).

    Raises:
        ValueError: a size that is not positive, heads that are no multiple of KV heads, an odd
            ``head_dim`` (RoPE rotates pairs), or a part of the settings of window layers.
        NotImplementedError: an architecture that is not one of ``ARCHITECTURES``.
    """

    architecture: str  # one of ARCHITECTURES
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
    qk_norm: bool = False  # Qwen3, Gemma 3: RMSNorm over head_dim on q and k before RoPE
    qkv_bias: bool = False  # Qwen2.5
    rope_scaling: RopeScaling | Llama3Scaling | LinearScaling | None = None
    sliding_window: int | None = None  # tokens that a window layer sees, the newest included
    global_every: int | None = None  # every n-th layer sees all tokens, the others the window
    rope_theta_local: float | None = None  # of window layers, which are never rescaled
    query_scalar: int | None = None  # logits are q.k / sqrt(this); None: head_dim

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
        together = ("sliding_window", "global_every", "rope_theta_local")
        stated = {field: getattr(self, field) for field in together}
        if any(value is not None for value in stated.values()) and not all(
            isinstance(value, int | float) and value > 0 for value in stated.values()
        ):
            raise ValueError(f"{stated}: window layers need all three, each a positive number")
        if self.query_scalar is not None and self.query_scalar < 1:
            raise ValueError(f"query_scalar={self.query_scalar}: must be positive")

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """Of every layer: tokens that a query sees, its own included; None: all before it.

        >>> import dataclasses
        >>> from oscar_jax.config import model_entry
        >>> model_entry("qwen3-0.6b").architecture.sliding_windows[:2]
        (None, None)
        """
        if self.global_every is None:
            return (None,) * self.num_layers
        return tuple(
            None if (layer + 1) % self.global_every == 0 else self.sliding_window
            for layer in range(self.num_layers)
        )

    @property
    def paged_layers(self) -> tuple[int, ...]:
        """The layers whose queries see all tokens: those that have pages, and rotations."""
        return tuple(i for i, window in enumerate(self.sliding_windows) if window is None)

    @property
    def is_gemma(self) -> bool:
        """Gemma's block: norms by 1 + w, also after each half; tanh-GELU; scaled embeddings."""
        return self.architecture == "gemma3_text"

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
        if architecture == "gemma3":  # with a vision tower: the text model alone
            config, architecture = config.get("text_config") or {}, "gemma3_text"
        if architecture not in ARCHITECTURES:
            raise NotImplementedError(
                f"model_type={architecture!r} is not supported: one of {ARCHITECTURES} is"
            )
        if architecture == "gemma3_text":
            return cls(**_gemma3(config))
        _refuse_unsupported(config, architecture)
        hidden, heads = _integer(config, "hidden_size"), _integer(config, "num_attention_heads")
        return cls(
            architecture=architecture,
            **_sizes(config),
            num_kv_heads=_integer(config, "num_key_value_heads", heads),
            head_dim=_integer(config, "head_dim", hidden // heads),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qk_norm=architecture == "qwen3",
            qkv_bias=architecture == "qwen2",
            **_rope(config),
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


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    """What every family states in the same way."""
    return dict(
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=_integer(config, "hidden_size"),
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=_integer(config, "num_hidden_layers"),
        num_heads=_integer(config, "num_attention_heads"),
        rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
        max_position_embeddings=_integer(config, "max_position_embeddings"),
    )


def _refuse(config: Mapping[str, Any], key: str, reason: str) -> None:
    raise NotImplementedError(f"config.json: {key}={config.get(key)!r}: {reason}")


# What Gemma 3 files leave out when it is the usual value (transformers' Gemma3TextConfig).
_GEMMA3 = dict(
    vocab_size=262_208,
    hidden_size=2304,
    intermediate_size=9216,
    num_hidden_layers=26,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=256,
    max_position_embeddings=131_072,
    tie_word_embeddings=True,
    query_pre_attn_scalar=256,
    sliding_window=4096,
    sliding_window_pattern=6,
    hidden_activation="gelu_pytorch_tanh",
)


def _gemma3(stated: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a Gemma 3 text model; both spellings of its two RoPE settings."""
    config = {**_GEMMA3, **{key: value for key, value in stated.items() if value is not None}}
    _refuse_everywhere(config)
    if config["hidden_activation"] != "gelu_pytorch_tanh":
        _refuse(config, "hidden_activation", "must be 'gelu_pytorch_tanh'")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "attention_bias"):
        if config.get(key):
            _refuse(config, key, "is not supported for Gemma 3")
    if config.get("use_bidirectional_attention"):
        _refuse(config, "use_bidirectional_attention", "only causal attention is supported")
    layers, every = (
        _integer(config, "num_hidden_layers"),
        _integer(config, "sliding_window_pattern"),
    )
    kinds = config.get("layer_types")
    if kinds:
        every = kinds.index("full_attention") + 1 if "full_attention" in kinds else layers + 1
        pattern = [
            "sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)
        ]
        if kinds != pattern:
            _refuse(config, "layer_types", "global layers must come at every n-th place")
    rope = config.get("rope_parameters") or {}
    local = rope.get("sliding_attention") or {}
    if local.get("rope_type", "default") != "default":
        _refuse(config, "rope_parameters", "window layers must have the 'default' rope_type")
    theta = local.get("rope_theta", config.get("rope_local_base_freq"))
    global_rope = {"rope_theta": 1e6, **config, "rope_parameters": rope.get("full_attention")}
    scalar = _integer(config, "query_pre_attn_scalar")
    head_dim = _integer(config, "head_dim")
    return dict(
        architecture="gemma3_text",
        **_sizes(config),
        num_kv_heads=_integer(config, "num_key_value_heads"),
        head_dim=head_dim,
        tie_word_embeddings=bool(config["tie_word_embeddings"]),
        qk_norm=True,
        **_rope(global_rope, linear=True),
        sliding_window=_integer(config, "sliding_window"),
        global_every=every,
        rope_theta_local=_number({"rope_local_base_freq": theta}, "rope_local_base_freq", 1e4),
        query_scalar=None if scalar == head_dim else scalar,
    )


def _refuse_everywhere(config: Mapping[str, Any]) -> None:
    if config.get("quantization_config"):
        _refuse(
            config,
            "quantization_config",
            "quantised checkpoints are not supported, only 16 or 32 bit",
        )


def _refuse_unsupported(config: Mapping[str, Any], architecture: str) -> None:
    """Refuses by name what would silently give other numbers than the model was trained for."""

    def refuse(key: str, reason: str) -> None:
        _refuse(config, key, reason)

    windowed = config.get("use_sliding_window")
    if windowed or (windowed is None and config.get("sliding_window")):
        key = "use_sliding_window" if windowed else "sliding_window"
        refuse(key, "sliding-window layers are not supported, only full attention")
    for kind in config.get("layer_types") or ():
        if kind != "full_attention":
            refuse("layer_types", f"{kind!r} layers are not supported, only 'full_attention'")
    if config.get("attention_bias") and architecture != "qwen2":
        refuse("attention_bias", "must be false: only Qwen2.5's q, k and v biases are supported")
    if config.get("mlp_bias"):
        refuse("mlp_bias", "must be false: biases in the MLP are not supported")
    if config.get("hidden_act", "silu") != "silu":
        refuse("hidden_act", "must be 'silu'")
    _refuse_everywhere(config)
    rope = config.get("rope_parameters") or {}
    partial = config.get("partial_rotary_factor", rope.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise NotImplementedError(
            f"config.json: partial_rotary_factor={partial!r}: RoPE over a part of head_dim is not "
            "supported, it must be 1.0 or absent"
        )


def _rope(config: Mapping[str, Any], *, linear: bool = False) -> dict[str, Any]:
    """``rope_theta`` and the scaling rule; transformers 5 moved both into ``rope_parameters``.

    Args:
        linear: whether the family has the rule "linear".
    """
    rope = dict(config.get("rope_scaling") or {})
    rope.update(config.get("rope_parameters") or {})
    theta = _number(
        {"rope_theta": rope.get("rope_theta", config.get("rope_theta"))}, "rope_theta", 1e4
    )
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in ("default", None):
        return dict(rope_theta=theta)
    if kind == "linear" and linear:
        return dict(rope_theta=theta, rope_scaling=LinearScaling(_number(rope, "factor")))
    limit = _integer(config, "max_position_embeddings")
    original = _integer(rope, "original_max_position_embeddings", limit)
    if kind == "yarn":
        factor = _number(rope, "factor", limit / original)
        scaling: Any = RopeScaling(
            factor=factor,
            original_max_position_embeddings=original,
            beta_fast=_number(rope, "beta_fast", 32.0),
            beta_slow=_number(rope, "beta_slow", 1.0),
            attention_factor=_yarn_attention_factor(rope, factor),
            truncate=bool(rope.get("truncate", True)),
        )
    elif kind == "llama3":
        scaling = Llama3Scaling(
            factor=_number(rope, "factor"),
            original_max_position_embeddings=original,
            low_freq_factor=_number(rope, "low_freq_factor"),
            high_freq_factor=_number(rope, "high_freq_factor"),
        )
    else:
        raise NotImplementedError(
            f"config.json: rope_type={kind!r} is not supported: 'default', 'yarn' and 'llama3' are"
        )
    return dict(rope_theta=theta, rope_scaling=scaling)


def _yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float | None:
    """The stated factor; with both mscales their ratio, as DeepSeek's configs mean it."""
    if rope.get("attention_factor") is not None:
        return _number(rope, "attention_factor")
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        log = 0.1 * math.log(factor) if factor > 1 else 0.0
        return (_number(rope, "mscale") * log + 1) / (_number(rope, "mscale_all_dim") * log + 1)
    return None
