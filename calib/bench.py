"""``python -m calib.bench``: what a model's calibration takes of a device, part by part.

    load     the weights
    passes   the model over the text: moments, rows that errors are measured on, rows for OptR
    optr     OptR on some of the layers, every step timed
    fits     the closed forms on some of the layers: all that ``calib`` fits, searches and measures
    check    a rotation in the running model, KL and recall, beside the BF16 cache

All of it is the calibration's own code on its own text. Random weights will do (``--load-format
dummy``): no time depends on their values. A part runs twice; the second time every program is
there, and what the first took beyond it is called compiling. Layers are handled one after the other
by the same programs, so all of them take what some take, times their number.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import tyro
from flax import nnx
from tqdm import tqdm

from calib.calibration import DEFAULT_TOKENS, closed_forms, refitting, with_mix
from calib.choice import AUTO, FINALISTS, Checker, candidates
from calib.collect import MomentStream, collect_rows, empty_moments, layer_frequencies
from calib.covariance import Moments
from calib.data import calibration_texts, sequences
from calib.fit import fit
from calib.held_out import HeldOut
from calib.material import SEQUENCE_LENGTH, Material, gather
from calib.optr import OptrSettings, learn, output_products
from calib.recipes import recipe as recipe_of
from calib.study import study
from oscar_jax import device, results
from oscar_jax.config import KVConfig
from oscar_jax.fetch import resolve
from oscar_jax.models import Loaded, load
from oscar_jax.rotation import Rotation

PROGRAM = "python -m calib.bench"
PARTS = ("optr", "fits", "check")  # in the order in which they run, after the passes
REPEATS = 3  # of a pass
WINDOWS = KVConfig()
Row = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Options:
    """Time a calibration: the passes over the text in full, fits and OptR on some layers."""

    model: str
    """A name in configs/, a Hugging Face directory or a GGUF file."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: random weights of the right shapes; no time depends on their values."""
    parts: str = ",".join(PARTS)
    """Comma-separated, what is timed after the passes: optr, fits, check."""
    layers: int = 2
    """Layers that OptR and the closed forms are timed on."""
    recipe: str = AUTO
    """What is fitted and checked, as in python -m calib."""
    base: str = "stretch+centre+gain"
    """What OptR refines."""
    optr_steps: int = OptrSettings.steps
    """Steps of OptR for the keys; the values take half as many."""
    tokens: int = DEFAULT_TOKENS
    """About how many tokens of text are fitted to."""
    out: Path | None = None
    """JSON file; by default benchmarks/results/DEVICE-calib-MODEL.json."""

    def __post_init__(self) -> None:
        if self.layers < 1:
            raise ValueError(f"layers={self.layers}: must be at least 1")
        if set(self.chosen) - {*PARTS}:
            raise ValueError(f"parts={self.parts!r}: must be some of {','.join(PARTS)}")
        for name in (*candidates(self.recipe), self.base):
            recipe_of(name)

    @property
    def chosen(self) -> list[str]:
        return [name.strip() for name in self.parts.split(",") if name.strip()]


def measure(options: Options, loaded: Loaded) -> Iterator[Row]:
    """The passes, then every chosen part; ``seconds`` are those of all layers, programs ready."""
    row, material, train = passes(options, loaded)
    yield row
    count = min(options.layers, len(loaded.config.paged_layers))
    some = _first_layers(material, count)
    timed: dict[str, Callable[[], Row]] = {
        "optr": lambda: optr(options, loaded, some, _first_rows(train, count)),
        "fits": lambda: fits(options, loaded, some),
        "check": lambda: check(options, loaded, material),
    }
    for name in PARTS:
        if name in options.chosen:
            yield timed[name]()


def whole(rows: Sequence[Row]) -> dict[str, Any]:
    """Seconds of every part with its compiling, and of OptR with the pass that it needs."""
    by_part = {row["part"]: row.get("compile_s", 0.0) + row["seconds"] for row in rows}
    found: dict[str, Any] = {"seconds_by_part": by_part, "seconds": sum(by_part.values())}
    if "optr" in by_part:
        passed = next(row for row in rows if row["part"] == "passes")
        found["optr_with_its_rows_s"] = by_part["optr"] + passed["optr_rows_s"]
    found["peak_bytes"] = max((row["peak_bytes"] or 0 for row in rows), default=0) or None
    return found


# ----------------------------------------------------------------------------------------- parts


