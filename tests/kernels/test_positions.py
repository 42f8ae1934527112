"""Single tokens at every border: which are BF16, which are INT2, what each one weighs."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from oscar_jax import (
    Codec,
    PagedKV,
    Rotation,
)
from pallas_kernels.format import hadamard
from tests.kernels import reference
from tests.kernels.cases import (
    Case,
    Sequences,
    changed,
    int32,
    poisoned_cache,
    sequences,
    transforms,
)
from tests.kernels.checks import assert_close, assert_same_bytes, expected
from tests.kernels.reference import bf16, bits
from tests.kernels.runs import attend, fill, in_one_call, newest
from tests.kernels.test_attention_suite import BASE, UNIFORM, implementations, one_call


def with_pools(cache: PagedKV, **pools: Any) -> PagedKV:
    """The cache with pools of its only layer replaced."""
    return dataclasses.replace(cache, layers=(dataclasses.replace(cache.layers[0], **pools),))


# --------------------------------------------------------------------- which tokens are INT2


@implementations
def test_codes_are_read_from_448_tokens_on(implementation: str) -> None:
    """U11: with every code set to 3, 447 tokens give the same output and 448 another."""
    n = (448, 447)
    cache = in_one_call(BASE, sequences(BASE), implementation, n).cache
    run = functools.partial(
        attend,
        rotation=transforms(BASE),
        q=newest(sequences(BASE), n),
        lengths=int32(n),
        implementation=implementation,
    )
    store = cache.layers[0]
    broken = with_pools(
        cache,
        k_pages=changed(store.k_pages, ..., 0xFFFF),
        v_pages=changed(store.v_pages, ..., 0xFFFF),
    )
    right, wrong = np.asarray(run(cache)), np.asarray(run(broken))
    assert (bits(right[1]) == bits(wrong[1])).all()
    assert np.abs(right[0] - wrong[0]).max() > 0.1 * np.abs(right[0]).max()


@implementations
def test_at_448_tokens_exactly_64_to_191_are_int2(implementation: str) -> None:
    """U12: NaN in a token's BF16 row, or in its page, reaches the output iff it is read there."""
    n = int32([448, 448])
    cache = in_one_call(BASE, sequences(BASE), implementation, (448, 448)).cache
    q, rotation = newest(sequences(BASE), (448, 448)), transforms(BASE)
    store, ring = cache.layers[0], cache.windows.ring
    slot = int(np.asarray(cache.tables.slot)[0])
    table, sinks = np.asarray(cache.tables.block_table), np.asarray(cache.tables.sink)

    def reaches(**pools: jax.Array) -> bool:
        broken = with_pools(cache, **pools)
        out = np.asarray(attend(broken, rotation, q, n, implementation=implementation))
        assert np.isfinite(out[1]).all()
        return bool(np.isnan(out[0]).all())

    for position, read in ((64, False), (191, False), (192, True), (447, True)):
        row = (position - 64) % ring
        for name in ("tail_k", "tail_v"):
            pool = changed(getattr(store, name), np.s_[slot, :, row], np.nan)
            assert reaches(**{name: pool}) == read, (name, position)
    for position in (0, 63):
        for name in ("sink_k", "sink_v"):
            pool = changed(getattr(store, name), np.s_[sinks[0], :, position], np.nan)
            assert reaches(**{name: pool}), (name, position)
    nan_words = 0x7E007E00
    for page, token, read in ((0, 0, True), (0, 127, True), (1, 0, False), (2, 127, False)):
        for name in ("k_meta", "v_meta"):
            pool = changed(getattr(store, name), np.s_[table[0, page], :, token], nan_words)
            assert reaches(**{name: pool}) == read, (name, page, token)


# ----------------------------------------------------------------------- what one token weighs


