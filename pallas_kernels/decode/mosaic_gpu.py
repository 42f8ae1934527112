"""Decode on Hopper and newer GPUs, in three launches of Pallas Mosaic GPU kernels.

    prepare   queries times scale and X_Q, packed as operands; q.mu (``mosaic_launches``)
    partials  one kernel over INT2 pages, BF16 sink and BF16 tail (``mosaic_kernel``)
    join      the splits merged, the pages' part times X_O, normalised (``mosaic_launches``)

In interpret mode the first and the last are the functions of this file, in XLA.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.decode import mosaic_bytes, mosaic_kernel, mosaic_launches, mosaic_stream
from pallas_kernels.decode.mosaic_ends import Heads
from pallas_kernels.decode.mosaic_kernel import Config
from pallas_kernels.decode.mosaic_shape import HEADS, WARPS, Shape, query_channels
from pallas_kernels.decode.mosaic_stream import StreamConfig
from pallas_kernels.decode.mosaic_tiles import ROWS, tile_bytes
from pallas_kernels.decode.mosaic_tuning import Batch, tuned
from pallas_kernels.decode.xla import group_heads, ungroup_heads
from pallas_kernels.device import SHARED_BYTES, device_kind, device_multiprocessors
from pallas_kernels.format import PAGE, Codec
from pallas_kernels.layout import LayerKV, Tables, Transform, Windows
from pallas_kernels.merge import MASKED, Partial, merge, normalise

HEAD_DIMS = (64, 128, 256)
LARGEST_GROUP = 16
# In times of a page, fitted to sweeps on an H200: what a block costs beside its pages, and what the
# sink and the tail of a row and head cost.
OVERHEAD_PAGES, WINDOW_PAGES = 8.0, 10.0
BLOCK_BYTES = 1536  # of shared memory beside the stages, what the device reserves included
STREAM_OVERHEAD = 6.0  # the same for BF16 pages, in times of 64 tokens
HIGHEST = lax.Precision.HIGHEST
LOG2_E = math.log2(math.e)


def stage_bytes(batch: Batch, pages: int) -> int:
    """Shared memory of one stage: K and V words, and their metadata."""
    keys, values = batch.head_dim * batch.key_bits, batch.v_head_dim * batch.value_bits
    return pages * PAGE * ((keys + values) // 8 + 8)


def blocks_by_registers(batch: Batch) -> int:
    """Blocks for which a multiprocessor has the registers that ptxas gave (sm_90a): 231 at 256
    channels, 134 to 168 at 128 (173 with 3-bit keys and a warp per page, where shared memory holds
    two blocks), 96 to 118 at 64."""
    largest = max(batch.head_dim, batch.v_head_dim)
    return 2 if largest > 128 else 3 if largest == 128 else 4


def blocks_per_multiprocessor(batch: Batch, config: Config) -> int:
    """Blocks that a multiprocessor holds at once, by registers and by shared memory."""
    held = config.stages * stage_bytes(batch, config.pages) + BLOCK_BYTES
    return max(1, min(blocks_by_registers(batch), SHARED_BYTES // held))


def heuristic(batch: Batch, sm_count: int) -> Config | StreamConfig:
    """The configuration for a batch, from what is known when it is compiled.

    A block costs its pages and ``OVERHEAD_PAGES``. If all blocks fit the device at once, the step
    lasts as long as one; else as long as all together, and half a block until the last one ends.
    Rows are taken to be of full length.
    """
    if batch.codec == "bf16":
        return _stream_heuristic(batch, sm_count)
    rows, largest = batch.segments, max(batch.head_dim, batch.v_head_dim)
    near = max(1, min(2, sm_count // 4 // rows))
    best: tuple[float, Config] = (math.inf, Config(1, near))
    for warps_per_page in (1, 2) if largest == 128 else (2,):
        pages = WARPS // warps_per_page
        held = blocks_per_multiprocessor(batch, Config(1, near, 2, warps_per_page))
        slots, turns = sm_count * held, max(1, -(-batch.pages // pages))
        for splits in range(1, min(turns, slots // rows + 8) + 1):
            block = -(-turns // splits) * pages * (1.0, 1.04)[warps_per_page - 1] + OVERHEAD_PAGES
            cost = block
            if rows * (splits + near) > slots:
                cost = rows * (splits * block + WINDOW_PAGES) / slots + block / 2
            if cost < best[0]:
                best = cost, Config(splits, near, 2, warps_per_page)
    return best[1]


def _stream_heuristic(batch: Batch, sm_count: int) -> StreamConfig:
    """The same for BF16 pages: as few whole waves of blocks as keep every copy engine busy."""
    dims = batch.head_dim, batch.v_head_dim
    stages = 3 if sum(dims) <= 256 else 2
    held = stages * WARPS * sum(tile_bytes(dim) for dim in dims) + 2048
    slots = sm_count * min(4, SHARED_BYTES // held)
    rows, turns = batch.segments, -(-batch.pages * PAGE // (ROWS * WARPS))
    best = (math.inf, 1)
    for splits in range(1, min(turns, -(-8 * slots // rows)) + 1):
        waves = -(-rows * splits // slots)
        best = min(best, (waves * (-(-turns // splits) + STREAM_OVERHEAD), splits))
    return StreamConfig(best[1], stages)


def end_blocks(head_dim: int) -> int:
    """Blocks of the launches before and after the kernel that a multiprocessor holds, by their
    registers: 164 to 204 of a thread at 128 channels and more, up to 93 at 64."""
    return 4 if head_dim <= 64 else 2


def choose(batch: Batch, kind: str, sm_count: int) -> Config | StreamConfig:
    """What was measured on this kind of device for a batch like it, or the heuristic's choice."""
    return tuned(kind, batch) or heuristic(batch, sm_count)


