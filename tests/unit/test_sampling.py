"""The sampler: hand-computed filters, frequencies of the softmax, rows that ignore the rest."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax.engine.request import SamplingParams
from oscar_jax.engine.sampling import BAD_LOGITS, SamplingArrays, pack, sample

# Probabilities 1/2, 1/4, 1/8, 1/16, 1/16 at ids 3, 0, 4, 1, 2: sums of them are exact in float32.
PROBABILITY = np.array([4, 1, 1, 8, 2], np.float32) / 16
LOGITS = np.log(PROBABILITY)

draw = jax.jit(sample)


def settings(**changes: float) -> SamplingParams:
    return SamplingParams(max_tokens=1, **changes)  # type: ignore[arg-type]


def drawn(params: SamplingParams, logits: np.ndarray = LOGITS, count: int = 4000) -> np.ndarray:
    """Tokens of ``count`` positions of one request."""
    rows = jnp.broadcast_to(jnp.asarray(logits), (count, logits.size))
    fields = (np.broadcast_to(field, (count,)) for field in pack([params]))
    return np.asarray(draw(rows, SamplingArrays(*fields), jnp.arange(count)))


def frequencies(tokens: np.ndarray, size: int) -> np.ndarray:
    return np.bincount(tokens, minlength=size) / tokens.size


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {3}),
        ({"top_k": 2}, {3, 0}),
        ({"top_k": 3}, {3, 0, 4}),
        ({"top_k": 4}, {3, 0, 4, 1, 2}),  # ids 1 and 2 tie for the fourth place
        ({"top_k": 99}, {3, 0, 4, 1, 2}),
        ({"top_p": 0.001}, {3}),
        ({"top_p": 0.5}, {3}),  # 1/2 reaches it
        ({"top_p": 0.51}, {3, 0}),
        ({"top_p": 0.75}, {3, 0}),
        ({"top_p": 0.76}, {3, 0, 4}),
        ({"top_p": 0.88}, {3, 0, 4, 1, 2}),
        ({"min_p": 0.12}, {3, 0, 4, 1, 2}),  # 1/16 is 1/8 of the largest
        ({"min_p": 0.13}, {3, 0, 4}),
        ({"min_p": 0.6}, {3}),
        ({"min_p": 1.0}, {3}),
        ({"top_k": 3, "top_p": 0.57}, {3}),  # of 8/14, 4/14, 2/14
        ({"top_k": 3, "top_p": 0.58}, {3, 0}),
        ({"min_p": 0.3, "top_p": 0.66}, {3}),  # of 2/3, 1/3
        ({"min_p": 0.3, "top_p": 0.67}, {3, 0}),
    ],
)
def test_each_filter_keeps_what_its_definition_keeps(
    changes: dict[str, float], kept: set[int]
) -> None:
    assert set(drawn(settings(**changes))) == kept


def test_frequencies_follow_the_softmax_within_four_standard_errors() -> None:
    cases: list[tuple[dict[str, float], np.ndarray]] = [
        ({}, PROBABILITY),
        ({"temperature": 2.0}, np.sqrt(PROBABILITY) / np.sqrt(PROBABILITY).sum()),
        ({"temperature": 0.5}, PROBABILITY**2 / (PROBABILITY**2).sum()),
        ({"top_k": 2}, np.array([4, 0, 0, 8, 0]) / 12),
        ({"top_k": 3, "top_p": 0.58}, np.array([4, 0, 0, 8, 0]) / 12),
    ]
    count = 20_000
    for changes, expected in cases:
        seen = frequencies(drawn(settings(**changes), count=count), PROBABILITY.size)
        error = np.sqrt(expected * (1 - expected) / count)
        assert (np.abs(seen - expected) <= 4 * error + 1e-12).all(), (
            changes,
            seen,
            expected,
        )


def test_a_large_flat_vocabulary_is_drawn_evenly() -> None:
    size = 2048
    tokens = drawn(settings(), np.zeros(size, np.float32), count=size)
    halves = frequencies(tokens // (size // 2), 2)
    assert abs(halves[0] - 0.5) < 4 * 0.5 / np.sqrt(size)
    # Distinct values of n draws from n: n (1 - 1/e), variance n (1/e - 2/e^2).
    distinct, deviation = size * (1 - np.exp(-1)), np.sqrt(size * (np.exp(-1) - 2 * np.exp(-2)))
    assert abs(len(set(tokens)) - distinct) < 4 * deviation


def test_greedy_takes_the_lowest_of_equal_maxima_and_ignores_every_filter() -> None:
    logits = jnp.array([[1.0, 7.0, 7.0, 0.0]] * 2)
    rows = pack([settings(temperature=0.0, top_k=1, top_p=0.1, min_p=1.0, seed=3), None])
    assert draw(logits, rows, jnp.array([0, 1])).tolist() == [1, 1]


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    assert set(drawn(settings(temperature=1e-6))) == {3}
    assert set(drawn(settings(temperature=2e-5))) == {3}


def mixed_rows() -> list[SamplingParams]:
    return [
        settings(temperature=0.0),
        settings(temperature=1.0, seed=11),
        settings(temperature=0.7, top_k=5, seed=12),
        settings(temperature=1.3, top_p=0.8, seed=13),
        settings(temperature=1.0, min_p=0.1, seed=14),
        settings(temperature=2.0, top_k=40, top_p=0.9, min_p=0.01, seed=15),
    ]


def test_a_row_is_the_same_alone_in_any_slot_and_beside_any_rows() -> None:
    rows = mixed_rows()
    logits = jax.random.normal(jax.random.key(0), (len(rows), 1000)) * 3
    positions = jnp.array([3, 70, 70, 5, 900, 12])
    together = draw(logits, pack(rows), positions)
    for index, row in enumerate(rows):
        alone = draw(logits[index][None], pack([row]), positions[index][None])
        assert alone[0] == together[index], row
        beside_greedy = draw(
            jnp.stack([logits[0], logits[index]]),
            pack([None, row]),
            positions[jnp.array([0, index])],
        )
        assert beside_greedy[1] == together[index], row
    order = jnp.array([4, 2, 0, 5, 1, 3])
    shuffled = draw(logits[order], pack([rows[i] for i in order]), positions[order])
    assert shuffled.tolist() == together[order].tolist()


def test_a_filter_that_keeps_everything_changes_no_draw() -> None:
    plain = drawn(settings(seed=5), count=500)
    assert (drawn(settings(seed=5, top_k=5), count=500) == plain).all()
    assert (drawn(settings(seed=5, top_p=0.9999), count=500) == plain).all()


def test_the_seed_and_the_position_fix_the_draw() -> None:
    flat = np.zeros(1000, np.float32)
    first = drawn(settings(seed=1), flat, count=300)
    assert (drawn(settings(seed=1), flat, count=300) == first).all()
    assert (drawn(settings(seed=2), flat, count=300) == first).mean() < 0.02
    assert (first[1:] == first[:-1]).mean() < 0.02  # another position, another draw
    later = draw(jnp.zeros((1, 1000)), pack([settings(seed=1)]), jnp.array([299]))
    assert later[0] == first[299]
    assert drawn(settings(seed=2**32 - 1), flat, count=2).shape == (2,)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_hold_nan_give_the_bad_token_and_spare_the_neighbours(
    temperature: float,
) -> None:
    row = settings(temperature=temperature, top_k=2)
    logits = np.zeros((4, 8), np.float32)
    logits[:, 6] = 50.0
    logits[1, 2] = np.nan
    logits[2, :] = -np.inf
    tokens = np.asarray(draw(jnp.asarray(logits), pack([row] * 4), jnp.arange(4)))
    assert tokens.tolist() == [6, BAD_LOGITS, BAD_LOGITS, 6]


def test_a_token_masked_by_minus_infinity_is_never_drawn() -> None:
    logits = LOGITS.copy()
    logits[3] = -np.inf
    assert set(drawn(settings(), logits)) == {0, 1, 2, 4}


def primitives(jaxpr: jax.extend.core.Jaxpr) -> list[str]:  # type: ignore[name-defined]
    """Primitive names of a jaxpr, the branches of conditionals left out."""
    return [equation.primitive.name for equation in jaxpr.eqns]


def test_an_all_greedy_batch_runs_no_noise_and_an_unfiltered_one_no_search() -> None:
    arguments = (jnp.zeros((2, 64)), pack([None, None]), jnp.zeros(2, jnp.int32))
    outer = jax.make_jaxpr(sample)(*arguments).jaxpr
    conditionals = [equation for equation in outer.eqns if equation.primitive.name == "cond"]
    assert len(conditionals) == 1
    outside = " ".join(primitives(outer))
    assert "random" not in outside and "while" not in outside and "exp" not in outside
    greedy, random = conditionals[0].params["branches"]
    assert len(greedy.jaxpr.eqns) == 0  # the argmax already made
    searches = [equation for equation in random.jaxpr.eqns if equation.primitive.name == "cond"]
    assert len(searches) == 1  # the thresholds sit behind a conditional of their own
    assert "while" not in primitives(random.jaxpr) and "scan" not in primitives(random.jaxpr)
    assert any("sort" in name for name in primitives(random.jaxpr)) is False
