"""Frozen settings of a model, its KV cache and the engine; nothing here touches a device."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from oscar_jax.model_config import Llama3Scaling, ModelConfig, RopeScaling

__all__ = ["KVConfig", "Llama3Scaling", "ModelConfig", "RopeScaling", "as_dict"]

KVDtype = Literal["int2", "bf16"]


@dataclasses.dataclass(frozen=True)
class KVConfig:
    """The cache's windows, in tokens; the page is always ``pallas_kernels.format.PAGE`` = 128.

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
