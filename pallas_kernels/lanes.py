"""The instructions of ``mosaic_fragments``, emitted for one warpgroup of a Mosaic GPU kernel.

``program`` turns a function of registers into an op that a Pallas kernel body can call. This is the
only file that touches MLIR: Mosaic's Python interface moves between minor versions of jax.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fa
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

THREADS = 128


def layout(registers: int) -> Any:
    """A flat array of 128 ``registers`` numbers: register r of thread i is element 128 r + i."""
    return plgpu.Layout.WG_STRIDED((THREADS * registers,), vec_size=1)


def element(value: Any, index: int) -> Any:
    """Register ``index`` of a vector."""
    return vector.extract(
        value,
        dynamic_position=[],
        static_position=ir.DenseI64ArrayAttr.get([index]),
    )


def registers_of(array: Any) -> list[Any]:
    """The registers of a FragmentedArray in ``layout``."""
    return [element(x, 0) for x in array.registers.flatten()]


def array_of(registers: Sequence[Any], signed: bool | None = None) -> Any:
    """The FragmentedArray in ``layout`` of registers of one type."""
    kind = ir.VectorType.get((1,), registers[0].type)
    held = np.array([vector.broadcast(kind, x) for x in registers], dtype=object)
    shape = (THREADS * len(registers),)
    return fa.FragmentedArray(
        _registers=held, _layout=fa.WGStridedFragLayout(shape, 1), _is_signed=signed
    )


def _pointer(ref: Any) -> Any:
    """To the first byte of a reference, in shared or in global (not generic) memory."""
    pointer = utils.memref_ptr(ref)
    if utils.is_smem_ref(ref):
        return pointer
    return llvm.addrspacecast(llvm.PointerType.get(1), pointer)


class Lanes:
    """Emits instructions; a register is an MLIR value of type i32, f32 or (conditions) i1."""

    def __init__(self) -> None:
        self.i32 = ir.IntegerType.get_signless(32)
        self.i64 = ir.IntegerType.get_signless(64)
        self.i16 = ir.IntegerType.get_signless(16)
        self.i8 = ir.IntegerType.get_signless(8)
        self.f32 = ir.F32Type.get()
        self.f16 = ir.F16Type.get()
        thread = utils.thread_idx()
        self.thread = arith.andi(thread, self.const_i(THREADS - 1))
        self.lane = arith.andi(thread, self.const_i(31))
        self.g = arith.shrui(self.lane, self.const_i(2))
        self.t = arith.andi(thread, self.const_i(3))
        self.warp = utils.warp_idx(sync=True)  # uniform to the compiler

    def divmod_warp(self, size: int) -> tuple[Any, Any]:
        """(warp // size, warp % size) for a power of two."""
        return self.shr(self.warp, size.bit_length() - 1), self.iand(self.warp, size - 1)

    # ------------------------------------------------------------------------------- integers

    def const_i(self, value: int) -> Any:
        return utils.c(value, self.i32)

    def _int(self, x: Any) -> Any:
        return self.const_i(x) if isinstance(x, int) else x

    def iadd(self, x: Any, y: Any) -> Any:
        return arith.addi(x, self._int(y))

    def isub(self, x: Any, y: Any) -> Any:
        return arith.subi(x, self._int(y))

    def imul(self, x: Any, y: Any) -> Any:
        return arith.muli(x, self._int(y))

    def iand(self, x: Any, y: Any) -> Any:
        return arith.andi(x, self._int(y))

    def ixor(self, x: Any, y: Any) -> Any:
        return arith.xori(x, self._int(y))

    def shr(self, x: Any, y: Any) -> Any:
        return arith.shrui(x, self._int(y))

    def shl(self, x: Any, y: Any) -> Any:
        return arith.shli(x, self._int(y))

    def urem(self, x: Any, y: Any) -> Any:
        return arith.remui(x, self._int(y))

    def imin(self, x: Any, y: Any) -> Any:
        return arith.minsi(x, self._int(y))

    def imax(self, x: Any, y: Any) -> Any:
        return arith.maxsi(x, self._int(y))

    def less(self, x: Any, y: Any) -> Any:
        return arith.cmpi(arith.CmpIPredicate.slt, self._int(x), self._int(y))

    def nonzero(self, x: Any) -> Any:
        return arith.cmpi(arith.CmpIPredicate.ne, x, self.const_i(0))

    def xor(self, x: Any, y: Any) -> Any:
        return arith.xori(x, self._int(y))

    def umin(self, x: Any, y: Any) -> Any:
        return arith.minui(x, y)

    def or_(self, x: Any, y: Any) -> Any:
        return arith.ori(x, y)

    def and_(self, x: Any, y: Any) -> Any:
        return arith.andi(x, y)

    def and_or(self, x: Any, mask: int, y: Any) -> Any:
        """x & mask | y in one instruction; two constants would otherwise become two."""
        return self._asm(self.i32, [x, y], f"lop3.b32 $0, $1, {mask}, $2, 0xEA;", "rr")

    def select(self, condition: Any, x: Any, y: Any) -> Any:
        return arith.select(condition, x, y)

    select_i = select

    def prmt(self, x: Any, y: Any, selector: Any) -> Any:
        return self._asm(self.i32, [x, y, self._int(selector)], "prmt.b32 $0, $1, $2, $3;", "rrr")

    # --------------------------------------------------------------------------------- floats

    def const_f(self, value: float) -> Any:
        return utils.c(float(value), self.f32)

    def fadd(self, x: Any, y: Any) -> Any:
        return arith.addf(x, y)

    def fmul(self, x: Any, y: Any) -> Any:
        return arith.mulf(x, y)

    def fma(self, x: Any, y: Any, z: Any) -> Any:
        return llvm.intr_fma(x, y, z)

    def fneg(self, x: Any) -> Any:
        return arith.negf(x)

    def fmax(self, x: Any, y: Any) -> Any:
        return arith.maxnumf(x, y)

    def fmin(self, x: Any, y: Any) -> Any:
        return arith.minnumf(x, y)

    def differs(self, x: Any, value: float) -> Any:
        return arith.cmpf(arith.CmpFPredicate.UNE, x, self.const_f(value))

    def positive(self, x: Any) -> Any:
        return arith.cmpf(arith.CmpFPredicate.OGT, x, self.const_f(0.0))

    def rcp(self, x: Any) -> Any:
        return arith.divf(self.const_f(1.0), x)

    def ex2(self, x: Any) -> Any:
        return self._asm(self.f32, [x], "ex2.approx.ftz.f32 $0, $1;", "f")

    def lg2(self, x: Any) -> Any:
        return self._asm(self.f32, [x], "lg2.approx.ftz.f32 $0, $1;", "f")

    # ---------------------------------------------------------------------------- conversions

    def bits_f32(self, x: Any) -> Any:
        return arith.bitcast(self.f32, x)

    def f32_bits(self, x: Any) -> Any:
        return arith.bitcast(self.i32, x)

    def f16_lo(self, x: Any) -> Any:
        half = arith.bitcast(self.f16, arith.trunci(self.i16, x))
        return arith.extf(self.f32, half)

    def pack_f16(self, low: Any, high: Any) -> Any:
        return self._asm(self.i32, [high, low], "cvt.rn.f16x2.f32 $0, $1, $2;", "ff")

    def pack_bf16(self, low: Any, high: Any) -> Any:
        return self._asm(self.i32, [high, low], "cvt.rn.bf16x2.f32 $0, $1, $2;", "ff")

    def add_f16x2(self, x: Any, y: Any) -> Any:
        return self._asm(self.i32, [x, y], "add.rn.f16x2 $0, $1, $2;", "rr")

    def sub_f16x2(self, x: Any, y: Any) -> Any:
        return self._asm(self.i32, [x, y], "sub.rn.f16x2 $0, $1, $2;", "rr")

    def mul_f16x2(self, x: Any, y: Any) -> Any:
        return self._asm(self.i32, [x, y], "mul.rn.f16x2 $0, $1, $2;", "rr")

    def fma_f16x2(self, x: Any, y: Any, z: Any) -> Any:
        return self._asm(self.i32, [x, y, z], "fma.rn.f16x2 $0, $1, $2, $3;", "rrr")

    # ------------------------------------------------------------------------- tensor core, warp

    def _mma(self, kind: str, total: Any, sums: list[Any], a: list[Any], b: list[Any]) -> list[Any]:
        """One step on 16 rows and 8 columns; ``kind``: its k and types, ``total``: a sum's."""
        letter = "f" if total == self.f32 else "r"
        result = llvm.inline_asm(
            llvm.StructType.get_literal([total] * 4),
            [*a, *b, *sums],
            f"mma.sync.aligned.m16n8{kind} "
            "{$0,$1,$2,$3}, {$4,$5,$6,$7}, {$8,$9}, {$10,$11,$12,$13};",
            ",".join([f"={letter}"] * 4 + ["r"] * 6 + [letter] * 4),
            has_side_effects=False,
        )
        return [llvm.extractvalue(total, result, [i]) for i in range(4)]

    def mma_f16(self, sums: list[Any], a: list[Any], b: list[Any]) -> list[Any]:
        return self._mma("k16.row.col.f32.f16.f16.f32", self.f32, sums, a, b)

    def mma_bf16(self, sums: list[Any], a: list[Any], b: list[Any]) -> list[Any]:
        return self._mma("k16.row.col.f32.bf16.bf16.f32", self.f32, sums, a, b)

    def mma_u8(self, sums: list[Any], a: list[Any], b: list[Any], kind: str) -> list[Any]:
        """i32 sums plus u8 rows [16, 32] times columns of ``kind`` (s8 or u8)."""
        return self._mma(f"k32.row.col.s32.u8.{kind}.s32", self.i32, sums, a, b)

    def movmatrix(self, x: Any) -> Any:
        ptx = "movmatrix.sync.aligned.m8n8.trans.b16 $0, $1;"
        return self._asm(self.i32, [x], ptx, "r")

    def shfl_xor(self, x: Any, distance: int) -> Any:
        return utils.shfl_bfly(x, distance)

    def any_warp(self, condition: Any) -> Any:
        flag = self._asm(
            self.i32,
            [arith.extui(self.i32, condition)],
            "{ .reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; "
            "selp.u32 $0, 1, 0, p; }",
            "r",
            side_effects=True,
        )
        return self.nonzero(flag)

    def if_(self, condition: Any, then: Callable[[], list[Any]], otherwise: list[Any]) -> list[Any]:
        op = scf.IfOp(condition, [x.type for x in otherwise], has_else=True)  # type: ignore[call-arg]
        with ir.InsertionPoint(op.then_block):
            scf.yield_(then())
        with ir.InsertionPoint(op.else_block):
            scf.yield_(otherwise)
        return list(op.results)

    def opaque(self, x: Any) -> Any:
        """x, without the compiler's knowledge that it is: what follows is computed anew."""
        return self._asm(self.i32, [x], "mov.b32 $0, $1;", "r", side_effects=True)

    def barrier(self) -> None:
        utils.warpgroup_barrier()

    # --------------------------------------------------------------------------------- memory

    def load(self, pointer: Any, offset: Any, count: int, plus: int = 0) -> list[Any]:
        """``count`` (1, 2 or 4) 32-bit registers from byte ``offset + plus`` of a pointer."""
        address = utils.getelementptr(pointer, [self.iadd(offset, plus)], self.i8)
        if count == 1:
            return [llvm.load(self.i32, address, alignment=4)]
        kind = ir.VectorType.get((count,), self.i32)
        held = llvm.load(kind, address, alignment=4 * count)
        return [element(held, i) for i in range(count)]

    def store(
        self,
        pointer: Any,
        offset: Any,
        values: Sequence[Any],
        where: Any = None,
        plus: int = 0,
    ) -> None:
        """1, 2 or 4 registers to byte ``offset + plus`` of a pointer, in the lanes of ``where``."""
        if where is not None:
            op = scf.IfOp(where)  # type: ignore[call-arg]
            with ir.InsertionPoint(op.then_block):
                self.store(pointer, offset, values, plus=plus)
                scf.yield_([])
            return
        kind = ir.VectorType.get((len(values),), values[0].type)
        held = vector.from_elements(kind, list(values))
        address = utils.getelementptr(pointer, [self.iadd(offset, plus)], self.i8)
        llvm.store(held, address, alignment=4 * len(values))

    store_bits = store

    # --------------------------------------------------------------------- pointers, async copies

    def choose(self, condition: Any, pointer: Any, other: Any) -> Any:
        return arith.select(condition, pointer, other)

    def advance(self, pointer: Any, index: Any, size: int) -> Any:
        """The pointer ``index`` times ``size`` bytes further on, in 64 bits."""
        offset = arith.muli(arith.extsi(self.i64, index), utils.c(size, self.i64))
        return utils.getelementptr(pointer, [offset], self.i8)

    def _shared(self, pointer: Any, offset: Any) -> Any:
        return arith.addi(llvm.ptrtoint(self.i32, pointer), offset)

    def copy_async(self, target: Any, at: Any, source: Any, where: Any, plus: int) -> None:
        """16 bytes from byte ``plus`` of a global pointer to byte ``at + plus`` of a shared one;
        zeros in lanes not of ``where``."""
        size = arith.select(where, self.const_i(16), self.const_i(0))
        llvm.inline_asm(
            None,
            [self._shared(target, at), source, size],
            f"cp.async.cg.shared.global [$0+{plus}], [$1+{plus}], 16, $2;",
            "r,l,r,~{memory}",
            has_side_effects=True,
        )

    def commit_copies(self) -> None:
        self._do("cp.async.commit_group;")

    def await_copies(self, pending: int) -> None:
        """Until at most ``pending`` groups of copies of every lane of the warp are on their way."""
        self._do(f"cp.async.wait_group {pending};")
        self.sync_warp()

    def sync_warp(self) -> None:
        self._do("bar.warp.sync 0xffffffff;")

    def _do(self, ptx: str) -> None:
        llvm.inline_asm(None, [], ptx, "~{memory}", has_side_effects=True)

    def ldmatrix(self, pointer: Any, offset: Any, transposed: bool) -> list[Any]:
        """Four 8 x 8 matrices of 16 bits; lane l gives the place of row l % 8 of matrix l // 8."""
        kind = llvm.StructType.get_literal([self.i32] * 4)
        result = llvm.inline_asm(
            kind,
            [self._shared(pointer, offset)],
            f"ldmatrix.sync.aligned.m8n8.x4{'.trans' * transposed}.shared.b16 "
            "{$0,$1,$2,$3}, [$4];",
            "=r,=r,=r,=r,r,~{memory}",
            has_side_effects=True,
        )
        return [llvm.extractvalue(self.i32, result, [i]) for i in range(4)]

    def _asm(
        self, kind: Any, operands: list[Any], ptx: str, inputs: str, side_effects: bool = False
    ) -> Any:
        output = "=r" if kind == self.i32 else "=f"
        constraints = ",".join([output, *inputs])
        return llvm.inline_asm(kind, operands, ptx, constraints, has_side_effects=side_effects)


def program(
    run: Callable[..., list[Any]],
    *,
    refs: Sequence[Any],
    scalars: Sequence[Any] = (),
    arrays: Sequence[tuple[Any, int]] = (),
    results: Sequence[tuple[Any, int]] = (),
    transforms: Sequence[tuple[Any, ...]] = (),
) -> tuple[Any, ...]:
    """Call ``run(ops, pointers, scalars, arrays)`` with registers, inside a kernel body.

    Args:
        refs: references to shared or global memory; ``run`` gets pointers to their first byte.
        scalars: i32 scalars. arrays: (flat array in ``layout``, registers per thread); results:
            (dtype, registers per thread) of each array of registers that ``run`` returns.
        transforms: how each reference is tiled and swizzled; default: not at all.
    """

    def emit(_: Any, *args: Any) -> list[Any]:
        ops = Lanes()
        ends = len(refs), len(refs) + len(scalars)
        pointers = [_pointer(x) for x in args[: ends[0]]]
        held = [x.registers.item() for x in args[ends[0] : ends[1]]]
        returned = run(ops, pointers, held, [registers_of(x) for x in args[ends[1] :]])
        return [
            array_of(x, None if jnp.issubdtype(dtype, jnp.floating) else True)
            for x, (dtype, _) in zip(returned, results, strict=True)
        ]

    kinds = (
        *(plgpu.RefType(x) for x in transforms or ((),) * len(refs)),
        *(plgpu.Layout.WG_SPLAT(()) for _ in scalars),
        *(layout(count) for _, count in arrays),
    )
    returns = [
        plgpu.ShapeDtypeStruct((THREADS * count,), dtype, layout=layout(count))
        for dtype, count in results
    ]
    call = plgpu.inline_mgpu(arg_types=kinds, return_type=returns)(emit)
    return tuple(call(*refs, *scalars, *(array for array, _ in arrays)))
