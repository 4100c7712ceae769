"""Run the shipped protocol generators through every interleaving, crash and lost reply.

The rule of this module: it knows nothing of the protocol. Actors run *operations* (protocol generators); each
effect of a pending batch is one atomic step on a store in memory, in any order. On top of that, within budgets,
an actor may die at any moment (what it had sent may still land later, or never), and a reply may be lost: the
driver then sends the effect again while the first copy may land at any later moment, once, or never.
A LIST may be split into pages between which others write, and a Delete into parts, as on a real store.

Breadth first with memoized states: two schedules that lead to the same bucket and the same knowledge in every
actor have one future. So the first violation found is one with a shortest schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

from s3capture.effects import (
    Absent,
    Answer,
    Batch,
    Create,
    Created,
    Delete,
    Deleted,
    Effect,
    Exists,
    Found,
    Get,
    List,
    Listed,
    ObjectInfo,
    Steps,
)


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of an actor.

    ``start`` gets the summaries of the actor's earlier operations and returns the generator to run, or None to
    skip. ``summary`` turns what it returned into something hashable; an exception becomes ``Raised``.
    """

    name: str
    start: Callable[[tuple[Hashable, ...]], Steps[Any] | None]
    summary: Callable[[Any], Hashable] = lambda result: result


@dataclass(frozen=True, slots=True)
class Actor:
    """A process that runs its operations one after the other."""

    name: str
    ops: tuple[Op, ...]


@dataclass(frozen=True, slots=True)
class Raised:
    """An operation ended with this error."""

    kind: type[Exception]
    text: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class Outcome:
    """One finished operation, in an execution.

    ``before`` holds the ``(actor, op)`` that had finished when this one started: real time, as far as any
    observer could tell.
    """

    actor: str
    op: str
    result: Hashable
    before: frozenset[tuple[str, str]]

    @property
    def acked(self) -> bool:
        """Whether it returned normally (and was not skipped)."""
        return not isinstance(self.result, Raised) and self.result != SKIPPED

    def raised(self, kind: type[Exception]) -> bool:
        """Whether it ended with this error or a kind of it."""
        return isinstance(self.result, Raised) and issubclass(self.result.kind, kind)


SKIPPED = "skipped"

_PAGE_EDGES = ("f", "g")
"""Where pages of a LIST end below its prefix: before the fences, and behind them."""


@dataclass(frozen=True, slots=True)
class End:
    """One end state: what each operation returned, and the bucket. Crashed operations are not in it."""

    outcomes: tuple[Outcome, ...]
    bucket: dict[str, bytes]

    def of(self, op: str) -> list[Outcome]:
        """The finished operations whose name is ``op`` or starts with ``op:``."""
        return [o for o in self.outcomes if o.op == op or o.op.startswith(op + ":")]


Invariant = Callable[[End], Iterator[str]]


