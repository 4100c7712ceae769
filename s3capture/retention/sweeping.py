"""What a retirement left behind, and how long after it that goes: records, late objects, markers, fences.

The rule of this module: a record behind a retirement goes only where it is certain that it was meant to: the decision
says so, a deletion had provably begun, or the object came after the retirement. What may have been kept on purpose
(``retention="keep"`` leaves every record, and a drop does not say so) goes only when that is asked for. Fences and
seals go last, and only when no record is left: they are what refuses a late writer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from s3capture.effects import List, ObjectInfo, Steps
from s3capture.errors import CaptureError, StoreError
from s3capture.inspection import State
from s3capture.inspection.standing import Judge, Standing, standing
from s3capture.inspection.summary import newest_of
from s3capture.keys import Kind, RunKeys, parse
from s3capture.protocol import bodies, ledger_bodies, retiring
from s3capture.protocol import ledger as ledger_steps
from s3capture.protocol.steps import listed, look
from s3capture.protocol.survey import Survey, survey
from s3capture.reader import Reader
from s3capture.retention.archives import ArchiveHand
from s3capture.retention.choosing import decided_to_delete, is_bare, ledger_keeps
from s3capture.retention.listing import Parts, Rows, Shard, Tally, map_shards, tally
from s3capture.retention.removing import Left, Outcome, delete_keys, side_by_side
from s3capture.retention.whole_run import clear, ordered
from s3capture.runtime import Runtime
from s3capture.stored import StoredRun

_CLOCKS_S = 60.0
"""How far two clocks of one store may be apart: what is stamped later than a retirement by more came after it."""

_RECORDS = (Kind.INTENT, Kind.CALL, Kind.CONFLICT, Kind.MARK)
_DAMAGED_ARCHIVE = "no rollout is swept, since it cannot be told what the archive speaks for: {}"
_CHANGED = "it was written to after it was looked at; sweep again"


class What(StrEnum):
    """The lines of a sweep."""

    RESIDUE = "records of retired rollouts"
    LATE = "late objects behind a retirement"
    COPIES = "copies of archived records, which archive takes away"
    KEPT = "records kept behind a retirement"
    FENCES = "fences and seals of retired rollouts"
    MARKERS = "markers without a rollout"
    ROWS = "rows of retired ledgers"
    KEPT_ROWS = "rows kept behind a retirement"
    LEDGER_FENCES = "fences of retired ledgers"
    PROBES = "scratch keys"
    ARCHIVE = "archive files that nobody needs"


@dataclass(frozen=True, slots=True)
class SweptRollout:
    """What goes of one rollout: ``records`` first, then, where nothing else is left, ``fences`` (with seals)."""

    rollout: str
    records: tuple[str, ...]
    fences: tuple[str, ...]
    ledger: bool = False


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What a sweep would delete. ``tallies`` are its lines; ``kept`` what stays because it may be kept on purpose."""

    rollouts: tuple[SweptRollout, ...]
    loose: tuple[str, ...]
    archive: tuple[str, ...]
    tallies: dict[What, Tally]
    kept: dict[What, Tally]
    problems: tuple[str, ...]
    strays: tuple[str, ...]
    until: float = 0.0

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.rollouts or self.loose or self.archive)


@dataclass(slots=True)
class _Found:
    rollouts: list[SweptRollout]
    loose: list[str]
    tallies: dict[What, Tally]
    kept: dict[What, Tally]
    problems: list[str]

    def add(self, what: What, rows: Rows, *, stays: bool = False) -> None:
        into = self.kept if stays else self.tallies
        if rows:
            into[what] = into.get(what, Tally()) + tally(rows, rollouts=1)


def plan_sweep(run: StoredRun, until: float, *, kept: bool = False, hand: ArchiveHand | None = None) -> SweepPlan:
    """Plan a sweep of what was last changed before ``until`` (Unix seconds); reads only.

    A rollout counts as a whole: one object that is younger, or whose time the store does not say, keeps all of it.
    ``kept`` takes records that may have been kept on purpose as well. Raise ``StoreError``, ``MissingExtraError``.
    """
    total = _Found([], [], {}, {}, [])
    strays: list[str] = []
    for found, foreign in map_shards(run, lambda shard: _of_shard(run, shard, until, kept, hand)):
        total.rollouts += found.rollouts
        total.loose += found.loose
        total.problems += found.problems
        for mine, theirs in ((total.tallies, found.tallies), (total.kept, found.kept)):
            for what, count in theirs.items():
                mine[what] = mine.get(what, Tally()) + count
        strays += foreign
    if damaged := run.problems():
        # A rollout that only the archive still has looks like one that was deleted halfway.
        total = _Found([], [], {}, total.kept, [*total.problems, *map(_DAMAGED_ARCHIVE.format, damaged.values())])
    reader, keys = run.reader, run.keys
    probes = tuple(row for row in reader.list(keys.probes, run.what) if _old((row,), until) and _ours(keys, row))
    total.loose += [row.key for row in probes]
    if probes:
        total.tallies[What.PROBES] = tally(probes)
    archive = tuple(hand.sweepable(until)) if hand is not None and not damaged else ()
    if archive:
        names = frozenset(archive)
        rows = [row for row in reader.list(keys.archive.base, run.what) if row.key in names]
        total.tallies[What.ARCHIVE] = tally(rows)
    order = {what: total.tallies[what] for what in What if what in total.tallies}
    return SweepPlan(
        tuple(total.rollouts),
        tuple(total.loose),
        archive,
        order,
        total.kept,
        tuple(total.problems),
        tuple(strays),
        until,
    )


