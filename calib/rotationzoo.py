"""``python -m calib.rotationzoo K.pt V.pt --model NAME --out DIR``: published rotations, offline.

RotationZoo files are third-party data in ``torch.save``'s format, which is a pickle: reading one
with an ordinary unpickler runs whatever it says. This reader needs no torch and knows six names;
anything else is refused by name before it is looked up. The server never imports it.

Their convention is ours: a token's key is a row and the stored key is k' = k R, so X_K = R and
X_V = R. Format 1 holds one R [d, d] per layer, shared by its KV heads; format 2 one per KV head,
R [H, d, d]. OptR (arXiv 2608.02691) writes format 2 and the key means to a third file, layers of
``mu`` [H, d]: ``--k-mean``. A ``k_mean`` beside the rotations becomes mu too; ``q_rotation`` and
``o_rotation`` are accepted where they are what this project derives anyway, the inverses.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import math
import pickle
import sys
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import ml_dtypes
import numpy as np
import tyro

from oscar_jax import checkpoint
from oscar_jax.checkpoint import CheckpointMetadata, fingerprint
from oscar_jax.config import KVConfig, ModelConfig, model_entry, model_names
from oscar_jax.rotation import Rotation
from pallas_kernels.format import Codec

FORMAT_VERSIONS = (1, 2)
ORTHOGONAL = 1e-2  # max |R R^T - I|: bfloat16 files reach 4e-3
LIMIT = 1 << 30  # bytes of one file; the largest published pair has 5 MB a side
STORAGES: Mapping[str, Any] = {
    "FloatStorage": np.dtype(np.float32),
    "DoubleStorage": np.dtype(np.float64),
    "HalfStorage": np.dtype(np.float16),
    "BFloat16Storage": np.dtype(ml_dtypes.bfloat16),
}


# ----------------------------------------------------------------------------------- torch.save


class _Unpickler(pickle.Unpickler):
    """Builds containers, numbers and tensors; every other name in the file is an error.

    Types of storage stand for themselves as strings, so that no real object of a library is within
    the pickle's reach.
    """

    def __init__(self, file: io.BytesIO, read_storage: Callable[[str], bytes]):
        super().__init__(file)
        self._read_storage = read_storage

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch._utils", "_rebuild_tensor_v2"):
            return _Tensor
        if (module, name) == ("collections", "OrderedDict"):
            return _Mapping
        if module == "torch" and name in STORAGES:
            return name
        raise ValueError(f"it asks for {module}.{name}, which no rotation file needs; refused")

    def persistent_load(self, pid: Any) -> np.ndarray:
        kind, storage, key, _location, count = pid
        if kind != "storage" or storage not in STORAGES:
            raise ValueError(f"it refers to {kind!r} {storage!r} outside the pickle; refused")
        numbers = np.frombuffer(self._read_storage(str(key)), STORAGES[storage])
        if len(numbers) != count:
            raise ValueError(f"storage {key} holds {len(numbers)} numbers, the file says {count}")
        return numbers


class _Mapping(dict):
    """Stands for OrderedDict: a class of this module, which the pickle cannot harm."""


class _Tensor:
    """torch._utils._rebuild_tensor_v2: a strided view of a storage, copied to float64.

    The arguments are checked to stay inside the storage.
    """

    def __new__(cls, storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> Any:
        if not isinstance(storage, np.ndarray):
            raise ValueError("a tensor without a storage")
        numbers = [offset, *size, *stride]
        if len(size) != len(stride) or not all(isinstance(n, int) and n >= 0 for n in numbers):
            raise ValueError(f"a tensor of size {size}, stride {stride}, offset {offset}")
        last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
        # a stride of 0 could make a huge array of one number
        if math.prod(size) > len(storage) or (math.prod(size) and last >= len(storage)):
            raise ValueError(f"a tensor of size {size} reaches outside its storage")
        width = storage.itemsize
        view = np.lib.stride_tricks.as_strided(
            storage[offset:], tuple(size), tuple(step * width for step in stride), writeable=False
        )
        return view.astype(np.float64)


def read_pt(path: Path) -> Any:
    """The containers, numbers and tensors (float64 arrays) of a ``torch.save`` file.

    Raises:
        ValueError: not such a file, too large, damaged, or it asks for anything but the six names.
            One line, naming the path.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            return _read_archive(archive)
    except zipfile.BadZipFile:
        raise ValueError(
            f"{path}: is not a torch.save file in zip form (written before torch 1.6? load it with "
            "weights_only=True in a recent torch and save it again)"
        ) from None
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror or error})") from None
    except Exception as error:  # a hostile pickle can raise anything
        raise ValueError(f"{path}: {' '.join(str(error).split())[:300]}") from None


