"""Times of the decode op on a GPU, with the best BF16 attention of the same run beside them.

    python -m pallas_kernels.decode.bench --out benchmarks/results/h200-decode.json
    python -m pallas_kernels.decode.bench --check-only        correctness against ``xla``
    python -m pallas_kernels.decode.bench --sweep             every configuration of every case
    python -m pallas_kernels.decode.bench --tune              the same, the best kept for the op
    python -m pallas_kernels.decode.bench --plot FILE.json    a PNG beside the file, on any machine

Times are those of the device (CUPTI, medians), never the host's. Block tables rotate over a pool
several times the L2, so that no page is served by it twice. ``useful_bytes`` are codes, metadata
and the visible rows of the windows; ``read_fraction`` relates them to the read bandwidth that a
kernel of nothing but copies into shared memory reached in the same run.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.decode import mosaic_gpu
from pallas_kernels.decode.bench_cases import (
    CHECKS,
    ROTATE_BYTES,
    ROWS,
    WINDOWS,
    Case,
    Inputs,
    call,
    check,
    inputs,
    useful_bytes,
)
from pallas_kernels.decode.mosaic_kernel import Config
from pallas_kernels.decode.mosaic_shape import WARPS
from pallas_kernels.decode.mosaic_stream import StreamConfig
from pallas_kernels.decode.mosaic_tuning import Batch, write
from pallas_kernels.device import SHARED_BYTES
from pallas_kernels.format import PAGE
from pallas_kernels.timing import (
    describe,
    kernel_times,
    parser,
    passed,
    picked,
    prepare,
    read_bandwidth,
    save,
)

CALLS = 12  # timed calls per row


def time_int2(
    case: Case, data: Inputs, config: Config | StreamConfig | None
) -> tuple[float, dict[str, float]]:
    run = call(case, mosaic_gpu.decode, config=config)
    tables = [data.tables[i % len(data.tables)] for i in range(CALLS)]
    return kernel_times(functools.partial(run, data, x) for x in tables)


def time_bf16(case: Case) -> dict[str, float]:
    """Microseconds of BF16 attention over the same lengths, by implementation."""
    shape = (case.batch, case.tokens, case.kv_heads, case.head_dim)
    size = 4 * int(np.prod(shape))
    sets = min(4, max(1, -(-ROTATE_BYTES // size)))
    key = jax.random.key(2, impl="rbg")
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
    del cudnn
    try:
        times["cudnn paged (jax)"] = _time_cudnn_paged(case, q, pairs[:1], lengths)
    except Exception as error:  # as above
        print(f"cudnn paged (jax), {case.name}: {str(error)[:300]}", file=sys.stderr)
    times.update(_time_torch(case, q, pairs))
    return times


def _time_cudnn_paged(case: Case, q: Any, pairs: Any, lengths: Any) -> float:
    """JAX's cuDNN paged attention over the same memory, cut into pages in random order."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    pages = case.tokens // PAGE
    count = case.batch * pages
    paged = jax.jit(lambda x: x[:, : pages * PAGE].reshape(count, PAGE, *x.shape[2:]))
    (pool,) = [(paged(k), paged(v)) for k, v in pairs]
    table = np.random.default_rng(0).permutation(count).reshape(case.batch, 1, pages, 1)
    run = jax.jit(
        functools.partial(
            cudnn.paged_attention,
            scale=case.head_dim**-0.5,
            mask_type=cudnn.MaskType.PADDING,
        )
    )
    one, seen = jnp.ones(case.batch, jnp.int32), jnp.minimum(lengths, pages * PAGE)
    ids = jnp.asarray(table, jnp.int32)
    return kernel_times(functools.partial(run, q, *pool, one, seen, ids, ids) for _ in range(8))[0]


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
                for _ in range(3):
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
    """The configurations worth timing for a case, around the heuristic's."""
    base = mosaic_gpu.heuristic(batch_of(case), mosaic_gpu.device_multiprocessors() or 132)
    if isinstance(base, StreamConfig):
        some = [max(1, round(base.splits * share)) for share in (0.5, 1.0, 2.0)]
        return list(dict.fromkeys([base, *(StreamConfig(n, s) for n in some for s in (2, 3))]))
    batch = batch_of(case)
    blocks = mosaic_gpu.blocks_by_registers(batch)
    found: list[Config | StreamConfig] = [chosen(case), base]
    for warps in (1, 2):
        stage = mosaic_gpu.stage_bytes(batch, WARPS // warps)
        deepest = max(2, min(4, SHARED_BYTES // blocks // (stage + 512)))
        found += [Config(base.splits, base.window_splits, n, warps) for n in {2, deepest}]
    for splits in {max(1, round(base.splits * share)) for share in (0.7, 1.4)}:
        found.append(dataclasses.replace(base, splits=splits))
    return list(dict.fromkeys(found))


def plot(report: dict[str, Any], path: Path) -> None:
    """Times beside the best BF16 attention's, and the fraction of the read bandwidth, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = report["rows"]
    size = (max(10.0, len(rows)), 7)
    figure, (times, fractions) = plt.subplots(2, 1, figsize=size, sharex=True)
    at = np.arange(len(rows))
    for offset, key, label in ((-0.2, "best_bf16_us", "best BF16"), (0.2, "us", "these pages")):
        times.bar(at + offset, [row.get(key, np.nan) for row in rows], 0.4, label=label)
    for x, row in zip(at, rows, strict=True):
        if "best_bf16_us" in row:
            ratio = f"{row['best_bf16_us'] / row['us']:.1f}x"
            times.annotate(ratio, (x + 0.2, row["us"]), ha="center")
    times.set(yscale="log", ylabel="us", title=f"decode attention, {report['device']}")
    times.legend()
    fractions.bar(at, [row["read_fraction"] for row in rows], 0.4, color="tab:orange")
    fractions.set(ylim=(0, 1), ylabel="useful bytes / read bandwidth")
    words = [row["case"].split() for row in rows]  # 32 x 32768, D128, 32/8, what is special
    labels = [[" ".join(x[:3]), " ".join(x[3:5]), *x[5:]] for x in words]
    fractions.set_xticks(at, ["\n".join(x) for x in labels], fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def batch_of(case: Case) -> Batch:
    """The case's inputs as the choice of a configuration sees them."""
    pages = max(0, (case.tokens - WINDOWS.sink - WINDOWS.recent) // PAGE)
    return Batch(
        codec=case.codec,
        head_dim=case.head_dim,
        v_head_dim=case.head_dim,
        segments=case.batch * case.kv_heads * mosaic_gpu.head_groups(case.group)[0],
        pages=pages + 1,
        key_bits=case.bits[0],
        value_bits=case.bits[1],
    )


def chosen(case: Case) -> Config | StreamConfig:
    """What the op takes for the case's inputs."""
    sm_count = mosaic_gpu.device_multiprocessors() or 132
    return mosaic_gpu.choose(batch_of(case), mosaic_gpu.device_kind(), sm_count)


def timed(case: Case, sweep: bool) -> dict[str, Any]:
    """The case's row: with the configuration that the op takes, or with the best of all."""
    data, row = inputs(case), {**dataclasses.asdict(case), "case": case.name}
    row["useful_bytes"], tried = useful_bytes(case), list[dict[str, Any]]()
    for config in configs(case) if sweep else [chosen(case)]:
        us, kernels = time_int2(case, data, config)
        tried.append({"us": us, "config": dataclasses.asdict(config), "kernels": kernels})
        if sweep:
            print(f"  {case.name} {config}: {us:.1f} {list(kernels.values())}", flush=True)
    row.update(min(tried, key=lambda x: x["us"]))
    if sweep:
        row["sweep"] = [{"us": x["us"], **x["config"]} for x in tried]
    return row


def best_bf16(case: Case) -> dict[str, Any]:
    """Times of BF16 attention by implementation, and the best of them if there is one."""
    found: dict[str, Any] = {"bf16": time_bf16(case)}
    if found["bf16"]:
        found["best_bf16_name"] = min(found["bf16"], key=found["bf16"].__getitem__)
        found["best_bf16_us"] = found["bf16"][found["best_bf16_name"]]
    return found


def main() -> int:
    prepare()
    arguments = parser("pallas_kernels.decode.bench", __doc__)
    arguments.add_argument("--sweep", action="store_true", help="time every configuration")
    arguments.add_argument("--tune", type=int, nargs="*", help="cases to sweep, keeping the best")
    arguments.add_argument("--no-bf16", action="store_true", help="leave the baselines out")
    options = arguments.parse_args()
    if options.plot:
        plot(json.loads(options.plot.read_text()), options.plot.with_suffix(".png"))
        return 0
    report = describe() | {"windows": dataclasses.asdict(WINDOWS)}
    print(json.dumps(report), flush=True)
    checks = (
        check(case, scale_v=scale_v)
        for case in picked(CHECKS, options.checks)
        for scale_v in ((1.0, 0.01, 100.0) if case == CHECKS[0] else (1.0,))
    )
    if not passed(report, checks):
        return 1
    if options.check_only:
        return 0
    report["read_tb_per_s"] = read_bandwidth()
    print(f"read bandwidth {report['read_tb_per_s']:.3f} TB/s", flush=True)
    report["rows"] = []
    tune = range(len(ROWS)) if options.tune == [] else options.tune or ()
    measured = []
    for case in picked(ROWS, options.rows):
        tuning = ROWS.index(case) in tune
        row = timed(case, sweep=options.sweep or tuning)
        row["read_fraction"] = row["useful_bytes"] / row["us"] / 1e6 / report["read_tb_per_s"]
        report["rows"].append(row)
        print({k: v for k, v in row.items() if k != "sweep"}, flush=True)
        save(report, options.out)
        # At once, so that a run which is ended has whole rows. Other pages of the same tokens have
        # the same BF16 attention.
        if not options.no_bf16 and case.codec != "waterfill" and case.bits == (2, 2):
            row.update(best_bf16(case))
            print({"case": case.name, "us": row["us"], "bf16": row["bf16"]}, flush=True)
            save(report, options.out)
        if tuning:
            kind = StreamConfig if case.codec == "bf16" else Config
            measured.append((batch_of(case), kind(**row["config"]), row["us"]))
    if measured:
        print(f"wrote {write(mosaic_gpu.device_kind(), measured)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
