"""``python -m oscar_jax.evaluate --model NAME``: what each rotation costs a model in quality.

Five parts, every one through the real pages and against the same model with BF16 pages:

    kl       perplexity, KL and top-1 agreement per text domain and band of positions
    recall   of random spans, keyed values and passages that lie in the pages, by depth and length:
             damage that kl does not see
    format   JSON objects and tool calls written greedily behind a long text: are they still valid,
             how far do they agree, are they longer
    drift    a long generation fed to the quantised cache: does KL grow, where do they part ways
    decode   the end of a sequence per domain at one query per step: how far is that from prefill

Texts and calibration share nothing. Standard errors are over sequences (questions for recall,
prompts for format); every recipe is also compared with one of them, paired by sequence or span.
The file is written after every part of every row, and ``--resume`` goes on from it.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import jax.numpy as jnp
import tyro
from tqdm import tqdm

from oscar_jax import results
from oscar_jax.config import KVConfig
from oscar_jax.evaluation import plots
from oscar_jax.evaluation.record import Record, check_same
from oscar_jax.evaluation.rows import ALL, INGREDIENTS, LISTS, Fits, Row, page_bits
from oscar_jax.evaluation.suite import PARTS, Settings, Suite
from oscar_jax.evaluation.table import compare, every_table, gaps
from oscar_jax.fetch import FetchError, resolve
from oscar_jax.models import Loaded, load

PROGRAM = "python -m oscar_jax.evaluate"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Measure what 2-bit pages cost a model, for several rotations side by side.

    Time on two idle cores, SmolLM2-135M (a pass over 2,048 tokens takes about 5 s), per recipe: kl
    40 s, recall 15 s, format 25 s, drift 10 s, decode 35 s, and 10 to 40 s to compile for each new
    codec; once: 15 s to load, 60 s to calibrate per choice of domains, 90 s to generate for drift.
    """

    model: str
    """A name in configs/, a Hugging Face directory or a GGUF file."""
    recipes: str = ",".join(INGREDIENTS)
    """Comma-separated: bf16, or any recipe of python -m calib; RECIPE@DOMAIN is fitted on the
    calibration text of one domain alone (prose or code); "ablation" is every row of
    docs/accuracy.md with a closed form, "learned" those of it with +optr."""
    rotation: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction] = ()
    """A checkpoint to measure as well; repeat for more."""
    parts: str = "kl,recall"
    """Comma-separated: kl, recall, format, drift, decode."""
    calibration_domain: str = ALL
    """The domain of recipes that name none: all, prose or code."""
    calibration_tokens: int = 16_384
    """About how many tokens the recipes are fitted on; a single domain has its share of them."""
    sequences: int = 4
    """kl: sequences of every domain."""
    length: int = 2048
    """Tokens of a sequence, up to the model's context."""
    stride: int = Settings.stride
    """kl: score every so many positions, from the first that sees a page."""
    recall: int = Settings.recall
    """recall: probes of 12 questions each, at every length."""
    recall_lengths: tuple[int, ...] = ()
    """recall: lengths to ask at besides --length, for instance 4096 8192."""
    prompts: int = Settings.prompts
    """format: how many, JSON objects and tool calls in turn."""
    context_tokens: int = Settings.context_tokens
    """format: tokens of text in front of the request."""
    answer_tokens: int = Settings.answer_tokens
    """format: most tokens of an answer."""
    drift: int = Settings.drift
    """drift: tokens that are generated for each domain."""
    drift_temperature: float = Settings.drift_temperature
    """drift: of the generation, with fixed noise; 0 is greedy."""
    per_step: bool = False
    """drift: feed the tokens at one query per step and not in prefill, as serving would: the same
    numbers up to bfloat16 rounding, at 60 ms a token and recipe."""
    decode_steps: int = Settings.decode_steps
    """decode: tokens at the end of each sequence."""
    sink: int = KVConfig.sink
    """S: tokens at the start of a sequence that stay in BF16."""
    recent: int = KVConfig.recent
    """R: newest tokens that stay in BF16."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of weights and computation."""
    seed: int = 0
    """Of the recall probes and of the drift's noise."""
    out: Path | None = None
    """JSON file; by default benchmarks/results/DEVICE-evaluate-MODEL.json."""
    resume: bool = False
    """Keep the rows and parts that the file already has, and measure what is missing."""
    plot: Path | None = None
    """Draw the table into this PNG."""


