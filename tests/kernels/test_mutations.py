"""The suite notices small mistakes: each mutation of the code makes one of its tests fail.

A mutation replaces a piece of one function's source by another, in the module where it lives and
wherever the function was imported, with every compiled program forgotten before and after.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import jax
import pytest

import oscar_jax.attention
import oscar_jax.cache
import pallas_kernels.decode.xla
import pallas_kernels.format
import pallas_kernels.heads.xla
import pallas_kernels.packing
from pallas_kernels.format import PAGE
from pallas_kernels.layout import Windows
from tests.kernels.cases import Case, sequences
from tests.kernels.checks import assert_close, assert_pages_follow_the_codec, expected
from tests.kernels.runs import Run, in_one_call, in_pieces, token_by_token
from tests.kernels.test_attention_suite import CASES
from tests.unit import test_cache, test_format, test_format_widths

INT2, BF16 = CASES[3], CASES[-1]  # cases of the suite, which passes on them


def dense(case: Case, run: Callable[..., Run]) -> None:
    """The suite's checks of one run: dense attention from pages that follow the codec."""
    data = sequences(case)
    found = run(case, data, "xla")
    for row, n in enumerate(case.lengths):
        assert_close(found.out[row, :n], expected(case, data, found.cache, row))
    assert_pages_follow_the_codec(case, data, found.cache, 0)


prefill = functools.partial(dense, INT2, in_one_call)
pieces = functools.partial(dense, BF16, in_pieces)
decode = functools.partial(dense, BF16, token_by_token)


@dataclasses.dataclass(frozen=True)
class Mutation:
    """``old`` in the source of ``owner.name`` becomes ``new``; ``caught`` must then fail."""

    owner: Any
    name: str
    old: str
    new: str
    caught: Callable[[], None]

    def __str__(self) -> str:
        return f"{self.name}: {self.old} -> {self.new or 'nothing'}"


CACHE, FORMAT, PACKING = oscar_jax.cache, pallas_kernels.format, pallas_kernels.packing
DECODE, HEADS = pallas_kernels.decode.xla, pallas_kernels.heads.xla
key_words = functools.partial(
    test_format.test_uniform_key_words_hold_channel_j_d_8_plus_i_in_bits_2j, 64
)
waterfilled_words = functools.partial(
    test_format.test_waterfill_key_words_hold_4_five_times_2_and_two_times_1_bits, 64
)
wide_words = test_format_widths.test_every_bit_of_a_wide_code_has_its_place_and_no_other
wide_codec = test_format_widths.test_wide_codes_agree_with_their_float64_formula
rounding = test_format.test_uniform_scale_is_a_third_of_the_range_and_codes_round_half_up
clip = functools.partial(
    test_format.test_clip_clamps_to_the_order_statistic_floor_r_d, 0.96, 64, 61
)
at_most = test_format.test_gain_never_grows_past_1_6
at_least = test_format.test_gain_never_shrinks_below_0_7
windows = test_cache.test_visible_complete_and_first_tail_by_hand
ring = test_cache.test_the_ring_keeps_the_newest_r_t_l_tokens
page = test_cache.test_a_written_page_holds_its_tokens_and_no_other_page_changes
due = functools.partial(test_cache.test_every_page_becomes_due_exactly_once_whatever_the_steps, 1)

