"""The write kernel's register programs, on a warpgroup emulated in NumPy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels import format as fmt
from pallas_kernels.format import PAGE, Codec
from pallas_kernels.write import mosaic_order as order
from pallas_kernels.write import mosaic_stream as stream
from pallas_kernels.write import mosaic_transform as transform
from pallas_kernels.write.mosaic_shape import SHIFT, TERMS, TILES, Side
from pallas_kernels.write.mosaic_unit import Place, Unit, locate, write_unit
from tests.kernels.warpgroup import THREADS, Pointer, Warpgroup


class Machine(Warpgroup):
    """The warpgroup with the instructions of ``mosaic_instructions``."""

    repeats = 0  # turns of ``repeat``

    def popc(self, x: Any) -> Any:
        return np.bitwise_count(x).astype(np.uint32)

    def imax(self, x: Any, y: Any) -> Any:
        return (
            super().imax(x, y)
            if isinstance(y, int)
            else np.maximum(x.view(np.int32), y.view(np.int32)).view(np.uint32)
        )

    def umax(self, x: Any, y: Any) -> Any:
        return np.maximum(x, y)

    def top_bit(self, x: Any) -> Any:
        return (np.frexp(x.astype(np.float64))[1] - 1).astype(np.int32).view(np.uint32)

    def prmt(self, x: Any, y: Any, selector: int) -> Any:
        out = super().prmt(x, y, selector)
        for i in range(4):
            if selector >> 4 * i & 8:  # the sign of the byte in all of its bits
                byte = np.uint32(0xFF << 8 * i)
                sign = out >> np.uint32(8 * i + 7) & np.uint32(1)
                out = np.where(sign == 1, out | byte, out & ~byte)
        return out

    def less_f(self, x: Any, y: Any) -> Any:
        return x < y

    def equal_f(self, x: Any, y: Any) -> Any:
        return x == y

    def fabs(self, x: Any) -> Any:
        return np.abs(x)

    def fma_sat(self, x: Any, y: Any, z: Any) -> Any:
        return np.fmax(np.fmin(self.fma(x, y, z), np.float32(1)), np.float32(0))

    def divide(self, x: Any, y: Any) -> Any:
        return x / y

    def sqrt(self, x: Any) -> Any:
        return np.sqrt(x)

    def rcp(self, x: Any) -> Any:
        with np.errstate(divide="ignore"):
            return np.float32(1) / x

    def mul_f16x2(self, x: Any, y: Any) -> Any:
        return self.pack_f16(*(self._halves(x, np.float16) * self._halves(y, np.float16)).T)

    def fma_f16x2(self, x: Any, y: Any, z: Any) -> Any:
        x, y, z = (self._halves(v, np.float16).astype(np.float64) for v in (x, y, z))
        return self.pack_f16(*(x * y + z).T)

    def pack_f16_finite(self, low: Any, high: Any) -> Any:
        most = np.float32(65504)
        return self.pack_f16(np.clip(low, -most, most), np.clip(high, -most, most))

    def fma_bf16x2(self, x: Any, y: Any, z: Any) -> Any:
        x, y, z = (self._halves(v, ml_dtypes.bfloat16).astype(np.float64) for v in (x, y, z))
        return self.pack_bf16(*(x * y + z).T)

    def wgmma_f16(
        self,
        a: list[list[Any]],
        b: Any,
        columns: int,
        terms: int,
        before: list[Any] | None = None,
    ) -> list[Any]:
        held = b[: terms * len(a) * 2 * columns * 16].view(np.float16).astype(float)
        held = held.reshape(terms, len(a), 2, columns, 8).swapaxes(-1, -2)
        held = held.reshape(terms, len(a), 16, columns)
        lefts = [self._left(np.float16, x) for x in a]
        sums = list(before or [np.zeros(THREADS, np.float32)] * (columns // 2))
        for term in reversed(held):
            for left, matrix in zip(lefts, term, strict=True):
                product = (left @ matrix).astype(np.float32)  # [4, 16, columns]
                for i in range(columns // 2):
                    row, column = self.g + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * self.t + i % 2
                    sums[i] = sums[i] + product[self.warp, row, column]
        return sums

    def when(self, condition: Any, then: Callable[[], None]) -> None:
        if condition.any():
            then()

    def loop(self, count: Any, body: Callable[..., list[Any]], state: list[Any]) -> list[Any]:
        for i in range(count if isinstance(count, int) else int(count[0])):
            state = body(self.const_i(i), state)
        return state

    def repeat(self, body: Callable[..., tuple[list[Any], Any]], state: list[Any]) -> list[Any]:
        active = np.full(THREADS, True)
        while active.any():
            new, go_on = body(list(state))
            state = [np.where(active, x, y) for x, y in zip(new, state, strict=True)]
            active = active & go_on
            self.repeats += 1
        return state

    def add_to(self, memory: np.ndarray, offset: Any, value: Any) -> None:
        np.add.at(memory.view(np.uint32), offset.astype(int) // 4, value)

    def _words(self, memory: Any, offset: Any) -> tuple[np.ndarray, np.ndarray]:
        at = offset.view(np.int32).astype(int)
        if isinstance(memory, Pointer):
            return memory.memories[0], memory.start + at
        return memory, at

    def load(self, memory: Any, offset: Any, count: int, plus: int = 0) -> list[Any]:
        memory, at = self._words(memory, offset)
        at = at + plus
        assert (at % (4 * count) == 0).all()
        assert (at >= 0).all()
        return [memory.view(np.uint32)[at // 4 + i] for i in range(count)]

    def store(self, memory: Any, offset: Any, values: list[Any], where: Any = True) -> None:
        memory, at = self._words(memory, offset)
        at = at[np.broadcast_to(where, (THREADS,))]
        assert (at % (4 * len(values)) == 0).all()
        assert (at >= 0).all()
        for i, value in enumerate(values):
            memory.view(value.dtype)[at // 4 + i] = value[np.broadcast_to(where, (THREADS,))]


def memory(x: Any) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(x)).view(np.uint8).reshape(-1).copy()


def orthogonal(dim: int, rng: np.random.Generator) -> np.ndarray:
    return np.linalg.qr(rng.normal(size=(dim, dim)))[0].astype(np.float32)


@dataclasses.dataclass
class Written:
    words: np.ndarray
    meta: np.ndarray
    counts: np.ndarray
    repeats: int


def write(side: Side, rows: np.ndarray, x: np.ndarray, mu: np.ndarray, offset: int) -> Written:
    """A unit of two pages, from ``offset`` of rows bf16[H, D] on and from row 0; one KV head."""
    ops = Machine()
    own = [np.full(side.own_bytes, 0xFF, np.uint8) for _ in range(3)]
    matrix = np.full(side.matrix_bytes, 0xFF, np.uint8)  # NaN
    if side.streamed:
        both = stream.operands([side], [jnp.array(x)[None]], jnp.array(mu)[None])
        stages, held = (np.asarray(y)[0] for y in both)
        transform.keep_held(ops, side, memory(held), own[0])
    else:
        for w in range(3):
            arrays = (memory(x), memory(mu), matrix, own[w], ops.const_i(w))
            transform.prepare(ops, side, *arrays, 3)
        kept = SHIFT + 4 * side.dim
        assert (own[0][:kept] == own[1][:kept]).all()
    pages, meta = np.zeros(3 * side.page_bytes, np.uint8), np.zeros(3 * PAGE * 4, np.uint8)
    counts = np.zeros(8, np.uint8)
    refs = dict(
        page_id=memory(np.array([2, 0], np.int32)),
        row=memory(np.array([0, 0], np.int32)),
        offset=memory(np.array([offset, 0], np.int32)),
        source=memory(rows),
        keys=memory(rows),
        pages=pages,
        meta=meta,
        matrix=matrix,
        own=own[0],
        buffer=np.zeros(side.buffer_bytes, np.uint8),
        counts=counts,
    )
    place = Place(2, len(rows), 1, side.dim)
    unit, head = ops.const_i(0), ops.const_i(0)
    if side.streamed:
        write_streamed(ops, side, place, refs, [memory(stage) for stage in stages])
    else:
        write_unit(ops, side, place, unit, head, refs)
    shape = (PAGE, side.dim) if side.keys else (side.dim, PAGE)
    words = pages.view(np.uint16).reshape(3, shape[0], shape[1] * side.bits // 16)
    held = words, meta.view(np.uint32).reshape(3, PAGE)
    return Written(held[0][[2, 0]], held[1][[2, 0]], counts.view(np.int32), ops.repeats)


def write_streamed(
    ops: Machine, side: Side, place: Place, refs: dict[str, Any], stages: list[np.ndarray]
) -> None:
    """``mosaic_kernel.Body.write_streamed`` without its ring."""
    located = locate(ops, place, ops.const_i(0), ops.const_i(0), refs)
    unit = Unit(ops, side, place, located, refs)
    unit.begin()
    for tile in reversed(range(TILES)):
        raw = transform.copied_rows(ops, side, refs["buffer"])
        steps, scales, inverses = transform.operands(ops, raw)
        rows, sums = [x for step in steps for x in step], None
        for piece, stage in enumerate(stages):
            sums = transform.product(ops, side, piece, stage, rows, sums)
        assert sums is not None
        unit.encode(ops.const_i(tile), sums, scales, inverses)
    unit.finish()


def hostile(
    kind: str, shape: tuple[int, int], turn: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    x = rng.normal(size=shape)
    if kind == "outliers":
        x[:, [3, 17]] *= 40
    if kind == "mean":
        x = x + 10 * rng.choice([-1, 1], shape[1])
    if kind == "positive":  # once transformed
        x = (np.abs(x) + 1e-3) @ turn.T
    if kind == "mixed":
        x = x * 10.0 ** rng.uniform(-5, 6, (shape[0], 1))
    return x.astype(ml_dtypes.bfloat16)


SIDES = (
    Side(128, "uniform", 0.96),
    Side(128, "waterfill", 0.96, gain=True),
    Side(128, None, 0.92),
    Side(64, "uniform", 0.9, gain=True),
    Side(64, "waterfill", 1.0),
    Side(64, None, 1.0),
    Side(64, None, 0.92),
    Side(128, "uniform", 0.3),
    Side(256, "uniform", 0.96, gain=True),
    Side(256, "waterfill", 0.96, gain=True),
    Side(256, None, 0.92),
)
WIDE = (
    Side(64, "uniform", 1.0, gain=True, bits=3),
    Side(128, "uniform", 0.96, bits=3),
    Side(128, "waterfill", 1.0, gain=True, bits=3),
    Side(128, "uniform", 1.0, bits=4),
    Side(64, "waterfill", 1.0, gain=True, bits=4),
    Side(128, None, 1.0, bits=4),
    Side(256, "uniform", 1.0, gain=True, bits=3),
)


def taken(rows: np.ndarray, offset: int) -> np.ndarray:
    """The tokens of the unit that ``write`` writes."""
    both = (offset + np.arange(PAGE)) % len(rows), np.arange(PAGE)
    return rows[np.concatenate(both)].astype(float)


def specification(side: Side, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """(codes, metadata, saturated rows) of transformed rows [2 T, D]."""
    pages = jnp.asarray(x.reshape(2, PAGE, side.dim), jnp.float32)
    if side.codec is not None:
        codec = Codec(side.codec, clip_k=side.clip, gain=side.gain, key_bits=side.bits)
        want = fmt.encode_key_pages(pages, codec)
    else:
        want = fmt.encode_value_pages(pages, Codec(clip_v=side.clip, value_bits=side.bits))
    return codes_of(side, want.words), np.asarray(want.meta), int(want.saturated)


def codes_of(side: Side, words: Any) -> np.ndarray:
    words = jnp.asarray(words)
    if side.codec:
        return np.asarray(fmt.unpack_keys(words, side.codec, side.bits), int)
    return np.asarray(fmt.unpack_values(words, side.bits), int)


def steps(side: Side, got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Steps between the numbers of two arrays of metadata."""
    first, out = 0, []
    for width in (16, 8, 8) if side.codec == "waterfill" else (16, 16):
        mine, right = ((x.astype(np.int64) >> first) & (2**width - 1) for x in (got, want))
        out.append(np.abs(mine - right))
        first += width
    return np.stack(out)


