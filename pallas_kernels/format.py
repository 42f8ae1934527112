"""The INT2 page format: codecs, packing and metadata, in plain JAX. This file is the specification.

One *row* is one token's key or value of one KV head after the transform, D numbers. Codes live in
16-bit words, and 32 bits of metadata per row live beside them:

    keys    u16[T, D/8]   word i of a token;   codes of channels i, i + D/8, i + 2 D/8, ...
    values  u16[D, T/8]   word i of a channel; codes of tokens   i, i + T/8, i + 2 T/8, ...
    meta    u32[T]        uniform: float16 scale | float16 min << 16
                          waterfill: float16 scale2 | e5m3 scale4 << 16 | e5m3 scale1 << 24

so an element costs 2 + 32/D bits. Rounding is always against the *stored* numbers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer, UInt8, UInt16, UInt32

PAGE = 128  # T, tokens per page
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
FLOAT16_MAX = 65504.0
E5M3_MAX = 0xF7  # the largest finite e5m3: float16 0x7B80
GAIN_RANGE = (0.7, 1.6)

KeyCodec = Literal["uniform", "waterfill"]


@dataclasses.dataclass(frozen=True)
class Codec:
    """How rows become codes; a property of the rotation checkpoint, static under ``jit``.

    Args:
        key: "uniform" (2 bits, scale and min) or "waterfill" (4, 2 and 1 bits over channels in
            descending worth, three scales, no clip). Values are always uniform.
        clip_k, clip_v: r; a row is clamped to the order statistic floor(r D) of its magnitudes.
            r >= 1 does not clip. OSCAR's published ratios are the defaults (0.96 and 0.92).
        gain: multiply a key row's stored numbers by <x, x> / <x, x^>, which removes the shrinkage
            of inner products.
    """

    key: KeyCodec = "uniform"
    clip_k: float = 0.96
    clip_v: float = 0.92
    gain: bool = False

    def __post_init__(self) -> None:
        if self.key not in ("uniform", "waterfill"):
            raise ValueError(f"Codec.key={self.key!r}: must be 'uniform' or 'waterfill'")
        for name in ("clip_k", "clip_v"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Codec.{name}={getattr(self, name)}: must be positive")

    @property
    def bits(self) -> tuple[int, int]:
        """Bits of a key's and of a value's code, metadata apart."""
        return 2, 2


def check_head_dim(head_dim: int, name: str = "head_dim") -> None:
    """Raise ValueError unless the format has a layout for ``head_dim``."""
    if head_dim not in HEAD_DIMS:
        raise ValueError(f"{name}={head_dim}: the INT2 page format has layouts for {HEAD_DIMS}")


# ------------------------------------------------------------------------------------- Hadamard


def _paley(order: int) -> np.ndarray:
    """Paley's first construction for a prime q = order - 1 with q = 3 mod 4; first row all ones."""
    q = order - 1
    residue = np.full(q, -1)
    residue[np.unique(np.arange(1, q) ** 2 % q)] = 1
    residue[0] = 0
    jacobsthal = residue[(np.arange(q)[None, :] - np.arange(q)[:, None]) % q]
    matrix = np.ones((order, order))
    matrix[1:, 0] = -1
    matrix[1:, 1:] = jacobsthal + np.eye(q)
    return matrix


@functools.lru_cache
def hadamard(order: int) -> np.ndarray:
    """An orthogonal f64[order, order] with entries +-1/sqrt(block); row 0 of a block is constant.

    Sylvester's matrix for powers of two, Paley's of order 12, 20 or 60 times Sylvester's where that
    exists, else block-diagonal with the largest power of two that divides ``order``.

    >>> bool(np.allclose(hadamard(96) @ hadamard(96).T, np.eye(96)))
    True
    """
    power = order & -order
    base, block = np.ones((1, 1)), power
    if power != order:
        for paley in (12, 20, 60):
            rest = order // paley
            if order % paley == 0 and rest & (rest - 1) == 0:
                base, block = _paley(paley), order
    sylvester = np.ones((1, 1))
    while sylvester.shape[0] * base.shape[0] < block:
        sylvester = np.kron(np.array([[1.0, 1.0], [1.0, -1.0]]), sylvester)
    full = np.kron(sylvester, base) / math.sqrt(block)
    matrix = np.kron(np.eye(order // block), full)
    matrix.setflags(write=False)
    return matrix


# ------------------------------------------------------------------------------------ metadata


def _saturate(x: Float[Array, "*s"]) -> tuple[Array, Array]:
    """float16 of x clamped to the finite range, and whether the clamp changed it."""
    return jnp.clip(x, -FLOAT16_MAX, FLOAT16_MAX).astype(jnp.float16), jnp.abs(x) > FLOAT16_MAX


def float16_bits(x: Float[Array, "*s"]) -> UInt32[Array, "*s"]:
    """The 16 bits of a float16 in the low half of a u32."""
    return lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint16).astype(jnp.uint32)


def bits_float16(bits: UInt32[Array, "*s"]) -> Float[Array, "*s"]:
    """float32 of the float16 in the low half of a u32."""
    half = (bits & 0xFFFF).astype(jnp.uint16)
    return lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32)


