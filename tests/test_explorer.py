"""The explorer counts what it runs, every promise holds for the shipped protocol, and every broken step is caught.

``pytest tests/test_explorer.py -rP`` shows what was covered: schedules, states and ends of each scenario.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator
from dataclasses import replace
from math import comb, factorial
from typing import Any

import pytest

from s3capture.effects import Answer, Create, Created, Delete, Effect, Exists, Get, List, Listed, Steps
from s3capture.errors import StoreError
from s3capture.protocol import freezing
from s3capture.testing.broken import VARIANTS, Broken
from s3capture.testing.explorer import (
    SKIPPED,
    Actor,
    End,
    Invariant,
    Op,
    Raised,
    Report,
    Scenario,
    explore,
    run_alone,
)
from s3capture.testing.ledger_scenarios import ledger_scenarios
from s3capture.testing.promises import PROMISES
from s3capture.testing.scenarios import KNOWN_LIMIT, SHIPPED, Scripts, scenarios

CI_SCENARIOS = (
    "begun put meets freeze",
    "put meets freeze and drop",
    "begun put is sent twice",
    "two freezers meet a begun put",
    "put meets two freezers",
    "mark meets freeze and drop",
    "mark meets a drop that dies",
    "two drops of one snapshot",
    "two drops and a mark",
    "conflicting puts meet freeze",
    "conflicting puts",
    "the same put twice meets freeze",
    "the same put twice",
    "refusal meets freeze",
    "late refusal",
    "refusal meets put",
    "retire meets a begun put",
    "retire meets a put",
    "retire meets mark and freeze",
    "two retires and a begun put",
    "retire meets drop",
    "begin meets freeze",
    "four at once",
    "begun put is put again",
    "two drops of a frozen rollout and a mark",
    "conflicting puts that live",
    "delete dies on the way",
)
LEDGER_SCENARIOS = (
    "admission meets close",
    "two admissions meet close",
    "two closes meet an admission",
    "paged close",
    "record meets manifest",
    "conflicting rows",
    "refusal meets record",
    "record meets retire",
    "failure meets retire",
    "close meets retire",
    "two retires",
)
STEPS = ("begin_call", "put_outcome", "mark_incomplete", "freeze", "drop", "retire", "delete")


def show(report: Report) -> None:
    sys.stdout.write(f"{report}\n")


# -- the shipped protocol -----------------------------------------------------------------------------------


def test_no_scenario_is_missing() -> None:
    """The scenarios that CI explores are exactly those named here, so none can fall out unseen."""
    assert sorted(scenarios()) == sorted(CI_SCENARIOS)
    assert sorted(ledger_scenarios()) == sorted(LEDGER_SCENARIOS)
    assert scenarios().keys() < scenarios(deep=True).keys()


@pytest.mark.parametrize("name", CI_SCENARIOS)
def test_every_promise_holds_for_the_shipped_protocol(name: str) -> None:
    """No interleaving, crash or lost reply of a scenario breaks a promise."""
    report = explore(scenarios()[name])
    show(report)
    assert report.violation is None, str(report)
    assert report.ends > 1, "a scenario with one end explores nothing"


@pytest.mark.parametrize("name", LEDGER_SCENARIOS)
def test_every_promise_holds_for_the_shipped_ledger(name: str) -> None:
    """No interleaving, crash or lost reply of a ledger's scenario breaks one of the ledger's promises."""
    report = explore(ledger_scenarios()[name])
    show(report)
    assert report.violation is None, str(report)


def test_the_known_limit_is_a_limit() -> None:
    """A begun call that another process puts first is outside of what is promised: the explorer shows how it breaks.

    This test fails when the protocol outgrows the limit: then move the scenario into CI and strike the paragraph
    in docs/protocol.md.
    """
    report = explore(KNOWN_LIMIT)
    assert report.violation is not None
    assert report.violation.invariant == "one_outcome_is_acknowledged"
    schedule = report.violation.schedule
    deleted = next(number for number, step in enumerate(schedule) if step.startswith("B drop: delete"))
    assert any(step.startswith("A put:c: create call/c -> created") for step in schedule[deleted:])
    assert KNOWN_LIMIT.name not in scenarios(deep=True)


def test_the_known_limit_is_the_one_trips_alone() -> None:
    """The same actors keep every promise when A's put claims no privilege."""
    a = Scripts(SHIPPED, "A")
    looking = a.actor(a.begin("c"), a.put("c", "a", begun=0, first=False))
    assert explore(replace(KNOWN_LIMIT, actors=(looking, KNOWN_LIMIT.actors[1]))).violation is None


