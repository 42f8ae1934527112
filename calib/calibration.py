"""Calibrates a loaded model: runs it over text, fits, measures, and writes down what was done."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
from tqdm import tqdm

from calib.collect import collect_moments, collect_rows
from calib.covariance import Moments
from calib.data import Text, calibration_texts, data_hash, sequences
from calib.fit import DAMPING, FitReport, fit
from calib.held_out import Errors, HeldOut, measure
from calib.recipes import CENTRE
from calib.recipes import recipe as recipe_of
from calib.report import CalibrationReport
from oscar_jax.checkpoint import CheckpointMetadata, fingerprint
from oscar_jax.config import KVConfig
from oscar_jax.models import Loaded
from oscar_jax.rotation import Rotation

DEFAULT_RECIPE = "oscar+centre"
DEFAULT_TOKENS = 16_384  # quality is flat from 2,000 to 30,000 on one domain; the default has two
SEQUENCE_LENGTH = 2_048
# A head falls back to a Hadamard where its fit has clearly more held-out key or value error, not
# merely more: on SmolLM2 centred OSCAR has 2 % less key error than centred Hadamard, 26 % less KL.
FALLBACK_RATIO = 1.25


def calibrate(
    loaded: Loaded,
    recipe: str = DEFAULT_RECIPE,
    data: Sequence[Text] | None = None,
    progress: bool = True,
    *,
    value_target: str = "proxy",
    tokens: int = DEFAULT_TOKENS,
    windows: KVConfig | None = None,
    damping: float = DAMPING,
    force: bool = False,
) -> tuple[Rotation, CheckpointMetadata, CalibrationReport]:
    """Fit a model's rotation from text and measure it on text that the fit has not seen.

    Args:
        loaded: the model, in the dtype it is served in.
        recipe: see ``calib.recipes``.
        data: texts; None takes the bundled prose and code. Of every domain the sequence after the
            ones that were used is held out for measuring.
        progress: show a bar on stderr.
        value_target: "proxy" or "attention".
        tokens: about how many tokens of text to run, spread over the domains.
        windows: S (tokens left out), and R for which queries see which page when measuring; None
            is ``KVConfig()``.
        damping: share of the mean eigenvalue added to the covariances.
        force: accept fewer tokens than a fit needs.

    Raises:
        ValueError: unknown recipe or target, too little text, or activations that are not finite.
    """
    started = time.perf_counter()
    windows = windows or KVConfig()
    centre = CENTRE * recipe_of(recipe).centred
    texts = calibration_texts() if data is None else list(data)
    length = min(SEQUENCE_LENGTH, loaded.config.max_position_embeddings)
    used, held = _split(loaded, texts, length, tokens)
    rows = [row for domain in used.values() for row in domain]
    with tqdm(
        total=length * (len(rows) + len(held)),
        desc="calibrating",
        unit=" tokens",
        disable=not progress,
    ) as bar:
        moments = collect_moments(loaded.decoder, rows, sink=windows.sink, progress=bar)
        # before the rows: too few tokens must not cost another pass
        rotation, report = fit(
            moments, recipe, value_target=value_target, damping=damping, force=force
        )
        held_out = collect_rows(loaded.decoder, held, windows, progress=bar) if held else None
    others: dict[str, Errors] = {}
    errors = None
    if held_out is not None:
        others = _others(moments, report, centre, force, held_out)
        rotation, report, errors = _with_fallback(
            moments, (rotation, report), others.get(f"hadamard{centre}"), held_out, force
        )
    calibration = CalibrationReport(
        fit=report,
        errors=errors,
        others=others,
        texts={name: len(one) * (length - windows.sink) for name, one in used.items()},
        held_out_tokens=length * len(held),
        seconds=time.perf_counter() - started,
        warnings=(*report.warnings, *_warnings(errors)),
        notes=tuple(_notes(report)),
    )
    metadata = CheckpointMetadata(
        recipe=report.recipe,
        value_target=value_target,
        codec=rotation.codec,
        damping=damping,
        sink=windows.sink,
        recent=windows.recent,
        tokens=report.tokens,
        data_hash=data_hash(rows),
        fingerprint=fingerprint(loaded.config),
        weights_hash=loaded.weights_hash,
        layers=tuple(range(rotation.layers)),
        warnings=calibration.warnings,
    )
    return rotation, metadata, calibration


def _split(
    loaded: Loaded, texts: Sequence[Text], length: int, tokens: int
) -> tuple[dict[str, np.ndarray], list[np.ndarray]]:
    """Sequences to fit on by domain, and one held out of every domain that has one to spare."""
    domains = len({text.domain for text in texts})
    if domains == 0:
        raise ValueError("data holds no text")
    count = max(1, round(tokens / length / domains))
    found = sequences(loaded.tokenizer.encode, texts, length=length, count=count + 1)
    used = {name: rows[: max(1, len(rows) - 1)] for name, rows in found.items()}
    return used, [rows[-1] for rows in found.values() if len(rows) > 1]


def _others(
    moments: Moments, report: FitReport, centre: str, force: bool, held_out: HeldOut
) -> dict[str, Errors]:
    """Errors of the other plain recipes with the same centring, for the report."""
    errors = {}
    for name in ("identity", "hadamard", "oscar-shared", "oscar"):
        if name + centre == report.recipe:
            continue
        rotation, _ = fit(
            moments,
            name + centre,
            value_target=report.value_target,
            damping=report.damping,
            force=force,
        )
        errors[name + centre] = measure(rotation, held_out)
    return errors


def _with_fallback(
    moments: Moments,
    fitted: tuple[Rotation, FitReport],
    hadamard: Errors | None,
    held_out: HeldOut,
    force: bool,
) -> tuple[Rotation, FitReport, Errors]:
    """Give heads a Hadamard where the fit is clearly worse than one on held-out text."""
    rotation, report = fitted
    errors = measure(rotation, held_out)
    if hadamard is None or not recipe_of(report.recipe).fitted:
        return rotation, report, errors
    keys = errors.key > FALLBACK_RATIO * hadamard.key
    values = errors.value > FALLBACK_RATIO * hadamard.value
    if not (keys.any() or values.any()):
        return rotation, report, errors
    rotation, report = fit(
        moments,
        report.recipe,
        value_target=report.value_target,
        damping=report.damping,
        force=force,
        fallback_keys=keys,
        fallback_values=values,
    )
    return rotation, report, measure(rotation, held_out)


def _warnings(errors: Errors | None) -> list[str]:
    if errors is None:
        return ["no text was left to measure the error on: pass more"]
    if errors.saturated:
        return [f"{errors.saturated} held-out rows did not fit float16 metadata and were clamped"]
    return []


def _notes(report: FitReport) -> list[str]:
    """Which heads fell back to a Hadamard: nothing to act on, so not a warning."""
    lines = []
    given_up = {"keys": report.fallback_keys, "values": report.fallback_values}
    for side, mask in given_up.items():
        if mask.any():
            heads = ", ".join(f"layer {layer} head {head}" for layer, head in np.argwhere(mask))
            lines.append(f"{side} use a plain Hadamard where the fit is not better: {heads}")
    return lines
