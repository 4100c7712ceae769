"""What a bucket holds of one rollout and of its ledger, read without touching it.

The rule of this module: it only reads, and every body that it goes by has been decoded and its digest checked; what is
damaged is an error of that rollout. Import compares with it before it writes and after, so the same eyes judge both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from s3capture.codec import StoredObject
from s3capture.errors import CorruptObjectError
from s3capture.inspection.standing import Judge, State, standing
from s3capture.keys import Kind, LedgerKeys, parse
from s3capture.protocol import bodies, ledger_bodies
from s3capture.protocol.bodies import Manifest
from s3capture.protocol.survey import Survey, survey
from s3capture.reader import Reader
from s3capture.stored import StoredRun


@dataclass(frozen=True, slots=True)
class Held:
    """The records of one rollout. ``outcomes`` are kind and identity by segment, ``markers`` (fingerprint, call)."""

    seen: Survey
    state: State
    manifest: Manifest | None = None
    archived: bool = False
    outcomes: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    markers: frozenset[tuple[str, str]] = frozenset()


@dataclass(frozen=True, slots=True)
class HeldLedger:
    """The ledger of one rollout. ``rows`` are the stored objects by segment, ``refused`` the settled refusals.

    ``failures`` are the (segment, digest of reason) of failure rows, ``markers`` the (fingerprint, call) of rows.
    """

    seen: ledger_bodies.LedgerSurvey
    rows: Mapping[str, StoredObject] = field(default_factory=dict)
    refused: frozenset[str] = frozenset()
    markers: frozenset[tuple[str, str]] = frozenset()

    @property
    def closing(self) -> bool:
        """Whether the admissions are closed, or being closed."""
        return bool(self.seen.fences)


def hold(run: StoredRun, rollout_id: str) -> Held:
    """Read what is stored of a rollout, live or archived. Raise ``StoreError`` and ``CorruptObjectError``."""
    stored = run.rollout(rollout_id)
    keys = stored.keys
    seen = survey(keys, stored.rows)
    if not stored.rows:
        return Held(seen, State.OPEN)
    judge = Judge(stored.get)
    stands = standing(keys, seen, judge)
    if damaged := judge.list():
        raise CorruptObjectError(damaged[0].problem)
    outcomes = {}
    for segment in sorted(seen.outcomes):
        body = stored.get(keys.call_at(segment))
        if body is not None:
            found = bodies.read_outcome(keys, segment, body)
            # A record is what its payload is, whatever its header says of it.
            identity = found.digest if found.kind == bodies.ENTRY else str(found.header.get("identity"))
            outcomes[segment] = (found.kind, identity)
    parsed = (parse(keys.of.root, row.key) for row in stored.lineage())
    markers = frozenset((p.detail, p.call) for p in parsed if p is not None and p.kind is Kind.LINEAGE)
    return Held(seen, stands.state, stands.manifest, stored.archived, outcomes, markers)


def hold_ledger(reader: Reader, keys: LedgerKeys) -> HeldLedger:
    """Read what is stored of a ledger. Raise ``StoreError`` and ``CorruptObjectError``."""
    what = f"look at the ledger of rollout {keys.rollout_id!r} of run {keys.of.run!r}"
    listed = reader.list(keys.base, what)
    seen = ledger_bodies.survey(keys, listed)
    rows: dict[str, StoredObject] = {}
    refused = set()
    for segment in sorted(seen.outcomes):
        key = keys.call_at(segment)
        body = reader.get(key, what)
        if body is not None:
            stored = ledger_bodies.read(keys, key, body, ledger_bodies.ROW, ledger_bodies.REFUSAL)
            if stored.kind == ledger_bodies.ROW:
                rows[segment] = stored
            else:
                refused.add(segment)
    parsed = (parse(keys.of.root, row.key) for row in listed)
    markers = frozenset((p.detail, p.call) for p in parsed if p is not None and p.kind is Kind.LEDGER_LINEAGE)
    return HeldLedger(seen, rows, frozenset(refused), markers)


def failures_of(reader: Reader, keys: LedgerKeys, held: HeldLedger) -> list[Mapping[str, Any]]:
    """The failure rows as they are stored (model_call_id, reason, at, by), in a stable order."""
    what = f"failures in the ledger of rollout {keys.rollout_id!r} of run {keys.of.run!r}"
    found = []
    for segment, digest in sorted(held.seen.failures):
        key = keys.failure_at(segment, digest)
        body = reader.get(key, what)
        if body is not None:
            found.append(ledger_bodies.read(keys, key, body, "ledger-failure").value())
    return sorted(found, key=lambda failure: (failure["at"], failure["model_call_id"], failure["reason"]))
