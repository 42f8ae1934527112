"""A JAX model of one's own on the INT2 cache: calibrate it, prefill, decode, and look at the error.

    python examples/custom_model.py

The model is 30 lines of plain JAX with random weights. It takes its attention as a function, which
is all that the cache asks of a model; three such functions follow it.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from calib import Moments, fit
from oscar_jax import (
    KVConfig,
    PagedKV,
    Rotation,
    append_kv,
    due_pages,
    init_cache,
    oscar_attention,
    oscar_prefill,
    write_pages,
)
from oscar_jax.accounting import CacheShape

LAYERS, HEADS, KV_HEADS, DIM, VOCAB = 2, 6, 2, 64, 256
WIDTH = HEADS * DIM
Attend = Callable[[Any, int, jax.Array, jax.Array, jax.Array], tuple[jax.Array, Any]]


def init(key: jax.Array) -> dict[str, jax.Array]:
    """Random weights; keys get a bias, as those of many models have."""
    sizes = {"q": HEADS * DIM, "k": KV_HEADS * DIM, "v": KV_HEADS * DIM, "up": 4 * WIDTH}
    keys = iter(jax.random.split(key, 32))
    normal = lambda *shape: jax.random.normal(next(keys), shape) / math.sqrt(shape[-2])  # noqa: E731
    params = {name: normal(LAYERS, WIDTH, size) for name, size in sizes.items()}
    params |= {"o": normal(LAYERS, HEADS * DIM, WIDTH), "down": normal(LAYERS, 4 * WIDTH, WIDTH)}
    bias = jax.random.normal(next(keys), (LAYERS, KV_HEADS * DIM))
    return params | {"bias": bias, "embed": normal(VOCAB, WIDTH) * math.sqrt(VOCAB)}


def norm(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def rope(x: jax.Array, positions: jax.Array) -> jax.Array:
    """Rotary embedding of x [B, Q, heads, D] at positions [B, Q]."""
    angle = positions[..., None, None] * 10_000.0 ** (-jnp.arange(DIM // 2) / (DIM // 2))
    a, b = jnp.split(x, 2, -1)
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def model(
    w: dict[str, jax.Array], tokens: jax.Array, positions: jax.Array, attend: Attend, state: Any
) -> tuple[jax.Array, Any]:
    """Logits [B, Q, V] of tokens [B, Q], and what ``attend`` made of ``state``."""
    h = w["embed"][tokens]
    heads = lambda x: x.reshape(*tokens.shape, -1, DIM)  # noqa: E731
    for i in range(LAYERS):
        x = norm(h)
        q, k = (rope(heads(y), positions) for y in (x @ w["q"][i], x @ w["k"][i] + w["bias"][i]))
        out, state = attend(state, i, q, k, heads(x @ w["v"][i]))
        h = h + out.reshape(*tokens.shape, -1) @ w["o"][i]
        h = h + jax.nn.gelu(norm(h) @ w["up"][i]) @ w["down"][i]
    return norm(h) @ w["embed"].T, state


# ----------------------------------------------------------------------- three kinds of attention


def exact(moments: Moments, layer: int, q: Any, k: Any, v: Any) -> tuple[jax.Array, Moments]:
    """Full precision, every key; the moments see every token beyond the sink."""
    out = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    beyond_sink = jnp.broadcast_to(jnp.arange(q.shape[1]) >= KVConfig().sink, q.shape[:2])
    return out, moments.update(layer, q, k, v, out, mask=beyond_sink)


def prompt(rotation: Rotation, n: int) -> Attend:
    """A whole prompt of n tokens into the cache."""
    return lambda cache, layer, q, k, v: oscar_prefill(q, k, v, cache, layer, rotation, lengths=n)


def step(rotation: Rotation, n: jax.Array) -> Attend:
    """One token, the n-th of the cache."""

    def attend(cache: PagedKV, layer: int, q: Any, k: Any, v: Any) -> tuple[jax.Array, PagedKV]:
        cache = append_kv(cache, layer, k, v, lengths=n)
        return oscar_attention(q, cache, layer, rotation, lengths=n), cache

    return attend


# ------------------------------------------------------------------------------------- the whole


@functools.partial(jax.jit, static_argnames="count", donate_argnames="cache")
def generate(
    w: dict[str, jax.Array],
    rotation: Rotation,
    cache: PagedKV,
    text: jax.Array,
    count: int,
) -> tuple[jax.Array, jax.Array, PagedKV]:
    """(the ``count`` most likely next tokens, the logits they came from, the cache)."""
    n = len(text)
    logits, cache = model(w, text[None], jnp.arange(n)[None], prompt(rotation, n), cache)

    def decode(carry: Any, n: jax.Array) -> Any:
        cache, token = carry
        # Pages that the last step completed; before attention, so that XLA updates them in place.
        cache = write_pages(cache, rotation, due_pages(cache, lengths=n - 1))
        tokens, positions = token[None, None], jnp.full((1, 1), n - 1)
        logits, cache = model(w, tokens, positions, step(rotation, n), cache)
        return (cache, logits[0, 0].argmax()), (token, logits[0, 0])

    lengths = n + 1 + jnp.arange(count)
    (cache, _), (tokens, logits) = lax.scan(decode, (cache, logits[0, -1].argmax()), lengths)
    return tokens, logits, cache


@jax.jit
def in_full(w: dict[str, jax.Array], text: jax.Array) -> tuple[jax.Array, Moments]:
    """Logits [1, n, V] in full precision, and the moments of the text."""
    moments = Moments.zeros(layers=LAYERS, kv_heads=KV_HEADS, head_dim=DIM)
    return model(w, text[None], jnp.arange(len(text))[None], exact, moments)


def bytes_of(module: str, count: int) -> jax.Array:
    """The first bytes of a file beside the json package's: text for a model of bytes."""
    text = Path(json.__file__).with_name(module).read_bytes()
    return jnp.array(np.frombuffer(text[:count], np.uint8).astype(np.int32))


def main(tokens: int = 2048, count: int = 48) -> dict[str, float]:
    """Relative error of the decoded logits by recipe, and the compression reached."""
    weights, text = init(jax.random.key(0)), bytes_of("encoder.py", tokens)
    _, moments = in_full(weights, bytes_of("decoder.py", tokens + count))
    found: dict[str, float] = {}
    for recipe in ("hadamard", "oscar+centre"):
        rotation, report = fit(moments, recipe)
        for warning in report.warnings:
            print(f"{recipe}: {warning}")
        cache = init_cache(
            KVConfig(),
            layers=LAYERS,
            kv_heads=KV_HEADS,
            head_dim=DIM,
            batch=1,
            max_tokens=tokens + count,
        )
        shape = CacheShape.of_cache(cache)
        new, logits, cache = generate(weights, rotation, cache, text, count)
        right = in_full(weights, jnp.concatenate([text, new]))[0][0, -count:]
        found[recipe] = float(jnp.linalg.norm(logits - right) / jnp.linalg.norm(right))
        print(f"{recipe:>13}: decoded logits differ by {found[recipe]:.1%} from full precision")
    found["compression"] = shape.compression(tokens + count)
    print(
        f"{tokens + count} tokens take {shape.live_bytes(tokens + count):,} bytes, "
        f"{found['compression']:.2f} times less than in BF16 "
        f"({shape.bits_per_element} bits per element of a page)"
    )
    return found


if __name__ == "__main__":
    main()
