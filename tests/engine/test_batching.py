"""What a request gets does not depend on who else runs, or on how its work is cut up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax import KVConfig, init_cache, oscar_attention
from oscar_jax.bench_cases import random_like
from oscar_jax.config import KVDtype
from oscar_jax.engine.engine import Engine
from oscar_jax.engine.request import SamplingParams
from oscar_jax.engine.runner import compile_count
from oscar_jax.evaluation.scorer import Scorer
from oscar_jax.models.loading import Loaded
from oscar_jax.rotation import Rotation
from pallas_kernels.layout import Tables
from tests.engine.conftest import CONFIG, ask, build, finish, greedy, prompt, solo

LENGTHS = (5, 64, 200, 447, 448, 700)


def test_greedy_tokens_are_the_argmax_of_the_scored_sequence(
    engine: Engine, tiny: Loaded, rotation: Rotation
) -> None:
    """The engine's decode agrees with one prefill over prompt and answer, page borders included."""
    ids = prompt(570)
    answer = solo(engine, ids, greedy(40))
    sequence = np.array([*ids, *answer.tokens], np.int32)
    h = Scorer(tiny.decoder, CONFIG.kv).hidden(sequence, rotation)
    scores = np.asarray(tiny.decoder.logits(h[len(ids) - 1 :]))
    top_two = np.sort(scores[:-1], axis=-1)[:, -2:]
    near_tie = top_two[:, 1] - top_two[:, 0] < 1e-3
    agree = scores[:-1].argmax(-1) == np.array(answer.tokens)
    assert (agree | near_tie).all()
    assert near_tie.sum() <= 2


def test_a_batch_gives_each_request_its_solo_answer(engine: Engine) -> None:
    prompts = [prompt(n, seed=n) for n in LENGTHS]
    alone = [solo(engine, p, greedy(24)).tokens for p in prompts]
    together = [ask(engine, p, greedy(24), str(i)) for i, p in enumerate(prompts)]
    finish(engine, *together)
    assert [answer.tokens for answer in together] == alone
    swapped = [ask(engine, p, greedy(24), str(i)) for i, p in enumerate(reversed(prompts))]
    finish(engine, *swapped)
    assert [answer.tokens for answer in reversed(swapped)] == alone


def test_steps_per_dispatch_and_chunk_size_change_nothing(
    engine: Engine, tiny: Loaded, rotation: Rotation
) -> None:
    other = build(tiny, rotation, steps_per_dispatch=13, prefill_chunk=128, max_num_seqs=2)
    for length in (130, 440, 640):
        ids = prompt(length, seed=length)
        assert solo(other, ids, greedy(150)).tokens == solo(engine, ids, greedy(150)).tokens


def test_short_sequences_equal_the_bf16_mode(engine: Engine, tiny: Loaded) -> None:
    """Below S + R + T = 448 tokens nothing is quantised; beyond it the two differ."""
    bf16 = build(tiny, None, kv_cache_dtype="bf16", max_num_seqs=2, prefill_chunk=128)
    assert bf16.stats().bits_per_element == 16
    ids = prompt(300)
    assert solo(bf16, ids, greedy(140)).tokens == solo(engine, ids, greedy(140)).tokens
    long = prompt(900)
    assert solo(bf16, long, greedy(64)).tokens != solo(engine, long, greedy(64)).tokens


def test_seeded_sampling_is_the_same_alone_and_in_a_batch(engine: Engine) -> None:
    params = [
        SamplingParams(max_tokens=20, temperature=1.0, seed=s, ignore_eos=True) for s in range(3)
    ]
    ids = prompt(90)
    alone = [solo(engine, ids, p).tokens for p in params]
    assert alone[0] != alone[1]
    together = [ask(engine, ids, p, str(i)) for i, p in enumerate(params)]
    others = [ask(engine, prompt(33), greedy(9), "g")]
    finish(engine, *together, *others)
    assert [a.tokens for a in together] == alone


