"""What the capture ledger promises, as predicates over the end of an execution.

The rule of this module: as in ``promises``: judged from what operations returned, when they started, and the bucket.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from s3capture.errors import (
    CaptureAdmissionError,
    ConflictingPayloadError,
    RetiredAdmissionError,
    RolloutRetiredError,
)
from s3capture.keys import LedgerKeys, RunKeys, escape
from s3capture.protocol import ledger as steps
from s3capture.protocol import ledger_bodies as bodies
from s3capture.protocol.bodies import Origin
from s3capture.protocol.ledger_bodies import LedgerContents
from s3capture.testing.explorer import SKIPPED, End, Outcome, Raised, run_alone

LEDGER: LedgerKeys = RunKeys("p", "run").ledger("r")
_EPILOGUE = Origin("epilogue", 0.0, "epilogue")


@dataclass(frozen=True, slots=True)
class Ledger:
    """What a manifest or a close returned, as far as a framework can tell states apart."""

    rows: frozenset[tuple[str, str]]
    refused: frozenset[str]
    failures: frozenset[tuple[str, str]]
    unsettled: frozenset[str]
    admitted: frozenset[str] | None

    @classmethod
    def of(cls, held: LedgerContents) -> Ledger:
        """Sum up the result of the ``contents`` and ``close_admissions`` generators."""
        return cls(
            rows=frozenset((segment, str(row)) for segment, row in held.rows.items()),
            refused=frozenset(held.refused),
            failures=frozenset((f["model_call_id"], f["reason"]) for f in held.failures),
            unsettled=held.unsettled,
            admitted=held.admitted,
        )

    @property
    def settled(self) -> set[str]:
        """The calls with a row or a refusal."""
        return {segment for segment, _ in self.rows} | self.refused


def _call(outcome: Outcome) -> str:
    return escape(outcome.op.split(":")[1])


def _kept(end: End, kind: str) -> list[Outcome]:
    """Writes that were acknowledged and not discarded (they return True)."""
    return [outcome for outcome in end.of(kind) if outcome.result is True]


def _reads(end: End) -> list[tuple[Outcome, Ledger]]:
    return [(o, o.result) for o in end.of("manifest") + end.of("close") if isinstance(o.result, Ledger)]


def _decision(end: End) -> frozenset[str] | None:
    body = end.bucket.get(LEDGER.closed)
    return None if body is None else bodies.read_closed(LEDGER, body)


def l1_admissions_are_decided_atomically(end: End) -> Iterator[str]:
    """An admission is in the closing decision exactly if its begin_call returned normally (invariant 10)."""
    admitted = _decision(end)
    if admitted is None:
        return
    for begin in end.of("begin"):
        if begin.acked and _call(begin) not in admitted:
            yield f"{begin.op} of {begin.actor} was admitted and is not in the decision"
        refused = begin.raised(CaptureAdmissionError) and not begin.raised(RetiredAdmissionError)
        others = [o for o in end.of("begin") if o.op == begin.op and o.actor != begin.actor]
        if refused and not others and _call(begin) in admitted:
            yield f"{begin.op} of {begin.actor} was refused and is in the decision"


def l2_nothing_is_admitted_behind_a_close(end: End) -> Iterator[str]:
    """A begin_call that starts after a close returned is refused, unless that call was admitted before."""
    for close in end.of("close"):
        for begin in end.of("begin"):
            late = close.acked and (close.actor, close.op) in begin.before
            if late and begin.acked and _call(begin) not in (_decision(end) or ()):
                yield f"{begin.op} of {begin.actor} started behind {close.actor}'s close and was admitted"


def l3_acknowledged_rows_are_in_later_manifests(end: End) -> Iterator[str]:
    """A row, refusal or failure that was acknowledged is in every manifest that starts later."""
    for read, ledger in _reads(end):
        for write in _kept(end, "record") + _kept(end, "refuse"):
            if (write.actor, write.op) in read.before and _call(write) not in ledger.settled:
                yield f"{read.op} of {read.actor} lacks {write.op} of {write.actor}, acknowledged before"
        for failure in _kept(end, "failure"):
            late = (failure.actor, failure.op) in read.before
            if late and _call(failure) not in {escape(call) for call, _ in ledger.failures}:
                yield f"{read.op} of {read.actor} lacks {failure.op} of {failure.actor}"


def l4_begun_calls_never_vanish(end: End) -> Iterator[str]:
    """A call that was admitted is settled or unsettled in every manifest that starts later, and in every close."""
    for read, ledger in _reads(end):
        for begin in end.of("begin"):
            due = (begin.actor, begin.op) in read.before or read.op.startswith("close")
            if begin.acked and due and _call(begin) not in ledger.settled | ledger.unsettled:
                yield f"{read.op} of {read.actor} does not know {begin.op} of {begin.actor}"


def l5_one_row_for_each_call(end: End) -> Iterator[str]:
    """All manifests agree on a call's row, and one decision closes the admissions."""
    reads = _reads(end)
    for _, one in reads:
        for _, other in reads:
            rows, others = dict(one.rows), dict(other.rows)
            if any(rows[call] != others[call] for call in rows.keys() & others.keys()):
                yield "the row of a call changed"
            if None not in (one.admitted, other.admitted) and one.admitted != other.admitted:
                yield "two closing decisions were read"


