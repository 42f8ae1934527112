"""What every implementation of the cache's ops must do: the dense result, and the same bytes."""

from __future__ import annotations

import functools

import numpy as np
import pytest

from oscar_jax import Codec
from pallas_kernels.format import PAGE
from tests.kernels.cases import (
    IMPLEMENTATIONS,
    Case,
    int32,
    poisoned_cache,
    sequences,
    transforms,
    with_implementations,
)
from tests.kernels.checks import (
    assert_close,
    assert_pages_follow_the_codec,
    assert_rows_close,
    assert_same_bytes,
    expected,
)
from tests.kernels.runs import (
    Run,
    attend,
    decode_several,
    in_one_call,
    in_pieces,
    newest,
    prefill,
    token_by_token,
)

UNIFORM, WATERFILL = Codec(), Codec("waterfill")
UNIFORM_GAIN, WATERFILL_GAIN = Codec(gain=True), Codec("waterfill", gain=True)

# Every head_dim, group and codec, and pairs of them that differ in everything else.
BASE = Case(64, 2, 3, (705, 700), UNIFORM, piece=97)
CASES = (
    BASE,
    Case(128, 1, 5, (577, 63), WATERFILL_GAIN, piece=200),
    Case(80, 2, 1, (449,), Codec(clip_k=1.0, clip_v=1.0, gain=True)),
    Case(96, 1, 12, (330, 200), UNIFORM, recent=64, lookahead=4),
    Case(192, 1, 6, (321,), WATERFILL, v_head_dim=128, recent=64, piece=31),
    Case(256, 1, 7, (340, 1), WATERFILL_GAIN, recent=64, lookahead=1),
    Case(64, 1, 16, (520,), UNIFORM_GAIN, v_head_dim=128, sink=128, recent=128, piece=128),
    Case(64, 1, 2, (335,), WATERFILL_GAIN.with_bits(key=3, value=4), recent=64, piece=111),
    Case(80, 2, 1, (330,), WATERFILL.with_bits(key=4), v_head_dim=64, recent=64),
    Case(80, 2, 3, (384, 10), None, recent=64, piece=129),
)
WIDE = CASES[7]  # keys of 3 bits, values of 4
BF16 = CASES[-1]
implementations = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)


@functools.cache
def one_call(case: Case, implementation: str) -> Run:
    """``in_one_call``, kept: the run that others are compared with."""
    return in_one_call(case, sequences(case), implementation)


@with_implementations(*CASES)
def test_prefill_is_dense_attention_over_what_the_windows_show(
    case: Case, implementation: str
) -> None:
    run, data = one_call(case, implementation), sequences(case)
    for row, n in enumerate(case.lengths):
        assert_close(run.out[row, :n], expected(case, data, run.cache, row))
    assert np.asarray(run.cache.faults).tolist() == [0, 0]


@with_implementations(*CASES)
def test_pages_hold_the_codes_of_the_transformed_rows(case: Case, implementation: str) -> None:
    cache = one_call(case, implementation).cache
    for row, n in enumerate(case.lengths):
        if n >= case.sink + PAGE:
            assert_pages_follow_the_codec(case, sequences(case), cache, row)


@with_implementations(*CASES)
def test_decode_of_the_newest_token_equals_prefill(case: Case, implementation: str) -> None:
    run, n = one_call(case, implementation), case.lengths
    out = attend(
        run.cache,
        transforms(case),
        newest(sequences(case), n),
        int32(n),
        implementation=implementation,
    )
    for row, length in enumerate(n):
        assert_close(np.asarray(out)[row, 0], run.out[row, length - 1])


@with_implementations(BASE, CASES[1], BF16)
def test_prefill_in_pieces_of_any_size_equals_one_call(case: Case, implementation: str) -> None:
    run, whole = in_pieces(case, sequences(case), implementation), one_call(case, implementation)
    assert_same_bytes(run.cache, whole.cache)
    assert_rows_close(case, run.out, whole.out)


@with_implementations(BASE, CASES[1], WIDE, BF16)
def test_token_by_token_equals_one_call(case: Case, implementation: str) -> None:
    data = sequences(case)
    run, whole = token_by_token(case, data, implementation), one_call(case, implementation)
    assert_same_bytes(run.cache, whole.cache)
    assert_rows_close(case, run.out, whole.out)


def test_several_queries_per_step_equal_one_call() -> None:
    """0 to 7 new tokens a row and call, as speculative decoding appends them."""
    case, implementation = BASE, "xla"  # the others serve one query per step
    data, whole, rotation = sequences(case), one_call(case, implementation), transforms(case)
    rng = np.random.default_rng(4)
    lengths = np.array(case.lengths)
    done = lengths - 60
    cache = in_one_call(case, data, implementation, tuple(done)).cache
    while (done < lengths).any():
        new = np.minimum(rng.integers(0, 8, len(done)), lengths - done)
        out, cache = decode_several(
            cache,
            rotation,
            *data.window(done, 7),
            int32(done + new),
            int32(new),
            implementation=implementation,
        )
        for row, (start, count) in enumerate(zip(done, new, strict=True)):
            if count:
                assert_close(np.asarray(out)[row, :count], whole.out[row, start : start + count])
        done = done + new
    assert_same_bytes(cache, whole.cache)


@implementations
def test_layers_do_not_share_anything(implementation: str) -> None:
    case = Case(64, 1, 3, (330,), UNIFORM, recent=64)
    rotation, n = transforms(case, layers=2), int32(case.lengths)
    data = [sequences(case, seed) for seed in (0, 1)]
    cache = poisoned_cache(case, layers=2)
    outs = []
    for layer in (0, 1):
        x = data[layer]
        out, cache = prefill(
            cache, rotation, x.q, x.k, x.v, n, n, layer=layer, implementation=implementation
        )
        outs.append(np.asarray(out))
    for layer in (0, 1):
        assert_close(outs[layer][0], expected(case, data[layer], cache, 0, layer=layer))
