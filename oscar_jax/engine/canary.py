"""The canary: before a port opens, compare the INT2 cache with BF16 on real tokens.

A cache can be allocated, fast and full of noise at once; capacity and speed do not show it.
"""

from __future__ import annotations

import dataclasses
import pydoc_data.topics

import numpy as np

from oscar_jax.config import KVConfig
from oscar_jax.engine.engine import Engine
from oscar_jax.engine.request import Output, Request, SamplingParams
from oscar_jax.evaluation.scorer import Scorer, Scores
from oscar_jax.models import Loaded
from oscar_jax.rotation import Rotation
from pallas_kernels.format import PAGE

SCORED = 512  # tokens whose logits are compared
GREEDY = 16  # tokens the engine writes itself
# SmolLM2: any consistent rotation 0.06 nats and 90 %, naive INT2 0.81 and 60 %, a wrong X_O 0.34
# and 77 %, a wrong X_Q 4.4 and 8 %.
KL_LIMIT = 0.25


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What the canary saw.

    Args:
        kl: mean KL(BF16 || INT2) of the next-token distributions, nats, over the positions that
            see at least one page. top1: share of them with the same likeliest token.
        greedy: share of the engine's own greedy tokens that BF16 ranks first as well.
        positions: how many were compared; 0 where the longest sequence never fills a page.
        problem: what is wrong, in one line, or None.
    """

    kl: float
    top1: float
    greedy: float
    positions: int
    problem: str | None

    def __str__(self) -> str:
        if not self.positions:
            return "canary: no sequence can grow long enough to see a page; nothing to compare"
        text = (
            f"KL to BF16 {self.kl:.3f}, same first token {self.top1:.0%} over {self.positions} "
            f"positions; greedy text agrees at {self.greedy:.0%}"
        )
        return f"canary: {text}" + (f"; {self.problem}" if self.problem else "")


def run_canary(engine: Engine, loaded: Loaded, rotation: Rotation, windows: KVConfig) -> Verdict:
    """Score a text with INT2 and BF16 pages, and let the engine continue it.

    Args:
        engine: built and not started: its own compiled steps write the greedy text.
        windows: with dtype "int2".

    Returns:
        A verdict whose ``problem`` says why the cache must not serve, if it must not.
    """
    try:
        rotation.check_inverses()
    except ValueError as error:
        return Verdict(float("inf"), 0.0, 0.0, 1, str(error))
    first = windows.sink + windows.recent + PAGE  # the first length that sees a page
    total = first + SCORED + GREEDY
    total = min(total, engine.max_model_len)
    if total < first + GREEDY + 1:
        return Verdict(0.0, 1.0, 1.0, 0, None)
    prompt = _text_ids(loaded, total - GREEDY)
    written = _continue(engine, prompt)
    tokens = np.array(prompt + written, np.int32)
    scorer = Scorer(loaded.decoder, windows)
    bf16, int2 = (scorer.hidden(tokens, side) for side in (None, rotation))
    compared = np.arange(min(first, len(prompt)) - 1, len(tokens) - 1)
    predicted = scorer.predict(bf16, np.arange(len(prompt) - 1, len(tokens) - 1))
    return judge(scorer.compare(bf16, int2, tokens, compared), predicted == written)


def judge(scores: Scores, greedy: np.ndarray) -> Verdict:
    """What the scores mean; ``greedy``: whether BF16 agrees with each token written."""
    _, kl, top1 = scores.mean()
    problem = None
    if not np.isfinite(kl):
        problem = "the INT2 cache gives logits that are not finite"
    elif kl > KL_LIMIT:
        problem = (
            f"the INT2 cache does not follow the model (KL limit {KL_LIMIT}): refit the rotation "
            "or serve with --kv-cache-dtype bf16"
        )
    return Verdict(kl, top1, float(np.mean(greedy)), len(scores.kl), problem)


def _text_ids(loaded: Loaded, count: int) -> list[int]:
    """English prose that every Python ships, as token ids."""
    topics = pydoc_data.topics.topics
    text = " ".join(topics[name] for name in sorted(topics))
    ids = loaded.tokenizer.encode(text[: 16 * count])
    return ids[:count]


def _continue(engine: Engine, prompt: list[int]) -> list[int]:
    """The engine's greedy continuation, by its own compiled steps on this thread."""
    outputs: list[Output] = []
    params = SamplingParams(max_tokens=GREEDY, temperature=0.0, ignore_eos=True)
    engine.submit(Request("canary", tuple(prompt), params, outputs.append))
    while not (outputs and outputs[-1].finish_reason):
        engine.step()
    if outputs[-1].error:
        raise RuntimeError(f"the canary's own request failed: {outputs[-1].error}")
    return [token for output in outputs for token in output.token_ids]
