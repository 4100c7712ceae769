"""Why a rollout stands as it does: its calls, marks, conflicts, drops and what is left of it, each as a finding.

The rule of this module: it adds no judgement to those of ``inspection`` (what is late, sealed, incomplete); it says
who, when and why, from the bucket alone, and "cannot be told" where the bucket does not say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from s3capture.audit.differing import Differences, differences
from s3capture.audit.findings import Finding, Kind, many, stated, utc
from s3capture.errors import CorruptObjectError
from s3capture.inspection import CallDetail, ConflictDetail, FenceDetail, MarkDetail, RolloutDetail, State
from s3capture.inspection.standing import Standing
from s3capture.keys import Kind as KeyKind
from s3capture.keys import escape, parse, unescape
from s3capture.protocol import bodies
from s3capture.protocol.survey import Survey
from s3capture.stored import StoredRollout


@dataclass(frozen=True, slots=True)
class Case:
    """One rollout as it was read: ``stored`` bodies by key, ``at`` when the store says a key was created."""

    rollout: StoredRollout
    seen: Survey
    stands: Standing
    detail: RolloutDetail
    stored: Mapping[str, bytes]
    at: Mapping[str, float]

    @property
    def swept(self) -> bool:
        """Whether a part of the rollout is gone because it was retired, or because the archive lost it."""
        manifest = self.stands.manifest
        return (
            self.stands.lost
            or bool(self.rollout.problem)
            or (
                self.stands.state is State.RETIRED
                and (manifest is None or not manifest.outcomes <= self.seen.outcomes.keys())
            )
        )

    def finding(self, kind: Kind, sentence: str, **more: Any) -> Finding:
        """A finding about this rollout."""
        return Finding(kind, sentence, self.rollout.rollout_id, **more)


def reasons(case: Case) -> Iterator[Finding]:
    """Yield everything that explains the state of the rollout."""
    for call in case.detail.calls:
        yield from _call(case, call)
        for conflict in call.conflicts:
            yield _conflict(case, call, conflict)
    for mark in case.detail.marks:
        yield _mark(case, mark)
    yield from _undecided(case)
    yield from _drops(case)
    yield from _standing(case)


# -- calls ----------------------------------------------------------------------------------------------------


def _call(case: Case, call: CallDetail) -> Iterator[Finding]:
    keys, name = case.rollout.keys, f"call {call.call!r}"
    more: dict[str, Any] = {"call": call.call, "key": keys.call(call.call)}
    begun = f"begun{stated(call.begun_by, call.begun_at)}"
    begin = {"begun_by": call.begun_by, "begun_at": call.begun_at}
    behind = "the freeze" if case.stands.manifest is not None else "the retirement"
    # Behind a decision, and not in it. Without one, a retired rollout does not tell what came before.
    late = call.in_snapshot is False and case.stands.state in (State.FROZEN, State.RETIRED)
    if call.kind == "late" or (call.kind == "seal" and late):
        sentence = f"{name} was {begun}, behind {behind}, and refused"
        more |= {"key": keys.intent(call.call), "by": call.begun_by, "at": call.begun_at, "details": {"what": "begin"}}
        yield case.finding(Kind.LATE, sentence, **more)
    elif call.kind == "seal":
        sealed = f"sealed{stated(call.by, call.created_at)}"
        known = call.begun_by is not None or call.begun_at is not None
        sentence = f"{name} was {begun if known else 'begun'} and had no outcome when it was {sealed}"
        more |= {"by": call.begun_by, "at": call.begun_at or call.created_at}
        more["details"] = begin | {"sealed_by": call.by, "sealed_at": call.created_at}
        yield case.finding(Kind.SEALED_CALL, sentence, **more)
    elif call.kind == "open":
        sentence = f"{name} was {begun} and has no outcome yet"
        if case.stands.state is State.RETIRED:
            sentence = f"{name} was {begun} and has no outcome: it came behind the retirement, or that never ended"
        more |= {"key": keys.intent(call.call), "by": call.begun_by, "at": call.begun_at, "details": begin}
        yield case.finding(Kind.OPEN_CALL, sentence, **more)
    elif late:
        what = f"the {call.kind} of {name}, created{stated(call.by, call.created_at)}, landed behind {behind}"
        more |= {"by": call.by, "at": case.at.get(keys.call(call.call)) or call.created_at}
        yield case.finding(Kind.LATE, f"{what}; it is not in the snapshot", **more, details={"what": call.kind})
    elif call.kind == "refusal":
        sentence = f"the engine refused {name} with code {call.code!r}; recorded{stated(call.by, call.created_at)}"
        more |= {"by": call.by, "at": call.created_at, "details": {"code": call.code}}
        yield case.finding(Kind.REFUSAL, sentence, **more)


# -- conflicts ------------------------------------------------------------------------------------------------


def _conflict(case: Case, call: CallDetail, conflict: ConflictDetail) -> Finding:
    keys = case.rollout.keys
    key = keys.conflict(call.call, conflict.digest)
    at = case.at.get(key)
    compared = _compared(case, call, key)
    held = "nothing that could be read" if call.digest is None else f"the {call.kind} {call.digest}"
    refused = f"{conflict.kind} {conflict.digest}{stated(conflict.by, at)}"
    paths = "" if compared is None else _paths(compared)
    details: dict[str, Any] = {
        "stored": {"kind": call.kind, "digest": call.digest, "by": call.by, "created_at": call.created_at},
        "refused": {"kind": conflict.kind, "digest": conflict.digest, "by": conflict.by, "bytes": conflict.bytes},
        "differences": [] if compared is None else [_row(difference) for difference in compared.told],
        "more": 0 if compared is None else compared.more,
    }
    late = (escape(call.call), conflict.digest) in case.stands.late_conflicts
    kind = Kind.LATE if late else Kind.CONFLICT
    behind = ", behind the retirement" if late else ""
    sentence = f"call {call.call!r} holds {held}, and {refused} was refused{behind}{paths}"
    details |= {"what": "conflict"} if late else {}
    return case.finding(kind, sentence, call=call.call, key=key, by=conflict.by, at=at, details=details)


def _row(difference: Any) -> dict[str, str | None]:
    return {"path": difference.path, "stored": difference.stored, "refused": difference.refused}


def _paths(compared: Differences) -> str:
    if not compared.told:
        return "; they differ in no field"
    names = [difference.path for difference in compared.told[:3]]
    more = len(compared.told) + compared.more - len(names)
    return f"; they differ in {', '.join(names)}{f' and {more} more' if more else ''}"


def _compared(case: Case, call: CallDetail, key: str) -> Differences | None:
    keys, segment = case.rollout.keys, escape(call.call)
    outcome, loser = case.stored.get(keys.call_at(segment)), case.stored.get(key)
    if outcome is None or loser is None:
        return None
    try:
        stored = bodies.read_outcome(keys, segment, outcome)
        refused = bodies.read(key, loser, bodies.ENTRY, bodies.REFUSAL)
        found = differences(stored.value(), refused.value())
    except (CorruptObjectError, ValueError, RecursionError):
        return None  # a finding of its own
    if stored.kind == refused.kind:
        return found
    return differences({"(kind)": stored.kind}, {"(kind)": refused.kind})


# -- marks ----------------------------------------------------------------------------------------------------


def _mark(case: Case, mark: MarkDetail) -> Finding:
    whose = f"call {mark.call!r}" if mark.call else "some call"
    why = f": {mark.reason}" if mark.reason else ", without a reason"
    when = ", after the freeze" if mark.in_snapshot is False else ""
    more: dict[str, Any] = {"call": mark.call or None, "by": mark.by, "at": mark.at}
    more["key"] = case.rollout.keys.mark(mark.mark)
    details = {"reason": mark.reason, "in_snapshot": mark.in_snapshot}
    if mark.late:
        sentence = f"{whose} was marked incomplete{stated(mark.by, mark.at)}, behind the retirement{why}"
        return case.finding(Kind.LATE, sentence, **more, details=details | {"what": "mark"})
    sentence = f"{whose} was marked incomplete{stated(mark.by, mark.at)}{when}{why}"
    return case.finding(Kind.MARK, sentence, **more, details=details)


# -- decisions ------------------------------------------------------------------------------------------------


def _fence(case: Case, name: str) -> FenceDetail | None:
    return next((fence for fence in case.detail.fences if fence.fence == name), None)


def _undecided(case: Case) -> Iterator[Finding]:
    keys = case.rollout.keys
    if case.stands.state is State.FREEZING:
        announced = _fence(case, "closing")
        by, at = (announced.by, announced.at) if announced else (None, None)
        sentence = (
            f"a freeze or retirement was announced{stated(by, at)} and is not decided; "
            "freezing or retiring again finishes it"
        )
        yield case.finding(Kind.UNDECIDED, sentence, key=keys.closing, by=by, at=at)
    for version in sorted(case.seen.retiring - case.seen.drops):
        announced = _fence(case, f"retiring-{version}")
        by, at = (announced.by, announced.at) if announced else (None, None)
        sentence = f"a drop at version {version} was announced{stated(by, at)} and is not decided; a drop finishes it"
        details = {"version": version}
        yield case.finding(Kind.UNDECIDED, sentence, key=keys.retiring(version), by=by, at=at, details=details)


def _drops(case: Case) -> Iterator[Finding]:
    for version in sorted(case.seen.drops):
        decided, announced = _fence(case, f"drop-{version}"), _fence(case, f"retiring-{version}")
        if decided is None or not decided.decision.startswith("refused"):
            continue
        by, at = (announced.by, announced.at) if announced else (None, None)
        since = _landed_after(case, version)
        names = [f"{what} {name}{stated(who, when)}" for what, name, who, when in since]
        landed = f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
        why = f"since that version came {landed}" if since else "what changed is no longer there, or retired it first"
        announcement = f", announced{stated(by, at)}," if by or at is not None else ""
        details = {
            "version": version,
            "since": [{"what": what, "name": name, "by": who, "at": when} for what, name, who, when in since],
        }
        yield case.finding(
            Kind.REFUSED_DROP,
            f"a drop at version {version}{announcement} was refused: {why}",
            key=case.rollout.keys.drop(version),
            by=by,
            at=at,
            details=details,
        )


def _landed_after(case: Case, version: int) -> list[tuple[str, str, str | None, float | None]]:
    """The marks and conflicts that a drop at ``version`` did not know of, in the order in which they came."""
    manifest, keys = case.stands.manifest, case.rollout.keys
    if manifest is None:
        return []
    extra: list[tuple[str, str, str | None, float | None]] = []
    for mark in case.detail.marks:
        if mark.in_snapshot is False:
            extra.append(
                ("mark", repr(mark.reason or mark.mark), mark.by, case.at.get(keys.mark(mark.mark)) or mark.at)
            )
    for call in case.detail.calls:
        for conflict in call.conflicts:
            if (escape(call.call), conflict.digest) not in manifest.conflicts:
                at = case.at.get(keys.conflict(call.call, conflict.digest))
                extra.append(("conflict", f"of call {call.call!r}", conflict.by, at))
    extra.sort(key=lambda item: item[3] or 0.0)
    known = version - 1 - len(manifest.outcomes) - len(manifest.conflicts) - len(manifest.marks)
    return extra[max(known, 0) :]


# -- how far it has come --------------------------------------------------------------------------------------


def _standing(case: Case) -> Iterator[Finding]:
    summary, keys = case.detail.summary, case.rollout.keys
    changed = summary.last_modified
    last = "" if changed is None else f"; last change at {utc(changed)} UTC"
    if case.rollout.problem:
        sentence = f"{case.rollout.problem}; so it is never given as complete"
        yield case.finding(Kind.LOST_EVIDENCE, sentence, key=keys.of.archive.base)
    if case.rollout.archived:
        yield case.finding(Kind.ARCHIVED, "was packed into the archive, and retired for it", at=changed)
        yield from _copies(case)
    elif case.stands.state is State.OPEN:
        yield case.finding(Kind.OPEN, f"is not frozen; {many(summary.calls, 'call')} so far{last}", at=changed)
    elif case.stands.state is State.FROZEN:
        frozen = _fence(case, "frozen")
        by, at = (frozen.by, frozen.at) if frozen else (None, None)
        sentence = f"was frozen{stated(by, at)} and neither dropped nor retired since; its version is {summary.version}"
        if summary.version is None:
            sentence = "was frozen, and its decision cannot be read; neither dropped nor retired since"
        yield case.finding(Kind.UNDELIVERED, sentence, key=keys.frozen, by=by, at=at)
    elif case.stands.state is State.RETIRED:
        yield from _left(case)


def _copies(case: Case) -> Iterator[Finding]:
    """The small objects of an archived rollout that are in its pack and were not deleted."""
    seals = {segment for segment, kind in case.stands.kinds.items() if kind == bodies.SEAL}
    left = [
        row
        for row in case.rollout.live
        if row.key in case.rollout.packed
        and (parsed := parse(case.rollout.keys.of.root, row.key)) is not None
        and parsed.kind in (KeyKind.INTENT, KeyKind.CALL, KeyKind.CONFLICT, KeyKind.MARK)
        and not (parsed.kind is KeyKind.CALL and parsed.call in seals)
    ]
    if left:
        sentence = f"{many(len(left), 'small object')} that the archive holds were not deleted; archiving again does"
        details = {"objects": len(left), "bytes": sum(row.size for row in left)}
        yield case.finding(Kind.RESIDUE, sentence, details=details)


def _left(case: Case) -> Iterator[Finding]:
    """What a retired rollout still holds, beyond what refuses late writers and what they left."""
    manifest, seen = case.stands.manifest, case.seen
    seals = {segment for segment, kind in case.stands.kinds.items() if kind == bodies.SEAL}
    records = seen.outcomes.keys() - seals
    if manifest is not None:
        records &= manifest.outcomes
    begun = seen.intents - case.stands.late_begins
    marks, conflicts = seen.marks - case.stands.late_marks, seen.conflicts - case.stands.late_conflicts
    if not (records or begun or marks or conflicts):
        return
    size = sum(row.size for row in seen.objects if not row.key.startswith(case.rollout.keys.fences))
    how, by, at = _retirement(case)
    details = {
        "outcomes": len(records),
        "intents": len(begun),
        "marks": len(marks),
        "conflicts": len(conflicts),
        "bytes": size,
    }
    held = f"holds {many(len(records), 'outcome')}, {many(len(begun), 'intent')}, {many(len(marks), 'mark')} and "
    held += many(len(conflicts), "conflict")
    if case.stands.lost:
        kind, why = Kind.RESIDUE, "what else there was is gone, or was to go"
        yield _lost(case, f"was {how}{stated(by, at)} and still {held}", by, at)
    elif manifest is None:
        kind, why = Kind.RETAINED, "kept or left behind: without a snapshot that cannot be told"
    elif case.swept:
        kind, why = Kind.RESIDUE, "the outcomes of its snapshot were deleted and these were not"
    else:
        kind, why = Kind.RETAINED, "its whole snapshot, so it was kept (retention='keep') or not deleted yet"
    yield case.finding(kind, f"was {how}{stated(by, at)} and still {held}: {why}", by=by, at=at, details=details)


def _lost(case: Case, held: str, by: str | None, at: float | None) -> Finding:
    """Records that are left of a retired rollout, and what is not there any more that may have spoken against them."""
    manifest, seen, granted = case.stands.manifest, case.seen, case.stands.granted
    details = {"outcomes": 0, "conflicts": 0, "marks": 0, "since_freeze": 0}
    if manifest is not None:
        details["outcomes"] = len(manifest.outcomes - seen.outcomes.keys())
        details["conflicts"] = len(manifest.conflicts - seen.conflicts)
        details["marks"] = len(manifest.marks - seen.marks)
        details["since_freeze"] = max(0, (granted or 0) - seen.version(manifest))
    words = [many(count, name[:-1]) for name, count in details.items() if count and name != "since_freeze"]
    gone = [f"{' and '.join(words)} of its snapshot were deleted and these were not"] if words else []
    if since := details["since_freeze"]:
        gone.append(f"the drop counted {many(since, 'mark')} or conflicts behind the freeze that are gone")
    if case.stands.kept is False:
        gone.append("its retirement was to delete all of it")
    return case.finding(Kind.LOST_EVIDENCE, f"{held}: {'; '.join(gone)}", by=by, at=at, details=details)


def _retirement(case: Case) -> tuple[str, str | None, float | None]:
    """How the rollout was retired, by whom and when; a drop decision names nobody, so its announcement is asked."""
    for fence in case.detail.fences:
        version = fence.fence.removeprefix("drop-")
        if version != fence.fence and fence.decision == "retired":
            announced = _fence(case, f"retiring-{version}")
            by, at = (announced.by, announced.at) if announced else (None, None)
            return f"dropped at version {version}", by, at
    retired = _fence(case, "retired")
    return "retired", retired.by if retired else None, retired.at if retired else None


def name_of(root: str, key: str) -> str | None:
    """The call id that ``key`` names, as far as it does; None for an object that is of no call."""
    parsed = parse(root, key)
    if parsed is None or not parsed.call or parsed.kind is KeyKind.MARK:
        return None
    return unescape(parsed.call) or parsed.call
