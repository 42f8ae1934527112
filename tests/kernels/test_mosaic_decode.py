"""The Mosaic GPU decode kernel: in interpret mode with race detection here, for real on a GPU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from oscar_jax import Codec, PagedKV
from pallas_kernels.decode import bench, mosaic_gpu, xla
from pallas_kernels.decode.mosaic_gpu import Config
from pallas_kernels.decode.mosaic_stream import StreamConfig
from tests.kernels.cases import Case, int32, needs_gpu, sequences, transforms
from tests.kernels.runs import in_one_call

WATERFILL = Codec(key="waterfill", gain=True)
# 910 tokens: 6 pages, so that stages are used again and splits are uneven; 190: no page yet.
RAGGED = Case(64, 2, 3, (910, 190, 20), WATERFILL, recent=64)
BF16 = dataclasses.replace(RAGGED, codec=None)
WIDE = Case(256, 1, 7, (3000, 1), Codec())
FOUR_BITS = Case(64, 1, 2, (460,), WATERFILL.with_bits(key=4, value=4), recent=64)
THREE_BITS = dataclasses.replace(FOUR_BITS, codec=Codec().with_bits(key=3, value=4))
MIXED = [
    Case(128, 1, group, (700,), codec.with_bits(key=key, value=value), recent=64)
    for group, codec, key, value in (
        (4, Codec(), 3, 2),
        (5, WATERFILL, 3, 2),
        (4, Codec(), 4, 2),
        (5, WATERFILL, 4, 2),
        (4, Codec(), 2, 4),
        (5, WATERFILL, 2, 4),
    )
]


@functools.cache
def cached(case: Case) -> tuple[PagedKV, np.ndarray]:
    """A poisoned cache with the case's tokens in it, and the newest queries [B, 1, N, D]."""
    data = sequences(case)
    last = np.array(case.lengths) - 1
    return in_one_call(case, data, "xla").cache, data.q[np.arange(len(last)), last][:, None]


def both(
    case: Case, config: Config | StreamConfig | None, **options: Any
) -> tuple[np.ndarray, np.ndarray]:
    """(kernel, specification) for the newest query of every row."""
    cache, q = cached(case)
    rotation = transforms(case)
    n = int32(case.lengths)
    keywords: dict[str, Any] = dict(
        lengths=n,
        q_lens=int32([1] * len(case.lengths)),
        windows=cache.windows,
        codec=case.codec or Codec(),
        scale=case.head_dim**-0.5,
    )
    arrays = (jax.device_put(q), cache.layers[0], rotation and rotation.layer(0), cache.tables)
    got = mosaic_gpu.decode(*arrays, **keywords, config=config, **options)
    return np.asarray(got), np.asarray(xla.decode(*arrays, **keywords))


def error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize(
    ("case", "config"),
    [
        (RAGGED, Config(1, 2, 2, 2)),
        (RAGGED, Config(4, 1, 2, 2)),
        (Case(128, 1, 9, (900, 450), Codec(), recent=64), Config(1, 3, 1, 1)),
        (Case(128, 1, 1, (700,), Codec(), v_head_dim=64, sink=128, recent=64), Config(1, 1, 4, 4)),
        (THREE_BITS, Config(1, 1, 2, 2)),
        (BF16, StreamConfig(3, 2)),
    ],
    ids=str,
)
def test_copies_barriers_and_masks_are_right_and_race_free(
    case: Case, config: Config | StreamConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    got, want = both(case, config, interpret=plgpu.InterpretGPUParams(detect_races=True))
    assert error(got, want) < 1e-3  # of float16 queries
    assert "RACE" not in capfd.readouterr().out.upper()


@needs_gpu
@pytest.mark.parametrize("case", bench.CHECKS, ids=lambda case: case.name)
def test_on_a_gpu_the_kernel_equals_the_specification_and_itself(
    case: bench.Case, record_property: Callable[[str, object], None]
) -> None:
    """With values of any size; one test, since the programs are the same."""
    rows = [bench.check(case, scale_v=x, seed=int(x * 100)) for x in (0.01, 1.0, 100.0)]
    errors = {row["scale_v"]: (row["error"], row["bf16_error"]) for row in rows}
    record_property("error", max(error for error, _ in errors.values()))
    record_property("bf16_error", max(error for _, error in errors.values()))
    assert all(max(both) <= 3e-3 for both in errors.values()), errors
    assert [row["repeats_equal"] for row in rows] == [True] * 3
    assert all(row["passed"] for row in rows), rows


@needs_gpu
@pytest.mark.parametrize(
    ("case", "config"),
    [
        *((case, None) for case in (RAGGED, BF16, WIDE, FOUR_BITS, THREE_BITS, *MIXED)),
        (RAGGED, Config(2, 2, 4, 4)),
        (WIDE, Config(3, 1, 3, 2)),
        (BF16, StreamConfig(5, 2)),
    ],
    ids=str,
)
def test_on_a_gpu_real_pages_in_poisoned_memory(
    case: Case, config: Config | StreamConfig | None
) -> None:
    got, want = both(case, config)
    assert error(got, want) <= 3e-3
