"""One real engine on a tiny random model, behind the real app, for all tests of the server."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import jax.numpy as jnp
import pytest

from oscar_jax.config import EngineConfig
from oscar_jax.engine.engine import Engine
from oscar_jax.models.loading import Loaded
from oscar_jax.models.tokenizer import byte_level
from oscar_jax.models.weights import dummy_decoder
from oscar_jax.rotation import Rotation
from oscar_jax.server.app import create_app
from oscar_jax.server.config import ServerConfig
from oscar_jax.server.service import Service, Serving
from tests.server.client import MAX_MODEL_LEN, MODEL, Server, idle, run
from tests.tiny import TINY as TWO_LAYERS

TINY = dataclasses.replace(
    TWO_LAYERS,
    hidden_size=64,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    max_position_embeddings=MAX_MODEL_LEN,
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
