"""The INT2 page format against values worked out by hand, number by number and bit by bit."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.format import (
    HEAD_DIMS,
    PAGE,
    Codec,
    bits_per_element,
    check_head_dim,
    clip_rows,
    decode_uniform,
    decode_waterfill,
    e5m3_to_float32,
    encode_key_pages,
    encode_uniform,
    encode_value_pages,
    encode_waterfill,
    float16_to_e5m3,
    hadamard,
    pack_keys,
    pack_values,
    unpack_keys,
    unpack_uniform_meta,
    unpack_values,
    unpack_waterfill_meta,
    waterfill_segments,
)

EVERY_HEAD_DIM = pytest.mark.parametrize("head_dim", HEAD_DIMS)


def row(*values: float) -> jnp.ndarray:
    return jnp.array(values, jnp.float32)


# -------------------------------------------------------------------------------------- uniform


def test_uniform_scale_is_a_third_of_the_range_and_codes_round_half_up() -> None:
    """x = -1 .. 2: scale 1, min -1; -0.5 lies half-way between codes 0 and 1 and goes up."""
    found = encode_uniform(row(-1, -0.5, 0, 0.49, 0.5, 1.51, 2, 2), clip=1.0, gain=False)
    assert found.codes.tolist() == [0, 1, 1, 1, 2, 3, 3, 3]
    assert int(found.meta) == 0x3C00 | 0xBC00 << 16  # float16 1.0 and -1.0
    assert decode_uniform(found.codes, found.meta).tolist() == [-1, 0, 0, 0, 1, 2, 2, 2]
    assert not found.saturated


def test_uniform_codes_are_taken_against_the_stored_numbers() -> None:
    """min 100.03 is stored as 100.0 (float16 steps are 1/16 there): 100.18 is code 0 of the exact
    numbers, 0.15 / 0.3333 + 0.5 = 0.95, and code 1 of the stored ones, 0.18 / 0.33325 + 0.5 = 1.04.
    """
    found = encode_uniform(row(100.03, 100.18, 100.5, 101.03), clip=1.0, gain=False)
    assert found.codes.tolist() == [0, 1, 2, 3]
    assert [float(x) for x in unpack_uniform_meta(found.meta)] == [float(np.float16(1 / 3)), 100.0]


@pytest.mark.parametrize(
    ("ratio", "head_dim", "index"),
    [(0.96, 64, 61), (0.96, 128, 122), (0.92, 64, 58), (0.92, 128, 117), (0.92, 256, 235)],
)
def test_clip_clamps_to_the_order_statistic_floor_r_d(
    ratio: float, head_dim: int, index: int
) -> None:
    """|x| = 1 .. D in any order with any signs: the threshold is index + 1."""
    rng = np.random.default_rng(0)
    x = rng.permutation(head_dim) + 1.0
    x *= rng.choice([-1, 1], head_dim)
    clipped = np.asarray(clip_rows(jnp.asarray(x, jnp.float32), ratio))
    assert (clipped == np.clip(x, -(index + 1), index + 1)).all()


def test_a_ratio_of_one_or_more_does_not_clip() -> None:
    x = row(*range(64))
    assert clip_rows(x, 1.0) is x
    assert clip_rows(x, 1.5) is x


def test_encoding_uses_the_clipped_row_for_range_and_codes() -> None:
    """D = 16, r = 0.9: threshold |x|[14] = 3; 100 is stored as 3, the range is -3 .. 3."""
    x = row(100, -3, *([0.0] * 10), 2, 1, -1, -2)
    found = encode_uniform(x, clip=0.9, gain=False)
    assert [float(v) for v in unpack_uniform_meta(found.meta)] == [2.0, -3.0]
    assert found.codes.tolist() == [3, 0, *([2] * 10), 3, 2, 1, 1]


# ----------------------------------------------------------------------------------------- gain


def gain(x: np.ndarray, clip: float = 1.0) -> tuple[float, float]:
    """The factor that the uniform codec's gain put on the stored scale and on the stored min."""
    plain, gained = (
        encode_uniform(jnp.asarray(x, jnp.float32), clip=clip, gain=g) for g in (False, True)
    )
    assert (plain.codes == gained.codes).all()
    pairs = zip(unpack_uniform_meta(gained.meta), unpack_uniform_meta(plain.meta), strict=True)
    scale, minimum = (float(a) / float(b) if b else float(a) for a, b in pairs)
    return scale, minimum


