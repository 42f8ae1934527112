"""A result file says who made it, on what, how, and every setting that it depends on."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path

import jax
import pytest

from oscar_jax import results

ROOT = Path(__file__).parents[2]


def test_a_result_names_commit_versions_device_command_and_settings(tmp_path: Path) -> None:
    path = tmp_path / "new" / "result.json"
    config, rows = {"sink": 64, "batches": (1, 8)}, [{"dtype": "int2", "tokens_per_s": 1.5}]
    results.write(path, command="python -m x --y", config=config, rows=rows, seconds=2)
    said = json.loads(path.read_text())
    head = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.strip()
    assert said["commit"] in (head, f"{head}+changes")
    assert said["versions"]["jax"] == jax.__version__
    assert said["versions"]["python"] == platform.python_version()
    assert said["versions"]["flax"] == importlib.metadata.version("flax")
    assert said["device"] == {
        "platform": jax.default_backend(),
        "kind": jax.devices()[0].device_kind,
        "count": jax.device_count(),
    }
    assert said["command"] == "python -m x --y"
    assert said["config"] == {"sink": 64, "batches": [1, 8]}
    assert (said["rows"], said["seconds"]) == (rows, 2)


def test_outside_a_checkout_the_commit_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIT_DIR", "/nowhere")
    assert results.provenance()["commit"] == "unknown"


def test_a_step_from_int2_pages_is_no_slower_from_8192_cached_tokens_on() -> None:
    """The published steps on an H200; below that length BF16 pages are, and README says so."""
    report = json.loads((ROOT / "benchmarks/results/h200-engine.json").read_text())
    ratios = {
        (ratio.get("same_memory", False), ratio["tokens"]): ratio["int2_over_bf16"]
        for ratio in report["ratios"]
    }
    assert ratios.keys() == {
        *((False, tokens) for tokens in (2048, 8192, 32768, 100_000)),
        *((True, tokens) for tokens in (8192, 32768, 100_000)),
    }
    slower = {cell for cell, ratio in ratios.items() if ratio < 1}
    assert slower == {(False, 2048)}
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert "One sequence of 8,192 tokens is as fast in both, a shorter one" in readme
