"""Deliberately broken variants of every step of the capture ledger, which the explorer must catch.

The rule of this module: as in ``broken``: a variant is the *shipped* generator seen through a bent glass (``bends``),
so it stays broken in its one way however the protocol changes. If the explorer finds no fault with a variant, then
either the step is not needed or the scenarios are blind to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, cast

from s3capture.effects import Absent, Answer, Create, Created, Delete, Effect, Exists, Found, Get, List, Steps
from s3capture.keys import Kind, LedgerKeys, escape
from s3capture.protocol import ledger_bodies as bodies
from s3capture.protocol.bodies import Origin
from s3capture.protocol.ledger_bodies import LedgerContents
from s3capture.protocol.steps import listed
from s3capture.testing import bends
from s3capture.testing.bends import Bend, Hiding
from s3capture.testing.ledger_scenarios import SHIPPED_LEDGER, LedgerProtocol


@dataclass(frozen=True, slots=True)
class BrokenLedger:
    """One broken variant; the fields are those of ``broken.Broken``."""

    name: str
    broken: str
    protocol: LedgerProtocol
    caught_by: tuple[str, ...]
    unseen: str = ""


class _LedgerBend(Bend):
    @property
    def ledger(self) -> LedgerKeys:
        """The keys, which here are those of a ledger."""
        return cast(LedgerKeys, self.keys)


class _OldSurvey(_LedgerBend):
    """The first survey that is made behind the announcement is answered with one from before it."""

    def __init__(self, keys: Any, old: Answer) -> None:
        super().__init__(keys)
        self._old: Answer | None = old

    def ask(self, effect: Effect) -> Effect | Answer:
        if effect == List(self.ledger.base) and self._old is not None:
            old, self._old = self._old, None
            return old
        return effect


class _DoesNotAdopt(_LedgerBend):
    """Whoever comes second with a closing decision believes that its own one stands."""

    _own: bytes | None = None

    def hear(self, effect: Effect, answer: Answer) -> Answer:
        if isinstance(effect, Create) and effect.key == self.ledger.closed and isinstance(answer, Exists):
            self._own = effect.body
            return Created()
        if effect == Get(self.ledger.closed) and self._own is not None:
            return Found(self._own)
        return answer


class _RereadsTheDecision(_LedgerBend):
    """The begin reads its own call into a standing decision, or out of it."""

    counts_itself = True

    def hear(self, effect: Effect, answer: Answer) -> Answer:
        if not (effect == Get(self.ledger.closed) and isinstance(answer, Found)):
            return answer
        admitted, own = bodies.read_closed(self.ledger, answer.body), {escape(self.args[0])}
        read = admitted | own if self.counts_itself else admitted - own
        return Found(bodies.fence("ledger-closed", self.ledger, Origin("", 0.0, ""), admitted=sorted(read)))


class _CountsItselfOut(_RereadsTheDecision):
    counts_itself = False


class _TakesAnyOutcome(_LedgerBend):
    """A row or refusal that stands is taken for the one that is written."""

    def hear(self, effect: Effect, answer: Answer) -> Answer:
        if self.is_of(effect, Create, Kind.LEDGER_CALL) and isinstance(answer, Exists):
            return Created()
        return answer


class _NoRetirement(Hiding):
    """The fence of the retirement is not seen in a LIST."""

    def hides(self, row: Any, rows: Any) -> bool:
        del rows
        return self.kind(row.key) is Kind.LEDGER_RETIRED


def _forgets(**fields: Any) -> type[Bend]:
    """What was read is returned without some of it."""

    class Forgets(Bend):
        def result(self, value: LedgerContents) -> LedgerContents:
            return replace(value, **fields)

    return Forgets


def _looks_before_it_creates(keys: LedgerKeys, *args: Any) -> Steps[None]:
    steps = SHIPPED_LEDGER.begin_call(keys, *args)
    create = next(steps)
    looked = yield (Get(keys.closing),)
    made = yield create
    steps.send(made)  # it asks for the announcement now, and is told what was seen before
    while True:
        try:
            batch = steps.send(looked)
        except StopIteration:
            return
        looked = yield batch


def _surveys_before_it_announces(keys: LedgerKeys, *args: Any) -> Steps[Any]:
    (old,) = yield (List(keys.base),)
    return (yield from bends.bent(SHIPPED_LEDGER.close_admissions(keys, *args), _OldSurvey(keys, old)))


def _deletes_before_the_fence(keys: LedgerKeys, *args: Any, **named: Any) -> Steps[Any]:
    (answer,) = yield (List(keys.base),)
    doomed = tuple(row.key for row in listed(answer) if not row.key.startswith(keys.fences))
    if doomed:
        yield (Delete(doomed),)
    return (yield from SHIPPED_LEDGER.retire(keys, *args, **{**named, "keep": True}))


def _of(
    name: str, step: str, broken: str, *caught_by: str, bend: Callable[..., Bend], unseen: str = ""
) -> BrokenLedger:
    bent = bends.through(getattr(SHIPPED_LEDGER, step), bend)
    return BrokenLedger(name, broken, replace(SHIPPED_LEDGER, **{step: bent}), caught_by, unseen)


LEDGER_VARIANTS: tuple[BrokenLedger, ...] = (
    _of(
        "begin does not look",
        "begin_call",
        "begin_call does not look for the announcement.",
        "two admissions meet close",
        bend=bends.unsent(Get, Kind.LEDGER_CLOSING, Absent()),
    ),
    BrokenLedger(
        "begin looks first",
        "begin_call looks for the announcement before it creates the intent.",
        replace(SHIPPED_LEDGER, begin_call=_looks_before_it_creates),
        ("two admissions meet close",),
    ),
    _of(
        "begin counts itself in",
        "begin_call",
        "A begin that meets a decision without its intent is admitted.",
        "two admissions meet close",
        bend=_RereadsTheDecision,
    ),
    _of(
        "begin counts itself out",
        "begin_call",
        "A begin that meets a decision is refused although its intent is in it.",
        "two admissions meet close",
        bend=_CountsItselfOut,
    ),
    _of(
        "begin does not adopt",
        "begin_call",
        "A begin that lost the creation of the decision goes by its own.",
        "two admissions meet close",
        bend=_DoesNotAdopt,
    ),
    _of(
        "begin overlooks retirement",
        "begin_call",
        "A begin that meets the announcement does not see that it was of a retirement.",
        "record meets retire",
        bend=_NoRetirement,
    ),
    _of(
        "close does not announce",
        "close_admissions",
        "A close decides without the announcement.",
        "two admissions meet close",
        bend=bends.unsent(Create, Kind.LEDGER_CLOSING, Created()),
    ),
    BrokenLedger(
        "close uses an old survey",
        "A close decides on a survey that it made before the announcement.",
        replace(SHIPPED_LEDGER, close_admissions=_surveys_before_it_announces),
        ("two admissions meet close",),
    ),
    _of(
        "close does not adopt",
        "close_admissions",
        "A close that lost the creation of the decision returns by its own.",
        "two closes meet an admission",
        bend=_DoesNotAdopt,
    ),
    _of(
        "close forgets open calls",
        "close_admissions",
        "A close does not report the admitted calls without an outcome.",
        "two admissions meet close",
        bend=_forgets(unsettled=frozenset()),
    ),
    _of(
        "close forgets refusals",
        "close_admissions",
        "A close takes refused calls for calls that never were.",
        "refusal meets record",
        bend=_forgets(refused={}),
    ),
    _of(
        "close overlooks retirement",
        "close_admissions",
        "A close of a retired ledger reports it as empty.",
        "close meets retire",
        bend=_NoRetirement,
    ),
    _of(
        "record does not look",
        "settle_call",
        "A row is acknowledged without a look for retirement.",
        "record meets retire",
        bend=bends.unsent(Get, Kind.LEDGER_RETIRED, Absent()),
    ),
    _of(
        "record takes any outcome for its own",
        "settle_call",
        "A row takes whatever stands for its call for itself.",
        "conflicting rows",
        bend=_TakesAnyOutcome,
    ),
    _of(
        "failure does not look",
        "record_failure",
        "A failure is acknowledged without a look for retirement.",
        "failure meets retire",
        bend=bends.unsent(Get, Kind.LEDGER_RETIRED, Absent()),
    ),
    _of(
        "failure is not written",
        "record_failure",
        "A failure is acknowledged and not written.",
        "failure meets retire",
        bend=bends.unsent(Create, Kind.LEDGER_FAILURE, Created()),
    ),
    _of(
        "manifest forgets failures",
        "contents",
        "A manifest leaves the failures out.",
        "failure meets retire",
        bend=_forgets(failures=()),
    ),
    _of(
        "manifest overlooks retirement",
        "contents",
        "A manifest of a retired ledger reads as empty, or as damaged while it is deleted.",
        "two retires",
        bend=_NoRetirement,
    ),
    _of(
        "retire leaves no fence",
        "retire",
        "A retire announces and does not create the fence 'retired'.",
        "record meets retire",
        bend=bends.unsent(Create, Kind.LEDGER_RETIRED, Created()),
    ),
    _of(
        "retire does not announce",
        "retire",
        "A retire creates its fence without the announcement that a begin looks for.",
        "record meets retire",
        bend=bends.unsent(Create, Kind.LEDGER_CLOSING, Created()),
    ),
    BrokenLedger(
        "retire deletes before the fence",
        "A retire deletes what it sees, and then creates its fence.",
        replace(SHIPPED_LEDGER, retire=_deletes_before_the_fence),
        ("record meets retire",),
    ),
)
