"""What is chosen layer by layer, by the damage to the attention output on text kept for choosing.

The rows that choose are neither those of the fit nor those that the report measures, so that the
report's numbers are not flattered by the choice. What wins here is still only a candidate: the
model itself decides (``calib.choice``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from calib.held_out import HeldOut, measure_layer
from oscar_jax.rotation import Rotation
from pallas_kernels.format import Codec

# At D = 128 0.96 clamps 5 numbers of a row and 0.87 clamps 16; 1.0 clamps none.
CLIPS = (1.0, 0.98, 0.96, 0.94, 0.92, 0.90, 0.87)


def search_clips(rotation: Rotation, rows: HeldOut) -> Rotation:
    """The same transforms with clip_k and clip_v of every layer out of ``CLIPS``.

    clip_k first, then clip_v beside it, each by the least attention-output error with the codec's
    gain in the loop. Without gain a narrower clip has less error and shrinks inner products, which
    costs more retrieval than the error saves. Water-filled keys have no clip.
    """
    codecs = []
    for layer, codec in enumerate(rotation.codecs):
        if codec is not None:
            if codec.key == "uniform":
                codec = _best(rotation, rows, layer, [replace(codec, clip_k=r) for r in CLIPS])
            codec = _best(rotation, rows, layer, [replace(codec, clip_v=r) for r in CLIPS])
        codecs.append(codec)
    return replace(rotation, codecs=tuple(codecs))


def _best(rotation: Rotation, rows: HeldOut, layer: int, options: Sequence[Codec]) -> Codec:
    return min(options, key=lambda option: output_error(rotation, rows, layer, option))


def output_error(
    rotation: Rotation, rows: HeldOut, layer: int, codec: Codec | None = None
) -> float:
    """A layer's attention-output error, its heads taken together; 0 where nothing is attended."""
    noise, signal = measure_layer(rotation, rows, layer, codec)[0][2].sum((1, 2, 3))
    return float(noise / signal) if signal > 0 else 0.0


def mix(rotations: Mapping[str, Rotation], rows: HeldOut) -> tuple[Rotation, tuple[str, ...]]:
    """Every layer from the rotation with the least output error there, and their names by layer."""
    names, layers = list(rotations), next(iter(rotations.values())).layers
    errors = [
        [output_error(rotations[name], rows, layer) for name in names] for layer in range(layers)
    ]
    chosen = tuple(names[int(np.argmin(row))] for row in errors)
    return combined([rotations[name] for name in chosen]), chosen


def combined(by_layer: Sequence[Rotation]) -> Rotation:
    """Layer i of ``by_layer[i]``."""
    fields = [field.name for field in dataclasses.fields(Rotation)]
    return Rotation(
        **{
            field: tuple(getattr(one, field)[layer] for layer, one in enumerate(by_layer))
            for field in fields
        }
    )


def in_words(names: Sequence[str], numbers: Sequence[int] | None = None) -> str:
    """Which recipe which layers have.

    Args:
        numbers: the model's number of each layer that has pages; by default counted from 0.

    >>> in_words(["a", "a", "b", "a"])
    'a (layers 0, 1, 3), b (layer 2)'
    """
    if len(set(names)) == 1:
        return names[0]
    numbers, parts = range(len(names)) if numbers is None else numbers, []
    for name in dict.fromkeys(names):
        layers = [str(n) for n, own in zip(numbers, names, strict=True) if own == name]
        parts.append(f"{name} (layer{'s' * (len(layers) > 1)} {', '.join(layers)})")
    return ", ".join(parts)
