"""Request bodies: what is read how, and that each fault is refused by the name of its field."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oscar_jax.models.tokenizer import Tokenizer, byte_level
from oscar_jax.server.errors import ApiError
from oscar_jax.server.prompts import plan_chat, plan_completion
from oscar_jax.server.protocol import (
    NOT_SUPPORTED,
    ChatRequest,
    CompletionRequest,
    Generation,
    parse,
)

USER = [{"role": "user", "content": "hi"}]


def completion(**fields: Any) -> CompletionRequest:
    return parse(json.dumps({"model": "m", "prompt": "x"} | fields).encode(), CompletionRequest)


def chat(**fields: Any) -> ChatRequest:
    return parse(json.dumps({"model": "m", "messages": USER} | fields).encode(), ChatRequest)


def refusal(body: bytes, model: type[Generation] = CompletionRequest) -> ApiError:
    with pytest.raises(ApiError) as caught:
        parse(body, model)
    assert (caught.value.status, caught.value.type) == (400, "invalid_request_error")
    return caught.value


def completion_refusal(**fields: Any) -> ApiError:
    return refusal(json.dumps({"model": "m", "prompt": "x"} | fields).encode())


def chat_refusal(**fields: Any) -> ApiError:
    return refusal(json.dumps({"model": "m", "messages": USER} | fields).encode(), ChatRequest)


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
        ("", [""]),  # whether that is any tokens is the tokenizer's to say
    ],
)
def test_the_four_kinds_of_prompt_become_one_list(prompt: Any, read: list[Any]) -> None:
    assert completion(prompt=prompt).prompt == read


@pytest.mark.parametrize("prompt", [[], None, 5, {}, [1, "a"], [[1], "a"], [["a"]], [True], [1.5]])
def test_another_kind_of_prompt_is_refused_by_name(prompt: Any) -> None:
    assert completion_refusal(prompt=prompt).param == "prompt"


def test_null_means_the_default_for_every_optional_field() -> None:
    for model, read in ((CompletionRequest, completion), (ChatRequest, chat)):
        optional = {n: None for n, field in model.model_fields.items() if not field.is_required()}
        assert read(**optional).sampling(7) != []
        (params,) = read(seed=0).sampling(7)
        assert (params.max_tokens, params.temperature, params.top_p) == (7, 1.0, 1.0)
        assert (params.top_k, params.min_p, params.stop, params.ignore_eos) == (0, 0.0, (), False)


def test_every_setting_reaches_the_sampler() -> None:
    (params,) = completion(
        temperature=0,
        top_p=0.5,
        top_k=3,
        min_p=0.25,
        seed=9,
        stop=["a", "b"],
        stop_token_ids=[4],
        include_stop_str_in_output=True,
        ignore_eos=True,
        min_tokens=2,
    ).sampling(11)
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k) == (11, 0.0, 0.5, 3)
    assert (params.min_p, params.seed, params.stop, params.stop_token_ids) == (
        0.25,
        9,
        ("a", "b"),
        (4,),
    )
    assert params.include_stop_str_in_output and params.ignore_eos
    assert params.min_tokens == 2
    assert completion(min_tokens=99).sampling(11)[0].min_tokens == 11
    assert completion(stop="a").sampling(1)[0].stop == ("a",)
    assert completion(top_k=-1).sampling(1)[0].top_k == 0


def test_choices_differ_in_the_seed_alone_and_the_first_is_the_request_without_n() -> None:
    seeds = [params.seed for params in completion(n=8, seed=7).sampling(1)]
    assert len(set(seeds)) == 8
    assert seeds[0] == completion(seed=7).sampling(1)[0].seed == 7
    assert seeds == [params.seed for params in completion(n=8, seed=7).sampling(1)]
    fresh = {completion().sampling(1)[0].seed for _ in range(8)}
    assert len(fresh) > 1


@given(seed=st.integers(-(2**63), 2**63 - 1))
def test_any_64_bit_seed_becomes_one_of_the_engines_32_bits(seed: int) -> None:
    folded = completion(seed=seed, n=2).sampling(1)
    assert all(0 <= params.seed < 2**32 for params in folded)
    if 0 <= seed < 2**32:
        assert folded[0].seed == seed


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "1"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("top_k", -2),
        ("top_k", 2**31),
        ("top_k", 1.5),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", 2**63),
        ("seed", "1"),
        ("n", 0),
        ("n", 9),
        ("n", 100_000),
        ("n", True),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", 5.0),
        ("max_tokens", "5"),
        ("stop", ""),
        ("stop", [""]),
        ("stop", ["a"] * 17),
        ("stop", "x" * 257),
        ("stop", 5),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [1] * 9),
        ("min_tokens", -1),
        ("ignore_eos", 1),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),  # without stream
        ("user", "u" * 257),
        ("model", None),
        ("model", 5),
    ],
)
def test_a_value_out_of_range_or_of_another_type_is_refused_by_name(field: str, value: Any) -> None:
    for refuse in (completion_refusal, chat_refusal):
        error = refuse(**{field: value})
        assert error.param == field
        assert error.message.startswith(field)


def test_the_choices_of_all_prompts_together_are_limited() -> None:
    assert len(completion(prompt=["x"] * 16, n=8).prompt) == 16
    assert "136 choices; at most 128" in completion_refusal(prompt=["x"] * 17, n=8).message
    assert "65 prompts; at most 64" in completion_refusal(prompt=["x"] * 65).message


@pytest.mark.parametrize("name", sorted(NOT_SUPPORTED))
def test_what_is_not_implemented_is_refused_unless_it_asks_for_nothing(name: str) -> None:
    for read, refuse in ((completion, completion_refusal), (chat, chat_refusal)):
        for neutral in NOT_SUPPORTED[name]:
            read(**{name: neutral})
        error = refuse(**{name: {"real": "wish"}})
        assert (error.param, error.code) == (name, "unsupported_parameter")
        assert error.message.startswith(f"{name} is not supported")


def test_a_neutral_value_is_one_of_the_same_type() -> None:
    assert completion_refusal(logprobs=0).param == "logprobs"  # 0 is not false: it asks for arrays
    assert completion_refusal(logprobs=True).param == "logprobs"
    assert completion_refusal(best_of=3).param == "best_of"
    assert chat_refusal(top_logprobs=2).param == "top_logprobs"
    assert chat_refusal(response_format={"type": "json_object"}).param == "response_format"
    tool = {"type": "function", "function": {"name": "f", "parameters": {"pattern": "("}}}
    assert chat_refusal(tools=[tool], tool_choice="auto").param in ("tools", "tool_choice")


def test_an_unknown_field_is_refused_with_the_list_of_known_ones() -> None:
    error = completion_refusal(temprature=1)
    assert error.param == "temprature"
    assert "Unknown field 'temprature'" in error.message
    assert "temperature, top_k, top_p" in error.message
    assert chat_refusal(prompt="x").param == "prompt"
    assert completion_refusal(messages=USER).param == "messages"
    assert len(completion_refusal(**{"f" * 100_000: 1}).message) < 600


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "not valid JSON"),
        (b"", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'"x"', "must be a JSON object"),
        (b'{"model":"m","prompt":"\\ud83c"}', "not valid JSON"),  # half of a character
        (b'{"tools":' + b'{"a":' * 10_000 + b"1" + b"}" * 10_000 + b"}", "not valid JSON"),
        (b"[" * 100_000, "not valid JSON"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes, reason: str) -> None:
    error = refusal(body)
    assert reason in error.message
    assert error.code == "invalid_json"


def test_messages_of_text_parts_are_joined_and_developer_means_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    asked = chat(
        messages=[
            {"role": "developer", "content": "s"},
            {"role": "user", "content": parts, "name": "Ann"},
            {"role": "assistant", "content": ""},
        ]
    )
    assert [message.rendered() for message in asked.messages] == [
        {"role": "system", "content": "s"},
        {"role": "user", "content": "a\nb", "name": "Ann"},
        {"role": "assistant", "content": ""},
    ]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ("hi", "messages: "),
        ([], "messages: "),
        (["hi"], "messages.0"),
        ([{"role": "wizard", "content": "x"}], "messages.0.role: "),
        ([{"role": "user"}], "messages.0.content: "),
        ([{"role": "user", "content": None}], "messages.0.content: "),
        ([{"role": "user", "content": 5}], "messages.0.content: "),
        ([{"content": "x"}], "messages.0.role: "),
        (
            [
                {
                    "role": "user",
                    "content": [{"type": "image_url", "image_url": {"url": "http://x"}}],
                }
            ],
            "messages.0.content.0.type: ",
        ),
        ([{"role": "assistant", "content": "x", "tool_calls": []}], "messages.0.tool_calls"),
        ([{"role": "tool", "content": "x", "tool_call_id": "1"}], "messages.0.role: "),
        (USER * 1025, "messages: "),
    ],
)
def test_a_message_that_is_not_text_of_a_known_role_is_refused(messages: Any, said: str) -> None:
    error = chat_refusal(messages=messages)
    assert error.param == "messages"
    assert said in error.message


def test_a_base_model_refuses_a_conversation_and_names_the_route_that_works() -> None:
    words = Tokenizer(byte_level(259)._backend, eos_ids=(), bos_id=None, template=None)
    with pytest.raises(ApiError, match=r"no chat template: use a plain prompt \(/v1/completions\)"):
        plan_chat(chat(), words, 100)
    assert plan_completion(completion(), words, 100)[0].prompt == tuple(words.encode("x"))


def test_a_template_variable_outside_the_allow_list_is_refused() -> None:
    assert chat(chat_template_kwargs={"enable_thinking": False}).template_options() == {
        "enable_thinking": False
    }
    assert chat().template_options() == {}
    for options in ({"tokenize": True}, {"add_generation_prompt": False}, {"enable_thinking": "x"}):
        assert chat_refusal(chat_template_kwargs=options).param == "chat_template_kwargs"


def test_the_two_names_of_the_maximum_may_not_disagree() -> None:
    assert chat(max_tokens=4, max_completion_tokens=4).max_tokens == 4
    assert chat_refusal(max_tokens=4, max_completion_tokens=5).param == "max_completion_tokens"
    assert completion_refusal(max_completion_tokens=5).param == "max_completion_tokens"


def test_an_error_never_repeats_the_prompt() -> None:
    secret = "the secret text"
    for error in (
        completion_refusal(prompt=[secret, 1]),
        completion_refusal(prompt={"x": secret}),
        chat_refusal(messages=[{"role": "user", "content": secret, "x": secret}]),
        chat_refusal(messages=[{"role": "user", "content": [{"type": "text", "txt": secret}]}]),
        refusal(b'{"model":"m","prompt":"the secret text'),
    ):
        assert "secret" not in error.body()
