"""How the codes of a row lie in 16-bit words: the layout of every width, packing and unpacking.

A row of D codes is 8 *blocks* of W = D/8 channels: block j holds channels jW .. jW + W - 1. (Values
are packed along tokens: T for D.) Its words are *planes* one after the other. Word i of a full
plane holds a code of channel i of some blocks, each in a *field* of its own bits. Word i of a half
plane holds channel i in its low byte and channel i + W/2, in the same fields, in its high byte.

    bits, codec   words   field at bit: block (bits)
    2 uniform     W       0: 0, 2: 1, 4: 2, ... 14: 7 (2 each)
    2 waterfill   W       0: 0 (4)  4: 1  6: 2  8: 3  10: 4  12: 5 (2 each)  14: 6  15: 7 (1 each)
    3 uniform     W       0: 0  3: 1  6: 2  9: 3  12: 4 (3 each)  15: 7 (its highest bit)
                  + W/2   0: 5  3: 6 (3 each)  6: 7 (its lower two bits)
    3 waterfill   W       0: 0 (5)  5: 1  8: 2  11: 3 (3 each)  14: 6 (2)
                  + W/2   0: 4  3: 5 (3 each)  6: 7 (2)
    4 uniform     W       0: 0  4: 1  8: 2  12: 3 (4 each)
                  + W     0: 4  4: 5  8: 6  12: 7 (4 each)
    4 waterfill   W       0: 0 (6)  6: 1 (4)  10: 6  13: 7 (3 each)
                  + W     0: 2  4: 3  8: 4  12: 5 (4 each)

Made for a kernel that reads a word ANDed with a mask as float16: bits 0 to 10 of a word are the
subnormals and the first binade, one linear grid, so a field there is an exact operand as it is and
the fields above need one shift for all. Every layout has that: one mask per field and one shift per
word (two in a half plane: 5 fields and a shift for 8 channels at 3 bits, where 2 bits take 8 and a
shift). Only the uniform 3-bit codes leave one code in two fields, which is one more product.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, UInt8, UInt16

KeyCodec = Literal["uniform", "waterfill"]
BLOCKS = 8
KEY_BITS = (2, 3, 4)
VALUE_BITS = (2, 4)


@dataclasses.dataclass(frozen=True)
class Field:
    """``bits`` bits from bit ``at`` on: a block's code without its lowest ``above`` bits."""

    block: int
    at: int
    bits: int
    above: int = 0


@dataclasses.dataclass(frozen=True)
class Plane:
    """Words with the same fields; ``half``: two channels per word, 8 bits each."""

    fields: tuple[Field, ...]
    half: bool = False


def _run(bits: int, at: int, blocks: Sequence[int]) -> tuple[Field, ...]:
    """Fields of ``bits`` bits one after the other."""
    return tuple(Field(block, at + i * bits, bits) for i, block in enumerate(blocks))


def layout(codec: KeyCodec, bits: int) -> tuple[Plane, ...]:
    """The planes of a row: the table above."""
    if codec == "uniform":
        if bits == 2:
            return (Plane(_run(2, 0, range(8))),)
        if bits == 3:
            return (
                Plane((*_run(3, 0, range(5)), Field(7, 15, 1, above=2))),
                Plane((*_run(3, 0, (5, 6)), Field(7, 6, 2)), half=True),
            )
        return Plane(_run(4, 0, range(4))), Plane(_run(4, 0, range(4, 8)))
    if bits == 2:
        return (Plane((Field(0, 0, 4), *_run(2, 4, range(1, 6)), *_run(1, 14, (6, 7)))),)
    if bits == 3:
        return (
            Plane((Field(0, 0, 5), *_run(3, 5, (1, 2, 3)), Field(6, 14, 2))),
            Plane((*_run(3, 0, (4, 5)), Field(7, 6, 2)), half=True),
        )
    return (
        Plane((Field(0, 0, 6), Field(1, 6, 4), *_run(3, 10, (6, 7)))),
        Plane(_run(4, 0, (2, 3, 4, 5))),
    )


@dataclasses.dataclass(frozen=True)
class Read:
    """A field as a float16 operand: (word >> shift) & mask is code * factor * 2^-24.

    ``above``: as ``Field``'s; the factor is that of the whole code. ``high``: in the high byte of a
    half plane's word.
    """

    block: int
    shift: int
    mask: int
    factor: int
    above: int
    high: bool


