"""Recipe "auto": the candidates run in the model, and the choice follows what they show."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest

from calib import calibrate
from calib.choice import CANDIDATES, Check, choose
from calib.recipes import recipe
from oscar_jax.models import load
from tests.unit.test_calib import LENGTH, TEXTS

# a session of its own would build the tiny model again: the fixture of test_calib makes the files
from tests.unit.test_calib import tiny_path as tiny_path


def test_the_least_kl_is_chosen_unless_another_recalls_clearly_more() -> None:
    spans = (0.30, 0.40, 0.35, 0.45)
    checks = {"bf16": Check((0.0, 0.0), (0.7,) * 4), "a": Check((0.02, 0.03), spans)}
    better = tuple(x + 0.2 + 0.01 * i for i, x in enumerate(spans))
    noisy = (0.9, 0.1, 0.35, 0.5)
    best, reason = choose({**checks, "b": Check((0.04, 0.05), noisy)})
    assert (best, reason) == ("a", "least KL of 2 (0.0250)")
    best, reason = choose({**checks, "b": Check((0.04, 0.05), better)})
    assert best == "b"
    assert reason == "recalls 59% of the spans where a with less KL recalls 37%"
    assert choose({**checks, "b": Check((0.04, 0.05), spans)})[0] == "a"


def test_without_a_recall_probe_the_least_kl_decides() -> None:
    checks = {"bf16": Check((0.0,), ()), "a": Check((0.2,), ()), "b": Check((0.1,), ())}
    assert choose(checks) == ("b", "least KL of 2 (0.1000)")


def test_the_mix_per_layer_must_be_clearly_better_and_worse_in_nothing() -> None:
    spans = (0.30, 0.40, 0.35, 0.45)
    checks = {
        "bf16": Check((0.0, 0.0, 0.0), (0.7,) * 4),
        "a": Check((0.020, 0.030, 0.025), spans),
        "per layer": Check((0.015, 0.024, 0.019), spans),
    }
    best, reason = choose(checks)
    assert best == "per layer"
    assert reason.endswith("KL 0.0193 against 0.0250 of a in every layer, recall 37% against 37%")
    fewer = tuple(x - 0.01 for x in spans)
    best, reason = choose(checks | {"per layer": Check((0.015, 0.024, 0.019), fewer)})
    assert best == "a"
    assert "choosing per layer is not clearly better: KL 0.0193 against 0.0250" in reason
    noisy = Check((0.010, 0.034, 0.019), spans)
    assert choose(checks | {"per layer": noisy})[0] == "a"


def test_auto_fits_checks_and_explains(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    candidates = ("stretch+centre+waterfill+gain", "stretch+centre+gain")
    monkeypatch.setattr("calib.choice.CANDIDATES", candidates)  # each is a compilation
    loaded = load(tiny_path, load_format="dummy", dtype=jnp.float32)
    rotation, metadata, report = calibrate(loaded, data=TEXTS, progress=False, tokens=2 * LENGTH)
    assert {"bf16", *candidates} <= set(report.checks) <= {"bf16", *candidates, "per layer"}
    assert report.checks["bf16"].mean_kl == pytest.approx(0.0, abs=1e-9)
    chosen, reason = choose(report.checks)
    assert report.chosen == chosen
    assert report.notes[0].endswith(reason)
    assert rotation.codecs == metadata.codecs == report.codecs
    assert report.judgement is not None and report.judgement.reason in report.verdict
    assert f"| {chosen} | {report.checks[chosen].mean_kl:.4f} | - |" in report.to_markdown()
    plain = {"identity+centre", "hadamard+centre", "oscar-shared+centre", "oscar+centre"}
    assert plain | {"hadamard+centre+gain", "oscar+centre+waterfill+gain"} <= set(report.others)
    assert metadata.recipe == report.fit.recipe


def test_every_candidate_is_a_recipe_and_the_best_comes_first() -> None:
    names = [recipe(name).full_name for name in CANDIDATES]
    assert names == list(CANDIDATES)
    assert names[0] == "stretch+centre+waterfill+gain"
