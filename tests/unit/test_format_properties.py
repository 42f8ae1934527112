"""Properties of the codecs that hold for any row."""

from __future__ import annotations

import functools
from typing import Any, get_args

import hypothesis
import hypothesis.extra.numpy as numpy_strategies
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.format import (
    PAGE,
    Codec,
    Encoded,
    KeyCodec,
    decode_key_pages,
    decode_uniform,
    decode_value_pages,
    decode_waterfill,
    encode_uniform,
    encode_waterfill,
    pack_keys,
    pack_values,
    unpack_keys,
    unpack_values,
)
from tests.kernels import reference

ROWS = 4
HALF = 2.0**-11  # relative rounding of float16
TINY = 2.0**-25  # and the absolute one of its subnormals

settings = hypothesis.settings(max_examples=30, deadline=None, derandomize=True)


@st.composite
def rows(draw: Any) -> np.ndarray:
    """float32[4, D]: noise of any size with an offset, and sometimes three entries of any value."""
    head_dim = draw(st.sampled_from((64, 80)))  # few shapes: each compiles
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    size = 10.0 ** draw(st.floats(-4, 3.5))
    x = size * (rng.normal(size=(ROWS, head_dim)) + draw(st.sampled_from([0.0, 0.0, 3.0, -20.0])))
    odd = draw(
        numpy_strategies.arrays(
            np.float32, (ROWS, 3), elements=st.floats(-30_000, 30_000, width=32)
        )
    )
    if draw(st.booleans()):
        x[:, rng.choice(head_dim, 3, replace=False)] = odd
    return x.astype(np.float32) + np.float32(0)  # no -0: min(-0, 0) may be either


@functools.partial(jax.jit, static_argnames=("ratio", "gain"))
def uniform(x: Any, ratio: float, gain: bool) -> tuple[Encoded, jax.Array]:
    """(codes with metadata, what they decode to)."""
    found = encode_uniform(x, clip=ratio, gain=gain)
    return found, decode_uniform(found.codes, found.meta)


@functools.partial(jax.jit, static_argnames="gain")
def waterfill(x: Any, gain: bool) -> tuple[Encoded, jax.Array]:
    found = encode_waterfill(x, gain=gain)
    return found, decode_waterfill(found.codes, found.meta)


@settings
@hypothesis.given(rows(), st.sampled_from([0.96, 1.0]))
def test_uniform_error_is_half_a_step_and_the_rounding_of_two_numbers(
    x: np.ndarray, ratio: float
) -> None:
    """|x - x^| <= range / 6 + 2^-11 (range + |min|) inside the clip."""
    clipped = reference.clip(x.astype(np.float64), ratio)
    found, decoded = uniform(x, ratio, False)
    error = np.abs(np.asarray(decoded) - clipped)
    span, low = np.ptp(clipped, -1), np.abs(clipped.min(-1))
    bound = span / 6 + 1.01 * HALF * (span + low) + 4 * TINY
    assert (error <= bound[:, None] * (1 + 1e-5)).all()
    assert not found.saturated.any()


@settings
@hypothesis.given(rows())
def test_waterfill_error_is_half_a_step_or_the_distance_to_the_outermost_level(
    x: np.ndarray,
) -> None:
    found, decoded = waterfill(x, False)
    error, meta = np.abs(np.asarray(decoded, np.float64) - x), np.asarray(found.meta)
    stored = {
        4: reference.from_e5m3_bits(meta >> 16),
        2: reference.from_half_bits(meta),
        1: reference.from_e5m3_bits(meta >> 24),
    }
    for bits, channels in reference.segments(x.shape[-1]):
        step = stored[bits][:, None]
        outside = np.abs(x[:, channels]) - (2**bits - 1) / 2 * step
        bound = np.maximum(step / 2, outside)
        assert (error[:, channels] <= bound * (1 + 1e-5) + 1e-30).all()


@settings
@hypothesis.given(rows())
def test_gain_changes_no_code(x: np.ndarray) -> None:
    assert (uniform(x, 0.96, False)[0].codes == uniform(x, 0.96, True)[0].codes).all()
    assert (waterfill(x, False)[0].codes == waterfill(x, True)[0].codes).all()


@settings
@hypothesis.given(rows())
def test_gain_restores_the_inner_product_with_the_row_itself(x: np.ndarray) -> None:
    """<x, x^> = <x, x> to float16's rounding, wherever the clamp does not bind."""
    wide = x.astype(np.float64)
    plain, gained = (np.asarray(uniform(x, 1.0, gain)[1], np.float64) for gain in (False, True))
    energy = (wide**2).sum(-1)
    ratio = energy / np.where(energy > 0, (wide * plain).sum(-1), 1)
    free = (ratio > 0.71) & (ratio < 1.59) & (np.abs(wide).max(-1) > 1e-3)
    error = np.abs((wide * gained).sum(-1) - energy)
    bound = 2 * HALF * (np.abs(wide) * (np.ptp(wide, -1) + np.abs(wide.min(-1)))[:, None]).sum(-1)
    assert (error <= bound * 1.6)[free].all()


