"""Calibration of a real decoder: moments, held-out error, fallback, report, command line."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from calib import HeldOut, Text, calibrate, measure
from calib.__main__ import Arguments, run
from calib.calibration import FALLBACK_RATIO
from calib.choice import Check
from calib.collect import blockwise_causal_attention, collect_moments, collect_rows
from calib.data import (
    evaluation_texts,
    sequences,
)
from calib.fit import fit
from calib.held_out import sample_positions
from calib.recipes import RECIPES
from calib.report import CalibrationReport
from oscar_jax import checkpoint
from oscar_jax.config import KVConfig, model_entry
from oscar_jax.models import Loaded, causal_attend, load
from oscar_jax.rotation import Rotation
from oscar_jax.rotation_source import resolve_rotation

ROOT = Path(__file__).parents[2]
LENGTH = 640  # tokens: two pages behind the sink are visible to the last query
YAML = f"""
source: {{kind: hub, repo: none/none}}
license: none
architecture:
  architecture: llama
  vocab_size: 259
  hidden_size: 96
  intermediate_size: 128
  num_layers: 2
  num_heads: 6
  num_kv_heads: 2
  head_dim: 64
  rms_norm_eps: 1.0e-5
  rope_theta: 10000.0
  max_position_embeddings: {LENGTH}
  tie_word_embeddings: true
