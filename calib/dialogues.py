"""Conversations that every Python installation can write: questions about its own library.

What a served model reads most is chat: turns between its template's special tokens, and answers in
Markdown, JSON and tables. The questions here ask for functions of modules that neither calibration
nor evaluation reads as code, and for tables of the library; the answers are taken from docstrings,
signatures and those tables. Nothing is imported for it and no model is asked.
"""

from __future__ import annotations

import ast
import html.entities
import http
import json
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from calib.sources import module_source

Message = dict[str, str]
SOURCES = ("statistics", "textwrap", "heapq", "difflib", "functools", "random", "tempfile", "gzip")
TURNS = 6  # questions of one conversation


def conversations() -> list[list[Message]]:
    """Conversations of TURNS questions, in an order that depends on nothing but Python's version.

    Answers take turns between a JSON object, Markdown and source code; every conversation ends
    with a table in JSON, CSV or Markdown.
    """
    functions = [pair for name in SOURCES for pair in _functions(name)]
    tables = list(_tables())
    found: list[list[Message]] = []
    for first in range(0, len(functions), TURNS):
        messages: list[Message] = []
        for index, (name, node) in enumerate(functions[first : first + TURNS]):
            question, answer = _ANSWERS[index % len(_ANSWERS)](name, node)
            messages += [_said("user", question), _said("assistant", answer)]
        question, answer = tables[len(found) % len(tables)]
        found.append([*messages, _said("user", question), _said("assistant", answer)])
    return found


def _said(role: str, content: str) -> Message:
    return {"role": role, "content": content}


def _functions(module: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Functions and methods with a docstring, by their dotted names."""

    def inside(body: Sequence[ast.stmt], prefix: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from inside(node.body, f"{prefix}.{node.name}")
            elif isinstance(node, ast.FunctionDef) and ast.get_docstring(node):
                yield f"{prefix}.{node.name}", node

    yield from inside(ast.parse(module_source(module)).body, module)


def _as_json(name: str, node: ast.FunctionDef) -> tuple[str, str]:
    parameters = [
        {"name": argument.arg, "kind": kind}
        for kind, arguments in (
            ("positional", node.args.posonlyargs + node.args.args),
            ("keyword", node.args.kwonlyargs),
        )
        for argument in arguments
    ]
    summary = (ast.get_docstring(node) or "").split("\n")[0]
    answer = {"function": name, "line": node.lineno, "parameters": parameters, "summary": summary}
    return f"Describe `{name}` as a JSON object.", json.dumps(answer, indent=2)


def _as_prose(name: str, node: ast.FunctionDef) -> tuple[str, str]:
    return f"What does `{name}` do?", ast.get_docstring(node) or ""


def _as_code(name: str, node: ast.FunctionDef) -> tuple[str, str]:
    body = [part for part in node.body if not isinstance(part, ast.Expr)] or node.body
    code = ast.unparse(ast.FunctionDef(**{**_fields(node), "body": body}))
    return f"Show me how `{name}` is written.", f"```python\n{code}\n```"


def _fields(node: ast.AST) -> dict[str, Any]:
    return dict(ast.iter_fields(node)) | {"lineno": 1}


_ANSWERS: tuple[Callable[[str, ast.FunctionDef], tuple[str, str]], ...] = (
    _as_json,
    _as_prose,
    _as_code,
)


def _tables() -> Iterator[tuple[str, str]]:
    """Questions for tables of the library, a dozen rows each."""
    statuses = [(s.value, s.phrase, s.description) for s in http.HTTPStatus]
    entities = [
        (name, ord(text), unicodedata.name(text, "?"))
        for name, text in sorted(html.entities.html5.items())
        if name.endswith(";") and len(text) == 1
    ]
    size = 12
    for first in range(0, len(entities), 40 * size):  # every 40th dozen: neighbours are alike
        own = entities[first : first + size]
        lines = ["name,code point,Unicode name", *(f"{a},{b},{c}" for a, b, c in own)]
        yield f"List HTML entities from {own[0][0]} on as CSV.", "\n".join(lines)
    for first in range(0, len(statuses), size):
        rows = statuses[first : first + size]
        lines = ["| code | phrase | meaning |", "| --- | --- | --- |"]
        lines += [f"| {a} | {b} | {c} |" for a, b, c in rows]
        yield f"Show HTTP status codes from {rows[0][0]} on as a table.", "\n".join(lines)
        records = [{"code": a, "phrase": b, "description": c} for a, b, c in rows]
        yield f"The status codes from {rows[0][0]} on as JSON, please.", json.dumps(records)
