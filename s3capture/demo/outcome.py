"""What came of a demo, as data: the table and the JSON are both made from it.

The rule of this module: numbers are counted where they happened and only added up here; whether the demo succeeded
follows from ``differences`` alone. Sizes are bytes, times are seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from s3capture.demo.verify import Why
from s3capture.records import ParentResolutionStatus
from s3capture.stats import OpStats


class Fate(StrEnum):
    """What became of a frozen rollout."""

    DROPPED = "dropped"
    RETAINED = "retained"


@dataclass(frozen=True, slots=True)
class Difference:
    """Something that is not what the script should give; ``rollout`` is "" when it concerns none."""

    rollout: str
    what: str


@dataclass(frozen=True, slots=True)
class RolloutOutcome:
    """One frozen rollout. ``verified`` counts the entries that were read back equal, 0 if anything differs."""

    rollout: str
    calls: int
    entries: int
    deltas: int
    refusals: int
    verified: int
    complete: bool
    reasons: Sequence[Why]
    fate: Fate
    why: str


@dataclass(slots=True)
class Lineage:
    """Parent decisions: ``crossed`` are resolved ones whose parent another process had put."""

    by_status: dict[ParentResolutionStatus, int] = field(
        default_factory=lambda: dict.fromkeys(ParentResolutionStatus, 0)
    )
    crossed: int = 0


@dataclass(slots=True)
class Tokens:
    """``prompt`` counts every prompt in full, ``stored_prompt`` what the records hold of it; of calls that were put."""

    prompt: int = 0
    stored_prompt: int = 0
    generated: int = 0


@dataclass(slots=True)
class Sizes:
    """``raw`` is the JSON of the records, ``records`` their objects, ``all_objects`` whatever the rollouts held."""

    raw: int = 0
    records: int = 0
    all_objects: int = 0
    objects: int = 0
    left: int = 0
    objects_left: int = 0


@dataclass(slots=True)
class Troubles:
    """What was provoked and behaved as it must, in counts. ``down_s`` is how long S3 was away."""

    retries: int = 0
    conflicts: int = 0
    refusals: int = 0
    deaths: int = 0
    late_writes: int = 0
    spilled: int = 0
    drained: int = 0
    down_s: float = 0.0


@dataclass(slots=True)
class Outcome:
    """Everything that a demo found out."""

    title: str
    url: str
    run: str
    embedded: bool
    workers: int
    kept: bool
    skipped: Sequence[str]
    calls: int
    puts: int = 0
    rollouts: list[RolloutOutcome] = field(default_factory=list)
    lineage: Lineage = field(default_factory=Lineage)
    tokens: Tokens = field(default_factory=Tokens)
    sizes: Sizes = field(default_factory=Sizes)
    troubles: Troubles = field(default_factory=Troubles)
    operations: dict[str, OpStats] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)
    log: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether everything is what the script should give."""
        return not self.differences

    @property
    def verified(self) -> int:
        """The number of entries that were read back equal."""
        return sum(rollout.verified for rollout in self.rollouts)

    def of_fate(self, fate: Fate) -> list[RolloutOutcome]:
        """The rollouts of one fate."""
        return [rollout for rollout in self.rollouts if rollout.fate is fate]