def _read_archive(archive: zipfile.ZipFile) -> Any:
    entries = archive.infolist()
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise ValueError("holds compressed entries, which torch.save never writes; refused")
    if sum(entry.file_size for entry in entries) > LIMIT:
        raise ValueError(f"is larger than {LIMIT} bytes; refused")
    roots = [
        entry.filename[: -len("/data.pkl")]
        for entry in entries
        if entry.filename.endswith("/data.pkl")
    ]
    if len(roots) != 1:
        raise ValueError("has no data.pkl; not a torch.save file")
    root = roots[0]
    names = {entry.filename for entry in entries}
    order = f"{root}/byteorder"
    if order in names and archive.read(order).strip() != b"little":
        raise ValueError("was written on a big-endian machine; not supported")
    pickled = io.BytesIO(archive.read(f"{root}/data.pkl"))
    return _Unpickler(pickled, lambda key: archive.read(f"{root}/data/{key}")).load()


# ------------------------------------------------------------------------------------- contents


@dataclasses.dataclass(frozen=True)
class Side:
    """One file: rotations f64[H or 1, d, d] by layer, and key means f64[H, d] if it has any."""

    version: int
    rotations: dict[int, np.ndarray]
    means: dict[int, np.ndarray]


def read_side(path: Path) -> Side:
    """One RotationZoo file, format 1 or 2, checked: layers numbered, every R orthogonal.

    Raises:
        ValueError: anything else. One line, naming path, layer and field.
    """
    version, layers = _read_layers(path, FORMAT_VERSIONS)
    rotations: dict[int, np.ndarray] = {}
    means: dict[int, np.ndarray] = {}
    for layer, entry in layers.items():
        rotations[layer] = _rotation(f"{path}: layer {layer}", version, entry)
        if entry.get("k_mean") is not None:
            means[layer] = np.atleast_2d(np.asarray(entry["k_mean"]))
    if means and means.keys() != rotations.keys():
        raise ValueError(f"{path}: only some layers have k_mean: {sorted(means)}")
    return Side(version, rotations, means)


def read_means(path: Path) -> dict[int, np.ndarray]:
    """A file of key means as OptR writes it, format 1: f64[H, d] by layer.

    Raises:
        ValueError: anything else. One line, naming path and layer.
    """
    means: dict[int, np.ndarray] = {}
    for layer, entry in _read_layers(path, (1,))[1].items():
        mean = entry.get("mu")
        if not isinstance(mean, np.ndarray) or mean.ndim != 2 or not np.isfinite(mean).all():
            raise ValueError(f"{path}: layer {layer}: mu must be finite numbers [H, d]")
        means[layer] = mean
    return means


def _read_layers(path: Path, versions: tuple[int, ...]) -> tuple[int, dict[int, Any]]:
    """The file's format version and its entries by layer number."""
    content = read_pt(path)
    version = content.get("format_version") if isinstance(content, dict) else None
    if version not in versions:
        raise ValueError(f"{path}: format_version {version!r}; readable are {versions}")
    layers = content.get("layers")
    if not isinstance(layers, dict) or not layers:
        raise ValueError(f"{path}: holds no layers")
    found: dict[int, Any] = {}
    for key, entry in layers.items():
        layer = _layer_number(path, key, entry)
        if layer in found:
            raise ValueError(f"{path}: layer {layer} appears twice")
        found[layer] = entry
    return version, found


