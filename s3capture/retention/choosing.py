"""Which rollouts a retire or a delete would take, and why the others stay.

The rule of this module: rollouts that nobody consumed (open, freezing, frozen) lose their records only when named by
their exact id, by ``--state``, or with the whole run; a pattern or an age is not a name. A retirement that was cut
short is judged as the rollout stood before it, so that the same command again finishes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum

from s3capture.errors import CaptureError, CorruptObjectError, StoreError
from s3capture.inspection import RolloutSummary, State, summary_of
from s3capture.inspection.summary import newest_of, summarize
from s3capture.keys import Kind, RolloutKeys, RunKeys
from s3capture.protocol import bodies, ledger_bodies
from s3capture.protocol.survey import Survey, survey
from s3capture.retention.listing import LiveRun, Parts, Rows, Shard, Tally, map_shards, parts_of, tally
from s3capture.stored import Selection, StoredRollout, StoredRun

_WILD = frozenset("*?[")
UNDELIVERED = frozenset({State.OPEN, State.FREEZING, State.FROZEN})


class Act(StrEnum):
    """What is done with the chosen rollouts."""

    RETIRE = "retire"
    DELETE = "delete"


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for. ``everything`` is the whole run; ``keep`` retires without deleting; ``ledger``: ledgers go
    along. ``everything`` of a delete looks at live objects alone: the archive goes as a whole, unread."""

    act: Act
    selection: Selection
    everything: bool = False
    keep: bool = False
    ledger: bool = True

    @property
    def exact(self) -> frozenset[str]:
        """The rollouts that are named in full; no id holds a character that a pattern needs."""
        return frozenset(glob for glob in self.selection.globs if not _WILD.intersection(glob))

    def names(self, rollout: str, state: State) -> bool:
        """Whether an undelivered rollout is asked for by name, by its state, or with the whole run."""
        return self.everything or rollout in self.exact or state in self.selection.states


class Stays(StrEnum):
    """Why a rollout that the options match is not taken."""

    PROTECTED = "nobody consumed it, and it is not named"
    RETIRED = "retired already"
    KEPT = "retired already, with its records kept"
    ARCHIVED = "archived already"


@dataclass(frozen=True, slots=True)
class Candidate:
    """One rollout to act on. ``ledger`` counts the objects of its ledger, which are among ``tally``; ``attempt`` is
    False where only the ledger is acted on.

    ``finishing``: its retirement was decided before and is only finished now. ``archived``: a pack speaks for it.
    """

    rollout: str
    state: State
    tally: Tally
    ledger: int = 0
    attempt: bool = True
    archived: bool = False
    finishing: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    """What would be done. ``stays`` counts by state and reason; ``absent`` are ids asked for of which nothing is kept.

    ``problems`` are damaged objects, and rollouts that could not be judged, in sentences; ``strays`` foreign keys.
    """

    request: Request
    candidates: tuple[Candidate, ...] = ()
    stays: tuple[tuple[State, Stays, int], ...] = ()
    absent: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    strays: tuple[str, ...] = ()

    def by_state(self) -> dict[State, Tally]:
        """The sums of each state, in the order of a rollout's life."""
        sums: dict[State, Tally] = {}
        for candidate in self.candidates:
            sums[candidate.state] = sums.get(candidate.state, Tally()) + candidate.tally
        return {state: sums[state] for state in State if state in sums}

    @property
    def total(self) -> Tally:
        """The sum of all."""
        return sum((candidate.tally for candidate in self.candidates), Tally())


@dataclass(frozen=True, slots=True)
class _Verdict:
    rollout: str
    state: State
    candidate: Candidate | None = None
    stays: Stays | None = None
    absent: bool = False
    problems: tuple[str, ...] = ()


def choose(run: StoredRun, request: Request) -> Plan:
    """Plan ``request``; reads only. Raise ``StoreError``, and ``MissingExtraError`` when archives cannot be read.

    Rollouts are in the order of their keys. One whose decisions are damaged is judged without them, and told.
    """
    verdicts: list[_Verdict] = []
    strays: list[str] = []
    chooser = _Chooser(run, request)
    for found, foreign in chooser.walk():
        verdicts.extend(found)
        strays.extend(foreign)
    counts = Counter((verdict.state, verdict.stays) for verdict in verdicts if verdict.stays is not None)
    return Plan(
        request,
        tuple(verdict.candidate for verdict in verdicts if verdict.candidate is not None),
        tuple((state, why, count) for (state, why), count in sorted(counts.items()) if why is not None),
        tuple(verdict.rollout for verdict in verdicts if verdict.absent),
        (*run.problems().values(), *(problem for verdict in verdicts for problem in verdict.problems)),
        tuple(strays),
    )