def float16_to_e5m3(x: Float[Array, "*s"]) -> UInt32[Array, "*s"]:
    """Bits 14..7 of a non-negative float16, rounded to nearest (half up), saturated below inf."""
    return jnp.minimum((float16_bits(x) + 0x40) >> 7, E5M3_MAX)


def e5m3_to_float32(bits: UInt32[Array, "*s"]) -> Float[Array, "*s"]:
    """The value of an e5m3 byte: the float16 whose bits are the byte shifted left by 7."""
    return bits_float16((bits & 0xFF) << 7)


def unpack_uniform_meta(meta: UInt32[Array, "*s"]) -> tuple[Array, Array]:
    """(scale, min) as float32."""
    return bits_float16(meta), bits_float16(meta >> 16)


def unpack_waterfill_meta(meta: UInt32[Array, "*s"]) -> tuple[Array, Array, Array]:
    """(scale4, scale2, scale1) as float32."""
    return e5m3_to_float32(meta >> 16), bits_float16(meta), e5m3_to_float32(meta >> 24)


# -------------------------------------------------------------------------------------- codecs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Encoded:
    """Codes of rows with their metadata, and the rows that did not fit float16."""

    codes: UInt8[Array, "*s D"]
    meta: UInt32[Array, "*s"]
    saturated: Array  # bool[*s]: a stored number was clamped to the finite float16 range


def clip_rows(x: Float[Array, "*s D"], ratio: float) -> Float[Array, "*s D"]:
    """Clamp every row to +-thr, thr = ascending order statistic floor(ratio D) of |x| (0-based)."""
    if ratio >= 1.0:
        return x
    index = int(ratio * x.shape[-1])
    largest, _ = lax.top_k(jnp.abs(x), x.shape[-1] - index)  # a few numbers: no need to sort all
    threshold = largest[..., -1:]
    return jnp.clip(x, -threshold, threshold)


def _gain(x: Array, x_hat: Array) -> Array:
    """<x, x> / <x, x^> over the last axis in 0.7 .. 1.6; 0/0 is 1, a product <= 0 gives 1.6."""
    energy, product = jnp.sum(x * x, -1), jnp.sum(x * x_hat, -1)
    ratio = jnp.clip(energy / jnp.where(product > 0, product, 1.0), *GAIN_RANGE)
    return jnp.where(product > 0, ratio, jnp.where(energy > 0, GAIN_RANGE[1], 1.0))


def encode_uniform(x: Float[Array, "*s D"], *, clip: float, gain: bool) -> Encoded:
    """2-bit codes with one float16 scale and min per row.

    scale = f16((max - min) / 3), min = f16(min) of the clipped row;
    code = clamp(floor((x - min) / scale + 1/2), 0, 3), 0 where scale is 0; x^ = code scale + min.
    There is no zero point: -min/scale overflows float16 where min and scale do not.
    """
    x = x.astype(jnp.float32)
    clipped = clip_rows(x, clip)
    low = clipped.min(-1)
    scale, big_scale = _saturate((clipped.max(-1) - low) / 3)
    minimum, big_minimum = _saturate(low)
    step, base = scale.astype(jnp.float32)[..., None], minimum.astype(jnp.float32)[..., None]
    level = jnp.floor((clipped - base) / jnp.where(step > 0, step, 1.0) + 0.5)
    codes = jnp.where(step > 0, jnp.clip(level, 0, 3), 0)
    saturated = big_scale | big_minimum
    if gain:
        factor = _gain(x, codes * step + base)
        scale, big_scale = _saturate(step[..., 0] * factor)
        minimum, big_minimum = _saturate(base[..., 0] * factor)
        saturated |= big_scale | big_minimum
    meta = float16_bits(scale) | float16_bits(minimum) << 16
    return Encoded(codes.astype(jnp.uint8), meta, saturated)


