"""How a shipped generator is seen through a bent glass: effects kept back, changed, or misheard.

The rule of this module: a bend touches effects and answers alone and knows no more of the protocol than which key is
what; no protocol code is copied, so a bent step stays broken in its one way however the protocol changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from s3capture.effects import (
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
from s3capture.keys import Kind, RolloutKeys, escape, parse
from s3capture.protocol import bodies
from s3capture.protocol.bodies import Outcome
from s3capture.protocol.freezing import FrozenRollout
from s3capture.protocol.survey import survey

_OUTCOMES = (bodies.ENTRY, bodies.REFUSAL, bodies.SEAL)


class Bend:
    """How one run of a generator is bent; made anew for each run, so it may remember."""

    def __init__(self, keys: RolloutKeys, *args: Any) -> None:
        self.keys = keys
        self.args = args

    def ask(self, effect: Effect) -> Effect | Answer:
        """What is sent instead of ``effect``; an answer means that nothing is sent."""
        return effect

    def hear(self, effect: Effect, answer: Answer) -> Answer:
        """What the generator hears instead of ``answer`` to the ``effect`` that it asked for."""
        del effect
        return answer

    def result(self, value: Any) -> Any:
        """What is returned instead of ``value``."""
        return value

    def is_of(self, effect: Effect, act: type[Create | Get], kind: Kind) -> bool:
        """Whether ``effect`` is this act on a key of this kind."""
        return isinstance(effect, (Create, Get)) and type(effect) is act and self.kind(effect.key) is kind

    def kind(self, key: str) -> Kind | None:
        """What ``key`` is."""
        parsed = parse(self.keys.of.root, key)
        return None if parsed is None else parsed.kind


def bent(steps: Steps[Any], bend: Bend) -> Steps[Any]:
    """Run ``steps`` behind ``bend``; a batch of which nothing is left to send is answered at once."""
    answers: tuple[Answer, ...] | None = None
    while True:
        try:
            batch: Batch = next(steps) if answers is None else steps.send(answers)
        except StopIteration as stop:
            return bend.result(stop.value)
        asked = tuple(bend.ask(effect) for effect in batch)
        sent = tuple(item for item in asked if isinstance(item, Effect))
        replies = iter((yield sent) if sent else ())
        answers = tuple(
            bend.hear(effect, next(replies)) if isinstance(item, Effect) else item
            for effect, item in zip(batch, asked, strict=True)
        )


def through(shipped: Callable[..., Steps[Any]], bend: Callable[..., Bend]) -> Callable[..., Steps[Any]]:
    """``shipped`` with a bend of its own for each run, which is given the positional arguments."""

    def broken(keys: RolloutKeys, *args: Any, **named: Any) -> Steps[Any]:
        return bent(shipped(keys, *args, **named), bend(keys, *args))

    return broken


def unsent(act: type[Create | Get], kind: Kind, answer: Answer) -> type[Bend]:
    """This act on keys of this kind is never sent, and answered so."""

    class Unsent(Bend):
        def ask(self, effect: Effect) -> Effect | Answer:
            return answer if self.is_of(effect, act, kind) else effect

    return Unsent


class NoFences(Bend):
    """The fences are not listed."""

    def ask(self, effect: Effect) -> Effect | Answer:
        return Listed(()) if effect == List(self.keys.fences) else effect


class OldSurvey(Bend):
    """The first survey is taken for every later one."""

    first: Answer | None = None

    def ask(self, effect: Effect) -> Effect | Answer:
        return self.first if effect == List(self.keys.base) and self.first is not None else effect

    def hear(self, effect: Effect, answer: Answer) -> Answer:
        if effect == List(self.keys.base):
            self.first = answer
        return answer


class Hiding(Bend):
    """Some rows of every LIST are not seen."""

    def hear(self, effect: Effect, answer: Answer) -> Answer:
        del effect
        if not isinstance(answer, Listed):
            return answer
        return Listed(tuple(row for row in answer.objects if not self.hides(row, answer.objects)))

    def hides(self, row: ObjectInfo, rows: tuple[ObjectInfo, ...]) -> bool:
        """Whether ``row`` of ``rows`` is not seen."""
        raise NotImplementedError


class NoIntents(Hiding):
    def hides(self, row: ObjectInfo, rows: tuple[ObjectInfo, ...]) -> bool:
        del rows
        return self.kind(row.key) is Kind.INTENT


class NoAnnouncedDrops(Hiding):
    def hides(self, row: ObjectInfo, rows: tuple[ObjectInfo, ...]) -> bool:
        del rows
        return self.kind(row.key) is Kind.RETIRING


class NoLateMarks(Hiding):
    """Marks are not seen once the freeze is decided."""

    def hides(self, row: ObjectInfo, rows: tuple[ObjectInfo, ...]) -> bool:
        return self.kind(row.key) is Kind.MARK and any(other.key == self.keys.frozen for other in rows)


class NoOtherDrops(Hiding):
    """Of drops at other versions, the decided (or only the undecided) ones are not seen; for ``drop``."""

    decided = True

    def hides(self, row: ObjectInfo, rows: tuple[ObjectInfo, ...]) -> bool:
        parsed = parse(self.keys.of.root, row.key)
        if parsed is None or parsed.kind not in (Kind.RETIRING, Kind.DROP):
            return False
        version = int(parsed.detail)
        return version != self.args[1] and (version in survey(self.keys, rows).drops) is self.decided


class NoUndecidedDrops(NoOtherDrops):
    decided = False


class AlwaysFirst(Bend):
    """A resent create that created is taken for a first attempt."""

    def hear(self, effect: Effect, answer: Answer) -> Answer:
        return Created() if self.is_of(effect, Create, Kind.CALL) and isinstance(answer, Created) else answer


def takes_for_its_own(*kinds: str) -> type[Bend]:
    """A standing outcome of these kinds is taken for the payload that is put."""

    class TakesForItsOwn(Bend):
        def hear(self, effect: Effect, answer: Answer) -> Answer:
            outcome: Outcome = self.args[0]
            if not (isinstance(effect, Get) and effect.key == self.keys.call(outcome.call)):
                return answer
            standing = isinstance(answer, Found) and bodies.read(effect.key, answer.body, *_OUTCOMES).kind in kinds
            return Found(outcome.body) if standing else answer

    return TakesForItsOwn


class CountsItself(Bend):
    """The put reads its own call into a decision that lacks it."""

    def hear(self, effect: Effect, answer: Answer) -> Answer:
        if not (isinstance(answer, Found) and self.is_of(effect, Get, Kind.FROZEN)):
            return answer
        return _with_outcomes(self.keys, answer, frozenset({escape(self.args[0].call)}))


class CountsLateOutcomes(Bend):
    """Whatever outcome is listed is read into the decision that stands."""

    listed: frozenset[str] = frozenset()

    def hear(self, effect: Effect, answer: Answer) -> Answer:
        if isinstance(answer, Listed):
            self.listed = frozenset(survey(self.keys, answer.objects).outcomes)
        if isinstance(answer, Found) and self.is_of(effect, Get, Kind.FROZEN):
            return _with_outcomes(self.keys, answer, self.listed)
        return answer


def _with_outcomes(keys: RolloutKeys, decision: Found, more: frozenset[str]) -> Found:
    manifest = bodies.read_manifest(keys, decision.body)
    return Found(bodies.frozen(keys, replace(manifest, outcomes=manifest.outcomes | more)))


class DoesNotAdopt(Bend):
    """A freezer that comes second believes that its decision stands."""

    def hear(self, effect: Effect, answer: Answer) -> Answer:
        return Created() if self.is_of(effect, Create, Kind.FROZEN) and isinstance(answer, Exists) else answer


class VersionOfTheDecision(Bend):
    """The version is counted from the decision alone."""

    def result(self, value: FrozenRollout) -> FrozenRollout:
        decided = value.manifest
        return replace(value, version=1 + len(decided.outcomes) + len(decided.conflicts) + len(decided.marks))


class DeletesSeals(Bend):
    """The sweep takes the seals as well."""

    def __init__(self, keys: RolloutKeys, *args: Any) -> None:
        super().__init__(keys, *args)
        self._seals: set[str] = set()

    def hear(self, effect: Effect, answer: Answer) -> Answer:
        if isinstance(effect, (Create, Get)) and self.kind(effect.key) is Kind.CALL:
            made = isinstance(answer, Created)
            read = isinstance(answer, Found) and bodies.read(effect.key, answer.body, *_OUTCOMES).kind == bodies.SEAL
            if made or read:
                self._seals.add(effect.key)
        return answer

    def ask(self, effect: Effect) -> Effect | Answer:
        return Delete((*effect.keys, *sorted(self._seals))) if isinstance(effect, Delete) else effect


class FencesFirst(Bend):
    """The first deletion takes the fences, the second one what the first should have taken."""

    def __init__(self, keys: RolloutKeys, *args: Any) -> None:
        super().__init__(keys, *args)
        self._fences: tuple[str, ...] = ()
        self._due: list[Delete] = []

    def hear(self, effect: Effect, answer: Answer) -> Answer:
        if effect == List(self.keys.base) and isinstance(answer, Listed):
            self._fences = tuple(row.key for row in answer.objects if row.key.startswith(self.keys.fences))
        return answer

    def ask(self, effect: Effect) -> Effect | Answer:
        if not isinstance(effect, Delete):
            return effect
        if self._fences:
            fences, self._fences = self._fences, ()
            self._due.append(effect)
            return Delete(fences)
        return self._due.pop() if self._due else Deleted()
