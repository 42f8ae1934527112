"""Requests that are wrong get an OpenAI-style 4xx, and the server serves on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.client import MAX_MODEL_LEN, MODEL, Server, error_of

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}
USER = [{"role": "user", "content": "hi"}]
IMAGE = {"type": "image_url", "image_url": {"url": "http://169.254.169.254/latest"}}
TOOL = {
    "type": "function",
    "function": {
        "name": "f",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "string", "pattern": "("}},
        },
    },
}


def nested(depth: int) -> bytes:
    head = f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"hi"}}],"tools":['
    return head.encode() + b'{"a":' * depth + b"1" + b"}" * depth + b"]}"


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{", None),
        (b"[]", None),
        (b"", None),
        (b"null", None),
        (b"\xff", None),
        ({"messages": "hi"}, "model"),
        ({"model": MODEL, "messages": "hi"}, "messages"),
        ({"model": MODEL}, "messages"),
        ({"messages": USER}, "model"),
        ({"model": None, "messages": USER}, "model"),
        ({"model": MODEL, "messages": [{"role": "wizard", "content": "x"}]}, "messages"),
        ({"model": MODEL, "messages": [{"role": "user", "content": [IMAGE]}]}, "messages"),
        ({"model": MODEL, "messages": USER, "no_such_field": 1}, "no_such_field"),
        ({"model": MODEL, "messages": USER, "temperature": float("nan")}, "temperature"),
        ({"model": MODEL, "messages": USER, "n": 0}, "n"),
        ({"model": MODEL, "messages": USER, "n": 100_000}, "n"),
        ({"model": MODEL, "messages": USER, "best_of": 3}, "best_of"),
        ({"model": MODEL, "messages": USER, "logprobs": True, "top_logprobs": 2}, "logprobs"),
        ({"model": MODEL, "messages": USER, "top_logprobs": 21}, "top_logprobs"),
        ({"model": MODEL, "messages": USER, "tools": [TOOL]}, "tools"),
        ({"model": MODEL, "messages": USER, "tools": [{"type": "something"}]}, "tools"),
        ({"model": MODEL, "messages": USER, "prompt_embeds": "AAAA"}, "prompt_embeds"),
        ({"model": MODEL, "messages": USER, "chat_template": "{{ 1 }}"}, "chat_template"),
        (
            {"model": MODEL, "messages": USER, "chat_template_kwargs": {"tokenize": True}},
            "chat_template_kwargs",
        ),
        (
            {"model": MODEL, "messages": USER, "response_format": {"type": "json_object"}},
            "response_format",
        ),
        ({"model": MODEL, "messages": USER, "guided_regex": "(a+)+$"}, "guided_regex"),
        ({"model": MODEL, "messages": USER, "stop_token_ids": list(range(9))}, "stop_token_ids"),
        (nested(10_000), None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_malformed_chat_request_is_400_and_the_next_one_is_served(
    server: Server, body: bytes | dict[str, Any], param: str | None, stream: bool
) -> None:
    if isinstance(body, dict):
        body = json.dumps(body | {"stream": stream}).encode()
    response = server.post(CHAT, content=body, headers=JSON)
    assert response.status_code == 400
    error = error_of(response)
    assert error["type"] == "invalid_request_error"
    if param is not None:
        assert error["param"] == param
        assert param in error["message"]
    assert server.chat(max_tokens=1).status_code == 200


@pytest.mark.parametrize("name", ["gpt-4", "../../etc/passwd", "Tiny", "", "tiny/", "x" * 100_000])
def test_a_model_of_another_name_is_404_whatever_it_looks_like(server: Server, name: str) -> None:
    for response in (server.complete(model=name), server.chat(model=name)):
        assert response.status_code == 404
        error = error_of(response)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert len(error["message"]) < 200
    for name in ("gpt-4", "..%2F..%2Fetc%2Fpasswd", "a/b/c"):
        response = server.get(f"/v1/models/{name}")
        assert (response.status_code, error_of(response)["code"]) == (404, "model_not_found")


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_another_content_type_is_415(server: Server, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = server.post(CHAT, content=b"{}", headers=headers)
    assert response.status_code == 415
    assert "application/json" in error_of(response)["message"]
    accepted = {"content-type": "Application/JSON; charset=utf-8"}
    assert server.post(CHAT, content=b"{}", headers=accepted).status_code == 400


def test_a_wrong_method_is_405_and_an_unknown_route_404(server: Server) -> None:
    for method, path in (("GET", CHAT), ("PUT", "/v1/completions"), ("POST", "/v1/models")):
        response = server.request(method, path)
        assert response.status_code == 405
        assert error_of(response)["code"] == "method_not_allowed"
    for path in ("/", "/v1", "/docs", "/redoc", "/openapi.json", "/v1/embeddings", "/flush_cache"):
        response = server.get(path)
        assert (response.status_code, error_of(response)["code"]) == (404, "not_found")


def test_text_parts_are_accepted(server: Server) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    in_parts = server.chat(messages=[{"role": "user", "content": parts}])
    assert in_parts.json()["choices"] == server.chat("a\nb").json()["choices"]


def test_the_models_route_names_the_model_and_its_context(server: Server) -> None:
    (entry,) = server.get("/v1/models").json()["data"]
    assert (entry["id"], entry["max_model_len"]) == (MODEL, MAX_MODEL_LEN)
    assert server.get(f"/v1/models/{MODEL}").json() == entry


def test_version_is_what_the_start_reported(server: Server) -> None:
    assert server.get("/version").json() == {"version": "test"}
