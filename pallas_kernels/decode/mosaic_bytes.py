"""Uniform 2-bit keys as bytes: scores by integer products, with a query of 16 bits.

A word of eight 2-bit codes is two bytes of four; an AND with 0x03 or 0x0C in every byte of a
register gives four codes times 1 or 4, where float16 operands get two. The tensor core multiplies
them (m16n8k32) by the query in integers of one unit per head,

    q = unit * factor * (256 high + low),    high in s8, low in u8,

with one set of sums for each half. Sums begin at the bits of 1.5 * 2^23, so that they are read as
floats without a conversion: within +-2^22 the float of its bits is 1.5 * 2^23 + sum. The codes of a
*source*, one mask of one register, are 16 channels, 4 in each lane t.

Worth it for 128 channels and groups of up to 4 heads: 9 % fewer instructions. Joining the halves
costs two per score, which is more than the masks save where scores are many (groups of 8), channels
few (64) or sums three (water-filled keys).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.decode.mosaic_shape import Shape, key_pieces

MAGIC = 1.5 * 2.0**23
MAGIC_BITS = 0x4B400000
BITS = 15  # of the largest query of a head, beside its sign

# (shift of the register, mask of every byte, factor, block of the even bytes); the odd bytes hold
# the block four further on
FIELDS = ((0, 0x03, 1, 0), (0, 0x0C, 4, 1), (4, 0x03, 1, 2), (4, 0x0C, 4, 3))


@dataclasses.dataclass(frozen=True)
class Source:
    """Sixteen channels of a row: a register of a lane's words, and which bits of each of its bytes.

    ``even``, ``odd``: the channels of bytes 0 and 1 in lane t = 0; bytes 2 and 3 hold the next
    ones, and a lane further on they are D / 32 further.
    """

    register: int
    shift: int
    mask: int
    factor: int
    even: int
    odd: int


def as_bytes(shape: Shape) -> bool:
    """Whether a shape's keys are read this way: where it was faster (``docs/performance.md``)."""
    return (shape.codec, shape.key_bits, shape.head_dim, shape.paired) == ("uniform", 2, 128, True)


def sources(shape: Shape) -> list[Source]:
    width, out = shape.head_dim // 8, []
    for register in range(key_pieces(shape)[0].registers):
        for shift, mask, factor, block in FIELDS:
            even = block * width + 2 * register
            out.append(Source(register, shift, mask, factor, even, even + 4 * width))
    return out


