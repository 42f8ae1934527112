"""The launches before and after the decode kernel: ``mosaic_ends`` over rows and blocks of heads.

A block reads its share of X_Q or X_O once and serves several rows with it, where a batch has more
rows than the device has room for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels.decode import mosaic_ends as ends
from pallas_kernels.decode import mosaic_keys
from pallas_kernels.decode.mosaic_ends import Heads, Matrix
from pallas_kernels.decode.mosaic_shape import HEADS, Shape
from pallas_kernels.decode.mosaic_stream import PARAMS, block_heads
from pallas_kernels.lanes import program
from pallas_kernels.layout import Transform


def _scratch(sizes: tuple[int, ...]) -> list[Any]:
    return [plgpu.SMEM((size // 4,), jnp.float32) for size in sizes]


def _early(dim: int, matrix: Any, mean: Any = None) -> list[tuple[Any, int]]:
    """The first rows of a thread's share of a matrix and its share of a mean, on their way."""
    sizes = [4 * min(ends.EARLY_ROWS, Matrix.share(dim))]
    refs = [matrix]
    if mean is not None:
        sizes, refs = [*sizes, dim // 16], [*refs, mean]

    def load(ops: Any, pointers: Any, *_: Any) -> Any:
        held = [[x for own in Matrix.rows(ops, dim, pointers[0]) for x in own]]
        return held if mean is None else [*held, ends.mean_of(ops, dim, pointers[1])]

    loaded = program(load, refs=refs, results=[(jnp.int32, size) for size in sizes])
    return list(zip(loaded, sizes, strict=True))


def _quads(arrays: Any) -> list[list[Any]]:
    return [x[i : i + 4] for x in arrays for i in range(0, len(x), 4)]


def _each_row(batch: int, at_once: int, visit: Callable[[Any], None]) -> None:
    """The rows of a block, one after the other: they share the matrix that it has read."""
    first = lax.axis_index("rows") * at_once

    def one(i: Any, carry: Any) -> Any:
        pl.when(first + i < batch)(lambda: visit(first + i))
        return carry

    lax.fori_loop(0, at_once, one, 0)


def prepare(
    q: Array,
    transform: Transform,
    *,
    shape: Shape,
    heads: Heads,
    groups: int,
    scale: float,
    rows: int,
) -> tuple[Array, Array, Array]:
    """(operands, constants) for ``partials`` and the pages' shift f32[B, H, 8].

    Args:
        q: [B, 1, N, D] in BF16 or float32, not yet scaled. scale: with log2(e). rows: per block.
    """
    batch, kv_heads = q.shape[0], transform.mu.shape[0]
    blocks, bf16 = kv_heads * groups, q.dtype == jnp.bfloat16

    def early_query(q_ref: Any, first: Any, count: Any) -> tuple[Any, int]:
        size = shape.head_dim // (32 if bf16 else 16)

        def load(ops: Any, pointers: Any, scalars: Any, _: Any) -> Any:
            return [ends.query_words(ops, shape.head_dim, bf16, scalars, pointers[0])]

        held = program(load, refs=[q_ref], scalars=[first, count], results=[(jnp.int32, size)])
        return held[0], size

    def body(q_ref: Any, x_ref: Any, mu_ref: Any, *rest: Any) -> None:
        kv_head, first, count = block_heads(heads, groups)
        # Before the pages' copies start, which whatever is read later waits for.
        early = _early(shape.head_dim, x_ref.at[kv_head], mu_ref.at[kv_head])
        if rows == 1:
            early.append(early_query(q_ref.at[lax.axis_index("rows"), 0], first, count))
        plgpu.griddepcontrol_launch_dependents()

        def visit(row: Any) -> None:
            outputs = [ref.at[row, lax.axis_index("head")] for ref in rest[:3]]

            def run(ops: Any, pointers: Any, scalars: Any, arrays: Any) -> Any:
                inputs, scratch, outs = pointers[:2], pointers[2:5], pointers[5:]
                ends.prepare(
                    ops,
                    shape,
                    heads,
                    scale,
                    bf16,
                    scalars,
                    tuple(inputs),
                    tuple(scratch),
                    tuple(outs),
                    _quads(arrays[:1]),
                    arrays[1],
                    [x for array in arrays[2:] for x in array],
                )
                return []

            refs = [q_ref.at[row, 0], x_ref.at[kv_head], *rest[3:], *outputs]
            program(run, refs=refs, scalars=[first, count], arrays=early)

        _each_row(batch, rows, visit)

    out = lambda n, dtype: jax.ShapeDtypeStruct((batch, blocks, n), dtype)  # noqa: E731
    sizes = (shape.head_dim * HEADS * 4, ends.matrix_scratch(heads.used), ends.SMALL)
    kernel = plgpu.kernel(
        body,
        out_type=[
            out(mosaic_keys.query_entries(shape) * 64, jnp.int32),
            out(4 * HEADS, jnp.float32),
            out(HEADS, jnp.float32),
        ],
        scratch_types=_scratch(sizes),
        grid=(blocks, -(-batch // rows)),
        grid_names=("head", "rows"),
        compiler_params=PARAMS,
    )
    packed = kernel(q, transform.x_q, transform.mu)
    return packed[0], packed[1], packed[2]


def join(
    out: Array,
    ml: Array,
    turn: tuple[Array, Array] | None,
    *,
    heads: Heads,
    groups: int,
    window_splits: int,
    dtype: Any,
    rows: int,
    alone: bool,
) -> Array:
    """The attention output [B, 1, N, Dv] from every block's partial result.

    Args:
        turn: the INT2 pages' shift f32[B, H, 8] and X_O; None where all splits are BF16.
        rows: per block. alone: a block for every query head, not for all that share results.
    """
    batch, blocks, splits = ml.shape[:3]
    dim = out.shape[-1] // heads.used
    turned = turn is not None
    columns = 1 if alone else heads.used
    shares = heads.size if alone else 1  # blocks here that share a block's heads

    def body(*refs: Any) -> None:
        out_ref, ml_ref, *given = refs[: 4 if turned else 2]
        result_ref, *scratch = refs[4 if turned else 2 :]
        kv_head, first, count = block_heads(heads, groups)
        head = lax.axis_index("head")
        column = lax.axis_index("column")
        early = _early(dim, given[1].at[kv_head]) if turned else []
        plgpu.griddepcontrol_wait()  # for the partial results, X_O on its way meanwhile

        def visit(row: Any) -> None:
            def run(ops: Any, pointers: Any, scalars: Any, arrays: Any) -> Any:
                ends.join(
                    ops,
                    dim,
                    heads,
                    alone,
                    (window_splits, splits),
                    dtype == jnp.bfloat16,
                    scalars,
                    tuple(pointers[len(scratch) + 1 :]),
                    tuple(pointers[1 : len(scratch) + 1]),
                    pointers[0],
                    _quads(arrays),
                )
                return []

            own: list[Any] = [given[0].at[row, head], given[1].at[kv_head]] if turned else []
            partial: list[Any] = [out_ref.at[row, head], ml_ref.at[row, head]]
            refs = [result_ref.at[row, 0], *scratch, *partial, *own]
            program(run, refs=refs, scalars=[first, count, column], arrays=early)

        _each_row(batch, rows, visit)

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((batch, 1, blocks // groups * heads.group, dim), dtype),
        scratch_types=_scratch(ends.join_scratch(dim, columns, splits, turned)),
        grid=(shares, blocks, -(-batch // rows)),
        grid_names=("column", "head", "rows"),
        compiler_params=PARAMS,
    )
    return kernel(out, ml, *(turn or ()))
