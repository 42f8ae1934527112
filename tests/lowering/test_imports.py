"""Every module imports on whatever jax is installed: CI runs this on the newest one too."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MODULES = [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for package in ("pallas_kernels", "oscar_jax", "calib")
    for path in sorted((ROOT / package).glob("**/*.py"))
]


@pytest.mark.parametrize("module", MODULES)
def test_module_imports(module: str) -> None:
    assert importlib.import_module(module).__name__ == module
