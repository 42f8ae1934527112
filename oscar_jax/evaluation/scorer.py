"""What a quantised cache does to a model's predictions, position by position.

Everything runs through the real packed pages. A query sees the same segments in prefill and in
decode (``docs/design.md``), so texts are scored in prefill; ``decode_check`` repeats the end of
some of them at one query per step and says how far the two are apart.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Int

from oscar_jax.attention import oscar_attention, oscar_prefill
from oscar_jax.cache import PagedKV, append_kv, check_faults, due_pages, init_cache, write_pages
from oscar_jax.config import KVConfig
from oscar_jax.models import Decoder
from oscar_jax.rotation import Rotation

LOGIT_ROWS = 64  # positions whose [rows, V] logits exist at once


@dataclasses.dataclass(frozen=True)
class Scores:
    """Per scored position: -log p(next token), KL to the reference in nats, same first token."""

    nll: np.ndarray
    kl: np.ndarray
    top1: np.ndarray  # bool

    def mean(self) -> tuple[float, float, float]:
        """(nll, kl, share of positions with the same first token)."""
        return float(self.nll.mean()), float(self.kl.mean()), float(self.top1.mean())


class Scorer:
    """A model with its weights on the device, scoring one sequence at a time.

    Args:
        decoder: in the dtype that is served.
        windows: S, R and L; the cache dtype follows from the rotation that is scored.
    """

    def __init__(self, decoder: Decoder, windows: KVConfig):
        self._graphdef, self._weights = nnx.split(decoder)
        self._windows = windows

    def hidden(self, tokens: np.ndarray, rotation: Rotation | None) -> Float[Array, "T E"]:
        """Final hidden states of a sequence i32[T]; None scores BF16 pages.

        Raises:
            ValueError: a key or value that reached a page was not finite.
        """
        h, cache = _prefill(
            self._graphdef, self._settings(rotation), self._weights, rotation, tokens[None]
        )
        check_faults(cache)
        return h[0]

    def compare(
        self,
        reference: Float[Array, "T E"],
        h: Float[Array, "T E"],
        tokens: np.ndarray,
        positions: np.ndarray,
    ) -> Scores:
        """Scores of ``h`` at ``positions``, each predicting the token that follows it."""
        pad = -len(positions) % LOGIT_ROWS
        padded = np.pad(positions, (0, pad), mode="edge").reshape(-1, LOGIT_ROWS)
        results = _compare(self._graphdef, self._weights, reference, h, padded, tokens[padded + 1])
        return Scores(*(np.asarray(x).reshape(-1)[: len(positions)] for x in results))

    def predict(self, h: Float[Array, "T E"], positions: np.ndarray) -> np.ndarray:
        """The likeliest next token after each of ``positions``, in their shape."""
        rows = h[positions.reshape(-1)]
        best = _greedy(self._graphdef, self._weights, rows)
        return np.asarray(best).reshape(positions.shape)

    def decode_check(
        self, sequences: np.ndarray, rotation: Rotation | None, steps: int
    ) -> tuple[Scores, float]:
        """The last ``steps`` tokens of i32[B, T] again, one query per step from a filled cache.

        Returns:
            (Scores against the same positions in prefill, largest |logit difference|)
        """
        settings, start = self._settings(rotation), sequences.shape[1] - steps
        whole = [self.hidden(tokens, rotation) for tokens in sequences]
        _, cache = _prefill(
            self._graphdef,
            settings,
            self._weights,
            rotation,
            sequences[:, :start],
            max_tokens=sequences.shape[1],
        )
        stepped, cache = _decode(
            self._graphdef, self._weights, rotation, cache, sequences[:, start:], start
        )
        check_faults(cache)
        # the last position predicts a token that is not there
        positions, scores, worst = np.arange(steps - 1), [], 0.0
        for row, tokens in enumerate(sequences):
            ends = whole[row][start:], stepped[row]
            scores.append(self.compare(*ends, tokens[start:], positions))
            worst = max(
                worst, float(_largest_logit_difference(self._graphdef, self._weights, *ends))
            )
        fields = [f.name for f in dataclasses.fields(Scores)]
        joined = (np.concatenate([getattr(s, name) for s in scores]) for name in fields)
        return Scores(*joined), worst

    def _settings(self, rotation: Rotation | None) -> KVConfig:
        return dataclasses.replace(self._windows, dtype="bf16" if rotation is None else "int2")


@functools.partial(jax.jit, static_argnums=(0, 1), static_argnames="max_tokens")
def _prefill(
    graphdef: Any,
    settings: KVConfig,
    weights: Any,
    rotation: Rotation | None,
    tokens: Int[Array | np.ndarray, "B T"],
    *,
    max_tokens: int | None = None,
) -> tuple[Float[Array, "B T E"], PagedKV]:
    """All of ``tokens`` through a fresh cache; the cache has room for ``max_tokens``."""
    model = nnx.merge(graphdef, weights)
    config, (batch, length) = model.config, tokens.shape
    cache = init_cache(
        settings,
        layers=config.num_layers,
        kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        batch=batch,
        max_tokens=max_tokens or length,
        codecs=None if rotation is None else rotation.codecs,
    )

    def attend(cache: PagedKV, layer: int, q: Array, k: Array, v: Array) -> tuple[Array, PagedKV]:
        return oscar_prefill(q, k, v, cache, layer, rotation, lengths=length)

    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    return model.hidden(jnp.asarray(tokens), positions, attend, cache)


@functools.partial(jax.jit, static_argnums=0)
def _decode(
    graphdef: Any,
    weights: Any,
    rotation: Rotation | None,
    cache: PagedKV,
    tokens: Int[Array | np.ndarray, "B Q"],
    start: Array | int,
) -> tuple[Float[Array, "B Q E"], PagedKV]:
    """Hidden states of ``tokens`` at positions ``start`` on, one per step, pages written as due."""

    def step(cache: PagedKV, at: tuple[Array, Array]) -> tuple[PagedKV, Array]:
        token, position = at  # i32[B], i32[]
        model = nnx.merge(graphdef, weights)

        def attend(
            cache: PagedKV, layer: int, q: Array, k: Array, v: Array
        ) -> tuple[Array, PagedKV]:
            cache = append_kv(cache, layer, k, v, lengths=position + 1)
            out = oscar_attention(q, cache, layer, rotation, lengths=position + 1)
            return out, cache

        where = jnp.broadcast_to(position, (token.shape[0], 1))
        h, cache = model.hidden(token[:, None], where, attend, cache)
        cache = write_pages(cache, rotation, due_pages(cache, lengths=position + 1))
        return cache, h[:, 0]

    positions = start + jnp.arange(tokens.shape[1])
    cache, h = lax.scan(step, cache, (jnp.asarray(tokens).T, positions))
    return h.swapaxes(0, 1), cache


@functools.partial(jax.jit, static_argnums=0)
def _compare(
    graphdef: Any,
    weights: Any,
    reference: Float[Array, "T E"],
    h: Float[Array, "T E"],
    positions: Int[Array | np.ndarray, "blocks rows"],
    targets: Int[Array | np.ndarray, "blocks rows"],
) -> tuple[Array, Array, Array]:
    model = nnx.merge(graphdef, weights)

    def block(at: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        rows, following = at
        exact = jax.nn.log_softmax(model.logits(reference[rows]))
        logits = jax.nn.log_softmax(model.logits(h[rows]))
        nll = -jnp.take_along_axis(logits, following[:, None], 1)[:, 0]
        kl = jnp.sum(jnp.exp(exact) * (exact - logits), -1)
        return nll, kl, exact.argmax(-1) == logits.argmax(-1)

    return lax.map(block, (jnp.asarray(positions), jnp.asarray(targets)))


@functools.partial(jax.jit, static_argnums=0)
def _greedy(graphdef: Any, weights: Any, h: Float[Array, "R E"]) -> Int[Array, " R"]:
    model = nnx.merge(graphdef, weights)
    return lax.map(lambda row: model.logits(row[None])[0].argmax(), h, batch_size=LOGIT_ROWS)


@functools.partial(jax.jit, static_argnums=0)
def _largest_logit_difference(graphdef: Any, weights: Any, a: Array, b: Array) -> Array:
    model = nnx.merge(graphdef, weights)
    one = lambda pair: jnp.abs(model.logits(pair[0]) - model.logits(pair[1])).max()  # noqa: E731
    return lax.map(one, (a, b), batch_size=LOGIT_ROWS).max()
