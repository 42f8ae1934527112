"""Errors of means, and comparisons paired by what both sides were measured on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def standard_error(values: Sequence[float]) -> float:
    """sd / sqrt(n) of independent values; 0 for a single one.

    >>> standard_error([1.0, 2.0, 3.0])
    0.5773502691896258
    """
    return float(np.std(values, ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def paired_ratio(values: Sequence[float], reference: Sequence[float]) -> tuple[float, float, float]:
    """(ratio, low, high): geometric mean of values / reference with its 2-SE interval.

    Pairing by sequence removes what makes one text harder than another.

    >>> paired_ratio([1.0, 2.0], [2.0, 4.0])
    (0.5, 0.5, 0.5)
    """
    logs = np.log(np.asarray(values)) - np.log(np.asarray(reference))
    middle, width = float(logs.mean()), 2 * standard_error(logs.tolist())
    low, mid, high = (float(np.exp(middle + step)) for step in (-width, 0.0, width))
    return mid, low, high


def paired_difference(values: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """(mean, standard error) of values - reference, paired.

    >>> paired_difference([0.5, 0.75], [0.25, 0.5])
    (0.25, 0.0)
    """
    gaps = np.subtract(values, reference)
    return float(gaps.mean()), standard_error(gaps.tolist())


def paired_share(values: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """(share, standard error) of mean(values) / mean(reference), paired; the first order of both.

    Single values may be 0, as no ratio of each pair could be.

    >>> paired_share([0.25, 0.0], [0.5, 0.5])
    (0.25, 0.25)
    """
    share = float(np.mean(values) / np.mean(reference))
    rest = np.subtract(values, share * np.asarray(reference))
    return share, standard_error(rest.tolist()) / float(np.mean(reference))
