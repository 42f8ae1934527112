"""OptR: the loss is the served attention's, what it learns helps or is dropped, runs resume."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jaxtyping import Array
from tqdm import tqdm

from calib import HeldOut, Moments, bench, calibrate, fit, recipe
from calib.held_out import sample_positions
from calib.optr import Learned, OptrSettings, SideLosses, learn
from calib.straight_through import keys_from_pages, values_from_pages
from oscar_jax.config import KVConfig
from oscar_jax.models import load
from oscar_jax.rotation import Rotation
from pallas_kernels.format import (
    PAGE,
    Codec,
    decode_key_pages,
    decode_value_pages,
    encode_key_pages,
    encode_value_pages,
    hadamard,
)
from tests.unit.test_calib import LENGTH, TEXTS
from tests.unit.test_calib import tiny_path as tiny_path

# the shapes of test_calib's tiny model: what is compiled for one is compiled for the other
LAYERS, HEADS, GROUP, SIZE, ROWS = 2, 2, 3, 64, 2
WINDOWS = KVConfig()
POSITIONS = sample_positions(LENGTH, WINDOWS)
TURN = hadamard(SIZE).astype("f")
MEAN = 0.3
BASE = Rotation.from_transforms(
    [np.stack([TURN] * HEADS)] * LAYERS,
    [np.stack([TURN] * HEADS)] * LAYERS,
    [np.full((HEADS, SIZE), MEAN)] * LAYERS,
)
WEIGHTS = np.random.default_rng(7).standard_normal((LAYERS, HEADS * GROUP, SIZE, 96)).astype("f")
OUTPUT = list(WEIGHTS @ WEIGHTS.swapaxes(-1, -2))
SETTINGS = OptrSettings(steps=12, learning_rate=0.05, output_weight=0.5, check_every=6)


def made_rows(seed: int, batch: int, second: int | None = None) -> HeldOut:
    """Rows that a Hadamard turns into six large channels of 64; ``second``: the seed of head 1."""
    heads = []
    for head in range(HEADS):
        rng = np.random.default_rng([seed if second is None or head == 0 else second, head])
        draw = lambda *shape: rng.standard_normal((LAYERS, batch, *shape)).astype("f")  # noqa: B023, E731
        large = np.where(np.arange(SIZE) % 11 == 5, 6.0, 1.0).astype("f")
        q, k, v = draw(len(POSITIONS), GROUP, SIZE), draw(LENGTH, SIZE), draw(LENGTH, SIZE)
        heads.append((q, (k * large) @ TURN.T + MEAN, (v * large) @ TURN.T))
    queries, keys, values = zip(*heads, strict=True)
    return HeldOut(
        POSITIONS,
        tuple(np.concatenate(queries, -2)),
        tuple(np.stack(keys, -2)),
        tuple(np.stack(values, -2)),
        WINDOWS,
    )


@pytest.fixture(scope="module")
def rows() -> tuple[HeldOut, HeldOut]:
    return made_rows(0, ROWS), made_rows(1, ROWS)


@pytest.fixture(scope="module")
def learned(rows: tuple[HeldOut, HeldOut]) -> Learned:
    return learn(BASE, *rows, OUTPUT, SETTINGS)


def factors(rotation: Rotation, side: str) -> np.ndarray:
    """[layers, heads, D, D]: X_base^-1 X for the Hadamard base."""
    base = np.stack([np.asarray(x, np.float64) for x in getattr(BASE, side)])
    return np.linalg.inv(base) @ np.stack([np.asarray(x) for x in getattr(rotation, side)])


# ---------------------------------------------------------------------------- quantiser and loss


@functools.partial(jax.jit, static_argnames="codec")
def stored(x: Array, codec: Codec) -> tuple[Array, Array]:
    """[B, T, D] as keys and as values of real pages, packed and unpacked."""
    pages = x.reshape(len(x), -1, PAGE, SIZE)
    keys, values = encode_key_pages(pages, codec), encode_value_pages(pages, codec)
    return (
        decode_key_pages(keys.words, keys.meta, codec).reshape(x.shape),
        decode_value_pages(values.words, values.meta).reshape(x.shape),
    )


@functools.partial(jax.jit, static_argnames="codec")
def passed(x: Array, seen: Array, codec: Codec) -> tuple[tuple[Array, Array], Array]:
    """What ``calib`` takes for the same rows, and the keys' pull-back of ``seen``."""
    keys, pull = jax.vjp(lambda x: keys_from_pages(x, codec), x)
    return (keys, values_from_pages(x, codec)), pull(seen)[0]


