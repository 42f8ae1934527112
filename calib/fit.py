"""Fits the transforms of every layer and KV head from streamed moments, in float64 on the host."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import get_args

import numpy as np
from threadpoolctl import threadpool_limits

from calib.covariance import LayerStatistics, Moments
from calib.recipes import (
    RECIPES,
    HeadStatistics,
    Recipe,
    ValueTarget,
    damped,
    descending_eigh,
)
from calib.recipes import recipe as recipe_of
from oscar_jax.rotation import Rotation

DAMPING = 0.02  # of the mean eigenvalue, added to S and C
MIN_TOKENS = 128  # one page: below it a fit is refused unless forced
FEW_TOKENS = 2_000  # below it a fit is measurably worse (512 tokens: 1.1 to 1.4 times the KL)
DEAD = 1e-12  # a head whose energy is below this share of the layer's largest head is dead


@dataclasses.dataclass(frozen=True)
class FitReport:
    """What a fit knows of itself; arrays are [layers, kv_heads] unless said otherwise.

    Args:
        recipe, value_target: the names asked for.
        tokens: tokens counted (the same in every layer).
        predictor: tr(X^T S X) tr(X^-1 C X^-T) / D^2 with damped S and C of unit mean eigenvalue:
            (row scale)^2 times the logit noise that a unit of it causes. Lower is better.
        fallback_keys, fallback_values: bool, heads that got ``Recipe.fallback`` instead (dead, or
            not better on held-out text).
        condition: the largest condition number of any transform.
        warnings: in plain words, also stored in the checkpoint.
        statistics: what was fitted to, per layer; for what is only worked out when it is shown.
        positions: the longest sequence that the statistics are averaged over; None: as in the text.
    """

    recipe: str
    value_target: str
    tokens: int
    predictor: np.ndarray
    fallback_keys: np.ndarray
    fallback_values: np.ndarray
    condition: float
    warnings: tuple[str, ...]
    statistics: tuple[LayerStatistics, ...]
    centred: bool
    damping: float
    positions: int | None = None

    @classmethod
    def per_layer(cls, reports: Sequence[FitReport]) -> FitReport:
        """Layer i of ``reports[i]``: fits of different recipes to the same moments."""
        first = reports[0]
        if any(one.centred != first.centred for one in reports):
            raise ValueError("reports differ in centred: a mix has one set of key means")
        pick = lambda name: np.stack(  # noqa: E731
            [getattr(one, name)[layer] for layer, one in enumerate(reports)]
        )
        return dataclasses.replace(
            first,
            recipe=", ".join(dict.fromkeys(one.recipe for one in reports)),
            predictor=pick("predictor"),
            fallback_keys=pick("fallback_keys"),
            fallback_values=pick("fallback_values"),
            condition=max(one.condition for one in reports),
            warnings=tuple(dict.fromkeys(line for one in reports for line in one.warnings)),
        )

    @functools.cached_property
    def bound(self) -> np.ndarray:
        """The least predictor that any invertible X reaches: ``predictor_bound`` of every head."""
        return np.array(
            [
                [
                    predictor_bound(damped(key, self.damping), damped(query, self.damping))
                    for key, query in zip(_rows(layer, self.centred), layer.query, strict=True)
                ]
                for layer in self.statistics
            ]
        )

    @functools.cached_property
    def key_spectrum(self) -> np.ndarray:
        """Eigenvalues of S, centred and undamped, largest first: [layers, kv_heads, D]."""
        return _spectra([layer.key for layer in self.statistics])

    @functools.cached_property
    def query_spectrum(self) -> np.ndarray:
        """Eigenvalues of C, undamped, largest first: [layers, kv_heads, D]."""
        return _spectra([layer.query for layer in self.statistics])

    @property
    def mean_share(self) -> np.ndarray:
        """|mu|^2 / tr S: the energy of the keys' mean over that of their spread."""
        spread = np.array([np.trace(one.key, axis1=-2, axis2=-1) for one in self.statistics])
        energy = np.array([(one.mean**2).sum(-1) for one in self.statistics])
        return energy / np.where(spread > 0, spread, 1.0)


def predictor(x: np.ndarray, key: np.ndarray, query: np.ndarray) -> float:
    """tr(X^T S X) tr(X^-1 C X^-T) / D^2, relative logit noise of a codec with one scale per row.

    >>> predictor(np.diag([2.0, 1.0]), np.eye(2), np.eye(2))
    1.5625
    """
    inverse = np.linalg.inv(x)
    noise = np.trace(x.T @ key @ x) * np.trace(inverse @ query @ inverse.T)
    return float(noise) / len(x) ** 2


