"""From the engine's outputs to OpenAI's answers, whole or as a stream of events."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import Protocol

from pydantic import BaseModel
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from oscar_jax.engine.request import Output
from oscar_jax.server import responses
from oscar_jax.server.errors import ApiError, internal
from oscar_jax.server.responses import FinishReason, Usage
from oscar_jax.server.run import Disconnected, Run

log = logging.getLogger("oscar_jax.server")

Ended = tuple[str, FinishReason]  # a choice's whole text and why it ended


class Shape(Protocol):
    """One endpoint's way to write answers."""

    def opening(self, choices: int) -> Iterator[BaseModel]:
        """Events before any text."""
        ...

    def event(self, index: int, text: str, reason: FinishReason | None) -> BaseModel:
        """The next increment of a choice, or its end."""
        ...

    def closing(self, usage: Usage) -> BaseModel:
        """The event of the token counts."""
        ...

    def whole(self, ended: Sequence[Ended], usage: Usage) -> BaseModel:
        """The answer that is not streamed."""
        ...


class CompletionShape:
    """``/v1/completions``."""

    def __init__(self, request_id: str, model: str) -> None:
        self.id = request_id.replace("req-", "cmpl-")
        self.model = model
        self.created = responses.now()

    def _with(
        self, choices: list[responses.CompletionChoice], usage: Usage | None = None
    ) -> responses.Completion:
        return responses.Completion(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage
        )

    def opening(self, choices: int) -> Iterator[BaseModel]:
        return iter(())

    def event(self, index: int, text: str, reason: FinishReason | None) -> BaseModel:
        choice = responses.CompletionChoice(index=index, text=text, finish_reason=reason)
        return self._with([choice])

    def closing(self, usage: Usage) -> BaseModel:
        return self._with([], usage)

    def whole(self, ended: Sequence[Ended], usage: Usage) -> BaseModel:
        choices = [
            responses.CompletionChoice(index=index, text=text, finish_reason=reason)
            for index, (text, reason) in enumerate(ended)
        ]
        return self._with(choices, usage)


class ChatShape:
    """``/v1/chat/completions``."""

    def __init__(self, request_id: str, model: str) -> None:
        self.id = request_id.replace("req-", "chatcmpl-")
        self.model = model
        self.created = responses.now()

    def _chunk(
        self, choices: list[responses.ChatDeltaChoice], usage: Usage | None = None
    ) -> responses.ChatCompletionChunk:
        return responses.ChatCompletionChunk(
            id=self.id, created=self.created, model=self.model, choices=choices, usage=usage
        )

    def opening(self, choices: int) -> Iterator[BaseModel]:
        for index in range(choices):
            delta = responses.ChatDelta(role="assistant", content="")
            yield self._chunk([responses.ChatDeltaChoice(index=index, delta=delta)])

    def event(self, index: int, text: str, reason: FinishReason | None) -> BaseModel:
        delta = responses.ChatDelta(content=text or None)
        choice = responses.ChatDeltaChoice(index=index, delta=delta, finish_reason=reason)
        return self._chunk([choice])

    def closing(self, usage: Usage) -> BaseModel:
        return self._chunk([], usage)

    def whole(self, ended: Sequence[Ended], usage: Usage) -> BaseModel:
        return responses.ChatCompletion(
            id=self.id,
            created=self.created,
            model=self.model,
            choices=[
                responses.ChatChoice(
                    index=index,
                    message=responses.ChatMessage(content=text),
                    finish_reason=reason,
                )
                for index, (text, reason) in enumerate(ended)
            ],
            usage=usage,
        )


async def whole_answer(run: Run, shape: Shape, receive: Receive) -> Response:
    """Wait for every choice and answer at once; aborts them if the client goes away."""
    texts = [""] * len(run)
    reasons: list[FinishReason] = ["length"] * len(run)
    try:
        async with aclosing(run.outputs(receive)) as outputs:
            async for index, output in outputs:
                texts[index] += output.text
                reasons[index] = _reason(output) or reasons[index]
    except Disconnected:
        return Response(status_code=499)  # for the log: nobody is there to read it
    ended = list(zip(texts, reasons, strict=True))
    body = shape.whole(ended, run.usage()).model_dump_json()
    return Response(body, media_type="application/json")


def _reason(output: Output) -> FinishReason | None:
    """Why a choice ended; the engine's other two reasons never get here (see Run.outputs)."""
    return output.finish_reason if output.finish_reason in ("stop", "length") else None


class EventStream(Response):
    """Server-sent events of a run, each ``data: JSON`` and a blank line, the last [DONE].

    A failure after the first byte becomes an event with an "error", then [DONE]. However the
    stream ends, the run is closed: a client that goes away frees its pages.
    """

    media_type = "text/event-stream"

    def __init__(self, run: Run, shape: Shape, wants_usage: bool) -> None:
        # Buffering proxies would hold the events back.
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._run = run
        self._shape = shape
        self._wants_usage = wants_usage

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(
                {
                    "type": "http.response.start",
                    "status": self.status_code,
                    "headers": self.raw_headers,
                }
            )
            async with aclosing(self._events(receive)) as events:
                async for data in events:
                    body = f"data: {data}\n\n".encode()
                    await send({"type": "http.response.body", "body": body, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._run.close()

    async def _events(self, receive: Receive) -> AsyncGenerator[str]:
        # "usage" is null in every event but the last if it was asked for, else absent.
        hidden = None if self._wants_usage else {"usage"}
        try:
            for event in self._shape.opening(len(self._run)):
                yield event.model_dump_json(exclude=hidden)
            async with aclosing(self._run.outputs(receive)) as outputs:
                async for index, output in outputs:
                    if output.text or output.finish_reason:
                        event = self._shape.event(index, output.text, _reason(output))
                        yield event.model_dump_json(exclude=hidden)
            if self._wants_usage:
                yield self._shape.closing(self._run.usage()).model_dump_json()
        except Disconnected:
            return
        except ApiError as error:
            yield error.body()
        except Exception:
            log.exception("%s failed", self._run.id)
            yield internal(self._run.id).body()
        yield "[DONE]"
