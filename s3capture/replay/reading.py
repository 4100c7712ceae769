"""One stored rollout read and judged: what of it a replay gives, and why not the rest.

The rule of this module: the freeze decision says which calls there are. A call that landed behind it is never given;
one that it names and that is damaged, gone or in conflict is a problem, told by name, and makes the rollout incomplete.
A rollout that is dropped while it is listed or read is judged again by what is there then. It reads and never creates.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from s3capture.errors import CorruptObjectError
from s3capture.inspection import RolloutSummary, State
from s3capture.inspection.standing import Archived, Judge, Standing, archived_of, standing
from s3capture.inspection.summary import summarize
from s3capture.keys import Kind, parse, unescape
from s3capture.protocol import bodies
from s3capture.protocol.freezing import ONE_PAGE
from s3capture.protocol.survey import Survey, survey
from s3capture.records import EngineRefusal
from s3capture.replay.assembling import assemble
from s3capture.replay.model import Packed, Problem, ProblemKind, ReplayedRollout, pack
from s3capture.source import read_entry, read_refusal, sorted_by_time
from s3capture.stored import Selection, StoredRollout

LEFT_OUT_CALLS = "left-out-calls"
NO_SNAPSHOT = "no-snapshot"

_TRIES = 3


class Verdict(StrEnum):
    """What became of one rollout. ``other`` was not selected, ``deleted`` was retired and its records are gone."""

    GIVEN = "given"
    OTHER = "other"
    INCOMPLETE = "incomplete"
    DELETED = "deleted"
    LEFT_OUT = "left-out"


@dataclass(frozen=True, slots=True)
class Judged:
    """A rollout that was looked at; ``rollout`` is there exactly if it is given."""

    verdict: Verdict
    rollout: ReplayedRollout | None = None
    problems: tuple[Problem, ...] = ()


class _Gone(Exception):
    """A listed object was not there when it was read: the rollout is being retired or deleted."""


def read_rollout(
    stored: StoredRollout, selection: Selection, again: Callable[[str], StoredRollout], *, paged: bool = False
) -> Judged:
    """Judge one rollout and read what is given of it; ``again`` lists it once more. Raise ``StoreError``.

    ``paged`` says that its rows may have come in more than one answer to a LIST; of a large one that is known.
    Not from within ``Reader.map``: the objects of the rollout are read side by side.
    """
    for attempt in range(_TRIES):
        try:
            paged = not stored.archived and (paged or len(stored.live) >= ONE_PAGE)
            return _Reading(stored, selection, paged=paged, last=attempt == _TRIES - 1).judge()
        except _Gone:
            stored, paged = again(stored.rollout_id), False
            if not stored.rows and not stored.problem:
                return Judged(Verdict.DELETED)
    raise AssertionError("unreachable: the last try reports what is gone")


class _Reading:
    def __init__(self, stored: StoredRollout, selection: Selection, *, paged: bool, last: bool) -> None:
        self._stored, self._selection, self._paged, self._last = stored, selection, paged, last
        self._archived = archived_of(stored)
        self._problems: list[Problem] = []
        self._bodies: dict[str, bytes] = {}

    def judge(self) -> Judged:
        keys, rows = self._stored.keys, self._stored.rows
        if self._stored.problem:
            # The archive lost a part of it: whether it was complete can no longer be known.
            self._problem(None, ProblemKind.DAMAGED, self._stored.problem)
            return self._judged(Verdict.LEFT_OUT)
        seen = survey(keys, rows)
        try:
            # Each time that a pack is asked costs a pass over a part of it, so it is asked once.
            first = seen.outcomes if self._stored.archived else seen.small_outcomes
            # Only these can have come behind the retirement, which costs a request for each archived rollout to know.
            behind = self._archived if seen.conflicts or seen.marks else None
            self._read([*_decisions(self._stored, behind), *map(keys.call_at, first)])
            summary = summarize(keys, rows, self._bodies.get, archived=self._archived)
            if not replace(self._selection, complete=None).takes(summary):
                return Judged(Verdict.OTHER)
            stands = standing(keys, seen, Judge(self._bodies.get), self._archived)
            return self._judge(seen, summary, stands)
        except CorruptObjectError as error:  # a pack of the archive, or its index
            self._problem(None, ProblemKind.DAMAGED, str(error))
            return self._judged(Verdict.LEFT_OUT)

    def _judge(self, seen: Survey, summary: RolloutSummary, stands: Standing) -> Judged:
        manifest = stands.manifest
        named = seen.outcomes.keys() if manifest is None else manifest.outcomes
        wanted = {segment for segment in named if stands.kinds.get(segment) != bodies.SEAL}
        present = wanted & seen.outcomes.keys()
        retired = stands.state is State.RETIRED
        if retired and not present:
            return Judged(Verdict.DELETED)
        if seen.frozen and manifest is None:
            self._damaged_decisions(summary, left_out=True)
            return self._judged(Verdict.LEFT_OUT)
        reasons = [*map(str, summary.incomplete_reasons), *([NO_SNAPSHOT] if retired and manifest is None else [])]
        if reasons and self._selection.complete is True:
            return Judged(Verdict.INCOMPLETE)
        self._damaged_decisions(summary, left_out=False)
        conflicts = (seen.conflicts if manifest is None else seen.conflicts_with(manifest)) - stands.late_conflicts
        records, refusals, left_out = self._outcomes(wanted, present, {segment for segment, _ in conflicts})
        calls, problems = assemble(self._stored.rollout_id, records, left_out)
        self._problems += problems
        if self._paged and self._retired_since(seen):
            if not self._last:
                raise _Gone
            self._problem(None, ProblemKind.MISSING, "it was retired while it was listed, time and again")
            return self._judged(Verdict.LEFT_OUT)
        if any(problem.left_out for problem in self._problems):
            reasons.append(LEFT_OUT_CALLS)
        if self._selection.complete is bool(reasons):
            return self._judged(Verdict.LEFT_OUT if self._selection.complete else Verdict.OTHER)
        rollout = ReplayedRollout(
            run=self._stored.keys.of.run,
            rollout_id=self._stored.rollout_id,
            state=str(summary.state),
            archived=self._stored.archived,
            incomplete=bool(reasons),
            reasons=tuple(reasons),
            snapshot_id=None if manifest is None else manifest.snapshot_id,
            version=summary.version,
            last_modified=summary.last_modified,
            calls=calls,
            refusals=tuple(sorted_by_time(refusals)),
            problems=tuple(self._problems),
        )
        return self._judged(Verdict.GIVEN, rollout)

    def _outcomes(
        self, wanted: set[str], present: set[str], conflicted: set[str]
    ) -> tuple[dict[str, Packed], list[EngineRefusal], set[str]]:
        """Read the outcomes; return records by call id, refusals, and the segments of what was left out."""
        keys = self._stored.keys
        records: dict[str, Packed] = {}
        refusals: list[EngineRefusal] = []
        left_out: set[str] = set()

        def leave_out(segment: str, kind: ProblemKind, text: str) -> None:
            left_out.add(segment)
            self._problem(unescape(segment) or segment, kind, text)

        for segment in sorted(wanted - present - conflicted):
            leave_out(segment, ProblemKind.MISSING, "the snapshot names it, and there is no such object")
        for segment in sorted(conflicted & wanted):
            leave_out(segment, ProblemKind.CONFLICT, "two payloads were put under its id; 's3capture show' names both")
        sound = sorted(present - conflicted)
        self._read(map(keys.call_at, sound))
        for segment in sound:
            body = self._bodies.pop(keys.call_at(segment), None)
            if body is None:
                leave_out(segment, ProblemKind.MISSING, "it was listed, and is gone")
                continue
            try:
                stored = bodies.read_outcome(keys, segment, body)
                if stored.kind == bodies.ENTRY:
                    entry = read_entry(keys, segment, stored)
                    records[entry.model_call_id] = pack(entry)
                elif stored.kind == bodies.REFUSAL:
                    refusals.append(read_refusal(keys, segment, stored))
            except CorruptObjectError as error:
                leave_out(segment, ProblemKind.DAMAGED, str(error))
        return records, refusals, left_out

    def _read(self, wanted: Iterable[str]) -> None:
        missing = [key for key in wanted if key not in self._bodies]
        found = self._stored.read_in_parallel(missing) if missing else {}
        if len(found) < len(missing) and not self._last:
            raise _Gone
        self._bodies.update(found)

    def _retired_since(self, seen: Survey) -> bool:
        """Whether a retirement stands that the LIST did not show: it may have taken marks away between two pages.

        See ``protocol.freezing.retired_since``. A drop that was refused costs one more look.
        """
        now = survey(self._stored.keys, self._stored.reader.list(self._stored.keys.fences, self._stored.what))
        return (now.retired and not seen.retired) or bool(now.drops - seen.drops)

    def _damaged_decisions(self, summary: RolloutSummary, *, left_out: bool) -> None:
        fences = self._stored.keys.fences
        for damaged in summary.damaged:
            # Damaged outcomes are told call by call, where they are read.
            if damaged.key.startswith(fences):
                self._problem(None, ProblemKind.DAMAGED, damaged.problem, left_out=left_out)

    def _problem(self, call: str | None, kind: ProblemKind, text: str, *, left_out: bool = True) -> None:
        self._problems.append(Problem(self._stored.rollout_id, call, kind, text, left_out))

    def _judged(self, verdict: Verdict, rollout: ReplayedRollout | None = None) -> Judged:
        return Judged(verdict, rollout, tuple(self._problems))


def _decisions(stored: StoredRollout, archived: Archived | None) -> Iterable[str]:
    for row in stored.rows:
        parsed = parse(stored.keys.of.root, row.key)
        if parsed is not None and parsed.kind in (Kind.FROZEN, Kind.DROP, Kind.RETIRED):
            yield row.key
    if archived is not None:
        yield from archived.decisions(stored.keys)
