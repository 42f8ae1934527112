"""``python -m oscar_jax.bench``: decode speed of a model on INT2 and on BF16 pages, side by side.

Both caches run the same compiled step in the same process on the same random cache content; only
the pages differ. The model's own time (matrix products, norms, sampling) is measured apart by the
same step with an attention that returns its query.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from oscar_jax import results
from oscar_jax.accounting import CacheShape
from oscar_jax.cache import init_layer, windows_of
from oscar_jax.config import KVConfig, KVDtype, as_dict
from oscar_jax.engine.request import SamplingParams
from oscar_jax.engine.runner import settings_of
from oscar_jax.engine.steps import Pools, SlotState, Steps
from oscar_jax.fetch import resolve
from oscar_jax.models import Loaded, load
from oscar_jax.rotation import Rotation
from pallas_kernels.layout import LayerKV

PROGRAM = "python -m oscar_jax.bench"


@dataclasses.dataclass(frozen=True)
class Engine:
    """Decode step time and tokens/s for batch sizes and cached lengths, INT2 and BF16."""

    model: str
    """A name in configs/, a Hugging Face directory or a GGUF file."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: random weights of the right shapes; speed does not depend on their values."""
    batches: tuple[int, ...] = (1, 8)
    """Sequences decoded together."""
    tokens: tuple[int, ...] = (2048,)
    """Cached tokens of every sequence."""
    steps: int = 4
    """Decode steps per dispatch, as in the server."""
    repeats: int = 12
    """Dispatches timed for each figure, after two that are not; the median is reported."""
    out: Path | None = None
    """JSON file; by default benchmarks/results/DEVICE-engine-MODEL.json."""


@dataclasses.dataclass(frozen=True)
class _Case:
    """One thing to time: the compiled step with the arguments that it gives back."""

    run: Callable[[Pools, SlotState], tuple[Pools, SlotState]]
    pools: Pools
    state: SlotState

    def seconds(self, repeats: int) -> list[float]:
        pools, state, times = self.pools, self.state, []
        for _ in range(repeats + 2):
            start = time.perf_counter()
            pools, state = jax.block_until_ready(self.run(pools, state))
            times.append(time.perf_counter() - start)
        return times[2:]


def random_like(layer: LayerKV, seed: int) -> LayerKV:
    """The layer's arrays filled with random bits (codes) and sane numbers: never zeros."""
    rng = np.random.default_rng(seed)

    def fill(name: str, x: jax.Array | None) -> jax.Array | None:
        if x is None:
            return None
        if x.dtype == jnp.uint16:
            return jnp.asarray(rng.integers(0, 1 << 16, x.shape, np.uint16))
        if x.dtype == jnp.uint32:  # float16 scale and min
            halves = rng.uniform(0.1, 0.5, (*x.shape, 2)).astype(np.float16)
            return jnp.asarray(halves.view(np.uint32)[..., 0])
        return jnp.asarray(rng.normal(size=x.shape).astype(np.float32), x.dtype)

    fields = {f.name: fill(f.name, getattr(layer, f.name)) for f in dataclasses.fields(layer)}
    return LayerKV(**fields)  # type: ignore[arg-type]


def _case(
    options: Engine, loaded: Loaded, dtype: KVDtype, batch: int, tokens: int, *, attend: bool
) -> _Case:
    model, config = loaded.config, KVConfig(dtype=dtype)
    rows = max(2, batch)  # the engine's smallest bucket
    room = tokens + options.steps * (options.repeats + 3)
    shape = CacheShape.of(
        config, layers=model.num_layers, kv_heads=model.num_kv_heads, head_dim=model.head_dim
    )
    pages = max(1, shape.pages_written(room))
    table = jnp.arange(rows * pages, dtype=jnp.int32).reshape(rows, pages)
    make = functools.partial(
        init_layer,
        config,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        pages=rows * pages,
        slots=rows,
        sinks=rows,
    )
    pools = Pools(
        tuple(random_like(make(), seed) for seed in range(model.num_layers)),
        jnp.full(rows, tokens, jnp.int32),
        jnp.zeros(2, jnp.int32),
    )
    settings = settings_of(SamplingParams(max_tokens=1 << 20, temperature=0.0))
    state = SlotState(
        token=jnp.arange(rows, dtype=jnp.int32),
        length=jnp.full(rows, tokens, jnp.int32),
        live=jnp.arange(rows) < batch,
        settings=jax.tree.map(lambda x: jnp.repeat(jnp.asarray(x), rows, 0), settings),
    )
    rotation = None
    if dtype == "int2":
        rotation = Rotation.hadamard(
            layers=model.num_layers, kv_heads=model.num_kv_heads, head_dim=model.head_dim
        )
    graphdef, weights = nnx.split(loaded.decoder)
    kind = Steps if attend else _WithoutAttention
    steps = kind(graphdef, windows_of(config), options.steps)
    slots = jnp.arange(rows, dtype=jnp.int32)
    slots = jnp.where(slots < batch, slots, -1)

    def step(weights: Any, rotation: Any, pools: Pools, state: SlotState) -> Any:
        return steps.decode(weights, rotation, pools, state, table, slots)[:2]

    compiled = jax.jit(step, donate_argnums=(2, 3)).lower(weights, rotation, pools, state).compile()
    return _Case(lambda p, s: compiled(weights, rotation, p, s), pools, state)


