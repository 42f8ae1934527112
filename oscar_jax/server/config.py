"""Settings of the HTTP side of the server; the engine's are in ``oscar_jax.config``."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

API_KEY_VARIABLE = "OSCAR_API_KEY"


@dataclasses.dataclass(frozen=True)
class ServerConfig:
    """Where the server listens and what it lets in.

    The API key is never a flag, because flags show in the process list: it is the first line of
    ``api_key_file``, else the environment variable OSCAR_API_KEY, else there is none.
    """

    host: str = "127.0.0.1"
    """Address to listen on. Anything but the loopback should have an API key."""
    port: int = 8000
    """TCP port; 0 takes a free one, which is printed."""
    served_model_name: str | None = None
    """What clients must send as "model"; by default the last part of --model."""
    api_key_file: Path | None = None
    """File whose first line is the API key (else the variable OSCAR_API_KEY)."""
    max_body_mib: int = 8
    """Largest request body, MiB; counted as it is read, beyond it 413."""
    body_timeout: float = 30.0
    """Seconds a client may take to send a body; beyond it 408."""
    max_in_flight: int = 256
    """Most choices (prompts times n) running or waiting at once; beyond it 429."""
    log_level: str = "info"
    """debug, info, warning or error. No level logs prompts or answers."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"--port {self.port}: must lie in 0 to 65535")
        if self.max_body_mib < 1:
            raise ValueError(f"--max-body-mib {self.max_body_mib}: must be at least 1")
        if not self.body_timeout > 0:
            raise ValueError(f"--body-timeout {self.body_timeout}: must be positive seconds")
        if self.max_in_flight < 1:
            raise ValueError(f"--max-in-flight {self.max_in_flight}: must be at least 1")
        if self.log_level not in ("debug", "info", "warning", "error"):
            raise ValueError(f"--log-level {self.log_level}: must be debug, info, warning or error")
        if self.served_model_name == "":
            raise ValueError("--served-model-name must not be empty")

    def api_key(self) -> bytes | None:
        """The key that clients must send, or None where none is asked for.

        Raises:
            ValueError: the file cannot be read, or the key is empty or has blanks within.
        """
        if self.api_key_file is not None:
            where = f"--api-key-file {self.api_key_file}"
            try:
                text = self.api_key_file.read_text(encoding="utf-8").partition("\n")[0]
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"{where}: cannot be read: {error}") from None
        elif API_KEY_VARIABLE in os.environ:
            where, text = API_KEY_VARIABLE, os.environ[API_KEY_VARIABLE]
        else:
            return None
        key = text.strip()
        if not key or len(key.split()) > 1:
            raise ValueError(f"{where}: the key must be one word that is not empty")
        return key.encode()