# -- broken variants ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.caught_by], ids=lambda variant: variant.name)
def test_a_broken_step_is_caught(variant: Broken) -> None:
    """Each deliberately broken variant breaks a promise in a scenario that the shipped protocol survives."""
    report = None
    for name in variant.caught_by:
        report = explore(scenarios(variant.protocol)[name])
        if report.violation is not None:
            break
    assert report is not None and report.violation is not None, f"nothing noticed: {variant.broken}"
    show(report)
    assert report.violation.message
    assert len(report.violation.schedule) > 1
    assert str(report.violation).count("\n") == len(report.violation.schedule)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if not v.caught_by], ids=lambda variant: variant.name)
def test_what_no_promise_sees_says_why(variant: Broken) -> None:
    """A variant that no scenario catches gives its reason, and indeed passes where it is exercised."""
    assert variant.unseen
    assert explore(scenarios(variant.protocol)["retire meets a begun put"]).violation is None


def test_every_step_has_broken_variants() -> None:
    """Each generator of the protocol is broken somewhere, in one step at a time, under a name of its own."""
    bent = [[step for step in STEPS if getattr(v.protocol, step) is not getattr(SHIPPED, step)] for v in VARIANTS]
    assert all(len(steps) == 1 for steps in bent)
    assert {steps[0] for steps in bent} == set(STEPS)
    assert len({v.name for v in VARIANTS}) == len(VARIANTS)
    assert all(v.broken.endswith(".") and set(v.caught_by) <= set(CI_SCENARIOS) for v in VARIANTS)


ALONE = {
    "p1_acknowledged_puts_are_in_later_snapshots": ("put does not look", "late refusal"),
    "p2_nothing_is_acknowledged_outside_the_decision": ("begin does not look", "begin meets freeze"),
    "p3_one_snapshot_for_each_version": ("freeze counts late outcomes", "late refusal"),
    "p4_a_drop_saw_everything": ("mark does not look", "mark meets freeze and drop"),
    "p5_acknowledged_marks_show": ("freeze overlooks late marks", "two drops and a mark"),
    "p6_a_begun_call_without_outcome_masks": ("begin does not look", "begin meets freeze"),
    "p7_late_refusals_change_nothing": ("put does not look", "late refusal"),
    "p8_retirement_is_final": ("retire leaves no fence", "retire meets a begun put"),
    "p9_the_living_finish": ("freeze writes no seals", "begin meets freeze"),
    "one_outcome_is_acknowledged": ("put takes a refusal for its own", "refusal meets put"),
    "bucket_is_sound": ("freeze does not announce", "begin meets freeze"),
    "a_later_consumer_sees_the_truth": ("begin does not look", "begin meets freeze"),
}


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_every_promise_catches_something_alone(promise: Invariant) -> None:
    """No promise is idle: each one, judged alone, is broken by some variant."""
    name, where = ALONE[promise.__name__]
    variant = next(v for v in VARIANTS if v.name == name)
    violation = explore(replace(scenarios(variant.protocol)[where], invariants=(promise,))).violation
    assert violation is not None and violation.invariant == promise.__name__


# -- the explorer itself ------------------------------------------------------------------------------------


def asking(*batches: tuple[Effect, ...]) -> Steps[tuple[Answer, ...]]:
    """A toy operation: yield each batch and return every answer."""
    heard: list[Answer] = []
    for batch in batches:
        heard.extend((yield batch))
    return tuple(heard)


def op(name: str, *batches: tuple[Effect, ...]) -> Op:
    return Op(name, lambda _: asking(*batches))


def toy(
    *actors: Actor, crashes: int = 0, losses: int = 0, list_pages: int = 1, **setup: bytes
) -> tuple[list[End], Report]:
    """Every end of a toy scenario, and its report."""
    ends: list[End] = []

    def collect(end: End) -> Iterator[str]:
        ends.append(end)
        yield from ()

    scenario = Scenario("toy", actors, (collect,), crashes, losses, list_pages, setup)
    return ends, explore(scenario)


def results(ends: list[End]) -> set[tuple[Hashable, ...]]:
    return {tuple(outcome.result for outcome in end.outcomes) for end in ends}


X, Y = Create("x", b"1"), Create("y", b"2")


@pytest.mark.parametrize(("first", "second"), [(1, 1), (2, 2), (3, 2), (4, 3)])
def test_sequential_steps_interleave_in_every_order(first: int, second: int) -> None:
    """Two actors of m and n steps one after the other have (m+n)!/(m!n!) schedules, and each is counted once."""
    actors = [
        Actor(name, (op("run", *((Create(f"{name}{number}", b""),) for number in range(steps))),))
        for name, steps in (("A", first), ("B", second))
    ]
    assert toy(*actors)[1].executions == comb(first + second, first)


