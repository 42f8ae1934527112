"""What every HTTP request passes before a route sees it: id, key, readiness, log, last resort."""

from __future__ import annotations

import hmac
import logging
import secrets
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from oscar_jax.server.errors import SERVER, ApiError, internal
from oscar_jax.server.service import Service

log = logging.getLogger("oscar_jax.server")

OPEN_ROUTES = ("/health",)  # need no key, and answer while the server is not ready


class Gate:
    """ASGI middleware around all routes.

    It gives the request an id (in ``scope["state"]["request_id"]`` and the x-request-id header of
    the answer), demands the key, refuses with 503 until the server is ready, turns an unforeseen
    exception into a plain 500, and writes one log line and one count. The line has the id, method,
    route, status, seconds and token counts; no text of the client.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self.app = app
        self.service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = f"req-{secrets.token_hex(12)}"
        scope.setdefault("state", {})["request_id"] = request_id
        start, status = time.perf_counter(), 0

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = [*message.get("headers", ()), (b"x-request-id", request_id.encode())]
                message = {**message, "headers": headers}
            await send(message)

        try:
            refusal = self._refusal(scope)
            if refusal is not None:
                await refusal.response()(scope, receive, tagged)
            else:
                await self.app(scope, receive, tagged)
        except Exception:
            log.exception("%s failed", request_id)
            if status == 0:
                await internal(request_id).response()(scope, receive, tagged)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self.service.metrics.answered(route, status)
            seconds = time.perf_counter() - start
            line = f"{request_id} {scope['method']} {route} {status} {seconds:.3f} s"
            if usage := scope["state"].get("usage"):
                tokens = usage()
                line += f" {tokens.prompt_tokens}+{tokens.completion_tokens} tokens"
            quiet = route in ("/health", "/metrics") and status in (
                200,
                503,
            )  # probes, every few seconds
            log.log(logging.DEBUG if quiet else logging.INFO, line)

    def _refusal(self, scope: Scope) -> ApiError | None:
        if scope["path"] in OPEN_ROUTES:
            return None
        if not self._has_key(scope):
            return ApiError(
                401,
                "This server needs its API key, as the header 'Authorization: Bearer KEY'.",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        if not self.service.serving:
            return ApiError(
                503,
                f"The server is not ready: {self.service.phase}.",
                type=SERVER,
                code="not_ready",
                headers={"Retry-After": "5"},
            )
        return None

    def _has_key(self, scope: Scope) -> bool:
        key = self.service.api_key
        if key is None:
            return True
        sent = [value for name, value in scope["headers"] if name == b"authorization"]
        scheme, _, token = sent[0].partition(b" ") if len(sent) == 1 else (b"", b"", b"")
        # On bytes: the header may hold any, and the time must not tell how much of it is right.
        return hmac.compare_digest(token.strip(), key) and scheme.lower() == b"bearer"
