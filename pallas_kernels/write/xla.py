"""Writing whole pages, in plain JAX: the specification.

A page is always transformed as one [T, D] block per head, so its bytes do not depend on how many
pages are written together, by prefill or ahead of decode.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from pallas_kernels.format import PAGE, Codec, encode_key_pages, encode_value_pages
from pallas_kernels.layout import LayerKV, PageJobs, Transform


def encode_page(
    k: Float[Array, "K T D"], v: Float[Array, "K T Dv"], transform: Transform, codec: Codec
) -> tuple[dict[str, Array], Array, Array]:
    """(the four arrays of a page, rows that saturated float16, rows that are not finite)."""
    dot = functools.partial(
        jnp.einsum, "ktd,kde->kte", precision=lax.Precision.HIGHEST, preferred_element_type=float
    )
    keys = dot(k.astype(jnp.float32) - transform.mu[:, None], transform.x_k)
    values = dot(v.astype(jnp.float32), transform.x_v)
    bad = ~jnp.isfinite(keys).all(-1) | ~jnp.isfinite(values).all(-1)
    key_page, value_page = encode_key_pages(keys, codec), encode_value_pages(values, codec)
    arrays = {
        "k_pages": key_page.words,
        "v_pages": value_page.words,
        "k_meta": key_page.meta,
        "v_meta": value_page.meta,
    }
    return arrays, key_page.saturated + value_page.saturated, bad.sum()


@functools.partial(jax.jit, static_argnames=("codec",))
def write(
    layer: LayerKV,
    source_k: Float[Array, "X K H D"],
    source_v: Float[Array, "X K H Dv"],
    transform: Transform | None,
    jobs: PageJobs,
    *,
    codec: Codec | None,
) -> tuple[LayerKV, Int32[Array, "2"]]:
    """See ``pallas_kernels.write.api.write``."""
    real = jnp.nonzero(jobs.page_id >= 0, size=len(jobs.page_id), fill_value=0)[0]
    count = (jobs.page_id >= 0).sum()
    names = ("k_pages", "v_pages") + (("k_meta", "v_meta") if layer.is_packed else ())

    def visit(i: Array, carry: tuple[dict[str, Array], Array]) -> tuple[dict[str, Array], Array]:
        pools, counts = carry
        job = real[i]  # the loop visits the real jobs only
        rows = (jobs.offset[job] + jnp.arange(PAGE)) % source_k.shape[2]
        # Rounded to BF16 first: prefill's k and v and the ring's are then the same numbers.
        k_block, v_block = (
            jnp.take(
                lax.dynamic_index_in_dim(x, jobs.row[job], 0, keepdims=False), rows, axis=1
            ).astype(jnp.bfloat16)
            for x in (source_k, source_v)
        )
        if transform is None or codec is None:
            arrays = {"k_pages": k_block, "v_pages": v_block}
        else:
            arrays, saturated, bad = encode_page(k_block, v_block, transform, codec)
            counts = counts + jnp.stack([saturated, bad]).astype(jnp.int32)
        pools = {
            name: lax.dynamic_update_index_in_dim(pools[name], arrays[name], jobs.page_id[job], 0)
            for name in names
        }
        return pools, counts

    pools = {name: getattr(layer, name) for name in names}
    pools, counts = lax.fori_loop(0, count, visit, (pools, jnp.zeros(2, jnp.int32)))
    return dataclasses.replace(layer, **pools), counts