SLOW = ("mixed", Side(128, "uniform", 0.3))  # many candidates at each of many scales
CASES = [(kind, side) for kind in ("outliers", "mean", "positive", "mixed") for side in SIDES]
CASES += [("outliers", side) for side in WIDE] + [("mixed", WIDE[0]), ("positive", WIDE[4])]


@pytest.mark.parametrize(("kind", "side"), [case for case in CASES if case != SLOW], ids=str)
def test_a_unit_is_what_the_specification_writes(side: Side, kind: str) -> None:
    rng = np.random.default_rng((SIDES + WIDE).index(side))
    x = orthogonal(side.dim, rng)
    rows = hostile(kind, (300, side.dim), x, rng)
    mu = (rows.astype(np.float32).mean(0) * 0.9).astype(np.float32)
    got = write(side, rows, x, mu, offset=250)
    exact = (taken(rows, 250) - mu * side.keys) @ x.astype(float)
    codes, meta, saturated = specification(side, exact)
    apart = np.abs(codes_of(side, got.words) - codes)
    same = ~apart.any(-1)  # a code that differs moves the gain
    off = steps(side, got.meta, meta)
    assert apart.max() <= 1
    assert (apart > 0).mean() < 1e-3
    assert off[:, same | (not side.gain)].max() <= (1 if kind != "positive" else 4)
    assert (off > 0).mean() < (1e-2 if kind != "positive" else 2e-2)
    assert got.counts.tolist() == [saturated, 0]


