"""Which layer gets how many bits: ``--kv-skip-layers`` and ``--kv-bits``.

Every layer starts with 2-bit keys and values. A step makes a layer's keys 3 or 4 bits wide, its
values 4, or, after both, its pages BF16. Of all steps that the budget still allows, the one that
removes most damage per bit comes next. With s_k and s_v the damage of a layer's 2-bit keys and
2-bit values, codes of b bits do

    s_k 4^(2 - b)    and    s_v 4^(2 - b)

(6 dB a bit), and BF16 pages none. s_k and s_v come from the checkpoint: the errors of the attention
output that calibration measured with 2-bit keys alone and with 2-bit values alone, the latter times
``VALUE_WEIGHT``. Where it has none, keys are ``KEY_SHARE`` of the damage of every layer, and the
first of equal layers come first: then 3-bit keys everywhere come before the first 4-bit keys, and
those before 4-bit values, which is K3V2, K4V2 and K4V4 for the budgets that pay for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from oscar_jax.rotation import Rotation
from pallas_kernels.format import Codec, bits_per_element

# On SmolLM2 and on Gemma 3, 2-bit keys alone have 90 % of the KL of 2-bit keys and values.
KEY_SHARE = 0.9
# An output error by values does less to the next token than the same one by keys: on SmolLM2
# (stretched, water-filled) KL falls from 0.0060 to 0.0028 with 3-bit keys and to 0.0048 with 4-bit
# values, so keys have three quarters of it, but 45 % of the summed output error.
VALUE_WEIGHT = 0.3
# What the order is worth there, 3-bit keys in half of the layers: KL 0.0038 in the most sensitive
# ones, 0.0041 in the first ones, 0.0050 in the least sensitive ones; 0.0060 in none, 0.0028 in all.
# All of this is in benchmarks/results/cpu-single-runs.json.
Sensitivity = tuple[float, float]  # output error by keys and by values
NARROW = (2, 2)
BF16 = (16, 16)


def with_budget(
    rotation: Rotation,
    *,
    skip: Sequence[int] = (),
    bits: float | None = None,
    sensitivity: Sequence[Sensitivity] = (),
) -> Rotation:
    """The same transforms with a codec per layer that keeps the budget.

    Args:
        skip: entries of the rotation whose pages are BF16.
        bits: stored bits of a key or value number in the pages, metadata counted, on average over
            all layers, the skipped ones included; at most that many. None: codecs as they are.
        sensitivity: per layer the output error by 2-bit keys and by 2-bit values, as the checkpoint
            has it; () where nothing was measured.

    Raises:
        ValueError: bits below what 2-bit codes (with the skipped layers in BF16) take, or over 16.
    """
    codecs = tuple(None if layer in skip else codec for layer, codec in enumerate(rotation.codecs))
    if bits is None:
        return dataclasses.replace(rotation, codecs=codecs)
    head_dim = rotation.x_k[0].shape[-1]
    if rotation.x_v[0].shape[-1] != head_dim:
        raise NotImplementedError("kv_bits needs keys and values of one head_dim")
    damage = [(keys, VALUE_WEIGHT * values) for keys, values in sensitivity]
    damage = damage or [(KEY_SHARE, 1 - KEY_SHARE)] * rotation.layers
    if len(damage) != rotation.layers:
        raise ValueError(f"sensitivity has {len(damage)} layers, the rotation {rotation.layers}")
    chosen = [BF16 if codec is None else NARROW for codec in codecs]
    size = lambda width: _stored(width, head_dim)  # noqa: E731
    left = bits * rotation.layers - sum(map(size, chosen))
    if left < -1e-9 or bits > 16:
        floor = sum(map(size, chosen)) / rotation.layers
        raise ValueError(
            f"kv_bits={bits:g}: must lie in {floor:g} to 16 for this model: 2-bit codes and their "
            "metadata" + (f", and layers {', '.join(map(str, skip))} in BF16" if skip else "")
        )
    while True:
        steps = [
            (_gain(damage[layer], width, wider) / (size(wider) - size(width)), -layer, wider)
            for layer, width in enumerate(chosen)
            for wider in _steps(width)
            if size(wider) - size(width) <= left + 1e-9
        ]
        if not steps:
            break
        _, layer, wider = max(steps)
        left -= size(wider) - size(chosen[-layer])
        chosen[-layer] = wider
    return dataclasses.replace(
        rotation,
        codecs=tuple(
            None
            if codec is None or width == BF16
            else codec.with_bits(key=width[0], value=width[1])
            for codec, width in zip(codecs, chosen, strict=True)
        ),
    )


def in_words(codecs: Sequence[Codec | None], layers: Sequence[int] | None = None) -> str:
    """How many layers have which widths, and which ones where they are not all.

    Args:
        layers: the model's number of each layer that has pages; by default counted from 0.

    >>> in_words([None, Codec(), Codec()])
    'keys 2 and values 2 bits (layers 1-2), BF16 (layer 0)'
    >>> in_words([None, Codec()], layers=(5, 11))
    'keys 2 and values 2 bits (layer 11), BF16 (layer 5)'
    """
    widths = [BF16 if codec is None else codec.bits for codec in codecs]
    parts = []
    for width in sorted(set(widths)):
        name = "BF16" if width == BF16 else f"keys {width[0]} and values {width[1]} bits"
        numbers = range(len(widths)) if layers is None else layers
        own = [layer for layer, other in zip(numbers, widths, strict=True) if other == width]
        parts.append(name if len(own) == len(widths) else f"{name} ({_ranges(own)})")
    return ", ".join(parts)


def _ranges(layers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"layer{'s' * (len(layers) > 1)} {text}"


def _stored(width: tuple[int, int], head_dim: int) -> float:
    codec = None if width == BF16 else Codec(key_bits=width[0], value_bits=width[1])
    return bits_per_element(codec, head_dim)


def _steps(width: tuple[int, int]) -> list[tuple[int, int]]:
    """What a layer of this width may become next."""
    if width == BF16:
        return []
    key, value = width
    if (key, value) == (4, 4):
        return [BF16]
    return [*([(key + 1, value)] if key < 4 else []), *([(key, 4)] if value == 2 else [])]


def _gain(damage: Sensitivity, width: tuple[int, int], wider: tuple[int, int]) -> float:
    """The damage that a step removes."""
    before, after = (
        0.0 if w == BF16 else sum(s * 4.0 ** (2 - b) for s, b in zip(damage, w, strict=True))
        for w in (width, wider)
    )
    return before - after
