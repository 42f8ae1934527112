"""Where tokens go in the cache, which pages are due when, and what is refused."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax import (
    Codec,
    KVConfig,
    PagedKV,
    PagePlan,
    Rotation,
    append_kv,
    due_pages,
    init_cache,
    truncate,
    write_pages,
)
from oscar_jax.cache import init_layer, page_ids, row_lengths
from pallas_kernels.layout import PageJobs, Windows
from pallas_kernels.write import write

S, R, T, LOOKAHEAD = 64, 256, 128, 16
RING = R + T + LOOKAHEAD


def cache_of(batch: int = 1, max_tokens: int = 700, **options: Any) -> PagedKV:
    return init_cache(
        KVConfig(**options), layers=1, kv_heads=1, head_dim=64, batch=batch, max_tokens=max_tokens
    )


def numbered(first: int, count: int, batch: int = 1) -> jax.Array:
    """Keys [B, count, 1, 64] whose channel 0 is the position and channel 1 the row, BF16-exact."""
    k = np.zeros((batch, count, 1, 64), np.float32)
    k[..., 0] = (np.arange(first, first + count) % 256)[None, :, None]
    k[..., 2] = (np.arange(first, first + count) // 256)[None, :, None]
    k[..., 1] = np.arange(batch)[:, None, None]
    return jnp.asarray(k)


def positions(pool: jax.Array) -> np.ndarray:
    """The positions that rows of a BF16 pool [..., D] hold."""
    x = np.asarray(pool, np.float32)
    return (x[..., 0] + 256 * x[..., 2]).astype(int)


@functools.partial(jax.jit, static_argnames="layer")
def append(
    cache: PagedKV, layer: int, k: jax.Array, v: jax.Array, *, lengths: Any, q_lens: Any = None
) -> PagedKV:
    return append_kv(cache, layer, k, v, lengths=lengths, q_lens=q_lens)


# --------------------------------------------------------------------------------------- windows


def test_visible_complete_and_first_tail_by_hand() -> None:
    windows = Windows()
    n = jnp.array([0, 1, 191, 192, 447, 448, 575, 576, 4096])
    assert windows.visible_pages(n).tolist() == [0, 0, 0, 0, 0, 1, 1, 2, 29]
    assert windows.complete_pages(n).tolist() == [0, 0, 0, 1, 2, 3, 3, 4, 31]
    assert windows.first_tail(n).tolist() == [64, 64, 64, 64, 64, 192, 192, 320, 64 + 29 * 128]
    assert (windows.ring, windows.band) == (400, 384)


def test_the_tail_is_always_shorter_than_r_plus_t_and_holds_the_newest_r() -> None:
    windows, n = Windows(), jnp.arange(S + R, 5000)
    tail = np.asarray(n - windows.first_tail(n))
    assert tail.min() == R
    assert tail.max() == R + T - 1


# ---------------------------------------------------------------------------------------- append


def test_the_first_s_tokens_go_to_the_sink_and_the_rest_to_row_p_minus_s_of_the_ring() -> None:
    k = numbered(0, 100)
    cache = append(cache_of(), 0, k, 2 * k, lengths=100)
    layer = cache.layers[0]
    assert positions(layer.sink_k[0, 0]).tolist() == list(range(64))
    assert positions(layer.tail_k[0, 0, :36]).tolist() == list(range(64, 100))
    assert not np.asarray(layer.tail_k[0, 0, 36:]).any()
    assert (layer.tail_v == 2 * layer.tail_k).all()
    assert (layer.sink_v == 2 * layer.sink_k).all()


def test_the_ring_keeps_the_newest_r_t_l_tokens() -> None:
    """700 tokens: row (p - 64) mod 400 holds p for p = 300 .. 699."""
    k = numbered(0, 700)
    cache = append(cache_of(), 0, k, k, lengths=700)
    held = positions(cache.layers[0].tail_k[0, 0])
    want = np.zeros(RING, int)
    for p in range(700 - RING, 700):
        want[(p - S) % RING] = p
    assert (held == want).all()


def test_keys_are_rounded_to_bf16_to_nearest_even() -> None:
    """1 + 1/256 lies half-way between BF16's 1 and 1 + 1/128: to even; 1 + 3/256: up."""
    k = jnp.zeros((1, 1, 1, 64)).at[0, 0, 0, :2].set(jnp.array([1 + 1 / 256, 1 + 3 / 256]))
    cache = append(cache_of(), 0, k, k, lengths=1)
    assert cache.layers[0].sink_k[0, 0, 0, :2].tolist() == [1.0, 1 + 4 / 256]


