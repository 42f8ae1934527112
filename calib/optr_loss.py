"""What OptR minimises, per KV head, and the rows that it reads; formulas in ``calib.optr``."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from calib.held_out import HeldOut
from calib.straight_through import keys_from_pages, values_from_pages
from oscar_jax.rotation import Rotation
from pallas_kernels.format import Codec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyRows:
    """What the keys' loss reads; a leading axis of heads, then sequences B (``metric``: none)."""

    keys: Float[Array, "*h B T D"]  # (k - mu) X_base of the tokens in pages
    queries: Float[Array, "*h B G Q D"]  # q X_base^-T / sqrt(D)
    values: Float[Array, "*h B T Dv"]  # v of the tokens in pages
    weights: Float[Array, "*h B G Q T"]  # P of the tokens in pages, 0 where not visible
    window: Float[Array, "*h B G Q Dv"]  # P v over the tokens that stay BF16
    metric: Float[Array, "*h G Dv Dv"]  # W_O^T W_O of every query head / mean |P V W_O|^2

    @property
    def rotated(self) -> Array:
        return self.keys


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ValueRows:
    """What the values' loss reads; axes as in ``KeyRows``."""

    values: Float[Array, "*h B T Dv"]  # v X_base of the tokens in pages
    weights: Float[Array, "*h B G Q T"]  # P_q of the tokens in pages
    metric: Float[Array, "*h G Dv Dv"]  # the metric above between X_base^-1 and its transpose

    @property
    def rotated(self) -> Array:
        return self.values


Rows = KeyRows | ValueRows
Loss = Callable[[Array, Any, Codec, Array], Array]  # (rotation [D, D], rows, codec, output_weight)


def select[R: Rows](rows: R, batch: Int[Array, " b"]) -> R:
    """The sequences ``batch`` of one head."""
    names = (field.name for field in dataclasses.fields(rows) if field.name != "metric")
    return dataclasses.replace(rows, **{name: getattr(rows, name)[batch] for name in names})