def test_gain_scales_the_stored_numbers_by_the_inner_products() -> None:
    """x = (4, 1, -1, -4): scale f16(8/3) = 2.666, x^ = (3.998, 1.332, -1.334, -4), so that
    <x, x> = 34 and <x, x^> = 34.658: the numbers shrink by 0.981. (3, 1, -1, -3) is exact.
    """
    assert gain(np.array([3, 1, -1, -3])) == (1.0, 1.0)
    x_hat = float(np.float16(8 / 3)) * np.array([3, 2, 1, 0]) - 4
    want = 34 / (np.array([4, 1, -1, -4]) @ x_hat)
    assert abs(want - 0.981) < 5e-4
    assert np.allclose(gain(np.array([4, 1, -1, -4])), want, rtol=1e-3)


def test_gain_never_grows_past_1_6() -> None:
    """A spike of 8 is clipped to 1: <x, x> = 79, <x, x^> = 23 at least, the ratio is over 3."""
    x = np.array([8.0, *([1.0] * 8), *([-1.0] * 7)])
    assert np.allclose(gain(x, clip=0.9), 1.6, rtol=1e-3)


def test_gain_never_shrinks_below_0_7() -> None:
    """0.51 of a step rounds up to code 1: <x, x> = 9 + 62 * 0.26, <x, x^> = 9 + 62 * 0.51."""
    x = np.array([0.0, 3.0, *([0.51] * 62)])
    assert 25.2 / 40.6 < 0.63
    assert np.isclose(gain(x)[0], 0.7, rtol=1e-3)


def test_gain_of_a_negative_product_is_1_6() -> None:
    """-1 .. 1.7 has levels -1, -0.1, 0.8, 1.7: the many 0.3 are stored as -0.1."""
    x = np.array([-1.0, 1.7, *([0.3] * 254)])
    assert 1 + 1.7**2 - 254 * 0.03 < 0
    assert np.allclose(gain(x), 1.6, rtol=1e-3)


def test_gain_of_zero_over_zero_is_one() -> None:
    for found in (
        encode_uniform(jnp.zeros(64), clip=0.96, gain=True),
        encode_waterfill(jnp.zeros(64), gain=True),
    ):
        assert int(found.meta) == 0


def test_waterfill_has_a_gain_for_every_segment() -> None:
    """Channel 0 alone is exact; 2 bits: (s, 0, 0, 0, 0) has the scale 0.9957 s / sqrt 5 and the
    product 1.5 scale s, a gain of 1.497; 1 bit: (3, 1) has scale 4, <x, x> = 10, <x, x^> = 8.
    """
    x = row(7.5, 4, 0, 0, 0, 0, 3, 1)
    plain, gained = (encode_waterfill(x, gain=g) for g in (False, True))
    assert (plain.codes == gained.codes).all()
    ratios = [
        float(a) / float(b)
        for a, b in zip(
            unpack_waterfill_meta(gained.meta), unpack_waterfill_meta(plain.meta), strict=True
        )
    ]
    assert ratios[0] == 1.0
    assert np.isclose(ratios[1], 5**0.5 / (1.5 * 0.9957), rtol=1e-3)
    assert ratios[2] == 1.25


# ---------------------------------------------------------------------------------- water-filled


