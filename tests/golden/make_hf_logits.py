"""Writes small random checkpoints and their logits by Hugging Face transformers, float32.

One per kind under tests/golden/hf/KIND (config.json, safetensors) with KIND.npz (tokens, logits),
rope.json (frequencies of published RoPE settings), smollm2_logits.npz and gemma3_logits.npz (the
real GGUF files). In an environment of its own, Python 3.11:

    pip install torch==2.13.0 transformers==5.24.0 safetensors gguf==0.19.0 accelerate
    python tests/golden/make_hf_logits.py SMOLLM2.gguf GEMMA3.gguf

with what ``python -m oscar_jax.fetch`` prints of smollm2-135m and gemma3-270m; KIND alone writes
that kind.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch  # only here, never in the project
import transformers  # type: ignore[import-not-found]
from transformers.modeling_rope_utils import (  # type: ignore[import-not-found]
    ROPE_INIT_FUNCTIONS,
)

HERE = Path(__file__).parent
SIZES = dict(
    vocab_size=272,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_tied": (
        "Qwen3",
        dict(head_dim=32, tie_word_embeddings=True, rope_parameters={"rope_theta": 1e6}),
    ),
    "qwen3_untied": (
        "Qwen3",
        dict(head_dim=16, tie_word_embeddings=False, rope_parameters={"rope_theta": 1e6}),
    ),
    "llama": (
        "Llama",
        dict(rms_norm_eps=1e-5, tie_word_embeddings=True, rope_parameters={"rope_theta": 1e5}),
    ),
    "qwen2_bias": (
        "Qwen2",
        dict(num_key_value_heads=1, tie_word_embeddings=True, rope_parameters={"rope_theta": 1e6}),
    ),
    "yarn": ("Qwen3", dict(head_dim=32, tie_word_embeddings=True, rope_parameters=YARN)),
    # windows shorter than the text, two thetas, the linear rule and 27B's other logit scale
    "gemma3": (
        "Gemma3Text",
        dict(
            num_hidden_layers=4,
            num_key_value_heads=1,
            head_dim=32,
            query_pre_attn_scalar=20,
            sliding_window=24,
            layer_types=["sliding_attention", "full_attention"] * 2,
            rope_parameters={
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        ),
    ),
}
ROPE: dict[str, dict[str, Any]] = {
    "qwen3 default": dict(rope_type="default", rope_theta=1e6, head_dim=128),
    "qwen3 yarn": dict(
        rope_type="yarn",
        rope_theta=1e6,
        head_dim=128,
        factor=4.0,
        original_max_position_embeddings=32768,
    ),
    "yarn, every setting": dict(
        rope_type="yarn",
        rope_theta=5e5,
        head_dim=64,
        factor=8.0,
        original_max_position_embeddings=4096,
        beta_fast=24.0,
        beta_slow=2.0,
        truncate=False,
        attention_factor=1.3,
    ),
    "yarn, mscale": dict(
        rope_type="yarn",
        rope_theta=1e4,
        head_dim=64,
        factor=40.0,
        original_max_position_embeddings=4096,
        mscale=1.0,
        mscale_all_dim=0.707,
    ),
    "llama 3.2": dict(
        rope_type="llama3",
        rope_theta=5e5,
        head_dim=64,
        factor=32.0,
        original_max_position_embeddings=8192,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    ),
}


def randomise(model: Any, generator: Any, norms: float) -> None:
    """Large enough that attention is far from uniform and biases and norms matter.

    Args:
        norms: mean of the norms' weights.
    """
    for name, weight in model.named_parameters():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("norm.weight"):
            value = norms + 0.3 * noise
        elif weight.ndim == 1:
            value = 0.5 * noise
        else:
            value = noise * 1.5 / math.sqrt(weight.shape[1])
        weight.data = value.to(torch.bfloat16)  # exact in float32 too, at half the file


def write_kind(kind: str, family: str, settings: dict[str, Any]) -> None:
    seeds = ["llama", "qwen2_bias", "qwen3_tied", "qwen3_untied", "yarn", "gemma3"]
    generator = torch.Generator().manual_seed(seeds.index(kind))
    settings, gemma = {**SIZES, **settings}, family == "Gemma3Text"
    if not gemma:
        settings["rope_parameters"] = {"rope_type": "default", **settings["rope_parameters"]}
    config = getattr(transformers, f"{family}Config")(**settings)
    model = getattr(transformers, f"{family.removesuffix('Text')}ForCausalLM")(config)
    randomise(model, generator, norms=0 if gemma else 1)  # Gemma multiplies by 1 + w
    model.tie_weights()
    place = HERE / "hf" / kind
    shutil.rmtree(place, ignore_errors=True)
    # one kind in shards with an index, as large models come
    model.save_pretrained(place, max_shard_size="100KB" if kind == "qwen3_untied" else "1GB")
    (place / "generation_config.json").unlink(missing_ok=True)
    if kind == "yarn":  # written the way configs were before transformers 5
        written = json.loads((place / "config.json").read_text())
        rope = written.pop("rope_parameters")
        written["rope_theta"] = rope.pop("rope_theta")
        written["rope_scaling"] = rope
        (place / "config.json").write_text(json.dumps(written, indent=2) + "\n")
    tokens = torch.randint(0, SIZES["vocab_size"], (2, 80), generator=generator)
    with torch.no_grad():
        logits = model.float().eval()(tokens).logits.numpy()
    np.savez_compressed(
        HERE / f"hf/{kind}.npz", tokens=tokens.numpy().astype(np.int32), logits=logits
    )


def write_rope() -> None:
    golden = {}
    for name, settings in ROPE.items():
        rope = dict(settings)
        head_dim = rope.pop("head_dim")
        config = transformers.LlamaConfig(
            **{**SIZES, "head_dim": head_dim, "max_position_embeddings": 131072},
            rope_parameters=rope,
        )
        if rope["rope_type"] == "default":
            rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
            frequencies, factor = rotary.inv_freq, rotary.attention_scaling
        else:
            frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, "cpu")
        golden[name] = {
            "head_dim": head_dim,
            "rope_parameters": rope,
            "frequencies": [float(f"{value:.9g}") for value in frequencies.tolist()],
            "factor": factor,
        }
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in golden.items())
    (HERE / "rope.json").write_text(f"{{\n{rows}\n}}\n")


def write_real(name: str, path: Path, tokens: list[int]) -> None:
    """Top five logits at every position, by the GGUF loader of transformers."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    with torch.no_grad():
        top = torch.topk(model.eval()(torch.tensor([tokens])).logits[0], 5)
    np.savez_compressed(
        HERE / f"{name}_logits.npz",
        tokens=np.asarray([tokens], np.int32),
        ids=top.indices.numpy().astype(np.int32),
        logits=top.values.numpy(),
    )


def texts_of(name: str) -> list[list[int]]:
    rows = json.loads((HERE / f"{name}_tokens.json").read_text())["texts"]
    return [row["ids"] for row in rows]


def main() -> None:
    if sys.argv[1] in KINDS:
        write_kind(sys.argv[1], *KINDS[sys.argv[1]])
        return
    for kind, (family, settings) in KINDS.items():
        write_kind(kind, family, settings)
    write_rope()
    smollm2, gemma3 = map(Path, sys.argv[1:])
    write_real("smollm2", smollm2, texts_of("smollm2")[-1])  # a chat
    # <bos> and all texts in a row, twice: twice as long as the window
    write_real("gemma3", gemma3, [2, *itertools.chain(*texts_of("gemma3") * 2)])


main()
