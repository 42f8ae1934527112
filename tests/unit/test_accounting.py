"""The bytes of a cache, by hand for Qwen3-8B and against the arrays that are really allocated."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from oscar_jax import Codec, KVConfig, init_cache
from oscar_jax.accounting import CacheShape
from oscar_jax.cache import init_layer
from pallas_kernels.layout import Windows

QWEN3_8B = CacheShape(layers=36, kv_heads=8, head_dim=128)


def test_a_token_of_qwen3_8b_takes_20736_bytes_instead_of_147456() -> None:
    """U41: 36 layers x 8 heads x 2 sides x (128 x 2 + 32) bits; BF16 36 x 8 x 2 x 128 x 2 bytes."""
    assert QWEN3_8B.bytes_per_token == 36 * 8 * 2 * (128 * 2 + 32) // 8 == 20_736
    assert QWEN3_8B.bf16_bytes_per_token == 36 * 8 * 2 * 128 * 2 == 147_456
    assert QWEN3_8B.bits_per_element == 2.25
    assert CacheShape(layers=30, kv_heads=3, head_dim=64).bits_per_element == 2.5


def test_the_live_ratio_of_qwen3_8b_is_4_5_at_4k_6_6_at_32k_and_7_0_at_128k() -> None:
    """U41. 4,096 tokens: m = (4096 - 320) // 128 = 29 pages, so 384 tokens stay in BF16."""
    assert QWEN3_8B.pages(4096) == 29
    assert QWEN3_8B.live_bytes(4096) == 29 * 128 * 20_736 + 384 * 147_456
    ratios = [QWEN3_8B.compression(n) for n in (4096, 32_768, 131_072)]
    assert [round(r, 1) for r in ratios] == [4.5, 6.6, 7.0]
    assert max(ratios) < 147_456 / 20_736 < 7.12  # what no length reaches


@pytest.mark.parametrize("n", [1, 63, 64, 320, 447])
def test_a_short_sequence_is_not_compressed_at_all(n: int) -> None:
    assert QWEN3_8B.compression(n) == 1
    assert QWEN3_8B.live_bits_per_element(n) == 16


def test_the_first_page_counts_from_448_tokens_on() -> None:
    assert [QWEN3_8B.pages(n) for n in (447, 448, 575, 576)] == [0, 1, 1, 2]
    saved = QWEN3_8B.live_bytes(447) + 147_456 - QWEN3_8B.live_bytes(448)
    assert saved == 128 * (147_456 - 20_736)
    assert [QWEN3_8B.pages_written(n) for n in (191, 192, 448)] == [0, 1, 3]


def test_a_slot_of_qwen3_8b_takes_66_megabytes_of_windows_and_two_for_the_lookahead() -> None:
    assert QWEN3_8B.sink_bytes == 64 * 147_456
    assert QWEN3_8B.ring_bytes == (256 + 128 + 16) * 147_456
    assert QWEN3_8B.window_bytes - 16 * 147_456 == 66_060_288


def test_what_memory_buys_is_less_than_the_live_ratio_and_below_one_for_short_slots() -> None:
    """32 slots of 4,096 tokens: 31 pages each are reserved, and a whole ring."""
    pages = 32 * QWEN3_8B.pages_written(4096)
    allocated = QWEN3_8B.allocated_bytes(pages=pages, slots=32)
    assert allocated == pages * 128 * 20_736 + 32 * 464 * 147_456
    assert QWEN3_8B.token_capacity(pages=pages, slots=32) == 32 * (31 * 128 + 64)
    ratio = QWEN3_8B.allocated_compression(pages=pages, slots=32)
    assert ratio == 32 * (31 * 128 + 64) * 147_456 / allocated
    assert 3.9 < ratio < QWEN3_8B.compression(4096)
    assert QWEN3_8B.allocated_compression(pages=32, slots=32) < 0.5