@settings
@hypothesis.given(rows(), st.integers(0, ROWS - 1))
def test_a_row_is_encoded_by_itself(x: np.ndarray, row: int) -> None:
    others = x.copy()
    others[np.arange(ROWS) != row] = np.float32(7.0)
    for (mine, _), (again, _) in (
        (uniform(x, 0.96, True), uniform(others, 0.96, True)),
        (waterfill(x, True), waterfill(others, True)),
    ):
        assert (mine.codes[row] == again.codes[row]).all()
        assert mine.meta[row] == again.meta[row]


@settings
@hypothesis.given(st.sampled_from((64, 80)), st.sampled_from((64, 96)), st.integers(0, 2**32 - 1))
def test_packing_a_page_and_unpacking_it_returns_every_code(
    key_dim: int, value_dim: int, seed: int
) -> None:
    """Every word is the packing of some codes, so words to codes to words must be the identity."""
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 1 << 16, (PAGE, key_dim // 8)).astype(np.uint16)
    for codec in get_args(KeyCodec):
        codes, again = repacked_keys(words, codec)
        assert (np.asarray(codes) == reference.unpack_keys(words, codec)).all()
        assert (np.asarray(again) == words).all()
    words = rng.integers(0, 1 << 16, (value_dim, PAGE // 8)).astype(np.uint16)
    codes, again = repacked_values(words)
    assert (np.asarray(codes) == reference.unpack_values(words)).all()
    assert (np.asarray(again) == words).all()


@functools.partial(jax.jit, static_argnames="codec")
def repacked_keys(words: Any, codec: KeyCodec) -> tuple[jax.Array, jax.Array]:
    codes = unpack_keys(words, codec)
    return codes, pack_keys(codes, codec)


@jax.jit
def repacked_values(words: Any) -> tuple[jax.Array, jax.Array]:
    codes = unpack_values(words)
    return codes, pack_values(codes)


@settings
@hypothesis.given(rows(), st.booleans())
def test_both_codecs_agree_with_their_float64_formula(x: np.ndarray, gain: bool) -> None:
    """Codes differ only at float32 ties, a stored number by at most one step."""
    for found, want, widths in (
        (uniform(x, 0.96, gain)[0], reference.encode_uniform(x, 0.96, gain), (16, 16)),
        (waterfill(x, gain)[0], reference.encode_waterfill(x, gain), (16, 8, 8)),
    ):
        apart = np.asarray(found.codes) != want.codes
        assert (want.margin[apart] < 1e-3).all()
        exact = ~apart.any(-1)  # a code at a tie moves the gain
        meta, first = np.asarray(found.meta), 0
        for width in widths:
            stored, right = (
                ((y >> first) & (2**width - 1)).astype(int)[exact] for y in (meta, want.meta)
            )
            assert (np.abs(stored - right) <= 1).all()
            first += width


@pytest.mark.parametrize("codec", [Codec(), Codec("waterfill")], ids=["uniform", "waterfill"])
@pytest.mark.parametrize(("key_dim", "value_dim"), [(64, 64), (192, 128), (80, 256)])
def test_decoding_a_page_follows_the_written_format(
    key_dim: int, value_dim: int, codec: Codec
) -> None:
    rng = np.random.default_rng(0)
    words = rng.integers(0, 1 << 16, (2, PAGE, key_dim // 8)).astype(np.uint16)
    low, high = (rng.normal(size=(2, PAGE)).astype(np.float16).view(np.uint16) for _ in range(2))
    meta = low.astype(np.uint32) | (high.astype(np.uint32) & 0x7777) << 16  # no NaN in any field
    got = np.asarray(decode_key_pages(jnp.asarray(words), jnp.asarray(meta), codec))
    want = reference.decode_keys(words, meta, codec.key)
    assert np.allclose(got, want, rtol=1e-6, atol=1e-6 * np.abs(want).max())
    words = rng.integers(0, 1 << 16, (2, value_dim, PAGE // 8)).astype(np.uint16)
    got = np.asarray(decode_value_pages(jnp.asarray(words), jnp.asarray(meta)))
    want = reference.decode_values(words, meta)
    assert np.allclose(got, want, rtol=1e-6, atol=1e-6 * np.abs(want).max())
