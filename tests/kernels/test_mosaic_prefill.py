"""The Mosaic GPU prefill kernels: in interpret mode with race detection here, for real on a GPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from oscar_jax import Codec, PagedKV
from pallas_kernels.prefill import bench, mosaic_gpu, xla
from pallas_kernels.prefill.mosaic_pages import Config
from tests.kernels.cases import Case, Sequences, int32, needs_gpu, sequences, transforms
from tests.kernels.interpreted import report, reports
from tests.kernels.runs import in_one_call

WATERFILL = Codec(key="waterfill", gain=True)


@functools.cache
def cached(case: Case) -> tuple[PagedKV, Sequences]:
    """A poisoned cache with all of the case's tokens in it."""
    data = sequences(case)
    return in_one_call(case, data, "xla").cache, data


def band(case: Case, x: np.ndarray, start: np.ndarray, rows: int) -> jax.Array:
    """BF16 rows [B, K, rows, .] from position start[b] on: NaN before S and past the length."""
    at = start[:, None] + np.arange(rows)
    there = (at >= case.sink) & (at < np.array(case.lengths)[:, None])
    taken = np.take_along_axis(x, np.clip(at, 0, x.shape[1] - 1)[:, :, None, None], 1)
    taken = np.where(there[:, :, None, None], taken, np.nan)
    return jax.device_put(taken.astype(ml_dtypes.bfloat16).swapaxes(1, 2))


