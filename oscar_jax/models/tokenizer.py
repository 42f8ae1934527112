"""Text to token ids and back, whole or as a stream, and chat messages to ids."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers.decoders import DecodeStream

from oscar_jax.models.chat import ChatTemplate


class Tokenizer:
    """Byte-level BPE with its special tokens and its chat template.

    Args:
        backend: the ``tokenizers`` object.
        eos_ids: ids that end a generation.
        bos_id: the id that begins a text, None for models without one.
        template: the chat template's source, None for base models.
        names: ``bos_token`` and the like with their text, as the template reads them.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        eos_ids: Iterable[int],
        bos_id: int | None,
        template: str | None,
        names: Mapping[str, str] | None = None,
    ):
        self._backend = backend
        self.eos_ids = frozenset(eos_ids)
        self.bos_id = bos_id
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._template = None if template is None else ChatTemplate(template, names or {})

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids. Special tokens written out in the text become their ids.

        Args:
            add_special_tokens: add what the model expects around a text (Llama's begin token).

        Raises:
            ValueError: the text has lone surrogates, which have no UTF-8 form.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"text is not valid Unicode: {error}") from None
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of the ids; bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def stream(self, *, skip_special_tokens: bool = True) -> TokenStream:
        """A new incremental decoder, for one generation."""
        return TokenStream(self._backend, skip_special_tokens)

    def save(self, path: Path) -> None:
        """Writes ``tokenizer.json``; the template and the end ids live in other files."""
        self._backend.save(str(path))

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **options: Any,
    ) -> list[int]:
        """Ids of a conversation, rendered by the model's own template.

        Args:
            messages: ``{"role": ..., "content": ...}`` each.
            tools: function descriptions for templates that know them.
            add_generation_prompt: end with the opening of the assistant's turn.
            options: ``enable_thinking`` only.

        Raises:
            ValueError: no template, an option that is not allowed, or the template refused.
        """
        if self._template is None:
            raise ValueError(
                "this model has no chat template: use a plain prompt (/v1/completions)"
            )
        text = self._template.render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, options=options
        )
        return self.encode(text, add_special_tokens=False)  # the template wrote them itself


class TokenStream:
    """Text of one generation as its tokens come: only whole characters ever leave it."""

    def __init__(self, backend: tokenizers.Tokenizer, skip_special_tokens: bool):
        self._backend = backend
        self._skip = skip_special_tokens
        self._stream = DecodeStream(skip_special_tokens=skip_special_tokens)
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """The text that this token completes, "" while a character is still in parts."""
        self._held.append(token)
        text = self._stream.step(self._backend, token)
        if text is None:
            return ""
        self._held.clear()
        return text

    def flush(self) -> str:
        """What was held back at the end of a generation; broken characters become U+FFFD."""
        text = self._backend.decode(self._held, skip_special_tokens=self._skip)
        self._held.clear()
        return text


def from_directory(directory: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory.

    Reads ``tokenizer.json``; the chat template from ``chat_template.jinja`` or
    ``tokenizer_config.json``; the ids that end a text from ``generation_config.json``,
    ``config.json`` and the tokenizer's own end token, all of them.

    Raises:
        FileNotFoundError: no ``tokenizer.json``.
        ValueError: a file that cannot be read.
    """
    path = directory / "tokenizer.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path}: missing; a model directory needs tokenizer.json")
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises plain Exception
        raise ValueError(f"{path}: not a tokenizer: {error}") from error
    settings = read_json(directory / "tokenizer_config.json")
    names = {
        key: text
        for key in ("bos_token", "eos_token", "pad_token", "unk_token")
        if (text := _token_text(settings.get(key))) is not None
    }
    eos = {backend.token_to_id(names["eos_token"])} if "eos_token" in names else set()
    for file in ("generation_config.json", "config.json"):
        stated = read_json(directory / file).get("eos_token_id")
        eos.update(stated if isinstance(stated, list) else [stated])
    bos = backend.token_to_id(names["bos_token"]) if "bos_token" in names else None
    return Tokenizer(
        backend,
        eos_ids=[token for token in eos if token is not None],
        bos_id=bos,
        template=_template_source(directory, settings),
        names=names,
    )


def byte_level(vocab_size: int) -> Tokenizer:
    """256 bytes and three ChatML tokens: for ``load_format="dummy"`` without a tokenizer's files.

    Raises:
        ValueError: the model has fewer than 259 embeddings.
    """
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    if vocab_size < 256 + len(specials):
        raise ValueError(f"vocab_size={vocab_size}: a byte-level tokenizer needs 259 ids")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[])
    )
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in specials])
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    ends = (256, 258)  # <|endoftext|> and <|im_end|>
    return Tokenizer(backend, eos_ids=ends, bos_id=None, template=template)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} where the file does not exist."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path}: must hold a JSON object, not {type(value).__name__}")
    return value


def _token_text(value: Any) -> str | None:
    """A special token is written as its text or as an object that holds it."""
    return value.get("content") if isinstance(value, dict) else value


def _template_source(directory: Path, settings: Mapping[str, Any]) -> str | None:
    path = directory / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several named ones: the default is for plain chat
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template
