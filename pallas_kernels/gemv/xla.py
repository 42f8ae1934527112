"""The specification of ``linear`` in plain JAX, and what every machine without the kernel runs."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt32

# On a CPU, float32 products win from about this many rows (2 cores with AVX512-BF16, SmolLM2's
# layers: 256 rows 338 ms against 744 ms, 64 rows 357 against 204, 2 rows 230 against 21).
_CPU_FLOAT32_ROWS = 128


def project(x: Float[Array, "*rows I"], weight: Float[Array, "O I"]) -> Float[Array, "*rows O"]:
    """x @ weight^T in float32: x is rounded to the weight's dtype, products are summed in float32.

    Weights keep the checkpoint's [out, in] layout: with two bf16 rows XLA's CPU product is twice as
    fast that way (SmolLM2's step: 25 ms against 51). Float32 weights mean float32: no TF32.
    """
    contract = (((x.ndim - 1,), (1,)), ((), ()))
    x = x.astype(weight.dtype)

    def native(x: jax.Array, weight: jax.Array) -> jax.Array:
        precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
        return lax.dot_general(
            x, weight, contract, precision=precision, preferred_element_type=jnp.float32
        )

    def widened(x: jax.Array, weight: jax.Array) -> jax.Array:
        return lax.dot_general(x.astype(jnp.float32), weight.astype(jnp.float32), contract)

    if x.dtype == jnp.float32 or x.size // x.shape[-1] < _CPU_FLOAT32_ROWS:
        return native(x, weight)
    return lax.platform_dependent(x, weight, cpu=widened, default=native)


def rms_norm(x: Float[Array, "*rows E"], gain: Float[Array, " E"], eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * gain, in float32."""
    scale = lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return gain.astype(jnp.float32) * (x * scale)


def linear(
    x: Float[Array, "*rows I"],
    weight: Float[Array, "O I"],
    *,
    gain: Float[Array, " I"] | None = None,
    eps: float = 0.0,
    residual: Float[Array, "*rows O"] | None = None,
    gated: bool = False,
) -> Float[Array, "*rows out"]:
    """See ``pallas_kernels.gemv.api.linear``."""
    y = project(x if gain is None else rms_norm(x, gain, eps), weight)
    if gated:
        gate, up = jnp.split(y, 2, axis=-1)
        return (jax.nn.silu(gate) * up).astype(weight.dtype)
    return y if residual is None else residual + y


def between(
    x: Float[Array, "*rows I"],
    residual: Float[Array, "*rows E"],
    out: Float[Array, "E I"],
    gain: Float[Array, " E"],
    gate_up: Float[Array, "both E"],
    down: Float[Array, "E inner"],
    counters: UInt32[Array, "4"],
    next_gain: Float[Array, " E"] | None = None,
    following: Float[Array, "O E"] | None = None,
    *,
    eps: float,
) -> tuple[Float[Array, "*rows E"], Float[Array, "*rows O"] | None, UInt32[Array, "4"]]:
    """See ``pallas_kernels.gemv.api.between``."""
    h = linear(x, out, residual=residual)
    h = linear(linear(h, gate_up, gain=gain, eps=eps, gated=True), down, residual=h)
    if following is None:
        return h, None, counters
    return h, linear(h, following, gain=next_gain, eps=eps), counters