def both(
    case: Case, queries: int, new: tuple[int, ...], **options: Any
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(kernel, specification) of the newest new[b] tokens of every row, ``queries`` a call."""
    cache, data = cached(case)
    rotation = transforms(case)
    n, count = np.array(case.lengths), np.array(new)
    q, _, _ = data.window(n - count, queries)
    q = np.where((np.arange(queries) < count[:, None])[..., None, None], q, np.nan)
    start = n - count - cache.windows.band
    rows = cache.windows.band + queries
    arrays = (
        jax.device_put(q),
        band(case, data.k, start, rows),
        band(case, data.v, start, rows),
        cache.layers[0],
        None if rotation is None else rotation.layer(0),
        cache.tables,
    )
    keywords: dict[str, Any] = dict(
        lengths=int32(n),
        q_lens=int32(count),
        windows=cache.windows,
        codec=None if rotation is None else rotation.codecs[0],
        scale=case.head_dim**-0.5,
    )
    got = np.asarray(mosaic_gpu.prefill(*arrays, **keywords, **options))
    want = np.asarray(xla.prefill(*arrays, **keywords))
    assert np.isfinite(got).all()  # padding too
    return [(got[b, :m], want[b, :m]) for b, m in enumerate(new)]


def error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


# name: (case, queries of a call, new tokens of each row, how the pages' kernel is cut)
INTERPRETED: dict[str, tuple[Case, int, tuple[int, ...], Config | None]] = {
    "ragged rows, one without a page, waterfill, pages in two shares": (
        Case(64, 1, 3, (905, 190, 20), WATERFILL, recent=64),
        40,
        (40, 33, 20),
        Config(2, 2, 1),
    ),
    "a group that does not divide a block, keys of 3 bits": (
        Case(128, 1, 5, (900,), Codec().with_bits(key=3), recent=64),
        30,
        (30,),
        Config(1, 1, 2),
    ),
    "values wider than keys, a group of one, a sink of two tiles": (
        Case(64, 1, 1, (700,), Codec(), v_head_dim=128, sink=128),
        150,
        (140,),
        Config(1, 3, 2),
    ),
    "256 channels in halves of pages, waterfill, keys of 3 bits, values of 4": (
        Case(256, 1, 2, (520,), WATERFILL.with_bits(key=3, value=4), recent=64),
        64,
        (64,),
        Config(3, 1, 1),
    ),
    "BF16 pages": (Case(64, 1, 2, (650, 5), None, recent=64), 70, (65, 1), None),
}
# Real pages for a GPU: these, and every pair of widths with both codecs. 64 channels with 256 are
# half a row of a swizzle atom for each thread.
REAL = INTERPRETED | {
    f"{codec.key} keys D{dim} of {key} bits, values D{v_dim or dim} of {value}": (
        Case(dim, 1, group, (900, 450), codec.with_bits(key=key, value=value), v_dim, recent=64),
        100,
        (100, 64),
        None,
    )
    for codec, group in ((Codec(), 3), (WATERFILL, 5))
    for dim, v_dim, key, value in (
        (256, None, 2, 2),
        (128, 64, 2, 2),
        (256, 128, 2, 2),
        (64, 256, 2, 4),
        (64, None, 3, 2),
        (128, None, 3, 4),
        (256, None, 3, 2),
        (128, None, 4, 2),
        (256, None, 4, 4),
    )
}


def interpret() -> None:
    """Every interpreted case's name, error, and whether a race was reported."""
    for name, (case, queries, new, config) in INTERPRETED.items():
        options: dict[str, Any] = dict(
            config=config, interpret=plgpu.InterpretGPUParams(detect_races=True)
        )
        run = functools.partial(both, case, queries, new, **options)
        report(name, lambda run=run: {"error": max(error(*pair) for pair in run())})  # type: ignore[misc]


@pytest.fixture(scope="module")
def interpreted() -> dict[str, dict[str, Any]]:
    return reports("tests.kernels.test_mosaic_prefill")


@pytest.mark.parametrize("name", INTERPRETED)
def test_copies_barriers_and_masks_are_right_and_race_free(
    name: str, interpreted: dict[str, dict[str, Any]]
) -> None:
    """NaN wherever nothing may be read, padding queries included."""
    assert interpreted[name]["error"] < 2e-3
    assert not interpreted[name]["races"]


def test_a_benchmark_case_counts_two_products_over_the_visible_keys() -> None:
    case = bench.Case(2, 3, batch=5, kv_heads=1, group=2, head_dim=64)
    assert case.flops == 5 * 2 * ((4 + 5) * 2 * 64 * 2)  # 4 and 5 keys, 2 operations, 2 products
    assert case.cache.lengths.tolist() == [5] * 5
    assert len({x.name for x in (*bench.ROWS, *bench.CHECKS)}) == len(bench.ROWS + bench.CHECKS)


def test_a_check_passes_the_specification_and_nothing_that_is_half_a_percent_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The kernels' part is played by ``xla``."""
    factor = 1.0
    monkeypatch.setattr(mosaic_gpu, "prefill", lambda *x, **k: factor * xla.prefill(*x, **k))
    case = bench.Case(20, 500, kv_heads=1, group=2, head_dim=64)
    assert bench.check(case)["error"] == 0
    factor = 1.005
    assert not bench.check(case)["passed"]


@needs_gpu
@pytest.mark.parametrize("case", bench.CHECKS, ids=lambda case: case.name)
def test_on_a_gpu_the_kernels_equal_the_specification_and_themselves(
    case: bench.Case, record_property: Callable[[str, object], None]
) -> None:
    """The first case with values of any size and with BF16 queries."""
    kinds = bench.KINDS if case == bench.CHECKS[0] else bench.KINDS[:1]
    rows = [bench.check(case, seed=len(case.name), scale_v=x, dtype=t) for x, t in kinds]
    errors = {f"{row['scale_v']} {row['queries']}": row["error"] for row in rows}
    record_property("error", max(errors.values()))
    assert all(error <= 3e-3 for error in errors.values()), errors
    assert all(row["repeats_equal"] for row in rows)


@needs_gpu
@pytest.mark.parametrize("name", REAL)
def test_on_a_gpu_real_pages_in_poisoned_memory(name: str) -> None:
    case, queries, new, config = REAL[name]
    for got, want in both(case, queries, new, config=config):
        assert error(got, want) <= 3e-3


if __name__ == "__main__":
    interpret()
