"""``load``: from a path to a model that can run."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp

from oscar_jax.config import ModelConfig, read_entry
from oscar_jax.models import gguf_tokenizer, tokenizer, weights
from oscar_jax.models.gguf import GGUFFile
from oscar_jax.models.tokenizer import Tokenizer
from oscar_jax.models.transformer import Decoder

LoadFormat = Literal["auto", "dummy"]


@dataclasses.dataclass(frozen=True)
class Loaded:
    """A model in memory: its numbers, its weights, its tokenizer and what identifies them.

    Args:
        weights_hash: see ``weights.weights_hash``.
        random_weights: they were made up (``load_format="dummy"``): of use for time and memory.
    """

    config: ModelConfig
    decoder: Decoder
    tokenizer: Tokenizer
    weights_hash: str
    random_weights: bool = False


def load(path: Path, *, load_format: str = "auto", dtype: Any = jnp.bfloat16) -> Loaded:
    """Reads a model.

    Args:
        path: a Hugging Face directory (config.json, safetensors, tokenizer.json), a ``.gguf``
            file or a directory that holds exactly one; with ``load_format="dummy"`` also a
            model's YAML file, whose architecture numbers are enough.
        load_format: "auto" reads the weights and never makes any up; "dummy" makes seeded random
            ones, for speed tests without a download.
        dtype: of weights and computation, bfloat16 or float32.

    Raises:
        FileNotFoundError: the path, or a file that must be in it, does not exist.
        ValueError: a broken file or tensor, named; an unknown ``load_format`` or ``dtype``.
        NotImplementedError: a model that is not supported, with the setting that says so.
    """
    if load_format not in ("auto", "dummy"):
        raise ValueError(f"load_format={load_format!r}: must be 'auto' or 'dummy'")
    if jnp.dtype(dtype) not in (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)):
        raise ValueError(f"dtype={jnp.dtype(dtype).name}: must be bfloat16 or float32")
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file or directory")
    if load_format == "dummy":
        config, words = _without_weights(path)
        made_up = _loaded(config, weights.dummy_decoder(config, dtype), words)
        return dataclasses.replace(made_up, random_weights=True)
    gguf_path = _gguf_in(path)
    if gguf_path is not None:
        file = GGUFFile(gguf_path)
        decoder = weights.build_decoder(file.config, file, dtype)
        return _loaded(file.config, decoder, gguf_tokenizer.from_gguf(file))
    config, words = _directory_config(path), tokenizer.from_directory(path)
    tensors = weights.SafetensorsDirectory(path)
    return _loaded(config, weights.build_decoder(config, tensors, dtype), words)


def _loaded(config: ModelConfig, decoder: Decoder, words: Tokenizer) -> Loaded:
    if words.vocab_size > config.vocab_size:
        raise ValueError(
            f"the tokenizer has {words.vocab_size} tokens, the model only {config.vocab_size} "
            "embeddings: they do not belong together"
        )
    return Loaded(config, decoder, words, weights.weights_hash(decoder))


def _gguf_in(path: Path) -> Path | None:
    if path.is_file():
        if path.suffix == ".gguf":
            return path
        raise ValueError(f"{path}: must be a directory or a .gguf file")
    if (path / "config.json").is_file():
        return None
    found = sorted(path.glob("*.gguf"))
    if len(found) > 1:
        names = ", ".join(file.name for file in found)
        raise ValueError(f"{path}: holds {len(found)} GGUF files ({names}): name one of them")
    return found[0] if found else None


def _directory_config(path: Path) -> ModelConfig:
    numbers = tokenizer.read_json(path / "config.json")
    if not numbers:
        raise FileNotFoundError(f"{path}: neither config.json nor a .gguf file is in it")
    try:
        return ModelConfig.from_hf(numbers)
    except (ValueError, NotImplementedError) as error:
        raise type(error)(f"{path}: {error}") from error


def _without_weights(path: Path) -> tuple[ModelConfig, Tokenizer]:
    if path.suffix == ".yaml":
        config = read_entry(path).architecture
        return config, tokenizer.byte_level(config.vocab_size)
    gguf_path = _gguf_in(path)
    if gguf_path is not None:
        file = GGUFFile(gguf_path)
        return file.config, gguf_tokenizer.from_gguf(file)
    config = _directory_config(path)
    if (path / "tokenizer.json").is_file():
        return config, tokenizer.from_directory(path)
    return config, tokenizer.byte_level(config.vocab_size)
