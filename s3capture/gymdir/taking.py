"""One rollout of a bucket as a capture directory of Gym's would hold it, and what is lost on the way.

The rule of this module: Gym's store, opened on what is written, gives the snapshot that our source gives: the same
entries and the same verdict. What Gym has no place for (refusals, evidence of conflicts, late objects) is left out and
said; what its reader cannot read is left out in a way that masks the rollout.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import orjson

from s3capture.codec import StoredObject
from s3capture.errors import CorruptObjectError
from s3capture.gymdir.holding import HeldLedger, failures_of, hold_ledger
from s3capture.gymdir.layout import FINGERPRINT_VERSION, GymState
from s3capture.gymdir.rows import Failure, dump_failure, dump_row
from s3capture.inspection.standing import Judge, Standing, State, standing
from s3capture.keys import LedgerKeys, unescape
from s3capture.ledger_records import UNCOMMITTED_CALL_REASON
from s3capture.protocol import bodies, ledger_bodies
from s3capture.protocol.survey import Survey, survey
from s3capture.reader import Reader
from s3capture.source import read_entry
from s3capture.stored import StoredRollout


@dataclass(slots=True)
class Taken:
    """The files of one rollout, in memory. ``lines`` are the records by call, in the order of the file."""

    rollout_id: str
    state: GymState = field(default_factory=GymState)
    lines: dict[str, bytes] = field(default_factory=dict)
    intents: list[str] = field(default_factory=list)
    marks: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def dangling(self) -> list[str]:
        """The intents without a record."""
        return [call for call in self.intents if call not in self.lines]


@dataclass(slots=True)
class TakenLedger:
    """The ledger file of one rollout: ``rows`` by call and ``failures``, as lines."""

    rows: dict[str, bytes] = field(default_factory=dict)
    failures: dict[Failure, bytes] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def take(stored: StoredRollout) -> Taken:
    """Read one rollout, live or archived, for export. Raise ``CorruptObjectError`` and ``StoreError``."""
    return _Taking(stored).run()


class _Taking:
    def __init__(self, stored: StoredRollout) -> None:
        self._stored, self._keys = stored, stored.keys
        self._seen: Survey = survey(stored.keys, stored.rows)
        self._found = Taken(stored.rollout_id)

    def run(self) -> Taken:
        judge = Judge(self._stored.get)
        stands = standing(self._keys, self._seen, judge)
        if damaged := judge.list():
            raise CorruptObjectError(damaged[0].problem)
        if stands.state is State.RETIRED and not self._is_kept(stands):
            return self._tombstone(stands)
        self._note_state(stands)
        outcomes = self._outcomes(stands)
        conflicts = self._seen.conflicts if stands.manifest is None else stands.manifest.conflicts
        refused = {s for s, stored in outcomes.items() if stored.kind == bodies.REFUSAL}
        conflicted = {call for call, _ in conflicts}
        self._take_entries({s: o for s, o in outcomes.items() if o.kind == bodies.ENTRY and s not in conflicted})
        masked = self._take_intents(stands, refused)
        masked = self._take_marks(stands) or masked
        if all_conflicts := self._seen.conflicts | conflicts:
            masked = True
            self._note(
                f"{len(all_conflicts)} payloads lost a conflict, and Gym keeps no evidence of that; {len(conflicted)} "
                "calls in conflict at the freeze are left out, as they are from our snapshot"
            )
        if refused:
            self._note(f"{len(refused)} calls were refused by the engine, which 0.7.0 has no record for")
        self._found.state = self._state(stands, masked=masked or bool(self._found.marks))
        return self._found

    def _note(self, text: str) -> None:
        self._found.notes.append(text)

    # -- how far it has come ------------------------------------------------------------------------------

    def _is_kept(self, stands: Standing) -> bool:
        """Whether a retired rollout was frozen and still has every record of its snapshot (``retention="keep"``)."""
        decided = frozenset[str]() if stands.manifest is None else stands.manifest.outcomes
        records = [segment for segment in decided if stands.kinds.get(segment) != bodies.SEAL]
        return bool(records) and decided <= self._seen.outcomes.keys()

    def _tombstone(self, stands: Standing) -> Taken:
        left = self._seen.outcomes.keys() - {s for s, kind in stands.kinds.items() if kind == bodies.SEAL}
        if left:
            self._note(f"retired without a whole snapshot; {len(left)} records that are still there are left out")
        manifest = stands.manifest
        version = 1 if manifest is None else self._seen.version(manifest)
        snapshot = "" if manifest is None else manifest.snapshot_id
        self._found.state = GymState(frozen=True, retired=True, snapshot_id=snapshot, version=version)
        return self._found

    def _note_state(self, stands: Standing) -> None:
        if stands.state is State.RETIRED:
            self._note(
                "retired with its records kept; exported as frozen, for Gym keeps no record of a retired rollout"
            )
        elif stands.state is State.FREEZING:
            self._note("a freeze is announced and not decided; exported as open")
        late = 0 if stands.manifest is None else len(self._seen.outcomes.keys() - stands.manifest.outcomes)
        if late or stands.late_begins:
            self._note(f"{late} records and {len(stands.late_begins)} intents came behind the fence and are left out")

    def _state(self, stands: Standing, *, masked: bool) -> GymState:
        lines, manifest = self._found.lines, stands.manifest
        return GymState(
            frozen=manifest is not None,
            incomplete=masked,
            snapshot_id="" if manifest is None else manifest.snapshot_id,
            version=len(lines) + len(self._found.marks) if manifest is None else self._seen.version(manifest),
            digests={call: hashlib.sha256(line).hexdigest() for call, line in lines.items()},
            indexed=sum(len(line) + 1 for line in lines.values()),
        )

    # -- what it holds ------------------------------------------------------------------------------------

    def _outcomes(self, stands: Standing) -> dict[str, StoredObject]:
        wanted = sorted(self._seen.outcomes if stands.manifest is None else stands.manifest.outcomes)
        read = self._stored.read(self._keys.call_at(segment) for segment in wanted)
        outcomes = {}
        for segment in wanted:
            body = read.pop(self._keys.call_at(segment), None)
            if body is None:
                raise CorruptObjectError(f"{self._keys.call_at(segment)}: the snapshot names it and it is gone")
            outcomes[segment] = bodies.read_outcome(self._keys, segment, body)
        return outcomes

    def _take_entries(self, outcomes: Mapping[str, StoredObject]) -> None:
        sound, foreign = [], 0
        for segment, stored in outcomes.items():
            entry = read_entry(self._keys, segment, stored)
            call = entry.model_call_id
            if not _gym_can_read(stored.payload):
                self._found.problems.append(
                    f"call {call!r} holds values that Gym's files cannot (non-finite numbers, integers beyond 64 bits, "
                    "lone surrogates); it is left out, and its intent masks the rollout"
                )
                self._found.intents.append(call)
                continue
            foreign += bool(entry.continuation_fingerprint) and entry.fingerprint_version != FINGERPRINT_VERSION
            sound.append((entry.created_at, call, stored.payload))
        if foreign:
            self._note(
                f"{foreign} calls were stamped by another matcher than Gym 0.7.0's, which finds no parent by them"
            )
        self._found.lines = {call: payload for _, call, payload in sorted(sound, key=lambda each: each[:2])}

    def _take_intents(self, stands: Standing, refused: set[str]) -> bool:
        """Take the begun calls; True when one that masks has a name that Gym's file of intents cannot hold."""
        decided = self._seen.intents if stands.manifest is None else self._seen.intents & stands.manifest.outcomes
        # A drop may have swept the intents of kept seals, which mask as an intent without a record does.
        sealed = {s for s, kind in stands.kinds.items() if kind == bodies.SEAL} - self._seen.intents
        named = [self._name_of(segment) for segment in sorted(decided - refused)]
        masked = bool(sealed)
        for call in dict.fromkeys((*self._found.intents, *named)):
            if _is_a_line(call):
                if call not in self._found.intents:
                    self._found.intents.append(call)
            elif call not in self._found.lines:
                masked = True
                self._note(
                    f"call {call!r} was begun, has no record, and a name that no line can hold: said by the state"
                )
        self._found.intents = [call for call in self._found.intents if _is_a_line(call)]
        return masked

    def _name_of(self, segment: str) -> str:
        call = unescape(segment)
        return call if call is not None else self._header_call(self._keys.intent(segment), "intent", segment)

    def _header_call(self, key: str, kind: str, segment: str) -> str:
        key = key if kind != "intent" else f"{self._keys.base}intent/{segment}"
        body = self._stored.get(key)
        if body is None:
            raise CorruptObjectError(f"{key}: listed and gone")
        return str(bodies.read(key, body, kind).header.get("call"))

    def _take_marks(self, stands: Standing) -> bool:
        """Take the marks; True when the manifest counts some that are gone."""
        gone = 0 if stands.manifest is None else len(stands.manifest.marks - self._seen.marks)
        for mark in sorted(self._seen.marks - stands.late_marks):
            key = self._keys.mark(unescape(mark) or "")
            call = self._header_call(key, "mark", mark)
            self._found.marks.append(call if "\n" not in call and _is_text(call) else "")
        return bool(gone)


