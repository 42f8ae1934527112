"""One HTTP request's choices in the engine: submitted together, read as they come, aborted."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncGenerator, Callable, Sequence

from starlette.types import Receive

from oscar_jax.engine.request import Output, Request
from oscar_jax.server.errors import SERVER, ApiError, internal, invalid
from oscar_jax.server.prompts import Planned
from oscar_jax.server.responses import Usage
from oscar_jax.server.service import Service, Serving

log = logging.getLogger("oscar_jax.server")

LIFE_CHECK_SECONDS = 1.0


class Disconnected(Exception):
    """The client is gone: nobody reads the rest."""


@dataclasses.dataclass
class _Choice:
    request: Request
    first_token: float | None = None  # seconds, as perf_counter
    completion_tokens: int = 0
    open: bool = True


class Run:
    """The choices of one request, prompt by prompt: choice i belongs to prompt i // n.

    Everything but the engine's callbacks happens on the event loop. Whoever makes a Run must
    call :meth:`close`, which aborts what is unfinished; it may be called again.

    Raises:
        ApiError: 429 when too many choices are in flight, 400 when the engine refuses one.
    """

    def __init__(
        self, service: Service, serving: Serving, request_id: str, planned: Sequence[Planned]
    ) -> None:
        self.id = request_id
        self._service = service
        self._engine = serving.engine
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Output] | None] = asyncio.Queue()
        self._arrival = time.perf_counter()
        self._prompt_tokens = sum(len(plan.prompt) for plan in planned)
        every = [(plan.prompt, params) for plan in planned for params in plan.choices]
        self._choices = [
            _Choice(Request(f"{request_id}-{index}", prompt, params, self._emitter(index)))
            for index, (prompt, params) in enumerate(every)
        ]
        service.admit(len(self._choices))
        self._admitted = len(self._choices)
        self._submit()

    def __len__(self) -> int:
        return len(self._choices)

    def _submit(self) -> None:
        try:
            for choice in self._choices:
                self._engine.submit(choice.request)
        except ValueError as error:  # the engine's last word: it can never be served
            self.close()
            raise invalid(str(error)) from None
        except BaseException:
            self.close()
            raise
        self._service.metrics.prompt_tokens.inc(self._prompt_tokens)

    def _emitter(self, index: int) -> Callable[[Output], None]:
        """The callback of one choice, which the engine calls on its own thread."""

        def emit(output: Output) -> None:
            # RuntimeError: the event loop has ended, and every reader with it.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._events.put_nowait, (index, output))

        return emit

    async def outputs(self, receive: Receive) -> AsyncGenerator[tuple[int, Output]]:
        """(choice, output) in the order of the engine, until every choice has ended.

        Raises:
            Disconnected: as soon as ``receive`` says that the client is gone.
            ApiError: 500 or 503 when the engine gives a choice up; the others are then aborted.
        """
        watcher = asyncio.create_task(self._watch(receive))
        try:
            while any(choice.open for choice in self._choices):
                event = await self._next()
                if event is None:
                    raise Disconnected
                index, output = event
                self._count(self._choices[index], output)
                if output.finish_reason == "error":
                    log.error("%s failed: %s", self.id, output.error)
                    raise internal(self.id)
                if output.finish_reason == "abort":
                    raise ApiError(
                        503, "The server is shutting down.", type=SERVER, code="shutting_down"
                    )
                yield index, output
        finally:
            watcher.cancel()
            self.close()

    async def _next(self) -> tuple[int, Output] | None:
        """The next event. An engine that dies with a request still on its way to it says nothing.

        Raises:
            ApiError: 503, the engine has stopped.
        """
        while True:
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(self._events.get(), LIFE_CHECK_SECONDS)
            if not self._engine.alive and self._events.empty():
                raise ApiError(503, "The engine has stopped.", type=SERVER, code="not_ready")

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._events.put_nowait(None)

    def _count(self, choice: _Choice, output: Output) -> None:
        metrics, now = self._service.metrics, time.perf_counter()
        metrics.generation_tokens.inc(output.completion_tokens - choice.completion_tokens)
        choice.completion_tokens = output.completion_tokens
        if choice.first_token is None and output.completion_tokens:
            choice.first_token = now
            metrics.time_to_first_token.observe(now - self._arrival)
        if output.finish_reason is None:
            return
        choice.open = False
        metrics.finished(output.finish_reason)
        metrics.request_seconds.observe(now - self._arrival)
        if choice.first_token is not None and output.completion_tokens > 1:
            later = output.completion_tokens - 1
            metrics.time_per_output_token.observe((now - choice.first_token) / later)

    def usage(self) -> Usage:
        """Tokens so far: every prompt once, the answers of all choices."""
        return Usage.of(
            self._prompt_tokens, sum(choice.completion_tokens for choice in self._choices)
        )

    def close(self) -> None:
        """Abort the choices that have not ended and give their places back."""
        for choice in self._choices:
            if choice.open:
                choice.open = False
                self._engine.abort(choice.request.id)
                self._service.metrics.finished("abort")
        self._service.release(self._admitted)
        self._admitted = 0
