"""Times of the prefill op on a GPU, with the best BF16 attention of the same run beside them.

    python -m pallas_kernels.prefill.bench --out benchmarks/results/h200-prefill.json
    python -m pallas_kernels.prefill.bench --check-only       correctness against ``xla``
    python -m pallas_kernels.prefill.bench --plot FILE.json   a PNG beside the file, on any machine

A case is a chunk of queries after a number of cached tokens, as one step of a chunked prefill: its
own pages are written already. Times are those of the device (CUPTI, medians) from the start of the
op's first kernel to the end of its last; block tables rotate over a pool larger than the L2.
``tflops`` counts 4 D operations per query head and visible key (2 for q k, 2 for p v) and nothing
else: not the unpacking, the transforms, or masked keys. BF16 attention runs over dense keys of the
same lengths:

    cudnn           jax.nn.dot_product_attention; after cached tokens it cannot align a causal mask
                    with the end of the keys, so it sees all keys unmasked (Q / 2 more than needed)
    cudnn, two      the cached tokens unmasked and the chunk causal, joined by their residuals
    flash (torch)   torch's flash attention with the mask aligned to the end of the keys
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.decode.bench_cases import WINDOWS, Inputs, inputs, poisoned
from pallas_kernels.decode.bench_cases import Case as Cached
from pallas_kernels.layout import Tables
from pallas_kernels.prefill import mosaic_gpu, xla
from pallas_kernels.prefill.mosaic_pages import Config
from pallas_kernels.prefill.mosaic_wgmma import BLOCK_ROWS
from pallas_kernels.timing import (
    describe,
    kernel_times,
    parser,
    passed,
    picked,
    prepare,
    save,
)

CALLS = 10  # timed calls per row


@dataclasses.dataclass(frozen=True)
class Case:
    """``queries`` new tokens of each row after ``cached`` older ones."""

    queries: int
    cached: int
    batch: int = 1
    kv_heads: int = 8
    group: int = 4
    head_dim: int = 128
    codec: Literal["uniform", "waterfill", "bf16"] = "uniform"  # bf16: pages of BF16
    bits: tuple[int, int] = (2, 2)  # of keys and values in packed pages

    @property
    def cache(self) -> Cached:
        """The cache with the chunk in it, as the decode benchmark describes it."""
        return Cached(
            self.batch,
            self.cached + self.queries,
            kv_heads=self.kv_heads,
            group=self.group,
            head_dim=self.head_dim,
            codec=self.codec,
            bits=self.bits,
        )

    @property
    def name(self) -> str:
        kind = "" if self.codec == "uniform" else f" {self.codec}"
        kind += "" if self.bits == (2, 2) else " K{}V{}".format(*self.bits)
        rows = "" if self.batch == 1 else f"{self.batch} x "
        heads = f"{self.kv_heads * self.group}/{self.kv_heads}"
        return f"{rows}{self.queries} after {self.cached} D{self.head_dim} {heads}{kind}"

    @property
    def flops(self) -> int:
        """Of two products over the keys that are visible."""
        keys = self.queries * self.cached + self.queries * (self.queries + 1) // 2
        return 4 * self.head_dim * self.batch * self.kv_heads * self.group * keys


ROWS = (
    Case(2048, 30720),
    Case(2048, 30720, codec="waterfill"),
    Case(2048, 30720, codec="bf16"),
    Case(2048, 0),
    Case(2048, 8192),
    Case(2048, 100_000),
    Case(512, 30720),
    Case(2048, 30720, head_dim=64),
    Case(2048, 30720, kv_heads=4, group=4, head_dim=256),
    Case(2048, 30720, codec="waterfill", bits=(3, 2)),
)
CHECKS = (
    Case(300, 3000, batch=2, kv_heads=2),
    Case(200, 2100, kv_heads=1, group=3, codec="waterfill"),
    Case(130, 2000, kv_heads=2, group=7, head_dim=64),
    Case(70, 2500, batch=2, kv_heads=1, group=5, head_dim=64, codec="waterfill"),
    Case(100, 1800, kv_heads=1, group=12, head_dim=256),
    Case(64, 1500, batch=2, kv_heads=1, group=2, head_dim=256, codec="waterfill"),
    Case(900, 0, kv_heads=1, group=1),
    Case(400, 0, kv_heads=1, group=16, head_dim=64),
    Case(300, 1500, batch=2, kv_heads=2, codec="bf16"),
    Case(100, 1500, kv_heads=1, group=2, head_dim=256, codec="bf16"),
    Case(64, 40_000, kv_heads=1),
    Case(300, 3000, batch=2, kv_heads=2, bits=(3, 2)),
    Case(200, 2100, kv_heads=1, group=3, codec="waterfill", bits=(3, 2)),
    Case(130, 2000, kv_heads=2, group=7, head_dim=64, bits=(3, 4)),
    Case(64, 1500, batch=2, kv_heads=1, group=2, head_dim=256, codec="waterfill", bits=(3, 2)),
    Case(130, 2000, kv_heads=2, group=5, bits=(4, 4)),
    Case(100, 1800, kv_heads=1, group=3, head_dim=256, codec="waterfill", bits=(4, 4)),
)
# (size of the values, dtype of the queries) of the first check; the others take the first of them.
KINDS = ((1.0, "float32"), (1.0, "bfloat16"), (0.01, "float32"), (100.0, "float32"))


@functools.partial(jax.jit, static_argnames=("case", "poison"))
def chunk(seed: Any, case: Case, poison: bool = False) -> tuple[Any, Any, Any]:
    """BF16 (q, band_k, band_v); ``poison``: NaN where the band is before the sink's end."""
    shape = (case.batch, case.queries, case.kv_heads * case.group, case.head_dim)
    rows = WINDOWS.band + case.queries
    keys = jax.random.split(jax.random.key(seed), 3)
    q = jax.random.normal(keys[0], shape, jnp.bfloat16)
    band = [
        jax.random.normal(x, (case.batch, case.kv_heads, rows, case.head_dim), jnp.bfloat16)
        for x in keys[1:]
    ]
    if poison:
        position = case.cached - WINDOWS.band + jnp.arange(rows)
        band = [jnp.where((position < WINDOWS.sink)[:, None], jnp.nan, x) for x in band]
    return q, band[0], band[1]


