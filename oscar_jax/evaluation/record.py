"""A run on disk: rows as they are measured, what they were measured on, and two runs in one."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oscar_jax import results

FIELDS = {
    "kl": "domains",
    "recall": "probes",
    "format": "answers",
    "drift": "drift",
    "decode": "decode_check",
}


@dataclasses.dataclass
class Record:
    """Rows by recipe, each with the fields of the parts that were measured.

    Args:
        protocol: what every number depends on: ``weights_hash``, ``windows``, ``dtype``,
            ``platform`` and, in ``parts``, each part's own (``Suite.protocol``).
        rows: JSON rows in the order of the table.
        reference: what BF16 wrote by itself (``Suite.reference``).
    """

    protocol: dict[str, Any]
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    reference: dict[str, Any] = dataclasses.field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Record:
        """A result file.

        Raises:
            ValueError: the file cannot be read, or is no result of this command.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(f"{path}: cannot be read as JSON ({error})") from None
        if not isinstance(content, dict) or not {"protocol", "rows"} <= content.keys():
            raise ValueError(f"{path}: has no protocol and rows: not a result of this evaluation")
        return cls(content["protocol"], content["rows"], content.get("reference", {}))

    def has(self, recipe: str, part: str) -> bool:
        """Whether a row has been measured, or its part was skipped for a reason."""
        return any(row["recipe"] == recipe and FIELDS[part] in row for row in self.rows)

    def put(self, recipe: str, fields: Mapping[str, Any]) -> None:
        """Add fields to a recipe's row, at the end of the table if it is new."""
        row = next((row for row in self.rows if row["recipe"] == recipe), None)
        if row is None:
            row = {"recipe": recipe}
            self.rows.append(row)
        measured = {**row.get("measured", {}), **fields.get("measured", {})}
        row.update({**fields, "measured": measured})

    def absorb(self, other: Record) -> None:
        """Add another run's rows and parts to this one.

        Raises:
            ValueError: the two measured on different things, which are named, or both measured the
                same part of a recipe.
        """
        check_same(self.protocol, other.protocol)
        for row in other.rows:
            for part, field in FIELDS.items():
                if field in row and self.has(row["recipe"], part):
                    raise ValueError(f"{row['recipe']}: both runs have measured part {part}")
            self.put(row["recipe"], row)
        self.protocol["parts"] = {**other.protocol["parts"], **self.protocol["parts"]}
        self.reference = {**other.reference, **self.reference}

    def write(self, path: Path, *, command: str, config: Mapping[str, Any], **more: Any) -> None:
        """Replace the file at once: an interrupted run leaves the last complete one behind."""
        partial = path.with_suffix(".partial")
        results.write(
            partial,
            command=command,
            config=config,
            rows=self.rows,
            protocol=self.protocol,
            reference=self.reference,
            **more,
        )
        os.replace(partial, path)


def check_same(protocol: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raise ValueError, naming the first difference, unless two protocols can share a table.

    A part that only one of them has is no difference.
    """
    for key in protocol.keys() | other.keys() - {"parts"}:
        if key != "parts" and protocol.get(key) != other.get(key):
            raise ValueError(
                f"{key} differs, {protocol.get(key)!r} and {other.get(key)!r}: the rows cannot "
                "stand in one table"
            )
    for part in protocol["parts"].keys() & other["parts"].keys():
        mine, theirs = protocol["parts"][part], other["parts"][part]
        for key in mine.keys() | theirs.keys():
            if mine.get(key) != theirs.get(key):
                raise ValueError(
                    f"{key} of part {part} differs, {mine.get(key)!r} and {theirs.get(key)!r}: "
                    "the rows cannot stand in one table"
                )