def unsupported(
    q: Any, layer: LayerKV, transform: Transform | None, windows: Windows
) -> str | None:
    """Why this implementation does not serve an input, or None."""
    group = q.shape[2] // layer.sink_k.shape[1]
    if layer.is_packed and transform is None:
        return "INT2 pages without a transform"
    if not layer.is_packed and layer.k_pages.dtype != jnp.bfloat16:
        return f"k_pages of {layer.k_pages.dtype}, it serves bfloat16 and INT2"
    for name, size in (("head_dim", q.shape[3]), ("v_head_dim", layer.v_head_dim)):
        if size not in HEAD_DIMS:
            return f"{name}={size}, it serves {HEAD_DIMS}"
    if group > LARGEST_GROUP:
        return f"{group} query heads per KV head, it serves 1 to {LARGEST_GROUP}"
    if q.shape[1] != 1:
        return f"{q.shape[1]} queries per row, it serves 1"
    if windows.sink % (ROWS * WARPS):
        return f"sink={windows.sink}, it needs a multiple of {ROWS * WARPS}"
    return None


# ------------------------------------------------------------------------------------- operands


def _power_of_two(exponent: Array) -> Array:
    """2^exponent exactly; GPUs approximate exp2."""
    return lax.bitcast_convert_type((exponent + 127) << 23, jnp.float32)


def _by_lane(x: Array, channels: np.ndarray) -> Array:
    """[..., 8 heads, D] to the B operands [..., steps, 8 (g), 4 (t), 2, 2], 0 at channel -1."""
    taken = jnp.where(channels >= 0, x[..., np.maximum(channels, 0)], 0.0)
    return jnp.moveaxis(taken, -5, -4)


