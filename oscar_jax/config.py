"""Frozen settings of a model, its KV cache and the engine; nothing here touches a device."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

KVDtype = Literal["int2", "bf16"]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """YaRN (Peng et al., arXiv 2309.00071) as Hugging Face's ``rope_scaling`` states it."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # None: 0.1 ln(factor) + 1


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture numbers of one decoder-only transformer (Qwen3, Llama, SmolLM2, Qwen2.5)."""

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
    rope_scaling: RopeScaling | None = None


@dataclasses.dataclass(frozen=True)
class KVConfig:
    """The cache's windows, in tokens; the page is always 128 tokens (``pallas_kernels.format.PAGE``).

    Args:
        dtype: "int2" packed pages, or "bf16": the same three segments with BF16 pages.
        sink: S, the first tokens of a sequence, kept in BF16. A multiple of 64.
        recent: R, the newest tokens, always kept in BF16. A multiple of 64.
        lookahead: L, extra rows of the tail ring: steps in flight and exact truncation.
    """

    dtype: KVDtype = "int2"
    sink: int = 64
    recent: int = 256
    lookahead: int = 16

    def __post_init__(self) -> None:
        if self.dtype not in ("int2", "bf16"):
            raise ValueError(f"KVConfig.dtype={self.dtype!r}: must be 'int2' or 'bf16'")
        if self.sink < 64 or self.sink % 64:
            raise ValueError(f"KVConfig.sink={self.sink}: must be a positive multiple of 64")
        if self.recent < 64 or self.recent % 64:
            raise ValueError(f"KVConfig.recent={self.recent}: must be a positive multiple of 64")
        if self.lookahead < 1:
            raise ValueError(f"KVConfig.lookahead={self.lookahead}: must be at least 1")


def as_dict(config: Any) -> dict[str, Any]:
    """A dataclass as plain JSON-ready values."""
    return dataclasses.asdict(config)
