"""The three compiled steps: prefill a chunk, decode a batch, write complete pages.

Pure functions of weights, rotation, pools and slot state; the runner compiles each once per shape.
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
from jaxtyping import Array, Bool, Int32

from oscar_jax.attention import oscar_attention, oscar_prefill
from oscar_jax.cache import PagedKV, PagePlan, append_kv, write_pages
from oscar_jax.engine.sampling import BAD_LOGITS, SamplingArrays, likeliest, sample
from oscar_jax.models import Attend, Decoder
from oscar_jax.rotation import Rotation
from oscar_jax.sliding import WindowKV
from pallas_kernels.layout import LayerKV, Tables, Windows
from pallas_kernels.merge import MASKED

IDLE = -2  # the "token" of a row that had ended before this step
STOP_IDS = 16  # most ids per sequence that end it on the device


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Pools:
    """The cache without tables: every sequence's pages, rings and sinks."""

    layers: tuple[LayerKV, ...]
    highest: Int32[Array, " slots"]
    faults: Int32[Array, "2"]
    sliding: tuple[WindowKV, ...] = ()
    sliding_layers: tuple[int, ...] = dataclasses.field(metadata=dict(static=True), default=())

    def cache(self, tables: Tables, windows: Windows) -> PagedKV:
        """The rows that ``tables`` name, as the public functions take them."""
        return PagedKV(
            self.layers,
            tables,
            self.highest,
            self.faults,
            windows,
            self.sliding,
            self.sliding_layers,
        )

    @classmethod
    def of(cls, cache: PagedKV) -> Pools:
        return cls(cache.layers, cache.highest, cache.faults, cache.sliding, cache.sliding_layers)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Settings:
    """How sequences sample and stop, one row each."""

    sampling: SamplingArrays
    end: Int32[Array | np.ndarray, " B"]  # tokens, prompt included, at which the row stops
    quiet_until: Int32[Array | np.ndarray, " B"]  # tokens before which a stop id cannot be drawn
    stop_ids: Int32[Array | np.ndarray, "B E"]  # padded with -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SlotState:
    """What the device knows of every slot: it owns the lengths while dispatches run ahead."""

    token: Int32[Array, " slots"]  # the newest, not yet in the cache
    length: Int32[Array, " slots"]  # cached tokens
    live: Bool[Array, " slots"]
    settings: Settings


def empty_state(slots: int) -> SlotState:
    """No slot is live."""
    zeros = functools.partial(jnp.zeros, (slots,))
    sampling = SamplingArrays(
        temperature=zeros(jnp.float32),
        top_p=jnp.ones(slots, jnp.float32),
        top_k=zeros(jnp.int32),
        min_p=zeros(jnp.float32),
        seed=zeros(jnp.uint32),
    )
    settings = Settings(
        sampling, zeros(jnp.int32), zeros(jnp.int32), jnp.full((slots, STOP_IDS), -1, jnp.int32)
    )
    return SlotState(zeros(jnp.int32), zeros(jnp.int32), zeros(bool), settings)


def draw(
    logits: Array, settings: Settings, position: Array, *, greedy: bool = False
) -> tuple[Array, Array]:
    """(token at ``position``, whether the row goes on after it); ``greedy``: every row is."""
    rows = jnp.arange(logits.shape[0])[:, None]
    quiet = (position < settings.quiet_until)[:, None] & (settings.stop_ids >= 0)
    column = jnp.where(quiet, settings.stop_ids, logits.shape[-1])  # out of range: dropped
    logits = logits.at[rows, column].set(MASKED, mode="drop")
    token = likeliest(logits) if greedy else sample(logits, settings.sampling, position)
    stopped = (token[:, None] == settings.stop_ids).any(-1) | (token == BAD_LOGITS)
    return token, ~stopped & (position + 1 < settings.end)


