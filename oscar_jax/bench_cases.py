"""What ``oscar_jax.bench`` times: compiled decode steps with a cache full of random numbers."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from oscar_jax.accounting import CacheShape
from oscar_jax.cache import init_layer, windows_of
from oscar_jax.config import KVConfig
from oscar_jax.device import is_gpu
from oscar_jax.engine.request import SamplingParams
from oscar_jax.engine.runner import settings_of
from oscar_jax.engine.steps import Pools, SlotState, Steps, draw
from oscar_jax.models import Loaded
from oscar_jax.rotation import Rotation
from pallas_kernels.format import PAGE, Codec
from pallas_kernels.layout import LayerKV

# int2, bf16: the engine's own step. cudnn: the same model on dense BF16 caches [B, N, K, D] of the
# same lengths, attention by cuDNN. none: the step without attention, its query for an answer.
Cache = Literal["int2", "bf16", "cudnn", "none"]


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _random(key: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Random codes (u16), metadata (u32: float16 scale 0.5 to 1, minimum -1 to -0.75) or BF16
    numbers of magnitude 0.5 to 1, all made of random bits alone: no wider copy is in memory."""
    if dtype == jnp.uint32:
        bits = jax.random.bits(key, shape, jnp.uint32)
        return (bits & jnp.uint32(0x01FF03FF)) | jnp.uint32(0xBA003800)
    bits = jax.random.bits(key, shape, jnp.uint16)
    if dtype == jnp.uint16:
        return bits
    return lax.bitcast_convert_type((bits & jnp.uint16(0x807F)) | jnp.uint16(0x3F00), jnp.bfloat16)


def random_like(layer: LayerKV, seed: int) -> LayerKV:
    """A layer's pools (or their shapes) filled on the device: codes and sane numbers, no zeros."""
    key = jax.random.key(seed, impl="rbg")  # quick to compile and to run
    held: dict[str, Any] = {}
    for index, field in enumerate(dataclasses.fields(layer)):
        x = getattr(layer, field.name)
        some = None if x is None else _random(jax.random.fold_in(key, index), x.shape, x.dtype)
        held[field.name] = some
    return LayerKV(**held)


class _WithoutAttention(Steps):
    def _attend(self, rotation: Any, lengths: Any, q_lens: Any) -> Any:
        return lambda cache, layer, q, k, v: (q, cache)


@dataclasses.dataclass(frozen=True)
class _DenseSteps:
    """Greedy steps on dense caches: ``pools`` is (k, v) per layer, bf16[B, N, K, D] each."""

    graphdef: Any
    decode_steps: int

    def decode(
        self, weights: Any, _: None, pools: Any, state: SlotState, *__: Any
    ) -> tuple[Any, SlotState, jax.Array]:
        model = nnx.merge(self.graphdef, weights)
        rows = jnp.arange(state.token.shape[0])

        def step(carry: Any, _: None) -> Any:
            pools, token, length = carry
            n = length + 1

            def attend(pools: Any, layer: int, q: Any, k: Any, v: Any) -> Any:
                put = lambda pool, x: pool.at[rows, length].set(x[:, 0])  # noqa: E731
                held = put(pools[layer][0], k), put(pools[layer][1], v)
                out = jax.nn.dot_product_attention(
                    q,
                    *held,
                    query_seq_lengths=jnp.ones_like(n),
                    key_value_seq_lengths=n,
                    implementation="cudnn",
                )
                return out, (*pools[:layer], held, *pools[layer + 1 :])

            h, pools = model.hidden(token[:, None], length[:, None], attend, pools)
            logits = model.logits(h[:, 0])
            token = draw(logits, state.settings, n, greedy=True)[0]
            return (pools, token, n), token

        start = (pools, state.token, state.length)
        (pools, token, length), emitted = lax.scan(step, start, None, length=self.decode_steps)
        return pools, dataclasses.replace(state, token=token, length=length), emitted


