"""Calibrates a loaded model: runs it over text, fits, measures, and writes down what was done."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from tqdm import tqdm

from calib.choice import AUTO, BF16, FINALISTS, MIXED, Check, Checker, Later, candidates, choose
from calib.collect import layer_frequencies
from calib.covariance import Moments
from calib.data import Text, calibration_texts
from calib.fit import DAMPING, FitReport, fit
from calib.held_out import Errors, measure
from calib.material import Material, gather
from calib.optr import Learned, OptrSettings, refine
from calib.per_layer import combined, in_words, mix, search_clips
from calib.recipes import Recipe
from calib.recipes import recipe as recipe_of
from calib.report import RANDOM_WEIGHTS, CalibrationReport
from calib.study import Study, study
from oscar_jax.checkpoint import CheckpointMetadata, fingerprint
from oscar_jax.config import KVConfig
from oscar_jax.models import Loaded
from oscar_jax.rotation import Rotation

PLAIN = ("identity", "hadamard", "oscar-shared", "oscar")  # for the report's comparison
DEFAULT_TOKENS = 24_576  # four sequences of each of three domains; the report says if it was enough
# A head falls back to the plain recipe where its fit has clearly more held-out error, not merely
# more: on SmolLM2 centred OSCAR has 2 % less key error than centred Hadamard, and 26 % less KL.
FALLBACK_RATIO = 1.25


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A fitted rotation: the recipe of each layer, what the fit says of itself, and its errors."""

    names: tuple[str, ...]
    rotation: Rotation
    report: FitReport
    errors: Errors | None


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
    positions: int | None = None,
    check: bool = True,
    force: bool = False,
    optr: OptrSettings | None = None,
    optr_resume: Path | None = None,
) -> tuple[Rotation, CheckpointMetadata, CalibrationReport]:
    """Fit a model's rotation from text and measure it on text that the fit has not seen.

    Args:
        loaded: the model, in the dtype it is served in.
        recipe: see ``calib.recipes``; "auto" fits ``calib.choice.CANDIDATES``, mixes them per layer
            and keeps what the model itself does best with on held-out text.
        data: texts; None takes the bundled prose, code and chat. Of every domain the two sequences
            after the ones that were fitted are held out, for choosing and for measuring.
        progress: show bars on stderr.
        value_target: "proxy" or "attention".
        tokens: about how many tokens of text to fit to, spread over the domains.
        windows: S (tokens left out), and R for which queries see which page when measuring; None
            is ``KVConfig()``.
        damping: share of the mean eigenvalue added to the covariances.
        positions: fit to queries and keys as they are in sequences of up to so many tokens
            (``calib.positions``); None: the model's context; 0: where they stand in the text.
        check: run the rotation in the model on held-out text; without it there is no verdict. The
            candidates of "auto" are always run.
        force: accept fewer tokens than a fit needs.
        optr, optr_resume: how a recipe with +optr learns, and the directory where an interrupted
            run goes on.

    Raises:
        ValueError: unknown recipe or target, too little text, or activations that are not finite.
    """
    started = time.perf_counter()
    windows = windows or KVConfig()
    recipes = [recipe_of(name) for name in candidates(recipe)]
    context = loaded.config.context_length
    served = context if positions is None else positions or None
    texts = calibration_texts(loaded.tokenizer) if data is None else list(data)
    material = gather(loaded, texts, windows, tokens, progress)
    fitting = functools.partial(fit, value_target=value_target, damping=damping, force=force)
    fitted = functools.partial(fitting, material.moments, positions=served)
    fits, others = closed_forms(fitted, recipes, material, progress)
    learned: dict[str, Learned] = {}
    if bases := {one.full_name: fits[one.full_name].rotation for one in recipes if one.learned}:
        deciding = material.held_out if material.tuning is None else material.tuning
        if deciding is None:
            raise ValueError("+optr decides on held-out text, and none was left: pass more text")
        rows = [row for own in material.fitted.values() for row in own]
        learned = refine(
            loaded.decoder, bases, rows, deciding, optr, resume=optr_resume, progress=progress
        )
        fits |= {name: _refined(fits[name], one, material) for name, one in learned.items()}
    checks: dict[str, Check] = {}
    later: Later | None = None
    numbers = loaded.config.paged_layers
    notes: list[str] = []
    chosen = recipes[0].full_name
    if material.held_out is not None and (check or len(recipes) > 1):
        checker = Checker(loaded, material.checked, windows)
        if len(recipes) > 1:
            fits = with_mix(fits, material)
        finalists = _finalists(fits)
        with tqdm(
            (BF16, *finalists), desc="checking in the model", unit=" caches", disable=not progress
        ) as caches:
            for name in caches:
                checks[name] = checker.check(None if name == BF16 else fits[name].rotation)
            chosen, reason = choose(checks)
            caches.set_postfix_str("later in the context")
            later = checker.check_later(
                fits[chosen].rotation,
                max(context, served or 0),
                layer_frequencies(loaded.config),
            )
        if len(recipes) > 1:
            notes.append(f"{in_words(fits[chosen].names, numbers)}: {reason}")
    best = fits.pop(chosen)
    studied: Study | None = None
    if material.held_out is not None and best.errors is not None:
        studied = study(
            refitting(fitting, best),
            best.rotation,
            best.errors,
            material,
            served,
            context,
            layer_frequencies(loaded.config),
            progress,
        )
    measured = {name: one.errors for name, one in fits.items() if one.errors is not None}
    report = CalibrationReport(
        fit=dataclasses.replace(best.report, recipe=in_words(best.names, numbers)),
        errors=best.errors,
        others=others | measured,
        chosen=chosen,
        checks=checks,
        later=later,
        study=studied,
        codecs=best.rotation.codecs,
        texts={
            name: len(rows) * (material.length - windows.sink)
            for name, rows in material.fitted.items()
        },
        held_out_tokens=sum(map(len, material.checked)),
        seconds=time.perf_counter() - started,
        warnings=(
            *(RANDOM_WEIGHTS,) * loaded.random_weights,
            *best.report.warnings,
            *_warnings(best.errors),
        ),
        notes=(
            *notes,
            *_notes(best.report, numbers),
            *(learned[chosen].summary() if chosen in learned else ()),
        ),
        layers=numbers,
        random_weights=loaded.random_weights,
    )
    metadata = CheckpointMetadata(
        recipe=in_words(best.names, numbers),
        value_target=value_target,
        codecs=best.rotation.codecs,
        damping=damping,
        sink=windows.sink,
        recent=windows.recent,
        tokens=best.report.tokens,
        data_hash=material.data_hash,
        fingerprint=fingerprint(loaded.config),
        weights_hash=loaded.weights_hash,
        layers=numbers,
        sensitivity=() if best.errors is None else _at_two_bits(best.errors, best.rotation),
        warnings=report.warnings,
        random_weights=loaded.random_weights,
    )
    return best.rotation, metadata, report


