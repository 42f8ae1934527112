"""What is set for the GPU before it starts, and what memory is said to be free."""

from __future__ import annotations

import pytest

from oscar_jax import device


def test_a_gpu_s_memory_is_the_server_s_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XLA_PYTHON_CLIENT_MEM_FRACTION", raising=False)
    device.prepare()
    assert device.os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.92"
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    device.prepare()
    assert device.os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] == "0.5"


@pytest.mark.skipif(device.is_gpu(), reason="a GPU reports its own memory")
def test_on_a_cpu_free_memory_is_the_host_s() -> None:
    assert 1 << 20 < device.free_bytes() < 1 << 50
