"""Instructions that the prefill kernel places among its products, on the machine of ``lanes``."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm, vector

from pallas_kernels.lanes import Lanes, element
from pallas_kernels.prefill.mosaic_wgmma import ROW

WHOLE = plgpu.Layout.WGMMA


def _numbers(array: Any) -> list[Any]:
    """The registers of an array, whose vectors hold one number or two neighbours."""
    return [
        element(x, i)
        for x in array.registers.flatten()
        for i in range(ir.VectorType(x.type).shape[0])
    ]


def computed(sums: Any) -> None:
    """Nothing that f32[rows] ``sums`` (in ``ROW``, at least 0) are made of is computed after this.

    ptxas moves arithmetic that stands between two waits for wgmma behind the second one, where it
    no longer runs beside the product that is waited for: 30 of 300 instructions stayed. It moves
    none behind a branch.
    """

    def emit(_: Any, sums: Any) -> list[Any]:
        total = functools.reduce(Lanes().fadd, _numbers(sums))
        never = "{ .reg .pred p; setp.lt.f32 p, $0, 0f00000000; @p nanosleep.u32 0; }"
        llvm.inline_asm(None, [total], never, "f,~{memory}", has_side_effects=True)
        return []

    plgpu.inline_mgpu(arg_types=(ROW,), return_type=())(emit)(sums)


def times_rows(x: Any, factors: Any) -> Any:
    """f32[rows, columns] (in ``WHOLE``) times a factor per row (in ``ROW``).

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
    return plgpu.inline_mgpu(arg_types=(WHOLE, ROW), return_type=result)(emit)(x, factors)