def predictor_bound(key: np.ndarray, query: np.ndarray) -> float:
    """min over invertible X of ``predictor``: the squared nuclear norm of S^1/2 C^1/2, over D^2.

    >>> round(predictor_bound(np.diag([4.0, 1.0]), np.eye(2)), 6)
    2.25
    """
    values, vectors = descending_eigh(key)
    half = (vectors * np.sqrt(values)) @ vectors.T
    inner = descending_eigh(half @ query @ half)[0]
    return float(np.sqrt(inner).sum() ** 2) / len(key) ** 2


def power_of_two(x: np.ndarray, rows: np.ndarray) -> float:
    """The power of two that brings the RMS entry of transformed rows nearest to 1.

    Args:
        x: the transform [D, D].
        rows: uncentred second moment [D, D] of the rows that it transforms.
    """
    energy = float(np.trace(x.T @ rows @ x)) / len(x)
    return 1.0 if energy <= 0 else float(2.0 ** -np.round(np.log2(energy) / 2))


# Matrices this small gain nothing from BLAS threads, which fight for cores that are busy.
@threadpool_limits.wrap(limits=1, user_api="blas")
def fit(
    moments: Moments,
    recipe: str | Recipe,
    *,
    value_target: str = "proxy",
    damping: float = DAMPING,
    force: bool = False,
    positions: int | None = None,
    fallback_keys: np.ndarray | None = None,
    fallback_values: np.ndarray | None = None,
) -> tuple[Rotation, FitReport]:
    """The rotation of a whole model.

    X_K and X_V of the recipe, per layer and KV head, each multiplied by the power of two that gives
    its transformed rows an RMS near 1 (so float16 metadata stays in range); X_Q and X_O are their
    inverses. A dead head (all keys, queries or values 0) gets a Hadamard, with a warning.

    Args:
        moments: at least MIN_TOKENS tokens, FEW_TOKENS for a fit worth serving.
        recipe: a name such as "oscar+centre", or a Recipe.
        value_target: which value covariance X_V diagonalises; see ``calib.covariance``.
        damping: share of the mean eigenvalue added to S and C.
        force: fit fewer than MIN_TOKENS all the same.
        positions: fit keys and queries as they are on average in sequences of up to so many tokens
            (``Moments.statistics``); None takes them where they stood in the text.
        fallback_keys, fallback_values: bool[layers, kv_heads], heads to be given the recipe's
            ``fallback``, for instance because the fit is not better on held-out text.

    Raises:
        ValueError: an unknown recipe or target, one with +optr, moments that are not finite, or too
            few tokens.
    """
    chosen = recipe_of(recipe) if isinstance(recipe, str) else recipe
    if chosen.learned:
        raise ValueError(
            f"recipe={chosen.full_name!r}: +optr learns from rows, which moments do not hold; fit "
            f"{chosen.closed_form.full_name!r} and give it to calib.optr.refine"
        )
    if value_target not in get_args(ValueTarget):
        raise ValueError(f"value_target={value_target!r}: must be one of {get_args(ValueTarget)}")
    if not damping >= 0:
        raise ValueError(f"damping={damping}: must be at least 0")
    moments.check_finite()
    layers = [moments.statistics(layer, positions) for layer in range(len(moments.layers))]
    warnings = _token_warnings(layers, force)
    heads = layers[0].mean.shape[0]
    given_up = [
        np.zeros((len(layers), heads), bool) if mask is None else np.array(mask, bool)
        for mask in (fallback_keys, fallback_values)
    ]
    fitted = [
        _fit_layer(
            index, layer, chosen, value_target, damping, (given_up[0][index], given_up[1][index])
        )
        for index, layer in enumerate(layers)
    ]
    rotation = Rotation.from_transforms(
        [one.x_k for one in fitted],
        [one.x_v for one in fitted],
        [layer.mean for layer in layers] if chosen.centred else None,
        chosen.codec,
    )
    report = FitReport(
        recipe=chosen.full_name,
        value_target=value_target,
        tokens=layers[0].tokens,
        predictor=np.array([one.predictor for one in fitted]),
        fallback_keys=np.array([one.fallback_keys for one in fitted]),
        fallback_values=np.array([one.fallback_values for one in fitted]),
        condition=rotation.condition(),
        warnings=tuple(warnings + [line for one in fitted for line in one.warnings]),
        statistics=tuple(layers),
        centred=chosen.centred,
        damping=damping,
        positions=positions,
    )
    return rotation, report


@dataclasses.dataclass(frozen=True)
class _FittedLayer:
    x_k: np.ndarray  # [K, D, D]
    x_v: np.ndarray  # [K, Dv, Dv]
    predictor: list[float]
    fallback_keys: np.ndarray
    fallback_values: np.ndarray
    warnings: list[str]


