"""``python -m oscar_jax.serve --model NAME_OR_PATH``: an OpenAI-compatible server.

The socket answers from the first second, with 503 and the phase of the start in /health and 503 on
everything else. Inference opens only after the canary has passed; if it finds damage, the socket is
closed and the process ends with one line and exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from oscar_jax import device
from oscar_jax.config import EngineConfig, model_entry, model_names
from oscar_jax.server.app import create_app
from oscar_jax.server.config import ServerConfig
from oscar_jax.server.listen import HttpServer, bind, is_loopback, url_of
from oscar_jax.server.loading import StartError, load_serving
from oscar_jax.server.service import Service

log = logging.getLogger("oscar_jax.server")

PROGRAM = "python -m oscar_jax.serve"
CHECK_SECONDS = 0.25  # between looks at the start and at the engine's thread


@dataclasses.dataclass(frozen=True)
class Settings:
    """Serve a model over an OpenAI-compatible HTTP API, from a 2-bit KV cache."""

    model: str
    """A name in configs/, a Hugging Face directory or a GGUF file."""
    rotation: str = "auto"
    """auto (a matching checkpoint, else calibrate now), DIR, hadamard or identity."""
    skip_canary: bool = False
    """Serve without comparing the cache with BF16 first; /health then says degraded."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: random weights, for speed tests without a download."""
    engine: Annotated[EngineConfig, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=EngineConfig
    )
    server: Annotated[ServerConfig, tyro.conf.arg(name="")] = dataclasses.field(
        default_factory=ServerConfig
    )

    @property
    def served_name(self) -> str:
        """The name that clients use: --served-model-name, else the last part of --model."""
        return self.server.served_model_name or Path(self.model).resolve().name

    def lines(self) -> list[str]:
        """Every setting as its flag and value; no secret is among them."""
        flat = dataclasses.asdict(self)
        flat |= flat.pop("engine") | flat.pop("server")
        return [f"--{name.replace('_', '-')} {value}" for name, value in flat.items()]


def parse(arguments: Sequence[str] | None = None) -> Settings:
    """The command line, over the defaults of the model's YAML file.

    Raises:
        ValueError: a value out of range, named.
        SystemExit: --help, or a flag that does not exist or has a value of another type.
    """
    first = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    first.add_argument("--model")
    model = first.parse_known_args(arguments)[0].model
    if model is None:
        return tyro.cli(Settings, prog=PROGRAM, args=arguments)
    kv = dict(model_entry(model).kv) if model in model_names() else {}
    if "dtype" in kv:
        kv["kv_cache_dtype"] = kv.pop("dtype")
    default = Settings(model, engine=EngineConfig(**kv))
    return tyro.cli(Settings, prog=PROGRAM, args=arguments, default=default)


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until a stop signal; returns the exit code, 0 only after one."""
    device.prepare()
    try:
        settings = parse(arguments)
        key = settings.server.api_key()
        listener = bind(settings.server.host, settings.server.port)
    except ValueError as error:
        return _fail(error, 2)
    _log_to_stderr(settings.server.log_level)
    print("\n".join(["settings:", *(f"  {line}" for line in settings.lines())]), flush=True)
    if key is None and not is_loopback(listener):
        log.warning(
            "ANYBODY who can reach %s may use this server: it has no API key "
            "(--api-key-file or OSCAR_API_KEY)",
            url_of(listener),
        )
    return asyncio.run(_serve(settings, key, listener))


async def _serve(settings: Settings, key: bytes | None, listener: socket.socket) -> int:
    service = Service(settings.served_name, settings.server, key)
    http = HttpServer(create_app(service))
    loop = asyncio.get_running_loop()

    def stop() -> None:
        http.force_exit = http.should_exit  # a second signal does not wait for answers
        http.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    start = Start(settings, service)
    start.begin()
    watch = asyncio.create_task(_watch(start, service, http, url_of(listener)))
    await http.serve(sockets=[listener])
    problem = await watch
    service.close()
    serving = service.started
    if serving is not None:
        serving.engine.stop()
    code = 0 if problem is None else _fail(problem, 1)
    if start.unfinished and problem is None:
        # A stop during the start: a thread deep inside XLA cannot be asked to end.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


async def _watch(start: Start, service: Service, http: HttpServer, url: str) -> str | None:
    """Follow the start, then the engine; what went wrong, or None after a stop signal."""
    announced = False
    while not http.should_exit:
        await asyncio.sleep(CHECK_SECONDS)
        problem = start.error
        if service.started is not None and not service.started.engine.alive:
            problem = "the engine has stopped; the log says why"
        if problem is not None:
            http.should_exit = True
            return problem
        if service.serving is not None and not announced:
            announced = True
            log.info("ready: %s serves %s", url, service.model)
    return None


class Start:
    """The start, on a thread of its own while the socket answers 503."""

    def __init__(self, settings: Settings, service: Service) -> None:
        self.error: str | None = None
        self._settings, self._service = settings, service
        self._thread = threading.Thread(target=self._run, name="start", daemon=True)

    def begin(self) -> None:
        """Start the thread."""
        self._thread.start()

    @property
    def unfinished(self) -> bool:
        """The thread still works."""
        return self._thread.is_alive()

    def _phase(self, text: str) -> None:
        self._service.phase = text
        log.info("%s", text)

    def _run(self) -> None:
        settings = self._settings
        try:
            serving = load_serving(
                settings.model,
                settings.engine,
                rotation=settings.rotation,
                load_format=settings.load_format,
                skip_canary=settings.skip_canary,
                progress=self._phase,
            )
            self._service.open(serving)
        except StartError as error:
            self.error = str(error)
        except BaseException as error:
            log.exception("the start failed")
            self.error = f"the start failed: {type(error).__name__}: {error}"


def _log_to_stderr(level: str) -> None:
    """Our own lines, whatever the libraries did to the root logger when they were imported."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    ours = logging.getLogger("oscar_jax")
    ours.addHandler(handler)
    ours.setLevel(level.upper())
    ours.propagate = False


def _fail(error: object, code: int) -> int:
    """One line on stderr, whatever the error's own text looks like."""
    print(f"error: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main())
