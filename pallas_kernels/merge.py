"""Joining attention over disjoint sets of keys: segments, splits and pages.

Logits are in base 2 (the softmax scale times log2 e is folded into the query), masks are -1e30 and
never infinite, sums are float32.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

MASKED = -1e30


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Partial:
    """Attention over some of the keys, before normalisation.

    max = max_i s_i, sum = sum_i 2^(s_i - max), out = sum_i 2^(s_i - max) v_i. Where no key is
    visible: max = -1e30, sum = 0, out = 0.
    """

    out: Float[Array, "*s D"]
    max: Float[Array, "*s"]
    sum: Float[Array, "*s"]


def row_sum(x: Float[Array, "*s n"]) -> Float[Array, "*s"]:
    """Sum over the last axis as a matrix product with ones, float32.

    A compiler chooses the order of a reduction by the shape around it, so that the same row sums
    differently in batches of 2 and 8; the products of a row keep their order. Eight equal columns,
    because a product with one is turned back into a reduction.
    """
    ones = jnp.ones((x.shape[-1], 8), jnp.float32)
    return jnp.matmul(x, ones, precision=lax.Precision.HIGHEST)[..., 0]


def softmax_weights(
    logits: Float[Array, "*s n"], visible: Bool[Array, "*t n"]
) -> tuple[Array, Array, Array]:
    """(weights, max, sum) of base-2 logits over the last axis; masked logits may be anything."""
    logits = jnp.where(visible, logits, MASKED)
    top = logits.max(-1)
    weights = jnp.where(visible, jnp.exp2(logits - top[..., None]), 0.0)
    return weights, top, row_sum(weights)


def _merge_two(a: Partial, b: Partial) -> Partial:
    top = jnp.maximum(a.max, b.max)
    scale_a, scale_b = jnp.exp2(a.max - top), jnp.exp2(b.max - top)
    return Partial(
        a.out * scale_a[..., None] + b.out * scale_b[..., None],
        top,
        a.sum * scale_a + b.sum * scale_b,
    )


def merge(*partials: Partial) -> Partial:
    """The partial result over the union of disjoint key sets."""
    return functools.reduce(_merge_two, partials)


def normalise(partial: Partial) -> Float[Array, "*s D"]:
    """out / sum, the attention output; 0 where no key was visible."""
    total = partial.sum[..., None]
    return partial.out / jnp.where(total > 0, total, 1.0)
