"""Short ways to ask the real app, in this process and without a socket, and to read answers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI

from oscar_jax.engine.engine import Engine
from oscar_jax.server.service import Service

MODEL = "tiny"
MAX_MODEL_LEN = 1024


@dataclasses.dataclass
class Server:
    """The app with its state, and the short ways to ask it."""

    service: Service
    app: FastAPI

    @asynccontextmanager
    async def client(self) -> AsyncIterator[httpx.AsyncClient]:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://server", timeout=60
        ) as http:
            yield http

    async def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        async with self.client() as http:
            return await http.request(method, path, **options)

    def request(self, method: str, path: str, **options: Any) -> httpx.Response:
        return run(self.ask(method, path, **options))

    def get(self, path: str, **options: Any) -> httpx.Response:
        return self.request("GET", path, **options)

    def post(self, path: str, **options: Any) -> httpx.Response:
        return self.request("POST", path, **options)

    def complete(self, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": "Once upon", "max_tokens": 8, "temperature": 0} | fields
        return self.post("/v1/completions", json=body)

    def chat(self, text: str = "hello", **fields: Any) -> httpx.Response:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": 8,
            "temperature": 0,
        }
        return self.post("/v1/chat/completions", json=body | fields)


async def idle(engine: Engine, seconds: float = 2.0) -> None:
    """Wait until nothing runs, waits or holds a page; fails when that takes longer."""
    async with asyncio.timeout(seconds):
        while (stats := engine.stats()).running or stats.waiting or stats.kv_pages_used:
            await asyncio.sleep(0.01)


def run[Result](work: Coroutine[Any, Any, Result]) -> Result:
    return asyncio.run(work)


def error_of(response: httpx.Response) -> dict[str, Any]:
    """The error of a response, whose shape is checked."""
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return dict(body["error"])


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The JSON events of a stream, which must end with [DONE]."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = response.content.decode().split("\n\n")
    assert lines.pop() == "" and lines.pop() == "data: [DONE]"
    return [json.loads(line.removeprefix("data: ")) for line in lines]
