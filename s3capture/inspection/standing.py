"""How far a rollout has come, and which of its objects came too late to count.

The rule of this module: evidence is called late only where that is certain, since whatever is called late masks
nothing; what cannot be told apart from a loss counts as one. A damaged decision is reported and decides nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

from s3capture.errors import CorruptObjectError
from s3capture.keys import RolloutKeys
from s3capture.protocol import bodies
from s3capture.protocol.bodies import Manifest
from s3capture.protocol.survey import Survey

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


@dataclass(frozen=True, slots=True)
class Standing:
    """The state of a rollout and what is judged by it; calls are key segments.

    ``kinds`` are those of the outcomes small enough to be a seal (None: gone or damaged). ``late_begins`` were refused
    behind the freeze or the retirement; ``late_conflicts`` and ``late_marks`` came behind the retirement.
    """

    state: State
    manifest: Manifest | None
    kinds: dict[str, str | None]
    late_begins: frozenset[str]
    late_conflicts: frozenset[tuple[str, str]]
    late_marks: frozenset[str]


def standing(keys: RolloutKeys, seen: Survey, judge: Judge) -> Standing:
    """Judge one rollout from its survey; reads its decisions and its small outcomes."""
    manifest = judge.read(keys.frozen, lambda body: bodies.read_manifest(keys, body)) if seen.frozen else None
    # Every one is read, so that a damaged decision is named although another one has settled the matter.
    drops = {version: judge.read(keys.drop(version), _drop_of(keys, version)) for version in sorted(seen.drops)}
    granted = next((version for version, retired in drops.items() if retired), None)
    kinds = {segment: judge.read(keys.call_at(segment), _kind_of(keys, segment)) for segment in seen.small_outcomes}
    state = _state(seen, retired=granted is not None)
    decided = frozenset[str]() if manifest is None else manifest.outcomes
    behind = state is State.RETIRED and _nothing_else_came_before(seen, manifest, granted, kinds)
    return Standing(
        state=state,
        manifest=manifest,
        kinds=kinds,
        late_begins=seen.open_calls - decided if manifest is not None or behind else frozenset(),
        late_conflicts=seen.conflicts - (manifest.conflicts if manifest else frozenset()) if behind else frozenset(),
        late_marks=seen.marks - (manifest.marks if manifest else frozenset()) if behind else frozenset(),
    )


def _state(seen: Survey, *, retired: bool) -> State:
    if seen.retired or retired:
        return State.RETIRED
    if seen.frozen:
        return State.FROZEN
    return State.FREEZING if seen.closing else State.OPEN


def _nothing_else_came_before(
    seen: Survey, manifest: Manifest | None, granted: int | None, kinds: dict[str, str | None]
) -> bool:
    """Whether all that a retired rollout holds beside its snapshot must have come behind the retirement."""
    if granted is not None and manifest is not None:
        # Whatever came between freeze and drop raised the version that was dropped.
        return granted == 1 + len(manifest.outcomes) + len(manifest.conflicts) + len(manifest.marks)
    # Retired unconditionally: what came before was swept, unless the records were kept, and then they are here.
    records = {segment for segment in seen.outcomes if kinds.get(segment) != bodies.SEAL}
    return not (records if manifest is None else records & manifest.outcomes)


def _drop_of(keys: RolloutKeys, version: int) -> Callable[[bytes], bool]:
    return lambda body: bodies.read_drop(keys, version, body)


def _kind_of(keys: RolloutKeys, segment: str) -> Callable[[bytes], str]:
    return lambda body: bodies.read_outcome(keys, segment, body).kind
