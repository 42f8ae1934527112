"""The write op's cases: shapes that are timed, data that is hostile to it, and the comparison."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels import format as fmt
from pallas_kernels.decode.bench_cases import encode
from pallas_kernels.format import PAGE, Codec, KeyCodec
from pallas_kernels.layout import LayerKV, PageJobs, Transform
from pallas_kernels.packing import unpack_keys, unpack_values, words_per_row
from pallas_kernels.write import mosaic_gpu, xla

ROTATE_BYTES = 400 << 20  # of sources that a case's calls go through before one is read again
RING = 400  # rows of a tail with the default windows
WATERFILL_PLACES = (16, 8, 8)  # bits of the numbers in a word of metadata, from the lowest on
UNIFORM_PLACES = (16, 16)


@dataclasses.dataclass(frozen=True)
class Case:
    """Pages to write in one call: ``pages`` of each of ``rows`` rows.

    Args:
        ring: they come from the rings of a decode step, one page each; else from a prefill's band.
        data: how the keys and values are distributed, see ``rows_of``.
        key_bits, value_bits: of a code; nothing is clipped from 3 bits on.
    """

    rows: int
    pages: int
    kv_heads: int = 8
    head_dim: int = 128
    v_head_dim: int = 128
    key: KeyCodec = "uniform"
    gain: bool = False
    ring: bool = False
    data: str = "plain"
    key_bits: int = 2
    value_bits: int = 2

    @property
    def codec(self) -> Codec:
        plain = Codec(key=self.key, gain=self.gain)
        return plain.with_bits(key=self.key_bits, value=self.value_bits)

    @property
    def length(self) -> int:
        """Rows H of the source."""
        return RING if self.ring else self.pages * PAGE + 384

    @property
    def name(self) -> str:
        source = "ring" if self.ring else "band"
        dims = f"D{self.head_dim}" + f"/{self.v_head_dim}" * (self.v_head_dim != self.head_dim)
        kind = self.key + " gain" * self.gain
        if self.codec.bits != (2, 2):
            kind += " K{}V{}".format(*self.codec.bits)
        data = "" if self.data == "plain" else f" {self.data}"
        return f"{self.rows} x {self.pages * PAGE} {source} {dims} K{self.kv_heads} {kind}{data}"


ROWS = (
    Case(1, 256),
    Case(1, 256, key="waterfill"),
    Case(1, 256, gain=True),
    Case(1, 256, key="waterfill", gain=True),
    Case(1, 16),
    Case(1, 16, key="waterfill", gain=True),
    Case(32, 1, ring=True),
    Case(32, 1, ring=True, key="waterfill", gain=True),
    Case(1, 256, kv_heads=3, head_dim=64, v_head_dim=64),
    Case(1, 256, kv_heads=4, head_dim=256, v_head_dim=256),
    Case(1, 256, kv_heads=4, head_dim=256, v_head_dim=256, key="waterfill", gain=True),
    Case(32, 1, kv_heads=4, head_dim=256, v_head_dim=256, ring=True),
    Case(1, 256, key="waterfill", gain=True, key_bits=3),
)
KINDS = ("plain", "outliers", "mean", "positive", "small", "large")
CHECKS = (
    *(Case(2, 3, 2, data=kind) for kind in KINDS),
    *(Case(2, 3, 2, key="waterfill", gain=True, data=kind) for kind in KINDS),
    Case(5, 1, 3, ring=True, gain=True),
    Case(2, 4, 3, 64, 64, data="mean"),
    Case(2, 4, 3, 64, 128, "waterfill", data="outliers"),
    Case(2, 4, 1, 128, 64, gain=True, data="positive"),
    Case(1, 300),
    Case(1, 3, 1, 256, 256, gain=True, data="outliers"),
    Case(1, 3, 1, 256, 128, "waterfill", data="mean"),
    Case(1, 75, 4, 256, 256),
    Case(5, 1, 3, 64, 256, "waterfill", gain=True, ring=True),
    Case(2, 3, 2, gain=True, data="outliers", key_bits=3),
    Case(2, 3, 2, key="waterfill", gain=True, data="mean", key_bits=3),
    Case(2, 4, 3, 64, 64, gain=True, data="outliers", key_bits=4, value_bits=4),
    Case(5, 1, 3, 128, 64, "waterfill", gain=True, ring=True, key_bits=4, value_bits=4),
    Case(1, 3, 1, 64, 256, gain=True, key_bits=3, value_bits=4),
    Case(1, 3, 1, 256, 128, "waterfill", gain=True, key_bits=4),
)


def rows_of(kind: str, shape: tuple[int, ...], x: np.ndarray, rng: Any) -> np.ndarray:
    """Keys or values in BF16: [..., n, D] of a head whose transform is the orthogonal x [D, D].

    "outliers": two channels 40 times the others. "mean": ten times the spread, in every channel.
    "positive": the transformed rows have one sign and a smallest magnitude near 0.
    "small", "large": values of 1e-3, of 1e3.
    """
    values = rng.normal(size=shape)
    if kind == "outliers":
        values[..., [3, 17]] *= 40
    if kind == "mean":
        values = values + 10 * rng.choice([-1, 1], shape[-1])
    if kind == "positive":
        values = (np.abs(values) + 1e-3) @ x.T
    values = values * {"small": 1e-3, "large": 1e3}.get(kind, 1.0)
    return values.astype(ml_dtypes.bfloat16)


@dataclasses.dataclass
class Inputs:
    layer: LayerKV
    sources: list[tuple[Any, Any]]  # keys and values [X, K, H, D], to rotate over
    transform: Transform
    jobs: PageJobs


def _layer(case: Case, pages: int) -> LayerKV:
    dims = case.head_dim, case.v_head_dim
    heads, (key_bits, value_bits) = case.kv_heads, case.codec.bits
    zeros = lambda dtype, *shape: jax.device_put(np.zeros(shape, dtype))  # noqa: E731
    return LayerKV(
        zeros(np.uint16, pages, heads, PAGE, words_per_row(dims[0], key_bits)),
        zeros(np.uint16, pages, heads, dims[1], words_per_row(PAGE, value_bits)),
        *(zeros(np.uint32, pages, heads, PAGE) for _ in dims),
        *(zeros(ml_dtypes.bfloat16, 1, heads, 64, d) for d in dims),
        *(zeros(ml_dtypes.bfloat16, 1, heads, RING, d) for d in dims),
    )


def inputs(case: Case, seed: int = 0, rotate: bool = True) -> Inputs:
    """Sources, orthogonal transforms, and jobs for pages in random order; every 7th is skipped
    unless ``rotate``."""
    rng = np.random.default_rng(seed)
    dims, count = (case.head_dim, case.v_head_dim), case.rows * case.pages
    turns = [
        np.stack([np.linalg.qr(rng.normal(size=(d, d)))[0] for _ in range(case.kv_heads)]).astype(
            np.float32
        )
        for d in dims
    ]
    shapes = [(case.rows, case.kv_heads, case.length, d) for d in dims]
    if rotate:
        size = sum(2 * int(np.prod(shape)) for shape in shapes)
        sets = min(16, max(2, -(-ROTATE_BYTES // size)))
        make = jax.jit(
            lambda key, shape: jax.random.normal(key, shape, jnp.bfloat16), static_argnums=1
        )
        keys = iter(jax.random.split(jax.random.key(seed), 2 * sets))
        sources = [tuple(make(next(keys), shape) for shape in shapes) for _ in range(sets)]
        mu = np.zeros((case.kv_heads, dims[0]), np.float32)
    else:
        held = []
        for shape, turn in zip(shapes, turns, strict=True):
            heads = [rows_of(case.data, shape[:1] + shape[2:], x, rng) for x in turn]
            held.append(np.stack(heads, 1))
        mu = held[0].astype(np.float32).mean((0, 2)) * 0.9
        sources = [tuple(jax.device_put(x) for x in held)]
    order = rng.permutation(count + 2)[:count]
    if not rotate:
        order[1::7] = -1
    row, page = (x.reshape(-1) for x in np.mgrid[: case.rows, : case.pages])
    offset = page * PAGE + (37 if not rotate else 0)
    offset = (offset + 128 * row) % case.length if case.ring else offset
    jobs = PageJobs(*(jax.device_put(x.astype(np.int32)) for x in (row, offset, order)))
    x_k, x_v = (jax.device_put(x) for x in turns)
    transform = Transform(x_k, x_k, x_v, x_v, jax.device_put(mu))
    return Inputs(_layer(case, count + 2), sources, transform, jobs)


def useful_bytes(case: Case) -> int:
    """Bytes that must be read (BF16 rows) and written (codes and metadata)."""
    pairs = zip((case.head_dim, case.v_head_dim), case.codec.bits, strict=True)
    per_token = sum(2 * dim + dim * bits // 8 + 4 for dim, bits in pairs)
    return case.rows * case.pages * PAGE * case.kv_heads * per_token


# ------------------------------------------------------------------------------------- checking


def exact(case: Case, data: Inputs) -> LayerKV:
    """What the specification makes of keys and values transformed in float64, on the CPU."""
    k, v = (np.asarray(x).astype(np.float64) for x in data.sources[0])
    x_k, x_v, mu = (
        np.asarray(x, np.float64)
        for x in (data.transform.x_k, data.transform.x_v, data.transform.mu)
    )
    jobs = np.stack([data.jobs.row, data.jobs.offset, data.jobs.page_id])
    row, offset, page = jobs[:, jobs[2] >= 0]
    taken = (offset[:, None] + np.arange(PAGE)) % case.length  # [J, T]
    rows = lambda x: x.swapaxes(1, 2)[row[:, None], taken].swapaxes(1, 2)  # noqa: E731
    keys, values = (rows(k) - mu[:, None]) @ x_k, rows(v) @ x_v  # [J, K, T, .]
    with jax.default_device(jax.devices("cpu")[0]):
        encoded = encode(keys.astype(np.float32), values.astype(np.float32), case.codec)
    pools: dict[str, Any] = {}
    for name, x in encoded.items():
        pool = np.array(getattr(data.layer, name))
        pool[page] = x
        pools[name] = jax.device_put(pool)
    return dataclasses.replace(data.layer, **pools)


def _steps(got: Any, want: Any, widths: tuple[int, ...]) -> np.ndarray:
    """How many steps the numbers packed in words are apart, one row per number.

    Bits of floats of one sign count them in order; a float16's sign makes that order go on below 0.
    """
    out, first = [], 0
    for width in widths:
        pair = [(np.asarray(x).astype(np.int64) >> first) & (2**width - 1) for x in (got, want)]
        if width == 16:
            pair = [np.where(x & 0x8000, -(x & 0x7FFF), x) for x in pair]
        out.append(np.abs(pair[0] - pair[1]))
        first += width
    return np.stack(out)


_uniform_meta = jax.jit(fmt.unpack_uniform_meta)


@functools.partial(jax.jit, static_argnames="codec")
def _codes(layer: LayerKV, codec: Codec) -> tuple[Any, Any]:
    """Of keys [P, K, T, D] and of values [P, K, T, Dv]."""
    keys = unpack_keys(layer.k_pages, codec.key, codec.key_bits)
    return keys, unpack_values(layer.v_pages, codec.value_bits)


def _resolved(got: Any, want: Any, bits: int) -> np.ndarray:
    """The same for uniform metadata, with the minimum in steps of what float32 can resolve.

    The minimum of a row of one sign may be next to nothing beside the row. Its float16 step is then
    finer than the error of any float32 transform, the specification's too: count 2^-17 scales of
    2-bit codes, of which wider codes have several in the same row.
    """
    steps = _steps(got, want, UNIFORM_PLACES).astype(np.float64)
    (scale, low), (_, other) = (
        [np.asarray(x, np.float64) for x in _uniform_meta(meta)] for meta in (want, got)
    )
    scale = scale * (2**bits - 1) / 3
    coarse = np.abs(other - low) / np.maximum(scale * 2.0**-17, 2.0**-24)
    return np.stack([steps[0], np.minimum(steps[1], coarse)])


def compare(case: Case, got: LayerKV, want: LayerKV) -> dict[str, int | float]:
    """Codes, float16 steps and resolved steps of stored numbers off: the most, and the share.

    With gain, a code that differs moves all of its row's metadata: such rows count as codes alone.
    """
    k, v = (
        np.abs(np.asarray(x, int) - np.asarray(y, int))
        for x, y in zip(_codes(got, case.codec), _codes(want, case.codec), strict=True)
    )
    places = WATERFILL_PLACES if case.key == "waterfill" else UNIFORM_PLACES
    same = ~k.any(-1) | (not case.gain)  # [P, K, T]
    pairs = ((got.k_meta, want.k_meta), (got.v_meta, want.v_meta))
    steps = [_steps(*pairs[0], places) * same, _steps(*pairs[1], UNIFORM_PLACES)]
    resolved = steps[0] if case.key == "waterfill" else _resolved(*pairs[0], case.key_bits) * same
    of_values = float(_resolved(*pairs[1], case.value_bits).max())
    codes = np.concatenate([k.ravel(), v.ravel()])
    numbers = np.concatenate([x.ravel() for x in steps])
    return {
        "codes_most": int(codes.max()),
        "codes_share": float((codes > 0).mean()),
        "steps_most": int(numbers.max()),
        "steps_share": float((numbers > 0).mean()),
        "resolved_steps_most": max(float(resolved.max()), of_values),
        "resolved_value_steps_most": of_values,
    }


def steps_allowed(case: Case) -> int:
    """Of keys' metadata, beside exact arithmetic: one where a rounding of float32 falls otherwise.
    Gain multiplies such a number and rounds it again, which makes two of one here and there (in
    ``xla`` on a CPU: of one in 61,426, with 4-bit keys and outliers). Of values, which have no
    gain, it is always one.
    """
    return 2 if case.gain else 1


def call(case: Case, implementation: Callable[..., Any], **options: Any) -> Any:
    """write(layer, keys, values, transform, jobs) whose pools are donated."""
    run = functools.partial(implementation, codec=case.codec, **options)
    return jax.jit(run, donate_argnums=0)


def check(case: Case, config: Any = None, with_xla: bool = True, seed: int = 1) -> dict[str, Any]:
    """The kernel on the device, and ``xla``, against ``exact``; whether repeats are equal."""
    data = inputs(case, seed, rotate=False)
    want = exact(case, data)
    leaves, tree = jax.tree.flatten(data.layer)
    held = [np.asarray(x) for x in leaves]
    copy = lambda: jax.tree.unflatten(tree, [jax.device_put(x) for x in held])  # noqa: E731
    arrays = (*data.sources[0], data.transform, data.jobs)
    run = call(case, mosaic_gpu.write, config=config)
    outs = [run(copy(), *arrays) for _ in range(5)]
    error = compare(case, outs[0][0], want)
    equal = all(
        (np.asarray(x) == np.asarray(y)).all()
        for other in outs[1:]
        for x, y in zip(jax.tree.leaves(outs[0]), jax.tree.leaves(other), strict=True)
    )
    row = {
        "case": case.name,
        "config": config and dataclasses.asdict(config),
        **error,
        "repeats_equal": equal,
        "counts": np.asarray(outs[0][1]).tolist(),
        "passed": bool(
            error["codes_most"] <= 1
            and error["resolved_steps_most"] <= steps_allowed(case)
            and error["resolved_value_steps_most"] <= 1
            and equal
        ),
    }
    if with_xla:
        right, counts = call(case, xla.write)(copy(), *arrays)
        row["xla"] = compare(case, right, want)
        row["passed"] &= row["counts"] == np.asarray(counts).tolist()
    return row
