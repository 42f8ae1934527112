"""Cases of the kernel tests: shapes with random sequences, transforms and poisoned caches.

A poisoned cache is what memory may look like to a kernel: BF16 rows are NaN, codes are random and
metadata decodes to NaN; pages, slots and sinks are shuffled, and block-table entries past the last
page point anywhere.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from oscar_jax import Codec, KVConfig, PagedKV, Rotation
from oscar_jax.cache import init_layer, windows_of
from pallas_kernels.format import PAGE
from pallas_kernels.layout import LayerKV, Tables

# Only a device runs the tensor core's instructions, which interpret mode and the emulated warpgroup
# replace: ``pytest -m gpu`` there, a skip everywhere else.
on_gpu = (
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA device"),
)


def needs_gpu(test: Any) -> Any:
    """The decorator of both marks."""
    return functools.reduce(lambda marked, mark: mark(marked), on_gpu, test)


IMPLEMENTATIONS = (pytest.param("xla"), pytest.param("mosaic_gpu", marks=on_gpu))
POOLS = tuple(field.name for field in dataclasses.fields(LayerKV))


@dataclasses.dataclass(frozen=True)
class Case:
    """A model's shape, a codec (None: BF16 pages), windows, and the ragged lengths of a batch."""

    head_dim: int
    kv_heads: int
    group: int
    lengths: tuple[int, ...]
    codec: Codec | None
    v_head_dim: int | None = None
    sink: int = 64
    recent: int = 256
    lookahead: int = 16
    piece: int = 128  # tokens per call when the sequence is put in in pieces

    @property
    def config(self) -> KVConfig:
        dtype: Any = "bf16" if self.codec is None else "int2"
        return KVConfig(dtype, self.sink, self.recent, self.lookahead)

    @property
    def tokens(self) -> int:
        return max(self.lengths)

    @property
    def value_dim(self) -> int:
        return self.v_head_dim or self.head_dim

    def __str__(self) -> str:
        codec = self.codec
        name = "bf16" if codec is None else codec.key + "+gain" * codec.gain
        if codec is not None and codec.bits != (2, 2):
            name += "-k{}v{}".format(*codec.bits)
        value = f"/{self.v_head_dim}" if self.v_head_dim else ""
        return f"D{self.head_dim}{value}-K{self.kv_heads}-G{self.group}-{name}-n{self.tokens}"


def with_implementations(*cases: Case) -> pytest.MarkDecorator:
    """Parameters (case, implementation): every case with every implementation that serves it."""
    kernel_dims = {64, 128, 256}
    pairs = [
        pytest.param(case, *kind.values, marks=kind.marks, id=f"{case}-{kind.values[0]}")
        for kind in IMPLEMENTATIONS
        for case in cases
        if kind.values == ("xla",)
        or (
            case.codec is not None
            and case.codec.bits == (2, 2)
            and {case.head_dim, case.value_dim} <= kernel_dims
        )
    ]
    return pytest.mark.parametrize(("case", "implementation"), pairs)


@dataclasses.dataclass(frozen=True)
class Sequences:
    """float32 q [B, n, N, D], k [B, n, K, D] and v [B, n, K, Dv]; padding past a length is NaN."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    def window(self, start: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(q, k, v) of the ``size`` tokens from start[b] on of every row b, NaN past the end."""
        at = start[:, None] + np.arange(size)  # [B, size]
        inside = (at < self.q.shape[1])[:, :, None, None]
        at = np.minimum(at, self.q.shape[1] - 1)[:, :, None, None]
        take = lambda x: np.where(inside, np.take_along_axis(x, at, 1), np.float32(np.nan))  # noqa: E731
        return take(self.q), take(self.k), take(self.v)


