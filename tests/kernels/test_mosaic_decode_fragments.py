"""The decode kernel's register programs, on a warpgroup emulated in NumPy."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import format as fmt
from pallas_kernels.decode import mosaic_fragments as fragments
from pallas_kernels.decode import mosaic_keys, mosaic_state
from pallas_kernels.decode.mosaic_gpu import pack_query
from pallas_kernels.decode.mosaic_shape import HEADS, Shape
from pallas_kernels.decode.mosaic_state import State
from pallas_kernels.format import PAGE, Codec
from pallas_kernels.packing import KeyCodec
from tests.kernels.warpgroup import Warpgroup

CODECS: tuple[KeyCodec, ...] = ("uniform", "waterfill")
SHAPES = [
    Shape(head_dim, head_dim, codec, warps)
    for head_dim, warps in ((64, 1), (64, 2), (128, 1), (128, 2), (128, 4), (256, 2), (256, 4))
    for codec in CODECS
] + [Shape(64, 128, "uniform", 2), Shape(128, 64, "waterfill", 1)]
SHAPES += [dataclasses.replace(shape, paired=True) for shape in SHAPES if shape.head_dim < 256]
SHAPES += [
    Shape(128, 128, "uniform", 1, False, 4, 4),
    Shape(64, 128, "waterfill", 2, True, 4, 4),
    Shape(256, 64, "waterfill", 4, False, 4, 4),
    Shape(64, 64, "waterfill", 1, True, 2, 4),
    *(Shape(64, 64, codec, 2, True, 3, 2) for codec in CODECS),
    *(Shape(128, 128, codec, 1, False, 3, 2) for codec in CODECS),
    *(Shape(256, 64, codec, 4, False, 3, 2) for codec in CODECS),
]


def heads_of(shape: Shape) -> int:
    return HEADS // shape.together


def encoded(shape: Shape, pages: int, rng: np.random.Generator, value_size: Any) -> tuple:
    """Random pages, (words, meta) of K and V, and what they decode to in float64."""
    codec = Codec(key=shape.codec, gain=True).with_bits(key=shape.key_bits, value=shape.value_bits)
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
    """The block's output [Dv, heads of q] over ``pages`` pages, normalised."""
    ops, heads = Warpgroup(), len(q)
    q = np.pad(q, ((0, HEADS - heads), (0, 0)))
    packed, constants = pack_query(jnp.asarray(q)[None, None, None], shape)
    steps = mosaic_keys.load_steps(ops, shape, memory(packed))
    consts = mosaic_keys.load_constants(ops, shape, memory(constants))
    state = State.empty(ops, shape.v_head_dim, 0.0)
    for start in range(0, pages, shape.pages):
        ids = np.minimum(start + np.arange(shape.pages), pages - 1)
        pools = [
            memory(np.asarray(x)[ids]) for x in (keys.words, values.words, keys.meta, values.meta)
        ]
        left = np.full(128, pages - start, np.uint32)
        started = np.full(128, start > 0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # inf asks for a new reference
            state = fragments.page_step(
                ops, shape, tuple(pools), steps, consts, state, left, started
            )
    return finished(ops, state, shape.out_scale, shape.paired)[:, :heads], ops


def finished(ops: Warpgroup, state: State, scale: float, paired: bool) -> np.ndarray:
    v_head_dim = 16 * len(state.out)
    scratch, small = np.zeros(4 * v_head_dim * HEADS * 4, np.uint8), np.zeros(256, np.uint8)
    columns = HEADS // (1 + paired)
    out, ml = np.zeros(v_head_dim * columns * 4, np.uint8), np.zeros(64, np.uint8)
    mosaic_state.finish(ops, state, scale, paired, columns, scratch, small, out, ml)
    total = ml.view(np.float32).reshape(2, HEADS)[1, :columns]
    return out.view(np.float32).reshape(columns, v_head_dim).T / total


@pytest.mark.parametrize(
    "shape",
    SHAPES,
    ids=lambda s: (
        f"D{s.head_dim}-{s.v_head_dim}-{s.codec}-w{s.warps_per_page}{'-paired' * s.paired}"
        f"-k{s.key_bits}v{s.value_bits}"
    ),
)
def test_pages_give_dense_attention_over_what_they_decode_to(shape: Shape) -> None:
    rng = np.random.default_rng(0)
    pages = 5  # with 4 or 2 at once the last iteration is not full
    keys, values, (k, v) = encoded(shape, pages, rng, 1.0)
    q = (
        rng.normal(0, 2, (heads_of(shape), shape.head_dim)).astype(np.float32)
        * shape.head_dim**-0.5
    )
    got, _ = run_pages(shape, q, keys, values, pages)
    want = attend(k.reshape(-1, k.shape[-1]) @ q.T, v.reshape(-1, v.shape[-1]))
    assert np.linalg.norm(got - want) < 1e-3 * np.linalg.norm(want)


@pytest.mark.parametrize("value_size", [0.01, 100.0, 5e3])
@pytest.mark.parametrize(
    ("warps", "paired", "bits"),
    [(1, False, 2), (2, True, 2), (4, False, 4), (1, True, 4)],
)
def test_a_sharp_token_on_a_flat_rest_keeps_both(
    value_size: float, warps: int, paired: bool, bits: int
) -> None:
    shape, rng = Shape(128, 128, "uniform", warps, paired, bits, bits), np.random.default_rng(1)
    pages = 12
    keys, values, (k, v) = encoded(shape, pages, rng, value_size)
    q = np.zeros((heads_of(shape), 128), np.float32)
    k, v = k.reshape(-1, 128), v.reshape(-1, 128)
    for head in range(len(q)):  # token 700 + head wins by 2^(1 + head)
        other = np.delete(k, 700 + head, 0)
        direction = k[700 + head] - other.mean(0)
        q[head] = direction * (1.0 + head) / (direction @ (k[700 + head] - other.mean(0)))
    want = attend(k @ q.T, v)
    got, ops = run_pages(shape, q, keys, values, pages)
    assert np.linalg.norm(got - want) < 1e-3 * np.linalg.norm(want)
    assert ops.renewed >= 4  # at least once per warp


@pytest.mark.parametrize("paired", [False, True])
def test_a_reference_far_too_low_is_renewed_by_the_page_that_needs_it(paired: bool) -> None:
    shape, rng = Shape(64, 64, "uniform", 1, paired), np.random.default_rng(2)
    keys, values, (k, v) = encoded(shape, 8, rng, 1.0)
    k, v = k.reshape(-1, 64), v.reshape(-1, 64)
    q = np.tile(k[900] * 3, (heads_of(shape), 1)).astype(np.float32)  # one logit near 200, page 7
    got, ops = run_pages(shape, q, keys, values, 8)
    want = attend(k @ q.T, v)
    assert ops.renewed > 4
    assert np.linalg.norm(got - want) < 1e-3 * np.linalg.norm(want)


@pytest.mark.parametrize("paired", [False, True])
def test_a_small_head_is_as_exact_as_the_large_ones_beside_it(paired: bool) -> None:
    """Also where a head's largest query rounds up to the end of its grid."""
    shape, rng = Shape(128, 128, "uniform", 1, paired), np.random.default_rng(3)
    keys, values, (k, v) = encoded(shape, 4, rng, 1.0)
    sizes = np.geomspace(2.0, 1e-3, heads_of(shape))[:, None]
    q = (rng.normal(0, sizes, (heads_of(shape), 128)) * 128**-0.5).astype(np.float32)
    q[1, 5] = np.nextafter(np.float32(0.5), np.float32(0))
    k, v = k.reshape(-1, 128), v.reshape(-1, 128)
    got, _ = run_pages(shape, q, keys, values, 4)
    want = attend(k @ q.T, v)
    error = np.linalg.norm(got - want, axis=0) / np.linalg.norm(want, axis=0)
    assert error.max() < 1e-3
