"""What must hold of a run: dense attention from the stored bytes, equal bytes, right codes."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from oscar_jax import Codec, PagedKV, Rotation
from pallas_kernels.format import PAGE
from tests.kernels import reference
from tests.kernels.cases import POOLS, Case, Sequences, transforms
from tests.kernels.reference import bits


@dataclasses.dataclass(frozen=True)
class Tolerance:
    """How far an implementation may be from the reference.

    Args:
        attention: largest error over largest value. margin: where between two codes, in units of
            their distance, either is right. codes, metadata: share of codes that may be the other
            one of the two, and of metadata numbers that may be one rounding step away.
    """

    attention: float
    margin: float
    codes: float
    metadata: float


TOLERANCES = {
    "xla": Tolerance(1e-5, 1e-3, 1e-3, 0.03),
    "mosaic_gpu": Tolerance(3e-3, 1e-2, 1e-2, 0.3),
}
tolerance = TOLERANCES["xla"]  # of the implementation under test (conftest)
measured: list[float] = []  # errors of the test that runs


def stored_tokens(
    cache: PagedKV, rotation: Rotation | None, row: int, pages: int, layer: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [T pages, K, .] that a row's pages hold, decoded and un-transformed."""
    store = cache.layers[layer]
    ids = np.asarray(cache.tables.block_table)[row, :pages]
    words_k, words_v = np.asarray(store.k_pages)[ids], np.asarray(store.v_pages)[ids]
    if rotation is None:
        keys, values = words_k.astype(np.float64), words_v.astype(np.float64)
    else:
        meta_k, meta_v = np.asarray(store.k_meta)[ids], np.asarray(store.v_meta)[ids]
        x_k, x_v = (np.asarray(x[layer], np.float64) for x in (rotation.x_k, rotation.x_v))
        codec = _codec(rotation, layer)
        keys = reference.decode_keys(words_k, meta_k, codec.key, codec.key_bits)
        keys = keys @ np.linalg.inv(x_k)
        keys = keys + np.asarray(rotation.mu[layer], np.float64)[:, None]
        values = reference.decode_values(words_v, meta_v) @ np.linalg.inv(x_v)
    by_token = lambda x: x.swapaxes(1, 2).reshape(-1, *x.shape[1::2])  # noqa: E731
    return by_token(keys), by_token(values)


def _codec(rotation: Rotation, layer: int) -> Codec:
    codec = rotation.codecs[layer]
    assert codec is not None
    return codec


def expected(
    case: Case, data: Sequences, cache: PagedKV, row: int, positions: Any = None, layer: int = 0
) -> np.ndarray:
    """Dense attention of one row at ``positions`` (default: all), pages read from the cache."""
    n = case.lengths[row]
    positions = np.arange(n) if positions is None else np.asarray(positions)
    pages = max(0, (n - case.sink) // PAGE)
    k, v = reference.bf16(data.k[row, :n]), reference.bf16(data.v[row, :n])
    paged_k, paged_v = np.full(k.shape, np.nan), np.full(v.shape, np.nan)
    stored = stored_tokens(cache, transforms(case, len(cache.layers)), row, pages, layer)
    for paged, held in zip((paged_k, paged_v), stored, strict=True):
        paged[case.sink : case.sink + PAGE * pages] = held
    return reference.attention(
        data.q[row, positions].astype(np.float64),
        k,
        v,
        paged_k,
        paged_v,
        positions=positions,
        sink=case.sink,
        recent=case.recent,
        scale=case.head_dim**-0.5,
    )


def assert_close(got: Any, want: Any, least: float = 0.0) -> None:
    """max |got - want| <= tolerance max |want|, a tolerance of ``least`` or more; NaN fails."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    worst, size = np.abs(got - want).max(), np.abs(want).max()
    measured.append(float(worst / size) if size else float(worst))
    limit = max(tolerance.attention, least) * size
    assert worst <= limit, f"differs by {worst:.3g}, values are up to {size:.3g}"


def assert_rows_close(case: Case, got: np.ndarray, want: np.ndarray) -> None:
    """Outputs [B, n, ...] of two runs agree up to every row's length."""
    for row, n in enumerate(case.lengths):
        assert_close(got[row, :n], want[row, :n])


def assert_same_bytes(a: PagedKV, b: PagedKV, pools: tuple[str, ...] = POOLS) -> None:
    """Every byte of the pools is equal, memory that nothing was written to included."""
    for index, (one, other) in enumerate(zip(a.layers, b.layers, strict=True)):
        for name in pools:
            x, y = getattr(one, name), getattr(other, name)
            if x is None:
                assert y is None
                continue
            where = np.argwhere(bits(x) != bits(y))
            assert not len(where), f"layer {index}: {name} differs at {where[0].tolist()}"


def assert_pages_follow_the_codec(case: Case, data: Sequences, cache: PagedKV, row: int) -> None:
    """The bytes of a row's complete pages are those of the float64 codec, up to float32 ties."""
    store, rotation = cache.layers[0], transforms(case)
    pages = (case.lengths[row] - case.sink) // PAGE
    ids = np.asarray(cache.tables.block_table)[row, :pages]
    words_k, words_v = np.asarray(store.k_pages)[ids], np.asarray(store.v_pages)[ids]
    stop = case.sink + PAGE * pages
    k, v = (  # [P, K, T, .]
        reference.bf16(x[row, case.sink : stop]).reshape(pages, PAGE, *x.shape[2:]).swapaxes(1, 2)
        for x in (data.k, data.v)
    )
    if rotation is None:
        assert (words_k == k).all()
        assert (words_v == v).all()
        return
    codec = _codec(rotation, 0)
    x_k, x_v, mu = (np.asarray(x[0], np.float64) for x in (rotation.x_k, rotation.x_v, rotation.mu))
    keys, values = (k - mu[:, None]) @ x_k, v @ x_v
    codes = reference.unpack_keys(words_k, codec.key, codec.key_bits)
    if codec.key == "uniform":
        rows = reference.encode_uniform(keys, codec.clip_k, codec.gain, codec.key_bits)
        _assert_same_rows(rows, codes, np.asarray(store.k_meta)[ids], (16, 16))
    else:
        rows = reference.encode_waterfill(keys, codec.gain, codec.key_bits)
        _assert_same_rows(rows, codes, np.asarray(store.k_meta)[ids], (16, 8, 8))
    rows = reference.encode_uniform(values, codec.clip_v, False, codec.value_bits)
    codes = reference.unpack_values(words_v)
    _assert_same_rows(rows, codes, np.asarray(store.v_meta)[ids], (16, 16))


def _assert_same_rows(
    want: reference.Rows, codes: np.ndarray, meta: np.ndarray, widths: tuple[int, ...]
) -> None:
    """A code may be its neighbour only close to the threshold between them; a number of the
    metadata, ``widths`` bits each from the lowest on, may be off by one rounding step in few rows.
    """
    apart = np.abs(codes.astype(int) - want.codes)
    assert apart.max() <= 1
    assert (want.margin[apart == 1] < tolerance.margin).all()
    assert (apart == 1).mean() < tolerance.codes
    first = 0
    for width in widths:
        stored, right = ((x >> first) & (2**width - 1) for x in (meta, want.meta))
        steps = np.abs(stored.astype(int) - right.astype(int))
        assert steps.max() <= 1
        assert (steps == 1).mean() < tolerance.metadata
        first += width