def test_rows_of_one_call_may_have_different_lengths_and_none() -> None:
    """Row 0 appends positions 70, 71; row 1 nothing; row 2 positions 63, 64, 65."""
    cache = cache_of(batch=3)
    k = jnp.concatenate([numbered(70, 4), numbered(0, 4) + 9, numbered(63, 4)])
    lengths, q_lens = jnp.array([72, 50, 66]), jnp.array([2, 0, 3])
    layer = append(cache, 0, k, k, lengths=lengths, q_lens=q_lens).layers[0]
    assert positions(layer.tail_k[0, 0, 6:9]).tolist() == [70, 71, 0]
    assert not np.asarray(layer.sink_k[:2]).any()
    assert not np.asarray(layer.tail_k[1]).any()
    assert positions(layer.sink_k[2, 0, 63]).tolist() == 63
    assert positions(layer.tail_k[2, 0, :3]).tolist() == [64, 65, 0]


def test_rows_go_to_the_slots_and_sinks_of_their_tables() -> None:
    cache = cache_of(batch=2)
    tables = dataclasses.replace(
        cache.tables, slot=jnp.array([1, 0], jnp.int32), sink=jnp.array([0, 1], jnp.int32)
    )
    cache = dataclasses.replace(cache, tables=tables)
    k = numbered(0, 70, batch=2)
    layer = append(cache, 0, k, k, lengths=70).layers[0]
    assert [float(layer.tail_k[slot, 0, 0, 1]) for slot in (0, 1)] == [1.0, 0.0]
    assert [float(layer.sink_k[sink, 0, 0, 1]) for sink in (0, 1)] == [0.0, 1.0]


def test_highest_remembers_the_most_a_ring_has_held_until_a_new_sequence_begins() -> None:
    cache = cache_of(batch=2)
    k = numbered(0, 90, batch=2)
    cache = append(cache, 0, k, k, lengths=90)
    assert cache.highest.tolist() == [90, 90]
    one = numbered(80, 1, batch=2)
    cache = append(cache, 0, one, one, lengths=jnp.array([81, 90]), q_lens=jnp.array([1, 0]))
    assert cache.highest.tolist() == [90, 90]  # truncated to 80 and regrown by one
    cache = append(cache, 0, k, k, lengths=jnp.array([30, 90]), q_lens=jnp.array([30, 0]))
    assert cache.highest.tolist() == [30, 90]  # another sequence took the slot