def test_a_batch_happens_in_every_order() -> None:
    """The effects of one batch are steps of their own: two batches of two have 4! schedules."""
    actors = (Actor("A", (op("run", (X, Y)),)), Actor("B", (op("run", (Get("x"), Get("y"))),)))
    ends, report = toy(*actors)
    assert report.executions == factorial(4)
    assert {tuple(type(answer).__name__ for answer in end.outcomes[1].result) for end in ends} == {  # type: ignore[attr-defined]
        (x, y) for x in ("Absent", "Found") for y in ("Absent", "Found")
    }


def test_one_create_of_two_wins() -> None:
    """Of two actors that create one key exactly one hears that it created, in both orders."""
    ends, report = toy(Actor("A", (op("run", (X,)),)), Actor("B", (op("run", (Create("x", b"2"),)),)))
    assert report.executions == 2
    assert results(ends) == {((Created(),), (Exists(),)), ((Exists(),), (Created(),))}
    assert {end.bucket["x"] for end in ends} == {b"1", b"2"}


def test_the_memo_does_not_lose_schedules() -> None:
    """Schedules that meet in one state are still counted one by one."""
    actors = [Actor(name, (op("run", (Get("x"),), (Get("y"),)),)) for name in ("A", "B", "C")]
    assert toy(*actors)[1].executions == factorial(6) // 2**3


def test_a_crash_leaves_a_late_copy_or_none() -> None:
    """A process that dies in mid-request may have written: never, or behind what another one reads afterwards."""
    ends, report = toy(Actor("A", (op("run", (X,)),)), Actor("B", (op("look", (Get("x"),)),)), crashes=1)
    dead = [end for end in ends if not end.of("run")]
    seen = {(type(end.of("look")[0].result[0]).__name__, "x" in end.bucket) for end in dead if end.of("look")}  # type: ignore[index]
    assert seen == {("Absent", False), ("Absent", True), ("Found", True)}
    assert report.violation is None


def test_a_crash_alone_is_counted() -> None:
    """One create and one crash: it returns, it dies without a trace, it dies and its create lands."""
    ends, report = toy(Actor("A", (op("run", (X,)),)), crashes=1)
    assert report.executions == 3
    assert sorted((len(end.outcomes), "x" in end.bucket) for end in ends) == [(0, False), (0, True), (1, True)]


def test_the_dead_stay_dead() -> None:
    """After a crash an actor starts nothing more, and without a budget nobody dies."""
    actor = Actor("A", (op("one", (X,)), op("two", (Y,))))
    ends, _ = toy(actor, crashes=1)
    assert {tuple(o.op for o in end.outcomes) for end in ends} == {(), ("one",), ("one", "two")}
    assert {tuple(o.op for o in end.outcomes) for end in toy(actor)[0]} == {("one", "two")}


def test_a_lost_reply_is_sent_again_and_its_copy_lands_whenever() -> None:
    """The sender of a doubtful create hears 'exists' of its own copy, or 'created' of the second attempt."""
    ends, report = toy(Actor("A", (op("run", (X,)),)), losses=1)
    heard = {result[0] for end in ends for result in (end.outcomes[0].result,)}  # type: ignore[index]
    assert heard == {Created(), Created(first_attempt=False), Exists()}
    # In order: answered; resent; resent, then the copy; the copy, then resent.
    assert report.executions == 4


def test_a_late_copy_can_outlive_a_delete() -> None:
    """The copy of a create whose reply was lost can bring a key back behind its deletion."""
    run = op("run", (X,), (Delete(("x",)),))
    assert {"x" in end.bucket for end in toy(Actor("A", (run,)), losses=1)[0]} == {True, False}
    assert {"x" in end.bucket for end in toy(Actor("A", (run,)))[0]} == {False}


def test_a_reply_is_lost_once_for_each_budget() -> None:
    """Losing the reply of a read changes nothing but the count, and an effect is sent at most twice."""
    _, report = toy(Actor("A", (op("run", (Get("x"),)),)), losses=3)
    assert report.executions == 2


def test_a_list_may_be_torn_between_its_pages() -> None:
    """With pages, a list can show a later key and miss an earlier one that was created before it."""
    writer = Actor("W", (op("write", (Create("p/a", b""),), (Create("p/z", b""),)),))
    reader = Actor("R", (op("read", (List("p/"),)),))

    def rows(ends: list[End]) -> set[str]:
        answers = [end.of("read")[0].result[0] for end in ends]  # type: ignore[index]
        return {"".join(row.key[-1] for row in answer.objects) for answer in answers if isinstance(answer, Listed)}

    assert rows(toy(writer, reader, list_pages=2)[0]) == {"", "a", "az", "z"}
    assert rows(toy(writer, reader)[0]) == {"", "a", "az"}


