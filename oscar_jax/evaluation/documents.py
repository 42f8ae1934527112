"""Tables in documents that are a result file's own: written by a command, held to it by a test.

    <!-- table main cpu-evaluate-smollm2-135m.json -->
    ...
    <!-- end -->

What stands between the two comments is the table of that name (``TABLES``) of the file under
``benchmarks/results/``; ``updated`` puts it there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from oscar_jax.evaluation.rows import BF16
from oscar_jax.evaluation.statistics import paired_ratio
from oscar_jax.evaluation.table import (
    Row,
    all_kl,
    answer_table,
    band_table,
    decode_table,
    drift_table,
    gap_table,
    gaps,
    interval,
    length_table,
    main_table,
    mean_kl,
    percent,
    probe_table,
)

MARK = re.compile(r"(<!-- table (\w+) ([\w.-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
COMPARED = ("hadamard", "oscar-shared", "oscar", "oscar+centre")  # what the best recipe is held to


def best_recipe(rows: Sequence[Row]) -> str:
    """The recipe of least mean KL among those of Hadamard's bits that were fitted on all domains.

    Raises:
        ValueError: there is no Hadamard row to say what the bits are.
    """
    found = {row["recipe"]: row for row in rows if "domains" in row}
    if "hadamard" not in found:
        raise ValueError("the rows have no hadamard: its bits are what others must not exceed")
    bits = found["hadamard"].get("bits")
    names = [
        name
        for name, row in found.items()
        if name != BF16 and row.get("bits") == bits and "@" not in name and "/" not in name
    ]
    return min(names, key=lambda name: mean_kl(found[name]))


def claims(rows: Sequence[Row]) -> str:
    """What the best recipe of the table is worth, as a list."""
    found = {row["recipe"]: row for row in rows}
    name = best_recipe(rows)
    best = found[name]
    lines = [f"* `{name}` has the least KL of all recipes in these bits: {mean_kl(best):.4f}"]
    for other in COMPARED:
        if other in found and other != name:
            low_mid_high = paired_ratio(all_kl(best), all_kl(found[other]))
            ratio = dict(zip(("ratio", "low", "high"), low_mid_high, strict=True))
            lines.append(f"* its KL is {interval(ratio)} times that of `{other}`")
    exact = found.get(BF16, {})
    if "recall" in best and "recall" in exact:
        mine, theirs = (percent(row["recall"], row["recall_se"]) for row in (best, exact))
        lines.append(
            f"* it finds {mine} % of the spans where BF16 finds {theirs} %: "
            f"{best['recall'] / exact['recall']:.2f} of them"
        )
    for recipe, gap in gaps(rows).items():
        lines.append(f"* `{recipe}` fitted on the other domain has {interval(gap)} times the KL")
    return "\n".join(lines) + "\n"


TABLES: Mapping[str, Callable[[Sequence[Any]], str]] = {
    "main": main_table,
    "bands": band_table,
    "probes": probe_table,
    "lengths": length_table,
    "answers": answer_table,
    "drift": drift_table,
    "decode": decode_table,
    "gaps": gap_table,
    "claims": claims,
}
NOT_MEASURED = "(not measured in this file)\n"


def updated(text: str, folder: Path) -> str:
    """A document with every marked table as its file in ``folder`` has it.

    Raises:
        ValueError: an unknown table, or a file that cannot be read.
    """

    def table(mark: re.Match[str]) -> str:
        opening, name, file, end = mark.groups()
        if name not in TABLES:
            raise ValueError(f"table {name!r}: must be one of {', '.join(TABLES)}")
        try:
            rows = json.loads((folder / file).read_text(encoding="utf-8"))["rows"]
        except (OSError, ValueError) as error:
            raise ValueError(f"{folder / file}: cannot be read ({error})") from None
        return f"{opening}\n{TABLES[name](rows) or NOT_MEASURED}\n{end}"

    return MARK.sub(table, text)
