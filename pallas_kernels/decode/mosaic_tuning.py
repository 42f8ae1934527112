"""Measured configurations of the decode kernel, a file per device beside the kernel.

``python -m pallas_kernels.decode.bench --tune`` times every configuration of its cases and writes
``tuning/<device>.json``, a list of entries

    {"codec": "uniform", "head_dim": 128, "v_head_dim": 128, "segments": 8, "pages": 253,
     "config": {"splits": 43, "window_splits": 4, "stages": 2, "warps_per_page": 2}, "us": 18.0}

with "key_bits" and "value_bits" where they are not 2. An entry serves batches like its own: the
same codec, widths and head dims, and KV heads times rows and pages per row within a factor of
``NEAR``. Where none does, ``mosaic_gpu.heuristic`` decides.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from pathlib import Path
from typing import Any

from pallas_kernels.decode.mosaic_kernel import Config
from pallas_kernels.decode.mosaic_stream import StreamConfig

FOLDER = Path(__file__).parent / "tuning"
NEAR = 1.5


@dataclasses.dataclass(frozen=True)
class Batch:
    """What a configuration is chosen by.

    Args:
        codec: of the keys; "bf16" for BF16 pages. segments: rows times KV heads times head groups.
        pages: per row of the block table. key_bits, value_bits: of packed pages.
    """

    codec: str
    head_dim: int
    v_head_dim: int
    segments: int
    pages: int
    key_bits: int = 2
    value_bits: int = 2

    @property
    def kernel(self) -> tuple[str, int, int, int, int]:
        """What batches of one kernel share, however it is cut."""
        return self.codec, self.head_dim, self.v_head_dim, self.key_bits, self.value_bits

    def distance(self, other: Batch) -> float:
        """The larger factor between the sizes of two batches; infinite for other kernels."""
        if self.kernel != other.kernel:
            return math.inf
        pairs = ((self.segments, other.segments), (self.pages, other.pages))
        return max(max(x, y) / max(1, min(x, y)) for x, y in pairs)


def path_of(device_kind: str) -> Path:
    """The file of a device, as ``NVIDIA H200`` is ``nvidia-h200.json``."""
    return FOLDER / f"{'-'.join(device_kind.lower().split())}.json"


def _batch(entry: dict[str, Any]) -> Batch:
    names = [field.name for field in dataclasses.fields(Batch)]
    return Batch(**{name: entry[name] for name in names if name in entry})


@functools.cache
def entries(device_kind: str) -> tuple[tuple[Batch, Config | StreamConfig], ...]:
    """What was measured on a device; nothing where it has no file."""
    path = path_of(device_kind)
    if not path.exists():
        return ()
    found = []
    for entry in json.loads(path.read_text()):
        kind = StreamConfig if entry["codec"] == "bf16" else Config
        found.append((_batch(entry), kind(**entry["config"])))
    return tuple(found)


def tuned(device_kind: str, batch: Batch) -> Config | StreamConfig | None:
    """The configuration of the nearest batch that was measured, or None."""
    near = [(own.distance(batch), i) for i, (own, _) in enumerate(entries(device_kind))]
    best = min(near, default=(math.inf, 0))
    return entries(device_kind)[best[1]][1] if best[0] <= NEAR else None


def write(device_kind: str, measured: list[tuple[Batch, Config | StreamConfig, float]]) -> Path:
    """Add measured configurations to a device's file; a batch's older entry is replaced."""
    path = path_of(device_kind)
    held: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    for batch, config, us in measured:
        held = [x for x in held if _batch(x) != batch]
        defaults = {x.name: x.default for x in dataclasses.fields(Batch)}
        own = {k: v for k, v in dataclasses.asdict(batch).items() if v != defaults[k]}
        held.append({**own, "config": dataclasses.asdict(config), "us": round(us, 2)})
    path.parent.mkdir(exist_ok=True)
    path.write_text("[\n " + ",\n ".join(json.dumps(x) for x in held) + "\n]\n")
    entries.cache_clear()
    return path