def l6_retirement_is_final(end: End) -> Iterator[str]:
    """After a retire returned: no admission, no manifest, and every write is discarded."""
    for retirement in end.of("retire"):
        for outcome in end.outcomes:
            late = (retirement.actor, retirement.op) in outcome.before and retirement.acked
            if not late or outcome.result == SKIPPED:
                continue
            kind = outcome.op.split(":")[0]
            if kind in ("begin", "manifest", "close") and not outcome.raised(RolloutRetiredError):
                yield f"{outcome.op} of {outcome.actor} started after retire returned and was not refused"
            if kind in ("record", "refuse", "failure") and outcome.result is True:
                yield f"{outcome.op} of {outcome.actor} started after retire returned and was kept"


def l7_the_living_finish(end: End) -> Iterator[str]:
    """Whoever dies, the others finish: with an answer, or with an error of the contract."""
    fine = (CaptureAdmissionError, RolloutRetiredError, ConflictingPayloadError)
    for outcome in end.outcomes:
        if isinstance(outcome.result, Raised) and not issubclass(outcome.result.kind, fine):
            yield f"{outcome.op} of {outcome.actor} ended in {outcome.result.kind.__name__}: {outcome.result.text}"


def l8_one_outcome_is_acknowledged(end: End) -> Iterator[str]:
    """Of different rows of one call, or a row and a refusal, one is acknowledged at most."""
    acknowledged: dict[str, str] = {}
    for write in _kept(end, "record") + _kept(end, "refuse"):
        first = acknowledged.setdefault(_call(write), write.op)
        if first != write.op:
            yield f"{first} and {write.op} were both acknowledged"


def a_later_framework_sees_the_truth(end: End) -> Iterator[str]:
    """A close alone, after everything, agrees with every earlier answer; then retire and delete do their work."""
    bucket = dict(end.bucket)
    try:
        ledger = Ledger.of(run_alone(steps.close_admissions(LEDGER, _EPILOGUE), bucket))
    except RolloutRetiredError:
        if LEDGER.retired not in end.bucket:
            yield "a ledger that nobody retired reads as retired"
    else:
        for write in _kept(end, "record") + _kept(end, "refuse"):
            if _call(write) not in ledger.settled:
                yield f"a later manifest lacks {write.op} of {write.actor}"
        for begin in end.of("begin"):
            if begin.acked and _call(begin) not in ledger.settled | ledger.unsettled:
                yield f"a later manifest does not know {begin.op} of {begin.actor}"
    run_alone(steps.retire(LEDGER, _EPILOGUE, keep=False), bucket)
    if set(bucket) - {LEDGER.closing, LEDGER.closed, LEDGER.retired}:
        yield f"retire left {sorted(bucket)}"
    run_alone(steps.delete(LEDGER), bucket)
    if bucket:
        yield f"delete left {sorted(bucket)}"


LEDGER_PROMISES = (
    l1_admissions_are_decided_atomically,
    l2_nothing_is_admitted_behind_a_close,
    l3_acknowledged_rows_are_in_later_manifests,
    l4_begun_calls_never_vanish,
    l5_one_row_for_each_call,
    l6_retirement_is_final,
    l7_the_living_finish,
    l8_one_outcome_is_acknowledged,
    a_later_framework_sees_the_truth,
)