def sequences(case: Case, seed: int = 0) -> Sequences:
    """Keys with a strong common mean and channels of unlike size, as real keys have; queries that
    BF16 holds, as models give them: the kernels' prefill rounds others to it."""
    rng = np.random.default_rng(seed)
    batch, n = len(case.lengths), case.tokens
    spread = np.exp(rng.normal(0, 0.5, case.head_dim))
    k = rng.normal(key_mean(case), spread, (batch, n, case.kv_heads, case.head_dim))
    v = rng.normal(0, 1, (batch, n, case.kv_heads, case.value_dim))
    q = rng.normal(0, 1, (batch, n, case.kv_heads * case.group, case.head_dim))
    q = q.astype(ml_dtypes.bfloat16)
    padding = np.arange(n) >= np.array(case.lengths)[:, None]
    pad = lambda x: np.where(padding[:, :, None, None], np.nan, x).astype(np.float32)  # noqa: E731
    return Sequences(pad(q), pad(k), pad(v))


def key_mean(case: Case) -> np.ndarray:
    return np.random.default_rng(1).normal(0, 1.5, (case.kv_heads, case.head_dim))


def int32(x: Any) -> jax.Array:
    """Numbers of tokens, or of a batch's rows."""
    return jax.device_put(np.asarray(x, np.int32))


def changed(pool: jax.Array, index: Any, value: Any) -> jax.Array:
    """A copy with ``value`` at ``index``, by NumPy: each jnp call would compile a program."""
    held = np.array(pool)
    held[index] = value
    return jax.device_put(held)


@functools.cache
def transforms(case: Case, layers: int = 1) -> Rotation | None:
    """Invertible, not orthogonal, different in every layer and head."""
    if case.codec is None:
        return None

    def random(rng: np.random.Generator, size: int) -> np.ndarray:
        orthogonal = np.linalg.qr(rng.normal(size=(case.kv_heads, size, size)))[0]
        stretch = np.exp(rng.uniform(-0.7, 0.7, (case.kv_heads, size, 1)))
        return stretch * orthogonal

    rngs = [np.random.default_rng(100 + layer) for layer in range(layers)]
    return Rotation.from_transforms(
        [random(rng, case.head_dim) for rng in rngs],
        [random(rng, case.value_dim) for rng in rngs],
        [key_mean(case)] * layers,
        case.codec,
    )


def poison(pool: jax.ShapeDtypeStruct | None, rng: np.random.Generator) -> jax.Array | None:
    """NaN, or for packed words random codes, or for metadata words of NaN in either codec."""
    if pool is None:
        return None
    if pool.dtype == jnp.uint16:
        return jax.device_put(rng.integers(0, 1 << 16, pool.shape).astype(np.uint16))
    if pool.dtype == jnp.uint32:
        return jax.device_put(np.full(pool.shape, 0xFFFFFFFF, np.uint32))
    return jax.device_put(np.full(pool.shape, np.nan, ml_dtypes.bfloat16))


def poisoned_cache(case: Case, layers: int = 1, shuffle: int = 2) -> PagedKV:
    """A cache with room for the case's tokens; ``shuffle`` seeds where pages and rows lie."""
    rng = np.random.default_rng(shuffle)
    batch = len(case.lengths)
    needed = [max(0, (n - case.sink) // PAGE) for n in case.lengths]
    pages = max(1, *needed) + 1
    ids = rng.permutation(sum(needed) + 2)
    table = rng.choice([-1, 10**6, int(ids[0])], size=(batch, pages))
    for row in range(batch):
        first = sum(needed[:row])
        table[row, : needed[row]] = ids[first : first + needed[row]]
    empty = jax.eval_shape(
        lambda: init_layer(
            case.config,
            codec=case.codec,
            kv_heads=case.kv_heads,
            head_dim=case.head_dim,
            v_head_dim=case.v_head_dim,
            pages=len(ids),
            slots=batch + 1,
            sinks=batch + 2,
        )
    )
    return PagedKV(
        layers=tuple(
            LayerKV(**{name: poison(getattr(empty, name), rng) for name in POOLS})  # type: ignore[arg-type]
            for _ in range(layers)
        ),
        tables=Tables(
            int32(table),
            int32(rng.permutation(batch + 1)[:batch]),
            int32(rng.permutation(batch + 2)[:batch]),
        ),
        highest=int32([0] * (batch + 1)),
        faults=int32([0, 0]),
        windows=windows_of(case.config),
    )
