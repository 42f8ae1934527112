"""Renders a model's chat template in a sandbox that bounds its time and its size.

A template is a program that came with the weights. Jinja's immutable sandbox keeps it away from
Python's internals; what it still allows is to run for ever or to fill the memory, so every way to
make something large out of something small is counted here or left out.
"""

from __future__ import annotations

import datetime
import json
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from types import CodeType, FrameType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_CHARS = 4_000_000  # of a rendered prompt, and of any string or list on the way there
MAX_SECONDS = 5.0
ALLOWED_OPTIONS = {"enable_thinking": bool}  # what a request may pass to the template

_MAX_BITS = 4096  # of an integer
_MAX_INDENT = 32
# No formatting with a width, nothing that repeats, nothing random: a list that chat templates of
# the supported families need, not all that Jinja has.
_FILTERS = (
    "abs",
    "capitalize",
    "count",
    "d",
    "default",
    "dictsort",
    "escape",
    "e",
    "first",
    "float",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "sort",
    "string",
    "title",
    "tojson",
    "trim",
    "unique",
    "upper",
)
_WIDENING_METHODS = {"center", "expandtabs", "format", "format_map", "ljust", "rjust", "zfill"}


class ChatTemplate:
    """A compiled chat template.

    Args:
        source: Jinja text, as in ``tokenizer_config.json`` or ``chat_template.jinja``.
        tokens: names such as ``bos_token`` with their text, visible to the template.

    Raises:
        ValueError: the template does not compile, or uses a filter that is not allowed.

    Example:
        >>> source = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
        >>> ChatTemplate(source, {}).render([{"role": "user", "content": "Hello"}])
        '<user>Hello'
    """

    def __init__(self, source: str, tokens: Mapping[str, str]):
        environment = _BoundedEnvironment()
        try:
            self._template = environment.from_string(source)
        except (jinja2.TemplateError, RecursionError) as error:
            raise ValueError(f"the chat template does not compile: {error}") from error
        self._tokens = dict(tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        options: Mapping[str, Any] | None = None,
        max_seconds: float = MAX_SECONDS,
    ) -> str:
        """The prompt's text.

        Args:
            messages: ``{"role": ..., "content": ...}`` and whatever else the template reads.
            tools: function descriptions for templates that know them.
            add_generation_prompt: end with the opening of the assistant's turn.
            options: what a request sets, only what is in ``ALLOWED_OPTIONS``. A mapping, so that
                none of its keys can be taken for an argument of this function.
            max_seconds: wall time after which the template is stopped.

        Raises:
            ValueError: an option that is not allowed, or the template refused the messages, read
                something forbidden, grew past ``MAX_CHARS`` or ran past ``max_seconds``.
        """
        options = options or {}
        for name, value in options.items():
            wanted = ALLOWED_OPTIONS.get(name)
            if wanted is None:
                raise ValueError(
                    f"chat template option {name!r} is not allowed: only "
                    f"{sorted(ALLOWED_OPTIONS)} may be set"
                )
            if not isinstance(value, wanted):
                raise ValueError(f"{name}={value!r}: must be a {wanted.__name__}")
        variables = {
            **self._tokens,
            **options,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._bounded(variables, max_seconds)

    def _bounded(self, variables: Mapping[str, Any], max_seconds: float) -> str:
        pieces, total = [], 0
        before = sys.gettrace()
        # A loop without output never returns to us; the line trace of this thread does.
        sys.settrace(_deadline(time.perf_counter() + max_seconds))
        try:
            for piece in self._template.generate(**variables):
                total += len(piece)
                _check_size(total)
                pieces.append(piece)
        except (jinja2.TemplateError, _Bound) as error:
            raise ValueError(f"the chat template failed: {error}") from None
        except (
            TypeError,
            KeyError,
            IndexError,
            AttributeError,
            ValueError,
            OverflowError,
        ) as error:
            raise ValueError(f"the chat template failed on these messages: {error}") from None
        except RecursionError:
            raise ValueError("the chat template failed: it calls itself without end") from None
        finally:
            sys.settrace(before)
        return "".join(pieces)


class _Bound(Exception):
    """A limit was reached."""


def _check_size(size: int) -> None:
    if size > MAX_CHARS:
        raise _Bound(f"it makes something larger than {MAX_CHARS:,} characters or items")


def _deadline(limit: float) -> Any:
    def each_line(frame: FrameType, event: str, argument: Any) -> Any:
        if time.perf_counter() > limit:
            raise _Bound("it ran past its time limit")
        return each_line

    def each_call(frame: FrameType, event: str, argument: Any) -> Any:
        code: CodeType = frame.f_code
        return each_line if code.co_filename == "<template>" else None

    return each_call


class _BoundedCode(CodeGenerator):
    """``a ~ b`` goes through the environment: doubling a string 40 times is 40 characters long."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _BoundedCode

    def __init__(self) -> None:
        # trim_blocks, lstrip_blocks and break/continue: what published templates are written for
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        self.filters = {name: self.filters[name] for name in _FILTERS if name in self.filters}
        self.filters.update(tojson=_tojson, join=_join, replace=_replace, indent=_indent)
        self.globals.pop("lipsum")
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if isinstance(obj, str) and attr in _WIDENING_METHODS:
            return False
        return super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> None:
        """The sandbox would allow ``format`` in a safe form, which still knows widths."""
        return None

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            # Inside a loop Jinja passes its own variables along; no method of str takes them.
            for name in ("_loop_vars", "_block_vars"):
                kwargs.pop(name, None)
        if isinstance(owner, str) and not kwargs:
            method = getattr(__obj, "__name__", "")
            if method == "replace" and len(args) >= 2:
                _check_replace(owner, args[0], args[1])
            elif method == "join" and len(args) == 1:
                return _join(args[0], owner)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str):
            raise _Bound("'text' % values is not allowed: use ~ to join text")
        if operator == "**":
            _check_power(left, right)
        elif isinstance(left, int) and isinstance(right, int):
            _check_bits(left.bit_length() + right.bit_length())
        elif operator == "*":
            _check_repeat(left, right)
            _check_repeat(right, left)
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            _check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def joined(self, parts: Iterable[Any]) -> str:
        return self.concat(map(str, parts))

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        parts = list(parts)
        _check_size(sum(map(len, parts)))
        return "".join(parts)


def _check_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise _Bound(f"an integer of more than {_MAX_BITS} bits")


def _check_power(base: Any, exponent: Any) -> None:
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        _check_bits(base.bit_length() * exponent)


def _check_repeat(sequence: Any, times: Any) -> None:
    if isinstance(times, int) and hasattr(sequence, "__len__"):
        _check_size(len(sequence) * max(times, 0))


def _check_replace(text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        _check_size(len(text) + text.count(old) * len(new))


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
    text = str(text)
    _check_replace(text, old, new)
    return text.replace(old, new, count)


def _join(values: Iterable[Any], separator: str = "", attribute: str | None = None) -> str:
    if attribute is not None:
        raise _Bound("join(attribute=...) is not allowed: use map(attribute=...) first")
    parts = [str(value) for value in values]
    _check_size(sum(map(len, parts)) + len(separator) * len(parts))
    return str(separator).join(parts)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    margin = width if isinstance(width, str) else " " * min(width, _MAX_INDENT + 1)
    if len(margin) > _MAX_INDENT:
        raise _Bound(f"indent() by more than {_MAX_INDENT} characters")
    lines = text.splitlines(keepends=True)
    _check_size(len(text) + len(margin) * len(lines))
    padded = [margin + line if blank or line.strip() else line for line in lines[1:]]
    return "".join([margin + lines[0] if first else lines[0], *padded]) if lines else text


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as the reference renderer writes it: not HTML-escaped, not ASCII only."""
    if isinstance(indent, str) or (indent or 0) > _MAX_INDENT:
        raise _Bound(f"tojson(indent={indent!r}): must be at most {_MAX_INDENT} spaces")
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 64:
        raise _Bound("strftime_now() with a pattern of more than 64 characters")
    return datetime.datetime.now().strftime(pattern)
