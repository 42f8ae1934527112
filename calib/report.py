"""What a calibration tells its user: a verdict in plain words, tables, JSON and plots."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from calib.choice import Check
from calib.fit import FitReport
from calib.held_out import Errors

# Key error on held-out text, geometric mean over layers and heads, and what it meant for SmolLM2's
# next-token distribution (KL to the BF16 cache): 0.17 -> 0.03 to 0.05, 0.35 -> 0.1, 0.85 -> 1.2.
GOOD, USABLE = 0.25, 0.5
SHARING_COSTS = 1.1  # shared over per-head error from which one rotation per layer is not enough


@dataclasses.dataclass(frozen=True)
class CalibrationReport:
    """A fit, its measured error, and what other recipes would have given on the same text.

    Args:
        fit: of the rotation that was kept.
        errors: of that rotation on held-out text; None when all text was needed for the fit.
        others: the same for other recipes from the same moments, by name.
        checks: of recipe "auto": every candidate, and "bf16", in the running model.
        texts: what was read: tokens counted per domain, sinks left out.
        held_out_tokens: tokens of the held-out sequences.
        seconds: wall time.
        warnings: everything a user should act on, the fit's warnings included.
        notes: what was decided on the way.
        layers: the model's number of every layer that has pages; () counts from 0.
    """

    fit: FitReport
    errors: Errors | None
    others: Mapping[str, Errors]
    texts: Mapping[str, int]
    held_out_tokens: int
    seconds: float
    warnings: tuple[str, ...]
    notes: tuple[str, ...] = ()
    checks: Mapping[str, Check] = dataclasses.field(default_factory=dict)
    layers: Sequence[int] = ()

    @property
    def verdict(self) -> str:
        """One or two sentences: is it good enough to serve, and would something else be better."""
        name = self.fit.recipe
        if self.errors is None:
            return f"{name}: fitted, but no text was left to measure it on; its quality is unknown."
        error = self.errors.key_mean
        grade = "good" if error < GOOD else "usable" if error < USABLE else "poor"
        advice = {
            "good": "fit to serve",
            "usable": "expect visible damage; a centred recipe or more calibration text may help",
            "poor": "do not serve it: answers will be noise",
        }[grade]
        text = (
            f"{name}: {grade}, {advice}. On held-out text 2-bit keys change the attention logits "
            f"by {error:.1%} of their variance and 2-bit values the output by "
            f"{self.errors.value_mean:.1%} of its energy."
        )
        return " ".join([text, *self._comparisons(error), *self._in_the_model()])

    def _in_the_model(self) -> list[str]:
        own = self.checks.get(self.fit.recipe)
        if own is None:
            return []
        text = f"In the running model: KL {own.mean_kl:.4f} to the BF16 cache"
        if own.mean_recall is None:
            return [text + "."]
        return [
            f"{text}, and {own.mean_recall:.0%} of repeated spans recalled where BF16 recalls "
            f"{self.checks['bf16'].mean_recall:.0%}."
        ]

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
        rows = {name: _summary(errors) for name, errors in self._all_errors().items()}
        return {
            "verdict": self.verdict,
            "warnings": list(self.warnings),
            "notes": list(self.notes),
            "recipe": self.fit.recipe,
            "value_target": self.fit.value_target,
            "tokens": self.fit.tokens,
            "tokens_by_domain": dict(self.texts),
            "held_out_tokens": self.held_out_tokens,
            "seconds": round(self.seconds, 1),
            "condition": self.fit.condition,
            "held_out_errors": rows,
            "checks": {name: dataclasses.asdict(one) for name, one in self.checks.items()},
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
            f"{self.held_out_tokens:,} held out, {self.seconds:.0f} s. Value target: "
            f"{self.fit.value_target}. Largest condition number of a transform: "
            f"{self.fit.condition:.3g}.",
            "",
        ]
        for title, remarks in (("Warnings", self.warnings), ("Notes", self.notes)):
            if remarks:
                lines += [f"{title}:", "", *(f"* {line}" for line in remarks), ""]
        lines += [
            "Errors on held-out text, geometric means over layers and KV heads:",
            "",
            "| recipe | key error | value error |",
            "| --- | --- | --- |",
        ]
        lines += [
            f"| {name} | {errors.key_mean:.4f} | {errors.value_mean:.4f} |"
            for name, errors in self._all_errors().items()
        ]
        lines += self._check_lines()
        lines += [
            "",
            "Key error: share of the logits' variance. Value error: share of the output's energy.",
            "",
            f"Layers, {self.fit.recipe}, mean over KV heads. Predictor: tr(X'SX) tr(X^-1 C X^-T) "
            "over the least value of any transform. Mean share: |mean key|^2 over the keys' "
            "spread.",
            "",
            "| layer | key error | value error | predictor | mean share |",
            "| --- | --- | --- | --- | --- |",
        ]
        over = self.fit.predictor / np.maximum(self.fit.bound, 1e-30)
        for layer in range(len(over)):
            key, value = (
                ("-", "-")
                if self.errors is None
                else (
                    f"{self.errors.key[layer].mean():.4f}",
                    f"{self.errors.value[layer].mean():.4f}",
                )
            )
            lines.append(
                f"| {self._number(layer)} | {key} | {value} | {over[layer].mean():.2f} "
                f"| {self.fit.mean_share[layer].mean():.2f} |"
            )
        return "\n".join(lines) + "\n"

    def _check_lines(self) -> list[str]:
        if not self.checks:
            return []
        lines = [
            "",
            "The candidates in the running model, on the same held-out text through real pages:",
            "",
            "| recipe | KL to BF16 | spans recalled |",
            "| --- | --- | --- |",
        ]
        for name, one in self.checks.items():
            recall = "-" if one.mean_recall is None else f"{one.mean_recall:.1%}"
            lines.append(f"| {name} | {one.mean_kl:.4f} | {recall} |")
        return lines

    def plots(self) -> dict[str, bytes]:
        """PNG files by name: errors per layer, and spectra of queries and keys.

        Raises:
            ImportError: matplotlib is missing (the ``report`` extra).
        """
        from matplotlib.figure import Figure

        return {
            "errors.png": _png(self._plot_errors(Figure(figsize=(8, 6), layout="constrained"))),
            "spectra.png": _png(self._plot_spectra(Figure(figsize=(8, 4), layout="constrained"))),
        }

    def _plot_errors(self, figure: Any) -> Any:
        above, below = figure.subplots(2, 1, sharex=True)
        for name, errors in self._all_errors().items():
            width = 2.0 if name == self.fit.recipe else 1.0
            above.plot(errors.key.mean(1), label=name, linewidth=width)
            below.plot(errors.value.mean(1), linewidth=width)
        above.set(ylabel="key error", yscale="log", title="Error on held-out text, mean over heads")
        below.set(ylabel="value error", xlabel="layer", yscale="log")
        if self._all_errors():
            above.legend(fontsize="small")
        return figure

    def _plot_spectra(self, figure: Any) -> Any:
        spectra = {"queries": self.fit.query_spectrum, "keys, centred": self.fit.key_spectrum}
        for axes, (name, spectrum) in zip(figure.subplots(1, 2), spectra.items(), strict=True):
            total = np.maximum(spectrum.sum(-1, keepdims=True), 1e-30)
            share = np.maximum(spectrum / total, 1e-8).mean(1)  # [layers, D]
            for layer, row in enumerate(share):
                axes.plot(
                    row, color=(layer / len(share), 0.3, 1 - layer / len(share)), linewidth=0.7
                )
            axes.set(title=f"{name}: eigenvalues", xlabel="rank", yscale="log")
            axes.set_ylabel("share of the trace (blue: first layer, red: last)")
        return figure

    def files(self) -> dict[str, bytes]:
        """report.json and report.md."""
        fields = self.to_json()
        layers = ",\n  ".join(json.dumps(row) for row in fields.pop("layers"))  # a layer a line
        text = f'{json.dumps(fields, indent=1)[:-2]},\n "layers": [\n  {layers}\n ]\n}}\n'
        return {"report.json": text.encode(), "report.md": self.to_markdown().encode()}


def _summary(errors: Errors) -> dict[str, float | int]:
    return {
        "key_error": round(errors.key_mean, 5),
        "value_error": round(errors.value_mean, 5),
        "saturated_rows": errors.saturated,
    }


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.4g}") for value in values]


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()
