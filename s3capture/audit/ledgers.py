"""The ledger of one rollout: was it closed, what failed, and what was admitted and never came to anything.

The rule of this module: it reads the ledger as ``S3CaptureLedger.manifest`` does, object by object, so that one that
is damaged is told and hides nothing; what the manifest would call a failure fails the audit as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from s3capture.audit.findings import Finding, Kind, many, stated
from s3capture.codec import StoredObject
from s3capture.effects import ObjectInfo
from s3capture.errors import CorruptObjectError
from s3capture.keys import Kind as KeyKind
from s3capture.keys import LedgerKeys, escape, parse, unescape
from s3capture.ledger_records import ManifestFailure, manifest_row
from s3capture.protocol import ledger_bodies as bodies
from s3capture.source import first_line

_KINDS: Mapping[KeyKind, tuple[str, ...]] = {
    KeyKind.LEDGER_INTENT: ("ledger-intent",),
    KeyKind.LEDGER_CALL: (bodies.ROW, bodies.REFUSAL),
    KeyKind.LEDGER_FAILURE: ("ledger-failure",),
    KeyKind.LEDGER_CLOSING: ("ledger-closing",),
    KeyKind.LEDGER_CLOSED: ("ledger-closed",),
    KeyKind.LEDGER_RETIRED: ("ledger-retired",),
}


@dataclass(slots=True)
class LedgerAudit:
    """One ledger, judged. ``rows`` are the committed calls (segments); ``settled`` says that no more can come."""

    keys: LedgerKeys
    findings: list[Finding] = field(default_factory=list)
    rows: set[str] = field(default_factory=set)
    retired: bool = False
    settled: bool = False


def audit_ledger(keys: LedgerKeys, listed: Sequence[ObjectInfo], get: Callable[[str], bytes | None]) -> LedgerAudit:
    """Read and judge the ledger whose objects were ``listed``."""
    audit = LedgerAudit(keys)
    seen = bodies.survey(keys, listed)
    audit.retired = seen.retired
    read: dict[tuple[KeyKind, str, str], StoredObject] = {}
    for row in listed:
        parsed = parse(keys.of.root, row.key)
        if parsed is None or parsed.kind not in _KINDS:
            continue
        body = get(row.key)
        if body is None:
            continue  # retired or deleted while it was being read
        try:
            read[parsed.kind, parsed.call, parsed.detail] = _read(keys, row.key, body, parsed.call, _KINDS[parsed.kind])
        except CorruptObjectError as error:
            name = (unescape(parsed.call) or parsed.call) if parsed.call else None
            audit.findings.append(_finding(keys, Kind.DAMAGED_OBJECT, str(error), call=name, key=row.key))
    failed = set(_failures(audit, read))
    _fences(audit, seen, read)
    admitted = _admitted(audit, read)
    audit.settled = admitted is not None
    for segment in () if seen.retired else sorted(seen.intents - seen.outcomes.keys() - failed):
        audit.findings.append(_unsettled(keys, segment, read, admitted))
    left = seen.intents | seen.outcomes.keys()
    if seen.retired and left:
        sentence = f"the ledger is retired and still holds {many(len(left), 'call')}: kept, or not deleted yet"
        audit.findings.append(_finding(keys, Kind.RETAINED, sentence, details={"ledger": True, "calls": len(left)}))
    return audit


def _read(keys: LedgerKeys, key: str, body: bytes, segment: str, kinds: tuple[str, ...]) -> StoredObject:
    stored = bodies.read(keys, key, body, *kinds)
    call = stored.header.get("call")
    if segment and not (isinstance(call, str) and escape(call) == segment):
        raise CorruptObjectError(f"{key}: the object says it is of call {call!r}")
    try:
        value = stored.value()
    except (ValueError, RecursionError) as error:
        raise CorruptObjectError(f"{key}: its payload is no JSON that can be read ({type(error).__name__})") from error
    if not isinstance(value, dict):
        raise CorruptObjectError(f"{key}: holds no fields")
    return stored


def _failures(audit: LedgerAudit, read: Mapping[tuple[KeyKind, str, str], StoredObject]) -> Iterator[str]:
    """Tell every failure and every row that is one; yield the segments of the failed calls."""
    keys = audit.keys
    for (kind, segment, detail), stored in sorted(read.items(), key=lambda item: item[0]):
        call = str(stored.header.get("call"))
        if kind is KeyKind.LEDGER_FAILURE:
            value = stored.value()
            by, at, reason = _text(value.get("by")), _time(value.get("at")), str(value.get("reason"))
            sentence = f"call {call!r} failed in the ledger{stated(by, at)}: {reason}"
            more: dict[str, Any] = {"call": call, "key": keys.failure_at(segment, detail), "by": by, "at": at}
            audit.findings.append(_finding(keys, Kind.LEDGER_FAILURE, sentence, **more, details={"reason": reason}))
            yield segment
        elif kind is KeyKind.LEDGER_CALL and stored.kind == bodies.ROW:
            audit.rows.add(segment)
            _row(audit, segment, call, stored)


def _row(audit: LedgerAudit, segment: str, call: str, stored: StoredObject) -> None:
    keys, by = audit.keys, _text(stored.header.get("by"))
    more: dict[str, Any] = {"call": call, "key": keys.call_at(segment), "by": by}
    try:
        row = manifest_row(stored.value()["record"])
    except (ValidationError, KeyError, TypeError, AttributeError) as error:
        text = first_line(error) if isinstance(error, ValidationError) else repr(error)
        sentence = f"the ledger row of call {call!r} breaks the contract: {text}"
        audit.findings.append(_finding(keys, Kind.BROKEN_RECORD, sentence, **more))
        return
    if isinstance(row, ManifestFailure):
        sentence = f"the ledger row of call {call!r}{stated(by, None)} counts as a failure: {row.reason}"
        audit.findings.append(_finding(keys, Kind.LEDGER_FAILURE, sentence, **more, details={"reason": row.reason}))


def _fences(
    audit: LedgerAudit, seen: bodies.LedgerSurvey, read: Mapping[tuple[KeyKind, str, str], StoredObject]
) -> None:
    keys, closing = audit.keys, KeyKind.LEDGER_CLOSING in seen.fences
    if (seen.closed or seen.retired) and not closing:
        audit.findings.append(_finding(keys, Kind.BREACH, "the ledger was decided without the announcement 'closing'"))
    if seen.closed or seen.retired:
        return
    if closing:
        stored = read.get((KeyKind.LEDGER_CLOSING, "", ""))
        value = {} if stored is None else stored.value()
        by, at = _text(value.get("by")), _time(value.get("at"))
        announced = f"the close of its ledger was announced{stated(by, at)}"
        sentence = f"{announced} and is not decided; closing again finishes it"
        audit.findings.append(_finding(keys, Kind.UNDECIDED, sentence, key=keys.closing, by=by, at=at))
    else:
        sentence = f"its ledger is open, with {many(len(seen.intents | seen.outcomes.keys()), 'call')}"
        audit.findings.append(_finding(keys, Kind.LEDGER_OPEN, sentence))


def _admitted(audit: LedgerAudit, read: Mapping[tuple[KeyKind, str, str], StoredObject]) -> frozenset[str] | None:
    stored = read.get((KeyKind.LEDGER_CLOSED, "", ""))
    if stored is None:
        return None
    value = stored.value().get("admitted")
    if not isinstance(value, list):
        problem = f"{audit.keys.closed}: not a closing decision"
        audit.findings.append(_finding(audit.keys, Kind.DAMAGED_OBJECT, problem, key=audit.keys.closed))
        return None
    return frozenset(map(str, value))


def _unsettled(
    keys: LedgerKeys,
    segment: str,
    read: Mapping[tuple[KeyKind, str, str], StoredObject],
    admitted: frozenset[str] | None,
) -> Finding:
    stored = read.get((KeyKind.LEDGER_INTENT, segment, ""))
    value = {} if stored is None else stored.value()
    by, at = _text(value.get("by")), _time(value.get("at"))
    call = str(stored.header.get("call")) if stored else unescape(segment) or segment
    more: dict[str, Any] = {"call": call, "key": keys.intent_at(segment), "by": by, "at": at}
    if admitted is None:
        sentence = f"call {call!r} asked its ledger to be admitted{stated(by, at)} and has no outcome yet"
        return _finding(keys, Kind.LEDGER_OPEN_CALL, sentence, **more)
    if segment not in admitted:
        sentence = f"call {call!r} asked its ledger to be admitted{stated(by, at)}, behind its close, and was refused"
        return _finding(keys, Kind.LATE, sentence, **more, details={"what": "ledger-intent"})
    sentence = f"call {call!r} was admitted by its ledger{stated(by, at)} and neither committed, failed nor refused"
    return _finding(keys, Kind.LEDGER_UNSETTLED, sentence, **more)


def _finding(keys: LedgerKeys, kind: Kind, sentence: str, **more: Any) -> Finding:
    return Finding(kind, sentence, keys.rollout_id, **more)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _time(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0 else None
