"""What one warp of the decode kernel does with a page in its registers, written against a small
machine.

Every function takes ``ops``: the instructions of one warpgroup (``lanes.Lanes`` emits them;
the tests run the same functions on NumPy arrays of 128 threads). Heads sit on the narrow side of
the tensor-core step, 8 of them, so that a step's 16 rows are tokens (scores) or channels (output):

    S^T[16 tokens, 8 heads]   += K[16 tokens, 16 channels]    q^T[16 channels, 8 heads]
    O^T[16 channels, 8 heads] += V^T[16 channels, 16 tokens]  P^T[16 tokens, 8 heads]

with mma.m16n8k16. Lane 4g + t holds, of A: rows g and g + 8, k = 2t, 2t+1 and 2t+8, 2t+9; of B: the
same k of column g; of the sums: rows g and g + 8 of columns 2t and 2t + 1. Operands are words of
codes as they are (``mosaic_shape``).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from pallas_kernels.decode.mosaic_keys import Keys
from pallas_kernels.decode.mosaic_shape import LOWEST, MASKED, Shape
from pallas_kernels.decode.mosaic_state import State
from pallas_kernels.decode.mosaic_values import Values
from pallas_kernels.format import PAGE


def page_step(
    ops: Any,
    shape: Shape,
    pointers: tuple[Any, ...],
    q: list[list[Any]],
    constants: list[list[Any]],
    state: State,
    left: Any,
    started: Any,
) -> State:
    """One page per ``warps_per_page`` warps: scores, weights, output; no other warp is waited for.

    The exact running maximum costs a reduction per page. A *reference* below which float16 can hold
    everything does as well: a lane that sees p * scale_v leave float16 asks for a new one, and only
    then does the warp reduce, rescale and redo the page's weights.

    Args:
        pointers: the iteration's K words, V words, K and V metadata in shared memory.
        left: pages of the iteration that exist. started: whether there is a reference.
    """
    page, part = ops.divmod_warp(shape.warps_per_page)
    valid = ops.less(page, left)
    row = ops.iadd(ops.imul(ops.shr(ops.g, 1), 4), ops.iand(ops.g, 1))  # of the first of 2 tokens
    token = ops.iadd(ops.iadd(row, ops.imul(part, 16 * shape.tiles)), ops.imul(page, PAGE))
    together = shape.together
    # Of its two tiles a lane weighs the first in columns 0 to 3 and the second in columns 4 to 7.
    second = ops.shr(ops.t, 1) if shape.paired else ops.const_i(0)
    keys = Keys(ops, shape, pointers[0], pointers[2], q, constants, second)
    values = Values(ops, shape, pointers[1], pointers[3], second)

    def separately(
        visit: Callable[[int, list[Any]], list[Any]], held: list[Any], more: int
    ) -> list[Any]:
        """``held`` after a visit of every group, which appends to it ``more`` zeros otherwise.

        Water-filled keys: a branch between the halves of the groups, on what is the same for both.
        Without it the compiler computes the sums of all groups side by side, in registers that a
        third block per multiprocessor needs (198 instead of 162 at 128 channels). Uniform keys have
        a third of these sums and are faster side by side.
        """
        groups = range(shape.tiles // together)
        if shape.codec == "uniform":
            for group in groups:
                held = visit(group, held)
            return held
        for some in (groups[: len(groups) // 2], groups[len(groups) // 2 :]):

            def run(some: range = some, held: list[Any] = held) -> list[Any]:
                for group in some:
                    held = visit(group, held)
                return held

            exist = ops.less(ops.iadd(token, 16 * together * some.start), ops.imul(left, PAGE))
            held = ops.if_(exist, run, [*held, *[ops.const_i(0)] * (more * len(some))])
        return held

    def weigh(reference: list[Any], l: list[Any], low: list[Any], token: Any) -> list[Any]:
        """Weights onto l and the minima's sums: [l, l, low, low, packed p * scale_v ...]."""

        def visit(group: int, old: list[Any]) -> list[Any]:
            scores = keys.scores(group, reference, token)
            held = values.scales_and_minima(group, token)
            l, low, packed = old[:2], old[2:4], old[4:]
            for h, (scale, minimum) in enumerate(held):
                scaled = []
                for e in range(2):
                    p = ops.ex2(scores[2 * h + e])
                    l[e] = ops.fadd(l[e], p)
                    low[e] = ops.fma(p, minimum, low[e])
                    scaled.append(ops.fmul(p, scale))
                packed.append(ops.pack_f16(*scaled))
            return [*l, *low, *packed]

        return separately(visit, [*l, *low], 2)

    reference = [ops.select(valid, m, ops.const_f(-MASKED)) for m in state.m]
    count = 2 * shape.tiles // together  # registers of packed weights

    def under_reference() -> list[Any]:
        weighed = weigh(reference, state.l, state.minima, token)
        total = weighed[4]
        for x in weighed[5:]:
            total = ops.add_f16x2(total, x)
        # bit 15 of a half is set by adding 2^10 exactly where its exponent is all ones: inf or NaN
        return [*weighed, ops.iand(ops.iadd(total, 0x04000400), 0x80008000 - (1 << 32))]

    # A block's first page has no reference yet, and is weighed once, not twice.
    unknown = [*state.l, *state.minima, *[ops.const_i(0)] * count, ops.const_i(1)]
    *weighed, overflow = ops.if_(started, under_reference, unknown)
    renew = ops.any_warp(ops.nonzero(overflow))

    def again() -> list[Any]:
        """Everything once more, rather than registers that hold the scores until now."""
        hidden = ops.opaque(token)
        zero = [ops.const_f(0.0)] * 2

        def visit(group: int, tops: list[Any]) -> list[Any]:
            scores = keys.scores(group, zero, hidden)
            held = values.scales_and_minima(group, hidden)
            log = math.log2(values.factor(group))
            unfold = values.by_tile(-log, shape.value_bits - log)
            for h, (scale, _) in enumerate(held):
                weight = ops.fadd(ops.lg2(scale), unfold)
                tops = [ops.fmax(tops[e], ops.fadd(scores[2 * h + e], weight)) for e in range(2)]
            return tops

        tops = separately(visit, [ops.const_f(MASKED)] * 2, 0)
        new, shrink = [], []
        for e in range(2):
            for distance in (4, 8, 16):
                tops[e] = ops.fmax(tops[e], ops.shfl_xor(tops[e], distance))
            old = ops.select(started, state.m[e], ops.const_f(LOWEST))
            new.append(ops.select(valid, ops.fmax(tops[e], old), old))
            shrink.append(ops.ex2(ops.fadd(old, ops.fneg(new[e]))))
        scale = lambda pair: [ops.fmul(x, c) for x, c in zip(pair, shrink, strict=True)]  # noqa: E731
        use = [ops.select(valid, m, ops.const_f(-MASKED)) for m in new]
        weighed = weigh(use, scale(state.l), scale(state.minima), ops.opaque(hidden))
        out = [ops.fmul(x, shrink[i % 2]) for row in state.out for i, x in enumerate(row)]
        return [*new, *weighed, *out]

    kept = [*state.m, *weighed, *(x for row in state.out for x in row)]
    chosen = ops.if_(renew, again, kept)
    packed, chosen = chosen[6 : 6 + count], chosen[:6] + chosen[6 + count :]
    state = State.of(chosen)
    values.add(page, part, values.operands(packed), state.out)
    return state
