"""Carry out a plan: rollouts retired or deleted side by side through the protocol, each with its own outcome.

The rule of this module: what cannot be deleted is told by key, with the store's reason, and stops nothing else; the
ledger of a rollout goes before its attempt, and packs forget it before both, so that as long as anything is left the
rollout can still be found and chosen by the same command.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from s3capture.effects import Delete, Deleted, Steps
from s3capture.errors import CaptureError, StoreError
from s3capture.protocol import ledger as ledger_steps
from s3capture.protocol import retiring
from s3capture.protocol.steps import look
from s3capture.retention.archives import ArchiveHand
from s3capture.retention.choosing import UNDELIVERED, Act, Candidate, Plan
from s3capture.runtime import Operation, Runtime

Left = tuple[tuple[str, str], ...]
_T = TypeVar("_T")
_R = TypeVar("_R")

GIVE_UP = 40
"""Failures in a row after which the store is taken to be away: the rest is not tried, and told as such."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of one rollout or one batch of keys.

    ``left`` are the keys that are still there, each with the store's reason; ``error`` is a sentence, empty where
    nothing else went wrong. ``came_back`` counts objects that somebody wrote while it was being deleted.
    """

    what: str
    left: Left = ()
    error: str = ""
    came_back: int = 0

    @property
    def done(self) -> bool:
        """Whether all of it was done."""
        return not self.left and not self.error and not self.came_back


def carry_out(
    runtime: Runtime,
    plan: Plan,
    *,
    hand: ArchiveHand | None = None,
    again: Callable[[], ArchiveHand | None] = lambda: None,
) -> Iterator[Outcome]:
    """Retire or delete the candidates of ``plan`` and yield an outcome for each, in their order.

    ``again`` gives the hand of the archive as it is behind the deletions: an archiver may have packed a rollout before
    its fences were gone, and lists no other after that. Raise nothing that one rollout can cause; the check of the
    store at first use raises ``StoreError``.
    """
    retires = plan.request.act is Act.RETIRE

    def steps(candidate: Candidate) -> Callable[[], Steps[Outcome]]:
        return lambda: _steps(runtime, plan, candidate)

    if retires:
        runtime.check_store()
    yield from side_by_side(
        runtime,
        plan.request.act,
        _forgotten(plan, hand),
        lambda candidate: candidate.rollout,
        steps,
        creates=retires,
    )
    if plan.request.act is Act.DELETE and not plan.request.everything:
        yield from _forgotten_again(plan, again)


def _forgotten_again(plan: Plan, again: Callable[[], ArchiveHand | None]) -> Iterator[Outcome]:
    try:
        hand = again()
        packed = [] if hand is None else [c.rollout for c in plan.candidates if hand.holds(c.rollout)]
        if hand is not None and packed:
            hand.forget(packed)
    except CaptureError as error:
        yield Outcome("the archive", error=f"it could not be asked again to forget what was deleted: {error}")


def _forgotten(plan: Plan, hand: ArchiveHand | None) -> Iterator[Candidate | Outcome]:
    """The candidates, once the packs that hold them have forgotten them: a few requests for each that is packed."""
    for candidate in plan.candidates:
        if plan.request.act is not Act.DELETE or plan.request.everything:
            yield candidate
            continue
        if hand is None:
            if candidate.archived:
                why = "it is archived, and this version cannot delete from archives; nothing of it was changed"
                yield Outcome(candidate.rollout, error=why)
            else:
                yield candidate
            continue
        try:
            if hand.holds(candidate.rollout):
                hand.forget((candidate.rollout,))
        except CaptureError as error:
            yield Outcome(candidate.rollout, error=f"the archive could not forget it: {error}")
        else:
            yield candidate


def _steps(runtime: Runtime, plan: Plan, candidate: Candidate) -> Steps[Outcome]:
    request, rollout = plan.request, candidate.rollout
    keys, ledger = runtime.rollout(rollout), runtime.keys.ledger(rollout)
    left: Left = ()
    if candidate.ledger:
        if request.act is Act.RETIRE:
            left = (yield from ledger_steps.retire(ledger, runtime.origin(), keep=request.keep)).left
        else:
            left = (yield from ledger_steps.delete(ledger)).left
        if left and request.act is Act.DELETE:
            return Outcome(rollout, left)
    if not candidate.attempt:
        return Outcome(rollout, left)
    if request.act is Act.RETIRE:
        return Outcome(rollout, left + (yield from retiring.retire(keys, runtime.origin(), keep=request.keep)).left)
    left = (yield from retiring.delete(keys)).left
    came_back = 0
    if not left and candidate.state in UNDELIVERED:
        # Its fences never refused anybody: who was still writing has written into a fresh rollout.
        came_back = len((yield from look(keys)).objects)
    return Outcome(rollout, left, came_back=came_back)


def delete_keys(keys: Iterable[str]) -> Steps[Left]:
    """Delete keys; return those that are still there, with reasons."""
    doomed = tuple(keys)
    if not doomed:
        return ()
    (answer,) = yield (Delete(doomed),)
    return answer.failed if isinstance(answer, Deleted) else ()


def side_by_side(
    runtime: Runtime,
    op: str,
    items: Iterable[_T | Outcome],
    name: Callable[[_T], str],
    steps: Callable[[_T], Callable[[], Steps[Outcome]]],
    *,
    creates: bool = False,
) -> Iterator[Outcome]:
    """Run ``steps(item)`` for each item, ``max_concurrency`` at once, and yield the outcomes in order.

    An item that is an outcome already is passed on. After ``GIVE_UP`` failures of the store in a row, the rest is
    not tried.
    """
    run, width = runtime.settings.run, runtime.settings.max_concurrency
    waiting: deque[tuple[str, Operation[Outcome] | Outcome]] = deque()
    failures = 0

    def finish() -> Outcome:
        nonlocal failures
        what, found = waiting.popleft()
        if isinstance(found, Outcome):
            return found
        try:
            outcome = found.result()
        except StoreError as error:
            failures += 1
            return Outcome(what, error=str(error))
        except CaptureError as error:
            outcome = Outcome(what, error=str(error))
        failures = 0
        return outcome

    for item in items:
        if isinstance(item, Outcome):
            waiting.append((item.what, item))
        elif failures >= GIVE_UP:
            why = f"not tried: {GIVE_UP} failed in a row before it"
            waiting.append((name(item), Outcome(name(item), error=why)))
        else:
            what = f"{op} of {name(item)!r}, run {run!r}"
            operation = runtime.submit(op, what, steps(item), writes=creates, patient=True, publishes=False)
            waiting.append((name(item), operation))
        while len(waiting) > width:
            yield finish()
    while waiting:
        yield finish()