def _layer_number(path: Path, key: Any, entry: Any) -> int:
    """Keys are numbers or their decimal strings; ``layer_id`` must agree where there is one."""
    if not isinstance(entry, dict):
        raise ValueError(f"{path}: layer {key!r} is a {type(entry).__name__}, must be a dict")
    if not (isinstance(key, int) or (isinstance(key, str) and key.isdecimal())) or int(key) < 0:
        raise ValueError(f"{path}: layer {key!r} is not a number")
    if int(entry.get("layer_id", key)) != int(key):
        raise ValueError(f"{path}: layer {key!r} says layer_id {entry['layer_id']!r}")
    return int(key)


def _rotation(where: str, version: int, entry: Mapping[str, Any]) -> np.ndarray:
    rotation = entry.get("rotation")
    dimensions = 2 if version == 1 else 3
    if not isinstance(rotation, np.ndarray) or rotation.ndim != dimensions:
        have = getattr(rotation, "shape", type(rotation).__name__)
        want = "[d, d]" if version == 1 else "[H, d, d]"
        raise ValueError(f"{where}: rotation is {have}, must be {want} in format {version}")
    stacked = rotation.reshape(-1, *rotation.shape[-2:])  # [H or 1, d, d]
    if stacked.shape[-1] != stacked.shape[-2]:
        raise ValueError(f"{where}: rotation is {rotation.shape}, must be square")
    error = np.abs(stacked @ stacked.swapaxes(-1, -2) - np.eye(stacked.shape[-1])).max()
    if not error <= ORTHOGONAL:
        raise ValueError(
            f"{where}: rotation is not orthogonal (max |R R^T - I| = {error:.2g}, at most "
            f"{ORTHOGONAL:g})"
        )
    for name in ("q_rotation", "o_rotation"):
        if entry.get(name) is not None:
            # row convention: q' = q R for a rotation, and the output turns back by R^T
            derived = stacked if name == "q_rotation" else stacked.swapaxes(-1, -2)
            given = np.asarray(entry[name]).reshape(-1, *rotation.shape[-2:])
            if given.shape != stacked.shape or np.abs(given - derived).max() > ORTHOGONAL:
                raise ValueError(f"{where}: {name} is not the inverse of rotation; not supported")
    return stacked


# ------------------------------------------------------------------------------------ conversion


def convert(
    key_file: Path,
    value_file: Path,
    config: ModelConfig,
    codec: Codec,
    mean_file: Path | None = None,
) -> tuple[Rotation, CheckpointMetadata]:
    """The files as a rotation for ``config``, with the metadata of a checkpoint.

    Raises:
        ValueError: a file that cannot be used, layers, heads or sizes that are not the model's, or
            key means in two of the files.
    """
    keys, values = read_side(key_file), read_side(value_file)
    if mean_file is not None:
        if keys.means:
            raise ValueError(f"{mean_file}: {key_file} holds key means too; leave one of them out")
        keys = dataclasses.replace(keys, means=read_means(mean_file))
        _check_layers(mean_file, keys.means, config)
    if values.means:
        raise ValueError(f"{value_file}: has k_mean; are the two files exchanged?")
    x_k = _for_model(key_file, keys.rotations, config)
    x_v = _for_model(value_file, values.rotations, config)
    mean_shape = (config.num_kv_heads, config.head_dim)
    for layer, mean in keys.means.items():
        if mean.shape != mean_shape:
            raise ValueError(
                f"{mean_file or key_file}: layer {layer}: the key mean is {mean.shape}, must be "
                f"{mean_shape}"
            )
    means = [keys.means[layer] for layer in range(config.num_layers)] if keys.means else None
    metadata = CheckpointMetadata(
        recipe=f"rotationzoo-v{keys.version}" + "+centre" * bool(means),
        value_target="none",
        codecs=(codec,) * config.num_layers,
        damping=0.0,
        sink=KVConfig.sink,
        recent=KVConfig.recent,
        tokens=0,
        data_hash=hashlib.sha256(
            b"".join(file.read_bytes() for file in (key_file, value_file, mean_file) if file)
        ).hexdigest(),
        fingerprint=fingerprint(config),
        weights_hash="",
        layers=tuple(range(config.num_layers)),
        warnings=("imported: what it was fitted on, and for which weights, is not known here",),
    )
    return Rotation.from_transforms(x_k, x_v, means, codec), metadata


