"""A model on its pages: exact scores, prefill equal to decode, and generation equal to both."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax.config import KVConfig
from oscar_jax.evaluation import answers, drift, recall
from oscar_jax.evaluation import scorer as scorer_module
from oscar_jax.evaluation.prompts import Prompt
from oscar_jax.evaluation.scorer import Sampling, Scorer
from oscar_jax.models import Loaded, causal_attend
from oscar_jax.models.tokenizer import byte_level
from oscar_jax.models.weights import dummy_decoder
from oscar_jax.rotation import Rotation
from pallas_kernels.format import Codec
from tests.tiny import TINY

LENGTH = 640
WINDOWS = KVConfig()


@pytest.fixture(scope="module")
def tiny() -> Loaded:
    return Loaded(TINY, dummy_decoder(TINY, jnp.float32), byte_level(259), "")


@pytest.fixture(scope="module")
def scorer(tiny: Loaded) -> Scorer:
    return Scorer(tiny.decoder, WINDOWS)


@pytest.fixture(scope="module")
def rotation() -> Rotation:
    """Random orthogonal transforms with means, the second half of them other than the first."""
    rng = np.random.default_rng(7)
    draw = lambda: np.stack([np.linalg.qr(rng.normal(size=(64, 64)))[0] for _ in range(2)])  # noqa: E731
    means = [0.05 * rng.normal(size=(2, 64)) for _ in range(2)]
    return Rotation.from_transforms([draw(), draw()], [draw(), draw()], means, Codec(gain=True))


def tokens(seed: int, length: int = LENGTH) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length).astype(np.int32)


# ----------------------------------------------------------------------------------------- scores


def test_the_reference_is_the_model_with_exact_attention(tiny: Loaded, scorer: Scorer) -> None:
    row = tokens(0)
    exact, _ = tiny.decoder.hidden(
        jnp.asarray(row[None]), jnp.arange(LENGTH)[None], causal_attend(tiny.decoder.config), None
    )
    # keys and values are rounded to BF16 once, in the cache
    difference = np.abs(np.asarray(scorer.hidden(row, None) - exact[0]))
    assert 0 < difference.max() < 0.02


def test_scores_are_log_likelihood_kl_and_agreement_of_the_first_token(
    tiny: Loaded, scorer: Scorer
) -> None:
    rng = np.random.default_rng(1)
    reference, h = (jnp.asarray(rng.normal(size=(LENGTH, 96)), jnp.float32) for _ in range(2))
    row, positions = tokens(2), np.array([3, 500, 77, 638])
    scores = scorer.compare(reference, h, row, positions)
    exact, other = (
        np.asarray(jax.nn.log_softmax(tiny.decoder.logits(x[positions])), np.float64)
        for x in (reference, h)
    )
    np.testing.assert_allclose(scores.nll, -other[np.arange(4), row[positions + 1]], rtol=1e-5)
    np.testing.assert_allclose(scores.kl, (np.exp(exact) * (exact - other)).sum(-1), rtol=1e-3)
    np.testing.assert_array_equal(scores.top1, exact.argmax(-1) == other.argmax(-1))
    np.testing.assert_array_equal(scorer.predict(h, positions), other.argmax(-1))
    same = scorer.compare(h, h, row, positions)
    assert same.kl.tolist() == [0, 0, 0, 0] and same.top1.all()


def test_one_query_per_step_scores_as_prefill_does(scorer: Scorer, rotation: Rotation) -> None:
    # over a border: at 576 the second page becomes visible
    pair = np.stack([tokens(3), tokens(4)])
    scores, largest = scorer.decode_check(pair, rotation, steps=80)
    assert len(scores.kl) == 2 * 79
    assert scores.kl.max() < 1e-6
    assert largest < 2e-3
    assert scores.top1.all()


def test_pages_are_what_makes_the_difference(scorer: Scorer, rotation: Rotation) -> None:
    row = tokens(5)
    exact, coded = scorer.hidden(row, None), scorer.hidden(row, rotation)
    np.testing.assert_allclose(coded[:447], exact[:447], atol=1e-5)  # n < 448: plain BF16
    assert np.abs(np.asarray(coded[447:] - exact[447:])).max(1).min() > 1e-4


def test_a_sequence_in_chunks_is_the_sequence_at_once(
    scorer: Scorer, rotation: Rotation, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = tokens(5)
    whole = scorer.hidden(row, rotation)
    monkeypatch.setattr(scorer_module, "CHUNK", LENGTH // 2)  # 320 and 320 tokens, no whole pages
    np.testing.assert_allclose(scorer.hidden(row, rotation), whole, atol=2e-5)


# ------------------------------------------------------------------------------------- generation

STEPS = 40  # over the border at 576, where the second page becomes visible
PROMPTS = [tokens(6, 560), tokens(7, 550)]
SAMPLED = Sampling(temperature=1.0, seed=3, banned=(5, 256))


@pytest.fixture(scope="module")
def sampled(scorer: Scorer, rotation: Rotation) -> list[np.ndarray]:
    return scorer.generate(PROMPTS, rotation, steps=STEPS, sampling=SAMPLED)


@pytest.fixture(scope="module")
def greedy(scorer: Scorer, rotation: Rotation) -> list[np.ndarray]:
    return scorer.generate(PROMPTS, rotation, steps=STEPS)


def fed(scorer: Scorer, rotation: Rotation, row: int, written: np.ndarray) -> jax.Array:
    """Hidden states of a prompt and its answer in prefill, padded to the length in use."""
    whole = np.concatenate([PROMPTS[row], written])
    return scorer.hidden(np.pad(whole, (0, LENGTH - len(whole))), rotation)


def test_what_is_written_is_what_prefill_would_choose_from_the_same_noise(
    scorer: Scorer, rotation: Rotation, sampled: list[np.ndarray]
) -> None:
    for row, written in enumerate(sampled):
        assert len(written) == STEPS and len(set(written.tolist())) > STEPS // 2
        before = len(PROMPTS[row]) - 1 + np.arange(STEPS)
        chosen = scorer.predict(fed(scorer, rotation, row, written), before, SAMPLED, row)
        np.testing.assert_array_equal(chosen, written)


def test_noise_depends_on_seed_row_and_position_and_banned_tokens_never_come(
    scorer: Scorer, rotation: Rotation, sampled: list[np.ndarray]
) -> None:
    assert not np.isin(np.concatenate(sampled), SAMPLED.banned).any()
    h, at = fed(scorer, rotation, 0, sampled[0]), 559 + np.arange(STEPS)
    seed = Sampling(temperature=1.0, seed=4, banned=SAMPLED.banned)
    for other in (
        scorer.predict(h, at, SAMPLED, row=1),
        scorer.predict(h, at, SAMPLED, row=0, first=1),
        scorer.predict(h, at, seed, row=0),
    ):
        assert (other != sampled[0]).mean() > 0.5
    with pytest.raises(ValueError, match="temperature=-1: must be at least 0"):
        Sampling(temperature=-1)


def test_an_answer_ends_with_its_stop_token_or_is_truncated(
    scorer: Scorer, rotation: Rotation, greedy: list[np.ndarray]
) -> None:
    tokenizer = byte_level(259)
    stop = int(greedy[0][0])
    assert stop not in greedy[1]
    tokenizer.eos_ids = frozenset({stop})
    valid = lambda text: text == tokenizer.decode(greedy[1].tolist())  # noqa: E731
    prompts = [Prompt("json", "?", tuple(row.tolist()), valid) for row in PROMPTS]
    ended, cut = answers.answer(scorer, rotation, tokenizer, prompts, STEPS)
    assert ended.tokens == (stop,) and not ended.truncated
    assert cut.tokens == tuple(greedy[1]) and cut.truncated
    assert (ended.valid, cut.valid) == (False, True)


# ------------------------------------------------------------------------------------------ parts


def test_drift_finds_where_a_free_run_would_part_ways(
    scorer: Scorer,
    rotation: Rotation,
    sampled: list[np.ndarray],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(drift, "PROMPT", 561)  # the shapes of decode_check above
    row = np.pad(np.concatenate([PROMPTS[0], sampled[0]]), (0, LENGTH - 560 - STEPS))
    rows = np.stack([row, row])
    exact = [scorer.hidden(row, rotation) for row in rows]
    at = drift.generated(LENGTH)
    chosen = [scorer.predict(h, at, SAMPLED, row) for row, h in enumerate(exact)]
    np.testing.assert_array_equal(chosen[0][: STEPS - 1], sampled[0][1:])
    scores, differs = drift.score(scorer, rotation, rows[:1], exact, chosen, SAMPLED)
    assert scores[0].kl.max() == 0 and not differs[0].any()
    # a cache that gets the values of its pages wrong, so that there is something to find
    worse = dataclasses.replace(rotation, x_o=tuple(100 * x for x in rotation.x_o))
    scores, differs = drift.score(scorer, worse, rows[:1], exact, chosen, SAMPLED)
    free = scorer.generate(PROMPTS, worse, steps=STEPS, sampling=SAMPLED)[0]
    other = (free != sampled[0])[1:]
    assert free[0] == sampled[0][0] and 0 < other.argmax() < STEPS - 1
    assert differs[0].argmax() == other.argmax()
    assert scores[0].kl.mean() > 1e-3
    stepped, again = drift.score(scorer, worse, rows, exact, chosen, SAMPLED, per_step=True)
    np.testing.assert_allclose(stepped[0].kl, scores[0].kl, atol=1e-4)
    written = slice(0, STEPS - 1)  # behind it the row is padding, which nobody chose
    np.testing.assert_array_equal(again[0][written], differs[0][written])


def test_recall_counts_the_tokens_that_are_the_first_choice(
    scorer: Scorer, rotation: Rotation, greedy: list[np.ndarray]
) -> None:
    whole = np.pad(np.concatenate([PROMPTS[0], greedy[0]]), (0, LENGTH - 600))
    known = recall.Question("span", 0, 0.1, 559 + np.arange(STEPS))  # the model wrote these itself
    unknown = recall.Question("key", 1, 0.5, np.arange(500, 520))  # random bytes
    found = recall.score(scorer, rotation, [recall.Probe(whole, (known, unknown))])
    assert found["span"] == [recall.Found(0, 0.1, 1.0)]
    assert found["key"][0].hits < 0.2
    assert found["copy"] == []