Fitted = Callable[..., tuple[Rotation, FitReport]]


def closed_forms(
    fitted: Fitted, recipes: Sequence[Recipe], material: Material, progress: bool = True
) -> tuple[dict[str, Candidate], dict[str, Errors]]:
    """Every recipe fitted; and the errors of plain recipes, a head's fall-back among them."""
    held_out = material.held_out
    plain = {name + "+centre" * one.centred for one in recipes for name in PLAIN}
    plain |= {one.fallback.full_name for one in recipes}
    plain -= {one.full_name for one in recipes}
    fits: dict[str, Candidate] = {}
    others: dict[str, Errors] = {}
    total = len(recipes) + (0 if held_out is None else len(plain))
    with tqdm(total=total, desc="fitting", unit=" recipes", disable=not progress) as bar:
        if held_out is not None:
            for name in sorted(plain):
                others[name] = measure(fitted(name)[0], held_out)
                bar.update()
        for one in recipes:
            fits[one.full_name] = _candidate(fitted, one, others, material)
            bar.update()
    return fits, others


def _candidate(
    fitted: Fitted, recipe: Recipe, plain: Mapping[str, Errors], material: Material
) -> Candidate:
    """Fit, give up heads that are clearly worse than the plain recipe, and search the clips."""
    closed_form = recipe.closed_form
    rotation, report = fitted(closed_form)
    errors, held_out = None, material.held_out
    if held_out is not None:
        errors = measure(rotation, held_out)
        known = plain.get(recipe.fallback.full_name)
        if known is not None and recipe.fitted:
            keys = errors.key > FALLBACK_RATIO * known.key
            values = errors.value > FALLBACK_RATIO * known.value
            if keys.any() or values.any():
                rotation, report = fitted(closed_form, fallback_keys=keys, fallback_values=values)
                errors = measure(rotation, held_out)
    if recipe.clipped:
        if material.tuning is None or held_out is None:
            raise ValueError(
                f"recipe={recipe.full_name!r}: +clip searches on text of its own; pass more, at "
                f"least {3 * material.length} tokens of a domain"
            )
        rotation = search_clips(rotation, material.tuning)
        errors = measure(rotation, held_out)
    return Candidate((recipe.full_name,) * rotation.layers, rotation, report, errors)


