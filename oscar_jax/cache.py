"""The paged KV cache: a pytree of pools and the pure functions that change it.

Decoding with a model of one's own, every function jit-, scan- and donation-safe:

    cache = init_cache(KVConfig(), layers=L, kv_heads=K, head_dim=D, batch=B, max_tokens=N)
    out, cache = oscar_prefill(q, k, v, cache, layer, rotation, lengths=n)       # a chunk

    cache = write_pages(cache, rotation, due_pages(cache, lengths=n - 1))        # a decode step:
    cache = append_kv(cache, layer, k, v, lengths=n)                             # then, per layer
    out = oscar_attention(q, cache, layer, rotation, lengths=n)

A layer with a sliding window (``init_cache(..., sliding_windows=...)``) has a BF16 ring of its own
instead of sink, pages and tail; the functions are the same for it.

``lengths`` always counts the tokens of a row with those of this call included. Any time before a
page is seen is right for ``write_pages``, but inside one compiled program it belongs *before* the
attention of the step: written after it, nothing tells XLA that the reads are over, and it copies
every pool (measured: all of them, in every step of a scan).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int32

from oscar_jax.config import KVConfig
from oscar_jax.rotation import Rotation
from oscar_jax.sliding import WindowKV, append_window, init_sliding, sliding_by_layer
from pallas_kernels.format import PAGE, Codec, check_head_dim
from pallas_kernels.heads import append
from pallas_kernels.layout import LayerKV, PageJobs, Tables, Transform, Windows
from pallas_kernels.packing import words_per_row
from pallas_kernels.write import write

DEFAULT_WINDOWS = KVConfig()


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedKV:
    """Pools of every layer with the tables of the rows that use them.

    ``layers`` are those with pages, in the model's order and in that of a rotation's entries;
    ``sliding`` are those with a sliding window, which ``sliding_layers`` names. Functions take the
    model's layer number. ``tables`` may be replaced at any time (``dataclasses.replace``): an
    engine keeps one set of pools and points the rows of each batch at them.
    """

    layers: tuple[LayerKV, ...]
    tables: Tables
    highest: Int32[Array, " slots"]  # most tokens a slot's ring has seen since its sequence began
    faults: Int32[Array, "2"]  # rows that saturated float16 metadata; rows that were not finite
    windows: Windows = dataclasses.field(metadata=dict(static=True), default=Windows())
    sliding: tuple[WindowKV, ...] = ()
    sliding_layers: tuple[int, ...] = dataclasses.field(metadata=dict(static=True), default=())

    def window(self, layer: int) -> WindowKV | None:
        """The rings of a model layer with a sliding window, None for one with pages."""
        if layer not in self.sliding_layers:
            return None
        return self.sliding[self.sliding_layers.index(layer)]

    def paged(self, layer: int) -> int:
        """Which of ``layers`` a model layer with pages is."""
        return layer - sum(one < layer for one in self.sliding_layers)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagePlan:
    """Page ``page`` of batch row ``row`` is complete and shall be written; page < 0 is skipped."""

    row: Int32[Array | np.ndarray, " J"]
    page: Int32[Array | np.ndarray, " J"]


def windows_of(config: KVConfig) -> Windows:
    """The kernels' view of a KVConfig."""
    return Windows(sink=config.sink, recent=config.recent, lookahead=config.lookahead)


def layer_codecs(
    config: KVConfig, layers: int, codecs: Sequence[Codec | None] | None = None
) -> tuple[Codec | None, ...]:
    """The codec of each layer's pages, None for BF16; by default as ``config.dtype`` says.

    Args:
        layers: those with pages.

    Raises:
        ValueError: not one per layer, or a codec for a BF16 cache.
    """
    if codecs is None:
        codecs = (Codec() if config.dtype == "int2" else None,) * layers
    if len(codecs) != layers:
        raise ValueError(f"codecs names {len(codecs)} layers: must be one per layer, {layers}")
    if config.dtype == "bf16" and any(codec is not None for codec in codecs):
        raise ValueError("codecs holds a codec: must be None everywhere where dtype='bf16'")
    return tuple(codecs)


