"""The decode op: validates once, picks an implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.decode import mosaic_gpu, xla
from pallas_kernels.format import Codec
from pallas_kernels.layout import LayerKV, Tables, Transform, Windows

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "xla": xla.decode,
    "mosaic_gpu": mosaic_gpu.decode,
}


def check_queries(
    q: Any,
    layer: LayerKV,
    transform: Transform | None,
    codec: Codec | None,
    tables: Tables,
    lengths: Any,
) -> None:
    """The shape rules that decode and prefill share; ValueError names what is wrong."""
    if q.ndim != 4:
        raise ValueError(f"q has shape {q.shape}: must be [B, Q, N, D]")
    batch, _, heads, head_dim = q.shape
    kv_heads, want_dim = layer.sink_k.shape[1], layer.sink_k.shape[3]
    if head_dim != want_dim:
        raise ValueError(f"q has head_dim {head_dim}, the cache {want_dim}: must be equal")
    if heads % kv_heads:
        raise ValueError(f"q has {heads} heads: must be a multiple of the cache's {kv_heads}")
    if tables.block_table.shape[0] != batch or lengths.shape != (batch,):
        raise ValueError(
            f"batch sizes differ: q {batch}, block_table {tables.block_table.shape[0]}, "
            f"lengths {lengths.shape}"
        )
    check_pages(layer, transform, codec)


def check_pages(layer: LayerKV, transform: Transform | None, codec: Codec | None) -> None:
    """Raise ValueError unless packed pages come with their codec and transforms of their shape."""
    if not layer.is_packed:
        return
    if transform is None or codec is None:
        raise ValueError("an INT2 cache needs a rotation; pass Rotation.identity(...) for none")
    if layer.bits != codec.bits:
        raise ValueError(
            f"the pages have keys and values of {layer.bits} bits, the rotation's codec "
            f"{codec.bits}: make the cache with codecs=rotation.codecs"
        )
    kv_heads, head_dim, v_head_dim = *layer.sink_k.shape[1::2], layer.v_head_dim
    want = (kv_heads, head_dim, head_dim), (kv_heads, v_head_dim, v_head_dim)
    have = transform.x_k.shape, transform.x_v.shape
    if have != want:
        raise ValueError(
            f"the rotation has x_k {have[0]} and x_v {have[1]}: the cache needs {want[0]} and "
            f"{want[1]}"
        )


def pick(
    table: dict[str, Callable[..., Any]], implementation: str | None, op: str
) -> Callable[..., Any]:
    """The named implementation, or the best that serves everything (``xla``) for None."""
    name = implementation or "xla"
    if name not in table:
        raise NotImplementedError(
            f"implementation={name!r} of {op} does not exist here: use one of {sorted(table)}"
        )
    return table[name]


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
    implementation: str | None = None,
) -> Float[Array, "B Q N Dv"]:
    """softmax(scale q K^T) V over what each query sees (``pallas_kernels.layout``), all segments.

    Args:
        q: queries after RoPE, any float dtype; query i of row b is at lengths[b] - q_lens[b] + i.
        layer: the layer's pools, the newest tokens already in sink and ring.
        transform, codec: None only for BF16 pages.
        lengths: cached tokens per row, the newest included. q_lens: valid queries per row.
        implementation: None takes "mosaic_gpu" where it serves the input and the computation is
            lowered for a GPU of compute capability 9.0 or newer, "xla" everywhere else. Given by
            name, "mosaic_gpu" also serves every other pair of widths.

    Returns:
        In q's dtype. Rows past q_lens are finite and meaningless; a row of length 0 gives 0.

    Raises:
        ValueError: shapes disagree, or q has more rows than the ring can hold back (L + 1).
        NotImplementedError: the named implementation does not serve this input.
    """
    check_queries(q, layer, transform, codec, tables, lengths)
    if q.shape[1] > windows.lookahead + 1:
        raise ValueError(
            f"q has {q.shape[1]} queries per row: the ring keeps lookahead={windows.lookahead} "
            f"older rows, so at most {windows.lookahead + 1}; use prefill for longer chunks"
        )
    keywords: dict[str, Any] = dict(
        lengths=lengths, q_lens=q_lens, windows=windows, codec=codec, scale=scale
    )
    arrays = (q, layer, transform, tables)
    if (
        implementation is None
        and mosaic_gpu.unsupported(q, layer, transform, windows) is None
        and mosaic_gpu.device_multiprocessors() is not None
    ):
        return lax.platform_dependent(
            *arrays,
            cuda=lambda *x: mosaic_gpu.decode(*x, **keywords),
            default=lambda *x: xla.decode(*x, **keywords),
        )
    return pick(IMPLEMENTATIONS, implementation, "decode")(*arrays, **keywords)
