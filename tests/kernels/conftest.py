"""The tolerance of the kernel tests, and the errors that the GPU report shows."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kernels import (
    checks,
    no_autotuning,  # noqa: F401
)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """``checks.tolerance`` for the test's implementation; its largest error is a property."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    checks.tolerance = checks.TOLERANCES[parameters.get("implementation", "xla")]
    checks.measured.clear()
    try:
        yield
    finally:
        if checks.measured:
            item.user_properties.append(("error", max(checks.measured)))
