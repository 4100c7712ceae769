"""What an import or an export came to, rollout by rollout, and who is told while it runs.

The rule of this module: a rollout has exactly one fate, and "verified" is said only of what was read back and compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol


class Fate(StrEnum):
    """What became of a rollout. All but the last four are as it should be."""

    IMPORTED = "imported"
    EXPORTED = "exported"
    PRESENT = "present"
    """Everything of it was in the bucket already."""
    PLANNED = "planned"
    """A dry run would have imported it."""
    EMPTY = "empty"
    """There was nothing to import: a lock alone, say."""
    DAMAGED = "damaged"
    CONFLICT = "conflict"
    """The bucket holds something else under its id; nothing of it was written."""
    FAILED = "failed"
    """It could not be finished: the bucket or the directory changed on the way."""
    DIFFERENT = "different"
    """It was written, and what was read back is not what was written."""


_GOOD = frozenset({Fate.IMPORTED, Fate.EXPORTED, Fate.PRESENT, Fate.PLANNED, Fate.EMPTY})


@dataclass(frozen=True, slots=True)
class RolloutReport:
    """One rollout: ``state`` (open, frozen or retired) and counts are those of its directory.

    ``dangling`` calls were begun and have no record; ``rows`` and ``failures`` are the ledger's. ``problems`` say why
    the fate is bad, or which calls were left out, ``notes`` what else is worth knowing.
    """

    rollout: str
    fate: Fate
    state: str
    calls: int = 0
    dangling: int = 0
    marks: int = 0
    rows: int = 0
    failures: int = 0
    verified: bool = False
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether it is as it should be, and nothing was left out."""
        return self.fate in _GOOD and not self.problems


@dataclass(frozen=True, slots=True)
class ImportReport:
    """A whole import. ``problems`` are of no rollout; ``others`` files of the directory are not the token store's."""

    rollouts: tuple[RolloutReport, ...]
    problems: tuple[str, ...] = ()
    others: int = 0
    leftovers: int = 0

    @property
    def ok(self) -> bool:
        """Whether every rollout is as it should be."""
        return not self.problems and all(rollout.ok for rollout in self.rollouts)

    @property
    def verified(self) -> tuple[int, int]:
        """How many were read back and found equal, of how many that hold anything sound."""
        kept = [r for r in self.rollouts if r.fate not in (Fate.EMPTY, Fate.DAMAGED, Fate.CONFLICT, Fate.PLANNED)]
        return sum(rollout.verified for rollout in kept), len(kept)


@dataclass(frozen=True, slots=True)
class ExportReport:
    """A whole export. ``strays`` are keys that belong to no rollout."""

    rollouts: tuple[RolloutReport, ...]
    strays: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every rollout is as it should be."""
        return all(rollout.ok for rollout in self.rollouts)

    @property
    def verified(self) -> tuple[int, int]:
        """How many were read back and found equal, of how many were written."""
        written = [rollout for rollout in self.rollouts if rollout.fate in (Fate.EXPORTED, Fate.DIFFERENT)]
        return sum(rollout.verified for rollout in written), len(written)


class Show(Protocol):
    """Whoever is told how far it is."""

    def phase(self, what: str, total: int | None) -> None:
        """A new phase begins, of ``total`` rollouts where that is known."""
        ...

    def advance(self) -> None:
        """One rollout more is done."""
        ...


class Silent:
    """A ``Show`` for nobody."""

    def phase(self, what: str, total: int | None) -> None:
        """See ``Show``."""

    def advance(self) -> None:
        """See ``Show``."""
