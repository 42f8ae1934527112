"""Times of the decode op on a GPU, with the best BF16 attention of the same run beside them.

    python -m pallas_kernels.decode.bench --out benchmarks/results/h200-decode.json
    python -m pallas_kernels.decode.bench --check-only        correctness against ``xla``
    python -m pallas_kernels.decode.bench --sweep             every configuration of every case
    python -m pallas_kernels.decode.bench --plot FILE.json    a PNG beside the file, on any machine

Times are sums of kernel times by CUPTI (medians), never host time. Block tables rotate over a pool
several times the L2, so that no page is served by it twice. ``useful_bytes`` are codes, metadata
and the visible rows of the windows; ``read_fraction`` relates them to the read bandwidth that a
kernel of nothing but copies into shared memory reached in the same run.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.metadata
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

# Kernels of a CUDA graph are not timed one by one; and torch needs memory beside jax.
os.environ.setdefault("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import profiler
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.decode import mosaic_gpu, xla
from pallas_kernels.decode.mosaic_gpu import Config, StreamConfig
from pallas_kernels.format import PAGE, Codec
from pallas_kernels.layout import LayerKV, Tables, Transform, Windows

ROTATE_BYTES = 400 << 20  # of pages that a case's calls go through before one is read again
CALLS = 24  # timed calls per row


@dataclasses.dataclass(frozen=True)
class Case:
    """A decode step: shapes, and tokens per row."""

    batch: int
    tokens: int
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    codec: Literal["uniform", "waterfill", "bf16"] = "uniform"  # bf16: pages of BF16
    ragged: bool = False  # rows of tokens/8 to tokens, evenly

    @property
    def lengths(self) -> np.ndarray:
        if not self.ragged:
            return np.full(self.batch, self.tokens, np.int32)
        return np.linspace(self.tokens // 8, self.tokens, self.batch).astype(np.int32)

    @property
    def key_codec(self) -> Codec:
        return Codec() if self.codec == "bf16" else Codec(key=self.codec)

    @property
    def page_bytes(self) -> int:
        """Of a page and KV head."""
        return PAGE * (4 * self.head_dim if self.codec == "bf16" else self.head_dim // 2 + 8)

    @property
    def name(self) -> str:
        kind = "" if self.codec == "uniform" else f" {self.codec}"
        heads = f"{self.kv_heads * self.group}/{self.kv_heads}"
        return (
            f"{self.batch} x {self.tokens} D{self.head_dim} {heads}{kind}{' ragged' * self.ragged}"
        )


WINDOWS = Windows()
ROWS = (
    Case(32, 32768),
    Case(64, 8192),
    Case(1, 131072),
    Case(1, 32768),
    Case(32, 32768, codec="waterfill"),
    Case(1, 32768, codec="waterfill"),
    Case(32, 8192, kv_heads=3, group=3, head_dim=64),
    Case(32, 8192, kv_heads=4, group=4, head_dim=256),
    Case(32, 32768, ragged=True),
    Case(8, 32768),
    Case(1, 8192),
    Case(1, 1_000_000),
    Case(32, 32768, codec="bf16"),
    Case(1, 32768, codec="bf16"),
    Case(32, 8192, kv_heads=3, group=3, head_dim=64, codec="bf16"),
    Case(32, 8192, kv_heads=4, group=4, head_dim=256, codec="bf16"),
)
CHECKS = (
    Case(3, 2000),
    Case(2, 5000, codec="waterfill", ragged=True),
    Case(3, 3000, kv_heads=3, group=3, head_dim=64, ragged=True),
    Case(3, 3000, kv_heads=3, group=5, head_dim=64, codec="waterfill"),
    Case(2, 2500, kv_heads=2, group=6, head_dim=256, ragged=True),
    Case(2, 2500, kv_heads=2, group=12, head_dim=256, codec="waterfill"),
    Case(2, 1500, kv_heads=2, group=1),
    Case(2, 1500, kv_heads=2, group=7, codec="waterfill"),
    Case(2, 1500, kv_heads=2, group=16),
    Case(4, 447, kv_heads=2, ragged=True),
    Case(256, 1200, kv_heads=2, ragged=True),
    Case(1, 100_000),
    Case(3, 2500, ragged=True, codec="bf16"),
    Case(2, 3000, kv_heads=3, group=5, head_dim=64, ragged=True, codec="bf16"),
    Case(2, 1500, kv_heads=2, group=12, head_dim=256, ragged=True, codec="bf16"),
)


@dataclasses.dataclass
class Inputs:
    q: Any
    layer: LayerKV
    transform: Transform | None  # None for BF16 pages
    tables: list[Tables]  # to rotate over
    lengths: Any


@functools.partial(jax.jit, static_argnames=("case", "pages", "slots"))
def _random(key: Any, case: Case, pages: int, slots: int, scale_v: float) -> tuple[Any, ...]:
    keys = iter(jax.random.split(key, 16))
    heads, dim = case.kv_heads, case.head_dim

    def meta(scale: Any, least: Any) -> Any:
        bits = lambda x: lax.bitcast_convert_type(x.astype(jnp.float16), jnp.uint16)  # noqa: E731
        return bits(scale).astype(jnp.uint32) | bits(least).astype(jnp.uint32) << 16

    shape = (pages, heads, PAGE)
    scale_k, scale = (jax.random.uniform(next(keys), shape, minval=0.5, maxval=1.0) for _ in "kv")
    k_meta = meta(scale_k, -1.5 * scale_k + 0.2 * jax.random.normal(next(keys), shape))
    if case.codec == "waterfill":  # scale4 and scale1 as e5m3 bytes: 0x70 is 0.5, a step is 1/8
        byte = lambda: jax.random.randint(next(keys), shape, 0x6C, 0x74).astype(jnp.uint32)  # noqa: E731
        k_meta = (k_meta & 0xFFFF) | byte() << 16 | byte() << 24
    v_meta = meta(scale * scale_v, -1.5 * scale * scale_v)
    normal = lambda *s: jax.random.normal(next(keys), s)  # noqa: E731
    bf16 = case.codec == "bf16"

    def words(rows: int, row: int, scale: float) -> Any:
        if bf16:
            shape = (pages, heads, PAGE, dim)
            return jax.random.normal(next(keys), shape, jnp.bfloat16) * jnp.bfloat16(scale)
        return jax.random.bits(next(keys), (pages, heads, rows, row), jnp.uint16)

    near = lambda rows: normal(slots, heads, rows, dim).astype(jnp.bfloat16)  # noqa: E731
    layer = LayerKV(
        words(PAGE, dim // 8, 1.0),
        words(dim, PAGE // 8, scale_v),
        None if bf16 else k_meta,
        None if bf16 else v_meta,
        near(WINDOWS.sink),
        near(WINDOWS.sink) * scale_v,
        near(WINDOWS.ring),
        near(WINDOWS.ring) * scale_v,
    )
    q = normal(case.batch, 1, heads * case.group, dim).astype(jnp.bfloat16)
    return q, layer, normal(heads, dim) * 0.1


def inputs(case: Case, seed: int = 0, rotate: bool = True, scale_v: float = 1.0) -> Inputs:
    """Random pages in random order, orthogonal transforms."""
    rng = np.random.default_rng(seed)
    n = case.lengths
    pages = np.maximum(0, (n - WINDOWS.sink - WINDOWS.recent) // PAGE)
    size = int(pages.sum()) * case.kv_heads * case.page_bytes
    sets = min(16, max(1, -(-ROTATE_BYTES // max(size, 1)))) if rotate else 1
    total = max(1, int(pages.sum())) * sets + 3  # three pages that nothing owns
    slots = case.batch * sets + 1
    q, layer, mu = _random(jax.random.key(seed), case, total, slots, scale_v)
    ids, owners = rng.permutation(total), rng.permutation(slots)
    tables = []
    width = int(pages.max()) + 1
    for index in range(sets):
        table = np.full((case.batch, width), 10**6)
        start = index * int(pages.sum())
        for row, count in enumerate(pages):
            table[row, :count] = ids[start : start + count]
            start += count
        owner = jnp.asarray(owners[index * case.batch : (index + 1) * case.batch], jnp.int32)
        tables.append(Tables(jnp.asarray(table, jnp.int32), owner, owner))
    turn = lambda: np.linalg.qr(rng.normal(size=(case.kv_heads, case.head_dim, case.head_dim)))[0]  # noqa: E731
    x, y = (jnp.asarray(turn(), jnp.float32) for _ in "kv")
    if case.codec == "bf16":
        return Inputs(q, layer, None, tables, jnp.asarray(n))
    transform = Transform(x, x, y, y.swapaxes(-1, -2), mu)
    return Inputs(q, layer, transform, tables, jnp.asarray(n))


def poisoned(data: Inputs, case: Case) -> Inputs:
    """The same, with NaN in every page, row and slot that no row of the batch sees."""
    n, tables = np.asarray(data.lengths), data.tables[0]
    counts = np.maximum(0, (n - WINDOWS.sink - WINDOWS.recent) // PAGE)
    table, layer = np.asarray(tables.block_table), data.layer
    used = np.zeros(layer.k_pages.shape[0], bool)
    ring = np.zeros((layer.tail_k.shape[0], WINDOWS.ring), bool)
    sink = np.zeros((layer.tail_k.shape[0], WINDOWS.sink), bool)
    for row, (count, length) in enumerate(zip(counts, n, strict=True)):
        used[table[row, :count]] = True
        position = np.arange(WINDOWS.sink + PAGE * count, length)
        slot = int(tables.slot[row])
        ring[slot, (position - WINDOWS.sink) % WINDOWS.ring] = True
        sink[slot, :length] = True
    keep = lambda x, mask: jnp.where(jnp.asarray(mask)[:, None, :, None], x, jnp.nan)  # noqa: E731
    meta = lambda x: jnp.where(jnp.asarray(used)[:, None, None], x, jnp.uint32(0xFFFFFFFF))  # noqa: E731
    if layer.is_int2:
        pages = dict(k_meta=meta(layer.k_meta), v_meta=meta(layer.v_meta))
    else:
        shown = jnp.asarray(used)[:, None, None, None]
        pages = {x: jnp.where(shown, getattr(layer, x), jnp.nan) for x in ("k_pages", "v_pages")}
    layer = dataclasses.replace(
        layer,
        **pages,
        sink_k=keep(layer.sink_k, sink),
        sink_v=keep(layer.sink_v, sink),
        tail_k=keep(layer.tail_k, ring),
        tail_v=keep(layer.tail_v, ring),
    )
    return dataclasses.replace(data, layer=layer)


def useful_bytes(case: Case) -> int:
    """Bytes that a step must read: codes, metadata and visible window rows."""
    n = case.lengths.astype(np.int64)
    pages = np.maximum(0, (n - WINDOWS.sink - WINDOWS.recent) // PAGE)
    near = n - pages * PAGE
    return int(case.kv_heads * (pages * case.page_bytes + near * case.head_dim * 4).sum())


def call(case: Case, implementation: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    keywords = dict(windows=WINDOWS, codec=case.key_codec, scale=case.head_dim**-0.5, **options)

    one_query = jnp.ones(case.batch, jnp.int32)  # made here: its kernel is not the op's

    def run(data: Inputs, tables: Tables) -> Any:
        return implementation(
            data.q,
            data.layer,
            data.transform,
            tables,
            lengths=data.lengths,
            q_lens=one_query,
            **keywords,
        )

    return run


# ------------------------------------------------------------------------------------- checking


def check(
    case: Case, config: Config | StreamConfig | None = None, seed: int = 1, scale_v: float = 1.0
) -> dict[str, Any]:
    """Relative error against ``xla`` on the device, and whether ten repeats are equal."""
    data = poisoned(inputs(case, seed, rotate=False, scale_v=scale_v), case)
    data = dataclasses.replace(data, q=data.q.astype(jnp.float32))  # compare before rounding
    want = np.asarray(call(case, xla.decode)(data, data.tables[0]), np.float64)
    run = call(case, mosaic_gpu.decode, config=config)
    outs = [np.asarray(run(data, data.tables[0])) for _ in range(10)]
    error = np.linalg.norm(outs[0] - want) / np.linalg.norm(want)
    equal = all((x == outs[0]).all() for x in outs)
    row = {"case": case.name, "scale_v": scale_v, "error": float(error), "repeats_equal": equal}
    row["passed"] = bool(error <= 3e-3 and equal)
    return row


# --------------------------------------------------------------------------------------- timing


def kernel_times(calls: Iterator[Callable[[], Any]]) -> tuple[float, dict[str, float]]:
    """Microseconds of a call (median of the sums of its kernels), and the median per kernel."""
    runs = list(calls)
    jax.block_until_ready([run() for run in runs[:2]])
    extension = profiler.mosaic_gpu_lib._mosaic_gpu_ext
    extension._cupti_init()
    try:
        jax.block_until_ready([run() for run in runs])
    finally:
        timings = extension._cupti_get_timings(True)
    if not timings or len(timings) % len(runs):
        raise RuntimeError(f"{len(timings or ())} kernels in {len(runs)} calls: not the same each")
    per_call = len(timings) // len(runs)
    table = np.array([ms for _, ms in timings]).reshape(len(runs), per_call) * 1e3
    names = [f"{i} {name}"[:60] for i, (name, _) in enumerate(timings[:per_call])]
    return float(np.median(table.sum(1))), dict(
        zip(names, np.median(table, 0).round(2).tolist(), strict=True)
    )


def time_int2(
    case: Case, data: Inputs, config: Config | StreamConfig | None
) -> tuple[float, dict[str, float]]:
    run = call(case, mosaic_gpu.decode, config=config)
    tables = [data.tables[i % len(data.tables)] for i in range(CALLS)]
    return kernel_times(functools.partial(run, data, x) for x in tables)


def read_bandwidth(gigabytes: int = 8) -> float:
    """TB/s of a kernel that copies an array into shared memory and does nothing with it."""
    rows, stages, blocks = gigabytes << 16, 6, 132 * 2  # rows of 16 KiB
    data = jax.random.bits(jax.random.key(0), (rows, 16, 256), jnp.uint32)

    def body(source: Any, out: Any, stage: Any, barriers: Any) -> None:
        block = lax.axis_index("block")
        turns = rows // blocks
        fetch = lambda i, slot: plgpu.copy_gmem_to_smem(  # noqa: E731
            source.at[block + i * blocks], stage.at[slot], barriers.at[slot]
        )
        for i in range(stages):
            fetch(i, i)

        def step(i: Any, carry: Any) -> Any:
            slot = lax.rem(i, jnp.int32(stages))
            plgpu.barrier_wait(barriers.at[slot])

            @pl.when(i + stages < turns)
            def _() -> None:
                fetch(i + stages, slot)

            return carry

        lax.fori_loop(0, turns, step, 0)
        out[block] = turns

    kernel = jax.jit(
        plgpu.kernel(
            body,
            out_type=jax.ShapeDtypeStruct((blocks,), jnp.int32),
            scratch_types=[
                plgpu.SMEM((stages, 16, 256), jnp.uint32),
                plgpu.Barrier(num_barriers=stages),
            ],
            grid=(blocks,),
            grid_names=("block",),
        )
    )
    us, _ = kernel_times(functools.partial(kernel, data) for _ in range(8))
    return rows // blocks * blocks * 16 * 256 * 4 / us / 1e6


def time_bf16(case: Case) -> dict[str, float]:
    """Microseconds of BF16 attention over the same lengths, by implementation."""
    shape = (case.batch, case.tokens, case.kv_heads, case.head_dim)
    size = 4 * int(np.prod(shape))
    sets = min(4, max(1, -(-ROTATE_BYTES // size)))
    key = jax.random.key(2)
    make = jax.jit(lambda key: jax.random.normal(key, shape, jnp.bfloat16))
    pairs = [
        (make(jax.random.fold_in(key, 2 * i)), make(jax.random.fold_in(key, 2 * i + 1)))
        for i in range(sets)
    ]
    q = jax.random.normal(
        key, (case.batch, 1, case.kv_heads * case.group, case.head_dim), jnp.bfloat16
    )
    lengths = jnp.asarray(case.lengths)
    times: dict[str, float] = {}
    cudnn = jax.jit(
        lambda q, k, v, n: jax.nn.dot_product_attention(
            q,
            k,
            v,
            key_value_seq_lengths=n,
            query_seq_lengths=jnp.ones_like(n),
            implementation="cudnn",
        )
    )
    try:
        times["cudnn (jax)"], _ = kernel_times(
            functools.partial(cudnn, q, *pairs[i % sets], lengths) for i in range(8)
        )
    except Exception as error:  # a baseline that this machine lacks is reported, not hidden
        print(f"cudnn (jax), {case.name}: {str(error)[:300]}", file=sys.stderr)
    times.update(_time_torch(case, q, pairs))
    return times


def _time_torch(case: Case, q: Any, pairs: Any) -> dict[str, float]:
    """torch's SDPA (flash and cuDNN backends) on the same memory, by CUDA events."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
    except ImportError:
        return {}
    if case.ragged:
        return {}
    times = {}
    move = lambda x: torch.from_dlpack(x).transpose(1, 2)  # noqa: E731
    query, held = move(q), [(move(k), move(v)) for k, v in pairs]
    for name, backend in (
        ("flash (torch)", SDPBackend.FLASH_ATTENTION),
        ("cudnn (torch)", SDPBackend.CUDNN_ATTENTION),
    ):
        try:
            with sdpa_kernel(backend):
                run = lambda i: torch.nn.functional.scaled_dot_product_attention(  # noqa: E731
                    query, *held[i % len(held)], enable_gqa=True
                )
                for i in range(3):
                    run(i)
                measured = []
                for _ in range(5):
                    begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
                    begin.record()
                    for i in range(12):
                        run(i)
                    end.record()
                    torch.cuda.synchronize()
                    measured.append(begin.elapsed_time(end) / 12 * 1e3)
            times[name] = float(np.median(measured))
        except Exception as error:  # as above
            print(f"{name}, {case.name}: {str(error)[:200]}", file=sys.stderr)
    return times


