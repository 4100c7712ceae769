"""Deliberately broken variants of every protocol step, which the explorer must catch.

The rule of this module: a variant is the *shipped* generator seen through a bent glass. A ``Bend`` keeps an effect
from being sent, sends another one, or changes what the generator hears; no protocol code is copied, so a variant
stays broken in its one way however the protocol changes. If the explorer finds no fault with a variant, then either
the step is not needed or the scenarios are blind to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
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
from s3capture.keys import Kind, RolloutKeys, parse
from s3capture.protocol import bodies
from s3capture.protocol.bodies import Outcome
from s3capture.protocol.freezing import FrozenRollout
from s3capture.protocol.survey import survey
from s3capture.testing.scenarios import SHIPPED, Protocol


@dataclass(frozen=True, slots=True)
class Broken:
    """One broken variant.

    ``broken`` says in one sentence what is wrong. ``caught_by`` names the scenarios that catch it, the quickest
    first; when it is empty, ``unseen`` says why no promise depends on the step.
    """

    name: str
    broken: str
    protocol: Protocol
    caught_by: tuple[str, ...]
    unseen: str = ""


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


def _bent(steps: Steps[Any], bend: Bend) -> Steps[Any]:
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


def _through(shipped: Callable[..., Steps[Any]], bend: Callable[..., Bend]) -> Callable[..., Steps[Any]]:
    def broken(keys: RolloutKeys, *args: Any, **named: Any) -> Steps[Any]:
        return _bent(shipped(keys, *args, **named), bend(keys, *args))

    return broken


# -- bends --------------------------------------------------------------------------------------------------


def _unsent(act: type[Create | Get], kind: Kind, answer: Answer) -> type[Bend]:
    """This act on keys of this kind is never sent, and answered so."""

    class Unsent(Bend):
        def ask(self, effect: Effect) -> Effect | Answer:
            return answer if self.is_of(effect, act, kind) else effect

    return Unsent


class _NoFences(Bend):
    """The fences are not listed."""

    def ask(self, effect: Effect) -> Effect | Answer:
        return Listed(()) if effect == List(self.keys.fences) else effect


class _OldSurvey(Bend):
    """The first survey is taken for every later one."""

    first: Answer | None = None

    def ask(self, effect: Effect) -> Effect | Answer:
        return self.first if effect == List(self.keys.base) and self.first is not None else effect

    def hear(self, effect: Effect, answer: Answer) -> Answer:
        if effect == List(self.keys.base):
            self.first = answer
        return answer


class _Hiding(Bend):
    """Some rows of every LIST are not seen."""

    def hear(self, effect: Effect, answer: Answer) -> Answer:
        del effect
        if not isinstance(answer, Listed):
            return answer
        return Listed(tuple(row for row in answer.objects if not self.hides(row, answer.objects)))

    def hides(self, row: ObjectInfo, rows: tuple[ObjectInfo, ...]) -> bool:
        """Whether ``row`` of ``rows`` is not seen."""
        raise NotImplementedError


class _NoIntents(_Hiding):
    def hides(self, row: ObjectInfo, rows: tuple[ObjectInfo, ...]) -> bool:
        del rows
        return self.kind(row.key) is Kind.INTENT


class _NoAnnouncedDrops(_Hiding):
    def hides(self, row: ObjectInfo, rows: tuple[ObjectInfo, ...]) -> bool:
        del rows
        return self.kind(row.key) is Kind.RETIRING


class _NoLateMarks(_Hiding):
    """Marks are not seen once the freeze is decided."""

    def hides(self, row: ObjectInfo, rows: tuple[ObjectInfo, ...]) -> bool:
        return self.kind(row.key) is Kind.MARK and any(other.key == self.keys.frozen for other in rows)


class _NoOtherDrops(_Hiding):
    """Of drops at other versions, the decided (or only the undecided) ones are not seen; for ``drop``."""

    decided = True

    def hides(self, row: ObjectInfo, rows: tuple[ObjectInfo, ...]) -> bool:
        parsed = parse(self.keys.of.root, row.key)
        if parsed is None or parsed.kind not in (Kind.RETIRING, Kind.DROP):
            return False
        version = int(parsed.detail)
        return version != self.args[1] and (version in survey(self.keys, rows).drops) is self.decided


class _NoUndecidedDrops(_NoOtherDrops):
    decided = False


class _AlwaysFirst(Bend):
    """A resent create that created is taken for a first attempt."""

    def hear(self, effect: Effect, answer: Answer) -> Answer:
        return Created() if self.is_of(effect, Create, Kind.CALL) and isinstance(answer, Created) else answer


def _takes_for_its_own(*kinds: str) -> type[Bend]:
    """A standing outcome of these kinds is taken for the payload that is put."""

    class TakesForItsOwn(Bend):
        def hear(self, effect: Effect, answer: Answer) -> Answer:
            outcome: Outcome = self.args[0]
            if not (isinstance(effect, Get) and effect.key == self.keys.call(outcome.call)):
                return answer
            standing = isinstance(answer, Found) and bodies.read(effect.key, answer.body, *_OUTCOMES).kind in kinds
            return Found(outcome.body) if standing else answer

    return TakesForItsOwn


_OUTCOMES = (bodies.ENTRY, bodies.REFUSAL, bodies.SEAL)


class _CountsItself(Bend):
    """The put reads its own call into a decision that lacks it."""

    def hear(self, effect: Effect, answer: Answer) -> Answer:
        if not (isinstance(answer, Found) and self.is_of(effect, Get, Kind.FROZEN)):
            return answer
        return _with_outcomes(self.keys, answer, frozenset({self.keys.call(self.args[0].call).rsplit("/", 1)[1]}))


class _CountsLateOutcomes(Bend):
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


class _DoesNotAdopt(Bend):
    """A freezer that comes second believes that its decision stands."""

    def hear(self, effect: Effect, answer: Answer) -> Answer:
        return Created() if self.is_of(effect, Create, Kind.FROZEN) and isinstance(answer, Exists) else answer


class _VersionOfTheDecision(Bend):
    """The version is counted from the decision alone."""

    def result(self, value: FrozenRollout) -> FrozenRollout:
        decided = value.manifest
        return replace(value, version=1 + len(decided.outcomes) + len(decided.conflicts) + len(decided.marks))


class _DeletesSeals(Bend):
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


class _FencesFirst(Bend):
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


# -- variants that no bend of single effects can express ----------------------------------------------------


def _looks_before_it_creates(keys: RolloutKeys, *args: Any) -> Steps[bool]:
    steps = SHIPPED.begin_call(keys, *args)
    create = next(steps)
    looked = yield (Get(keys.closing),)
    made = yield create
    steps.send(made)  # it asks for the announcement now, and is told what was seen before
    while True:
        try:
            batch = steps.send(looked)
        except StopIteration as stop:
            return bool(stop.value)
        looked = yield batch


def _owned(when: Callable[[Outcome], bool]) -> Callable[..., Steps[None]]:
    """Puts that claim the one-trip privilege whatever they are told."""

    def broken(keys: RolloutKeys, outcome: Outcome, origin: bodies.Origin, *, owned: bool) -> Steps[None]:
        return SHIPPED.put_outcome(keys, outcome, origin, owned=owned or when(outcome))

    return broken


def _of(name: str, broken: str, *caught_by: str, bend: Callable[..., Bend], unseen: str = "") -> Broken:
    """A variant whose name begins with the step that it bends."""
    step = {"begin": "begin_call", "put": "put_outcome", "mark": "mark_incomplete"}.get(
        name.split()[0], name.split()[0]
    )
    bent = _through(getattr(SHIPPED, step), bend)
    return Broken(name, broken, replace(SHIPPED, **{step: bent}), caught_by, unseen)


VARIANTS: tuple[Broken, ...] = (
    _of(
        "begin does not look",
        "begin_call does not look for the announcement.",
        "begin meets freeze",
        bend=_unsent(Get, Kind.CLOSING, Absent()),
    ),
    Broken(
        "begin looks first",
        "begin_call looks for the announcement before it creates the intent.",
        replace(SHIPPED, begin_call=_looks_before_it_creates),
        ("begin meets freeze",),
    ),
    _of(
        "put does not look",
        "A put of a call that was not begun here does not look for the announcement.",
        "late refusal",
        bend=_unsent(Get, Kind.CLOSING, Absent()),
    ),
    _of(
        "put counts itself in",
        "A put behind a decision acknowledges although the decision lacks its call.",
        "late refusal",
        bend=_CountsItself,
    ),
    _of(
        "put trusts a resent create",
        "A put keeps its one-trip privilege when its create was sent twice.",
        bend=_AlwaysFirst,
    ),
    Broken(
        "put is owned again",
        "A second put of a begun call keeps the one-trip privilege of the first.",
        replace(SHIPPED, put_outcome=_owned(lambda outcome: outcome.kind == bodies.ENTRY)),
        ("begun put is put again",),
    ),
    _of(
        "put takes any entry for its own",
        "A put takes any entry that stands for its own payload.",
        "conflicting puts meet freeze",
        bend=_takes_for_its_own(bodies.ENTRY),
    ),
    _of(
        "put takes a refusal for its own",
        "A put takes a refusal that stands for its own payload.",
        "refusal meets put",
        bend=_takes_for_its_own(bodies.REFUSAL),
    ),
    _of(
        "put takes a seal for its own",
        "A put takes a seal for its own payload.",
        "begun put meets freeze",
        bend=_takes_for_its_own(bodies.SEAL),
    ),
    _of(
        "put leaves no evidence",
        "A put that lost to another payload does not record the conflict.",
        "conflicting puts",
        bend=_unsent(Create, Kind.CONFLICT, Created()),
    ),
    _of(
        "put leaves the candidate",
        "A put that lost does not take the call out of the lineage candidates.",
        "conflicting puts that live",
        bend=_unsent(Create, Kind.LINEAGE_CONFLICT, Created()),
    ),
    Broken(
        "put of a refusal is owned",
        "A refusal takes the one-trip privilege, though its call was not begun here.",
        replace(SHIPPED, put_outcome=_owned(lambda outcome: outcome.kind == bodies.REFUSAL)),
        ("late refusal",),
    ),
    _of(
        "freeze does not announce",
        "A freeze decides without the announcement.",
        "begin meets freeze",
        bend=_unsent(Create, Kind.CLOSING, Created()),
    ),
    _of(
        "freeze uses an old survey",
        "A freeze decides on the survey that it made before the announcement.",
        "late refusal",
        bend=_OldSurvey,
    ),
    _of(
        "freeze writes no seals",
        "A freeze counts open calls as sealed and writes no seals.",
        "begin meets freeze",
        bend=_unsent(Create, Kind.CALL, Created()),
    ),
    _of("freeze overlooks intents", "A freeze does not see begun calls.", "begin meets freeze", bend=_NoIntents),
    _of(
        "freeze does not adopt",
        "A freezer that lost returns its own manifest.",
        "put meets two freezers",
        bend=_DoesNotAdopt,
    ),
    _of(
        "freeze counts late outcomes",
        "A freeze counts outcomes that landed behind the decision.",
        "late refusal",
        bend=_CountsLateOutcomes,
    ),
    _of(
        "freeze overlooks late marks",
        "A freeze does not see marks that landed behind the decision.",
        "two drops and a mark",
        bend=_NoLateMarks,
    ),
    _of(
        "freeze keeps the version",
        "Marks and conflicts behind the decision do not raise the version.",
        "two drops and a mark",
        bend=_VersionOfTheDecision,
    ),
    _of("mark does not look", "A mark does not look at the fences.", "mark meets freeze and drop", bend=_NoFences),
    _of(
        "mark leaves drops open",
        "A mark does not finish a drop that was announced and not decided.",
        "mark meets freeze and drop",
        bend=_NoAnnouncedDrops,
    ),
    _of(
        "drop does not announce",
        "A drop decides without its announcement.",
        "two drops of one snapshot",
        bend=_unsent(Create, Kind.RETIRING, Created()),
    ),
    _of(
        "drop uses an old survey",
        "A drop decides on the survey that it made before its announcement.",
        "mark meets freeze and drop",
        bend=_OldSurvey,
    ),
    _of(
        "drop overlooks drops",
        "A drop counts the version from what another drop, which it does not see, has left.",
        "two drops and a mark",
        bend=_NoOtherDrops,
    ),
    _of(
        "drop overlooks open drops",
        "A drop does not finish an earlier one that was announced and not decided.",
        "two drops and a mark",
        bend=_NoUndecidedDrops,
    ),
    _of(
        "drop deletes seals", "A drop deletes the seals with the records.", "begun put meets freeze", bend=_DeletesSeals
    ),
    _of(
        "retire leaves no fence",
        "A retire announces and does not create the fence 'retired'.",
        "retire meets a begun put",
        bend=_unsent(Create, Kind.RETIRED, Created()),
    ),
    _of(
        "retire writes no seals",
        "A retire does not seal the open calls.",
        "retire meets a begun put",
        bend=_unsent(Create, Kind.CALL, Created()),
    ),
    _of(
        "retire deletes seals",
        "A retire deletes the seals that it made.",
        "retire meets a begun put",
        bend=_DeletesSeals,
    ),
    _of(
        "delete takes fences first",
        "A delete removes the fences before the records.",
        "delete dies on the way",
        bend=_FencesFirst,
    ),
)