class _WithoutAttention(Steps):
    """The same steps, with the query for an answer: what is left is the model's own time."""

    def _attend(self, rotation: Any, lengths: Any, q_lens: Any) -> Any:
        return lambda cache, layer, q, k, v: (q, cache)


def engine(options: Engine, loaded: Loaded) -> list[dict[str, Any]]:
    """Measure every (batch, tokens) of the grid; a row for INT2 and one for BF16 each."""
    rows = []
    for tokens in options.tokens:
        for batch in options.batches:
            model_only = _case(options, loaded, "int2", batch, tokens, attend=False)
            gemm = statistics.median(model_only.seconds(options.repeats)) / options.steps
            for dtype in ("int2", "bf16"):
                case = _case(options, loaded, dtype, batch, tokens, attend=True)
                times = [t / options.steps for t in case.seconds(options.repeats)]
                rows.append(_row(options, loaded, dtype, batch, tokens, times, gemm))
                print(_line(rows[-1]), flush=True)
    return rows


def _row(
    options: Engine,
    loaded: Loaded,
    dtype: KVDtype,
    batch: int,
    tokens: int,
    times: Sequence[float],
    gemm: float,
) -> dict[str, Any]:
    model, step = loaded.config, statistics.median(times)
    shape = CacheShape.of(
        KVConfig(dtype=dtype),
        layers=model.num_layers,
        kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
    )
    weights = sum(x.nbytes for x in jax.tree.leaves(nnx.state(loaded.decoder)))
    return {
        "dtype": dtype,
        "batch": batch,
        "tokens": tokens,
        "step_ms": 1e3 * step,
        "fastest_step_ms": 1e3 * min(times),
        "tokens_per_s": batch / step,
        "model_ms": 1e3 * gemm,
        "attention_ms": 1e3 * (step - gemm),
        "weight_bytes": weights,
        "cache_bytes": batch * shape.live_bytes(tokens),
    }


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['dtype']}  batch {row['batch']:>3}  cached {row['tokens']:>6}  step "
        f"{row['step_ms']:8.2f} ms (model {row['model_ms']:.2f}, attention "
        f"{row['attention_ms']:.2f})  {row['tokens_per_s']:8.1f} tokens/s"
    )


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """INT2 over BF16 tokens/s for every (batch, tokens) of the same run."""
    by_key = {(r["dtype"], r["batch"], r["tokens"]): r["tokens_per_s"] for r in rows}
    return [
        {"batch": b, "tokens": n, "int2_over_bf16": speed / by_key["bf16", b, n]}
        for (dtype, b, n), speed in by_key.items()
        if dtype == "int2"
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark and write its JSON."""
    options = tyro.extras.subcommand_cli_from_dict({"engine": Engine}, prog=PROGRAM, args=arguments)
    path = resolve(options.model, load_format=options.load_format)
    rows = engine(options, load(path, load_format=options.load_format))
    device = jax.devices()[0]
    kind = "cpu" if device.platform == "cpu" else device.device_kind.split()[-1].lower()
    out = options.out or results.FOLDER / f"{kind}-engine-{Path(options.model).stem}.json"
    found = ratios(rows)
    for ratio in found:
        print(
            f"batch {ratio['batch']:>3}  cached {ratio['tokens']:>6}  INT2 / BF16 tokens/s: "
            f"{ratio['int2_over_bf16']:.2f}"
        )
    config = dataclasses.asdict(options) | {"out": str(out), "windows": as_dict(KVConfig())}
    config["windows"].pop("dtype")  # both are measured
    config["implementation"] = "what oscar_attention picks for the device (None)"
    results.write(out, command=f"{PROGRAM} engine", config=config, rows=rows, ratios=found)
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