@pytest.mark.parametrize("bf16_weight", [0.5, 1.0])
@implementations
def test_a_key_weighs_the_same_wherever_it_lies(bf16_weight: float, implementation: str) -> None:
    """U26: one key along the query at position p of 2,048; its weight is within 2 % of BF16's.

    At a BF16 weight of one half a 3 % error of the key's score moves the weight by 10 %: the gain
    is what keeps the score of a key that is parallel to the query.
    """
    n, dim, codec = 2048, 128, Codec(clip_v=1.0, gain=True)
    borders = (0, 63, 64, 65, 127, 128, 129, 191, 192, 193, 1599, 1600, 1663, 1664, 1665)
    positions = (*borders, n - 258, n - 257, n - 256, n - 255, n - 254, n - 1)
    case = Case(dim, 1, 1, (n,) * len(positions), codec)
    rng = np.random.default_rng(0)
    q = rng.normal(0, 0.3, dim)
    keys = np.broadcast_to(rng.normal(size=(n, dim)), (len(positions), n, dim)).copy()
    others = np.exp(bf16(keys[0]) @ q / dim**0.5).sum()
    score = np.log(others) if bf16_weight < 1 else 10 * dim**0.5 * np.linalg.norm(q) / dim**0.5
    values = np.zeros((len(positions), n, dim))
    for row, p in enumerate(positions):
        keys[row, p] = score * dim**0.5 * q / (q @ q)
        values[row, p] = 1  # the output is the weight; a constant row survives the codec exactly
    rotation = Rotation.from_transforms([hadamard(dim)[None]], [np.eye(dim)[None]], codec=codec)
    lengths = int32([n] * len(positions))
    cache = fill(
        poisoned_cache(case),
        rotation,
        keys[:, :, None].astype(np.float32),
        values[:, :, None].astype(np.float32),
        lengths,
        implementation=implementation,
    )
    queries = np.broadcast_to(q, (len(positions), 1, 1, dim)).astype(np.float32)
    out = np.asarray(attend(cache, rotation, queries, lengths, implementation=implementation))
    logits = bf16(keys) @ np.asarray(q, np.float32).astype(np.float64) / dim**0.5
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    for row, p in enumerate(positions):
        want = weights[row, p]
        assert abs(want - bf16_weight) < 0.02
        assert np.abs(out[row] / want - 1).max() < 0.02, f"position {p}"


@implementations
def test_a_length_of_no_round_number_gives_the_same_every_time(implementation: str) -> None:
    """U24: 4,092 tokens, 1 and 7 queries (the kernel serves 1), 10 runs, unused memory of NaN."""
    case = Case(64, 1, 3, (4092,), UNIFORM)
    data, rotation, n = sequences(case), transforms(case), int32([4092])
    cache = fill(poisoned_cache(case), rotation, data.k, data.v, n, implementation=implementation)
    for queries in (1, 7) if implementation == "xla" else (1,):
        q = data.q[:, -queries:]
        run = functools.partial(attend, cache, rotation, q, n, implementation=implementation)
        outs = [np.asarray(run()) for _ in range(10)]
        positions = np.arange(4092 - queries, 4092)
        assert_close(outs[0][0], expected(case, data, cache, 0, positions))
        assert all((bits(out) == bits(outs[0])).all() for out in outs[1:])


# ------------------------------------------------------------------------- values that are known


