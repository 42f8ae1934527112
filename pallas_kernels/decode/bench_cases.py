"""The cases of the decode benchmark: what is timed, what is checked, and the inputs of both."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax import lax

from pallas_kernels import format as fmt
from pallas_kernels.decode import mosaic_gpu, xla
from pallas_kernels.decode.mosaic_kernel import Config
from pallas_kernels.decode.mosaic_stream import StreamConfig
from pallas_kernels.format import PAGE, Codec
from pallas_kernels.layout import LayerKV, Tables, Transform, Windows
from pallas_kernels.packing import words_per_row

ROTATE_BYTES = 400 << 20  # of pages that a case's calls go through before one is read again


@dataclasses.dataclass(frozen=True)
class Case:
    """A decode step: shapes, and tokens per row."""

    batch: int
    tokens: int
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    codec: Literal["uniform", "waterfill", "bf16"] = "uniform"  # bf16: pages of BF16
    ragged: bool = False  # rows of tokens/8 to tokens, evenly
    content: Literal["random", "outliers", "sharp"] = "random"  # see ``encoded``
    bits: tuple[int, int] = (2, 2)  # of keys and values in packed pages

    @property
    def lengths(self) -> np.ndarray:
        if not self.ragged:
            return np.full(self.batch, self.tokens, np.int32)
        return np.linspace(self.tokens // 8, self.tokens, self.batch).astype(np.int32)

    @property
    def key_codec(self) -> Codec:
        key: Any = "uniform" if self.codec == "bf16" else self.codec
        return Codec(key).with_bits(key=self.bits[0], value=self.bits[1])

    @property
    def page_bytes(self) -> int:
        """Of a page and KV head."""
        if self.codec == "bf16":
            return PAGE * 4 * self.head_dim
        return PAGE * (self.head_dim * sum(self.bits) // 8 + 8)

    @property
    def name(self) -> str:
        kind = "" if self.codec == "uniform" else f" {self.codec}"
        kind += "" if self.bits == (2, 2) else " K{}V{}".format(*self.bits)
        heads = f"{self.kv_heads * self.group}/{self.kv_heads}"
        more = "" if self.content == "random" else f" {self.content}"
        ragged = " ragged" * self.ragged
        return f"{self.batch} x {self.tokens} D{self.head_dim} {heads}{kind}{ragged}{more}"


WINDOWS = Windows()
ROWS = (
    Case(32, 32768),
    Case(64, 8192),
    Case(1, 131072),
    Case(1, 32768),
    Case(32, 32768, codec="waterfill"),
    Case(1, 32768, codec="waterfill"),
    Case(32, 8192, kv_heads=3, group=3, head_dim=64),
    Case(32, 8192, kv_heads=4, group=4, head_dim=256),
    Case(32, 32768, ragged=True),
    Case(8, 32768),
    Case(1, 8192),
    Case(1, 1_000_000),
    Case(32, 32768, codec="bf16"),
    Case(1, 32768, codec="bf16"),
    Case(32, 8192, kv_heads=3, group=3, head_dim=64, codec="bf16"),
    Case(32, 8192, kv_heads=4, group=4, head_dim=256, codec="bf16"),
    Case(32, 32768, bits=(3, 2)),
    Case(32, 32768, codec="waterfill", bits=(3, 2)),
    Case(1, 32768, bits=(3, 2)),
    Case(32, 8192, kv_heads=3, group=3, head_dim=64, bits=(3, 2)),
    Case(32, 8192, kv_heads=4, group=4, head_dim=256, bits=(3, 2)),
    Case(32, 32768, bits=(4, 2)),
    Case(32, 32768, bits=(2, 4)),
    Case(32, 32768, bits=(4, 4)),
)
CHECKS = (
    Case(3, 2000),
    Case(2, 5000, codec="waterfill", ragged=True),
    Case(3, 3000, kv_heads=3, group=3, head_dim=64, ragged=True),
    Case(3, 3000, kv_heads=3, group=5, head_dim=64, codec="waterfill"),
    Case(2, 2500, kv_heads=2, group=6, head_dim=256, ragged=True),
    Case(2, 2500, kv_heads=2, group=12, head_dim=256, codec="waterfill"),
    Case(2, 1500, kv_heads=2, group=1),
    Case(2, 1500, kv_heads=2, group=7, codec="waterfill"),
    Case(2, 1500, kv_heads=2, group=16),
    Case(4, 447, kv_heads=2, ragged=True),
    Case(256, 700, kv_heads=2, ragged=True),  # several rows per block before and after
    Case(1, 100_000),
    Case(3, 2500, ragged=True, codec="bf16"),
    Case(2, 3000, kv_heads=3, group=5, head_dim=64, ragged=True, codec="bf16"),
    Case(2, 1500, kv_heads=2, group=12, head_dim=256, ragged=True, codec="bf16"),
    Case(2, 1500, kv_heads=2, content="outliers"),
    Case(2, 1500, kv_heads=2, codec="waterfill", content="outliers"),
    Case(2, 1500, kv_heads=2, content="sharp"),
    Case(2, 1500, kv_heads=2, group=6, codec="waterfill", content="sharp"),
    Case(3, 3000, kv_heads=3, group=3, head_dim=64, ragged=True, bits=(3, 2)),
    Case(3, 3000, kv_heads=3, group=5, head_dim=64, codec="waterfill", bits=(3, 2)),
    Case(3, 2000, bits=(3, 2)),
    Case(2, 5000, codec="waterfill", ragged=True, bits=(3, 2)),
    Case(2, 2500, kv_heads=2, group=6, head_dim=256, ragged=True, bits=(3, 2)),
    Case(2, 2500, kv_heads=2, group=12, head_dim=256, codec="waterfill", bits=(3, 2)),
    Case(2, 1500, kv_heads=2, content="outliers", bits=(3, 2)),
    Case(2, 1500, kv_heads=2, group=6, codec="waterfill", content="sharp", bits=(3, 2)),
    Case(2, 1500, kv_heads=2, group=7, bits=(3, 4)),
    Case(3, 2000, bits=(4, 2)),
    Case(2, 2500, kv_heads=2, group=6, codec="waterfill", content="outliers", bits=(4, 2)),
    Case(3, 2000, bits=(2, 4)),
    Case(2, 2500, kv_heads=2, group=5, head_dim=64, codec="waterfill", bits=(2, 4)),
)


@dataclasses.dataclass
class Inputs:
    q: Any
    layer: LayerKV
    transform: Transform | None  # None for BF16 pages
    tables: list[Tables]  # to rotate over
    lengths: Any


@functools.partial(jax.jit, static_argnames=("case", "pages", "slots"))
def _random(seed: Any, case: Case, pages: int, slots: int, scale_v: Any) -> tuple[Any, ...]:
    keys = iter(jax.random.split(jax.random.key(seed, impl="rbg"), 16))
    heads, dim = case.kv_heads, case.head_dim

    def meta(scale: Any, least: Any) -> Any:
        bits = lambda x: lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint16)  # noqa: E731
        return bits(scale).astype(jnp.uint32) | bits(least).astype(jnp.uint32) << 16

    shape = (pages, heads, PAGE)
    scale_k, scale = (jax.random.uniform(next(keys), shape, minval=0.5, maxval=1.0) for _ in "kv")
    # Codes of any width spread alike.
    top_k, top_v = (2**bits - 1 for bits in case.bits)
    scale_k, scale = 3 / top_k * scale_k, 3 / top_v * scale
    least = -top_k / 2 * scale_k + 0.2 * jax.random.normal(next(keys), shape)
    k_meta = meta(scale_k, least)
    if case.codec == "waterfill":  # head and tail as e5m3 bytes: 0x70 is 0.5, a step is 1/8
        first = 0x6C - 8 * (case.bits[0] - 2)
        byte = lambda: jax.random.randint(next(keys), shape, first, first + 8).astype(jnp.uint32)  # noqa: E731
        k_meta = (k_meta & 0xFFFF) | byte() << 16 | byte() << 24
    v_meta = meta(scale * scale_v, -top_v / 2 * scale * scale_v)
    normal = lambda *s: jax.random.normal(next(keys), s)  # noqa: E731
    bf16 = case.codec == "bf16"

    def words(rows: int, row: int, scale: Any) -> Any:
        if bf16:
            shape = (pages, heads, PAGE, dim)
            return jax.random.normal(next(keys), shape, jnp.bfloat16) * jnp.bfloat16(scale)
        return jax.random.bits(next(keys), (pages, heads, rows, row), jnp.uint16)

    near = lambda rows: normal(slots, heads, rows, dim).astype(jnp.bfloat16)  # noqa: E731
    layer = LayerKV(
        words(PAGE, words_per_row(dim, case.bits[0]), 1.0),
        words(dim, words_per_row(PAGE, case.bits[1]), scale_v),
        None if bf16 else k_meta,
        None if bf16 else v_meta,
        near(WINDOWS.sink),
        near(WINDOWS.sink) * scale_v,
        near(WINDOWS.ring),
        near(WINDOWS.ring) * scale_v,
    )
    q = normal(case.batch, 1, heads * case.group, dim).astype(jnp.bfloat16)
    return q, layer, normal(heads, dim) * 0.1


def inputs(case: Case, seed: int = 0, rotate: bool = True, scale_v: float = 1.0) -> Inputs:
    """Random pages in random order, orthogonal transforms."""
    rng = np.random.default_rng(seed)
    n = case.lengths
    pages = np.maximum(0, (n - WINDOWS.sink - WINDOWS.recent) // PAGE)
    size = int(pages.sum()) * case.kv_heads * case.page_bytes
    sets = min(16, max(1, -(-ROTATE_BYTES // max(size, 1)))) if rotate else 1
    total = max(1, int(pages.sum())) * sets + 3  # three pages that nothing owns
    slots = case.batch * sets + 1
    q, layer, mu = _random(seed, case, total, slots, scale_v)
    ids, owners = rng.permutation(total), rng.permutation(slots)
    tables = []
    width = int(pages.max()) + 1
    for index in range(sets):
        table = np.full((case.batch, width), 10**6)
        start = index * int(pages.sum())
        for row, count in enumerate(pages):
            table[row, :count] = ids[start : start + count]
            start += count
        owner = owners[index * case.batch : (index + 1) * case.batch].astype(np.int32)
        tables.append(Tables(*map(jax.device_put, (table.astype(np.int32), owner, owner))))
    turn = lambda: np.linalg.qr(rng.normal(size=(case.kv_heads, case.head_dim, case.head_dim)))[0]  # noqa: E731
    x, y = (turn().astype(np.float32) for _ in "kv")
    if case.codec == "bf16":
        return Inputs(q, layer, None, tables, jax.device_put(n))
    transform = Transform(*map(jax.device_put, (x, x, y, y.swapaxes(-1, -2), mu)))
    return Inputs(q, layer, transform, tables, jax.device_put(n))


@jax.jit
def _nan_but(layer: LayerKV, used: Any, sink: Any, ring: Any) -> LayerKV:
    """NaN in every page, sink row and ring row outside the masks [P], [slots, S], [slots, ring]."""
    keep = lambda x, mask: jnp.where(mask[:, None, :, None], x, jnp.nan)  # noqa: E731
    pages: dict[str, Any]
    if layer.is_packed:
        meta = lambda x: jnp.where(used[:, None, None], x, jnp.uint32(0xFFFFFFFF))  # noqa: E731
        pages = dict(k_meta=meta(layer.k_meta), v_meta=meta(layer.v_meta))
    else:
        shown = used[:, None, None, None]
        pages = {x: jnp.where(shown, getattr(layer, x), jnp.nan) for x in ("k_pages", "v_pages")}
    return dataclasses.replace(
        layer,
        **pages,
        sink_k=keep(layer.sink_k, sink),
        sink_v=keep(layer.sink_v, sink),
        tail_k=keep(layer.tail_k, ring),
        tail_v=keep(layer.tail_v, ring),
    )


def poisoned(data: Inputs, case: Case) -> Inputs:
    """The same, with NaN in every page, row and slot that no row of the batch sees."""
    n, tables = np.asarray(data.lengths), data.tables[0]
    counts = np.maximum(0, (n - WINDOWS.sink - WINDOWS.recent) // PAGE)
    table, slots, layer = np.asarray(tables.block_table), np.asarray(tables.slot), data.layer
    used = np.zeros(layer.k_pages.shape[0], bool)
    ring = np.zeros((layer.tail_k.shape[0], WINDOWS.ring), bool)
    sink = np.zeros((layer.tail_k.shape[0], WINDOWS.sink), bool)
    for row, (count, length) in enumerate(zip(counts, n, strict=True)):
        used[table[row, :count]] = True
        position = np.arange(WINDOWS.sink + PAGE * count, length)
        slot = slots[row]
        ring[slot, (position - WINDOWS.sink) % WINDOWS.ring] = True
        sink[slot, :length] = True
    return dataclasses.replace(data, layer=_nan_but(layer, used, sink, ring))


def useful_bytes(case: Case) -> int:
    """Bytes that a step must read: codes, metadata and visible window rows."""
    n = case.lengths.astype(np.int64)
    pages = np.maximum(0, (n - WINDOWS.sink - WINDOWS.recent) // PAGE)
    near = n - pages * PAGE
    return int(case.kv_heads * (pages * case.page_bytes + near * case.head_dim * 4).sum())


def call(case: Case, implementation: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    keywords = dict(windows=WINDOWS, codec=case.key_codec, scale=case.head_dim**-0.5, **options)

    one_query = jax.device_put(np.ones(case.batch, np.int32))  # made here: it is not the op's

    def run(data: Inputs, tables: Tables) -> Any:
        return implementation(
            data.q,
            data.layer,
            data.transform,
            tables,
            lengths=data.lengths,
            q_lens=one_query,
            **keywords,
        )

    return run


# ------------------------------------------------------------------------------------- checking


OUTLIERS, OUTLIER_SIZE = 4, 4.0  # channels, and how much larger they are than the others
SHARP = 0.8  # times a key is the query that looks for it: 2^13 of its neighbours' weight


@functools.partial(jax.jit, static_argnames="codec")
def encode(k: Any, v: Any, codec: Codec) -> dict[str, Any]:
    """Pages of transformed keys [P, K, T, D] and values, named as ``LayerKV`` does."""
    keys, values = fmt.encode_key_pages(k, codec), fmt.encode_value_pages(v, codec)
    return dict(k_pages=keys.words, k_meta=keys.meta, v_pages=values.words, v_meta=values.meta)


def encoded(data: Inputs, case: Case) -> tuple[Inputs, np.ndarray]:
    """Pages that were really encoded, and the attention over what they were encoded from.

    "outliers": a few channels of the keys are much larger. "sharp": every query is (a part of) one
    token's key, so that this token weighs as much as a thousand others, which stay flat.

    Returns:
        the inputs with these pages, and f64[B, N, D], dense attention over the unquantised tokens.
    """
    rng, layer, transform = np.random.default_rng(5), data.layer, data.transform
    if transform is None:
        raise ValueError(f"{case.codec=} has no encoded pages: must be uniform or waterfill")
    shape = (layer.k_pages.shape[0], case.kv_heads, PAGE, case.head_dim)
    k, v = (rng.normal(size=shape).astype(np.float32) for _ in "kv")
    if case.content == "outliers":
        k[..., rng.permutation(case.head_dim)[:OUTLIERS]] *= OUTLIER_SIZE
    layer = dataclasses.replace(layer, **encode(k, v, case.key_codec))
    table = np.asarray(data.tables[0].block_table)
    q = np.asarray(data.q)[:, 0].astype(np.float64)
    x_q, x_o, mu = (np.asarray(x, np.float64) for x in (transform.x_q, transform.x_o, transform.mu))
    if case.content == "sharp":
        for row, head in np.ndindex(*q.shape[:2]):
            own = head // case.group
            q[row, head] = SHARP * x_q[own] @ k[table[row, 1], own, 7 + head]
    rounded = q.astype(ml_dtypes.bfloat16)
    q = rounded.astype(np.float64)
    data = dataclasses.replace(data, layer=layer, q=jax.device_put(rounded[:, None]))
    out = np.zeros(q.shape)
    slots = np.asarray(data.tables[0].slot)
    sinks, tails = (
        [np.asarray(getattr(layer, f"{part}_{side}")) for side in "kv"] for part in ("sink", "tail")
    )
    for row, length in enumerate(case.lengths):
        count = max(0, (int(length) - WINDOWS.sink - WINDOWS.recent) // PAGE)
        near = np.arange(WINDOWS.sink + PAGE * count, length)
        slot, ring = slots[row], (near - WINDOWS.sink) % WINDOWS.ring
        for head in range(q.shape[1]):
            own, pages = head // case.group, table[row, :count]
            far_k, far_v = (
                x[pages, own].reshape(-1, case.head_dim).astype(np.float64) for x in (k, v)
            )
            near_k, near_v = (
                np.concatenate([sink[slot, own], tail[slot, own, ring]]).astype(np.float64)
                for sink, tail in zip(sinks, tails, strict=True)
            )
            asked = q[row, head]
            logits = np.concatenate([far_k @ (asked @ x_q[own]) + asked @ mu[own], near_k @ asked])
            weights = np.exp((logits - logits.max()) * case.head_dim**-0.5)
            seen = np.concatenate([far_v @ x_o[own], near_v])
            out[row, head] = weights @ seen / weights.sum()
    return data, out


def check(
    case: Case, config: Config | StreamConfig | None = None, seed: int = 1, scale_v: float = 1.0
) -> dict[str, Any]:
    """Relative errors on the device, and whether ten repeats are equal.

    ``error`` is against ``xla`` on the same pages with float32 queries, ``bf16_error`` with BF16
    queries and output. With encoded pages also ``dense_error`` and ``xla_dense_error``,
    against float64 attention over what was encoded: the first at most 1.5 times the second.
    """
    size = lambda x: float(np.linalg.norm(x))  # noqa: E731
    data = inputs(case, seed, rotate=False, scale_v=scale_v)
    dense = None
    if case.content != "random":
        data, dense = encoded(data, case)
    data = poisoned(data, case)
    half = data
    data = dataclasses.replace(data, q=jax.device_put(np.asarray(half.q).astype(np.float32)))
    want = np.asarray(call(case, xla.decode)(data, data.tables[0]), np.float64)
    run = call(case, mosaic_gpu.decode, config=config)
    outs = [np.asarray(run(data, data.tables[0])) for _ in range(10)]
    rounded = np.asarray(run(half, data.tables[0]), np.float64)
    errors = {
        "error": size(outs[0] - want) / size(want),
        "bf16_error": size(rounded - want) / size(want),
    }
    equal = all((x == outs[0]).all() for x in outs)
    passed = max(errors.values()) <= 3e-3 and equal
    if dense is not None:
        for name, x in (("dense_error", outs[0]), ("xla_dense_error", want)):
            errors[name] = size(x[:, 0] - dense) / size(dense)
        passed = passed and errors["dense_error"] <= 1.5 * errors["xla_dense_error"]
    return {
        "case": case.name,
        "scale_v": scale_v,
        **errors,
        "repeats_equal": equal,
        "passed": bool(passed),
    }
