"""Whether a model still finds what lies in the pages: retrieval, which perplexity does not see.

A probe is a text with things planted in it and asked for at its end, when all of them lie in pages.
The part that pages can hold is cut into ``DEPTHS`` equal sections, and each section holds one

    span   SPAN random words; repeated at the end, each next word is asked for
    key    "The code for KEY is VALUES.", and another one that is never asked for (a distractor);
           the end says "The code for KEY is" and the VALUES are asked for
    copy   SPAN tokens of the text itself; replayed at the end, each next token is asked for

The end asks for passages, keys and spans in that order, each kind's sections in a random order. A
score is the share of the tokens asked for that are the model's first choice. A key can only be
answered by telling it from 2 DEPTHS - 1 others; spans and passages by going on from where they were
found. Text is predictable without looking back, so ``copy`` means something only beside BF16.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from oscar_jax.config import KVConfig
from oscar_jax.evaluation.scorer import Scorer
from oscar_jax.evaluation.statistics import standard_error
from oscar_jax.models import Tokenizer
from oscar_jax.rotation import Rotation
from pallas_kernels.format import PAGE

KINDS = ("span", "key", "copy")
DEPTHS, SPAN = 4, 64  # sections of a probe; tokens of a span and of a passage
VALUES = 4  # words behind a key


@dataclasses.dataclass(frozen=True)
class Question:
    """What one planted thing is asked by.

    Args:
        kind: one of KINDS. section: in which it lies, 0 to DEPTHS - 1.
        depth: where it begins, as a share of the tokens before the end's questions.
        positions: i32[n], from each of which the next token is asked for.
    """

    kind: str
    section: int
    depth: float
    positions: np.ndarray


@dataclasses.dataclass(frozen=True)
class Probe:
    """A text i32[T] with things planted in it, and the questions at its end."""

    tokens: np.ndarray
    questions: tuple[Question, ...]


@dataclasses.dataclass(frozen=True)
class Found:
    """The share of a question's tokens that were found, with where it lies (``Question``)."""

    section: int
    depth: float
    hits: float


@dataclasses.dataclass(frozen=True)
class Sentence:
    """The ids of "The code for KEY is VALUES." around its words: what comes before, between and
    after them."""

    before: tuple[int, ...]
    between: tuple[int, ...]
    after: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> Sentence:
        encode: Callable[[str], list[int]] = lambda text: tokenizer.encode(  # noqa: E731
            text, add_special_tokens=False
        )
        return cls(*(tuple(encode(text)) for text in ("\nThe code for", " is", ".")))

    @property
    def length(self) -> int:
        return len(self.before) + 1 + len(self.between) + VALUES + len(self.after)

    @property
    def planted(self) -> int:
        """Tokens that a section must hold: a span, a passage, a fact and a distractor."""
        return 2 * SPAN + 2 * self.length

    @property
    def asked(self) -> int:
        """Tokens of all questions."""
        return DEPTHS * (2 * SPAN + self.length)

    def fact(self, words: np.ndarray) -> np.ndarray:
        """The whole sentence; words: the key, then its values."""
        parts = self.before, words[:1], self.between, words[1:], self.after
        return np.concatenate([np.asarray(part, np.int32) for part in parts])


def word_tokens(tokenizer: Tokenizer) -> np.ndarray:
    """Ids that are one lower-case word of at least three letters with its leading space.

    Raises:
        ValueError: the vocabulary has too few of them for a probe.
    """
    words = [
        token
        for token in range(tokenizer.vocab_size)
        if re.fullmatch(r" [a-z]{3,}", tokenizer.decode([token]))
    ]
    if len(words) < DEPTHS * (SPAN + 2 * (1 + VALUES)):
        raise ValueError(f"the tokenizer has {len(words)} whole words: a recall probe needs more")
    return np.array(words, np.int32)


def section_length(length: int, sentence: Sentence, windows: KVConfig) -> int:
    """Tokens of each of the DEPTHS sections that lie in pages once the questions begin."""
    asked = length - sentence.asked
    pages = max(0, asked + 1 - windows.sink - windows.recent) // PAGE
    return PAGE * pages // DEPTHS