@pytest.mark.parametrize(("heads", "kv_heads"), [(32, 8), (28, 4), (40, 8), (16, 16), (8, 1)])
@implementations
def test_query_head_h_reads_kv_head_h_over_g(
    heads: int, kv_heads: int, implementation: str
) -> None:
    """U18: the values of KV head j are all j + 1, in sink, pages and tail alike."""
    n = 500
    case = Case(64, kv_heads, heads // kv_heads, (n,), UNIFORM)
    rng = np.random.default_rng(0)
    owner = np.arange(kv_heads) + 1.0
    cache = poisoned_cache(case)
    pages = cache.layers[0].k_pages.shape[:3]  # [P, K, T]
    meta = np.broadcast_to(owner[:, None].astype(np.float16), pages).view(np.uint16)
    spread = lambda pool: changed(pool, ..., owner[:, None, None])  # noqa: E731
    random = lambda pool: changed(pool, ..., rng.normal(size=pool.shape))  # noqa: E731
    store = cache.layers[0]
    cache = with_pools(
        cache,
        k_meta=jax.device_put(np.full(pages, 0x38003800, np.uint32)),  # scale, min 0.5; any codes
        v_meta=jax.device_put(meta.astype(np.uint32) << 16),  # scale 0, min j + 1
        sink_k=random(store.sink_k),
        tail_k=random(store.tail_k),
        sink_v=spread(store.sink_v),
        tail_v=spread(store.tail_v),
    )
    identity = Rotation.identity(layers=1, kv_heads=kv_heads, head_dim=64, codec=UNIFORM)
    q = rng.normal(size=(1, 1, heads, 64)).astype(np.float32)
    out = attend(cache, identity, q, int32([n]), implementation=implementation)
    want = np.repeat(owner, heads // kv_heads)
    assert np.allclose(np.asarray(out)[0, 0], want[:, None], rtol=1e-6, atol=0)


@implementations
def test_values_are_not_keys(implementation: str) -> None:
    """U21: keys all 1, values all 2, any query: every output is 2."""
    data = sequences(BASE)
    ones = np.where(np.isnan(data.k), np.nan, 1).astype(np.float32)
    identity = Rotation.identity(layers=1, kv_heads=2, head_dim=64, codec=UNIFORM)
    n = int32(BASE.lengths)
    cache = fill(poisoned_cache(BASE), identity, ones, 2 * ones, n, implementation=implementation)
    q = newest(data, BASE.lengths)
    out = attend(cache, identity, q, n, implementation=implementation)
    assert np.allclose(out, 2, rtol=1e-6, atol=0)


@implementations
def test_pages_do_not_depend_on_the_query_heads(implementation: str) -> None:
    """U19: 2 or 6 query heads over 2 KV heads store the same bytes, 20 times out of 20."""
    data, whole = sequences(BASE), one_call(BASE, implementation)
    few = dataclasses.replace(BASE, group=1)
    data = dataclasses.replace(data, q=data.q[:, :, :2])
    for _ in range(20):
        assert_same_bytes(in_one_call(few, data, implementation).cache, whole.cache)


# -------------------------------------------------------------------------------- hard inputs


@implementations
def test_zero_and_constant_tokens_never_become_nan(implementation: str) -> None:
    """U16: a token of zeros, constant tokens, and a whole page of zeros.

    Scores reach hundreds, so float32 keeps fewer digits of the weights, and the float16 of the
    kernels' queries 11 bits of them.
    """
    least = 1e-4 if implementation == "xla" else 300 * 2.0**-11
    data = sequences(BASE)
    for x in (data.k, data.v):
        x[:, 70], x[:, 80], x[:, 90] = 0, 100, -3.5
        x[:, 192:320] = 0
    run = in_one_call(BASE, data, implementation)
    for row, n in enumerate(BASE.lengths):
        assert_close(run.out[row, :n], expected(BASE, data, run.cache, row), least=least)


@implementations
def test_one_strong_token_over_a_flat_rest_of_small_values(implementation: str) -> None:
    """A page's weights span many binades while its values are about 0.01."""
    data = sequences(BASE)
    v = (0.01 * data.v).astype(np.float32)
    k, q = data.k.copy(), data.q.copy()
    q[:, -40:] = q[:, -40:-39]
    k[:, 100] = 1.7 * q[:, -40, ::3]  # scores 13 above the rest for the last queries
    data = Sequences(q, k, v)
    run = in_one_call(BASE, data, implementation)
    for row, n in enumerate(BASE.lengths):
        positions = np.arange(n - 30, n)
        assert_close(run.out[row, positions], expected(BASE, data, run.cache, row, positions))


@implementations
def test_channels_with_a_large_offset_need_centring(implementation: str) -> None:
    """U12: K + 200 in channel 5 and - 150 in channel 90, as models with a K bias have them.

    Centred, the error is that of the same keys without the offset; a Hadamard alone spreads the
    offset over the row and loses most of the signal.
    """
    case = Case(128, 4, 16, (600,), UNIFORM)
    rng = np.random.default_rng(0)
    plain = np.repeat(rng.normal(size=(1, 600, 1, 128)), 4, 2)  # the heads are alike
    v = np.tile(rng.normal(size=(1, 600, 1, 1)), (4, 128))  # constant rows, stored exactly
    q = bf16(rng.normal(size=(1, 1, 64, 128))).astype(np.float32)
    offset = np.zeros(128)
    offset[5], offset[90] = 200, -150

    def error(k: np.ndarray, mu: np.ndarray) -> float:
        x_k, x_v, means = (np.tile(x, (4, *[1] * x.ndim)) for x in (hadamard(128), np.eye(128), mu))
        rotation = Rotation.from_transforms([x_k], [x_v], [means], UNIFORM)
        n = int32([600])
        cache = fill(poisoned_cache(case), rotation, k, v, n, implementation=implementation)
        out = attend(cache, rotation, q, n, implementation=implementation)
        keys, values = bf16(k[0]), bf16(v[0])
        exact = reference.attention(
            q[0].astype(np.float64),
            keys,
            values,
            keys,
            values,
            positions=np.array([599]),
            sink=64,
            recent=256,
            scale=128**-0.5,
        )
        return float(np.linalg.norm(np.asarray(out)[0] - exact) / np.linalg.norm(exact))

    none = np.zeros(128)
    unbiased, centred = error(plain, none), error(plain + offset, offset)
    assert centred < 1.1 * unbiased
    assert error(plain + offset, none) > 2 * centred
