"""The quotient of two medians with an interval of its own. Pure: the same measurements give the same interval."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.summary import CONFIDENCE, Added

RESAMPLES = 4000
MIN_VALUES = 5
"""On each side: of fewer a resample says nothing."""


@dataclass(frozen=True, slots=True)
class Ratio:
    """Attributes:
    value: infinite where what is divided by is not above zero.
    interval: that holds it with `CONFIDENCE`; None where there are too few measurements.
    """

    value: float
    interval: tuple[float, float] | None


def of_medians(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Median ÷ median, and the percentiles of both drawn again and again, each side by itself (bootstrap).

    Where a draw's divisor is zero or less the quotient counts as infinite, whatever is above it: that never makes us
    look better.
    """
    if min(len(above), len(below)) < MIN_VALUES:
        return Ratio(_quotient(above, below), None)
    draw = random.Random(0)
    quotients = sorted(
        _quotient(draw.choices(above, k=len(above)), draw.choices(below, k=len(below))) for _ in range(RESAMPLES)
    )
    outside = math.floor(RESAMPLES * (1 - CONFIDENCE) / 2)
    return Ratio(_quotient(above, below), (quotients[outside], quotients[-1 - outside]))


def added(ours: Added, theirs: Added) -> Ratio:
    """What ours adds ÷ what theirs adds; without an interval unless both are differences within rounds."""
    if ours.is_paired and theirs.is_paired:
        return of_medians(ours.differences, theirs.differences)
    return of_medians([ours.seconds.median], [theirs.seconds.median])


def text(ratio: Ratio, label: str = "") -> str:
    """As it stands in tables: the value, and the interval in brackets, after its label."""
    value = _number(ratio.value)
    if ratio.interval is None:
        return value
    low, high = ratio.interval
    return f"{value} ({label}{_number(low)} … {_number(high)})"


def _number(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "∞"


def _quotient(above: Sequence[float], below: Sequence[float]) -> float:
    divisor = median(below)
    return median(above) / divisor if divisor > 0 else math.inf