def _gym_can_read(payload: bytes) -> bool:
    """Whether Gym's reader, which is orjson, gets the very value back that the payload holds."""
    try:
        return orjson.dumps(orjson.loads(payload), option=orjson.OPT_SORT_KEYS) == payload
    except (ValueError, TypeError):
        return False


def _is_a_line(call: str) -> bool:
    """Whether Gym reads a call id back from a line of its intents: stripped, and not empty."""
    return bool(call) and _is_text(call) and call.encode().splitlines() == [call.encode().strip()]


def _is_text(call: str) -> bool:
    try:
        call.encode()
    except UnicodeEncodeError:
        return False
    return True


# -- ledger ---------------------------------------------------------------------------------------------------


def take_ledger(reader: Reader, keys: LedgerKeys) -> TakenLedger:
    """Read one ledger for export. Raise ``CorruptObjectError`` and ``StoreError``."""
    held, found = hold_ledger(reader, keys), TakenLedger()
    if held.seen.retired:
        found.notes.append("its ledger is retired; 0.7.0 has no such state, and no rows are left to write")
        return found
    foreign = 0
    for stored in held.rows.values():
        value = stored.value()
        try:
            found.rows[str(value["record"]["model_call_id"])] = dump_row(value)
            foreign += value["fingerprint_version"] != FINGERPRINT_VERSION
        except (KeyError, TypeError) as error:
            raise CorruptObjectError(f"ledger of rollout {keys.rollout_id!r}: not a row ({error!r})") from error
    for row in failures_of(reader, keys, held):
        failure = Failure(str(row["model_call_id"]), str(row["reason"]))
        found.failures[failure] = dump_failure(failure)
    _take_unsettled(reader, keys, held, found)
    if foreign:
        found.notes.append(
            f"{foreign} rows were stamped by another matcher than Gym 0.7.0's, which resolves none of them"
        )
    if held.refused:
        found.notes.append(f"{len(held.refused)} refusals in its ledger are left out: 0.7.0 has none")
    if held.closing:
        found.notes.append("its admissions are closed, which 0.7.0 does not know")
    return found


def _take_unsettled(reader: Reader, keys: LedgerKeys, held: HeldLedger, found: TakenLedger) -> None:
    """Write the admitted calls without an outcome as the failures that our manifest reports them as."""
    failed = {failure.call for failure in found.failures}
    admitted = held.seen.intents
    what = f"intents in the ledger of rollout {keys.rollout_id!r}"
    if held.seen.closed and (body := reader.get(keys.closed, what)) is not None:
        admitted = admitted & ledger_bodies.read_closed(keys, body)
    for segment in sorted(admitted - held.seen.outcomes.keys()):
        call = unescape(segment)
        if call is None:
            key = keys.intent_at(segment)
            call = str(ledger_bodies.read(keys, key, reader.get(key, what) or b"", "ledger-intent").header.get("call"))
        if call not in failed:
            failure = Failure(call, UNCOMMITTED_CALL_REASON)
            found.failures[failure] = dump_failure(failure)
            found.notes.append(f"call {call!r} was admitted to the ledger and never settled: written as a failure")
