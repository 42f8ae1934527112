"""What the README and docs/ tell a reader to type works: Python blocks, commands, links."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
SHELL = ("bash", "console", "sh", "shell")
RUN = "import sys; exec(compile(sys.stdin.read(), sys.argv[1], 'exec'), {'__name__': '__main__'})"


@dataclasses.dataclass(frozen=True)
class Block:
    """One fenced block; ``line`` is the number of its first line of text."""

    language: str
    line: int
    text: str


def blocks(text: str) -> list[Block]:
    """The fenced blocks of a Markdown text, in order; a fence that never closes is an error."""
    found: list[Block] = []
    lines = text.splitlines()
    opened: int | None = None
    for index, line in enumerate(lines):
        if not line.startswith("```"):
            continue
        if opened is None:
            opened = index
            continue
        body = "\n".join(lines[opened + 1 : index])
        found.append(Block(lines[opened].removeprefix("```").strip(), opened + 2, body))
        opened = None
    if opened is not None:
        raise ValueError(f"line {opened + 1}: this fence is never closed")
    return found


def script(text: str) -> str:
    """A document's Python blocks as one program, each line at its own line number."""
    lines = [""] * (text.count("\n") + 1)
    for block in blocks(text):
        if block.language == "python":
            body = block.text.splitlines()
            lines[block.line - 1 : block.line - 1 + len(body)] = body
    return "\n".join(lines)


def commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """(line, words) of each command in the shell blocks; quotes and ``\\`` may span lines."""
    for block in blocks(text):
        if block.language not in SHELL:
            continue
        prompts = "$ " in block.text and block.language == "console"
        number, pending = block.line, ""
        for offset, line in enumerate(block.text.splitlines()):
            if not pending:
                number = block.line + offset
                if prompts and not line.startswith("$ "):
                    continue  # output
                line = line.removeprefix("$ ")
            pending += line.removesuffix("\\") + "\n"
            if line.endswith("\\"):
                continue
            try:
                words = shlex.split(pending, comments=True)
            except ValueError:
                continue  # a quotation that goes on in the next line
            pending = ""
            if words:
                yield number, words
        if pending:
            raise ValueError(f"line {number}: this command never ends")


@functools.cache
def flags_of(*command: str) -> frozenset[str]:
    """The flags that ``python -m command --help`` names.

    Run as ``python -m`` runs it, but in this process: a new one imports jax for four seconds.
    """
    printed, errors = io.StringIO(), io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(errors),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", "'.*' found in sys.modules", RuntimeWarning)
        patch.setattr("sys.argv", [*command, "--help"])
        patch.setattr("os.environ", dict(os.environ))  # a benchmark sets what XLA reads
        with pytest.raises(SystemExit) as left:
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
    assert not left.value.code, f"python -m {' '.join(command)} --help:\n{errors.getvalue()}"
    return frozenset(re.findall(r"(?<![\w-])--?[A-Za-z][\w-]*", printed.getvalue()))


@functools.cache
def make_targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))


def fault(words: list[str]) -> str | None:
    """What is wrong with a command of the project, or None; other programs are not judged."""
    program, rest = Path(words[0]).name, words[1:]
    if program == "make":
        targets = [word for word in rest if not word.startswith("-") and "=" not in word]
        unknown = [target for target in targets if target not in make_targets()]
        return f"the Makefile has no target {unknown}" if unknown else None
    if not re.fullmatch(r"python[\d.]*", program):
        return None
    if rest[:1] == ["-m"] and rest[1].partition(".")[0] in ("oscar_jax", "calib", "pallas_kernels"):
        flags = [word.partition("=")[0] for word in rest[2:] if re.match(r"--?[A-Za-z]", word)]
        unknown = [flag for flag in flags if flag not in flags_of(rest[1])]
        if unknown and re.fullmatch("[a-z]+", rest[2]):  # a subcommand's own flags
            unknown = [flag for flag in unknown if flag not in flags_of(*rest[1:3])]
        return f"python -m {rest[1]} has no flag {unknown}" if unknown else None
    if rest and rest[0].endswith(".py") and not (ROOT / rest[0]).exists():
        return f"there is no file {rest[0]}"
    return None


def anchors(path: Path) -> set[str]:
    """The fragments that a Markdown file's headings answer to, as code hosts make them."""
    headings = re.findall(r"^#+ +(.*)$", path.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_python_blocks_run(path: Path) -> None:
    program = script(path.read_text())
    if program.strip():
        done = subprocess.run(
            [sys.executable, "-c", RUN, name(path)],
            input=program,
            capture_output=True,
            text=True,
            cwd=ROOT,
        )
        assert done.returncode == 0, f"{name(path)}:\n{done.stderr[-4000:]}"


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_commands_exist_with_their_flags(path: Path) -> None:
    faults = [
        f"{name(path)}:{line}: {problem}"
        for line, words in commands(path.read_text())
        if (problem := fault(words))
    ]
    assert faults == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_links_inside_the_repository_lead_somewhere(path: Path) -> None:
    broken = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        for target in re.findall(r"\]\(([^)\s]+)\)", line):
            if re.match(r"[a-z]+:", target):
                continue
            file, _, fragment = target.partition("#")
            resolved = (path.parent / file).resolve() if file else path
            if not resolved.exists() or (fragment and fragment not in anchors(resolved)):
                broken.append(f"{name(path)}:{number}: {target}")
    assert broken == []


def test_the_readme_opens_with_the_commands_that_set_everything_up() -> None:
    typed = [words for _, words in commands((ROOT / "README.md").read_text())]
    assert ["make", "serve"] in typed
    assert ["make", "test"] in typed


EXAMPLE = """text
```python
x = 1
```
```console
$ python -m calib --model a \\
    --no-such-flag=3
output --ignored
$ make test nothing
```
```python
raise ValueError(x)
```
"""


def test_a_failing_block_is_reported_at_its_own_line() -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN, "docs/x.md"],
        input=script(EXAMPLE),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert 'File "docs/x.md", line 12' in done.stderr
    assert "ValueError: 1" in done.stderr


def test_unknown_flags_and_targets_are_faults() -> None:
    (line, calibrate), (_, make) = commands(EXAMPLE)
    assert (line, calibrate) == (
        6,
        ["python", "-m", "calib", "--model", "a", "--no-such-flag=3"],
    )
    assert fault(calibrate) == "python -m calib has no flag ['--no-such-flag']"
    assert fault(make) == "the Makefile has no target ['nothing']"
    assert fault(["curl", "--anything"]) is None


def test_a_fence_that_never_closes_is_an_error() -> None:
    with pytest.raises(ValueError, match="line 2: this fence is never closed"):
        blocks("text\n```python\nx = 1\n")
