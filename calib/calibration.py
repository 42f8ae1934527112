"""Calibrates a loaded model: runs it over text, fits, measures, and writes down what was done."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from calib.choice import AUTO, Check, candidates, check, choose
from calib.collect import collect_moments, collect_rows
from calib.data import Text, calibration_texts, data_hash, sequences
from calib.fit import DAMPING, FitReport, fit
from calib.held_out import Errors, HeldOut, measure
from calib.optr import Learned, OptrSettings, refine
from calib.recipes import Recipe
from calib.recipes import recipe as recipe_of
from calib.report import CalibrationReport
from oscar_jax.checkpoint import CheckpointMetadata, fingerprint
from oscar_jax.config import KVConfig
from oscar_jax.models import Loaded
from oscar_jax.rotation import Rotation

PLAIN = ("identity", "hadamard", "oscar-shared", "oscar")  # for the report's comparison
DEFAULT_TOKENS = 16_384  # quality is flat from 2,000 to 30,000 on one domain; the default has two
SEQUENCE_LENGTH = 2_048
# A head falls back to the plain recipe where its fit has clearly more held-out error, not merely
# more: on SmolLM2 centred OSCAR has 2 % less key error than centred Hadamard, and 26 % less KL.
FALLBACK_RATIO = 1.25


def calibrate(
    loaded: Loaded,
    recipe: str = AUTO,
    data: Sequence[Text] | None = None,
    progress: bool = True,
    *,
    value_target: str = "proxy",
    tokens: int = DEFAULT_TOKENS,
    windows: KVConfig | None = None,
    damping: float = DAMPING,
    force: bool = False,
    optr: OptrSettings | None = None,
    optr_resume: Path | None = None,
) -> tuple[Rotation, CheckpointMetadata, CalibrationReport]:
    """Fit a model's rotation from text and measure it on text that the fit has not seen.

    Args:
        loaded: the model, in the dtype it is served in.
        recipe: see ``calib.recipes``; "auto" fits ``calib.choice.CANDIDATES`` and keeps the one
            that the model itself does best with on held-out text.
        data: texts; None takes the bundled prose and code. Of every domain the sequence after the
            ones that were used is held out for measuring.
        progress: show a bar on stderr.
        value_target: "proxy" or "attention".
        tokens: about how many tokens of text to run, spread over the domains.
        windows: S (tokens left out), and R for which queries see which page when measuring; None
            is ``KVConfig()``.
        damping: share of the mean eigenvalue added to the covariances.
        force: accept fewer tokens than a fit needs.
        optr, optr_resume: how a recipe with +optr learns, and the directory where an interrupted
            run goes on.

    Raises:
        ValueError: unknown recipe or target, too little text, or activations that are not finite.
    """
    started = time.perf_counter()
    windows = windows or KVConfig()
    recipes = [recipe_of(name) for name in candidates(recipe)]
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
        fitting = functools.partial(
            fit, moments, value_target=value_target, damping=damping, force=force
        )
        # before the rows: too few tokens must not cost another pass
        fits = {one.full_name: fitting(one.closed_form) for one in recipes}
        held_out = collect_rows(loaded.decoder, held, windows, progress=bar) if held else None
    errors: dict[str, Errors] = {}
    checks: dict[str, Check] = {}
    chosen, reason = recipes[0].full_name, ""
    learned: dict[str, Learned] = {}
    if held_out is None and any(one.learned for one in recipes):
        raise ValueError("+optr decides on held-out text, and none was left: pass more text")
    if held_out is not None:
        for one in recipes:
            plain = {name + "+centre" * one.centred for name in PLAIN}
            for other in sorted(plain | {one.fallback.full_name}):
                if other not in errors and other not in fits:
                    errors[other] = measure(fitting(other)[0], held_out)
        for one in recipes:
            name = one.full_name
            closed_form = one.closed_form
            fits[name], errors[name] = _with_fallback(
                fitting, fits[name], closed_form, errors, held_out
            )
        bases = {one.full_name: fits[one.full_name][0] for one in recipes if one.learned}
        if bases:
            learned = refine(
                loaded.decoder, bases, rows, held_out, optr, resume=optr_resume, progress=progress
            )
        for name, found in learned.items():
            fits[name] = found.rotation, dataclasses.replace(fits[name][1], recipe=name)
            errors[name] = measure(found.rotation, held_out)
        if len(recipes) > 1:
            rotations = {name: rotation for name, (rotation, _) in fits.items()}
            checks = check(loaded, rotations, held, windows)
            chosen, reason = choose(checks)
    (rotation, report), own = fits[chosen], errors.pop(chosen, None)
    calibration = CalibrationReport(
        fit=report,
        errors=own,
        others=errors,
        checks=checks,
        texts={name: len(one) * (length - windows.sink) for name, one in used.items()},
        held_out_tokens=length * len(held),
        seconds=time.perf_counter() - started,
        warnings=(*report.warnings, *_warnings(own)),
        notes=(
            *([f"{chosen}: {reason}"] if reason else []),
            *_notes(report),
            *(learned[chosen].summary() if chosen in learned else ()),
        ),
        layers=loaded.config.paged_layers,
    )
    metadata = CheckpointMetadata(
        recipe=report.recipe,
        value_target=value_target,
        codecs=rotation.codecs,
        damping=damping,
        sink=windows.sink,
        recent=windows.recent,
        tokens=report.tokens,
        data_hash=data_hash(rows),
        fingerprint=fingerprint(loaded.config),
        weights_hash=loaded.weights_hash,
        layers=loaded.config.paged_layers,
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


def _with_fallback(
    fitting: Callable[..., tuple[Rotation, FitReport]],
    fitted: tuple[Rotation, FitReport],
    recipe: Recipe,
    known: Mapping[str, Errors],
    held_out: HeldOut,
) -> tuple[tuple[Rotation, FitReport], Errors]:
    """Give heads the plain recipe where the fit is clearly worse than that on held-out text."""
    errors = measure(fitted[0], held_out)
    plain = known.get(recipe.fallback.full_name)
    if plain is None or not recipe.fitted:
        return fitted, errors
    keys = errors.key > FALLBACK_RATIO * plain.key
    values = errors.value > FALLBACK_RATIO * plain.value
    if not (keys.any() or values.any()):
        return fitted, errors
    fitted = fitting(recipe, fallback_keys=keys, fallback_values=values)
    return fitted, measure(fitted[0], held_out)


def _warnings(errors: Errors | None) -> list[str]:
    if errors is None:
        return ["no text was left to measure the error on: pass more"]
    if errors.saturated:
        return [f"{errors.saturated} held-out rows did not fit float16 metadata and were clamped"]
    return []


def _notes(report: FitReport) -> list[str]:
    """Which heads fell back to the plain recipe: nothing to act on, so not a warning."""
    lines = []
    given_up = {"keys": report.fallback_keys, "values": report.fallback_values}
    for side, mask in given_up.items():
        if mask.any():
            heads = ", ".join(f"layer {layer} head {head}" for layer, head in np.argwhere(mask))
            lines.append(f"{side} use the plain recipe where the fit is not better: {heads}")
    return lines
