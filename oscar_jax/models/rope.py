"""Rotary position embeddings: the frequencies of a model, and the angles of positions.

They are applied by ``pallas_kernels.heads.rotate``.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from oscar_jax.model_config import LinearScaling, Llama3Scaling, ModelConfig, RopeScaling


def frequencies(config: ModelConfig, *, local: bool = False) -> tuple[np.ndarray, float]:
    """Angular frequencies in radians per token, and the factor on cos and sin.

    Args:
        local: of the window layers, which have a theta of their own and no scaling rule.

    f_i = theta^(-2i / D), i = 0 .. D/2 - 1, changed by the model's scaling rule. YaRN blends f_i
    and f_i / factor by a ramp over i whose ends are the channels that turn ``beta_fast`` and
    ``beta_slow`` times in the original length; its attention factor multiplies cos and sin, so
    that logits grow by its square.

    Returns:
        (float32 [D/2], float). Computed in float64 and rounded once.

    Source: Su et al. (arXiv 2104.09864); Peng et al. (arXiv 2309.00071), section 3.2 and 3.4.
    """
    dim = config.head_dim
    theta = config.rope_theta_local if local else config.rope_theta
    if theta is None:
        raise ValueError("local=True: this model has no window layers")
    base = float(theta) ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
    scaling = None if local else config.rope_scaling
    factor = 1.0
    if isinstance(scaling, RopeScaling):
        base = _yarn(base, scaling, dim, config.rope_theta)
        factor = scaling.attention_factor or 0.1 * math.log(max(scaling.factor, 1.0)) + 1.0
    elif isinstance(scaling, Llama3Scaling):
        base = _llama3(base, scaling)
    elif isinstance(scaling, LinearScaling):
        base = base / scaling.factor
    return base.astype(np.float32), factor


def _yarn(base: np.ndarray, scaling: RopeScaling, dim: int, theta: float) -> np.ndarray:
    def channel(turns: float) -> float:
        wavelength = scaling.original_max_position_embeddings / (turns * 2 * math.pi)
        return dim * math.log(wavelength) / (2 * math.log(theta))

    low, high = channel(scaling.beta_fast), channel(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = high - low or 0.001  # a ramp of no width would divide by zero
    ramp = np.clip((np.arange(dim // 2) - low) / width, 0.0, 1.0)
    return base / scaling.factor * ramp + base * (1 - ramp)


def _llama3(base: np.ndarray, scaling: Llama3Scaling) -> np.ndarray:
    turns = scaling.original_max_position_embeddings * base / (2 * math.pi)
    blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return base / scaling.factor * (1 - blend) + base * blend


def cos_sin(
    config: ModelConfig, positions: Int[Array, "B Q"], *, local: bool = False
) -> tuple[Float[Array, "B Q 1 H"], Float[Array, "B Q 1 H"]]:
    """cos and sin of position times frequency, float32, H = D/2, one axis left for the heads.

    Positions are absolute, 0-based, in tokens; the angle is a float32 product as in the reference
    implementations, so the last bits at long positions agree with the model's training.
    ``local``: as in ``frequencies``.
    """
    frequency, factor = frequencies(config, local=local)
    angle = positions[:, :, None, None].astype(jnp.float32) * frequency  # [B, Q, 1, D/2]
    return jnp.cos(angle) * factor, jnp.sin(angle) * factor
