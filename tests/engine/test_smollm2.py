"""The real model from the real INT2 cache, with the rotation that ships: what users meet first."""

from __future__ import annotations

import json
import pydoc_data.topics
from pathlib import Path

import pytest

from oscar_jax.config import EngineConfig, model_entry
from oscar_jax.engine.engine import Engine
from oscar_jax.engine.request import SamplingParams
from oscar_jax.models.loading import Loaded
from oscar_jax.rotation_source import resolve_rotation
from tests.engine.conftest import ask, finish, greedy, solo

# Greedy answers on a CPU, by prompt; kept as a file so that a GPU is held to the same text.
GREEDY = Path(__file__).parents[1] / "golden" / "smollm2_greedy.json"
LONG = ("assert", "for", "if", "while", "with", "import")


@pytest.fixture(scope="module")
def smollm2_engine(smollm2: Loaded) -> Engine:
    config = EngineConfig(max_model_len=4096)
    shipped = model_entry("smollm2-135m").rotation
    rotation = resolve_rotation("auto", smollm2, config.kv, shipped=shipped).rotation
    return Engine.build(config, smollm2, rotation)


def stops(max_tokens: int) -> SamplingParams:
    """Greedy, and the model may end its answer."""
    return SamplingParams(max_tokens=max_tokens, temperature=0.0)


def chat(engine: Engine, text: str) -> list[int]:
    return engine.tokenizer.chat([{"role": "user", "content": text}])


def document() -> str:
    """About 2,770 tokens of Python's own documentation."""
    return "".join(pydoc_data.topics.topics[name] for name in LONG)[:11_500]


def test_the_capital_of_france(smollm2_engine: Engine) -> None:
    answer = solo(smollm2_engine, chat(smollm2_engine, "What is the capital of France?"), stops(40))
    assert "Paris" in answer.text
    assert answer.reason == "stop"
    assert smollm2_engine.stats().bits_per_element == 2.5


def test_a_long_prompt_is_answered_alike_alone_and_in_a_batch_of_8(smollm2_engine: Engine) -> None:
    question = "In one sentence: which programming language does the text above describe?"
    ids = chat(smollm2_engine, f"{document()}\n\n{question}")
    assert 2700 < len(ids) < 3100
    alone = solo(smollm2_engine, ids, stops(24))
    assert "Python" in alone.text
    others = [
        ask(smollm2_engine, chat(smollm2_engine, f"Count from {i} upwards."), greedy(70), str(i))
        for i in range(7)
    ]
    together = ask(smollm2_engine, ids, stops(24), "long")
    for _ in range(12):
        smollm2_engine.step()
    assert smollm2_engine.stats().running == 8
    finish(smollm2_engine, together, *others)
    assert together.tokens == alone.tokens
    assert together.text == alone.text


@pytest.mark.parametrize("name", ("capital", "sum", "haiku", "document"))
def test_greedy_text_is_the_same_on_every_device(smollm2_engine: Engine, name: str) -> None:
    """Three prompts below 448 tokens (BF16) and one of 2,800 that is read from INT2 pages."""
    golden = json.loads(GREEDY.read_text(encoding="utf-8"))[name]
    prompt = golden["prompt"]
    if name == "document":
        prompt = f"{document()}\n\n{prompt}"
    answer = solo(smollm2_engine, chat(smollm2_engine, prompt), stops(golden["max_tokens"]))
    assert answer.text == golden["text"]
