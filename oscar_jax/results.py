"""Benchmark and evaluation results as JSON files that say where they come from."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("jax", "jaxlib", "flax", "numpy")
FOLDER = Path("benchmarks/results")


def provenance() -> dict[str, Any]:
    """Commit, versions, device and machine of this process."""
    device = jax.devices()[0]
    return {
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in PACKAGES},
        },
        "device": {
            "platform": device.platform,
            "kind": device.device_kind,
            "count": jax.device_count(),
        },
        "machine": {"cpu": _cpu_model(), "cores": os.cpu_count(), "load": os.getloadavg()[0]},
    }


def write(
    path: Path,
    *,
    command: str,
    config: Mapping[str, Any],
    rows: Sequence[Mapping[str, Any]],
    **more: Any,
) -> None:
    """Write one result: who made it (``provenance``), how (command, config), and what (rows)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "command": command,
        **provenance(),
        "config": dict(config),
        "rows": list(rows),
        **more,
    }
    path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def _commit() -> str:
    """The checkout's commit, with "+changes" if files other than results differ from it; "unknown"
    outside git."""
    git = ("git", "-C", str(Path(__file__).parent))
    try:
        commit = subprocess.run(
            [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
        ).stdout.strip()
        changed = subprocess.run(
            [*git, "status", "--porcelain", "--untracked-files=no", ":/", ":!/benchmarks/results"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit + ("+changes" if changed else "")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
