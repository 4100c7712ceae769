"""What is still missing in the bucket of one checked rollout, and what stands in its way.

The rule of this module: nothing is written where something else stands already. Whatever a write could only answer with
a conflict or a fence is found here, by reading, so that importing leaves no conflict evidence of its own making. A plan
that has nothing to do and no conflicts is what "imported" means: it is made again after the import, as its proof.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from s3capture.gymdir.checked import CheckedRollout, Line, Mark
from s3capture.gymdir.holding import Held, HeldLedger
from s3capture.gymdir.rows import Failure
from s3capture.inspection.standing import State
from s3capture.keys import RunKeys, escape, parse
from s3capture.protocol import bodies


@dataclass(slots=True)
class Plan:
    """The writes that one rollout still needs, in the order in which they are made; ``conflicts`` forbid all of them.

    ``begin`` and ``admit`` come before everything: an import that dies halfway leaves begun calls without outcome,
    which mask the rollout, and never a rollout that looks complete and is not.
    """

    begin: list[str] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    put: list[Line] = field(default_factory=list)
    admit: list[str] = field(default_factory=list)
    record: list[Line] = field(default_factory=list)
    fail: list[Failure] = field(default_factory=list)
    freeze: bool = False
    retire: bool = False
    conflicts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether the bucket holds all of it already."""
        writes = self.begin or self.marks or self.put or self.admit or self.record or self.fail
        return not (writes or self.freeze or self.retire or self.conflicts)


def plan(keys: RunKeys, checked: CheckedRollout, held: Held, ledger: HeldLedger) -> Plan:
    """Compare a checked rollout with what the bucket holds of it."""
    found = Plan()
    if checked.state.retired:
        _plan_tombstone(found, held)
    elif checked.calls or checked.marks or checked.state.frozen:
        _plan_records(keys, checked, held, found)
    _plan_ledger(keys, checked, ledger, found)
    return found


def _plan_tombstone(found: Plan, held: Held) -> None:
    seen = held.seen
    if held.state in (State.OPEN, State.FREEZING) and not (
        seen.outcomes or seen.intents or seen.marks or seen.conflicts
    ):
        found.retire = True  # nothing is there, or the announcement of a retirement that was cut short
    elif held.state is not State.RETIRED:
        found.conflicts.append(
            "retired in the directory, while the bucket holds records of it that were never retired; importing the "
            "tombstone would retire them. Import into another run, or retire the rollout there yourself"
        )


def _plan_records(keys: RunKeys, checked: CheckedRollout, held: Held, found: Plan) -> None:
    of = keys.rollout(checked.rollout_id)
    if held.state is State.RETIRED:
        found.conflicts.append(
            "retired in the bucket, where nothing more can be written under its id; take another run"
        )
        return
    for line in checked.entries:
        segment = escape(line.call)
        kind, identity = held.outcomes.get(segment, ("", ""))
        if any(call == segment for call, _ in held.seen.conflicts):
            found.conflicts.append(f"call {line.call!r} has conflicting payloads in the bucket")
        elif not kind:
            found.put.append(line)
        elif (kind, identity) != (bodies.ENTRY, line.digest):
            known = {bodies.SEAL: "was sealed without a record", bodies.REFUSAL: "was refused by the engine"}
            what = known.get(kind, f"is another record ({identity}, here {line.digest})")
            found.conflicts.append(f"call {line.call!r} {what} in the bucket")
        elif line.fingerprint and not _is_among(held.markers, keys, of.lineage_call(line.fingerprint, line.call)):
            found.put.append(line)  # putting it again writes the marker that a dead process left out
    found.begin = [call for call in checked.calls if escape(call) not in held.seen.intents | held.outcomes.keys()]
    for call in checked.dangling:
        kind, _ = held.outcomes.get(escape(call), (bodies.SEAL, ""))
        if kind != bodies.SEAL:
            found.conflicts.append(f"call {call!r} has no record in the directory and {_a(kind)} in the bucket")
    found.marks = [mark for mark in checked.marks if escape(mark.mark_id) not in held.seen.marks]
    _plan_freeze(checked, held, found)
    if held.archived and (found.begin or found.put or found.marks or found.freeze):
        found.conflicts.append("archived in the bucket without all that the directory holds; take another run")


def _is_among(markers: frozenset[tuple[str, str]], keys: RunKeys, key: str) -> bool:
    """Whether the continuation marker ``key`` was listed."""
    parsed = parse(keys.root, key)
    return parsed is not None and (parsed.detail, parsed.call) in markers


def _a(kind: str) -> str:
    return {bodies.ENTRY: "a record", bodies.REFUSAL: "a refusal"}.get(kind, kind)


def _plan_freeze(checked: CheckedRollout, held: Held, found: Plan) -> None:
    ours = {escape(call) for call in checked.calls}
    theirs = held.seen.outcomes.keys() | held.seen.intents
    decided = held.manifest
    if held.state is not State.OPEN and (found.begin or found.put):
        count = len({*found.begin, *(line.call for line in found.put)})
        found.conflicts.append(
            f"{held.state} in the bucket without {count} of the calls in the directory; take another run"
        )
    elif checked.state.frozen and decided is None:
        if more := theirs - ours:
            found.conflicts.append(
                f"frozen in the directory and open in the bucket, where it has {len(more)} calls more, the first is "
                f"{min(more)!r}: a freeze now would decide on another snapshot. Import into another run"
            )
        found.freeze = not more
    elif checked.state.frozen and decided is not None and decided.outcomes != ours:
        found.conflicts.append("frozen in the bucket with another set of calls than in the directory")
    elif not checked.state.frozen:
        if decided is not None:
            found.notes.append("open in the directory and frozen in the bucket")
        if more := theirs - ours:
            found.notes.append(f"the bucket has {len(more)} calls of it more")
    extra = len(held.seen.marks) + len(held.seen.conflicts)
    if extra and not checked.incomplete and not found.conflicts:
        found.notes.append(
            "complete in the directory and masked in the bucket, which has marks or conflicts of its own"
        )


def _plan_ledger(keys: RunKeys, checked: CheckedRollout, held: HeldLedger, found: Plan) -> None:
    if not (checked.rows or checked.failures):
        return
    if held.seen.retired:
        found.conflicts.append("its ledger is retired in the bucket, where rows are discarded; take another run")
        return
    of = keys.ledger(checked.rollout_id)
    for line in checked.rows:
        segment = escape(line.call)
        if segment in held.refused:
            found.conflicts.append(
                f"call {line.call!r} has a row in the directory and was refused in the bucket's ledger"
            )
        elif (stored := held.rows.get(segment)) is None:
            found.record.append(line)
        elif stored.digest != line.digest:
            found.conflicts.append(
                f"call {line.call!r} has another ledger row in the bucket ({stored.digest}, here {line.digest})"
            )
        elif line.fingerprint and not _is_among(held.markers, keys, of.lineage_call(line.fingerprint, line.call)):
            found.record.append(line)
    for failure in checked.failures:
        reason = hashlib.sha256(failure.reason.encode("utf-8", "surrogatepass")).hexdigest()
        if (escape(failure.call), reason) not in held.seen.failures:
            found.fail.append(failure)
    calls = dict.fromkeys((*(line.call for line in found.record), *(failure.call for failure in found.fail)))
    found.admit = [call for call in calls if escape(call) not in held.seen.intents]
    if held.closing and found.admit:
        found.conflicts.append(
            "the admissions of its ledger are closed in the bucket, and rows of it are missing there"
        )