@jax.jit
def _key_rows(
    q: Float[Array, "B Q N D"],
    k: Float[Array, "B L K D"],
    v: Float[Array, "B L K Dv"],
    positions: Int[Array, " Q"],
    visible: Bool[Array, "Q L"],
    x_k: Float[Array, "K D D"],
    x_q: Float[Array, "K D D"],
    mu: Float[Array, "K D"],
    output: Float[Array, "N Dv Dv"],
) -> KeyRows:
    """``key_rows`` with T = L, all tokens."""
    with jax.default_matmul_precision("highest"):
        k, v = (x.astype(jnp.float32).transpose(2, 0, 1, 3) for x in (k, v))  # [K, B, L, D]
        batch, count, heads, size = q.shape
        kv_heads = len(x_k)
        q = q.astype(jnp.float32).reshape(batch, count, kv_heads, heads // kv_heads, size)
        q = q.transpose(2, 0, 3, 1, 4) * size**-0.5  # [K, B, G, Q, D]
        logits = jnp.einsum("kbgqd,kbtd->kbgqt", q, k)
        seen = jnp.arange(k.shape[2]) <= positions[:, None]
        weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf), axis=-1)
        attended = jnp.einsum("kbgqt,kbtd->kbgqd", weights, v)
        weights = jnp.where(visible, weights, 0.0)
        metric = output.reshape(kv_heads, heads // kv_heads, *output.shape[1:])
        energy = jnp.einsum("kbgqd,kgde,kbgqe->k", attended, metric, attended)
        energy /= batch * count * (heads // kv_heads)
        return KeyRows(
            keys=jnp.einsum("kbtd,kde->kbte", k - mu[:, None, None], x_k),
            queries=jnp.einsum("kbgqd,kde->kbgqe", q, x_q),
            values=v,
            weights=weights,
            window=attended - jnp.einsum("kbgqt,kbtd->kbgqd", weights, v),
            metric=metric / jnp.where(energy > 0, energy, 1.0)[:, None, None, None],
        )


def key_rows(rows: HeldOut, layer: int, rotation: Rotation, output: Array) -> KeyRows:
    """One layer's rows under the base transform, heads leading.

    Args:
        output: f32[N, Dv, Dv], W_O^T W_O of every query head.
    """
    stored, length = rows.stored, rows.keys[layer].shape[1]
    visible = np.zeros((len(rows.positions), length), bool)
    visible[:, stored] = rows.visible
    made = _key_rows(
        rows.queries[layer],
        rows.keys[layer],
        rows.values[layer],
        rows.positions,
        visible,
        rotation.x_k[layer],
        rotation.x_q[layer],
        rotation.mu[layer],
        output,
    )
    return dataclasses.replace(
        made,
        keys=made.keys[:, :, stored],
        values=made.values[:, :, stored],
        weights=made.weights[..., stored],
    )


@functools.partial(jax.jit, static_argnames="codec")
def value_rows(
    keys: KeyRows,
    factor: Float[Array, "H D D"],
    x_v: Float[Array, "H Dv Dv"],
    x_o: Float[Array, "H Dv Dv"],
    *,
    codec: Codec,
) -> ValueRows:
    """What the values' loss reads once the keys' factors are final; heads leading everywhere."""

    def one(rows: KeyRows, factor: Array, x_v: Array, x_o: Array) -> ValueRows:
        grown, excess, _ = _quantised_attention(factor, rows, codec)
        return ValueRows(
            values=rows.values @ x_v,
            weights=(rows.weights + excess) / (1 + grown),
            metric=x_o @ rows.metric @ x_o.T,
        )

    with jax.default_matmul_precision("highest"):
        return lax.map(lambda one_head: one(*one_head), (keys, factor, x_v, x_o))


# ---------------------------------------------------------------------------------------- losses


def expm(skew: Float[Array, "D D"]) -> Float[Array, "D D"]:
    """exp(A - A^T) in float32, for the inside of a step.

    Taylor's polynomial of degree 8 at 1/32 of the argument, squared five times: 9 products. What is
    kept in the end is computed in float64 by scipy. ``jax.scipy.linalg.expm`` computes five Pade
    approximants and two LU factorisations of every head: 30 heads of 64 took 2.4 s with gradients,
    as much as the rest of a step.
    """
    b = (skew - skew.T) / 32
    eye, b2 = jnp.eye(len(b)), b @ b
    b3, b4 = b2 @ b, b2 @ b2
    tail = eye / 24 + b / 120 + b2 / 720 + b3 / 5040 + b4 / 40320
    result = eye + b + b2 / 2 + b3 / 6 + b4 @ tail
    for _ in range(5):
        result = result @ result
    return result


def _quantised_attention(rotation: Array, rows: KeyRows, codec: Codec) -> tuple[Array, ...]:
    """(Z - 1, P e^d, e^-m - 1) with d = e - m, e the error of a logit and m = sum P e.

    P_q = P e^d / Z on the pages and P e^-m / Z in the windows, where e = 0. In terms of Z - 1
    nothing cancels when the errors are small.
    """
    x = rows.keys @ rotation
    noise = keys_from_pages(x, codec) - x
    error = jnp.einsum("bgqd,btd->bgqt", rows.queries @ rotation, noise)
    mean = (rows.weights * error).sum(-1, keepdims=True)
    excess = rows.weights * jnp.expm1(error - mean)
    shift = jnp.expm1(-mean)
    exact = 1 - rows.weights.sum(-1, keepdims=True)  # P of the windows
    return excess.sum(-1, keepdims=True) + exact * shift, excess, shift


def key_loss(rotation: Array, rows: KeyRows, codec: Codec, output_weight: Array) -> Array:
    """KL(P || P_q) + output_weight |(P_q - P) V W_O|^2 / |P V W_O|^2 of one head."""
    grown, excess, shift = _quantised_attention(rotation, rows, codec)
    attended = jnp.einsum("bgqt,btd->bgqd", rows.weights, rows.values) + rows.window
    moved = jnp.einsum("bgqt,btd->bgqd", excess, rows.values) + shift * rows.window
    error = (moved - grown * attended) / (1 + grown)
    return jnp.log1p(grown).mean() + output_weight * _energy(error, rows.metric)


def value_loss(rotation: Array, rows: ValueRows, codec: Codec, output_weight: Array) -> Array:
    """|P_q (V_q - V) W_O|^2 / |P V W_O|^2 of one head."""
    del output_weight
    x = rows.values @ rotation
    noise = values_from_pages(x, codec) - x
    error = jnp.einsum("bgqt,btd->bgqd", rows.weights, noise) @ rotation.T
    return _energy(error, rows.metric)


def _energy(error: Float[Array, "B G Q D"], metric: Float[Array, "G D D"]) -> Array:
    turned = jnp.einsum("bgqd,gde->bgqe", error, metric)
    return (error * turned).sum(-1).mean()
