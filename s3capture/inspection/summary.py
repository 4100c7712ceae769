"""Runs and rollouts, counted from listings and as few bodies as possible.

The rule of this module: a summary of a rollout costs its share of a LIST, its decisions, and the outcomes small enough
to be a seal; entries are never read, so a run of millions of them can be listed. One damaged object makes one
``DamagedObject`` and hides nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TypeVar

from s3capture.effects import ObjectInfo
from s3capture.errors import CorruptObjectError, InvalidIdError
from s3capture.ids import validate_run
from s3capture.keys import Kind, RolloutKeys, RunKeys, parse, run_folder, unescape
from s3capture.protocol import bodies
from s3capture.protocol.survey import Survey, survey
from s3capture.reader import Reader

_T = TypeVar("_T")


class State(StrEnum):
    """How far a rollout has come. ``freezing``: a freeze or retirement was announced and is not decided."""

    OPEN = "open"
    FREEZING = "freezing"
    FROZEN = "frozen"
    RETIRED = "retired"


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
class DamagedObject:
    """A stored object that cannot be trusted, and why."""

    key: str
    problem: str


@dataclass(frozen=True, slots=True)
class RolloutSummary:
    """One rollout, counted.

    ``calls`` are entries and refusals (``refusals`` of them), in the snapshot when there is one; ``late`` those that
    landed behind the freeze: evidence, never data. ``sealed`` calls were begun and had no outcome at the freeze,
    ``open_calls`` have none yet. ``version`` is set while the rollout is frozen. ``foreign`` keys are not ours.
    ``bytes`` are as stored; ``last_modified`` is in Unix seconds, None where the store does not say.
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

    One LIST for each shard of each run, no bodies. Raise ``StoreError``.
    """
    folder = run_folder(prefix)
    for path in reader.folders(folder):
        try:
            keys = RunKeys(prefix, validate_run(unescape(path[len(folder) :].removesuffix("/"))))
        except (InvalidIdError, ValueError):
            continue
        below = reader.folders(keys.root)
        if not set(keys.parts).isdisjoint(below):
            yield _run_summary(reader, keys, with_attempts=keys.attempts in below)


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


class Judge:
    """Decodes bodies and keeps a list of those that cannot be."""

    def __init__(self, get: Callable[[str], bytes | None]) -> None:
        self._get = get
        self.damaged: dict[str, str] = {}

    def read(self, key: str, decode: Callable[[bytes], _T]) -> _T | None:
        """Return the decoded body, or None when it is gone or damaged (which is noted)."""
        body = self._get(key)
        if body is None:
            return None
        try:
            return decode(body)
        except CorruptObjectError as error:
            self.damaged.setdefault(key, str(error))
            return None

    def list(self) -> tuple[DamagedObject, ...]:
        """The damaged objects so far, by key."""
        return tuple(DamagedObject(key, problem) for key, problem in sorted(self.damaged.items()))


def summarize(keys: RolloutKeys, rows: Sequence[ObjectInfo], get: Callable[[str], bytes | None]) -> RolloutSummary:
    """Count one rollout from the rows of its LIST; ``get`` reads what else is needed."""
    seen, judge = survey(keys, rows), Judge(get)
    manifest = judge.read(keys.frozen, lambda body: bodies.read_manifest(keys, body)) if seen.frozen else None
    state = _state(keys, seen, judge)
    # Behind a decision only what it names counts: the rest are late outcomes, and begins that were refused.
    counted = seen.outcomes.keys() if manifest is None else seen.outcomes.keys() & manifest.outcomes
    kinds = {segment: judge.read(keys.call_at(segment), _kind_of(keys, segment)) for segment in seen.small_outcomes}
    sealed = {segment for segment in counted if kinds.get(segment) == bodies.SEAL}
    late = {s for s in seen.outcomes.keys() - counted if kinds.get(s) != bodies.SEAL}
    open_calls = seen.open_calls if state in (State.OPEN, State.FREEZING) else frozenset()
    conflicts = seen.conflicts if manifest is None else seen.conflicts_with(manifest)
    marks = seen.marks if manifest is None else seen.marks_with(manifest)
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
        bytes=sum(row.size for row in rows),
        version=seen.version(manifest) if manifest is not None and state is State.FROZEN else None,
        incomplete=bool(found),
        incomplete_reasons=found,
        last_modified=_newest(rows),
        damaged=judge.list(),
        foreign=tuple(sorted(seen.foreign)),
    )


def _state(keys: RolloutKeys, seen: Survey, judge: Judge) -> State:
    # Every one is read, so that a damaged decision is named although another one has settled the matter.
    drops = [judge.read(keys.drop(version), _drop_of(keys, version)) for version in sorted(seen.drops)]
    if seen.retired or any(drops):
        return State.RETIRED
    if seen.frozen:
        return State.FROZEN
    return State.FREEZING if seen.closing else State.OPEN


def _drop_of(keys: RolloutKeys, version: int) -> Callable[[bytes], bool]:
    return lambda body: bodies.read_drop(keys, version, body)


def _kind_of(keys: RolloutKeys, segment: str) -> Callable[[bytes], str]:
    return lambda body: bodies.read_outcome(keys, segment, body).kind


def _newest(rows: Sequence[ObjectInfo]) -> float | None:
    """The last change of any row in Unix seconds; None where stamps are no times (the memory store)."""
    times = []
    for stamp in {row.stamp.partition("/")[0] for row in rows}:
        try:
            times.append(datetime.fromisoformat(stamp).timestamp())
        except ValueError:
            continue
    return max(times, default=None)
