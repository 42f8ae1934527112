"""Interpreted kernels of several warpgroups, in a process with a thread for each of them.

They wait for one another, and a runtime with two threads, as on a machine with two cores, would
wait forever.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

THREADS = 8


def report(name: str, run: Callable[[], dict[str, Any]]) -> None:
    """Print what ``run`` finds, and whether a race was reported meanwhile, as a line of JSON."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        found = run()
    races = "RACE" in printed.getvalue().upper()
    print(json.dumps({"name": name, **found, "races": races}), flush=True)


def reports(module: str) -> dict[str, dict[str, Any]]:
    """What ``python -m module`` reports, by name."""
    run = subprocess.run(
        [sys.executable, "-m", module],
        env={**os.environ, "NPROC": str(THREADS), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]
    return {row["name"]: row for row in rows}