def call(case: Case, implementation: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """A function of (chunk, inputs of the cache, tables)."""
    keywords = dict(
        windows=WINDOWS, codec=case.cache.key_codec, scale=case.head_dim**-0.5, **options
    )
    new = jax.device_put(np.full(case.batch, case.queries, np.int32))

    def run(arrays: tuple[Any, Any, Any], data: Inputs, tables: Tables) -> Any:
        return implementation(
            *arrays,
            data.layer,
            data.transform,
            tables,
            lengths=data.lengths,
            q_lens=new,
            **keywords,
        )

    return run


def check(
    case: Case, seed: int = 1, scale_v: float = 1.0, repeats: int = 10, dtype: str = "float32"
) -> dict[str, Any]:
    """Relative error against ``xla`` on the device, NaN in all that no query sees, and repeats.

    ``dtype``: of the queries and the output; the queries have BF16 values in any.
    """
    data = poisoned(inputs(case.cache, seed, rotate=False, scale_v=scale_v), case.cache)
    q, band_k, band_v = (np.asarray(x) for x in chunk(seed, case, poison=True))
    q, band_v = q.astype(np.float32), band_v * ml_dtypes.bfloat16(scale_v)
    arrays = jax.device_put(q), jax.device_put(band_k), jax.device_put(band_v)
    want = np.asarray(call(case, xla.prefill)(arrays, data, data.tables[0]), np.float64)
    run, given = call(case, mosaic_gpu.prefill), (arrays[0].astype(dtype), *arrays[1:])
    outs = [np.asarray(run(given, data, data.tables[0]), np.float32) for _ in range(repeats)]
    error = float(np.linalg.norm(outs[0] - want) / np.linalg.norm(want))
    equal = all((x == outs[0]).all() for x in outs)
    return {
        "case": case.name,
        "scale_v": scale_v,
        "queries": dtype,
        "error": error,
        "repeats_equal": equal,
        "passed": bool(error <= 3e-3 and equal),
    }


# --------------------------------------------------------------------------------------- timing


def time_prefill(case: Case, data: Inputs) -> tuple[float, dict[str, float]]:
    run, arrays = call(case, mosaic_gpu.prefill), chunk(0, case)
    tables = [data.tables[i % len(data.tables)] for i in range(CALLS)]
    return kernel_times(functools.partial(run, arrays, data, x) for x in tables)


def _two_parts(q: Any, k: Any, v: Any, cached: int) -> Any:
    """Attention over the cached tokens and, causal, over the chunk, joined by their residuals."""
    attend = functools.partial(
        jax.nn.dot_product_attention, implementation="cudnn", return_residual=True
    )
    far, far_lse = attend(q, k[:, :cached], v[:, :cached])
    near, near_lse = attend(q, k[:, cached:], v[:, cached:], is_causal=True)
    weight = jax.nn.sigmoid(far_lse - near_lse)[..., None]
    return (far * weight + near * (1 - weight)).astype(q.dtype)


def time_bf16(case: Case) -> dict[str, float]:
    """Microseconds of BF16 attention over the same lengths, by implementation."""
    tokens = case.cached + case.queries
    keys = jax.random.split(jax.random.key(2), 3)
    make = lambda key, n, heads: jax.random.normal(  # noqa: E731
        key, (case.batch, n, heads, case.head_dim), jnp.bfloat16
    )
    q = make(keys[0], case.queries, case.kv_heads * case.group)
    k, v = (make(key, tokens, case.kv_heads) for key in keys[1:])
    one = functools.partial(
        jax.nn.dot_product_attention, implementation="cudnn", is_causal=case.cached == 0
    )
    runs: dict[str, Callable[..., Any]] = {"cudnn": one}
    if case.cached:
        runs["cudnn, two"] = functools.partial(_two_parts, cached=case.cached)
    times = {}
    for name, run in runs.items():
        try:
            compiled = jax.jit(run)
            times[name], _ = kernel_times(
                functools.partial(compiled, q, k, v) for _ in range(CALLS)
            )
        except Exception as error:  # a baseline that this machine lacks is reported, not hidden
            print(f"{name}, {case.name}: {str(error)[:300]}", file=sys.stderr)
    times.update(_time_torch(case, q, k, v))
    return times


def _time_torch(case: Case, q: Any, k: Any, v: Any) -> dict[str, float]:
    """torch's flash attention on the same memory, by CUDA events."""
    try:
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.nn.attention.bias import causal_lower_right
    except ImportError:
        return {}
    try:
        query, key, value = (torch.from_dlpack(x).transpose(1, 2) for x in (q, k, v))
        mask = causal_lower_right(case.queries, case.cached + case.queries)
        run = functools.partial(
            torch.nn.functional.scaled_dot_product_attention,
            query,
            key,
            value,
            attn_mask=mask,
            enable_gqa=True,
        )
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            measured = []
            for _ in range(2 + CALLS):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in "be")
                begin.record()
                run()
                end.record()
                torch.cuda.synchronize()
                measured.append(begin.elapsed_time(end) * 1e3)
        return {"flash (torch)": float(np.median(measured[2:]))}
    except Exception as error:  # as above
        print(f"flash (torch), {case.name}: {str(error)[:300]}", file=sys.stderr)
        return {}


