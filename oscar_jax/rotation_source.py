"""``--rotation``: from what the user asked for to transforms that belong to the model."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path

from oscar_jax import checkpoint
from oscar_jax.checkpoint import CheckpointMetadata
from oscar_jax.config import KVConfig
from oscar_jax.fetch import cache_dir
from oscar_jax.models import Loaded
from oscar_jax.rotation import Rotation

log = logging.getLogger(__name__)
Progress = Callable[[str], None]


@dataclasses.dataclass(frozen=True)
class ResolvedRotation:
    """A rotation and where it comes from, in words for the start-up log.

    Args:
        sensitivity: of every layer, as its checkpoint says (``oscar_jax.budget``), or ().
    """

    rotation: Rotation
    source: str
    sensitivity: tuple[tuple[float, float], ...] = ()


def resolve_rotation(
    choice: str,
    loaded: Loaded,
    windows: KVConfig,
    *,
    shipped: Path | None = None,
    progress: Progress = lambda _: None,
    show_bar: bool = True,
) -> ResolvedRotation:
    """The transforms for a model's INT2 cache.

    Args:
        choice: "auto", "hadamard", "identity", or the directory of a checkpoint. "auto" takes the
            shipped checkpoint, else the one that an earlier start left in the cache directory,
            else calibrates now on the bundled text and keeps the result there.
        windows: S and R, for a calibration. shipped: the model's committed checkpoint, if any.
        progress: told what is being done. show_bar: calibration's progress bar on stderr.

    Raises:
        CheckpointError: the directory is broken or belongs to another model.
        ValueError: the model cannot be calibrated (values that are not finite).
    """
    model = loaded.config
    if choice in ("hadamard", "identity"):
        make = Rotation.hadamard if choice == "hadamard" else Rotation.identity
        rotation = make(
            layers=len(model.paged_layers), kv_heads=model.num_kv_heads, head_dim=model.head_dim
        )
        return ResolvedRotation(rotation, f"{choice} (data-free)")
    if choice != "auto":
        return _load(Path(choice).expanduser(), loaded)
    if shipped is not None:
        return _load(shipped, loaded)
    kept = cached_path(loaded, windows)
    if kept.exists():
        return _load(kept, loaded)
    return _calibrate(loaded, windows, kept, progress, show_bar)


def cached_path(loaded: Loaded, windows: KVConfig) -> Path:
    """Where ``auto`` keeps the rotation of exactly these weights, windows and file format.

    The format counts because a file of an earlier one was also fitted by earlier rules (version 1:
    to the positions of the calibration text alone).
    """
    model = checkpoint.fingerprint(loaded.config)
    identity = json.dumps(
        [model, loaded.weights_hash, windows.sink, windows.recent, checkpoint.FORMAT_VERSION],
        sort_keys=True,
    )
    return cache_dir() / "rotations" / hashlib.sha256(identity.encode()).hexdigest()[:32]


def _load(path: Path, loaded: Loaded) -> ResolvedRotation:
    rotation, metadata = checkpoint.load(
        path, model_config=loaded.config, weights_hash=loaded.weights_hash
    )
    for warning in metadata.warnings:
        log.warning("rotation %s: %s", path, warning)
    return _resolved(rotation, metadata, f"{metadata.recipe} from {path}")


def _resolved(rotation: Rotation, metadata: CheckpointMetadata, source: str) -> ResolvedRotation:
    by_layer = dict(zip(metadata.layers, metadata.sensitivity, strict=False))
    return ResolvedRotation(rotation, source, tuple(by_layer[layer] for layer in sorted(by_layer)))


def _calibrate(
    loaded: Loaded, windows: KVConfig, path: Path, progress: Progress, show_bar: bool
) -> ResolvedRotation:
    # Here and not above: calib is built on this package, and most starts do not need it.
    from calib import calibrate

    progress("calibrating: no rotation checkpoint for this model was found")
    rotation, metadata, report = calibrate(loaded, progress=show_bar, windows=windows)
    log.warning("calibration: %s", report.verdict)
    checkpoint.save(path, rotation, metadata)
    log.info("the rotation is kept in %s", path)
    return _resolved(rotation, metadata, f"{metadata.recipe}, calibrated now, kept in {path}")
