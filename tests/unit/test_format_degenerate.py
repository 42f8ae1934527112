"""Rows without a range, beyond float16, or not finite: no NaN out of numbers, nothing silent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax import Rotation, append_kv, check_faults, due_pages, init_cache, write_pages
from oscar_jax.cache import PagedKV
from pallas_kernels.format import (
    PAGE,
    Codec,
    decode_key_pages,
    decode_uniform,
    decode_value_pages,
    decode_waterfill,
    encode_key_pages,
    encode_uniform,
    encode_value_pages,
    encode_waterfill,
    unpack_uniform_meta,
)

CODECS = pytest.mark.parametrize(
    "codec",
    [Codec(), Codec(gain=True), Codec("waterfill"), Codec("waterfill", gain=True)],
    ids=["uniform", "uniform+gain", "waterfill", "waterfill+gain"],
)


@CODECS
def test_a_page_of_zeros_decodes_to_exactly_zero(codec: Codec) -> None:
    @jax.jit
    def decoded(zeros: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        keys, values = encode_key_pages(zeros, codec), encode_value_pages(zeros, codec)
        return (
            decode_key_pages(keys.words, keys.meta, codec),
            decode_value_pages(values.words, values.meta),
            keys.saturated + values.saturated,
        )

    keys, values, saturated = decoded(jnp.zeros((1, PAGE, 64)))
    assert (keys == 0).all()
    assert (values == 0).all()
    assert int(saturated) == 0


@pytest.mark.parametrize("gain", [False, True])
@pytest.mark.parametrize("constant", [100.0, -3.5, 0.1, 1e-5, -1e4])
def test_a_constant_row_decodes_to_the_constant(constant: float, gain: bool) -> None:
    """U16: the scale is 0 and every code 0; the constant is rounded to float16, 8 times finer than
    BF16, and with a gain once more.
    """
    found = encode_uniform(jnp.full(128, constant), clip=0.96, gain=gain)
    assert found.codes.max() == 0
    decoded = np.asarray(decode_uniform(found.codes, found.meta))
    half_step = max(abs(constant) * 2.0**-11, 2.0**-25)
    assert np.abs(decoded - constant).max() <= (1 + gain) * half_step


def test_a_row_with_less_range_than_float16_can_store_is_a_constant_row() -> None:
    """(max - min) / 3 = 1e-8 is below half of float16's least subnormal: scale 0, codes 0."""
    found = encode_uniform(jnp.array([0.25] * 63 + [0.25 + 2**-25]), clip=1.0, gain=False)
    assert found.codes.max() == 0
    assert (decode_uniform(found.codes, found.meta) == 0.25).all()


def test_a_zero_point_would_overflow_where_a_minimum_does_not() -> None:
    """U14: 1000 + linspace(-0.005, 0.005): -min / scale is about -3.0e5; codes and error are right.

    float16 has a step of 0.5 at 1000, so that is how far min may be off.
    """
    x = 1000 + jnp.linspace(-0.005, 0.005, 128)
    found = encode_uniform(x, clip=1.0, gain=False)
    scale, minimum = (float(v) for v in unpack_uniform_meta(found.meta))
    assert abs(minimum / scale) > 65504
    decoded = np.asarray(decode_uniform(found.codes, found.meta))
    assert set(np.asarray(found.codes).tolist()) <= {0, 1, 2, 3}
    assert np.abs(decoded - np.asarray(x)).max() <= 0.01 / 6 + 0.25
    assert not found.saturated


def test_numbers_beyond_float16_saturate_and_are_counted() -> None:
    """U14: [-70000, linspace(-1, 1)]: min is stored as -65504, everything stays finite."""
    x = jnp.concatenate([jnp.array([-70_000.0]), jnp.linspace(-1, 1, 127)])
    found = encode_uniform(x, clip=1.0, gain=False)
    assert bool(found.saturated)
    decoded = np.asarray(decode_uniform(found.codes, found.meta))
    assert np.isfinite(decoded).all()
    span = 70_001.0
    assert np.abs(decoded - np.asarray(x)).max() <= span / 6 + span * 2.0**-11 + 70_000 - 65_504
    clipped = encode_uniform(x, clip=0.96, gain=False)  # the clip removes the outlier
    assert not clipped.saturated
    assert np.abs(np.asarray(decode_uniform(clipped.codes, clipped.meta))[1:] - x[1:]).max() < 0.34


