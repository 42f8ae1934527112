"""Windows, codec, packing and attention in float64 NumPy, written from docs/design.md section 3.

Shares no code with the packages under test, and is written for reading: one formula of the design
per function. Rows are the last axis everywhere.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_dtypes
import numpy as np

PAGE = 128


def pages_seen(n: int, sink: int = 64, recent: int = 256) -> int:
    """m(n) = max(0, (n - S - R) // T)."""
    return max(0, (n - sink - recent) // PAGE)


def bf16(x: Any) -> np.ndarray:
    """x rounded to BF16, as float64."""
    return np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float64)


def bits(x: Any) -> np.ndarray:
    """The bytes of an array as integers: NaN equals the same NaN."""
    x = np.asarray(x)
    return x.view({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[x.dtype.itemsize])


# ------------------------------------------------------------------------------------- metadata


def half(x: Any) -> np.ndarray:
    """The nearest float16, clamped to the finite range, as float64."""
    return np.clip(x, -65504.0, 65504.0).astype(np.float16).astype(np.float64)


def half_bits(x: Any) -> np.ndarray:
    return np.asarray(x, np.float16).view(np.uint16).astype(np.uint32)


def from_half_bits(stored: Any) -> np.ndarray:
    return (np.asarray(stored) & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64)


def e5m3_bits(x: Any) -> np.ndarray:
    """Bits 14..7 of the float16, to nearest; 0xF7 (61440) is the largest that is finite."""
    return np.minimum((half_bits(half(x)) + 64) // 128, 0xF7)


def from_e5m3_bits(stored: Any) -> np.ndarray:
    return from_half_bits((np.asarray(stored) & 0xFF) << 7)


# --------------------------------------------------------------------------------------- codecs


@dataclasses.dataclass(frozen=True)
class Rows:
    """Codes with the metadata word, what they decode to, and how near a code was to another.

    ``margin`` is the distance of x / scale from the nearest decision threshold: a code whose margin
    is below the rounding noise may be its neighbour in another precision.
    """

    codes: np.ndarray
    meta: np.ndarray
    decoded: np.ndarray
    margin: np.ndarray


def clip(x: np.ndarray, ratio: float) -> np.ndarray:
    """+-thr, thr = ascending order statistic floor(r D) of |x|, 0-based; r >= 1 does not clip."""
    if ratio >= 1:
        return x
    threshold = np.sort(np.abs(x), -1)[..., int(np.floor(ratio * x.shape[-1])), None]
    return np.minimum(np.maximum(x, -threshold), threshold)


def gain_of(x: np.ndarray, decoded: np.ndarray) -> np.ndarray:
    """<x, x> / <x, x^> in 0.7 .. 1.6; 0/0 is 1, a negative product 1.6."""
    energy, product = (x * x).sum(-1), (x * decoded).sum(-1)
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = np.clip(energy / product, 0.7, 1.6)
    gain = np.where(product <= 0, 1.6, gain)
    return np.where((energy == 0) & (product == 0), 1.0, gain)


def _levels(ratio: np.ndarray, top: int) -> tuple[np.ndarray, np.ndarray]:
    """clamp(floor(ratio), 0, top) and the distance of ratio from a threshold 1 .. top."""
    margin = np.abs(ratio - np.clip(np.round(ratio), 1, top))
    return np.clip(np.floor(ratio), 0, top), margin


def encode_uniform(x: np.ndarray, ratio: float, gain: bool, bits: int = 2) -> Rows:
    x = np.asarray(x, np.float64)
    clipped = clip(x, ratio)
    low = clipped.min(-1)
    scale, least = half((clipped.max(-1) - low) / (2**bits - 1)), half(low)
    step, base = scale[..., None], least[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        codes, margin = _levels((clipped - base) / step + 0.5, 2**bits - 1)
    codes, margin = np.where(step == 0, 0, codes), np.where(step == 0, np.inf, margin)
    if gain:
        factor = gain_of(x, codes * step + base)
        scale, least = half(scale * factor), half(least * factor)
    meta = half_bits(scale) + (half_bits(least) << 16)
    return Rows(codes.astype(np.uint8), meta, codes * scale[..., None] + least[..., None], margin)


WIDTHS = {2: (4, 2, 1), 3: (5, 3, 2), 4: (6, 4, 3)}  # of head, middle and tail
META_BIT = (16, 0, 24)  # where their scales lie


def segments(head_dim: int, bits: int = 2) -> tuple[tuple[int, slice], ...]:
    """(bits, channels): the first D/8, the next 5D/8, the last D/4."""
    eighth = head_dim // 8
    ends = (0, eighth, 6 * eighth, head_dim)
    return tuple((w, slice(*ends[i : i + 2])) for i, w in enumerate(WIDTHS[bits]))


def encode_waterfill(x: np.ndarray, gain: bool, bits: int = 2) -> Rows:
    x = np.asarray(x, np.float64)
    codes, decoded, margin = np.zeros(x.shape), np.zeros(x.shape), np.zeros(x.shape)
    meta = np.zeros(x.shape[:-1], np.uint32)
    for place, (width, channels) in enumerate(segments(x.shape[-1], bits)):
        part = x[..., channels]
        rms = np.sqrt((part**2).mean(-1))
        largest = np.abs(part).max(-1)
        scale = {
            6: largest / 31.5,
            5: largest / 15.5,
            4: largest / 7.5,
            3: 0.5860 * rms,
            2: 0.9957 * rms,
            1: 2 * np.abs(part).mean(-1),
        }[width]
        store, load = (half_bits, from_half_bits) if place == 1 else (e5m3_bits, from_e5m3_bits)
        scale = load(store(half(scale)))
        with np.errstate(divide="ignore", invalid="ignore"):
            ratio = np.where(scale[..., None] > 0, part / scale[..., None], 0.0)
        level, near = _levels(ratio + 2 ** (width - 1), 2**width - 1)
        middle = (2**width - 1) / 2
        if gain:
            factor = gain_of(part, (level - middle) * scale[..., None])
            scale = load(store(half(scale * factor)))
        meta = meta + (store(half(scale)) << META_BIT[place]).astype(np.uint32)
        codes[..., channels], margin[..., channels] = level, near
        decoded[..., channels] = (level - middle) * scale[..., None]
    return Rows(codes.astype(np.uint8), meta, decoded, margin)


# -------------------------------------------------------------------------------------- packing


# Of block j = channels jW .. jW + W - 1, W = D/8: (plane, first bit, bits) of its code, or of the
# high and the low part of it. A plane of 0.5 is the half plane after plane 0.
PLACES: dict[tuple[str, int], list[Any]] = {
    ("uniform", 2): [[(0, 2 * j, 2)] for j in range(8)],
    ("waterfill", 2): [
        [(0, 0, 4)],
        *([(0, 4 + 2 * j, 2)] for j in range(5)),
        [(0, 14, 1)],
        [(0, 15, 1)],
    ],
    ("uniform", 3): [
        *([(0, 3 * j, 3)] for j in range(5)),
        [(0.5, 0, 3)],
        [(0.5, 3, 3)],
        [(0, 15, 1), (0.5, 6, 2)],
    ],
    ("waterfill", 3): [
        [(0, 0, 5)],
        [(0, 5, 3)],
        [(0, 8, 3)],
        [(0, 11, 3)],
        [(0.5, 0, 3)],
        [(0.5, 3, 3)],
        [(0, 14, 2)],
        [(0.5, 6, 2)],
    ],
    ("uniform", 4): [[(j // 4, 4 * (j % 4), 4)] for j in range(8)],
    ("waterfill", 4): [
        [(0, 0, 6)],
        [(0, 6, 4)],
        *([(1, 4 * j, 4)] for j in range(4)),
        [(0, 10, 3)],
        [(0, 13, 3)],
    ],
}


def places(channel: int, size: int, codec: str, bits: int = 2) -> list[tuple[int, int, int]]:
    """(word, first bit, bits) of the parts of a channel's code in a row's words, highest first."""
    width = size // 8
    block, i = divmod(channel, width)
    found = []
    for plane, bit, count in PLACES[codec, bits][block]:
        if plane == 0.5:
            word, bit = width + i % (width // 2), bit + 8 * (i >= width // 2)
        else:
            word = int(plane) * width + i
        found.append((word, bit, count))
    return found


def unpack_keys(words: np.ndarray, codec: str, bits: int = 2) -> np.ndarray:
    """u16[..., T, bits D/16] to codes [..., T, D], one channel at a time."""
    head_dim = 16 * words.shape[-1] // bits
    codes = np.zeros((*words.shape[:-1], head_dim), np.uint8)
    for channel in range(head_dim):
        for word, bit, count in places(channel, head_dim, codec, bits):
            part = (words[..., word] >> bit) & (2**count - 1)
            codes[..., channel] = codes[..., channel] << count | part
    return codes


def unpack_values(words: np.ndarray) -> np.ndarray:
    """u16[..., D, bits T/16] to codes [..., T, D]: the uniform layout along the page's tokens."""
    return unpack_keys(words, "uniform", 16 * words.shape[-1] // PAGE).swapaxes(-1, -2)


def decode_keys(words: np.ndarray, meta: np.ndarray, codec: str, bits: int = 2) -> np.ndarray:
    """Keys of pages in the transformed space."""
    codes = unpack_keys(words, codec, bits).astype(np.float64)
    if codec == "uniform":
        return codes * from_half_bits(meta)[..., None] + from_half_bits(meta >> 16)[..., None]
    scales = (from_e5m3_bits(meta >> 16), from_half_bits(meta), from_e5m3_bits(meta >> 24))
    parts = [
        (codes[..., channels] - (2**width - 1) / 2) * scale[..., None]
        for (width, channels), scale in zip(segments(codes.shape[-1], bits), scales, strict=True)
    ]
    return np.concatenate(parts, -1)


def decode_values(words: np.ndarray, meta: np.ndarray) -> np.ndarray:
    """Values of pages in the transformed space."""
    codes = unpack_values(words).astype(np.float64)
    return codes * from_half_bits(meta)[..., None] + from_half_bits(meta >> 16)[..., None]


# ------------------------------------------------------------------------------------ attention


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    paged_k: np.ndarray,
    paged_v: np.ndarray,
    *,
    positions: np.ndarray,
    sink: int,
    recent: int,
    scale: float,
) -> np.ndarray:
    """Dense softmax attention of one sequence, every key in full precision or from its page.

    Args:
        q: [Q, N, D] at ``positions``. k, v: [n, K, D], already rounded to BF16.
        paged_k, paged_v: the same tokens as their pages give them back; read only where visible.

    Returns:
        [Q, N, Dv]
    """
    token = np.arange(len(k))
    end = np.array([sink + PAGE * pages_seen(t + 1, sink, recent) for t in positions])[:, None]
    from_page = (token >= sink) & (token < end)  # [Q, n]
    group = q.shape[1] // k.shape[1]
    out = np.zeros((*q.shape[:2], v.shape[-1]))
    page_rows = from_page.any(0)[:, None, None]
    paged_k, paged_v = np.where(page_rows, paged_k, 0.0), np.where(page_rows, paged_v, 0.0)
    for head in range(q.shape[1]):
        own = head // group
        logits = np.where(from_page, q[:, head] @ paged_k[:, own].T, q[:, head] @ k[:, own].T)
        logits = np.where(token <= positions[:, None], scale * logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        out[:, head] = (weights * from_page) @ paged_v[:, own] + (weights * ~from_page) @ v[:, own]
    return out