def _for_model(
    path: Path, rotations: dict[int, np.ndarray], config: ModelConfig
) -> list[np.ndarray]:
    """[K, d, d] per layer, in numeric order; a layer's one matrix is repeated for its heads."""
    _check_layers(path, rotations, config)
    heads, size = config.num_kv_heads, config.head_dim
    for layer, rotation in rotations.items():
        if rotation.shape[0] not in (1, heads) or rotation.shape[-1] != size:
            raise ValueError(
                f"{path}: layer {layer}: rotation is for {rotation.shape[0]} KV heads of "
                f"{rotation.shape[-1]}, the model has {heads} of {size}"
            )
    shape = (heads, size, size)
    return [np.broadcast_to(rotations[layer], shape) for layer in range(config.num_layers)]


def _check_layers(path: Path, found: Mapping[int, Any], config: ModelConfig) -> None:
    wanted = range(config.num_layers)
    missing, extra = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or extra:
        raise ValueError(
            f"{path}: has {len(found)} layers for a model of {len(wanted)}: missing {missing}, "
            f"extra {extra}"
        )


def model_config(name_or_path: str) -> ModelConfig:
    """Architecture numbers alone: no weights are fetched or read."""
    if name_or_path in model_names():
        return model_entry(name_or_path).architecture
    path = Path(name_or_path)
    if path.suffix == ".gguf":
        from oscar_jax.models.gguf import GGUFFile

        return GGUFFile(path).config
    from oscar_jax.models.tokenizer import read_json

    numbers = read_json(path / "config.json")
    if not numbers:
        raise ValueError(
            f"--model {name_or_path}: neither one of {', '.join(model_names())}, nor a GGUF file, "
            "nor a directory with config.json"
        )
    return ModelConfig.from_hf(numbers)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Convert a pair of published RotationZoo files to a checkpoint; nothing in them is run."""

    key_file: Annotated[Path, tyro.conf.Positional]
    """The keys' rotations (k_rotation_*.pt)."""
    value_file: Annotated[Path, tyro.conf.Positional]
    """The values' rotations (v_rotation_*.pt)."""
    model: str
    """A name in configs/, a Hugging Face directory or a GGUF file; only its numbers are read."""
    out: Path
    """Directory of the checkpoint."""
    k_mean: Path | None = None
    """The keys' means, where they are a file of their own (OptR's k_mean.pt)."""
    clip_k: float = Codec.clip_k
    """Clip ratio of keys that the rotations were published with."""
    clip_v: float = Codec.clip_v
    """Clip ratio of values; Qwen3-32B was published with 0.96."""
    force: bool = False
    """Replace an existing checkpoint."""


def main() -> None:
    """Parse the command line and convert; wrong input ends in one line and exit code 2."""
    arguments = tyro.cli(Arguments, prog="python -m calib.rotationzoo")
    try:
        checkpoint.check_target(arguments.out, arguments.force)
        rotation, metadata = convert(
            arguments.key_file,
            arguments.value_file,
            model_config(arguments.model),
            Codec(clip_k=arguments.clip_k, clip_v=arguments.clip_v),
            arguments.k_mean,
        )
        checkpoint.save(arguments.out, rotation, metadata, arguments.force)
    except (ValueError, NotImplementedError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"{metadata.recipe}: {rotation.layers} layers saved to {arguments.out}")
    print("Third-party data: check it with python -m oscar_jax.evaluate before serving it.")


if __name__ == "__main__":
    main()
