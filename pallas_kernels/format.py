"""The packed page format: codecs and metadata, in plain JAX. This file and ``packing`` specify it.

One *row* is one token's key or value of one KV head after the transform, D numbers. Codes of b bits
on average (keys 2, 3 or 4; values 2 or 4) live in 16-bit words (``pallas_kernels.packing``), and
32 bits of metadata per row live beside them:

    keys    u16[T, b D/16]   words of a token;   of channels i, i + D/8, i + 2 D/8, ...
    values  u16[D, b T/16]   words of a channel; of tokens   i, i + T/8, i + 2 T/8, ...
    meta    u32[T]           uniform: float16 scale | float16 min << 16
                             waterfill: float16 middle | e5m3 head << 16 | e5m3 tail << 24, scales
                             of its three segments of channels

so an element costs b + 32/D bits. Rounding is always against the *stored* numbers.

A water-filled row has its channels in descending worth: a head of D/8, a middle of 5D/8 and a tail
of D/4 channels with 4, 2 and 1 bits at b = 2, and one bit more for every channel per step of b,
as reverse water-filling says: 5, 3, 2 at b = 3 and 6, 4, 3 at b = 4. So one transform serves every
width.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer, UInt8, UInt16, UInt32

from pallas_kernels.packing import (
    KEY_BITS,
    VALUE_BITS,
    KeyCodec,
    pack_keys,
    pack_values,
    unpack_keys,
    unpack_values,
)

PAGE = 128  # T, tokens per page
HEAD_DIMS = (64, 80, 96, 128, 192, 256)
FLOAT16_MAX = 65504.0
E5M3_MAX = 0xF7  # the largest finite e5m3: float16 0x7B80
GAIN_RANGE = (0.7, 1.6)


@dataclasses.dataclass(frozen=True)
class Codec:
    """How rows become codes; a property of the rotation checkpoint, static under ``jit``.

    Args:
        key: "uniform" (scale and min) or "waterfill" (three widths over channels in descending
            worth, three scales, no clip). Values are always uniform.
        clip_k, clip_v: r; a row is clamped to the order statistic floor(r D) of its magnitudes.
            r >= 1 does not clip. OSCAR's published ratios are the defaults (0.96 and 0.92).
        gain: multiply a key row's stored numbers by <x, x> / <x, x^>, which removes the shrinkage
            of inner products.
        key_bits: of a key's code, on average: 2, 3 or 4. value_bits: 2 or 4.
    """

    key: KeyCodec = "uniform"
    clip_k: float = 0.96
    clip_v: float = 0.92
    gain: bool = False
    key_bits: int = 2
    value_bits: int = 2

    def __post_init__(self) -> None:
        if self.key not in ("uniform", "waterfill"):
            raise ValueError(f"Codec.key={self.key!r}: must be 'uniform' or 'waterfill'")
        for name in ("clip_k", "clip_v"):
            if not getattr(self, name) > 0:
                raise ValueError(f"Codec.{name}={getattr(self, name)}: must be positive")
        for name, served in (("key_bits", KEY_BITS), ("value_bits", VALUE_BITS)):
            if getattr(self, name) not in served:
                raise ValueError(f"Codec.{name}={getattr(self, name)}: must be one of {served}")

    @property
    def bits(self) -> tuple[int, int]:
        """Bits of a key's and of a value's code, metadata apart."""
        return self.key_bits, self.value_bits

    def with_bits(self, *, key: int | None = None, value: int | None = None) -> Codec:
        """The same codec with codes of another width; None leaves a side as it is.

        From 3 bits on nothing is clipped: on Gaussian rows of 64 and 128 channels the clip of 0.96
        gains 6 to 20 % of the squared error at 3 bits and costs 58 to 72 % at 4; where tails are
        heavier (Student's t, 5 degrees of freedom) it costs 5 to 45 % at 3 bits already.

        >>> Codec().with_bits(key=3)
        Codec(key='uniform', clip_k=1.0, clip_v=0.92, gain=False, key_bits=3, value_bits=2)
        """
        widths = (("key_bits", "clip_k", key), ("value_bits", "clip_v", value))
        changes: dict[str, Any] = {}
        for bits, clip, wanted in widths:
            if wanted is not None and wanted != getattr(self, bits):
                changes[bits] = wanted
                changes[clip] = getattr(Codec, clip) if wanted == 2 else 1.0
        return dataclasses.replace(self, **changes)


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
    """(head, middle, tail) scales as float32."""
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


def encode_uniform(x: Float[Array, "*s D"], *, clip: float, gain: bool, bits: int = 2) -> Encoded:
    """Codes of b bits with one float16 scale and min per row.

    scale = f16((max - min) / (2^b - 1)), min = f16(min) of the clipped row;
    code = clamp(floor((x - min) / scale + 1/2), 0, 2^b - 1), 0 where scale is 0;
    x^ = code scale + min.
    There is no zero point: -min/scale overflows float16 where min and scale do not.
    """
    x = x.astype(jnp.float32)
    clipped = clip_rows(x, clip)
    low = clipped.min(-1)
    top = 2**bits - 1
    scale, big_scale = _saturate((clipped.max(-1) - low) / top)
    minimum, big_minimum = _saturate(low)
    step, base = scale.astype(jnp.float32)[..., None], minimum.astype(jnp.float32)[..., None]
    level = jnp.floor((clipped - base) / jnp.where(step > 0, step, 1.0) + 0.5)
    codes = jnp.where(step > 0, jnp.clip(level, 0, top), 0)
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


def waterfill_segments(head_dim: int, bits: int = 2) -> tuple[tuple[int, slice], ...]:
    """(bits, channels) of head, middle and tail: D/8 at b + 2, 5D/8 at b and D/4 at b - 1 bits."""
    eighth = head_dim // 8
    return (
        (bits + 2, slice(0, eighth)),
        (bits, slice(eighth, 6 * eighth)),
        (bits - 1, slice(6 * eighth, head_dim)),
    )


def waterfill_middles(bits: int = 2) -> tuple[float, ...]:
    """The middle of the codes of head, middle and tail, where x^ is 0."""
    return tuple((2**width - 1) / 2 for width, _ in waterfill_segments(8, bits))


# Max's step for a Gaussian of unit variance at 4 and 8 levels. From 16 levels on the largest
# magnitude is a better guide than the variance in segments of a few channels.
MAX_STEPS = {2: 0.9957, 3: 0.5860}


def _waterfill_scale(x: Array, bits: int) -> Array:
    if bits >= 4:
        return jnp.abs(x).max(-1) / (2 ** (bits - 1) - 0.5)
    if bits > 1:
        return MAX_STEPS[bits] * jnp.sqrt(jnp.mean(x * x, -1))
    return 2.0 * jnp.mean(jnp.abs(x), -1)


def _store_scale(scale: Array, middle: bool) -> tuple[Array, Array, Array]:
    """(stored bits, the float32 they mean, saturated): float16 for the middle, else e5m3."""
    half, saturated = _saturate(scale)
    if middle:
        return float16_bits(half), half.astype(jnp.float32), saturated
    stored = float16_to_e5m3(half)
    return stored, e5m3_to_float32(stored), saturated


def encode_waterfill(x: Float[Array, "*s D"], *, gain: bool, bits: int = 2) -> Encoded:
    """Codes of three widths over channels that the transform put in descending worth.

    Per segment of w bits (``waterfill_segments``), no clip:
    code = clamp(floor(x / scale + 2^(w-1)), 0, 2^w - 1); x^ = (code - (2^w - 1)/2) scale.
    scale = 2 mean|x| at w = 1, 0.9957 rms at 2, 0.5860 rms at 3, max|x| / (2^(w-1) - 1/2) from 4.
    """
    x = x.astype(jnp.float32)
    codes, stored, saturated = [], [], jnp.zeros(x.shape[:-1], bool)
    for place, (width, channels) in enumerate(waterfill_segments(x.shape[-1], bits)):
        part, middle = x[..., channels], place == 1
        held, scale, big = _store_scale(_waterfill_scale(part, width), middle)
        step = scale[..., None]
        level = jnp.floor(part / jnp.where(step > 0, step, jnp.inf) + 2 ** (width - 1))
        code = jnp.clip(level, 0, 2**width - 1)
        if gain:
            factor = _gain(part, (code - (2**width - 1) / 2) * step)
            held, _, big = _store_scale(scale * factor, middle)
        codes.append(code)
        stored.append(held)
        saturated |= big
    head, middle_scale, tail = stored
    meta = middle_scale | head << 16 | tail << 24
    return Encoded(jnp.concatenate(codes, -1).astype(jnp.uint8), meta, saturated)


def decode_waterfill(
    codes: Integer[Array, "*s D"], meta: UInt32[Array, "*s"], bits: int = 2
) -> Array:
    """x^ = (code - (2^w - 1)/2) scale per segment of w bits, float32."""
    segments = waterfill_segments(codes.shape[-1], bits)
    parts = [
        (codes[..., channels].astype(jnp.float32) - (2**width - 1) / 2) * scale[..., None]
        for (width, channels), scale in zip(segments, unpack_waterfill_meta(meta), strict=True)
    ]
    return jnp.concatenate(parts, -1)


# ---------------------------------------------------------------------------------- whole pages


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PageBytes:
    """One page of packed rows as it is stored, and how many rows did not fit float16."""

    words: UInt16[Array, "*s A W"]
    meta: UInt32[Array, "*s T"]
    saturated: Array  # i32[]


def encode_key_pages(x: Float[Array, "*s T D"], codec: Codec) -> PageBytes:
    """Transformed keys of whole pages, to words [..., T, b D/16] and metadata [..., T]."""
    bits = codec.key_bits
    if codec.key == "uniform":
        rows = encode_uniform(x, clip=codec.clip_k, gain=codec.gain, bits=bits)
    else:
        rows = encode_waterfill(x, gain=codec.gain, bits=bits)
    return PageBytes(pack_keys(rows.codes, codec.key, bits), rows.meta, rows.saturated.sum())


def encode_value_pages(x: Float[Array, "*s T D"], codec: Codec) -> PageBytes:
    """Transformed values of whole pages, to words [..., D, b T/16] and metadata [..., T]."""
    rows = encode_uniform(x, clip=codec.clip_v, gain=False, bits=codec.value_bits)
    return PageBytes(pack_values(rows.codes, codec.value_bits), rows.meta, rows.saturated.sum())


def decode_key_pages(
    words: UInt16[Array, "*s T W"], meta: UInt32[Array, "*s T"], codec: Codec
) -> Float[Array, "*s T D"]:
    """Keys of whole pages in the transformed space, float32."""
    codes = unpack_keys(words, codec.key, codec.key_bits)
    if codec.key == "uniform":
        return decode_uniform(codes, meta)
    return decode_waterfill(codes, meta, codec.key_bits)


def decode_value_pages(
    words: UInt16[Array, "*s D W"], meta: UInt32[Array, "*s T"]
) -> Float[Array, "*s T D"]:
    """Values of whole pages in the transformed space, float32; a page has T tokens at any width."""
    return decode_uniform(unpack_values(words, 16 * words.shape[-1] // PAGE), meta)


def bits_per_element(codec: Codec | None, head_dim: int) -> float:
    """Stored bits of a number in a page, mean of both sides: (bk + bv)/2 + 32/D, or 16 for BF16.

    >>> bits_per_element(Codec(), 128), bits_per_element(Codec(key_bits=3), 64)
    (2.25, 3.0)
    """
    return 16.0 if codec is None else sum(codec.bits) / 2 + 32 / head_dim
