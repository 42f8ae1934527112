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
# Processes that share a GPU: each would take three quarters of the memory that it finds free.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
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


# The files that take the longest (95 to 20 seconds of CPU), in the order in which they start, so
# that processes which share the suite end together. Mutations are before all of them, for they
# forget every compiled program.
LONG_FILES = (
    "kernels/test_mutations.py",
    "engine/test_smollm2.py",
    "kernels/test_attention_suite.py",
    "engine/test_batching.py",
    "kernels/test_mosaic_prefill.py",
    "unit/test_docs.py",
    "kernels/test_mosaic_decode.py",
    "unit/test_packaging.py",
    "unit/test_evaluation_scorer.py",
    "unit/test_optr.py",
    "kernels/test_mosaic_decode_bench.py",
    "server/test_serve.py",
    "kernels/test_equalities.py",
    "kernels/test_positions.py",
    "kernels/test_mosaic_write.py",
    "kernels/test_gemv.py",
    "unit/test_gemma3.py",
)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; ``make test`` keeps this order."""
    place = {Path(__file__).parent / name: i for i, name in enumerate(LONG_FILES)}
    missing = [str(path) for path in place if not path.exists()]
    if missing:
        raise pytest.UsageError(f"LONG_FILES names files that are not there: {missing}")
    items.sort(key=lambda item: place.get(item.path, len(place)))


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
