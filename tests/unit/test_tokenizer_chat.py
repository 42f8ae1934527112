"""Chat templates are programs from outside: they see what they need and can neither escape nor run
away, and a request can set only what is meant to be set."""

from __future__ import annotations

import sys
import time
import tracemalloc
from typing import Any

import pytest

from oscar_jax.models.chat import MAX_CHARS, ChatTemplate

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}]


def rendered(source: str, messages: Any = MESSAGES, **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)


def test_messages_tools_tokens_and_the_generation_prompt_reach_the_template() -> None:
    source = (
        "{{ bos_token }}{% for m in messages %}\n"
        "[{{ m['role'] }}] {{ m.content }}\n"
        "{% endfor %}\n"
        "{% if tools %}{{ tools | tojson }}{% endif %}\n"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    # block lines leave no line of their own behind: that is how published templates are written
    assert rendered(source, tools=[{"name": "é<b>"}]) == (
        '<s>[user] Hi\n[assistant] Yes?\n[{"name": "é<b>"}][assistant] '
    )
    assert rendered(source, add_generation_prompt=False) == "<s>[user] Hi\n[assistant] Yes?\n"


def test_what_published_templates_use_works() -> None:
    source = """
{%- set ns = namespace(last=-1, think=enable_thinking is defined and enable_thinking is false) -%}
{%- for message in messages[::-1] -%}
  {%- if message.role == 'system' -%}{%- continue -%}{%- endif -%}
  {%- set ns.last = (messages|length - 1) - loop.index0 -%}
  {%- if message.content is string and message.content.startswith('<x>') -%}
    {%- break -%}
  {%- endif -%}
  {{- message.content.split('</think>')[-1].lstrip('\\n').replace('a', 'b') | trim | upper -}}
  {{- '|' + message.role ~ ns.last -}}
{%- endfor -%}
{%- macro twice(x) -%}{{ x * 2 }}{%- endmacro -%}
{{- twice('=') -}}
{{- messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(',') -}}
{{- '<think></think>' if ns.think -}}
"""
    messages = [*MESSAGES, {"role": "user", "content": "q</think>\n\nand a"}]
    assert rendered(source, messages) == "BND B|user2YES?|assistant1HI|user0==Hi,q</think>\n\nand a"
    assert rendered(source, messages, options={"enable_thinking": False}).endswith(
        "<think></think>"
    )


def test_a_template_may_refuse_the_conversation_in_its_own_words() -> None:
    with pytest.raises(ValueError, match="roles must alternate"):
        rendered("{{ raise_exception('roles must alternate') }}")


def test_messages_that_the_template_cannot_read_are_an_error_of_the_request() -> None:
    with pytest.raises(ValueError, match="chat template failed"):
        rendered("{{ 'a' + messages[0].content }}", [{"role": "user", "content": 3}])
    with pytest.raises(ValueError, match="chat template failed"):
        rendered("{{ messages[0].content.text.more }}", [{"role": "user"}])


@pytest.mark.parametrize(
    "option", ["tokenize", "chat_template", "messages", "tools", "max_seconds", "bos_token", ""]
)
def test_an_option_that_is_not_listed_is_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option!r} is not allowed: only .'enable_thinking'"):
        ChatTemplate("{{ tokenize }}", {}).render(MESSAGES, options={option: True})


def test_a_listed_option_must_have_its_type() -> None:
    with pytest.raises(ValueError, match="enable_thinking='yes': must be a bool"):
        rendered("", options={"enable_thinking": "yes"})


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}",
        "{{ (messages|first).__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ messages|map(attribute='__class__')|list }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set x = namespace() %}{{ x.__class__.__mro__ }}",
        "{{ lipsum() }}",
    ],
)
def test_a_template_cannot_reach_python_or_change_its_input(source: str) -> None:
    messages = [dict(message) for message in MESSAGES]
    try:
        text = rendered(source, messages)
    except ValueError:
        text = ""
    assert messages == MESSAGES
    assert "class" not in text
    assert "root:" not in text
    assert "<built-in" not in text


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
        "{{ 'a' * 10**9 }}",
        "{{ 10**9 * 'a' }}",
        "{{ [0] * 10**9 }}",
        "{{ 10 ** (10 ** 10) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ 'a'.center(10**9) }}",
        "{{ 'a' | center(10**9) }}",
        "{{ 'a'.ljust(10**9) }}",
        "{{ 'a'.zfill(10**9) }}",
        "{{ '\\t'.expandtabs(10**9) }}",
        "{{ 'a\\nb' | indent(10**9) }}",
        "{{ messages | tojson(indent=10**9) }}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}"
        "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}"
        "{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}"
        "{% set ns.s = ns.s.replace('ab', 'abab') %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}"
        "{% set ns.s = ns.s | replace('ab', 'abab') %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}"
        "{% set ns.s = [ns.s, ns.s] | join %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}"
        "{% set ns.s = ns.s.join(['', ns.s, '']) %}{% endfor %}",
        "{% set ns = namespace(n=3) %}{% for i in range(60) %}"
        "{% set ns.n = ns.n * ns.n %}{% endfor %}",
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}"
        "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    ],
    ids=lambda source: ascii(source)[-40:],
)
def test_a_template_that_would_run_or_grow_without_end_is_stopped(source: str) -> None:
    start = time.perf_counter()
    tracemalloc.start()  # of this interpreter alone; the process may be compiling elsewhere
    try:
        with pytest.raises(ValueError, match="chat template"):
            rendered(source, max_seconds=0.5)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert time.perf_counter() - start < 5
    assert peak < 100_000_000  # bytes


def test_a_long_conversation_is_within_the_bounds_and_quick() -> None:
    source = "{% for m in messages %}{{ '<' ~ m.role + '>' ~ m.content | trim }}{% endfor %}"
    messages = [{"role": "user", "content": "word " * 2000}] * 100
    start = time.perf_counter()
    text = rendered(source, messages)
    assert len(text) == 100 * (len("<user>") + 9999)
    assert len(text) < MAX_CHARS
    assert time.perf_counter() - start < 3


def test_a_prompt_past_the_limit_is_refused_however_it_comes_about() -> None:
    messages = [{"role": "user", "content": "x" * (MAX_CHARS // 2 + 1)}] * 2
    with pytest.raises(ValueError, match="larger than 4,000,000"):
        rendered("{% for m in messages %}{{ m.content }}{% endfor %}", messages)


def test_a_trace_of_the_callers_own_is_put_back() -> None:
    def trace(frame: Any, event: str, argument: Any) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        rendered("{{ messages | length }}")
        assert sys.gettrace() is trace
        with pytest.raises(ValueError):
            rendered("{{ raise_exception('no') }}")
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("source", ["{% if %}", "{{ x | lipsum }}", "{% unknown %}"])
def test_a_template_that_does_not_compile_is_refused_when_the_model_loads(source: str) -> None:
    with pytest.raises(ValueError, match="does not compile"):
        ChatTemplate(source, {})
