"""Runs a real model over calibration text and keeps its moments, or a few sequences' rows."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int
from tqdm import tqdm

from calib.covariance import Moments
from calib.held_out import HeldOut, sample_positions
from oscar_jax.config import KVConfig, ModelConfig
from oscar_jax.models import Decoder, rope

QUERY_BLOCK = 256  # queries whose [block, T] scores exist at once
PARTS = 4  # of a sequence; one more is compiled for each, and reads no keys behind its end


def blockwise_causal_attention(
    q: Float[Array, "B T N D"],
    k: Float[Array, "B T K D"],
    v: Float[Array, "B T K D"],
    window: int | None = None,
) -> Float[Array, "B T N D"]:
    """softmax(q k^T D^-0.5, causal) v in float32, QUERY_BLOCK queries at a time, in q's dtype.

    With a window a query sees itself and the ``window - 1`` tokens before it.

    Memory for scores is B N QUERY_BLOCK T numbers instead of B N T^2.
    """
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    blocks = -(-length // QUERY_BLOCK)
    padded = jnp.pad(q, ((0, 0), (0, blocks * QUERY_BLOCK - length), (0, 0), (0, 0)))
    grouped = padded.reshape(
        batch, blocks, QUERY_BLOCK, kv_heads, heads // kv_heads, head_dim
    ).swapaxes(0, 1)
    keys, values = k.astype(jnp.float32), v.astype(jnp.float32)

    def one(end: int, block: tuple[Array, Array]) -> Array:
        index, queries = block
        scores = jnp.einsum("bqkgd,btkd->bkgqt", queries.astype(jnp.float32), keys[:, :end])
        position = index * QUERY_BLOCK + jnp.arange(QUERY_BLOCK)
        seen = jnp.arange(end) <= position[:, None]
        if window is not None:
            seen &= jnp.arange(end) > position[:, None] - window
        weights = jax.nn.softmax(jnp.where(seen, scores * head_dim**-0.5, -jnp.inf), axis=-1)
        return jnp.einsum("bkgqt,btkd->bqkgd", weights, values[:, :end])

    size, parts = -(-blocks // PARTS), []
    for first in range(0, blocks, size):
        part = slice(first, min(first + size, blocks))
        end = min(part.stop * QUERY_BLOCK, length)  # no query of this part sees more
        at = jnp.arange(part.start, part.stop)
        parts.append(lax.map(functools.partial(one, end), (at, grouped[part])))
    out = jnp.concatenate(parts)  # [blocks, B, block, K, G, D]
    return out.swapaxes(0, 1).reshape(batch, -1, heads, head_dim)[:, :length].astype(q.dtype)


def empty_moments(config: ModelConfig) -> Moments:
    """Sums of zero tokens for a model, before and after RoPE."""
    return Moments.zeros(
        layers=len(config.paged_layers),
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        frequencies=np.stack(layer_frequencies(config)),
    )


def layer_frequencies(config: ModelConfig) -> list[np.ndarray]:
    """f32[D/2] of every layer with pages, radians per token."""
    return [rope.frequencies(config)[0]] * len(config.paged_layers)


class MomentStream:
    """Adds the tokens of one sequence after another to moments: compiled once.

    Layers with a sliding window run as the model has them and leave nothing: they are never
    quantised.

    Args:
        decoder: the model, in the dtype it is served in.
        progress: is moved by T tokens per sequence.
    """

    def __init__(self, decoder: Decoder, progress: tqdm | None = None):
        self._graphdef, self._weights = nnx.split(decoder)
        self._progress = progress

    def add(
        self, moments: Moments, tokens: np.ndarray, first: int, end: int | None = None
    ) -> Moments:
        """With the tokens first .. end - 1 of i32[T], which runs whole with full causal attention.

        ``moments`` is donated: use what is returned.

        Raises:
            ValueError: an activation is NaN or infinite; layer and tensor are named at once, not at
                the end of the text.
        """
        end = len(tokens) if end is None else end
        moments, finite = _add(
            self._graphdef, self._weights, moments, jnp.asarray(tokens), first, end
        )
        if not finite:
            moments.check_finite()
        if self._progress is not None:
            self._progress.update(len(tokens))
        return moments


def collect_moments(
    decoder: Decoder,
    sequences: Iterable[np.ndarray],
    *,
    sink: int,
    progress: tqdm | None = None,
) -> Moments:
    """Moments of the layers with pages, over full sequences i32[T] of one length.

    Tokens before ``sink`` are left out, because they never reach a page.

    Raises:
        ValueError: an activation is NaN or infinite.
    """
    stream, moments = MomentStream(decoder, progress), empty_moments(decoder.config)
    for tokens in sequences:
        moments = stream.add(moments, tokens, sink)
    return moments


def collect_rows(
    decoder: Decoder,
    sequences: Sequence[np.ndarray],
    windows: KVConfig,
    *,
    domains: Sequence[str] = (),
    progress: tqdm | None = None,
) -> HeldOut:
    """Keys, values and sampled queries of a few sequences, for ``calib.held_out.measure``.

    Of the layers with pages; kept on the host in the model's dtype: 2 L K D numbers per token.
    ``domains`` names each sequence's.
    """
    graphdef, weights = nnx.split(decoder)
    positions = sample_positions(len(sequences[0]), windows)
    rows = []
    for tokens in sequences:
        rows.append(
            jax.tree.map(np.asarray, _rows(graphdef, weights, jnp.asarray(tokens), positions))
        )
        if progress is not None:
            progress.update(len(tokens))
    stacked = jax.tree.map(lambda *one: np.stack(one), *rows)  # per layer (q, k, v), each [B, ...]
    queries, keys, values = zip(*stacked, strict=True)
    return HeldOut(positions, queries, keys, values, windows, tuple(domains))


# Compiled once per model and length, however many calibrations a process makes.


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _add(
    graphdef: Any,
    weights: Any,
    moments: Moments,
    tokens: Int[Array, " T"],
    first: Array | int,
    end: Array | int,
) -> tuple[Moments, Bool[Array, ""]]:
    """The moments with these tokens, and whether they are finite."""
    model = nnx.merge(graphdef, weights)
    config = model.config
    positions = jnp.arange(tokens.shape[0])[None]
    counted = (positions >= first) & (positions < end)  # bool[1, T]

    def attend(state: Moments, layer: int, q: Array, k: Array, v: Array) -> tuple[Array, Moments]:
        out = blockwise_causal_attention(q, k, v, config.sliding_windows[layer])
        if layer not in config.paged_layers:
            return out, state
        paged = config.paged_layers.index(layer)
        return out, state.update(paged, q, k, v, out, mask=counted, positions=positions)

    moments = model.hidden(tokens[None], positions, attend, moments)[1]
    return moments, moments.finite()


@functools.partial(jax.jit, static_argnums=0)
def _rows(
    graphdef: Any, weights: Any, tokens: Int[Array, " T"], sampled: Int[Array | np.ndarray, " Q"]
) -> tuple[tuple[Array, Array, Array], ...]:
    """Per layer with pages: queries at ``sampled`` [Q, N, D], all keys and values [T, K, D]."""
    model = nnx.merge(graphdef, weights)
    config = model.config

    def attend(state: tuple, layer: int, q: Array, k: Array, v: Array) -> tuple[Array, tuple]:
        out = blockwise_causal_attention(q, k, v, config.sliding_windows[layer])
        if layer not in config.paged_layers:
            return out, state
        return out, (*state, (q[0, sampled], k[0], v[0]))

    return model.hidden(tokens[None], jnp.arange(tokens.shape[0])[None], attend, ())[1]
