"""tests/cases.md answers for every known report (U..) and security expectation (S..)."""

from __future__ import annotations

import ast
import dataclasses
import functools
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAP = ROOT / "tests" / "cases.md"

REPORTS = tuple(
    f"U{number:02d}"
    for number in (
        (1, 3, 4, 6, 8, 9, 11, 12, 14, 16, 18, 19, 20, 21, 23, 24, 25, 26, 28, 29, 31, 32)  # output
        + (34, 35, 36, 38, 40)  # speed and compilation
        + (41, 43, 45, 47, 48)  # memory
        + (49, 51, 53, 54, 56, 58, 59, 60, 61, 62)  # server
        + (63, 65, 67, 68, 69, 71)  # checkpoints and configs
        + (73, 75, 77, 78)  # calibration
    )
)
SECURITY = tuple(f"S{number}" for number in range(1, 22))
# What may be left to a later change, and nothing else.
LATER = ("prefix cache", "preemption", "full API", "GPU kernels", "measurement")


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the map: tests as path::name, or a topic of LATER with the reason."""

    id: str
    expectation: str
    tests: tuple[str, ...]
    later: str | None
    reason: str


def rows(text: str) -> list[Row]:
    """The rows of every table whose first column is an id."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) != 3 or not re.fullmatch(r"[US]\d+", cells[0]):
            continue
        later = re.match(r"later \(([^)]*)\): *(.*)", cells[2])
        tests = () if later else tuple(re.findall(r"`(tests/[^`]*)`", cells[2]))
        topic, reason = later.groups() if later else (None, "")
        found.append(Row(cells[0], cells[1], tests, topic, reason))
    return found


@functools.cache
def names_in(path: str) -> frozenset[str]:
    """The names of a file's test functions and of its classes' test methods (Class::name)."""
    file = ROOT / path
    if not file.is_file():
        return frozenset()
    names: set[str] = set()
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {
                f"{node.name}::{item.name}"
                for item in node.body
                if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return frozenset(name for name in names if name.split("::")[-1].startswith("test_"))


def unanswered(entries: list[Row]) -> list[str]:
    """What is wrong with the rows: no test and no reason, an unknown test, an unknown topic."""
    problems = []
    for row in entries:
        if row.later is not None:
            if row.later not in LATER:
                problems.append(f"{row.id}: {row.later!r} is not one of {LATER}")
            if len(row.reason.split()) < 4:
                problems.append(f"{row.id}: say why it is left to a later change")
        elif not row.tests:
            problems.append(f"{row.id}: names no test and no later change")
        for test in row.tests:
            path, _, name = test.partition("::")
            if name not in names_in(path):
                problems.append(f"{row.id}: there is no test {test}")
    return problems


def test_every_id_has_exactly_one_row() -> None:
    ids = [row.id for row in rows(MAP.read_text())]
    assert len(REPORTS) == 52
    assert sorted(ids) == sorted(REPORTS + SECURITY)


def test_every_row_names_tests_that_exist_or_a_later_change_with_its_reason() -> None:
    assert unanswered(rows(MAP.read_text())) == []


def test_a_row_without_an_answer_is_reported() -> None:
    table = """
| id | what must hold | where |
| --- | --- | --- |
| U01 | a | `tests/unit/test_cases_map.py::test_every_id_has_exactly_one_row` |
| U03 | b | `tests/unit/test_cases_map.py::test_that_never_was` |
| U04 | c | soon |
| U06 | d | later (someday): because it is not written yet |
| U08 | e | later (preemption): no |
"""
    assert unanswered(rows(table)) == [
        "U03: there is no test tests/unit/test_cases_map.py::test_that_never_was",
        "U04: names no test and no later change",
        f"U06: 'someday' is not one of {LATER}",
        "U08: say why it is left to a later change",
    ]