def channels(shape: Shape) -> np.ndarray:
    """i32[sources, 4 (t), 4]: the channel of every byte."""
    first = np.array([(x.even, x.odd, x.even + 1, x.odd + 1) for x in sources(shape)])
    return first[:, None] + (np.arange(4) * shape.head_dim // 32)[:, None]


# ----------------------------------------------------------------------------------------- query


def pack_query(q: Float[Array, "*b 8 D"], shape: Shape) -> tuple[Array, Array]:
    """Queries as operands i32[*b, sources 64] ([sources][8 g][4 t][high, low]) and the constants
    f32[*b, 4, 8] of ``mosaic_gpu.pack_query``: unit, sum(q), 0, 0.
    """
    factor = np.array([x.factor for x in sources(shape)], np.float32)[:, None, None, None]
    bits = lax.bitcast_convert_type(jnp.abs(q).max(-1), jnp.int32)  # [*b, 8]
    exponent = jnp.clip((bits >> 23) - 126, -60, 60)  # largest < 2^exponent
    power = lambda x: lax.bitcast_convert_type((x + 127) << 23, jnp.float32)  # noqa: E731
    taken = jnp.moveaxis(q[..., channels(shape)], -4, -3)  # [*b, sources, 8, 4, 4]
    grid = power(BITS - exponent)[..., None, :, None, None]
    number = jnp.minimum(jnp.round(taken * grid / factor), 2.0**BITS - 1)
    whole, places = number.astype(jnp.int32), np.arange(0, 32, 8)
    halves = [((x & 255) << places).sum(-1, dtype=jnp.int32) for x in (whole >> 8, whole)]
    unit = power(exponent - BITS)
    zero, total = jnp.zeros_like(unit), (number * factor).sum((-4, -2, -1))
    operands = jnp.stack(halves, -1).reshape(*q.shape[:-2], -1)
    return operands, jnp.stack([unit, total * unit, zero, zero], -2)


def pack(ops: Any, shape: Shape, used: Any, row: Any, query: Any, out: Any) -> list[Any]:
    """The same by a warp (all warps alike), from f32 q[., D] in shared memory.

    Args:
        used: whether lane g's column has a head. row: byte offset of its query.

    Returns:
        the constants [4] of lane g's column.
    """
    held, zero = sources(shape), ops.const_f(0.0)
    at = ops.iadd(row, ops.imul(ops.t, shape.head_dim // 8))
    taken, largest = [], zero
    for source in held:
        even, odd = (ops.load(query, at, 2, 4 * first) for first in (source.even, source.odd))
        words = [even[0], odd[0], even[1], odd[1]]
        taken.append([ops.select(used, ops.bits_f32(x), zero) for x in words])
        for x in taken[-1]:
            largest = ops.fmax(largest, ops.fmax(x, ops.fneg(x)))
    for distance in (1, 2):
        largest = ops.fmax(largest, ops.shfl_xor(largest, distance))
    exponent = ops.iadd(ops.shr(ops.f32_bits(largest), 23), -126)
    exponent = ops.imax(ops.imin(exponent, 60), -60)
    power = lambda x: ops.bits_f32(ops.shl(ops.iadd(x, 127), 23))  # noqa: E731
    grid = power(ops.isub(ops.const_i(BITS), exponent))
    total = zero
    for index, (source, values) in enumerate(zip(held, taken, strict=True)):
        scaled = ops.fmul(grid, ops.const_f(1 / source.factor))
        numbers = []
        for x in values:
            y = ops.fma(x, scaled, ops.const_f(MAGIC))  # rounded to an integer
            y = ops.fmin(y, ops.const_f(MAGIC + 2.0**BITS - 1))
            rounded = ops.fadd(y, ops.const_f(-MAGIC))
            total = ops.fma(rounded, ops.const_f(float(source.factor)), total)
            numbers.append(ops.f32_bits(y))  # its low 16 bits are the integer's
        first, second = (ops.prmt(*numbers[i : i + 2], 0x5140) for i in (0, 2))
        halves = [ops.prmt(first, second, selector) for selector in (0x7632, 0x5410)]
        ops.store_bits(out, ops.iadd(ops.imul(ops.lane, 8), index * 256), halves)
    for distance in (1, 2):
        total = ops.fadd(total, ops.shfl_xor(total, distance))
    unit = power(ops.iadd(exponent, -BITS))
    return [unit, ops.fmul(total, unit), zero, zero]


# ---------------------------------------------------------------------------------------- scores


def sums(
    ops: Any, shape: Shape, tiles: list[list[list[list[Any]]]], q: list[list[Any]]
) -> list[Any]:
    """Sums f32[4] of two tiles of 16 tokens, in units of the query.

    Args:
        tiles: words of tokens g and g + 8, of the one piece. q: (high, low) of every source, of
            every tile.
    """
    held = sources(shape)
    high = low = [ops.const_i(MAGIC_BITS)] * 4
    for index, rows in enumerate(tiles):
        shifted = [[(x, ops.shr(x, 4)) for x in words] for (words,) in rows]
        query = q[index * len(held) : (index + 1) * len(held)]
        for step in range(0, len(held), 2):
            operand = [
                ops.iand(words[x.register][x.shift // 4], x.mask * 0x01010101)
                for x in held[step : step + 2]
                for words in shifted
            ]
            high = ops.mma_u8(high, operand, [x for x, _ in query[step : step + 2]], "s8")
            low = ops.mma_u8(low, operand, [x for _, x in query[step : step + 2]], "u8")
    out = []
    for x, y in zip(high, low, strict=True):  # 256 high - MAGIC, exactly
        most = ops.fma(ops.bits_f32(x), ops.const_f(256.0), ops.const_f(-257 * MAGIC))
        out.append(ops.fadd(most, ops.bits_f32(y)))
    return out


def codes(shape: Shape, words: Any) -> Any:
    """Codes times factors f32[P, T, 4 (t), sources, 4] of words [P, T, D / 8], in jnp."""
    lanes = words.reshape(*words.shape[:2], 4, -1, 2).astype(jnp.int32)
    even, odd = lanes[..., 0], lanes[..., 1]  # the words of every register
    registers = jnp.stack([even & 255, even >> 8, odd & 255, odd >> 8], -1)
    picked = [(registers[..., x.register, :] >> x.shift) & x.mask for x in sources(shape)]
    return jnp.stack(picked, -2).astype(jnp.float32)


def numbers(operands: Any) -> Any:
    """The query's integers f32[sources, 8, 4 (t), 4] of ``pack_query``'s operands, in jnp."""
    words = operands.reshape(-1, 8, 4, 2)
    split = jnp.stack([words >> at & 255 for at in range(0, 32, 8)], -1)  # [sources, 8, 4, 2, 4]
    high, low = split[..., 0, :], split[..., 1, :]
    return (256 * jnp.where(high > 127, high - 256, high) + low).astype(jnp.float32)
