"""The transforms: inverses made in float64, refusals by name, and what a rotation may look like."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax import Codec, Rotation
from pallas_kernels.format import hadamard


def orthogonal(seed: int, heads: int = 2, size: int = 64) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(heads, size, size)))[0]


def test_the_query_side_is_the_inverse_transpose_and_the_output_side_the_inverse() -> None:
    x_k, x_v = np.diag([4.0, 2.0, 0.5])[None], np.array([[[1.0, 2.0], [0.0, 0.25]]])
    rotation = Rotation.from_transforms([x_k], [x_v])
    assert rotation.x_q[0].tolist() == [np.diag([0.25, 0.5, 2.0]).tolist()]
    assert rotation.x_o[0].tolist() == [[[1.0, -8.0], [0.0, 4.0]]]
    skew = np.array([[[1.0, 2.0], [0.0, 0.25]]])
    assert Rotation.from_transforms([skew], [skew]).x_q[0].tolist() == [[[1.0, 0.0], [-8.0, 4.0]]]


def test_inverses_of_an_ill_conditioned_transform_are_those_of_float64() -> None:
    """Condition number 900: a float32 inverse would lose four more bits than its rounding."""
    stretch = np.geomspace(1, 900, 64)[:, None] * orthogonal(0)
    rotation = Rotation.from_transforms([stretch], [stretch])
    exact = np.linalg.inv(stretch)
    assert np.abs(np.asarray(rotation.x_o[0]) - exact).max() <= 2.0**-24 * np.abs(exact).max()
    assert np.isclose(rotation.condition(), 900, rtol=1e-3)
    rotation.check_inverses()


def test_inner_products_and_outputs_survive_the_two_sides() -> None:
    """(k X_K) . (q X_Q) = k . q and v X_V X_O = v."""
    rng = np.random.default_rng(1)
    stretch = np.exp(rng.normal(0, 0.5, (2, 64, 1))) * orthogonal(2)
    rotation = Rotation.from_transforms([stretch], [stretch])
    q, k = rng.normal(size=(2, 64))
    for head in range(2):
        x_k, x_q, x_v, x_o = (
            np.asarray(side[0][head], np.float64)
            for side in (rotation.x_k, rotation.x_q, rotation.x_v, rotation.x_o)
        )
        assert np.isclose((k @ x_k) @ (q @ x_q), k @ q, atol=1e-4)
        assert np.allclose(k @ x_v @ x_o, k, atol=1e-4)


def test_a_consistent_random_rotation_passes_the_check_of_inverses() -> None:
    """U32: as good as a Hadamard; what is refused is a query side of another rotation."""
    rotation = Rotation.from_transforms([orthogonal(3)], [orthogonal(4)])
    rotation.check_inverses()
    other = Rotation.from_transforms([orthogonal(5)], [orthogonal(6)])
    for side, message in (("x_q", "layer 0: x_k and x_q"), ("x_o", "layer 0: x_v and x_o")):
        mixed = dataclasses.replace(rotation, **{side: getattr(other, side)})
        with pytest.raises(ValueError, match=f"{message} are not inverse"):
            mixed.check_inverses()


def test_an_inverse_that_holds_nan_is_refused() -> None:
    rotation = Rotation.hadamard(layers=1, kv_heads=1, head_dim=64)
    broken = dataclasses.replace(rotation, x_q=(rotation.x_q[0].at[0, 0, 0].set(jnp.nan),))
    with pytest.raises(ValueError, match="not inverse"):
        broken.check_inverses()


def test_hadamard_and_identity_have_the_shapes_asked_for() -> None:
    rotation = Rotation.hadamard(layers=3, kv_heads=2, head_dim=96, v_head_dim=64)
    assert rotation.layers == 3
    for layer in range(3):
        assert np.allclose(rotation.x_k[layer], np.broadcast_to(hadamard(96), (2, 96, 96)))
        assert np.allclose(rotation.x_v[layer], np.broadcast_to(hadamard(64), (2, 64, 64)))
        assert np.allclose(rotation.x_q[layer], rotation.x_k[layer], atol=1e-6)
        assert (rotation.mu[layer] == 0).all()
    identity = Rotation.identity(layers=1, kv_heads=2, head_dim=64)
    assert (identity.x_k[0] == jnp.eye(64)).all()
    assert set(identity.codecs) == {Codec(clip_k=1.0, clip_v=1.0)}


def test_a_layer_is_what_the_kernels_take() -> None:
    mu = [np.full((2, 64), float(i)) for i in range(2)]
    rotation = Rotation.from_transforms(
        [orthogonal(7), orthogonal(8)], [orthogonal(9), orthogonal(10)], mu
    )
    layer = rotation.layer(1)
    assert layer.mu is rotation.mu[1]
    assert np.allclose(layer.x_k, orthogonal(8), atol=1e-7)
    assert np.allclose(layer.x_o, orthogonal(10).swapaxes(1, 2), atol=1e-6)


def test_layers_may_have_codecs_of_their_own() -> None:
    codecs = [Codec(gain=True), None, Codec("waterfill")]
    eye, mean = [np.eye(64)[None]] * 3, [np.zeros((1, 64))] * 3
    assert Rotation.from_transforms(eye, eye, mean, codecs).codecs == tuple(codecs)
    with pytest.raises(ValueError, match="codec names 2 layers, x_k 3: must be equal"):
        Rotation.from_transforms(eye, eye, mean, codecs[:2])
    with pytest.raises(ValueError, match="needs centred keys: pass mu"):
        Rotation.from_transforms(eye, eye, None, codecs)


def test_a_rotation_is_a_pytree_whose_codec_is_static() -> None:
    traces = []

    @functools.partial(jax.jit)
    def gains(rotation: Rotation, x: jax.Array) -> jax.Array:
        traces.append(rotation.codecs)
        return x * 2 if rotation.codecs == (Codec(gain=True),) else x

    plain = Rotation.hadamard(layers=1, kv_heads=1, head_dim=64)
    gain = Rotation.hadamard(layers=1, kv_heads=1, head_dim=64, codec=Codec(gain=True))
    x = jnp.ones(())
    assert [float(gains(r, x)) for r in (plain, gain, plain)] == [1, 2, 1]
    assert traces == [plain.codecs, gain.codecs]
    assert len(jax.tree.leaves(plain)) == 5


NAN = np.eye(64)[None].copy()
NAN[0, 1, 2] = np.nan
SINGULAR = np.diag([1.0] * 63 + [0.0])[None]
STIFF = np.diag([1.0] * 63 + [1e-3 / 1.01])[None]
EYE = np.eye(64)[None]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(x_k=[EYE, NAN], x_v=[EYE, EYE]), "x_k of layer 1 holds values that are not finite"),
        (dict(x_k=[EYE], x_v=[NAN]), "x_v of layer 0 holds values that are not finite"),
        (dict(x_k=[SINGULAR], x_v=[EYE]), "x_k of layer 0 has condition number"),
        (dict(x_k=[EYE], x_v=[STIFF]), r"x_v of layer 0 has condition number 1\.01e\+03: at most"),
        (dict(x_k=[np.eye(64)], x_v=[EYE]), r"x_k of layer 0 has shape \(64, 64\): must be"),
        (dict(x_k=[EYE, EYE], x_v=[EYE]), "x_k has 2 layers and x_v 1: must be equal"),
        (dict(x_k=[EYE], x_v=[np.tile(EYE, (2, 1, 1))]), r"layer 0: x_k \(1, 64, 64\), x_v \(2,"),
        (dict(x_k=[EYE], x_v=[EYE], mu=[np.zeros(64)]), r"mu \(64,\): must be"),
        (dict(x_k=[EYE], x_v=[EYE], mu=[np.full((1, 64), np.inf)]), "mu of layer 0 holds"),
        (dict(x_k=[EYE], x_v=[EYE], codec=Codec("waterfill")), "needs centred keys: pass mu"),
    ],
)
def test_transforms_that_cannot_serve_are_refused_by_layer_and_name(
    arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Rotation.from_transforms(**arguments)


def test_a_rotation_of_another_model_is_refused_naming_both_shapes() -> None:
    rotation = Rotation.hadamard(layers=2, kv_heads=3, head_dim=64)
    rotation.check_matches(layers=2, kv_heads=3, head_dim=64, v_head_dim=64)
    with pytest.raises(ValueError, match=r"\(2, 3, 64, 64\), the model \(2, 3, 128, 64\)"):
        rotation.check_matches(layers=2, kv_heads=3, head_dim=128, v_head_dim=64)