def _fit_layer(
    index: int,
    layer: LayerStatistics,
    recipe: Recipe,
    value_target: str,
    damping: float,
    given_up: tuple[np.ndarray, np.ndarray],
) -> _FittedLayer:
    rows = _rows(layer, recipe.centred)
    target = layer.proxy if value_target == "proxy" else layer.attention
    dead_keys = _dead(_rows(layer, centred=False)) | _dead(layer.query)
    dead_values = _dead(layer.value) | _dead(target)
    warnings = []
    for dead, side in ((dead_keys, "keys or queries"), (dead_values, "values")):
        if recipe.fitted and dead.any():
            which = ", ".join(map(str, np.flatnonzero(dead)))
            warnings.append(
                f"layer {index}: {side} of KV head {which} are all zero: Hadamard used there"
            )
    fallback_keys = recipe.fitted & (dead_keys | given_up[0])
    fallback_values = recipe.fitted & (dead_values | given_up[1])
    fitted = _FittedLayer(
        x_k=np.empty_like(layer.key),
        x_v=np.empty_like(layer.value),
        predictor=[],
        fallback_keys=fallback_keys,
        fallback_values=fallback_values,
        warnings=warnings,
    )
    plain = recipe.fallback
    # nothing to diagonalise: I and the codec's mixing
    dead = (
        recipe
        if not recipe.fitted
        else dataclasses.replace(
            plain, keys=RECIPES["hadamard"].keys, values=RECIPES["hadamard"].values
        )
    )
    average = _mean_head(rows, layer.query, target, dead_keys, dead_values)
    for head in range(len(rows)):
        own = (rows[head], layer.query[head], target[head])
        key, query, value = average if recipe.shared else own
        statistics = HeadStatistics(damped(key, damping), damped(query, damping), value)
        keys, values = (
            dead if is_dead else plain if given else recipe
            for is_dead, given in (
                (dead_keys[head], fallback_keys[head]),
                (dead_values[head], fallback_values[head]),
            )
        )
        x_k, x_v = keys.key_transform(statistics), values.value_transform(statistics)
        fitted.x_k[head] = x_k * power_of_two(x_k, rows[head])
        fitted.x_v[head] = x_v * power_of_two(x_v, layer.value[head])
        mine = damped(own[0], damping), damped(own[1], damping)
        fitted.predictor.append(predictor(x_k, *mine))
    return fitted


def _mean_head(
    key: np.ndarray,
    query: np.ndarray,
    value: np.ndarray,
    dead_keys: np.ndarray,
    dead_values: np.ndarray,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The live heads' averages; all heads' (zeros) when none is alive."""
    keys = ~dead_keys if not dead_keys.all() else dead_keys
    values = ~dead_values if not dead_values.all() else dead_values
    return key[keys].mean(0), query[keys].mean(0), value[values].mean(0)


def _dead(covariance: np.ndarray) -> np.ndarray:
    """bool[K]: the trace is 0, or vanishes beside the layer's largest head."""
    energy = np.trace(covariance, axis1=-2, axis2=-1)
    return energy <= DEAD * energy.max()


def _rows(layer: LayerStatistics, centred: bool) -> np.ndarray:
    """[K, D, D], the second moment of the rows that X_K transforms."""
    if centred:
        return layer.key
    return layer.key + layer.mean[:, :, None] * layer.mean[:, None, :]


def _spectra(covariances: list[np.ndarray]) -> np.ndarray:
    return np.array([[descending_eigh(head)[0] for head in layer] for layer in covariances])


def _token_warnings(layers: list[LayerStatistics], force: bool) -> list[str]:
    """Refuse or warn by the number of tokens counted, which must be the same in every layer."""
    counts = [layer.tokens for layer in layers]
    if len(set(counts)) > 1:
        raise ValueError(
            f"layers counted different numbers of tokens, {min(counts)} to {max(counts)}: "
            "update every layer with every chunk"
        )
    tokens, head_dim = counts[0], layers[0].mean.shape[-1]
    if tokens == 0 or (tokens < MIN_TOKENS and not force):
        raise ValueError(
            f"moments hold {tokens} tokens: at least {MIN_TOKENS} are needed, and {FEW_TOKENS} for "
            "a fit worth serving (force fits fewer)"
        )
    warnings = []
    if tokens < head_dim:
        warnings.append(f"{tokens} tokens < head_dim {head_dim}: the covariances are singular")
    if tokens < FEW_TOKENS:
        warnings.append(f"{tokens} tokens: below {FEW_TOKENS} a fit is noisy, calibrate on more")
    return warnings
