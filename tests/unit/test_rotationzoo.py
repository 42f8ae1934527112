"""Published ``.pt`` rotations: read without torch, converted exactly, and harmless when hostile."""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from calib.rotationzoo import convert, model_config, read_pt, read_side
from oscar_jax import checkpoint
from oscar_jax.config import ModelConfig
from pallas_kernels.format import Codec

SAMPLES = Path(__file__).parents[1] / "golden/rotationzoo"
ROOT = Path(__file__).parents[2]
LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 64


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return model_config(str(SAMPLES / "model"))


def rotation(seed: int) -> np.ndarray:
    """The matrix that ``make_samples.py`` stored for this seed."""
    matrix = np.eye(HEAD_DIM)
    for step in range(1, 8):
        turned = np.roll(np.arange(HEAD_DIM), step * (seed + 1))
        for i, j in zip(turned[::2], turned[1::2], strict=True):
            angle = ((seed + 3) * step + i) % 16 * np.pi / 16
            c, s = np.cos(angle), np.sin(angle)
            rows = matrix[[i, j]].copy()
            matrix[i], matrix[j] = c * rows[0] - s * rows[1], s * rows[0] + c * rows[1]
    return matrix.astype(np.float32)


def test_one_matrix_per_layer_serves_all_heads_in_numeric_layer_order(config: ModelConfig) -> None:
    converted, metadata = convert(SAMPLES / "k_v1.pt", SAMPLES / "v_v1.pt", config, Codec())
    for layer in range(LAYERS):  # the file lists "2", "0", "1"
        for head in range(KV_HEADS):
            np.testing.assert_array_equal(converted.x_k[layer][head], rotation(layer))
            np.testing.assert_array_equal(converted.x_v[layer][head], rotation(layer + 100))
            np.testing.assert_allclose(converted.x_q[layer][head], rotation(layer), atol=1e-5)
        np.testing.assert_array_equal(converted.mu[layer], np.zeros((KV_HEADS, HEAD_DIM)))
    assert metadata.recipe == "rotationzoo-v1"
    assert metadata.tokens == 0


def test_keys_are_rows_so_the_stored_key_is_k_times_r(config: ModelConfig) -> None:
    converted, _ = convert(SAMPLES / "k_v1.pt", SAMPLES / "v_v1.pt", config, Codec())
    key = np.arange(HEAD_DIM, dtype=np.float32)
    np.testing.assert_allclose(key @ np.asarray(converted.x_k[1][0]), key @ rotation(1), rtol=1e-6)
    assert not np.allclose(rotation(1), rotation(1).T, atol=0.1)  # the other order would show


def test_per_head_matrices_and_key_means_are_kept(config: ModelConfig) -> None:
    converted, metadata = convert(
        SAMPLES / "k_v2.pt", SAMPLES / "v_v2.pt", config, Codec(clip_v=0.96)
    )
    for layer in range(LAYERS):
        for head in range(KV_HEADS):
            np.testing.assert_array_equal(converted.x_k[layer][head], rotation(10 * layer + head))
            want = rotation(10 * layer + head + 200)
            np.testing.assert_array_equal(converted.x_v[layer][head], want)
        mean = np.arange(KV_HEADS * HEAD_DIM).reshape(KV_HEADS, HEAD_DIM) / 64 + layer
        np.testing.assert_array_equal(converted.mu[layer], mean)
    assert metadata.recipe == "rotationzoo-v2+centre"
    assert metadata.codecs == converted.codecs == (Codec(clip_v=0.96),) * converted.layers