def test_a_row_with_nan_or_inf_is_counted_once_and_harms_no_other() -> None:
    rng = np.random.default_rng(5)
    x = orthogonal(64, rng)
    rows = rng.normal(size=(300, 64)).astype(ml_dtypes.bfloat16)
    rows[130, 5], rows[200, 7] = np.nan, -np.inf
    for side in (Side(64, "uniform", 0.96), Side(64, "waterfill", 1.0), WIDE[4]):
        with np.errstate(invalid="ignore"):
            got = write(side, rows, x, np.zeros(64, np.float32), offset=128)
        codes, _, _ = specification(side, taken(rows, 128) @ x)
        good = np.delete(np.arange(PAGE), [2, 72])
        assert got.counts[1] == 2
        assert (codes_of(side, got.words)[0, good] == codes[0, good]).all()
    # The values of these rows are bad too, but so are their keys, which count them.
    with np.errstate(invalid="ignore"):
        got = write(Side(64, None, 0.92), rows, x, np.zeros(64, np.float32), offset=128)
    assert got.counts[1] == 0


@pytest.mark.parametrize("columns", [16, 32, 64])
@pytest.mark.parametrize("rank", [1, 3, 11, 64])
def test_the_order_statistic_is_exact_among_ties_zeros_and_sizes_far_apart(
    columns: int, rank: int
) -> None:
    """``columns`` numbers in each of four lanes are a row, and there are two rows a lane."""
    rng, ops = np.random.default_rng(rank), Machine()
    values = rng.normal(size=(2, columns, THREADS)).astype(np.float32)
    values[0, :, :32] *= 10.0 ** rng.integers(-9, 9, (columns, 32)).astype(np.float32)
    values[0, :, 32:64] = rng.integers(-2, 3, (columns, 32))
    values[1, :, 64:96] = np.float32(1.5)
    values[1, :, 96:] = 0
    rows = [list(row) for row in values]
    by_row = np.abs(values).reshape(2, columns, -1, 4).transpose(0, 2, 1, 3).reshape(2, 32, -1)
    largest = [np.repeat(by_row[h].max(-1), 4) for h in range(2)]
    yes = np.full(THREADS, True)
    buffer = np.zeros(2 * columns * THREADS * 4, np.uint8)
    got = order.kth_largest(ops, rows, largest, [yes, yes], rank, buffer)
    want = -np.sort(-by_row, -1)[..., rank - 1]
    for h in range(2):
        assert (got[h].reshape(32, 4) == want[h][:, None]).all()