def test_a_delete_of_many_keys_is_seen_half_done() -> None:
    """Deleting two keys is two steps, and another actor may look between them."""
    cleaner = Actor("C", (op("clean", (Delete(("x", "y")),)),))
    looker = Actor("L", (op("look", (List(""),)),))
    ends, _ = toy(cleaner, looker, x=b"", y=b"")
    seen = {tuple(row.key for row in end.of("look")[0].result[0].objects) for end in ends}  # type: ignore[index]
    assert seen == {("x", "y"), ("y",), ()}


def test_real_time_order_is_known() -> None:
    """An operation that starts after another one returned has it in ``before``; a concurrent one has not."""
    ends, _ = toy(Actor("A", (op("one", (X,)),)), Actor("B", (op("two", (Get("x"),), (Get("x"),)),)))
    before = {(("A", "one") in end.of("two")[0].before, ("B", "two") in end.of("one")[0].before) for end in ends}
    assert before == {(True, False), (False, True), (False, False)}


def test_errors_and_skips_are_results() -> None:
    """An exception is the outcome of its operation, one whose start says None is skipped; neither is an ack."""

    def failing(_: tuple[Hashable, ...]) -> Steps[None]:
        yield (Get("x"),)
        raise StoreError("no")

    ends, _ = toy(Actor("A", (Op("fail", failing), Op("skip", lambda _: None), op("last"))))
    fail, skip, last = ends[0].outcomes
    assert fail.raised(StoreError) and not fail.acked
    assert skip.result == SKIPPED and not skip.acked
    assert last.acked and last.result == ()
    assert fail.result == Raised(StoreError, "texts are not compared")


def elect(name: str, *, look_first: bool) -> Actor:
    """A toy election over one flag for each actor: whoever sees no other flag believes to be alone."""
    flag, other = Create(f"flag/{name}", b""), Get(f"flag/{'B' if name == 'A' else 'A'}")

    def run(_: tuple[Hashable, ...]) -> Steps[str]:
        answers: dict[type[Any], Answer] = {}
        for effect in (other, flag) if look_first else (flag, other):
            (answers[type(effect)],) = yield (effect,)
        return "alone" if type(answers[Get]).__name__ == "Absent" else "not alone"

    return Actor(name, (Op("elect", run),))


def at_most_one_is_alone(end: End) -> Iterator[str]:
    """Never do both believe to be alone."""
    if sum(outcome.result == "alone" for outcome in end.outcomes) > 1:
        yield "both are alone"


def test_a_broken_toy_is_caught_by_a_shortest_schedule() -> None:
    """Look-then-announce is caught with four steps, the least that can break it; announce-then-look holds."""
    broken = Scenario("toy", (elect("A", look_first=True), elect("B", look_first=True)), (at_most_one_is_alone,))
    violation = explore(broken).violation
    assert violation is not None
    assert (violation.invariant, violation.message) == ("at_most_one_is_alone", "both are alone")
    assert len(violation.schedule) == 4
    assert "get flag/B -> absent" in str(violation) and "create flag/B -> created   => alone" in str(violation)
    sound = replace(broken, actors=(elect("A", look_first=False), elect("B", look_first=False)))
    assert explore(sound).violation is None


def test_a_scenario_that_is_too_large_says_so() -> None:
    """Running out of states is an error, never a pass."""
    actors = tuple(elect(name, look_first=False) for name in ("A", "B"))
    with pytest.raises(RuntimeError, match="toy: more than 10 states"):
        explore(Scenario("toy", actors, ()), max_states=10)


def test_running_alone_changes_the_bucket_in_place() -> None:
    """``run_alone`` gives every effect its answer in order and leaves its result in the bucket."""
    bucket = {"y": b"0"}
    assert run_alone(asking((X, Y), (Delete(("y",)), List(""))), bucket)[:2] == (Created(), Exists())
    assert bucket == {"x": b"1"}


def _retirement_between_pages() -> Scenario:
    a, b = Scripts(SHIPPED, "A"), Scripts(SHIPPED, "B")
    actors = (a.actor(a.mark("m"), a.freeze()), b.actor(b.retire()))
    return Scenario("a retirement between pages", actors, PROMISES, crashes=0, losses=0, list_pages=3)


def test_a_retirement_between_the_pages_of_a_list_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a LIST takes several pages, a retirement that sweeps between them hides no acknowledged mark."""
    monkeypatch.setattr(freezing, "ONE_PAGE", 0)
    report = explore(_retirement_between_pages())
    assert report.violation is None, str(report)


def test_without_the_second_look_pages_would_hide_a_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scenario above bites: a freeze that trusts torn pages breaks a promise."""
    monkeypatch.setattr(freezing, "ONE_PAGE", 10**9)
    assert explore(_retirement_between_pages()).violation is not None
