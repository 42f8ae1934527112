"""Each kernel on small cases, for compute-sanitizer on a machine with a GPU.

    compute-sanitizer --tool memcheck python -m tests.kernels.sanitize
    compute-sanitizer --tool racecheck python -m tests.kernels.sanitize decode

The kernels alone: whether they are right is what the suite tests, and XLA's own programs, which it
compares them with, do not get through the tool.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from pallas_kernels.decode import bench_cases as decoding
from pallas_kernels.decode import mosaic_gpu as decode
from pallas_kernels.prefill import bench as prefilling
from pallas_kernels.prefill import mosaic_gpu as prefill
from pallas_kernels.timing import prepare
from pallas_kernels.write import bench_cases as writing
from pallas_kernels.write import mosaic_gpu as write
from tests.kernels import no_autotuning  # noqa: F401

Outputs = Iterable[tuple[str, Any]]


def decodes() -> Outputs:
    for case in (
        decoding.Case(2, 900, kv_heads=2),
        decoding.Case(2, 900, kv_heads=1, group=5, head_dim=64, codec="waterfill", ragged=True),
        decoding.Case(2, 900, kv_heads=1, head_dim=64, bits=(3, 2)),
        decoding.Case(2, 900, kv_heads=1, head_dim=256, codec="bf16"),
    ):
        data = decoding.poisoned(decoding.inputs(case, 1, rotate=False), case)
        yield case.name, decoding.call(case, decode.decode)(data, data.tables[0])


def prefills() -> Outputs:
    for case in (
        prefilling.Case(130, 900, kv_heads=1),
        prefilling.Case(70, 900, kv_heads=1, group=3, head_dim=64, codec="waterfill"),
        prefilling.Case(70, 900, kv_heads=1, group=3, codec="waterfill", bits=(3, 2)),
    ):
        inputs = decoding.inputs(case.cache, 1, rotate=False)
        data = decoding.poisoned(inputs, case.cache)
        chunk = prefilling.chunk(1, case, poison=True)
        yield case.name, prefilling.call(case, prefill.prefill)(chunk, data, data.tables[0])


def writes() -> Outputs:
    for case in writing.CHECKS[:2]:
        data = writing.inputs(case, 1, rotate=False)
        run = writing.call(case, write.write)
        _, counts = run(data.layer, *data.sources[0], data.transform, data.jobs)
        yield case.name, counts


KERNELS: dict[str, Callable[[], Outputs]] = dict(decode=decodes, prefill=prefills, write=writes)


def main(names: list[str]) -> None:
    prepare()
    for name in names or list(KERNELS):
        for case, out in KERNELS[name]():
            values = np.asarray(jax.block_until_ready(out), np.float32)
            print(f"{name}, {case}: {values.size} numbers, sum {values.sum():.6g}", flush=True)
            if not np.isfinite(values).all():
                sys.exit(f"{name}, {case}: {np.sum(~np.isfinite(values))} are not finite")


if __name__ == "__main__":
    main(sys.argv[1:])