@dataclasses.dataclass(frozen=True)
class Steps:
    """The steps of one model and cache geometry.

    Args:
        graphdef: of the Decoder. windows: S, R, L. decode_steps: tokens per decode dispatch.
        implementation: of the attention and write ops; None picks the best.
    """

    graphdef: Any
    windows: Windows
    decode_steps: int
    implementation: str | None = None

    def _model(self, weights: Any) -> Decoder:
        return nnx.merge(self.graphdef, weights)

    def prefill(
        self,
        weights: Any,
        rotation: Rotation | None,
        pools: Pools,
        state: SlotState,
        block_table: Int32[Array, "slots MP"],
        slot: Int32[Array, "1"],
        tokens: Int32[Array, "1 Q"],
        length: Int32[Array, "1"],
        q_len: Int32[Array, "1"],
        final: Bool[Array, "1"],
        settings: Settings,
    ) -> tuple[Pools, SlotState, Int32[Array, "1"]]:
        """One chunk of one prompt; after the last chunk the slot is live with its first token.

        Args:
            length: cached tokens with this chunk. q_len: tokens of the chunk that are real.
            final: the chunk ends the prompt; else the returned token means nothing.
        """
        model = self._model(weights)
        cache = pools.cache(Tables(block_table[slot], slot, slot), self.windows)

        def attend(cache: PagedKV, layer: int, q: Array, k: Array, v: Array) -> tuple[Array, Any]:
            return oscar_prefill(
                q,
                k,
                v,
                cache,
                layer,
                rotation,
                lengths=length,
                q_lens=q_len,
                implementation=self.implementation,
            )

        positions = (length - q_len)[:, None] + jnp.arange(tokens.shape[1])
        h, cache = model.hidden(tokens, positions, attend, cache)
        last = lax.dynamic_slice_in_dim(h[0], jnp.maximum(q_len[0] - 1, 0), 1)  # [1, E]
        # Two equal rows: a bf16 product with a single row is eight times slower on a CPU.
        logits = model.logits(jnp.broadcast_to(last, (2, last.shape[-1])))[:1]
        token, goes_on = draw(logits, settings, length)
        put = lambda old, new: old.at[slot].set(jnp.where(final[0], new, old[slot]))  # noqa: E731
        state = SlotState(
            token=put(state.token, token),
            length=put(state.length, length),
            live=state.live.at[slot].set(final & goes_on),
            settings=jax.tree.map(put, state.settings, settings),
        )
        return Pools.of(cache), state, token

    def decode(
        self,
        weights: Any,
        rotation: Rotation | None,
        pools: Pools,
        state: SlotState,
        block_table: Int32[Array, "slots MP"],
        rows: Int32[Array, " B"],
        *,
        greedy: bool = False,
    ) -> tuple[Pools, SlotState, Int32[Array, "steps B"]]:
        """``decode_steps`` tokens for each row; IDLE where a row had ended.

        Args:
            rows: slots; -1 pads the batch to its bucket.
            greedy: no row samples, so that the program needs no branch: on a GPU each one stops
                the host until the device has come that far.
        """
        model = self._model(weights)
        slot = jnp.maximum(rows, 0)
        target = jnp.where(rows >= 0, rows, state.live.shape[0])  # out of range: dropped
        tables = Tables(block_table[slot], slot, slot)
        settings = jax.tree.map(lambda x: x[slot], state.settings)

        def step(
            carry: tuple[Pools, Array, Array, Array], _: None
        ) -> tuple[tuple[Pools, Array, Array, Array], Array]:
            pools, token, length, live = carry
            new = live.astype(jnp.int32)
            n = length + new
            cache = pools.cache(tables, self.windows)
            attend = self._attend(rotation, n, new)
            h, cache = model.hidden(token[:, None], length[:, None], attend, cache)
            drawn, goes_on = draw(model.logits(h[:, 0]), settings, n, greedy=greedy)
            emitted = jnp.where(live, drawn, IDLE)
            token = jnp.where(live, drawn, token)
            return (Pools.of(cache), token, n, live & goes_on), emitted

        start = (pools, state.token[slot], state.length[slot], state.live[slot] & (rows >= 0))
        (pools, token, length, live), emitted = lax.scan(
            step, start, None, length=self.decode_steps
        )
        put = lambda old, new: old.at[target].set(new, mode="drop")  # noqa: E731
        state = dataclasses.replace(
            state,
            token=put(state.token, token),
            length=put(state.length, length),
            live=put(state.live, live),
        )
        return pools, state, emitted

    def _attend(self, rotation: Rotation | None, lengths: Array, q_lens: Array) -> Attend:
        """Append the newest token of every row, then attend."""

        def attend(
            cache: PagedKV, layer: int, q: Array, k: Array, v: Array
        ) -> tuple[Array, PagedKV]:
            cache = append_kv(cache, layer, k, v, lengths=lengths, q_lens=q_lens)
            out = oscar_attention(
                q,
                cache,
                layer,
                rotation,
                lengths=lengths,
                q_lens=q_lens,
                implementation=self.implementation,
            )
            return out, cache

        return attend

    def write(
        self,
        rotation: Rotation | None,
        pools: Pools,
        block_table: Int32[Array, "slots MP"],
        plan: PagePlan,
    ) -> tuple[Pools, Int32[Array, "2"]]:
        """Write the planned pages of all layers; also the fault counts so far, for the host."""
        slots = jnp.arange(block_table.shape[0], dtype=jnp.int32)
        cache = pools.cache(Tables(block_table, slots, slots), self.windows)
        cache = write_pages(cache, rotation, plan, implementation=self.implementation)
        return Pools.of(cache), cache.faults + 0