def init_layer(
    config: KVConfig,
    *,
    codec: Codec | None,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    pages: int,
    slots: int,
    sinks: int,
) -> LayerKV:
    """One layer's pools, zeroed: ``pages`` pages, ``slots`` rings and ``sinks`` sinks.

    Args:
        config: the windows. codec: decides the pages' words; None stores BF16.
    """
    v_head_dim = v_head_dim or head_dim
    windows, bf16 = windows_of(config), jnp.bfloat16
    stored: dict[str, Array | None]
    if codec is not None:
        check_head_dim(head_dim)
        check_head_dim(v_head_dim, "v_head_dim")
        words_k = words_per_row(head_dim, codec.key_bits)
        words_v = words_per_row(PAGE, codec.value_bits)
        stored = dict(
            k_pages=jnp.zeros((pages, kv_heads, PAGE, words_k), jnp.uint16),
            v_pages=jnp.zeros((pages, kv_heads, v_head_dim, words_v), jnp.uint16),
            k_meta=jnp.zeros((pages, kv_heads, PAGE), jnp.uint32),
            v_meta=jnp.zeros((pages, kv_heads, PAGE), jnp.uint32),
        )
    else:
        stored = dict(
            k_pages=jnp.zeros((pages, kv_heads, PAGE, head_dim), bf16),
            v_pages=jnp.zeros((pages, kv_heads, PAGE, v_head_dim), bf16),
            k_meta=None,
            v_meta=None,
        )
    return LayerKV(
        **stored,  # type: ignore[arg-type]
        sink_k=jnp.zeros((sinks, kv_heads, windows.sink, head_dim), bf16),
        sink_v=jnp.zeros((sinks, kv_heads, windows.sink, v_head_dim), bf16),
        tail_k=jnp.zeros((slots, kv_heads, windows.ring, head_dim), bf16),
        tail_v=jnp.zeros((slots, kv_heads, windows.ring, v_head_dim), bf16),
    )


