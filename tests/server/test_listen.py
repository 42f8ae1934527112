"""Over a real socket: bodies that are too large or too slow, clients that leave, real clients."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from oscar_jax.engine.engine import Engine
from oscar_jax.server.app import create_app
from oscar_jax.server.config import ServerConfig
from oscar_jax.server.listen import HttpServer, bind, is_loopback, url_of
from oscar_jax.server.service import Service, Serving
from tests.server.client import MAX_MODEL_LEN, MODEL, error_of, idle, run

MIB = 2**20


@pytest.fixture(scope="module")
def service(engine: Engine) -> Service:
    config = ServerConfig(max_body_mib=1, body_timeout=0.5, max_in_flight=6)
    service = Service(MODEL, config)
    service.open(Serving(engine, engine.tokenizer, engine.max_model_len, {}))
    return service


@pytest.fixture(scope="module")
def url(service: Service) -> Iterator[str]:
    listener = bind("127.0.0.1", 0)
    server = HttpServer(create_app(service))
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield url_of(listener)
    server.should_exit = True
    thread.join()


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "abc", "max_tokens": 4, "temperature": 0} | fields


def connection(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def sent(url: str, body: bytes, length: int | None = None) -> socket.socket:
    """A connection over which a completion request was written by hand."""
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    raw = connection(url)
    raw.sendall(head.encode() + body)
    return raw


def until(condition: Any, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.01)


def test_the_default_address_is_the_loopback() -> None:
    listener = bind(ServerConfig().host, 0)
    assert is_loopback(listener)
    assert url_of(listener).startswith("http://127.0.0.1:")
    with pytest.raises(
        ValueError, match=f"cannot listen on 127.0.0.1 port {listener.getsockname()[1]}"
    ):
        listener.listen()
        bind("127.0.0.1", listener.getsockname()[1])
    listener.close()


def test_openais_client_reads_everything(url: str) -> None:
    client = openai.OpenAI(api_key="any", base_url=f"{url}/v1", max_retries=0)
    messages: Any = [{"role": "user", "content": "hi"}]
    (model,) = client.models.list().data
    assert (model.id, model.max_model_len) == (MODEL, MAX_MODEL_LEN)  # type: ignore[attr-defined]
    whole = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4)
    assert whole.usage and whole.usage.completion_tokens <= 4
    chunks = list(
        client.chat.completions.create(
            model=MODEL,
            messages=messages,
            max_tokens=4,
            seed=1,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage and chunks[-1].usage.total_tokens > 4
    again = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=4, seed=1)
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert said == again.choices[0].message.content
    legacy = client.completions.create(model=MODEL, prompt="hi", max_tokens=4, temperature=0)
    assert legacy.choices[0].finish_reason in ("stop", "length")
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("gpt-4")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="hi", logprobs=2)
    assert refused.value.param == "logprobs"


def test_a_body_beyond_the_limit_is_413_declared_or_not(url: str) -> None:
    declared = httpx.post(
        f"{url}/v1/completions",
        content=b" " * (MIB + 1),
        headers={"content-type": "application/json"},
    )
    assert declared.status_code == 413
    assert error_of(declared)["code"] == "request_too_large"

    raw = connection(url)
    raw.sendall(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n"
    )
    piece = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    for _ in range(17):  # 1 MiB and 64 KiB, and no end
        raw.sendall(piece)
    assert raw.recv(4096).startswith(b"HTTP/1.1 413 ")
    raw.close()


def test_a_body_at_the_limit_is_read(url: str) -> None:
    body = json.dumps(completion()).encode()
    padded = body[:-1] + b" " * (MIB - len(body)) + body[-1:]
    response = httpx.post(
        f"{url}/v1/completions", content=padded, headers={"content-type": "application/json"}
    )
    assert response.status_code == 200


def test_a_64_mib_body_does_not_keep_others_waiting(url: str) -> None:
    slowest = 0.0

    def flood() -> None:
        with connection(url) as raw:
            raw.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
                b"Transfer-Encoding: chunked\r\n\r\n"
            )
            piece = b"100000\r\n" + b"[" * MIB + b"\r\n"
            try:
                for _ in range(64):
                    raw.sendall(piece)
            except OSError:
                pass  # the server has closed the connection, as it should

    flooding = threading.Thread(target=flood)
    flooding.start()
    with httpx.Client(timeout=60) as http:
        for _ in range(20):
            start = time.monotonic()
            assert http.get(f"{url}/health").status_code == 200
            slowest = max(slowest, time.monotonic() - start)
    flooding.join()
    assert slowest < 1.0


def test_a_body_that_does_not_come_is_408(url: str) -> None:
    raw = sent(url, b'{"model"', length=500)
    assert raw.recv(4096).startswith(b"HTTP/1.1 408 ")
    raw.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_pages(
    url: str, service: Service, engine: Engine, stream: bool
) -> None:
    body = completion(
        prompt="x" * 300, max_tokens=MAX_MODEL_LEN, ignore_eos=True, n=4, stream=stream
    )
    raw = sent(url, json.dumps(body).encode())
    until(lambda: engine.stats().running == 2 and engine.stats().waiting == 2)
    assert engine.stats().kv_pages_used > 0
    raw.close()
    until(lambda: service.in_flight == 0)
    run(idle(engine))
    assert b'finished_reason="abort",model_name="tiny"} 4' in service.metrics.exposition() or stream


def test_more_at_once_than_allowed_is_429_and_passes_later(
    url: str, service: Service, engine: Engine
) -> None:
    body = completion(max_tokens=MAX_MODEL_LEN, ignore_eos=True, n=6, stream=True)
    raw = sent(url, json.dumps(body).encode())
    until(lambda: service.in_flight == 6)
    response = httpx.post(f"{url}/v1/completions", json=completion())
    assert response.status_code == 429
    assert response.headers["retry-after"] == "1"
    assert error_of(response)["code"] == "queue_full"
    raw.close()
    until(lambda: service.in_flight == 0)
    assert httpx.post(f"{url}/v1/completions", json=completion()).status_code == 200


def test_events_arrive_one_by_one_while_the_answer_grows(url: str) -> None:
    body = completion(max_tokens=200, ignore_eos=True, stream=True)
    with httpx.stream("POST", f"{url}/v1/completions", json=body) as response:
        assert response.headers["cache-control"] == "no-cache"
        times = [time.monotonic() for _ in response.iter_lines()]
    assert times[-1] - times[0] > 0.01  # and not all in the last packet


def test_headers_that_are_too_large_are_refused_and_the_server_lives(url: str) -> None:
    raw = connection(url)
    raw.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"y" * 200_000 + b"\r\n\r\n")
    assert raw.recv(4096).startswith(b"HTTP/1.1 4")
    raw.close()
    assert httpx.get(f"{url}/health").status_code == 200
