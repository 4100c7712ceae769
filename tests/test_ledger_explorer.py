"""Every promise of the capture ledger holds over every interleaving, and every broken step of it is caught.

``pytest tests/test_ledger_explorer.py -rP`` shows what was covered: schedules, states and ends of each scenario.
"""

from __future__ import annotations

from dataclasses import fields, replace

import pytest

from s3capture.testing.explorer import Invariant, Report, explore
from s3capture.testing.ledger_broken import LEDGER_VARIANTS, BrokenLedger
from s3capture.testing.ledger_promises import LEDGER_PROMISES
from s3capture.testing.ledger_scenarios import SHIPPED_LEDGER, LedgerProtocol, ledger_scenarios

CI_SCENARIOS = (
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
STEPS = tuple(field.name for field in fields(LedgerProtocol))


def show(report: Report) -> None:
    """Leave what was covered in the captured output."""
    print(report)  # noqa: T201 - pytest -rP shows it


def test_no_scenario_is_missing() -> None:
    """The scenarios that CI explores are exactly those named here, so none can fall out unseen."""
    assert sorted(ledger_scenarios()) == sorted(CI_SCENARIOS)


@pytest.mark.parametrize("name", CI_SCENARIOS)
def test_every_promise_holds_for_the_shipped_ledger(name: str) -> None:
    """No interleaving, crash or lost reply of a scenario breaks a promise."""
    report = explore(ledger_scenarios()[name])
    show(report)
    assert report.violation is None, str(report)
    assert report.ends > 1, "a scenario with one end explores nothing"


@pytest.mark.parametrize("variant", LEDGER_VARIANTS, ids=lambda variant: variant.name)
def test_a_broken_step_is_caught(variant: BrokenLedger) -> None:
    """Each deliberately broken variant breaks a promise in a scenario that the shipped ledger survives."""
    report = explore(ledger_scenarios(variant.protocol)[variant.caught_by[0]])
    assert report.violation is not None, f"nothing noticed: {variant.broken}"
    show(report)
    assert report.violation.message
    assert len(report.violation.schedule) > 1


def test_every_step_has_broken_variants() -> None:
    """Each generator of the ledger is broken somewhere, in one step at a time, under a name of its own."""
    bent = [
        [step for step in STEPS if getattr(v.protocol, step) is not getattr(SHIPPED_LEDGER, step)]
        for v in LEDGER_VARIANTS
    ]
    assert all(len(steps) == 1 for steps in bent)
    assert {steps[0] for steps in bent} == set(STEPS)
    assert len({v.name for v in LEDGER_VARIANTS}) == len(LEDGER_VARIANTS)
    assert all(
        v.broken.endswith(".") and v.caught_by and set(v.caught_by) <= set(CI_SCENARIOS) for v in LEDGER_VARIANTS
    )


ALONE = {
    "l1_admissions_are_decided_atomically": ("begin counts itself out", "two admissions meet close"),
    "l2_nothing_is_admitted_behind_a_close": ("begin does not look", "two admissions meet close"),
    "l3_acknowledged_rows_are_in_later_manifests": ("manifest forgets failures", "failure meets retire"),
    "l4_begun_calls_never_vanish": ("close forgets open calls", "two admissions meet close"),
    "l5_one_row_for_each_call": ("close does not adopt", "two closes meet an admission"),
    "l6_retirement_is_final": ("record does not look", "record meets retire"),
    "l7_the_living_finish": ("manifest overlooks retirement", "two retires"),
    "l8_one_outcome_is_acknowledged": ("record takes any outcome for its own", "conflicting rows"),
    "a_later_framework_sees_the_truth": ("retire deletes before the fence", "record meets retire"),
}


@pytest.mark.parametrize("promise", LEDGER_PROMISES, ids=lambda promise: promise.__name__)
def test_every_promise_catches_something_alone(promise: Invariant) -> None:
    """No promise is idle: each one, judged alone, is broken by some variant."""
    name, where = ALONE[promise.__name__]
    variant = next(v for v in LEDGER_VARIANTS if v.name == name)
    violation = explore(replace(ledger_scenarios(variant.protocol)[where], invariants=(promise,))).violation
    assert violation is not None and violation.invariant == promise.__name__
