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

from s3capture.effects import Absent, Create, Created, Get, Steps
from s3capture.keys import Kind, RolloutKeys
from s3capture.protocol import bodies
from s3capture.protocol.bodies import Outcome
from s3capture.testing import bends
from s3capture.testing.bends import Bend
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


def _of(name: str, step: str, broken: str, *caught_by: str, bend: Callable[..., Bend], unseen: str = "") -> Broken:
    bent = bends.through(getattr(SHIPPED, step), bend)
    return Broken(name, broken, replace(SHIPPED, **{step: bent}), caught_by, unseen)


VARIANTS: tuple[Broken, ...] = (
    _of(
        "begin does not look",
        "begin_call",
        "begin_call does not look for the announcement.",
        "begin meets freeze",
        bend=bends.unsent(Get, Kind.CLOSING, Absent()),
    ),
    Broken(
        "begin looks first",
        "begin_call looks for the announcement before it creates the intent.",
        replace(SHIPPED, begin_call=_looks_before_it_creates),
        ("begin meets freeze",),
    ),
    _of(
        "put does not look",
        "put_outcome",
        "A put of a call that was not begun here does not look for the announcement.",
        "late refusal",
        bend=bends.unsent(Get, Kind.CLOSING, Absent()),
    ),
    _of(
        "put counts itself in",
        "put_outcome",
        "A put behind a decision acknowledges although the decision lacks its call.",
        "late refusal",
        bend=bends.CountsItself,
    ),
    _of(
        "put trusts a resent create",
        "put_outcome",
        "A put keeps its one-trip privilege when its create was sent twice.",
        bend=bends.AlwaysFirst,
        unseen="The first copy either created the outcome, which every later decision then holds, or met one that "
        "stood. Only where another process put another payload first do the two differ, and there a first attempt "
        "that is slow has the same fault: the known limit of docs/protocol.md. The step narrows that limit.",
    ),
    Broken(
        "put is owned again",
        "A second put of a begun call keeps the one-trip privilege of the first.",
        replace(SHIPPED, put_outcome=_owned(lambda outcome: outcome.kind == bodies.ENTRY)),
        ("begun put is put again",),
    ),
    _of(
        "put takes any entry for its own",
        "put_outcome",
        "A put takes any entry that stands for its own payload.",
        "conflicting puts meet freeze",
        bend=bends.takes_for_its_own(bodies.ENTRY),
    ),
    _of(
        "put takes a refusal for its own",
        "put_outcome",
        "A put takes a refusal that stands for its own payload.",
        "refusal meets put",
        bend=bends.takes_for_its_own(bodies.REFUSAL),
    ),
    _of(
        "put takes a seal for its own",
        "put_outcome",
        "A put takes a seal for its own payload.",
        "begun put meets freeze",
        bend=bends.takes_for_its_own(bodies.SEAL),
    ),
    _of(
        "put leaves no evidence",
        "put_outcome",
        "A put that lost to another payload does not record the conflict.",
        "conflicting puts",
        bend=bends.unsent(Create, Kind.CONFLICT, Created()),
    ),
    _of(
        "put leaves the candidate",
        "put_outcome",
        "A put that lost does not take the call out of the lineage candidates.",
        "conflicting puts that live",
        bend=bends.unsent(Create, Kind.LINEAGE_CONFLICT, Created()),
    ),
    Broken(
        "put of a refusal is owned",
        "A refusal takes the one-trip privilege, though its call was not begun here.",
        replace(SHIPPED, put_outcome=_owned(lambda outcome: outcome.kind == bodies.REFUSAL)),
        ("late refusal",),
    ),
    _of(
        "freeze does not announce",
        "freeze",
        "A freeze decides without the announcement.",
        "begin meets freeze",
        bend=bends.unsent(Create, Kind.CLOSING, Created()),
    ),
    _of(
        "freeze uses an old survey",
        "freeze",
        "A freeze decides on the survey that it made before the announcement.",
        "late refusal",
        bend=bends.OldSurvey,
    ),
    _of(
        "freeze writes no seals",
        "freeze",
        "A freeze counts open calls as sealed and writes no seals.",
        "begin meets freeze",
        bend=bends.unsent(Create, Kind.CALL, Created()),
    ),
    _of(
        "freeze overlooks intents",
        "freeze",
        "A freeze does not see begun calls.",
        "begin meets freeze",
        bend=bends.NoIntents,
    ),
    _of(
        "freeze does not adopt",
        "freeze",
        "A freezer that lost returns its own manifest.",
        "put meets two freezers",
        bend=bends.DoesNotAdopt,
    ),
    _of(
        "freeze counts late outcomes",
        "freeze",
        "A freeze counts outcomes that landed behind the decision.",
        "late refusal",
        bend=bends.CountsLateOutcomes,
    ),
    _of(
        "freeze overlooks late marks",
        "freeze",
        "A freeze does not see marks that landed behind the decision.",
        "two drops and a mark",
        bend=bends.NoLateMarks,
    ),
    _of(
        "freeze keeps the version",
        "freeze",
        "Marks and conflicts behind the decision do not raise the version.",
        "two drops and a mark",
        bend=bends.VersionOfTheDecision,
    ),
    _of(
        "mark does not look",
        "mark_incomplete",
        "A mark does not look at the fences.",
        "mark meets freeze and drop",
        bend=bends.NoFences,
    ),
    _of(
        "mark leaves drops open",
        "mark_incomplete",
        "A mark does not finish a drop that was announced and not decided.",
        "mark meets freeze and drop",
        bend=bends.NoAnnouncedDrops,
    ),
    _of(
        "drop does not announce",
        "drop",
        "A drop decides without its announcement.",
        "mark meets freeze and drop",
        bend=bends.unsent(Create, Kind.RETIRING, Created()),
    ),
    _of(
        "drop uses an old survey",
        "drop",
        "A drop decides on the survey that it made before its announcement.",
        "mark meets freeze and drop",
        bend=bends.OldSurvey,
    ),
    _of(
        "drop overlooks drops",
        "drop",
        "A drop counts the version from what another drop, which it does not see, has left.",
        "two drops and a mark",
        bend=bends.NoOtherDrops,
    ),
    _of(
        "drop overlooks open drops",
        "drop",
        "A drop does not finish an earlier one that was announced and not decided.",
        "two drops of a frozen rollout and a mark",
        bend=bends.NoUndecidedDrops,
    ),
    _of(
        "drop deletes seals",
        "drop",
        "A drop deletes the seals with the records.",
        "begun put meets freeze",
        bend=bends.DeletesSeals,
    ),
    _of(
        "retire leaves no fence",
        "retire",
        "A retire announces and does not create the fence 'retired'.",
        "retire meets a begun put",
        bend=bends.unsent(Create, Kind.RETIRED, Created()),
    ),
    _of(
        "retire writes no seals",
        "retire",
        "A retire does not seal the open calls.",
        "retire meets a begun put",
        bend=bends.unsent(Create, Kind.CALL, Created()),
    ),
    _of(
        "retire deletes seals",
        "retire",
        "A retire deletes the seals that it made.",
        "retire meets a begun put",
        bend=bends.DeletesSeals,
    ),
    _of(
        "delete takes fences first",
        "delete",
        "A delete removes the fences before the records.",
        "delete dies on the way",
        bend=bends.FencesFirst,
    ),
)
