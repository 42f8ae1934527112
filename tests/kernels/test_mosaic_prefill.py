"""The Mosaic GPU prefill kernels: in interpret mode with race detection here, for real on a GPU."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from oscar_jax import Codec, PagedKV
from pallas_kernels.prefill import mosaic_gpu, xla
from pallas_kernels.prefill.mosaic_pages import Config
from tests.kernels.cases import Case, Sequences, sequences, transforms
from tests.kernels.runs import in_one_call

WATERFILL = Codec(key="waterfill", gain=True)


@functools.cache
def cached(case: Case) -> tuple[PagedKV, Sequences]:
    """A poisoned cache with all of the case's tokens in it."""
    data = sequences(case)
    return in_one_call(case, data, "xla").cache, data


def band(case: Case, x: np.ndarray, start: np.ndarray, rows: int) -> jax.Array:
    """BF16 rows [B, K, rows, .] from position start[b] on: NaN before S and past the length."""
    at = start[:, None] + np.arange(rows)
    there = (at >= case.sink) & (at < np.array(case.lengths)[:, None])
    taken = np.take_along_axis(x, np.clip(at, 0, x.shape[1] - 1)[:, :, None, None], 1)
    taken = np.where(there[:, :, None, None], taken, np.nan)
    return jnp.asarray(taken, jnp.bfloat16).swapaxes(1, 2)


def both(
    case: Case, queries: int, new: tuple[int, ...], **options: Any
) -> list[tuple[np.ndarray, np.ndarray]]:
    """(kernel, specification) of the newest new[b] tokens of every row, in a call of ``queries``."""
    cache, data = cached(case)
    rotation = transforms(case)
    n, count = np.array(case.lengths), np.array(new)
    q, _, _ = data.window(n - count, queries)
    q = np.where((np.arange(queries) < count[:, None])[..., None, None], q, np.nan)
    start = n - count - cache.windows.band
    rows = cache.windows.band + queries
    arrays = (
        jnp.asarray(q),
        band(case, data.k, start, rows),
        band(case, data.v, start, rows),
        cache.layers[0],
        None if rotation is None else rotation.layer(0),
        cache.tables,
    )
    keywords: dict[str, Any] = dict(
        lengths=jnp.asarray(n),
        q_lens=jnp.asarray(count),
        windows=cache.windows,
        codec=Codec() if rotation is None else rotation.codec,
        scale=case.head_dim**-0.5,
    )
    got = np.asarray(mosaic_gpu.prefill(*arrays, **keywords, **options))
    want = np.asarray(xla.prefill(*arrays, **keywords))
    assert np.isfinite(got).all()  # padding too
    return [(got[b, :m], want[b, :m]) for b, m in enumerate(new)]


def error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-30))


@pytest.mark.parametrize(
    ("case", "queries", "new", "config"),
    [
        (Case(64, 2, 3, (905, 190, 20), WATERFILL, recent=64), 60, (60, 33, 20), Config(2, 2, 1)),
        (Case(128, 1, 5, (900,), Codec(), recent=64), 30, (30,), Config(1, 1, 2)),
        (Case(64, 1, 1, (700,), Codec(), v_head_dim=128, sink=128), 150, (140,), Config(1, 3, 2)),
        (Case(256, 1, 2, (520,), WATERFILL, recent=64), 64, (64,), Config(3, 1, 1)),
        (Case(64, 1, 2, (650, 5), None, recent=64), 70, (65, 1), None),
    ],
    ids=str,
)
def test_copies_barriers_and_masks_are_right_and_race_free(
    case: Case,
    queries: int,
    new: tuple[int, ...],
    config: Config | None,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Interpret mode: ragged rows, rows without a page, NaN wherever nothing may be read."""
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    for got, want in both(case, queries, new, config=config, interpret=interpret):
        assert error(got, want) < 3e-3
    assert "RACE" not in capfd.readouterr().out.upper()