def test_extremes_hold_for_rows_of_one_sign_and_tell_what_is_finite() -> None:
    rng, ops = np.random.default_rng(1), Machine()
    values = rng.normal(size=(2, 16, THREADS)).astype(np.float32)
    values[0, :, :64] = np.abs(values[0, :, :64])
    values[1, :, 64:] = -np.abs(values[1, :, 64:])
    values[0, 3, 100], values[1, 4, 9], values[1, 5, 20] = np.nan, np.inf, -np.inf
    found = order.extremes(ops, [list(row) for row in values])
    for h, (top, low, finite) in enumerate(found):
        rows = values[h].reshape(16, 32, 4).transpose(1, 0, 2).reshape(32, -1)
        good = np.isfinite(rows).all(-1)
        assert (finite.reshape(32, 4) == good[:, None]).all()
        assert (top.reshape(32, 4)[good] == rows[good].max(-1)[:, None]).all()
        assert (low.reshape(32, 4)[good] == rows[good].min(-1)[:, None]).all()


@pytest.mark.parametrize("side", [Side(64, "uniform", 1), Side(256, "uniform", 1)], ids=str)
def test_columns_and_rows_are_permutations_that_arrays_share(side: Side) -> None:
    channels = side.channel(np.arange(side.dim))
    assert sorted(channels) == list(range(side.dim))
    rows = transform.operand_channels(side.dim).reshape(-1)
    assert sorted(rows) == list(range(side.dim))
    x = np.arange(side.dim * side.dim).reshape(side.dim, side.dim)
    assert (stream.by_column(side, x) == x[:, channels]).all()
    assert (stream.by_column(side, x[:, channels], back=True) == x).all()
    assert (stream.by_step(x) == x[rows]).all()
    assert (stream.by_step(x[rows], back=True) == x).all()


