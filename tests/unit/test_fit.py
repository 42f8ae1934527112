"""Closed-form fits: eigenvector order and signs, scaling, dead heads, too little data."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from calib import Moments, fit
from calib.choice import CANDIDATES, candidates
from calib.fit import power_of_two, predictor, predictor_bound
from calib.recipes import RECIPES, HeadStatistics, damped, descending_eigh, recipe, with_widths
from oscar_jax.rotation import Rotation
from pallas_kernels.format import Codec, hadamard

D, DV, KV_HEADS, GROUP, LAYERS = 64, 32, 2, 2, 2
TOKENS = 2048
NAMES = [
    *(name + centre for name in RECIPES for centre in ("", "+centre")),
    "stretch+centre+gain",
    "stretch+centre+waterfill+gain",
    "oscar+centre+waterfill",
]


def random_covariance(rng: np.random.Generator, size: int, decay: float = 0.9) -> np.ndarray:
    """A factor F with F^T F the covariance: random axes, geometric spectrum."""
    axes = np.linalg.qr(rng.standard_normal((size, size)))[0]
    return (decay ** np.arange(size))[:, None] ** 0.5 * axes


def make_moments(tokens: int = TOKENS, **dead: Any) -> Moments:
    """Moments of rows with decaying spectra and a key mean; ``k=(layer, head)`` zeroes a head."""
    rng = np.random.default_rng(1)
    moments = Moments.zeros(layers=LAYERS, kv_heads=KV_HEADS, head_dim=D, v_head_dim=DV)
    update = jax.jit(Moments.update, static_argnums=1)
    for layer in range(LAYERS):
        tensors = {}
        for name, heads, group, size in (
            ("q", KV_HEADS, GROUP, D),
            ("k", KV_HEADS, 1, D),
            ("v", KV_HEADS, 1, DV),
            ("o", KV_HEADS, GROUP, DV),
        ):
            one = np.stack(
                [
                    rng.standard_normal((tokens, group, size)) @ random_covariance(rng, size)
                    + (name == "k") * rng.standard_normal(size)
                    for _ in range(heads)
                ],
                axis=1,
            )
            if dead.get(name, (-1, 0))[0] == layer:
                one[:, dead[name][1]] = 0
            tensors[name] = one.reshape(1, tokens, heads * group, size).astype(np.float32)
        moments = update(moments, layer, tensors["q"], tensors["k"], tensors["v"], tensors["o"])
    return moments


@pytest.fixture(scope="module")
def moments() -> Moments:
    return make_moments()


def sides(rotation: Rotation, layer: int, head: int) -> tuple[np.ndarray, np.ndarray]:
    x_k, x_v = rotation.x_k[layer][head], rotation.x_v[layer][head]
    return np.asarray(x_k, np.float64), np.asarray(x_v, np.float64)


def unscaled(x: np.ndarray) -> np.ndarray:
    """An orthogonal matrix times a power of two, as the orthogonal matrix."""
    scale = np.linalg.norm(x, axis=-1)
    np.testing.assert_allclose(scale, scale[0], rtol=1e-5)
    assert np.log2(scale[0]) == pytest.approx(round(float(np.log2(scale[0]))), abs=1e-5)
    return x / scale[0]


# ------------------------------------------------------------------------- eigenvectors (U73, U77)


def test_eigenvalues_come_largest_first_and_follow_a_shuffled_diagonal() -> None:
    order = np.random.default_rng(0).permutation(128)
    values, vectors = descending_eigh(np.diag(np.arange(1.0, 129.0)[order]))
    np.testing.assert_allclose(values, np.arange(128.0, 0.0, -1.0))
    for rank in range(128):
        expected = np.zeros(128)
        expected[np.flatnonzero(order == 127 - rank)] = 1.0
        np.testing.assert_allclose(vectors[:, rank], expected, atol=1e-12)


def test_the_sign_rule_does_not_depend_on_the_solver(monkeypatch: pytest.MonkeyPatch) -> None:
    factor = random_covariance(np.random.default_rng(2), D)
    matrix = factor.T @ factor
    _, vectors = descending_eigh(matrix)
    largest = np.abs(vectors).argmax(0)
    assert (vectors[largest, np.arange(D)] > 0).all()
    solve = np.linalg.eigh
    flips = np.where(np.arange(D) % 3 == 0, -1.0, 1.0)
    monkeypatch.setattr(np.linalg, "eigh", lambda m: (solve(m)[0], solve(m)[1] * flips))
    np.testing.assert_array_equal(descending_eigh(matrix)[1], vectors)


def test_a_tie_for_the_largest_entry_is_settled_by_the_first() -> None:
    _, vectors = descending_eigh(np.array([[2.0, -1.0], [-1.0, 2.0]]))
    np.testing.assert_allclose(vectors, np.array([[1.0, 1.0], [-1.0, 1.0]]) / np.sqrt(2))


def test_equal_eigenvalues_do_not_crash_and_repeat_exactly() -> None:
    values, vectors = descending_eigh(np.eye(64))
    np.testing.assert_array_equal(values, np.ones(64))
    np.testing.assert_array_equal(vectors, np.eye(64))


def test_the_leading_subspace_agrees_with_another_solver() -> None:
    factor = random_covariance(np.random.default_rng(3), D, decay=0.8)
    _, vectors = descending_eigh(factor.T @ factor)
    _, _, rows = np.linalg.svd(factor)  # right singular vectors, another algorithm
    with jax.default_matmul_precision("highest"):
        _, on_device = jax.numpy.linalg.eigh(jax.numpy.asarray(factor.T @ factor))
    ours = vectors[:, :8] @ vectors[:, :8].T
    np.testing.assert_allclose(ours, rows[:8].T @ rows[:8], atol=1e-10)
    device = np.asarray(on_device)[:, ::-1][:, :8]
    np.testing.assert_allclose(ours, device @ device.T, atol=1e-3)


def test_fewer_tokens_than_channels_still_give_an_orthogonal_transform() -> None:
    rows = np.random.default_rng(4).standard_normal((12, 128)).astype(np.float32)
    values, vectors = descending_eigh((rows.T @ rows / 12).astype(np.float64))
    assert (values >= 0).all() and (values[12:] < 1e-6).all()
    np.testing.assert_allclose(vectors.T @ vectors, np.eye(128), atol=1e-12)


def test_the_same_moments_give_the_same_bits(moments: Moments) -> None:
    first, second = (fit(moments, "oscar+centre")[0] for _ in range(2))
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


# --------------------------------------------------------------------------------------- recipes


@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_has_unit_rows_and_matching_inverses_and_most_are_rotations(
    moments: Moments, name: str
) -> None:
    rotation, report = fit(moments, name)
    rotation.check_inverses()
    rotation.check_matches(layers=LAYERS, kv_heads=KV_HEADS, head_dim=D, v_head_dim=DV)
    assert report.recipe == name
    stretched = name.startswith("stretch")
    assert (report.condition > 2) if stretched else (report.condition < 1 + 1e-4)
    assert report.warnings == ()
    centred = "+centre" in name
    for layer in range(LAYERS):
        statistics = moments.statistics(layer)
        for head in range(KV_HEADS):
            x_k, x_v = sides(rotation, layer, head)
            if not stretched:
                unscaled(x_k)
            unscaled(x_v)
            mean = statistics.mean[head]
            np.testing.assert_allclose(rotation.mu[layer][head], mean * centred, rtol=1e-6)
            rows = statistics.key[head] + (not centred) * np.outer(mean, mean)
            for x, second in ((x_k, rows), (x_v, statistics.value[head])):
                rms = np.sqrt(np.trace(x.T @ second @ x) / len(x))
                assert 2**-0.5 <= rms <= 2**0.5


def test_a_wider_recipe_has_the_same_transforms_and_a_codec_that_does_not_clip(
    moments: Moments,
) -> None:
    """One fit serves every width, so a checkpoint can be widened without its text."""
    for name, codec in (
        ("oscar+centre", Codec(clip_k=1.0, key_bits=3)),
        ("stretch+centre+waterfill+gain", Codec("waterfill", 1.0, gain=True, key_bits=3)),
    ):
        narrow, wide = (fit(moments, name + more)[0] for more in ("", "+k3"))
        assert set(wide.codecs) == {codec}
        for side in ("x_k", "x_v", "mu"):
            for one, other in zip(getattr(narrow, side), getattr(wide, side), strict=True):
                assert (one == other).all()
    assert set(fit(moments, "oscar+v4")[0].codecs) == {Codec(clip_v=1.0, value_bits=4)}


def test_widths_have_names_and_keys_have_one_width() -> None:
    name = with_widths("stretch+gain+centre", 4, 4)
    assert recipe(name).full_name == "stretch+centre+gain+k4+v4"
    assert recipe(name).fallback.full_name == "hadamard+centre+gain+k4+v4"
    assert [recipe(one).codec.key_bits for one in candidates("auto+k3")] == [3] * len(CANDIDATES)
    with pytest.raises(ValueError, match=r"keys have one width; use \+k3 or \+k4"):
        recipe("oscar+k3+k4")
    with pytest.raises(ValueError, match=r"Codec.value_bits=3: must be one of \(2, 4\)"):
        with_widths("oscar", 2, 3)


def test_identity_and_hadamard_are_what_they_say(moments: Moments) -> None:
    for name, keys, values, codec in (
        ("identity", np.eye(D), np.eye(DV), Codec(clip_k=1.0, clip_v=1.0)),
        ("hadamard", hadamard(D), hadamard(DV), Codec()),
    ):
        rotation, _ = fit(moments, name)
        assert set(rotation.codecs) == {codec}
        x_k, x_v = sides(rotation, 1, 0)
        np.testing.assert_allclose(unscaled(x_k), keys, atol=1e-7)
        np.testing.assert_allclose(unscaled(x_v), values, atol=1e-7)


@pytest.mark.parametrize("target", ["proxy", "attention"])
def test_oscar_diagonalises_queries_and_its_value_target_then_flattens_them(
    moments: Moments, target: str
) -> None:
    rotation, report = fit(moments, "oscar", value_target=target)
    assert report.value_target == target
    statistics = moments.statistics(0)
    for head in range(KV_HEADS):
        for x, matrix in zip(
            sides(rotation, 0, head),
            (statistics.query[head], getattr(statistics, target)[head]),
            strict=True,
        ):
            basis = unscaled(x) @ hadamard(len(x)).T  # U
            spectrum = basis.T @ matrix @ basis
            np.testing.assert_allclose(
                spectrum, np.diag(np.diag(spectrum)), atol=1e-5 * np.trace(matrix)
            )
            assert (np.diff(np.diag(spectrum)) <= 1e-6).all()  # descending
            flat = np.diag(unscaled(x).T @ matrix @ unscaled(x))  # OSCAR's lemma 1
            np.testing.assert_allclose(flat, np.trace(matrix) / len(x), rtol=1e-4)


def test_the_leading_direction_becomes_the_offset_of_the_row(moments: Moments) -> None:
    # H's constant first row sends it to all channels alike: min/max stores it in `min`
    rotation, _ = fit(moments, "oscar+centre")
    _, vectors = descending_eigh(moments.statistics(0).query[1])
    leading = vectors[:, 0] @ np.asarray(rotation.x_k[0][1], np.float64)
    np.testing.assert_allclose(leading, leading[0], rtol=1e-4)


def test_shared_rotations_are_one_per_layer_and_diagonalise_the_mean(moments: Moments) -> None:
    rotation, _ = fit(moments, "oscar-shared+centre")
    first, second = (unscaled(sides(rotation, 1, head)[0]) for head in range(KV_HEADS))
    np.testing.assert_allclose(first, second, atol=1e-6)
    statistics = moments.statistics(1)
    basis = first @ hadamard(D).T
    mean = statistics.query.mean(0)
    spectrum = basis.T @ mean @ basis
    np.testing.assert_allclose(spectrum, np.diag(np.diag(spectrum)), atol=1e-5 * np.trace(mean))
    assert not np.allclose(rotation.mu[1][0], rotation.mu[1][1])  # the means stay per head


def test_heads_in_unrelated_bases_pay_for_sharing_one_rotation(moments: Moments) -> None:
    # U63: the predictor must see what a shared rotation costs queries that are not aligned
    shared = fit(moments, "oscar-shared+centre")[0]
    own = fit(moments, "oscar+centre")[0]
    for rotation, limit in ((own, 1e-3), (shared, np.inf)):
        for head in range(KV_HEADS):
            turned = unscaled(sides(rotation, 0, head)[0])
            importance = np.diag(turned.T @ moments.statistics(0).query[head] @ turned)
            spread = importance.max() / importance.min() - 1
            assert spread < limit
            if rotation is shared:
                assert spread > 0.2  # not flat: some channels matter more than others


def test_stretch_makes_energy_and_importance_equal_in_every_channel(moments: Moments) -> None:
    # and is the best that any invertible transform can do: the bound of the predictor
    name = "stretch+centre"
    rotation, report = fit(moments, name)
    np.testing.assert_allclose(report.predictor, report.bound, rtol=1e-6)
    statistics = moments.statistics(1)
    for head in range(KV_HEADS):
        x = sides(rotation, 1, head)[0]
        inverse = np.linalg.inv(x)
        key, query = (damped(m[head], report.damping) for m in (statistics.key, statistics.query))
        for matrix in (x.T @ key @ x, inverse @ query @ inverse.T):
            basis = hadamard(D) @ matrix @ hadamard(D).T
            spectrum = np.diag(basis)
            np.testing.assert_allclose(basis, np.diag(spectrum), atol=1e-5 * spectrum.max())
            assert (np.diff(spectrum) <= 1e-6 * spectrum.max()).all()
            np.testing.assert_allclose(np.diag(matrix), np.trace(matrix) / D, rtol=1e-4)
    assert (fit(moments, "oscar+centre")[1].predictor > 1.5 * report.predictor).all()


def test_waterfilling_mixes_only_channels_of_equal_bits(moments: Moments) -> None:
    rotation, _ = fit(moments, "stretch+centre+waterfill+gain")
    assert set(rotation.codecs) == {Codec("waterfill", gain=True)}
    uniform = sides(fit(moments, "stretch+centre")[0], 0, 1)[0] @ hadamard(D).T
    own = sides(rotation, 0, 1)[0]
    bounds = (0, D // 8, 3 * D // 4, D)
    for first, last in itertools.pairwise(bounds):
        part, basis = own[:, first:last], uniform[:, first:last]
        turn = np.linalg.lstsq(basis, part, rcond=None)[0]
        np.testing.assert_allclose(basis @ turn, part, atol=1e-5 * np.abs(part).max())
    energy = np.diag(own.T @ moments.statistics(0).key[1] @ own)
    assert energy[: D // 8].min() > energy[D // 8 : 3 * D // 4].max()


@pytest.mark.parametrize("name", ["waterfill", "gain+waterfill"])
def test_waterfilling_is_refused_where_nothing_orders_the_channels(name: str) -> None:
    for base in ("hadamard+centre", "identity+centre", "stretch"):
        with pytest.raises(ValueError, match="needs \\+centre and channels in order of worth"):
            recipe(f"{base}+{name}")


def test_an_unknown_recipe_or_target_is_refused_with_the_known_ones(moments: Moments) -> None:
    for name in ("oscar+center", "stretchy", "+centre", "oscar+centre+centre", "", "oscar+"):
        with pytest.raises(ValueError, match="must be one of identity, hadamard, oscar-sh"):
            fit(moments, name)
    with pytest.raises(ValueError, match="value_target='exact'"):
        fit(moments, "oscar", value_target="exact")
    with pytest.raises(ValueError, match="damping=-1"):
        fit(moments, "oscar", damping=-1.0)


def test_a_new_recipe_needs_only_its_formula(moments: Moments) -> None:
    def scaled(head: HeadStatistics) -> np.ndarray:
        return np.diag(1 / np.sqrt(np.diag(head.key)))

    own = dataclasses.replace(recipe("oscar+centre"), name="diagonal", keys=scaled)
    rotation, report = fit(moments, own)
    rotation.check_inverses()
    assert report.recipe == "diagonal+centre"
    assert report.condition > 1.1


# -------------------------------------------------------------------------------------- predictor


def test_the_predictor_is_least_at_its_bound_and_scale_free() -> None:
    rng = np.random.default_rng(5)
    key, query = (f.T @ f for f in (random_covariance(rng, 16, 0.7) for _ in range(2)))
    bound = predictor_bound(key, query)
    values, vectors = descending_eigh(key)
    half = (vectors * np.sqrt(values)) @ vectors.T
    inverse = (vectors / np.sqrt(values)) @ vectors.T
    middle, axes = descending_eigh(half @ query @ half)
    best = inverse @ (axes * np.sqrt(middle)) @ axes.T @ inverse  # A; X = A^1/2 reaches the bound
    sizes, turns = descending_eigh(best)
    x = (turns * np.sqrt(sizes)) @ turns.T
    assert predictor(x, key, query) == pytest.approx(bound, rel=1e-8)
    assert predictor(8 * x, key, query) == pytest.approx(bound, rel=1e-8)
    for other in (np.eye(16), hadamard(16), rng.standard_normal((16, 16))):
        assert predictor(other, key, query) > bound
    # any rotation scores the same: tr S tr C
    assert predictor(hadamard(16), key, query) == pytest.approx(
        np.trace(key) * np.trace(query) / 256
    )


def test_the_report_says_how_far_each_head_is_from_the_bound(moments: Moments) -> None:
    _, centred = fit(moments, "oscar+centre")
    _, plain = fit(moments, "oscar")
    assert (centred.predictor >= centred.bound).all()
    statistics = moments.statistics(1)
    key, query = damped(statistics.key[0], 0.02), damped(statistics.query[0], 0.02)
    assert centred.predictor[1, 0] == pytest.approx(np.trace(key) * np.trace(query) / D**2)
    assert centred.bound[1, 0] == pytest.approx(predictor_bound(key, query))
    assert plain.bound[1, 0] != centred.bound[1, 0]
    np.testing.assert_allclose(
        centred.mean_share[1, 0],
        (statistics.mean[0] ** 2).sum() / np.trace(statistics.key[0]),
    )
    assert centred.key_spectrum.shape == (LAYERS, KV_HEADS, D)


@pytest.mark.parametrize(
    ("variance", "want"), [(1.0, 1.0), (16.0, 0.25), (1.9, 1.0), (2.1, 0.5), (1e-8, 8192.0), (0, 1)]
)
def test_rows_are_brought_to_unit_rms_by_a_power_of_two(variance: float, want: float) -> None:
    assert power_of_two(hadamard(8), variance * np.eye(8)) == want


# ---------------------------------------------------------- dead heads, NaN, too little data (U75)


@pytest.mark.parametrize(
    ("tensor", "side", "message"),
    [
        ("v", "x_v", "layer 1: values of KV head 0 are all zero: Hadamard used there"),
        ("k", "x_k", "layer 1: keys or queries of KV head 0 are all zero: Hadamard used there"),
        ("q", "x_k", "layer 1: keys or queries of KV head 0 are all zero: Hadamard used there"),
        ("o", "x_v", "layer 1: values of KV head 0 are all zero: Hadamard used there"),
    ],
)
def test_a_dead_head_gets_a_hadamard_and_a_warning(tensor: str, side: str, message: str) -> None:
    moments = make_moments(TOKENS, **{tensor: (1, 0)})
    target = "attention" if tensor == "o" else "proxy"
    for name in ("oscar+centre", "oscar", "oscar-shared+centre"):
        rotation, report = fit(moments, name, value_target=target)
        assert message in report.warnings
        dead = np.asarray(getattr(rotation, side)[1][0], np.float64)
        np.testing.assert_allclose(unscaled(dead), hadamard(len(dead)), atol=1e-6)
        for array in jax.tree.leaves(rotation):
            assert np.isfinite(array).all()
        fallback = report.fallback_keys if side == "x_k" else report.fallback_values
        assert fallback.tolist() == [[False, False], [True, False]]


def test_keys_of_zero_leave_no_score_weights_and_no_nan() -> None:
    # all proxy weights are 0 then: 0/0
    rotation, report = fit(make_moments(k=(0, 1)), "oscar+centre")
    assert any("layer 0: values of KV head 1" in line for line in report.warnings)
    np.testing.assert_allclose(unscaled(sides(rotation, 0, 1)[1]), hadamard(DV), atol=1e-6)


def test_heads_that_a_caller_gives_up_get_the_plain_recipe_of_their_codec(
    moments: Moments,
) -> None:
    given_up = np.array([[False, True], [False, False]])
    for name, plain in (
        ("stretch+centre+waterfill+gain", "oscar+centre+waterfill+gain"),
        ("oscar+centre", "hadamard+centre"),
    ):
        rotation, report = fit(moments, name, fallback_keys=given_up)
        expected = fit(moments, plain)[0]
        np.testing.assert_array_equal(rotation.x_k[0][1], expected.x_k[0][1])
        assert not np.array_equal(rotation.x_k[0][0], expected.x_k[0][0])
    assert report.fallback_keys.tolist() == given_up.tolist()
    assert not report.fallback_values.any()


def test_nan_is_refused_naming_layer_and_tensor(moments: Moments) -> None:
    q = np.ones((1, 4, KV_HEADS * GROUP, D), np.float32)
    k, v, o = q[:, :, :KV_HEADS], np.ones((1, 4, KV_HEADS, DV), np.float32), q[..., :DV].copy()
    v[0, 2, 1, 7] = np.inf
    with pytest.raises(ValueError, match="layer 1: v held values that are not finite"):
        fit(moments.update(1, *map(jnp.asarray, (q, k, v, o))), "oscar+centre")


def test_too_few_tokens_are_refused_unless_forced_and_always_warned_about() -> None:
    moments = make_moments(tokens=12)
    with pytest.raises(ValueError, match="moments hold 12 tokens: at least 128 are needed"):
        fit(moments, "oscar+centre")
    rotation, report = fit(moments, "oscar+centre", force=True)
    assert report.tokens == 12
    assert report.warnings[:2] == (
        "12 tokens < head_dim 64: the covariances are singular",
        "12 tokens: below 2000 a fit is noisy, calibrate on more",
    )
    rotation.check_inverses()
    unscaled(sides(rotation, 0, 0)[0])
    with pytest.raises(ValueError, match="moments hold 0 tokens"):
        fit(Moments.zeros(layers=1, kv_heads=1, head_dim=64), "oscar", force=True)


def test_a_layer_that_missed_a_chunk_is_refused(moments: Moments) -> None:
    short = Moments((moments.layers[0], make_moments(tokens=256).layers[1]))
    with pytest.raises(ValueError, match="different numbers of tokens, 256 to 2048"):
        fit(short, "oscar")


@pytest.mark.parametrize("head_dim", [80, 192])  # Paley's matrices of order 20 and 12 inside
def test_a_head_dim_that_is_no_power_of_two_can_be_fitted(head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    k = (rng.standard_normal((1, 256, 1, head_dim)) @ random_covariance(rng, head_dim)) + 3.0
    q = rng.standard_normal((1, 256, 1, head_dim)) @ random_covariance(rng, head_dim)
    q, k = (jnp.asarray(x, jnp.float32) for x in (q, k))
    update = jax.jit(Moments.update, static_argnums=1)
    moments = update(Moments.zeros(layers=1, kv_heads=1, head_dim=head_dim), 0, q, k, k, q)
    rotation, report = fit(moments, "oscar+centre")
    rotation.check_inverses()
    assert report.condition == pytest.approx(1.0, abs=1e-4)
    assert report.predictor[0, 0] >= report.bound[0, 0]
    np.testing.assert_allclose(rotation.mu[0][0], np.asarray(k[0, :, 0]).mean(0), rtol=1e-5)
