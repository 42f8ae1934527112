"""``python -m oscar_jax.bench``: decode speed of a model on INT2 and on BF16 pages, side by side.

All caches run the same compiled model in one process on random content of the same lengths; only
the attention differs. On a GPU the BF16 side is the faster of two: the engine's own BF16 pages, and
cuDNN's attention on dense caches; every row is set beside its byte limit (weights and live cache
bytes over the read bandwidth measured in the same run) and taken apart into kernels by CUPTI.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax
import tyro
from flax import nnx

from oscar_jax import bench_kernels, device, results
from oscar_jax.bench_cases import Cache, Case, Plan, row_bytes, shape_of
from oscar_jax.config import KVConfig, as_dict
from oscar_jax.fetch import resolve
from oscar_jax.models import Loaded, load
from pallas_kernels.timing import read_bandwidth

PROGRAM = "python -m oscar_jax.bench"
COMPILE_THREADS = 6
MOST_ROWS = 512
NAMES = {"int2": "INT2 pages", "bf16": "BF16 pages", "cudnn": "BF16 dense, cuDNN"}


@dataclasses.dataclass(frozen=True)
class Engine:
    """Decode step time and tokens/s by batch and cached tokens, INT2 and BF16."""

    model: str
    """A name in configs/, a Hugging Face directory or a GGUF file."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: random weights of the right shapes; speed does not depend on their values."""
    batches: tuple[int, ...] | None = None
    """Sequences decoded together; by default 1, and 8 as well on a CPU."""
    tokens: tuple[int, ...] | None = None
    """Cached tokens of every sequence; by default 2048, and 8192, 32768, 100000 on a GPU."""
    filled: tuple[int, ...] | None = None
    """Cached tokens measured at the largest batch that fits, the same bytes for every cache; by
    default 8192, 32768 and 100000 on a GPU and none on a CPU."""
    mem_fraction: float = 0.85
    """Share of the memory free beside the weights that such a cache takes."""
    caches: tuple[Literal["int2", "bf16", "cudnn"], ...] | None = None
    """By default INT2 and BF16 pages, and cuDNN on dense BF16 caches as well on a GPU."""
    steps: int = 4
    """Decode steps per dispatch, as in the server."""
    repeats: int = 12
    """Dispatches timed for each figure, after two that are not; the median is reported."""
    out: Path | None = None
    """JSON file; by default benchmarks/results/DEVICE-engine-MODEL.json."""
    plot: Path | None = None
    """Draw this JSON as a PNG beside it, and measure nothing."""

    def __post_init__(self) -> None:
        if not 0 < self.mem_fraction <= 1:
            raise ValueError(f"mem_fraction={self.mem_fraction}: must be above 0 and at most 1")

    def grid(self, gpu: bool) -> Grid:
        """What to measure, with the defaults of a GPU or a CPU where nothing was said."""
        long = (100_000, 32768, 8192)

        def chosen(value: Any, on_gpu: Any, on_cpu: Any) -> Any:
            return (on_gpu if gpu else on_cpu) if value is None else value

        return Grid(
            batches=chosen(self.batches, (1,), (1, 8)),
            tokens=chosen(self.tokens, (*long, 2048), (2048,)),
            filled=chosen(self.filled, long, ()),
            caches=chosen(self.caches, ("int2", "bf16", "cudnn"), ("int2", "bf16")),
            mem_fraction=self.mem_fraction,
            steps=self.steps,
            repeats=self.repeats,
        )


@dataclasses.dataclass(frozen=True)
class Grid:
    """The cells of a run; fields as in ``Engine``."""

    batches: tuple[int, ...]
    tokens: tuple[int, ...]
    filled: tuple[int, ...]
    caches: tuple[Cache, ...]
    mem_fraction: float
    steps: int
    repeats: int

    @property
    def headroom(self) -> int:
        """Tokens that a measurement adds to a sequence, rounded up."""
        return self.steps * (self.repeats + 8)


@dataclasses.dataclass(frozen=True)
class Task:
    """A program to compile, and the cached lengths to time it at."""

    plan: Plan
    lengths: tuple[int, ...]
    filled: bool = False


