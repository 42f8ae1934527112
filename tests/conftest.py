"""Fixtures of more than one part of the suite, and one thread of linear algebra per process."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy  # noqa: F401  # loads the BLAS that is limited below
import pytest
from threadpoolctl import threadpool_limits

from oscar_jax import results
from oscar_jax.fetch import resolve
from oscar_jax.models import Loaded, load
from oscar_jax.models.gguf import GGUFFile

# Matrices here are small, and the processes of pytest-xdist have a core each: OpenBLAS with a
# thread per core takes 22 s of CPU where it needs 6 s (three cases of the kernels' suite).
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # for the processes that tests start
threadpool_limits(1, user_api="blas")


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """SmolLM2's GGUF in the user's cache, fetched on the first run."""
    return resolve("smollm2-135m")


@pytest.fixture(scope="session")
def smollm2_file(smollm2_path: Path) -> GGUFFile:
    """The same file opened, for what needs no weights or other ones than bfloat16."""
    return GGUFFile(smollm2_path)


@pytest.fixture(scope="session")
def smollm2(smollm2_path: Path) -> Loaded:
    """SmolLM2-135M-Instruct in bfloat16, the real model of most tests."""
    return load(smollm2_path)


# Seconds of CPU of the files that take the longest: they start first, so that the processes that
# share the suite end together. Mutations before all, for they forget every compiled program.
LONG_FILES = {
    "kernels/test_mutations.py": 100,
    "engine/test_smollm2.py": 95,
    "kernels/test_attention_suite.py": 75,
    "unit/test_packaging.py": 42,
    "kernels/test_mosaic_prefill.py": 50,
    "engine/test_batching.py": 50,
    "unit/test_gemma3.py": 45,
    "kernels/test_mosaic_decode.py": 42,
    "server/test_serve.py": 40,
    "unit/test_optr.py": 33,
    "kernels/test_mosaic_decode_bench.py": 29,
    "kernels/test_equalities.py": 26,
    "kernels/test_positions.py": 26,
    "kernels/test_mosaic_write.py": 22,
    "kernels/test_gemv.py": 21,
    "unit/test_docs.py": 20,
}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; ``make test`` keeps this order."""
    tests = Path(__file__).parent
    place = lambda item: -LONG_FILES.get(str(item.path.relative_to(tests, walk_up=True)), 0)  # noqa: E731
    items.sort(key=place)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--gpu-report",
        type=Path,
        metavar="FILE.json",
        help="write outcome, seconds and error of every test that ran, with commit and device",
    )


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Iterator[None]:
    """The report that ``-m gpu`` leaves behind (benchmarks/results/h200-tests.json)."""
    yield
    path = session.config.getoption("--gpu-report")
    if path is None or hasattr(session.config, "workerinput"):
        return
    terminal = session.config.pluginmanager.get_plugin("terminalreporter")
    rows: list[dict[str, Any]] = []
    for outcome in ("passed", "failed"):
        for report in terminal.stats.get(outcome, ()):  # type: ignore[union-attr]
            row = {"test": report.nodeid, "outcome": outcome, "seconds": round(report.duration, 2)}
            rows.append(row | dict(report.user_properties))
    results.write(path, command=f"pytest -m gpu --gpu-report {path}", config={}, rows=rows)
