"""One real engine on a tiny random model, behind the real app, for all tests of the server."""

from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import pytest

from oscar_jax.config import EngineConfig, ModelConfig
from oscar_jax.engine.engine import Engine
from oscar_jax.models.loading import Loaded
from oscar_jax.models.tokenizer import byte_level
from oscar_jax.models.weights import dummy_decoder
from oscar_jax.rotation import Rotation
from oscar_jax.server.app import create_app
from oscar_jax.server.config import ServerConfig
from oscar_jax.server.service import Service, Serving
from tests.server.client import MAX_MODEL_LEN, MODEL, Server, idle, run

TINY = ModelConfig(
    architecture="llama",
    vocab_size=259,
    hidden_size=64,
    intermediate_size=128,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    max_position_embeddings=MAX_MODEL_LEN,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="session")
def engine() -> Iterator[Engine]:
    """A byte-level model of one layer: its text is noise, its bookkeeping is the real one."""
    loaded = Loaded(TINY, dummy_decoder(TINY, jnp.float32), byte_level(259), "")
    config = EngineConfig(
        max_model_len=MAX_MODEL_LEN, max_num_seqs=2, prefill_chunk=128, steps_per_dispatch=2
    )
    rotation = Rotation.hadamard(layers=1, kv_heads=1, head_dim=64)
    engine = Engine.build(config, loaded, rotation, available_bytes=64 * 2**20)
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def server(engine: Engine) -> Iterator[Server]:
    """A ready server; every test leaves it idle, with all pages free."""
    service = Service(MODEL, ServerConfig())
    service.open(Serving(engine, engine.tokenizer, engine.max_model_len, {"version": "test"}))
    yield Server(service, create_app(service))
    service.close()
    assert service.in_flight == 0
    run(idle(engine))