@pytest.mark.parametrize(
    ("k", "v"),
    [((1, 1, 2, 64), (1, 1, 2, 64)), ((1, 1, 1, 64), (1, 1, 1, 128)), ((2, 1, 1, 64),) * 2],
)
def test_append_refuses_shapes_of_another_cache(k: tuple[int, ...], v: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must be \(1, 1, 1, 64\) and \(1, 1, 1, 64\)"):
        append_kv(cache_of(), 0, jnp.zeros(k), jnp.zeros(v), lengths=1)


# ----------------------------------------------------------------------------------------- pages


def planned(plan: PagePlan) -> list[tuple[int, int]]:
    return [(int(r), int(p)) for r, p in zip(plan.row, plan.page, strict=True) if int(p) >= 0]


@pytest.mark.parametrize(
    ("lengths", "queries", "want"),
    [
        (191, 1, []),
        (192, 1, [(0, 0)]),
        (193, 1, []),
        (320, 1, [(0, 1)]),
        (320, 320, [(0, 0), (0, 1)]),
        (200, 16, [(0, 0)]),
        (208, 16, []),  # complete at 192, the newest 16 are 193 .. 208
        (207, 16, [(0, 0)]),
    ],
)
def test_a_page_is_due_when_its_last_token_is_among_the_newest(
    lengths: int, queries: int, want: list[tuple[int, int]]
) -> None:
    assert planned(due_pages(cache_of(), lengths=lengths, queries=queries)) == want


def test_due_pages_are_those_of_each_rows_own_new_tokens() -> None:
    plan = due_pages(
        cache_of(batch=3),
        lengths=jnp.array([192, 192, 330]),
        q_lens=jnp.array([1, 0, 200]),
        queries=200,
    )
    assert planned(plan) == [(0, 0), (2, 0), (2, 1)]


@pytest.mark.parametrize("step", [1, 7, 128, 300])
def test_every_page_becomes_due_exactly_once_whatever_the_steps(step: int) -> None:
    """Rows of one batch stand for the successive calls of one sequence of 600 tokens."""
    lengths = jnp.arange(step, 600 + step, step)
    cache = cache_of(batch=len(lengths), max_tokens=200)
    found = [page for _, page in planned(due_pages(cache, lengths=lengths, queries=step))]
    assert found == list(range((int(lengths[-1]) - S) // T))


def test_pages_outside_the_block_table_are_skipped() -> None:
    cache = cache_of(batch=2, max_tokens=320)  # two pages a row
    plan = PagePlan(jnp.array([0, 1, 1, 0]), jnp.array([0, 1, 2, -1]))
    assert page_ids(cache, plan).tolist() == [0, 3, -1, -1]


def test_a_written_page_holds_its_tokens_and_no_other_page_changes() -> None:
    """BF16 pages hold the rows themselves: page 1 is tokens 192 .. 319, wherever the ring has them.

    At 600 tokens they lie in rows 128 .. 255; page 3, tokens 448 .. 575, wraps around row 400.
    """
    cache = cache_of(max_tokens=600, dtype="bf16")
    k = numbered(0, 600)
    cache = append(cache, 0, k, -k, lengths=600)
    plan = PagePlan(jnp.array([0, 0]), jnp.array([1, 3]))
    layer = write_pages(cache, None, plan).layers[0]
    assert (np.arange(448, 576) - S).max() >= RING
    for page, first in ((1, 200), (3, 448)):
        at = first - (S + T * page)
        assert positions(layer.k_pages[page, 0, at:]).tolist() == list(
            range(first, S + T * (page + 1))
        )
        assert (layer.v_pages[page] == -layer.k_pages[page]).all()
    assert not np.asarray(layer.k_pages[jnp.array([0, 2])]).any()
    assert len(layer.k_pages) == 4


def test_a_page_has_the_same_bytes_alone_and_in_bulk() -> None:
    rotation = Rotation.hadamard(layers=1, kv_heads=1, head_dim=64)
    rng = np.random.default_rng(0)
    k = jnp.asarray(rng.normal(size=(2, 448, 1, 64)), jnp.float32)
    cache = append(cache_of(batch=2), 0, k, k, lengths=448)
    bulk = write_pages(cache, rotation, due_pages(cache, lengths=448, queries=448)).layers[0]
    for row in range(2):
        for page in (2, 0, 1):
            plan = PagePlan(jnp.array([row]), jnp.array([page]))
            alone = write_pages(cache, rotation, plan).layers[0]
            index = int(cache.tables.block_table[row, page])
            for name in ("k_pages", "v_pages", "k_meta", "v_meta"):
                assert (getattr(alone, name)[index] == getattr(bulk, name)[index]).all()


def test_write_refuses_a_missing_rotation_and_wrong_sources() -> None:
    cache = cache_of()
    with pytest.raises(ValueError, match="an INT2 cache needs a rotation"):
        write_pages(cache, None, due_pages(cache, lengths=192))
    layer, rotation = cache.layers[0], Rotation.hadamard(layers=1, kv_heads=1, head_dim=64)
    zero = jnp.zeros(1, jnp.int32)
    jobs, codec = PageJobs(zero, zero, zero), rotation.codecs[0]
    short, two_heads = jnp.zeros((1, 1, 100, 64)), jnp.zeros((1, 2, 128, 64))
    for source, shape in ((short, r"\(1, 1, 100, 64\)"), (two_heads, r"\(1, 2, 128, 64\)")):
        with pytest.raises(ValueError, match=f"source_k has shape {shape}: must be"):
            write(layer, source, source, rotation.layer(0), jobs, codec=codec)


# ------------------------------------------------------------------------------- making a cache


def test_an_empty_cache_has_the_documented_arrays() -> None:
    cache = init_cache(
        layers=2, kv_heads=3, head_dim=192, v_head_dim=128, batch=2, max_tokens=64 + 3 * 128 + 1
    )
    layer = cache.layers[1]
    shapes = {
        "k_pages": ((6, 3, 128, 24), "uint16"),
        "v_pages": ((6, 3, 128, 16), "uint16"),
        "k_meta": ((6, 3, 128), "uint32"),
        "v_meta": ((6, 3, 128), "uint32"),
        "sink_k": ((2, 3, 64, 192), "bfloat16"),
        "sink_v": ((2, 3, 64, 128), "bfloat16"),
        "tail_k": ((2, 3, 400, 192), "bfloat16"),
        "tail_v": ((2, 3, 400, 128), "bfloat16"),
    }
    assert {
        name: (getattr(layer, name).shape, str(getattr(layer, name).dtype)) for name in shapes
    } == shapes
    assert cache.tables.block_table.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(cache.layers))


def test_k_and_v_may_differ_in_size_and_a_size_without_a_layout_is_refused() -> None:
    """U28: 192 keys with 128 values serve; 72 and 48 are refused with the sizes that serve."""
    wrong: tuple[dict[str, Any], ...] = (dict(head_dim=72), dict(head_dim=128, v_head_dim=48))
    for sizes in wrong:
        with pytest.raises(ValueError, match=r"has layouts for \(64, 80, 96, 128, 192, 256\)"):
            init_cache(layers=1, kv_heads=1, batch=1, max_tokens=100, **sizes)
    odd = init_cache(
        KVConfig(dtype="bf16"), layers=1, kv_heads=1, head_dim=72, batch=1, max_tokens=100
    )
    assert odd.layers[0].k_pages.shape[-1] == 72  # BF16 pages have no packing to respect


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(dtype="int4"), "dtype='int4': must be 'int2' or 'bf16'"),
        (dict(sink=0), "sink=0: must be a positive multiple of 64"),
        (dict(sink=100), "sink=100: must be a positive multiple of 64"),
        (dict(recent=32), "recent=32: must be a positive multiple of 64"),
        (dict(recent=-64), "recent=-64: must be a positive multiple of 64"),
        (dict(lookahead=0), "lookahead=0: must be at least 1"),
    ],
)
def test_windows_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        KVConfig(**settings)


