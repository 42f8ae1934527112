"""Pictures of a table's rows: one PNG with a panel for every part that was measured."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from oscar_jax.evaluation.rows import BF16
from oscar_jax.evaluation.statistics import standard_error
from oscar_jax.evaluation.table import all_kl

Row = Mapping[str, Any]
WIDTH = 6.4  # inches of a panel


def save(rows: Sequence[Row], path: Path, title: str) -> None:
    """Write the PNG.

    Raises:
        ValueError: matplotlib is missing (the ``report`` extra), or nothing was measured.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib: pip install '.[report]'") from None
    panels = [(draw, kept) for draw, kept in _panels(rows) if kept]
    if not panels:
        raise ValueError("--plot: no row has anything to draw")
    height = max(3.2, 1.2 + 0.28 * len(rows))
    across = min(2, len(panels))
    down = -(-len(panels) // across)
    figure = Figure(figsize=(WIDTH * across, height * down), layout="constrained")
    figure.suptitle(title)
    axes = figure.subplots(down, across, squeeze=False).ravel()
    for one, (draw, kept) in zip(axes, panels, strict=False):
        draw(one, kept)
    for one in axes[len(panels) :]:
        one.set_axis_off()
    figure.savefig(path, dpi=64)


def _panels(rows: Sequence[Row]) -> list[tuple[Callable[[Any, list[Row]], None], list[Row]]]:
    quantised = [row for row in rows if row["recipe"] != BF16]
    return [
        (kl_per_recipe, [row for row in quantised if "domains" in row]),
        (recall_per_recipe, [row for row in rows if "recall" in row]),
        (kl_by_position, [row for row in quantised if _has_bands(row)]),
        (recall_by_depth, [row for row in rows if "probes" in row]),
        (drift_by_position, [row for row in quantised if "drift" in row]),
        (answers_per_recipe, [row for row in rows if "answers" in row]),
    ]


def _has_bands(row: Row) -> bool:
    return bool(row.get("domains")) and all("bands" in one for one in row["domains"].values())


def kl_per_recipe(axes: Any, rows: list[Row]) -> None:
    """Mean KL with one standard error over the sequences, logarithmic."""
    means = [float(np.mean(all_kl(row))) for row in rows]
    errors = [standard_error(all_kl(row)) for row in rows]
    _bars(axes, rows, means, errors)
    axes.set(xscale="log", xlabel="KL to the BF16 cache, nats per token")


def recall_per_recipe(axes: Any, rows: list[Row]) -> None:
    """Recall of spans with one standard error."""
    means, errors = ([100 * row[key] for row in rows] for key in ("recall", "recall_se"))
    _bars(axes, rows, means, errors)
    axes.set(xlabel="recall of spans in the pages, %")


def kl_by_position(axes: Any, rows: list[Row]) -> None:
    """KL per band of positions, mean over the domains."""
    bands = list(next(iter(rows[0]["domains"].values()))["bands"])
    means = [
        [
            float(np.mean([one["bands"][band]["kl"] for one in row["domains"].values()]))
            for band in bands
        ]
        for row in rows
    ]
    _lines(axes, rows, [bands] * len(rows), means)
    axes.set(yscale="log", xlabel="position", ylabel="KL, nats per token")


def recall_by_depth(axes: Any, rows: list[Row]) -> None:
    """Recall of spans by where they lie, at the longest length."""
    length = list(rows[0]["probes"])[-1]
    depths = [row["probes"][length]["span"]["by_depth"] for row in rows]
    x, y = ([[100 * one[key] for one in own] for own in depths] for key in ("depth", "mean"))
    _lines(axes, rows, x, y)
    axes.set(xlabel=f"depth of the span in {length} tokens, %", ylabel="recall, %")


def drift_by_position(axes: Any, rows: list[Row]) -> None:
    """KL of generated tokens by how many were generated before them."""
    bands = list(rows[0]["drift"]["bands"])
    means = [[row["drift"]["bands"][band]["kl"] for band in bands] for row in rows]
    _lines(axes, rows, [bands] * len(rows), means)
    axes.set(yscale="log", xlabel="generated token", ylabel="KL, nats per token")


def answers_per_recipe(axes: Any, rows: list[Row]) -> None:
    """Share of BF16's strict-format answer that comes out token by token."""
    found = [row["answers"]["kinds"]["all"] for row in rows]
    means, errors = ([100 * one[key] for one in found] for key in ("agreement", "agreement_se"))
    _bars(axes, rows, means, errors)
    axes.set(xlabel="agreement with BF16's greedy answer, % of its tokens")


def _bars(axes: Any, rows: list[Row], means: list[float], errors: list[float]) -> None:
    places = np.arange(len(rows))
    axes.barh(places, means, xerr=errors, height=0.7, color="tab:blue", ecolor="black")
    axes.set_yticks(places, [row["recipe"] for row in rows], fontsize="x-small")
    axes.invert_yaxis()


def _lines(axes: Any, rows: list[Row], x: list[Any], y: list[Any]) -> None:
    """A line per recipe, none like another; their names below the axes, where they hide nothing."""
    kinds = itertools.product(("-", "--", ":"), [f"C{i}" for i in range(10)])
    for row, own_x, own_y, (style, color) in zip(rows, x, y, kinds, strict=False):
        axes.plot(
            own_x, own_y, style, color=color, marker="o", markersize=3, linewidth=1,
            label=row["recipe"],
        )  # fmt: skip
    axes.legend(fontsize="xx-small", ncols=2, loc="upper center", bbox_to_anchor=(0.5, -0.12))
