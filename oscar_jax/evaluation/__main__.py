"""``python -m oscar_jax.evaluation FILE...``: the tables of results, or of several as one."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import tyro

from oscar_jax import results
from oscar_jax.evaluation import documents, plots
from oscar_jax.evaluation.record import Record
from oscar_jax.evaluation.table import compare, every_table, gaps

PROGRAM = "python -m oscar_jax.evaluation"


@dataclasses.dataclass(frozen=True)
class Arguments:
    """Print the tables of results of python -m oscar_jax.evaluate; several become one table."""

    files: Annotated[tuple[Path, ...], tyro.conf.Positional] = ()
    """JSON files. More than one: their texts, settings and weights must be the same."""
    out: Path | None = None
    """Write the merged rows to this JSON file."""
    plot: Path | None = None
    """Draw them into this PNG."""
    into: tuple[Path, ...] = ()
    """Bring the marked tables of these Markdown files up to date with benchmarks/results/."""


def run(arguments: Arguments) -> list[dict[str, Any]]:
    """The command; returns the rows."""
    for path in arguments.into:
        text = path.read_text(encoding="utf-8")
        path.write_text(documents.updated(text, results.FOLDER), encoding="utf-8")
    if not arguments.files:
        if arguments.into:
            return []
        raise ValueError("no file was named")
    merged = Record.load(arguments.files[0])
    for path in arguments.files[1:]:
        try:
            merged.absorb(Record.load(path))
        except ValueError as error:
            raise ValueError(f"{path} and {arguments.files[0]}: {error}") from None
    compare(merged.rows)
    print(every_table(merged.rows))
    contents = [json.loads(path.read_text(encoding="utf-8")) for path in arguments.files]
    if arguments.out is not None:
        kept = ("evaluation_hash", "calibration", "weights_hash", "bits_per_element")
        merged.write(
            arguments.out,
            command=" ".join([PROGRAM, *sys.argv[1:]]),
            config=contents[0]["config"],
            sources=[{key: one[key] for key in ("command", "commit", "date")} for one in contents],
            domain_gap=gaps(merged.rows),
            **{name: contents[0][name] for name in kept if name in contents[0]},
        )
    if arguments.plot is not None:
        plots.save(merged.rows, arguments.plot, contents[0]["config"]["model"])
    return merged.rows


def main() -> None:
    """Parse the command line and run; wrong input ends in one line and exit code 2."""
    arguments = tyro.cli(Arguments, prog=PROGRAM)
    try:
        run(arguments)
    except (ValueError, FileNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