class _Chooser:
    def __init__(self, run: StoredRun, request: Request) -> None:
        self._request = request
        self._whole = request.everything and request.act is Act.DELETE
        self._run = LiveRun(run.reader, run.keys) if self._whole else run

    def walk(self) -> Iterator[tuple[list[_Verdict], tuple[str, ...]]]:
        """Judge what the selection names: rollout by rollout where all are named in full, else shard by shard."""
        globs = self._request.selection.globs
        if globs and self._request.exact.issuperset(globs):
            for verdict in self._run.reader.map(self._one, sorted(self._request.exact)):
                yield ([] if verdict is None else [verdict]), ()
            return
        yield from map_shards(self._run, self._shard)

    def _one(self, rollout: str) -> _Verdict | None:
        parts = parts_of(self._run, rollout)
        if not (parts.stored.rows or parts.attempt or parts.markers or parts.ledger):
            return _Verdict(rollout, State.OPEN, absent=True)
        return self._judged(parts)

    def _shard(self, shard: Shard) -> tuple[list[_Verdict], tuple[str, ...]]:
        named = (parts for parts in shard.rollouts if self._request.selection.names(parts.rollout))
        return [verdict for parts in named if (verdict := self._judged(parts)) is not None], shard.strays

    def _judged(self, parts: Parts) -> _Verdict | None:
        try:
            return self._judge(parts)
        except StoreError:
            raise
        except CaptureError as error:
            return _Verdict(parts.rollout, State.OPEN, problems=(f"rollout {parts.rollout!r}: {error}",))

    def _judge(self, parts: Parts) -> _Verdict | None:
        stored, request = parts.stored, self._request
        ledger = parts.ledger if request.ledger or self._whole else ()
        if not (stored.rows or parts.attempt or parts.markers or ledger):
            return None
        if stored.rows or parts.attempt or not ledger:
            summary = summary_of(stored)
        else:
            summary = _of_ledger(self._run.keys, parts.rollout, ledger)
        # A rollout was changed when its ledger was; its markers count where nothing else is left to tell.
        others = _without_retirement(self._run.keys, parts.rollout, ledger) or (() if stored.rows else parts.markers)
        summary = replace(summary, last_modified=_later(summary.last_modified, newest_of(others)))
        seen = survey(stored.keys, parts.attempt)
        judge = self._of_retire if request.act is Act.RETIRE else self._of_delete
        taken, stays, finishing = judge(replace(parts, ledger=ledger), summary, seen)
        if not taken and stays is None:
            return None
        own = parts.attempt + parts.markers
        if request.act is Act.RETIRE and summary.state is State.RETIRED and not self._has_records(parts, summary, seen):
            own = ()  # only its ledger is left to retire
        candidate = Candidate(
            parts.rollout,
            summary.state,
            tally(own + ledger, rollouts=1, calls=summary.calls + summary.late),
            ledger=len(ledger),
            attempt=bool(own),
            archived=stored.archived,
            finishing=finishing,
        )
        problems = tuple(f"damaged: {damaged.problem}" for damaged in summary.damaged)
        if taken:
            return _Verdict(parts.rollout, summary.state, candidate, problems=problems)
        return _Verdict(parts.rollout, summary.state, stays=stays, problems=problems)

    def _of_retire(self, parts: Parts, summary: RolloutSummary, seen: Survey) -> tuple[bool, Stays | None, bool]:
        request, selection, stored = self._request, self._request.selection, parts.stored
        matches = request.everything or selection.takes(summary)
        if not stored.rows and not parts.ledger:
            return False, None, False  # markers without a rollout: nothing to retire
        if stored.archived:
            return False, Stays.ARCHIVED if matches else None, False
        if summary.state is not State.RETIRED:
            announced = _announced_retirement(stored, seen)
            if announced is not None:
                matches = request.everything or selection.takes(announced)
            if not matches:
                return False, None, False
            state = announced.state if announced is not None else summary.state
            if request.keep or request.names(parts.rollout, state):
                return True, None, announced is not None
            return False, Stays.PROTECTED, False
        if not self._has_records(parts, summary, seen):
            ledger_open = bool(parts.ledger) and request.ledger and not _ledger_retired(self._run.keys, parts)
            return matches and ledger_open, Stays.RETIRED if matches else None, ledger_open
        if request.keep:
            return False, Stays.KEPT if matches else None, False
        if decided_to_delete(stored):
            return True, None, True
        asked = parts.rollout in request.exact or State.RETIRED in selection.states
        return matches and asked, Stays.KEPT if matches else None, False

    def _of_delete(self, parts: Parts, summary: RolloutSummary, seen: Survey) -> tuple[bool, Stays | None, bool]:
        request, selection = self._request, self._request.selection
        if is_bare(seen) and not parts.ledger and not parts.stored.archived:
            # What a delete left that was cut short before its last key: announcements, or markers without a rollout.
            # Its state and calls are gone with the rest.
            anything = replace(selection, states=frozenset(), complete=None)
            return request.everything or anything.takes(summary), None, True
        if not (request.everything or selection.takes(summary)):
            return False, None, False
        if summary.state in UNDELIVERED and not request.names(parts.rollout, summary.state):
            return False, Stays.PROTECTED, False
        return True, None, False

    @staticmethod
    def _has_records(parts: Parts, summary: RolloutSummary, seen: Survey) -> bool:
        return bool(summary.calls or summary.late or seen.intents or seen.conflicts or seen.marks or parts.markers)