def test_requests_join_and_leave_a_running_batch(engine: Engine) -> None:
    first = ask(engine, prompt(100), greedy(60), "first")
    for _ in range(4):
        engine.step()
    assert not first.done
    second = ask(engine, prompt(50, 1), greedy(8), "second")
    while not second.done:
        engine.step()
    assert not first.done, "the later, shorter request must not wait for the earlier one"
    finish(engine, first)
    assert second.tokens == solo(engine, prompt(50, 1), greedy(8)).tokens


def test_one_trace_per_bucket_and_none_while_serving(engine: Engine) -> None:
    before = compile_count()
    finish(engine, *(ask(engine, prompt(40, i), greedy(5), str(i)) for i in range(9)))
    assert compile_count() == before
    names = [("write", 4), ("prefill", 128), ("prefill", 256), ("decode", 2), ("decode", 4)]
    assert dict(engine.runner.traces) == dict.fromkeys(names, 1)


def test_on_a_gpu_batches_that_only_take_the_likeliest_token_have_programs_of_their_own(
    engine: Engine, tiny: Loaded, rotation: Rotation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oscar_jax.engine.runner.is_gpu", lambda: True)
    other = build(tiny, rotation, max_num_seqs=1, prefill_chunk=128)
    names = [("write", 1), ("prefill", 128), ("decode", 1), ("greedy", 1)]
    assert dict(other.runner.traces) == dict.fromkeys(names, 1)
    used: list[str] = []

    def recording(name: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def of(*arguments: Any) -> Any:
            used.append(name)
            return run(*arguments)

        return of

    for name, run in other.runner._compiled.items():
        other.runner._compiled[name] = recording(name[0], run)
    sampled = SamplingParams(max_tokens=12, temperature=0.8, seed=3, ignore_eos=True)
    for params, kind in ((greedy(40), "greedy"), (sampled, "decode")):
        used.clear()
        want = solo(engine, prompt(450), params).tokens
        assert solo(other, prompt(450), params).tokens == want
        assert set(used) - {"write"} == {"prefill", kind}


def test_the_block_table_is_sent_when_it_has_changed(engine: Engine) -> None:
    runner, table = engine.runner, np.zeros_like(engine._table)
    first = runner._on_device(table)
    assert runner._on_device(table.copy()) is first
    table[0, 0] = 7  # the caller's own array
    second = runner._on_device(table)
    assert (int(first[0, 0]), int(second[0, 0])) == (0, 7)


def test_decode_updates_the_pools_in_place(engine: Engine) -> None:
    analysis = engine.runner.memory_analysis("decode", 4)
    assert analysis.alias_size_in_bytes >= engine.capacity.allocated_bytes


@pytest.mark.skipif(
    jax.default_backend() != "cpu", reason="a GPU kernel's splits follow the batch: 1e-6 there"
)
@pytest.mark.parametrize("dtype", ["int2", "bf16"])
def test_a_row_is_bit_equal_in_every_batch_size(dtype: KVDtype) -> None:
    """Sums are made in the same order whoever shares the batch, so text never depends on load."""
    rng = np.random.default_rng(3)
    cache = init_cache(
        KVConfig(dtype=dtype), layers=1, kv_heads=3, head_dim=64, batch=8, max_tokens=3000
    )
    filled = random_like(cache.layers[0], 1)
    lengths = np.array([2048, 2100, 500, 30, 1000, 2900, 448, 2500], np.int32)
    q = jnp.asarray(rng.normal(size=(8, 1, 9, 64)), jnp.float32)
    rotation = Rotation.hadamard(layers=1, kv_heads=3, head_dim=64)

    @jax.jit
    def attend(tables: Tables, q: jax.Array, lengths: jax.Array) -> jax.Array:
        rows = dataclasses.replace(cache, layers=(filled,), tables=tables)
        return oscar_attention(q, rows, 0, rotation, lengths=lengths)

    whole = np.asarray(attend(cache.tables, q, lengths))
    for size in (2, 4):
        part = attend(jax.tree.map(lambda x, n=size: x[:n], cache.tables), q[:size], lengths[:size])
        np.testing.assert_array_equal(np.asarray(part), whole[:size])
