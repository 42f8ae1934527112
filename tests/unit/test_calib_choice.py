"""Recipe "auto": the candidates run in the model, and the choice follows what they show."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import pytest

from calib import calibrate
from calib.choice import CANDIDATES, Check, choose
from oscar_jax.models import load
from tests.unit.test_calib import LENGTH, TEXTS

# a session of its own would build the tiny model again: the fixture of test_calib makes the files
from tests.unit.test_calib import tiny_path as tiny_path


def test_the_least_kl_is_chosen_unless_another_recalls_clearly_more() -> None:
    spans = (0.30, 0.40, 0.35, 0.45)
    checks = {"bf16": Check((0.0, 0.0), (0.7,) * 4), "a": Check((0.02, 0.03), spans)}
    better = tuple(x + 0.2 + 0.01 * i for i, x in enumerate(spans))
    noisy = (0.9, 0.1, 0.35, 0.5)
    recipe, reason = choose({**checks, "b": Check((0.04, 0.05), noisy)})
    assert (recipe, reason) == ("a", "least KL of 2 (0.0250)")
    recipe, reason = choose({**checks, "b": Check((0.04, 0.05), better)})
    assert recipe == "b"
    assert reason == "recalls 59% of the spans where a with less KL recalls 37%"
    assert choose({**checks, "b": Check((0.04, 0.05), spans)})[0] == "a"


def test_without_a_recall_probe_the_least_kl_decides() -> None:
    checks = {"bf16": Check((0.0,), ()), "a": Check((0.2,), ()), "b": Check((0.1,), ())}
    assert choose(checks) == ("b", "least KL of 2 (0.1000)")


def test_auto_fits_checks_and_explains(tiny_path: Path) -> None:
    loaded = load(tiny_path, load_format="dummy", dtype=jnp.float32)
    rotation, metadata, report = calibrate(loaded, data=TEXTS, progress=False, tokens=4 * LENGTH)
    assert set(report.checks) == {"bf16", *CANDIDATES}
    assert report.checks["bf16"].mean_kl == pytest.approx(0.0, abs=1e-9)
    assert metadata.recipe in CANDIDATES
    assert metadata.recipe == min(CANDIDATES, key=lambda name: report.checks[name].mean_kl)
    assert rotation.codecs == metadata.codecs
    assert any(note.startswith(f"{metadata.recipe}: least KL of 3") for note in report.notes)
    assert "In the running model: KL" in report.verdict
    assert f"| {metadata.recipe} | {report.checks[metadata.recipe].mean_kl:.4f} | - |" in (
        report.to_markdown()
    )
    assert set(report.others) == {
        "identity+centre",
        "hadamard+centre",
        "oscar-shared+centre",
        "hadamard+centre+gain",
        "oscar+centre+waterfill+gain",
        *CANDIDATES,
    } - {metadata.recipe}