def decode_uniform(codes: Integer[Array, "*s D"], meta: UInt32[Array, "*s"]) -> Array:
    """x^ = code scale + min, float32."""
    scale, minimum = unpack_uniform_meta(meta)
    return codes.astype(jnp.float32) * scale[..., None] + minimum[..., None]


def waterfill_segments(head_dim: int) -> tuple[tuple[int, slice], ...]:
    """(bits, channels) of the three segments: D/8 at 4 bits, 5D/8 at 2 bits, D/4 at 1 bit."""
    eighth = head_dim // 8
    return (
        (4, slice(0, eighth)),
        (2, slice(eighth, 6 * eighth)),
        (1, slice(6 * eighth, head_dim)),
    )


def _waterfill_scale(x: Array, bits: int) -> Array:
    if bits == 4:
        return jnp.abs(x).max(-1) / 7.5
    if bits == 2:
        return 0.9957 * jnp.sqrt(jnp.mean(x * x, -1))  # Max's step for a Gaussian at 4 levels
    return 2.0 * jnp.mean(jnp.abs(x), -1)


def _store_scale(scale: Array, bits: int) -> tuple[Array, Array, Array]:
    """(stored bits, the float32 they mean, saturated): float16 for 2-bit segments, else e5m3."""
    half, saturated = _saturate(scale)
    if bits == 2:
        return float16_bits(half), half.astype(jnp.float32), saturated
    stored = float16_to_e5m3(half)
    return stored, e5m3_to_float32(stored), saturated


def encode_waterfill(x: Float[Array, "*s D"], *, gain: bool) -> Encoded:
    """4, 2 and 1-bit codes over channels that the transform put in descending worth.

    Per segment: code = clamp(floor(x / scale + 2^(b-1)), 0, 2^b - 1), no clip;
    x^ = (code - (2^b - 1)/2) scale. scale4 = max|x| / 7.5, scale2 = 0.9957 rms, scale1 = 2 mean|x|.
    """
    x = x.astype(jnp.float32)
    codes, stored, saturated = [], {}, jnp.zeros(x.shape[:-1], bool)
    for bits, channels in waterfill_segments(x.shape[-1]):
        part = x[..., channels]
        stored[bits], scale, big = _store_scale(_waterfill_scale(part, bits), bits)
        step = scale[..., None]
        level = jnp.floor(part / jnp.where(step > 0, step, jnp.inf) + 2 ** (bits - 1))
        code = jnp.clip(level, 0, 2**bits - 1)
        if gain:
            factor = _gain(part, (code - (2**bits - 1) / 2) * step)
            stored[bits], _, big = _store_scale(scale * factor, bits)
        codes.append(code)
        saturated |= big
    meta = stored[2] | stored[4] << 16 | stored[1] << 24
    return Encoded(jnp.concatenate(codes, -1).astype(jnp.uint8), meta, saturated)


def decode_waterfill(codes: Integer[Array, "*s D"], meta: UInt32[Array, "*s"]) -> Array:
    """x^ = (code - (2^b - 1)/2) scale_b per segment, float32."""
    scales = unpack_waterfill_meta(meta)
    parts = [
        (codes[..., channels].astype(jnp.float32) - (2**bits - 1) / 2) * scale[..., None]
        for (bits, channels), scale in zip(waterfill_segments(codes.shape[-1]), scales, strict=True)
    ]
    return jnp.concatenate(parts, -1)


# -------------------------------------------------------------------------------------- packing


def _code_widths(codec: KeyCodec) -> tuple[tuple[int, int], ...]:
    """(first bit, bits) of the code of channel block j in every u16 word, j = 0, 1, ..."""
    if codec == "uniform":
        return tuple((2 * j, 2) for j in range(8))
    return ((0, 4), *((4 + 2 * j, 2) for j in range(5)), (14, 1), (15, 1))