def configs(case: Case) -> list[Config | StreamConfig]:
    """The configurations worth timing for a case."""
    rows, found = case.batch * case.kv_heads, list[Config | StreamConfig]()
    if case.codec == "bf16":
        most = -(-case.tokens // 64)
        splits = {s for b in (1, 2, 3, 4, 6, 8, 12) for s in (b * 132 // rows, -(-b * 132 // rows))}
        return [StreamConfig(s, n) for s in sorted(splits) if 0 < s <= most for n in (2, 3)]
    table = max(1, (case.tokens - 320) // PAGE)
    for warps, stages in ((1, 1), (1, 2), (2, 2), (2, 3), (2, 4), (4, 4), (4, 6)):
        pages = 4 // warps
        if stages * mosaic_gpu.stage_bytes(case.head_dim, case.head_dim, pages) > 220 << 10:
            continue
        for blocks in (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128):
            if not 132 * 2 <= rows * blocks <= 132 * 24 or blocks * pages > table:
                continue
            near = 4 if rows < 64 else 1
            found.append(Config(blocks, near, stages, warps))
    return found


def plot(report: dict[str, Any], path: Path) -> None:
    """Times beside the best BF16 attention's, and the fraction of the read bandwidth, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in report["rows"] if "best_bf16_us" in row]
    figure, (times, fractions) = plt.subplots(2, 1, figsize=(10, 7), sharex=True)
    at = np.arange(len(rows))
    for offset, key, label in ((-0.2, "best_bf16_us", "best BF16"), (0.2, "us", "INT2 pages")):
        times.bar(at + offset, [row[key] for row in rows], 0.4, label=label)
    for x, row in zip(at, rows, strict=True):
        times.annotate(f"{row['best_bf16_us'] / row['us']:.1f}x", (x + 0.2, row["us"]), ha="center")
    times.set(yscale="log", ylabel="us", title=f"decode attention, {report['device']}")
    times.legend()
    fractions.bar(at, [row["read_fraction"] for row in rows], 0.4, color="tab:orange")
    fractions.set(ylim=(0, 1), ylabel="useful bytes / read bandwidth")
    fractions.set_xticks(at, [row["case"].replace(" D", "\nD") for row in rows])
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def chosen(case: Case) -> Config | StreamConfig:
    """What the heuristic takes for the case's inputs."""
    pages = max(0, (case.tokens - WINDOWS.sink - WINDOWS.recent) // PAGE)
    choose = mosaic_gpu.stream_heuristic if case.codec == "bf16" else mosaic_gpu.heuristic
    return choose(
        batch=case.batch,
        kv_heads=case.kv_heads * mosaic_gpu.head_groups(case.group)[0],
        table_pages=pages + 1,
        head_dim=case.head_dim,
        v_head_dim=case.head_dim,
        sm_count=mosaic_gpu.device_multiprocessors() or 132,
    )


def describe() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    device = jax.devices()[0]
    versions = {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "numpy")}
    return {
        "commit": os.environ.get("BENCH_COMMIT", commit) or "unknown",
        "device": device.device_kind,
        "versions": versions,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "windows": dataclasses.asdict(WINDOWS),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, help="where the JSON goes")
    parser.add_argument("--check-only", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--rows", type=int, nargs="*", help="indices of the cases to time")
    parser.add_argument("--checks", type=int, nargs="*", help="indices of the checks to make")
    parser.add_argument("--no-bf16", action="store_true", help="leave the baselines out")
    parser.add_argument("--plot", type=Path, help="draw this JSON and do nothing else")
    options = parser.parse_args()
    if options.plot:
        plot(json.loads(options.plot.read_text()), options.plot.with_suffix(".png"))
        return 0
    report = describe()
    print(json.dumps(report), flush=True)
    report["checks"] = []
    checks = range(len(CHECKS)) if options.checks is None else options.checks
    for index, case in ((i, CHECKS[i]) for i in checks):
        for scale_v in (1.0, 0.01, 100.0) if index < 2 else (1.0,):
            row = check(case, scale_v=scale_v)
            report["checks"].append(row)
            print(row, flush=True)
    if not all(row["passed"] for row in report["checks"]):
        print("a check failed: nothing is timed", file=sys.stderr)
        return 1
    if options.check_only:
        return 0
    report["read_tb_per_s"] = read_bandwidth()
    print(f"read bandwidth {report['read_tb_per_s']:.3f} TB/s", flush=True)
    report["rows"] = []
    cases = ROWS if options.rows is None else [ROWS[i] for i in options.rows]
    for case in cases:
        data, row = inputs(case), {**dataclasses.asdict(case), "case": case.name}
        row["useful_bytes"] = useful_bytes(case)
        tried: list[dict[str, Any]] = []
        for config in configs(case) if options.sweep else [chosen(case)]:
            us, kernels = time_int2(case, data, config)
            tried.append({"us": us, "config": dataclasses.asdict(config), "kernels": kernels})
            if options.sweep:
                print(f"  {case.name} {config}: {us:.1f} {list(kernels.values())}", flush=True)
        best = min(tried, key=lambda x: x["us"])
        row.update(best)
        if options.sweep:
            row["sweep"] = [{"us": x["us"], **x["config"]} for x in tried]
        row["read_fraction"] = row["useful_bytes"] / row["us"] / 1e6 / report["read_tb_per_s"]
        del data
        if not options.no_bf16 and case.codec != "waterfill":
            row["bf16"] = time_bf16(case)
            if row["bf16"]:
                row["best_bf16_name"] = min(row["bf16"], key=row["bf16"].__getitem__)
                row["best_bf16_us"] = row["bf16"][row["best_bf16_name"]]
        report["rows"].append(row)
        print({k: v for k, v in row.items() if k != "sweep"}, flush=True)
        if options.out:  # after every row: what was measured is kept
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