MUTATIONS = (
    # m(n), by one token and by one page
    Mutation(Windows, "visible_pages", "n - self.sink", "n + 1 - self.sink", prefill),
    Mutation(Windows, "visible_pages", "n - self.sink", "n + 1 - self.sink", windows),
    Mutation(Windows, "visible_pages", "// PAGE", "// PAGE + 1", windows),
    # the order of codes in a word
    Mutation(PACKING, "layout", "2, 0, range(8)", "2, 0, range(7, -1, -1)", key_words),
    Mutation(PACKING, "layout", "2, 4, range(1, 6)", "2, 4, range(5, 0, -1)", waterfilled_words),
    Mutation(PACKING, "layout", "1, 14, (6, 7)", "1, 14, (7, 6)", waterfilled_words),
    Mutation(PACKING, "layout", "Field(7, 15, 1, above=2)", "Field(7, 15, 1, above=1)", wide_words),
    Mutation(PACKING, "layout", "Field(6, 14, 2)", "Field(7, 14, 2)", wide_words),
    Mutation(PACKING, "_planes", "part >> 8", "part >> 7", wide_words),
    # the width of a water-filled segment
    Mutation(FORMAT, "waterfill_segments", "(bits - 1,", "(bits,", wide_codec),
    Mutation(FORMAT, "_waterfill_scale", "- 0.5)", "- 1)", wide_codec),
    # the gain's clamp
    Mutation(FORMAT, "_gain", "*GAIN_RANGE", "0.7, 1.7", at_most),
    Mutation(FORMAT, "_gain", "*GAIN_RANGE", "0.6, 1.6", at_least),
    # the ring's index: where it is written, and the three places where it is read
    Mutation(HEADS, "append", "(position - windows.sink)", "(position - windows.sink + 1)", ring),
    Mutation(DECODE, "ring_positions", "windows.sink - rows", "windows.sink - rows - 1", decode),
    Mutation(CACHE, "write_pages", "(PAGE * jnp.maximum", "(1 + PAGE * jnp.maximum", page),
    Mutation(
        oscar_jax.attention,
        "oscar_prefill",
        "(recent - windows.sink)",
        "(recent - windows.sink + 1)",
        pieces,
    ),
    # rounding and clip
    Mutation(FORMAT, "encode_uniform", "+ 0.5)", "+ 0.4)", rounding),
    Mutation(FORMAT, "clip_rows", "int(ratio", "-1 + int(ratio", clip),
    # the mean's share of the logits
    Mutation(DECODE, "transformed_pages", "part.max + shift", "part.max", prefill),
    # when a page is due
    Mutation(CACHE, "due_pages", "complete_pages(n)", "complete_pages(n - 1)", due),
)


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    jax.clear_caches()
    yield
    jax.clear_caches()


def mutate(monkeypatch: pytest.MonkeyPatch, mutation: Mutation) -> None:
    """Put the changed function in the place of the original, everywhere in the packages."""
    original = inspect.getattr_static(mutation.owner, mutation.name)
    plain = inspect.unwrap(original)
    source = textwrap.dedent(inspect.getsource(plain))
    assert source.count(mutation.old) == 1, f"{mutation.name} has no single {mutation.old!r}"
    namespace = vars(sys.modules[plain.__module__])
    local: dict[str, Any] = {}
    code = compile(
        "from __future__ import annotations\n" + source.replace(mutation.old, mutation.new),
        plain.__code__.co_filename,
        "exec",
    )
    exec(code, namespace, local)
    changed = local[mutation.name]
    if isinstance(mutation.owner, type):
        monkeypatch.setattr(mutation.owner, mutation.name, changed)
        return
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("oscar_jax", "pallas_kernels", "tests"):
            continue
        for attribute, value in list(vars(module).items()):
            if value is original:
                monkeypatch.setattr(module, attribute, changed)
            elif isinstance(value, dict) and original in value.values():
                for key in [key for key, item in value.items() if item is original]:
                    monkeypatch.setitem(value, key, changed)


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_small_mistake_is_noticed(mutation: Mutation, monkeypatch: pytest.MonkeyPatch) -> None:
    mutate(monkeypatch, mutation)
    with pytest.raises(AssertionError):
        mutation.caught()


def test_a_ring_with_a_row_more_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = property(lambda windows: windows.recent + PAGE + windows.lookahead + 1)
    monkeypatch.setattr(Windows, "ring", rows)
    with pytest.raises(AssertionError):
        test_cache.test_an_empty_cache_has_the_documented_arrays()
