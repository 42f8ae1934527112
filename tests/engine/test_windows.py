"""The engine with a model of window layers: what it writes is what the model says."""

from __future__ import annotations

import numpy as np
import pytest

from oscar_jax.config import EngineConfig
from oscar_jax.engine.engine import Engine
from oscar_jax.evaluation.scorer import Scorer
from oscar_jax.models import Decoder, Loaded
from oscar_jax.models.tokenizer import byte_level
from oscar_jax.rotation import Rotation
from tests.engine.conftest import ask, finish, greedy, prompt, solo
from tests.unit.test_sliding_model import TINY, lively

CONFIG = EngineConfig(max_model_len=640, max_num_seqs=2, prefill_chunk=128)
ROTATION = Rotation.hadamard(layers=1, kv_heads=1, head_dim=64)


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    return Loaded(TINY, Decoder(TINY, lively), byte_level(259), "")


@pytest.fixture(scope="module")
def engine(loaded: Loaded) -> Engine:
    return Engine.build(CONFIG, loaded, ROTATION, available_bytes=1 << 26)


def test_chunked_prompts_and_decoded_tokens_are_what_the_model_says(
    engine: Engine, loaded: Loaded
) -> None:
    """A prompt of four chunks, far longer than the window of 40, over two visible pages."""
    ids = prompt(500)
    written = solo(engine, ids, greedy(24)).tokens
    tokens = np.array([*ids, *written], np.int32)
    scorer = Scorer(loaded.decoder, CONFIG.kv)
    predicted = scorer.predict(scorer.hidden(tokens, ROTATION), np.arange(499, 523))
    assert predicted.tolist() == written
    assert len(set(written)) > 5


def test_a_slot_that_another_sequence_had_changes_nothing(engine: Engine) -> None:
    first = solo(engine, prompt(90, seed=1), greedy(12)).tokens
    together = [ask(engine, prompt(90, seed=s), greedy(12), str(s)) for s in (2, 1)]
    finish(engine, *together)
    assert together[1].tokens == first
    assert together[0].tokens != first


def test_the_plan_counts_window_rings(engine: Engine) -> None:
    """Two layers of 40 + 16 rows of a key and a value of 64 numbers in BF16, per slot."""
    capacity = engine.capacity
    rings = 2 * (40 + 16) * 2 * 64 * 2
    assert capacity.shape.window_bytes == rings + (64 + 256 + 128 + 16) * 2 * 64 * 2
    assert capacity.allocated_bytes == 2 * capacity.shape.window_bytes + capacity.pages * 128 * 40
    assert engine.stats().bits_per_element == 2.5
