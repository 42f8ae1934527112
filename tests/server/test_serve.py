"""``python -m oscar_jax.serve``: flags, one-line refusals, the phases of a start, and the end."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from oscar_jax import serve
from oscar_jax.config import CONFIGS, EngineConfig, model_names
from oscar_jax.engine.canary import Verdict
from oscar_jax.engine.engine import Engine
from oscar_jax.rotation import Rotation
from oscar_jax.server import loading
from oscar_jax.server.config import API_KEY_VARIABLE, ServerConfig
from oscar_jax.server.loading import StartError, load_serving
from oscar_jax.server.service import Serving
from pallas_kernels.format import Codec
from tests.server.client import error_of
from tests.server.conftest import TINY


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """A model's YAML file: with random weights its numbers are all that is needed."""
    architecture = {
        name: value for name, value in dataclasses.asdict(TINY).items() if value is not None
    }
    fields = {
        "source": {"kind": "hub", "repo": "nobody/tiny"},
        "license": "Apache-2.0",
        "architecture": architecture,
    }
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(fields))
    return file


# ------------------------------------------------------------------------------------------ flags


def test_every_field_of_both_config_classes_is_a_flag_with_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        serve.parse(["--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    fields = [*dataclasses.fields(EngineConfig), *dataclasses.fields(ServerConfig)]
    for name in ("model", "rotation", "skip-canary", *(field.name for field in fields)):
        assert re.search(rf"--{name.replace('_', '-')}[ ,]", text), name
    assert "api-key " not in text  # the key itself is never a flag


def test_flags_reach_the_settings_and_all_are_printed() -> None:
    flags = (
        "--model smollm2-135m --kv-cache-dtype bf16 --rotation identity --max-model-len 512 "
        "--max-num-seqs 3 --mem-fraction 0.25 --port 8123 --served-model-name me"
    )
    settings = serve.parse(flags.split())
    assert settings.engine.kv_cache_dtype == "bf16"
    assert (settings.engine.max_model_len, settings.engine.max_num_seqs) == (512, 3)
    assert (settings.engine.mem_fraction, settings.rotation) == (0.25, "identity")
    assert (settings.server.port, settings.served_name) == (8123, "me")
    lines = settings.lines()
    assert "--kv-cache-dtype bf16" in lines and "--max-num-seqs 3" in lines
    fields = len(dataclasses.fields(EngineConfig)) + len(dataclasses.fields(ServerConfig))
    assert len(lines) == fields + len(("model", "rotation", "skip_canary", "load_format"))


def test_the_models_yaml_gives_the_defaults_and_flags_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = yaml.safe_load((CONFIGS / "smollm2-135m.yaml").read_text())
    text["kv"] = {"sink": 128, "recent": 320}
    (tmp_path / "own.yaml").write_text(yaml.safe_dump(text))
    monkeypatch.setattr("oscar_jax.config.CONFIGS", tmp_path)
    assert model_names() == ["own"]
    settings = serve.parse(["--model=own", "--recent", "512"])
    assert (settings.engine.sink, settings.engine.recent) == (128, 512)
    assert settings.served_name == "own"


@pytest.mark.parametrize("model", ["/a/b/qwen3-8b", "qwen3-8b", "/a/b/qwen3-8b/"])
def test_the_served_name_is_the_last_part_of_the_model(model: str) -> None:
    assert serve.Settings(model).served_name == "qwen3-8b"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--mem-fraction 0", "mem_fraction=0.0: must be above 0 and at most 1"),
        ("--mem-fraction 1.5", "mem_fraction=1.5: must be above 0 and at most 1"),
        ("--mem-fraction -1", "mem_fraction=-1.0: must be above 0 and at most 1"),
        ("--mem-fraction nan", "mem_fraction=nan: must be above 0 and at most 1"),
        ("--max-num-seqs 0", "max_num_seqs=0: must be at least 1"),
        ("--max-model-len 1", "max_model_len=1: must be at least 2 tokens"),
        ("--sink 63", "sink=63: must be a positive multiple of 64"),
        ("--port 70000", "--port 70000: must lie in 0 to 65535"),
        ("--host 192.0.2.1", "cannot listen on 192.0.2.1 port 8000"),
        ("--api-key-file /nonexistent/key", "--api-key-file /nonexistent/key: cannot be read"),
    ],
)
def test_a_bad_setting_ends_in_one_line_before_anything_is_loaded(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main(["--model", "smollm2-135m", *arguments.split()]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert said in captured.err


def test_a_port_in_use_ends_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert serve.main(["--model", "smollm2-135m", "--port", str(port)]) == 2
    assert f"error: cannot listen on 127.0.0.1 port {port}" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------- loading


def test_a_length_that_cannot_fit_names_need_have_and_the_largest_that_fits(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "free_bytes", lambda: 1_000_000)
    config = EngineConfig(max_model_len=1024, max_num_seqs=2, mem_fraction=0.25)
    with pytest.raises(StartError) as caught:
        load_serving(str(tiny), config, load_format="dummy")
    text = str(caught.value)
    assert "max_model_len=1024 needs" in text
    assert "mem_fraction=0.25 of 1 MB free leaves" in text
    # 250 kB less two slots' windows of 464 tokens x 256 bytes leaves 12,432 bytes: 2 pages of 5,120
    assert text.endswith("the largest max_model_len that fits is 320")
    fits = EngineConfig(max_model_len=320, max_num_seqs=2, mem_fraction=0.25)
    loading.plan_capacity(fits, loading.CacheShape(1, 1, 64), 1024, 1_000_000)


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("smollm", "model 'smollm' is not known; did you mean smollm2-135m"),
        ("/nonexistent/model", "/nonexistent/model: no such directory"),
    ],
)
def test_a_model_that_is_not_there_is_one_line(model: str, said: str) -> None:
    with pytest.raises(StartError, match=said):
        load_serving(model, EngineConfig())