def pack_query(q: Float[Array, "*b 8 D"], shape: Shape) -> tuple[Array, Array]:
    """Transformed queries as float16 operands [*b, steps 128], and constants f32[*b, 4, 8].

    Code blocks are read as code * factor, so q carries key_factor / factor; a power of two per
    block of heads puts the largest q at 2^5 .. 2^6 of it. Rows of the constants: what the sums are
    multiplied by; then sum(q) (uniform), or minus the middle codes' part per segment (waterfill).
    Sums are those of the rounded q: then an error of q meets k, not k - min.
    """
    if mosaic_bytes.as_bytes(shape):
        return mosaic_bytes.pack_query(q, shape)
    channels, steps = query_channels_of(shape), shape.key_steps()
    of_step = lambda value: np.array(  # noqa: E731 - [steps, 1, 1, 2 (half), 1]
        [[value(x.read) if x else 1 for x in halves] for halves in steps]
    )[:, None, None, :, None]
    factor = of_step(lambda read: read.factor / shape.key_factor)
    counted = of_step(lambda read: read.above == 0)  # a code in two fields is counted once
    largest = jnp.abs(q).max((-2, -1))  # [*b]
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    exponent = jnp.clip((bits >> 23) - 126, -60, 60)  # largest < 2^exponent
    to_grid = _power_of_two(6 - exponent)[..., None, None, None, None, None]
    unit = _power_of_two(18 + exponent) / shape.key_factor  # [*b]
    lanes = _by_lane(q, channels) * to_grid  # [*b, steps, 8, 4, 2, 2]
    packed = lax.reduce_precision(lanes / factor, 5, 10)
    rounded = packed * (factor * counted)
    segment = np.array([first.segment for first, _ in steps])
    sums = [
        rounded[..., segment == s, :, :, :, :].sum((-5, -3, -2, -1)) for s in range(shape.segments)
    ]  # [*b, 8], times to_grid
    inverse = _power_of_two(exponent - 6)[..., None]
    rows = [jnp.broadcast_to(unit[..., None], sums[0].shape)]
    if shape.codec == "uniform":
        rows += [sums[0] * inverse] + [jnp.zeros_like(sums[0])] * 2
    else:
        rows += [
            -c * x * inverse / unit[..., None] for c, x in zip(shape.middles, sums, strict=True)
        ]
    pairs = packed.astype(jnp.float16).reshape(*q.shape[:-2], -1, 2)
    operands = lax.bitcast_convert_type(pairs, jnp.int32)
    return operands, jnp.stack(rows, -2)


query_channels_of = functools.cache(query_channels)


# --------------------------------------------------------------------------------------- decode


def _segments(
    out: Array, ml: Array, window_splits: int, kv_heads: int, group: int
) -> tuple[Partial, ...]:
    """The splits of the windows and of the INT2 pages joined, each [B, K, G, .]; or all splits."""
    batch, _, splits = out.shape[:3]
    blocks = (batch, kv_heads, -1, splits)
    columns = Heads(group, head_groups(group)[1]).used
    values = out.reshape(*blocks, columns, out.shape[-1] // columns)
    tops, sums = jnp.moveaxis(ml.reshape(*blocks, 2, HEADS)[..., :columns], -2, 0)
    tops = jnp.where(sums > 0, tops, MASKED)

    def joined(own: slice) -> Partial:
        v, m, l = (x[:, :, :, own] for x in (values, tops, sums))
        top = m.max(-2, keepdims=True)
        scale = jnp.exp2(m - top)
        parts = ((v * scale[..., None]).sum(-3), jnp.squeeze(top, -2), (l * scale).sum(-2))
        return Partial(*(join_heads(x, group) for x in parts))

    if not window_splits:
        return (joined(slice(None)),)
    return joined(slice(window_splits)), joined(slice(window_splits, None))


def head_groups(group: int) -> tuple[int, int]:
    """(groups, heads in each): the G heads of a KV head over as few blocks of 8 as hold them."""
    groups = -(-group // HEADS)
    return groups, -(-group // groups)


def split_heads(x: Float[Array, "B K G D"]) -> Float[Array, "B K H 8 D"]:
    """Heads in groups of up to 8, padded with zeros."""
    b, k, group, d = x.shape
    groups, size = head_groups(group)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, groups * size - group), (0, 0)))
    x = x.reshape(b, k, groups, size, d)
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, HEADS - size), (0, 0)))


def join_heads(x: Array, group: int) -> Array:
    """[B, K, H, 8, *d] back to [B, K, G, *d]."""
    _, size = head_groups(group)
    x = x[:, :, :, :size]
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])[:, :, :group]