"""
PROSE = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 60
TEXTS = [Text("prose", "a", PROSE), Text("code", "b", "for i in range(10):\n    print(i)\n" * 120)]


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.yaml"
    path.write_text(YAML)
    return path


@pytest.fixture(scope="module")
def tiny(tiny_path: Path) -> Loaded:
    return load(tiny_path, load_format="dummy", dtype=jnp.float32)


@pytest.fixture(scope="module")
def calibrated(tiny: Loaded) -> tuple[Rotation, checkpoint.CheckpointMetadata, CalibrationReport]:
    return calibrate(tiny, "oscar+centre", TEXTS, progress=False, tokens=4 * LENGTH, check=False)


# ------------------------------------------------------------------------------ running the model


def test_attention_in_blocks_is_causal_attention() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.standard_normal((2, 300, heads, 16)), jnp.float32) for heads in (6, 2, 2)
    )
    whole, _ = causal_attend(model_entry("smollm2-135m").architecture)(None, 0, q, k, v)
    np.testing.assert_allclose(blockwise_causal_attention(q, k, v), whole, atol=2e-6)


def test_moments_of_a_model_are_those_of_its_own_rows(tiny: Loaded) -> None:
    rows = sequences(tiny.tokenizer.encode, TEXTS[:1], length=LENGTH, count=2)["prose"]
    moments = collect_moments(tiny.decoder, rows, sink=64)
    held = collect_rows(tiny.decoder, list(rows), KVConfig())
    for layer in range(2):
        statistics = moments.statistics(layer)
        keys = held.keys[layer][:, 64:].reshape(-1, 2, 64).astype(np.float64)
        values = held.values[layer][:, 64:].reshape(-1, 2, 64).astype(np.float64)
        assert statistics.tokens == len(keys) == 2 * (LENGTH - 64)
        np.testing.assert_allclose(statistics.mean, keys.mean(0), atol=1e-6)
        centred = keys - keys.mean(0)
        np.testing.assert_allclose(
            statistics.key, np.einsum("rkd,rke->kde", centred, centred) / len(keys), atol=1e-5
        )
        np.testing.assert_allclose(
            statistics.value, np.einsum("rkd,rke->kde", values, values) / len(keys), atol=1e-5
        )


def test_an_activation_that_is_not_finite_stops_at_once_naming_layer_and_tensor(
    tiny_path: Path,
) -> None:
    broken = load(tiny_path, load_format="dummy", dtype=jnp.float32)
    attention = broken.decoder.layers[1].self_attn
    first = attention.qkv_proj.weight.shape[0] - attention.qkv_proj.rows("v_proj").shape[0]
    weight = attention.qkv_proj.weight
    weight[...] = weight[...].at[first, 0].set(jnp.nan)
    with pytest.raises(ValueError, match="layer 1: v held values that are not finite"):
        calibrate(broken, "oscar+centre", TEXTS, progress=False, tokens=LENGTH)


# ------------------------------------------------------------------------------- held-out errors


def reference_errors(rotation: Rotation, held: HeldOut, layer: int, head: int) -> np.ndarray:
    """Key, value and output error of one head, and its output error by keys and by values alone:
    token by token in float64 numpy."""
    as64 = lambda x: np.asarray(x, np.float64)  # noqa: E731
    x_k, x_q, x_v, x_o, mu = (
        as64(getattr(rotation, side)[layer][head]) for side in ("x_k", "x_q", "x_v", "x_o", "mu")
    )

    assert rotation.codecs[0] is not None
    clip_k, clip_v = rotation.codecs[0].clip_k, rotation.codecs[0].clip_v

    def codec(row: np.ndarray, clip: float) -> np.ndarray:
        if clip < 1:
            limit = np.sort(np.abs(row))[int(clip * len(row))]
            row = np.clip(row, -limit, limit)
        scale = np.float64(np.float16((row.max() - row.min()) / 3))
        low = np.float64(np.float16(row.min()))
        return np.clip(np.floor((row - low) / scale + 0.5), 0, 3) * scale + low

    softmax = lambda x: np.exp(x / 8 - x.max() / 8) / np.exp(x / 8 - x.max() / 8).sum()  # noqa: E731
    sums = np.zeros(10)
    for sequence in range(len(held.keys[layer])):
        keys, values = (as64(x[layer][sequence][:, head]) for x in (held.keys, held.values))
        k_hat = np.array([codec((row - mu) @ x_k, clip_k) for row in keys])
        v_hat = np.array([codec(row @ x_v, clip_v) @ x_o for row in values])
        for index, position in enumerate(held.positions):
            visible = slice(64, 64 + 128 * ((int(position) + 1 - 64 - 256) // 128))
            for query in as64(held.queries[layer][sequence][index, 3 * head : 3 * head + 3]):
                logits = keys[visible] @ query
                noise = k_hat[visible] @ (query @ x_q) + query @ mu - logits
                weights = softmax(logits)
                # as served: everything up to the query, with the pages' keys and values replaced
                all_logits, all_values = keys[: position + 1] @ query, values[: position + 1]
                exact, moved, changed = softmax(all_logits), all_logits.copy(), all_values.copy()
                moved[visible] += noise
                changed[visible] = v_hat[visible]
                signal = ((exact @ all_values) ** 2).sum()
                difference = softmax(moved) @ changed - exact @ all_values
                by_keys = (softmax(moved) - exact) @ all_values
                by_values = exact @ (changed - all_values)
                sums += [
                    ((noise - noise.mean()) ** 2).sum(),
                    ((logits - logits.mean()) ** 2).sum(),
                    ((weights @ (v_hat - values)[visible]) ** 2).sum(),
                    ((weights @ values[visible]) ** 2).sum(),
                    (difference**2).sum(),
                    signal,
                    (by_keys**2).sum(),
                    signal,
                    (by_values**2).sum(),
                    signal,
                ]
    return sums[::2] / sums[1::2]


@pytest.mark.parametrize("name", ["identity", "oscar+centre"])
def test_held_out_errors_are_those_of_the_page_format(tiny: Loaded, name: str) -> None:
    rows = sequences(tiny.tokenizer.encode, TEXTS, length=LENGTH, count=3)
    moments = collect_moments(tiny.decoder, rows["prose"], sink=64)
    held = collect_rows(tiny.decoder, list(rows["code"][:2]), KVConfig())
    thinned = dataclasses.replace(
        held, positions=held.positions[::9], queries=tuple(q[:, ::9] for q in held.queries)
    )
    rotation, _ = fit(moments, name)
    errors = measure(rotation, thinned)
    for layer, head in ((0, 1), (1, 0)):
        want = reference_errors(rotation, thinned, layer, head)
        noise, signal = errors.sums[layer, :, :, :, :, head].sum((2, 3)).T
        have = noise / signal
        assert have[:3].tolist() == [
            one[layer, head] for one in (errors.key, errors.value, errors.output)
        ]
        # a code may differ where float32 and float64 round a tie apart
        assert have == pytest.approx(want, rel=2e-3)
    assert errors.saturated == 0
    first = np.arange(2) == 0
    one = measure(
        rotation,
        dataclasses.replace(
            thinned,
            queries=tuple(x[:1] for x in thinned.queries),
            keys=tuple(x[:1] for x in thinned.keys),
            values=tuple(x[:1] for x in thinned.values),
        ),
    )
    np.testing.assert_allclose(errors.of(sequences=first).output, one.output, rtol=1e-4)


def test_queries_are_sampled_where_a_page_is_visible() -> None:
    positions = sample_positions(2048, KVConfig(), count=5)
    assert positions.tolist() == [447, 847, 1247, 1647, 2047]
    with pytest.raises(ValueError, match="length=447: a sequence of at least 448 tokens"):
        sample_positions(447, KVConfig())
    rows = np.zeros((1, 640, 1, 64), np.float32)
    with pytest.raises(ValueError, match=r"held-out queries must stand at 447\.\.639"):
        HeldOut(np.array([446]), (rows,), (rows,), (rows,), KVConfig())


# -------------------------------------------------------------------------------------- calibrate


def test_calibration_says_what_it_used_and_for_which_model(calibrated, tiny: Loaded) -> None:  # type: ignore[no-untyped-def]
    rotation, metadata, report = calibrated
    rotation.check_matches(layers=2, kv_heads=2, head_dim=64, v_head_dim=64)
    assert metadata.tokens == report.fit.tokens == 4 * (LENGTH - 64)
    assert report.texts == {"prose": 2 * (LENGTH - 64), "code": 2 * (LENGTH - 64)}
    assert report.held_out_tokens == 2 * LENGTH
    assert metadata.fingerprint == checkpoint.fingerprint(tiny.config)
    assert metadata.weights_hash == tiny.weights_hash
    assert (metadata.sink, metadata.recent, metadata.page) == (64, 256, 128)
    assert (metadata.recipe, metadata.value_target) == ("oscar+centre", "proxy")
    assert report.errors is not None and metadata.sensitivity == report.errors.sensitivity
    assert all(keys > 0 and values > 0 for keys, values in metadata.sensitivity)
    assert set(report.others) == {
        "identity+centre", "hadamard+centre", "oscar-shared+centre"
    }  # fmt: skip


def test_calibration_repeats_to_the_bit(  # type: ignore[no-untyped-def]
    calibrated, tiny: Loaded
) -> None:
    first, metadata, _ = calibrated
    again, same, _ = calibrate(
        tiny, "oscar+centre", TEXTS, progress=False, tokens=4 * LENGTH, check=False
    )
    assert same.data_hash == metadata.data_hash
    for a, b in zip(first.x_k + first.x_v, again.x_k + again.x_v, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_random_weights_are_never_judged_and_their_checkpoint_serves_no_others(
    tiny: Loaded, tiny_path: Path, tmp_path: Path
) -> None:
    data = tmp_path / "text"
    data.write_text(PROSE)
    report = run(
        Arguments(
            str(tiny_path),
            tmp_path / "r",
            load_format="dummy",
            recipe="oscar+centre",
            data=(data,),
            tokens=2 * LENGTH,
            dtype="float32",
            check=False,
        )
    )
    said = "not judged, because the model's weights are random (--load-format dummy)"
    assert report.verdict.startswith(f"oscar+centre: {said}")
    judged = dataclasses.replace(report, checks={"bf16": Check((0.0,), ())}, chosen="bf16")
    assert judged.judgement is None
    written = json.loads((tmp_path / "r" / "report.json").read_text())
    assert written["random_weights"] and written["level"] is None
    assert written["warnings"][0].startswith("the model's weights are random")
    served = resolve_rotation(str(tmp_path / "r"), tiny, KVConfig())
    assert served.source.startswith("oscar+centre from ")
    real = dataclasses.replace(tiny, weights_hash="other")
    with pytest.raises(checkpoint.CheckpointError, match="was fitted to random weights"):
        resolve_rotation(str(tmp_path / "r"), real, KVConfig())


def test_too_little_text_is_refused_or_measured_on_nothing_with_a_warning(tiny: Loaded) -> None:
    with pytest.raises(ValueError, match="prose: has fewer than 640 tokens"):
        calibrate(tiny, "oscar", [Text("prose", "a", PROSE[:600])], progress=False)
    with pytest.raises(ValueError, match="data holds no text"):
        calibrate(tiny, "oscar", [], progress=False)
    _, metadata, report = calibrate(
        tiny, "oscar", [Text("prose", "a", PROSE[:700])], progress=False
    )
    assert report.errors is None
    assert "its quality is unknown" in report.verdict
    assert "576 tokens: below 2000 a fit is noisy, calibrate on more" in metadata.warnings
    assert "no text was left to measure the error on: pass more" in metadata.warnings
    assert "| 1 | - | - | - |" in report.to_markdown()


def test_a_head_whose_fit_is_clearly_worse_on_held_out_text_gets_a_hadamard(
    tiny: Loaded, monkeypatch: pytest.MonkeyPatch
) -> None:
    def concentrated(head):  # type: ignore[no-untyped-def]
        return np.linalg.qr(np.arange(64.0)[:, None] + np.eye(64))[0]  # a useless fixed rotation

    bad = dataclasses.replace(RECIPES["oscar"], keys=concentrated)
    monkeypatch.setitem(RECIPES, "oscar", bad)
    monkeypatch.setattr("calib.calibration.FALLBACK_RATIO", 1.0)
    _, metadata, report = calibrate(
        tiny, "oscar+centre", TEXTS, progress=False, tokens=2 * LENGTH, check=False
    )
    worse = report.fit.fallback_keys
    assert worse.any()
    hadamard = report.others["hadamard+centre"]
    assert report.errors is not None
    np.testing.assert_allclose(report.errors.key[worse], hadamard.key[worse], rtol=1e-4)
    (note,) = [line for line in report.notes if line.startswith("keys use the plain recipe")]
    layer, head = np.argwhere(worse)[0]
    assert f"layer {layer} head {head}" in note
    assert not any("Hadamard" in line for line in metadata.warnings)  # nothing to act on
    assert f"* {note}" in report.to_markdown()
    assert FALLBACK_RATIO > 1  # the default only acts on clear losses


# ----------------------------------------------------------------------------------------- report


def test_the_report_holds_every_layer_and_recipe(calibrated) -> None:  # type: ignore[no-untyped-def]
    _, _, report = calibrated
    files = report.files()
    fields = json.loads(files["report.json"])
    assert fields["verdict"] == report.verdict
    assert len(fields["layers"]) == 2
    assert fields["held_out_errors"].keys() == report.others.keys() | {"oscar+centre"}
    assert set(fields["study"]["by_domain"]) == {"prose", "code"}
    assert set(fields["study"]["by_offset"]) == {"up to 640", "as in the text"}
    stored = fields["layers"][1]["key_error oscar+centre"]
    np.testing.assert_allclose(stored, report.errors.key[1], rtol=1e-3)
    text = files["report.md"].decode()
    assert report.verdict in text
    assert (
        f"| oscar+centre | {report.errors.key_mean:.4f} | {report.errors.value_mean:.4f} "
        f"| {report.errors.output_mean:.5f} |" in text
    )
    assert len(re.findall(r"^\| \d+ \|", text, re.M)) == 2


def test_plots_are_png_files(calibrated) -> None:  # type: ignore[no-untyped-def]
    plots = calibrated[2].plots()
    assert set(plots) == {"errors.png", "spectra.png", "tokens.png"}
    for content in plots.values():
        assert content.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = np.frombuffer(content[16:24], ">u4")
        assert (width, height) in {(800, 600), (800, 400), (600, 400)}


# ---------------------------------------------------------------------- the checkpoint that ships


def test_the_shipped_rotation_of_smollm2_is_good_on_text_it_has_not_seen(smollm2: Loaded) -> None:
    path = model_entry("smollm2-135m").rotation
    assert path is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rotation, metadata = checkpoint.load(
            path, model_config=smollm2.config, weights_hash=smollm2.weights_hash
        )
    assert metadata.recipe == "stretch+centre+waterfill+gain"
    assert metadata.tokens > 8_000
    assert sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) < 4e6
    rows = sequences(smollm2.tokenizer.encode, evaluation_texts(), length=768, count=1)
    held = collect_rows(smollm2.decoder, [rows["prose"][0], rows["code"][0]], KVConfig())
    errors = measure(rotation, held)
    plain = measure(Rotation.hadamard(layers=30, kv_heads=3, head_dim=64), held)
    naive = measure(Rotation.identity(layers=30, kv_heads=3, head_dim=64), held)
    # over 2,048 tokens of calibration text: 0.039, 0.35 and 0.85; the first two pages are worse
    assert 0.03 < errors.key_mean < 0.09
    assert errors.key_mean < 0.2 * plain.key_mean < 0.2 * naive.key_mean
    assert errors.value_mean < 0.95 * plain.value_mean
