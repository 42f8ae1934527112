"""A model on a quantised cache: its predictions position by position, and what it writes by itself.

Everything runs through the real packed pages. A query sees the same segments in prefill and in
decode (``docs/design.md``), so texts are scored in prefill; ``stepped`` runs them at one query per
step instead, and ``decode_check`` says how far the two are apart.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from oscar_jax.attention import oscar_attention, oscar_prefill
from oscar_jax.cache import PagedKV, append_kv, check_faults, due_pages, init_cache, write_pages
from oscar_jax.config import KVConfig
from oscar_jax.models import Decoder
from oscar_jax.rotation import Rotation

LOGIT_ROWS = 64  # positions whose [rows, V] logits exist at once
CHUNK = 2048  # tokens of a sequence that are computed at once
FEWEST_ROWS = 2  # of a decode step: XLA's bfloat16 product of a single row is eight times slower


@dataclasses.dataclass(frozen=True)
class Scores:
    """Per scored position: -log p(next token), KL to the reference in nats, same first token."""

    nll: np.ndarray
    kl: np.ndarray
    top1: np.ndarray  # bool

    def mean(self) -> tuple[float, float, float]:
        """(nll, kl, share of positions with the same first token)."""
        return float(self.nll.mean()), float(self.kl.mean()), float(self.top1.mean())

    def part(self, chosen: np.ndarray) -> Scores:
        """The scores of some of the positions."""
        return Scores(self.nll[chosen], self.kl[chosen], self.top1[chosen])


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: argmax(logits / temperature + noise).

    The Gumbel noise depends on seed, row and position alone, so two caches that see the same text
    draw the same token until their logits differ by enough to change it.

    Args:
        temperature: 0 is greedy, without noise.
        seed: of the noise.
        banned: ids that are never chosen.
    """

    temperature: float = 0.0
    seed: int = 0
    banned: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature={self.temperature}: must be at least 0")

    def choose(
        self, logits: Float[Array, "R V"], row: Int[Array, " R"], position: Int[Array, " R"]
    ) -> Int[Array, " R"]:
        """The token that follows ``position`` of each row."""
        if self.banned:
            logits = logits.at[:, list(self.banned)].set(-jnp.inf)
        if self.temperature == 0:
            return logits.argmax(-1).astype(jnp.int32)
        key = jax.random.key(self.seed)

        def noise(row: Array, position: Array) -> Array:
            own = jax.random.fold_in(jax.random.fold_in(key, row), position)
            return jax.random.gumbel(own, logits.shape[1:])

        noisy = logits / self.temperature + jax.vmap(noise)(row, position)
        return noisy.argmax(-1).astype(jnp.int32)


GREEDY = Sampling()