@pytest.mark.parametrize(
    ("config", "shape"),
    [
        (KVConfig(), dict(layers=2, kv_heads=3, head_dim=64)),
        (KVConfig(sink=128, recent=64, lookahead=5), dict(layers=1, kv_heads=2, head_dim=128)),
        (KVConfig(), dict(layers=3, kv_heads=1, head_dim=192, v_head_dim=128)),
        (KVConfig(), dict(layers=1, kv_heads=1, head_dim=80)),
        (KVConfig(dtype="bf16"), dict(layers=2, kv_heads=2, head_dim=96, v_head_dim=64)),
    ],
)
def test_allocated_bytes_are_the_bytes_of_the_arrays(
    config: KVConfig, shape: dict[str, Any]
) -> None:
    """U41: exactly, where 2 % were asked for."""
    cache = init_cache(config, batch=3, max_tokens=1000, **shape)
    pages = cache.layers[0].k_pages.shape[0]
    held = CacheShape.of(config, **shape)
    assert held.allocated_bytes(pages=pages, slots=3) == sum(
        x.nbytes for x in jax.tree.leaves(cache.layers)
    )
    assert CacheShape.of_cache(cache).allocated_bytes(pages=pages, slots=3) == (
        held.allocated_bytes(pages=pages, slots=3)
    )
    layers = shape.pop("layers")
    codec = Codec() if config.dtype == "int2" else None
    layer = init_layer(config, codec=codec, pages=7, slots=2, sinks=5, **shape)
    assert held.allocated_bytes(pages=7, slots=2, sinks=5) == layers * sum(
        x.nbytes for x in jax.tree.leaves(layer)
    )


def test_a_layer_in_bf16_among_packed_ones_is_counted_as_its_arrays_are() -> None:
    """Qwen3-8B with its first layer in BF16: 35 layers of 576 bytes a token, one of 4,096."""
    shape: dict[str, Any] = dict(layers=36, kv_heads=8, head_dim=128)
    held = CacheShape.of(KVConfig(), **shape, codecs=(None, *[Codec()] * 35))
    assert held.bytes_per_token == 35 * 576 + 4096
    assert held.bits_per_element == (35 * 2.25 + 16) / 36
    small: dict[str, Any] = dict(layers=2, kv_heads=3, head_dim=64)
    codecs = (None, Codec("waterfill"))
    cache = init_cache(**small, batch=2, max_tokens=500, codecs=codecs)
    held = CacheShape.of(KVConfig(), **small, codecs=codecs)
    assert CacheShape.of_cache(cache).bits == held.bits == ((16, 16), (2, 2))
    assert held.allocated_bytes(pages=6, slots=2) == sum(
        x.nbytes for x in jax.tree.leaves(cache.layers)
    )


def test_a_bf16_cache_has_a_ratio_of_one_and_allocates_its_windows_on_top() -> None:
    plain = CacheShape(layers=36, kv_heads=8, head_dim=128, bits=((16, 16),) * 36)
    assert plain.bits_per_element == 16
    assert plain.compression(100_000) == 1
    assert plain.allocated_compression(pages=100, slots=4) < 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(layers=0, kv_heads=1, head_dim=64), "layers=0: must be at least 1"),
        (dict(layers=1, kv_heads=1, head_dim=64, v_head_dim=0), "v_head_dim=0: must be at least 1"),
        (dict(layers=2, kv_heads=1, head_dim=64, bits=((2, 2),)), "bits names 1 layers: must be 2"),
    ],
)
def test_shapes_that_mean_nothing_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CacheShape(**arguments)


def test_a_negative_length_is_refused() -> None:
    with pytest.raises(ValueError, match="n=-1 tokens: must be at least 0"):
        QWEN3_8B.live_bytes(-1)
    assert QWEN3_8B.compression(0) == 1


def test_windows_change_the_ratio() -> None:
    small = CacheShape(36, 8, 128, windows=Windows(sink=64, recent=64, lookahead=1))
    assert small.compression(4096) > QWEN3_8B.compression(4096)
    assert small.window_bytes == (64 + 64 + 128 + 1) * 147_456
