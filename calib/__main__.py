"""``python -m calib --model NAME --out DIR``: fit a model's rotations and save a checkpoint."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

from calib.calibration import DEFAULT_TOKENS, calibrate
from calib.choice import AUTO, candidates
from calib.data import read_texts
from calib.optr import OptrSettings
from calib.recipes import ValueTarget, with_widths
from calib.recipes import recipe as recipe_of
from calib.report import CalibrationReport
from oscar_jax import checkpoint
from oscar_jax.config import KVConfig
from oscar_jax.fetch import FetchError, resolve


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Fit the transforms of a model's 2-bit KV cache on text and save them as a checkpoint."""

    model: str
    """A name in configs/, a Hugging Face directory or a GGUF file."""
    out: Path
    """Directory of the checkpoint; a report lies beside the arrays in it."""
    load_format: Literal["auto", "dummy"] = "auto"
    """dummy: random weights of the right shapes, to see time and memory before a download. The
    checkpoint says so and is refused for any other weights."""
    recipe: str = AUTO
    """auto fits the best candidates, tries them in the model on held-out text and keeps one; or
    identity, hadamard, oscar-shared, oscar or stretch with any of +centre, +waterfill, +gain,
    +clip, +optr."""
    key_bits: Literal[2, 3, 4] = 2
    """Of a key's code, on average, metadata apart; +k3 and +k4 in a recipe's name are the same."""
    value_bits: Literal[2, 4] = 2
    """Of a value's code; +v4 in a recipe's name is the same."""
    data: Annotated[tuple[Path, ...], tyro.conf.UseAppendAction] = ()
    """A UTF-8 text file to calibrate on; repeat for more. Default: prose and code of the Python
    standard library, and chat about it in the model's own template."""
    value_target: ValueTarget = "proxy"
    """Which value covariance is diagonalised: token weights, or the attention output's own."""
    tokens: int = DEFAULT_TOKENS
    """About how many tokens of text to fit to; two more sequences of each domain are held out."""
    positions: int | None = None
    """Fit to queries and keys as they are in sequences of up to so many tokens (2048, 32768, ...).
    Default: the model's context; 0: where they stand in the text."""
    check: bool = True
    """Run the rotation in the model on held-out text: what the verdict is made of."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of weights and computation; use what is served."""
    sink: int = KVConfig.sink
    """Tokens at the start of every sequence that are never quantised."""
    recent: int = KVConfig.recent
    """Newest tokens that are never quantised."""
    optr_steps: int = OptrSettings.steps
    """Steps of a recipe with +optr for the keys; the values take half as many."""
    optr_resume: Path | None = None
    """Directory where a recipe with +optr keeps its state: the same command goes on there after an
    interruption."""
    force: bool = False
    """Replace an existing checkpoint, and fit even on fewer than 128 tokens."""


def run(arguments: Arguments) -> CalibrationReport:
    """The command; returns its report. Raises what ``calibrate`` and ``checkpoint.save`` raise."""
    import jax.numpy as jnp

    from oscar_jax.models import load

    recipe = with_widths(arguments.recipe, arguments.key_bits, arguments.value_bits)
    wanted = [recipe_of(name) for name in candidates(recipe)]  # refuse now, not after minutes
    optr = OptrSettings(steps=arguments.optr_steps)
    if arguments.optr_resume is not None and not any(one.learned for one in wanted):
        raise ValueError(f"--optr-resume {arguments.optr_resume}: {recipe} has no +optr")
    if arguments.positions is not None and arguments.positions < 0:
        raise ValueError(f"--positions {arguments.positions}: must be at least 0")
    checkpoint.check_target(arguments.out, arguments.force)
    windows = KVConfig(sink=arguments.sink, recent=arguments.recent)
    texts = read_texts(arguments.data) or None
    form = arguments.load_format
    path = resolve(arguments.model, load_format=form)
    loaded = load(path, load_format=form, dtype=jnp.dtype(arguments.dtype))
    rotation, metadata, report = calibrate(
        loaded,
        recipe,
        texts,
        value_target=arguments.value_target,
        tokens=arguments.tokens,
        windows=windows,
        positions=arguments.positions,
        check=arguments.check,
        force=arguments.force,
        optr=optr,
        optr_resume=arguments.optr_resume,
    )
    files = report.files()
    try:
        files |= report.plots()
    except ImportError:
        print("no plots: they need matplotlib, pip install 'oscar-jax[report]'", file=sys.stderr)
    checkpoint.save(arguments.out, rotation, metadata, arguments.force, attachments=files)
    return report


def main() -> None:
    """Parse the command line and run; wrong input ends in one line and exit code 2."""
    arguments = tyro.cli(Arguments, prog="python -m calib")
    try:
        report = run(arguments)
    except (ValueError, NotImplementedError, FileNotFoundError, FetchError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    for line in report.warnings:
        print(f"warning: {line}", file=sys.stderr)
    for line in report.notes:
        print(f"note: {line}", file=sys.stderr)
    print(report.verdict)
    print(f"saved to {arguments.out}: arrays/, metadata.json, report.md, report.json")


if __name__ == "__main__":
    main()