def chosen(case: Case) -> Config | None:
    """What the heuristic takes for the case's pages; None for BF16 pages."""
    if case.codec == "bf16":
        return None
    rows = -(-case.queries * case.group // BLOCK_ROWS)
    tokens = case.cached + case.queries
    return mosaic_gpu.heuristic(
        blocks=rows * case.kv_heads * case.batch,
        table_pages=max(0, tokens - WINDOWS.sink - WINDOWS.recent) // 128 + 1,
        sm_count=mosaic_gpu.device_multiprocessors(wgmma=True) or 132,
        tiles=mosaic_gpu.tiles_of(case.head_dim, case.head_dim, case.cache.key_codec),
    )


def plot(report: dict[str, Any], path: Path) -> None:
    """TFLOP/s beside the best BF16 attention's, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in report["rows"] if "best_bf16_us" in row]
    figure, axes = plt.subplots(figsize=(11, 5))
    at = np.arange(len(rows))
    for offset, key, label in ((-0.2, "best_bf16_us", "best BF16"), (0.2, "us", "this")):
        rates = [row["flops"] / row[key] / 1e6 for row in rows]
        axes.bar(at + offset, rates, 0.4, label=label)
    for x, row in zip(at, rows, strict=True):
        text = f"{row['best_bf16_us'] / row['us']:.2f}x"
        axes.annotate(text, (x + 0.2, row["tflops"]), ha="center", va="bottom")
    axes.set(ylabel="TFLOP/s of visible keys", title=f"prefill attention, {report['device']}")
    axes.set_xticks(at, [row["case"].replace(" D", "\nD") for row in rows], fontsize=7)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    prepare()
    arguments = parser("pallas_kernels.prefill.bench", __doc__)
    arguments.add_argument("--no-bf16", action="store_true", help="leave the baselines out")
    options = arguments.parse_args()
    if options.plot:
        plot(json.loads(options.plot.read_text()), options.plot.with_suffix(".png"))
        return 0
    report = describe() | {"windows": dataclasses.asdict(WINDOWS)}
    print(json.dumps(report), flush=True)
    checks = (
        check(case, scale_v=scale_v, dtype=dtype)
        for case in picked(CHECKS, options.checks)
        for scale_v, dtype in (KINDS if case == CHECKS[0] else KINDS[:1])
    )
    if not passed(report, checks):
        return 1
    if options.check_only:
        return 0
    report["rows"] = []
    for case in picked(ROWS, options.rows):
        row = {**dataclasses.asdict(case), "case": case.name, "flops": case.flops}
        config = chosen(case)
        row["config"] = None if config is None else dataclasses.asdict(config)
        row["us"], row["kernels"] = time_prefill(case, inputs(case.cache))
        row["tflops"] = case.flops / row["us"] / 1e6
        if not options.no_bf16:
            row["bf16"] = time_bf16(case)
            if row["bf16"]:
                row["best_bf16_name"] = min(row["bf16"], key=row["bf16"].__getitem__)
                row["best_bf16_us"] = row["bf16"][row["best_bf16_name"]]
                row["ratio"] = row["best_bf16_us"] / row["us"]
        report["rows"].append(row)
        print(row, flush=True)
        save(report, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
