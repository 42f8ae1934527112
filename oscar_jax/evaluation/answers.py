"""Greedy answers in strict formats, compared with those of the same model with BF16 pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from oscar_jax.evaluation.prompts import Prompt
from oscar_jax.evaluation.scorer import Scorer
from oscar_jax.evaluation.statistics import standard_error
from oscar_jax.models import Tokenizer
from oscar_jax.rotation import Rotation


@dataclasses.dataclass(frozen=True)
class Answer:
    """One greedy answer.

    Args:
        tokens: i32[n], the token that ended it included. text: without special tokens.
        valid: in the format that was asked for. truncated: it reached the limit instead of an end.
    """

    tokens: tuple[int, ...]
    text: str
    valid: bool
    truncated: bool


def answer(
    scorer: Scorer,
    rotation: Rotation | None,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    limit: int,
) -> list[Answer]:
    """Every prompt answered greedily, all as rows of one batch, in at most ``limit`` tokens."""
    rows = [np.array(prompt.ids, np.int32) for prompt in prompts]
    stop = sorted(tokenizer.eos_ids)
    answers = []
    written = scorer.generate(rows, rotation, steps=limit, stop=stop)
    for prompt, tokens in zip(prompts, written, strict=True):
        ids = tokens.tolist()
        text = tokenizer.decode(ids)
        ended = ids[-1] in tokenizer.eos_ids
        answers.append(Answer(tuple(ids), text, prompt.valid(text), not ended))
    return answers


def agreement(tokens: Sequence[int], reference: Sequence[int]) -> int:
    """How many tokens both begin with.

    >>> agreement([1, 2, 3], [1, 2, 4, 5])
    2
    """
    pairs = zip(tokens, reference, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(reference)))


def summary(
    prompts: Sequence[Prompt], answers: Sequence[Answer], exact: Sequence[Answer]
) -> dict[str, Any]:
    """JSON values per kind of prompt and over all: validity, agreement, length, truncation.

    ``valid`` is the share of valid answers among the prompts that BF16 answers validly, null where
    there are none; ``agreement`` is the mean share of BF16's answer that comes out token by token;
    ``length`` the mean number of tokens over BF16's.
    """
    kinds = {"all": range(len(prompts))} | {
        kind: [i for i, prompt in enumerate(prompts) if prompt.kind == kind]
        for kind in dict.fromkeys(prompt.kind for prompt in prompts)
    }
    return {
        kind: _kind([answers[i] for i in own], [exact[i] for i in own])
        for kind, own in kinds.items()
    }


def _kind(answers: Sequence[Answer], exact: Sequence[Answer]) -> dict[str, Any]:
    pairs = list(zip(answers, exact, strict=True))
    kept = [float(one.valid) for one, reference in pairs if reference.valid]
    agreed = [agreement(a.tokens, b.tokens) / len(b.tokens) for a, b in pairs]
    lengths = [len(a.tokens) / len(b.tokens) for a, b in pairs]
    return {
        "prompts": len(pairs),
        "bf16_valid": sum(reference.valid for reference in exact),
        "valid": float(np.mean(kept)) if kept else None,
        "valid_se": standard_error(kept),
        "agreement": float(np.mean(agreed)),
        "agreement_se": standard_error(agreed),
        "same": float(np.mean([a.tokens == b.tokens for a, b in pairs])),
        "length": float(np.mean(lengths)),
        "truncated": float(np.mean([a.truncated for a in answers])),
        "bf16_truncated": float(np.mean([b.truncated for b in exact])),
    }
