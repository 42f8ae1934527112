"""Fixtures of more than one part of the suite."""

from __future__ import annotations

from pathlib import Path

import pytest

from oscar_jax.fetch import resolve
from oscar_jax.models import Loaded, load
from oscar_jax.models.gguf import GGUFFile


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
    """SmolLM2-135M-Instruct in bfloat16, the one real model of the tests."""
    return load(smollm2_path)
