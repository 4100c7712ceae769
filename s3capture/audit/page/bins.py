"""Numbers put into bins: a timeline with steps that a person counts in, and histograms with edges of 1, 2 and 5.

The rule of this module: bins cover everything that was counted, so that their sum is the count; where a bin begins and
ends is part of the answer and never guessed by who draws it.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

_MOST = 72
_STEPS = (
    *(1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10_800, 21_600, 43_200),
    *(86_400, 2 * 86_400, 7 * 86_400, 14 * 86_400, 28 * 86_400),
)
"""Seconds: the widths that a bin of a timeline may have; beyond them, whole multiples of the last."""


def timeline(lanes: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Bin several series of times (Unix seconds) alike; ``start`` is a multiple of ``step`` in UTC.

    Series without a time are there with zeros. Without any time at all, ``counts`` are empty.
    """
    filled = [times for times in lanes.values() if times]
    if not filled:
        return {"start": 0, "step": 1, "lanes": [{"name": name, "total": 0, "counts": []} for name in lanes]}
    first, last = min(map(min, filled)), max(map(max, filled))
    step = _step(last - first)
    start = math.floor(first / step) * step
    width = int((last - start) // step) + 1
    rows = []
    for name, times in lanes.items():
        counts = [0] * width
        for time in times:
            counts[int((time - start) // step)] += 1
        rows.append({"name": name, "total": len(times), "counts": counts})
    return {"start": start, "step": step, "lanes": rows}


def _step(span: float) -> int:
    for step in _STEPS:
        if span / step <= _MOST:
            return step
    return _STEPS[-1] * math.ceil(span / _STEPS[-1] / _MOST)


def histogram(values: array[float], smallest: float) -> dict[str, Any]:
    """Bin ``values`` at 1, 2, 5, 10, ... times a power of ten, the first bin being everything below ``smallest``.

    ``edges`` has one number fewer than ``counts``: bin 0 ends at the first edge, the last bin begins at the last one.
    """
    if not values:
        return {"n": 0, "edges": [], "counts": []}
    ordered = sorted(values)
    edges = [smallest]
    while edges[-1] <= ordered[-1]:
        head = edges[-1] / 10 ** math.floor(math.log10(edges[-1]) + 1e-9)
        edges.append(_rounded(edges[-1] * (2.5 if round(head) == 2 else 2)))
    counts = [0] * (len(edges) + 1)
    for value in ordered:
        counts[bisect_right(edges, value)] += 1
    skip = 0
    while skip < len(edges) - 1 and counts[skip] == 0 and counts[skip + 1] == 0:
        skip += 1
    while len(edges) > skip + 1 and counts[-1] == 0 and counts[-2] == 0:
        edges.pop()
        counts.pop()
    return {
        "n": len(ordered),
        "edges": edges[skip:],
        "counts": counts[skip:],
        "p50": _quantile(ordered, 0.5),
        "p95": _quantile(ordered, 0.95),
        "max": ordered[-1],
    }


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def _quantile(ordered: list[float], part: float) -> float:
    return ordered[min(len(ordered) - 1, math.ceil(part * len(ordered)) - 1)]
