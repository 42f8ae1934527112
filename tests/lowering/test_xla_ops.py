"""The public ops lower for CPU, CUDA (an H200 that is not here) and TPU, and keep donated pools."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

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
from pallas_kernels.format import hadamard

BATCH, KV_HEADS, HEADS = 2, 2, 6
PLATFORMS = ("cpu", "cuda", "tpu")
H200 = AbstractMesh(
    (1,),
    ("x",),
    axis_types=(AxisType.Auto,),
    abstract_device=AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu"),
)


def shapes(
    dtype: Any = "int2", head_dim: int = 128, queries: int = 1, codec: Codec | None = None
) -> tuple[PagedKV, Rotation | None, Any, Any]:
    """(cache, rotation, q, k) as shapes alone."""
    init = functools.partial(
        init_cache,
        KVConfig(dtype=dtype),
        layers=1,
        kv_heads=KV_HEADS,
        head_dim=head_dim,
        batch=BATCH,
        max_tokens=4096,
    )
    rotation = None
    if dtype == "int2":
        transform = np.broadcast_to(hadamard(head_dim), (KV_HEADS, head_dim, head_dim))
        mu = np.zeros((KV_HEADS, head_dim))
        fitted = Rotation.from_transforms([transform], [transform], [mu], codec or Codec())
        rotation = jax.eval_shape(lambda: fitted)
    q = jax.ShapeDtypeStruct((BATCH, queries, HEADS, head_dim), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((BATCH, queries, KV_HEADS, head_dim), jnp.bfloat16)
    return jax.eval_shape(init), rotation, q, k


def decode(
    cache: PagedKV, rotation: Rotation | None, q: jax.Array, k: jax.Array, n: jax.Array
) -> tuple[PagedKV, jax.Array]:
    cache = append_kv(cache, 0, k, k, lengths=n)
    out = oscar_attention(q, cache, 0, rotation, lengths=n)
    return write_pages(cache, rotation, due_pages(cache, lengths=n)), out


def prefill(
    cache: PagedKV, rotation: Rotation | None, q: jax.Array, k: jax.Array, n: jax.Array
) -> tuple[PagedKV, jax.Array]:
    out, cache = oscar_prefill(q, k, k, cache, 0, rotation, lengths=n)
    return cache, out


def shape_and_type(x: Any) -> tuple[tuple[int, ...], Any]:
    return x.shape, x.dtype


LENGTHS = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
CACHES: dict[str, dict[str, Any]] = {
    "uniform": dict(codec=Codec(gain=True)),
    "waterfill": dict(codec=Codec(key="waterfill", gain=True)),
    "head_dim 64": dict(head_dim=64),
    "head_dim 96": dict(head_dim=96),
    "bf16": dict(dtype="bf16"),
}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize(("step", "queries"), [(decode, 1), (decode, 5), (prefill, 300)])
def test_a_step_lowers_and_reuses_every_donated_buffer(
    step: Callable[..., Any], queries: int, kind: str
) -> None:
    options = CACHES[kind]
    cache, rotation, q, k = shapes(queries=queries, **options)
    with jax.sharding.use_abstract_mesh(H200):
        traced = jax.jit(step, donate_argnums=0).trace(cache, rotation, q, k, LENGTHS)
        programs = {name: traced.lower(lowering_platforms=(name,)) for name in PLATFORMS}
    new_cache, out = traced.out_info
    assert (out.shape, out.dtype) == (q.shape, q.dtype)
    assert jax.tree.map(shape_and_type, new_cache) == jax.tree.map(shape_and_type, cache)
    for platform, program in programs.items():
        text = program.as_text()
        assert text.count("tf.aliasing_output") == len(jax.tree.leaves(cache)), platform
        assert "callback" not in text, platform  # the host takes no part in a step
        assert "f64" not in text, platform
