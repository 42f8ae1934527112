"""Errors as OpenAI's API states them: ``{"error": {"message", "type", "param", "code"}}``."""

from __future__ import annotations

import json
from collections.abc import Mapping

from starlette.responses import Response

INVALID = "invalid_request_error"
SERVER = "server_error"


class ApiError(Exception):
    """A refusal that the client may read.

    Args:
        status: HTTP status, 4xx or 5xx.
        message: what is wrong and what would be right; never a part of the prompt.
        param: the request field at fault.
        code: a word that programs can compare, such as ``context_length_exceeded``.
        type: OpenAI's error type.
        headers: further response headers, such as Retry-After (seconds).
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        type: str = INVALID,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.type = type
        self.headers = dict(headers or {})

    def body(self) -> str:
        """The JSON of this error."""
        fields = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return json.dumps({"error": fields}, ensure_ascii=False)

    def response(self) -> Response:
        """The HTTP response of this error."""
        return Response(
            self.body(), self.status, headers=self.headers, media_type="application/json"
        )


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """400: the request can never succeed as it is."""
    return ApiError(400, message, param=param, code=code)


def internal(request_id: str) -> ApiError:
    """500: what happened is in the server's log, under the request's id."""
    return ApiError(
        500,
        f"The server failed on this request; its log has the reason under {request_id}.",
        type=SERVER,
        code="internal_error",
    )


def shortened(text: str, limit: int = 64) -> str:
    """A client's text, quoted for an error message: never longer than ``limit`` characters."""
    return repr(text) if len(text) <= limit else repr(text[:limit]) + "..."
