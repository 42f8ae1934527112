"""Everything that rotations of one model are measured with: the same texts, probes and prompts."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Array

from oscar_jax.config import KVConfig
from oscar_jax.evaluation import answers, drift, likelihood, recall
from oscar_jax.evaluation.prompts import Prompt, strict_prompts
from oscar_jax.evaluation.scorer import Sampling, Scorer
from oscar_jax.models import Loaded
from oscar_jax.rotation import Rotation

PARTS = ("kl", "recall", "format", "drift", "decode")
Moved = Callable[[int], object]
Texts = Mapping[str, np.ndarray]  # i32[n, T] by domain


@dataclasses.dataclass(frozen=True)
class Settings:
    """How much of each part is measured; see the command's flags of the same names."""

    stride: int = 2
    recall: int = 3
    prompts: int = 8
    context_tokens: int = 420
    answer_tokens: int = 96
    drift: int = 1536
    drift_temperature: float = 1.0
    per_step: bool = False
    decode_steps: int = 256
    seed: int = 0


class Suite:
    """A model, and the parts by name: ``run`` gives a row's fields of one part as JSON values.

    What the model does with BF16 pages is computed when it is first needed and kept.

    Args:
        texts: i32[n, T] by domain, T tokens each. longer: the same for other lengths at which
            recall is asked for as well.
        saved: ``reference`` of an earlier suite of the same protocol: nothing is generated twice.

    Raises:
        ValueError: sequences too short for a page or for a probe.
    """

    def __init__(
        self,
        loaded: Loaded,
        windows: KVConfig,
        texts: Texts,
        settings: Settings | None = None,
        *,
        longer: Mapping[int, Texts] | None = None,
        saved: Mapping[str, Any] | None = None,
    ):
        self._loaded, self._windows, self.texts = loaded, windows, texts
        self._settings = settings or Settings()
        self._length = next(iter(texts.values())).shape[1]
        self._longer = {self._length: texts, **(longer or {})}
        self._saved = dict(saved or {})
        self._positions = likelihood.scored_positions(self._length, windows, self._settings.stride)
        self.scorer = Scorer(loaded.decoder, windows)
        self._exact: dict[str, list[Array]] | None = None
        self._probes: dict[int, list[recall.Probe]] | None = None
        self._prompts: tuple[list[Prompt], str] | None = None
        self._drifted: tuple[np.ndarray, list[Array], list[np.ndarray]] | None = None

    # ------------------------------------------------------------------------ what is compared

    def protocol(self, part: str) -> dict[str, Any]:
        """Everything but the rotation that a part's numbers depend on, texts as hashes."""
        settings = self._settings
        if part == "kl":
            found = {"texts": _hash(self.texts), "length": self._length, "stride": settings.stride}
        elif part == "recall":
            probes = {
                str(length): np.stack([probe.tokens for probe in own])
                for length, own in self._all_probes().items()
            }
            found = {"probes": {length: _hash({length: own}) for length, own in probes.items()}}
        elif part == "format":
            ids = {str(i): np.array(one.ids) for i, one in enumerate(self._strict()[0])}
            found = {"prompts": _hash(ids), "answer_tokens": settings.answer_tokens}
        elif part == "decode":
            found = {"texts": _hash(self._ends()), "steps": settings.decode_steps}
        else:
            prompts = {domain: rows[0][: drift.PROMPT] for domain, rows in self.texts.items()}
            found = {
                "prompts": _hash(prompts),
                "tokens": settings.drift,
                "temperature": settings.drift_temperature,
                "per_step": settings.per_step,
                "seed": settings.seed,
            }
        return found

    def cost(self, part: str) -> int:
        """Tokens that one row of a part runs through the model, for the progress bar."""
        settings = self._settings
        rows = sum(len(one) for one in self.texts.values())
        if part == "kl":
            return rows * self._length
        if part == "recall":
            return settings.recall * sum(self._longer)
        if part == "format":
            # a step of decode costs what about 16 tokens of prefill cost
            prompts = sum(len(one.ids) for one in self._strict()[0])
            return prompts + 16 * settings.answer_tokens
        if part == "decode":
            return len(self.texts) * 2 * self._length + 16 * settings.decode_steps
        return len(self.texts) * (drift.PROMPT + settings.drift * (16 if settings.per_step else 1))

    @property
    def reference(self) -> dict[str, Any]:
        """What BF16 pages wrote by themselves, for ``saved``."""
        return dict(self._saved)

    # -------------------------------------------------------------------------------- the parts

    def run(self, part: str, rotation: Rotation | None, moved: Moved = lambda _: None) -> dict:
        """A row's fields of one part; ``moved`` is told tokens as they are done.

        Raises:
            ValueError: an unknown part, or keys or values that are not finite.
            NotImplementedError: the model cannot be asked for this part; the reason is a result.
        """
        parts = {
            "kl": self._likelihood,
            "recall": self._recall,
            "format": self._format,
            "drift": self._drift,
            "decode": self._decode,
        }
        if part not in parts:
            raise ValueError(f"part={part!r}: must be one of {', '.join(PARTS)}")
        return parts[part](rotation, moved)

    def _likelihood(self, rotation: Rotation | None, moved: Moved) -> dict:
        """``domains``: see ``likelihood.summary``."""
        if self._exact is None:
            self._exact = {
                domain: [self.scorer.hidden(tokens, None) for tokens in rows]
                for domain, rows in self.texts.items()
            }
        one = lambda: moved(self._length)  # noqa: E731
        scores = likelihood.score(
            self.scorer, rotation, self.texts, self._exact, self._positions, one
        )
        found = likelihood.summary(scores, self._positions, self._windows, self._length)
        return {"domains": found}

    def _recall(self, rotation: Rotation | None, moved: Moved) -> dict:
        """``recall`` of the spans at the first length, and ``probes`` of all kinds and lengths."""
        probes = {}
        for length, own in self._all_probes().items():
            probes[str(length)] = recall.summary(recall.score(self.scorer, rotation, own))
            moved(length * len(own))
        spans = probes[str(self._length)]["span"]
        return {
            "recall": spans["mean"],
            "recall_se": spans["se"],
            "recall_per_span": spans["values"],
            "probes": probes,
        }

    def _format(self, rotation: Rotation | None, moved: Moved) -> dict:
        """``answers``: the texts, and ``answers.summary`` of them."""
        prompts, remark = self._strict()
        asked = (self._loaded.tokenizer, prompts, self._settings.answer_tokens)
        if "answers" not in self._saved:
            exact = answers.answer(self.scorer, None, *asked)
            self._saved["answers"] = [dataclasses.asdict(one) for one in exact]
        exact = [
            answers.Answer(**{**one, "tokens": tuple(one["tokens"])})
            for one in self._saved["answers"]
        ]
        own = exact if rotation is None else answers.answer(self.scorer, rotation, *asked)
        moved(self.cost("format"))
        kinds = answers.summary(prompts, own, exact)
        return {"answers": {"remark": remark, "kinds": kinds, "texts": [one.text for one in own]}}

    def _drift(self, rotation: Rotation | None, moved: Moved) -> dict:
        """``drift``: see ``drift.summary``."""
        settings = self._settings
        sampling = Sampling(
            settings.drift_temperature,
            settings.seed,
            tuple(sorted(self._loaded.tokenizer.eos_ids)),
        )
        if self._drifted is None:
            if "drift" not in self._saved:
                written = drift.generate(self.scorer, self.texts, sampling, settings.drift)
                self._saved["drift"] = written.tolist()
            rows = np.array(self._saved["drift"], np.int32)
            exact, at = (
                [self.scorer.hidden(row, None) for row in rows],
                drift.generated(rows.shape[1]),
            )
            chosen = [self.scorer.predict(h, at, sampling, row) for row, h in enumerate(exact)]
            self._drifted = rows, exact, chosen
        rows, exact, chosen = self._drifted
        one = lambda: moved(self.cost("drift") // len(rows))  # noqa: E731
        scores, differs = drift.score(
            self.scorer,
            rotation,
            rows,
            exact,
            chosen,
            sampling,
            per_step=settings.per_step,
            moved=one,
        )
        return {"drift": drift.summary(scores, differs)}

    def _decode(self, rotation: Rotation | None, moved: Moved) -> dict:
        """``decode_check``: the end of one sequence per domain again, at one query per step."""
        steps = self._settings.decode_steps
        scores, largest = self.scorer.decode_check(
            np.concatenate(list(self._ends().values())), rotation, steps
        )
        moved(self.cost("decode"))
        _, kl, top1 = scores.mean()
        found = {"steps": steps, "kl_to_prefill": kl, "top1_of_prefill": top1}
        return {"decode_check": found | {"largest_logit_difference": largest}}

    # --------------------------------------------------------------------------- made when needed

    def _all_probes(self) -> dict[int, list[recall.Probe]]:
        if self._probes is None:
            tokenizer, self._probes = self._loaded.tokenizer, {}
            words, sentence = recall.word_tokens(tokenizer), recall.Sentence.of(tokenizer)
            for length, texts in self._longer.items():
                bases = [row for rows in zip(*texts.values(), strict=False) for row in rows]
                self._probes[length] = recall.recall_probes(
                    bases[: self._settings.recall],
                    words,
                    sentence,
                    self._windows,
                    self._settings.seed,
                )
        return self._probes

    def _ends(self) -> Texts:
        """One sequence of each domain."""
        return {domain: rows[:1] for domain, rows in self.texts.items()}

    def _strict(self) -> tuple[list[Prompt], str]:
        if self._prompts is None:
            tokenizer, size = self._loaded.tokenizer, self._settings.context_tokens
            contexts = [tokenizer.decode(rows[-1][:size].tolist()) for rows in self.texts.values()]
            self._prompts = strict_prompts(tokenizer, contexts, self._settings.prompts)
        return self._prompts


def _hash(arrays: Mapping[str, np.ndarray]) -> str:
    """SHA-256 over names and token ids."""
    digest = hashlib.sha256()
    for name, array in arrays.items():
        digest.update(name.encode())
        digest.update(np.ascontiguousarray(array, np.int32).tobytes())
    return digest.hexdigest()
