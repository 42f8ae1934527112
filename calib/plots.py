"""The pictures of a calibration's report, PNG, drawn without a display."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from calib.held_out import Errors
from calib.study import Study


def errors_by_layer(errors: Mapping[str, Errors], chosen: str) -> bytes:
    """Key and value error of every recipe, mean over heads; the chosen one drawn thicker."""
    figure = _figure(8, 6)
    above, below = figure.subplots(2, 1, sharex=True)
    for name, one in errors.items():
        width = 2.0 if name == chosen else 1.0
        above.plot(one.key.mean(1), label=name, linewidth=width)
        below.plot(one.value.mean(1), linewidth=width)
    above.set(ylabel="key error", yscale="log", title="Error on held-out text, mean over heads")
    below.set(ylabel="value error", xlabel="layer", yscale="log")
    if errors:
        above.legend(fontsize="small")
    return _png(figure)


def spectra(queries: np.ndarray, keys: np.ndarray) -> bytes:
    """Eigenvalues [layers, kv_heads, D] of queries and centred keys, largest first."""
    figure = _figure(8, 4)
    sides = {"queries": queries, "keys, centred": keys}
    for axes, (name, spectrum) in zip(figure.subplots(1, 2), sides.items(), strict=True):
        total = np.maximum(spectrum.sum(-1, keepdims=True), 1e-30)
        share = np.maximum(spectrum / total, 1e-8).mean(1)  # [layers, D]
        for layer, row in enumerate(share):
            axes.plot(row, color=(layer / len(share), 0.3, 1 - layer / len(share)), linewidth=0.7)
        axes.set(title=f"{name}: eigenvalues", xlabel="rank", yscale="log")
        axes.set_ylabel("share of the trace (blue: first layer, red: last)")
    return _png(figure)


def errors_by_tokens(study: Study) -> bytes:
    """Key error on each domain's held-out text over the tokens that the fit saw."""
    figure = _figure(6, 4)
    axes = figure.subplots()
    tokens = [count for count, _ in study.growing]
    for domain in dict.fromkeys(study.domains):
        own = [study.by_domain(one)[domain].key_mean for _, one in study.growing]
        axes.plot(tokens, own, marker="o", label=domain)
    axes.set(
        xlabel="tokens fitted to",
        ylabel="key error",
        xscale="log",
        yscale="log",
        title="Error on held-out text by the size of the fit",
    )
    axes.legend(fontsize="small")
    return _png(figure)


def _figure(width: int, height: int) -> Any:
    from matplotlib.figure import Figure  # the ``report`` extra; the module imports without it

    return Figure(figsize=(width, height), layout="constrained")


def _png(figure: Any) -> bytes:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=100)
    return buffer.getvalue()