@dataclasses.dataclass(frozen=True)
class Plan:
    """A decode step to compile: ``batch`` rows with room for ``room`` tokens each.

    ``steps``: tokens per dispatch.
    """

    loaded: Loaded
    cache: Cache
    batch: int
    room: int
    steps: int

    @property
    def rows(self) -> int:
        """The engine's smallest bucket on a CPU has two."""
        return self.batch if is_gpu() else max(2, self.batch)

    @property
    def _heads(self) -> dict[str, Any]:
        model = self.loaded.config
        return dict(kv_heads=model.num_kv_heads, head_dim=model.head_dim)

    @property
    def _kv(self) -> KVConfig:
        return KVConfig(dtype="bf16" if self.cache == "bf16" else "int2")

    @property
    def _pages(self) -> int:
        """Pages of a row."""
        if self.cache == "none":
            return 1
        return max(1, shape_of(self.loaded, self.cache).pages_written(self.room))

    def _pools(self, of: Callable[[Any, int], Any]) -> Any:
        """The pools with every array made by ``of`` its shape and a seed."""
        layers = self.loaded.config.num_layers
        if self.cache == "cudnn":
            shape = (self.rows, -(-self.room // PAGE) * PAGE, *self._heads.values())
            dense = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
            return tuple((of(dense, 2 * i), of(dense, 2 * i + 1)) for i in range(layers))
        counts: dict[str, Any] = dict(pages=self.rows * self._pages, slots=self.rows)
        layer = jax.eval_shape(
            lambda: init_layer(
                self._kv,
                codec=None if self.cache == "bf16" else Codec(),
                **self._heads,
                **counts,
                sinks=self.rows,
            )
        )
        zeros = jnp.zeros(self.rows, jnp.int32), jnp.zeros(2, jnp.int32)
        return Pools(tuple(of(layer, seed) for seed in range(layers)), *zeros)

    def _rest(self) -> tuple[Any, ...]:
        """(state, block table, rows)"""
        rows, live = self.rows, jnp.arange(self.rows) < self.batch
        settings = settings_of(SamplingParams(max_tokens=1 << 30, temperature=0.0))
        state = SlotState(
            token=jnp.arange(rows, dtype=jnp.int32),
            length=jnp.zeros(rows, jnp.int32),
            live=live,
            settings=jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x), rows, 0), settings),
        )
        order = np.random.default_rng(0).permutation(rows * self._pages)
        table = jnp.asarray(order.reshape(rows, self._pages), jnp.int32)
        return state, table, jnp.where(live, jnp.arange(rows), -1).astype(jnp.int32)

    def compile(self) -> Compiled:
        """The program, without its pools in memory."""
        begin = time.perf_counter()
        graphdef, weights = nnx.split(self.loaded.decoder)
        stepper: Any
        options: dict[str, Any] = dict(greedy=True)
        if self.cache == "cudnn":
            stepper, options = _DenseSteps(graphdef, self.steps), {}
        else:
            kind = _WithoutAttention if self.cache == "none" else Steps
            stepper = kind(graphdef, windows_of(self._kv), self.steps)
        rotation = None
        if self.cache == "int2":
            rotation = _hadamard(self.loaded.config.num_layers, **self._heads)
        pools = self._pools(lambda shape, _: shape)

        def step(weights: Any, rotation: Any, pools: Any, state: SlotState, *more: Any) -> Any:
            return stepper.decode(weights, rotation, pools, state, *more, **options)

        jitted = jax.jit(step, donate_argnums=(2, 3))
        run = jitted.lower(weights, rotation, pools, *self._rest()).compile()
        analysis: Any = run.memory_analysis()
        temporary = analysis.temp_size_in_bytes if analysis else 0
        taken = functools.partial(run, weights, rotation)
        return Compiled(self, taken, time.perf_counter() - begin, temporary)


@functools.cache
def _hadamard(layers: int, kv_heads: int, head_dim: int) -> Rotation:
    return Rotation.hadamard(layers=layers, kv_heads=kv_heads, head_dim=head_dim)


@dataclasses.dataclass(frozen=True)
class Compiled:
    """A plan's program: (pools, state, table, rows) to (pools, state, tokens)."""

    plan: Plan
    run: Callable[..., tuple[Any, SlotState, jax.Array]]
    seconds: float
    temporary_bytes: int

    def fill(self) -> Case:
        """Its pools full of random numbers."""

        def of(shape: Any, seed: int) -> Any:
            if isinstance(shape, LayerKV):
                return random_like(shape, seed)
            return _random(jax.random.key(seed, impl="rbg"), shape.shape, shape.dtype)

        state, table, rows = self.plan._rest()
        return Case(self, self.plan._pools(of), state, table, rows)


@dataclasses.dataclass
class Case:
    """A program with its arguments; ``pools`` and ``state`` go through it."""

    compiled: Compiled
    pools: Any
    state: SlotState
    table: jax.Array
    rows: jax.Array

    @property
    def batch(self) -> int:
        return self.compiled.plan.batch

    def rewind(self, tokens: int) -> None:
        """Every row holds ``tokens`` tokens again."""
        length = jnp.full_like(self.state.length, tokens)
        self.state = dataclasses.replace(
            self.state, length=length, live=jnp.arange(length.shape[0]) < self.batch
        )

    def dispatch(self) -> jax.Array:
        """Queue one dispatch; its tokens, to be read later."""
        run = self.compiled.run
        self.pools, self.state, tokens = run(self.pools, self.state, self.table, self.rows)
        return tokens

    def seconds(self, tokens: int, repeats: int) -> list[float]:
        """Seconds of ``repeats`` dispatches from ``tokens`` cached tokens on.

        As in the engine's loop, one dispatch is queued before the one before it is read.
        """
        self.rewind(tokens)
        unread, stamps = [self.dispatch(), self.dispatch()], []
        for _ in range(repeats + 1):
            np.asarray(unread.pop(0))
            stamps.append(time.perf_counter())
            unread.append(self.dispatch())
        jax.block_until_ready(unread)
        return list(np.diff(stamps))


def shape_of(loaded: Loaded, cache: Cache) -> CacheShape:
    """The accounting of a case's cache; NotImplementedError for a model with window layers."""
    model = loaded.config
    if len(model.paged_layers) < model.num_layers:
        raise NotImplementedError(
            f"sliding_window={model.sliding_window}: only models without window layers are "
            "measured here"
        )
    return CacheShape.of(
        KVConfig(dtype="int2" if cache == "int2" else "bf16"),
        layers=model.num_layers,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
    )


def row_bytes(loaded: Loaded, cache: Cache, room: int) -> int:
    """Bytes that one row with room for ``room`` tokens allocates."""
    shape = shape_of(loaded, cache)
    if cache == "cudnn":
        return -(-room // PAGE) * PAGE * shape.bf16_bytes_per_token
    return shape.allocated_bytes(pages=max(1, shape.pages_written(room)), slots=1)
