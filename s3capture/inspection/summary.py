"""Runs and rollouts, counted from listings and as few bodies as possible.

The rule of this module: a summary of a rollout costs its share of a LIST, its decisions, and the outcomes small enough
to be a seal; entries are never read, so a run of millions of them can be listed. One damaged object makes one
``DamagedObject`` and hides nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from s3capture.effects import ObjectInfo
from s3capture.errors import InvalidIdError
from s3capture.ids import validate_run
from s3capture.inspection.standing import (
    Archived,
    DamagedObject,
    Judge,
    State,
    archived_of,
    rows_of,
    standing,
    stored_at,
)
from s3capture.keys import Kind, RolloutKeys, RunKeys, parse, run_folder, unescape
from s3capture.protocol import bodies
from s3capture.protocol.survey import survey
from s3capture.reader import Reader
from s3capture.stored import StoredRollout, StoredRun


class Reason(StrEnum):
    """Why a snapshot is incomplete, or would be if the rollout were frozen now."""

    OPEN_CALLS = "open-calls"
    SEALED_CALLS = "sealed-calls"
    CONFLICTS = "conflicts"
    MARKS = "marks"
    LOST_EVIDENCE = "lost-evidence"
    """It was retired, or archived, and not all that it held then is there: a mark may be among what is gone."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run. ``calls`` counts outcomes of any kind, ``bytes`` what its rollouts hold, times are Unix seconds.

    What was archived is counted as it was.
    """

    run: str
    rollouts: int
    calls: int
    bytes: int
    last_modified: float | None


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """One rollout, counted.

    ``calls`` are entries and refusals (``refusals`` of them), in the snapshot when there is one; ``late`` those that
    landed behind the freeze: evidence, never data. ``late_begins`` came behind the freeze or the retirement and were
    refused, ``late_conflicts`` and ``late_marks`` behind the retirement; none of them makes a rollout incomplete.
    ``sealed`` calls were begun and had no outcome at the freeze, ``open_calls`` have none yet. ``version`` is set while
    the rollout is frozen. ``foreign`` keys are not ours. ``bytes`` are as stored; ``last_modified`` is in Unix seconds,
    None where the store does not say. An ``archived`` rollout is counted as it was when it was packed.
    """

    rollout: str
    state: State
    calls: int
    refusals: int
    open_calls: int
    sealed: int
    conflicts: int
    marks: int
    late: int
    late_begins: int
    late_conflicts: int
    late_marks: int
    bytes: int
    version: int | None
    incomplete: bool
    incomplete_reasons: tuple[Reason, ...]
    last_modified: float | None
    damaged: tuple[DamagedObject, ...]
    foreign: tuple[str, ...]
    archived: bool = False

    @property
    def sound(self) -> bool:
        """Whether everything that was read is intact and ours."""
        return not self.damaged and not self.foreign


def list_runs(reader: Reader, prefix: str) -> Iterator[RunSummary]:
    """Yield the runs below ``prefix`` (as in the url), in order of their names; folders of others are passed over.

    So are the empty folders that some stores keep of a run that was removed. One LIST for each shard of each run, and
    the indexes of its archive; no bodies. Raise ``StoreError``.
    """
    folder = run_folder(prefix)
    for path in reader.folders(folder):
        try:
            keys = RunKeys(prefix, validate_run(unescape(path[len(folder) :].removesuffix("/"))))
        except (InvalidIdError, ValueError):
            continue
        run = StoredRun(reader, keys)
        summary = _run_summary(run)
        if summary.rollouts or summary.bytes or run.exists():
            yield summary


def run_exists(reader: Reader, keys: RunKeys) -> bool:
    """Whether anything that makes it a run is stored under its name. Raise ``StoreError``."""
    return StoredRun(reader, keys).exists()


def _run_summary(run: StoredRun) -> RunSummary:
    strays: list[str] = []
    rollouts = calls = size = 0
    newest: float | None = None
    for rollout in run.rollouts(on_stray=strays.append):
        rollouts += 1
        size += sum(row.size for row in rollout.rows)
        parsed = (parse(run.keys.root, row.key) for row in rollout.rows)
        calls += sum(found is not None and found.kind is Kind.CALL for found in parsed)
        newest = max(filter(None, (newest, newest_of(rollout.rows))), default=None)
    return RunSummary(run.keys.run, rollouts, calls, size, newest)


def list_rollouts(
    reader: Reader,
    keys: RunKeys,
    *,
    on_stray: Callable[[str], None] = lambda _: None,
    on_problem: Callable[[str, str], None] = lambda _key, _problem: None,
) -> Iterator[RolloutSummary]:
    """Yield every rollout of a run, live or archived, shard by shard, and by id within one.

    Reads, beside the listings, the decisions and the outcomes small enough to be a seal. ``on_stray`` is told every
    key among the attempts that belongs to no rollout, and ``on_problem``, at the end, every key of the archive that
    could not be read, with the reason. Raise ``StoreError``; a damaged object is in the summary.
    """
    run = StoredRun(reader, keys)
    yield from reader.map(summary_of, run.rollouts(on_stray=on_stray))
    for key, problem in run.problems().items():
        on_problem(key, problem)


def summary_of(rollout: StoredRollout) -> RolloutSummary:
    """Count one rollout; reads its decisions and its small outcomes. Raise ``StoreError``."""
    return summarize(
        rollout.keys, rows_of(rollout), rollout.get, archived=archived_of(rollout), problem=rollout.problem
    )


def summarize(
    keys: RolloutKeys,
    rows: Sequence[ObjectInfo],
    get: Callable[[str], bytes | None],
    *,
    archived: Archived | None = None,
    problem: str = "",
) -> RolloutSummary:
    """Count one rollout from the rows of its LIST; ``get`` reads what else is needed.

    ``problem`` says what the archive lost of it, if anything.
    """
    seen, judge = survey(keys, rows), Judge(get)
    stands = standing(keys, seen, judge, archived)
    state, manifest, kinds = stands.state, stands.manifest, stands.kinds
    # Behind a decision only what it names counts: the rest are late outcomes, and begins that were refused.
    counted = seen.outcomes.keys() if manifest is None else seen.outcomes.keys() & manifest.outcomes
    sealed = {segment for segment in counted if kinds.get(segment) == bodies.SEAL}
    late = {s for s in seen.outcomes.keys() - counted if kinds.get(s) != bodies.SEAL}
    open_calls = seen.open_calls if state in (State.OPEN, State.FREEZING) else frozenset()
    conflicts = (seen.conflicts if manifest is None else seen.conflicts_with(manifest)) - stands.late_conflicts
    marks = (seen.marks if manifest is None else seen.marks_with(manifest)) - stands.late_marks
    reasons = (
        (Reason.OPEN_CALLS, open_calls),
        (Reason.SEALED_CALLS, sealed),
        (Reason.CONFLICTS, conflicts),
        (Reason.MARKS, marks),
        (Reason.LOST_EVIDENCE, stands.lost or problem),
    )
    if problem:
        judge.damaged[keys.of.archive.base] = problem
    late_evidence = len(stands.late_conflicts) + len(stands.late_marks)
    found = tuple(reason for reason, applies in reasons if applies)
    return RolloutSummary(
        rollout=keys.rollout_id,
        state=state,
        calls=len(counted) - len(sealed),
        refusals=sum(kinds.get(segment) == bodies.REFUSAL for segment in counted),
        open_calls=len(open_calls),
        sealed=len(sealed),
        conflicts=len(conflicts),
        marks=len(marks),
        late=len(late),
        late_begins=len(stands.late_begins),
        late_conflicts=len(stands.late_conflicts),
        late_marks=len(stands.late_marks),
        bytes=sum(row.size for row in rows),
        version=seen.version(manifest) - late_evidence if manifest is not None and state is State.FROZEN else None,
        incomplete=bool(found),
        incomplete_reasons=found,
        last_modified=newest_of(rows),
        damaged=judge.list(),
        foreign=tuple(sorted(seen.foreign)),
        archived=archived is not None,
    )


def newest_of(rows: Sequence[ObjectInfo]) -> float | None:
    """The last change of any row in Unix seconds; None where stamps are no times (the memory store)."""
    stamps = {row.stamp.partition("/")[0]: row for row in rows}
    return max(filter(None, map(stored_at, stamps.values())), default=None)
