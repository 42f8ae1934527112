"""A warpgroup in NumPy: the machine under the register programs, one array element per thread.

Tensor-core steps, movmatrix and shuffles follow the PTX manual's fragment tables, so a program that
gives the right numbers here has its operands in the right lanes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

THREADS = 128


@dataclasses.dataclass
class Pointer:
    """What every thread points to: one of some memories, from byte ``start`` on."""

    memories: list[np.ndarray]
    which: np.ndarray
    start: np.ndarray

    @classmethod
    def of(cls, memory: np.ndarray) -> Pointer:
        return cls([memory], np.zeros(THREADS, int), np.zeros(THREADS, int))


class Warpgroup:
    """Integers are u32[128], floats f32[128], conditions bool[128]; memory is bytes."""

    def __init__(self) -> None:
        self.thread = np.arange(THREADS, dtype=np.uint32)
        self.lane = self.thread % 32
        self.warp = self.thread // 32
        self.g, self.t = self.lane // 4, self.lane % 4
        self.renewed = 0  # warps in which ``any_warp`` found one

    def divmod_warp(self, size: int) -> tuple[Any, Any]:
        return self.warp // size, self.warp % size

    def _int(self, x: Any) -> Any:
        return np.uint32(x & 0xFFFFFFFF) if isinstance(x, int) else x

    def const_i(self, value: int) -> Any:
        return np.full(THREADS, value & 0xFFFFFFFF, np.uint32)

    def iadd(self, x: Any, y: Any) -> Any:
        return x + self._int(y)

    def isub(self, x: Any, y: Any) -> Any:
        return x - self._int(y)

    def imul(self, x: Any, y: Any) -> Any:
        return x * self._int(y)

    def iand(self, x: Any, y: Any) -> Any:
        return x & self._int(y)

    def shr(self, x: Any, y: Any) -> Any:
        return x >> self._int(y)

    def shl(self, x: Any, y: Any) -> Any:
        return x << self._int(y)

    def urem(self, x: Any, y: Any) -> Any:
        return x % self._int(y)

    def imin(self, x: Any, y: Any) -> Any:
        return np.minimum(
            x.view(np.int32), np.int32(y) if isinstance(y, int) else y.view(np.int32)
        ).view(np.uint32)

    def imax(self, x: Any, y: Any) -> Any:
        return np.maximum(
            x.view(np.int32), np.int32(y) if isinstance(y, int) else y.view(np.int32)
        ).view(np.uint32)

    def less(self, x: Any, y: Any) -> Any:
        signed = lambda v: np.int32(v) if isinstance(v, int) else v.view(np.int32)  # noqa: E731
        return signed(x) < signed(y)

    def nonzero(self, x: Any) -> Any:
        return x != 0

    def xor(self, x: Any, y: Any) -> Any:
        return x ^ self._int(y)

    def umin(self, x: Any, y: Any) -> Any:
        return np.minimum(x, y)

    def or_(self, x: Any, y: Any) -> Any:
        return x | y

    def and_(self, x: Any, y: Any) -> Any:
        return x & y

    def select(self, condition: Any, x: Any, y: Any) -> Any:
        return np.where(condition, x, y)

    select_i = select

    def prmt(self, x: Any, y: Any, selector: Any) -> Any:
        pair = x.astype(np.uint64) | y.astype(np.uint64) << np.uint64(32)
        out = np.zeros(THREADS, np.uint32)
        for i in range(4):
            place = np.asarray(selector, np.uint64) >> np.uint64(4 * i) & np.uint64(7)
            byte = (pair >> np.uint64(8) * place) & np.uint64(0xFF)
            out |= byte.astype(np.uint32) << np.uint32(8 * i)
        return out

    def const_f(self, value: float) -> Any:
        return np.full(THREADS, value, np.float32)

    def fadd(self, x: Any, y: Any) -> Any:
        return x + y

    def fmul(self, x: Any, y: Any) -> Any:
        return x * y

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        return (x.astype(np.float64) * y + z).astype(np.float32)

    def fneg(self, x: Any) -> Any:
        return -x

    def fmax(self, x: Any, y: Any) -> Any:
        return np.fmax(x, y)

    def fmin(self, x: Any, y: Any) -> Any:
        return np.fmin(x, y)

    def positive(self, x: Any) -> Any:
        return x > 0

    def rcp(self, x: Any) -> Any:
        return np.float32(1) / x

    def ex2(self, x: Any) -> Any:
        return np.exp2(x)

    def lg2(self, x: Any) -> Any:
        return np.log2(x)

    def bits_f32(self, x: Any) -> Any:
        return x.view(np.float32)

    def f32_bits(self, x: Any) -> Any:
        return x.view(np.uint32)

    def f16_lo(self, x: Any) -> Any:
        return (x & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float32)

    def _pack(self, low: Any, high: Any, kind: Any) -> Any:
        bits = lambda x: x.astype(kind).view(np.uint16).astype(np.uint32)  # noqa: E731
        return bits(low) | bits(high) << np.uint32(16)

    def pack_f16(self, low: Any, high: Any) -> Any:
        return self._pack(low, high, np.float16)

    def pack_bf16(self, low: Any, high: Any) -> Any:
        return self._pack(low, high, ml_dtypes.bfloat16)

    def _halves(self, x: Any, kind: Any) -> np.ndarray:
        """[128, 2] float32 of the low and the high half."""
        halves = np.stack([x & 0xFFFF, x >> 16], -1).astype(np.uint16)
        return halves.view(kind).astype(np.float32)

    def add_f16x2(self, x: Any, y: Any) -> Any:
        total = self._halves(x, np.float16) + self._halves(y, np.float16)
        return self.pack_f16(total[:, 0], total[:, 1])

    def _left(self, kind: Any, a: list[Any]) -> np.ndarray:
        """The warps' A of a step, [4, 16, 16]."""
        lanes = np.arange(32)
        g, t = lanes // 4, lanes % 4
        left, held = np.zeros((4, 16, 16)), np.stack([self._halves(x, kind) for x in a])
        for e in range(2):
            for i, (row, column) in enumerate(((0, 0), (8, 0), (0, 8), (8, 8))):
                left[:, g + row, 2 * t + e + column] = held[i, :, e].reshape(4, 32)
        return left

    def sub_f16x2(self, x: Any, y: Any) -> Any:
        return self.add_f16x2(x, y ^ np.uint32(0x80008000))

    def _mma(self, kind: Any, sums: list[Any], a: list[Any], b: list[Any]) -> list[Any]:
        lanes = np.arange(32)
        g, t = lanes // 4, lanes % 4
        right = np.zeros((4, 16, 8))
        held_b = np.stack([self._halves(x, kind) for x in b]).reshape(2, 4, 32, 2)
        for warp in range(4):
            for e in range(2):
                for i in range(2):
                    right[warp, 2 * t + e + 8 * i, g] = held_b[i, warp, :, e]
        product = self._left(kind, a) @ right  # [4, 16, 8]
        out = [
            product[:, g + 8 * (i // 2), 2 * t + i % 2].reshape(THREADS).astype(np.float32)
            for i in range(4)
        ]
        return [x + y for x, y in zip(sums, out, strict=True)]

    def mma_f16(self, sums: list[Any], a: list[Any], b: list[Any]) -> list[Any]:
        return self._mma(np.float16, sums, a, b)

    def mma_bf16(self, sums: list[Any], a: list[Any], b: list[Any]) -> list[Any]:
        return self._mma(ml_dtypes.bfloat16, sums, a, b)

    def mma_u8(self, sums: list[Any], a: list[Any], b: list[Any], kind: str) -> list[Any]:
        lanes, dtype = np.arange(32), np.int8 if kind == "s8" else np.uint8
        g, t = lanes // 4, lanes % 4
        left, right = np.zeros((4, 16, 32), int), np.zeros((4, 32, 8), int)
        split = lambda x, dtype: x.reshape(4, 32, 1).view(dtype).astype(int)  # noqa: E731
        for e in range(4):
            for i, x in enumerate(a):
                left[:, g + 8 * (i % 2), 4 * t + e + 16 * (i // 2)] = split(x, np.uint8)[..., e]
            for i, x in enumerate(b):
                right[:, 4 * t + e + 16 * i, g] = split(x, dtype)[..., e]
        product = left @ right  # [4, 16, 8]
        out = [product[:, g + 8 * (i // 2), 2 * t + i % 2].reshape(THREADS) for i in range(4)]
        return [x + y.astype(np.int32).view(np.uint32) for x, y in zip(sums, out, strict=True)]

    def movmatrix(self, x: Any) -> Any:
        halves = np.stack([x & 0xFFFF, x >> 16], -1).reshape(4, 8, 8)  # [warp, row g, column]
        flipped = halves.swapaxes(1, 2).reshape(THREADS, 2).astype(np.uint32)
        return flipped[:, 0] | flipped[:, 1] << np.uint32(16)

    def shfl_xor(self, x: Any, distance: int) -> Any:
        return x[self.thread ^ distance]

    def any_warp(self, condition: Any) -> Any:
        warps = condition.reshape(4, 32).any(1)
        self.renewed += int(warps.sum())
        return np.repeat(warps, 32)

    def if_(self, condition: Any, then: Callable[[], list[Any]], otherwise: list[Any]) -> list[Any]:
        return [np.where(condition, x, y) for x, y in zip(then(), otherwise, strict=True)]

    def opaque(self, x: Any) -> Any:
        return x

    def barrier(self) -> None:
        pass  # all threads of this machine run every instruction together

    def choose(self, condition: Any, pointer: Any, other: Any) -> Pointer:
        a, b = (x if isinstance(x, Pointer) else Pointer.of(x) for x in (pointer, other))
        which = np.where(condition, a.which, b.which + len(a.memories))
        return Pointer([*a.memories, *b.memories], which, np.where(condition, a.start, b.start))

    def advance(self, memory: Any, index: Any, size: int) -> Pointer:
        pointer = memory if isinstance(memory, Pointer) else Pointer.of(memory)
        start = pointer.start + index.view(np.int32).astype(int) * size
        return Pointer(pointer.memories, pointer.which, start)

    def copy_async(
        self, target: np.ndarray, at: Any, source: Pointer, where: Any, plus: int
    ) -> None:
        for lane in range(THREADS):
            piece = np.zeros(16, np.uint8)
            if where[lane]:
                start = int(source.start[lane]) + plus
                piece = source.memories[source.which[lane]][start : start + 16]
            assert len(piece) == 16  # inside the array
            target[int(at[lane]) + plus :][:16] = piece

    def commit_copies(self) -> None:
        pass

    def await_copies(self, pending: int) -> None:
        pass

    def sync_warp(self) -> None:
        pass

    def ldmatrix(self, memory: np.ndarray, offset: Any, transposed: bool) -> list[Any]:
        at = offset.astype(np.int64).reshape(4, 4, 8)  # [warp, matrix, row]
        rows = memory[at[..., None] + np.arange(16)].view(np.uint16)  # [4, 4, 8, 8]
        if transposed:
            rows = rows.swapaxes(-1, -2)
        pairs = np.ascontiguousarray(rows).view(np.uint32).reshape(4, 4, 32)  # lane 4 row + pair
        return [pairs[:, i].reshape(THREADS).copy() for i in range(4)]

    def load(self, memory: np.ndarray, offset: Any, count: int, plus: int = 0) -> list[Any]:
        at = offset.astype(np.int64) + plus
        assert (at % (4 * count) == 0).all()  # the alignment that a vector load needs
        words = memory.view(np.uint32)
        return [words[at // 4 + i] for i in range(count)]

    def store(self, memory: np.ndarray, offset: Any, values: list[Any], where: Any = True) -> None:
        where = np.broadcast_to(where, (THREADS,))
        at = offset.astype(np.int64)[where]
        assert (at % (4 * len(values)) == 0).all()
        for i, value in enumerate(values):
            memory.view(value.dtype)[at // 4 + i] = value[where]

    store_bits = store
