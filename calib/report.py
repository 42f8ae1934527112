"""What a calibration tells its user: a verdict in plain words, tables, JSON and plots."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from calib.choice import BF16, Check, Later
from calib.fit import FitReport
from calib.held_out import Errors
from calib.study import Study, in_words, summary, table
from calib.verdict import Verdict, judge
from pallas_kernels.format import Codec

RANDOM_WEIGHTS = (
    "the model's weights are random (--load-format dummy): this shows what a calibration takes, "
    "and the checkpoint is for no other weights"
)
SHARING_COSTS = 1.1  # shared over per-head error from which one rotation per layer is not enough


@dataclasses.dataclass(frozen=True)
class CalibrationReport:
    """A fit, its measured error, and what other recipes would have given on the same text.

    Args:
        fit: of the rotation that was kept.
        errors: of that rotation on held-out text; None when all text was needed for the fit.
        others: the same for other recipes from the same moments, by name.
        chosen: the name of the rotation in ``checks``.
        checks: in the running model: the rotation, "bf16", and what "auto" compared it with.
        later: the rotation in the running model at the end of the context; None if ``checks`` has
            all of it.
        study: what the error depends on; None when no text was left.
        codecs: of each layer of the rotation.
        texts: what was read: tokens counted per domain, sinks left out.
        held_out_tokens: tokens of the held-out sequences.
        seconds: wall time.
        warnings: everything a user should act on, the fit's warnings included.
        notes: what was decided on the way.
        layers: the model's number of every layer that has pages; () counts from 0.
        random_weights: of the model; nothing is judged then.
    """

    fit: FitReport
    errors: Errors | None
    others: Mapping[str, Errors]
    texts: Mapping[str, int]
    held_out_tokens: int
    seconds: float
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()
    chosen: str = ""
    checks: Mapping[str, Check] = dataclasses.field(default_factory=dict)
    later: Later | None = None
    study: Study | None = None
    codecs: tuple[Codec | None, ...] = ()
    layers: Sequence[int] = ()
    random_weights: bool = False

    @property
    def judgement(self) -> Verdict | None:
        """safe, use 3-bit keys, or do not; None if the rotation did not run in a real model."""
        own = self.checks.get(self.chosen)
        if own is None or self.random_weights:
            return None
        return judge(own, self.checks[BF16], self.later, self.fit.positions)

    @property
    def verdict(self) -> str:
        """A few sentences: may it be served, and would something else be better."""
        name, found = self.fit.recipe, self.judgement
        if self.errors is None:
            return f"{name}: fitted, but no text was left to measure it on; its quality is unknown."
        why = RANDOM_WEIGHTS if self.random_weights else "it did not run in the model"
        first = (
            f"{name}: not judged, because {why}."
            if found is None
            else f"{name}: {found.level}. {found.reason}."
        )
        text = (
            f"{first} On held-out text 2-bit keys change the attention logits "
            f"by {self.errors.key_mean:.1%} of their variance, 2-bit values the output over the "
            f"pages by {self.errors.value_mean:.1%} of its energy, and both together what "
            f"attention answers by {self.errors.output_mean:.2%}."
        )
        return " ".join([text, *self._comparisons(self.errors.key_mean)])

    def _comparisons(self, error: float) -> list[str]:
        lines = []
        centre = "+centre" if self.fit.recipe.endswith("+centre") else ""
        shared, own = (self.others.get(name + centre) for name in ("oscar-shared", "oscar"))
        if shared and own and shared.key_mean > SHARING_COSTS * own.key_mean:
            ratio = shared.key_mean / own.key_mean
            lines.append(
                f"One rotation per layer would cost {ratio:.2f}x the key error: use oscar{centre}."
            )
        best = min(self.others, key=lambda name: self.others[name].key_mean, default=None)
        if best is not None and self.others[best].key_mean < error / SHARING_COSTS:
            lines.append(f"{best} has less key error ({self.others[best].key_mean:.1%}).")
        return lines

    def to_json(self) -> dict[str, Any]:
        """Everything but the full spectra, as JSON values."""
        found = self.judgement
        rows = {name: summary(errors) for name, errors in self._all_errors().items()}
        return {
            "random_weights": self.random_weights,
            "level": None if found is None else found.level,
            "verdict": self.verdict,
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "recipe": self.fit.recipe,
            "positions": self.fit.positions,
            "value_target": self.fit.value_target,
            "tokens": self.fit.tokens,
            "tokens_by_domain": dict(self.texts),
            "held_out_tokens": self.held_out_tokens,
            "seconds": round(self.seconds, 1),
            "condition": self.fit.condition,
            "held_out_errors": rows,
            "checks": {name: dataclasses.asdict(one) for name, one in self.checks.items()},
            "later": None if self.later is None else dataclasses.asdict(self.later),
            "study": None if self.study is None else self.study.to_json(),
            "layers": self._layer_rows(),
        }

    def _all_errors(self) -> dict[str, Errors]:
        own = {} if self.errors is None else {self.fit.recipe: self.errors}
        return {**self.others, **own}

    def _number(self, row: int) -> int:
        return self.layers[row] if self.layers else row

    def _layer_rows(self) -> list[dict[str, Any]]:
        rows = []
        for layer in range(len(self.fit.predictor)):
            row: dict[str, Any] = {
                "layer": self._number(layer),
                "predictor": _rounded(self.fit.predictor[layer]),
                "predictor_over_bound": _rounded(
                    self.fit.predictor[layer] / np.maximum(self.fit.bound[layer], 1e-30)
                ),
                "mean_share": _rounded(self.fit.mean_share[layer]),
                "plain_keys": self.fit.fallback_keys[layer].tolist(),
                "plain_values": self.fit.fallback_values[layer].tolist(),
            }
            for name, errors in self._all_errors().items():
                row[f"key_error {name}"] = _rounded(errors.key[layer])
                row[f"value_error {name}"] = _rounded(errors.value[layer])
            rows.append(row)
        return rows

    def to_markdown(self) -> str:
        """The verdict, the warnings, a table of recipes and a table of layers."""
        lines = ["# Calibration report", "", self.verdict, ""]
        read = ", ".join(f"{count:,} {domain}" for domain, count in self.texts.items())
        lines += [
            f"{self.fit.tokens:,} tokens counted ({read}; sinks left out), "
            f"{self.held_out_tokens:,} held out, {self.seconds:.0f} s. Positions fitted to: "
            f"{in_words(self.fit.positions)}. Value target: {self.fit.value_target}. Largest "
            "condition number of a transform: "
            f"{self.fit.condition:.3g}.",
            "",
        ]
        for title, remarks in (("Warnings", self.warnings), ("Notes", self.notes)):
            if remarks:
                lines += [f"{title}:", "", *(f"* {line}" for line in remarks), ""]
        lines += [
            "Errors on held-out text, geometric means over layers and KV heads:",
            "",
        ]
        lines += table("recipe", list(self._all_errors().items()))
        lines += self._check_lines()
        lines += [] if self.study is None else self.study.to_markdown()
        lines += [
            "",
            "Key error: share of the logits' variance. Value error: share of the output's energy, "
            "pages alone. Output error: share of the energy of the attention output as served.",
            "",
            f"Layers, {self.fit.recipe}, mean over KV heads. Predictor: tr(X'SX) tr(X^-1 C X^-T) "
            "over the least value of any transform. Mean share: |mean key|^2 over the keys' "
            "spread.",
            "",
            "| layer | key error | value error | output error | predictor | mean share | codec |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        over = self.fit.predictor / np.maximum(self.fit.bound, 1e-30)
        for layer in range(len(over)):
            errors = ("-", "-", "-")
            if self.errors is not None:
                key, value, output = (
                    one[layer].mean()
                    for one in (self.errors.key, self.errors.value, self.errors.output)
                )
                errors = (f"{key:.4f}", f"{value:.4f}", f"{output:.5f}")
            lines.append(
                f"| {self._number(layer)} | {' | '.join(errors)} | {over[layer].mean():.2f} "
                f"| {self.fit.mean_share[layer].mean():.2f} | {self._codec(layer)} |"
            )
        return "\n".join(lines) + "\n"

    def _codec(self, layer: int) -> str:
        """The layer's keys and clip ratios, in short."""
        codec = self.codecs[layer] if self.codecs else None
        if codec is None:
            return "-"
        keys = f"uniform {codec.clip_k:g}" if codec.key == "uniform" else codec.key
        return f"{keys}, values {codec.clip_v:g}"

    def _check_lines(self) -> list[str]:
        if not self.checks:
            return []
        lines = [
            "",
            "In the running model, on the same held-out text through real pages:",
            "",
            "| recipe | KL to BF16 | spans recalled |",
            "| --- | --- | --- |",
        ]
        for name, one in self.checks.items():
            recall = "-" if one.mean_recall is None else f"{one.mean_recall:.1%}"
            lines.append(f"| {name} | {one.mean_kl:.4f} | {recall} |")
        if self.later is not None:
            name = f"{self.chosen}, {self.later.offset:,} tokens later"
            lines.append(f"| {name} | {self.later.mean_kl:.4f} | - |")
        return lines

    def plots(self) -> dict[str, bytes]:
        """PNG files by name: errors per layer, spectra, and the error over the tokens fitted to.

        Raises:
            ImportError: matplotlib is missing (the ``report`` extra).
        """
        from calib.plots import errors_by_layer, errors_by_tokens, spectra

        found = {
            "errors.png": errors_by_layer(self._all_errors(), self.fit.recipe),
            "spectra.png": spectra(self.fit.query_spectrum, self.fit.key_spectrum),
        }
        if self.study is not None:
            found["tokens.png"] = errors_by_tokens(self.study)
        return found

    def files(self) -> dict[str, bytes]:
        """report.json and report.md."""
        fields = self.to_json()
        layers = ",\n  ".join(json.dumps(row) for row in fields.pop("layers"))  # a layer a line
        text = f'{json.dumps(fields, indent=1)[:-2]},\n "layers": [\n  {layers}\n ]\n}}\n'
        return {"report.json": text.encode(), "report.md": self.to_markdown().encode()}


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.4g}") for value in values]
