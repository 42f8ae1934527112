"""The product ops: they pick the kernel where it serves the input, and plain JAX elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt32

from pallas_kernels.device import device_multiprocessors
from pallas_kernels.gemv import mosaic_gpu, xla

IMPLEMENTATIONS = ("xla", "mosaic_gpu")
# Beyond, XLA's products are as fast: at 4 rows an 8B model's layers take 1.22 of the weights' bytes
# either way, at 1 row 1.16 against 1.29.
MOST_ROWS = 4


def _dispatch(
    plain: Callable[..., Any],
    kernel: Callable[..., Any],
    implementation: str | None,
    arrays: Sequence[Any],
    weights: Sequence[Any],
) -> Any:
    """Call one of two functions of ``arrays``, the first of which holds the rows."""
    if implementation not in (None, *IMPLEMENTATIONS):
        raise NotImplementedError(
            f"implementation={implementation!r} of a product does not exist here: use one of "
            f"{sorted(IMPLEMENTATIONS)}"
        )
    if implementation == "xla":
        return plain(*arrays)
    if implementation == "mosaic_gpu":
        return kernel(*arrays)
    blocks, x = device_multiprocessors(), arrays[0]
    rows, widths = x.size // x.shape[-1], [weight.shape[1] for weight in weights]
    config = mosaic_gpu.Config.of(rows, widths, blocks or 1)
    if blocks is None or rows > MOST_ROWS or mosaic_gpu.unsupported(rows, weights, config):
        return plain(*arrays)
    return lax.platform_dependent(*arrays, cuda=kernel, default=plain)


def linear(
    x: Float[Array, "*rows I"],
    weight: Float[Array, "O _"],
    *,
    gain: Float[Array, " I"] | None = None,
    eps: float = 0.0,
    residual: Float[Array, "*rows O"] | None = None,
    gated: bool = False,
    implementation: str | None = None,
) -> Float[Array, "*rows out"]:
    """y = norm(x) W^T, summed in float32; then a gate or a residual.

        norm(x) = x / sqrt(mean(x^2) + eps) * gain      with ``gain``, else x itself
        out     = y                                     float32 [..., O]
                  residual + y                          with ``residual``, float32
                  silu(y[..., :O/2]) * y[..., O/2:]     with ``gated``, in the weight's dtype

    norm(x) is rounded to the weight's dtype before it is multiplied; float32 weights mean float32.

    Args:
        x: any number of rows. weight: [out, in] as checkpoints store it.
        implementation: None takes "mosaic_gpu" for up to 4 rows of BF16 on a GPU of compute
            capability 9.0 or newer, "xla" everywhere else; the kernel serves up to 8.

    Raises:
        ValueError: shapes disagree, or both a gate and a residual are asked for.
        NotImplementedError: the named implementation does not exist or serve this input.

    >>> import jax.numpy as jnp
    >>> linear(jnp.array([[3.0, 4.0]]), jnp.eye(2), residual=jnp.array([[1.0, 0.0]])).tolist()
    [[4.0, 4.0]]
    """
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x has {x.shape[-1]} columns, the weight {weight.shape[1]}: must be equal"
        )
    if gated and (residual is not None or weight.shape[0] % 2):
        raise ValueError(
            f"gated=True with a weight of {weight.shape[0]} rows and residual "
            f"{'given' if residual is not None else 'absent'}: it needs an even number and none"
        )

    def run(op: Callable[..., Any]) -> Callable[..., Array]:
        return lambda x, weight, gain, residual: op(
            x, weight, gain=gain, eps=eps, residual=residual, gated=gated
        )

    return _dispatch(
        run(xla.linear),
        run(mosaic_gpu.linear),
        implementation,
        (x, weight, gain, residual),
        (weight,),
    )


def counters() -> UInt32[Array, "4"]:
    """What the first ``between`` of a program takes: zeros, and so they are after every call."""
    return jnp.zeros(4, jnp.uint32)


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
    implementation: str | None = None,
) -> tuple[Float[Array, "*rows E"], Float[Array, "*rows O"] | None, UInt32[Array, "4"]]:
    """Everything of a decoder that lies between two attentions, as one op.

        h = residual + x out^T
        h = h + (silu(gate) * up) down^T            gate, up = halves of norm(h, gain) gate_up^T
        y = norm(h, next_gain) following^T          what the next layer projects, if there is one

    Each line is a ``linear``, with its roundings.

    Args:
        x: the attention's output. residual: the stream before the attention, float32.
        counters: of ``counters``, or what the call before returned: by them the blocks of a
            kernel wait for each other, and no two kernels may use the same at once.
        next_gain, following: of the next layer; None after the last.
        implementation: as in ``linear``; fewer rows where they do not fit into shared memory.

    Returns:
        (h, y, counters); y is None without ``following``.

    Raises:
        NotImplementedError: the named implementation does not exist or serve this input.
    """

    def run(op: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *arrays: op(*arrays, eps=eps)

    weights = (out, gate_up, down) if following is None else (out, gate_up, down, following)
    return _dispatch(
        run(xla.between),
        run(mosaic_gpu.between),
        implementation,
        (x, residual, out, gain, gate_up, down, counters, next_gain, following),
        weights,
    )
