"""The programs before and after the decode kernel, on a warpgroup emulated in NumPy."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.decode import mosaic_bytes, mosaic_keys
from pallas_kernels.decode import mosaic_ends as ends
from pallas_kernels.decode.mosaic_ends import Heads
from pallas_kernels.decode.mosaic_gpu import pack_query
from pallas_kernels.decode.mosaic_shape import HEADS, Shape
from tests.kernels.warpgroup import Warpgroup


def memory(x: Any) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(x)).view(np.uint8).reshape(-1).copy()


def scalar(value: int) -> np.ndarray:
    return np.full(128, value, np.uint32)


def query_of(operands: Any, shape: Shape) -> np.ndarray:
    """The numbers that packed operands stand for."""
    words = np.array(operands)
    if mosaic_bytes.as_bytes(shape):
        return np.asarray(mosaic_bytes.numbers(words), np.float64)
    return words.view(np.float16).astype(np.float64)


@pytest.mark.parametrize("codec", ["uniform", "waterfill"])
@pytest.mark.parametrize(
    ("head_dim", "size", "bf16", "bits"),
    [(64, 3, True, 2), (64, 3, True, 3), (128, 4, True, 2), (128, 7, False, 3), (256, 6, True, 2)],
)
def test_prepare_packs_what_the_host_packs(
    head_dim: int, size: int, bf16: bool, bits: int, codec: Any
) -> None:
    rng = np.random.default_rng(0)
    shape = Shape(head_dim, head_dim, codec, 1, size <= 4, bits)
    q = rng.normal(0, 3, (2 * size, head_dim)).astype(ml_dtypes.bfloat16 if bf16 else np.float32)
    x_q = rng.normal(0, head_dim**-0.5, (head_dim, head_dim)).astype(np.float32)
    mu = rng.normal(size=head_dim).astype(np.float32)
    steps = mosaic_keys.query_entries(shape)
    outputs: list[Any] = [np.zeros(n, np.uint8) for n in (steps * 256, 128, 32)]
    heads = Heads(2 * size, size)
    sizes = (head_dim * 32, ends.matrix_scratch(heads.used), ends.SMALL)
    scratch = [np.full(n, 0xFF, np.uint8) for n in sizes]  # as the row before left it: NaN
    ops, matrix, mean = Warpgroup(), memory(x_q), memory(mu)
    block, queries = [scalar(size), scalar(size - 1)], memory(q)
    early = ends.query_words(ops, head_dim, bf16, block, queries) if size < HEADS else []
    ends.prepare(
        ops, shape, heads, 0.25, bf16, block,
        (queries, matrix), tuple(scratch), tuple(outputs),
        ends.Matrix.rows(ops, head_dim, matrix), ends.mean_of(ops, head_dim, mean), early,
    )  # fmt: skip
    own = np.zeros((HEADS, head_dim), np.float32)
    own[: size - 1] = 0.25 * q[size : 2 * size - 1].astype(np.float32)
    turned = own.astype(np.float64) @ x_q
    operands, constants = pack_query(jnp.asarray(turned, jnp.float32), shape)
    got, want = (query_of(x, shape) for x in (outputs[0].view(np.int32), operands))
    np.testing.assert_allclose(
        got,
        want,
        rtol=2e-3,
        atol=(4e-5 if mosaic_bytes.as_bytes(shape) else 1e-6) * np.abs(want).max(),
    )
    assert (got == want).mean() > 0.98  # the rest rounds the other way
    got = outputs[1].view(np.float32).reshape(4, HEADS)
    assert got[0, 0] == constants[0, 0]
    size_of = np.abs(np.asarray(constants)[1:]).max()
    np.testing.assert_allclose(got[1:], constants[1:], atol=1e-3 * size_of)
    np.testing.assert_allclose(outputs[2].view(np.float32), own @ mu, atol=1e-4)


@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize(
    ("v_head_dim", "size", "near", "splits", "bf16", "turned"),
    [
        (64, 4, 1, 18, False, True),
        (128, 4, 4, 40, False, True),
        (128, 7, 2, 3, False, True),
        (256, 5, 1, 34, True, True),
        (128, 3, 5, 5, True, False),
        (64, 8, 70, 70, False, False),
    ],
)
def test_join_merges_transforms_and_normalises(
    v_head_dim: int, size: int, near: int, splits: int, bf16: bool, turned: bool, alone: bool
) -> None:
    """``alone``: by a block for every head."""
    rng, heads = np.random.default_rng(1), Heads(size, size)
    parts = rng.normal(0, 1, (splits, v_head_dim, HEADS)).astype(np.float32)
    m = rng.normal(0, 5, (splits, HEADS)).astype(np.float32)
    l = rng.uniform(1, 9, (splits, HEADS)).astype(np.float32)
    m[splits // 2], l[splits // 2], parts[splits // 2] = 0.0, 0.0, 0.0  # a split without a page
    shift = rng.normal(0, 2, HEADS).astype(np.float32)
    x_o = rng.normal(0, v_head_dim**-0.5, (v_head_dim, v_head_dim)).astype(np.float32)
    dtype: Any = ml_dtypes.bfloat16 if bf16 else np.float32
    out = np.full((size + 2) * v_head_dim * (2 if bf16 else 4), 7, np.uint8)
    sizes = ends.join_scratch(v_head_dim, 1 if alone else heads.used, splits, turned)
    held = parts[..., : heads.used].swapaxes(1, 2)
    inputs = (held, np.stack([m, l], 1), *((shift, x_o) if turned else ()))
    ops, pointers = Warpgroup(), tuple(memory(x) for x in inputs)
    rows = ends.Matrix.rows(ops, v_head_dim, pointers[3]) if turned else []
    for column in range(size if alone else 1):
        scratch = [np.full(n, 0xFF, np.uint8) for n in sizes]  # as the row before left it: NaN
        ends.join(
            ops, v_head_dim, heads, alone, (near, splits), bf16,
            [scalar(1), scalar(size), scalar(column)], pointers, tuple(scratch), out, rows,
        )  # fmt: skip
    level = np.where(
        l > 0, m.astype(np.float64) + shift * (np.arange(splits) >= near)[:, None], -1e30
    )
    weight = np.exp2(level - level.max(0))  # [splits, 8]
    merged = np.einsum("sdh,sh->sdh", parts.astype(np.float64), weight)
    total = merged[:near].sum(0) + np.einsum("sdh,de->eh", merged[near:], x_o)
    want = (total / (l * weight).sum(0)).T[:size]
    got = out.view(dtype).astype(np.float64).reshape(size + 2, v_head_dim)
    np.testing.assert_allclose(
        got[1 : 1 + size], want, atol=(8e-3 if bf16 else 1e-5) * np.abs(want).max()
    )
    assert (out.reshape(size + 2, -1)[[0, -1]] == 7).all()  # the neighbours' heads