def sweep(runtime: Runtime, plan: SweepPlan, *, hand: ArchiveHand | None = None) -> Iterator[Outcome]:
    """Delete what ``plan`` names and nothing else, and yield an outcome for each rollout and batch of keys.

    Files of the archive go only if ``hand`` still finds that nobody needs them; without it they stay.
    """
    yield from side_by_side(
        runtime,
        "sweep",
        plan.rollouts,
        lambda item: f"the ledger of {item.rollout}" if item.ledger else item.rollout,
        lambda item: lambda: _steps(runtime.keys, item),
    )
    if plan.loose:
        yield from clear(runtime, (plan.loose,))
    if plan.archive and hand is not None:
        try:
            going = tuple(hand.confirm(plan.archive, plan.until))
        except CaptureError as error:
            yield Outcome("the archive", error=f"its files stay: {error}")
        else:
            yield from clear(runtime, ordered(runtime.keys, going))


def _steps(keys: RunKeys, item: SweptRollout) -> Steps[Outcome]:
    left: Left = yield from delete_keys(item.records)
    if left or not item.fences:
        return Outcome(item.rollout, left)
    expected = frozenset(item.fences)
    # The protocol deletes whatever lies there, so it must be what was planned.
    if item.ledger:
        ledger = keys.ledger(item.rollout)
        (answer,) = yield (List(ledger.base),)
        if not expected.issuperset(row.key for row in listed(answer)):
            return Outcome(item.rollout, error=_CHANGED)
        return Outcome(item.rollout, (yield from ledger_steps.delete(ledger)).left)
    rollout = keys.rollout(item.rollout)
    seen = yield from look(rollout)
    if not expected.issuperset(row.key for row in seen.objects):
        return Outcome(item.rollout, error=_CHANGED)
    return Outcome(item.rollout, (yield from retiring.delete(rollout)).left)


def _of_shard(
    run: StoredRun, shard: Shard, until: float, kept: bool, hand: ArchiveHand | None
) -> tuple[_Found, tuple[str, ...]]:
    found = _Found([], [], {}, {}, [])
    for parts in shard.rollouts:
        try:
            if parts.attempt:
                _of_rollout(found, parts, until, kept, hand)
            elif parts.markers and _old(parts.markers, until):
                if parts.stored.archived:
                    found.add(What.COPIES, parts.markers, stays=True)
                else:
                    found.add(What.MARKERS, parts.markers)
                    found.loose += [row.key for row in parts.markers]
            if parts.ledger and _old(parts.ledger, until):
                _of_ledger(found, run.reader, run.keys, parts, kept)
        except StoreError:
            raise
        except CaptureError as error:
            found.problems.append(f"rollout {parts.rollout!r} is left alone: {error}")
    return found, shard.strays


def _of_rollout(found: _Found, parts: Parts, until: float, kept: bool, hand: ArchiveHand | None) -> None:
    stored, keys = parts.stored, parts.stored.keys
    rows = parts.attempt + parts.markers
    if not _old(rows, until):
        return
    seen = survey(keys, parts.attempt)
    judge = Judge(lambda key: stored.reader.get(key, stored.what))
    stands = standing(keys, seen, judge)
    if judge.damaged:
        found.problems += [f"rollout {parts.rollout!r} is left alone: {problem}" for problem in judge.damaged.values()]
        return
    if is_bare(seen):
        found.add(What.FENCES, parts.attempt)
        found.add(What.MARKERS, parts.markers)
        swept = SweptRollout(parts.rollout, _keys(parts.markers), _keys(parts.attempt))
        found.rollouts.append(swept)
        return
    if stands.state is not State.RETIRED:
        return
    groups = _sorted(parts, seen, stands)
    stays = () if kept else groups.pop(What.KEPT, ())
    # Only the archiver compares a copy with its pack before it lets go of it.
    copies = groups.pop(What.COPIES, ())
    found.add(What.COPIES, copies, stays=True)
    for what, group in groups.items():
        found.add(what, group)
    found.add(What.KEPT, stays, stays=True)
    fences = _fences(parts, seen, stands)
    whole = not stays and not copies and not seen.foreign
    if whole and stored.archived and (hand is None or hand.needs_fences(parts.rollout)):
        whole = False  # the fences are what says that the pack speaks for it
    if whole:
        found.add(What.FENCES, fences)
    records = tuple(row.key for group in groups.values() for row in group)
    if records or whole:
        found.rollouts.append(SweptRollout(parts.rollout, records, _keys(fences) if whole else ()))


