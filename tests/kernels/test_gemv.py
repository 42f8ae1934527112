"""The product kernel: its register programs on NumPy, its copies and loops in interpret mode."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.gemv import between, counters, linear, mosaic_gpu, xla
from pallas_kernels.gemv import mosaic_program as programs
from pallas_kernels.gemv.mosaic_gpu import Config
from pallas_kernels.gemv.mosaic_program import UNIT, Shape
from tests.kernels.cases import needs_gpu
from tests.kernels.warpgroup import Warpgroup

CASES = [  # rows, outputs, columns, norm, residual, gated
    (1, 96, 1024, True, False, False),
    (3, 64, 1024, False, True, False),
    (2, 48, 512, True, False, True),
    (8, 32, 512, True, False, False),
]
ids = lambda case: "-".join(map(str, case)) if isinstance(case, tuple) else None  # noqa: E731


def inputs(case: tuple[Any, ...], seed: int = 0) -> tuple[Any, Any, dict[str, Any]]:
    """(x, weight, keywords) with numbers of every size; x is BF16 where it is not normed."""
    rows, outs, width, normed, residual, gated = case
    rng = np.random.default_rng(seed)
    draw = lambda *s: np.asarray(rng.normal(size=s), np.float32)  # noqa: E731
    x = draw(rows, width) * np.exp(draw(rows, 1))
    weight = bf16(draw(outs * (1 + gated), width) / width**0.5)
    keywords: dict[str, Any] = dict(gated=gated)
    if normed:
        keywords |= dict(gain=bf16(1 + 0.3 * draw(width)), eps=1e-2)
    if residual:
        keywords["residual"] = jax.device_put(draw(rows, outs))
    return jax.device_put(x) if normed else bf16(x), weight, keywords


def bf16(x: np.ndarray) -> jax.Array:
    return jax.device_put(x.astype(ml_dtypes.bfloat16))


def in_float64(x: Any, weight: Any, keywords: dict[str, Any]) -> np.ndarray:
    """The formula of ``linear`` on the rounded operands."""
    wide = lambda v: np.asarray(v).astype(np.float64)  # noqa: E731
    x, weight = wide(x), wide(weight)
    if "gain" in keywords:
        x = wide(keywords["gain"]) * x / np.sqrt((x**2).mean(-1, keepdims=True) + keywords["eps"])
        x = x.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float64)
    y = x @ weight.T
    if keywords["gated"]:
        gate, up = np.split(y, 2, -1)
        return gate / (1 + np.exp(-gate)) * up
    return y + wide(keywords["residual"]) if "residual" in keywords else y


@pytest.mark.parametrize("case", CASES, ids=ids)
def test_the_specification_is_the_formula(case: tuple[Any, ...]) -> None:
    x, weight, keywords = inputs(case)
    got = np.asarray(linear(x, weight, **keywords)).astype(np.float32)
    assert relative(got, in_float64(x, weight, keywords)) < (4e-3 if keywords["gated"] else 2e-4)


@pytest.mark.parametrize(
    ("case", "config"),
    [(case, (Config(512, 2, 3), Config(256, 3, 200))[i % 2]) for i, case in enumerate(CASES)],
    ids=str,
)
def test_copies_and_loops_are_right_and_race_free(
    case: tuple[Any, ...], config: Config, capfd: pytest.CaptureFixture[str]
) -> None:
    x, weight, keywords = inputs(case)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    got = mosaic_gpu.linear(x, weight, **keywords, config=config, interpret=interpret)
    want = xla.linear(x, weight, **keywords)
    assert got.dtype == want.dtype
    assert relative(np.asarray(got, np.float32), np.asarray(want, np.float32)) < 2e-3
    assert "RACE" not in capfd.readouterr().out.upper()


def relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def memory(x: Any) -> np.ndarray:
    return np.array(x).view(np.uint8).reshape(-1)


@pytest.mark.parametrize("columns", [256, 512])
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_the_register_programs_are_the_formula(case: tuple[Any, ...], columns: int) -> None:
    rows, outs, width, normed, residual, gated = case
    x, weight, keywords = inputs(case, seed=1)
    shape = Shape(rows, width, columns, outs, gated, keywords["eps"] if normed else None, residual)
    ops = Warpgroup()
    held = np.zeros(rows * width * 2, np.uint8)
    gain = memory(keywords["gain"]) if normed else None
    programs.prologue(ops, shape, memory(x), gain, np.zeros(16, np.uint8), held)
    added = memory(keywords["residual"]) if residual else None
    out = np.zeros((rows, outs), ml_dtypes.bfloat16 if gated else np.float32)
    stored = out.view(np.uint8).reshape(-1)
    half = UNIT // 2
    for unit in range(outs // (half if gated else UNIT)):
        first = unit * (half if gated else UNIT)
        own = np.arange(first, first + UNIT)
        if gated:
            own = np.r_[first : first + half, outs + first : outs + first + half]
        state = [ops.const_f(0.0)] * programs.STATE
        for column in range(0, width, columns):
            tile = np.asarray(weight)[own, column : column + columns]
            state = programs.tile(ops, shape, memory(tile), held, ops.const_i(column), state)
        scratch = np.full(programs.SUMS, 0xFF, np.uint8)  # NaN
        programs.finish(ops, shape, ops.const_i(unit), state, scratch, added, stored)
    want = in_float64(x, weight, keywords)
    assert relative(out.astype(np.float64), want) < (4e-3 if gated else 2e-4)


def test_what_the_kernel_does_not_serve_is_named() -> None:
    def reason(rows: int, outs: int, width: int, dtype: Any = jnp.bfloat16) -> str | None:
        shape: Any = jax.ShapeDtypeStruct
        weight = shape((outs, width), dtype)
        config = Config.of(rows, (width,), 132)
        return mosaic_gpu.unsupported(rows, [weight], config)

    assert reason(8, 151936, 4096) is None
    assert reason(9, 4096, 4096) == "9 rows, it serves 1 to 8"
    assert reason(1, 4096, 576) == "576 columns, it needs a multiple of 512"
    assert reason(1, 4100, 4096) == "4100 outputs, it needs a multiple of 16"
    assert reason(8, 4096, 12288) == "8 rows of 12288, too large for shared memory"
    assert reason(1, 4096, 4096, jnp.float32) == "weights in float32, it multiplies bfloat16"
    x, weight, keywords = inputs((1, 64, 576, True, False, False))
    with pytest.raises(NotImplementedError, match=r"576 columns.* use 'xla'"):
        linear(x, weight, **keywords, implementation="mosaic_gpu")
    with pytest.raises(NotImplementedError, match="compute capability 9"):
        linear(*inputs(CASES[0])[:2], implementation="mosaic_gpu")
    with pytest.raises(ValueError, match="x has 512 columns, the weight 576"):
        linear(x[:, :512], weight)
    with pytest.raises(ValueError, match="gated=True with a weight of 64 rows and residual given"):
        linear(x, weight, gated=True, residual=jnp.zeros((1, 64)))


def chain(rows: int, width: int, size: int, inner: int, after: int | None) -> tuple[Any, ...]:
    """Arguments of ``between``."""
    rng = np.random.default_rng(3)
    draw = lambda *s: np.asarray(rng.normal(size=s), np.float32)  # noqa: E731
    weight = lambda o, i: bf16(draw(o, i) / i**0.5)  # noqa: E731
    gain = lambda: bf16(1 + 0.3 * draw(size))  # noqa: E731
    return (
        bf16(draw(rows, width)),
        jax.device_put(draw(rows, size)),
        weight(size, width),
        gain(),
        weight(2 * inner, size),
        weight(size, inner),
        counters(),
        *(() if after is None else (gain(), weight(after, size))),
    )


@pytest.mark.parametrize("sizes", [(1, 256, 512, 768, 48), (2, 256, 256, 256, None)], ids=str)
def test_a_chain_is_its_products_one_after_the_other(
    sizes: tuple[Any, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    """With one block: interpret mode runs blocks in turn, so they cannot wait for each other."""
    arrays = chain(*sizes)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    config = Config(256, 2, 1)
    got = mosaic_gpu.between(*arrays, eps=1e-6, config=config, interpret=interpret)
    want = between(*arrays, eps=1e-6)
    assert (got[1] is None) == (want[1] is None) == (sizes[-1] is None)
    for ours, specified in zip(got[:2], want[:2], strict=True):
        if ours is None or specified is None:
            continue
        assert relative(np.asarray(ours), np.asarray(specified)) < 2e-3
    assert "RACE" not in capfd.readouterr().out.upper()


@needs_gpu
@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        (1, 6144, 2048, True, False, False),  # three units of the first blocks, two of the last
        (1, 1024, 12288, False, True, False),
        (2, 3072, 4096, True, False, True),
        (8, 1024, 4096, True, False, False),
        (4, 20000, 1024, True, False, False),
    ],
    ids=ids,
)
def test_on_a_gpu_the_kernel_equals_the_specification_and_itself(case: tuple[Any, ...]) -> None:
    x, weight, keywords = inputs(case)
    run = jax.jit(lambda x, weight: mosaic_gpu.linear(x, weight, **keywords))
    outs = [np.asarray(run(x, weight)).astype(np.float32) for _ in range(10)]
    plain = jax.jit(lambda x, weight: xla.linear(x, weight, **keywords))
    want = np.asarray(plain(x, weight)).astype(np.float32)
    assert relative(outs[0], want) < (4e-3 if keywords["gated"] else 2e-4)
    assert all((out == outs[0]).all() for out in outs)


@needs_gpu
@pytest.mark.parametrize(
    "sizes",
    [(1, 1024, 2048, 6144, 3072), (2, 512, 2048, 3072, 64), (4, 1024, 2048, 3072, None)],
    ids=str,
)
def test_on_a_gpu_the_chain_equals_the_specification_and_itself(sizes: tuple[Any, ...]) -> None:
    """Twelve in a row, of different inputs in turn: nothing of the one before is taken for new."""
    arrays = chain(*sizes)
    flipped, doubled = np.flip(np.asarray(arrays[0])), -2 * np.asarray(arrays[1])
    other = (jax.device_put(flipped.copy()), jax.device_put(doubled), *arrays[2:])

    def twelve(op: Any, *arrays: Any) -> list[Any]:
        answer, x, *weights = arrays
        held, outs = weights.pop(4), []
        for i in range(12):
            scale = jnp.float32(1 + i % 3)
            x, y, held = op(
                (answer * scale).astype(jnp.bfloat16), x, *weights[:4], held, *weights[4:]
            )
            outs += [x] if y is None else [x, y]
        return [*outs, held]

    kernel = jax.jit(functools.partial(twelve, functools.partial(mosaic_gpu.between, eps=1e-6)))
    plain = jax.jit(functools.partial(twelve, functools.partial(xla.between, eps=1e-6)))
    firsts = [kernel(*arrays), kernel(*other)]
    for got, want in zip(firsts, (plain(*arrays), plain(*other)), strict=True):
        assert (np.asarray(got[-1]) == 0).all()
        for ours, specified in zip(got[:-1], want[:-1], strict=True):
            assert relative(np.asarray(ours), np.asarray(specified)) < 1e-2
    for i in range(50):
        for got, again in zip(firsts[i % 2], kernel(*(arrays, other)[i % 2]), strict=True):
            np.testing.assert_array_equal(np.asarray(got), np.asarray(again))
