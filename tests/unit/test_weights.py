"""Checkpoints: whole ones load to the last tensor, others are refused by file and tensor."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from oscar_jax.config import CONFIGS, ModelConfig, model_entry
from oscar_jax.models import load
from oscar_jax.models.tokenizer import byte_level
from oscar_jax.models.weights import (
    SafetensorsDirectory,
    build_decoder,
    dummy_decoder,
    expected_shapes,
    weights_hash,
)

HF = Path(__file__).parents[1] / "golden" / "hf"
Q0 = "model.layers.0.self_attn.q_proj.weight"
UP0 = "model.layers.0.mlp.up_proj.weight"


def copy_of(kind: str, place: Path) -> Path:
    """A golden checkpoint with a tokenizer beside it, as a Hugging Face directory is."""
    directory = place / kind
    shutil.copytree(HF / kind, directory)
    byte_level(272).save(directory / "tokenizer.json")
    return directory


def change_config(directory: Path, **changes: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rewrite(directory: Path, **changes: np.ndarray | None) -> None:
    """Replaces, adds or (None) removes tensors of model.safetensors."""
    tensors = {**load_file(directory / "model.safetensors"), **changes}
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, directory / "model.safetensors")


def bf16(*shape: int) -> np.ndarray:
    return np.ones(shape, ml_dtypes.bfloat16)


def test_a_directory_loads_every_tensor_as_it_is_stored(tmp_path: Path) -> None:
    directory = copy_of("qwen3_tied", tmp_path)
    loaded = load(directory)
    stored = load_file(directory / "model.safetensors")
    attention = loaded.decoder.layers[1].self_attn
    assert attention.q_norm is not None
    pairs: list[tuple[Any, str]] = [
        (loaded.decoder.embed_tokens, "model.embed_tokens.weight"),
        (loaded.decoder.norm.weight, "model.norm.weight"),
        (attention.qkv_proj.rows("q_proj"), "model.layers.1.self_attn.q_proj.weight"),
        (attention.qkv_proj.rows("k_proj"), "model.layers.1.self_attn.k_proj.weight"),
        (attention.qkv_proj.rows("v_proj"), "model.layers.1.self_attn.v_proj.weight"),
        (attention.q_norm.weight, "model.layers.1.self_attn.q_norm.weight"),
        (loaded.decoder.layers[0].mlp.down_proj.weight, "model.layers.0.mlp.down_proj.weight"),
        (loaded.decoder.layers[0].mlp.gate_up_proj.rows("up_proj"), UP0),
    ]
    for ours, name in pairs:
        assert ours.dtype == jnp.bfloat16
        np.testing.assert_array_equal(np.asarray(ours[...]), stored[name])
    assert loaded.config.head_dim == 32
    assert loaded.tokenizer.encode("Hi") == [ord("H") - 33, ord("i") - 33]


def test_shards_with_an_index_hold_the_same_model_as_one_file(tmp_path: Path) -> None:
    sharded = copy_of("qwen3_untied", tmp_path)
    single = tmp_path / "single"
    shutil.copytree(sharded, single)
    tensors = {}
    for shard in sorted(single.glob("*.safetensors")):
        tensors.update(load_file(shard))
        shard.unlink()
    (single / "model.safetensors.index.json").unlink()
    save_file(tensors, single / "model.safetensors")
    both = [jax.tree.leaves(nnx.split(load(path).decoder)[1]) for path in (sharded, single)]
    assert len(both[0]) == 2 * 8 + 3
    for left, right in zip(*both, strict=True):
        np.testing.assert_array_equal(np.asarray(left), np.asarray(right))


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [jnp.float32, jnp.bfloat16])
def test_16_and_32_bit_files_load_in_either_dtype(
    tmp_path: Path, stored: type, wanted: type
) -> None:
    directory = copy_of("llama", tmp_path)
    before = load_file(directory / "model.safetensors")
    rewrite(directory, **{name: value.astype(stored) for name, value in before.items()})
    weight = load(directory, dtype=wanted).decoder.layers[0].self_attn.qkv_proj.rows("q_proj")
    assert weight.dtype == wanted
    np.testing.assert_array_equal(
        np.asarray(weight, np.float32), before[Q0].astype(stored).astype(np.float32)
    )


def test_missing_tensors_are_named_with_their_file(tmp_path: Path) -> None:
    directory = copy_of("llama", tmp_path)
    rewrite(directory, **{Q0: None})
    with pytest.raises(ValueError) as refusal:
        load(directory)
    assert str(directory / "model.safetensors") in str(refusal.value)
    assert f"tensor '{Q0}' of shape (64, 64) is missing" in str(refusal.value)


def test_a_missing_layer_and_a_layer_too_many_are_named(tmp_path: Path) -> None:
    directory = copy_of("llama", tmp_path)
    change_config(directory, num_hidden_layers=3)
    with pytest.raises(ValueError, match=r"'model\.layers\.2\.input_layernorm\.weight'.* missing"):
        load(directory)
    change_config(directory, num_hidden_layers=1)
    with pytest.raises(
        ValueError, match=r"model\.safetensors: tensor 'model\.layers\.1\..* 1-layer"
    ):
        load(directory)


def test_a_tensor_without_a_place_is_named(tmp_path: Path) -> None:
    directory = copy_of("llama", tmp_path)
    rewrite(directory, **{"model.layers.0.self_attn.q_proj.bias": bf16(64)})
    with pytest.raises(ValueError, match=r"q_proj\.bias' has no place in a 2-layer llama model"):
        load(directory)


def test_a_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    directory = copy_of("qwen3_tied", tmp_path)
    change_config(directory, head_dim=16)
    with pytest.raises(ValueError) as refusal:
        load(directory)
    assert f"tensor '{Q0}' has shape (128, 64), the config says (64, 64)" in str(refusal.value)
    assert "model.safetensors" in str(refusal.value)


def test_rope_buffers_of_old_files_are_ignored(tmp_path: Path) -> None:
    directory = copy_of("llama", tmp_path)
    rewrite(directory, **{"model.layers.0.self_attn.rotary_emb.inv_freq": bf16(8)})
    assert load(directory).weights_hash == load(copy_of("llama", tmp_path / "b")).weights_hash


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("present", [True, False])
def test_the_four_combinations_of_tied_and_present_heads(
    tmp_path: Path, tied: bool, present: bool
) -> None:
    directory = copy_of("llama", tmp_path)
    change_config(directory, tie_word_embeddings=tied)
    if present:
        rewrite(directory, **{"lm_head.weight": 3 * bf16(272, 64)})
    if not tied and not present:
        with pytest.raises(ValueError, match=r"tensor 'lm_head\.weight' .* is missing"):
            load(directory)
        return
    decoder = load(directory).decoder
    head = decoder.embed_tokens[...] if tied else 3 * bf16(272, 64)
    h = jnp.linspace(-1, 1, 64, dtype=jnp.bfloat16)
    expected = np.asarray(h, np.float32) @ np.asarray(head, np.float32).T
    np.testing.assert_allclose(
        np.asarray(decoder.logits(h[None]))[0], expected, rtol=1e-4, atol=1e-4
    )
    assert (decoder.lm_head is None) == tied


@pytest.mark.parametrize("keep", [4, 60, -10])
def test_a_truncated_file_is_named_with_the_first_tensor_lost(tmp_path: Path, keep: int) -> None:
    directory = copy_of("llama", tmp_path)
    path = directory / "model.safetensors"
    data = path.read_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    header.pop("__metadata__")
    last = max(header, key=lambda name: header[name]["data_offsets"][1])
    path.write_bytes(data[:keep])
    with pytest.raises(ValueError) as refusal:
        load(directory)
    assert f"{path}: not a whole safetensors file" in str(refusal.value)
    if keep < 0:
        assert f"tensor {last!r} is cut off" in str(refusal.value)


def test_a_missing_shard_an_unlisted_tensor_and_a_path_in_the_index_are_named(
    tmp_path: Path,
) -> None:
    directory = copy_of("qwen3_untied", tmp_path)
    index = directory / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    last = "model-00002-of-00002.safetensors"
    (directory / last).rename(tmp_path / last)
    with pytest.raises(ValueError, match=rf"{last}: shard is missing \(tensor "):
        load(directory)
    (tmp_path / last).rename(directory / last)

    listed["weight_map"]["model.extra"] = last
    index.write_text(json.dumps(listed))
    with pytest.raises(ValueError, match=rf"{last}: tensor 'model\.extra' of the index is missing"):
        load(directory)

    listed["weight_map"]["model.extra"] = "../secret.safetensors"
    index.write_text(json.dumps(listed))
    with pytest.raises(ValueError, match="must be a plain file name"):
        load(directory)

    index.write_text("{}")
    with pytest.raises(ValueError, match=r"index\.json: no JSON object with a weight_map"):
        load(directory)


def test_a_tensor_in_two_shards_is_named(tmp_path: Path) -> None:
    directory = copy_of("qwen3_untied", tmp_path)
    first, second = sorted(directory.glob("*.safetensors"))
    save_file({**load_file(second), **load_file(first)}, second)
    with pytest.raises(ValueError, match="is also in model-00001-of-00002"):
        load(directory)


def test_pickled_weights_are_never_read(tmp_path: Path) -> None:
    directory = copy_of("llama", tmp_path)
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"no \*\.safetensors file; pickled"):
        load(directory)


def test_integer_weights_are_refused_by_name(tmp_path: Path) -> None:
    directory = copy_of("llama", tmp_path)
    rewrite(directory, **{Q0: np.ones((64, 64), np.int8)})
    with pytest.raises(NotImplementedError, match=rf"tensor '{Q0}' is I8"):
        load(directory)


def test_code_beside_the_weights_is_not_run(tmp_path: Path) -> None:
    directory = copy_of("qwen3_tied", tmp_path)
    mark = tmp_path / "executed"
    program = f"open({str(mark)!r}, 'w').write('run')\n"
    for name in ("modeling_evil.py", "configuration_evil.py", "__init__.py"):
        (directory / name).write_text(program)
    change_config(
        directory,
        auto_map={"AutoConfig": "configuration_evil.C", "AutoModelForCausalLM": "modeling_evil.M"},
    )
    load(directory)
    assert not mark.exists()


def test_a_directory_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file or directory"):
        load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"neither config\.json nor a \.gguf file"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ValueError, match=r"config\.json: must hold a JSON object"):
        load(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    with pytest.raises(NotImplementedError, match="model_type='mamba'"):
        load(tmp_path)
    other = tmp_path / "model.bin"
    other.write_bytes(b"")
    with pytest.raises(ValueError, match=r"must be a directory or a \.gguf file"):
        load(other)


def test_other_dtypes_and_formats_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="dtype=float16: must be bfloat16 or float32"):
        load(tmp_path, dtype=jnp.float16)
    with pytest.raises(ValueError, match="load_format='random'"):
        load(tmp_path, load_format="random")


def test_only_the_dummy_format_invents_weights_and_it_does_so_alike_each_time() -> None:
    config = ModelConfig("qwen2", 300, 32, 48, 2, 4, 2, 8, 1e-6, 1e4, 64, True, qkv_bias=True)
    first, second = dummy_decoder(config, jnp.float32), dummy_decoder(config, jnp.float32)
    assert weights_hash(first) == weights_hash(second)
    np.testing.assert_array_equal(np.asarray(first.norm.weight[...]), np.ones(32, np.float32))
    gate = np.asarray(first.layers[1].mlp.gate_up_proj.rows("gate_proj"))
    assert gate.std() == pytest.approx(0.02, rel=0.05)
    assert (gate != np.asarray(first.layers[0].mlp.gate_up_proj.rows("gate_proj"))).mean() > 0.99


def test_a_dummy_model_needs_a_yaml_file_or_a_config_and_no_weights(tmp_path: Path) -> None:
    entry = (CONFIGS / "qwen3-0.6b.yaml").read_text()
    small = entry.replace("vocab_size: 151936", "vocab_size: 512").replace(
        "num_layers: 28", "num_layers: 1"
    )
    path = tmp_path / "small.yaml"
    path.write_text(small)
    loaded = load(path, load_format="dummy")
    assert (loaded.config.num_layers, loaded.config.head_dim) == (1, 128)
    ids = loaded.tokenizer.chat([{"role": "user", "content": "é"}])
    text = loaded.tokenizer.decode(ids, skip_special_tokens=False)
    assert text == "<|im_start|>user\né<|im_end|>\n<|im_start|>assistant\n"

    directory = copy_of("llama", tmp_path)
    (directory / "model.safetensors").unlink()
    assert load(directory, load_format="dummy").config.num_layers == 2


def test_the_hash_is_of_the_first_and_last_attention_weights_in_any_dtype(tmp_path: Path) -> None:
    directory = copy_of("llama", tmp_path)
    before = load(directory).weights_hash
    assert load(directory, dtype=jnp.float32).weights_hash == before
    rewrite(directory, **{"model.layers.0.mlp.up_proj.weight": bf16(96, 64)})
    assert load(directory).weights_hash == before
    rewrite(directory, **{"model.layers.1.self_attn.o_proj.weight": bf16(64, 64)})
    assert load(directory).weights_hash != before


def test_every_tensor_of_qwen3_8b_is_expected_once_and_in_layer_order() -> None:
    shapes = expected_shapes(model_entry("qwen3-8b").architecture)
    assert len(shapes) == 36 * 11 + 3
    assert shapes["model.layers.35.self_attn.k_proj.weight"] == (1024, 4096)
    layers = [int(name.split(".")[2]) for name in shapes if name.startswith("model.layers.")]
    assert layers == sorted(layers)


def test_tensors_are_read_one_at_a_time() -> None:
    held: list[str] = []

    class Counting(SafetensorsDirectory):
        def read(self, name: str) -> np.ndarray:
            held.append(name)
            return super().read(name)

    config = ModelConfig.from_hf(json.loads((HF / "llama" / "config.json").read_text()))
    build_decoder(config, Counting(HF / "llama"), jnp.float32)
    assert held == list(expected_shapes(config))