def test_optrs_files_and_their_means_convert_like_format_2(config: ModelConfig) -> None:
    files = SAMPLES / "k_optr.pt", SAMPLES / "v_optr.pt"
    means = SAMPLES / "k_mean_optr.pt"
    found, metadata = convert(*files, config, Codec(), means)
    same, _ = convert(SAMPLES / "k_v2.pt", SAMPLES / "v_v2.pt", config, Codec())
    for layer in range(LAYERS):
        for side in ("x_k", "x_v", "mu"):
            np.testing.assert_array_equal(getattr(found, side)[layer], getattr(same, side)[layer])
    assert metadata.recipe == "rotationzoo-v2+centre"
    without, metadata = convert(*files, config, Codec())
    assert metadata.recipe == "rotationzoo-v2" and float(without.mu[1].max()) == 0.0
    with pytest.raises(ValueError, match=r"k_mean_optr.pt: .*k_v2.pt holds key means too"):
        convert(SAMPLES / "k_v2.pt", SAMPLES / "v_v2.pt", config, Codec(), means)
    with pytest.raises(ValueError, match=r"k_v1.pt: layer 2: mu must be finite numbers \[H, d\]"):
        convert(*files, config, Codec(), SAMPLES / "k_v1.pt")
    with pytest.raises(
        ValueError, match=r"k_mean_optr\.pt: has 3 layers for a model of 2: missing"
    ):
        shorter = dataclasses.replace(config, num_layers=2)
        convert(*files, shorter, Codec(), means)


def test_strided_views_and_bfloat16_are_read_as_torch_meant_them() -> None:
    np.testing.assert_array_equal(read_side(SAMPLES / "k_view_v1.pt").rotations[2][0], rotation(2))
    half = read_side(SAMPLES / "k_bf16_v2.pt").rotations[1][1]
    assert 0 < np.abs(half - rotation(11)).max() < 2**-8
    np.testing.assert_allclose(half, rotation(11), atol=2**-9)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("k_missing_v1", r"has 2 layers for a model of 3: missing \[1\], extra \[\]"),
        ("k_extra_v1", r"has 4 layers for a model of 3: missing \[\], extra \[36\]"),
        ("k_v3", r"format_version 3; readable are \(1, 2\)"),
        ("k_skewed_v1", r"layer 1: rotation is not orthogonal \(max \|R R\^T - I\| = 1.2"),
        ("legacy", "is not a torch.save file in zip form"),
        ("nowhere", r"cannot be read \(No such file"),
    ],
)
def test_files_that_do_not_fit_are_refused(config: ModelConfig, name: str, message: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}.pt: .*{message}"):
        convert(SAMPLES / f"{name}.pt", SAMPLES / "v_v1.pt", config, Codec())


def test_another_models_head_layout_is_refused_and_exchanged_files_are_noticed(
    config: ModelConfig,
) -> None:
    with pytest.raises(ValueError, match="is for 2 KV heads of 64, the model has 3 of 64"):
        wider = dataclasses.replace(config, num_kv_heads=3)
        convert(SAMPLES / "k_v2.pt", SAMPLES / "v_v2.pt", wider, Codec())
    with pytest.raises(ValueError, match="is for 1 KV heads of 64, the model has 2 of 128"):
        wide = dataclasses.replace(config, head_dim=128)
        convert(SAMPLES / "k_v1.pt", SAMPLES / "v_v1.pt", wide, Codec())
    with pytest.raises(ValueError, match="has k_mean; are the two files exchanged"):
        convert(SAMPLES / "v_v2.pt", SAMPLES / "k_v2.pt", config, Codec())


# ---------------------------------------------------------------------------------- hostile (S1)


@pytest.mark.parametrize(
    ("name", "asked"), [("malicious_touch", "getattr"), ("malicious_eval", "eval")]
)
def test_a_file_that_would_run_code_is_refused_by_name_and_runs_nothing(
    name: str, asked: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=rf"{name}.pt: it asks for __builtin__.{asked}.*refused"):
        read_pt(SAMPLES / f"{name}.pt")
    assert list(tmp_path.iterdir()) == []


def test_the_hostile_samples_are_hostile(tmp_path: Path) -> None:
    # otherwise the test above proves nothing
    script = """
import io, pickle, sys, zipfile
archive = zipfile.ZipFile(sys.argv[1])
pickle.load(io.BytesIO(archive.read("malicious_touch/data.pkl")))
"""
    subprocess.run(
        [sys.executable, "-c", script, SAMPLES / "malicious_touch.pt"], cwd=tmp_path, check=True
    )
    assert (tmp_path / "rotationzoo-was-here").exists()