def is_bare(seen: Survey) -> bool:
    """Whether nothing but undecided announcements is left: no record, and no decision. Nothing is lost with those."""
    records = seen.intents or seen.outcomes or seen.conflicts or seen.marks
    return not records and not seen.foreign and not (seen.frozen or seen.retired or seen.drops)


def decided_to_delete(stored: StoredRollout) -> bool:
    """Whether an unconditional retirement decided that the records go (older ones do not say, and then it did not)."""
    return _field(stored.keys.retired, stored.get, "retired", "keep") is False


def _announced_retirement(stored: StoredRollout, seen: Survey) -> RolloutSummary | None:
    """The rollout as it stood before a retirement that was announced and not decided; None where there is none."""
    if seen.frozen or not seen.closing or _field(stored.keys.closing, stored.get, "closing", "why") != "retire":
        return None
    before = [row for row in stored.rows if row.key != stored.keys.closing]
    return summarize(stored.keys, before, stored.get)


def _field(key: str, get: Callable[[str], bytes | None], kind: str, name: str) -> object:
    body = get(key)
    if body is None:
        return None
    try:
        value = bodies.read(key, body, kind).value()
    except CorruptObjectError:
        return None  # a damaged decision decides nothing
    return value.get(name) if isinstance(value, dict) else None


def ledger_keeps(keys: RunKeys, rollout: str, get: Callable[[str], bytes | None]) -> bool:
    """Whether the rows of a retired ledger are kept, or may be: only a decision that they go says otherwise."""
    return _field(keys.ledger(rollout).retired, get, "ledger-retired", "keep") is not False


def _ledger_retired(keys: RunKeys, parts: Parts) -> bool:
    return ledger_bodies.survey(keys.ledger(parts.rollout), parts.ledger).retired


def _without_retirement(keys: RunKeys, rollout: str, ledger: Rows) -> Rows:
    """The rows of a ledger without what a retirement of it makes: its age must not change by a retire that died."""
    of = keys.ledger(rollout)
    return tuple(row for row in ledger if row.key not in (of.closing, of.retired))


def _of_ledger(keys: RunKeys, rollout: str, ledger: Rows) -> RolloutSummary:
    """A rollout of which there is only a ledger, in the same terms."""
    seen = ledger_bodies.survey(keys.ledger(rollout), ledger)
    states = ((Kind.LEDGER_RETIRED, State.RETIRED), (Kind.LEDGER_CLOSED, State.FROZEN))
    state = next((state for kind, state in states if kind in seen.fences), State.OPEN)
    empty: RolloutKeys = keys.rollout(rollout)
    return replace(summarize(empty, (), lambda _: None), state=state, calls=len(seen.outcomes))


def _later(one: float | None, other: float | None) -> float | None:
    return max((time for time in (one, other) if time is not None), default=None)