@EVERY_HEAD_DIM
def test_waterfill_gives_an_eighth_4_bits_five_eighths_2_and_a_quarter_1(head_dim: int) -> None:
    found = [(bits, part.stop - part.start) for bits, part in waterfill_segments(head_dim)]
    assert found == [(4, head_dim // 8), (2, 5 * head_dim // 8), (1, head_dim // 4)]
    assert [part.start for _, part in waterfill_segments(head_dim)] == [
        0,
        head_dim // 8,
        6 * head_dim // 8,
    ]


def test_waterfill_codes_by_hand() -> None:
    """D = 16. 4 bits: max 7.5, scale 1: 7.5 -> 15, 2.2 -> floor(10.2). 2 bits: rms of ten +-2 is 2,
    scale f16(1.9914): 2 / 1.9914 + 2 -> 3, -2 -> 0. 1 bit: mean |x| = 2, scale 4, the sign.
    """
    x = row(7.5, 2.2, 2, -2, 2, -2, 2, -2, 2, -2, 2, -2, 1, 3, -1, -3)
    found = encode_waterfill(x, gain=False)
    assert found.codes.tolist() == [15, 10, *([3, 0] * 5), 1, 1, 0, 0]
    assert [float(s) for s in unpack_waterfill_meta(found.meta)] == [
        1.0,
        float(np.float16(1.9914)),
        4.0,
    ]
    step = float(np.float16(1.9914))
    want = [7.5, 2.5, *([1.5 * step, -1.5 * step] * 5), 2, 2, -2, -2]
    assert decode_waterfill(found.codes, found.meta).tolist() == want


def test_waterfill_metadata_lies_in_the_documented_bits() -> None:
    """scale2 float16 in bits 0-15, scale4 e5m3 in 16-23 (1.0 is 0x78), scale1 in 24-31 (4.0)."""
    x = row(7.5, 2.2, 2, -2, 2, -2, 2, -2, 2, -2, 2, -2, 1, 3, -1, -3)
    meta = int(encode_waterfill(x, gain=False).meta)
    assert meta & 0xFFFF == int(np.float16(1.9914).view(np.uint16))
    assert (meta >> 16) & 0xFF == 0x78
    assert meta >> 24 == 0x88


@pytest.mark.parametrize(
    ("value", "byte", "back"),
    [
        (0.0, 0x00, 0.0),
        (1.0, 0x78, 1.0),
        (1.0615, 0x78, 1.0),  # float16 0x3C3F
        (1.0625, 0x79, 1.125),  # 0x3C40, the half: up
        (1.9375, 0x80, 2.0),  # 0x3FC0 carries into the exponent
        (2.0**-17, 0x01, 2.0**-17),  # the smallest subnormal of e5m3
        (2.0**-18, 0x01, 2.0**-17),
        (2.0**-18 * 0.98, 0x00, 0.0),
        (61440.0, 0xF7, 61440.0),
        (65504.0, 0xF7, 61440.0),  # would round to infinity: saturated
    ],
)
def test_e5m3_is_the_float16_rounded_half_up_to_bit_7(value: float, byte: int, back: float) -> None:
    assert int(float16_to_e5m3(jnp.float32(value))) == byte
    assert float(e5m3_to_float32(jnp.uint32(byte))) == back


def test_every_finite_e5m3_returns_to_itself_and_they_ascend() -> None:
    values = e5m3_to_float32(jnp.arange(0xF8, dtype=jnp.uint32))
    assert float16_to_e5m3(values).tolist() == list(range(0xF8))
    assert (np.diff(np.asarray(values)) > 0).all()


# -------------------------------------------------------------------------------------- packing


@EVERY_HEAD_DIM
def test_uniform_key_words_hold_channel_j_d_8_plus_i_in_bits_2j(head_dim: int) -> None:
    for bit in (0, 1):
        codes = (jnp.eye(head_dim) * (1 << bit)).astype(jnp.uint8)  # row c: only channel c
        words = np.asarray(pack_keys(codes, "uniform"))
        assert words.shape == (head_dim, head_dim // 8)
        for channel in range(head_dim):
            j, i = divmod(channel, head_dim // 8)
            want = np.zeros(head_dim // 8, np.uint16)
            want[i] = 1 << (2 * j + bit)
            assert (words[channel] == want).all()


@EVERY_HEAD_DIM
def test_waterfill_key_words_hold_4_five_times_2_and_two_times_1_bits(head_dim: int) -> None:
    eighth = head_dim // 8
    places = {i: (i, 0, 4) for i in range(eighth)}
    places |= {eighth + j * eighth + i: (i, 4 + 2 * j, 2) for j in range(5) for i in range(eighth)}
    places |= {6 * eighth + j * eighth + i: (i, 14 + j, 1) for j in range(2) for i in range(eighth)}
    assert sorted(places) == list(range(head_dim))
    for bit in range(4):
        codes = (jnp.eye(head_dim) * (1 << bit)).astype(jnp.uint8)
        words = np.asarray(pack_keys(codes, "waterfill"))
        for channel, (word, first, width) in places.items():
            if bit < width:
                want = np.zeros(eighth, np.uint16)
                want[word] = 1 << (first + bit)
                assert (words[channel] == want).all()


def test_value_words_are_channel_major_and_hold_token_j_16_plus_i_in_bits_2j() -> None:
    for token in range(PAGE):
        codes = np.zeros((PAGE, 8), np.uint8)
        codes[token, 5] = 2
        words = np.asarray(pack_values(jnp.asarray(codes)))
        assert words.shape == (8, PAGE // 8)
        want = np.zeros((8, 16), np.uint16)
        want[5, token % 16] = 2 << 2 * (token // 16)
        assert (words == want).all()


@EVERY_HEAD_DIM
def test_unpacking_is_the_inverse_for_every_code(head_dim: int) -> None:
    rng = np.random.default_rng(0)
    codes = jnp.asarray(rng.integers(0, 4, (3, PAGE, head_dim)), jnp.uint8)
    assert (unpack_keys(pack_keys(codes, "uniform"), "uniform") == codes).all()
    assert (unpack_values(pack_values(codes)) == codes).all()
    widths = np.concatenate([np.full(p.stop - p.start, b) for b, p in waterfill_segments(head_dim)])
    codes = jnp.asarray(rng.integers(0, 2**widths, (3, PAGE, head_dim)), jnp.uint8)
    assert (unpack_keys(pack_keys(codes, "waterfill"), "waterfill") == codes).all()


@pytest.mark.parametrize("codec", [Codec(), Codec("waterfill")], ids=["uniform", "waterfill"])
@EVERY_HEAD_DIM
def test_a_page_takes_2_bits_an_element_and_32_a_row(head_dim: int, codec: Codec) -> None:
    x = jax.ShapeDtypeStruct((2, PAGE, head_dim), jnp.float32)
    keys, values = (
        jax.eval_shape(functools.partial(encode, codec=codec), x)
        for encode in (encode_key_pages, encode_value_pages)
    )
    for page in (keys, values):
        bits = 8 * (page.words.size * 2 + page.meta.size * 4)
        assert bits == 2 * PAGE * head_dim * bits_per_element(codec, head_dim)
        assert (page.words.dtype, page.meta.dtype) == (jnp.uint16, jnp.uint32)
    assert keys.words.shape == (2, PAGE, head_dim // 8)
    assert values.words.shape == (2, head_dim, PAGE // 8)


def test_bits_per_element_count_the_metadata() -> None:
    assert [bits_per_element(Codec(), d) for d in (64, 128, 256)] == [2.5, 2.25, 2.125]
    assert bits_per_element(Codec(key_bits=3, value_bits=4), 128) == 3.75
    assert bits_per_element(None, 128) == 16


# ------------------------------------------------------------------------- Hadamard and settings


@pytest.mark.parametrize(
    ("order", "block"),
    [(64, 64), (128, 128), (256, 256), (12, 12), (20, 20), (60, 60), (80, 80), (96, 96), (192, 192)]
    + [(120, 120), (28, 4), (36, 4), (72, 8), (1, 1), (2, 2)],
)
def test_hadamard_is_orthogonal_with_equal_magnitudes_in_every_block(
    order: int, block: int
) -> None:
    h = hadamard(order)
    assert np.abs(h @ h.T - np.eye(order)).max() < 1e-12
    inside = np.kron(np.eye(order // block), np.ones((block, block)))
    assert np.allclose(np.abs(h), inside / np.sqrt(block), rtol=1e-12, atol=0)
    assert np.allclose(h[0, :block], block**-0.5)  # the constant row


def test_hadamard_of_a_power_of_two_is_sylvesters() -> None:
    assert (hadamard(4) * 2 == [[1, 1, 1, 1], [1, -1, 1, -1], [1, 1, -1, -1], [1, -1, -1, 1]]).all()


@pytest.mark.parametrize("head_dim", [0, 8, 48, 72, 100, 512, 576])
def test_a_head_dim_without_a_layout_is_refused_with_those_that_have_one(head_dim: int) -> None:
    with pytest.raises(ValueError, match=rf"head_dim={head_dim}: .*\(64, 80, 96, 128, 192, 256\)"):
        check_head_dim(head_dim)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(key="int4"), "Codec.key='int4': must be 'uniform' or 'waterfill'"),
        (dict(clip_k=0.0), "Codec.clip_k=0.0: must be positive"),
        (dict(clip_v=-1.0), "Codec.clip_v=-1.0: must be positive"),
        (dict(clip_k=float("nan")), "Codec.clip_k=nan: must be positive"),
        (dict(key_bits=5), r"Codec.key_bits=5: must be one of \(2, 3, 4\)"),
        (dict(value_bits=3), r"Codec.value_bits=3: must be one of \(2, 4\)"),
    ],
)
def test_a_codec_refuses_settings_that_mean_nothing(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Codec(**settings)


def test_the_published_clip_ratios_are_the_default() -> None:
    assert (Codec().clip_k, Codec().clip_v, Codec().key, Codec().gain) == (
        0.96,
        0.92,
        "uniform",
        False,
    )
