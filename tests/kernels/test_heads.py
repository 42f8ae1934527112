"""Norm, rotation and storing of new heads: the programs on NumPy, the kernels on GPUs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.heads import append, mosaic_gpu, rotate, xla
from pallas_kernels.heads.mosaic_gpu import Shape, append_program, rotate_program
from pallas_kernels.layout import LayerKV, Tables, Windows
from tests.kernels.cases import needs_gpu
from tests.kernels.warpgroup import Warpgroup

WINDOWS = Windows(sink=64, recent=64, lookahead=16)
PAGES: Any = (jnp.zeros(1), jnp.zeros(1), None, None)
SHAPES = [Shape(6, 2, 64, 1e-6), Shape(3, 1, 128, None), Shape(5, 2, 256, 1e-2)]


def draw(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def projections(shape: Shape, batch: int) -> tuple[Any, ...]:
    """(y, cos, sin, q_gain, k_gain) of one token per row."""
    angle = draw(1, batch, 1, 1, shape.dim // 2)
    gain = lambda seed: bf16(1 + 0.3 * draw(seed, shape.dim))  # noqa: E731
    gains = (None, None) if shape.eps is None else (gain(2), gain(3))
    y = draw(0, batch, 1, shape.total, shape.dim)
    return *map(jax.device_put, (y, np.cos(angle), np.sin(angle))), *gains


def bf16(x: np.ndarray) -> jax.Array:
    return jax.device_put(x.astype(ml_dtypes.bfloat16))


def int32(*numbers: int) -> jax.Array:
    return jax.device_put(np.array(numbers, np.int32))


def in_float64(shape: Shape, arrays: tuple[Any, ...]) -> list[np.ndarray]:
    """The formulas of ``rotate``: q, k, v [B, ., D]."""
    y, cos, sin, *gains = (None if x is None else np.asarray(x).astype(np.float64) for x in arrays)
    assert y is not None and cos is not None and sin is not None
    parts = np.split(y[:, 0], (shape.heads, shape.heads + shape.kv_heads), 1)
    for i, gain in enumerate(gains):
        x = parts[i]
        if gain is not None and shape.eps is not None:
            x = x / np.sqrt((x**2).mean(-1, keepdims=True) + shape.eps) * gain
        a, b = np.split(x, 2, -1)
        c, s = cos[:, 0], sin[:, 0]
        parts[i] = np.concatenate([a * c - b * s, b * c + a * s], -1)
    return parts


def memory(x: Any) -> np.ndarray:
    return np.array(x).view(np.uint8).reshape(-1)


def error(got: Any, want: np.ndarray) -> float:
    return float(np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_specification_and_the_program_rotate_by_the_formula(shape: Shape) -> None:
    arrays = projections(shape, 2)
    want = in_float64(shape, arrays)
    eps = 0.0 if shape.eps is None else shape.eps
    for got, wanted in zip(
        rotate(*arrays, heads=shape.heads, eps=eps, dtype=jnp.float32), want, strict=True
    ):
        assert error(got[:, 0], wanted) < 1e-6
    y, cos, sin, *gains = arrays
    for row in range(2):
        outs = [np.zeros((x.shape[1], shape.dim), ml_dtypes.bfloat16) for x in want]
        ops = Warpgroup()
        inputs = [memory(y[row]), memory(cos[row]), memory(sin[row])]
        inputs += [memory(g) for g in gains if g is not None]
        for block in range(-(-shape.total // 4)):
            stored = tuple(x.view(np.uint8).reshape(-1) for x in outs)
            rotate_program(ops, shape, ops.const_i(block), tuple(inputs), stored)
        for out, wanted in zip(outs, want, strict=True):
            assert error(out, wanted[row]) < 4e-3  # of BF16


@pytest.mark.parametrize("dims", [(64, 128), (128, 64), (256, 256)])
@pytest.mark.parametrize(
    ("length", "new"), [(1, 1), (64, 1), (65, 1), (64 + 208, 1), (64 + 209, 1), (5000, 1), (70, 0)]
)
def test_the_program_appends_where_the_specification_does(
    length: int, new: int, dims: tuple[int, int]
) -> None:
    pools = [
        draw(i, 1, 1, rows, dims[i % 2]) for i, rows in enumerate((64, 64, *[WINDOWS.ring] * 2))
    ]
    layer = LayerKV(*PAGES, *map(bf16, pools))
    k, v = (bf16(draw(9, 1, 1, 1, dim)) for dim in dims)
    zero = int32(0)
    want = append(
        layer,
        k,
        v,
        Tables(zero[:, None], zero, zero),
        lengths=int32(length),
        q_lens=int32(new),
        windows=WINDOWS,
    )
    ops = Warpgroup()
    held = [memory(x) for x in (layer.sink_k, layer.sink_v, layer.tail_k, layer.tail_v)]
    scalars = ops.const_i(length), ops.const_i(new)
    append_program(ops, WINDOWS, dims, scalars, (memory(k), memory(v)), tuple(held))
    changed = 0
    for got, name in zip(held, ("sink_k", "sink_v", "tail_k", "tail_v"), strict=True):
        np.testing.assert_array_equal(got, memory(getattr(want, name)))
        changed += int((got != memory(getattr(layer, name))).any())
    assert changed == 2 * new


def test_what_the_kernels_do_not_serve_is_named() -> None:
    assert mosaic_gpu.unsupported(1, (64, 128, 256), jnp.bfloat16) is None
    assert mosaic_gpu.unsupported(2, (64,), jnp.bfloat16) == "2 tokens per row, it serves 1"
    assert "head_dim=96" in str(mosaic_gpu.unsupported(1, (128, 96), jnp.bfloat16))
    assert "float32" in str(mosaic_gpu.unsupported(1, (64,), jnp.float32))
    with pytest.raises(NotImplementedError, match=r"compute capability 9.*use 'xla'"):
        mosaic_gpu.rotate(*projections(SHAPES[0], 1), heads=6, eps=0.0, dtype=jnp.bfloat16)


@needs_gpu
@pytest.mark.parametrize("shape", [*SHAPES, Shape(32, 8, 128, 1e-6)], ids=str)
def test_on_a_gpu_both_kernels_equal_the_specification(shape: Shape) -> None:
    batch = 5
    arrays = projections(shape, batch)
    options: Any = dict(heads=shape.heads, eps=shape.eps or 0.0, dtype=jnp.bfloat16)
    got = mosaic_gpu.rotate(*arrays, **options)
    right = jax.jit(functools.partial(xla.rotate, **options))(*arrays)
    for ours, want in zip(got, right, strict=True):
        assert error(ours, np.asarray(want, np.float64)) < 2e-3  # the last bit of a few
    owners = 4, 2, 0, 1, 3
    rows = (WINDOWS.sink, WINDOWS.sink, WINDOWS.ring, WINDOWS.ring)
    pools = [bf16(draw(i, batch, shape.kv_heads, n, shape.dim)) for i, n in enumerate(rows)]
    layer = LayerKV(*PAGES, *pools)
    step: Any = dict(
        lengths=int32(1, 64, 65, 4000, 100),
        q_lens=int32(1, 1, 1, 1, 0),
        windows=WINDOWS,
    )
    slots = int32(*owners)
    table = jax.device_put(np.array(owners, np.int32)[:, None])
    tables = Tables(table, slots, int32(*owners[::-1]))
    run = lambda op: jax.jit(lambda *x: op(*x, tables, **step))(layer, got[1], got[2])  # noqa: E731
    for ours, want in zip(
        jax.tree.leaves(run(mosaic_gpu.append)), jax.tree.leaves(run(xla.append)), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(want))
