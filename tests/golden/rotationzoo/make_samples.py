"""Writes the sample ``.pt`` files of this directory with the real ``torch.save``.

    python tests/golden/rotationzoo/make_samples.py  # torch 2.13 and numpy, nothing else

The layout is RotationZoo's: format 1 has one matrix per layer, format 2 one per KV head; OptR's
files are of format 2 with what its search noted, and the key means in a file of their own. Matrices
are orthogonal ones of 64 x 64 for a model of 3 layers with 2 KV heads, products of plane rotations
that the tests compute again without torch.
"""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable

import numpy as np
import torch

HERE = pathlib.Path(__file__).parent
LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 64


class Exploit:
    """Unpickling this would create a file."""

    def __reduce__(self) -> tuple:
        return pathlib.Path.touch, (pathlib.Path("rotationzoo-was-here"),)


class Evaluated:
    def __reduce__(self) -> tuple:
        return eval, ("open('rotationzoo-was-here', 'w')",)


def rotation(seed: int) -> torch.Tensor:
    """A product of plane rotations whose angles follow from ``seed``; the tests repeat this."""
    matrix = np.eye(HEAD_DIM)
    for step in range(1, 8):
        turned = np.roll(np.arange(HEAD_DIM), step * (seed + 1))
        for i, j in zip(turned[::2], turned[1::2], strict=True):
            angle = ((seed + 3) * step + i) % 16 * np.pi / 16
            c, s = np.cos(angle), np.sin(angle)
            rows = matrix[[i, j]].copy()
            matrix[i], matrix[j] = c * rows[0] - s * rows[1], s * rows[0] + c * rows[1]
    return torch.tensor(matrix, dtype=torch.float32)


def shared(offset: int, ids: Iterable) -> dict:
    layers = {
        i: {
            "layer_id": int(i),
            "rotation": rotation(int(i) + offset),
            "eigenvalues": torch.ones(64),
        }
        for i in ids
    }
    return {
        "format_version": 1,
        "objective": "qqt",
        "source_grouping": "layer",
        "layers": layers,
    }


def per_head(
    offset: int, dtype: torch.dtype = torch.float32, **fields: Callable[[int], torch.Tensor]
) -> dict:
    layers = {
        i: {
            "layer_id": i,
            "rotation": torch.stack([rotation(10 * i + h + offset) for h in range(KV_HEADS)]).to(
                dtype
            ),
            **{name: make(i) for name, make in fields.items()},
        }
        for i in range(LAYERS)
    }
    return {"format_version": 2, "source_grouping": "per_kv_head", "layers": layers}


def mean(layer: int) -> torch.Tensor:
    return torch.arange(KV_HEADS * HEAD_DIM).reshape(KV_HEADS, HEAD_DIM) / 64 + layer


def optr(offset: int) -> dict:
    """Format 2 with the fields that ``calibrate_optr.py`` adds (read at commit a4125f4)."""
    noted = {"base_held": torch.ones(KV_HEADS), "best_held": torch.ones(KV_HEADS) / 2}
    content = per_head(offset, eigenvalues=lambda i: torch.ones(HEAD_DIM))
    for entry in content["layers"].values():
        entry.update(noted, kept_heads=[0], ortho_err=1e-6)
    settings = {"variant": "sequential", "lam": 1.0, "steps": 80, "calib_chunks": "3,4"}
    return content | {"source_grouping": "kv_head", "objective": "optr_output_aware_k"} | settings


def main() -> None:
    skewed = shared(0, range(LAYERS))
    skewed["layers"][1]["rotation"] = skewed["layers"][1]["rotation"] * 1.5
    # a transposed view shares its storage and has strides of its own
    view = shared(0, range(LAYERS))
    for entry in view["layers"].values():
        entry["rotation"] = entry["rotation"].T.contiguous().T
    samples = {
        "k_v1": shared(0, ["2", "0", "1"]),  # string keys, shuffled
        "v_v1": shared(100, range(LAYERS)),
        "k_view_v1": view,
        "k_v2": per_head(0, k_mean=mean),
        "v_v2": per_head(200),
        "k_optr": optr(0),
        "v_optr": optr(200),
        "k_mean_optr": {
            "format_version": 1,
            "note": "post-RoPE key channel mean",
            "layers": {i: {"layer_id": i, "mu": mean(i)} for i in range(LAYERS)},
        },
        "k_bf16_v2": per_head(0, torch.bfloat16),
        "k_missing_v1": shared(0, [0, 2]),
        "k_extra_v1": shared(0, [0, 1, 2, 36]),
        "k_v3": shared(0, range(LAYERS)) | {"format_version": 3},
        "k_skewed_v1": skewed,
        "malicious_touch": {"format_version": 1, "layers": {0: Exploit()}},
        "malicious_eval": Evaluated(),
    }
    for name, content in samples.items():
        torch.save(content, HERE / f"{name}.pt")
    torch.save(shared(0, [0]), HERE / "legacy.pt", _use_new_zipfile_serialization=False)


if __name__ == "__main__":
    main()
