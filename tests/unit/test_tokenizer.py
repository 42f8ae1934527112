"""Token ids equal another implementation's, and text survives the way there and back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, processors

from oscar_jax.models import Loaded, Tokenizer
from oscar_jax.models.gguf import GGUFFile
from oscar_jax.models.gguf_tokenizer import from_gguf, pre_tokenizer
from oscar_jax.models.tokenizer import byte_level, from_directory

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "smollm2_tokens.json").read_text())


@pytest.fixture(scope="session")
def words(smollm2: Loaded) -> Tokenizer:
    return smollm2.tokenizer


@pytest.mark.parametrize("row", GOLDEN["texts"], ids=lambda row: ascii(row["text"])[:30])
def test_ids_equal_those_of_llama_cpp(words: Tokenizer, row: dict[str, Any]) -> None:
    assert words.encode(row["text"]) == row["ids"]
    assert words.decode(row["ids"], skip_special_tokens=False) == row["text"]


def test_the_file_says_what_begins_and_ends_a_text(words: Tokenizer) -> None:
    assert words.vocab_size == 49152
    assert words.bos_id == 1
    assert words.eos_ids == {0, 2}  # <|endoftext|> and <|im_end|>
    assert words.encode("Hello") == words.encode("Hello", add_special_tokens=False)


def test_special_tokens_are_left_out_of_the_text_on_request(words: Tokenizer) -> None:
    ids = words.encode("<|im_start|>user\nHi<|im_end|>")
    assert ids[0] == 1
    assert ids[-1] == 2
    assert words.decode(ids) == "user\nHi"


# SmolLM2 has no token for the bytes F1 and F2, which begin the unassigned planes 4 to 11, nor for
# six control characters; its own tokenizer drops them too.
KNOWN = st.characters(exclude_characters="\x04\x06\x13\x14\x16\x1d", codec="utf-8").filter(
    lambda character: not 0x40000 <= ord(character) < 0xC0000
)


@settings(max_examples=150, deadline=None)
@given(text=st.text(KNOWN, max_size=60))
def test_any_text_comes_back_whole_and_as_a_stream(words: Tokenizer, text: str) -> None:
    ids = words.encode(text)
    assert words.decode(ids, skip_special_tokens=False) == text
    stream = words.stream(skip_special_tokens=False)
    assert "".join([stream.push(token) for token in ids]) + stream.flush() == text


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 49151), max_size=40))
def test_a_stream_of_any_ids_is_what_decoding_them_at_once_gives(
    words: Tokenizer, ids: list[int]
) -> None:
    stream = words.stream()
    assert "".join([stream.push(token) for token in ids]) + stream.flush() == words.decode(ids)


def test_a_character_in_parts_leaves_the_stream_in_one_piece(words: Tokenizer) -> None:
    ids = words.encode("🦜!")
    stream = words.stream()
    pieces = [stream.push(token) for token in ids]
    assert len(ids) > 2
    assert [piece for piece in pieces if piece] == ["🦜", "!"]


def test_what_is_left_of_a_broken_character_is_flushed_as_one_replacement(words: Tokenizer) -> None:
    stream = words.stream()
    assert stream.push(words.encode("🦜")[0]) == ""
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_a_lone_surrogate_is_refused(words: Tokenizer) -> None:
    with pytest.raises(ValueError, match="not valid Unicode"):
        words.encode("a\ud800b")


def test_ids_past_the_vocabulary_decode_to_nothing(words: Tokenizer) -> None:
    assert words.decode([words.encode("a")[0], 60000]) == "a"


def test_a_chat_is_rendered_by_the_models_own_template(words: Tokenizer) -> None:
    ids = words.chat([{"role": "user", "content": "What is the capital of France?"}])
    assert ids == GOLDEN["texts"][-1]["ids"]
    closed = words.chat(
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
        add_generation_prompt=False,
    )
    assert words.decode(closed, skip_special_tokens=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    )


def directory_with(place: Path, **files: Any) -> Path:
    """A directory with a byte-level tokenizer that adds its begin token, and the JSON given."""
    alphabet = {chr(33 + i): i for i in range(90)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.add_special_tokens([AddedToken(text) for text in ("<s>", "</s>", "<end>")])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 90)]
    )
    backend.save(str(place / "tokenizer.json"))
    for name, content in files.items():
        (place / f"{name}.json").write_text(json.dumps(content))
    return place


def test_a_directory_gives_template_names_and_every_end_token(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ eos_token }}"
    words = from_directory(
        directory_with(
            tmp_path,
            tokenizer_config={
                "bos_token": {"content": "<s>", "lstrip": False},
                "eos_token": "</s>",
                "chat_template": template,
            },
            generation_config={"eos_token_id": [91, 92]},
            config={"eos_token_id": 91},
        )
    )
    assert (words.bos_id, words.eos_ids, words.vocab_size) == (90, {91, 92}, 93)
    assert words.encode("!") == [90, 0]
    assert words.encode("!", add_special_tokens=False) == [0]
    # the template wrote the begin token, so that encoding must not add another
    assert words.chat([{"role": "user", "content": "!"}]) == [90, 0, 91]


def test_a_jinja_file_beats_the_config_and_a_list_gives_its_default(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "#"}, {"name": "default", "template": "$"}]
    directory = directory_with(tmp_path, tokenizer_config={"chat_template": named})
    assert from_directory(directory).chat([]) == [ord("$") - 33]
    (directory / "chat_template.jinja").write_text("%")
    assert from_directory(directory).chat([]) == [ord("%") - 33]


def test_a_base_model_without_a_template_says_so(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no chat template"):
        from_directory(directory_with(tmp_path)).chat([{"role": "user", "content": "!"}])


def test_missing_and_broken_tokenizer_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"tokenizer\.json: missing"):
        from_directory(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not a tokenizer"):
        from_directory(tmp_path)
    directory_with(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: not JSON"):
        from_directory(tmp_path)


def test_the_byte_level_tokenizer_needs_259_ids() -> None:
    assert byte_level(259).vocab_size == 259
    with pytest.raises(ValueError, match="vocab_size=258"):
        byte_level(258)


class Fields:
    """The tokenizer fields of a GGUF file, changed."""

    path = Path("changed.gguf")

    def __init__(self, file: GGUFFile, **changes: Any):
        self._file, self._changes = file, changes

    def field(self, key: str, default: Any = None) -> Any:
        name = key.removeprefix("tokenizer.ggml.")
        return self._changes[name] if name in self._changes else self._file.field(key, default)


def test_a_gguf_that_asks_for_a_begin_token_gets_it(smollm2_file: GGUFFile) -> None:
    words = from_gguf(Fields(smollm2_file, add_bos_token=True))
    plain = from_gguf(Fields(smollm2_file)).encode("Hi")
    assert words.encode("Hi") == [1, *plain]
    assert words.encode("Hi", add_special_tokens=False) == plain


@pytest.mark.parametrize(
    ("pre", "text", "cut"),
    [
        ("smollm", "a 12", ["a", "Ġ", "1", "2"]),
        ("gpt-2", "a 12", ["a", "Ġ12"]),
        ("qwen2", "a 12\n\n", ["a", "Ġ", "1", "2", "ĊĊ"]),
        ("llama-bpe", "a 1234!", ["a", "Ġ", "123", "4", "!"]),
        ("llama-bpe", "I'LL go", ["I", "'LL", "Ġgo"]),
    ],
)
def test_words_are_cut_as_each_family_cuts_them(pre: str, text: str, cut: list[str]) -> None:
    assert [word for word, _ in pre_tokenizer(pre).pre_tokenize_str(text)] == cut


@pytest.mark.parametrize(
    ("changes", "error", "named"),
    [
        (dict(model="bert"), NotImplementedError, "tokenizer.ggml.model='bert'"),
        (dict(model="llama", add_space_prefix=True), NotImplementedError, "add_space_prefix=True"),
        (dict(model="llama"), ValueError, "49152 tokens but 0 scores"),
        (dict(pre="chameleon"), NotImplementedError, "tokenizer.ggml.pre='chameleon'"),
        (dict(token_type=[1]), ValueError, "49152 tokens but 1 token types"),
        (dict(merges=["a b", "abc"]), ValueError, "('abc',) is not a pair"),
        (dict(add_bos_token=True, bos_token_id=None), ValueError, "without a bos_token_id"),
    ],
)
def test_fields_that_do_not_fit_are_refused_by_name(
    smollm2_file: GGUFFile, changes: dict[str, Any], error: type[Exception], named: str
) -> None:
    with pytest.raises(error) as refusal:
        from_gguf(Fields(smollm2_file, **changes))
    assert named in str(refusal.value)