def _sorted(parts: Parts, seen: Survey, stands: Standing) -> dict[What, Rows]:
    """The records and markers of a retired rollout by what they are to a sweep."""
    fences = frozenset(_keys(_fences(parts, seen, stands)))
    root = parts.stored.keys.of.root
    records = tuple(row for row in parts.attempt if row.key not in fences and _kind(root, row) in _RECORDS)
    if not records and not parts.markers:
        return {}
    if parts.stored.archived:
        packed = parts.stored.packed
        copies = tuple(row for row in records + parts.markers if row.key in packed)
        late = tuple(row for row in records + parts.markers if row.key not in packed)
        return {What.COPIES: copies, What.LATE: late}
    if decided_to_delete(parts.stored) or _deletion_began(seen, stands) or not records:
        return {What.RESIDUE: records + parts.markers}
    late_keys = _late(parts, stands, records)
    kept = tuple(row for row in records if row.key not in late_keys)
    late = tuple(row for row in records if row.key in late_keys)
    if not kept:
        return {What.LATE: late + parts.markers}
    calls = {parsed.call for row in kept if (parsed := parse(root, row.key)) is not None and parsed.kind is Kind.CALL}
    mine = tuple(row for row in parts.markers if (found := parse(root, row.key)) is not None and found.call in calls)
    others = tuple(row for row in parts.markers if row not in mine)
    return {What.LATE: late + others, What.KEPT: kept + mine}


def _fences(parts: Parts, seen: Survey, stands: Standing) -> Rows:
    """The objects that refuse late writers: fences, and seals."""
    keys = parts.stored.keys
    seals = {keys.call_at(segment) for segment in seen.outcomes if stands.kinds.get(segment) == bodies.SEAL}
    return tuple(row for row in parts.attempt if row.key.startswith(keys.fences) or row.key in seals)


def _deletion_began(seen: Survey, stands: Standing) -> bool:
    """Whether something that the snapshot names, or that a seal implies, is gone: nothing but a deletion takes it.

    Late objects are no exception: where a snapshot named nothing that could be missing, all that is here came late.
    """
    sealed = {segment for segment in seen.outcomes if stands.kinds.get(segment) == bodies.SEAL}
    if sealed - seen.intents:
        return True
    manifest = stands.manifest
    if manifest is None:
        return False
    return bool(
        manifest.outcomes - seen.outcomes.keys() or manifest.conflicts - seen.conflicts or manifest.marks - seen.marks
    )


def _late(parts: Parts, stands: Standing, records: Rows) -> frozenset[str]:
    """The records that certainly came behind the retirement, or behind the freeze as outcomes: evidence, never data."""
    keys, late = parts.stored.keys, set[str]()
    root = keys.of.root
    decided = stands.manifest.outcomes if stands.manifest is not None else None
    retired = next((newest_of((row,)) for row in parts.attempt if row.key == keys.retired), None)
    for row in records:
        parsed = parse(root, row.key)
        if parsed is None:
            continue
        match parsed.kind:
            case Kind.CALL:
                behind = decided is not None and parsed.call not in decided
            case Kind.INTENT:
                behind = parsed.call in stands.late_begins
            case Kind.CONFLICT:
                behind = (parsed.call, parsed.detail) in stands.late_conflicts
            case _:
                behind = parsed.detail in stands.late_marks
        at = newest_of((row,))
        if behind or (retired is not None and at is not None and at > retired + _CLOCKS_S):
            late.add(row.key)
    return frozenset(late)


def _of_ledger(found: _Found, reader: Reader, keys: RunKeys, parts: Parts, kept: bool) -> None:
    ledger = keys.ledger(parts.rollout)
    seen = ledger_bodies.survey(ledger, parts.ledger)
    fences = tuple(row for row in parts.ledger if row.key.startswith(ledger.fences))
    rows = tuple(row for row in parts.ledger if not row.key.startswith(ledger.fences))
    bare = not rows and seen.fences == frozenset({Kind.LEDGER_CLOSING})
    if not seen.retired and not bare:
        return
    stays = bool(rows) and not kept and ledger_keeps(keys, parts.rollout, lambda key: reader.get(key, "sweep"))
    if stays:
        found.add(What.KEPT_ROWS, rows, stays=True)
        return
    found.add(What.ROWS, rows)
    found.add(What.LEDGER_FENCES, fences)
    found.rollouts.append(SweptRollout(parts.rollout, _keys(rows), _keys(fences), ledger=True))


def _old(rows: Rows, until: float) -> bool:
    times = [newest_of((row,)) for row in rows]
    return all(time is not None and time < until for time in times)


def _ours(keys: RunKeys, row: ObjectInfo) -> bool:
    return parse(keys.root, row.key) is not None


def _kind(root: str, row: ObjectInfo) -> Kind | None:
    parsed = parse(root, row.key)
    return None if parsed is None else parsed.kind


def _keys(rows: Rows) -> tuple[str, ...]:
    return tuple(row.key for row in rows)
