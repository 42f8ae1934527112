"""What a query sees depends on its position alone: not on dispatch, batch or time of writing.

All tests use the shapes of BASE, so that they share its compiled programs.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from oscar_jax import PagedKV, truncate
from tests.kernels.cases import (
    POOLS,
    Sequences,
    changed,
    int32,
    poisoned_cache,
    sequences,
    transforms,
)
from tests.kernels.checks import assert_close, assert_same_bytes
from tests.kernels.reference import bits
from tests.kernels.runs import decode_steps, in_one_call, token_by_token, write_due
from tests.kernels.test_attention_suite import BASE, implementations, one_call

DISPATCH = 16  # the steps of one compiled call
AHEAD = BASE.recent + DISPATCH


def decode_on(
    data: Sequences,
    cache: PagedKV,
    start: Any,
    stop: Any,
    implementation: str,
    *,
    per_call: int = DISPATCH,
    write: bool = True,
    steps: int = DISPATCH,
) -> tuple[list[np.ndarray], PagedKV]:
    """Decode BASE's rows from ``start`` to ``stop`` tokens, ``per_call`` tokens of a compiled call
    of ``steps`` steps at a time; without ``write``, no page is written.
    """
    done, stop, rotation = np.array(start), np.array(stop), transforms(BASE)
    outs: list[list[np.ndarray]] = [[] for _ in done]
    while (done < stop).any():
        new = np.minimum(per_call, stop - done)
        out, cache = decode_steps(
            cache,
            rotation,
            *data.window(done, steps),
            int32(done),
            int32(new),
            write=write,
            implementation=implementation,
        )
        for row, count in enumerate(new):
            outs[row].append(np.asarray(out)[row, :count])
        done = done + new
    return [np.concatenate(parts) for parts in outs], cache


def prefilled(n: tuple[int, int], implementation: str, data: Sequences | None = None) -> PagedKV:
    return in_one_call(BASE, data or sequences(BASE), implementation, n).cache


@pytest.mark.parametrize(("per_call", "steps"), [(1, 1), (4, 16), (16, 16)])
@implementations
def test_any_number_of_steps_per_dispatch_with_pages_written_between(
    per_call: int, steps: int, implementation: str
) -> None:
    """Row 0 completes page 3 (at 576) and sees page 2 (at 576); row 1 stops in mid-dispatch."""
    data, start, stop = sequences(BASE), (560, 500), (592, 521)
    whole, rotation = one_call(BASE, implementation), transforms(BASE)
    cache, done = prefilled(start, implementation), np.array(start)
    while (done < stop).any():
        until = np.minimum(done + per_call, stop)
        outs, cache = decode_on(
            data, cache, done, until, implementation, per_call=per_call, write=False, steps=steps
        )
        cache = write_due(
            cache, rotation, int32(until), queries=per_call, implementation=implementation
        )
        for row, out in enumerate(outs):
            if len(out):
                assert_close(out, whole.out[row, done[row] : until[row]])
        done = until
    assert_same_bytes(cache, prefilled(stop, implementation))


@implementations
def test_a_page_may_be_written_at_any_time_before_it_is_seen(implementation: str) -> None:
    """Pages 2 and 3, complete at 448 and 576, are written in one go at 703: 704 sees page 2."""
    data, whole, rotation = sequences(BASE), one_call(BASE, implementation), transforms(BASE)
    cache = prefilled((440, 440), implementation)
    before, cache = decode_on(data, cache, (440, 440), (703, 700), implementation, write=False)
    unwritten = np.asarray(cache.tables.block_table)[:, 2:4]
    empty = np.asarray(poisoned_cache(BASE).layers[0].k_pages)
    assert (np.asarray(cache.layers[0].k_pages)[unwritten] == empty[unwritten]).all()
    for _ in range(2):  # twice gives the same bytes
        cache = write_due(
            cache,
            rotation,
            int32([703, 700]),
            queries=AHEAD,
            implementation=implementation,
        )
    after, cache = decode_on(data, cache, (703, 700), (705, 700), implementation)
    assert_close(np.concatenate([before[0], after[0]]), whole.out[0, 440:705])
    assert_close(before[1], whole.out[1, 440:700])
    assert_same_bytes(cache, whole.cache)


@implementations
def test_a_page_outlives_its_last_reader_in_the_ring_by_the_lookahead(implementation: str) -> None:
    """Complete at 320 with R + L tokens to spare: at 592 its first token is still in the ring."""
    rotation = transforms(BASE)
    n = (320 + AHEAD, 320 + AHEAD)
    cache, other = prefilled(n, implementation), prefilled(n, implementation)
    ids = np.asarray(cache.tables.block_table)[:, 1]
    words = changed(cache.layers[0].k_pages, ids, 0)
    cache = dataclasses.replace(
        cache, layers=(dataclasses.replace(cache.layers[0], k_pages=words),)
    )
    cache = write_due(cache, rotation, int32(n), queries=AHEAD + 1, implementation=implementation)
    assert_same_bytes(cache, other)


@implementations
def test_rows_of_a_batch_do_not_depend_on_each_other(implementation: str) -> None:
    """U08: 321 and 700 tokens together, in the other order, and each alone."""
    data = sequences(BASE)
    together = in_one_call(BASE, data, implementation, (700, 321)).out
    swapped_data = Sequences(data.q[::-1], data.k[::-1], data.v[::-1])
    swapped = in_one_call(BASE, swapped_data, implementation, (321, 700)).out
    alone = dataclasses.replace(BASE, lengths=(705,))
    for row, n in enumerate((700, 321)):
        assert (bits(together[row, :n]) == bits(swapped[1 - row, :n])).all()
        rows = slice(row, row + 1)
        single = in_one_call(
            alone,
            Sequences(data.q[rows], data.k[rows], data.v[rows]),
            implementation,
            (n,),
        )
        assert_close(single.out[0, :n], together[row, :n])


@implementations
def test_where_pages_lie_in_the_pool_changes_nothing(implementation: str) -> None:
    """U25: the page size is fixed, the page ids are not."""
    data, whole = sequences(BASE), one_call(BASE, implementation)
    other = in_one_call(BASE, data, implementation, cache=poisoned_cache(BASE, shuffle=5))
    table, others = whole.cache.tables.block_table, other.cache.tables.block_table
    assert (np.asarray(table) != np.asarray(others)).any()
    for row, n in enumerate(BASE.lengths):
        assert (bits(other.out[row, :n]) == bits(whole.out[row, :n])).all()


@implementations
def test_an_inactive_row_keeps_every_byte(implementation: str) -> None:
    data, empty = sequences(BASE), np.float32(np.nan)
    frozen = [x.copy() for x in (data.q, data.k, data.v)]
    for x in frozen:
        x[1] = empty
    cache = prefilled((570, 570), implementation)
    before = {name: np.array(getattr(cache.layers[0], name)) for name in POOLS}
    _, cache = decode_on(Sequences(*frozen), cache, (570, 570), (586, 570), implementation)
    store, tables = cache.layers[0], cache.tables
    slot, sink = (int(np.asarray(x)[1]) for x in (tables.slot, tables.sink))
    pages = np.asarray(tables.block_table)[1, :5]
    for name, index in (
        ("tail_k", slot),
        ("tail_v", slot),
        ("sink_k", sink),
        ("sink_v", sink),
        ("k_pages", pages),
        ("v_pages", pages),
        ("k_meta", pages),
        ("v_meta", pages),
    ):
        held, was = np.asarray(getattr(store, name)), before[name]
        assert (bits(held[index]) == bits(was[index])).all(), name
    assert np.asarray(cache.highest)[slot] == 570


@implementations
def test_fewer_than_448_tokens_equal_the_bf16_cache_exactly(implementation: str) -> None:
    """U09: every length up to 447 at once, as positions, in prefill and token by token.

    The kernels of the two kinds of pages sum in another order, and BF16 pages are written by XLA.
    """
    data, n = sequences(BASE), (447, 320)
    bf16 = dataclasses.replace(BASE, codec=None)
    for run in (in_one_call, token_by_token):
        int2, plain = run(BASE, data, implementation, n).out, run(bf16, data, "xla", n).out
        for row, length in enumerate(n):
            if implementation == "xla":
                assert (int2[row, :length] == plain[row, :length]).all()
            else:
                assert_close(int2[row, :length], plain[row, :length])


@implementations
def test_truncate_and_regrow_equals_a_run_that_never_held_the_other_tokens(
    implementation: str,
) -> None:
    """Both rows lose tokens; page 3, complete at 576, has to be rewritten in row 0."""
    data, other = sequences(BASE), sequences(BASE, seed=7)
    cut, held, regrown = (570, 578), (580, 590), (592, 585)
    mixed = [x.copy() for x in (data.q, data.k, data.v)]
    for mine, theirs in zip(mixed, (other.q, other.k, other.v), strict=True):
        for row, n in enumerate(cut):
            mine[row, n:] = theirs[row, n:]
    cache = prefilled(held, implementation, Sequences(*mixed))
    cache = truncate(cache, int32(cut))
    outs, cache = decode_on(data, cache, cut, regrown, implementation)
    whole = one_call(BASE, implementation)
    for row, (start, stop) in enumerate(zip(cut, regrown, strict=True)):
        assert_close(outs[row], whole.out[row, start:stop])
    fresh = prefilled(regrown, implementation)
    assert_same_bytes(cache, fresh, ("k_pages", "v_pages", "k_meta", "v_meta", "sink_k", "sink_v"))


@implementations
def test_truncate_refuses_what_the_ring_no_longer_holds(implementation: str) -> None:
    """Exact down to highest - L, however the row got there; below that: recompute."""
    cache = prefilled((580, 590), implementation)
    assert truncate(cache, int32([564, 574])) is cache
    for lengths, row in (([563, 590], 0), ([580, 573], 1)):
        with pytest.raises(ValueError, match=rf"row {row} .*recompute the row"):
            truncate(cache, int32(lengths))
    with pytest.raises(ValueError, match="row 1 holds 590 tokens and cannot be truncated to 591"):
        truncate(cache, int32([580, 591]))
    _, cache = decode_on(sequences(BASE), cache, (564, 580), (570, 586), implementation)
    with pytest.raises(ValueError, match=r"row 0 .*exact from 564 to 580"):
        truncate(cache, int32([563, 586]))  # regrown to 570, yet the ring has seen 580
