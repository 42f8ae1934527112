"""What is planted, asked, accepted and compared: everything of an evaluation but the model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from oscar_jax.config import KVConfig
from oscar_jax.evaluation import answers, drift, likelihood, recall
from oscar_jax.evaluation.prompts import CALL_EXAMPLES, strict_prompts, valid_call, valid_object
from oscar_jax.evaluation.recall import (
    DEPTHS,
    SPAN,
    VALUES,
    Found,
    Sentence,
    recall_probes,
    word_tokens,
)
from oscar_jax.evaluation.scorer import Scores
from oscar_jax.evaluation.statistics import paired_difference, paired_ratio, standard_error
from oscar_jax.models.tokenizer import Tokenizer, byte_level

WINDOWS = KVConfig()
SENTENCE = Sentence((1, 2, 3), (4,), (5,))  # 10 tokens with its five words
WORDS = np.arange(1000, 3000, dtype=np.int32)


# ----------------------------------------------------------------------------------------- recall


def of_kind(probe: recall.Probe, kind: str) -> list[recall.Question]:
    return [one for one in probe.questions if one.kind == kind]


@pytest.mark.parametrize("length", [2048, 4096])
def test_what_is_asked_for_lies_in_pages_once_in_every_section(length: int) -> None:
    text = np.arange(length, dtype=np.int32) % 900 + 10
    probe, other = recall_probes([text, text], WORDS, SENTENCE, WINDOWS, seed=0)
    asked = length - DEPTHS * (2 * SPAN + 10)
    pages_end = 64 + 128 * ((asked + 1 - 64 - 256) // 128)  # seen by the first query that asks
    np.testing.assert_array_equal(text, np.arange(length) % 900 + 10)  # not written over
    early = probe.tokens[:asked]
    changed = np.flatnonzero(early != text[:asked])
    assert changed.min() >= 64 and changed.max() + SPAN < pages_end
    assert changed.max() > 0.85 * pages_end  # the last section is used
    for kind in recall.KINDS:
        questions = of_kind(probe, kind)
        assert sorted(one.section for one in questions) == [0, 1, 2, 3]
        count = VALUES if kind == "key" else SPAN - 1
        for one in questions:
            # the tokens asked for stand a second time in the pages, at the depth that is said
            wanted = probe.tokens[one.positions + 1]
            start = round(one.depth * asked)
            size = 10 if kind == "key" else SPAN
            source = early[start : start + size]
            assert len(wanted) == count
            assert start + size <= pages_end
            first = size - count - (1 if kind == "key" else 0)
            np.testing.assert_array_equal(source[first : first + count], wanted)
            # and so does what is given before them
            np.testing.assert_array_equal(
                source[:first], probe.tokens[one.positions[0] + 1 - first : one.positions[0] + 1]
            )
    assert [one.section for one in probe.questions] != [one.section for one in other.questions]


def test_a_key_is_one_of_eight_and_no_word_comes_twice() -> None:
    text = np.full(2048, 7, np.int32)
    (probe,) = recall_probes([text], WORDS, SENTENCE, WINDOWS, seed=1)
    early = probe.tokens[: 2048 - SENTENCE.asked]
    starts = [i for i in range(len(early) - 3) if early[i : i + 3].tolist() == [1, 2, 3]]
    keys = [int(early[i + 3]) for i in starts]
    assert len(set(keys)) == 2 * DEPTHS
    words = early[early >= 1000]
    assert len(words) == len(set(words.tolist())) == DEPTHS * (SPAN + 2 * (1 + VALUES))
    known = {int(probe.tokens[one.positions[0] - 1]) for one in of_kind(probe, "key")}
    assert len(known) == DEPTHS and known < set(keys)
    (again,) = recall_probes([text], WORDS, SENTENCE, WINDOWS, seed=1)
    np.testing.assert_array_equal(again.tokens, probe.tokens)


def test_recall_needs_room_and_whole_words() -> None:
    with pytest.raises(ValueError, match="sequences of 1400 tokens are too short for recall"):
        recall_probes([np.zeros(1400, np.int32)], WORDS, SENTENCE, WINDOWS, seed=0)
    tokenizer = byte_level(259)
    fits = [n for n in range(1024, 2049, 64) if recall.recall_fits(n, tokenizer, WINDOWS)]
    sentence = Sentence.of(tokenizer)
    for length in (fits[0], fits[0] - 64):  # the check says what making a probe finds
        if length in fits:
            recall_probes([np.zeros(length, np.int32)], WORDS, sentence, WINDOWS, seed=0)
        else:
            with pytest.raises(ValueError, match="too short for recall"):
                recall_probes([np.zeros(length, np.int32)], WORDS, sentence, WINDOWS, seed=0)
    with pytest.raises(ValueError, match="the tokenizer has 0 whole words"):
        word_tokens(tokenizer)


def test_recall_is_summed_up_per_kind_and_depth() -> None:
    spans = [Found(s, 0.1 + 0.2 * s, 0.25 * s) for s in range(DEPTHS)]
    spans += [Found(s, 0.3 + 0.2 * s, 0.25 * s + 0.2) for s in range(DEPTHS)]
    found = recall.summary({"span": spans})["span"]
    assert found["mean"] == pytest.approx(0.475)
    assert found["se"] == pytest.approx(standard_error([one.hits for one in spans]))
    last = found["by_depth"][3]
    assert (last["depth"], last["mean"], last["se"]) == pytest.approx((0.8, 0.85, 0.1))


# ------------------------------------------------------------------------------------- likelihood


def test_positions_are_cut_into_bands_that_cover_them() -> None:
    positions = likelihood.scored_positions(2048, WINDOWS, 2)
    assert (positions[0], positions[-1]) == (448, 2046)
    assert likelihood.bands(5000, WINDOWS)[-2:] == [(2048, 4096), (4096, 5000)]
    at = np.arange(len(positions))
    scores = [Scores(at * 1.0, at * 0.001, at % 2 == 0), Scores(at * 1.0, at * 0.003, at < 0)]
    found = likelihood.summary({"prose": scores}, positions, WINDOWS, 2048)["prose"]
    assert found["kl"] == pytest.approx(0.002 * at.mean())
    assert found["kl_se"] == pytest.approx(0.001 * at.mean())
    assert found["perplexity"] == pytest.approx(np.exp(at.mean()))
    first = found["bands"]["448-768"]  # 160 positions
    assert first["kl"] == pytest.approx(0.002 * 79.5)
    assert first["top1"] == pytest.approx(0.25)
    weights = [320, 512, 768]  # tokens of each band: their mean is the whole
    kls = [one["kl"] for one in found["bands"].values()]
    assert np.average(kls, weights=weights) == pytest.approx(found["kl"], rel=0.01)
    with pytest.raises(ValueError, match="length=449: must be more than 449 tokens"):
        likelihood.scored_positions(449, WINDOWS, 1)


# ------------------------------------------------------------------------------------------ drift


def test_drift_is_summed_up_by_generated_token_and_says_where_rows_part() -> None:
    kl = np.arange(200) / 100
    zero = np.zeros(200)
    scores = [Scores(zero, kl, zero == 0), Scores(zero, kl + 1, zero == 0)]
    differs = [np.arange(200) >= 150, np.zeros(200, bool)]
    found = drift.summary(scores, differs)
    assert found["parted"] == [150, None]
    assert found["choices"] == pytest.approx(1 - 50 / 400)
    assert list(found["bands"]) == ["0-64", "64-128", "128-200"]
    assert found["bands"]["64-128"]["kl"] == pytest.approx(0.955 + 0.5)
    assert found["bands"]["128-200"]["choices"] == pytest.approx(1 - 50 / 144)
    assert found["kl"] == pytest.approx(0.995 + 0.5)
    assert found["kl_se"] == pytest.approx(0.5)


# ---------------------------------------------------------------------------------------- formats


@pytest.mark.parametrize(
    ("answer", "valid"),
    [
        ('{"name": "Ann", "age": 3}', True),
        ('\n{"age": 3, "name": "Ann"}  ', True),
        ('{"name": "Ann", "age": "3"}', False),  # a string where a number was asked for
        ('{"name": "Ann", "age": true}', False),
        ('{"name": "Ann", "age": 3, "city": "Rome"}', False),
        ('{"name": "Ann"}', False),
        ('Sure! {"name": "Ann", "age": 3}', False),
        ('{"name": "Ann", "age": 3', False),
        ('["name", "age"]', False),
    ],
)
def test_an_object_has_exactly_the_keys_and_types_and_nothing_around_it(
    answer: str, valid: bool
) -> None:
    assert valid_object({"name": str, "age": int})(answer) is valid


def test_a_call_names_the_tool_with_all_of_its_arguments() -> None:
    good = CALL_EXAMPLES[1][1]
    test = valid_call("send_email")
    assert test(good) and test(f"  {good}\n")
    assert not valid_call("get_weather")(good)
    for bad in (
        good.replace("</tool_call>", ""),
        good.replace('"to"', '"recipient"'),
        good.replace('"tom@example.com"', "3"),
        good.replace('"name"', '"tool"'),
        "I wrote to Tom. " + good,
    ):
        assert bad != good and not test(bad)


def chat_tokenizer(template: str) -> Tokenizer:
    words = byte_level(259)
    return Tokenizer(words._backend, eos_ids=(256,), bos_id=None, template=template)


def test_tools_go_through_the_template_where_it_knows_them() -> None:
    plain = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    prompts, remark = strict_prompts(chat_tokenizer(plain), ["TEXT ONE", "TEXT TWO"], 4)
    assert remark == "tools in the first message"
    texts = [byte_level(259).decode(list(one.ids)) for one in prompts]
    assert [one.kind for one in prompts] == ["json", "tool call"] * 2
    assert "TEXT ONE" in texts[1] and "TEXT TWO" in texts[2]
    assert "send_email(to, text): Sends an email." in texts[1]
    assert all(text.endswith(one.request) for text, one in zip(texts, prompts, strict=True))
    assert texts[0].index("TEXT ONE") < texts[0].index("<assistant>")

    knows = "{% if tools %}TOOLS {{ tools | tojson }}{% endif %}" + plain
    prompts, remark = strict_prompts(chat_tokenizer(knows), ["x"], 2)
    assert remark == "tools by the chat template"
    json_text, call_text = (byte_level(259).decode(list(one.ids)) for one in prompts)
    assert not json_text.startswith("TOOLS")
    assert call_text.startswith('TOOLS [{"type": "function"') and "search_web" in call_text
    assert "Sends an email." not in call_text.partition("<user>")[2]

    base = Tokenizer(byte_level(259)._backend, eos_ids=(), bos_id=None, template=None)
    with pytest.raises(NotImplementedError, match="no chat template"):
        strict_prompts(base, ["x"], 2)


def test_answers_are_compared_token_by_token_with_those_of_bf16() -> None:
    def made(tokens: tuple[int, ...], valid: bool, truncated: bool = False) -> answers.Answer:
        return answers.Answer(tokens, "", valid, truncated)

    prompts: list[Any] = strict_prompts(chat_tokenizer("{{ messages[0].content }}"), ["x"], 4)[0]
    exact = [made((1, 2, 3, 4), True), made((1, 2), True), made((5,), False), made((7, 8), True)]
    own = [
        made((1, 2, 9, 9), False),
        made((1, 2), True),
        made((6,), True),
        made((7, 8, 8, 8), True, truncated=True),
    ]
    found = answers.summary(prompts, own, exact)
    every = found["all"]
    assert (every["bf16_valid"], every["valid"]) == (3, pytest.approx(2 / 3))
    assert every["agreement"] == pytest.approx((0.5 + 1 + 0 + 1) / 4)
    assert every["same"] == 0.25
    assert every["length"] == pytest.approx((1 + 1 + 1 + 2) / 4)
    assert (every["truncated"], every["bf16_truncated"]) == (0.25, 0)
    assert found["json"]["valid"] == 0.0 and found["json"]["bf16_valid"] == 1
    assert found["tool call"]["valid"] == 1.0


# ---------------------------------------------------------------------------------------- numbers


def test_standard_errors_and_paired_comparisons_are_their_formulas() -> None:
    assert standard_error([1.0, 3.0]) == pytest.approx(1.0)  # sd sqrt(2) over sqrt(2)
    assert standard_error([5.0]) == 0.0
    ratio, low, high = paired_ratio([1.0, 4.0], [2.0, 2.0])
    # logs -log 2 and log 2: mean 0, standard error log 2
    assert (ratio, low, high) == pytest.approx((1.0, 0.25, 4.0))
    assert paired_difference([1.0, 4.0], [2.0, 3.0]) == pytest.approx((0.0, 1.0))
