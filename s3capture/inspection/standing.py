"""How far a rollout has come, and which of its objects came too late to count.

The rule of this module: evidence is called late only where that is certain, since whatever is called late masks
nothing; what cannot be told apart from a loss counts as one. A damaged decision is reported and decides nothing.
A retired rollout of which a part is gone is never whole again, whatever is left of it: a deletion takes marks as well.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from typing import TypeVar

from s3capture.effects import ObjectInfo
from s3capture.errors import CorruptObjectError
from s3capture.keys import RolloutKeys
from s3capture.protocol import bodies
from s3capture.protocol.bodies import Manifest
from s3capture.protocol.survey import Survey, survey
from s3capture.stored import StoredRollout

_T = TypeVar("_T")


class State(StrEnum):
    """How far a rollout has come. ``freezing``: a freeze or retirement was announced and is not decided."""

    OPEN = "open"
    FREEZING = "freezing"
    FROZEN = "frozen"
    RETIRED = "retired"


@dataclass(frozen=True, slots=True)
class DamagedObject:
    """A stored object that cannot be trusted, and why."""

    key: str
    problem: str


class Judge:
    """Decodes bodies and keeps a list of those that cannot be."""

    def __init__(self, get: Callable[[str], bytes | None]) -> None:
        self._get = get
        self.damaged: dict[str, str] = {}

    def read(self, key: str, decode: Callable[[bytes], _T]) -> _T | None:
        """Return the decoded body, or None when it is gone or damaged (which is noted).

        What cannot be unpacked from the archive is damage of that key, like what cannot be decoded.
        """
        try:
            body = self._get(key)
            return None if body is None else decode(body)
        except CorruptObjectError as error:
            self.damaged.setdefault(key, str(error))
            return None

    def list(self) -> tuple[DamagedObject, ...]:
        """The damaged objects so far, by key."""
        return tuple(DamagedObject(key, problem) for key, problem in sorted(self.damaged.items()))


@dataclass(frozen=True, slots=True)
class Archived:
    """What tells the late objects of a rollout that the archive speaks for: it was retired at what was packed.

    ``packed`` are the keys that lie in packs, ``drops`` the versions of drop decisions that are live and were not
    packed: the retirement by the archive itself is among them.
    """

    packed: frozenset[str]
    drops: frozenset[int] = frozenset()

    def decisions(self, keys: RolloutKeys) -> tuple[str, ...]:
        """The keys that ``standing`` reads beside the rows of the rollout."""
        return tuple(keys.drop(version) for version in sorted(self.drops))


def archived_of(rollout: StoredRollout) -> Archived | None:
    """What the archive says of ``rollout``, None where it does not speak for it."""
    if not rollout.archived:
        return None
    if rollout.problem:
        # Not all that was packed is known, so nothing is certain to have come behind it.
        return Archived(frozenset(row.key for row in rows_of(rollout)))
    drops = survey(rollout.keys, rollout.live).drops - survey(rollout.keys, rollout.rows).drops
    return Archived(rollout.packed, drops)


def rows_of(rollout: StoredRollout) -> tuple[ObjectInfo, ...]:
    """The rows by which a rollout is judged: where the archive lost its part, the live fences still say what it is."""
    if not rollout.problem:
        return rollout.rows
    known = {row.key for row in rollout.rows}
    return (*rollout.rows, *(row for row in rollout.live if row.key not in known))


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a rollout and what is judged by it; calls are key segments.

    ``kinds`` are those of the outcomes small enough to be a seal (None: gone or damaged). ``late_begins`` were refused
    behind the freeze or the retirement; ``late_conflicts`` and ``late_marks`` came behind the retirement. ``granted``
    is the version at which a drop retired the rollout, ``kept`` what an unconditional retirement said of its records
    (None: nothing; read only while there are some). ``lost`` says that records of a retired rollout are left and that
    other parts of it are gone, or were to go: what spoke against those records may have been among them.
    """

    state: State
    manifest: Manifest | None
    kinds: dict[str, str | None]
    late_begins: frozenset[str]
    late_conflicts: frozenset[tuple[str, str]]
    late_marks: frozenset[str]
    granted: int | None = None
    kept: bool | None = None
    lost: bool = False


