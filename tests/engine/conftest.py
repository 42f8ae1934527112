"""A real engine on a tiny random model in float32, stepped by the tests instead of a thread."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax.accounting import CacheShape
from oscar_jax.config import EngineConfig
from oscar_jax.engine.engine import Engine
from oscar_jax.engine.request import Output, Request, SamplingParams
from oscar_jax.models.loading import Loaded
from oscar_jax.models.tokenizer import byte_level
from oscar_jax.models.transformer import Decoder
from oscar_jax.rotation import Rotation
from tests.tiny import TINY as TWO_LAYERS

TINY = dataclasses.replace(TWO_LAYERS, tie_word_embeddings=False)
CONFIG = EngineConfig(
    max_model_len=1280, max_num_seqs=4, prefill_chunk=256, steps_per_dispatch=4, mem_fraction=1.0
)
PAGES = 14  # two sequences of 1,000 tokens


def lively(name: str, shape: tuple[int, ...]) -> jax.Array:
    """Weights large enough that the next token depends on what attention reads."""
    if name.endswith("norm.weight"):
        return jnp.ones(shape, jnp.float32)
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    return jnp.asarray(2.0 * rng.normal(size=shape) / shape[-1] ** 0.5, jnp.float32)


@pytest.fixture(scope="session")
def tiny() -> Loaded:
    return Loaded(TINY, Decoder(TINY, lively), byte_level(259), "")


@pytest.fixture(scope="session")
def rotation() -> Rotation:
    """A random orthogonal transform with a mean: every part of the codec takes part."""
    rng = np.random.default_rng(7)
    heads = lambda: np.stack([np.linalg.qr(rng.normal(size=(64, 64)))[0] for _ in range(2)])  # noqa: E731
    means = [0.1 * rng.normal(size=(2, 64)) for _ in range(2)]
    return Rotation.from_transforms([heads(), heads()], [heads(), heads()], means)


@pytest.fixture(scope="session")
def shared(tiny: Loaded, rotation: Rotation) -> Engine:
    return build(tiny, rotation)


@pytest.fixture
def engine(shared: Engine) -> Engine:
    """A fresh engine on the session's compiled steps."""
    return Engine(shared.runner, shared.tokenizer)


def build(tiny: Loaded, rotation: Rotation | None, **changes: object) -> Engine:
    """An engine like the shared one but for some settings."""
    config = dataclasses.replace(CONFIG, **changes)  # type: ignore[arg-type]
    shape = CacheShape.of(config.kv, layers=2, kv_heads=2, head_dim=64)
    memory = config.max_num_seqs * shape.window_bytes + PAGES * shape.page_bytes
    return Engine.build(config, tiny, rotation, available_bytes=memory)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Random byte tokens."""
    return tuple(int(t) for t in np.random.default_rng(seed).integers(0, 255, length))


def greedy(max_tokens: int, **changes: object) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **changes)  # type: ignore[arg-type]


@dataclasses.dataclass
class Answer:
    """Everything that one request's ``emit`` received."""

    outputs: list[Output] = dataclasses.field(default_factory=list)

    @property
    def done(self) -> bool:
        return bool(self.outputs) and self.outputs[-1].finish_reason is not None

    @property
    def tokens(self) -> list[int]:
        return [t for output in self.outputs for t in output.token_ids]

    @property
    def text(self) -> str:
        return "".join(output.text for output in self.outputs)

    @property
    def reason(self) -> str | None:
        return self.outputs[-1].finish_reason


def ask(engine: Engine, tokens: Sequence[int], params: SamplingParams, name: str = "r") -> Answer:
    answer = Answer()
    engine.submit(Request(name, tuple(tokens), params, answer.outputs.append))
    return answer


def finish(engine: Engine, *answers: Answer) -> None:
    """Step until all have ended; an engine that gets nowhere fails the test."""
    for _ in range(2000):
        if all(answer.done for answer in answers):
            break
        engine.step()
    assert all(answer.done for answer in answers)
    engine.step()  # the last unread dispatch
    assert_idle(engine)


def assert_idle(engine: Engine) -> None:
    """Every page is free, every slot too."""
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.kv_pages_used) == (0, 0, 0)


def solo(engine: Engine, tokens: Sequence[int], params: SamplingParams) -> Answer:
    answer = ask(engine, tokens, params)
    finish(engine, answer)
    return answer
