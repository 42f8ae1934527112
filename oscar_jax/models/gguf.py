"""Reads a GGUF file: config, tensors under their Hugging Face names, tokenizer fields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from oscar_jax.model_config import LinearScaling, ModelConfig, RopeScaling

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_GEMMA_LAYER = {
    **_IN_LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_ARCHITECTURES = {"gemma3": "gemma3_text"}  # where the file's name is not Hugging Face's
_GEMMA3_PATTERN = 6  # files state the window and leave this out, as llama.cpp does
_GEMMA3_27B_LAYERS = 62  # the one size whose logits are not scaled by head_dim
_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")


class _Reader(gguf.GGUFReader):
    """The package's reader, which on a truncated file fails without saying where.

    It also takes a vocabulary's arrays element by element: 12 s for 262,144 tokens, 1 s here.
    """

    def _get_field_parts(
        self, orig_offs: int, raw_type: Any
    ) -> tuple[int, list[Any], list[int], list[gguf.GGUFValueType]]:
        array = gguf.GGUFValueType.ARRAY
        if raw_type != array or self.byte_order == "S":
            return super()._get_field_parts(orig_offs, raw_type)
        head = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
        kind, count, at = gguf.GGUFValueType(head[0][0]), int(head[1][0]), orig_offs + 12
        number = self.gguf_scalar_to_np.get(kind)
        parts: list[Any] = []
        if kind == gguf.GGUFValueType.STRING:
            for _ in range(count):
                size = int.from_bytes(self.data[at : at + 8].data, "little")
                parts.append(self.data[at + 8 : at + 8 + size])
                at += 8 + size
        elif number is not None:
            values = self._get(at, number, count)
            at += values.nbytes
            parts = list(values.reshape(-1, 1))
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        if at > len(self.data):
            raise ValueError("a metadata field is cut off")
        return at - orig_offs, head + parts, list(range(2, 2 + count)), [array, kind]

    def _build_tensors(self, start_offs: int, fields: list[Any]) -> None:
        for field in fields:
            _, name, _, dims, kind, offset = field.parts
            block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind[0])]
            end = start_offs + int(offset[0]) + int(np.prod(dims, dtype=np.uint64)) // block * size
            if end > len(self.data):
                tensor = bytes(name).decode("utf-8", "replace")
                raise ValueError(
                    f"tensor {tensor!r} is cut off: it ends at byte {end}, the file has "
                    f"{len(self.data)}"
                )
        super()._build_tensors(start_offs, fields)


class GGUFFile:
    """One GGUF file of a supported architecture.

    Tensors are dequantised to float32 when read. Files of the llama architecture store the q and k
    rows of each head as interleaved RoPE pairs; reading puts them back as halves. Files of the
    gemma3 architecture store norms as 1 + w; reading gives w.

    Raises:
        ValueError: not a GGUF file, truncated, or without a needed field.
        NotImplementedError: an architecture or RoPE setting that is not supported.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._reader = _Reader(str(path))
        except (ValueError, IndexError, KeyError, OverflowError) as error:
            raise ValueError(f"{path}: not a whole GGUF file: {error}") from error
        kind = self._needed("general.architecture")
        in_layer = _IN_GEMMA_LAYER if kind == "gemma3" else _IN_LAYER
        self._tensors = {self._hf_name(t.name, in_layer): t for t in self._reader.tensors}
        self.config = self._read_config()

    def field(self, key: str, default: Any = None) -> Any:
        """A metadata field as plain Python, ``default`` where it is absent."""
        found = self._reader.fields.get(key)
        return default if found is None else found.contents()

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {n: tuple(int(d) for d in reversed(t.shape)) for n, t in self._tensors.items()}

    def read(self, name: str) -> np.ndarray:
        tensor = self._tensors[name]
        try:
            values = gguf.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise NotImplementedError(
                f"{self.path}: tensor {tensor.name!r} is {tensor.tensor_type.name}, "
                "which cannot be dequantised"
            ) from error
        if self.config.architecture == "llama":
            for part, heads in (("q", self.config.num_heads), ("k", self.config.num_kv_heads)):
                if name.endswith(f"self_attn.{part}_proj.weight"):
                    values = unpermute(values, heads)
        if self.config.is_gemma and name.endswith("norm.weight"):
            values = values - 1
        return values

    def where(self, name: str | None) -> str:
        return str(self.path)

    def _hf_name(self, name: str, in_layer: Mapping[str, str]) -> str:
        if name in _TOP:
            return _TOP[name]
        if name == "rope_freqs.weight":
            raise NotImplementedError(
                f"{self.path}: tensor 'rope_freqs.weight' (Llama 3 RoPE scaling as a table) is not "
                "supported: load the model's Hugging Face directory instead"
            )
        found = _LAYER.fullmatch(name)
        if found is None or found[2] not in in_layer:
            return name  # has no place in the model: reported as left over
        return f"model.layers.{found[1]}.{in_layer[found[2]]}.{found[3]}"

    def _read_config(self) -> ModelConfig:
        architecture = self._needed("general.architecture")

        def number(key: str) -> Any:
            return self._needed(f"{architecture}.{key}")

        heads, hidden = number("attention.head_count"), number("embedding_length")
        head_dim = self.field(f"{architecture}.attention.key_length", hidden // heads)
        partial = self.field(f"{architecture}.rope.dimension_count", head_dim)
        if partial != head_dim:
            raise NotImplementedError(
                f"{self.path}: rope.dimension_count={partial}: RoPE over a part of "
                f"head_dim={head_dim} is not supported"
            )
        windows = self._gemma3_windows() if architecture == "gemma3" else {}
        if self.field(f"{architecture}.attention.sliding_window") and not windows:
            raise NotImplementedError(
                f"{self.path}: sliding-window layers are only supported in gemma3 files"
            )
        return ModelConfig(
            architecture=_ARCHITECTURES.get(architecture, architecture),
            vocab_size=len(self._needed("tokenizer.ggml.tokens")),
            hidden_size=hidden,
            intermediate_size=number("feed_forward_length"),
            num_layers=number("block_count"),
            num_heads=heads,
            num_kv_heads=self.field(f"{architecture}.attention.head_count_kv", heads),
            head_dim=head_dim,
            rms_norm_eps=_rounded(number("attention.layer_norm_rms_epsilon")),
            rope_theta=_rounded(self.field(f"{architecture}.rope.freq_base", 10000.0)),
            max_position_embeddings=number("context_length"),
            tie_word_embeddings="lm_head.weight" not in self._tensors,
            qk_norm=architecture in ("qwen3", "gemma3"),
            qkv_bias=architecture == "qwen2",
            rope_scaling=self._rope_scaling(architecture),
            **windows,
        )

    def _gemma3_windows(self) -> dict[str, Any]:
        """The window layers' settings; the defaults are llama.cpp's, which writes such files."""
        layers = self._needed("gemma3.block_count")
        scalar = None
        if layers == _GEMMA3_27B_LAYERS:
            scalar = self._needed("gemma3.embedding_length")
            scalar //= self._needed("gemma3.attention.head_count")
        for key in ("attn_logit_softcapping", "final_logit_softcapping"):
            if self.field(f"gemma3.{key}"):
                raise NotImplementedError(f"{self.path}: {key} is not supported")
        theta = self.field("gemma3.rope.freq_base_swa", 10000.0)
        return dict(
            sliding_window=self._needed("gemma3.attention.sliding_window"),
            global_every=self.field("gemma3.attention.sliding_window_pattern", _GEMMA3_PATTERN),
            rope_theta_local=_rounded(theta),
            query_scalar=scalar,
        )

    def _rope_scaling(self, architecture: str) -> RopeScaling | LinearScaling | None:
        prefix = f"{architecture}.rope.scaling"
        kind = self.field(f"{prefix}.type", "none")
        if kind == "none":
            return None
        if kind == "linear" and architecture == "gemma3":
            return LinearScaling(_rounded(self._needed(f"{prefix}.factor")))
        if kind != "yarn":
            raise NotImplementedError(
                f"{self.path}: rope.scaling.type={kind!r} is not supported: 'yarn' is"
            )
        return RopeScaling(
            factor=_rounded(self._needed(f"{prefix}.factor")),
            original_max_position_embeddings=self._needed(f"{prefix}.original_context_length"),
        )

    def _needed(self, key: str) -> Any:
        value = self.field(key)
        if value is None:
            raise ValueError(f"{self.path}: metadata field {key!r} is missing")
        return value


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows (pair, half) of each head, [heads D, in], put back as (half, pair)."""
    out, into = rows.shape
    pairs = rows.reshape(heads, out // heads // 2, 2, into)  # [heads, D/2, 2, in]
    return pairs.swapaxes(1, 2).reshape(out, into)


def _rounded(value: float) -> float:
    """The decimal number that a float32 field was written from: 1e-5, not 9.99999975e-06."""
    return float(f"{value:.7g}")