class Scorer:
    """A model with its weights on the device.

    Args:
        decoder: in the dtype that is served.
        windows: S, R and L; the cache dtype follows from the rotation that is scored.
    """

    def __init__(self, decoder: Decoder, windows: KVConfig):
        self._graphdef, self._weights = nnx.split(decoder)
        self._config = decoder.config
        self._windows = windows

    def hidden(self, tokens: np.ndarray, rotation: Rotation | None) -> Float[Array, "T E"]:
        """Final hidden states of a sequence i32[T]; None scores BF16 pages.

        Raises:
            ValueError: a key or value that reached a page was not finite.
        """
        return self._filled(tokens[None], rotation, len(tokens))[0][0]

    def compare(
        self,
        reference: Float[Array, "T E"],
        h: Float[Array, "T E"],
        tokens: np.ndarray,
        positions: np.ndarray,
    ) -> Scores:
        """Scores of ``h`` at ``positions``, each predicting the token that follows it."""
        padded = _in_rows(positions)
        results = _compare(self._graphdef, self._weights, reference, h, padded, tokens[padded + 1])
        return Scores(*(np.asarray(x).reshape(-1)[: len(positions)] for x in results))

    def predict(
        self,
        h: Float[Array, "T E"],
        positions: np.ndarray,
        sampling: Sampling = GREEDY,
        row: int = 0,
        first: int = 0,
    ) -> np.ndarray:
        """The next token after each of ``positions``, in their shape; by default the likeliest.

        Args:
            row, first: of which row of a batch ``h`` is, and at which of its positions it begins;
                the noise of ``sampling`` depends on both.
        """
        flat = positions.reshape(-1)
        best = _predict(self._graphdef, sampling, self._weights, h, _in_rows(flat), row, first)
        return np.asarray(best).reshape(-1)[: len(flat)].reshape(positions.shape)

    def stepped(
        self, sequences: np.ndarray, rotation: Rotation | None, start: int
    ) -> Float[Array, "B T E"]:
        """Hidden states of i32[B, T] from ``start`` on, one query per step."""
        _, cache = self._filled(sequences[:, :start], rotation, sequences.shape[1])
        h, cache = _decode(
            self._graphdef, self._weights, rotation, cache, sequences[:, start:], start
        )
        check_faults(cache)
        return h

    def decode_check(
        self, sequences: np.ndarray, rotation: Rotation | None, steps: int
    ) -> tuple[Scores, float]:
        """The last ``steps`` tokens of i32[B, T] again, one query per step from a filled cache.

        Returns:
            (Scores against the same positions in prefill, largest |logit difference|)
        """
        start = sequences.shape[1] - steps
        whole = [self.hidden(tokens, rotation) for tokens in sequences]
        stepped = self.stepped(sequences, rotation, start)
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

    def generate(
        self,
        prompts: Sequence[np.ndarray],
        rotation: Rotation | None,
        *,
        steps: int,
        stop: Sequence[int] = (),
        sampling: Sampling = GREEDY,
    ) -> list[np.ndarray]:
        """What the model writes after each prompt i32[n]: one query per step, all rows together.

        Args:
            steps: most tokens of an answer. stop: ids that end it, and are its last token then.
        """
        rows = [*prompts, *[prompts[-1]] * (FEWEST_ROWS - len(prompts))]
        lengths = np.array([len(row) for row in rows], np.int32)
        longest = int(lengths.max())
        tokens = np.stack([np.pad(row, (0, longest - len(row))) for row in rows])
        h, cache = self._filled(tokens, rotation, longest + steps, lengths)
        last = jnp.stack([h[row, length - 1] for row, length in enumerate(lengths)])  # [B, E]
        written, count, cache = _generate(
            self._graphdef,
            sampling,
            steps,
            self._weights,
            rotation,
            cache,
            last,
            lengths,
            np.array(stop, np.int32),
        )
        check_faults(cache)
        counts = np.asarray(count)[: len(prompts)]
        return [np.asarray(written[row, :n]) for row, n in enumerate(counts)]

    def _filled(
        self,
        tokens: np.ndarray,
        rotation: Rotation | None,
        max_tokens: int,
        lengths: np.ndarray | None = None,
    ) -> tuple[Float[Array, "B T E"], PagedKV]:
        """i32[B, T] through a fresh cache with room for ``max_tokens``, chunk by chunk.

        What lies past ``lengths`` i32[B] is padding, and its hidden states mean nothing.
        """
        batch, total = tokens.shape
        lengths = np.full(batch, total, np.int32) if lengths is None else lengths
        config = self._config
        cache = init_cache(
            dataclasses.replace(self._windows, dtype="bf16" if rotation is None else "int2"),
            layers=config.num_layers,
            kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            batch=batch,
            max_tokens=max_tokens,
            codecs=None if rotation is None else rotation.codecs,
            sliding_windows=config.sliding_windows,
        )
        parts = []
        for start in range(0, total, CHUNK):
            part = tokens[:, start : start + CHUNK]
            new = np.clip(lengths - start, 0, part.shape[1])
            held = jnp.asarray(np.minimum(lengths, start + part.shape[1]))
            arguments = (self._weights, rotation, cache, part, held, jnp.asarray(new))
            h, cache = _prefill(self._graphdef, *arguments)
            parts.append(h)
        check_faults(cache)
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts, 1), cache


def _in_rows(positions: np.ndarray) -> np.ndarray:
    """[blocks, LOGIT_ROWS], the last position repeated to fill the last block."""
    return np.pad(positions, (0, -len(positions) % LOGIT_ROWS), mode="edge").reshape(-1, LOGIT_ROWS)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _prefill(
    graphdef: Any,
    weights: Any,
    rotation: Rotation | None,
    cache: PagedKV,
    tokens: Int[Array | np.ndarray, "B Q"],
    lengths: Int[Array, " B"],
    q_lens: Int[Array, " B"],
) -> tuple[Float[Array, "B Q E"], PagedKV]:
    """A chunk; ``lengths`` counts the tokens of each row with the chunk's ``q_lens`` included."""
    model = nnx.merge(graphdef, weights)

    def attend(cache: PagedKV, layer: int, q: Array, k: Array, v: Array) -> tuple[Array, PagedKV]:
        return oscar_prefill(q, k, v, cache, layer, rotation, lengths=lengths, q_lens=q_lens)

    positions = (lengths - q_lens)[:, None] + jnp.arange(tokens.shape[1])
    return model.hidden(jnp.asarray(tokens), positions, attend, cache)


