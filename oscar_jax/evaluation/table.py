"""Tables of JSON rows in Markdown: +- one standard error, paired comparisons with 2-SE intervals.

Everything is worked out from the rows' own values, so a merged file reads like a single run's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from oscar_jax.evaluation.rows import ALL, BF16
from oscar_jax.evaluation.statistics import paired_difference, paired_ratio, paired_share

Row = Mapping[str, Any]


def all_kl(row: Row) -> list[float]:
    """KL of every sequence, domain after domain."""
    return [kl for domain in row["domains"].values() for kl in domain["per_sequence"]["kl"]]


def reference_of(rows: Sequence[Row]) -> str | None:
    """The recipe that others are compared with: Hadamard, or the first that is not BF16."""
    names = [row["recipe"] for row in rows if row["recipe"] != BF16]
    return "hadamard" if "hadamard" in names else next(iter(names), None)


def compare(rows: Sequence[dict[str, Any]]) -> None:
    """Give every row ``kl_ratio`` and ``recall_difference`` to the table's reference.

    KL is compared as a ratio paired by sequence, recall as a difference paired by span.
    """
    name = reference_of(rows)
    reference = next((row for row in rows if row["recipe"] == name), None)
    for row in rows:
        row.pop("kl_ratio", None)
        row.pop("recall_difference", None)
        if reference is None or row["recipe"] == BF16:
            continue
        if "domains" in row and "domains" in reference:
            ratio, low, high = paired_ratio(all_kl(row), all_kl(reference))
            row["kl_ratio"] = {"ratio": ratio, "low": low, "high": high, "to": name}
        if "recall_per_span" in row and "recall_per_span" in reference:
            pair = row["recall_per_span"], reference["recall_per_span"]
            mean, error = paired_difference(*pair)
            row["recall_difference"] = {"mean": mean, "se": error, "to": name}


def main_table(rows: Sequence[Row]) -> str:
    """Bits, perplexity, KL, top-1 and recall of every recipe, and its paired comparisons."""
    measured = [row for row in rows if "domains" in row or "recall" in row]
    if not measured:
        return ""
    domains = next((list(row["domains"]) for row in measured if "domains" in row), [])
    name = reference_of(measured)
    header = ["recipe", "bits", *(f"perplexity {domain}" for domain in domains)]
    header += [*(f"KL {domain}" for domain in domains), *(f"top-1 % {x}" for x in domains)]
    header += ["recall %"] if any("recall" in row for row in measured) else []
    header += [f"KL / KL of {name} [2 SE]"] if any("kl_ratio" in row for row in measured) else []
    lines = [header]
    for row in measured:
        numbers = [row.get("domains", {}).get(domain) for domain in domains]
        cells = [row["recipe"], f"{row['bits']:.4g}" if "bits" in row else "-"]
        cells += [_or_dash(one, lambda x: f"{x['perplexity']:.2f}") for one in numbers]
        cells += [_or_dash(one, lambda x: f"{x['kl']:.4f} ± {x['kl_se']:.4f}") for one in numbers]
        cells += [_or_dash(one, lambda x: f"{100 * x['top1']:.1f}") for one in numbers]
        if "recall %" in header:
            cells.append(percent(row.get("recall"), row.get("recall_se")))
        if len(cells) < len(header):
            cells.append(_or_dash(row.get("kl_ratio"), interval))
        lines.append(cells)
    return markdown(lines)


def band_table(rows: Sequence[Row]) -> str:
    """KL by position band, mean over the domains."""
    measured = [row for row in rows if "bands" in next(iter(row.get("domains", {0: {}}).values()))]
    if not measured:
        return ""
    domains = measured[0]["domains"]
    names = list(next(iter(domains.values()))["bands"])
    lines = [["recipe", *(f"KL {domain} {band}" for domain in domains for band in names)]]
    for row in measured:
        cells = [
            f"{one['bands'][band]['kl']:.4f} ± {one['bands'][band]['kl_se']:.4f}"
            for one in row["domains"].values()
            for band in names
        ]
        lines.append([row["recipe"], *cells])
    return markdown(lines)


def probe_table(rows: Sequence[Row]) -> str:
    """Recall of every kind, length and depth, in per cent."""
    measured = [row for row in rows if "probes" in row]
    if not measured:
        return ""
    columns = [(length, kind) for length, kinds in measured[0]["probes"].items() for kind in kinds]
    header = ["recipe", "recall % - reference"]
    for length, kind in columns:
        depths = measured[0]["probes"][length][kind]["by_depth"]
        shown = ", ".join(f"{100 * one['depth']:.0f}" for one in depths)
        header.append(f"{kind} {length} (at depth {shown} %)")
    lines = [header]
    for row in measured:
        gap = row.get("recall_difference")
        cells = [row["recipe"], _or_dash(gap, lambda x: percent(x["mean"], x["se"]))]
        for length, kind in columns:
            found = row["probes"][length][kind]
            depths = ", ".join(f"{100 * one['mean']:.0f}" for one in found["by_depth"])
            cells.append(f"{percent(found['mean'], found['se'])} ({depths})")
        lines.append(cells)
    return markdown(lines)


def length_table(rows: Sequence[Row]) -> str:
    """Recall by kind and length in per cent, and how much of BF16's that is."""
    measured = [row for row in rows if "probes" in row]
    exact: Row = next((row["probes"] for row in measured if row["recipe"] == BF16), {})
    if not exact:
        return ""
    columns = [(kind, length) for kind in next(iter(exact.values())) for length in exact]
    lines = [["recipe", *(f"{kind} {length} (% of BF16's)" for kind, length in columns)]]
    for row in measured:
        cells = [row["recipe"]]
        for kind, length in columns:
            found, all_there = row["probes"][length][kind], exact[length][kind]
            of = "-"  # where BF16 finds nothing
            if all_there["mean"]:
                share, error = paired_share(found["values"], all_there["values"])
                of = f"{100 * share:.0f} ± {100 * error:.0f}"
            cells.append(f"{percent(found['mean'], found['se'])} ({of})")
        lines.append(cells)
    return markdown(lines)


