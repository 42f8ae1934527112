"""The Mosaic GPU write kernel: in interpret mode with race detection here, for real on a GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.format import PAGE, Codec
from pallas_kernels.layout import LayerKV, PageJobs, Transform
from pallas_kernels.write import mosaic_gpu, xla
from pallas_kernels.write.bench_cases import CHECKS, Case, check, steps_allowed
from pallas_kernels.write.mosaic_gpu import Config
from tests.kernels.cases import needs_gpu
from tests.kernels.interpreted import report, reports

WATERFILL = Codec(key="waterfill", gain=True)
POOLS = ("k_pages", "v_pages", "k_meta", "v_meta")


def inputs(
    head_dim: int, v_head_dim: int, bits: tuple[int, int], pages: int, rows: int, length: int
) -> tuple[LayerKV, Any, Any, Transform]:
    """A pool that holds no zeros, sources with a channel far larger than the rest, transforms."""
    rng, kv_heads = np.random.default_rng(head_dim + pages), 2
    dims = head_dim, v_head_dim
    full = lambda *shape, dtype: jax.device_put(np.full(shape, 0x5A5A, dtype))  # noqa: E731
    bf16 = lambda x: jax.device_put(x.astype(ml_dtypes.bfloat16))  # noqa: E731
    normal = lambda *shape: np.asarray(rng.normal(size=shape))  # noqa: E731
    layer = LayerKV(
        full(pages, kv_heads, PAGE, head_dim * bits[0] // 16, dtype=np.uint16),
        full(pages, kv_heads, v_head_dim, PAGE * bits[1] // 16, dtype=np.uint16),
        *(full(pages, kv_heads, PAGE, dtype=np.uint32) for _ in dims),
        *(bf16(normal(1, kv_heads, 64, d)) for d in dims),
        *(bf16(normal(1, kv_heads, 400, d)) for d in dims),
    )
    k, v = (bf16(normal(rows, kv_heads, length, d) * large_channel(d)) for d in dims)
    turns = [np.linalg.qr(normal(kv_heads, d, d))[0] for d in dims]
    mu = normal(kv_heads, head_dim)
    arrays = (turns[0], turns[0], turns[1], turns[1], mu)
    return layer, k, v, Transform(*(jax.device_put(x.astype(np.float32)) for x in arrays))


def large_channel(dim: int) -> np.ndarray:
    """Factors [D] that make one channel far larger than the rest."""
    return np.where(np.arange(dim) == 5, 20, 1)


def jobs(pages: list[int], rows: list[int], offsets: list[int]) -> PageJobs:
    row, offset, page = (jax.device_put(np.array(x, np.int32)) for x in (rows, offsets, pages))
    return PageJobs(row, offset, page)


RING = jobs([3, -1, 0, 5, -1], [1, 0, 0, 1, 1], [330, 7, 12, 0, 0])


# name: (head dims, codec, how the kernel is cut, jobs)
INTERPRETED: dict[str, tuple[tuple[int, int], Codec, Config, PageJobs]] = {
    "one warpgroup": ((64, 64), Codec(), Config(1, 1, 1), RING),
    "keys of 3 bits, more channels of 4-bit values, two warpgroups": (
        (64, 128),
        WATERFILL.with_bits(key=3, value=4),
        Config(2, 1, 2),
        RING,
    ),
    "three warpgroups, and a block of values without a page": (
        (128, 64),
        Codec(gain=True),
        Config(1, 3, 3),
        RING,
    ),
    "streamed keys of which a warpgroup has none": (
        (256, 64),
        WATERFILL,
        Config(1, 1, 2),
        jobs([2, 4], [1, 0], [330, 12]),
    ),
}


def interpret() -> None:
    """Every interpreted case: words that differ in each pool, counts, and races."""
    for name, (dims, codec, config, plan) in INTERPRETED.items():
        arrays = (*inputs(*dims, codec.bits, pages=7, rows=2, length=389), plan)

        def run(arrays: Any = arrays, codec: Codec = codec, config: Config = config) -> Any:
            options = plgpu.InterpretGPUParams(detect_races=True)
            got, counts = mosaic_gpu.write(*arrays, codec=codec, config=config, interpret=options)
            want, right = xla.write(*arrays, codec=codec)
            apart = {x: np.asarray(getattr(got, x)) != np.asarray(getattr(want, x)) for x in POOLS}
            shares = {x: float(apart[x].mean()) for x in POOLS}
            return {"apart": shares, "counts": counts.tolist(), "right": right.tolist()}

        report(name, run)


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, Any]]:
    return reports("tests.kernels.test_mosaic_write")


@pytest.mark.parametrize("name", INTERPRETED)
def test_blocks_jobs_and_barriers_are_right_and_race_free(
    name: str, interpreted: dict[str, dict[str, Any]]
) -> None:
    row = interpreted[name]
    assert max(row["apart"].values()) <= 2e-3  # X is a sum of two float16 numbers
    assert row["counts"] == row["right"]
    assert not row["races"]


def test_a_check_passes_the_specification_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's part is played by ``xla``, then by one that encodes other rows."""
    moved = 0

    def write(layer: Any, k: Any, v: Any, transform: Any, jobs: Any, **options: Any) -> Any:
        del options["config"]
        jobs = dataclasses.replace(jobs, offset=jobs.offset + moved)
        return xla.write(layer, k, v, transform, jobs, **options)

    monkeypatch.setattr(mosaic_gpu, "write", write)
    case = Case(1, 2, 1, 64, 64, gain=True, data="outliers")
    row = check(case, with_xla=False)
    assert row["passed"] and row["codes_share"] < 1e-3
    moved = 1
    assert not check(case, with_xla=False)["passed"]


@needs_gpu
@pytest.mark.parametrize("case", CHECKS, ids=lambda case: case.name)
def test_on_a_gpu_pages_are_those_of_exact_arithmetic_to_one_code_and_one_step(case: Case) -> None:
    row = check(case, with_xla=False)
    assert row["codes_most"] <= 1
    assert row["resolved_steps_most"] <= steps_allowed(case)
    assert row["resolved_value_steps_most"] <= 1
    assert row["repeats_equal"]
    assert row["passed"]


if __name__ == "__main__":
    interpret()
