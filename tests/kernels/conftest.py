"""Order of the kernel tests: mutations last, because they forget every compiled program."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name == "test_mutations.py")
