"""``python -m oscar_jax.evaluate --model NAME``: what each rotation costs a model in quality.

Perplexity, KL to the BF16 cache and top-1 agreement per text domain, and recall of random spans
that lie inside the pages: recall sees damage that the other three do not. Protocol: full sequences
of 2,048 tokens through the real pages, every second position from the first that sees a page; texts
and calibration share nothing. Standard errors are over sequences (spans for recall), and every
recipe is also given as a ratio to one of them, paired by sequence.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import numpy as np
import tyro
from tqdm import tqdm

from oscar_jax import checkpoint, results
from oscar_jax.config import KVConfig
from oscar_jax.evaluation.recall import recall_sequences, word_tokens
from oscar_jax.evaluation.scorer import Scorer
from oscar_jax.evaluation.statistics import paired_ratio, standard_error
from oscar_jax.fetch import FetchError, resolve
from oscar_jax.models import Loaded, load
from oscar_jax.rotation import Rotation
from pallas_kernels.format import PAGE, bits_per_element

PROGRAM = "python -m oscar_jax.evaluate"
BF16 = "bf16"
# Every ingredient on top of the one before; gain and water-filling also alone.
DEFAULT_RECIPES = (
    "bf16,identity,hadamard,oscar-shared,oscar,oscar+centre,stretch+centre,stretch+centre+gain,"
    "stretch+centre+waterfill,stretch+centre+waterfill+gain"
)


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Measure what 2-bit pages cost a model, for several rotations side by side."""

    model: str
    """A name in configs/, a Hugging Face directory or a GGUF file."""
    recipes: str = DEFAULT_RECIPES
    """Comma-separated: bf16, or any recipe of python -m calib; all fitted from one calibration."""
    rotation: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction] = ()
    """A checkpoint to measure as well; repeat for more."""
    sequences: int = 4
    """Sequences of every domain."""
    length: int = 2048
    """Tokens of a sequence."""
    stride: int = 2
    """Score every so many positions, from the first that sees a page."""
    recall: int = 3
    """Recall sequences, four spans of 64 tokens each; 0 leaves the probe out."""
    decode_steps: int = 256
    """Tokens at the end of one sequence per domain that the last row repeats at one query per
    step; 0 for none."""
    calibration_tokens: int = 16_384
    """About how many tokens the recipes are fitted on."""
    sink: int = KVConfig.sink
    """S: tokens at the start of a sequence that stay in BF16."""
    recent: int = KVConfig.recent
    """R: newest tokens that stay in BF16."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of weights and computation."""
    seed: int = 0
    """Of the recall spans."""
    out: Path | None = None
    """JSON file; by default benchmarks/results/DEVICE-evaluate-MODEL.json."""


@dataclasses.dataclass
class Measured:
    """One row: means per sequence by domain (nll, kl, top1), hits per recall span, decode check."""

    domains: dict[str, list[tuple[float, float, float]]] = dataclasses.field(default_factory=dict)
    spans: list[float] = dataclasses.field(default_factory=list)
    decode: dict[str, float] | None = None


def fitted_rotations(
    loaded: Loaded, names: Sequence[str], windows: KVConfig, tokens: int, length: int
) -> tuple[dict[str, Rotation], dict[str, Any]]:
    """Every recipe fitted from one calibration on the bundled calibration text, and its numbers.

    No head falls back to another recipe here, so that each row is what its name says.
    """
    if not names:
        return {}, {}
    # Here and not above: calib is built on this package.
    from calib.collect import collect_moments
    from calib.data import calibration_texts, data_hash, sequences
    from calib.fit import fit

    texts = calibration_texts()
    count = max(1, round(tokens / length / len({text.domain for text in texts})))
    found = sequences(loaded.tokenizer.encode, texts, length=length, count=count)
    rows = [row for domain in found.values() for row in domain]
    with tqdm(total=length * len(rows), desc="calibrating", unit=" tokens") as bar:
        moments = collect_moments(loaded.decoder, rows, sink=windows.sink, progress=bar)
    rotations = {name: fit(moments, name)[0] for name in names}
    used = moments.statistics(0).tokens
    return rotations, {"tokens": used, "data_hash": data_hash(rows)}


