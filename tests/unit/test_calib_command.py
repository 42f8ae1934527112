"""Calibration from the outside: which text it reads, and its command line."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import tokenizers

from calib import Text
from calib import __main__ as calib_command
from calib.__main__ import Arguments, run
from calib.data import (
    calibration_texts,
    data_hash,
    evaluation_texts,
    read_texts,
    sequences,
)
from calib.dialogues import SOURCES
from oscar_jax import checkpoint
from oscar_jax.config import ModelConfig
from oscar_jax.models import load
from oscar_jax.models.tokenizer import byte_level
from oscar_jax.models.weights import expected_shapes
from tests.tiny import TINY, hf_config

ROOT = Path(__file__).parents[2]
LENGTH = 640  # tokens: two pages behind the sink are visible to the last query
PROSE = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 60
MODEL = hf_config(dataclasses.replace(TINY, max_position_embeddings=LENGTH))


# ------------------------------------------------------------------------------------------- data


def test_calibration_and_evaluation_never_share_text() -> None:
    used, kept = calibration_texts(), evaluation_texts()
    assert not {text.source for text in used} & {text.source for text in kept}
    assert {text.domain for text in used} == {text.domain for text in kept} == {"prose", "code"}
    assert not set(SOURCES) & {text.source for text in kept}  # what the chat is about
    sentences = lambda text: {line.strip() for line in text.splitlines() if len(line.strip()) > 50}  # noqa: E731
    prose, other = sentences(used[0].text), sentences(kept[0].text)
    assert len(prose) > 1000 and len(other) > 1000
    assert len(prose & other) < 0.02 * len(other)  # the reference repeats itself here and there


def test_sequences_take_documents_in_turn_and_keep_the_begin_token() -> None:
    def encode(text: str) -> list[int]:
        return [1, *(ord(c) for c in text)]  # BOS is 1

    texts = [Text("x", "a", "aaaaaaa"), Text("x", "b", "bbbb"), Text("y", "c", "cccccc")]
    found = sequences(encode, texts, length=3, count=3)
    a, b, c = (ord(letter) for letter in "abc")
    assert found["x"].tolist() == [[1, a, a], [1, b, b], [1, a, a]]
    assert found["y"].tolist() == [[1, c, c]] * 3
    assert data_hash(found["x"]) != data_hash(found["x"][[1, 0, 2]])
    assert data_hash(found["x"]) == data_hash(found["x"].astype(np.int64))
    with pytest.raises(ValueError, match="x: has fewer than 9 tokens"):
        sequences(encode, texts, length=9, count=1)


def test_chat_is_in_the_models_own_template_and_keeps_its_special_tokens() -> None:
    words = byte_level(259)
    (chat,) = [text for text in calibration_texts(words) if text.domain == "chat"]
    assert chat.text.startswith("<|im_start|>user\n")
    ids = sequences(words.encode, [chat], length=64, count=1)["chat"][0]
    assert ids[0] == 257  # the special token's id, not its letters


def test_a_users_files_are_joined_and_faults_are_named(tmp_path: Path) -> None:
    for name, content in (("a.txt", b"one"), ("b.txt", b"two"), ("bad", b"\xff"), ("empty", b" ")):
        (tmp_path / name).write_bytes(content)
    (text,) = read_texts([tmp_path / "a.txt", tmp_path / "b.txt"])
    assert (text.domain, text.text) == ("data", "one\n\ntwo")
    assert read_texts([]) == []
    for name, fault in (("bad", "UTF-8"), ("empty", "is empty"), ("missing", "No such file")):
        with pytest.raises(ValueError, match=rf"--data .*{name}: .*{fault}"):
            read_texts([tmp_path / name])


# ----------------------------------------------------------------------------------- command line


def run_calib(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "calib", *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def test_wrong_command_lines_end_in_one_line_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    result = run_calib("--model", "smollm2-135m", "--out", tmp_path, "--recipe", "oscar")
    assert result.returncode == 2
    assert result.stderr == f"error: {tmp_path}: exists; it is only replaced with force\n"

    def refused(*arguments: str) -> str:
        """What the command says in this process, which has loaded jax."""
        words = ["calib", "--model", "x", "--out", str(tmp_path / "r"), *arguments]
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            calib_command.main()
        assert ended.value.code == 2
        return capsys.readouterr().err

    assert refused("--positions", "-1") == "error: --positions -1: must be at least 0\n"
    message = refused("--recipe", "oscar+center")
    assert message.startswith("error: recipe='oscar+center': must be one of identity, hada")


def write_model(path: Path) -> Path:
    """A Hugging Face directory of the tiny model, with random weights and a byte tokenizer."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(MODEL))
    rng = np.random.default_rng(0)
    shapes = expected_shapes(ModelConfig.from_hf(MODEL))
    weights = {
        name: (np.ones(shape) if len(shape) == 1 else 0.05 * rng.standard_normal(shape)).astype("f")
        for name, shape in shapes.items()
    }
    safetensors.numpy.save_file(weights, path / "model.safetensors")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = tokenizers.Tokenizer(
        tokenizers.models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[])
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    words.save(str(path / "tokenizer.json"))
    return path


def test_the_command_fits_saves_and_reports(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    out = tmp_path / "rotation"
    data = tmp_path / "text.txt"
    data.write_text(PROSE)
    report = run(
        Arguments(
            model=str(model),
            out=out,
            recipe="stretch+centre+gain",
            data=(data,),
            tokens=2 * LENGTH,
            key_bits=3,
            dtype="float32",
        )
    )
    assert {path.name for path in out.iterdir()} == {
        "arrays", "metadata.json", "report.json", "report.md", "errors.png", "spectra.png",
        "tokens.png"
    }  # fmt: skip
    loaded = load(model, dtype=jnp.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rotation, metadata = checkpoint.load(
            out, model_config=loaded.config, weights_hash=loaded.weights_hash
        )
    assert metadata.tokens == report.fit.tokens
    assert metadata.recipe == "stretch+centre+gain+k3"
    assert report.judgement is not None and set(report.checks) == {"bf16", metadata.recipe}
    assert {codec and codec.bits for codec in rotation.codecs} == {(3, 2)}
    rotation.check_inverses()
    assert np.abs(np.asarray(rotation.mu[0])).max() > 0
