"""When the engine fails: one request alone, or all of it; and what the metrics say meanwhile."""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any

import jax.numpy as jnp
import pytest

from oscar_jax.engine.engine import Engine
from oscar_jax.engine.request import SamplingParams
from oscar_jax.engine.sampling import BAD_LOGITS
from oscar_jax.server.app import create_app
from oscar_jax.server.config import ServerConfig
from oscar_jax.server.errors import ApiError
from oscar_jax.server.prompts import Planned
from oscar_jax.server.run import Run
from oscar_jax.server.service import Service, Serving
from tests.server.client import MODEL, Server, error_of, events_of, run


def values(server: Server) -> dict[str, float]:
    """Every series of /metrics that has no label but the model's name."""
    text = server.get("/metrics").text
    found = re.findall(rf'^oscar:(\w+){{model_name="{MODEL}"}} (\S+)$', text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def test_metrics_tell_the_cache_the_traffic_and_that_nothing_compiled(server: Server) -> None:
    # The count is of the process, in which other tests have compiled since the engine started.
    before = values(server)["compiles_after_ready_total"]
    server.complete(prompt="x" * 10, max_tokens=6, ignore_eos=True)
    server.complete(prompt=["abc", "de"], max_tokens=4, n=2, ignore_eos=True, stream=True)
    seen = values(server)
    assert seen["kv_page_bits_per_element"] == 2.5  # 2 + 32/64
    assert seen["kv_cache_bytes_per_token"] == 40  # one layer, one head: 2 (64 x 2.5) / 8
    assert seen["compiles_after_ready_total"] == before
    assert seen["num_preemptions_total"] == 0
    assert (seen["num_requests_running"], seen["num_requests_waiting"]) == (0, 0)
    assert seen["kv_cache_usage_perc"] == seen["kv_cache_pages_used"] == 0
    assert seen["kv_cache_pages"] > 0
    assert seen["prompt_tokens_total"] == 10 + 5
    assert seen["generation_tokens_total"] == 6 + 4 * 4
    assert seen["time_to_first_token_seconds_count"] == 5
    assert seen["time_per_output_token_seconds_count"] == 5
    assert seen["e2e_request_latency_seconds_count"] == 5
    assert seen["time_to_first_token_seconds_sum"] > 0
    text = server.get("/metrics").text
    assert f'oscar:request_success_total{{finished_reason="length",model_name="{MODEL}"}} 5' in text
    route = 'route="/v1/completions",status="200"'
    assert f'oscar:http_requests_total{{model_name="{MODEL}",{route}}} 2.0' in text


def test_health_is_ok_then_degraded_when_the_check_was_skipped(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (server.get("/health").status_code, server.get("/health").json()["status"]) == (
        200,
        "ok",
    )
    monkeypatch.setattr(server.service.serving.engine, "degraded", True)  # type: ignore[union-attr]
    response = server.get("/health")
    assert (response.status_code, response.json()["status"]) == (200, "degraded")


def test_a_request_whose_logits_are_not_finite_fails_alone(
    server: Server,
    engine: Engine,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as patch:
        whole = engine.runner.prefill

        def poisoned(*arguments: object, **options: object) -> object:
            whole(*arguments, **options)  # type: ignore[arg-type]
            return jnp.full(1, BAD_LOGITS, jnp.int32)

        patch.setattr(engine.runner, "prefill", poisoned)
        response = server.complete()
        assert response.status_code == 500
        assert error_of(response)["code"] == "internal_error"
        assert "finite" not in response.text and "finite" in caplog.text
        (event,) = events_of(server.complete(stream=True))
        assert event["error"]["type"] == "server_error"
    assert server.complete().status_code == 200
    assert server.get("/health").status_code == 200


@pytest.fixture
def dying(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Server:
    """A server whose engine stops at its first step."""
    second = Engine(engine.runner, engine.tokenizer)

    def broken() -> None:
        raise MemoryError("no more memory")

    monkeypatch.setattr(second, "step", broken)
    second.start()
    service = Service(MODEL, ServerConfig())
    service.open(Serving(second, engine.tokenizer, second.max_model_len, {}))
    return Server(service, create_app(service))


@pytest.mark.parametrize("stream", [False, True])
def test_when_the_engine_dies_requests_end_and_health_is_503(dying: Server, stream: bool) -> None:
    assert dying.get("/health").status_code == 200
    response = dying.complete(stream=stream)
    if stream:
        (event,) = events_of(response)
        assert event["error"]["type"] == "server_error"
    else:  # 503 if the request came a moment after the end
        assert response.status_code in (500, 503)
    assert dying.service.in_flight == 0
    end = time.monotonic() + 2  # the answer goes out a moment before the thread has ended
    while (health := dying.get("/health")).status_code == 200 and time.monotonic() < end:
        time.sleep(0.01)
    assert (health.status_code, health.json()["status"]) == (503, "failed")
    assert dying.complete().status_code == 503
    assert error_of(dying.chat())["code"] == "not_ready"


def test_a_request_that_an_ended_engine_never_sees_is_not_left_waiting(engine: Engine) -> None:
    ended = Engine(engine.runner, engine.tokenizer)  # not running: nobody reads its commands
    service = Service(MODEL, ServerConfig())
    serving = Serving(ended, engine.tokenizer, ended.max_model_len, {})

    async def nobody_leaves() -> Any:
        await asyncio.sleep(60)

    async def wait() -> None:
        planned = [Planned((1, 2, 3), [SamplingParams(max_tokens=4)])]
        async for _ in Run(service, serving, "req-1", planned).outputs(nobody_leaves):
            pass

    with pytest.raises(ApiError, match="The engine has stopped") as caught:
        run(wait())
    assert caught.value.status == 503
    assert service.in_flight == 0
