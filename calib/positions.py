"""Rotary position embeddings in calibration: rows without them, and moments averaged over them.

A key at position p is k = R_p x, with x the row before RoPE and R_p the rotation of every pair of
channels (i, i + D/2) by the angle p f_i. What x looks like hardly depends on where the token
stands; what k looks like does, so moments of the first 2,048 positions are not those of a page at
100,000. With z_i = x_i + j x_(i + D/2), a rotation multiplies z_i by exp(j p f_i), and over p

    E[z_i conj z_k]  is multiplied by  mean over p of exp(j p (f_i - f_k)),
    E[z_i z_k]       by                mean over p of exp(j p (f_i + f_k)),
    E[z_i]           by                mean over p of exp(j p f_i),

each the sum of a geometric series: the averages over any range cost what one D x D product costs.

*Which positions.* A server sees sequences of many lengths, so a fit to "up to P tokens" takes the
lengths P, P/2, P/4, ... down to 2,048 as equally likely. Positions spread evenly over 0 .. P - 1
would serve the far end best; on SmolLM2 with P = 8,192 the output error at the start is then
0.00196, against 0.00168 of this average (0.00173 of a fit to the text as it stands, which is at 0.1
by the end of the context; ``benchmarks/results/cpu-single-runs.json``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from oscar_jax.rotation import Rotation

SHORTEST = 2_048  # tokens; shorter sequences hardly fill a page beside the BF16 windows


def turned(
    x: Float[Array, "B Q heads D"], positions: Int[Array, "B Q"], frequencies: Float[Array, " H"]
) -> Float[Array, "B Q heads D"]:
    """Every row rotated by its position times ``frequencies`` (radians per token), float32.

    A negative position takes the rotation of its absolute value back: the angle is the same float32
    product as in ``oscar_jax.models.rope``.
    """
    angle = positions[:, :, None, None].astype(jnp.float32) * frequencies
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def as_if_later(rotation: Rotation, offset: int, frequencies: Sequence[np.ndarray]) -> Rotation:
    """What a text from position 0 on is stored with as ``rotation`` stores it ``offset`` later.

    A key k would be k R^T there, with R the turn by ``offset``, and

        (k R^T - mu) X_K = (k - mu R) R^T X_K,    (q R^T) X_Q = q (R^T X_Q).

    Attention within the text does not change, so a model that runs at 0 with R^T X_K, R^T X_Q and
    mu R has the errors of one that runs ``offset`` tokens later: the same programs, and the same
    BF16 run to compare with.

    Args:
        offset: tokens. frequencies: per layer f32[D/2], radians per token.
    """

    def back(rows: Array, own: np.ndarray) -> Array:  # [K, n, D]
        at = jnp.full(rows.shape[:2], -offset)
        return turned(rows[:, :, None], at, jnp.asarray(own))[:, :, 0]

    def columns(side: tuple[Array, ...]) -> tuple[Array, ...]:
        return tuple(
            back(x.swapaxes(1, 2), own).swapaxes(1, 2)
            for x, own in zip(side, frequencies, strict=True)
        )

    return dataclasses.replace(
        rotation,
        x_k=columns(rotation.x_k),
        x_q=columns(rotation.x_q),
        mu=tuple(
            back(mu[:, None], own)[:, 0] for mu, own in zip(rotation.mu, frequencies, strict=True)
        ),
    )


def mean_turn(angle: np.ndarray, positions: int) -> np.ndarray:
    """mean of exp(j p angle) over p = 0 .. positions - 1, complex128 in the shape of ``angle``.

    >>> mean_turn(np.array([0.0, np.pi]), 4).round(12).tolist()
    [(1+0j), 0j]
    """
    half = np.asarray(angle, np.float64) / 2
    base = np.sin(half)
    still = np.abs(base) < 1e-12  # a multiple of 2 pi per token
    ratio = np.sin(positions * half) / (positions * np.where(still, 1.0, base))
    return np.where(still, 1.0, ratio * np.exp(1j * (positions - 1) * half))


def lengths(positions: int) -> list[int]:
    """The sequence lengths that a fit to up to ``positions`` tokens is an average over.

    >>> lengths(10_000)
    [10000, 5000, 2500]
    """
    found = [positions]
    while found[-1] // 2 >= SHORTEST:
        found.append(found[-1] // 2)
    return found


def served_turn(angle: np.ndarray, positions: int) -> np.ndarray:
    """``mean_turn`` averaged over the ``lengths`` of up to ``positions`` tokens."""
    return np.mean([mean_turn(angle, length) for length in lengths(positions)], axis=0)


def averaged_mean(mean: np.ndarray, frequencies: np.ndarray, positions: int) -> np.ndarray:
    """E[R_p x] over sequences of up to ``positions`` tokens from E[x], f64[..., D]."""
    first, second = np.split(np.asarray(mean, np.float64), 2, axis=-1)
    z = (first + 1j * second) * served_turn(frequencies, positions)
    return np.concatenate([z.real, z.imag], axis=-1)


def averaged_moment(moment: np.ndarray, frequencies: np.ndarray, positions: int) -> np.ndarray:
    """E[R_p x x^T R_p^T] over sequences of up to ``positions`` tokens, f64[..., D, D].

    Args:
        moment: E[x x^T]. frequencies: radians per token of the pairs, f64[D/2].

    >>> one = np.outer([1.0, 0.0], [1.0, 0.0])  # one pair, always at the same angle
    >>> averaged_moment(one, np.array([np.pi / 2]), 4).round(12).tolist()  # turns once around
    [[0.5, 0.0], [0.0, 0.5]]
    """
    half = moment.shape[-1] // 2
    xx, xy = moment[..., :half, :half], moment[..., :half, half:]
    yx, yy = moment[..., half:, :half], moment[..., half:, half:]
    f = np.asarray(frequencies, np.float64)
    across = (xx + yy + 1j * (yx - xy)) * served_turn(f[:, None] - f, positions)  # E[z conj z]
    along = (xx - yy + 1j * (yx + xy)) * served_turn(f[:, None] + f, positions)  # E[z z]
    total, rest = across + along, across - along
    top = np.concatenate([total.real, -rest.imag], axis=-1)
    bottom = np.concatenate([total.imag, rest.real], axis=-1)
    return np.concatenate([top, bottom], axis=-2) / 2