def _step(
    model: Decoder,
    rotation: Rotation | None,
    cache: PagedKV,
    tokens: Int[Array, " B"],
    positions: Int[Array, " B"],
) -> tuple[Float[Array, "B E"], PagedKV]:
    """One query per row, at ``positions``; pages that became complete before it are written."""
    cache = write_pages(cache, rotation, due_pages(cache, lengths=positions))
    lengths = positions + 1

    def attend(cache: PagedKV, layer: int, q: Array, k: Array, v: Array) -> tuple[Array, PagedKV]:
        cache = append_kv(cache, layer, k, v, lengths=lengths)
        return oscar_attention(q, cache, layer, rotation, lengths=lengths), cache

    h, cache = model.hidden(tokens[:, None], positions[:, None], attend, cache)
    return h[:, 0], cache


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def _decode(
    graphdef: Any,
    weights: Any,
    rotation: Rotation | None,
    cache: PagedKV,
    tokens: Int[Array | np.ndarray, "B Q"],
    start: Array | int,
) -> tuple[Float[Array, "B Q E"], PagedKV]:
    """Hidden states of ``tokens`` at positions ``start`` on, one per step."""
    model = nnx.merge(graphdef, weights)

    def step(cache: PagedKV, at: tuple[Array, Array]) -> tuple[PagedKV, Array]:
        token, position = at  # i32[B], i32[]
        where = jnp.broadcast_to(position, token.shape)
        h, cache = _step(model, rotation, cache, token, where)
        return cache, h

    positions = start + jnp.arange(tokens.shape[1])
    cache, h = lax.scan(step, cache, (jnp.asarray(tokens).T, positions))
    return h.swapaxes(0, 1), cache


# (step, cache, last hidden states [B, E], tokens [B, N], which rows go on [B], lengths [B])
_Writing = tuple[Array, PagedKV, Array, Array, Array, Array]


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=5)
def _generate(
    graphdef: Any,
    sampling: Sampling,
    steps: int,
    weights: Any,
    rotation: Rotation | None,
    cache: PagedKV,
    last: Float[Array, "B E"],
    lengths: Int[Array | np.ndarray, " B"],
    stop: Int[Array | np.ndarray, " S"],
) -> tuple[Int[Array, "B N"], Int[Array, " B"], PagedKV]:
    """(tokens, how many of them are the answer, cache); ends when every row has stopped."""
    model, rows = nnx.merge(graphdef, weights), jnp.arange(len(lengths))

    def going(state: _Writing) -> Bool[Array, ""]:
        step, *_, open_rows, _ = state
        return (step < steps) & open_rows.any()

    def write(state: _Writing) -> _Writing:
        step, cache, h, written, open_rows, count = state
        position = jnp.asarray(lengths) + count  # of the token that is chosen now
        token = sampling.choose(model.logits(h), rows, position - 1)
        written = written.at[rows, step].set(jnp.where(open_rows, token, 0))
        count = count + open_rows
        open_rows = open_rows & ~jnp.isin(token, jnp.asarray(stop))
        h, cache = _step(model, rotation, cache, token, position)
        return step + 1, cache, h, written, open_rows, count

    started = jnp.zeros_like(rows)
    written = jnp.zeros((len(rows), steps), jnp.int32)
    state: _Writing = (jnp.int32(0), cache, last, written, rows >= 0, started)
    _, cache, _, written, _, count = lax.while_loop(going, write, state)
    return written, count, cache


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


@functools.partial(jax.jit, static_argnums=(0, 1))
def _predict(
    graphdef: Any,
    sampling: Sampling,
    weights: Any,
    h: Float[Array, "T E"],
    positions: Int[Array | np.ndarray, "blocks rows"],
    row: Array | int,
    first: Array | int,
) -> Int[Array, "blocks rows"]:
    model = nnx.merge(graphdef, weights)

    def block(at: Array) -> Array:
        return sampling.choose(model.logits(h[at]), jnp.full(at.shape, row), first + at)

    return lax.map(block, jnp.asarray(positions))


@functools.partial(jax.jit, static_argnums=0)
def _largest_logit_difference(graphdef: Any, weights: Any, a: Array, b: Array) -> Array:
    model = nnx.merge(graphdef, weights)
    one = lambda pair: jnp.abs(model.logits(pair[0]) - model.logits(pair[1])).max()  # noqa: E731
    return lax.map(one, (a, b), batch_size=LOGIT_ROWS).max()