def _refined(base: Candidate, learned: Learned, material: Material) -> Candidate:
    """The candidate with what OptR learned on top of its closed form."""
    errors = None
    if material.held_out is not None:
        errors = measure(learned.rotation, material.held_out)
    return dataclasses.replace(base, rotation=learned.rotation, errors=errors)


def with_mix(candidates: Mapping[str, Candidate], material: Material) -> dict[str, Candidate]:
    """The candidates and, where no single one wins every layer, their mix."""
    if material.tuning is None or material.held_out is None:
        return dict(candidates)
    rotation, names = mix({name: one.rotation for name, one in candidates.items()}, material.tuning)
    if len(set(names)) == 1:
        return dict(candidates)
    report = FitReport.per_layer([candidates[name].report for name in names])
    return {
        **candidates,
        MIXED: Candidate(names, rotation, report, measure(rotation, material.held_out)),
    }


def _finalists(candidates: Mapping[str, Candidate]) -> list[str]:
    """What runs in the model: the single recipes with the least output error, and the mix."""
    singles = [name for name in candidates if name != MIXED]
    error = lambda name: getattr(candidates[name].errors, "output_mean", 0.0)  # noqa: E731
    return [*sorted(singles, key=error)[:FINALISTS], *([MIXED] if MIXED in candidates else [])]


def refitting(fitting: Fitted, best: Candidate) -> Callable[[Moments, int | None], Rotation]:
    """The chosen recipe of every layer, with its codec, on other moments; closed forms only."""

    def refit(moments: Moments, positions: int | None) -> Rotation:
        fits = {
            name: fitting(moments, recipe_of(name).closed_form, positions=positions, force=True)[0]
            for name in set(best.names)
        }
        rotation = combined([fits[name] for name in best.names])
        return dataclasses.replace(rotation, codecs=best.rotation.codecs)

    return refit


def _at_two_bits(errors: Errors, rotation: Rotation) -> tuple[tuple[float, float], ...]:
    """The layers' sensitivities; of wider codes carried back, a bit for a factor of four."""
    return tuple(
        (keys, values)
        if codec is None
        else (keys * 4.0 ** (codec.key_bits - 2), values * 4.0 ** (codec.value_bits - 2))
        for (keys, values), codec in zip(errors.sensitivity, rotation.codecs, strict=True)
    )


def _warnings(errors: Errors | None) -> list[str]:
    if errors is None:
        return ["no text was left to measure the error on: pass more"]
    if errors.saturated:
        return [f"{errors.saturated} held-out rows did not fit float16 metadata and were clamped"]
    return []


def _notes(report: FitReport, numbers: Sequence[int]) -> list[str]:
    """Which heads fell back to the plain recipe: nothing to act on, so not a warning."""
    lines = []
    given_up = {"keys": report.fallback_keys, "values": report.fallback_values}
    for side, mask in given_up.items():
        if mask.any():
            heads = ", ".join(f"layer {numbers[i]} head {head}" for i, head in np.argwhere(mask))
            lines.append(f"{side} use the plain recipe where the fit is not better: {heads}")
    return lines