def run(arguments: Arguments) -> tuple[list[dict[str, Any]], Path]:
    """The command: measures, prints tables, writes the JSON; returns the rows and the file."""
    from calib.data import data_hash  # here and not above: calib is built on this package

    rows, parts = _wanted(arguments)
    started, origin = time.perf_counter(), results.provenance()  # of the code that runs from here
    stem = f"{origin['device']['platform']}-evaluate-{Path(arguments.model).stem}.json"
    path = arguments.out or results.FOLDER / stem
    if arguments.resume and not path.exists():
        raise ValueError(f"--resume: {path} does not exist")
    old = Record.load(path) if arguments.resume else None
    loaded = load(resolve(arguments.model), dtype=jnp.dtype(arguments.dtype))
    windows = KVConfig(sink=arguments.sink, recent=arguments.recent)
    suite = _suite(arguments, loaded, windows, old)
    fits = Fits(loaded, windows, arguments.calibration_tokens, arguments.length)
    for row in rows:
        fits.check(row)
    protocol = {
        "weights_hash": loaded.weights_hash,
        "windows": [windows.sink, windows.recent],
        "dtype": arguments.dtype,
        "platform": origin["device"]["platform"],
        "parts": {},
    }
    skipped = {}
    for part in parts:
        try:
            protocol["parts"][part] = suite.protocol(part)
        except NotImplementedError as error:  # a base model has no chat template
            skipped[part] = str(error)
            print(f"part {part} is left out: {error}", file=sys.stderr)
    record = Record(protocol) if old is None else old
    if old is not None:
        check_same(old.protocol, protocol)
        old.protocol["parts"] |= protocol["parts"]
    todo = [
        (row, part) for row in rows for part in protocol["parts"] if not record.has(row.name, part)
    ]
    config = _config(arguments)

    def save() -> None:
        record.reference = suite.reference
        compare(record.rows)
        record.write(
            path,
            command=" ".join([PROGRAM, *sys.argv[1:]]),
            config=config,
            calibration=fits.calibration(arguments.calibration_domain),
            evaluation_hash=data_hash([row for own in suite.texts.values() for row in own]),
            weights_hash=loaded.weights_hash,
            domain_gap=gaps(record.rows),
            skipped=skipped,
            seconds=round(time.perf_counter() - started, 1),
            **origin,
        )

    _measure(suite, fits, todo, arguments, record, save, origin)
    save()
    print(every_table(record.rows))
    if arguments.plot is not None:
        plots.save(record.rows, arguments.plot, arguments.model)
    return record.rows, path


def _measure(
    suite: Suite,
    fits: Fits,
    todo: list[tuple[Row, str]],
    arguments: Arguments,
    record: Record,
    save: Any,
    origin: dict[str, Any],
) -> None:
    """Every (row, part) in turn, rows fitted when their turn comes; saved after each."""
    fitted: Row | None = None
    total = sum(suite.cost(part) for _, part in todo)
    with tqdm(total=total, desc="evaluating", unit=" tokens", unit_scale=True) as bar:
        for row, part in todo:
            if row != fitted:
                rotation, calibration = fits.rotation(row)
                bits = page_bits(fits.loaded, fits.windows, rotation)
                fitted = row
            bar.set_postfix_str(f"{row.name} {part}")
            began = time.perf_counter()
            fields = suite.run(part, rotation, bar.update)
            seconds = round(time.perf_counter() - began, 1)
            said = {"commit": origin["commit"], "date": origin["date"], "seconds": seconds}
            fields |= {"bits": bits, "calibration": calibration, "measured": {part: said}}
            record.put(row.name, fields)
            save()


def _wanted(arguments: Arguments) -> tuple[list[Row], list[str]]:
    """Rows and parts of the command line, refused at the door and not after minutes."""
    names = [name.strip() for name in arguments.recipes.split(",") if name.strip()]
    names = [one for name in names for one in LISTS.get(name, (name,))]
    rows = [Row.of(name, arguments.calibration_domain) for name in dict.fromkeys(names)]
    rows += [Row(str(path), checkpoint=path) for path in arguments.rotation]
    if not rows:
        raise ValueError("--recipes and --rotation are both empty: nothing to measure")
    parts = [name.strip() for name in arguments.parts.split(",") if name.strip()]
    if not parts or set(parts) - {*PARTS}:
        raise ValueError(f"--parts {arguments.parts!r}: must be some of {','.join(PARTS)}")
    return rows, [part for part in PARTS if part in parts]


def _suite(arguments: Arguments, loaded: Loaded, windows: KVConfig, old: Record | None) -> Suite:
    """The suite of the settings, on the bundled evaluation text.

    Raises:
        ValueError: a length beyond the model's context or beyond the text there is.
    """
    from calib.data import evaluation_texts, sequences

    longest = loaded.config.max_position_embeddings
    for length in (arguments.length, *arguments.recall_lengths):
        if length > longest:
            raise ValueError(f"length={length}: {arguments.model} has a context of {longest}")
    texts, encode = evaluation_texts(), loaded.tokenizer.encode
    longer = {
        length: sequences(encode, texts, length=length, count=arguments.recall)
        for length in arguments.recall_lengths
    }
    settings = Settings(
        **{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Settings)}
    )
    return Suite(
        loaded,
        windows,
        sequences(encode, texts, length=arguments.length, count=arguments.sequences),
        settings,
        longer=longer,
        saved=None if old is None else old.reference,
    )


def _config(arguments: Arguments) -> dict[str, Any]:
    fields = dataclasses.asdict(arguments)
    hidden = ("out", "rotation", "resume", "plot")
    config = {name: value for name, value in fields.items() if name not in hidden}
    return config | {"rotation": [str(path) for path in arguments.rotation]}


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
