"""What ``mosaic_fragments`` computes, in jnp, for Pallas' interpret mode.

A kernel body under interpret mode keeps its blocks, jobs, barrier and loops, which the race
detector checks, and calls these in place of the register programs. X passes through the same
shared memory.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import format as fmt
from pallas_kernels.format import PAGE, Codec
from pallas_kernels.write.mosaic_fragments import SHIFT, TERMS, UNIT, Place, Side


def _columns(side: Side, x: Any, back: bool = False) -> Any:
    """The last axis in ``Side.channel``'s order; ``back``: from it."""
    if not side.keys:
        return x
    split = (8, side.pairs, 4, 2) if back else (8, 4, side.pairs, 2)
    return x.reshape(*x.shape[:-1], *split).swapaxes(-2, -3).reshape(x.shape)


def _rows(x: Any, back: bool = False) -> Any:
    """X's rows in the order of ``operand_channels``; ``back``: from it."""
    split = (-1, 2, 2, 4, 2) if back else (-1, 4, 2, 2, 2)
    order = (0, 3, 1, 2, 4, 5) if back else (0, 2, 3, 1, 4, 5)
    return x.reshape(*split, x.shape[-1]).transpose(order).reshape(x.shape)


def prepare(
    side: Side, x_ref: Any, mu_ref: Any, matrix: Any, held_ref: Any, own: Any, share: int
) -> None:
    """``mosaic_fragments.prepare``: every ``share``-th 8 rows from ``own`` on, and -mu X."""
    x, octets = x_ref[...], side.dim // 8
    held = _rows(_columns(side, x)).reshape(octets, 8, side.dim).swapaxes(1, 2)  # [D / 8, D, 8]
    high = held.astype(jnp.float16)
    terms = (high, (held - high.astype(jnp.float32)).astype(jnp.float16))
    for turn in range(-(-octets // share)):
        octet = own + turn * share

        @pl.when(octet < octets)
        def _(octet: Any = octet) -> None:
            for term, values in enumerate(terms):
                at = (term * octets + octet) * side.dim * 8
                block = lax.dynamic_index_in_dim(values, octet, 0, keepdims=False)
                matrix[pl.ds(at, side.dim * 8)] = block.reshape(-1)

    if side.keys:
        shift = -_columns(side, jnp.dot(mu_ref[...], x, precision="highest"))
        held_ref[SHIFT // 4 : SHIFT // 4 + side.dim] = shift


def write_unit(
    side: Side, place: Place, codec: Codec, unit: Any, head: Any, refs: dict[str, Any]
) -> None:
    """``mosaic_fragments.write_unit``."""
    dim = side.dim
    if not side.given:
        terms = refs["matrix"][: TERMS * dim * dim].astype(jnp.float32)
        held = terms.reshape(TERMS, dim // 8, dim, 8).sum(0).swapaxes(1, 2).reshape(dim, dim)
        x = _columns(side, _rows(held, back=True), back=True)
        shift = jnp.zeros(dim)
        if side.keys:
            shift = _columns(side, refs["own"][SHIFT // 4 : SHIFT // 4 + dim], back=True)
    for i in range(UNIT):
        job = unit * UNIT + i
        at = jnp.minimum(job, place.jobs - 1)
        page = refs["page_id"][at]

        @pl.when(jnp.logical_and(job < place.jobs, page >= 0))
        def _(at: Any = at, page: Any = page) -> None:
            taken = (refs["offset"][at] + jnp.arange(PAGE)) % place.length

            def of(source: Any) -> Any:
                return source[refs["row"][at], head][taken].astype(jnp.float32)

            if side.given:
                out = refs["source"][at, head]
            else:
                out = jnp.dot(of(refs["source"]), x, precision="highest") + shift
            bad = ~jnp.isfinite(out).all(-1)
            if side.keys:
                encoded = fmt.encode_key_pages(out, codec)
            else:
                encoded = fmt.encode_value_pages(out, codec)
                bad &= jnp.isfinite(of(refs["keys"])).all(-1)
            refs["pages"][page, head] = encoded.words
            refs["meta"][page, head] = encoded.meta
            found = jnp.stack([encoded.saturated, bad.sum()]).astype(jnp.int32)
            refs["counts"][...] = refs["counts"][...] + found