@functools.cache
def reads(plane: Plane, high: bool = True) -> tuple[Read, ...]:
    """How a kernel reads the fields of a word: one shift for the upper half of them.

    Args:
        high: also those in the high byte of a half plane's word.
    """
    fields = [(f.at, f, False) for f in plane.fields]
    if plane.half and high:
        fields += [(f.at + 8, f, True) for f in plane.fields]
    upper = fields[len(fields) // 2][0] if high else 16
    found = []
    for at, field, is_high in fields:
        shift = upper if at >= upper else 0
        mask = (2**field.bits - 1) << at - shift
        found.append(
            Read(field.block, shift, mask, 1 << at - shift >> field.above, field.above, is_high)
        )
    return tuple(found)


def words_per_row(size: int, bits: int) -> int:
    """u16 words of ``size`` codes of ``bits`` bits on average."""
    return size * bits // 16


def pack_keys(codes: UInt8[Array, "*s D"], codec: KeyCodec, bits: int = 2) -> UInt16[Array, "*s W"]:
    """The words of a token's codes, ``bits`` D / 16 of them."""
    blocks = codes.reshape(*codes.shape[:-1], BLOCKS, -1).astype(jnp.uint16)  # [..., 8, D/8]
    planes = []
    for plane in layout(codec, bits):
        words = functools.reduce(
            jnp.bitwise_or,
            [
                ((blocks[..., f.block, :] >> f.above) & (2**f.bits - 1)) << f.at
                for f in plane.fields
            ],
        )
        if plane.half:
            low, high = jnp.split(words, 2, -1)
            words = low | high << 8
        planes.append(words)
    return jnp.concatenate(planes, -1)


def unpack_keys(
    words: UInt16[Array, "*s W"], codec: KeyCodec, bits: int = 2
) -> UInt8[Array, "*s D"]:
    """The inverse of ``pack_keys``."""
    blocks: dict[int, Array] = {}
    for plane, part in _planes(words, codec, bits, -1):
        for f in plane.fields:
            code = ((part >> f.at) & (2**f.bits - 1)) << f.above
            blocks[f.block] = blocks[f.block] | code if f.block in blocks else code
    return jnp.concatenate([blocks[j] for j in range(BLOCKS)], -1).astype(jnp.uint8)


def unpack_transposed(words: UInt16[Array, "*s A W"], codec: KeyCodec, bits: int = 2) -> Array:
    """Codes as float32 [..., D, A]: the packed axis leads, the other one is contiguous.

    The same codes as ``unpack_keys`` in the order in which a matrix product on a CPU wants them:
    transposing the words first moves an eighth of the bytes and keeps every shift a vector.
    """
    fields: list[Field] = []
    parts = []
    for plane, part in _planes(words.swapaxes(-1, -2), codec, bits, -2):
        at, sizes = (
            np.array([getattr(f, name) for f in plane.fields], np.uint16) for name in ("at", "bits")
        )
        mask = ((1 << sizes) - 1).astype(np.uint16)
        part = part[..., None, :, :] >> at[:, None, None]
        parts.append(part & mask[:, None, None])  # [..., fields, W, A]
        fields += plane.fields
    codes = parts[0] if len(parts) == 1 else jnp.concatenate(parts, -3)
    if [field.block for field in fields] != list(range(BLOCKS)):
        blocks = [
            functools.reduce(
                jnp.bitwise_or,
                [codes[..., i, :, :] << f.above for i, f in enumerate(fields) if f.block == block],
            )
            for block in range(BLOCKS)
        ]
        codes = jnp.stack(blocks, -3)
    return codes.astype(jnp.float32).reshape(*codes.shape[:-3], -1, codes.shape[-1])


def _planes(words: Array, codec: KeyCodec, bits: int, axis: int) -> Iterator[tuple[Plane, Array]]:
    """Each plane with its W words along ``axis``, a half plane's high bytes after its low ones."""
    width, first = 2 * words.shape[axis] // bits, 0
    for plane in layout(codec, bits):
        count = width // 2 if plane.half else width
        part = lax.slice_in_dim(words, first, first + count, axis=axis % words.ndim)
        first += count
        yield plane, jnp.concatenate([part, part >> 8], axis) if plane.half else part


def pack_values(codes: UInt8[Array, "*s T D"], bits: int = 2) -> UInt16[Array, "*s D W"]:
    """Channel-major: the uniform layout along tokens, T for D."""
    return pack_keys(codes.swapaxes(-1, -2), "uniform", bits)


def unpack_values(words: UInt16[Array, "*s D W"], bits: int = 2) -> UInt8[Array, "*s T D"]:
    """The inverse of ``pack_values``."""
    return unpack_keys(words, "uniform", bits).swapaxes(-1, -2)
