"""Products of BF16 weights with a few rows on Hopper and newer GPUs, as one launch or one of four.

At a row or two the bytes of the weights are all there is to it, and what costs beside them is every
launch: its start, its end, and the memory idle between. Here one block per multiprocessor streams
units of 16 weight rows through a ring of shared-memory stages. One warpgroup issues the copies
(tiles of 16 rows of ``columns``; issuing one takes it hundreds of cycles), the other makes the norm
meanwhile, multiplies by the tensor core (``mosaic_program``) and stores finished outputs.

A chain of products is one kernel: the blocks meet at a counter in global memory between two links,
and because weights wait for nobody, the next link's tiles are already on their way into the ring
while they do. The counters are zero before and after a launch: the last to need one resets it, so
that one array serves all launches of a step, in turn. All blocks must run at once: one fits a
multiprocessor, and there is one for each. A process that may use fewer than the device has (a share
of an MPS server) would wait for ever.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir.dialects import llvm
from jaxtyping import Array, Float, UInt32

from pallas_kernels.device import SHARED_BYTES, device_multiprocessors
from pallas_kernels.gemv import mosaic_program as programs
from pallas_kernels.gemv import xla
from pallas_kernels.gemv.mosaic_program import MOST_ROWS, STATE, SUMS, UNIT, Shape
from pallas_kernels.lanes import program

LINE = 256  # a TMA box's longest row
HALF = UNIT // 2
LEAST_STAGES = 3
ROOM = SHARED_BYTES - 1024  # of a block, a little left for barriers
GIVEN = -1  # a link's source or residual that is the call's, not an earlier link's output
PARAMS = plgpu.CompilerParams(
    approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
)


@dataclasses.dataclass(frozen=True)
class Config:
    """How the kernel is cut.

    Args:
        columns: of a tile. stages: tiles in shared memory or on their way there.
        blocks: in the grid, at most one per multiprocessor: the blocks of a chain wait for each
            other.
    """

    columns: int = 1024
    stages: int = 6
    blocks: int = 132

    @property
    def stage_bytes(self) -> int:
        return UNIT * self.columns * 2

    @classmethod
    def of(cls, rows: int, widths: Sequence[int], blocks: int) -> Config:
        """The widest tiles that divide the columns, and as many of them as fit."""
        columns = 1024 if not any(width % 1024 for width in widths) else 512
        room = ROOM - SUMS - rows * max(widths) * 2
        stages = min(6 * 1024 // columns, room // (UNIT * columns * 2))
        return cls(columns, max(LEAST_STAGES, stages), blocks)


def unsupported(rows: int, weights: Sequence[Any], config: Config) -> str | None:
    """Why this implementation does not serve a product or a chain of them, or None."""
    if rows > MOST_ROWS:
        return f"{rows} rows, it serves 1 to {MOST_ROWS}"
    for weight in weights:
        outs, width = weight.shape
        if weight.dtype != jnp.bfloat16:
            return f"weights in {weight.dtype.name}, it multiplies bfloat16"
        if width % config.columns:
            return f"{width} columns, it needs a multiple of {config.columns}"
        if outs % UNIT:
            return f"{outs} outputs, it needs a multiple of {UNIT}"
        if rows * width * 2 + config.stages * config.stage_bytes + SUMS > ROOM:
            return f"{rows} rows of {width}, too large for shared memory"
    return None


@dataclasses.dataclass(frozen=True)
class Link:
    """One product of a chain: x is the output of link ``source``, or GIVEN; so is the residual."""

    shape: Shape
    source: int = GIVEN
    residual: int = GIVEN

    @property
    def units(self) -> int:
        return self.shape.outs // (HALF if self.shape.gated else UNIT)

    @property
    def out_type(self) -> Any:
        dtype = jnp.bfloat16 if self.shape.gated else jnp.float32
        return jax.ShapeDtypeStruct((self.shape.rows, self.shape.outs), dtype)


def _meet(counters: Any, index: int, blocks: int) -> None:
    """Wait until every block has come here for the ``index``-th time, and see what they stored.

    All have left the meeting before this one, so its counter can be reset.
    """
    reset = "st.relaxed.gpu.global.u32 [$0+-4], 0; " if index else ""

    def run(ops: Any, pointers: Any, *_: Any) -> list[Any]:
        ops.barrier()
        llvm.inline_asm(
            None,
            [utils.getelementptr(pointers[0], [ops.const_i(4 * index)], ops.i8), ops.thread],
            "{ .reg .pred other, early; .reg .u32 seen; setp.ne.u32 other, $1, 0; "
            "@other bra done; fence.acq_rel.gpu; red.release.gpu.global.add.u32 [$0], 1; "
            "again: ld.acquire.gpu.global.u32 seen, [$0]; "
            f"setp.lt.u32 early, seen, {blocks}; @early bra again; {reset}done: }}",
            "l,r,~{memory}",
            has_side_effects=True,
        )
        ops.barrier()
        return []

    program(run, refs=[counters])


def _leave(counters: Any, meetings: int, blocks: int) -> None:
    """The last block to come here resets the counter of the last meeting, and the one it used."""

    def run(ops: Any, pointers: Any, *_: Any) -> list[Any]:
        ops.barrier()
        llvm.inline_asm(
            None,
            [utils.getelementptr(pointers[0], [ops.const_i(4 * meetings)], ops.i8), ops.thread],
            "{ .reg .pred other; .reg .u32 seen; setp.ne.u32 other, $1, 0; @other bra done; "
            "atom.acq_rel.gpu.global.add.u32 seen, [$0], 1; "
            f"setp.ne.u32 other, seen, {blocks - 1}; @other bra done; "
            "st.relaxed.gpu.global.u32 [$0], 0; st.relaxed.gpu.global.u32 [$0+-4], 0; done: }",
            "l,r,~{memory}",
            has_side_effects=True,
        )
        return []

    program(run, refs=[counters])


@dataclasses.dataclass(frozen=True)
class Body:
    """The static part of the kernel."""

    links: tuple[Link, ...]
    config: Config
    interpret: bool

    def mine(self, link: Link) -> Any:
        """Units of this block."""
        spare = link.units - lax.axis_index("block") + self.config.blocks - 1
        return lax.div(spare, jnp.int32(self.config.blocks))

    def steps(self, link: Link) -> int:
        """Tiles of a unit."""
        return link.shape.width // self.config.columns

    # ------------------------------------------------------------------------------- registers

    def prologue(self, shape: Shape, x: Any, gain: Any, scratch: Any, out: Any) -> None:
        if self.interpret:
            held = x[...]
            if shape.eps is not None:
                held = xla.rms_norm(held, gain[...], shape.eps).astype(jnp.bfloat16)
            out[pl.ds(0, shape.rows * shape.width)] = held.reshape(-1)
            plgpu.commit_smem()
            return

        def run(ops: Any, pointers: Any, *_: Any) -> list[Any]:
            x, out, scratch, *gains = pointers
            programs.prologue(ops, shape, x, gains[0] if gains else None, scratch, out)
            return []

        program(run, refs=[x, out, scratch, *([] if gain is None else [gain])])

    def empty(self, shape: Shape) -> Any:
        if self.interpret:
            return jnp.zeros((UNIT, shape.rows), jnp.float32)
        run = lambda ops, *_: [[ops.const_f(0.0)] * STATE]  # noqa: E731
        return program(run, refs=[], results=[(jnp.float32, STATE)])[0]

    def tile(self, shape: Shape, stage: Any, x: Any, first: Any, state: Any) -> Any:
        if self.interpret:
            left = stage[...].reshape(UNIT, -1).astype(jnp.float32)
            right = x[pl.ds(0, shape.rows * shape.width)].reshape(shape.rows, -1)
            right = lax.dynamic_slice_in_dim(right, first, shape.columns, 1)
            return state + left @ right.astype(jnp.float32).T

        def run(ops: Any, pointers: Any, scalars: Any, arrays: Any) -> list[Any]:
            stage, x = pointers
            return [programs.tile(ops, shape, stage, x, scalars[0], arrays[0])]

        return program(
            run,
            refs=[stage, x],
            scalars=[first],
            arrays=[(state, STATE)],
            results=[(jnp.float32, STATE)],
        )[0]

    def finish(
        self, shape: Shape, unit: Any, state: Any, scratch: Any, residual: Any, out: Any
    ) -> None:
        if self.interpret:
            value = state.T
            if shape.gated:
                gate, up = jnp.split(value, 2, axis=1)
                value = (jax.nn.silu(gate) * up).astype(jnp.bfloat16)
            own = pl.ds(unit * value.shape[1], value.shape[1])
            out[:, own] = residual[:, own] + value if shape.residual else value
            return

        def run(ops: Any, pointers: Any, scalars: Any, arrays: Any) -> list[Any]:
            scratch, out, *added = pointers
            programs.finish(
                ops, shape, scalars[0], arrays[0], scratch, added[0] if added else None, out
            )
            return []

        program(
            run,
            refs=[scratch, out, *([residual] if shape.residual else [])],
            scalars=[unit],
            arrays=[(state, STATE)],
        )

    # ---------------------------------------------------------------------------------- blocks

    def __call__(self, *refs: Any) -> None:
        """x, [residual], weights, [gains], [counters]; an output per link; scratch."""
        *inputs, stages, x_held, scratch, full, free = refs
        shapes = [link.shape for link in self.links]
        outs = [inputs.pop() for _ in shapes][::-1]
        x = inputs.pop(0)
        given = any(k.shape.residual and k.residual == GIVEN for k in self.links)
        residual = inputs.pop(0) if given else None
        weights = [inputs.pop(0) for _ in shapes]
        gains = [None if shape.eps is None else inputs.pop(0) for shape in shapes]

        @pl.when(lax.axis_index("warpgroup") == 0)
        def _() -> None:
            base = jnp.int32(0)
            for i, link in enumerate(self.links):
                if i and inputs:
                    _meet(inputs[0], i - 1, self.config.blocks)
                source = x if link.source == GIVEN else outs[link.source]
                added = residual if link.residual == GIVEN else outs[link.residual]
                self.prologue(link.shape, source, gains[i], scratch, x_held)
                self.multiply(link, base, (stages, x_held), (full, free), scratch, added, outs[i])
                base += self.mine(link) * self.steps(link)
            if inputs:
                _leave(inputs[0], len(self.links) - 1, self.config.blocks)

        @pl.when(lax.axis_index("warpgroup") == 1)
        def _() -> None:
            base = jnp.int32(0)
            for link, weight in zip(self.links, weights, strict=True):
                self.copy_all(link, base, weight, stages, full, free)
                base += self.mine(link) * self.steps(link)

    @property
    def _total(self) -> Any:
        """Tiles of this block, of all links."""
        return sum(self.mine(link) * self.steps(link) for link in self.links)

    def multiply(
        self,
        link: Link,
        base: Any,
        held: Any,
        barriers: Any,
        scratch: Any,
        residual: Any,
        out: Any,
    ) -> None:
        """The first warpgroup's part: every tile of the block's units, as it comes.

        Args:
            base: tiles of the links before.
        """
        steps, ring = self.steps(link), jnp.int32(self.config.stages)
        (stages, x), (full, free) = held, barriers

        def visit(turn: Any, _: Any) -> None:
            def step(k: Any, state: Any) -> Any:
                j = base + turn * steps + k
                slot = lax.rem(j, ring)
                plgpu.barrier_wait(full.at[slot])
                first = k * self.config.columns
                state = self.tile(link.shape, stages.at[slot], x, first, state)
                plgpu.commit_smem()  # orders these reads before the copy that overwrites them
                pl.when(j + ring < self._total)(lambda: plgpu.barrier_arrive(free.at[slot]))
                return state

            state = lax.fori_loop(0, steps, step, self.empty(link.shape))
            unit = lax.axis_index("block") + turn * self.config.blocks
            self.finish(link.shape, unit, state, scratch, residual, out)

        lax.fori_loop(0, self.mine(link), visit, None)

    def copy_all(
        self, link: Link, base: Any, weight: Any, stages: Any, full: Any, free: Any
    ) -> None:
        """The second warpgroup's part: copies, as far ahead as the ring reaches."""
        shape, lines = link.shape, self.config.columns // LINE
        steps, ring = jnp.int32(self.steps(link)), jnp.int32(self.config.stages)

        def fetch(i: Any, _: Any) -> None:
            slot = lax.rem(base + i, ring)
            pl.when(base + i >= ring)(lambda: plgpu.barrier_wait(free.at[slot]))
            unit = lax.axis_index("block") + lax.div(i, steps) * self.config.blocks
            line = lax.rem(i, steps) * lines
            upper = unit * (HALF if shape.gated else UNIT)
            lower = upper + (shape.outs if shape.gated else HALF)
            for place, row in ((0, upper), (HALF, lower)):
                own = pl.ds(row, HALF), pl.ds(line, lines)
                target = stages.at[slot, pl.ds(place, HALF)]
                plgpu.copy_gmem_to_smem(weight.at[own], target, full.at[slot])

        lax.fori_loop(0, self.mine(link) * steps, fetch, None)


