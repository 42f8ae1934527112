"""Tables in documents are those of the result files, and pictures show what the formulas say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calib.recipes import HeadStatistics, damped, recipe
from oscar_jax.evaluation.documents import MARK, TABLES, best_recipe, claims, updated
from oscar_jax.evaluation.pictures import balanced, binned, logits_on_pages
from oscar_jax.rotation import Rotation
from pallas_kernels.format import Codec

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_marked_tables_are_the_result_files_own(path: Path) -> None:
    text = path.read_text()
    again = updated(text, RESULTS)
    assert again == text, f"run: python -m oscar_jax.evaluation --into {path.relative_to(ROOT)}"
    assert text.count("<!-- table ") == len(MARK.findall(text)) == text.count("<!-- end -->")


def test_the_accuracy_page_has_every_table_and_shows_every_picture() -> None:
    text = (ROOT / "docs/accuracy.md").read_text()
    assert {name for _, name, _, _ in MARK.findall(text)} == set(TABLES)
    for picture in (ROOT / "docs/pictures").glob("*.png"):
        assert f"pictures/{picture.name}" in text
        assert picture.stat().st_size < 250_000  # bytes


def test_a_wrong_figure_in_a_document_is_put_right(tmp_path: Path) -> None:
    rows = [result_row("hadamard", [0.2, 0.4]), result_row("oscar", [0.1, 0.2])]
    (tmp_path / "x.json").write_text(json.dumps({"rows": rows}))
    mark = "<!-- table main x.json -->\n"
    right = updated(f"text\n\n{mark}\n0.9999\n\n<!-- end -->\nmore\n", tmp_path)
    assert right.startswith(f"text\n\n{mark}") and right.endswith("<!-- end -->\nmore\n")
    assert "| 0.1500 ± 0.0500 |" in right and "0.9999" not in right
    assert updated(right, tmp_path) == right
    with pytest.raises(ValueError, match="table 'speed': must be one of main, bands"):
        updated("<!-- table speed x.json -->\n<!-- end -->", tmp_path)
    with pytest.raises(ValueError, match=r"y\.json: cannot be read"):
        updated("<!-- table main y.json -->\n<!-- end -->", tmp_path)


def result_row(
    name: str, kl: list[float], spans: list[float] | None = None, bits: float = 2.5
) -> dict[str, Any]:
    error = float(np.std(kl, ddof=1) / np.sqrt(len(kl)))
    domain = {
        "perplexity": 8.0,
        "kl": float(np.mean(kl)),
        "kl_se": error,
        "top1": 0.9,
        "per_sequence": {"kl": kl, "nll": [2.0] * len(kl), "top1": [0.9] * len(kl)},
    }
    row = {"recipe": name, "bits": bits, "domains": {"prose": domain}}
    if spans is not None:
        row |= {"recall": float(np.mean(spans)), "recall_se": 0.02, "recall_per_span": spans}
    return row


def test_the_best_recipe_is_the_least_kl_in_the_same_bits() -> None:
    rows = [
        result_row("bf16", [0.0, 0.0], [0.6, 0.6], 16),
        result_row("hadamard", [0.2, 0.4], [0.1, 0.1]),
        result_row("oscar-shared", [0.1, 0.4]),
        result_row("stretch+centre", [0.01, 0.02], [0.3, 0.3]),
        result_row("stretch+centre@code", [0.001, 0.002]),
        result_row("stretch+centre+k4", [0.001, 0.001], bits=3.5),
        result_row("some/checkpoint", [0.001, 0.001]),
    ]
    assert best_recipe(rows) == "stretch+centre"
    lines = claims(rows).splitlines()
    assert lines[0].startswith("* `stretch+centre` has the least KL") and "0.0150" in lines[0]
    assert lines[1] == "* its KL is 0.050 [0.050, 0.050] times that of `hadamard`"
    # log ratios log(0.1) and log(0.05): mean log(0.0707), error log(2) / 2
    assert lines[2] == "* its KL is 0.071 [0.035, 0.141] times that of `oscar-shared`"
    assert lines[3].endswith(
        "30.0 ± 2.0 % of the spans where BF16 finds 60.0 ± 2.0 %: 0.50 of them"
    )
    with pytest.raises(ValueError, match="the rows have no hadamard"):
        best_recipe(rows[:1])


# --------------------------------------------------------------------------------------- pictures


def test_z_is_the_energy_of_keys_and_of_queries_in_the_stretched_space() -> None:
    rng = np.random.default_rng(0)
    keys, queries = (rng.normal(size=(200, 16)) * np.exp(rng.normal(size=16)) for _ in range(2))
    key, query = (damped(x.T @ x, 0.02) for x in (keys, queries))
    basis = recipe("stretch").keys(HeadStatistics(key, query, np.eye(16)))  # A^1/2 E
    z = balanced(key, query)
    np.testing.assert_allclose(basis.T @ key @ basis, np.diag(z), atol=1e-8 * z[0])
    inverse = np.linalg.inv(basis)
    np.testing.assert_allclose(inverse @ query @ inverse.T, np.diag(z), atol=1e-8 * z[0])


def test_gain_brings_the_largest_logits_back_to_the_line() -> None:
    rng = np.random.default_rng(1)
    keys, queries = rng.normal(size=(1, 512, 64)), 2 * rng.normal(size=(1, 40, 64))
    keys[0, ::16] += 0.5 * queries[0, :32]  # some keys that a query looks for
    slopes = {}
    for gain in (False, True):
        rotation = Rotation.hadamard(
            layers=1, kv_heads=1, head_dim=64, codec=Codec(clip_k=0.85, gain=gain)
        )
        exact, coded = logits_on_pages(rotation, 0, 0, keys, queries)
        assert np.corrcoef(exact, coded)[0, 1] > 0.85
        centres, means = binned(exact, coded)
        slopes[gain] = float((means / centres)[centres > 4].mean())
    assert slopes[False] < 0.95
    assert abs(slopes[True] - 1) < 0.5 * (1 - slopes[False])
