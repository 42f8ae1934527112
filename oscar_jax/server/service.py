"""What the routes work with: the engine, the tokenizer, and how far the start has come."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from oscar_jax.engine.request import Request
from oscar_jax.models.tokenizer import Tokenizer
from oscar_jax.server.config import ServerConfig
from oscar_jax.server.errors import ApiError
from oscar_jax.server.metrics import Metrics
from oscar_jax.server.responses import now


class Engine(Protocol):
    """What the server needs of ``oscar_jax.engine.engine.Engine``; all of it thread-safe."""

    @property
    def alive(self) -> bool: ...

    @property
    def degraded(self) -> bool: ...

    def submit(self, request: Request) -> None: ...

    def abort(self, request_id: str) -> None: ...

    def stats(self) -> Any: ...

    def stop(self) -> None: ...


@dataclasses.dataclass(frozen=True)
class Serving:
    """What exists once the model is loaded and its cache was found sound."""

    engine: Engine
    tokenizer: Tokenizer
    max_model_len: int
    report: dict[str, Any]  # versions and KV settings, for /version


class Service:
    """State of one server process, read by every request.

    Args:
        model: the served name, the only one that a request's "model" is compared with.
        config: the HTTP settings.
        api_key: what clients must send, or None.
    """

    def __init__(self, model: str, config: ServerConfig, api_key: bytes | None = None) -> None:
        self.model = model
        self.config = config
        self.api_key = api_key
        self.created = now()
        self.phase = "starting"
        self.in_flight = 0  # choices running or waiting; touched by the event loop alone
        self.metrics = Metrics(model, self._stats)
        self.started: Serving | None = None  # set once, by open()
        # Two threads: text of any length is tokenised here while the event loop keeps answering.
        self._workers = ThreadPoolExecutor(2, "tokenize")

    def open(self, serving: Serving) -> None:
        """From here on requests are served."""
        self.started = serving
        self.phase = "ready"

    @property
    def serving(self) -> Serving | None:
        """The engine and its model while requests can be served, else None."""
        started = self.started
        return started if started is not None and started.engine.alive else None

    def health(self) -> tuple[int, dict[str, str]]:
        """Status and body of /health: 200 "ok" or "degraded", 503 while starting or after."""
        started = self.started
        if started is None:
            return 503, {"status": "starting", "phase": self.phase}
        if not started.engine.alive:
            return 503, {"status": "failed", "phase": "the engine has stopped"}
        if started.engine.degraded:
            return 200, {"status": "degraded", "reason": "started without the cache check"}
        return 200, {"status": "ok"}

    def admit(self, choices: int) -> None:
        """Count choices in, or raise 429 when that would be too many at once."""
        limit = self.config.max_in_flight
        if self.in_flight + choices > limit:
            raise ApiError(
                429,
                f"{self.in_flight} choices are running or waiting and at most {limit} may be; "
                f"this request asks for {choices} more. Try again later.",
                type="rate_limit_error",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self.in_flight += choices

    def release(self, choices: int) -> None:
        """Count choices out."""
        self.in_flight -= choices

    async def in_worker[Result](self, work: Callable[..., Result], *arguments: Any) -> Result:
        """Run ``work(*arguments)`` on a worker thread."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._workers, work, *arguments)

    def close(self) -> None:
        """Stop the worker threads."""
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _stats(self) -> Any | None:
        return None if self.started is None else self.started.engine.stats()
