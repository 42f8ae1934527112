"""What happens before a route: readiness, the key, request ids, and nothing of clients in logs."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute

from oscar_jax.server.app import create_app
from oscar_jax.server.config import API_KEY_VARIABLE, ServerConfig
from oscar_jax.server.service import Service
from tests.server.client import MODEL, Server, error_of

KEY = "right-key"


def starting(key: bytes | None = None, phase: str = "starting") -> Server:
    """A server whose model is not loaded yet."""
    service = Service(MODEL, ServerConfig(), key)
    service.phase = phase
    return Server(service, create_app(service))


def test_health_is_503_with_the_phase_until_the_server_is_ready() -> None:
    response = starting(phase="loading weights").get("/health")
    assert response.status_code == 503
    assert response.json() == {"status": "starting", "phase": "loading weights"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/models"),
        ("GET", "/metrics"),
        ("GET", "/version"),
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("GET", "/nowhere"),
    ],
)
def test_every_other_path_is_503_until_then(method: str, path: str) -> None:
    response = starting(phase="calibrating").request(method, path)
    assert response.status_code == 503
    assert response.headers["retry-after"] == "5"
    error = error_of(response)
    assert (error["type"], error["code"]) == ("server_error", "not_ready")
    assert "calibrating" in error["message"]


def test_every_route_but_health_needs_the_key() -> None:
    server = starting(KEY.encode())
    routes = [route for route in server.app.routes if isinstance(route, APIRoute)]
    assert (
        len(routes) == len(server.app.routes) == 7
    )  # no documentation pages, no other kind of route
    for route in routes:
        method = min(route.methods or ())
        response = server.request(method, route.path.replace("{name:path}", "m"))
        if route.path == "/health":
            assert response.status_code == 503
        else:
            assert response.status_code == 401, route.path
            assert response.headers["www-authenticate"] == "Bearer"
            assert error_of(response)["code"] == "invalid_api_key"


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer wrong",
        b"Bearer right-key2",
        b"Basic right-key",
        b"right-key",
        "Bearer clé".encode("latin-1"),
        "Bearer ключ".encode(),
        b"Bearer \xff\xfe",
    ],
)
def test_a_wrong_key_of_any_bytes_is_401(header: bytes) -> None:
    response = starting(KEY.encode()).get("/v1/models", headers=[(b"authorization", header)])
    assert response.status_code == 401
    assert KEY not in response.text


def test_the_right_key_passes_and_may_be_of_any_script() -> None:
    for key in (KEY, "ключ-🔑"):
        for scheme in (b"Bearer ", b"bearer "):
            header = [(b"authorization", scheme + key.encode())]
            assert starting(key.encode()).get("/v1/models", headers=header).status_code == 503


def test_an_unknown_route_or_method_gets_openais_error_shape() -> None:
    response = starting().post("/health")
    assert response.status_code == 405
    assert response.headers["allow"] == "GET"
    assert "does not take POST; it takes GET" in error_of(response)["message"]


def test_a_page_of_another_origin_gets_no_cors_headers() -> None:
    headers = {
        "Origin": "http://evil.example",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }
    for path in ("/health", "/v1/chat/completions"):
        response = starting().request("OPTIONS", path, headers=headers)
        assert response.status_code in (405, 503)
        assert not any(name.startswith("access-control") for name in response.headers)


def test_an_unforeseen_exception_is_a_plain_500_with_the_id_that_the_log_has(
    server: Server, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> bytes:
        raise RuntimeError("inner detail")

    monkeypatch.setattr(server.service.metrics, "exposition", broken)
    with caplog.at_level(logging.INFO, "oscar_jax.server"):
        response = server.get("/metrics")
    assert response.status_code == 500
    error = error_of(response)
    request_id = response.headers["x-request-id"]
    assert request_id in error["message"] and "inner detail" not in response.text
    assert error["type"] == "server_error"
    assert f"{request_id} failed" in caplog.text and "inner detail" in caplog.text
    assert server.complete().status_code == 200


def test_the_log_has_ids_and_counts_and_no_text_of_the_client(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "oscar_jax"):
        starting().post("/MARKER?q=MARKER", content="MARKER", headers={"X-M": "MARKER"})
        assert server.complete(prompt="MARKER", max_tokens=3, user="MARKER").status_code == 200
        assert server.chat("MARKER", stream=True, stop="MARKER").status_code == 200
        assert server.complete(prompt="MARKER" * 200).status_code == 400
        assert server.complete(model="MARKER").status_code == 404
        assert server.complete(MARKER=1).status_code == 400
    assert "POST /v1/completions 200" in caplog.text and "6+3 tokens" in caplog.text
    assert "MARKER" not in caplog.text


def test_requests_are_counted_by_route_and_status_never_by_a_clients_path() -> None:
    server = starting()
    for path in ("/health", "/health", "/MARKER"):
        server.get(path)
    text = server.service.metrics.exposition().decode()
    line = f'oscar:http_requests_total{{model_name="{MODEL}",route="/health",status="503"}} 2.0'
    assert line in text
    assert "MARKER" not in text


def test_the_key_comes_from_a_file_or_the_environment_and_must_be_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    assert ServerConfig().api_key() is None
    monkeypatch.setenv(API_KEY_VARIABLE, " of-the-environment ")
    assert ServerConfig().api_key() == b"of-the-environment"
    file = tmp_path / "key"
    file.write_text("of-the-file\nsecond line\n")
    assert ServerConfig(api_key_file=file).api_key() == b"of-the-file"
    for text in ("", "\n", "two words"):
        file.write_text(text)
        with pytest.raises(ValueError, match="must be one word"):
            ServerConfig(api_key_file=file).api_key()
    with pytest.raises(ValueError, match="cannot be read"):
        ServerConfig(api_key_file=tmp_path / "missing").api_key()
    monkeypatch.setenv(API_KEY_VARIABLE, "")
    with pytest.raises(ValueError, match="OSCAR_API_KEY: the key must be one word"):
        ServerConfig().api_key()


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("port", 70_000, "--port 70000: must lie in 0 to 65535"),
        ("port", -1, "--port -1"),
        ("max_body_mib", 0, "--max-body-mib 0: must be at least 1"),
        ("body_timeout", 0.0, "--body-timeout 0.0: must be positive"),
        ("max_in_flight", 0, "--max-in-flight 0: must be at least 1"),
        ("log_level", "loud", "--log-level loud: must be"),
        ("served_model_name", "", "--served-model-name"),
    ],
)
def test_a_setting_out_of_range_is_refused_by_its_flag(field: str, value: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ServerConfig(**{field: value})