def measure(
    loaded: Loaded,
    rotations: Mapping[str, Rotation | None],
    texts: Mapping[str, np.ndarray],
    windows: KVConfig,
    *,
    stride: int = 2,
    recall: int = 3,
    decode_steps: int = 256,
    seed: int = 0,
) -> dict[str, Measured]:
    """Every rotation (None: BF16 pages) on the same sequences.

    Args:
        texts: i32[n, T] by domain. stride, recall, decode_steps, seed: see ``Arguments``. Only the
            last rotation is checked at one query per step: the slowest part by far.

    Raises:
        ValueError: sequences too short for a page, or values that are not finite.
    """
    length = next(iter(texts.values())).shape[1]
    first = windows.sink + windows.recent + PAGE - 1  # the first position that sees a page
    positions = np.arange(first + 1, length - 1, stride)
    if len(positions) == 0:
        raise ValueError(
            f"length={length}: must be more than {first + 2} tokens for a page to be seen"
        )
    scorer = Scorer(loaded.decoder, windows)
    rows = {name: Measured({domain: [] for domain in texts}) for name in rotations}
    probes = []
    if recall:
        bases = [row for domain in texts.values() for row in domain][:recall]
        probes = recall_sequences(bases, word_tokens(loaded.tokenizer), windows, seed)
    passes = sum(map(len, texts.values())) + len(probes)
    total = len(rotations) * passes + bool(decode_steps)
    with tqdm(total=total, desc="evaluating", unit=" passes") as bar:
        for domain, sequences in texts.items():
            for tokens in sequences:
                exact = scorer.hidden(tokens, None)
                for name, rotation in rotations.items():
                    h = exact if rotation is None else scorer.hidden(tokens, rotation)
                    scores = scorer.compare(exact, h, tokens, positions)
                    rows[name].domains[domain].append(scores.mean())
                    bar.update()
        for probe in probes:
            for name, rotation in rotations.items():
                h = scorer.hidden(probe.tokens, rotation)
                hits = scorer.predict(h, probe.positions) == probe.tokens[probe.positions + 1]
                rows[name].spans.extend(hits.mean(1).tolist())
                bar.update()
        if decode_steps:
            pair = np.stack([sequences[0] for sequences in texts.values()])
            name, rotation = list(rotations.items())[-1]
            scores, largest = scorer.decode_check(pair, rotation, decode_steps)
            _, kl, top1 = scores.mean()
            rows[name].decode = {
                "steps": decode_steps,
                "kl_to_prefill": kl,
                "top1_of_prefill": top1,
                "largest_logit_difference": largest,
            }
            bar.update()
    return rows


# ---------------------------------------------------------------------------------------- numbers


def summary(rows: Mapping[str, Measured], reference: str | None) -> list[dict[str, Any]]:
    """One JSON row per recipe: means, standard errors, pairs, and the values they come from."""
    table = []
    for name, row in rows.items():
        entry: dict[str, Any] = {"recipe": name, "domains": {}}
        for domain, sequences in row.domains.items():
            nll, kl, top1 = (list(column) for column in zip(*sequences, strict=True))
            entry["domains"][domain] = {
                "perplexity": float(np.exp(np.mean(nll))),
                "kl": float(np.mean(kl)),
                "kl_se": standard_error(kl),
                "top1": float(np.mean(top1)),
                "top1_se": standard_error(top1),
                "per_sequence": {"nll": nll, "kl": kl, "top1": top1},
            }
        if row.spans:
            entry["recall"] = float(np.mean(row.spans))
            entry["recall_se"] = standard_error(row.spans)
            entry["recall_per_span"] = row.spans
        if row.decode is not None:
            entry["decode_check"] = row.decode
        if reference is not None and name != BF16:
            entry["kl_ratio"] = dict(
                zip(
                    ("ratio", "low", "high"),
                    paired_ratio(_all_kl(row), _all_kl(rows[reference])),
                    strict=True,
                ),
                to=reference,
            )
        table.append(entry)
    return table


def _all_kl(row: Measured) -> list[float]:
    return [kl for sequences in row.domains.values() for _, kl, _ in sequences]


