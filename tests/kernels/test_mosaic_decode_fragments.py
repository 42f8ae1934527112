"""The decode kernel's register programs, on a warpgroup emulated in NumPy."""

from __future__ import annotations

import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import format as fmt
from pallas_kernels.decode import mosaic_fragments as fragments
from pallas_kernels.decode.mosaic_fragments import HEADS, Shape, State
from pallas_kernels.decode.mosaic_gpu import pack_query
from pallas_kernels.format import PAGE, Codec
from tests.kernels.warpgroup import Warpgroup

SHAPES = [
    Shape(head_dim, head_dim, codec, warps)
    for head_dim, warps in ((64, 1), (64, 2), (128, 1), (128, 2), (128, 4), (256, 2), (256, 4))
    for codec in ("uniform", "waterfill")
] + [Shape(64, 128, "uniform", 2), Shape(128, 64, "waterfill", 1)]


def encoded(shape: Shape, pages: int, rng: np.random.Generator, value_size: Any) -> tuple:
    """Random pages, (words, meta) of K and V, and what they decode to in float64."""
    codec = Codec(key=shape.codec, gain=True)
    k = rng.normal(0.3, 1, (pages, PAGE, shape.head_dim)).astype(np.float32)
    v = (rng.normal(0.2, 1, (pages, PAGE, shape.v_head_dim)) * value_size).astype(np.float32)
    keys = fmt.encode_key_pages(jnp.asarray(k), codec)
    values = fmt.encode_value_pages(jnp.asarray(v), codec)
    decoded = (
        np.asarray(fmt.decode_key_pages(keys.words, keys.meta, codec), np.float64),
        np.asarray(fmt.decode_value_pages(values.words, values.meta), np.float64),
    )
    return keys, values, decoded


def memory(x: Any) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(x)).view(np.uint8).reshape(-1).copy()


def attend(logits: np.ndarray, values: np.ndarray) -> np.ndarray:
    """softmax_2(logits [n, heads]) values [n, Dv]: [Dv, heads]."""
    weights = np.exp2(logits - logits.max(0))
    return (values.T @ weights) / weights.sum(0)


def run_pages(
    shape: Shape, q: np.ndarray, keys: Any, values: Any, pages: int
) -> tuple[np.ndarray, Warpgroup]:
    """The block's output [Dv, HEADS] over ``pages`` pages, normalised."""
    ops = Warpgroup()
    packed, constants = pack_query(jnp.asarray(q)[None, None, None], shape)
    steps = fragments.load_steps(ops, memory(packed), len(shape.key_steps()))
    consts = fragments.load_constants(ops, memory(constants))
    state = State.empty(ops, shape.v_head_dim, 0.0)
    for start in range(0, pages, shape.pages):
        ids = np.minimum(start + np.arange(shape.pages), pages - 1)
        pools = [
            memory(np.asarray(x)[ids]) for x in (keys.words, values.words, keys.meta, values.meta)
        ]
        valid = start + ops.warp // shape.warps_per_page < pages
        first = np.full(128, start == 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # inf asks for a new reference
            state = fragments.page_step(
                ops, shape, tuple(pools), steps, consts, state, valid, first
            )
    return finished(ops, state, shape.out_scale), ops


def finished(ops: Warpgroup, state: State, scale: float) -> np.ndarray:
    v_head_dim = 16 * len(state.out)
    scratch, small = np.zeros(4 * v_head_dim * HEADS * 4, np.uint8), np.zeros(256, np.uint8)
    out, ml = np.zeros(v_head_dim * HEADS * 4, np.uint8), np.zeros(64, np.uint8)
    fragments.finish(ops, state, scale, scratch, small, out, ml)
    total = ml.view(np.float32).reshape(2, HEADS)[1]
    return out.view(np.float32).reshape(v_head_dim, HEADS) / total


@pytest.mark.parametrize(
    "shape", SHAPES, ids=lambda s: f"D{s.head_dim}-{s.v_head_dim}-{s.codec}-w{s.warps_per_page}"
)
def test_pages_give_dense_attention_over_what_they_decode_to(shape: Shape) -> None:
    rng = np.random.default_rng(0)
    pages = shape.pages + 1  # the last iteration is not full
    keys, values, (k, v) = encoded(shape, pages, rng, 1.0)
    q = rng.normal(0, 2, (HEADS, shape.head_dim)).astype(np.float32) * shape.head_dim**-0.5
    got, _ = run_pages(shape, q, keys, values, pages)
    want = attend(k.reshape(-1, k.shape[-1]) @ q.T, v.reshape(-1, v.shape[-1]))
    assert np.linalg.norm(got - want) < 1e-3 * np.linalg.norm(want)


@pytest.mark.parametrize("value_size", [0.01, 100.0, 5e3])
@pytest.mark.parametrize("warps", [1, 2, 4])
def test_a_sharp_token_on_a_flat_rest_keeps_both(value_size: float, warps: int) -> None:
    shape, rng = Shape(128, 128, "uniform", warps), np.random.default_rng(1)
    pages = 12
    keys, values, (k, v) = encoded(shape, pages, rng, value_size)
    q = np.zeros((HEADS, 128), np.float32)
    k, v = k.reshape(-1, 128), v.reshape(-1, 128)
    for head in range(HEADS):  # token 700 + head wins by 2^(1 + head)
        other = np.delete(k, 700 + head, 0)
        direction = k[700 + head] - other.mean(0)
        q[head] = direction * (1.0 + head) / (direction @ (k[700 + head] - other.mean(0)))
    want = attend(k @ q.T, v)
    got, ops = run_pages(shape, q, keys, values, pages)
    assert np.linalg.norm(got - want) < 1e-3 * np.linalg.norm(want)
    assert ops.renewed >= 4  # at least once per warp


def test_a_reference_far_too_low_is_renewed_by_the_page_that_needs_it() -> None:
    shape, rng = Shape(64, 64, "uniform", 1), np.random.default_rng(2)
    keys, values, (k, v) = encoded(shape, 8, rng, 1.0)
    k, v = k.reshape(-1, 64), v.reshape(-1, 64)
    q = np.tile(k[900] * 3, (HEADS, 1)).astype(np.float32)  # one logit near 200, page 7
    got, ops = run_pages(shape, q, keys, values, 8)
    want = attend(k @ q.T, v)
    assert ops.renewed > 4
    assert np.linalg.norm(got - want) < 1e-3 * np.linalg.norm(want)
