"""The true size of a KV cache: bytes and bits with metadata, BF16 windows and rings counted.

With S sink, R recent, T page tokens, n cached tokens and m(n) = max(0, (n - S - R) // T) visible
pages, per layer and KV head a token costs

    in a page   (bk D + 32 + bv Dv + 32) / 8 bytes      2 + 32/D bits per key element at bk = 2
    in BF16     2 (D + Dv) bytes

where a layer's codec has bk bits per key number and bv per value number (a layer may also keep its
pages in BF16), and a sequence is live in T m(n) tokens of pages and n - T m(n) tokens of BF16. A
layer with a sliding window W has no pages and is live in its newest min(n, W) tokens, in BF16 as it
would be anywhere. What is *allocated* is more: pages written ahead of need, and a whole sink and
ring per slot however short its sequence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from oscar_jax.cache import PagedKV, layer_codecs, windows_of
from oscar_jax.config import KVConfig
from oscar_jax.sliding import sliding_by_layer
from pallas_kernels.format import PAGE, Codec
from pallas_kernels.layout import Windows

BF16_BYTES = 2
META_BYTES = 4  # float16 scale and min, or three water-filled scales
DEFAULT_WINDOWS = Windows()
BF16 = (16, 16)


@dataclasses.dataclass(frozen=True)
class CacheShape:
    """What decides the bytes of a cache; every number below is of all layers together.

    Numbers per token or per element are of the layers with pages: those grow with a sequence.

    Args:
        layers: layers with pages. kv_heads, head_dim: the model's. v_head_dim: None for head_dim.
        windows: S, R and the lookahead.
        bits: per layer, of a key's and of a value's code; (16, 16) is BF16, which has no metadata.
            () is 2 bits everywhere.
        sliding: the window, in tokens, of each further layer that has one instead of pages.

    >>> qwen3_8b = CacheShape(layers=36, kv_heads=8, head_dim=128)
    >>> qwen3_8b.bytes_per_token, qwen3_8b.bf16_bytes_per_token
    (20736, 147456)
    >>> [round(qwen3_8b.compression(n), 1) for n in (4096, 32768, 131072)]
    [4.5, 6.6, 7.0]
    """

    layers: int
    kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    windows: Windows = DEFAULT_WINDOWS
    bits: tuple[tuple[int, int], ...] = ()
    sliding: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("layers", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1")
        if self.v_head_dim is not None and self.v_head_dim < 1:
            raise ValueError(f"v_head_dim={self.v_head_dim}: must be at least 1, or None")
        object.__setattr__(self, "bits", self.bits or ((2, 2),) * self.layers)
        if len(self.bits) != self.layers:
            raise ValueError(f"bits names {len(self.bits)} layers: must be {self.layers}, or ()")

    @classmethod
    def of(
        cls,
        config: KVConfig,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        codecs: Sequence[Codec | None] | None = None,
        sliding_windows: Sequence[int | None] | None = None,
    ) -> CacheShape:
        """The shape of the cache that ``init_cache(config, ...)`` makes; ``layers`` are all."""
        sliding = tuple(sliding_by_layer(layers, sliding_windows).values())
        layers -= len(sliding)
        bits = tuple(
            BF16 if codec is None else codec.bits for codec in layer_codecs(config, layers, codecs)
        )
        return cls(layers, kv_heads, head_dim, v_head_dim, windows_of(config), bits, sliding)

    @classmethod
    def of_cache(cls, cache: PagedKV) -> CacheShape:
        """The shape of a cache that exists."""
        first = cache.layers[0]
        return cls(
            layers=len(cache.layers),
            kv_heads=first.sink_k.shape[1],
            head_dim=first.sink_k.shape[3],
            v_head_dim=first.v_head_dim,
            windows=cache.windows,
            bits=tuple(layer.bits for layer in cache.layers),
            sliding=tuple(layer.window for layer in cache.sliding),
        )

    # ------------------------------------------------------------------------------- one token

    @property
    def _value_dim(self) -> int:
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def _per_layer(self) -> int:
        """Key and value numbers of one token in one layer: K (D + Dv)."""
        return self.kv_heads * (self.head_dim + self._value_dim)

    @property
    def _elements(self) -> int:
        """Key and value numbers of one token in the layers with pages."""
        return self.layers * self._per_layer

    def _in_windows(self, n: int) -> int:
        """Key and value numbers that n tokens keep in layers with a sliding window."""
        return sum(min(n, window) for window in self.sliding) * self._per_layer

    @property
    def bf16_bytes_per_token(self) -> int:
        """Bytes of one token in BF16 in these layers, the cache that all ratios compare with."""
        return BF16_BYTES * self._elements

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token in the pages of all layers, metadata counted.

        The sum over layers of K ((bk D + bv Dv) / 8 + 8), without the 8 where they are BF16.
        """
        return self.kv_heads * sum(
            (key * self.head_dim + value * self._value_dim) // 8
            + (0 if (key, value) == BF16 else 2 * META_BYTES)
            for key, value in self.bits
        )

    @property
    def bits_per_element(self) -> float:
        """Stored bits of one key or value number in a page, averaged over layers and both sides:
        2 + 32/D where all layers have 2-bit keys and values and D = Dv."""
        return 8 * self.bytes_per_token / self._elements

    # ---------------------------------------------------------------------------- one sequence

    def pages(self, n: int) -> int:
        """m(n), the pages that the newest of n tokens sees."""
        return max(0, (n - self.windows.sink - self.windows.recent) // PAGE)

    def pages_written(self, n: int) -> int:
        """Pages that n tokens need room for, those written ahead of need included: (n - S) // T."""
        return max(0, (n - self.windows.sink) // PAGE)

    def live_bytes(self, n: int) -> int:
        """Bytes that n tokens of one sequence are read from: every token once, page or BF16."""
        if n < 0:
            raise ValueError(f"n={n} tokens: must be at least 0")
        paged = PAGE * self.pages(n)
        plain = (n - paged) * self.bf16_bytes_per_token + BF16_BYTES * self._in_windows(n)
        return paged * self.bytes_per_token + plain

    def bf16_bytes(self, n: int) -> int:
        """Bytes of the same sequence where all of it is BF16: what ratios compare with."""
        return n * self.bf16_bytes_per_token + BF16_BYTES * self._in_windows(n)

    def live_bits_per_element(self, n: int) -> float:
        """Bits that a key or value number of an n-token sequence takes, windows counted."""
        return 8 * BF16_BYTES * self.live_bytes(n) / self.bf16_bytes(n) if n > 0 else 0.0

    def compression(self, n: int) -> float:
        """The true live ratio: BF16 bytes of n tokens over ``live_bytes(n)``; 1 for short ones."""
        return self.bf16_bytes(n) / self.live_bytes(n) if n > 0 else 1.0

    # ------------------------------------------------------------------------------- the pools

    @property
    def page_bytes(self) -> int:
        """Bytes of one page of all layers."""
        return PAGE * self.bytes_per_token

    @property
    def sink_bytes(self) -> int:
        """Bytes of one sink of all layers: S tokens in BF16."""
        return self.windows.sink * self.bf16_bytes_per_token

    @property
    def ring_bytes(self) -> int:
        """Bytes of a slot's rings: R + T + lookahead tokens in BF16 in layers with pages, the
        window and the lookahead in the others."""
        sliding = sum(window + self.windows.lookahead for window in self.sliding)
        own = BF16_BYTES * sliding * self._per_layer
        return self.windows.ring * self.bf16_bytes_per_token + own

    @property
    def window_bytes(self) -> int:
        """Bytes that a slot takes beside its pages, however short its sequence: sink and rings."""
        return self.sink_bytes + self.ring_bytes

    def allocated_bytes(self, *, pages: int, slots: int, sinks: int | None = None) -> int:
        """Bytes of pools of ``pages`` pages, ``slots`` rings and ``sinks`` (default: slots) sinks.

        Exactly the arrays' bytes; block tables and lengths (4 bytes a page) are not counted.
        """
        sinks = slots if sinks is None else sinks
        return pages * self.page_bytes + slots * self.ring_bytes + sinks * self.sink_bytes

    def token_capacity(self, *, pages: int, slots: int) -> int:
        """Tokens that ``slots`` sequences, each of at least S, can hold together in any split.

        Every sequence has S tokens beside its pages; the up to T - 1 tokens of each that do not
        fill a page yet are not promised.
        """
        return pages * PAGE + slots * self.windows.sink

    def allocated_compression(self, *, pages: int, slots: int, sinks: int | None = None) -> float:
        """BF16 bytes of ``token_capacity`` over ``allocated_bytes``: what the memory really buys.

        Below 1 where slots outweigh pages: few tokens per slot are better off in plain BF16.
        """
        capacity = self.token_capacity(pages=pages, slots=slots) * self.bf16_bytes_per_token
        capacity += slots * BF16_BYTES * sum(self.sliding) * self._per_layer
        return capacity / self.allocated_bytes(pages=pages, slots=slots, sinks=sinks)
