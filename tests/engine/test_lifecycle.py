"""Starting, stopping, running out and breaking: nothing leaks and everybody gets an answer."""

from __future__ import annotations

import threading

import jax
import pytest

from oscar_jax.accounting import CacheShape
from oscar_jax.config import EngineConfig
from oscar_jax.engine.blocks import BlockManager
from oscar_jax.engine.engine import Engine
from oscar_jax.engine.request import Output, Request, SamplingParams
from oscar_jax.engine.runner import plan_capacity
from oscar_jax.models.loading import Loaded
from oscar_jax.rotation import Rotation
from tests.engine.conftest import ask, assert_idle, build, finish, greedy, prompt, solo

QWEN3_8B = CacheShape(layers=36, kv_heads=8, head_dim=128)


# ------------------------------------------------------------------------------------- stopping


def test_max_tokens_ends_with_length(engine: Engine) -> None:
    answer = solo(engine, prompt(30), greedy(7))
    assert (len(answer.tokens), answer.reason) == (7, "length")
    assert answer.outputs[-1].completion_tokens == 7
    assert answer.outputs[-1].prompt_tokens == 30


def test_a_stop_token_ends_the_text_and_is_not_in_it(engine: Engine) -> None:
    free = solo(engine, prompt(30), greedy(20))
    stop = free.tokens[6]
    first = free.tokens.index(stop)
    answer = solo(engine, prompt(30), greedy(20, stop_token_ids=(stop,)))
    assert answer.reason == "stop"
    assert answer.tokens == free.tokens[: first + 1]
    assert answer.text == engine.tokenizer.decode(free.tokens[:first])


def test_min_tokens_keeps_a_stop_token_away(engine: Engine) -> None:
    free = solo(engine, prompt(30), greedy(20))
    answer = solo(engine, prompt(30), greedy(20, stop_token_ids=(free.tokens[0],), min_tokens=5))
    assert free.tokens[0] not in answer.tokens[:5]
    assert len(answer.tokens) >= 5


def test_a_stop_string_across_tokens_cuts_the_text(engine: Engine) -> None:
    """The model is byte-level: a string of several characters spans several tokens."""
    params = SamplingParams(
        max_tokens=200, temperature=0.0, ignore_eos=True, seed=1, stop=("zz never",)
    )
    free = solo(engine, prompt(30), params)
    text = free.text
    stop = text[40:43]
    cut = text.index(stop)
    answer = solo(engine, prompt(30), greedy(200, stop=(stop,)))
    assert answer.reason == "stop"
    assert answer.text == text[:cut]
    assert answer.outputs[-1].completion_tokens == len(answer.tokens) < 200
    kept = solo(engine, prompt(30), greedy(200, stop=(stop,), include_stop_str_in_output=True))
    assert kept.text == text[: cut + len(stop)]


# --------------------------------------------------------------------------- queueing, aborting


def test_more_requests_than_slots_or_pages_wait_and_finish(engine: Engine) -> None:
    """The pool has 14 pages and each request needs 7 of them."""
    alone = [solo(engine, prompt(1000, i), greedy(20)).tokens for i in range(5)]
    answers = [ask(engine, prompt(1000, i), greedy(20), str(i)) for i in range(5)]
    engine.step()
    assert (engine.stats().running, engine.stats().waiting) == (2, 3)
    finish(engine, *answers)
    assert [a.tokens for a in answers] == alone


@pytest.mark.parametrize("steps", [0, 1, 3, 6])
def test_abort_frees_everything_wherever_the_request_is(engine: Engine, steps: int) -> None:
    answer = ask(engine, prompt(600), greedy(300), "gone")
    for _ in range(steps):
        engine.step()
    engine.abort("gone")
    engine.step()
    assert answer.reason == "abort"
    engine.step()
    assert_idle(engine)
    engine.abort("gone")  # again: nothing happens
    engine.step()
    assert [o.finish_reason for o in answer.outputs].count("abort") == 1


def test_a_long_prompt_runs_at_most_one_chunk_ahead_of_what_was_read(engine: Engine) -> None:
    answer = ask(engine, prompt(1000), greedy(4))
    for _ in range(3):  # of four chunks
        engine.step()
        assert len(engine._in_flight) == 1
    engine.abort("r")
    engine.step()
    assert answer.reason == "abort"
    assert_idle(engine)


def test_a_slot_forgets_its_last_sequence(engine: Engine) -> None:
    """The next request in the same slot and pages answers as on a fresh engine."""
    want = solo(engine, prompt(500, 3), greedy(30)).tokens
    for seed in range(3):
        gone = ask(engine, prompt(1000, seed), greedy(200), "gone")
        for _ in range(7):
            engine.step()
        engine.abort("gone")
        engine.step()
        assert gone.reason == "abort"
        assert solo(engine, prompt(500, 3), greedy(30)).tokens == want


