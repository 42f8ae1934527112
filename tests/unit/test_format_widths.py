"""Codes wider than 2 bits: where every bit lies, what it decodes to, and what a width is worth."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.format import (
    HEAD_DIMS,
    PAGE,
    Codec,
    decode_key_pages,
    decode_value_pages,
    encode_key_pages,
    encode_uniform,
    encode_value_pages,
    encode_waterfill,
    waterfill_segments,
)
from pallas_kernels.packing import (
    KeyCodec,
    layout,
    pack_keys,
    pack_values,
    reads,
    unpack_keys,
    unpack_transposed,
    unpack_values,
)
from tests.kernels import reference

WIDE: tuple[tuple[KeyCodec, int], ...] = (
    ("uniform", 3),
    ("waterfill", 3),
    ("uniform", 4),
    ("waterfill", 4),
)


def test_every_bit_of_a_wide_code_has_its_place_and_no_other() -> None:
    """One code with one bit at a time; the places are the table of ``pallas_kernels.packing``."""
    head_dim = 64
    for codec, bits in WIDE:
        seen = []
        for bit in range(bits + 2):
            codes = (jnp.eye(head_dim) * (1 << bit)).astype(jnp.uint8)  # row c: only channel c
            words = np.asarray(pack_keys(codes, codec, bits))
            assert words.shape == (head_dim, bits * head_dim // 16)
            for channel in range(head_dim):
                want, low = np.zeros(words.shape[-1], np.uint16), 0
                for word, first, count in reversed(
                    reference.places(channel, head_dim, codec, bits)
                ):
                    if low <= bit < low + count:
                        want[word] = 1 << (first + bit - low)
                        seen.append((word, first + bit - low))
                    low += count
                assert (words[channel] == want).all()
        assert len(seen) == len(set(seen)) == bits * head_dim  # every bit of every word, once
        words = np.random.default_rng(0).integers(0, 1 << 16, (2, 5, bits * head_dim // 16))
        packed = jnp.asarray(words, jnp.uint16)
        codes = unpack_keys(packed, codec, bits)
        assert (np.asarray(codes) == reference.unpack_keys(words, codec, bits)).all()
        assert (pack_keys(codes, codec, bits) == packed).all()
        assert (unpack_transposed(packed, codec, bits) == codes.swapaxes(-1, -2)).all()


@pytest.mark.parametrize(("codec", "bits"), [("uniform", 2), ("waterfill", 2), *WIDE])
def test_a_masked_word_is_a_code_as_float16_with_one_shift_per_word(
    codec: KeyCodec, bits: int
) -> None:
    rng, width = np.random.default_rng(1), 8  # channels of a block
    words = rng.integers(0, 1 << 16, (50, bits * width // 2)).astype(np.uint16)
    codes = np.zeros((50, 8, width))
    planes = layout(codec, bits)
    sizes = [width // 2 if plane.half else width for plane in planes]
    split = np.split(words, np.cumsum(sizes)[:-1], -1)
    for plane, held, size in zip(planes, split, sizes, strict=True):
        fields = reads(plane)
        assert len({field.shift for field in fields} - {0}) == 1
        for field in fields:
            masked = (held >> field.shift & field.mask).view(np.float16).astype(np.float64)
            first = field.high * size
            codes[:, field.block, first : first + size] += masked * 2.0**24 / field.factor
        if plane.half:  # or the high bytes moved down, with the masks of the low ones
            low = [field for field in fields if not field.high]
            assert reads(plane, high=False) == tuple(dataclasses.replace(x, shift=0) for x in low)
    assert (codes.reshape(50, -1) == reference.unpack_keys(words, codec, bits)).all()


def test_values_of_4_bits_lie_along_the_tokens_of_a_page() -> None:
    """Word 16 p + i of a channel holds tokens 64 p + 16 j + i in bits 4 j .. 4 j + 3."""
    for token in (0, 1, 15, 16, 63, 64, 127):
        codes = np.zeros((PAGE, 8), np.uint8)
        codes[token, 5] = 9
        words = np.asarray(pack_values(jnp.asarray(codes), 4))
        want = np.zeros((8, 32), np.uint16)
        plane, rest = divmod(token, 64)
        want[5, 16 * plane + rest % 16] = 9 << 4 * (rest // 16)
        assert (words == want).all()
        assert (unpack_values(jnp.asarray(words), 4) == codes).all()


def test_a_water_filled_row_has_one_bit_more_per_channel_for_every_step() -> None:
    for head_dim in HEAD_DIMS:
        for bits, widths in reference.WIDTHS.items():
            found = waterfill_segments(head_dim, bits)
            sizes = [part.stop - part.start for _, part in found]
            assert [width for width, _ in found] == list(widths)
            assert sizes == [head_dim // 8, 5 * head_dim // 8, head_dim // 4]
            assert np.dot(widths, sizes) == bits * head_dim


def test_wide_codes_by_hand() -> None:
    """Uniform, 3 bits: -1 .. 6 has scale 1. Water-filled, 3 bits, D = 16: head max 15.5, scale 1:
    15.5 -> 31, 2.2 -> floor(18.2); middle rms 2, scale f16(1.172): 2 / 1.172 + 4 -> 5, -2 -> 2;
    tail rms 2, scale e5m3(1.9914) = 2: 2 / 2 + 2 -> 3, -2 -> 1.
    """
    x = jnp.array([-1, -0.5, 2.4, 2.5, 6, 6, 6, 6], jnp.float32)
    assert encode_uniform(x, clip=1.0, gain=False, bits=3).codes.tolist() == [
        *(0, 1, 3, 4),
        *([7] * 4),
    ]
    x = jnp.array([15.5, 2.2, *([2, -2] * 5), 2, -2, 2, -2], jnp.float32)
    found = encode_waterfill(x, gain=False, bits=3)
    assert found.codes.tolist() == [31, 18, *([5, 2] * 5), 3, 1, 3, 1]
    assert int(found.meta) & 0xFFFF == int(np.float16(0.586 * 2).view(np.uint16))
    assert (int(found.meta) >> 16 & 0xFF, int(found.meta) >> 24) == (0x78, 0x80)  # 1.0 and 2.0


def test_wide_codes_agree_with_their_float64_formula() -> None:
    """Codes differ only at float32 ties, a stored number by at most one step."""
    rng = np.random.default_rng(1)
    x = (rng.standard_t(4, size=(64, 64)) * np.exp(rng.normal(size=(64, 1)))).astype(np.float32)
    widths: tuple[int, ...]
    for codec, bits in WIDE:
        if codec == "uniform":
            found = encode_uniform(jnp.asarray(x), clip=1.0, gain=True, bits=bits)
            want, widths = reference.encode_uniform(x, 1.0, True, bits), (16, 16)
        else:
            found = encode_waterfill(jnp.asarray(x), gain=True, bits=bits)
            want, widths = reference.encode_waterfill(x, True, bits), (16, 8, 8)
        apart = np.asarray(found.codes) != want.codes
        assert (want.margin[apart] < 1e-3).all()
        meta, first = np.asarray(found.meta), 0
        for width in widths:
            stored, right = (
                ((y >> first) & (2**width - 1)).astype(int)[~apart.any(-1)]
                for y in (meta, want.meta)
            )
            assert (np.abs(stored - right) <= 1).all()
            first += width


@pytest.mark.parametrize("key", ["uniform", "waterfill"])
def test_a_bit_more_is_a_quarter_of_the_squared_error_or_nearly(key: KeyCodec) -> None:
    """6 dB per bit in the limit; on Gaussian channels of falling size, as a fit orders them."""
    rng = np.random.default_rng(2)
    x = rng.normal(size=(8, PAGE, 128)) * np.geomspace(3, 0.4, 128) ** (key == "waterfill")
    error = {}
    for bits in (2, 3, 4):
        codec = Codec(key).with_bits(key=bits)

        @functools.partial(jax.jit, static_argnames="codec")
        def stored(x: jax.Array, codec: Codec) -> jax.Array:
            page = encode_key_pages(x, codec)
            return decode_key_pages(page.words, page.meta, codec)

        back = np.asarray(stored(jnp.asarray(x, jnp.float32), codec), np.float64)
        error[bits] = ((back - x) ** 2).sum() / (x**2).sum()
    assert 0.2 < error[3] / error[2] < 0.36
    assert 0.18 < error[4] / error[3] < 0.36


def test_values_of_4_bits_have_a_twentieth_of_the_error_of_2() -> None:
    x = jnp.asarray(np.random.default_rng(3).normal(size=(2, PAGE, 64)), jnp.float32)
    error = {}
    for codec in (Codec(), Codec().with_bits(value=4)):
        page = encode_value_pages(x, codec)
        assert page.words.shape == (2, 64, codec.value_bits * PAGE // 16)
        back = decode_value_pages(page.words, page.meta)
        error[codec.value_bits] = float(((back - x) ** 2).sum() / (x**2).sum())
    assert 0.1 < error[2] < 0.15
    assert error[4] < error[2] / 12


def test_widening_stops_clipping_and_narrowing_starts_it_again() -> None:
    wide = Codec("waterfill", gain=True).with_bits(key=3, value=4)
    assert wide == Codec("waterfill", 1.0, 1.0, True, 3, 4)
    assert wide.with_bits(key=2, value=2) == Codec("waterfill", gain=True)
    own = Codec(clip_k=0.5)
    assert own.with_bits(key=2) == own  # nothing asked for, nothing changed
