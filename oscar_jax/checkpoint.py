"""Rotation checkpoints: a directory of three arrays (Orbax) and a metadata file (JSON).

    DIR/metadata.json   what the transforms are and for which model; ``CheckpointMetadata``
    DIR/arrays/         Orbax: x_k f32[L, K, D, D], x_v f32[L, K, Dv, Dv], mu f32[L, K, D]

Only the stored sides are written; X_Q and X_O are inverted in float64 when the file is read.
Loading runs no code from the file: JSON and raw arrays, nothing pickled.
"""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import shutil
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp  # type: ignore[import-untyped]

from oscar_jax.config import ModelConfig
from oscar_jax.rotation import Rotation
from pallas_kernels.format import PAGE, Codec

FORMAT_VERSION = 2
READABLE = (1, 2)  # version 1 had one codec for all layers
METADATA = "metadata.json"
ARRAYS = "arrays"
COMMIT_MARKER = "_CHECKPOINT_METADATA"  # what Orbax writes last


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: one line that names the path and what is wrong."""


@dataclasses.dataclass(frozen=True)
class CheckpointMetadata:
    """What a checkpoint says of itself.

    Args:
        recipe: "oscar+centre", ... or the converter's name for an imported file.
        value_target: "proxy" | "attention" | "none".
        codecs: of each of ``layers``, what the transforms were made for; None: BF16 pages.
        damping: share of the mean eigenvalue added to the covariances.
        sink, recent, page: S, R and T in tokens: tokens before S were left out of the fit.
        tokens: tokens counted.
        data_hash: SHA-256 of the token ids (of the files for an imported checkpoint).
        fingerprint: ``fingerprint(model_config)`` of the model; None for one without a ModelConfig.
        weights_hash: SHA-256 over q, k, v, o of the first and the last layer, or "".
        layers: the model layer of each row of the arrays.
        sensitivity: of each of ``layers``, the damage that 2-bit keys and 2-bit values do there
            (``oscar_jax.budget``); () where it was not measured.
        warnings: of the fit, in plain words.
        random_weights: the model's weights were made up (``--load-format dummy``).
    """

    recipe: str
    value_target: str
    codecs: tuple[Codec | None, ...]
    damping: float
    sink: int
    recent: int
    tokens: int
    data_hash: str
    fingerprint: dict[str, Any] | None
    weights_hash: str
    layers: tuple[int, ...]
    page: int = PAGE
    sensitivity: tuple[tuple[float, float], ...] = ()
    warnings: tuple[str, ...] = ()
    random_weights: bool = False
    library_version: str = ""
    format_version: int = FORMAT_VERSION

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> CheckpointMetadata:
        """Raises KeyError, TypeError or ValueError on a field that is missing or malformed."""
        fields = dict(fields)
        fields["layers"] = tuple(int(layer) for layer in fields["layers"])
        if fields["format_version"] == 1:
            fields["codecs"] = [fields.pop("codec")] * len(fields["layers"])
            fields["format_version"] = FORMAT_VERSION
        fields["codecs"] = tuple(None if x is None else Codec(**x) for x in fields["codecs"])
        if len(fields["codecs"]) != len(fields["layers"]):
            raise ValueError(f"{len(fields['codecs'])} codecs, {len(fields['layers'])} layers")
        damage = [(float(key), float(value)) for key, value in fields.get("sensitivity", ())]
        if damage and (len(damage) != len(fields["layers"]) or min(map(min, damage)) < 0):
            raise ValueError(f"sensitivity {damage}: must be two numbers >= 0 for every layer")
        fields["sensitivity"] = tuple(damage)
        fields["warnings"] = tuple(fields["warnings"])
        return cls(**fields)


def fingerprint(config: ModelConfig) -> dict[str, Any]:
    """The numbers that decide whether one model's rotation means anything to another.

    Three groups: "architecture", "heads" and "rope"; keys after RoPE depend on all of them. The
    vocabulary and the MLP's width do not matter to the cache.
    """
    rope = config.rope_scaling
    sliding = ("sliding_window", "global_every", "rope_theta_local", "query_scalar")
    stated = {name: getattr(config, name) for name in sliding if getattr(config, name) is not None}
    return {
        "architecture": {
            "architecture": config.architecture,
            "hidden_size": config.hidden_size,
            "num_layers": config.num_layers,
            "qk_norm": config.qk_norm,
            "qkv_bias": config.qkv_bias,
            **stated,
        },
        "heads": {
            "num_heads": config.num_heads,
            "num_kv_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
        },
        "rope": {
            "rope_theta": config.rope_theta,
            "rope_scaling": None if rope is None else dataclasses.asdict(rope),
        },
    }


def check_target(path: Path, force: bool = False) -> None:
    """Raise CheckpointError if ``save`` would refuse ``path``; ask before minutes of work."""
    path = Path(path).absolute()
    try:
        if path.exists() and not force:
            raise CheckpointError(f"{path}: exists; it is only replaced with force")
        if path.exists() and not path.is_dir():
            raise CheckpointError(f"{path}: is a file; a rotation checkpoint is a directory")
    except OSError as error:
        raise CheckpointError(f"{path}: {_reason(error)}") from error


def save(
    path: Path,
    rotation: Rotation,
    metadata: CheckpointMetadata,
    force: bool = False,
    *,
    attachments: Mapping[str, bytes] | None = None,
) -> None:
    """Write a checkpoint to ``path``: complete or not at all.

    Everything goes to a temporary directory beside ``path`` that is renamed at the end, so that a
    reader never sees half a checkpoint. Arrays are gathered to the host first: how they are sharded
    here does not matter to who loads them.

    Args:
        attachments: further files by name, such as a report; never read back.

    Raises:
        CheckpointError: ``path`` exists and ``force`` is not set, or it cannot be written.
        ValueError: metadata that does not describe the rotation.
    """
    path = Path(path).absolute()
    if len(metadata.layers) != rotation.layers or metadata.codecs != rotation.codecs:
        raise ValueError(
            f"metadata says {len(metadata.layers)} layers and {_distinct(metadata.codecs)}, the "
            f"rotation has {rotation.layers} and {_distinct(rotation.codecs)}"
        )
    check_target(path, force)
    arrays = {
        name: np.stack([np.asarray(one, np.float32) for one in getattr(rotation, name)])
        for name in ("x_k", "x_v", "mu")
    }
    stored = dataclasses.replace(metadata, library_version=metadata.library_version or _version())
    scratch: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
        ocp.save(scratch / ARRAYS, arrays)
        text = json.dumps(stored.to_json(), indent=1) + "\n"
        (scratch / METADATA).write_text(text, encoding="utf-8")
        for name, content in (attachments or {}).items():
            (scratch / name).write_bytes(content)
        scratch.chmod(0o755)  # mkdtemp keeps others out
        _replace(scratch, path)
    except OSError as error:
        raise CheckpointError(f"{path}: {_reason(error)}") from error
    finally:
        if scratch is not None:
            shutil.rmtree(scratch, ignore_errors=True)


def load(
    path: Path, *, model_config: ModelConfig | None = None, weights_hash: str | None = None
) -> tuple[Rotation, CheckpointMetadata]:
    """Read a checkpoint for a model.

    Args:
        path: the directory; a relative path is taken from the working directory.
        model_config: refuse a checkpoint whose architecture, head layout or RoPE settings differ.
            None (a custom model): the caller compares ``rotation``'s shapes with its own.
        weights_hash: of the running model; a difference only warns (``warnings.warn``), because two
            files of one model (GGUF and safetensors) never match. A checkpoint of random weights is
            refused for all but those.

    Returns:
        The rotation, on the default device, and what the checkpoint says of itself.

    Raises:
        CheckpointError: anything wrong with the directory or a model that it is not for. One line,
            naming the path.
    """
    path = Path(path).absolute()
    metadata = read_metadata(path)
    if model_config is not None:
        _check_model(path, metadata, model_config)
    if metadata.random_weights and weights_hash != metadata.weights_hash:
        raise CheckpointError(
            f"{path}: was fitted to random weights (--load-format dummy), and means nothing to a "
            "model with others; calibrate without --load-format"
        )
    if weights_hash and metadata.weights_hash and weights_hash != metadata.weights_hash:
        warnings.warn(
            f"{path}: was fitted on other weights ({metadata.weights_hash[:12]}, the model has "
            f"{weights_hash[:12]}); harmless if they are another file of the same model",
            stacklevel=2,
        )
    order = _layer_order(path, metadata, model_config)
    arrays = _read_arrays(path, metadata, model_config)
    x_k, x_v, mu = (list(arrays[name][order]) for name in ("x_k", "x_v", "mu"))
    try:
        rotation = Rotation.from_transforms(x_k, x_v, mu, [metadata.codecs[i] for i in order])
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from error
    return rotation, metadata


def read_metadata(path: Path) -> CheckpointMetadata:
    """The metadata alone: cheap, no array is read. Raises CheckpointError."""
    path = Path(path).absolute()
    file = path / METADATA
    try:
        if not path.exists():
            raise CheckpointError(f"{path}: does not exist")
        if not path.is_dir():
            raise CheckpointError(f"{path}: is a file; a rotation checkpoint is a directory")
        if not file.is_file():
            what = "is empty" if not any(path.iterdir()) else f"has no {METADATA}"
            raise CheckpointError(f"{path}: {what}; not a rotation checkpoint")
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        fields = json.loads(text)
        version = fields["format_version"]
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: {METADATA} is damaged ({error!r})") from error
    if version not in READABLE:
        raise CheckpointError(
            f"{path}: has format_version {version!r}; this release reads "
            f"{' and '.join(map(str, READABLE))}"
        )
    try:
        return CheckpointMetadata.from_json(fields)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: {METADATA} is damaged ({error!r})") from error


def _check_model(path: Path, metadata: CheckpointMetadata, config: ModelConfig) -> None:
    if metadata.fingerprint is None:
        raise CheckpointError(f"{path}: has no model fingerprint; it was made for a custom model")
    want = fingerprint(config)
    for group, numbers in want.items():
        have = metadata.fingerprint.get(group)
        if have == numbers:
            continue
        names = [name for name in numbers if (have or {}).get(name) != numbers[name]]
        differ = "; ".join(
            f"{name} {(have or {}).get(name)!r}, the model {numbers[name]!r}" for name in names
        )
        raise CheckpointError(
            f"{path}: is for another model ({group}): the checkpoint has {differ}"
        )


def _layer_order(
    path: Path, metadata: CheckpointMetadata, config: ModelConfig | None
) -> np.ndarray:
    """The rows of the arrays in layer order; refuses missing, extra and repeated layers."""
    have = metadata.layers
    wanted = range(len(have)) if config is None else config.paged_layers
    missing, extra = sorted(set(wanted) - set(have)), sorted(set(have) - set(wanted))
    if missing or extra or len(set(have)) != len(have):
        raise CheckpointError(
            f"{path}: has {len(have)} layers for a model of {len(wanted)}: "
            f"missing {missing}, extra {extra}"
        )
    return np.argsort(have)


def _read_arrays(
    path: Path, metadata: CheckpointMetadata, config: ModelConfig | None
) -> dict[str, np.ndarray]:
    """The three arrays; names, shapes and dtypes are checked before anything is restored.

    Orbax casts silently to the dtype it is asked for, so the stored dtype is compared first.
    """
    directory = path / ARRAYS
    if not directory.is_dir():
        raise CheckpointError(f"{path}: has no {ARRAYS}/ directory; it was not written to the end")
    try:
        if not (directory / COMMIT_MARKER).is_file():  # Orbax itself would read on
            raise ValueError("its commit marker is missing")
        stored = ocp.metadata(directory).metadata
    except Exception as error:  # Orbax raises many types, none of them documented
        raise CheckpointError(
            f"{path}: {ARRAYS}/ is not a complete Orbax checkpoint ({_one_line(error)})"
        ) from error
    names = ("x_k", "x_v", "mu")
    if not isinstance(stored, dict) or set(stored) != set(names):
        found = sorted(stored) if isinstance(stored, dict) else type(stored).__name__
        raise CheckpointError(f"{path}: {ARRAYS}/ holds {found}, must be {sorted(names)}")
    for name in names:
        if getattr(stored[name], "shape", None) is None:
            raise CheckpointError(f"{path}: {name} is a tree, must be one array (an older layout?)")
    shapes = {name: tuple(stored[name].shape) for name in names}
    if config is not None:
        heads, size = (config.num_kv_heads, config.head_dim), config.head_dim
    elif len(shapes["mu"]) == 3 and len(shapes["x_v"]) == 4:
        heads, size = (shapes["mu"][1], shapes["mu"][2]), shapes["x_v"][-1]
    else:
        raise CheckpointError(f"{path}: mu and x_v have shapes {shapes['mu']} and {shapes['x_v']}")
    layers = len(metadata.layers)
    want = {
        "x_k": (layers, *heads, heads[-1]),
        "x_v": (layers, heads[0], size, size),
        "mu": (layers, *heads),
    }
    # an explicit single-device target: what the file was written on does not matter
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    template = {}
    for name in names:
        if shapes[name] != want[name]:
            raise CheckpointError(f"{path}: {name} has shape {shapes[name]}, must be {want[name]}")
        if np.dtype(stored[name].dtype) != np.float32:
            raise CheckpointError(f"{path}: {name} is {stored[name].dtype}, must be float32")
        template[name] = jax.ShapeDtypeStruct(want[name], np.float32, sharding=device)
    try:
        restored = ocp.load(directory, template)
    except Exception as error:
        raise CheckpointError(f"{path}: cannot be read ({_one_line(error)})") from error
    return {name: np.asarray(restored[name]) for name in names}


def _replace(scratch: Path, path: Path) -> None:
    """Rename ``scratch`` to ``path``; an old checkpoint steps aside first and goes last."""
    if not path.exists():
        os.rename(scratch, path)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
    try:
        os.rename(path, old / path.name)
        try:
            os.rename(scratch, path)
        except OSError:
            os.rename(old / path.name, path)
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def _distinct(codecs: tuple[Codec | None, ...]) -> str:
    return ", ".join(dict.fromkeys("BF16" if codec is None else str(codec) for codec in codecs))


def _reason(error: OSError) -> str:
    return "is not writable" if error.errno in (errno.EACCES, errno.EROFS) else str(error)


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}"


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("oscar-jax")
    except PackageNotFoundError:
        return "unknown (run from source)"