def answer_table(rows: Sequence[Row]) -> str:
    """Strict formats: validity, agreement, length and truncation beside BF16."""
    measured = [row for row in rows if "answers" in row]
    if not measured:
        return ""
    kinds = list(measured[0]["answers"]["kinds"])
    header = ["recipe"]
    header += [f"valid % of BF16's, {kind}" for kind in kinds]
    header += ["agreement %", "same %", "length / BF16", "truncated % (BF16)"]
    lines = [header]
    for row in measured:
        found = row["answers"]["kinds"]
        every = found["all"]
        cells = [row["recipe"]]
        for kind in kinds:
            one = found[kind]
            of = f"of {one['bf16_valid']}"
            cells.append(_or_dash(one["valid"], lambda x, of=of: f"{100 * x:.0f} ({of})"))
        cells += [percent(every["agreement"], every["agreement_se"]), f"{100 * every['same']:.0f}"]
        cells.append(f"{every['length']:.2f}")
        cells.append(f"{100 * every['truncated']:.0f} ({100 * every['bf16_truncated']:.0f})")
        lines.append(cells)
    return markdown(lines)


def drift_table(rows: Sequence[Row]) -> str:
    """KL by generated position, agreement of choices, and where a free run parts ways."""
    measured = [row for row in rows if "drift" in row]
    if not measured:
        return ""
    bands = list(measured[0]["drift"]["bands"])
    lines = [["recipe", "KL", *(f"KL {band}" for band in bands), "same choice %", "parts after"]]
    for row in measured:
        found = row["drift"]
        parted = ", ".join("never" if one is None else str(one) for one in found["parted"])
        cells = [f"{found['bands'][band]['kl']:.4f}" for band in bands]
        head = [row["recipe"], f"{found['kl']:.4f} ± {found['kl_se']:.4f}"]
        lines.append([*head, *cells, f"{100 * found['choices']:.1f}", parted])
    return markdown(lines)


def decode_table(rows: Sequence[Row]) -> str:
    """How far one query per step is from prefill."""
    measured = [row for row in rows if "decode_check" in row]
    if not measured:
        return ""
    lines = [["recipe", "KL to prefill", "same first token %", "largest logit difference"]]
    for row in measured:
        found = row["decode_check"]
        same = f"{100 * found['top1_of_prefill']:.1f}"
        largest = f"{found['largest_logit_difference']:.2f}"
        lines.append([row["recipe"], f"{found['kl_to_prefill']:.5f}", same, largest])
    return markdown(lines)


def gaps(rows: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Per recipe what text of the wrong domain costs: KL fitted on the other / on the same domain.

    One number over all test sequences of the domains that the recipe was fitted on one by one:
    geometric mean, paired by sequence, with its 2-SE interval.
    """
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        recipe, _, domain = row["recipe"].partition("@")
        if domain and domain != ALL and domain in row.get("domains", {}):
            found.setdefault(recipe, {})[domain] = row["domains"]
    out = {}
    for recipe, by_domain in found.items():
        other, same = [], []
        for tested, own in by_domain.items():
            for fitted, domains in by_domain.items():
                if fitted != tested:
                    other += domains[tested]["per_sequence"]["kl"]
                    same += own[tested]["per_sequence"]["kl"]
        if other:
            out[recipe] = dict(
                zip(("ratio", "low", "high"), paired_ratio(other, same), strict=True)
            )
    return out


def gap_table(rows: Sequence[Row]) -> str:
    """``gaps`` as a table."""
    found = gaps(rows)
    if not found:
        return ""
    lines = [["recipe", "KL fitted on the other domain / on the same [2 SE]"]]
    return markdown(lines + [[recipe, interval(gap)] for recipe, gap in found.items()])


def every_table(rows: Sequence[Row]) -> str:
    """All tables that the rows have numbers for."""
    makers = (
        main_table,
        band_table,
        probe_table,
        length_table,
        answer_table,
        drift_table,
        decode_table,
        gap_table,
    )
    return "\n".join(table for table in (maker(rows) for maker in makers) if table)


def interval(ratio: Mapping[str, float]) -> str:
    """A ratio with its 2-SE interval.

    >>> interval({"ratio": 0.5, "low": 0.25, "high": 1.0})
    '0.50 [0.25, 1.00]'
    """
    digits = 2 if ratio["ratio"] >= 0.1 else 3
    low, middle, high = (f"{ratio[key]:.{digits}f}" for key in ("low", "ratio", "high"))
    return f"{middle} [{low}, {high}]"


def percent(mean: float | None, error: float | None) -> str:
    """
    >>> percent(0.5, 0.0123), percent(None, None)
    ('50.0 ± 1.2', '-')
    """
    return "-" if mean is None or error is None else f"{100 * mean:.1f} ± {100 * error:.1f}"


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A header and rows as a Markdown table."""
    ruled = [lines[0], ["---"] * len(lines[0]), *lines[1:]]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in ruled) + "\n"


def _or_dash(value: Any, shown: Any) -> str:
    return "-" if value is None else shown(value)


def mean_kl(row: Row) -> float:
    """KL over all sequences of all domains."""
    return float(np.mean(all_kl(row)))