@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_pieces_are_both_matrices_to_22_bits_at_any_scale(scale: float) -> None:
    rng, dim = np.random.default_rng(2), 256
    sides = Side(dim, "uniform", 0.96), Side(dim, None, 0.92)
    xs = [np.float32(scale) * orthogonal(dim, rng)[None] for _ in sides]
    mu = rng.normal(size=(1, dim)).astype(np.float32)
    pieces, first = stream.operands(sides, [jnp.array(x) for x in xs], jnp.array(mu))
    terms = np.asarray(pieces, np.float64).reshape(2, TERMS, dim // 8, dim, 8)
    held = terms.sum(1).swapaxes(2, 3).reshape(2, dim, dim)
    for side, x, own, got in zip(sides, xs, np.asarray(first, np.float64), held, strict=True):
        got = stream.by_column(side, stream.by_step(got, back=True), back=True)
        assert 4 <= np.abs(got).max() < 8
        assert np.abs(got * own[0] - x[0]).max() <= 2.0**-22 * np.abs(x).max()
        shift = stream.by_column(side, own[4:] * own[0], back=True)
        want = -(mu[0] * side.keys) @ x[0].astype(np.float64)
        assert np.abs(shift - want).max() <= 1e-6 * np.abs(x).max() * np.abs(mu).sum()
