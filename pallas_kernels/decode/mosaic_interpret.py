"""What ``mosaic_fragments`` computes, in jnp, for Pallas' interpret mode.

A kernel body under interpret mode (a machine without a GPU) keeps its copies, barriers, masks and
loops, which the race detector checks, and calls these in place of the register programs. The
programs themselves run on an emulated warpgroup in the tests.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from pallas_kernels import format as fmt
from pallas_kernels.decode import mosaic_bytes
from pallas_kernels.decode.mosaic_shape import GRID, HEADS, LOWEST, MASKED, WARPS, Shape, key_pieces
from pallas_kernels.decode.mosaic_state import state_registers
from pallas_kernels.format import PAGE

PAD = 256  # numbers of the flat state per running quantity, 2 registers of 128 threads


def empty_state(v_head_dim: int, reference: float) -> Any:
    state = jnp.zeros(128 * state_registers(v_head_dim))
    return state.at[:PAD].set(reference)


def _split(state: Any, v_head_dim: int) -> tuple[Any, Any, Any, Any]:
    """m, l, minima [4 warps, 8 heads] and out [4, Dv, 8] of the flat state."""
    parts = [state[i * PAD : i * PAD + WARPS * HEADS].reshape(WARPS, HEADS) for i in range(3)]
    return parts[0], parts[1], parts[2], state[3 * PAD :].reshape(WARPS, v_head_dim, HEADS)


def _join(m: Any, l: Any, minima: Any, out: Any) -> Any:
    pad = lambda x: jnp.pad(x.reshape(-1), (0, PAD - WARPS * HEADS))  # noqa: E731
    return jnp.concatenate([pad(m), pad(l), pad(minima), out.reshape(-1)])


def _update(state: Any, logits: Any, values: Any, lows: Any, v_head_dim: int) -> Any:
    """Softmax update per warp: logits [4, n, 8], values [4, n, Dv], lows [4, n]."""
    m, l, minima, out = _split(state, v_head_dim)
    top = jnp.maximum(m, jnp.maximum(logits.max(1), LOWEST))
    shrink = jnp.exp2(jnp.minimum(m - top, 0.0))
    p = jnp.exp2(logits - top[:, None])
    dot = lambda x: jnp.einsum("wnd,wnh->wdh", x, p, precision="highest")  # noqa: E731
    return _join(
        top,
        l * shrink + p.sum(1),
        minima * shrink + (p * lows[..., None]).sum(1),
        out * shrink[:, None] + dot(values),
    )


def _lane_words(shape: Shape, words: Any) -> list[Any]:
    """Tokens' words u16[P, T, .] as lanes hold them: [P, T, 4 (t), registers, 2] per piece."""
    pieces = key_pieces(shape)
    ends = [piece.start // 2 for piece in pieces[1:]]
    held = []
    for piece, plane in zip(pieces, jnp.split(words, ends, -1), strict=True):
        x = plane.reshape(*words.shape[:2], -1, 1, piece.registers, 2)
        if piece.shared:  # by two lanes
            x = jnp.concatenate([x, x >> 8], -3)
        held.append(x.reshape(*words.shape[:2], 4, piece.registers, 2))
    return held


def _by_bytes(shape: Shape, words_k: Any, q: Any) -> list[Any]:
    """Sums [P, T, 8] of every segment."""
    words = words_k.reshape(shape.pages, PAGE, -1)
    codes, numbers = mosaic_bytes.codes(shape, words), mosaic_bytes.numbers(q)
    return [jnp.einsum("ptlsb,shlb->pth", codes, numbers, precision="highest")]


def _by_halves(shape: Shape, words_k: Any, q: Any, begin: list[Any]) -> list[Any]:
    """The same with float16 operands; ``begin``: where the sums begin."""
    pieces = _lane_words(shape, words_k.reshape(shape.pages, PAGE, -1))
    held = lax.bitcast_convert_type(q, jnp.float16).astype(jnp.float32).reshape(-1, HEADS, 16)
    sums = list(begin)
    for step, (a, b) in enumerate(shape.key_steps()):
        halves = [
            ((pieces[x.piece][..., x.register, :] >> x.read.shift) & x.read.mask) / GRID
            if x
            else jnp.zeros((shape.pages, PAGE, 4, 2))
            for x in (a, b)
        ]
        operand = jnp.stack(halves, 3).reshape(shape.pages, PAGE, 16)  # k = (t, half, 2)
        sums[a.segment] += jnp.einsum("ptk,hk->pth", operand, held[step], precision="highest")
    return sums


def page_step(
    shape: Shape,
    stage: tuple[Any, ...],
    q: Any,
    constants: Any,
    state: Any,
    valid_pages: Any,
) -> Any:
    """``mosaic_fragments.page_step`` for the block: operands as the kernel holds them."""
    words_k, words_v, meta_k, meta_v = stage
    pages = shape.pages
    unit = constants[0]
    logits: Any = 0.0
    scales: tuple[Any, ...]
    if shape.codec == "uniform":
        scale, low = fmt.unpack_uniform_meta(meta_k.reshape(pages, PAGE))
        logits, scales = low[..., None] * constants[1], (scale,)
    else:
        scales = fmt.unpack_waterfill_meta(meta_k.reshape(pages, PAGE))
    begin = [constants[1 + s] if shape.codec == "waterfill" else 0.0 for s in range(shape.segments)]
    if mosaic_bytes.as_bytes(shape):
        sums = _by_bytes(shape, words_k, q)
    else:
        sums = _by_halves(shape, words_k, q, begin)
    for scale, total in zip(scales, sums, strict=True):
        logits = logits + total * unit * scale[..., None]
    logits = jnp.where((jnp.arange(pages) < valid_pages)[:, None, None], logits, MASKED)
    scale_v, low_v = fmt.unpack_uniform_meta(meta_v.reshape(pages, PAGE))
    codes_v = fmt.unpack_values(words_v.reshape(pages, shape.v_head_dim, -1), shape.value_bits)
    values = codes_v.astype(jnp.float32) * scale_v[..., None]
    by_warp = lambda x: x.reshape(WARPS, PAGE // shape.warps_per_page, *x.shape[2:])  # noqa: E731
    return _update(state, by_warp(logits), by_warp(values), by_warp(low_v), shape.v_head_dim)


def tile_step(keys: Any, values: Any, visible: Any, q: Any, state: Any) -> Any:
    """``mosaic_tiles.step`` for the block's 4 tiles: keys and values [64, .], scaled q [8, D]."""
    used = visible[:, None]
    k = jnp.where(used, keys.astype(jnp.float32), 0.0)
    v = jnp.where(used, values.astype(jnp.float32), 0.0)
    logits = jnp.einsum("nd,hd->nh", k, q, precision="highest")
    logits = jnp.where(used, logits, MASKED).reshape(WARPS, -1, HEADS)
    v = v.reshape(WARPS, -1, v.shape[-1])
    return _update(state, logits, v, jnp.zeros(v.shape[:2]), v.shape[-1])


def finish(state: Any, v_head_dim: int, columns: int) -> tuple[Any, Any]:
    """out [columns Dv] and max and sum [16] of the block."""
    m, l, minima, out = _split(state, v_head_dim)
    top = m.max(0)
    shrink = jnp.exp2(m - top)
    total = ((out + minima[:, None]) * shrink[:, None]).sum(0)
    return total[:, :columns].T.reshape(-1), jnp.concatenate([top, (l * shrink).sum(0)])