def passes(options: Options, loaded: Loaded) -> tuple[Row, Material, HeldOut]:
    """The model over all the text; also what came of it, and the rows that OptR learns from."""
    texts = calibration_texts(loaded.tokenizer)
    length = min(SEQUENCE_LENGTH, loaded.config.max_position_embeddings)
    found = sequences(loaded.tokenizer.encode, texts[:1], length=length, count=1)
    (tokens,) = found[texts[0].domain]
    stream, moments = MomentStream(loaded.decoder), empty_moments(loaded.config)

    def add() -> Moments:
        nonlocal moments  # given away and got back, as in a calibration
        moments = stream.add(moments, tokens, WINDOWS.sink)
        return moments

    programs: dict[str, Callable[[], Any]] = {
        "moments": add,
        "rows": lambda: collect_rows(loaded.decoder, [tokens], WINDOWS),
    }
    with ThreadPoolExecutor() as pool:  # XLA compiles without Python's lock
        first = dict(zip(programs, pool.map(_seconds, programs.values()), strict=True))
    each = {
        name: statistics.median(_seconds(call) for _ in range(REPEATS))
        for name, call in programs.items()
    }
    began = time.perf_counter()
    material = gather(loaded, texts, WINDOWS, options.tokens)
    gathered = time.perf_counter() - began
    fitted = [row for own in material.fitted.values() for row in own]
    began = time.perf_counter()
    train = collect_rows(loaded.decoder, fitted, WINDOWS)
    kept = [rows for rows in (material.tuning, material.held_out) if rows is not None]
    row = {
        "part": "passes",
        "layers": len(loaded.config.paged_layers),
        "tokens_per_sequence": length,
        "sequences": {
            "moments": len(fitted) + len(material.fitted),  # the first of a domain run twice
            "rows": sum(len(rows.keys[0]) for rows in kept),
            "rows_for_optr": len(fitted),
        },
        "ms_per_sequence": {name: 1e3 * seconds for name, seconds in each.items()},
        "compile_s": sum(first[name] - each[name] for name in programs),
        "optr_rows_s": time.perf_counter() - began,
        "seconds": gathered,
        "peak_bytes": device.peak_bytes(),
    }
    return row, material, train


def optr(options: Options, loaded: Loaded, some: Material, train: HeldOut) -> Row:
    """OptR from the rows on: its steps, and everything around them."""
    deciding = some.held_out if some.tuning is None else some.tuning
    if deciding is None:
        raise ValueError(f"tokens={options.tokens}: leaves no text for OptR to decide on")
    products, compiling, output_s = _twice(lambda: output_products(loaded.decoder))
    base, _ = fit(some.moments, options.base, positions=loaded.config.context_length)
    settings = OptrSettings(steps=options.optr_steps)
    with Stamped(desc="OptR, twice", unit=" steps") as bar:
        output = products[: base.layers]
        learned, compile_s, run_s = _twice(
            lambda: learn(base, train, deciding, output, settings, progress=bar)
        )
        keys, values = bar.step_seconds()
    layers = len(loaded.config.paged_layers)
    return {
        "part": "optr",
        "base": options.base,
        "layers": base.layers,
        "heads": learned.keys.kept.size,
        "sequences": {"learned_from": len(train.keys[0]), "held_out": len(deciding.keys[0])},
        "steps": {"keys": settings.steps, "values": settings.value_steps},
        "ms_per_step": {"keys": 1e3 * keys, "values": 1e3 * values},
        "compile_s": compile_s + compiling,
        "run_s": run_s,
        "output_products_s": output_s,  # of all layers
        "seconds": output_s + run_s * layers / base.layers,
        "peak_bytes": device.peak_bytes(),
    }


def fits(options: Options, loaded: Loaded, some: Material) -> Row:
    """Every closed form with its searches, the plain recipes beside them, and the study."""
    context = loaded.config.context_length
    recipes = [recipe_of(name).closed_form for name in candidates(options.recipe)]
    frequencies = layer_frequencies(loaded.config)[: len(some.moments.layers)]
    fitted = functools.partial(fit, some.moments, positions=context)

    def forms() -> Any:
        found, _ = closed_forms(fitted, recipes, some, progress=False)
        return with_mix(found, some) if len(recipes) > 1 else found

    def studied() -> Any:
        if best.errors is not None:
            study(
                refitting(fit, best),
                best.rotation,
                best.errors,
                some,
                context,
                context,
                frequencies,
                progress=False,
            )

    found, compile_s, forms_s = _twice(forms)
    best = found[recipes[0].full_name]
    _, compiling, studied_s = _twice(studied)
    _, _, single_s = _twice(lambda: fitted(recipes[0]))
    layers = len(some.moments.layers)
    return {
        "part": "fits",
        "recipes": [one.full_name for one in recipes],
        "layers": layers,
        "ms_per_layer": {
            "one closed form": 1e3 * single_s / layers,
            "recipes, comparisons, clips": 1e3 * forms_s / layers,
            "study": 1e3 * studied_s / layers,
        },
        "compile_s": compile_s + compiling,
        "run_s": forms_s + studied_s,
        "seconds": (forms_s + studied_s) * len(loaded.config.paged_layers) / layers,
        "peak_bytes": device.peak_bytes(),
    }


