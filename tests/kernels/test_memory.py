"""The compiled decode step: donated pools are not copied, and nothing is dequantised in bulk."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax import (
    Codec,
    KVConfig,
    PagedKV,
    Rotation,
    append_kv,
    due_pages,
    init_cache,
    oscar_attention,
    oscar_prefill,
    write_pages,
)
from oscar_jax.accounting import CacheShape
from tests.kernels.cases import int32, poisoned_cache, sequences, transforms
from tests.kernels.runs import decode_steps, prefill
from tests.kernels.test_attention_suite import BASE, implementations

TOKENS = 131_072
SHAPE: dict[str, Any] = dict(layers=1, kv_heads=8, head_dim=128)  # a layer of Qwen3-8B
HEADS = 32


def nbytes(tree: Any) -> int:
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def compiled(step: Any, *arguments: Any) -> Any:
    """memory_analysis() of a step whose first argument is donated; nothing is allocated."""
    return jax.jit(step, donate_argnums=0).lower(*arguments).compile().memory_analysis()


@pytest.mark.parametrize("codec", [Codec(), Codec("waterfill", gain=True)], ids=["uniform", "wf"])
@implementations
def test_a_decode_step_has_no_temporary_the_size_of_the_cache(
    codec: Codec, implementation: str
) -> None:
    """U35: at 131,072 tokens, less than 5 % of the dequantised cache (147,456 bytes a token)."""
    config = KVConfig()
    init = functools.partial(init_cache, config, batch=1, max_tokens=TOKENS, **SHAPE)
    cache = jax.eval_shape(init)
    mean = [np.zeros((8, 128))]
    eye = [np.broadcast_to(np.eye(128), (8, 128, 128))]
    rotation = jax.eval_shape(lambda: Rotation.from_transforms(eye, eye, mean, codec))

    def step(cache: PagedKV, rotation: Rotation, q: Any, k: Any, n: Any) -> Any:
        plan = due_pages(cache, lengths=n - 1)
        cache = write_pages(cache, rotation, plan, implementation=implementation)
        cache = append_kv(cache, 0, k, k, lengths=n)
        out = oscar_attention(q, cache, 0, rotation, lengths=n, implementation=implementation)
        return cache, out

    q = jax.ShapeDtypeStruct((1, 1, HEADS, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, 1, 8, 128), jnp.bfloat16)
    n = jax.ShapeDtypeStruct((1,), jnp.int32)
    memory = compiled(step, cache, rotation, q, k, n)
    shape = CacheShape.of(config, **SHAPE)
    assert memory.temp_size_in_bytes < 0.05 * TOKENS * shape.bf16_bytes_per_token
    assert memory.alias_size_in_bytes == nbytes(cache)  # every pool is updated in place
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1 << 16


@implementations
def test_a_prefill_chunk_makes_no_dense_copy_of_the_prefix(implementation: str) -> None:
    """128 queries behind 130,000 tokens: temporaries are the chunk's, not the prefix's."""
    config = KVConfig()
    init = functools.partial(init_cache, config, batch=1, max_tokens=TOKENS, **SHAPE)
    cache = jax.eval_shape(init)
    rotation = jax.eval_shape(lambda: Rotation.hadamard(**SHAPE))

    def step(cache: PagedKV, rotation: Rotation, q: Any, k: Any, n: Any) -> Any:
        out, cache = oscar_prefill(
            q, k, k, cache, 0, rotation, lengths=n, implementation=implementation
        )
        return cache, out

    q = jax.ShapeDtypeStruct((1, 128, HEADS, 128), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((1, 128, 8, 128), jnp.bfloat16)
    n = jax.ShapeDtypeStruct((1,), jnp.int32)
    memory = compiled(step, cache, rotation, q, k, n)
    dense = TOKENS * CacheShape.of(config, **SHAPE).bf16_bytes_per_token
    assert memory.temp_size_in_bytes < 0.1 * dense
    assert memory.alias_size_in_bytes == nbytes(cache)


@implementations
def test_a_donated_cache_is_consumed_without_a_warning(implementation: str) -> None:
    data, rotation = sequences(BASE), transforms(BASE)
    cache = poisoned_cache(BASE)
    n = int32([440, 440])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _, prefilled = prefill(
            cache, rotation, data.q, data.k, data.v, n, n, implementation=implementation
        )
        window = data.window(np.array([440, 440]), 16)
        _, decoded = decode_steps(
            prefilled, rotation, *window, n, int32([16, 16]), implementation=implementation
        )
    for donated in (cache, prefilled):
        assert all(x.is_deleted() for x in jax.tree.leaves(donated))
    assert not any(x.is_deleted() for x in jax.tree.leaves(decoded))
    assert nbytes(decoded.layers) == CacheShape.of_cache(decoded).allocated_bytes(
        pages=decoded.layers[0].k_pages.shape[0], slots=3, sinks=4
    )