@pytest.mark.parametrize("codec", [Codec(), Codec(key="waterfill", gain=True)], ids=str)
def test_the_forward_values_are_those_of_stored_pages(codec: Codec) -> None:
    x = jax.random.normal(jax.random.key(0), (2, 2 * PAGE, SIZE)) * jnp.linspace(3, 0.1, SIZE)
    for ours, theirs in zip(passed(x, x, codec)[0], stored(x, codec), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_gradients_pass_through_rounding_stop_at_the_clip_and_follow_the_scale() -> None:
    """d x^ = d c + (x^ - c) / (max c - min c) d(max c - min c), c clipped at a constant."""
    x, seen = jax.random.normal(jax.random.key(0), (2, 2, 2 * PAGE, SIZE))
    (back, _), gradient = passed(x, seen, Codec())
    x, back, seen = (np.asarray(one, np.float64) for one in (x, back, seen))
    threshold = np.sort(np.abs(x), -1)[..., 61:62]  # floor(0.96 * 64)
    inside = np.abs(x) <= threshold
    np.testing.assert_array_equal((~inside).sum(-1), 2)
    clipped = np.clip(x, -threshold, threshold)
    high, low = clipped.max(-1, keepdims=True), clipped.min(-1, keepdims=True)
    scale = (seen * (back - clipped)).sum(-1, keepdims=True) / (high - low)
    top, bottom = clipped == high, clipped == low  # equal shares, also to those that were clipped
    share = top / top.sum(-1, keepdims=True) - bottom / bottom.sum(-1, keepdims=True)
    np.testing.assert_allclose(gradient, inside * (seen + scale * share), atol=1e-4)


def test_losses_are_those_of_the_served_attention(
    rows: tuple[HeldOut, HeldOut], learned: Learned
) -> None:
    """In float64 from the definition: windows exact, pages visible as in decoding."""
    held, layer, head = rows[1], 1, 1
    k, v = (x[layer][:, :, head].astype(np.float64) for x in (held.keys, held.values))
    q = held.queries[layer][:, :, GROUP * head : GROUP * (head + 1)].astype(np.float64)
    x_k, x_v = (np.asarray(getattr(learned.rotation, side)[layer][head]) for side in ("x_k", "x_v"))
    tokens = slice(64, 64 + 2 * PAGE)
    turned, _ = stored(jnp.asarray((k[:, tokens] - MEAN) @ x_k, jnp.float32), Codec())
    k_hat = k.copy()
    k_hat[:, tokens] = turned @ np.linalg.inv(x_k) + MEAN
    sides = []
    for x in (np.asarray(BASE.x_v[layer][head]), x_v):
        _, turned = stored(jnp.asarray(v[:, tokens] @ x, jnp.float32), Codec())
        sides.append(v.copy())
        sides[-1][:, tokens] = turned @ np.linalg.inv(x)
    kl, routing, energy = [], [], []
    errors: tuple[list[float], list[float]] = ([], [])  # the values' loss for base and learned
    for b, index, group in np.ndindex(ROWS, len(POSITIONS), GROUP):
        position = int(POSITIONS[index])
        seen, place = slice(0, position + 1), np.arange(position + 1)
        page = (place >= 64) & (place < 64 + PAGE * ((position + 1 - 64 - 256) // PAGE))
        logits = k[b, seen] @ q[b, index, group] / 8
        coded = np.where(page, k_hat[b, seen] @ q[b, index, group] / 8, logits)
        p, p_q = (np.exp(x) / np.exp(x).sum() for x in (logits, coded))
        square = lambda x, m=OUTPUT[layer][GROUP * head + group]: x @ m @ x  # noqa: E731
        kl.append((p * np.log(p / p_q)).sum())
        energy.append(square(p @ v[b, seen]))
        routing.append(square((p_q - p) @ v[b, seen]))
        for found, v_hat in zip(errors, sides, strict=True):
            error = np.where(page[:, None], v_hat[b, seen] - v[b, seen], 0)
            found.append(square(p_q @ error))
    keys, values = learned.keys, learned.values
    expected = np.mean(kl) + SETTINGS.output_weight * np.mean(routing) / np.mean(energy)
    assert keys.held_after[layer, head] == pytest.approx(expected, rel=2e-3)
    for measured, found in zip((values.held_before, values.held_after), errors, strict=True):
        assert measured[layer, head] == pytest.approx(np.mean(found) / np.mean(energy), rel=2e-3)


# -------------------------------------------------------------------------------------- learning


def test_learning_lowers_the_loss_and_no_head_is_worse_on_held_out_rows(learned: Learned) -> None:
    for side in (learned.keys, learned.values):
        assert side.kept.all()
        assert (side.train_after < side.train_before).all()
        assert (side.held_after < side.held_before).all()


def test_channels_that_hadamard_left_large_are_spread(learned: Learned) -> None:
    """Six of 64 channels set the scale of every row: nearly any rotation that mixes is better."""
    assert (learned.keys.held_after < 0.5 * learned.keys.held_before).all()
    assert (learned.values.held_after < 0.5 * learned.values.held_before).all()


def test_the_factor_is_orthogonal_and_differs_between_heads(learned: Learned) -> None:
    for side in ("x_k", "x_v"):
        factor = factors(learned.rotation, side)
        product = factor @ factor.swapaxes(-1, -2)
        assert np.abs(product - np.eye(SIZE)).max() < 1e-5
        assert np.abs(factor - np.eye(SIZE)).max(axis=(-1, -2)).min() > 0.05
        assert np.abs(factor[:, 0] - factor[:, 1]).max() > 0.05
    assert learned.rotation.codecs == BASE.codecs
    np.testing.assert_array_equal(learned.rotation.mu[1], BASE.mu[1])


def test_another_heads_rows_change_nothing(rows: tuple[HeldOut, HeldOut], learned: Learned) -> None:
    again = learn(
        BASE, made_rows(0, ROWS, second=5), made_rows(1, ROWS, second=6), OUTPUT, SETTINGS
    )
    for side in ("x_k", "x_v"):
        ours, theirs = (np.stack(getattr(x.rotation, side)) for x in (learned, again))
        np.testing.assert_array_equal(ours[:, 0], theirs[:, 0])
        assert np.abs(ours[:, 1] - theirs[:, 1]).max() > 0.05


def test_a_learning_rate_that_destroys_everything_leaves_the_base(
    rows: tuple[HeldOut, HeldOut],
) -> None:
    wrecked = learn(BASE, *rows, OUTPUT, dataclasses.replace(SETTINGS, learning_rate=1e4))
    for losses, side in ((wrecked.keys, "x_k"), (wrecked.values, "x_v")):
        assert not losses.kept.any()
        np.testing.assert_array_equal(losses.held_after, losses.held_before)
        for ours, base in zip(getattr(wrecked.rotation, side), getattr(BASE, side), strict=True):
            np.testing.assert_array_equal(ours, base)


# ---------------------------------------------------------------------------------------- resume


class Interrupted(Exception):
    pass


class StopsAfter(tqdm):
    """A progress bar that ends the run after so many steps, as Ctrl-C would."""

    def __init__(self, steps: int):
        super().__init__(disable=True)
        self.left = steps

    def update(self, n: float | None = 1) -> None:
        self.left -= int(n or 0)
        if self.left < 0:
            raise Interrupted


def test_an_interrupted_run_ends_with_the_same_bits(
    rows: tuple[HeldOut, HeldOut], learned: Learned, tmp_path: Path
) -> None:
    for steps in (
        8,
        15,
    ):  # in the keys, two steps after a save; in the values, before the first one
        with pytest.raises(Interrupted):
            learn(BASE, *rows, OUTPUT, SETTINGS, resume=tmp_path, progress=StopsAfter(steps))
    counted = StopsAfter(18)  # 12 for the keys, 6 for the values
    resumed = learn(BASE, *rows, OUTPUT, SETTINGS, resume=tmp_path, progress=counted)
    assert counted.left == 0  # what was done before is counted, once
    for ours, theirs in zip(
        jax.tree.leaves(resumed.rotation), jax.tree.leaves(learned.rotation), strict=True
    ):
        np.testing.assert_array_equal(ours, theirs)
    for field in dataclasses.fields(SideLosses):
        ours, theirs = (getattr(one.keys, field.name) for one in (resumed, learned))
        np.testing.assert_array_equal(ours, theirs)


def test_a_directory_of_another_run_is_refused(
    rows: tuple[HeldOut, HeldOut], tmp_path: Path
) -> None:
    with pytest.raises(Interrupted):
        learn(BASE, *rows, OUTPUT, SETTINGS, resume=tmp_path, progress=StopsAfter(0))
    other = dataclasses.replace(SETTINGS, seed=1)
    with pytest.raises(ValueError, match=r"holds another run \(settings is .*'seed': 0.*'seed': 1"):
        learn(BASE, *rows, OUTPUT, other, resume=tmp_path)
    with pytest.raises(ValueError, match=r"holds another run \(rows is '[0-9a-f]{64}' there and"):
        learn(BASE, rows[1], rows[1], OUTPUT, SETTINGS, resume=tmp_path)
    (tmp_path / "run.json").unlink()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(ValueError, match=r"is not empty and holds no run of OptR"):
        learn(BASE, *rows, OUTPUT, SETTINGS, resume=tmp_path)


# ----------------------------------------------------------------------------------- wrong input


def test_wrong_input_is_named(rows: tuple[HeldOut, HeldOut]) -> None:
    train, held = rows
    with pytest.raises(ValueError, match=r"OptrSettings.steps=0: must be at least 1"):
        OptrSettings(steps=0)
    with pytest.raises(ValueError, match=r"OptrSettings.learning_rate=nan: must be positive"):
        OptrSettings(learning_rate=float("nan"))
    three = Rotation.hadamard(layers=3, kv_heads=HEADS, head_dim=SIZE)
    with pytest.raises(ValueError, match=r"train: rows have .*\(2, 2, 64\), the base \(3, 2, 64\)"):
        learn(three, train, held, OUTPUT, SETTINGS)
    with pytest.raises(ValueError, match=r"output has shapes .*must be \(6, 64, 64\) for 2 layers"):
        learn(BASE, train, held, OUTPUT[:1], SETTINGS)
    broken = np.array(train.keys[1])
    broken[0, 3, 1, 7] = np.nan
    nan = dataclasses.replace(train, keys=(train.keys[0], broken))
    with pytest.raises(ValueError, match="train: layer 1 holds values that are not finite"):
        learn(BASE, nan, held, OUTPUT, SETTINGS)


# ---------------------------------------------------------------------------------------- recipe


def test_the_modifier_goes_with_every_base_and_codec() -> None:
    assert recipe("hadamard+optr").full_name == "hadamard+optr"
    full = recipe("stretch+optr+gain+waterfill+centre")
    assert full.full_name == "stretch+centre+waterfill+gain+optr"
    assert full.closed_form.full_name == "stretch+centre+waterfill+gain"
    with pytest.raises(ValueError, match=r"'oscar\+optr': \+optr learns from rows.*fit 'oscar'"):
        fit(Moments.zeros(layers=1, kv_heads=1, head_dim=64), "oscar+optr")


def test_a_model_is_calibrated_with_what_its_heads_learned(tiny_path: Path, tmp_path: Path) -> None:
    tiny = load(tiny_path, load_format="dummy", dtype=jnp.float32)
    rotation, metadata, report = calibrate(
        tiny,
        "hadamard+optr",
        TEXTS,
        progress=False,
        tokens=2 * LENGTH,
        optr=SETTINGS,
        optr_resume=tmp_path,
        check=False,
    )
    assert metadata.recipe == report.fit.recipe == "hadamard+optr"
    assert (tmp_path / "hadamard+optr" / "run.json").is_file()
    keys, values = (note for note in report.notes if note.startswith("OptR"))
    assert keys.startswith("OptR, keys: kept for ") and "of 4 heads; mean loss" in keys
    assert values.startswith("OptR, values: kept for ")
    product = np.stack(rotation.x_k) @ np.stack(rotation.x_k).swapaxes(-1, -2)
    scale = product[..., :1, :1]
    np.testing.assert_allclose(
        product / scale, np.broadcast_to(np.eye(SIZE), product.shape), atol=1e-5
    )
    assert report.errors is not None and report.errors.key_mean < report.others["hadamard"].key_mean


def test_the_benchmark_times_every_part_and_says_what_all_layers_take(
    tiny_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "calibration_texts", lambda _: TEXTS)  # as compiled above
    tiny = load(tiny_path, load_format="dummy", dtype=jnp.float32)
    monkeypatch.setattr(bench, "load", lambda *_, **__: tiny)
    out = tmp_path / "result.json"
    arguments = f"--model {tiny_path} --load-format dummy --parts optr --recipe hadamard"
    arguments += f" --base hadamard --tokens {2 * LENGTH} --optr-steps 12 --out {out}"
    assert bench.main(arguments.split()) == 0
    said = json.loads(out.read_text())
    assert said["command"] == f"python -m calib.bench {arguments}"
    assert said["config"]["random_weights"] and said["config"]["model_layers"] == LAYERS
    load_row, passes, optr = said["rows"]
    assert [row["part"] for row in said["rows"]] == ["load", "passes", "optr"]
    assert load_row["weight_bytes"] == sum(
        x.nbytes for x in jax.tree.leaves(nnx.state(tiny.decoder))
    )
    # a sequence of each domain is fitted to, half of it again, and two more are kept
    assert passes["sequences"] == {"moments": 4, "rows": 4, "rows_for_optr": 2}
    assert all(ms > 0 for ms in passes["ms_per_sequence"].values())
    assert (optr["layers"], optr["heads"]) == (LAYERS, LAYERS * HEADS)
    assert optr["sequences"] == {"learned_from": 2, "held_out": 2}
    assert optr["steps"] == {"keys": 12, "values": 6}
    steps = sum(optr["steps"][side] * optr["ms_per_step"][side] for side in ("keys", "values"))
    assert 0 < steps < 3e3 * optr["run_s"]
    assert optr["seconds"] == optr["output_products_s"] + optr["run_s"]
    whole = said["whole"]
    assert whole["seconds"] == sum(whole["seconds_by_part"].values())
    assert whole["seconds_by_part"]["optr"] == optr["compile_s"] + optr["seconds"]
    assert whole["optr_with_its_rows_s"] == (
        whole["seconds_by_part"]["optr"] + passes["optr_rows_s"]
    )
    one_layer = bench.Options("tiny", recipe="hadamard", parts="fits", layers=1, tokens=2 * LENGTH)
    _, fits = bench.measure(one_layer, tiny)
    assert (fits["part"], fits["layers"]) == ("fits", 1)
    assert fits["seconds"] == LAYERS * fits["run_s"]
    assert 0 < fits["ms_per_layer"]["one closed form"] < 1e3 * fits["run_s"]


def test_a_benchmark_of_unknown_parts_or_recipes_is_refused() -> None:
    with pytest.raises(ValueError, match="parts='fit': must be some of optr,fits,check"):
        bench.Options("x", parts="fit")
    with pytest.raises(ValueError, match="layers=0: must be at least 1"):
        bench.Options("x", layers=0)
    with pytest.raises(ValueError, match="recipe='stretsch': must be one of"):
        bench.Options("x", base="stretsch")
