"""The listening socket and the HTTP server on it."""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

log = logging.getLogger("oscar_jax.server")

GRACE_SECONDS = 5  # after a stop signal, for answers that are under way
KEEP_ALIVE_SECONDS = 30


def bind(host: str, port: int) -> socket.socket:
    """The socket to serve on.

    Raises:
        ValueError: the address cannot be taken, in one line.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ValueError(f"cannot listen on {host} port {port}: {error}") from None
    return listener


def url_of(listener: socket.socket) -> str:
    """Where the socket answers."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can reach the socket."""
    return ipaddress.ip_address(listener.getsockname()[0]).is_loopback


class HttpServer(uvicorn.Server):
    """uvicorn without its log lines (the gate writes ours) and without its signal handlers.

    Whoever runs it sets ``should_exit``; requests under way then have GRACE_SECONDS.
    """

    def __init__(self, app: ASGIApp) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",  # the same parser and limits whatever else is installed
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                lifespan="off",
                ws="none",
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """The command has handlers of its own, which also stop a start that is under way."""
        yield
