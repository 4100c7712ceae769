"""What an audit can find, and how grave each kind is.

The rule of this module: a finding says one thing about one call, object or rollout, in a sentence that stands alone,
and its kind alone decides whether it fails a check. Kinds are only ever added: scripts name them (``--fail-on``), and
so do dashboards. A finding never holds a token array.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any


class Severity(StrEnum):
    """``fail``: evidence is lost, doubtful or in the wrong place. ``note``: how far things have come, nothing wrong."""

    FAIL = "fail"
    NOTE = "note"


class Kind(StrEnum):
    """What was found; ``MEANING`` says each in words."""

    # Why a rollout is incomplete.
    SEALED_CALL = "sealed-call"
    CONFLICT = "conflict"
    MARK = "mark"
    SPILLED_MARK = "spilled-mark"
    LOST_EVIDENCE = "lost-evidence"
    # What cannot be trusted.
    DAMAGED_OBJECT = "damaged-object"
    LOST_OBJECT = "lost-object"
    BROKEN_RECORD = "broken-record"
    BROKEN_CHAIN = "broken-chain"
    WRONG_TOKENS = "wrong-tokens"
    MISSING_PARENT = "missing-parent"
    MISSING_MARKER = "missing-marker"
    WRONG_MARKER = "wrong-marker"
    STRAY_MARKER = "stray-marker"
    BREACH = "breach"
    # What the ledger says.
    LEDGER_FAILURE = "ledger-failure"
    LEDGER_UNSETTLED = "ledger-unsettled"
    # What lies where nothing should.
    FOREIGN_KEY = "foreign-key"
    ORPHAN_LINEAGE = "orphan-lineage"
    ORPHAN_LEDGER = "orphan-ledger"
    ORPHAN_CAPTURE = "orphan-capture"
    LOST_PACK = "lost-pack"
    SPILL_DAMAGE = "spill-damage"
    # How far it has come.
    OPEN = "open"
    OPEN_CALL = "open-call"
    UNDECIDED = "undecided"
    UNDELIVERED = "undelivered"
    REFUSED_DROP = "refused-drop"
    RETAINED = "retained"
    RESIDUE = "residue"
    ARCHIVED = "archived"
    REFUSAL = "refusal"
    LATE = "late"
    LEDGER_OPEN = "ledger-open"
    LEDGER_OPEN_CALL = "ledger-open-call"
    SPILLED_ELSEWHERE = "spilled-elsewhere"
    ORPHAN_PACK = "orphan-pack"
    UNLISTED_PACK = "unlisted-pack"
    PROBE_LEFTOVER = "probe-leftover"


_NOTES = frozenset(
    {
        Kind.OPEN,
        Kind.OPEN_CALL,
        Kind.UNDECIDED,
        Kind.UNDELIVERED,
        Kind.REFUSED_DROP,
        Kind.RETAINED,
        Kind.RESIDUE,
        Kind.ARCHIVED,
        Kind.REFUSAL,
        Kind.LATE,
        Kind.LEDGER_OPEN,
        Kind.LEDGER_OPEN_CALL,
        Kind.SPILLED_ELSEWHERE,
        Kind.ORPHAN_PACK,
        Kind.UNLISTED_PACK,
        Kind.PROBE_LEFTOVER,
    }
)

MEANING: Mapping[Kind, str] = {
    Kind.SEALED_CALL: "begun, and no outcome came before the freeze or retirement",
    Kind.CONFLICT: "a second payload came under a call id that held another one",
    Kind.MARK: "a writer said that something of the rollout was lost",
    Kind.SPILLED_MARK: "a mark of this run that is on this machine's disk and not in the bucket",
    Kind.LOST_EVIDENCE: "records of it are left, and not all that there was when it was retired or archived",
    Kind.DAMAGED_OBJECT: "an object that fails its digest, or is not what its key says",
    Kind.LOST_OBJECT: "listed time and again, and never there to be read",
    Kind.BROKEN_RECORD: "intact as stored, and breaks the contract of a record",
    Kind.BROKEN_CHAIN: "a delta whose full prompt cannot be rebuilt",
    Kind.WRONG_TOKENS: "the tokens do not have the length or digest that the record states",
    Kind.MISSING_PARENT: "continues a call that is not in the rollout",
    Kind.MISSING_MARKER: "a lineage marker is not there, so resolve decides without it",
    Kind.WRONG_MARKER: "a lineage marker that names another payload than its call holds",
    Kind.STRAY_MARKER: "a lineage marker without the call that it stands for",
    Kind.BREACH: "an invariant does not hold",
    Kind.LEDGER_FAILURE: "the ledger says that a call was not captured",
    Kind.LEDGER_UNSETTLED: "admitted by a closed ledger, and neither committed, failed nor refused",
    Kind.FOREIGN_KEY: "a key that this project never writes",
    Kind.ORPHAN_LINEAGE: "lineage markers of a rollout that is not there",
    Kind.ORPHAN_LEDGER: "in the ledger and not in the capture",
    Kind.ORPHAN_CAPTURE: "in the capture and not in the ledger",
    Kind.LOST_PACK: "the archive says that rollouts lie in a pack, and that or its index is gone",
    Kind.SPILL_DAMAGE: "a file of the spill that cannot be read: it may be a mark",
    Kind.OPEN: "not frozen yet",
    Kind.OPEN_CALL: "begun, and no outcome yet",
    Kind.UNDECIDED: "announced and not decided: under way, or its process died",
    Kind.UNDELIVERED: "frozen, and neither dropped nor retired",
    Kind.REFUSED_DROP: "a drop that was refused because the rollout had changed",
    Kind.RETAINED: "retired, and its records are still there",
    Kind.RESIDUE: "retired, and some of its records are left",
    Kind.ARCHIVED: "packed into an archive, and retired for it",
    Kind.REFUSAL: "the engine refused the call before it generated anything",
    Kind.LATE: "came behind the freeze or the retirement and was refused: evidence, never data",
    Kind.LEDGER_OPEN: "the admissions of its ledger are open",
    Kind.LEDGER_OPEN_CALL: "asked to be admitted by an open ledger, and has no outcome yet",
    Kind.SPILLED_ELSEWHERE: "a mark of a run of this name, spilled under another address",
    Kind.ORPHAN_PACK: "a pack without an index: being made or swept, or its process died; it speaks for nobody",
    Kind.UNLISTED_PACK: "no list names the pack, and rollouts in it have no other records: nobody reads it",
    Kind.PROBE_LEFTOVER: "the scratch key of a check whose process died",
}

SEVERITY: Mapping[Kind, Severity] = {kind: Severity.NOTE if kind in _NOTES else Severity.FAIL for kind in Kind}
"""How grave each kind is; what ``--fail-on`` and ``--strict`` change for one audit."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was found.

    ``rollout`` is None for what concerns the run; ``call`` and ``key`` where it is about one. ``by`` and ``at`` (Unix
    seconds) say who did what was found and when, as far as the bucket knows. ``details`` is JSON-like, and what is in
    it depends on the kind (docs/audit.md).
    """

    kind: Kind
    sentence: str
    rollout: str | None = None
    call: str | None = None
    key: str | None = None
    by: str | None = None
    at: float | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def severity(self) -> Severity:
        """How grave its kind is."""
        return SEVERITY[self.kind]

    @property
    def fails(self) -> bool:
        """Whether its kind fails a check unless the check says otherwise."""
        return SEVERITY[self.kind] is Severity.FAIL


def stated(by: str | None, at: float | None) -> str:
    """Return `` by host:17 at 2026-12-01 15:05:09 UTC``, as far as it is known; for sentences."""
    return f"{f' by {by}' if by else ''}{f' at {utc(at)} UTC' if at is not None else ''}"


def utc(seconds: float) -> str:
    """Return Unix seconds as ``2026-12-01 15:05:09``; a number that is no time of the calendar as itself."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return repr(seconds)


def many(count: int, word: str) -> str:
    """Return ``1 call``, ``2 calls``."""
    return f"{count:,} {word}{'' if count == 1 else 's'}"
