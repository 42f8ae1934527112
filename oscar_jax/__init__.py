"""LLM serving from a 2-bit KV cache, in JAX."""

from oscar_jax.attention import oscar_attention, oscar_prefill
from oscar_jax.cache import (
    PagedKV,
    PagePlan,
    append_kv,
    check_faults,
    due_pages,
    init_cache,
    truncate,
    write_pages,
)
from oscar_jax.config import KVConfig
from oscar_jax.rotation import Rotation
from pallas_kernels.format import Codec

__all__ = [
    "Codec",
    "KVConfig",
    "PagePlan",
    "PagedKV",
    "Rotation",
    "append_kv",
    "check_faults",
    "due_pages",
    "init_cache",
    "oscar_attention",
    "oscar_prefill",
    "truncate",
    "write_pages",
]