def test_a_receiver_that_raises_loses_only_its_own_request(engine: Engine) -> None:
    def broken(_: Output) -> None:
        raise RuntimeError("receiver is gone")

    engine.submit(Request("broken", prompt(20), greedy(50), broken))
    other = ask(engine, prompt(40), greedy(12), "other")
    finish(engine, other)
    assert len(other.tokens) == 12


def test_the_thread_serves_and_stops(engine: Engine) -> None:
    engine.start()
    done = threading.Event()
    outputs: list[Output] = []

    def emit(output: Output) -> None:
        outputs.append(output)
        if output.finish_reason:
            done.set()

    engine.submit(Request("a", prompt(50), greedy(9), emit))
    assert done.wait(60)
    assert outputs[-1].completion_tokens == 9
    assert engine.stats().compiles_after_ready == 0
    done.clear()
    engine.submit(Request("b", prompt(50), greedy(1000), emit))
    engine.stop()
    assert not engine.alive
    assert done.wait(5)
    assert outputs[-1].finish_reason == "abort"


# -------------------------------------------------------------------------------------- refusing


@pytest.mark.parametrize(
    ("tokens", "params", "message"),
    [
        (0, greedy(5), "no tokens"),
        (10, greedy(0), "max_tokens=0"),
        (1275, greedy(6), "max_model_len=1280"),
        (10, greedy(5, stop_token_ids=tuple(range(20))), "at most 16"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(
    engine: Engine, tokens: int, params: SamplingParams, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ask(engine, prompt(tokens), params)


def test_the_longest_sequence_fits_exactly(engine: Engine) -> None:
    assert len(solo(engine, prompt(1200), greedy(80)).tokens) == 80


def test_too_little_memory_names_need_have_and_what_fits() -> None:
    config = EngineConfig(max_model_len=40_000, max_num_seqs=1, mem_fraction=0.5)
    available = 2 * (QWEN3_8B.window_bytes + 100 * QWEN3_8B.page_bytes)
    with pytest.raises(ValueError, match=r"needs 897 MB .*leaves 334 MB.* that fits is 12864"):
        plan_capacity(config, QWEN3_8B, 40_960, available)
    fits = EngineConfig(max_model_len=12_864, max_num_seqs=1, mem_fraction=0.5)
    assert plan_capacity(fits, QWEN3_8B, 40_960, available).pages == 100


def test_a_length_beyond_the_model_is_refused() -> None:
    with pytest.raises(ValueError, match="at most 2048 tokens"):
        plan_capacity(EngineConfig(max_model_len=4096), QWEN3_8B, 2048, 10**12)


@pytest.mark.parametrize("fraction", [0.0, 1.5, -1.0, float("nan")])
def test_a_memory_fraction_outside_zero_to_one_is_refused(fraction: float) -> None:
    with pytest.raises(ValueError, match="mem_fraction"):
        EngineConfig(mem_fraction=fraction)


def test_a_rotation_of_another_shape_is_refused(tiny: Loaded) -> None:
    other = Rotation.hadamard(layers=3, kv_heads=2, head_dim=64)
    with pytest.raises(ValueError, match=r"\(3, 2, 64, 64\), the model \(2, 2, 64, 64\)"):
        build(tiny, other)


def test_pages_have_one_owner() -> None:
    blocks = BlockManager(3)
    mine = blocks.allocate(2)
    assert mine == [0, 1]
    assert blocks.allocate(2) is None
    blocks.release(mine)
    with pytest.raises(RuntimeError, match="page 0"):
        blocks.release([0])


# ------------------------------------------------------------------------------------- recovering


def test_a_step_that_fails_is_repeated_with_fresh_pools(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pools were donated: they are made anew and every request goes on where it was."""
    want = [solo(engine, prompt(n, n), greedy(60)).tokens for n in (460, 80)]
    before = engine.stats().recoveries
    answers = [ask(engine, prompt(n, n), greedy(60), str(n)) for n in (460, 80)]
    real, calls = engine.runner.decode, [0]

    def flaky(*arguments: object, **options: object) -> jax.Array:
        calls[0] += 1
        if calls[0] == 6:
            for leaf in jax.tree.leaves(engine.runner._pools):
                leaf.delete()
            raise jax.errors.JaxRuntimeError("INTERNAL: injected")
        return real(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.runner, "decode", flaky)
    finish(engine, *answers)
    assert engine.stats().recoveries == before + 1
    assert [a.tokens for a in answers] == want
    assert [a.outputs[-1].completion_tokens for a in answers] == [60, 60]


def test_a_step_that_always_fails_ends_the_engine_and_tells_everybody(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:

    def broken(*_: object, **__: object) -> jax.Array:
        raise jax.errors.JaxRuntimeError("INTERNAL: injected")

    monkeypatch.setattr(engine.runner, "prefill", broken)
    answer = ask(engine, prompt(10), greedy(3))
    engine.start()
    assert engine._thread is not None
    engine._thread.join(30)
    assert not engine.alive
    assert (answer.reason, answer.outputs[-1].error) == ("error", "the engine has stopped")
