"""The canary refuses a cache that does not follow the model, and lets a consistent one pass."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax.config import ModelConfig
from oscar_jax.engine.canary import GREEDY, SCORED, judge, run_canary
from oscar_jax.engine.engine import Engine
from oscar_jax.evaluation.scorer import Scores
from oscar_jax.models.loading import Loaded
from oscar_jax.models.tokenizer import byte_level
from oscar_jax.models.weights import dummy_decoder
from oscar_jax.rotation import Rotation
from tests.engine.conftest import CONFIG, TINY, build


@pytest.fixture(scope="module")
def calm() -> Loaded:
    """A model whose attention is nearly flat: any consistent cache follows it closely."""
    config: ModelConfig = dataclasses.replace(TINY, num_layers=2)
    return Loaded(config, dummy_decoder(config, jnp.float32), byte_level(259), "")


@pytest.fixture(scope="module")
def calm_engine(calm: Loaded, rotation: Rotation) -> Engine:
    return build(calm, rotation, max_num_seqs=2, prefill_chunk=128)


def test_a_consistent_random_rotation_passes(
    calm_engine: Engine, calm: Loaded, rotation: Rotation
) -> None:
    verdict = run_canary(calm_engine, calm, rotation, CONFIG.kv)
    assert verdict.problem is None
    assert verdict.positions == SCORED + GREEDY
    assert 0 < verdict.kl < 0.1
    assert verdict.top1 > 0.5  # random weights give nearly equal logits: many ties
    assert "canary: KL to BF16" in str(verdict)


@pytest.mark.parametrize("side", ["x_q", "x_o"])
def test_a_transform_whose_inverse_does_not_match_is_refused(
    calm_engine: Engine, calm: Loaded, rotation: Rotation, side: str
) -> None:
    other = Rotation.hadamard(layers=2, kv_heads=2, head_dim=64)
    damaged = dataclasses.replace(rotation, **{side: getattr(other, side)})
    verdict = run_canary(calm_engine, calm, damaged, CONFIG.kv)
    assert verdict.problem is not None
    assert "not inverse to each other" in verdict.problem
    assert "layer 0" in verdict.problem


def test_noise_in_the_logits_is_refused_even_where_the_algebra_is_not_looked_at(
    engine: Engine, tiny: Loaded, rotation: Rotation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second line of defence: the comparison of logits alone finds a wrong query side."""
    monkeypatch.setattr(Rotation, "check_inverses", lambda self: None)
    other = Rotation.hadamard(layers=2, kv_heads=2, head_dim=64)
    damaged = dataclasses.replace(rotation, x_q=tuple(3 * x for x in other.x_q))
    verdict = run_canary(engine, tiny, damaged, CONFIG.kv)
    assert verdict.problem is not None
    assert "does not follow the model" in verdict.problem


@pytest.mark.parametrize(("kl", "words"), [(0.2, None), (0.3, "KL limit"), (np.nan, "finite")])
def test_the_mean_divergence_decides(kl: float, words: str | None) -> None:
    scores = Scores(np.zeros(4), np.array([0.0, 2 * kl, kl, kl]), np.array([1, 1, 1, 0], bool))
    verdict = judge(scores, np.array([True, False]))
    assert (verdict.top1, verdict.greedy, verdict.positions) == (0.75, 0.5, 4)
    assert verdict.kl == pytest.approx(kl, nan_ok=True)
    assert words in str(verdict.problem) if words else verdict.problem is None


def test_a_server_whose_sequences_never_fill_a_page_has_nothing_to_compare(
    calm_engine: Engine, calm: Loaded, rotation: Rotation
) -> None:
    windows = dataclasses.replace(CONFIG.kv, recent=1152)  # 1,344 tokens before the first page
    verdict = run_canary(calm_engine, calm, rotation, windows)
    assert (verdict.positions, verdict.problem) == (0, None)