def test_a_gain_that_leaves_float16_saturates_too() -> None:
    """50,000 clipped from a row with a larger outlier: min -50,000 fits, 1.6 times it does not."""
    x = jnp.array([-3e6, *([-50_000.0] * 8), *([50_000.0] * 7)])
    assert not encode_uniform(x, clip=0.9, gain=False).saturated
    found = encode_uniform(x, clip=0.9, gain=True)
    assert bool(found.saturated)
    assert np.isfinite(decode_uniform(found.codes, found.meta)).all()


@pytest.mark.parametrize("gain", [False, True])
@pytest.mark.parametrize(
    "segment", [slice(0, 8), slice(8, 48), slice(48, 64)], ids=["4 bits", "2 bits", "1 bit"]
)
def test_every_waterfill_segment_saturates_on_its_own(segment: slice, gain: bool) -> None:
    x = np.ones(64, np.float32)
    assert not encode_waterfill(jnp.asarray(x), gain=gain).saturated
    x[segment] = 6e5
    found = encode_waterfill(jnp.asarray(x), gain=gain)
    assert bool(found.saturated)
    assert np.isfinite(decode_waterfill(found.codes, found.meta)).all()


@pytest.mark.parametrize(
    "segment", [slice(0, 8), slice(8, 48), slice(48, 64)], ids=["4 bits", "2 bits", "1 bit"]
)
def test_a_waterfill_segment_of_zeros_is_zero_beside_others(segment: slice) -> None:
    x = np.random.default_rng(0).normal(size=64).astype(np.float32)
    x[segment] = 0
    found = encode_waterfill(jnp.asarray(x), gain=True)
    decoded = np.asarray(decode_waterfill(found.codes, found.meta))
    assert (decoded[segment] == 0).all()
    assert np.abs(decoded - x).max() < np.abs(x).max()


# ----------------------------------------------------------------------------------- in the cache


def written(k: np.ndarray, v: np.ndarray) -> PagedKV:
    """A cache whose only page was written from tokens 64 to 191 of k, v [192, 64]."""
    rotation = Rotation.identity(layers=1, kv_heads=1, head_dim=64)
    cache = init_cache(layers=1, kv_heads=1, head_dim=64, batch=1, max_tokens=192)
    cache = append_kv(
        cache,
        0,
        jnp.asarray(k, jnp.float32)[None, :, None],
        jnp.asarray(v, jnp.float32)[None, :, None],
        lengths=192,
    )
    return write_pages(cache, rotation, due_pages(cache, lengths=192, queries=192))


def test_saturated_rows_are_counted_and_reported() -> None:
    k, v = np.ones((2, 192, 64))
    k[70, 0], k[80, 0], v[90, 0] = -70_000, -70_000, 1e6
    cache = written(k, v)
    assert cache.faults.tolist() == [3, 0]
    assert check_faults(cache) == 3


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("side", [0, 1], ids=["k", "v"])
def test_a_row_that_is_not_finite_is_counted_and_refused(side: int, bad: float) -> None:
    kv = np.ones((2, 192, 64))
    kv[side, 100, 3] = bad
    cache = written(*kv)
    assert int(cache.faults[1]) == 1
    with pytest.raises(ValueError, match="1 cached rows held NaN or inf"):
        check_faults(cache)


def test_bad_tokens_outside_the_page_are_not_counted() -> None:
    kv = np.ones((2, 192, 64))
    kv[:, 10] = np.nan  # in the sink
    assert check_faults(written(*kv)) == 0