def _run(
    links: Sequence[Link],
    x: Array,
    residual: Array | None,
    weights: Sequence[Array],
    gains: Sequence[Array | None],
    config: Config,
    interpret: Any,
    counters: Any = None,
) -> list[Array]:
    """The outputs of all links. ``counters``: a reference, for more than one."""
    reason = unsupported(x.shape[0], weights, config)
    if reason is not None:
        raise NotImplementedError(f"mosaic_gpu does not serve this: {reason}; use 'xla'")
    if interpret is None and device_multiprocessors() is None:
        raise NotImplementedError(
            "mosaic_gpu needs a GPU of compute capability 9.0 or newer, which this is not traced "
            "for; use 'xla'"
        )
    operands: list[Any] = [x] if residual is None else [x, residual]
    operands += [w.reshape(w.shape[0], w.shape[1] // LINE, LINE) for w in weights]
    operands += [gain for gain in gains if gain is not None]
    if counters is not None and config.blocks > 1:
        operands.append(counters)
    body = Body(tuple(links), config, interpret is not None)

    def linear_kernel(*refs: Any) -> None:  # the name that profiles show
        body(*refs)

    kernel = plgpu.kernel(
        linear_kernel,
        out_type=[link.out_type for link in links],
        scratch_types=[
            plgpu.SMEM((config.stages, UNIT, config.columns // LINE, LINE), jnp.bfloat16),
            plgpu.SMEM((max(link.shape.rows * link.shape.width for link in links),), jnp.bfloat16),
            plgpu.SMEM((SUMS // 4,), jnp.float32),
            plgpu.Barrier(num_arrivals=2, num_barriers=config.stages),
            plgpu.Barrier(num_barriers=config.stages),
        ],
        grid=(config.blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="warpgroup",
        compiler_params=PARAMS,
        interpret=interpret,
    )
    return list(kernel(*operands))


@functools.partial(jax.jit, static_argnames=("eps", "gated", "config", "interpret"))
def linear(
    x: Float[Array, "*rows I"],
    weight: Float[Array, "O I"],
    *,
    gain: Float[Array, " I"] | None = None,
    eps: float = 0.0,
    residual: Float[Array, "*rows O"] | None = None,
    gated: bool = False,
    config: Config | None = None,
    interpret: Any = None,
) -> Float[Array, "*rows out"]:
    """See ``pallas_kernels.gemv.api.linear``.

    Args:
        config: how the kernel is cut. interpret: plgpu.InterpretGPUParams.
    """
    outs, width = weight.shape
    rows = x.size // width
    config = config or Config.of(rows, (width,), device_multiprocessors() or 132)
    outs = outs // 2 if gated else outs
    norm = None if gain is None else eps
    shape = Shape(rows, width, config.columns, outs, gated, norm, residual is not None)
    held = x.astype(jnp.bfloat16 if gain is None else jnp.float32).reshape(rows, width)
    added = None if residual is None else residual.reshape(rows, outs)
    gains = [None if gain is None else gain.astype(jnp.bfloat16)]
    (out,) = _run([Link(shape)], held, added, [weight], gains, config, interpret)
    return out.reshape(*x.shape[:-1], outs)


@functools.partial(jax.jit, static_argnames=("eps", "config", "interpret"))
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
    config: Config | None = None,
    interpret: Any = None,
) -> tuple[Float[Array, "*rows E"], Float[Array, "*rows O"] | None, UInt32[Array, "4"]]:
    """See ``pallas_kernels.gemv.api.between``; ``config`` and ``interpret`` as in ``linear``."""
    size, width = out.shape
    inner, rows = down.shape[1], x.size // width
    widths = (width, size, inner)
    config = config or Config.of(rows, widths, device_multiprocessors() or 132)
    shape = functools.partial(Shape, rows)
    links = [
        Link(shape(width, config.columns, size, residual=True)),
        Link(shape(size, config.columns, inner, True, eps), source=0),
        Link(shape(inner, config.columns, size, residual=True), source=1, residual=0),
    ]
    weights, gains = [out, gate_up, down], [None, gain, None]
    if following is not None:
        links.append(Link(shape(size, config.columns, following.shape[0], False, eps), source=2))
        weights.append(following)
        gains.append(next_gain)
    held = jax.new_ref(counters)
    outs = _run(
        links,
        x.astype(jnp.bfloat16).reshape(rows, width),
        residual.astype(jnp.float32).reshape(rows, size),
        weights,
        [None if g is None else g.astype(jnp.bfloat16) for g in gains],
        config,
        interpret,
        held,
    )
    lead = x.shape[:-1]
    y = outs[3].reshape(*lead, -1) if following is not None else None
    return outs[2].reshape(*lead, size), y, jax.freeze(held)
