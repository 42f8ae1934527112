"""The routes. None of them waits for anything but the network, a worker thread or the engine."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from oscar_jax.server import protocol
from oscar_jax.server.answers import ChatShape, CompletionShape, EventStream, Shape, whole_answer
from oscar_jax.server.errors import ApiError, shortened
from oscar_jax.server.gate import Gate
from oscar_jax.server.prompts import Planned, plan_chat, plan_completion
from oscar_jax.server.responses import Model, ModelList
from oscar_jax.server.run import Run
from oscar_jax.server.service import Service, Serving


def create_app(service: Service) -> FastAPI:
    """The ASGI application of one server: OpenAI's routes, /health, /metrics and /version.

    No documentation pages and no CORS headers: a web page of another origin gets nothing.
    """
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(Gate, service=service)
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(HTTPException, _http_exception)

    @app.get("/health")
    async def health() -> Response:
        status, body = service.health()
        return JSONResponse(body, status)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(
            service.metrics.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8"
        )

    @app.get("/version")
    async def version() -> Response:
        return JSONResponse(_serving(service).report)

    @app.get("/v1/models")
    async def models() -> Response:
        return _json(ModelList(data=[_model(service)]))

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        _check_model(service, name)
        return _json(_model(service))

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        body = await _body(request, service)
        asked = await service.in_worker(protocol.parse, body, protocol.CompletionRequest)
        _check_model(service, asked.model)
        serving = _serving(service)
        planned = await service.in_worker(
            plan_completion, asked, serving.tokenizer, serving.max_model_len
        )
        shape = CompletionShape(request.state.request_id, service.model)
        return await _generate(request, service, serving, asked, planned, shape)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        body = await _body(request, service)
        asked = await service.in_worker(protocol.parse, body, protocol.ChatRequest)
        _check_model(service, asked.model)
        serving = _serving(service)
        planned = await service.in_worker(
            plan_chat, asked, serving.tokenizer, serving.max_model_len
        )
        shape = ChatShape(request.state.request_id, service.model)
        return await _generate(request, service, serving, asked, planned, shape)

    return app


async def _generate(
    request: Request,
    service: Service,
    serving: Serving,
    asked: protocol.Generation,
    planned: list[Planned],
    shape: Shape,
) -> Response:
    run = Run(service, serving, request.state.request_id, planned)
    request.state.usage = run.usage  # for the log
    if asked.stream:
        return EventStream(run, shape, asked.wants_usage)
    return await whole_answer(run, shape, request.receive)


async def _body(request: Request, service: Service) -> bytes:
    """The body of a JSON request, its bytes counted as they come.

    Raises:
        ApiError: 415 for another content type, 413 beyond the limit, 408 for a slow client.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, "Content-Type must be application/json.", code="invalid_content_type")
    limit = service.config.max_body_mib * 2**20
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise _too_large(service)
    body = bytearray()
    try:
        async with asyncio.timeout(service.config.body_timeout):
            async for piece in request.stream():
                body += piece
                if len(body) > limit:
                    raise _too_large(service)
    except TimeoutError:
        raise ApiError(
            408,
            f"The body did not arrive within {service.config.body_timeout:g} seconds.",
            code="request_timeout",
            headers={"Connection": "close"},
        ) from None
    return bytes(body)


def _too_large(service: Service) -> ApiError:
    return ApiError(
        413,
        f"The body is larger than {service.config.max_body_mib} MiB.",
        code="request_too_large",
        headers={"Connection": "close"},  # the rest of it is not read
    )


def _check_model(service: Service, name: str) -> None:
    """A client's model is compared with the served name and used for nothing else."""
    if name != service.model:
        raise ApiError(
            404,
            f"The model {shortened(name)} does not exist; this server serves {service.model!r}.",
            param="model",
            code="model_not_found",
        )


def _model(service: Service) -> Model:
    return Model(
        id=service.model,
        created=service.created,
        max_model_len=_serving(service).max_model_len,
    )


def _serving(service: Service) -> Serving:
    serving = service.serving
    if serving is None:  # the engine died after the request had passed the gate
        raise ApiError(503, "The engine has stopped.", type="server_error", code="not_ready")
    return serving


def _json(model: Model | ModelList) -> Response:
    return Response(model.model_dump_json(), media_type="application/json")


async def _api_error(request: Request, error: Exception) -> Response:
    return error.response() if isinstance(error, ApiError) else Response(status_code=500)


async def _http_exception(request: Request, error: Exception) -> Response:
    """Starlette's own 404 and 405 in OpenAI's shape."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    headers = error.headers if isinstance(error, HTTPException) else None
    if status == 404:
        refusal = ApiError(404, "There is no such route.", code="not_found")
    elif status == 405:
        allowed = (headers or {}).get("Allow", "another method")
        message = f"This route does not take {request.method}; it takes {allowed}."
        refusal = ApiError(405, message, code="method_not_allowed", headers=headers)
    else:
        refusal = ApiError(status, "The request cannot be served.", headers=headers)
    return refusal.response()
