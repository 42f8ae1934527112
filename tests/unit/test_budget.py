"""Which layers get wider codes: the budget is kept, spent, and spent where it does most."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from oscar_jax import Codec, KVConfig, Rotation
from oscar_jax.accounting import CacheShape
from oscar_jax.budget import VALUE_WEIGHT, in_words, with_budget
from oscar_jax.config import EngineConfig, parse_layers

LAYERS, D = 6, 128
CODEC = Codec(gain=True)
ROTATION = Rotation.hadamard(layers=LAYERS, kv_heads=1, head_dim=D, codec=CODEC)


def widths(rotation: Rotation) -> list[tuple[int, int]]:
    return [(16, 16) if codec is None else codec.bits for codec in rotation.codecs]


def stored(rotation: Rotation) -> float:
    return CacheShape.of(
        KVConfig(), layers=LAYERS, kv_heads=1, head_dim=D, codecs=rotation.codecs
    ).bits_per_element


def test_without_a_budget_the_codecs_are_the_checkpoints_but_for_skipped_layers() -> None:
    skipped = with_budget(ROTATION, skip=(0, 5))
    assert skipped.codecs == (None, CODEC, CODEC, CODEC, CODEC, None)
    assert skipped.x_k is ROTATION.x_k
    assert with_budget(ROTATION).codecs == ROTATION.codecs


def test_budgets_that_pay_for_a_step_everywhere_are_k3v2_k4v2_k4v4_and_bf16() -> None:
    """2 + 32/128 bits, and half a bit for one more of the keys."""
    for bits, width in ((2.25, (2, 2)), (2.75, (3, 2)), (3.25, (4, 2)), (4.25, (4, 4))):
        found = with_budget(ROTATION, bits=bits)
        assert widths(found) == [width] * LAYERS
        assert stored(found) == bits
    assert with_budget(ROTATION, bits=16.0).codecs == (None,) * LAYERS
    wide = with_budget(ROTATION, bits=2.75).codecs[0]
    assert wide == dataclasses.replace(CODEC, key_bits=3, clip_k=1.0)


def test_any_budget_between_is_kept_and_spent_to_less_than_a_step_of_one_layer() -> None:
    for bits in (2.3, 2.5, 2.9, 3.5, 4.0, 6.5):
        found = stored(with_budget(ROTATION, bits=bits))
        step = (16 - 4.25 if bits > 4.25 else 1.0) / LAYERS
        assert bits - step < found <= bits


def test_bits_go_to_the_layers_that_were_measured_to_need_them() -> None:
    """Layer 4's keys do sixteen times the damage of others', layer 1's values too."""
    sensitivity = [(1.0, 0.1 / VALUE_WEIGHT)] * LAYERS
    sensitivity[4], sensitivity[1] = (16.0, 0.1), (1.0, 1.6 / VALUE_WEIGHT)
    found = with_budget(ROTATION, bits=2.25 + 0.5 / LAYERS, sensitivity=sensitivity)
    assert widths(found) == [(2, 2)] * 4 + [(3, 2), (2, 2)]
    found = with_budget(ROTATION, bits=2.25 + 1 / LAYERS, sensitivity=sensitivity)
    assert widths(found)[4] == (4, 2)  # its second bit is worth four times a first one elsewhere
    found = with_budget(ROTATION, bits=2.25 + 5 / LAYERS, sensitivity=sensitivity)
    assert [width[1] for width in widths(found)] == [2, 4, 2, 2, 2, 2]


def test_skipped_layers_are_paid_for_and_what_cannot_be_is_refused() -> None:
    """One of six layers in BF16 takes (16 - 2.25) / 6 more than 2.25 bits."""
    floor = 2.25 + (16 - 2.25) / 6
    found = with_budget(ROTATION, skip=(2,), bits=floor + 0.25)
    assert found.codecs[2] is None
    assert np.isclose(stored(found), floor + 0.25)
    with pytest.raises(ValueError, match=r"kv_bits=3: must lie in 4.54167 to 16 .* layers 2 in"):
        with_budget(ROTATION, skip=(2,), bits=3.0)
    with pytest.raises(
        ValueError, match=r"kv_bits=2: must lie in 2.25 to 16 for this model: 2-bit"
    ):
        with_budget(ROTATION, bits=2.0)
    with pytest.raises(ValueError, match="sensitivity has 1 layers, the rotation 6"):
        with_budget(ROTATION, bits=3.0, sensitivity=[(1.0, 1.0)])


def test_layers_are_numbers_and_ranges() -> None:
    assert parse_layers("") == ()
    assert parse_layers("35, 0-1,1") == (0, 1, 35)
    for text in ("a", "3-1", "-1", "1.5", "0-"):
        with pytest.raises(ValueError, match="must be layers and ranges such as 0-1,35"):
            EngineConfig(kv_skip_layers=text)
    with pytest.raises(ValueError, match=r"kv_bits=3.0: needs kv_cache_dtype='int2'"):
        EngineConfig(kv_cache_dtype="bf16", kv_bits=3.0)


def test_widths_are_named_with_their_layers() -> None:
    codecs = (None, None, CODEC, CODEC.with_bits(key=3), CODEC.with_bits(key=3), None)
    assert in_words(codecs) == (
        "keys 2 and values 2 bits (layer 2), keys 3 and values 2 bits (layers 3-4), "
        "BF16 (layers 0-1, 5)"
    )
    assert in_words([CODEC, CODEC]) == "keys 2 and values 2 bits"
