"""What the check of one rollout found: where each of its records lies, and what is wrong with it.

The rule of this module: it holds no token ids. A record stays in its file and is named by place and digest, so that a
directory of any size can be checked whole before anything is written.
"""

from __future__ import annotations

from dataclasses import dataclass

from s3capture.gymdir.layout import Fault, Files, GymState
from s3capture.gymdir.rows import Failure


@dataclass(frozen=True, slots=True)
class Line:
    """One record or ledger row in its file: bytes ``start`` to ``start + length``, and the digest ours stores it by."""

    call: str
    number: int
    start: int
    length: int
    digest: str
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Mark:
    """One incomplete marker. ``mark_id`` follows from its place in the directory, so importing it twice is one mark."""

    mark_id: str
    call: str
    reason: str


@dataclass(frozen=True, slots=True)
class CheckedRollout:
    """One rollout of a directory: what it holds, what is wrong with it, and what is worth knowing."""

    files: Files
    state: GymState
    entries: tuple[Line, ...] = ()
    intents: tuple[str, ...] = ()
    marks: tuple[Mark, ...] = ()
    rows: tuple[Line, ...] = ()
    failures: tuple[Failure, ...] = ()
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def rollout_id(self) -> str:
        """The rollout id."""
        return self.files.rollout_id

    @property
    def dangling(self) -> tuple[str, ...]:
        """The begun calls without a record, which make Gym's snapshot incomplete."""
        recorded = {line.call for line in self.entries}
        return tuple(call for call in self.intents if call not in recorded)

    @property
    def incomplete(self) -> bool:
        """Whether Gym masks the rollout."""
        return bool(self.state.incomplete or self.marks or self.dangling)

    @property
    def calls(self) -> tuple[str, ...]:
        """Every call that was begun or recorded, each once."""
        return tuple(dict.fromkeys((*self.intents, *(line.call for line in self.entries))))

    @property
    def empty(self) -> bool:
        """Whether nothing of it is worth keeping: a lock alone, or a state that says nothing."""
        held = self.entries or self.intents or self.marks or self.rows or self.failures or self.faults
        return not (held or self.state.frozen or self.state.retired)


def read_line(files: Files, suffix: str, line: Line) -> bytes:
    """Return the bytes of a line that was checked."""
    with files.path(suffix).open("rb") as handle:
        handle.seek(line.start)
        return handle.read(line.length)
