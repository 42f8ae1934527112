"""The inputs that the decode benchmark checks kernels with, on the specification."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode import xla
from pallas_kernels.decode.bench_cases import Case, call, encoded, inputs, poisoned


def errors(case: Case) -> tuple[float, float]:
    """The specification's relative error against the dense reference, and the largest output."""
    data, dense = encoded(inputs(case, 1, rotate=False), case)
    data = dataclasses.replace(poisoned(data, case), q=data.q.astype(jnp.float32))
    got = np.asarray(call(case, xla.decode)(data, data.tables[0]), np.float64)[:, 0]
    return float(np.linalg.norm(got - dense) / np.linalg.norm(dense)), float(np.abs(dense).max())


def test_without_pages_the_dense_reference_is_the_specification() -> None:
    error, _ = errors(Case(2, 440, kv_heads=2, head_dim=64, content="outliers"))
    assert error < 1e-5


def test_quantising_is_all_that_parts_them_otherwise() -> None:
    case = Case(1, 2000, kv_heads=1, head_dim=64)
    plain, _ = errors(case)
    outliers, _ = errors(dataclasses.replace(case, content="outliers"))
    assert 0.05 < plain < outliers


def test_a_sharp_query_finds_its_token_on_a_flat_rest() -> None:
    case = Case(1, 2000, kv_heads=1, head_dim=64)
    _, flat = errors(case)
    error, sharp = errors(dataclasses.replace(case, content="sharp"))
    assert error < 0.6
    assert sharp > 3 * flat  # one value counts, not the mean of two thousand


def test_bf16_pages_cannot_be_encoded() -> None:
    case = Case(1, 600, kv_heads=1, head_dim=64, codec="bf16")
    with pytest.raises(ValueError, match="bf16"):
        encoded(inputs(case, rotate=False), case)
