"""Rotation checkpoints: what is written comes back, and everything else is refused in one line."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp  # type: ignore[import-untyped]

from oscar_jax import checkpoint
from oscar_jax.checkpoint import CheckpointError, CheckpointMetadata, fingerprint, load, save
from oscar_jax.config import ModelConfig, RopeScaling
from oscar_jax.rotation import Rotation
from pallas_kernels.format import Codec

LAYERS, KV_HEADS, HEAD_DIM = 3, 2, 64
CONFIG = ModelConfig(
    architecture="llama",
    vocab_size=256,
    hidden_size=128,
    intermediate_size=256,
    num_layers=LAYERS,
    num_heads=4,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    rms_norm_eps=1e-5,
    rope_theta=10_000.0,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
)


def orthogonal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return np.linalg.qr(rng.standard_normal((*shape, shape[-1])))[0].astype(np.float32)


def make_rotation(layers: int = LAYERS) -> Rotation:
    rng = np.random.default_rng(0)
    return Rotation.from_transforms(
        list(orthogonal(rng, layers, KV_HEADS, HEAD_DIM)),
        list(orthogonal(rng, layers, KV_HEADS, HEAD_DIM)),
        list(rng.standard_normal((layers, KV_HEADS, HEAD_DIM)).astype(np.float32)),
        Codec(gain=True),
    )


def make_metadata(**changes: Any) -> CheckpointMetadata:
    metadata = CheckpointMetadata(
        recipe="oscar+centre",
        value_target="proxy",
        codecs=(Codec(gain=True),) * LAYERS,
        damping=0.02,
        sink=64,
        recent=256,
        tokens=8000,
        data_hash="ab" * 32,
        fingerprint=fingerprint(CONFIG),
        weights_hash="cd" * 32,
        layers=tuple(range(LAYERS)),
        warnings=("layer 1: values of KV head 0 are all zero: Hadamard used there",),
    )
    if "layers" in changes:
        changes.setdefault("codecs", (Codec(gain=True),) * len(changes["layers"]))
    return dataclasses.replace(metadata, **changes)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("original") / "rotation"
    save(path, make_rotation(), make_metadata())
    return path


@pytest.fixture
def saved(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "rotation"))


def test_a_saved_rotation_comes_back_bit_for_bit_with_its_metadata(saved: Path) -> None:
    want = make_rotation()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rotation, metadata = load(saved, model_config=CONFIG, weights_hash="cd" * 32)
    for side in ("x_k", "x_q", "x_v", "x_o", "mu"):
        for have, expected in zip(getattr(rotation, side), getattr(want, side), strict=True):
            np.testing.assert_array_equal(have, expected)
    assert rotation.codecs == (Codec(gain=True),) * LAYERS
    assert metadata.tokens == 8000
    assert metadata.warnings == make_metadata().warnings
    assert metadata.library_version


def test_every_layer_has_its_own_codec_and_a_layer_without_one_is_bf16(tmp_path: Path) -> None:
    codecs = (None, Codec(gain=True), Codec("waterfill"))
    rotation = dataclasses.replace(make_rotation(), codecs=codecs)
    save(tmp_path / "r", rotation, make_metadata(codecs=codecs))
    assert load(tmp_path / "r", model_config=CONFIG)[0].codecs == codecs
    # rows may stand in any order: each layer keeps its own codec
    edit_metadata(tmp_path / "r", layers=[2, 0, 1])
    assert load(tmp_path / "r", model_config=CONFIG)[0].codecs == (codecs[1], codecs[2], None)
    edit_metadata(tmp_path / "r", codecs=[None])
    with pytest.raises(CheckpointError, match="1 codecs, 3 layers"):
        load(tmp_path / "r", model_config=CONFIG)


def test_a_checkpoint_of_version_1_had_one_codec_for_all_layers(saved: Path) -> None:
    fields = json.loads((saved / "metadata.json").read_text())
    fields["codec"] = {**fields.pop("codecs")[0], "clip_k": 0.9}
    (saved / "metadata.json").write_text(json.dumps({**fields, "format_version": 1}))
    rotation, metadata = load(saved, model_config=CONFIG)
    assert rotation.codecs == metadata.codecs == (Codec(clip_k=0.9, gain=True),) * LAYERS


def test_a_relative_path_works(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved.parent)
    assert load(Path("rotation"), model_config=CONFIG)[0].layers == LAYERS
    save(Path("second"), make_rotation(), make_metadata())
    assert load(Path("second"), model_config=CONFIG)[0].layers == LAYERS


def test_an_existing_checkpoint_is_only_replaced_with_force(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="exists; it is only replaced with force"):
        save(saved, make_rotation(), make_metadata(tokens=1))
    assert load(saved, model_config=CONFIG)[1].tokens == 8000
    save(saved, make_rotation(), make_metadata(tokens=1), force=True)
    assert load(saved, model_config=CONFIG)[1].tokens == 1
    assert [entry.name for entry in saved.parent.iterdir()] == ["rotation"]


def test_a_write_that_fails_leaves_nothing_behind_and_the_old_checkpoint_whole(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint.ocp, "save", full_disk)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(saved, make_rotation(), make_metadata(tokens=1), force=True)
    with pytest.raises(CheckpointError, match="No space left on device"):
        save(saved.parent / "other", make_rotation(), make_metadata())
    assert [entry.name for entry in saved.parent.iterdir()] == ["rotation"]
    assert load(saved, model_config=CONFIG)[1].tokens == 8000


def test_metadata_that_does_not_describe_the_rotation_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="metadata says 2 layers"):
        save(tmp_path / "r", make_rotation(), make_metadata(layers=(0, 1)))
    with pytest.raises(ValueError, match=r"clip_k=0\.5"):
        save(tmp_path / "r", make_rotation(), make_metadata(codecs=(Codec(clip_k=0.5),) * LAYERS))


# --------------------------------------------------------------------------- another model's file


@pytest.mark.parametrize(
    ("change", "group", "names"),
    [
        ({"num_heads": 8}, "heads", r"num_heads 4, the model 8"),
        ({"num_kv_heads": 4}, "heads", r"num_kv_heads 2, the model 4"),
        ({"head_dim": 128}, "heads", r"head_dim 64, the model 128"),
        ({"rope_theta": 1e6}, "rope", r"rope_theta 10000.0, the model 1000000.0"),
        ({"rope_scaling": RopeScaling(4.0, 32768)}, "rope", r"rope_scaling None, the model .*4.0"),
        ({"qk_norm": True}, "architecture", r"qk_norm False, the model True"),
        ({"architecture": "qwen3"}, "architecture", r"architecture 'llama', the model 'qwen3'"),
        ({"hidden_size": 256}, "architecture", r"hidden_size 128, the model 256"),
    ],
)
def test_another_models_checkpoint_is_refused_naming_both(
    saved: Path, change: dict, group: str, names: str
) -> None:
    with pytest.raises(CheckpointError, match=rf"another model \({group}\).*{names}"):
        load(saved, model_config=dataclasses.replace(CONFIG, **change))


def test_numbers_that_the_cache_does_not_see_may_differ(saved: Path) -> None:
    other = dataclasses.replace(CONFIG, vocab_size=512, max_position_embeddings=4096)
    assert load(saved, model_config=other)[0].layers == LAYERS


def test_other_weights_only_warn(saved: Path) -> None:
    with pytest.warns(UserWarning, match="was fitted on other weights"):
        rotation, _ = load(saved, model_config=CONFIG, weights_hash="ef" * 32)
    assert rotation.layers == LAYERS


def test_a_checkpoint_of_random_weights_is_for_those_alone(tmp_path: Path) -> None:
    save(tmp_path / "r", make_rotation(), make_metadata(random_weights=True))
    for other in ("ef" * 32, None):
        with pytest.raises(CheckpointError, match=r"r: was fitted to random weights \(--load-for"):
            load(tmp_path / "r", model_config=CONFIG, weights_hash=other)
    rotation, metadata = load(tmp_path / "r", model_config=CONFIG, weights_hash="cd" * 32)
    assert metadata.random_weights and rotation.layers == LAYERS


def test_a_checkpoint_without_a_fingerprint_is_for_custom_models_only(tmp_path: Path) -> None:
    save(tmp_path / "r", make_rotation(), make_metadata(fingerprint=None))
    assert load(tmp_path / "r")[0].layers == LAYERS
    with pytest.raises(CheckpointError, match="no model fingerprint"):
        load(tmp_path / "r", model_config=CONFIG)


# ------------------------------------------------------------------------------------- layers (U65)


def test_a_missing_layer_is_named(tmp_path: Path) -> None:
    save(tmp_path / "r", make_rotation(2), make_metadata(layers=(0, 2)))
    with pytest.raises(CheckpointError, match=r"2 layers for a model of 3: missing \[1\], extra"):
        load(tmp_path / "r", model_config=CONFIG)


def test_an_extra_layer_is_named(tmp_path: Path) -> None:
    save(tmp_path / "r", make_rotation(4), make_metadata(layers=(0, 1, 2, 36)))
    with pytest.raises(CheckpointError, match=r"missing \[\], extra \[36\]"):
        load(tmp_path / "r", model_config=CONFIG)


def test_layers_are_put_in_numeric_order_however_they_are_listed(tmp_path: Path) -> None:
    rotation = make_rotation(12)
    shuffled = tuple(sorted(range(12), key=str))  # 0, 1, 10, 11, 2, ...
    save(tmp_path / "r", rotation, make_metadata(layers=shuffled))
    edit_metadata(tmp_path / "r", layers=[str(layer) for layer in shuffled])
    config = dataclasses.replace(CONFIG, num_layers=12)
    edit_metadata(tmp_path / "r", fingerprint=fingerprint(config))
    loaded, _ = load(tmp_path / "r", model_config=config)
    np.testing.assert_array_equal(loaded.x_k[2], rotation.x_k[shuffled.index(2)])
    np.testing.assert_array_equal(loaded.mu[10], rotation.mu[shuffled.index(10)])


# ----------------------------------------------------------------------------- broken files (U68)


def remove(*paths: Path) -> None:
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def empty(path: Path) -> None:
    shutil.rmtree(path)
    path.mkdir()


def replace_by_file(path: Path) -> None:
    shutil.rmtree(path)
    path.write_text("x")


def edit_metadata(path: Path, **changes: object) -> None:
    file = path / "metadata.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def truncate_largest_file(path: Path) -> None:
    largest = max((f for f in path.rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)


def rewrite_arrays(path: Path, tree: dict) -> None:
    shutil.rmtree(path / "arrays")
    ocp.save(path / "arrays", tree)


def arrays(**changes: object) -> dict:
    rotation = make_rotation()
    stack = lambda side: np.stack([np.asarray(x) for x in getattr(rotation, side)])  # noqa: E731
    return {name: stack(name) for name in ("x_k", "x_v", "mu")} | changes


BREAK: dict[str, tuple[Callable[[Path], object], str]] = {
    "a missing directory": (shutil.rmtree, "does not exist"),
    "an empty directory": (empty, "is empty"),
    "a file": (replace_by_file, "is a file"),
    "no metadata": (lambda p: remove(p / "metadata.json"), "has no metadata.json"),
    "metadata that is no JSON": (lambda p: (p / "metadata.json").write_text("{"), "is damaged"),
    "metadata that is a list": (lambda p: (p / "metadata.json").write_text("[]"), "is damaged"),
    "metadata without a field": (
        lambda p: (p / "metadata.json").write_text('{"format_version": 1}'),
        "is damaged",
    ),
    "an unknown codec": (
        lambda p: edit_metadata(p, codecs=[{"key": "int9"}] * LAYERS),
        "is damaged",
    ),
    "an unknown version": (lambda p: edit_metadata(p, format_version=3), "format_version 3"),
    "no arrays": (lambda p: remove(p / "arrays"), "has no arrays/ directory"),
    "an empty arrays directory": (
        lambda p: empty(p / "arrays"),
        "not a complete Orbax checkpoint",
    ),
    "no commit marker": (
        lambda p: remove(p / "arrays/commit_success.txt", p / "arrays/_CHECKPOINT_METADATA"),
        "not a complete Orbax checkpoint",
    ),
    "a truncated array file": (truncate_largest_file, "cannot be read"),
    "an extra key": (
        lambda p: rewrite_arrays(p, arrays(extra=np.zeros(2, np.float32))),
        r"holds \['extra', 'mu', 'x_k', 'x_v'\]",
    ),
    "a missing key": (
        lambda p: rewrite_arrays(p, {k: v for k, v in arrays().items() if k != "mu"}),
        r"holds \['x_k', 'x_v'\]",
    ),
    "an older layout": (
        lambda p: rewrite_arrays(p, arrays(x_k={str(i): x for i, x in enumerate(arrays()["x_k"])})),
        "x_k is a tree",
    ),
    "half precision, which Orbax would cast silently": (
        lambda p: rewrite_arrays(p, arrays(x_v=arrays()["x_v"].astype(np.float16))),
        "x_v is float16, must be float32",
    ),
    "another shape": (
        lambda p: rewrite_arrays(p, arrays(mu=arrays()["mu"][:, :1])),
        r"mu has shape \(3, 1, 64\), must be \(3, 2, 64\)",
    ),
    "a singular transform": (
        lambda p: rewrite_arrays(p, arrays(x_k=np.zeros_like(arrays()["x_k"]))),
        "condition number",
    ),
    "NaN": (
        lambda p: rewrite_arrays(p, arrays(x_v=np.full_like(arrays()["x_v"], np.nan))),
        "not finite",
    ),
}


@pytest.mark.parametrize("case", BREAK)
def test_a_broken_checkpoint_is_one_line_naming_path_and_fault(saved: Path, case: str) -> None:
    damage, message = BREAK[case]
    damage(saved)
    with pytest.raises(CheckpointError, match=message) as caught:
        load(saved, model_config=CONFIG)
    assert str(caught.value).startswith(f"{saved}: ")
    assert "\n" not in str(caught.value)


def test_a_place_that_may_not_be_written_or_read_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o000)
    user = os.geteuid()
    try:
        if user == 0:  # root writes anywhere
            os.seteuid(65534)
        with pytest.raises(CheckpointError, match="r: is not writable"):
            save(tmp_path / "r", make_rotation(), make_metadata())
        with pytest.raises(CheckpointError, match=r"r: cannot be read \(Permission denied\)"):
            load(tmp_path / "r")
    finally:
        os.seteuid(user)
        tmp_path.chmod(0o755)


def test_a_parent_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="file/r: "):
        save(tmp_path / "file" / "r", make_rotation(), make_metadata())


# ----------------------------------------------------------------------------- device count (U67)


def test_a_checkpoint_of_eight_devices_loads_on_one_without_a_warning(tmp_path: Path) -> None:
    script = """