def standing(keys: RolloutKeys, seen: Survey, judge: Judge, archived: Archived | None = None) -> Standing:
    """Judge one rollout from its survey; reads its decisions and its small outcomes."""
    manifest = judge.read(keys.frozen, lambda body: bodies.read_manifest(keys, body)) if seen.frozen else None
    # Every one is read, so that a damaged decision is named although another one has settled the matter.
    granted = _granted(keys, seen.drops, judge)
    kinds = {segment: judge.read(keys.call_at(segment), _kind_of(keys, segment)) for segment in seen.small_outcomes}
    state = _state(seen, retired=granted is not None)
    decided = frozenset[str]() if manifest is None else manifest.outcomes
    records = {segment for segment in seen.outcomes if kinds.get(segment) != bodies.SEAL}
    if manifest is not None:
        records &= manifest.outcomes
    behind = state is State.RETIRED and _nothing_else_came_before(manifest, granted, records)
    later_conflicts = seen.conflicts - (manifest.conflicts if manifest else frozenset())
    later_marks = seen.marks - (manifest.marks if manifest else frozenset())
    late = survey(keys, ())
    # Asked only where it decides something: it costs a request for each rollout of an archive.
    if archived is not None and (later_conflicts or later_marks):
        # The retirement was at what was packed. What later runs packed besides is told by the version of that.
        late = survey(keys, (row for row in seen.objects if row.key not in archived.packed))
        at = _granted(keys, archived.drops, judge)
        behind = behind or (manifest is not None and at == _version_of(manifest))
    retired = state is State.RETIRED
    kept = judge.read(keys.retired, _kept_of(keys)) if seen.retired and records else None
    return Standing(
        state=state,
        manifest=manifest,
        kinds=kinds,
        late_begins=seen.open_calls - decided if manifest is not None or behind else frozenset(),
        late_conflicts=later_conflicts if behind else later_conflicts & late.conflicts,
        late_marks=later_marks if behind else later_marks & late.marks,
        granted=granted,
        kept=kept,
        lost=retired and _is_lost(keys, seen, manifest, records, granted=granted, kept=kept),
    )


def _granted(keys: RolloutKeys, versions: frozenset[int], judge: Judge) -> int | None:
    drops = {version: judge.read(keys.drop(version), _drop_of(keys, version)) for version in sorted(versions)}
    return next((version for version, retired in drops.items() if retired), None)


def _state(seen: Survey, *, retired: bool) -> State:
    if seen.retired or retired:
        return State.RETIRED
    if seen.frozen:
        return State.FROZEN
    return State.FREEZING if seen.closing else State.OPEN


def _version_of(manifest: Manifest) -> int:
    """The version of a rollout of which nothing came behind its freeze."""
    return 1 + len(manifest.outcomes) + len(manifest.conflicts) + len(manifest.marks)


def _nothing_else_came_before(manifest: Manifest | None, granted: int | None, records: set[str]) -> bool:
    """Whether all that a retired rollout holds beside its snapshot must have come behind the retirement."""
    if granted is not None and manifest is not None:
        # Whatever came between freeze and drop raised the version that was dropped.
        return granted == _version_of(manifest)
    # Retired unconditionally: what came before was swept, unless the records were kept, and then they are here.
    return not records


def _is_lost(
    keys: RolloutKeys,
    seen: Survey,
    manifest: Manifest | None,
    records: set[str],
    *,
    granted: int | None,
    kept: bool | None,
) -> bool:
    """Whether ``records`` of a retired rollout are left, and not all that was there when it was retired."""
    if not records:
        return False
    if manifest is None:
        # A put that was refused leaves a record as well: only what is older than the decision was to be deleted by it.
        times = {row.key: stored_at(row) for row in (*seen.outcomes.values(), *seen.objects)}
        decided, called = times.get(keys.retired), (times[seen.outcomes[segment].key] for segment in records)
        return kept is False and decided is not None and any(at is not None and at < decided for at in called)
    # What the snapshot names is looked for by name, so that nothing that came late stands in for it. Of what came
    # between freeze and drop only the number is known; where some of it is there, it masks the rollout anyway.
    missing = (
        manifest.outcomes - seen.outcomes.keys() or manifest.conflicts - seen.conflicts or manifest.marks - seen.marks
    )
    return bool(missing) or kept is False or (granted is not None and granted > seen.version(manifest))


def stored_at(row: ObjectInfo) -> float | None:
    """When the store says that ``row`` was created, in Unix seconds; None where it does not say."""
    try:
        return datetime.fromisoformat(row.stamp.partition("/")[0]).timestamp()
    except ValueError:
        return None


def _kept_of(keys: RolloutKeys) -> Callable[[bytes], bool | None]:
    def decode(body: bytes) -> bool | None:
        fence = bodies.read(keys.retired, body, "retired").value()
        keep = fence.get("keep") if isinstance(fence, dict) else None
        return keep if isinstance(keep, bool) else None

    return decode


def _drop_of(keys: RolloutKeys, version: int) -> Callable[[bytes], bool]:
    return lambda body: bodies.read_drop(keys, version, body)


def _kind_of(keys: RolloutKeys, segment: str) -> Callable[[bytes], str]:
    return lambda body: bodies.read_outcome(keys, segment, body).kind
