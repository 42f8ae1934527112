"""The inputs that the decode benchmark checks kernels with, on the specification."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode import bench, mosaic_gpu, mosaic_tuning, xla
from pallas_kernels.decode.bench_cases import Case, call, check, encoded, inputs, poisoned


def errors(case: Case) -> tuple[float, float]:
    """The specification's relative error against the dense reference, and the largest output."""
    data, dense = encoded(inputs(case, 1, rotate=False), case)
    data = dataclasses.replace(poisoned(data, case), q=data.q.astype(jnp.float32))
    got = np.asarray(call(case, xla.decode)(data, data.tables[0]), np.float64)[:, 0]
    return float(np.linalg.norm(got - dense) / np.linalg.norm(dense)), float(np.abs(dense).max())


def test_without_pages_the_dense_reference_is_the_specification() -> None:
    error, _ = errors(Case(2, 440, kv_heads=2, head_dim=64, content="outliers"))
    assert error < 1e-5


def test_quantising_is_all_that_parts_them_otherwise() -> None:
    case = Case(1, 2000, kv_heads=1, head_dim=64)
    plain, _ = errors(case)
    outliers, _ = errors(dataclasses.replace(case, content="outliers"))
    assert 0.05 < plain < outliers


def test_a_sharp_query_finds_its_token_on_a_flat_rest() -> None:
    case = Case(1, 2000, kv_heads=1, head_dim=64)
    _, flat = errors(case)
    error, sharp = errors(dataclasses.replace(case, content="sharp"))
    assert error < 0.6
    assert sharp > 3 * flat  # one value counts, not the mean of two thousand


def test_bf16_pages_cannot_be_encoded() -> None:
    case = Case(1, 600, kv_heads=1, head_dim=64, codec="bf16")
    with pytest.raises(ValueError, match="bf16"):
        encoded(inputs(case, rotate=False), case)


@pytest.fixture
def on_the_specification(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark times the specification, since the kernel needs a GPU; returns its factor."""
    factor = {"of": 1.0}

    def decode(*arrays: Any, config: Any = None, **options: Any) -> Any:
        return xla.decode(*arrays, **options) * jnp.asarray(factor["of"], arrays[0].dtype)

    def kernel_times(calls: Iterator[Any]) -> tuple[float, dict[str, float]]:
        jax.block_until_ready([run() for run in calls])
        return 20.0, {"0 decode": 20.0}

    monkeypatch.setattr(mosaic_gpu, "decode", decode)
    monkeypatch.setattr(bench, "kernel_times", kernel_times)
    monkeypatch.setattr(bench, "read_bandwidth", lambda: 4.7)
    monkeypatch.setattr(bench, "CALLS", 2)
    return factor


def test_a_check_passes_the_specification_and_nothing_that_is_half_a_percent_off(
    on_the_specification: Any,
) -> None:
    case = Case(2, 700, kv_heads=1, head_dim=64, codec="waterfill", content="sharp")
    row = check(case)
    assert row["passed"] and row["error"] == 0
    assert 0 < row["bf16_error"] < 3e-3  # BF16 output
    assert row["dense_error"] == row["xla_dense_error"]
    on_the_specification["of"] = 1.005
    assert not check(case)["passed"]


def test_a_run_writes_its_rows_and_the_configurations_it_tuned(
    on_the_specification: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cases = (Case(1, 600, kv_heads=1, head_dim=64), Case(1, 600, 1, 3, 64, codec="bf16"))
    monkeypatch.setattr(bench, "ROWS", cases)
    monkeypatch.setattr(bench, "CHECKS", cases[:1])
    monkeypatch.setattr(mosaic_tuning, "FOLDER", tmp_path)
    mosaic_tuning.entries.cache_clear()
    out = tmp_path / "h200-decode.json"
    arguments = ["bench", "--out", str(out), "--tune", "1"]
    monkeypatch.setattr("sys.argv", arguments)
    assert bench.main() == 0
    report = json.loads(out.read_text())
    assert [row["case"] for row in report["rows"]] == [case.name for case in cases]
    useful = (2 * 128 * (64 // 2 + 8) + 344 * 4 * 64, 600 * 4 * 64)
    for row, want in zip(report["rows"], useful, strict=True):
        assert row["useful_bytes"] == want
        assert row["read_fraction"] == pytest.approx(want / 20.0 / 1e6 / 4.7)
    (entry,) = json.loads(mosaic_tuning.path_of(mosaic_gpu.device_kind()).read_text())
    assert (entry["codec"], entry["segments"], entry["us"]) == ("bf16", 1, 20.0)
    mosaic_tuning.entries.cache_clear()
    on_the_specification["of"] = 1.1
    assert bench.main() == 1  # a failed check: nothing is timed