def write_pt(path: Path, pickled: bytes, storage: bytes = b"", **options: Any) -> Path:
    with zipfile.ZipFile(path, "w", **options) as archive:
        archive.writestr("x/data.pkl", pickled)
        archive.writestr("x/data/0", storage)
    return path


class Global:
    """Pickles as a global name, or as a call of one."""

    def __init__(self, module: str, name: str):
        self.module, self.name = module, name


class Writer(pickle._Pickler):
    """Writes globals that do not exist here, and storages as persistent ids, as torch does."""

    write: Any  # the base class's own, which its stubs leave out

    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if isinstance(obj, Storage) else None

    def save(self, obj: Any, save_persistent_id: bool = True) -> Any:
        if isinstance(obj, Global):
            return self.write(f"c{obj.module}\n{obj.name}\n".encode())
        if isinstance(obj, Call):
            self.save(obj.function)
            self.save(obj.arguments)
            return self.write(pickle.REDUCE)
        return super().save(obj, save_persistent_id)  # type: ignore[misc]


class Storage:
    def __init__(self, *pid: Any):
        self.pid = pid


class Call:
    def __init__(self, function: Global, *arguments: Any):
        self.function, self.arguments = function, arguments


def pickled(content: Any) -> bytes:
    file = io.BytesIO()
    Writer(file, protocol=2).dump(content)
    return file.getvalue()


REBUILD = Global("torch._utils", "_rebuild_tensor_v2")


def floats(key: str, count: int) -> Storage:
    return Storage("storage", Global("torch", "FloatStorage"), key, "cpu", count)


FLOATS = floats("0", 4)


def tensor(offset: Any, size: Any, stride: Any, storage: Any = FLOATS) -> Call:
    return Call(REBUILD, storage, offset, size, stride, False, Call(ORDERED))


ORDERED = Global("collections", "OrderedDict")
FOUR = np.arange(4, dtype=np.float32).tobytes()


def test_our_own_writer_makes_files_that_the_reader_accepts(tmp_path: Path) -> None:
    path = write_pt(tmp_path / "x.pt", pickled(tensor(1, (3,), (1,))), FOUR)
    np.testing.assert_array_equal(read_pt(path), [1.0, 2.0, 3.0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: pickled(Call(Global("os", "system"), "true")), "asks for os.system"),
        (lambda: pickled(Global("torch", "load")), "asks for torch.load"),
        (lambda: pickled(Global("torch", "LongStorage")), "asks for torch.LongStorage"),
        (lambda: pickled(Global("numpy", "ndarray")), "asks for numpy.ndarray"),
        (lambda: pickled(Global("builtins", "getattr")), "asks for builtins.getattr"),
        (lambda: pickled(Global("collections", "OrderedDict.__init__")), "asks for collections"),
        (lambda: pickled(tensor(0, (5,), (1,))), "reaches outside its storage"),
        (lambda: pickled(tensor(2, (3,), (1,))), "reaches outside its storage"),
        (lambda: pickled(tensor(0, (2, 2), (3, 1))), "reaches outside its storage"),
        (lambda: pickled(tensor(0, (10**12,), (0,))), "reaches outside its storage"),
        (lambda: pickled(tensor(-1, (2,), (1,))), "offset -1"),
        (lambda: pickled(tensor(0, (2,), (-1,))), "stride"),
        (lambda: pickled(tensor(0, (2,), (1,), "text")), "without a storage"),
        (
            lambda: pickled(tensor(0, (2,), (1,), floats("0", 9))),
            "storage 0 holds 4 numbers, the file says 9",
        ),
        (
            lambda: pickled(tensor(0, (2,), (1,), floats("7", 4))),
            "no item named 'x/data/7'",
        ),
        (lambda: pickled(Storage("module", "x", "0", "cpu", 4)), "refers to 'module'"),
        (lambda: b"\x80\x02garbage", "pickle data was truncated"),
        (lambda: b"", "Ran out of input"),
    ],
)
def test_every_other_trick_is_refused_in_one_line(
    make: Callable[[], bytes], message: str, tmp_path: Path
) -> None:
    path = write_pt(tmp_path / "x.pt", make(), FOUR)
    with pytest.raises(ValueError, match=message) as caught:
        read_pt(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


def test_compressed_archives_are_refused_before_they_unfold(tmp_path: Path) -> None:
    path = write_pt(tmp_path / "x.pt", pickled({}), bytes(10**7), compression=zipfile.ZIP_DEFLATED)
    with pytest.raises(ValueError, match="holds compressed entries"):
        read_pt(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "format_version None"),
        ({"format_version": "1"}, "format_version '1'"),
        ({"format_version": 1}, "holds no layers"),
        ({"format_version": 1, "layers": {0: 3}}, "layer 0 is a int, must be a dict"),
        ({"format_version": 1, "layers": {"x": {}}}, "layer 'x' is not a number"),
        ({"format_version": 1, "layers": {-1: {}}}, "layer -1 is not a number"),
        ({"format_version": 1, "layers": {0: {"layer_id": 4}}}, "layer 0 says layer_id 4"),
        ({"format_version": 1, "layers": {0: {}}}, r"rotation is NoneType, must be \[d, d\]"),
        (
            {"format_version": 2, "layers": {0: {"rotation": tensor(0, (2, 2), (2, 1))}}},
            r"rotation is \(2, 2\), must be \[H, d, d\] in format 2",
        ),
        (
            {"format_version": 1, "layers": {0: {"rotation": tensor(0, (1, 4), (4, 1))}}},
            "must be square",
        ),
    ],
)
def test_contents_of_another_layout_are_refused(content: Any, message: str, tmp_path: Path) -> None:
    path = write_pt(tmp_path / "x.pt", pickled(content), FOUR)
    with pytest.raises(ValueError, match=message):
        read_side(path)


