"""Times of the write op on a GPU, beside the copy bandwidth of the same run.

    python -m pallas_kernels.write.bench --out benchmarks/results/h200-write.json
    python -m pallas_kernels.write.bench --check-only        codes and float16 steps off the formula
    python -m pallas_kernels.write.bench --sweep             several configurations of every case
    python -m pallas_kernels.write.bench --plot FILE.json    a PNG beside the file, on any machine

Times are those of the device (CUPTI, medians), never the host's: from the start of a call's first
kernel to the end of its last. Sources rotate over several times the L2, so that no row is served by
it twice. ``useful_bytes`` are the BF16 rows read and the codes and metadata written;
``copy_fraction`` relates them to the bytes that a kernel which reads and writes an array moved.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.timing import (
    describe,
    kernel_times,
    parser,
    passed,
    picked,
    prepare,
    save,
)
from pallas_kernels.write import mosaic_gpu, xla
from pallas_kernels.write.bench_cases import (
    CHECKS,
    ROWS,
    Case,
    Inputs,
    call,
    check,
    inputs,
    useful_bytes,
)
from pallas_kernels.write.mosaic_gpu import Config

CALLS = 16  # timed calls per row
VARIED = CHECKS[0], CHECKS[6], CHECKS[14]  # checked in every configuration: both codecs, D 64 / 128


def copy_bandwidth(gigabytes: int = 2) -> float:
    """TB/s, read and written, of a kernel that adds one to an array."""
    data = jnp.zeros(gigabytes << 28, jnp.uint32)
    step = jax.jit(lambda x: x + jnp.uint32(1))
    us, _ = kernel_times(functools.partial(step, data) for _ in range(8))
    return 2 * data.nbytes / us / 1e6


def calls(data: Inputs, run: Callable[..., Any], count: int) -> Iterator[Callable[[], Any]]:
    """Calls one after the other on the same pools, which each of them donates."""
    held = [jax.tree.map(jnp.copy, data.layer)]

    def one(index: int) -> Any:
        source = data.sources[index % len(data.sources)]
        held[0], counts = run(held[0], *source, data.transform, data.jobs)
        return counts

    return (functools.partial(one, index) for index in range(count))


def configs(case: Case) -> list[Config]:
    """Configurations worth timing for a case, the heuristic's first."""
    sides = mosaic_gpu.sides_of(case.head_dim, case.v_head_dim, case.codec)
    best = mosaic_gpu.heuristic(
        sides,
        jobs=case.rows * case.pages,
        kv_heads=case.kv_heads,
        sm_count=mosaic_gpu.device_multiprocessors(wgmma=True) or 132,
    )
    found, splits = [best], (best.key_splits, best.value_splits)
    if best.warpgroups > 2:  # rows and X fit registers and shared memory
        found += [Config(*splits, 3), Config(*splits, 4)]
    return list(dict.fromkeys(found))


def checked(cases: list[Case], with_xla: bool) -> Iterator[dict[str, Any]]:
    """The cases with their own configuration, then some of them with the others."""
    for case in cases:
        yield check(case, with_xla=with_xla)
    for case in cases:
        if case in VARIED:
            for config in configs(case)[1:]:
                yield check(case, config, with_xla=False)


def plot(report: dict[str, Any], path: Path) -> None:
    """Times beside those of ``xla``, and the fraction of the copy bandwidth, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = report["rows"]
    figure, (times, fractions) = plt.subplots(2, 1, figsize=(10, 8), sharex=True)
    at = np.arange(len(rows))
    timed = any("xla_us" in row for row in rows)  # xla too
    if timed:
        times.bar(at - 0.2, [row.get("xla_us", np.nan) for row in rows], 0.4, label="xla")
    own = at + 0.2 * timed
    times.bar(own, [row["us"] for row in rows], 0.4, label="Mosaic GPU", color="tab:orange")
    for x, row in zip(own, rows, strict=True):
        times.annotate(f"{row['us']:.0f}", (x, row["us"]), ha="center")
    times.set(yscale="log", ylabel="us", title=f"writing pages, {report['device']}")
    times.legend()
    fractions.bar(at, [row["copy_fraction"] for row in rows], 0.4, color="tab:orange")
    fractions.set(ylim=(0, 1), ylabel="useful bytes / copy bandwidth")
    fractions.set_xticks(
        at, [row["case"].replace(" D", "\nD") for row in rows], rotation=30, ha="right"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def time_row(case: Case, sweep: bool, bandwidth: float) -> dict[str, Any]:
    """One row of the report."""
    data = inputs(case)
    row: dict[str, Any] = {**dataclasses.asdict(case), "case": case.name}
    tried: list[dict[str, Any]] = []
    arrays = (data.layer, *data.sources[0], data.transform, data.jobs)
    names = ("k_pages", "v_pages", "k_meta", "v_meta")
    pools = sum(getattr(data.layer, name).nbytes for name in names)
    for config in configs(case) if sweep else configs(case)[:1]:
        run = call(case, mosaic_gpu.write, config=config).lower(*arrays).compile()
        us, kernels = kernel_times(calls(data, run, CALLS))
        memory = run.memory_analysis()
        tried.append(
            {
                "us": us,
                "config": dataclasses.asdict(config),
                "kernels": kernels,
                "pools_in_place": bool(memory.alias_size_in_bytes >= pools),
                "temporary_bytes": memory.temp_size_in_bytes,
            }
        )
        if sweep:
            print(f"  {case.name} {config}: {us:.1f}", flush=True)
    row.update(min(tried, key=lambda x: x["us"]))
    if sweep:
        row["sweep"] = [{"us": x["us"], **x["config"]} for x in tried]
    row["useful_bytes"] = useful_bytes(case)
    row["copy_fraction"] = row["useful_bytes"] / row["us"] / 1e6 / bandwidth
    return row


def time_xla(case: Case) -> float:
    """Microseconds of the specification, a loop over pages that the host drives."""
    data = inputs(case)
    return kernel_times(calls(data, call(case, xla.write), 2))[0]


def main() -> int:
    prepare()
    arguments = parser("pallas_kernels.write.bench", __doc__)
    arguments.add_argument(
        "--sweep", type=int, nargs="*", help="keep the best of several cuts of these cases, or all"
    )
    arguments.add_argument("--no-xla", action="store_true", help="leave out the time of xla")
    options = arguments.parse_args()
    if options.plot:
        plot(json.loads(options.plot.read_text()), options.plot.with_suffix(".png"))
        return 0
    report = describe()
    print(json.dumps(report), flush=True)
    with_xla = options.check_only and not options.no_xla
    if not passed(report, checked(picked(CHECKS, options.checks), with_xla)):
        return 1
    if options.check_only:
        return 0
    report["copy_tb_per_s"] = copy_bandwidth()
    print(f"copy bandwidth {report['copy_tb_per_s']:.3f} TB/s", flush=True)
    report["rows"] = []
    cases = picked(ROWS, options.rows)
    for case in cases:
        sweep = options.sweep is not None and (
            not options.sweep or ROWS.index(case) in options.sweep
        )
        row = time_row(case, sweep, report["copy_tb_per_s"])
        report["rows"].append(row)
        print({k: v for k, v in row.items() if k != "sweep"}, flush=True)
        save(report, options.out)
    for case, row in zip(cases, report["rows"], strict=True):
        if not options.no_xla:
            row["xla_us"] = time_xla(case)
            print(f"xla, {case.name}: {row['xla_us']:.0f} us", flush=True)
            save(report, options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