def recall_fits(length: int, tokenizer: Tokenizer, windows: KVConfig) -> bool:
    """Whether everything that a probe of ``length`` plants lies wholly inside pages."""
    sentence = Sentence.of(tokenizer)
    return section_length(length, sentence, windows) >= sentence.planted


def recall_probes(
    texts: Sequence[np.ndarray],
    words: np.ndarray,
    sentence: Sentence,
    windows: KVConfig,
    seed: int,
) -> list[Probe]:
    """One probe per text i32[T], which is not written over itself.

    Args:
        words: ids of ``word_tokens``.

    Raises:
        ValueError: T is too short for what is planted to be in pages when it is asked for.
    """
    rng = np.random.default_rng(seed)
    return [_probe(text.copy(), words, sentence, windows, rng) for text in texts]


def _probe(
    tokens: np.ndarray,
    words: np.ndarray,
    sentence: Sentence,
    windows: KVConfig,
    rng: np.random.Generator,
) -> Probe:
    size = section_length(len(tokens), sentence, windows)
    asked, spare = len(tokens) - sentence.asked, size - sentence.planted
    if spare < 0:
        raise ValueError(
            f"sequences of {len(tokens)} tokens are too short for recall: {DEPTHS} sections of "
            f"{sentence.planted} tokens must lie in pages, and {sentence.asked} tokens of "
            "questions behind them"
        )
    drawn = rng.choice(words, DEPTHS * (SPAN + 2 * (1 + VALUES)), replace=False)
    spans, facts = drawn[: DEPTHS * SPAN].reshape(DEPTHS, SPAN), drawn[DEPTHS * SPAN :]
    told, others = facts.reshape(2, DEPTHS, 1 + VALUES)
    starts = windows.sink + size * np.arange(DEPTHS) + spare // 2
    where = {"key": starts, "span": starts + sentence.length}
    where["copy"] = where["span"] + SPAN + sentence.length  # the text that stands there
    for section, start in enumerate(starts):
        pieces = sentence.fact(told[section]), spans[section], sentence.fact(others[section])
        planted = np.concatenate(pieces)
        tokens[start : start + len(planted)] = planted

    questions, at = [], asked
    for kind in reversed(KINDS):
        size = sentence.length if kind == "key" else SPAN
        count = VALUES if kind == "key" else SPAN - 1
        last = size - 1 - (len(sentence.after) if kind == "key" else 0)  # the last one asked for
        for section in rng.permutation(DEPTHS):
            start = where[kind][section]
            tokens[at : at + size] = tokens[start : start + size]
            positions = at + last - count + np.arange(count)
            questions.append(Question(kind, int(section), float(start / asked), positions))
            at += size
    return Probe(tokens, tuple(questions))


def score(
    scorer: Scorer, rotation: Rotation | None, probes: Sequence[Probe]
) -> dict[str, list[Found]]:
    """Per kind, what was found for each question."""
    found: dict[str, list[Found]] = {kind: [] for kind in KINDS}
    for probe in probes:
        h = scorer.hidden(probe.tokens, rotation)
        everything = np.concatenate([one.positions for one in probe.questions])
        hits = scorer.predict(h, everything) == probe.tokens[everything + 1]
        for one in probe.questions:
            own, hits = hits[: len(one.positions)], hits[len(one.positions) :]
            found[one.kind].append(Found(one.section, one.depth, float(own.mean())))
    return found


def summary(found: Mapping[str, Sequence[Found]]) -> dict[str, Any]:
    """JSON values of what ``score`` found: per kind mean, error, every value, and depths."""
    kinds = {}
    for kind, entries in found.items():
        hits = [one.hits for one in entries]
        depths = []
        for section in range(DEPTHS):
            own = [one for one in entries if one.section == section]
            shares = [one.hits for one in own]
            depths.append(
                {
                    "depth": float(np.mean([one.depth for one in own])),
                    "mean": float(np.mean(shares)),
                    "se": standard_error(shares),
                }
            )
        mean, error = float(np.mean(hits)), standard_error(hits)
        kinds[kind] = {"mean": mean, "se": error, "by_depth": depths, "values": hits}
    return kinds
