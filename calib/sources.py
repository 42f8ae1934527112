"""Sources of standard-library modules: files that are read, not imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path


def module_source(name: str) -> str:
    """The source file of a standard-library module.

    Raises:
        ValueError: this Python has none (a frozen or stripped installation).
    """
    spec = importlib.util.find_spec(name)
    origin = Path(spec.origin) if spec is not None and spec.origin else None
    if origin is None or origin.suffix != ".py" or not origin.is_file():
        raise ValueError(f"{name}: this Python installation has no source file of it; pass --data")
    return origin.read_text(encoding="utf-8")