def test_a_rotation_that_is_not_there_or_a_bad_canary_stops_the_start(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    monkeypatch.setattr(loading.Engine, "build", lambda *arguments: engine)
    start: dict[str, Any] = dict(load_format="dummy")
    config = EngineConfig(max_model_len=1024)
    with pytest.raises(StartError, match="no-such-dir: does not exist"):
        load_serving(str(tiny), config, rotation=str(tmp_path / "no-such-dir"), **start)
    damage = Verdict(9.0, 0.0, 0.0, 512, "the INT2 cache does not follow the model")
    monkeypatch.setattr(loading, "run_canary", lambda *arguments: damage)
    with pytest.raises(
        StartError, match=r"canary: KL to BF16 9\.000, .* does not follow the model"
    ):
        load_serving(str(tiny), config, rotation="hadamard", **start)


def test_skipped_layers_and_the_budget_reach_the_engine_and_are_refused_by_name(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    built: list[Rotation] = []

    def build(config: EngineConfig, loaded: Any, rotation: Rotation, *_: Any) -> Engine:
        built.append(rotation)
        return engine

    monkeypatch.setattr(loading.Engine, "build", build)
    monkeypatch.setattr(loading, "run_canary", lambda *_: Verdict(0.0, 1.0, 1.0, 1, None))
    monkeypatch.setattr(engine, "start", lambda: None)
    config = EngineConfig(max_model_len=1024, kv_skip_layers="0")
    start: dict[str, Any] = dict(load_format="dummy", rotation="hadamard")
    load_serving(str(tiny), config, **start)
    load_serving(str(tiny), dataclasses.replace(config, kv_skip_layers="", kv_bits=4.5), **start)
    assert [one.codecs for one in built] == [(None,), (Codec().with_bits(key=4, value=4),)]
    for changes, message in (
        (dict(kv_skip_layers="0-1"), "kv_skip_layers='0-1': the model's layers are 0 to 0"),
        (dict(kv_skip_layers="", kv_bits=2.25), "kv_bits=2.25: must lie in 2.5 to 16"),
    ):
        with pytest.raises(StartError, match=message):
            load_serving(str(tiny), dataclasses.replace(config, **changes), **start)


# ---------------------------------------------------------------------------- the running command


class Command:
    """``main`` on this thread, and a client on another that tells it when to stop."""

    def __init__(self, load: Callable[..., Serving]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._load = load

    def run(self, client: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> int:
        monkeypatch.setattr(serve, "load_serving", self._load)
        monkeypatch.setattr(serve, "_log_to_stderr", lambda level: None)
        failures: list[BaseException] = []

        def act() -> None:
            try:
                self.until(lambda: httpx.get(f"{self.url}/health").status_code in (200, 503))
                client()
            except BaseException as failure:
                failures.append(failure)
                os.kill(os.getpid(), signal.SIGTERM)

        other = threading.Thread(target=act)
        other.start()
        code = serve.main(["--model", "tiny", "--port", str(self.port)])
        other.join()
        if failures:
            raise failures[0]
        return code

    def until(self, condition: Callable[[], bool], seconds: float = 30.0) -> None:
        end = time.monotonic() + seconds
        while True:
            try:
                if condition():
                    return
            except httpx.TransportError:
                pass
            assert time.monotonic() < end, "it took too long"
            time.sleep(0.02)


def test_while_the_model_loads_health_tells_the_phase_and_damage_closes_the_port(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = threading.Event()

    def load(*arguments: Any, progress: Callable[[str], None], **options: Any) -> Serving:
        progress("canary: comparing")
        assert seen.wait(60)
        raise StartError("canary: the INT2 cache\ndoes not follow the model")

    command = Command(load)

    def client() -> None:
        command.until(
            lambda: (
                httpx.get(f"{command.url}/health").json()
                == {"status": "starting", "phase": "canary: comparing"}
            )
        )
        refused = httpx.post(f"{command.url}/v1/completions", json={})
        assert (refused.status_code, error_of(refused)["code"]) == (503, "not_ready")
        seen.set()

    assert command.run(client, monkeypatch) == 1
    assert capsys.readouterr().err.endswith(
        "error: canary: the INT2 cache does not follow the model\n"
    )
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{command.url}/health")


@pytest.mark.parametrize(("host", "warned"), [("0.0.0.0", True), ("127.0.0.1", False)])
def test_an_address_that_others_reach_without_a_key_is_a_loud_warning(
    host: str,
    warned: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def load(*arguments: Any, **options: Any) -> Serving:
        raise StartError("enough")

    monkeypatch.setattr(serve, "load_serving", load)
    monkeypatch.setattr(serve, "_log_to_stderr", lambda level: None)
    monkeypatch.delenv(API_KEY_VARIABLE, raising=False)
    assert serve.main(["--model", "tiny", "--host", host, "--port", "0"]) == 1
    assert ("ANYBODY" in caplog.text) == warned
    caplog.clear()
    monkeypatch.setenv(API_KEY_VARIABLE, "key")
    assert serve.main(["--model", "tiny", "--host", host, "--port", "0"]) == 1
    assert "ANYBODY" not in caplog.text


def listening_ports(pid: int) -> set[int]:
    """TCP ports on which a process listens, as Linux tells them."""
    sockets = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}
    ports = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def test_after_a_stop_signal_an_answer_under_way_ends_well_and_the_exit_code_is_0(
    monkeypatch: pytest.MonkeyPatch, engine: Engine
) -> None:
    own = Engine(engine.runner, engine.tokenizer)  # its thread ends with the command
    own.start()

    def load(*arguments: Any, **options: Any) -> Serving:
        return Serving(own, engine.tokenizer, own.max_model_len, {})

    command = Command(load)

    def client() -> None:
        command.until(lambda: httpx.get(f"{command.url}/health").status_code == 200)
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 200, "ignore_eos": True}
        with httpx.stream(
            "POST", f"{command.url}/v1/completions", json=body | {"stream": True}, timeout=60
        ) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: {")
            os.kill(os.getpid(), signal.SIGTERM)
            assert [line for line in lines if line][-1] == "data: [DONE]"

    assert command.run(client, monkeypatch) == 0
    assert not own.alive


def test_an_engine_that_dies_ends_the_process_with_an_error(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, capsys: pytest.CaptureFixture[str]
) -> None:
    own = Engine(engine.runner, engine.tokenizer)

    def broken() -> None:
        raise MemoryError("no more memory")

    monkeypatch.setattr(own, "step", broken)
    own.start()

    def load(*arguments: Any, **options: Any) -> Serving:
        return Serving(own, engine.tokenizer, own.max_model_len, {})

    command = Command(load)

    def client() -> None:
        command.until(lambda: httpx.get(f"{command.url}/health").status_code == 200)
        body = {"model": "tiny", "prompt": "abc", "max_tokens": 8}
        answer = httpx.post(f"{command.url}/v1/completions", json=body, timeout=60)
        assert answer.status_code in (500, 503)

    assert command.run(client, monkeypatch) == 1
    assert "error: the engine has stopped" in capsys.readouterr().err


@pytest.fixture
def process(tiny: Path, tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The real command in a process of its own, on a model of random weights."""
    port = free_port()
    flags = (
        f"--model {tiny} --load-format dummy --rotation hadamard --max-model-len 600 "
        f"--max-num-seqs 1 --prefill-chunk 128 --steps-per-dispatch 1 --port {port} "
        "--kv-bits 3"  # 2.5 bits and one more of the keys
    )
    command = [sys.executable, "-m", "oscar_jax.serve", *flags.split()]
    environment = os.environ | {
        "OSCAR_CACHE": str(tmp_path),
        API_KEY_VARIABLE: "very-secret",
        # what is compiled here runs for a second: do not optimise it for half a minute
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as running:
        yield running, f"http://127.0.0.1:{port}"
        running.kill()


def test_the_command_starts_answers_and_stops(
    process: tuple[subprocess.Popen[str], str],
) -> None:
    running, url = process
    phases = set()
    for _ in range(1200):
        try:
            health = httpx.get(f"{url}/health")
        except httpx.TransportError:
            pass
        else:
            if health.status_code == 200:
                break
            assert health.status_code == 503
            phases.add(health.json()["phase"].split(" ")[0])
        assert running.poll() is None
        time.sleep(0.1)
    assert health.json() == {"status": "ok"}
    assert phases & {"compiling", "canary:"}
    if sys.platform == "linux":
        assert listening_ports(running.pid) == {int(url.rpartition(":")[2])}
    body = {"model": "tiny.yaml", "prompt": "MARKER", "max_tokens": 4, "temperature": 0}
    assert httpx.post(f"{url}/v1/completions", json=body).status_code == 401
    with httpx.Client(headers={"authorization": "Bearer very-secret"}, timeout=60) as http:
        answer = http.post(f"{url}/v1/completions", json=body).json()
        assert answer["usage"]["completion_tokens"] == 4
        version = http.get(f"{url}/version").json()
        assert version["rotation"] == "hadamard" and version["bits_per_element"] == 3
        assert "oscar:compiles_after_ready_total" in http.get(f"{url}/metrics").text
    running.send_signal(signal.SIGTERM)
    output, _ = running.communicate(timeout=30)
    assert running.returncode == 0
    assert "--kv-cache-dtype int2" in output and "3 bits per element" in output
    assert "KV pages: keys 3 and values 2 bits" in output
    assert "kv_bits: the rotation has no measured sensitivities" in output
    assert "canary: KL to BF16" in output and f"ready: {url}" in output
    assert "very-secret" not in output and "MARKER" not in output