@functools.partial(jax.jit, static_argnames=("windows", "codec", "scale", "config", "interpret"))
def decode(
    q: Float[Array, "B Q N D"],
    layer: LayerKV,
    transform: Transform | None,
    tables: Tables,
    *,
    lengths: Int32[Array, " B"],
    q_lens: Int32[Array, " B"],
    windows: Windows,
    codec: Codec | None,
    scale: float,
    config: Config | StreamConfig | None = None,
    interpret: Any = None,
) -> Float[Array, "B Q N Dv"]:
    """See ``pallas_kernels.decode.api.decode``; one query per row.

    Args:
        config: how the kernel is cut; default: ``heuristic``. interpret: plgpu.InterpretGPUParams.
    """
    del q_lens  # one query, at the row's last position
    reason = unsupported(q, layer, transform, windows)
    if reason is not None:
        raise NotImplementedError(f"mosaic_gpu does not serve this: {reason}; use 'xla'")
    if interpret is None and device_multiprocessors() is None:
        raise NotImplementedError(
            "mosaic_gpu needs a GPU of compute capability 9.0 or newer, which this is not traced "
            "for; use 'xla'"
        )
    kv_heads, half = layer.sink_k.shape[1], q.dtype == jnp.bfloat16
    group = q.shape[2] // kv_heads
    groups, size = head_groups(group)
    asked = q if half else q.astype(jnp.float32)
    split: dict[str, Any] = dict(heads=Heads(group, size), groups=groups)
    own: dict[str, Any] = dict(
        layer=layer,
        tables=tables,
        lengths=lengths,
        windows=windows,
        scale=scale * LOG2_E,
        interpret=interpret,
        **split,
    )
    int2 = transform is not None and layer.is_packed
    sm_count = device_multiprocessors() or 132
    bits = codec.bits if int2 and codec is not None else (2, 2)
    batch = Batch(
        codec=codec.key if int2 and codec is not None else "bf16",
        head_dim=q.shape[3],
        v_head_dim=layer.v_head_dim,
        segments=q.shape[0] * kv_heads * groups,
        pages=tables.block_table.shape[1],
        key_bits=bits[0],
        value_bits=bits[1],
    )
    # Before and after the kernel: one wave. Rows per block, so that X_Q and X_O are read no more
    # often; where there is room, a block for every query head after it.
    slots = end_blocks(max(q.shape[3], layer.v_head_dim)) * sm_count
    rows = max(1, -(-batch.segments // slots))
    config = config or choose(batch, device_kind(), sm_count)
    near, turn = 0, None
    if isinstance(config, StreamConfig):
        if int2:
            raise ValueError(f"{config=} is for BF16 pages: must be a Config")
        out, ml = mosaic_stream.partials(asked, config=config, **own)
    else:
        if transform is None or codec is None or not int2:
            raise ValueError(f"{config=} is for INT2 pages: must be a StreamConfig")
        near = config.window_splits
        dims = q.shape[3], layer.v_head_dim
        paired = size <= HEADS // 2 and max(dims) <= 128  # twice the registers for the query
        shape = Shape(*dims, codec.key, config.warps_per_page, paired, *codec.bits)
        if interpret is None:
            operands, constants, shift = mosaic_launches.prepare(
                asked, transform, shape=shape, scale=scale * LOG2_E, rows=rows, **split
            )
            turn = shift, transform.x_o
        else:
            grouped = group_heads(asked, kv_heads) * (scale * LOG2_E)
            turned = jnp.einsum("bkmd,kde->bkme", grouped, transform.x_q, precision=HIGHEST)
            operands, constants = (
                x.reshape(x.shape[0], kv_heads * groups, -1)
                for x in pack_query(split_heads(turned), shape)
            )
        out, ml = mosaic_kernel.partials(
            operands, constants, asked, shape=shape, config=config, **own
        )
    if interpret is None:
        merged = mosaic_launches.join(
            out,
            ml,
            turn,
            window_splits=near if turn else ml.shape[2],
            dtype=jnp.bfloat16 if half else jnp.float32,
            rows=rows,
            alone=batch.segments * size <= slots,
            **split,
        )
        return merged.astype(q.dtype)
    parts = _segments(out, ml, near, kv_heads, group)
    if near and transform is not None:
        windows_part, far = parts
        shift = jnp.einsum("bkmd,kd->bkm", grouped, transform.mu, precision=HIGHEST)
        far = Partial(
            jnp.einsum("bkmd,kde->bkme", far.out, transform.x_o, precision=HIGHEST),
            jnp.where(far.sum > 0, far.max + shift, MASKED),
            far.sum,
        )
        parts = windows_part, far
    return ungroup_heads(normalise(merge(*parts)), 1).astype(q.dtype)