def pack_keys(codes: UInt8[Array, "*s D"], codec: KeyCodec) -> UInt16[Array, "*s W"]:
    """Word i holds the codes of channels i, i + D/8, ..., i + 7 D/8 (8 blocks of D/8 channels)."""
    blocks = codes.reshape(*codes.shape[:-1], 8, -1).astype(jnp.uint16)  # [..., 8, D/8]
    words = [blocks[..., j, :] << at for j, (at, _) in enumerate(_code_widths(codec))]
    return functools.reduce(jnp.bitwise_or, words)


def unpack_keys(words: UInt16[Array, "*s W"], codec: KeyCodec) -> UInt8[Array, "*s D"]:
    """The inverse of ``pack_keys``."""
    blocks = [(words >> at) & (2**bits - 1) for at, bits in _code_widths(codec)]
    return jnp.concatenate(blocks, -1).astype(jnp.uint8)


def unpack_transposed(words: UInt16[Array, "*s A W"], codec: KeyCodec) -> Array:
    """Codes as float32 [..., 8 W, A]: the packed axis leads, the other one is contiguous.

    The same codes as ``unpack_keys`` in the order in which a matrix product on a CPU wants them:
    transposing the words first moves an eighth of the bytes and keeps every shift a vector.
    """
    at, bits = (np.array(column, np.uint16) for column in zip(*_code_widths(codec), strict=True))
    mask = ((1 << bits) - 1).astype(np.uint16)
    words = words.swapaxes(-1, -2)[..., None, :, :]  # [..., 1, W, A]
    codes = (words >> at[:, None, None]) & mask[:, None, None]  # [..., 8, W, A]
    return codes.astype(jnp.float32).reshape(*codes.shape[:-3], -1, codes.shape[-1])


def pack_values(codes: UInt8[Array, "*s T D"]) -> UInt16[Array, "*s D W"]:
    """Channel-major: word i of a channel holds the codes of tokens i, i + T/8, ..., i + 7 T/8."""
    return pack_keys(codes.swapaxes(-1, -2), "uniform")


def unpack_values(words: UInt16[Array, "*s D W"]) -> UInt8[Array, "*s T D"]:
    """The inverse of ``pack_values``."""
    return unpack_keys(words, "uniform").swapaxes(-1, -2)


# ---------------------------------------------------------------------------------- whole pages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageBytes:
    """One page of packed rows as it is stored, and how many rows did not fit float16."""

    words: UInt16[Array, "*s A W"]
    meta: UInt32[Array, "*s T"]
    saturated: Array  # i32[]


def encode_key_pages(x: Float[Array, "*s T D"], codec: Codec) -> PageBytes:
    """Transformed keys of whole pages, to k_pages words [..., T, D/8] and metadata [..., T]."""
    if codec.key == "uniform":
        rows = encode_uniform(x, clip=codec.clip_k, gain=codec.gain)
    else:
        rows = encode_waterfill(x, gain=codec.gain)
    return PageBytes(pack_keys(rows.codes, codec.key), rows.meta, rows.saturated.sum())


def encode_value_pages(x: Float[Array, "*s T D"], codec: Codec) -> PageBytes:
    """Transformed values of whole pages, to v_pages words [..., D, T/8] and metadata [..., T]."""
    rows = encode_uniform(x, clip=codec.clip_v, gain=False)
    return PageBytes(pack_values(rows.codes), rows.meta, rows.saturated.sum())


def decode_key_pages(
    words: UInt16[Array, "*s T W"], meta: UInt32[Array, "*s T"], codec: Codec
) -> Float[Array, "*s T D"]:
    """Keys of whole pages in the transformed space, float32."""
    codes = unpack_keys(words, codec.key)
    return decode_uniform(codes, meta) if codec.key == "uniform" else decode_waterfill(codes, meta)


def decode_value_pages(
    words: UInt16[Array, "*s D W"], meta: UInt32[Array, "*s T"]
) -> Float[Array, "*s T D"]:
    """Values of whole pages in the transformed space, float32."""
    return decode_uniform(unpack_values(words), meta)


def bits_per_element(head_dim: int) -> float:
    """Stored bits of one key or value element in a page: 2 + 32 / D (2.25 at 128, 2.5 at 64)."""
    return 2 + 32 / head_dim
