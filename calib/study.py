"""What a rotation's error depends on: the text, how much of it, and where the tokens stand."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from tqdm import tqdm

from calib.covariance import Moments
from calib.held_out import Errors, HeldOut, measure
from calib.material import Material
from oscar_jax.rotation import Rotation

OFFSETS = (0, 2_048, 32_768, 131_072)  # tokens
BANDS = 3
AS_IN_TEXT = "as in the text"
# (moments, positions) to the rotation: the recipe that was chosen, fitted to something else
Refit = Callable[[Moments, int | None], Rotation]


@dataclasses.dataclass(frozen=True)
class Study:
    """Held-out errors of one recipe.

    Args:
        domains: of each held-out sequence. positions: where each measured query stands.
        errors: of the rotation itself.
        cross: of the same recipe fitted on one domain alone, by that domain.
        growing: of the same recipe fitted on ever more tokens, and how many they were.
        offsets: of fits to different positions, by their name, with the text stored later.
    """

    domains: tuple[str, ...]
    positions: np.ndarray
    errors: Errors
    cross: Mapping[str, Errors]
    growing: tuple[tuple[int, Errors], ...]
    offsets: Mapping[str, Mapping[int, Errors]]

    def by_domain(self, errors: Errors) -> dict[str, Errors]:
        """The errors on each domain's text."""
        own = np.array(self.domains)
        return {name: errors.of(sequences=own == name) for name in dict.fromkeys(self.domains)}

    def by_band(self) -> dict[str, Errors]:
        """The errors of the queries in each third of the positions that see a page."""
        edges = np.linspace(self.positions.min(), self.positions.max() + 1, BANDS + 1)
        band = np.searchsorted(edges, self.positions, side="right") - 1
        return {
            f"{int(np.ceil(edges[i]))}-{int(np.ceil(edges[i + 1])) - 1}": self.errors.of(
                queries=band == i
            )
            for i in range(BANDS)
            if (band == i).any()
        }

    def gaps(self) -> dict[str, float]:
        """By "A on B": key error on B of the fit to A alone, over that of the fit to B alone."""
        found = {}
        for fitted, errors in self.cross.items():
            for tested, error in self.by_domain(errors).items():
                if tested != fitted and tested in self.cross:
                    own = self.by_domain(self.cross[tested])[tested]
                    found[f"{fitted} on {tested}"] = error.key_mean / max(own.key_mean, 1e-30)
        return found

    def to_json(self) -> dict[str, Any]:
        named = lambda found: {str(name): summary(one) for name, one in found.items()}  # noqa: E731
        return {
            "by_domain": named(self.by_domain(self.errors)),
            "by_position": named(self.by_band()),
            "fitted_on_one_domain": {
                name: named(self.by_domain(one)) for name, one in self.cross.items()
            },
            "cross_domain_key_error_ratio": {n: round(x, 3) for n, x in self.gaps().items()},
            "by_tokens": {str(tokens): summary(one) for tokens, one in self.growing},
            "by_offset": {name: named(found) for name, found in self.offsets.items()},
        }

    def to_markdown(self) -> list[str]:
        lines = ["", "Where the error is, and what the fit owes to its text:", ""]
        parts = [("domain " + name, one) for name, one in self.by_domain(self.errors).items()]
        parts += [("positions " + name, one) for name, one in self.by_band().items()]
        parts += [(f"fitted on {tokens:,} tokens", one) for tokens, one in self.growing]
        lines += table("part", parts)
        if self.gaps():
            lines += ["", "Fitted on one domain, key error on each:", ""]
            tested = list(dict.fromkeys(self.domains))
            lines += [
                "| fitted on | " + " | ".join(tested) + " |",
                "| --- |" + " --- |" * len(tested),
            ]
            for name, errors in {**self.cross, "all": self.errors}.items():
                own = self.by_domain(errors)
                cells = [f"{own[domain].key_mean:.4f}" for domain in tested]
                lines.append(f"| {name} | " + " | ".join(cells) + " |")
        if self.offsets:
            lines += ["", "The same text stored later in a sequence, key error:", ""]
            heads = [f"{offset:,}" for offset in OFFSETS]
            lines += [
                "| fitted to positions | " + " | ".join(f"offset {head}" for head in heads) + " |",
                "| --- |" + " --- |" * len(heads),
            ]
            for name, found in self.offsets.items():
                cells = [f"{found[offset].key_mean:.4f}" for offset in OFFSETS]
                lines.append(f"| {name} | " + " | ".join(cells) + " |")
        return lines


def study(
    refit: Refit,
    rotation: Rotation,
    errors: Errors,
    material: Material,
    positions: int | None,
    context: int,
    frequencies: Sequence[np.ndarray],
    progress: bool = True,
) -> Study:
    """Measure the rotation and its recipe's other fits on the material's held-out rows.

    Args:
        errors: of the rotation on these rows.
        positions: that the rotation is fitted to. context: the other choice to compare with.
        progress: show a bar on stderr.
    """
    held = material.held_out
    if held is None:
        raise ValueError("the material holds no held-out rows")
    domains = material.by_domain if len(material.by_domain) > 1 else {}
    total = len(domains) + len(material.growing) + 2 * len(OFFSETS)
    with tqdm(total=total, desc="studying", unit=" measurements", disable=not progress) as bar:

        def measured(one: Rotation, rows: HeldOut) -> Errors:
            found = measure(one, rows)
            bar.update()
            return found

        cross = {
            name: measured(refit(moments, positions), held) for name, moments in domains.items()
        }
        growing = [
            (tokens, measured(refit(moments, positions), held))
            for tokens, moments in material.growing
        ]
        growing.append((int(material.moments.layers[0].tokens), errors))
        other = context if positions is None else None
        fits = {positions: rotation, other: refit(material.moments, other)}
        offsets: dict[str, dict[int, Errors]] = {in_words(one): {} for one in fits}
        for offset in OFFSETS:
            later = thinned(held, 4).at_offset(offset, frequencies)
            for fitted_to, one in fits.items():
                offsets[in_words(fitted_to)][offset] = measured(one, later)
    return Study(held.domains, held.positions, errors, cross, tuple(growing), offsets)


def thinned(held: HeldOut, step: int) -> HeldOut:
    """Every ``step``-th query: comparisons of whole fits need no more."""
    return dataclasses.replace(
        held,
        positions=held.positions[::step],
        queries=tuple(queries[:, ::step] for queries in held.queries),
    )


def in_words(positions: int | None) -> str:
    return AS_IN_TEXT if positions is None else f"up to {positions:,}"


def summary(errors: Errors) -> dict[str, float | int]:
    return {
        "key_error": round(errors.key_mean, 5),
        "value_error": round(errors.value_mean, 5),
        "output_error": round(errors.output_mean, 6),
        "saturated_rows": errors.saturated,
    }


def table(title: str, rows: Sequence[tuple[str, Errors]]) -> list[str]:
    """Markdown: a row of errors for each name."""
    return [
        f"| {title} | key error | value error | output error |",
        "| --- | --- | --- | --- |",
        *(
            f"| {name} | {one.key_mean:.4f} | {one.value_mean:.4f} | {one.output_mean:.5f} |"
            for name, one in rows
        ),
    ]