def test_query_and_output_sides_are_accepted_only_as_the_inverses(tmp_path: Path) -> None:
    swap = tensor(0, (2, 2), (2, 1))  # [[0, 1], [1, 0]]
    storage = np.array([0, 1, 1, 0], np.float32).tobytes()
    entry = {"rotation": swap, "q_rotation": swap, "o_rotation": swap}
    layers = {"format_version": 1, "layers": {0: entry}}
    path = write_pt(tmp_path / "x.pt", pickled(layers), storage)
    np.testing.assert_array_equal(read_side(path).rotations[0][0], [[0, 1], [1, 0]])
    quarter = np.array([0, 1, -1, 0], np.float32).tobytes()  # its inverse is its transpose
    path = write_pt(tmp_path / "y.pt", pickled(layers), quarter)
    with pytest.raises(ValueError, match="layer 0: o_rotation is not the inverse of rotation"):
        read_side(path)


# ----------------------------------------------------------------------------------- command line


def test_the_command_converts_and_refuses_in_one_line(tmp_path: Path, config: ModelConfig) -> None:
    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "calib.rotationzoo", *map(str, arguments)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env=os.environ | {"JAX_PLATFORMS": "cpu"},
        )

    model = ("--model", SAMPLES / "model")
    done = run(
        SAMPLES / "k_v2.pt",
        SAMPLES / "v_v2.pt",
        *model,
        "--out",
        tmp_path / "r",
        "--clip-v",
        "0.96",
    )
    assert done.returncode == 0, done.stderr
    assert f"rotationzoo-v2+centre: 3 layers saved to {tmp_path / 'r'}" in done.stdout
    loaded, metadata = checkpoint.load(tmp_path / "r", model_config=config)
    np.testing.assert_array_equal(loaded.x_k[2][1], rotation(21))
    assert {codec and codec.clip_v for codec in metadata.codecs} == {0.96}
    done = run(SAMPLES / "malicious_eval.pt", SAMPLES / "v_v1.pt", *model, "--out", tmp_path / "x")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "it asks for __builtin__.eval" in done.stderr
    assert not (tmp_path / "x").exists()


def test_a_models_numbers_are_found_by_name_and_path() -> None:
    assert model_config("smollm2-135m").num_layers == 30
    assert model_config(str(SAMPLES / "model")).num_kv_heads == KV_HEADS
    with pytest.raises(ValueError, match="--model nothing: neither one of"):
        model_config("nothing")
