"""Fills a decoder from a checkpoint: every tensor named, checked and read once, none invented."""

from __future__ import annotations

import functools
import hashlib
import json
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import safetensors

from oscar_jax.model_config import ModelConfig
from oscar_jax.models.transformer import Decoder

_FLOATS = {"F32", "F16", "BF16"}
_TEXT_PART = re.compile(r"^(language_model\.(?=model\.|lm_head\.)|model\.language_model\.)")
_VISION = (
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
)
_LARGEST_HEADER = 100_000_000  # bytes, the format's own limit


class CheckpointTensors(Protocol):
    """Tensors of one checkpoint by their Hugging Face names."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor's shape, without reading it."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor in host memory, in its stored or dequantised float type."""
        ...

    def where(self, name: str | None) -> str:
        """The file that holds (or should hold) a tensor, for error messages."""
        ...


def build_decoder(config: ModelConfig, tensors: CheckpointTensors, dtype: Any) -> Decoder:
    """A decoder with the checkpoint's weights in ``dtype``, read one tensor at a time.

    Raises:
        ValueError: tensors missing, left over, or of another shape than the config says; file and
            tensor are named. ``lm_head.weight`` of a tied model and the RoPE buffers that old
            Llama files carry are ignored: the config already says what they hold. So are the parts
            of a Gemma 3 file that see pictures: this is the text model.
    """
    expected, stored = expected_shapes(config), tensors.shapes()
    missing = [name for name in expected if name not in stored]
    if missing:
        raise ValueError(
            f"{tensors.where(missing[0])}: tensor {missing[0]!r} of shape {expected[missing[0]]} "
            f"is missing ({len(missing)} of {len(expected)} are: {_listed(missing)})"
        )
    extra = [
        name
        for name in stored
        if name not in expected
        and not name.endswith(".rotary_emb.inv_freq")
        and not (name == "lm_head.weight" and config.tie_word_embeddings)
        and not (config.is_gemma and name.startswith(_VISION))
    ]
    if extra:
        raise ValueError(
            f"{tensors.where(extra[0])}: tensor {extra[0]!r} has no place in a {config.num_layers}-"
            f"layer {config.architecture} model ({len(extra)} do not: {_listed(extra)})"
        )
    for name, shape in expected.items():
        if stored[name] != shape:
            raise ValueError(
                f"{tensors.where(name)}: tensor {name!r} has shape {stored[name]}, "
                f"the config says {shape}"
            )

    def take(name: str, shape: tuple[int, ...]) -> jax.Array:
        return jnp.array(tensors.read(name)).astype(dtype)  # a copy: the file may be mapped

    return Decoder(config, take)


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of the model, in the order in which it is read."""
    shapes: dict[str, tuple[int, ...]] = {}

    def note(name: str, shape: tuple[int, ...]) -> jax.Array:
        shapes[name] = shape
        return jnp.zeros(shape, jnp.bfloat16)

    def build() -> None:
        Decoder(config, note)

    jax.eval_shape(build)  # nothing is allocated
    return shapes


def dummy_decoder(config: ModelConfig, dtype: Any) -> Decoder:
    """Random weights of the right shapes, the same every time: for speed tests, never for answers.

    Norms are 1, the rest uniform with standard deviation 0.02, seeded by the tensor's name.
    """

    def take(name: str, shape: tuple[int, ...]) -> jax.Array:
        if name.endswith("norm.weight"):
            return jnp.full(shape, 0 if config.is_gemma else 1, dtype)
        return _uniform(np.uint32(zlib.crc32(name.encode())), shape, dtype)

    return Decoder(config, take)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _uniform(seed: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    key, width = jax.random.key(seed, impl="rbg"), 0.02 * 3**0.5  # rbg: quick to compile and to run
    return jax.random.uniform(key, shape, jnp.float32, -width, width).astype(dtype)


def weights_hash(decoder: Decoder) -> str:
    """SHA-256 over q, k, v, o of the first and the last layer, as bfloat16 bytes.

    It ties a calibration to its model. Rounded to bfloat16 so that one checkpoint has one hash
    whatever dtype it is loaded in.
    """
    digest = hashlib.sha256()
    for layer in (decoder.layers[0], decoder.layers[-1]):
        attention = layer.self_attn
        for linear in (attention.qkv_proj, attention.o_proj):
            digest.update(np.asarray(linear.weight[...].astype(jnp.bfloat16)).tobytes())
    return digest.hexdigest()


class SafetensorsDirectory:
    """The safetensors files of a Hugging Face directory: one, or shards with their index.

    A multimodal model's text tensors go by the names they have in a text model's file.

    Raises:
        FileNotFoundError: no safetensors file. Pickled ``.bin`` files are never read: loading
            them can execute code.
        ValueError: a shard that is missing, truncated or at odds with the index.
        NotImplementedError: a tensor that is not float32, float16 or bfloat16.
    """

    def __init__(self, directory: Path):
        self._directory = directory
        self._listed: dict[str, str] = {}  # tensor -> file name, by the index
        index = directory / "model.safetensors.index.json"
        if index.is_file():
            self._listed = _read_index(index)
            files = sorted(set(self._listed.values()))
        else:
            files = [_single_file(directory)]
        self._open: dict[str, Any] = {name: _open(directory / name) for name in files}
        self._file_of: dict[str, str] = {}
        self._stored: dict[str, str] = {}  # name -> name in the file
        self._shapes: dict[str, tuple[int, ...]] = {}
        for file, handle in self._open.items():
            for stored in handle.keys():  # noqa: SIM118  (not a mapping)
                name = _text_name(stored)
                if name in self._file_of:
                    raise ValueError(
                        f"{directory / file}: tensor {name!r} is also in {self._file_of[name]}"
                    )
                piece = handle.get_slice(stored)
                if piece.get_dtype() not in _FLOATS:
                    raise NotImplementedError(
                        f"{directory / file}: tensor {name!r} is {piece.get_dtype()}: only "
                        f"{sorted(_FLOATS)} weights are supported"
                    )
                self._file_of[name], self._stored[name] = file, stored
                self._shapes[name] = tuple(piece.get_shape())
        for name, file in self._listed.items():
            if self._file_of.get(_text_name(name)) != file:
                raise ValueError(f"{directory / file}: tensor {name!r} of the index is missing")

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def read(self, name: str) -> np.ndarray:
        return self._open[self._file_of[name]].get_tensor(self._stored[name])

    def where(self, name: str | None) -> str:
        file = self._file_of.get(name or "")
        if file is None and len(self._open) == 1:
            file = next(iter(self._open))
        return str(self._directory / file) if file else str(self._directory)


def _text_name(stored: str) -> str:
    """``language_model.model.norm.weight`` and the like as ``model.norm.weight``."""
    found = _TEXT_PART.match(stored)
    if found is None:
        return stored
    return stored.replace(found[0], "model." if found[0].startswith("model.") else "", 1)


def _single_file(directory: Path) -> str:
    found = sorted(path.name for path in directory.glob("*.safetensors"))
    if "model.safetensors" in found:
        return "model.safetensors"
    if len(found) == 1:
        return found[0]
    if found:
        raise ValueError(
            f"{directory}: {len(found)} safetensors files ({_listed(found)}) and no "
            "model.safetensors.index.json to say which tensor is where"
        )
    hint = "; pickled .bin or .pt weights are not read" if any(directory.glob("*.bin")) else ""
    raise FileNotFoundError(f"{directory}: no *.safetensors file{hint}")


def _read_index(index: Path) -> dict[str, str]:
    try:
        listed = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        listed = {str(name): str(file) for name, file in listed.items()}
    except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: no JSON object with a weight_map: {error!r}") from error
    for name, file in listed.items():
        if Path(file).name != file:
            raise ValueError(f"{index}: tensor {name!r} is in {file!r}: must be a plain file name")
        if not (index.parent / file).is_file():
            raise ValueError(f"{index.parent / file}: shard is missing (tensor {name!r} is in it)")
    if not listed:
        raise ValueError(f"{index}: the weight_map is empty")
    return listed


def _open(path: Path) -> Any:
    try:
        return safetensors.safe_open(str(path), framework="numpy")
    except (safetensors.SafetensorError, OSError) as error:
        lost = _first_cut_tensor(path)
        what = f"tensor {lost!r} is cut off, the file is truncated" if lost else str(error)
        raise ValueError(f"{path}: not a whole safetensors file: {what}") from error


def _first_cut_tensor(path: Path) -> str | None:
    """The first tensor whose bytes the file no longer has, None if the header is unreadable."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(min(length, _LARGEST_HEADER)))
        header.pop("__metadata__", None)
        size = path.stat().st_size - 8 - length
        cut = [(entry["data_offsets"][1], name) for name, entry in header.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return min(((end, name) for end, name in cut if end > size), default=(0, None))[1]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