def init_cache(
    config: KVConfig = DEFAULT_WINDOWS,
    *,
    layers: int,
    kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    batch: int,
    max_tokens: int,
    codecs: Sequence[Codec | None] | None = None,
    sliding_windows: Sequence[int | None] | None = None,
) -> PagedKV:
    """An empty cache in which row b owns slot b, sink b and its own pages (identity block table).

    Args:
        layers, kv_heads, head_dim, v_head_dim: the model's shape; K and V may differ in size.
        batch: rows. max_tokens: the longest sequence of a row.
        codecs: ``rotation.codecs``, needed where a layer's pages are wider than 2 bits or BF16; by
            default all layers are of ``config.dtype``. One per layer with pages.
        sliding_windows: per layer the tokens that a query sees, its own included, or None for a
            layer with pages; by default all have pages.

    Raises:
        ValueError: a head_dim without a layout, a size below 1, not one sliding window per layer or
            not one codec per layer with pages.

    >>> cache = init_cache(layers=1, kv_heads=2, head_dim=64, batch=2, max_tokens=1000)
    >>> cache.tables.block_table.shape, cache.layers[0].k_pages.shape
    ((2, 7), (14, 2, 128, 8))
    """
    for name, value in (("layers", layers), ("batch", batch), ("max_tokens", max_tokens)):
        if value < 1:
            raise ValueError(f"{name}={value}: must be at least 1")
    pages = max(1, (max_tokens - config.sink) // PAGE)
    rows = jnp.arange(batch, dtype=jnp.int32)
    sizes: dict[str, Any] = dict(kv_heads=kv_heads, head_dim=head_dim, v_head_dim=v_head_dim)
    sliding = sliding_by_layer(layers, sliding_windows)
    return PagedKV(
        layers=tuple(
            init_layer(config, codec=codec, pages=batch * pages, slots=batch, sinks=batch, **sizes)
            for codec in layer_codecs(config, layers - len(sliding), codecs)
        ),
        tables=Tables(
            block_table=rows[:, None] * pages + jnp.arange(pages, dtype=jnp.int32),
            slot=rows,
            sink=rows.copy(),  # two leaves of a donated cache may not share a buffer
        ),
        highest=jnp.zeros(batch, jnp.int32),
        faults=jnp.zeros(2, jnp.int32),
        windows=windows_of(config),
        sliding=init_sliding(sliding, lookahead=config.lookahead, slots=batch, **sizes),
        sliding_layers=tuple(sliding),
    )


def replace_layer(cache: PagedKV, layer: int, pools: LayerKV | WindowKV) -> PagedKV:
    """The cache with one model layer's pools replaced by others of their kind."""
    if isinstance(pools, WindowKV):
        index = cache.sliding_layers.index(layer)
        sliding = (*cache.sliding[:index], pools, *cache.sliding[index + 1 :])
        return dataclasses.replace(cache, sliding=sliding)
    index = cache.paged(layer)
    layers = (*cache.layers[:index], pools, *cache.layers[index + 1 :])
    return dataclasses.replace(cache, layers=layers)


def row_lengths(
    cache: PagedKV, lengths: Array | int, q_lens: Array | int | None, queries: int
) -> tuple[Int32[Array, " B"], Int32[Array, " B"]]:
    """lengths and q_lens as i32[B]; q_lens defaults to all of the queries."""
    batch = cache.tables.slot.shape[0]
    for name, value in (("lengths", lengths), ("q_lens", q_lens)):
        if value is not None and jnp.shape(value) not in ((), (batch,)):
            raise ValueError(
                f"{name} has shape {jnp.shape(value)}: must be a number or one per row, ({batch},)"
            )
    as_rows = lambda x: jnp.broadcast_to(jnp.asarray(x, jnp.int32), (batch,))  # noqa: E731
    return as_rows(lengths), as_rows(queries if q_lens is None else q_lens)


def append_kv(
    cache: PagedKV,
    layer: int,
    k: Float[Array, "B Q K D"],
    v: Float[Array, "B Q K Dv"],
    *,
    lengths: Array | int,
    q_lens: Array | int | None = None,
) -> PagedKV:
    """Store a row's newest keys and values, rounded to BF16, in its sink and its ring.

    Token i of row b has position lengths[b] - q_lens[b] + i; tokens past q_lens are ignored, so a
    row with q_lens 0 is left exactly as it is. The ring keeps the last R + T + L tokens, that of a
    layer with a sliding window W the last W + L.

    Args:
        k: post-RoPE keys; v: values. lengths: tokens per row, these included.

    Raises:
        ValueError: shapes disagree with the cache.
    """
    tables, window = cache.tables, cache.window(layer)
    n, new = row_lengths(cache, lengths, q_lens, k.shape[1])
    if window is not None:
        _check_rows(k, v, tables, window.ring_k, window.ring_v)
        window = append_window(window, k, v, tables, lengths=n, q_lens=new)
        cache = replace_layer(cache, layer, window)
    else:
        store = cache.layers[cache.paged(layer)]
        _check_rows(k, v, tables, store.sink_k, store.sink_v)
        store = append(store, k, v, tables, lengths=n, q_lens=new, windows=cache.windows)
        cache = replace_layer(cache, layer, store)
    if layer:
        return cache
    seen = jnp.where(n == new, n, jnp.maximum(cache.highest[tables.slot], n))
    owner = jnp.where(new > 0, tables.slot, cache.highest.shape[0])  # out of range: dropped
    return dataclasses.replace(cache, highest=cache.highest.at[owner].set(seen, mode="drop"))


def _check_rows(k: Array, v: Array, tables: Tables, keys: Array, values: Array) -> None:
    """Raise ValueError unless k and v are rows of these pools [_, K, _, D]."""
    rows = (tables.slot.shape[0], k.shape[1], keys.shape[1])
    wanted = (*rows, keys.shape[3]), (*rows, values.shape[3])
    if (k.shape, v.shape) != wanted:
        raise ValueError(
            f"k has shape {k.shape} and v {v.shape}: must be {wanted[0]} and {wanted[1]}"
        )


def due_pages(
    cache: PagedKV, *, lengths: Array | int, q_lens: Array | int | None = None, queries: int = 1
) -> PagePlan:
    """The pages whose last token is among the newest ``q_lens`` (default: ``queries``) tokens."""
    n, new = row_lengths(cache, lengths, q_lens, queries)
    first, end = cache.windows.complete_pages(n - new), cache.windows.complete_pages(n)
    page = first[:, None] + jnp.arange(queries // PAGE + 1)  # [B, J/B]
    row = jnp.broadcast_to(jnp.arange(n.shape[0])[:, None], page.shape)
    return PagePlan(row.reshape(-1), jnp.where(page < end[:, None], page, -1).reshape(-1))


def page_ids(cache: PagedKV, plan: PagePlan) -> Int32[Array, " J"]:
    """Pool indices of planned pages, -1 where the plan says skip."""
    last = cache.tables.block_table.shape[1] - 1
    ids = cache.tables.block_table[plan.row, jnp.clip(plan.page, 0, last)]
    return jnp.where((plan.page >= 0) & (plan.page <= last), ids, -1)


def transform_of(
    cache: PagedKV, rotation: Rotation | None, index: int
) -> tuple[Transform | None, Codec | None]:
    """What the pages of ``cache.layers[index]`` are read and written with.

    Returns:
        (None, None) for BF16 pages.

    Raises:
        ValueError: the pages are packed and the rotation has no codec for them.
    """
    if not cache.layers[index].is_packed:
        return None, None
    if rotation is None:
        raise ValueError("an INT2 cache needs a rotation; pass Rotation.identity(...) for none")
    if rotation.layers != len(cache.layers):
        raise ValueError(
            f"rotation has {rotation.layers} layers: must be one per layer with pages, "
            f"{len(cache.layers)}"
        )
    if rotation.codecs[index] is None:
        raise ValueError(
            f"layer {index} has packed pages and the rotation says BF16: make the cache with "
            "codecs=rotation.codecs"
        )
    return rotation.layer(index), rotation.codecs[index]


def write_pages(
    cache: PagedKV,
    rotation: Rotation | None,
    plan: PagePlan,
    *,
    implementation: str | None = None,
) -> PagedKV:
    """Write complete pages of all layers with pages, from their rings and ahead of need.

    A page is complete R tokens before any query sees it, and stays in the ring for L tokens more:
    it may be written at any time in between, once or several times, with the same bytes.

    Args:
        plan: from ``due_pages``, or made by a scheduler.
    """
    ids, windows = page_ids(cache, plan), cache.windows
    jobs = PageJobs(
        row=cache.tables.slot[plan.row],
        offset=(PAGE * jnp.maximum(plan.page, 0)) % windows.ring,
        page_id=ids,
    )
    layers, faults = [], cache.faults
    for index, layer in enumerate(cache.layers):
        transform, codec = transform_of(cache, rotation, index)
        layer, found = write(
            layer,
            layer.tail_k,
            layer.tail_v,
            transform,
            jobs,
            codec=codec,
            implementation=implementation,
        )
        layers.append(layer)
        faults = faults + found
    return dataclasses.replace(cache, layers=tuple(layers), faults=faults)


def truncate(cache: PagedKV, lengths: Array | int) -> PagedKV:
    """Forget the tokens of each row from ``lengths`` on; exact, or refused. Not for use in ``jit``.

    The ring still holds what every shorter query must see down to L tokens below the most it has
    held. Pages that the cut crosses become invisible and are rewritten when they are due again.

    Raises:
        ValueError: a row would have to go back further (recompute it from its tokens), or forward.
    """
    wanted, _ = row_lengths(cache, lengths, None, 1)
    new, highest = np.asarray(wanted), np.asarray(cache.highest[cache.tables.slot])
    floor = highest - cache.windows.lookahead
    for row in np.flatnonzero((new < floor) | (new > highest)):
        raise ValueError(
            f"row {row} holds {highest[row]} tokens and cannot be truncated to {new[row]}: exact "
            f"from {max(0, floor[row])} to {highest[row]} (lookahead={cache.windows.lookahead}); "
            "recompute the row from its tokens"
        )
    return cache


def check_faults(cache: PagedKV) -> int:
    """Rows whose metadata was clamped to float16's range so far. Not for use in ``jit``.

    Raises:
        ValueError: a key or value that reached a page was NaN or inf.
    """
    saturated, bad = (int(x) for x in np.asarray(cache.faults))
    if bad:
        raise ValueError(f"{bad} cached rows held NaN or inf when their page was written")
    return saturated
