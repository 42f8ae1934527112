"""From a model's name to an engine that may serve: weights, rotation, compiled steps, canary."""

from __future__ import annotations

import importlib.metadata
import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from oscar_jax.accounting import CacheShape
from oscar_jax.budget import in_words, with_budget
from oscar_jax.config import EngineConfig, model_entry, model_names, parse_layers
from oscar_jax.device import free_bytes
from oscar_jax.engine.canary import run_canary
from oscar_jax.engine.engine import Engine
from oscar_jax.engine.runner import plan_capacity
from oscar_jax.fetch import FetchError, cache_dir, resolve
from oscar_jax.models import load
from oscar_jax.models.loading import LoadFormat
from oscar_jax.rotation import Rotation
from oscar_jax.rotation_source import resolve_rotation
from oscar_jax.server.service import Serving
from pallas_kernels.format import PAGE

log = logging.getLogger("oscar_jax.server")


class StartError(Exception):
    """The server cannot start; the message is for the operator."""


def load_serving(
    model: str,
    config: EngineConfig,
    *,
    rotation: str = "auto",
    load_format: LoadFormat = "auto",
    skip_canary: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> Serving:
    """Load, allocate, compile, check and start an engine.

    Args:
        model: a name in configs/, a Hugging Face directory or a GGUF file.
        rotation: "auto", "hadamard", "identity" or a checkpoint's directory; a BF16 cache has none.
        skip_canary: do not compare the cache with BF16; the engine is then marked degraded.
        progress: told each phase in words.

    Raises:
        StartError: the model cannot be had or read, does not fit, or its cache is damaged.
    """
    try:
        return _load_serving(model, config, rotation, load_format, skip_canary, progress)
    except (FetchError, ValueError, NotImplementedError, OSError) as error:
        raise StartError(str(error)) from error


def _load_serving(
    model: str,
    config: EngineConfig,
    rotation: str,
    load_format: LoadFormat,
    skip_canary: bool,
    progress: Callable[[str], None],
) -> Serving:
    _keep_compilations()
    progress("finding the model")
    path = resolve(model, load_format=load_format)
    progress("loading weights")
    loaded = load(path, load_format=load_format)
    numbers = loaded.config
    skip = parse_layers(config.kv_skip_layers)
    if skip and skip[-1] >= numbers.num_layers:
        raise ValueError(
            f"kv_skip_layers={config.kv_skip_layers!r}: the model's layers are 0 to "
            f"{numbers.num_layers - 1}"
        )
    shape = CacheShape.of(
        config.kv,
        layers=numbers.num_layers,
        kv_heads=numbers.num_kv_heads,
        head_dim=numbers.head_dim,
        sliding_windows=numbers.sliding_windows,
    )
    # The engine plans again after the rotation; a plan that cannot work must not wait for it.
    plan_capacity(config, shape, numbers.max_position_embeddings, free_bytes())
    budgeted: Rotation | None = None
    if config.kv_cache_dtype == "int2":
        progress("finding the rotation")
        shipped = model_entry(model).rotation if model in model_names() else None
        resolved = resolve_rotation(rotation, loaded, config.kv, shipped=shipped, progress=progress)
        log.info("rotation: %s", resolved.source)
        budgeted = with_budget(
            resolved.rotation,
            # window layers are BF16 as they are, and have no entry in a rotation
            skip=[numbers.paged_layers.index(one) for one in skip if one in numbers.paged_layers],
            bits=config.kv_bits,
            sensitivity=resolved.sensitivity,
        )
        log.info("KV pages: %s", in_words(budgeted.codecs, numbers.paged_layers))
        if config.kv_bits is not None and not resolved.sensitivity:
            log.warning("kv_bits: the rotation has no measured sensitivities, all layers are equal")
    engine = Engine.build(config, loaded, budgeted, progress)
    if budgeted is not None:
        if skip_canary:
            engine.degraded = True
            log.warning("the canary is skipped: nobody has compared this cache with BF16")
        else:
            progress("canary: comparing the INT2 cache with BF16")
            verdict = run_canary(engine, loaded, budgeted, config.kv)
            log.info("%s", verdict)
            if verdict.problem is not None:
                raise StartError(str(verdict))
    for line in capacity_lines(engine):
        log.info("%s", line)
    engine.start()
    report = describe(engine, model, rotation)
    log.info("for bug reports: %s", " ".join(f"{name}={value}" for name, value in report.items()))
    return Serving(engine, loaded.tokenizer, engine.max_model_len, report)


def capacity_lines(engine: Engine) -> list[str]:
    """What was allocated, in true numbers: tokens, bytes, bits, and ratios to a BF16 cache."""
    capacity = engine.capacity
    shape, longest = capacity.shape, capacity.max_model_len
    allocated = shape.allocated_compression(pages=capacity.pages, slots=capacity.slots)
    windows = capacity.slots * shape.window_bytes / 1e6
    return [
        f"KV cache: {capacity.tokens:,} tokens, {capacity.pages:,} pages and {capacity.slots} "
        f"slots, {capacity.allocated_bytes / 1e6:,.1f} MB of which {windows:,.1f} MB are BF16 "
        f"windows; longest sequence {longest:,} tokens, "
        f"{capacity.tokens / longest:.1f} of that length at once",
        f"KV page: {shape.bytes_per_token:,} bytes per token, {shape.bits_per_element:g} bits per "
        f"element with metadata (BF16: {shape.bf16_bytes_per_token:,} bytes, 16 bits)",
        f"smaller than BF16: live {shape.compression(longest):.2f}x at {longest:,} tokens, "
        f"allocated {allocated:.2f}x",
    ]


def describe(engine: Engine, model: str, rotation: str) -> dict[str, Any]:
    """Versions and KV settings in one flat record: no path, no secret, fit for a bug report."""
    config, device = engine.runner.config, jax.local_devices()[0]
    known = rotation in ("auto", "hadamard", "identity")
    return {
        "version": importlib.metadata.version("oscar-jax"),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "device": device.device_kind,
        "model": Path(model).name or model,
        "kv_cache_dtype": config.kv_cache_dtype,
        "rotation": "none" if config.kv_cache_dtype == "bf16" else rotation if known else "DIR",
        "kv_skip_layers": config.kv_skip_layers or "none",
        "kv_bits": config.kv_bits or "codec",
        "sink": config.sink,
        "recent": config.recent,
        "page": PAGE,
        "bits_per_element": engine.capacity.shape.bits_per_element,
        "max_model_len": engine.max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "prefill_chunk": config.prefill_chunk,
        "steps_per_dispatch": config.steps_per_dispatch,
        "kv_pages": engine.capacity.pages,
        "degraded": engine.degraded,
    }


def _keep_compilations() -> None:
    """Compiled programs survive the process, so a second start is fast.

    JAX runs what it finds there, so the directory is the user's alone.
    """
    directory = cache_dir() / "compiled"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        os.chmod(directory, 0o700)
    except OSError as error:
        log.warning("compiled programs are not kept: %s", error)
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
