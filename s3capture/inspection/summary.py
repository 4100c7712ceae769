"""Runs and rollouts, counted from listings and as few bodies as possible.

The rule of this module: a summary of a rollout costs its share of a LIST, its decisions, and the outcomes small enough
to be a seal; entries are never read, so a run of millions of them can be listed. One damaged object makes one
``DamagedObject`` and hides nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from s3capture.effects import ObjectInfo
from s3capture.errors import InvalidIdError
from s3capture.ids import validate_run
from s3capture.inspection.standing import DamagedObject, Judge, State, standing
from s3capture.keys import Kind, RolloutKeys, RunKeys, parse, run_folder, unescape
from s3capture.protocol import bodies
from s3capture.protocol.survey import survey
from s3capture.reader import Reader


class Reason(StrEnum):
    """Why a snapshot is incomplete, or would be if the rollout were frozen now."""

    OPEN_CALLS = "open-calls"
    SEALED_CALLS = "sealed-calls"
    CONFLICTS = "conflicts"
    MARKS = "marks"


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run. ``calls`` counts outcomes of any kind, ``bytes`` what its attempts hold, times are Unix seconds."""

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
    None where the store does not say.
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

    @property
    def sound(self) -> bool:
        """Whether everything that was read is intact and ours."""
        return not self.damaged and not self.foreign


def list_runs(reader: Reader, prefix: str) -> Iterator[RunSummary]:
    """Yield the runs below ``prefix`` (as in the url), in order of their names; folders of others are passed over.

    So are the empty folders that some stores keep of a run that was removed. One LIST for each shard of each run, no
    bodies. Raise ``StoreError``.
    """
    folder = run_folder(prefix)
    for path in reader.folders(folder):
        try:
            keys = RunKeys(prefix, validate_run(unescape(path[len(folder) :].removesuffix("/"))))
        except (InvalidIdError, ValueError):
            continue
        below = set(keys.parts).intersection(reader.folders(keys.root))
        if not below:
            continue
        summary = _run_summary(reader, keys, with_attempts=keys.attempts in below)
        if summary.rollouts or summary.bytes or _holds_objects(reader, below - {keys.attempts}):
            yield summary


def run_exists(reader: Reader, keys: RunKeys) -> bool:
    """Whether anything that makes it a run is stored under its name. Raise ``StoreError``."""
    return _holds_objects(reader, set(keys.parts).intersection(reader.folders(keys.root)))


def _holds_objects(reader: Reader, folders: Iterable[str]) -> bool:
    return any(reader.list(folder, "look for a run") for folder in sorted(folders))


def _run_summary(reader: Reader, keys: RunKeys, *, with_attempts: bool) -> RunSummary:
    what = f"list of run {keys.run!r}"

    def count(shard: str) -> tuple[int, int, int, float | None]:
        rows = reader.list(shard, what)
        parsed = [found for row in rows if (found := parse(keys.root, row.key)) is not None]
        rollouts = {found.rollout for found in parsed}
        return len(rollouts), sum(f.kind is Kind.CALL for f in parsed), sum(r.size for r in rows), _newest(rows)

    rollouts = calls = size = 0
    newest: float | None = None
    for more in reader.map(count, reader.folders(keys.attempts) if with_attempts else ()):
        rollouts, calls, size = rollouts + more[0], calls + more[1], size + more[2]
        newest = max(filter(None, (newest, more[3])), default=None)
    return RunSummary(keys.run, rollouts, calls, size, newest)


def list_rollouts(
    reader: Reader, keys: RunKeys, *, on_stray: Callable[[str], None] = lambda _: None
) -> Iterator[RolloutSummary]:
    """Yield every rollout of a run, shard by shard, and by id within one.

    Reads, beside the listings, the decisions and the outcomes small enough to be a seal. ``on_stray`` is told every
    key among the attempts that belongs to no rollout. Raise ``StoreError``; a damaged object is in the summary.
    """
    what = f"list of run {keys.run!r}"

    def of_shard(shard: str) -> tuple[list[RolloutSummary], list[str]]:
        grouped, strays = _by_rollout(keys, reader.list(shard, what))
        get = getter(reader, what)
        return [summarize(keys.rollout(rollout), rows, get) for rollout, rows in sorted(grouped.items())], strays

    for summaries, strays in reader.map(of_shard, reader.folders(keys.attempts)):
        for key in strays:
            on_stray(key)
        yield from summaries


def _by_rollout(keys: RunKeys, rows: tuple[ObjectInfo, ...]) -> tuple[dict[str, list[ObjectInfo]], list[str]]:
    grouped: dict[str, list[ObjectInfo]] = {}
    unknown: list[ObjectInfo] = []
    for row in rows:
        parsed = parse(keys.root, row.key)
        if parsed is None:
            unknown.append(row)
        else:
            grouped.setdefault(parsed.rollout_id, []).append(row)
    bases = {keys.rollout(rollout).base: rollout for rollout in grouped} if unknown else {}
    strays: list[str] = []
    for row in unknown:
        owner = next((rollout for base, rollout in bases.items() if row.key.startswith(base)), None)
        if owner is None:
            strays.append(row.key)
        else:
            grouped[owner].append(row)
    return grouped, strays


def getter(reader: Reader, what: str) -> Callable[[str], bytes | None]:
    """Return the function that reads a key for ``what``."""
    return lambda key: reader.get(key, what)


def summarize(keys: RolloutKeys, rows: Sequence[ObjectInfo], get: Callable[[str], bytes | None]) -> RolloutSummary:
    """Count one rollout from the rows of its LIST; ``get`` reads what else is needed."""
    seen, judge = survey(keys, rows), Judge(get)
    stands = standing(keys, seen, judge)
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
    )
    found = tuple(reason for reason, calls in reasons if calls)
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
        version=seen.version(manifest) if manifest is not None and state is State.FROZEN else None,
        incomplete=bool(found),
        incomplete_reasons=found,
        last_modified=_newest(rows),
        damaged=judge.list(),
        foreign=tuple(sorted(seen.foreign)),
    )


def _newest(rows: Sequence[ObjectInfo]) -> float | None:
    """The last change of any row in Unix seconds; None where stamps are no times (the memory store)."""
    times = []
    for stamp in {row.stamp.partition("/")[0] for row in rows}:
        try:
            times.append(datetime.fromisoformat(stamp).timestamp())
        except ValueError:
            continue
    return max(times, default=None)
