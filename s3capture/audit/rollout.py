"""One rollout, audited: everything read once, judged together, and let go.

The rule of this module: the bodies of a rollout are in memory only while it is judged, and only so many bytes of all
rollouts at once. A rollout that changes under the audit (it is dropped, or packed, between LIST and GET) is read
again as it is by then; what is listed time and again and never there is a finding, and so is a retired rollout of which
a part is gone each time: a deletion that is under way is not told as a loss.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from s3capture import codec
from s3capture.audit.chains import Chains
from s3capture.audit.findings import Finding, Kind, many
from s3capture.audit.ledgers import LedgerAudit, audit_ledger
from s3capture.audit.markers import Markers, Payloads
from s3capture.audit.objects import misplaced, refused_payloads
from s3capture.audit.reasons import Case, name_of, reasons
from s3capture.effects import ObjectInfo
from s3capture.errors import CorruptObjectError
from s3capture.inspection import RolloutDetail, State, judge_rollout, stored_at
from s3capture.inspection.detail import bodies_of
from s3capture.inspection.standing import Judge, archived_of, rows_of, standing
from s3capture.keys import Kind as KeyKind
from s3capture.keys import parse, unescape
from s3capture.protocol.survey import survey
from s3capture.stored import StoredRollout

_LOOKS = 3


@dataclass(frozen=True, slots=True)
class RolloutAudit:
    """One rollout and what was found.

    ``at`` is when the store says each key was created, in Unix seconds. ``ledger`` is None where there is none.
    Where there is only a ledger, and nothing is ``captured``, ``detail`` is that of a rollout which does not exist.
    """

    rollout: StoredRollout
    detail: RolloutDetail
    findings: tuple[Finding, ...]
    at: Mapping[str, float]
    ledger: LedgerAudit | None = None

    @property
    def rollout_id(self) -> str:
        """The rollout id."""
        return self.rollout.rollout_id

    @property
    def captured(self) -> bool:
        """Whether anything of a capture is stored, and not a ledger alone."""
        return bool(self.rollout.rows or self.rollout.problem)


class Budget:
    """Bytes, as stored, that may be read at once; who asks for more than all of it gets it alone."""

    def __init__(self, size: int) -> None:
        self._size = self._free = size
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, wanted: int) -> Iterator[None]:
        """Wait until ``wanted`` bytes are free and hold them."""
        share = min(wanted, self._size)
        with self._changed:
            self._changed.wait_for(lambda: self._free >= share)
            self._free -= share
        try:
            yield
        finally:
            with self._changed:
                self._free += share
                self._changed.notify_all()


def audit_rollout(
    rollout: StoredRollout,
    *,
    again: Callable[[], StoredRollout],
    markers: tuple[ObjectInfo, ...],
    ledger: tuple[ObjectInfo, ...] = (),
    budget: Budget,
) -> RolloutAudit:
    """Audit one rollout; may run within ``Reader.map``. Raise ``StoreError``.

    ``markers`` are its live lineage rows and ``ledger`` those of its ledger, as they were listed. ``again`` lists the
    rollout anew.
    """
    for look in range(1, _LOOKS + 1):
        with budget.taken(sum(row.size for row in rollout.rows)):
            read = _read(rollout)
            if not read.gone or look == _LOOKS:
                audit = _judged_whole(rollout, read, markers, ledger)
                if look == _LOOKS or not any(finding.kind is Kind.LOST_EVIDENCE for finding in audit.findings):
                    return audit
        rollout = again()
    raise AssertionError("the last look returns")


@dataclass(frozen=True, slots=True)
class _Read:
    """The bodies of a rollout by key, the keys that were listed and are not there, and what the archive lost."""

    stored: dict[str, bytes]
    gone: tuple[str, ...]
    lost: Mapping[str, str]


def _read(rollout: StoredRollout) -> _Read:
    own = bodies_of(rollout)
    lost: dict[str, str] = {}
    try:
        stored = rollout.read(own)
    except CorruptObjectError:
        # A pack is damaged: one key after another, so that what can be read is audited all the same.
        stored = {}
        for key in own:
            try:
                stored |= rollout.read((key,))
            except CorruptObjectError as error:
                lost[key] = str(error)
    return _Read(stored, tuple(key for key in own if key not in stored and key not in lost), lost)


def _judged_whole(
    rollout: StoredRollout, read: _Read, live: tuple[ObjectInfo, ...], ledger: tuple[ObjectInfo, ...]
) -> RolloutAudit:
    try:
        return _judged(rollout, read, live, ledger)
    except (ValueError, RecursionError):
        # Intact by its digest, and no JSON: no writer of this project makes such an object, and readers of it trip.
        unreadable = {key: told for key, body in read.stored.items() if (told := _no_json(key, body))}
        if not unreadable:
            raise
        stored = {key: body for key, body in read.stored.items() if key not in unreadable}
        return _judged(rollout, _Read(stored, read.gone, {**read.lost, **unreadable}), live, ledger)


def _no_json(key: str, body: bytes) -> str:
    try:
        codec.decode(key, body).value()
    except CorruptObjectError:
        return ""  # found where it is judged
    except (ValueError, RecursionError) as error:
        return f"{key}: its payload is no JSON that can be read ({type(error).__name__})"
    return ""


def _judged(
    rollout: StoredRollout,
    read: _Read,
    live: tuple[ObjectInfo, ...],
    ledger: tuple[ObjectInfo, ...],
) -> RolloutAudit:
    keys, stored = rollout.keys, read.stored
    listed = {row.key for row in live}
    markers = Markers(rollout, (*live, *(row for row in rollout.markers if row.key not in listed)))
    chains = Chains(keys, stored)
    detail = judge_rollout(rollout, stored, lineage_markers=len(markers.rows), read_entry=chains.read_entry)
    seen = survey(keys, rows_of(rollout))
    at = {row.key: time for row in rollout.rows if (time := stored_at(row)) is not None}
    case = Case(rollout, seen, standing(keys, seen, Judge(stored.get), archived_of(rollout)), detail, stored, at)
    found = [*reasons(case), *_damage(case, chains, read)] if rollout.rows or rollout.problem else []
    found += [] if rollout.problem else chains.findings(swept=case.swept)
    at_fault = (parse(keys.of.root, damage.key) for damage in detail.damaged)
    damaged = {parsed.call for parsed in at_fault if parsed is not None and parsed.kind is KeyKind.CALL}
    damaged |= {parsed.call for parsed in (parse(keys.of.root, key) for key in read.lost) if parsed is not None}
    payloads = Payloads(
        stored=chains.marked,
        refused=refused_payloads(keys, stored),
        others=seen.outcomes.keys() - chains.marked.keys() - damaged,
        damaged=damaged - chains.marked.keys(),
        begun=seen.intents,
    )
    closed = case.stands.state is not State.OPEN
    found += [] if rollout.problem else markers.findings(payloads, closed=closed, swept=case.swept)
    if markers.late and not rollout.problem:
        count = many(len(markers.late), "lineage marker")
        sentence = f"{count} of puts that were refused, or of records since deleted: resolve finds no call behind them"
        found.append(case.finding(Kind.LATE, sentence, details={"what": "marker", "keys": markers.late[:20]}))
    held = None
    if ledger:
        held = audit_ledger(keys.of.ledger(keys.rollout_id), ledger, lambda key: rollout.reader.get(key, rollout.what))
        found += held.findings
        found += _mismatches(case, held)
    return RolloutAudit(rollout, detail, tuple(found), at, held)


def _damage(case: Case, chains: Chains, read: _Read) -> Iterator[Finding]:
    """Objects and invariants: what is damaged, misplaced, lost, foreign or breached."""
    root = case.rollout.keys.of.root
    told = {damage.key for damage in case.detail.damaged}
    for damage in case.detail.damaged:
        if damage.key == case.rollout.keys.of.archive.base:
            continue  # lost evidence
        kind = Kind.BROKEN_RECORD if damage.key in chains.broken else Kind.DAMAGED_OBJECT
        yield case.finding(kind, damage.problem, call=name_of(root, damage.key), key=damage.key)
    for key, problem in misplaced(case.rollout.keys, case.stored):
        if key not in told:
            yield case.finding(Kind.DAMAGED_OBJECT, problem, call=name_of(root, key), key=key)
    for problem in sorted(set(read.lost.values()) - {case.rollout.problem}):
        keys = [key for key, told in read.lost.items() if told == problem]
        sentence = f"{problem} ({many(len(keys), 'object')} of the rollout)"
        yield case.finding(Kind.DAMAGED_OBJECT, sentence, key=keys[0], details={"keys": keys[:20]})
    for key in read.gone:
        sentence = f"{key}: was listed {_LOOKS} times and could not be read: the store lists what it has not"
        yield case.finding(Kind.LOST_OBJECT, sentence, call=name_of(root, key), key=key)
    foreign = case.detail.summary.foreign
    for key in foreign:
        yield case.finding(Kind.FOREIGN_KEY, f"{key}: nothing that this project writes is called so", key=key)
    by_name = {f"foreign key {key}" for key in foreign}
    for breach in case.detail.breaches:
        if breach not in by_name:
            yield case.finding(Kind.BREACH, breach)


def _mismatches(case: Case, ledger: LedgerAudit) -> Iterator[Finding]:
    """Calls that ledger and capture do not both know of, where both are closed and neither was swept."""
    if ledger.retired or not ledger.settled or case.stands.state is not State.FROZEN or not case.seen.outcomes:
        return
    entries = case.seen.outcomes.keys() - {
        segment for segment, kind in case.stands.kinds.items() if kind is not None and kind != "entry"
    }
    for segment in sorted(ledger.rows - case.seen.outcomes.keys()):
        call = unescape(segment) or segment
        sentence = f"call {call!r} is committed in the ledger, and the capture has no outcome of it"
        yield case.finding(Kind.ORPHAN_LEDGER, sentence, call=call, key=ledger.keys.call_at(segment))
    for segment in sorted(entries - ledger.rows):
        call = unescape(segment) or segment
        sentence = f"call {call!r} is captured, and the ledger has no row of it"
        yield case.finding(Kind.ORPHAN_CAPTURE, sentence, call=call, key=case.rollout.keys.call_at(segment))
