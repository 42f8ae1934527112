"""The shape checker of the tests really refuses wrong shapes, and only those."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from oscar_jax import Codec, KVConfig, PagedKV, Rotation, init_cache, oscar_attention


def small_cache() -> PagedKV:
    return init_cache(KVConfig(), layers=1, kv_heads=1, head_dim=64, batch=1, max_tokens=512)


def test_an_argument_of_the_wrong_rank_is_refused_at_the_door() -> None:
    rotation = Rotation.hadamard(layers=1, kv_heads=1, head_dim=64)
    with pytest.raises(TypeCheckError, match=r"parameter.*q"):
        oscar_attention(jnp.ones((1, 1, 64)), small_cache(), 0, rotation, lengths=1)


def test_a_pytree_given_arrays_of_the_wrong_shape_is_refused() -> None:
    square, mu = jnp.ones((1, 4, 4)), jnp.ones((1, 4))
    with pytest.raises(TypeCheckError, match="mu"):
        Rotation((square,), (square,), (square,), (square,), (mu[0],), (Codec(),))


def test_a_pytree_may_be_rebuilt_around_shapes() -> None:
    shapes = jax.tree.map(lambda leaf: str(leaf.shape), small_cache())
    assert shapes.layers[0].k_meta == "(3, 1, 128)"
