"""What a report says of text, positions and layers, on errors that are known by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from calib.dialogues import SOURCES, conversations
from calib.held_out import Errors, HeldOut, measure
from calib.per_layer import combined, in_words, mix, output_error, search_clips
from calib.recipes import recipe
from calib.study import Study
from oscar_jax.config import KVConfig
from oscar_jax.rotation import Rotation
from pallas_kernels.format import Codec

LAYERS, KV_HEADS, D, LENGTH = 2, 1, 64, 640


def known(key: np.ndarray) -> Errors:
    """Errors whose key error of sequence b and query i is key[b, i]."""
    sums = np.ones((1, 5, 2, *key.shape, 1))
    sums[0, 0, 0, :, :, 0] = key
    return Errors(sums, 0)


def test_errors_are_split_by_domain_and_by_third_of_the_positions() -> None:
    key = np.array([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0.3, 0.3, 0.3, 0.3, 0.9, 0.9]])
    study = Study(
        domains=("prose", "code"),
        positions=np.array([447, 500, 600, 640, 700, 746]),
        errors=known(key),
        cross={"prose": known(key), "code": known(2 * key[::-1])},
        growing=(),
        offsets={},
    )
    found = {name: one.key_mean for name, one in study.by_domain(study.errors).items()}
    assert found == pytest.approx({"prose": 0.35, "code": 0.5})
    bands = {name: one.key_mean for name, one in study.by_band().items()}
    assert bands == pytest.approx({"447-546": 0.225, "547-646": 0.325, "647-746": 0.725})
    assert study.errors.sensitivity == ((1.0, 1.0),)
    # fitted on prose, code has 0.5; fitted on code it has 0.7, and prose 1.0 against 0.35
    assert study.gaps() == pytest.approx({"prose on code": 0.5 / 0.7, "code on prose": 1.0 / 0.35})


@pytest.fixture(scope="module")
def held() -> HeldOut:
    """Gaussian rows with one loud channel per layer, and queries that read all of them alike."""
    rng = np.random.default_rng(0)
    draw = lambda heads, count: tuple(  # noqa: E731
        rng.standard_normal((1, count, heads, D)).astype(np.float32) for _ in range(LAYERS)
    )
    keys = tuple(x * np.where(np.arange(D) == 7, 12.0, 1.0).astype("f") for x in draw(1, LENGTH))
    positions = np.array([500, 600, 639])
    queries = tuple(x * 0.5 for x in draw(2, len(positions)))
    return HeldOut(positions, queries, keys, draw(1, LENGTH), KVConfig())


def naive() -> Rotation:
    return Rotation.identity(layers=LAYERS, kv_heads=KV_HEADS, head_dim=D)


def turned(codec: Codec = Codec()) -> Rotation:
    return Rotation.hadamard(layers=LAYERS, kv_heads=KV_HEADS, head_dim=D, codec=codec)


def test_the_mix_takes_each_layer_from_what_is_best_there(held: HeldOut) -> None:
    first = combined([turned(), naive()])  # good in layer 0 alone
    second = combined([naive(), turned()])
    rotation, names = mix({"first": first, "second": second}, held)
    assert names == ("first", "second")
    np.testing.assert_array_equal(measure(rotation, held).key, measure(turned(), held).key)
    assert rotation.codecs == turned().codecs
    assert in_words(names) == "first (layer 0), second (layer 1)"


def test_the_clip_search_finds_the_least_output_error_of_its_grid(
    held: HeldOut, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("calib.per_layer.CLIPS", (1.0, 0.94))  # every clip is a compilation
    start = turned(Codec(clip_k=1.0, clip_v=1.0, gain=True))
    found = search_clips(start, held)
    for layer, codec in enumerate(found.codecs):
        assert codec is not None and codec.gain
        best = output_error(found, held, layer)
        assert best < output_error(start, held, layer)
        for clip in (1.0, 0.94):  # the values' clip was searched last
            option = dataclasses.replace(codec, clip_v=clip)
            assert best <= output_error(start, held, layer, option)
    centred = dataclasses.replace(start, codecs=(Codec(key="waterfill", gain=True), None))
    filled = search_clips(centred, held).codecs
    assert filled[0] is not None and filled[0].clip_k == Codec.clip_k  # it has no clip to search
    assert filled[1] is None
    assert measure(centred, held).output[1].tolist() == [0.0]  # BF16 pages give back what they got


def test_text_stored_later_keeps_its_attention_and_changes_what_pages_hold(held: HeldOut) -> None:
    frequencies = [np.linspace(1.0, 0.0, D // 2).astype(np.float32)] * LAYERS
    later = held.at_offset(1000, frequencies)
    for layer in range(LAYERS):
        before, after = (
            np.einsum("bqnd,btkd->bnqt", x.queries[layer], x.keys[layer]) for x in (held, later)
        )
        np.testing.assert_allclose(after, before, atol=1e-3)
        assert np.abs(later.keys[layer] - held.keys[layer]).max() > 5
    assert measure(naive(), later).key_mean != pytest.approx(
        measure(naive(), held).key_mean, rel=0.01
    )


def test_a_clip_search_without_gain_is_refused() -> None:
    assert recipe("stretch+clip+gain").full_name == "stretch+gain+clip"
    with pytest.raises(ValueError, match=r"recipe='oscar\+clip': \+clip needs \+gain"):
        recipe("oscar+clip")


def test_conversations_answer_in_json_code_and_tables() -> None:
    found = conversations()
    assert found == conversations()
    turns = [message for one in found for message in one]
    assert [turn["role"] for turn in turns] == ["user", "assistant"] * (len(turns) // 2)
    assert sum(len(turn["content"]) for turn in turns) > 80_000
    text = "\n".join(turn["content"] for turn in turns)
    for name in SOURCES:
        assert f"`{name}." in text
    for sign in (
        "```python\ndef ",
        '"parameters": [',
        "| code | phrase | meaning |",
        "Unicode name",
    ):
        assert sign in text
