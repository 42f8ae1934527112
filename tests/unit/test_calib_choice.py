"""Recipe "auto": the candidates run in the model, and the choice follows what they show."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from calib import bench, calibrate
from calib.choice import CANDIDATES, Check, Checker, choose
from calib.collect import collect_moments, layer_frequencies
from calib.data import sequences
from calib.fit import fit
from calib.material import gather
from calib.recipes import recipe
from calib.verdict import judge
from oscar_jax.config import KVConfig
from oscar_jax.models import Loaded, load
from tests.tiny import TINY
from tests.unit.test_calib import LENGTH, TEXTS

# a session of its own would build the tiny model again: the fixture of test_calib makes the files
from tests.unit.test_calib import tiny_path as tiny_path

SERVED = 4096  # tokens


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
    loaded = taken_for_real(load(tiny_path, load_format="dummy", dtype=jnp.float32))
    rotation, metadata, report = calibrate(
        loaded, data=TEXTS, progress=False, tokens=2 * LENGTH, positions=SERVED
    )
    assert {"bf16", *candidates} <= set(report.checks) <= {"bf16", *candidates, "per layer"}
    assert report.checks["bf16"].mean_kl == pytest.approx(0.0, abs=1e-9)
    chosen, reason = choose(report.checks)
    assert report.chosen == chosen
    assert report.notes[0].endswith(reason)
    assert rotation.codecs == metadata.codecs == report.codecs
    assert report.judgement is not None and report.judgement.reason in report.verdict
    assert f"| {chosen} | {report.checks[chosen].mean_kl:.4f} | - |" in report.to_markdown()
    assert report.later is not None and report.later.end == SERVED
    assert report.later.mean_kl != report.checks[chosen].mean_kl
    assert report.to_json()["later"]["kl"] == report.later.kl
    assert f"| {chosen}, 3,456 tokens later | {report.later.mean_kl:.4f} | - |" in (
        report.to_markdown()
    )
    plain = {"identity+centre", "hadamard+centre", "oscar-shared+centre", "oscar+centre"}
    assert plain | {"hadamard+centre+gain", "oscar+centre+waterfill+gain"} <= set(report.others)
    assert metadata.recipe == report.fit.recipe


def taken_for_real(model: Loaded) -> Loaded:
    """Random weights are not judged otherwise."""
    return dataclasses.replace(model, random_weights=False)


def test_a_check_is_timed_for_as_many_caches_as_auto_runs(tiny_path: Path) -> None:
    loaded = load(tiny_path, load_format="dummy", dtype=jnp.float32)
    material = gather(loaded, TEXTS, KVConfig(), 2 * LENGTH, progress=False)
    row = bench.check(bench.Options("tiny"), loaded, material)
    assert (row["part"], row["layers"], row["caches"]) == ("check", 2, 3)
    assert row["seconds"] == row["bf16_s"] + 4 * row["seconds_per_cache"]
    assert row["compile_s"] == 3 * row["compile_s_per_cache"]
    assert row["seconds_per_cache"] > 0


def with_a_mean_in_slow_channels(model: Loaded) -> Loaded:
    """The model with what trained keys have: a part that all tokens share, where RoPE turns slowly.

    The channels 18 to 23 of a head's pairs turn once in 1,100 to 4,700 tokens.
    """
    decoder, heads = model.decoder, TINY.num_heads * TINY.head_dim
    keys = slice(heads, heads + TINY.num_kv_heads * TINY.head_dim)
    table = np.array(decoder.embed_tokens[...])
    decoder.embed_tokens[...] = jnp.asarray(table + table.std())
    for layer in decoder.layers:
        weight = np.array(layer.self_attn.qkv_proj.weight[...])
        spread = weight.std()
        weight[: keys.stop] *= 5.0  # attention that looks at some tokens more than at others
        weight[keys].reshape(TINY.num_kv_heads, 2, 32, -1)[:, :, 18:24] += 3.0 * spread
        layer.self_attn.qkv_proj.weight[...] = jnp.asarray(weight)
    decoder.norm.weight[...] = 28.0 * decoder.norm.weight[...]  # and surer of the next token
    return model


def test_a_fit_to_few_positions_is_called_out_and_one_to_all_is_not(tiny_path: Path) -> None:
    model = with_a_mean_in_slow_channels(load(tiny_path, load_format="dummy", dtype=jnp.float32))
    rows = [
        row
        for text in TEXTS
        for row in sequences(model.tokenizer.encode, [text], length=LENGTH, count=3)[text.domain]
    ]
    held = [rows.pop(5), rows.pop(2)]  # the last of each text
    moments = collect_moments(model.decoder, rows, sink=64)
    checker, frequencies = Checker(model, held, KVConfig()), layer_frequencies(model.config)
    kl, verdicts = {}, {}
    for positions in (None, SERVED):
        rotation, _ = fit(moments, "stretch+centre+waterfill+gain", positions=positions)
        start = checker.check(rotation)
        later = checker.check_later(rotation, SERVED, frequencies)
        assert later is not None
        kl[positions] = start.mean_kl, later.mean_kl
        verdicts[positions] = judge(start, start, later, positions)
        assert judge(start, start).level == "safe"  # what the start of the context says of both
    assert kl[None] == pytest.approx((0.0040, 0.0965), rel=0.1)
    assert kl[SERVED] == pytest.approx((0.0047, 0.0048), rel=0.1)
    assert verdicts[None].level == "do not"
    assert "calibrate with --positions 4096, or serve at most 640 tokens" in verdicts[None].reason
    assert verdicts[SERVED].level == "safe"
    assert verdicts[SERVED].reason.endswith("where the same text stands 3,456 tokens later")
    assert checker.check_later(rotation, LENGTH, frequencies) is None  # nothing lies further on


def test_every_candidate_is_a_recipe_and_the_best_comes_first() -> None:
    names = [recipe(name).full_name for name in CANDIDATES]
    assert names == list(CANDIDATES)
    assert names[0] == "stretch+centre+waterfill+gain"
