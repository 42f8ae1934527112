"""Moments before RoPE and their averages over positions, against rows that are really turned."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from calib.covariance import Moments
from calib.fit import fit
from calib.positions import as_if_later, averaged_mean, averaged_moment, lengths, mean_turn, turned
from oscar_jax.config import model_entry
from oscar_jax.models import rope
from oscar_jax.rotation import Rotation
from pallas_kernels.heads.xla import rotate

D, KV_HEADS, GROUP, TOKENS = 8, 2, 2, 40
FREQUENCIES = np.array([1.0, 0.31, 0.02, 0.0])


def turn(position: int) -> np.ndarray:
    """R_p for column vectors, float64."""
    cos, sin = (np.diag(f(position * FREQUENCIES)) for f in (np.cos, np.sin))
    return np.block([[cos, -sin], [sin, cos]])


def rows(heads: int, seed: int, offset: float = 0.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((TOKENS, heads, D)) @ rng.standard_normal((D, D))
    return x + offset * rng.standard_normal((heads, D))


def moments_of(q: np.ndarray, k: np.ndarray, positions: np.ndarray, parts: int = 1) -> Moments:
    """Moments of rows before RoPE [T, heads, D] that stand at ``positions`` in the text."""
    moments = Moments.zeros(layers=1, kv_heads=KV_HEADS, head_dim=D, frequencies=FREQUENCIES)
    at = jnp.asarray(positions)[None]
    queries, keys = (
        turned(jnp.asarray(x, jnp.float32)[None], at, jnp.asarray(FREQUENCIES)) for x in (q, k)
    )
    for part in np.array_split(np.arange(TOKENS), parts):
        a, b = queries[:, part], keys[:, part]
        moments = moments.update(0, a, b, b, a, positions=at[:, part])
    return moments


def test_rows_turn_as_the_model_turns_them() -> None:
    config = model_entry("smollm2-135m").architecture
    frequencies, _ = rope.frequencies(config)
    at = jnp.array([[0, 5, 1000]])
    y = jnp.asarray(np.random.default_rng(0).standard_normal((1, 3, 3, 64)), jnp.float32)
    cos, sin = rope.cos_sin(config, at)
    q, k, _ = rotate(y, cos, sin, None, None, heads=1, eps=1e-6, dtype=jnp.float32)
    ours = turned(y[:, :, :2], at, jnp.asarray(frequencies))
    np.testing.assert_allclose(ours, jnp.concatenate([q, k], axis=2), atol=2e-6)
    np.testing.assert_allclose(turned(ours, -at, jnp.asarray(frequencies)), y[:, :, :2], atol=2e-6)


def test_a_rotation_for_text_that_stands_later_is_the_same_rotation_turned_back() -> None:
    rng = np.random.default_rng(6)
    q, k = rows(KV_HEADS, seed=7), rows(KV_HEADS, seed=8, offset=5.0)
    x, mean = rng.standard_normal((KV_HEADS, D, D)), rng.standard_normal((KV_HEADS, D))
    rotation = Rotation.from_transforms([x], [x], [mean])
    moved = as_if_later(rotation, 1000, [FREQUENCIES.astype(np.float32)])
    later = turn(1000)
    for head in range(KV_HEADS):
        stored = (k[:, head] @ later.T - mean[head]) @ x[head]
        read = q[:, head] @ later.T @ np.asarray(rotation.x_q[0][head])
        x_k, x_q, mu = (np.asarray(side[0][head]) for side in (moved.x_k, moved.x_q, moved.mu))
        np.testing.assert_allclose((k[:, head] - mu) @ x_k, stored, rtol=1e-3, atol=2e-3)
        np.testing.assert_allclose(q[:, head] @ x_q, read, rtol=1e-3, atol=2e-3)
        assert np.abs(mu - mean[head]).max() > 0.1
    moved.check_inverses()
    assert moved.x_v is rotation.x_v and moved.codecs == rotation.codecs


def weights(positions: int) -> np.ndarray:
    """The share of every position when lengths P, P/2, ... >= 2,048 are equally likely."""
    found = np.array(lengths(positions))
    return (np.arange(positions)[:, None] < found).astype(float) @ (1 / found) / len(found)


@pytest.mark.parametrize("positions", [1, 7, 4096])
def test_the_closed_form_is_the_average_over_every_position(positions: int) -> None:
    x = rows(1, seed=1)[:, 0]
    moment = x.T @ x / len(x)
    turns = [turn(p) for p in range(positions)]
    np.testing.assert_allclose(
        averaged_moment(moment, FREQUENCIES, positions),
        np.einsum("p,pij->ij", weights(positions), [r @ moment @ r.T for r in turns]),
        atol=1e-10,
    )
    np.testing.assert_allclose(
        averaged_mean(x[0], FREQUENCIES, positions),
        np.einsum("p,pi->i", weights(positions), [r @ x[0] for r in turns]),
        atol=1e-12,
    )
    assert weights(positions).sum() == pytest.approx(1.0)
    assert mean_turn(np.array([2 * np.pi]), positions)[0] == pytest.approx(1.0)


def test_averaged_statistics_are_those_of_rows_at_every_position() -> None:
    q, k = rows(KV_HEADS * GROUP, seed=2), rows(KV_HEADS, seed=3, offset=5.0)
    served = 50
    everywhere = [turn(p) for p in range(served)]
    statistics = moments_of(q, k, np.arange(TOKENS) + 64).statistics(0, served)
    for head in range(KV_HEADS):
        keys = np.concatenate([k[:, head] @ r.T for r in everywhere])
        group = q[:, GROUP * head : GROUP * (head + 1)].reshape(-1, D)
        queries = np.concatenate([group @ r.T for r in everywhere])
        centred = keys - keys.mean(0)
        np.testing.assert_allclose(statistics.mean[head], keys.mean(0), atol=1e-4)
        np.testing.assert_allclose(
            statistics.key[head], centred.T @ centred / len(keys), rtol=1e-4, atol=1e-3
        )
        np.testing.assert_allclose(
            statistics.query[head],
            GROUP * queries.T @ queries / len(queries),  # a sum over the group
            rtol=1e-4,
            atol=1e-3,
        )


def test_what_is_averaged_does_not_depend_on_where_the_text_stood_or_on_chunks() -> None:
    q, k = rows(KV_HEADS * GROUP, seed=4), rows(KV_HEADS, seed=5, offset=5.0)
    near = moments_of(q, k, np.arange(TOKENS)).statistics(0, 4096)
    far = moments_of(q, k, np.arange(TOKENS) + 3000, parts=4).statistics(0, 4096)
    for name in ("mean", "key", "query"):
        np.testing.assert_allclose(getattr(far, name), getattr(near, name), rtol=1e-3, atol=2e-3)
    halves = [slice(0, TOKENS // 2), slice(TOKENS // 2, TOKENS)]
    both = [Moments.zeros(layers=1, kv_heads=KV_HEADS, head_dim=D, frequencies=FREQUENCIES)] * 2
    for index, half in enumerate(halves):
        at = jnp.arange(TOKENS)[None, half]
        a, b = (
            turned(jnp.asarray(x[half], jnp.float32)[None], at, jnp.asarray(FREQUENCIES))
            for x in (q, k)
        )
        both[index] = both[index].update(0, a, b, b, a, positions=at)
    merged = both[0].merge(both[1]).statistics(0, 4096)
    for name in ("mean", "key", "query"):
        np.testing.assert_allclose(getattr(merged, name), getattr(near, name), rtol=1e-3, atol=2e-3)


def test_positions_need_moments_from_before_rope() -> None:
    plain = Moments.zeros(layers=1, kv_heads=1, head_dim=8)
    with pytest.raises(ValueError, match="positions=2048: these moments hold nothing from before"):
        plain.statistics(0, 2048)
    with pytest.raises(ValueError, match="positions=2048"):
        x = jnp.ones((1, 200, 1, 8))
        fit(plain.update(0, x, x, x, x), "oscar", positions=2048)
    own = Moments.zeros(layers=1, kv_heads=1, head_dim=8, frequencies=FREQUENCIES)
    x = jnp.ones((1, 3, 1, 8))
    with pytest.raises(ValueError, match="positions=None: these moments have frequencies"):
        own.update(0, x, x, x, x)
    with pytest.raises(ValueError, match=r"positions has shape \(1, 2\): must be \(1, 3\)"):
        own.update(0, x, x, x, x, positions=jnp.zeros((1, 2), int))
    with pytest.raises(ValueError, match="positions=0: must be at least 1"):
        own.statistics(0, 0)
    with pytest.raises(ValueError, match=r"frequencies have shape \(3,\): must be \(4,\)"):
        Moments.zeros(layers=1, kv_heads=1, head_dim=8, frequencies=np.ones(3))
