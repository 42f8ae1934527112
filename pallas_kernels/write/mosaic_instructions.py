"""Instructions that the write kernel's programs need beside those of ``lanes``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf

from pallas_kernels.lanes import Lanes


class Instructions(Lanes):
    """Registers are MLIR values of type i32, f32 or (conditions) i1; ``warp`` is 0 to 3."""

    def __init__(self) -> None:
        super().__init__()
        self.warp = arith.andi(self.warp, self.const_i(3))  # of the warpgroup, not of the block

    # ------------------------------------------------------------------------------- integers

    def popc(self, x: Any) -> Any:
        return self._asm(self.i32, [x], "popc.b32 $0, $1;", "r")

    def umax(self, x: Any, y: Any) -> Any:
        return arith.maxui(x, y)

    def top_bit(self, x: Any) -> Any:
        """Place of the highest bit that is set; -1 in 0."""
        return self._asm(self.i32, [x], "bfind.u32 $0, $1;", "r")

    # --------------------------------------------------------------------------------- floats

    def less_f(self, x: Any, y: Any) -> Any:
        """x < y; false where one of them is NaN."""
        return arith.cmpf(arith.CmpFPredicate.OLT, x, y)

    def equal_f(self, x: Any, y: Any) -> Any:
        return arith.cmpf(arith.CmpFPredicate.OEQ, x, y)

    def fabs(self, x: Any) -> Any:
        return self._asm(self.f32, [x], "abs.f32 $0, $1;", "f")

    def fma_sat(self, x: Any, y: Any, z: Any) -> Any:
        """x y + z clamped to 0 .. 1; NaN gives 0."""
        return self._asm(self.f32, [x, y, z], "fma.rn.sat.f32 $0, $1, $2, $3;", "fff")

    def divide(self, x: Any, y: Any) -> Any:
        """x / y, rounded to nearest."""
        return self._asm(self.f32, [x, y], "div.rn.f32 $0, $1, $2;", "ff")

    def sqrt(self, x: Any) -> Any:
        return self._asm(self.f32, [x], "sqrt.rn.f32 $0, $1;", "f")

    def rcp(self, x: Any) -> Any:
        return self._asm(self.f32, [x], "rcp.approx.ftz.f32 $0, $1;", "f")

    def pack_f16_finite(self, low: Any, high: Any) -> Any:
        """``pack_f16`` clamped to the finite range."""
        return self._asm(self.i32, [high, low], "cvt.rn.satfinite.f16x2.f32 $0, $1, $2;", "ff")

    def fma_bf16x2(self, x: Any, y: Any, z: Any) -> Any:
        return self._asm(self.i32, [x, y, z], "fma.rn.bf16x2 $0, $1, $2, $3;", "rrr")

    # -------------------------------------------------------------------- tensor core, warpgroup

    def wgmma_f16(
        self,
        a: list[list[Any]],
        b: Any,
        columns: int,
        terms: int,
        before: list[Any] | None = None,
    ) -> list[Any]:
        """Sums of A (B_0 + B_1 + ...) over all steps of 16: f32[64, columns], all warps together.

        Args:
            a: per step the 4 registers of mma's A operand, 16 rows of each warp.
            b: float16 [terms, 2 steps, columns, 8] in shared memory: 8 numbers along k together.
            before: sums to add to; None: there are none yet.

        Returns:
            Per 8 columns the 4 registers of mma's sums.
        """
        sums, steps = columns // 2, len(a)
        registers = ",".join(f"${i}" for i in range(sums))
        lines = [
            "{ .reg .pred p; .reg .b64 base, d;",
            f"mov.b64 base, {{${sums + 4 * steps}, 8}};",  # 128 bytes from 8 columns to the next
            "wgmma.fence.sync.aligned;",
        ]
        for index in range(terms * steps):
            term, step = terms - 1 - index // steps, index % steps  # the smallest terms first
            operand = ",".join(f"${sums + 4 * step + i}" for i in range(4))
            place = (term * steps + step) * 2 * columns  # in units of 16 bytes
            lines += [
                f"setp.ne.b32 p, {int(index > 0 or before is not None)}, 0;",
                f"add.s64 d, base, {place};",
                f"wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.f16.f16 "
                f"{{{registers}}}, {{{operand}}}, d, p, 1, 1, 0;",
            ]
        lines += ["wgmma.commit_group.sync.aligned;", "wgmma.wait_group.sync.aligned 0; }"]
        # In units of 16 bytes: the address, and from one 8 of k to the next. It stays below 2^14.
        address = arith.shrui(llvm.ptrtoint(self.i32, b), self.const_i(4))
        descriptor = arith.addi(address, self.const_i(columns << 16))
        result = llvm.inline_asm(
            llvm.StructType.get_literal([self.f32] * sums),
            [*(x for step in a for x in step), descriptor, *(before or [])],
            " ".join(lines),
            ",".join(
                ["=f"] * sums + ["r"] * (4 * steps + 1) + [str(i) for i in range(len(before or []))]
            ),
            has_side_effects=True,
        )
        return [llvm.extractvalue(self.f32, result, [i]) for i in range(sums)]

    # -------------------------------------------------------------------------------- control

    def when(self, condition: Any, then: Callable[[], None]) -> None:
        """``then`` in the warps whose lanes, all of them, hold the condition."""
        op = scf.IfOp(condition)  # type: ignore[call-arg]
        with ir.InsertionPoint(op.then_block):
            then()
            scf.yield_([])

    def loop(self, count: Any, body: Callable[..., list[Any]], state: list[Any]) -> list[Any]:
        """state = body(i, state) for i = 0 .. count - 1."""
        op = scf.ForOp(self.const_i(0), self._int(count), self.const_i(1), state)  # type: ignore[call-arg]
        with ir.InsertionPoint(op.body):
            scf.yield_(body(op.induction_variable, list(op.inner_iter_args)))
        return list(op.results)

    def repeat(self, body: Callable[..., tuple[list[Any], Any]], state: list[Any]) -> list[Any]:
        """(state, go_on) = body(state), once and as long as ``go_on``, equal in a warp, holds."""
        kinds = [x.type for x in state]
        op = scf.WhileOp(kinds, state)
        before = op.before.blocks.append(*kinds)
        with ir.InsertionPoint(before):
            new, go_on = body(list(before.arguments))
            scf.condition(go_on, new)
        after = op.after.blocks.append(*kinds)
        with ir.InsertionPoint(after):
            scf.yield_(list(after.arguments))
        return list(op.results)

    # --------------------------------------------------------------------------------- memory

    def add_to(self, pointer: Any, offset: Any, value: Any) -> None:
        """Add an i32 to one in global memory, atomically."""
        llvm.inline_asm(
            None,
            [utils.getelementptr(pointer, [offset], self.i8), value],
            "red.global.add.u32 [$0], $1;",
            "l,r,~{memory}",
            has_side_effects=True,
        )
