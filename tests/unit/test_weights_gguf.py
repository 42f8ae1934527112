"""GGUF files: tensors under their other names, q and k rows put back, faults named."""

from __future__ import annotations

from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import pytest

from oscar_jax.models import load
from oscar_jax.models.gguf import GGUFFile, unpermute
from oscar_jax.models.weights import build_decoder


def test_unpermute_undoes_the_interleaving_of_rope_pairs() -> None:
    rows = np.arange(8, dtype=np.float32)[:, None]  # two heads of four channels: pairs (0,1), (2,3)
    assert unpermute(rows, 2)[:, 0].tolist() == [0, 2, 1, 3, 4, 6, 5, 7]


def write_gguf(
    path: Path, *, drop: str | None = None, window: int | None = None, pre: str = "gpt-2"
) -> None:
    """A one-layer Llama with two heads of four channels and three tokens."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_embedding_length(8)
    writer.add_feed_forward_length(16)
    writer.add_context_length(64)
    writer.add_block_count(1)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    if window is not None:
        writer.add_sliding_window(window)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(["a", "b", "ab"])
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd.weight": (3, 8),
        "output_norm.weight": (8,),
        "blk.0.attn_norm.weight": (8,),
        "blk.0.ffn_norm.weight": (8,),
        "blk.0.attn_q.weight": (8, 8),
        "blk.0.attn_k.weight": (8, 8),
        "blk.0.attn_v.weight": (8, 8),
        "blk.0.attn_output.weight": (8, 8),
        "blk.0.ffn_gate.weight": (16, 8),
        "blk.0.ffn_up.weight": (16, 8),
        "blk.0.ffn_down.weight": (8, 16),
    }
    for name, shape in shapes.items():
        if name != drop:
            writer.add_tensor(name, rng.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_truncated_gguf_is_named_with_the_first_tensor_lost(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    write_gguf(path)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(
        ValueError, match=r"cut\.gguf: .*tensor 'blk\.0\.ffn_down\.weight' is cut off"
    ):
        load(path)
    for content in (b"GGUF", b"not a model at all, only text that is long enough"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"cut\.gguf: not a whole GGUF file"):
            load(path)


def test_a_gguf_tensor_that_is_missing_or_has_no_place_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, drop="blk.0.ffn_up.weight")
    file = GGUFFile(path)
    with pytest.raises(ValueError) as refusal:
        build_decoder(file.config, file, jnp.float32)
    assert f"{path}: tensor 'model.layers.0.mlp.up_proj.weight'" in str(refusal.value)
    write_gguf(path)
    file = GGUFFile(path)
    assert (file.config.head_dim, file.config.vocab_size) == (4, 3)
    decoder = build_decoder(file.config, file, jnp.float32)
    q = np.asarray(decoder.layers[0].self_attn.qkv_proj.rows("q_proj"))
    stored = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.attn_q.weight")
    np.testing.assert_array_equal(q[:4], stored.data[[0, 2, 1, 3]])


def test_gguf_settings_that_are_not_supported_are_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, window=1024)
    with pytest.raises(
        NotImplementedError, match="sliding-window layers are only supported in gemma3"
    ):
        GGUFFile(path)
    write_gguf(path, pre="chameleon")
    with pytest.raises(NotImplementedError, match=r"tokenizer\.ggml\.pre='chameleon'"):
        load(path)
