"""Builds the tokenizer of a GGUF file from the fields in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.pre_tokenizers import PreTokenizer

from oscar_jax.models.tokenizer import Tokenizer

# The words that a text is cut into before the merges, as the models' own tokenizers cut it.
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_WORDS = _QWEN2_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_KINDS = ("smollm", "qwen2", "llama-bpe", "gpt-2")

_NORMAL, _CONTROL, _USER_DEFINED = 1, 3, 4  # tokenizer.ggml.token_type
# Control tokens that end a turn or a text in the supported families, besides the stated one.
_ENDS = {
    "<|endoftext|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "<end_of_turn>",
}


class MetadataFields(Protocol):
    """What is needed of a ``GGUFFile``."""

    path: Path

    def field(self, key: str, default: Any = None) -> Any:
        """A metadata field as plain Python, ``default`` where it is absent."""
        ...


def from_gguf(file: MetadataFields) -> Tokenizer:
    """The tokenizer that ``tokenizer.ggml.*`` and ``tokenizer.chat_template`` describe.

    Raises:
        ValueError: a field that is missing or does not fit the others.
        NotImplementedError: a model other than byte-level BPE or SentencePiece's BPE, or cutting
            rules ("pre") that are not known here: guessing them would give other ids than the model
            was trained on.
    """
    kind, pre = file.field("tokenizer.ggml.model"), file.field("tokenizer.ggml.pre")
    texts: list[str] = file.field("tokenizer.ggml.tokens")
    types: list[int] = file.field("tokenizer.ggml.token_type") or [_NORMAL] * len(texts)
    if len(types) != len(texts):
        raise ValueError(f"{file.path}: {len(texts)} tokens but {len(types)} token types")
    if kind == "gpt2":
        backend = _byte_level(file, texts, pre)
    elif kind == "llama":
        backend = _sentencepiece(file, texts, types)
    else:
        raise NotImplementedError(
            f"{file.path}: tokenizer.ggml.model={kind!r} is not supported: 'gpt2' "
            "(byte-level BPE) and 'llama' (SentencePiece's BPE) are"
        )
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        backend.add_tokens(
            [
                AddedToken(text, special=special, normalized=False)
                for text, of in zip(texts, types, strict=True)
                if of == wanted
            ]
        )
    bos = file.field("tokenizer.ggml.bos_token_id")
    if file.field("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        if bos is None:
            raise ValueError(f"{file.path}: add_bos_token without a bos_token_id")
        backend.post_processor = processors.TemplateProcessing(
            single=f"{texts[bos]} $A", special_tokens=[(texts[bos], bos)]
        )
    eos = file.field("tokenizer.ggml.eos_token_id")
    ends = {eos, file.field("tokenizer.ggml.eot_token_id")} - {None}
    ends |= {i for i, text in enumerate(texts) if text in _ENDS and types[i] == _CONTROL}
    names = {"bos_token": bos, "eos_token": eos}
    return Tokenizer(
        backend,
        eos_ids=ends,
        bos_id=bos,
        template=file.field("tokenizer.chat_template"),
        names={name: texts[token] for name, token in names.items() if token is not None},
    )


def _byte_level(file: MetadataFields, texts: list[str], pre: str) -> tokenizers.Tokenizer:
    if pre not in _KINDS:
        raise NotImplementedError(
            f"{file.path}: tokenizer.ggml.pre={pre!r} is not supported: one of {_KINDS} is"
        )
    backend = tokenizers.Tokenizer(_bpe(file, texts, ignore_merges=pre == "llama-bpe"))
    backend.pre_tokenizer = pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    return backend


def _sentencepiece(
    file: MetadataFields, texts: list[str], types: list[int]
) -> tokenizers.Tokenizer:
    """BPE over characters, a space written as U+2581, unknown characters as their bytes.

    SentencePiece stores no merges: of all neighbours whose joint text is a token, it joins those
    with the highest score. As ranked merges these are all ways to cut a token in two tokens, by
    score.
    """
    if file.field("tokenizer.ggml.add_space_prefix", True):
        raise NotImplementedError(
            f"{file.path}: tokenizer.ggml.add_space_prefix=True is not supported: Gemma 3's files "
            "state false"
        )
    scores: list[float] = file.field("tokenizer.ggml.scores") or []
    if len(scores) != len(texts):
        raise ValueError(f"{file.path}: {len(texts)} tokens but {len(scores)} scores")
    vocabulary = _vocabulary(file, texts)
    joins = [
        (-scores[token], token, text[:cut], text[cut:])
        for token, text in enumerate(texts)
        if types[token] == _NORMAL  # the others are found in the text as they stand
        for cut in range(1, len(text))
        if text[:cut] in vocabulary and text[cut:] in vocabulary
    ]
    joins.sort()
    unknown = file.field("tokenizer.ggml.unknown_token_id")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[(left, right) for _, _, left, right in joins],
            byte_fallback=True,
            unk_token=None if unknown is None else texts[unknown],
        )
    )
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return backend


def _vocabulary(file: MetadataFields, texts: list[str]) -> dict[str, int]:
    vocabulary = {text: token for token, text in enumerate(texts)}
    if len(vocabulary) != len(texts):
        raise ValueError(f"{file.path}: tokenizer.ggml.tokens holds the same token twice")
    return vocabulary


def _bpe(file: MetadataFields, texts: list[str], *, ignore_merges: bool) -> models.BPE:
    merges = [tuple(pair.split(" ")) for pair in file.field("tokenizer.ggml.merges", [])]
    bad = next((pair for pair in merges if len(pair) != 2), None)
    if bad is not None or not merges:
        raise ValueError(f"{file.path}: tokenizer.ggml.merges: {bad!r} is not a pair of tokens")
    return models.BPE(vocab=_vocabulary(file, texts), merges=merges, ignore_merges=ignore_merges)


def pre_tokenizer(pre: str) -> PreTokenizer:
    """How a text is cut into words, by the name that GGUF files give the rule."""
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2_words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if pre == "gpt-2":
        return gpt2_words
    if pre == "smollm":  # every digit by itself
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2_words])
    words = Regex(_QWEN2_WORDS if pre == "qwen2" else _LLAMA3_WORDS)
    return pre_tokenizers.Sequence([pre_tokenizers.Split(words, "isolated"), byte_level])
