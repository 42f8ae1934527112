"""The benchmark runs all caches on the same content and reports what it measured."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from oscar_jax import KVConfig, bench, bench_kernels
from oscar_jax.accounting import CacheShape
from oscar_jax.bench_cases import Plan, random_like, row_bytes
from oscar_jax.cache import init_layer
from oscar_jax.config import KVDtype
from oscar_jax.engine.steps import IDLE
from oscar_jax.models.loading import Loaded
from pallas_kernels.format import Codec


@dataclasses.dataclass(frozen=True)
class Run:
    """What a run of the command left behind."""

    arguments: str
    report: dict[str, Any]
    stdout: str
    stderr: str


@pytest.fixture(scope="module")
def run(tiny: Loaded, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("bench")
    out, printed, told = folder / "result.json", io.StringIO(), io.StringIO()
    arguments = (
        "engine --model tiny --batches 1 --tokens 600 900 --filled 900 --mem-fraction 0.5 "
        f"--steps 2 --repeats 3 --out {out}"
    )
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(told),
    ):
        patch.setattr(bench, "resolve", lambda *_, **__: folder)
        patch.setattr(bench, "load", lambda *_, **__: tiny)
        patch.setattr(bench.device, "free_bytes", lambda: 12_000_000)
        assert bench.main(arguments.split()) == 0
    return Run(arguments, json.loads(out.read_text()), printed.getvalue(), told.getvalue())


def test_every_cell_has_both_caches_and_their_ratio(run: Run) -> None:
    rows = run.report["rows"]
    assert [(r["dtype"], r["batch"], r["tokens"], r.get("filled", False)) for r in rows] == [
        ("int2", 1, 600, False),
        ("int2", 1, 900, False),
        ("bf16", 1, 600, False),
        ("bf16", 1, 900, False),
        ("int2", 10, 900, True),
        ("bf16", 4, 900, True),
    ]
    shape = CacheShape(layers=2, kv_heads=2, head_dim=64)
    for row in rows:
        assert 0 < row["step_ms"] < 3 * row["mean_step_ms"]
        if "filled" not in row:
            assert abs(row["model_ms"] + row["attention_ms"] - row["step_ms"]) < 1e-9
        assert abs(row["tokens_per_s"] * row["step_ms"] - 1e3 * row["batch"]) < 1e-6
        one = row["cache_bytes"] // row["batch"]
        plain = row["tokens"] * shape.bf16_bytes_per_token
        assert one == (shape.live_bytes(row["tokens"]) if row["dtype"] == "int2" else plain)
        if "filled" in row:  # one sequence more would not fit
            assert (
                row["allocated_bytes"]
                <= 6_000_000
                < row["allocated_bytes"] * (1 + 1 / row["batch"])
            )
    assert rows[0]["model_ms"] == rows[2]["model_ms"]
    first, _, same_memory = run.report["ratios"]
    assert first == {
        "batch": 1,
        "tokens": 600,
        "int2_over_bf16": rows[0]["tokens_per_s"] / rows[2]["tokens_per_s"],
        "best_bf16": "BF16 pages",
    }
    assert same_memory["same_memory"]
    assert same_memory["int2_over_bf16"] == rows[4]["tokens_per_s"] / rows[5]["tokens_per_s"]


def test_the_best_bf16_of_a_cell_is_what_int2_is_compared_with() -> None:
    row = lambda dtype, cache, speed: {  # noqa: E731
        "dtype": dtype,
        "cache": cache,
        "batch": 1,
        "tokens": 9,
        "tokens_per_s": speed,
    }
    rows = [row("int2", "INT2", 30.0), row("bf16", "pages", 5.0), row("bf16", "dense", 10.0)]
    (ratio,) = bench.ratios(rows)
    assert (ratio["int2_over_bf16"], ratio["best_bf16"]) == (3.0, "dense")
    assert bench.ratios(rows[:1]) == []


def test_a_step_decodes_from_the_length_that_it_was_set_to(tiny: Loaded) -> None:
    case = Plan(tiny, "int2", batch=1, room=700, steps=2).compile().fill()
    for tokens in (500, 500, 640):
        case.rewind(tokens)
        emitted = np.asarray(case.dispatch())
        assert emitted.shape == (2, 2)  # the smallest bucket of a CPU has two rows
        assert (emitted[:, 0] >= 0).all()
        assert (emitted[:, 1] == IDLE).all()
        assert case.state.length.tolist() == [tokens + 2, tokens]
    assert len(case.seconds(500, 3)) == 3


def test_pools_are_full_of_sane_numbers_and_bytes_are_what_they_take(tiny: Loaded) -> None:
    dtypes: tuple[KVDtype, ...] = ("int2", "bf16")
    for dtype in dtypes:
        config = KVConfig(dtype=dtype)
        make: Any = dict(kv_heads=2, head_dim=64, pages=5, slots=1, sinks=1)
        codec = Codec() if dtype == "int2" else None
        layer = random_like(init_layer(config, codec=codec, **make), 3)
        assert (np.abs(np.asarray(layer.tail_k, np.float32)) >= 0.5).all()
        assert (np.abs(np.asarray(layer.tail_k, np.float32)) < 1).all()
        if layer.k_meta is not None:
            halves = np.asarray(layer.k_meta).view(np.float16)
            assert ((halves[..., ::2] >= 0.5) & (halves[..., ::2] < 1)).all()
            assert ((halves[..., 1::2] <= -0.75) & (halves[..., 1::2] > -1)).all()
            assert len(np.unique(np.asarray(layer.k_pages))) > 8000
        total = sum(x.nbytes for x in vars(layer).values() if x is not None)
        room = 64 + 5 * 128 + 60  # sink, five pages, a part of a sixth
        assert row_bytes(tiny, dtype, room) == 2 * total


def test_overlapping_kernels_are_counted_once_and_by_what_they_do() -> None:
    named = lambda *rows: [bench_kernels.Kernel(*row) for row in rows]  # noqa: E731
    kernels = named(
        ("linear_kernel_mosaic_gpu_kernel", 0.0, 1.0),
        ("prepare_mosaic_gpu_kernel", 2.0, 1.0),
        ("partials_mosaic_gpu_kernel", 2.5, 2.0),  # begins before the one before has ended
        ("join_mosaic_gpu_kernel", 3.0, 1.0),  # and this ends before that one
        ("rotate_kernel_mosaic_gpu_kernel", 5.0, 0.5),
        ("gemm_fusion_dot_1", 6.0, 3.0),
    )
    assert bench_kernels.alone(kernels) == [1.0, 1.0, 1.5, 0.0, 0.5, 3.0]
    found = bench_kernels.breakdown(kernels, steps=2)
    assert {k: v for k, v in found.items() if k != "kernels"} == dict(
        kernels_ms=3.5, products_ms=2.0, attention_ms=1.25, rest_ms=0.25, launches=3.0
    )
    assert found["kernels"][:2] == [
        {"kernel": "gemm_fusion_dot_1", "launches": 0.5, "us": 3000.0, "ms_per_step": 1.5},
        {
            "kernel": "partials_mosaic_gpu_kernel",
            "launches": 0.5,
            "us": 2000.0,
            "ms_per_step": 0.75,
        },
    ]


def test_the_command_writes_a_result_that_says_how_it_was_made(run: Run) -> None:
    report = run.report
    assert report["command"] == f"{bench.PROGRAM} {run.arguments}"
    assert report["device"]["platform"] == "cpu"
    assert (report["config"]["mem_fraction"], report["config"]["windows"]["recent"]) == (0.5, 256)
    ratio = report["ratios"][2]["int2_over_bf16"]
    assert f"same memory  cached    900  INT2 / BF16 pages tokens/s: {ratio:.2f}" in run.stdout
    assert "compiled in" in run.stderr


def test_a_length_that_does_not_fit_is_refused_before_anything_is_compiled(tiny: Loaded) -> None:
    grid = bench.Engine("tiny", filled=(900,)).grid(gpu=False)
    with pytest.raises(ValueError, match="filled=900: one sequence of INT2 pages does not fit"):
        bench.tasks(grid, tiny, 1000)
    with pytest.raises(ValueError, match=r"mem_fraction=1\.5"):
        bench.Engine("tiny", mem_fraction=1.5)


def test_on_a_gpu_the_grid_is_the_long_one_with_cudnn_on_caches_of_their_length(
    tiny: Loaded,
) -> None:
    grid = bench.Engine("tiny").grid(gpu=True)
    assert grid.tokens == (100_000, 32768, 8192, 2048)
    assert (grid.filled, grid.batches) == ((100_000, 32768, 8192), (1,))
    single, *filled = bench.tasks(grid, tiny, 1 << 36)
    found = [(t.plan.cache, t.lengths) for t in single if t.plan.cache != "none"]
    assert found == [
        ("int2", grid.tokens),
        ("bf16", grid.tokens),
        *(("cudnn", (n,)) for n in grid.tokens),
    ]
    assert [[(t.plan.cache, t.lengths) for t in group] for group in filled] == [
        [(cache, (n,)) for cache in ("int2", "bf16", "cudnn")] for n in grid.filled
    ]


def test_a_gpu_s_rows_have_their_byte_limit_and_what_their_kernels_do(
    tiny: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench.device, "is_gpu", lambda: True)
    monkeypatch.setattr(bench, "_read_bandwidth", lambda: 4.0)
    kernels = [bench_kernels.Kernel("linear_kernel_mosaic_gpu_kernel", 0.0, 3.0)]
    kernels += [bench_kernels.Kernel("partials_mosaic_gpu_kernel", 3.0, 1.0)]
    monkeypatch.setattr(bench_kernels, "trace", lambda dispatch: [dispatch(), kernels][1])
    options = bench.Engine(
        "tiny", tokens=(500,), filled=(), caches=("int2", "bf16"), steps=2, repeats=2
    )
    rows = list(bench.engine(options.grid(gpu=True), tiny))
    assert [row["cache"] for row in rows] == ["INT2 pages", "BF16 pages"]
    weights = sum(x.nbytes for x in jax.tree.leaves(nnx.state(tiny.decoder)))
    for row in rows:
        read = weights - 259 * 96 * 4 + row["cache_bytes"]  # the embedding table is not the head
        assert row["limit_ms"] == pytest.approx(read / 4.0 / 1e9)
        assert row["over_limit"] == row["step_ms"] / row["limit_ms"]
        assert (row["products_ms"], row["attention_ms"], row["rest_ms"]) == (1.5, 0.5, 0.0)
        assert row["gap_ms"] == row["step_ms"] - 2.0
        assert "model_ms" not in row

    def broken(_: object) -> list[bench_kernels.Kernel]:
        raise RuntimeError("no kernel in the profile")

    monkeypatch.setattr(bench_kernels, "trace", broken)
    (row, _) = bench.engine(options.grid(gpu=True), tiny)
    assert "limit_ms" in row and "products_ms" not in row  # what was timed is kept


def test_a_result_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        {"cache": c, "batch": b, "tokens": 100, "step_ms": 2.0, "tokens_per_s": 9.0, "filled": f}
        for c, b, f in (("INT2 pages", 1, False), ("INT2 pages", 7, True), ("BF16", 1, True))
    ]
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"rows": rows, "device": {"kind": "H"}}))
    image = bench.plot(path)
    assert image.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
