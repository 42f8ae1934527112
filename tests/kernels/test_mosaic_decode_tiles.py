"""Tiles of BF16 tokens on a warpgroup emulated in NumPy: copies, masks and softmax."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.decode import mosaic_state
from pallas_kernels.decode import mosaic_tiles as tiles
from pallas_kernels.decode.mosaic_shape import HEADS, LOWEST, WARPS
from pallas_kernels.decode.mosaic_state import State
from pallas_kernels.decode.mosaic_tiles import ROWS, Tokens
from pallas_kernels.format import PAGE
from pallas_kernels.layout import Windows
from tests.kernels.warpgroup import Warpgroup

SCALE = 0.1
KV_HEADS, HEAD, HEAD_COUNT = 2, 1, 5  # the KV head that is read, and its query heads


def memory(x: Any) -> np.ndarray:
    return np.ascontiguousarray(x).view(np.uint8).reshape(-1).copy()


def scalar(value: int) -> np.ndarray:
    return np.full(128, value, np.uint32)


def attend(logits: np.ndarray, values: np.ndarray) -> np.ndarray:
    """softmax_2(logits [n, heads]) values [n, Dv]: [Dv, heads]."""
    weights = np.exp2(logits - logits.max(0))
    return (values.T @ weights) / weights.sum(0)


def page_count(windows: Windows, length: int) -> int:
    return max(0, (length - windows.sink - windows.recent) // PAGE)


class Row:
    """A row's tokens in sink, ring and (if ``paged``) BF16 pages; NaN wherever there is none."""

    def __init__(self, windows: Windows, length: int, dim: int, v_dim: int, paged: bool) -> None:
        rng = np.random.default_rng(length)
        self.windows, self.length, self.paged = windows, length, paged
        pages = page_count(windows, length)
        self.table = rng.permutation(pages + 2)[: pages + 1].astype(np.int32)
        self.tokens = [
            rng.normal(0, 1, (length, d)).astype(ml_dtypes.bfloat16) for d in (dim, v_dim)
        ]
        self.arrays = []
        position = np.arange(length)
        beyond = position - windows.sink
        for x, d in zip(self.tokens, (dim, v_dim), strict=True):
            empty = lambda *s: np.full(s, np.nan, ml_dtypes.bfloat16)  # noqa: E731
            sink, ring = empty(windows.sink, d), empty(windows.ring, d)
            pool = empty(pages + 2, KV_HEADS, PAGE, d)
            sink[position[beyond < 0]] = x[beyond < 0]
            tail = beyond >= PAGE * pages
            ring[beyond[tail] % windows.ring] = x[tail]
            for index in range(pages):
                start = windows.sink + PAGE * index
                pool[self.table[index], HEAD] = x[start : start + PAGE]
            self.arrays.append((sink, ring, pool))
        self.seen = position if paged else position[(beyond < 0) | tail]

    def pointers(self) -> list[np.ndarray]:
        (sink_k, ring_k, pool_k), (sink_v, ring_v, pool_v) = self.arrays
        near = [memory(x) for x in (sink_k, sink_v, ring_k, ring_v)]
        if not self.paged:
            return near
        pools = [memory(x)[HEAD * x[0, 0].nbytes :] for x in (pool_k, pool_v)]
        return [*near, *pools, memory(self.table)]


def run(row: Row, q: np.ndarray, stages: int = 2) -> np.ndarray:
    """What four warps give for all tiles of a row: [Dv, heads], normalised."""
    ops, bf16 = Warpgroup(), q.dtype == ml_dtypes.bfloat16
    (dim, v_dim) = (x.shape[-1] for x in row.tokens)
    strides = (KV_HEADS * PAGE * dim * 2, KV_HEADS * PAGE * v_dim * 2)
    tokens = Tokens(
        dim, v_dim, row.windows, strides if row.paged else None, 1 if bf16 else 2, stages, SCALE
    )
    operands = tiles.load_queries(ops, tokens, memory(q), scalar(1), scalar(HEAD_COUNT), bf16)
    stage = [np.full(stages * WARPS * tiles.tile_bytes(d), 0xFF, np.uint8) for d in (dim, v_dim)]
    paged = PAGE * page_count(row.windows, row.length)
    skip = scalar(0 if row.paged else paged)
    stop, length = scalar(-(-len(row.seen) // ROWS)), scalar(row.length)
    state = State.empty(ops, v_dim, LOWEST)
    for turn in range(-(-len(row.seen) // (ROWS * WARPS))):
        tile, slot = scalar(WARPS * turn) + ops.warp, scalar(turn % stages)
        limits = (stop, length, skip, scalar(paged))
        tiles.fetch(ops, tokens, row.pointers(), (stage[0], stage[1]), tile, slot, limits)
        _, count = tiles.visible_rows(ops, tokens, tile, stop, length, skip)
        state = tiles.step(ops, tokens, (stage[0], stage[1]), slot, count, operands, state)
    scratch, small = np.zeros(4 * v_dim * HEADS * 4, np.uint8), np.zeros(256, np.uint8)
    out, ml = np.zeros(v_dim * HEADS * 4, np.uint8), np.zeros(64, np.uint8)
    mosaic_state.finish(ops, state, 1.0, False, HEADS, scratch, small, out, ml)
    total = ml.view(np.float32).reshape(2, HEADS)[1]
    return out.view(np.float32).reshape(HEADS, v_dim).T / total


def expected(row: Row, q: np.ndarray) -> np.ndarray:
    k, v = (x.astype(np.float64)[row.seen] for x in row.tokens)
    heads = 1 + np.minimum(np.arange(HEADS), HEAD_COUNT - 1)  # the last one repeats
    return attend(k @ q.astype(np.float64)[heads].T * SCALE, v)


def error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize(
    ("dims", "length", "windows"),
    [
        ((64, 64), 50, Windows()),
        ((128, 128), 600, Windows()),
        ((256, 256), 530, Windows(64, 64)),
        ((64, 128), 701, Windows(64, 64, 5)),  # tiles that go beyond the ring's end
        ((128, 64), 460, Windows(128, 0, 1)),
    ],
)
def test_a_stream_is_dense_attention_over_what_is_visible_and_ignores_nan(
    dims: tuple[int, int], length: int, windows: Windows, paged: bool
) -> None:
    row, rng = Row(windows, length, *dims, paged), np.random.default_rng(3)
    q = rng.normal(0, 2, (HEAD_COUNT + 2, dims[0])).astype(ml_dtypes.bfloat16)
    assert error(run(row, q), expected(row, q)) < 2e-5


def test_float32_queries_count_with_both_their_terms() -> None:
    row, rng = Row(Windows(), 400, 64, 64, False), np.random.default_rng(4)
    q = rng.normal(0, 2, (HEAD_COUNT + 1, 64)).astype(np.float32)
    assert error(run(row, q), expected(row, q)) < 2e-5
    rounded = q.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert error(run(row, rounded), expected(row, q)) > 1e-3


def test_a_reference_is_renewed_when_a_later_tile_exceeds_it() -> None:
    row = Row(Windows(), 440, 64, 64, False)
    q = np.tile(row.tokens[0][300].astype(np.float32) * 40, (HEAD_COUNT + 1, 1))
    q = q.astype(ml_dtypes.bfloat16)  # one logit near 250
    logits = row.tokens[0].astype(np.float64)[row.seen] @ q[0].astype(np.float64) * SCALE
    assert logits.max() - logits[:64].max() > tiles.SLACK
    got, want = run(row, q), expected(row, q)
    assert error(got, want) < 2e-5
    assert math.isfinite(float(np.abs(got).max()))