import dataclasses, pathlib, sys
import jax
from tests.unit.test_checkpoint import make_metadata, make_rotation
from oscar_jax.checkpoint import save
assert len(jax.devices()) == 8
mesh = jax.make_mesh((8,), ("d",))
rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "d"))
rotation = make_rotation()
sharded = tuple(jax.device_put(x, rows) for x in rotation.x_k)
assert len(sharded[0].addressable_shards) == 8
save(pathlib.Path(sys.argv[1]), dataclasses.replace(rotation, x_k=sharded), make_metadata())
"""
    env = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]),
    }
    subprocess.run([sys.executable, "-c", script, tmp_path / "r"], env=env, check=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        rotation, _ = load(tmp_path / "r", model_config=CONFIG)
    np.testing.assert_array_equal(rotation.x_k[2], make_rotation().x_k[2])
    assert len(rotation.x_k[0].devices()) == 1


def test_loading_imports_neither_torch_nor_a_pickle_reader(saved: Path) -> None:
    source = Path(checkpoint.__file__).read_text()
    assert "allow_pickle" not in source and "import pickle" not in source
    script = f"""
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from oscar_jax.checkpoint import load
load(Path({str(saved)!r}))
print([name for name in ("torch", "calib.rotationzoo", "dill", "joblib") if name in sys.modules])
"""
    output = subprocess.run(
        [sys.executable, "-c", script],
        cwd=Path(__file__).parents[2],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert output.splitlines()[-1] == "[]"
