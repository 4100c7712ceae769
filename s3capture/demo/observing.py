"""What a process notices about itself: what its operations cost, and what the library warned about.

The rule of this module: everything is an increment since one last asked, so that a process that is killed loses what
it did since its last reply and nothing before.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace

from s3capture.endpoint import Endpoint
from s3capture.stats import OpStats

_LINES = 8
_LINE_LIMIT = 400  # characters


class Increments:
    """What the operations of some endpoints cost since the last time one asked."""

    def __init__(self, endpoints: Iterable[Endpoint]) -> None:
        self._endpoints = list(endpoints)
        self._before: list[dict[str, OpStats]] = [{} for _ in self._endpoints]

    def since_last(self) -> dict[str, OpStats]:
        """Return the difference, by operation; operations that did not happen are left out."""
        found: dict[str, OpStats] = {}
        for index, endpoint in enumerate(self._endpoints):
            now = endpoint.stats()
            for op, stats in now.items():
                before = self._before[index].get(op)
                grown = stats if before is None else _difference(stats, before)
                if grown.count:
                    found[op] = add(found[op], grown) if op in found else grown
            self._before[index] = now
        return found


def _difference(now: OpStats, before: OpStats) -> OpStats:
    count = now.count - before.count
    failures = {name: n - before.failures.get(name, 0) for name, n in now.failures.items()}
    return OpStats(
        count=count,
        failures={name: n for name, n in failures.items() if n},
        trips=now.trips - before.trips,
        requests=now.requests - before.requests,
        retries=now.retries - before.retries,
        seconds=now.seconds[-count:] if count else (),
    )


def add(one: OpStats, other: OpStats) -> OpStats:
    """The two together."""
    failures = dict(one.failures)
    for name, number in other.failures.items():
        failures[name] = failures.get(name, 0) + number
    return replace(
        one,
        count=one.count + other.count,
        failures=failures,
        trips=one.trips + other.trips,
        requests=one.requests + other.requests,
        retries=one.retries + other.retries,
        seconds=one.seconds + other.seconds,
    )


class LogTail(logging.Handler):
    """Keeps the newest warnings of the library until someone takes them."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one line."""
        self._lines = [*self._lines, f"{record.levelname.lower()}: {record.getMessage()[:_LINE_LIMIT]}"][-_LINES:]

    def take(self) -> tuple[str, ...]:
        """Return the lines and forget them."""
        lines, self._lines = self._lines, []
        return tuple(lines)


def merge(into: dict[str, OpStats], increment: dict[str, OpStats]) -> None:
    """Add the costs of one process to those of all."""
    for op, stats in increment.items():
        into[op] = add(into[op], stats) if op in into else stats


def percentile(samples: Sequence[float], percent: int) -> float:
    """The smallest sample that at least ``percent`` percent of all do not exceed (nearest rank); 0.0 of none."""
    if not samples:
        return 0.0
    rank = -(-len(samples) * percent // 100)
    return sorted(samples)[max(rank, 1) - 1]
