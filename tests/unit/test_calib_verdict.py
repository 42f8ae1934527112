"""What a report says in plain words: safe, use 3-bit keys, or do not, and why."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from calib.choice import Check, Later
from calib.fit import FitReport
from calib.held_out import Errors
from calib.report import CalibrationReport


def sums(*errors: float) -> np.ndarray:
    """Noise and signal of one layer, sequence, query and head with these errors."""
    return np.array([[error, 1.0] for error in errors]).reshape(1, len(errors), 2, 1, 1, 1)


def make_report(
    key: float, others: dict[str, float], name: str = "oscar+centre"
) -> CalibrationReport:
    errors = lambda key: Errors(sums(key, 0.03, 0.002, 0.0015, 0.0005), 0)  # noqa: E731
    fitted = FitReport(
        recipe=name,
        value_target="proxy",
        tokens=4000,
        predictor=np.ones((1, 1)),
        fallback_keys=np.zeros((1, 1), bool),
        fallback_values=np.zeros((1, 1), bool),
        condition=1.0,
        warnings=(),
        statistics=(),
        centred=True,
        damping=0.02,
    )
    return CalibrationReport(
        fitted, errors(key), {n: errors(v) for n, v in others.items()}, {}, 640, 1.0, ()
    )


def test_without_a_run_in_the_model_the_verdict_is_only_what_was_measured() -> None:
    verdict = make_report(0.16, {}).verdict
    assert verdict.startswith("oscar+centre: not judged, because it did not run in the model.")
    assert "2-bit keys change the attention logits by 16.0% of their variance" in verdict
    assert "what attention answers by 0.20%" in verdict


@pytest.mark.parametrize(
    ("kl", "recall", "level", "words"),
    [
        (0.004, 0.45, "safe", "KL 0.0040 and 90% of the spans that BF16 recalls: within 0.015"),
        (0.010, 0.31, "use 3-bit keys", "verbatim retrieval from the pages suffers"),
        (0.040, 0.45, "use 3-bit keys", "the next token changes visibly"),
        (0.100, 0.45, "do not", "KL over 0.06, or under 25% of BF16's recall"),
        (0.010, 0.10, "do not", "20% of the spans"),
    ],
)
def test_the_verdict_follows_kl_and_recall(
    kl: float, recall: float, level: str, words: str
) -> None:
    checks = {"bf16": Check((0.0,), (0.5,)), "oscar+centre": Check((kl,), (recall,))}
    report = dataclasses.replace(make_report(0.1, {}), checks=checks, chosen="oscar+centre")
    assert report.verdict.startswith(f"oscar+centre: {level}. ")
    assert words in report.verdict
    assert report.judgement is not None and report.judgement.level == level


@pytest.mark.parametrize(
    ("recall", "later", "positions", "level", "words"),
    [
        (0.45, 0.013, 8192, "safe", "KL 0.0130 where the same text stands 6,144 tokens later."),
        (
            0.45,
            0.25,
            2048,
            "do not",
            "KL 0.2500 where the same text stands 6,144 tokens later (safe is 0.015): the fit is "
            "to positions up to 2,048, the context 8,192 tokens: calibrate with --positions 8192, "
            "or serve at most 2,048 tokens. At the start KL 0.0070 and 90%",
        ),
        (0.45, 0.25, None, "do not", "positions as they stand in the text, the context 8,192"),
        (0.45, 0.03, 8192, "use 3-bit keys", "has these positions already, so use 3-bit keys"),
        (0.31, 0.03, 2048, "use 3-bit keys", "matter. KL 0.0300 where the same text stands 6,144"),
        (0.10, 0.03, 2048, "do not", "calibrate with --positions 8192, or serve at most 2,048"),
    ],
)
def test_the_worse_end_of_the_context_decides(
    recall: float, later: float, positions: int | None, level: str, words: str
) -> None:
    checks = {"bf16": Check((0.0,), (0.5,)), "oscar+centre": Check((0.007,), (recall,))}
    report = make_report(0.1, {})
    report = dataclasses.replace(
        report,
        fit=dataclasses.replace(report.fit, positions=positions),
        checks=checks,
        chosen="oscar+centre",
        later=Later(6144, 2048, (later,)),
    )
    assert report.verdict.startswith(f"oscar+centre: {level}. ")
    assert words in report.verdict


def test_the_verdict_recommends_per_head_rotations_when_sharing_costs() -> None:
    # U63: 30B-A3B loses 17 % of perplexity to one rotation per layer
    verdict = make_report(
        0.3, {"oscar-shared+centre": 0.3, "oscar+centre": 0.15}, "oscar-shared+centre"
    ).verdict
    assert "One rotation per layer would cost 2.00x the key error: use oscar+centre." in verdict
    assert "oscar+centre has less key error (15.0%)" in verdict
    assert (
        "One rotation"
        not in make_report(0.15, {"oscar-shared+centre": 0.155, "oscar+centre": 0.15}).verdict
    )
