"""What the operations of this process cost, for whoever runs them: counts, seconds, trips and requests.

The rule of this module: measuring never changes an operation, and memory stays bounded (the newest samples are
kept).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from threading import Lock

from s3capture.driver import Tally

_SAMPLES = 20_000


@dataclass(frozen=True, slots=True)
class OpStats:
    """Totals of one kind of operation; ``seconds`` are the newest samples, in no order that means anything."""

    count: int
    failures: dict[str, int]
    trips: int
    requests: int
    retries: int
    seconds: tuple[float, ...]


@dataclass(slots=True)
class _Totals:
    count: int = 0
    trips: int = 0
    requests: int = 0
    retries: int = 0
    failures: dict[str, int] = field(default_factory=dict)
    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))


class Stats:
    """Collects from many threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._of: dict[str, _Totals] = {}

    def add(self, op: str, seconds: float, tally: Tally, failure: str) -> None:
        """Count one finished operation; ``failure`` names the kind of error it raised, empty for none."""
        with self._lock:
            totals = self._of.setdefault(op, _Totals())
            totals.count += 1
            totals.trips += tally.trips
            totals.requests += tally.requests
            totals.retries += tally.retries
            totals.seconds.append(seconds)
            if failure:
                totals.failures[failure] = totals.failures.get(failure, 0) + 1

    def snapshot(self) -> dict[str, OpStats]:
        """The totals so far, by operation."""
        with self._lock:
            return {
                op: OpStats(t.count, dict(t.failures), t.trips, t.requests, t.retries, tuple(t.seconds))
                for op, t in sorted(self._of.items())
            }