def test_the_page_size_is_not_a_setting() -> None:
    """U25, U28: there is one page size and one group, a row; nothing else can be asked for."""
    assert {field.name for field in dataclasses.fields(KVConfig)} == {
        "dtype",
        "sink",
        "recent",
        "lookahead",
    }


@pytest.mark.parametrize("name", ["layers", "batch", "max_tokens"])
def test_a_cache_of_nothing_is_refused(name: str) -> None:
    sizes: dict[str, Any] = dict(layers=1, kv_heads=1, head_dim=64, batch=1, max_tokens=100)
    sizes |= {name: 0}
    with pytest.raises(ValueError, match=f"{name}=0: must be at least 1"):
        init_cache(**sizes)


def test_lengths_may_be_a_number_for_all_rows_and_q_lens_default_to_all_queries() -> None:
    cache = cache_of(batch=3)
    n, new = row_lengths(cache, 70, None, 5)
    assert (n.tolist(), new.tolist()) == ([70] * 3, [5] * 3)
    n, new = row_lengths(cache, jnp.array([1, 2, 3]), jnp.array([1, 0, 1]), 5)
    assert (n.tolist(), new.tolist()) == ([1, 2, 3], [1, 0, 1])


def test_a_cache_and_a_rotation_that_disagree_about_a_layer_are_refused() -> None:
    rotation = Rotation.hadamard(layers=1, kv_heads=1, head_dim=64, codec=[None])
    with pytest.raises(ValueError, match="layer 0 has packed pages and the rotation says BF16"):
        write_pages(cache_of(), rotation, PagePlan(jnp.zeros(1, int), jnp.zeros(1, int)))
    of: dict[str, Any] = dict(layers=2, kv_heads=1, head_dim=64, batch=1, max_tokens=500)
    with pytest.raises(ValueError, match="codecs names 1 layers: must be one per layer, 2"):
        init_cache(**of, codecs=(Codec(),))
    with pytest.raises(ValueError, match="must be None everywhere where dtype='bf16'"):
        init_cache(KVConfig(dtype="bf16"), **of, codecs=(None, Codec()))


def test_truncate_of_a_fresh_row_is_refused_forward() -> None:
    with pytest.raises(ValueError, match="row 0 holds 0 tokens and cannot be truncated to 1"):
        truncate(cache_of(), 1)
    cache = cache_of()
    assert truncate(cache, 0) is cache


def test_init_layer_counts_pages_slots_and_sinks_separately() -> None:
    layer = init_layer(
        KVConfig(), codec=Codec(), kv_heads=2, head_dim=64, pages=5, slots=3, sinks=4
    )
    assert (len(layer.k_pages), len(layer.tail_k), len(layer.sink_k)) == (5, 3, 4)
