"""The examples run, and print numbers that are right."""

from __future__ import annotations

import pytest

from examples import custom_model
from oscar_jax.accounting import CacheShape


def test_a_custom_model_calibrates_itself_and_decodes_from_two_bits(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """2,096 tokens: 13 pages in 2.5 bits and 432 tokens in BF16."""
    found = custom_model.main()
    assert found["compression"] == 2096 / (13 * 128 * 2.5 / 16 + 432)
    assert 0.01 < found["oscar+centre"] < 0.08
    assert found["oscar+centre"] < 0.7 * found["hadamard"]
    shape = CacheShape(layers=2, kv_heads=2, head_dim=64)
    printed = capsys.readouterr().out
    assert f"2096 tokens take {shape.live_bytes(2096):,} bytes, 3.03 times less" in printed
    assert "2.5 bits per element" in printed
