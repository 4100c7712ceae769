"""What an audit came to, in numbers.

The rule of this module: totals are added up as rollouts go by, in memory that does not grow with the run (but for a
number for each kind); nothing is counted twice, and what was found is counted even where no report has room for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from s3capture.audit.findings import Finding, Kind
from s3capture.audit.rollout import RolloutAudit
from s3capture.inspection import State


@dataclass(slots=True)
class Totals:
    """Rollouts, calls and bytes (as stored), by state; findings by kind, and rollouts with a finding of each kind.

    ``archived`` counts rollouts whose records lie in packs; they are counted by the state in which they were packed as
    well. ``ledgers`` counts those of rollouts with and without a capture.
    """

    rollouts: int = 0
    calls: int = 0
    bytes: int = 0
    incomplete: int = 0
    archived: int = 0
    ledgers: int = 0
    states: Counter[str] = field(default_factory=Counter)
    bytes_by_state: Counter[str] = field(default_factory=Counter)
    kinds: Counter[Kind] = field(default_factory=Counter)
    rollouts_by_kind: Counter[Kind] = field(default_factory=Counter)

    def take(self, audit: RolloutAudit) -> None:
        """Count one rollout and its findings."""
        summary = audit.detail.summary
        if audit.captured:
            self.rollouts += 1
            self.calls += summary.calls
            self.bytes += summary.bytes
            self.incomplete += summary.incomplete
            self.archived += summary.archived
            self.states[summary.state] += 1
            self.bytes_by_state[summary.state] += summary.bytes
        self.ledgers += audit.ledger is not None
        self.kinds.update(finding.kind for finding in audit.findings)
        self.rollouts_by_kind.update({finding.kind for finding in audit.findings})

    def take_findings(self, findings: Iterable[Finding]) -> None:
        """Count findings that concern the run."""
        for finding in findings:
            self.kinds[finding.kind] += 1

    def failing(self, kinds: frozenset[Kind]) -> int:
        """How many findings are of ``kinds``."""
        return sum(count for kind, count in self.kinds.items() if kind in kinds)

    def as_json(self) -> dict[str, Any]:
        """The totals as JSON-like data; every state is there, and the kinds that were found."""
        return {
            "rollouts": self.rollouts,
            "calls": self.calls,
            "bytes": self.bytes,
            "incomplete": self.incomplete,
            "archived": self.archived,
            "ledgers": self.ledgers,
            "states": {str(state): self.states[state] for state in State},
            "bytes_by_state": {str(state): self.bytes_by_state[state] for state in State},
            "kinds": {str(kind): self.kinds[kind] for kind in Kind if self.kinds[kind]},
            "rollouts_by_kind": {
                str(kind): self.rollouts_by_kind[kind] for kind in Kind if self.rollouts_by_kind[kind]
            },
        }