def check(options: Options, loaded: Loaded, material: Material) -> Row:
    """BF16 pages, and pages of the recipe's codec; the transform in them is any, a Hadamard."""
    config, names = loaded.config, candidates(options.recipe)
    layers = len(config.paged_layers)
    rotation = dataclasses.replace(
        Rotation.hadamard(layers=layers, kv_heads=config.num_kv_heads, head_dim=config.head_dim),
        codecs=(recipe_of(names[0]).codec,) * layers,
    )
    checker = Checker(loaded, material.checked, WINDOWS)
    exact_s = _seconds(lambda: checker.check(None))  # kept, so there is no second run of it
    _, compile_s, run_s = _twice(lambda: checker.check(rotation))
    caches = FINALISTS + 1 if len(names) > 1 else 1  # with the mix
    return {
        "part": "check",
        "layers": layers,
        "bf16_s": exact_s,  # with compiling
        "compile_s_per_cache": compile_s,
        "seconds_per_cache": run_s,
        "caches": caches,
        "compile_s": caches * compile_s,
        "seconds": exact_s + (caches + 1) * run_s,  # one of them again, later in the context
        "peak_bytes": device.peak_bytes(),
    }


class Stamped(tqdm):
    """A bar that keeps when it moved: OptR moves it by 0 before each side of a group of layers."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.sides: list[list[float]] = []

    def update(self, n: int | float | None = 1) -> bool | None:
        if n == 0:
            self.sides.append([])
        self.sides[-1].append(time.perf_counter())
        return super().update(n)

    def step_seconds(self) -> tuple[float, float]:
        """Medians of a step of the keys and of one of the values, in the second of two runs."""
        second = self.sides[len(self.sides) // 2 :]
        keys, values = (
            float(np.median(np.concatenate([np.diff(side) for side in second[first::2]])))
            for first in (0, 1)
        )
        return keys, values


def _seconds(call: Callable[[], Any]) -> float:
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began


def _twice[T](call: Callable[[], T]) -> tuple[T, float, float]:
    """(result, seconds of compiling, seconds without)."""
    first = _seconds(call)
    began = time.perf_counter()
    found = jax.block_until_ready(call())
    again = time.perf_counter() - began
    return found, max(0.0, first - again), again


def _first_layers(material: Material, count: int) -> Material:
    moments = lambda one: Moments(one.layers[:count])  # noqa: E731
    rows = lambda one: None if one is None else _first_rows(one, count)  # noqa: E731
    return dataclasses.replace(
        material,
        moments=moments(material.moments),
        by_domain={name: moments(one) for name, one in material.by_domain.items()},
        growing=tuple((tokens, moments(one)) for tokens, one in material.growing),
        tuning=rows(material.tuning),
        held_out=rows(material.held_out),
    )


def _first_rows(rows: HeldOut, count: int) -> HeldOut:
    names = ("queries", "keys", "values")
    return dataclasses.replace(rows, **{name: getattr(rows, name)[:count] for name in names})


# --------------------------------------------------------------------------------------- command


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write the JSON after every part, and say what the whole takes."""
    options = tyro.cli(Options, prog=PROGRAM, args=arguments)
    device.prepare()
    began = time.perf_counter()
    path = resolve(options.model, load_format=options.load_format)
    loaded = load(path, load_format=options.load_format)
    weights = sum(x.nbytes for x in jax.tree.leaves(nnx.state(loaded.decoder)))
    first: Row = {
        "part": "load",
        "weight_bytes": weights,
        "seconds": time.perf_counter() - began,
        "peak_bytes": device.peak_bytes(),
    }
    kind = jax.devices()[0]
    name = "cpu" if kind.platform == "cpu" else kind.device_kind.split()[-1].lower()
    out = options.out or results.FOLDER / f"{name}-calib-{Path(options.model).stem}.json"
    origin = results.provenance()  # before a row is written: the file itself is a change
    config = dataclasses.asdict(options) | {
        "out": str(out),
        "model_layers": loaded.config.num_layers,
        "random_weights": loaded.random_weights,
        "windows": [WINDOWS.sink, WINDOWS.recent],
        "optr": dataclasses.asdict(OptrSettings(steps=options.optr_steps)),
    }
    command = " ".join([PROGRAM, *(sys.argv[1:] if arguments is None else arguments)])
    rows: list[Row] = []
    for row in (part for parts in ([first], measure(options, loaded)) for part in parts):
        rows.append(row)
        print(f"[{time.perf_counter() - began:6.1f} s] {row}", file=sys.stderr, flush=True)
        results.write(out, command=command, config=config, rows=rows, **origin, whole=whole(rows))
    found = whole(rows)
    for part, seconds in found["seconds_by_part"].items():
        print(f"{part:<8} {seconds:8.1f} s")
    print(f"{'together':<8} {found['seconds']:8.1f} s of {loaded.config.num_layers} layers")
    print(f"written to {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
