"""The ops on new heads: they pick the kernel where it serves the input, and plain JAX elsewhere."""

from __future__ import annotations

from typing import Any

from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.device import device_multiprocessors
from pallas_kernels.heads import mosaic_gpu, xla
from pallas_kernels.layout import LayerKV, Tables, Windows


def _serves(queries: int, dims: tuple[int, ...], dtype: Any) -> bool:
    return (
        device_multiprocessors() is not None
        and mosaic_gpu.unsupported(queries, dims, dtype) is None
    )


def rotate(
    y: Float[Array, "B Q all D"],
    cos: Float[Array, "B Q 1 H"],
    sin: Float[Array, "B Q 1 H"],
    q_gain: Float[Array, " D"] | None,
    k_gain: Float[Array, " D"] | None,
    *,
    heads: int,
    eps: float,
    dtype: Any,
) -> tuple[Float[Array, "B Q N D"], Float[Array, "B Q K D"], Float[Array, "B Q K D"]]:
    """Queries, keys and values as attention takes them.

        norm(x) = x / sqrt(mean(x^2) + eps) * gain      of every query and key head, with gains
        (a, b) -> (a cos - b sin, b cos + a sin)        the halves of every query and key head

    Args:
        y: the projections, float32: N query heads, then K key heads, then K value heads.
        q_gain, k_gain: of the norms, or None for both; the kernel rounds them to ``dtype``, and so
            XLA takes those of another (Gemma's 1 + w in float32).
        heads: N. dtype: of the results; everything before the rounding is float32.

    A GPU of compute capability 9.0 or newer makes one kernel of it for one token per row, BF16 and
    head_dim 128; XLA does it everywhere else.
    """

    def run(op: Any) -> Any:
        return lambda *arrays: op(*arrays, heads=heads, eps=eps, dtype=dtype)

    arrays = (y, cos, sin, q_gain, k_gain)
    exact = any(gain is not None and gain.dtype != dtype for gain in (q_gain, k_gain))
    if exact or not _serves(y.shape[1], (y.shape[3],), dtype):
        return run(xla.rotate)(*arrays)
    return lax.platform_dependent(*arrays, cuda=run(mosaic_gpu.rotate), default=run(xla.rotate))


def append(
    layer: LayerKV,
    k: Float[Array, "B Q K D"],
    v: Float[Array, "B Q K Dv"],
    tables: Tables,
    *,
    lengths: Int32[Array, " B"],
    q_lens: Int32[Array, " B"],
    windows: Windows,
) -> LayerKV:
    """The layer with every row's newest tokens in its sink and its ring, rounded to BF16.

    Token i of row b has position lengths[b] - q_lens[b] + i; tokens past q_lens are ignored. The
    ring keeps the last R + T + L tokens. One kernel where ``rotate`` is one; XLA everywhere else.

    Args:
        lengths: tokens per row, these included.
    """

    def run(op: Any) -> Any:
        def of(layer: LayerKV, k: Array, v: Array, tables: Tables, n: Array, new: Array) -> LayerKV:
            return op(layer, k, v, tables, lengths=n, q_lens=new, windows=windows)

        return of

    arrays = (layer, k, v, tables, lengths, q_lens)
    if not _serves(k.shape[1], (k.shape[3], v.shape[3]), layer.sink_k.dtype):
        return run(xla.append)(*arrays)
    return lax.platform_dependent(*arrays, cuda=run(mosaic_gpu.append), default=run(xla.append))