def markdown(table: Sequence[Mapping[str, Any]], bits: float) -> str:
    """A table, one recipe a line: +- one standard error, ratios with their 2-SE interval."""
    domains = list(table[0]["domains"])
    reference = next((row["kl_ratio"]["to"] for row in table if "kl_ratio" in row), None)
    header = ["recipe", "bits", *(f"perplexity {name}" for name in domains)]
    header += [*(f"KL {name}" for name in domains), *(f"top-1 % {name}" for name in domains)]
    header += ["recall %"] if "recall" in table[0] else []
    header += [f"KL / KL of {reference} [2 SE]"] if reference else []
    lines = [header, ["---"] * len(header)]
    for row in table:
        cells = [row["recipe"], "16" if row["recipe"] == BF16 else f"{bits:g}"]
        numbers = list(row["domains"].values())
        cells += [f"{one['perplexity']:.2f}" for one in numbers]
        cells += [f"{one['kl']:.4f} ± {one['kl_se']:.4f}" for one in numbers]
        cells += [f"{100 * one['top1']:.1f}" for one in numbers]
        if "recall" in row:
            cells.append(f"{100 * row['recall']:.1f} ± {100 * row['recall_se']:.1f}")
        if reference:
            ratio = row.get("kl_ratio")
            cells.append(
                "-"
                if ratio is None
                else f"{ratio['ratio']:.2f} [{ratio['low']:.2f}, {ratio['high']:.2f}]"
            )
        lines.append(cells)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines) + "\n"


# ---------------------------------------------------------------------------------------- command


def run(arguments: Arguments) -> tuple[list[dict[str, Any]], Path]:
    """The command: measures, prints a table, writes the JSON; returns the rows and the file."""
    from calib.data import data_hash, evaluation_texts, sequences
    from calib.recipes import recipe

    names = [name.strip() for name in arguments.recipes.split(",") if name.strip()]
    for name in names:  # refuse at the door, not after minutes
        if name != BF16:
            recipe(name)
    if not names and not arguments.rotation:
        raise ValueError("--recipes and --rotation are both empty: nothing to measure")
    windows = KVConfig(sink=arguments.sink, recent=arguments.recent)
    started, origin = time.perf_counter(), results.provenance()  # of the code that runs from here
    loaded = load(resolve(arguments.model), dtype=jnp.dtype(arguments.dtype))
    stored = {
        str(path): checkpoint.load(
            path, model_config=loaded.config, weights_hash=loaded.weights_hash
        )[0]
        for path in arguments.rotation
    }
    texts = sequences(
        loaded.tokenizer.encode,
        evaluation_texts(),
        length=arguments.length,
        count=arguments.sequences,
    )
    fitted, calibration = fitted_rotations(
        loaded,
        [name for name in names if name != BF16],
        windows,
        arguments.calibration_tokens,
        arguments.length,
    )
    rotations: dict[str, Rotation | None] = {name: fitted.get(name) for name in names}
    rows = measure(
        loaded,
        {**rotations, **stored},
        texts,
        windows,
        stride=arguments.stride,
        recall=arguments.recall,
        decode_steps=arguments.decode_steps,
        seed=arguments.seed,
    )
    quantised = [name for name in rows if name != BF16]
    reference = "hadamard" if "hadamard" in rows else next(iter(quantised), None)
    table = summary(rows, reference)
    bits = bits_per_element(loaded.config.head_dim)
    print(markdown(table, bits))
    stem = f"{origin['device']['platform']}-evaluate-{Path(arguments.model).stem}.json"
    path = arguments.out or results.FOLDER / stem
    results.write(
        path,
        command=" ".join([PROGRAM, *sys.argv[1:]]),
        config={
            name: str(value) if isinstance(value, Path) else value
            for name, value in dataclasses.asdict(arguments).items()
            if name not in ("out", "rotation")
        }
        | {"rotation": [str(path) for path in arguments.rotation]},
        rows=table,
        bits_per_element=bits,
        calibration=calibration,
        evaluation_hash=data_hash([row for domain in texts.values() for row in domain]),
        weights_hash=loaded.weights_hash,
        seconds=round(time.perf_counter() - started, 1),
        **origin,
    )
    return table, path


def main() -> None:
    """Parse the command line and run; wrong input ends in one line and exit code 2."""
    arguments = tyro.cli(Arguments, prog=PROGRAM)
    try:
        _, path = run(arguments)
    except (ValueError, NotImplementedError, FileNotFoundError, FetchError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    print(f"written to {path}")


if __name__ == "__main__":
    main()