@dataclass(frozen=True, slots=True)
class Scenario:
    """Actors, what must hold at every end, and how much may go wrong."""

    name: str
    actors: tuple[Actor, ...]
    invariants: tuple[Invariant, ...]
    crashes: int = 1
    losses: int = 1
    list_pages: int = 1
    setup: dict[str, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Violation:
    """A broken promise and a shortest schedule that breaks it."""

    invariant: str
    message: str
    schedule: tuple[str, ...]

    def __str__(self) -> str:
        steps = "\n".join(f"  {number:2}. {step}" for number, step in enumerate(self.schedule, 1))
        return f"{self.invariant}: {self.message}\n{steps}"


@dataclass(frozen=True, slots=True)
class Report:
    """What was covered. ``executions`` counts distinct schedules, ``states`` the memoized states."""

    scenario: str
    executions: int
    states: int
    ends: int
    violation: Violation | None = None

    def __str__(self) -> str:
        verdict = "holds" if self.violation is None else f"VIOLATED\n{self.violation}"
        return f"{self.scenario}: {self.executions:,} executions, {self.states:,} states, {self.ends:,} ends: {verdict}"


@dataclass(frozen=True, slots=True)
class _Pending:
    """An effect of the pending batch: not begun, in the middle (pages, parts), or answered."""

    answer: Answer | None = None
    progress: int = 0
    passed: str = ""
    rows: tuple[ObjectInfo, ...] = ()
    resent: bool = False


@dataclass(frozen=True, slots=True)
class _Actor:
    """An actor's whole knowledge: its finished operations and the answers of the one it is in."""

    results: tuple[tuple[Hashable, frozenset[tuple[str, str]]], ...] = ()
    before: frozenset[tuple[str, str]] = frozenset()
    answers: tuple[tuple[Answer, ...], ...] = ()
    pending: tuple[_Pending, ...] = ()
    alive: bool = True


@dataclass(frozen=True, slots=True)
class _State:
    bucket: frozenset[tuple[str, bytes]]
    actors: tuple[int, ...]  # interned: hashing an actor's whole knowledge at each step would be most of the work
    zombies: tuple[Effect, ...]
    crashes: int
    losses: int


@dataclass(frozen=True, slots=True)
class _Done:
    """The end of an operation."""

    summary: Hashable


class _Explorer:
    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._played: dict[Hashable, Batch | _Done] = {}
        self._actors: list[_Actor] = []
        self._numbers: dict[_Actor, int] = {}

    def _intern(self, actor: _Actor) -> int:
        number = self._numbers.get(actor)
        if number is None:
            number = self._numbers[actor] = len(self._actors)
            self._actors.append(actor)
        return number

    def _with(self, state: _State, number: int, actor: _Actor) -> tuple[int, ...]:
        return (*state.actors[:number], self._intern(actor), *state.actors[number + 1 :])

    # -- one operation, replayed up to where its answers lead ---------------------------------------------

    def _play(self, number: int, actor: _Actor) -> Batch | _Done:
        results = tuple(result for result, _ in actor.results)
        key = (number, results, actor.answers)
        if key not in self._played:
            self._played[key] = _replay(self._scenario.actors[number].ops[len(results)], results, actor.answers)
        return self._played[key]

    def _advance(self, number: int, actor: _Actor, finished: frozenset[tuple[str, str]]) -> _Actor:
        """Run the actor up to its next batch, through operations that end without one."""
        spec = self._scenario.actors[number]
        while len(actor.results) < len(spec.ops):
            played = self._play(number, actor)
            if not isinstance(played, _Done):
                return replace(actor, pending=tuple(_Pending() for _ in played))
            op = spec.ops[len(actor.results)]
            before = actor.before if actor.answers else finished
            actor = _Actor(results=(*actor.results, (played.summary, before)))
            finished |= {(spec.name, op.name)}
        return actor

    def _finished(self, state: _State) -> frozenset[tuple[str, str]]:
        return frozenset(
            (spec.name, op.name)
            for spec, number in zip(self._scenario.actors, state.actors, strict=True)
            for op, _ in zip(spec.ops, self._actors[number].results, strict=False)
        )

    def _begun(self, state: _State, actor: _Actor) -> _Actor:
        """The actor at the moment of an effect: an operation starts with its first one, and not before."""
        if actor.answers or any(item != _Pending() for item in actor.pending):
            return actor
        return replace(actor, before=self._finished(state))

    # -- states and their successors ----------------------------------------------------------------------

    def initial(self) -> _State:
        numbers = range(len(self._scenario.actors))
        actors = tuple(self._intern(self._advance(number, _Actor(), frozenset())) for number in numbers)
        bucket = frozenset(self._scenario.setup.items())
        return _State(bucket, actors, (), self._scenario.crashes, self._scenario.losses)

    def successors(self, state: _State) -> Iterator[tuple[str, _State]]:
        bucket = dict(state.bucket)
        for number, interned in enumerate(state.actors):
            actor = self._actors[interned]
            if not (actor.alive and actor.pending):
                continue
            spec = self._scenario.actors[number]
            op = spec.ops[len(actor.results)].name
            batch = self._play(number, actor)
            assert not isinstance(batch, _Done)
            for index, effect in enumerate(batch):
                if actor.pending[index].answer is not None:
                    continue
                yield self._step(state, bucket, number, index, effect)
                if state.losses and not actor.pending[index].resent and not actor.pending[index].progress:
                    yield self._lose(state, number, index, effect, f"{spec.name} {op}")
            if state.crashes:
                yield self._crash(state, number, batch, f"{spec.name} {op}")
        for index, zombie in enumerate(state.zombies):
            after, _ = _apply(bucket, zombie, resent=False)
            rest = state.zombies[:index] + state.zombies[index + 1 :]
            yield (
                f"a copy of {_text(zombie)} lands late",
                replace(state, bucket=frozenset(after.items()), zombies=rest),
            )

    def _step(
        self, state: _State, bucket: dict[str, bytes], number: int, index: int, effect: Effect
    ) -> tuple[str, _State]:
        actor, spec = self._begun(state, self._actors[state.actors[number]]), self._scenario.actors[number]
        done, before = len(actor.results), actor.pending[index]
        after, now = self._perform(bucket, effect, before)
        op = spec.ops[done].name
        label = f"{spec.name} {op}: {_text(effect)} -> {_text(now.answer) if now.answer else 'first part'}"
        pending = (*actor.pending[:index], now, *actor.pending[index + 1 :])
        if all(item.answer is not None for item in pending):
            answers = tuple(item.answer for item in pending if item.answer is not None)
            actor = replace(actor, answers=(*actor.answers, answers), pending=())
            actor = self._advance(number, actor, self._finished(state))
            if len(actor.results) > done:
                label += f"   => {_text(actor.results[done][0])}"
        else:
            actor = replace(actor, pending=pending)
        changed = state.bucket if after is bucket else frozenset(after.items())
        return label, replace(state, bucket=changed, actors=self._with(state, number, actor))

    def _perform(self, bucket: dict[str, bytes], effect: Effect, before: _Pending) -> tuple[dict[str, bytes], _Pending]:
        if isinstance(effect, List) and before.progress < self._scenario.list_pages - 1:
            # Real stores list in key order: what a page has passed is not looked at again.
            edge = effect.prefix + _PAGE_EDGES[before.progress]
            page = tuple(row for row in _rows(bucket, effect.prefix) if before.passed <= row.key < edge)
            return bucket, replace(before, progress=before.progress + 1, passed=edge, rows=(*before.rows, *page))
        if isinstance(effect, List) and before.progress:
            last = tuple(row for row in _rows(bucket, effect.prefix) if row.key >= before.passed)
            return bucket, replace(before, answer=Listed((*before.rows, *last)))
        if isinstance(effect, Delete) and len(effect.keys) > 1:
            half = len(effect.keys) // 2
            part = effect.keys[:half] if not before.progress else effect.keys[half:]
            after = {key: body for key, body in bucket.items() if key not in part}
            return after, replace(before, progress=1, answer=Deleted() if before.progress else None)
        after, answer = _apply(bucket, effect, resent=before.resent)
        return after, replace(before, answer=answer)

    def _lose(self, state: _State, number: int, index: int, effect: Effect, who: str) -> tuple[str, _State]:
        actor = self._begun(state, self._actors[state.actors[number]])
        again = replace(actor.pending[index], resent=True)
        pending = (*actor.pending[:index], again, *actor.pending[index + 1 :])
        actors = self._with(state, number, replace(actor, pending=pending))
        zombies = state.zombies if isinstance(effect, (Get, List)) else _sorted((*state.zombies, effect))
        return (
            f"{who}: no reply to {_text(effect)}; it is sent again",
            replace(state, actors=actors, zombies=zombies, losses=state.losses - 1),
        )

    def _crash(self, state: _State, number: int, batch: Batch, who: str) -> tuple[str, _State]:
        actor = self._actors[state.actors[number]]
        sent = [
            effect
            for effect, item in zip(batch, actor.pending, strict=True)
            if item.answer is None and not isinstance(effect, (Get, List))
        ]
        actors = self._with(state, number, _Actor(results=actor.results, alive=False))
        zombies = _sorted((*state.zombies, *sent))
        return f"{who}: dies", replace(state, actors=actors, zombies=zombies, crashes=state.crashes - 1)

    # -- ends ---------------------------------------------------------------------------------------------

    def end(self, state: _State) -> End | None:
        actors = [self._actors[number] for number in state.actors]
        if any(actor.alive and actor.pending for actor in actors):
            return None
        outcomes = tuple(
            Outcome(spec.name, op.name, result, before)
            for spec, actor in zip(self._scenario.actors, actors, strict=True)
            for op, (result, before) in zip(spec.ops, actor.results, strict=False)
        )
        return End(outcomes, dict(state.bucket))


def explore(scenario: Scenario, *, max_states: int = 5_000_000) -> Report:
    """Run every schedule of ``scenario`` and check its invariants at every end.

    Stops at the first violation, which has a shortest schedule. Raise ``RuntimeError`` when more than
    ``max_states`` states were met: such a scenario proves nothing in the time a test has.
    """
    explorer = _Explorer(scenario)
    layer: dict[_State, int] = {explorer.initial(): 1}
    parents: dict[_State, tuple[_State, str] | None] = dict.fromkeys(layer)
    executions = ends = 0
    checked: set[tuple[tuple[Outcome, ...], frozenset[tuple[str, bytes]]]] = set()
    while layer:
        following: dict[_State, int] = {}
        for state, paths in layer.items():
            end = explorer.end(state)
            if end is not None:
                executions += paths
                fingerprint = (end.outcomes, state.bucket)
                if fingerprint not in checked:
                    checked.add(fingerprint)
                    ends += 1
                    violation = _check(scenario, end, state, parents)
                    if violation is not None:
                        return Report(scenario.name, executions, len(parents), ends, violation)
            for label, after in explorer.successors(state):
                if after in following:
                    following[after] += paths
                else:
                    following[after] = paths
                    parents.setdefault(after, (state, label))
        if len(parents) > max_states:
            raise RuntimeError(f"{scenario.name}: more than {max_states:,} states; make the scenario smaller")
        layer = following
    return Report(scenario.name, executions, len(parents), ends)


def _check(
    scenario: Scenario, end: End, state: _State, parents: dict[_State, tuple[_State, str] | None]
) -> Violation | None:
    for invariant in scenario.invariants:
        for message in invariant(end):
            schedule: list[str] = []
            link = parents[state]
            while link is not None:
                schedule.append(link[1])
                link = parents[link[0]]
            return Violation(invariant.__name__, message, tuple(reversed(schedule)))
    return None


def run_alone(steps: Steps[Any], bucket: dict[str, bytes]) -> Any:
    """Run one generator to its end on ``bucket`` (which it changes), with nobody else there."""
    answers: tuple[Answer, ...] | None = None
    for _ in count():
        try:
            batch = next(steps) if answers is None else steps.send(answers)
        except StopIteration as stop:
            return stop.value
        collected: list[Answer] = []
        for effect in batch:
            after, answer = _apply(bucket, effect, resent=False)
            if after is not bucket:
                bucket.clear()
                bucket.update(after)
            collected.append(answer)
        answers = tuple(collected)
    raise AssertionError("unreachable")


def _replay(op: Op, results: tuple[Hashable, ...], answers: tuple[tuple[Answer, ...], ...]) -> Batch | _Done:
    steps = op.start(results)
    if steps is None:
        return _Done(SKIPPED)
    try:
        batch = next(steps)
        for answer in answers:
            batch = steps.send(answer)
    except StopIteration as stop:
        return _Done(op.summary(stop.value))
    except Exception as error:  # noqa: BLE001 - whatever a protocol raises is the outcome under test
        return _Done(Raised(type(error), str(error)))
    finally:
        steps.close()
    return batch


def _rows(bucket: dict[str, bytes], prefix: str) -> tuple[ObjectInfo, ...]:
    return tuple(ObjectInfo(key, len(body)) for key, body in sorted(bucket.items()) if key.startswith(prefix))


def _apply(bucket: dict[str, bytes], effect: Effect, *, resent: bool) -> tuple[dict[str, bytes], Answer]:
    """Perform one effect; returns the same dict when nothing changed."""
    match effect:
        case Create(key, body):
            if key in bucket:
                return bucket, Exists()
            return {**bucket, key: body}, Created(first_attempt=not resent)
        case Get(key):
            return bucket, Found(bucket[key]) if key in bucket else Absent()
        case List(prefix):
            return bucket, Listed(_rows(bucket, prefix))
        case Delete(keys):
            return {key: body for key, body in bucket.items() if key not in keys}, Deleted()


def _sorted(effects: tuple[Effect, ...]) -> tuple[Effect, ...]:
    return tuple(sorted(effects, key=repr))


def _text(thing: object) -> str:
    """One short phrase for an effect, an answer or a result."""
    match thing:
        case Create(key) | Get(key):
            return f"{type(thing).__name__.lower()} {_short(key)}"
        case List(prefix):
            return f"list {_short(prefix)}"
        case Delete(keys):
            return f"delete {', '.join(map(_short, keys))}"
        case Found():
            return "found"
        case Listed(objects):
            return f"[{', '.join(_short(row.key) for row in objects)}]"
        case Raised(kind):
            return kind.__name__
        case Created() | Exists() | Absent() | Deleted():
            return type(thing).__name__.lower()
    return str(thing)


def _short(key: str) -> str:
    return "/".join(key.rstrip("/").split("/")[-2:])
