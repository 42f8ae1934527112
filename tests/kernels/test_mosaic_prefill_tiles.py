"""The prefill kernel's dequantiser, on an emulated warpgroup: right values at the right places."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import format as fmt
from pallas_kernels.format import PAGE
from pallas_kernels.packing import words_per_row
from pallas_kernels.prefill import mosaic_tiles
from pallas_kernels.prefill.mosaic_tiles import Tiles
from tests.kernels.warpgroup import THREADS, Warpgroup


class Machine(Warpgroup):
    """Counts the shared-memory cycles of its loads and stores beside what is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.cycles = self.least = 0

    def _count(self, at: np.ndarray, words: int) -> None:
        """Lanes are served 128 bytes at a time (32, 16 or 8); a bank gives 4 bytes a cycle."""
        touched = np.sort((at[:, None] // 4 + np.arange(words)).reshape(-1, 32), 1)
        once = np.diff(touched, axis=1, prepend=-1) > 0
        banks = (once[..., None] & (touched[..., None] % 32 == np.arange(32))).sum(1)
        self.cycles += int(banks.max(1).sum())
        self.least += int(-(-once.sum(1) // 32).sum())

    def prmt(self, x: Any, y: Any, selector: int) -> Any:
        pair = x.astype(np.uint64) | y.astype(np.uint64) << np.uint64(32)
        out = np.zeros(THREADS, np.uint32)
        for i in range(4):
            byte = (pair >> np.uint64(8 * (selector >> 4 * i & 7))) & np.uint64(0xFF)
            out |= byte.astype(np.uint32) << np.uint32(8 * i)
        return out

    def ixor(self, x: Any, y: Any) -> Any:
        return x ^ self._int(y)

    def and_or(self, x: Any, mask: int, y: Any) -> Any:
        return x & np.uint32(mask) | y

    def mul_f16x2(self, x: Any, y: Any) -> Any:
        product = self._halves(x, np.float16) * self._halves(y, np.float16)
        return self.pack_f16(product[:, 0], product[:, 1])

    def fma_f16x2(self, x: Any, y: Any, z: Any) -> Any:
        x, y, z = (self._halves(a, np.float16) for a in (x, y, z))
        total = x * y + z  # 22 bits and a shift: float32 is exact but for the last addition
        return self.pack_f16(total[:, 0], total[:, 1])

    def load(self, memory: Any, offset: Any, count: int, plus: int = 0) -> list[Any]:
        self._count(offset.astype(np.int64) + plus, count)
        return super().load(memory, offset, count, plus)

    def store(
        self, memory: Any, offset: Any, values: Any, where: Any = True, plus: int = 0
    ) -> None:
        self._count(offset.astype(np.int64) + plus, len(values))
        super().store(memory, offset + np.uint32(plus), values, where)


def unswizzled(tile: np.ndarray, rows: int, columns: int) -> np.ndarray:
    """[rows, columns] float16 of a tile: atoms of 8 rows of 64, chunk c of row r at c xor r."""
    atoms = tile.view(np.float16).reshape(rows // 8, columns // 64, 8, 8, 8)
    at = np.arange(8)[:, None] ^ np.arange(8)
    atoms = np.take_along_axis(atoms, at[None, None, :, :, None], 3)
    return atoms.swapaxes(1, 2).reshape(rows, columns)


def page(shape: Tiles, scale_v: float = 1.0) -> tuple[Any, ...]:
    """Random (K words, V words, K metadata, V metadata)."""
    rng = np.random.default_rng(shape.head_dim)
    half = lambda x: x.astype(np.float16).view(np.uint16).astype(np.uint32)  # noqa: E731
    top_k, top_v = (2**bits - 1 for bits in (shape.key_bits, shape.value_bits))
    scale = rng.uniform(0.3, 2.0, PAGE) * 3 / top_k  # codes of any width spread alike
    k_meta = half(scale) | half(-top_k / 2 * scale + rng.normal(0, 0.1, PAGE)) << 16
    if shape.codec == "waterfill":
        first = 0x6C - 8 * (shape.key_bits - 2)  # 0.5 is 0x70
        e5m3 = lambda: rng.integers(first, first + 8, PAGE).astype(np.uint32)  # noqa: E731
        k_meta = half(scale) | e5m3() << 16 | e5m3() << 24
    scale = rng.uniform(0.5, 1.0, PAGE) * scale_v * 3 / top_v
    v_meta = half(scale) | half(-top_v / 2 * scale) << 16
    words = lambda a, b: rng.integers(0, 1 << 16, (a, b)).astype(np.uint16)  # noqa: E731
    k_words = words(PAGE, words_per_row(shape.head_dim, shape.key_bits))
    return k_words, words(shape.v_head_dim, words_per_row(PAGE, shape.value_bits)), k_meta, v_meta


SHAPES = [
    Tiles(64, 64, "uniform"),
    Tiles(128, 128, "uniform"),
    Tiles(128, 64, "waterfill"),
    Tiles(256, 256, "uniform", halves=2),
    Tiles(256, 128, "waterfill", halves=2),
    Tiles(128, 256, "uniform", halves=2),
]
MORE = [  # of one size of values
    Tiles(64, 256, "uniform", halves=2),
    Tiles(64, 64, "uniform", 1, 3, 2),
    Tiles(128, 128, "uniform", 1, 3, 2),
    Tiles(128, 128, "waterfill", 1, 3, 4),
    Tiles(64, 64, "waterfill", 1, 4, 4),
    Tiles(128, 128, "uniform", 1, 4, 2),
    Tiles(256, 256, "uniform", 2, 3, 2),
    Tiles(128, 256, "waterfill", 2, 3, 4),
    Tiles(64, 256, "uniform", 2, 3, 4),
    Tiles(256, 256, "waterfill", 2, 4, 4),
]


@pytest.mark.parametrize(
    ("shape", "scale_v"),
    [(shape, scale) for scale in (0.01, 1.0, 100.0) for shape in SHAPES]
    + [(shape, 0.01) for shape in MORE],
    ids=str,
)
def test_tiles_hold_the_page_in_the_order_of_words(shape: Tiles, scale_v: float) -> None:
    k_words, v_words, k_meta, v_meta = page(shape, scale_v)
    codec = fmt.Codec(key=shape.codec, key_bits=shape.key_bits)
    on_device = [jnp.asarray(x) for x in (k_words, v_words, k_meta, v_meta)]
    keys = np.asarray(fmt.decode_key_pages(on_device[0], on_device[2], codec))
    values = np.asarray(fmt.decode_value_pages(on_device[1], on_device[3]))
    tokens, channels = mosaic_tiles.token_order(), mosaic_tiles.channel_order(shape.head_dim)
    for half in range(shape.halves):
        ops = Machine()
        which = np.full(THREADS, half, np.uint32)
        own = tokens[half * shape.tokens : (half + 1) * shape.tokens]
        tile = np.zeros(shape.tokens * shape.head_dim * 2, np.uint8)
        mosaic_tiles.key_tile(
            ops, shape, k_words.reshape(-1).view(np.uint8), k_meta.view(np.uint8), tile, which
        )
        got = unswizzled(tile, shape.tokens, shape.head_dim)
        want = keys[own][:, channels]
        assert np.abs(got - want).max() <= 2**-11 * np.abs(want).max()
        tile = np.zeros(shape.tokens * shape.v_head_dim * 2, np.uint8)
        mosaic_tiles.value_tile(
            ops, shape, v_words.reshape(-1).view(np.uint8), v_meta.view(np.uint8), tile, which
        )
        got = unswizzled(tile, shape.v_head_dim, shape.tokens)
        want = values[own].T
        assert np.abs(got - want).max() <= 2**-11 * np.abs(want).max()
        assert np.linalg.norm(got - want) <= 4e-4 * np.linalg.norm(want)
        # Banks. A row of 4-bit codes has 16 of them or all: eight lanes meet in few.
        wide = 4 in (shape.key_bits, shape.value_bits)
        assert ops.cycles <= (1.55 if wide else 1.25) * ops.least


def test_the_order_of_words_is_a_permutation_of_neighbours() -> None:
    assert sorted(mosaic_tiles.token_order()) == list(range(PAGE))
    assert mosaic_tiles.token_order()[:4].tolist() == [0, 1, 16, 17]
    assert mosaic_tiles.channel_order(64)[:4].tolist() == [0, 1, 8, 9]
