"""One pass of a model over text: moments to fit to, and rows to choose and to measure with."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from calib.collect import MomentStream, collect_rows, empty_moments
from calib.covariance import Moments
from calib.data import Text, data_hash, sequences
from calib.held_out import HeldOut
from oscar_jax.config import KVConfig
from oscar_jax.models import Loaded

SEQUENCE_LENGTH = 2_048


@dataclasses.dataclass(frozen=True)
class Material:
    """What was read, and what of it was kept; no sequence serves two purposes.

    Args:
        length: T, tokens of every sequence.
        fitted: by domain, the sequences i32[n, T] whose moments were taken.
        moments: of all domains. by_domain: of each alone.
        growing: (tokens counted, moments) of ever more of the text, every domain's share alike.
        tuning: rows that per-layer choices are made on, a sequence of every domain with two to
            spare; None if there are none.
        held_out: rows that errors are reported on, a sequence of every domain with one to spare.
        checked: the tokens of ``held_out``, for checks in the running model.
    """

    length: int
    fitted: Mapping[str, np.ndarray]
    moments: Moments
    by_domain: Mapping[str, Moments]
    growing: tuple[tuple[int, Moments], ...]
    tuning: HeldOut | None
    held_out: HeldOut | None
    checked: tuple[np.ndarray, ...]

    @property
    def data_hash(self) -> str:
        return data_hash(row for rows in self.fitted.values() for row in rows)


def gather(
    loaded: Loaded,
    texts: Sequence[Text],
    windows: KVConfig,
    tokens: int,
    progress: bool = True,
) -> Material:
    """Run the model over about ``tokens`` tokens, as many of every domain, and two sequences more.

    Raises:
        ValueError: no text, too little of a domain, or activations that are not finite.
    """
    domains = list(dict.fromkeys(text.domain for text in texts))
    if not domains:
        raise ValueError("data holds no text")
    length = min(SEQUENCE_LENGTH, loaded.config.max_position_embeddings)
    count = max(1, round(tokens / length / len(domains)))
    found = sequences(loaded.tokenizer.encode, texts, length=length, count=count + 2)
    fitted = {name: rows[: max(1, min(count, len(rows) - 1))] for name, rows in found.items()}
    spare = {name: rows[len(fitted[name]) :] for name, rows in found.items()}
    held = {name: rows[0] for name, rows in spare.items() if len(rows) > 0}
    tuned = {name: rows[1] for name, rows in spare.items() if len(rows) > 1}
    # the first sequences run twice, for the smallest of the growing shares
    total = sum(map(len, fitted.values())) + len(domains) + len(held) + len(tuned)
    with tqdm(
        total=length * total, desc="calibrating", unit=" tokens", disable=not progress
    ) as bar:
        by_domain, growing = _stream(MomentStream(loaded.decoder, bar), loaded, fitted, windows)
        rows = [
            collect_rows(
                loaded.decoder, list(chosen.values()), windows, domains=list(chosen), progress=bar
            )
            if chosen
            else None
            for chosen in (tuned, held)
        ]
    return Material(
        length=length,
        fitted=fitted,
        moments=_merged(by_domain),
        by_domain=by_domain,
        growing=growing,
        tuning=rows[0],
        held_out=rows[1],
        checked=tuple(held.values()),
    )


def _stream(
    stream: MomentStream, loaded: Loaded, fitted: Mapping[str, np.ndarray], windows: KVConfig
) -> tuple[dict[str, Moments], tuple[tuple[int, Moments], ...]]:
    """Moments by domain, and of half of each first sequence, all of them, and half of all."""
    empty = functools.partial(empty_moments, loaded.config)
    length, most = len(next(iter(fitted.values()))[0]), max(map(len, fitted.values()))
    growing = []

    def keep(moments: Mapping[str, Moments]) -> None:
        merged = jax.tree.map(jnp.copy, _merged(moments))  # what is added to next is donated
        growing.append((int(merged.layers[0].tokens), merged))

    middle = (windows.sink + length) // 2
    keep(
        {name: stream.add(empty(), rows[0], windows.sink, middle) for name, rows in fitted.items()}
    )
    by_domain = {name: empty() for name in fitted}
    for turn in range(most):
        for name, rows in fitted.items():
            if turn < len(rows):
                by_domain[name] = stream.add(by_domain[name], rows[turn], windows.sink)
        if turn + 1 < most and turn + 1 in (1, most // 2):
            keep(by_domain)
    return by_domain, tuple(growing)


def _merged(moments: Mapping[str, Moments]) -> Moments:
    return functools.reduce(Moments.merge, moments.values())
