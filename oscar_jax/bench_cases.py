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
from oscar_jax.engine.request import SamplingParams
from oscar_jax.engine.runner import settings_of
from oscar_jax.engine.steps import Pools, SlotState, Steps, draw
from oscar_jax.models import Loaded
from oscar_jax.rotation import Rotation
from pallas_kernels.format import PAGE
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


@dataclasses.dataclass
class Case:
    """A compiled step with everything that it takes; ``pools`` and ``state`` go through it."""

    run: Callable[[Any, SlotState], tuple[Any, SlotState, jax.Array]]
    pools: Any
    state: SlotState
    batch: int
    compile_seconds: float
    temporary_bytes: int

    @classmethod
    def of(cls, loaded: Loaded, cache: Cache, *, batch: int, room: int, steps: int) -> Case:
        """``batch`` rows with room for ``room`` tokens each; ``steps`` tokens per dispatch."""
        model = loaded.config
        rows = batch if jax.default_backend() == "gpu" else max(2, batch)  # as in the engine
        graphdef, weights = nnx.split(loaded.decoder)
        config = KVConfig(dtype="bf16" if cache == "bf16" else "int2")
        heads: dict[str, Any] = dict(kv_heads=model.num_kv_heads, head_dim=model.head_dim)
        pages = max(1, shape_of(loaded, cache).pages_written(room if cache != "none" else 0))
        order = np.random.default_rng(0).permutation(rows * pages)
        table = jnp.asarray(order.reshape(rows, pages), jnp.int32)
        pools: Any
        stepper: Any
        if cache == "cudnn":
            shape = (rows, -(-room // PAGE) * PAGE, *heads.values())
            fill = lambda i: _random(jax.random.key(i, impl="rbg"), shape, jnp.bfloat16)  # noqa: E731
            pools = tuple((fill(2 * i), fill(2 * i + 1)) for i in range(model.num_layers))
            stepper = _DenseSteps(graphdef, steps)
        else:
            shapes = jax.eval_shape(
                lambda: init_layer(config, **heads, pages=rows * pages, slots=rows, sinks=rows)
            )
            pools = Pools(
                tuple(random_like(shapes, seed) for seed in range(model.num_layers)),
                jnp.zeros(rows, jnp.int32),
                jnp.zeros(2, jnp.int32),
            )
            kind = _WithoutAttention if cache == "none" else Steps
            stepper = kind(graphdef, windows_of(config), steps)
        settings = settings_of(SamplingParams(max_tokens=1 << 30, temperature=0.0))
        state = SlotState(
            token=jnp.arange(rows, dtype=jnp.int32),
            length=jnp.zeros(rows, jnp.int32),
            live=jnp.arange(rows) < batch,
            settings=jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x), rows, 0), settings),
        )
        rotation = None
        if cache in ("int2", "none"):
            rotation = Rotation.hadamard(layers=model.num_layers, **heads)
        slots = jnp.where(jnp.arange(rows) < batch, jnp.arange(rows), -1).astype(jnp.int32)
        options = {} if cache == "cudnn" else dict(greedy=True)

        def step(weights: Any, rotation: Any, pools: Any, state: SlotState, *more: Any) -> Any:
            return stepper.decode(weights, rotation, pools, state, *more, **options)

        begin = time.perf_counter()
        arguments = (weights, rotation, pools, state, table, slots)
        compiled = jax.jit(step, donate_argnums=(2, 3)).lower(*arguments).compile()
        analysis: Any = compiled.memory_analysis()
        return cls(
            lambda pools, state: compiled(weights, rotation, pools, state, table, slots),
            pools,
            state,
            batch,
            time.perf_counter() - begin,
            analysis.temp_size_in_bytes if analysis else 0,
        )

    def rewind(self, tokens: int) -> None:
        """Every row holds ``tokens`` tokens again."""
        length = jnp.full_like(self.state.length, tokens)
        self.state = dataclasses.replace(
            self.state, length=length, live=jnp.arange(length.shape[0]) < self.batch
        )

    def dispatch(self) -> jax.Array:
        """Queue one dispatch; its tokens, to be read later."""
        self.pools, self.state, tokens = self.run(self.pools, self.state)
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
    """The accounting of a case's cache."""
    model = loaded.config
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
