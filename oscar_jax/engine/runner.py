"""The device side: weights, pools and compiled steps; nothing here knows requests."""

from __future__ import annotations

import collections
import dataclasses
import functools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from oscar_jax.accounting import CacheShape
from oscar_jax.cache import PagePlan, init_layer, layer_codecs, windows_of
from oscar_jax.config import EngineConfig
from oscar_jax.device import free_bytes, is_gpu
from oscar_jax.engine.request import SamplingParams
from oscar_jax.engine.sampling import pack
from oscar_jax.engine.steps import STOP_IDS, Pools, Settings, Steps, empty_state
from oscar_jax.models import Loaded
from oscar_jax.rotation import Rotation
from oscar_jax.sliding import init_sliding, sliding_by_layer

SMALLEST_PREFILL = 128
MAX_LEN_DEFAULT = 8192
# More would hold more programs' memory at once on a small machine.
COMPILE_THREADS = max(2, min(8, (os.cpu_count() or 2) // 2))
Progress = Callable[[str], None]

_compiles = 0


def _count_compile(event: str, duration_secs: float, **_: Any) -> None:
    global _compiles
    if event == "/jax/core/compile/backend_compile_duration":
        _compiles += 1


jax.monitoring.register_event_duration_secs_listener(_count_compile)


def compile_count() -> int:
    """Programs this process has compiled so far."""
    return _compiles


def spaced(first: int, last: int, factor: int) -> tuple[int, ...]:
    """first, first factor, first factor^2, ... below ``last``, and ``last``.

    >>> spaced(2, 12, 2)
    (2, 4, 8, 12)
    """
    sizes = []
    while first < last:
        sizes.append(first)
        first *= factor
    return (*sizes, last)


@dataclasses.dataclass(frozen=True)
class Capacity:
    """What was allocated, in true bytes."""

    shape: CacheShape
    pages: int
    slots: int
    max_model_len: int

    @property
    def tokens(self) -> int:
        return self.shape.token_capacity(pages=self.pages, slots=self.slots)

    @property
    def allocated_bytes(self) -> int:
        return self.shape.allocated_bytes(pages=self.pages, slots=self.slots)


def plan_capacity(
    config: EngineConfig, shape: CacheShape, model_max: int, available: int
) -> Capacity:
    """How many pages fit next to the slots' windows, and no more than the slots can fill.

    Args:
        model_max: the model's own length limit in tokens. available: bytes free.

    Raises:
        ValueError: one sequence of the wanted length does not fit: needed, available, and the
            largest length that would.
    """
    longest = config.max_model_len or min(model_max, MAX_LEN_DEFAULT)
    if longest > model_max:
        raise ValueError(
            f"max_model_len={longest}: the model was made for at most {model_max} tokens"
        )
    budget = int(config.mem_fraction * available)
    windows = config.max_num_seqs * shape.window_bytes
    per_sequence = shape.pages_written(longest)
    pages = min((budget - windows) // shape.page_bytes, config.max_num_seqs * per_sequence)
    if pages < per_sequence:
        need = windows + per_sequence * shape.page_bytes
        fits = max(0, pages) * 128 + shape.windows.sink if budget > windows else 0
        raise ValueError(
            f"max_model_len={longest} needs {need / 1e6:.0f} MB of cache with "
            f"max_num_seqs={config.max_num_seqs} ({windows / 1e6:.0f} MB of that BF16 windows); "
            f"mem_fraction={config.mem_fraction} of {available / 1e6:.0f} MB free leaves "
            f"{budget / 1e6:.0f} MB; the largest max_model_len that fits is {fits}"
        )
    return Capacity(shape, max(1, pages), config.max_num_seqs, longest)


class ModelRunner:
    """Weights, pools and slot state on the device, and one executable per step and shape.

    Everything is compiled by ``compile`` ahead of time and called through the compiled object, so
    a shape that was not planned is an error and never a silent compilation.
    """

    def __init__(
        self,
        config: EngineConfig,
        loaded: Loaded,
        rotation: Rotation | None,
        *,
        available_bytes: int | None = None,
    ) -> None:
        model = loaded.config
        if config.kv_cache_dtype == "int2":
            if rotation is None:
                raise ValueError("kv_cache_dtype='int2' needs a rotation")
            rotation.check_matches(
                layers=len(model.paged_layers),
                kv_heads=model.num_kv_heads,
                head_dim=model.head_dim,
                v_head_dim=model.head_dim,
            )
        else:
            rotation = None  # BF16 pages are stored as they are
        codecs = None if rotation is None else rotation.codecs
        self._codecs = layer_codecs(config.kv, len(model.paged_layers), codecs)
        self.config, self.model = config, model
        shape = CacheShape.of(
            config.kv,
            layers=model.num_layers,
            kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            codecs=self._codecs,
            sliding_windows=model.sliding_windows,
        )
        available = free_bytes() if available_bytes is None else available_bytes
        self.capacity = plan_capacity(config, shape, model.max_position_embeddings, available)
        self.table_pages = max(1, shape.pages_written(self.capacity.max_model_len))
        graphdef, self._weights = nnx.split(loaded.decoder)
        self._rotation = rotation
        self._steps = Steps(graphdef, windows_of(config.kv), config.steps_per_dispatch)
        # XLA's bf16 product with one row is eight times slower on a CPU, and no slower on a GPU.
        smallest = 1 if is_gpu() else 2
        self.decode_buckets = spaced(smallest, max(smallest, config.max_num_seqs), 2)
        # A branch of a GPU program stops the host, so batches that only take the likeliest token
        # have programs without any: the host stays ahead of the device.
        self.greedy_apart = is_gpu()
        self.prefill_buckets = spaced(SMALLEST_PREFILL, config.prefill_chunk, 4)
        self.traces: collections.Counter[tuple[str, int]] = collections.Counter()
        self._compiled: dict[tuple[str, int], Callable[..., Any]] = {}
        self._table: tuple[np.ndarray, jax.Array] | None = None  # the newest, here and there
        self.reset()

    def reset(self) -> None:
        """New pools and no live slot, as after a step that failed with its pools donated."""
        slots, kv, model = self.config.max_num_seqs, self.config.kv, self.model
        sizes = dict(kv_heads=model.num_kv_heads, head_dim=model.head_dim, slots=slots)
        sliding = sliding_by_layer(model.num_layers, model.sliding_windows)
        self._pools = Pools(
            tuple(
                init_layer(kv, codec=codec, pages=self.capacity.pages, sinks=slots, **sizes)
                for codec in self._codecs
            ),
            jnp.zeros(slots, jnp.int32),
            jnp.zeros(2, jnp.int32),
            init_sliding(sliding, lookahead=kv.lookahead, **sizes),
            tuple(sliding),
        )
        self._state = empty_state(slots)

    # -------------------------------------------------------------------------------- compiling

    def compile(self, progress: Progress = lambda _: None) -> None:
        """Compile every step for every bucket; a second call does nothing."""
        table, slots = self._empty_table(), self.config.max_num_seqs
        jobs: list[tuple[tuple[str, int], Callable[..., Any], tuple[int, ...], tuple[Any, ...]]] = [
            (("write", slots), self._steps.write, (1,), self._write_arguments(table, []))
        ]
        for size in self.prefill_buckets:
            arguments = self._prefill_arguments(
                table, 0, [0], size, length=1, final=True, settings=settings_of(None)
            )
            jobs.append((("prefill", size), self._steps.prefill, (2, 3), arguments))
        for size in self.decode_buckets:
            arguments = self._decode_arguments(table, [], size)
            jobs.append((("decode", size), self._steps.decode, (2, 3), arguments))
            if self.greedy_apart:
                greedy = functools.partial(self._steps.decode, greedy=True)
                jobs.append((("greedy", size), greedy, (2, 3), arguments))
        done = 0

        def build(job: tuple[Any, ...]) -> None:
            nonlocal done
            name, step, donated, arguments = job
            if name not in self._compiled:
                traced = jax.jit(self._counted(name, step), donate_argnums=donated)
                self._compiled[name] = traced.lower(*arguments).compile()
            done += 1
            progress(f"compiled {name[0]} {name[1]} ({done} of {len(jobs)})")

        progress(f"compiling {len(jobs)} steps")
        # XLA compiles without Python's lock; one program alone does not keep two cores busy.
        with ThreadPoolExecutor(COMPILE_THREADS, "compile") as pool:
            list(pool.map(build, jobs))

    def _counted(self, name: tuple[str, int], step: Callable[..., Any]) -> Callable[..., Any]:
        """The step, counting how often JAX traces it."""

        def run(*arguments: Any) -> Any:
            self.traces[name] += 1
            return step(*arguments)

        return run

    def memory_analysis(self, step: str, size: int) -> Any:
        """XLA's account of a compiled step's memory."""
        return self._compiled[step, size].memory_analysis()  # type: ignore[attr-defined]

    # -------------------------------------------------------------------------------- dispatching

    def _empty_table(self) -> np.ndarray:
        return np.zeros((self.config.max_num_seqs, self.table_pages), np.int32)

    def _prefill_arguments(
        self,
        table: np.ndarray,
        slot: int,
        tokens: list[int],
        size: int,
        *,
        length: int,
        final: bool,
        settings: Settings,
    ) -> tuple[Any, ...]:
        padded = np.zeros((1, size), np.int32)
        padded[0, : len(tokens)] = tokens
        one = lambda x, dtype=np.int32: np.array([x], dtype)  # noqa: E731
        return (
            self._weights,
            self._rotation,
            self._pools,
            self._state,
            self._on_device(table),
            one(slot),
            padded,
            one(length),
            one(len(tokens)),
            one(final, bool),
            settings,
        )

    def prefill(
        self,
        table: np.ndarray,
        slot: int,
        tokens: list[int],
        *,
        length: int,
        final: bool,
        settings: Settings,
    ) -> jax.Array:
        """Dispatch one chunk; returns the first token i32[1], to be read later.

        Args:
            table: i32[slots, MP]. tokens: the chunk. length: cached tokens with the chunk.
        """
        size = next(s for s in self.prefill_buckets if s >= len(tokens))
        arguments = self._prefill_arguments(
            table, slot, tokens, size, length=length, final=final, settings=settings
        )
        self._pools, self._state, token = self._compiled["prefill", size](*arguments)
        return token

    def _on_device(self, table: np.ndarray) -> jax.Array:
        """The block table there; it is sent when it has changed, not with every dispatch."""
        if self._table is None or not np.array_equal(self._table[0], table):
            held = table.copy()  # the device may read it after the caller has changed it
            self._table = held, jnp.asarray(held)
        return self._table[1]

    def _decode_arguments(self, table: np.ndarray, slots: list[int], size: int) -> tuple[Any, ...]:
        rows = np.full(size, -1, np.int32)
        rows[: len(slots)] = slots
        held = self._on_device(table)
        return self._weights, self._rotation, self._pools, self._state, held, rows

    def decode(self, table: np.ndarray, slots: list[int], *, greedy: bool = False) -> jax.Array:
        """Dispatch ``steps_per_dispatch`` steps; returns tokens i32[steps, bucket], read later.

        Args:
            greedy: none of the sequences samples.
        """
        size = next(s for s in self.decode_buckets if s >= len(slots))
        arguments = self._decode_arguments(table, slots, size)
        name = "greedy" if greedy and self.greedy_apart else "decode"
        self._pools, self._state, tokens = self._compiled[name, size](*arguments)
        return tokens

    def _write_arguments(self, table: np.ndarray, jobs: list[tuple[int, int]]) -> tuple[Any, ...]:
        row = np.zeros(self.config.max_num_seqs, np.int32)
        page = np.full(self.config.max_num_seqs, -1, np.int32)
        for index, (slot, number) in enumerate(jobs):
            row[index], page[index] = slot, number
        return self._rotation, self._pools, self._on_device(table), PagePlan(row, page)

    def write(self, table: np.ndarray, jobs: list[tuple[int, int]]) -> jax.Array:
        """Dispatch the writing of (slot, page number) jobs, at most one per slot; fault counts."""
        compiled = self._compiled["write", self.config.max_num_seqs]
        self._pools, faults = compiled(*self._write_arguments(table, jobs))
        return faults


def settings_of(
    params: SamplingParams | None, *, prompt_len: int = 1, stop_ids: Any = ()
) -> Settings:
    """One sequence's settings as the prefill step takes them; None for a row that only compiles."""
    params = params or SamplingParams(max_tokens=1, temperature=0.0)
    ids = np.full((1, STOP_IDS), -1, np.int32)
    ids[0, : len(stop_ids)] = sorted(stop_ids)
    as_array = lambda x: np.array([x], np.int32)  # noqa: E731
    return Settings(
        sampling=pack([params]),
        end=as_array(prompt_len + params.max_tokens),
        quiet_until=as_array(prompt_len + params.min_tokens),
        stop_ids=ids,
    )
