"""What ``mosaic_transform`` and ``mosaic_unit`` compute, in jnp, for Pallas' interpret mode.

A kernel body under interpret mode keeps its blocks, jobs, barrier and loops, which the race
detector checks, and calls these in place of the register programs. X passes through the same
shared memory.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import format as fmt
from pallas_kernels.format import PAGE, Codec
from pallas_kernels.write.mosaic_shape import PIECE_STEPS, SHIFT, TERMS, TILES, UNIT, Side
from pallas_kernels.write.mosaic_stream import by_column, by_step
from pallas_kernels.write.mosaic_unit import Place


def prepare(
    side: Side, x_ref: Any, mu_ref: Any, matrix: Any, held_ref: Any, own: Any, share: int
) -> None:
    """``mosaic_transform.prepare``: every ``share``-th 8 rows from ``own`` on, and -mu X."""
    x, octets = x_ref[...], side.dim // 8
    held = by_step(by_column(side, x)).reshape(octets, 8, side.dim).swapaxes(1, 2)  # [D / 8, D, 8]
    high = held.astype(jnp.float16)
    terms = (high, (held - high.astype(jnp.float32)).astype(jnp.float16))
    for turn in range(-(-octets // share)):
        octet = own + turn * share

        @pl.when(octet < octets)
        def _(octet: Any = octet) -> None:
            for term, values in enumerate(terms):
                block = lax.dynamic_index_in_dim(values, octet, 0, keepdims=False)
                block = block.reshape(-1, matrix.shape[1])
                lines = block.shape[0]
                matrix[pl.ds((term * octets + octet) * lines, lines)] = block

    if side.keys:
        shift = -by_column(side, jnp.dot(mu_ref[...], x, precision="highest"))
        held_ref[SHIFT // 4 : SHIFT // 4 + side.dim] = shift


def write_unit(
    side: Side, place: Place, codec: Codec, unit: Any, head: Any, refs: dict[str, Any]
) -> None:
    """``mosaic_unit.write_unit``."""
    dim = side.dim
    terms = refs["matrix"][: TERMS * dim * dim // refs["matrix"].shape[1]].astype(jnp.float32)
    held = terms.reshape(TERMS, dim // 8, dim, 8).sum(0).swapaxes(1, 2).reshape(dim, dim)
    x = by_column(side, by_step(held, back=True), back=True)
    shift = jnp.zeros(dim)
    if side.keys:
        shift = by_column(side, refs["own"][SHIFT // 4 : SHIFT // 4 + dim], back=True)
    for i in range(UNIT):
        rows = _source_rows(place, unit * UNIT + i, head, refs, refs["source"])
        out = jnp.dot(rows, x, precision="highest") + shift
        _encode(side, place, codec, unit * UNIT + i, head, refs, out)


def write_streamed(
    side: Side, place: Place, codec: Codec, unit: Any, head: Any, refs: dict[str, Any], stream: Any
) -> None:
    """``mosaic_kernel.Body.write_streamed``, with the tiles of a unit upwards."""
    dim, size, jobs = side.dim, PAGE // TILES, [unit * UNIT + i for i in range(UNIT)]
    rows = jnp.stack([_source_rows(place, job, head, refs, refs["source"]) for job in jobs])
    rows = by_step(rows.reshape(-1, dim).T).T.reshape(UNIT, PAGE, -1, 16 * PIECE_STEPS)
    own = refs["own"]
    shift = own[SHIFT // 4 : SHIFT // 4 + dim] if side.keys else jnp.zeros(dim)
    (back,) = own[:1]

    def tile(i: Any, out: Any) -> Any:
        taken = lax.dynamic_slice_in_dim(rows, i * size, size, 1)  # [2, 32, ., .]
        sums = jnp.zeros((UNIT, size, dim))

        def multiply(piece: int, stage: Any) -> None:
            nonlocal sums
            held = stage[...].astype(jnp.float32).reshape(-1, dim, 8).swapaxes(1, 2)
            plgpu.commit_smem()  # loads before a later copy; wgmma is ordered by its own wait
            a = taken[:, :, piece % rows.shape[2]]
            sums = sums + jnp.dot(a, held.reshape(-1, dim), precision="highest")

        stream.visit(multiply)
        return lax.dynamic_update_slice_in_dim(out, (sums + shift) * back, i * size, 1)

    out = lax.fori_loop(0, TILES, tile, jnp.zeros((UNIT, PAGE, dim)))
    for job, x in zip(jobs, out, strict=True):
        _encode(side, place, codec, job, head, refs, by_column(side, x, back=True))


def _source_rows(place: Place, job: Any, head: Any, refs: dict[str, Any], source: Any) -> Any:
    """Those of a job, f32[T, D]; of one that is to be skipped, anything."""
    at = jnp.minimum(job, place.jobs - 1)
    taken = (refs["offset"][at] + jnp.arange(PAGE)) % place.length
    return source[refs["row"][at], head][taken].astype(jnp.float32)


def _encode(
    side: Side, place: Place, codec: Codec, job: Any, head: Any, refs: dict[str, Any], out: Any
) -> None:
    """Transformed rows to words and metadata in the pools, if the job is there."""
    page = refs["page_id"][jnp.minimum(job, place.jobs - 1)]

    @pl.when(jnp.logical_and(job < place.jobs, page >= 0))
    def _() -> None:
        bad = ~jnp.isfinite(out).all(-1)
        if side.keys:
            encoded = fmt.encode_key_pages(out, codec)
        else:
            encoded = fmt.encode_value_pages(out, codec)
            keys = _source_rows(place, job, head, refs, refs["keys"])
            bad &= jnp.isfinite(keys).all(-1)
        refs["pages"][page, head] = encoded.words
        refs["meta"][page, head] = encoded.meta
        found = jnp.stack([encoded.saturated, bad.sum()]).astype(jnp.int32)
        refs["counts"][...] = refs["counts"][...] + found
