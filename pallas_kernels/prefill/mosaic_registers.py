"""Instructions that the prefill kernel places among its products, on the machine of ``lanes``."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.lanes import Lanes

WHOLE = plgpu.Layout.WGMMA
TILE = 8  # columns of a row that four lanes hold side by side, two each


def _numbers(array: Any) -> list[Any]:
    """The registers of an array, whose vectors hold one number or two neighbours."""
    return [
        vector.extract(x, dynamic_position=[], static_position=ir.DenseI64ArrayAttr.get([i]))
        for x in array.registers.flatten()
        for i in range(ir.VectorType(x.type).shape[0])
    ]


def lane_sums(x: Any, interpret: bool) -> Any:
    """f32[rows, columns] (in ``WHOLE``) summed to f32[rows, 8], columns that are 8 apart together.

    That is what a lane holds of a row, so nothing is exchanged; the sum over the 8 is of the row.
    """
    if interpret:
        return x.reshape(x.shape[0], -1, TILE).sum(1)

    def emit(_: Any, x: Any) -> Any:
        return functools.reduce(
            lambda total, part: total + part,
            (x[:, at : at + TILE] for at in range(0, x.shape[1], TILE)),
        )

    result = plgpu.ShapeDtypeStruct((x.shape[0], TILE), jnp.float32, layout=WHOLE)
    return plgpu.inline_mgpu(arg_types=(WHOLE,), return_type=result)(emit)(x)


def computed(sums: Any) -> None:
    """Nothing that f32[rows, 8] ``sums`` (in ``WHOLE``, at least 0) are made of is computed after
    this.

    ptxas moves arithmetic that stands between two waits for wgmma behind the second one, where it
    no longer runs beside the product that is waited for: 30 of 300 instructions stayed. It moves
    none behind a branch.
    """

    def emit(_: Any, sums: Any) -> list[Any]:
        total = functools.reduce(Lanes().fadd, _numbers(sums))
        never = "{ .reg .pred p; setp.lt.f32 p, $0, 0f00000000; @p nanosleep.u32 0; }"
        llvm.inline_asm(None, [total], never, "f,~{memory}", has_side_effects=True)
        return []

    plgpu.inline_mgpu(arg_types=(WHOLE,), return_type=())(emit)(sums)


def times_rows(x: Any, factors: Any) -> Any:
    """f32[rows, columns] (in ``WHOLE``) times a factor per row.

    A warp whose 16 rows all have the factor 1 branches over the products.
    """

    def emit(_: Any, x: Any, factors: Any) -> Any:
        ops = Lanes()
        changed = functools.reduce(ops.or_, (ops.differs(f, 1.0) for f in _numbers(factors)))

        def product() -> list[Any]:
            return _numbers(x * factors.broadcast_in_dim(x.shape, (0,), x.layout))

        held = ops.if_(ops.any_warp(changed), product, _numbers(x))
        kind = ir.VectorType(x.registers.flat[0].type)
        registers = np.empty(x.registers.size, dtype=object)
        for i in range(registers.size):
            some = held[i * kind.shape[0] : (i + 1) * kind.shape[0]]
            registers[i] = vector.from_elements(kind, some)
        return fa.FragmentedArray(
            _registers=registers.reshape(x.registers.shape), _layout=x.layout, _is_signed=None
        )

    result = plgpu.ShapeDtypeStruct(x.shape, x.dtype, layout=WHOLE)
    return plgpu.inline_mgpu(arg_types=(WHOLE, WHOLE.reduce(1)), return_type=result)(emit)(
        x, factors
    )