def tasks(grid: Grid, loaded: Loaded, budget: int) -> list[list[Task]]:
    """What to run, in groups that are compiled together; INT2 before BF16, longest first.

    Raises:
        ValueError: not even one sequence fits into ``budget`` bytes.
    """

    def plan(cache: Cache, batch: int, longest: int) -> Plan:
        return Plan(loaded, cache, batch, longest + grid.headroom, grid.steps)

    groups = []
    for batch in grid.batches if grid.tokens else ():
        group = [] if device.is_gpu() else [Task(plan("none", batch, 0), grid.tokens[:1])]
        for cache in grid.caches:
            # cuDNN's caches are as long as their sequences; pages are one pool for all lengths.
            parts = [(n,) for n in grid.tokens] if cache == "cudnn" else [grid.tokens]
            group += [Task(plan(cache, batch, max(part)), part) for part in parts]
        groups.append(group)
    for tokens in sorted(grid.filled, reverse=True):
        group = []
        for cache in grid.caches:
            batch = min(budget // row_bytes(loaded, cache, tokens + grid.headroom), MOST_ROWS)
            if batch < 1:
                raise ValueError(
                    f"filled={tokens}: one sequence of {NAMES[cache]} does not fit into "
                    f"{budget / 1e9:.1f} GB (mem_fraction={grid.mem_fraction})"
                )
            group.append(Task(plan(cache, batch, tokens), (tokens,), True))
        groups.append(group)
    return groups


def engine(grid: Grid, loaded: Loaded) -> Iterator[dict[str, Any]]:
    """Measure every cell; yields a row for each."""
    budget = int(grid.mem_fraction * device.free_bytes())
    bandwidth = _read_bandwidth()
    _say(f"cache budget {budget / 1e9:.1f} GB, read bandwidth {bandwidth or 0:.3f} TB/s")
    for group in tasks(grid, loaded, budget):
        # Together, because XLA compiles without Python's lock; and before anything is timed.
        with ThreadPoolExecutor(COMPILE_THREADS) as pool:
            programs = list(pool.map(lambda task: task.plan.compile(), group))
        model_ms = None
        for task, compiled in zip(group, programs, strict=True):
            plan = task.plan
            _say(
                f"{plan.cache}, batch {plan.batch}, room for {plan.room} tokens: compiled in "
                f"{compiled.seconds:.1f} s, {compiled.temporary_bytes / 1e6:.0f} MB of temporaries"
            )
            case = compiled.fill()
            for tokens in task.lengths:
                times = [t / grid.steps for t in case.seconds(tokens, grid.repeats)]
                if plan.cache == "none":
                    model_ms = 1e3 * statistics.median(times)
                    continue
                row = _row(case, tokens, times)
                row |= {"filled": True} if task.filled else {}
                row |= _limit(row, bandwidth) if bandwidth else {}
                if model_ms is not None:
                    row |= dict(model_ms=model_ms, attention_ms=row["step_ms"] - model_ms)
                if device.is_gpu():
                    row |= _breakdown(case, tokens, row["step_ms"])
                _say(_line(row))
                yield row
            del case
            gc.collect()  # its pools make room for the next


def _read_bandwidth() -> float | None:
    """TB/s of reads, on a GPU."""
    return read_bandwidth() if device.is_gpu() else None


def _row(case: Case, tokens: int, times: Sequence[float]) -> dict[str, Any]:
    plan, step = case.compiled.plan, statistics.median(times)
    loaded, batch = plan.loaded, plan.batch
    return {
        "dtype": "int2" if plan.cache == "int2" else "bf16",
        "cache": NAMES[plan.cache],
        "batch": batch,
        "tokens": tokens,
        "step_ms": 1e3 * step,
        "mean_step_ms": 1e3 * statistics.fmean(times),
        "tokens_per_s": batch / step,
        "weight_bytes": read_weights(loaded),
        "cache_bytes": batch * shape_of(loaded, plan.cache).live_bytes(tokens),
        "allocated_bytes": batch * row_bytes(loaded, plan.cache, plan.room),
        "compile_s": case.compiled.seconds,
        "temporary_bytes": case.compiled.temporary_bytes,
    }


def _breakdown(case: Case, tokens: int, step_ms: float) -> dict[str, Any]:
    """What the kernels of a step do, and the time without any; {} where nothing was profiled."""
    case.rewind(tokens)
    try:
        kernels = bench_kernels.trace(case.dispatch)
    except RuntimeError as error:  # the times stand, without a breakdown
        _say(f"no breakdown: {error}")
        return {}
    found = bench_kernels.breakdown(kernels, case.compiled.plan.steps)
    return found | {"gap_ms": step_ms - found["kernels_ms"]}


def read_weights(loaded: Loaded) -> int:
    """Bytes of weights that a step reads: all but an embedding table that is not the head too."""
    total = sum(x.nbytes for x in jax.tree.leaves(nnx.state(loaded.decoder)))
    tied = loaded.config.tie_word_embeddings
    return total if tied else total - loaded.decoder.embed_tokens[...].nbytes


def _limit(row: dict[str, Any], bandwidth: float) -> dict[str, float]:
    limit = (row["weight_bytes"] + row["cache_bytes"]) / bandwidth / 1e9
    return {
        "read_tb_per_s": bandwidth,
        "limit_ms": limit,
        "over_limit": row["step_ms"] / limit,
    }


def _line(row: dict[str, Any]) -> str:
    line = (
        f"{row['cache']:<18} batch {row['batch']:>3}  cached {row['tokens']:>6}  step "
        f"{row['step_ms']:8.2f} ms  {row['tokens_per_s']:8.1f} tokens/s"
    )
    if "over_limit" in row:
        line += f"  {row['over_limit']:.2f} of its byte limit"
    parts = [("model_ms", "model"), ("products_ms", "products"), ("attention_ms", "attention")]
    parts += [("rest_ms", "rest"), ("gap_ms", "gap")]
    found = [f"{name} {row[key]:.2f}" for key, name in parts if key in row]
    return line + (f"\n    {', '.join(found)} ms" if found else "")


_BEGIN = time.perf_counter()


def _say(text: str) -> None:
    print(f"[{time.perf_counter() - _BEGIN:6.1f} s] {text}", file=sys.stderr, flush=True)


def ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """INT2 over the best BF16 tokens/s of the same run, for every (batch, tokens) with both.

    Rows at the largest batch that fits are compared by their bytes (``same_memory``).
    """
    cells: dict[tuple[Any, ...], dict[str, list[dict[str, Any]]]] = {}
    for row in rows:
        filled = row.get("filled", False)
        key = (filled, None if filled else row["batch"], row["tokens"])
        cells.setdefault(key, {}).setdefault(row["dtype"], []).append(row)
    found = []
    for (filled, batch, tokens), sides in cells.items():
        if set(sides) != {"int2", "bf16"}:
            continue
        best = max(sides["bf16"], key=lambda row: row["tokens_per_s"])
        (ours,) = sides["int2"]
        cell = {"same_memory": True} if filled else {"batch": batch}
        found.append(
            cell
            | {
                "tokens": tokens,
                "int2_over_bf16": ours["tokens_per_s"] / best["tokens_per_s"],
                "best_bf16": best["cache"],
            }
        )
    return found


def plot(path: Path) -> Path:
    """A PNG of a result: step times beside their limits at batch 1, tokens/s in equal memory."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    report = json.loads(path.read_text(encoding="utf-8"))
    rows = report["rows"]
    figure, (steps, speeds) = plt.subplots(1, 2, figsize=(12, 4.5))
    single = [r for r in rows if r["batch"] == 1 and not r.get("filled")]
    filled = [r for r in rows if r.get("filled")]
    for axis, chosen, value in ((steps, single, "step_ms"), (speeds, filled, "tokens_per_s")):
        caches = list(dict.fromkeys(r["cache"] for r in chosen))
        lengths = sorted({r["tokens"] for r in chosen})
        for index, cache in enumerate(caches):
            own = {r["tokens"]: r for r in chosen if r["cache"] == cache}
            at = [i + 0.27 * (index - (len(caches) - 1) / 2) for i in range(len(lengths))]
            axis.bar(at, [own[n][value] if n in own else 0 for n in lengths], 0.25, label=cache)
            for x, n in zip(at, lengths, strict=True):
                if value == "step_ms" and n in own and "limit_ms" in own[n]:
                    axis.hlines(own[n]["limit_ms"], x - 0.125, x + 0.125, "black")
                if value == "tokens_per_s" and n in own:
                    axis.annotate(f"{own[n]['batch']}", (x, own[n][value]), ha="center")
        axis.set_xticks(range(len(lengths)), [f"{n:,}" for n in lengths])
        axis.set_xlabel("cached tokens")
        axis.legend()
    device_name = report["device"]["kind"]
    steps.set(ylabel="ms", title=f"decode step, batch 1, {device_name} (line: byte limit)")
    speeds.set(ylabel="tokens/s", title="the same memory for every cache (number: batch)")
    figure.tight_layout()
    image = path.with_suffix(".png")
    figure.savefig(image, dpi=120)
    return image


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a benchmark and write its JSON."""
    options = tyro.extras.subcommand_cli_from_dict({"engine": Engine}, prog=PROGRAM, args=arguments)
    if options.plot is not None:
        print(f"drawn: {plot(options.plot)}")
        return 0
    device.prepare()
    path = resolve(options.model, load_format=options.load_format)
    loaded = load(path, load_format=options.load_format)
    name = jax.devices()[0]
    kind = "cpu" if name.platform == "cpu" else name.device_kind.split()[-1].lower()
    origin = results.provenance()  # before a row is written: the file itself is a change
    out = options.out or results.FOLDER / f"{kind}-engine-{Path(options.model).stem}.json"
    grid = options.grid(device.is_gpu())
    config = dataclasses.asdict(options) | dataclasses.asdict(grid) | {"out": str(out)}
    config["windows"] = as_dict(KVConfig())
    config["windows"].pop("dtype")  # both are measured
    config["implementation"] = "what oscar_attention picks for the device (None)"
    command = " ".join([PROGRAM, *(sys.argv[1:] if arguments is None else arguments)])
    rows: list[dict[str, Any]] = []
    for row in engine(grid, loaded):  # written after every row: what was measured is kept
        rows.append(row)
        results.write(out, command=command, config=config, rows=rows, ratios=ratios(rows), **origin)
    for ratio in ratios(rows):
        where = "same memory" if "same_memory" in ratio else f"batch {ratio['batch']:>3}"
        print(
            f"{where}  cached {ratio['tokens']:>6}  INT2 / {ratio['best_bf16']} tokens/s: "
            f"{ratio['int2_over_bf16']:.2f}"
        )
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
