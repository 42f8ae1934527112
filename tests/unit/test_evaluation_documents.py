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
from oscar_jax.evaluation.statistics import paired_share
from oscar_jax.evaluation.table import length_table
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


def test_what_is_said_of_far_recall_is_the_result_files_own() -> None:
    rows = json.loads((RESULTS / "cpu-evaluate-smollm2-135m-recall.json").read_text())["rows"]
    spans = {
        row["recipe"]: {length: kinds["span"] for length, kinds in row["probes"].items()}
        for row in rows
    }
    exact, ships = spans["bf16"], spans["configs/rotations/smollm2-135m"]
    share = {n: paired_share(ships[n]["values"], exact[n]["values"]) for n in exact}
    near, middle, far = (f"{100 * share[n][0]:.0f}" for n in ("2048", "4096", "8192"))
    with_error = {
        n: f"{100 * mean:.0f} ± {100 * error:.0f} %" for n, (mean, error) in share.items()
    }
    found = f"{100 * exact['8192']['mean']:.0f}"
    first = [f"{100 * one['8192']['by_depth'][0]['mean']:.0f}" for one in (exact, ships)]
    readme, page = (
        " ".join((ROOT / name).read_text().split()) for name in ("README.md", "docs/accuracy.md")
    )
    assert (
        f"{near} % are still found at 2,048 tokens, {middle} % at 4,096 and {far} % at 8,192, "
        f"where BF16 itself finds {found} %" in readme
    )
    assert f"spans {with_error['2048']} remain at 2,048 tokens and {with_error['8192']} at" in page
    assert (
        f"{found} % of the spans at 8,192 tokens, and only {first[0]} % of those in the first "
        f"quarter, where what ships finds {first[1]} %" in page.replace("* ", "")
    )


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


def test_recall_at_a_length_is_put_beside_bf16s() -> None:
    def row(name: str, near: list[float], far: list[float]) -> dict[str, Any]:
        kinds = (
            {"span": {"mean": float(np.mean(x)), "se": 0.01, "values": x}} for x in (near, far)
        )
        return {"recipe": name, "probes": dict(zip(("2048", "8192"), kinds, strict=True))}

    rows = [row("bf16", [0.5, 0.5], [0.0, 0.0]), row("oscar", [0.25, 0.0], [0.1, 0.1])]
    lines = length_table(rows).splitlines()
    assert lines[0] == "| recipe | span 2048 (% of BF16's) | span 8192 (% of BF16's) |"
    assert lines[2] == "| bf16 | 50.0 ± 1.0 (100 ± 0) | 0.0 ± 1.0 (-) |"
    # 0.125 of 0.5; what is left of the pairs, +-0.125, has an error of 0.125, a quarter of 0.5
    assert lines[3] == "| oscar | 12.5 ± 1.0 (25 ± 25) | 10.0 ± 1.0 (-) |"
    assert length_table(rows[1:]) == ""


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
