"""Plays a script: hands its calls to random workers, stages the troubles, and closes each rollout.

The rule of this module: it is the harness and the trainer at once, and goes by what a server would tell it. A call is
handed out only when the put of its parent returned; a rollout is dropped only after its snapshot was read back and
compared. What is not as the script says is written down as a difference, and the play goes on where it can.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from s3capture.demo import place as places
from s3capture.demo.closing import Closing
from s3capture.demo.crew import Crew
from s3capture.demo.entries import Decision
from s3capture.demo.gate import Gate
from s3capture.demo.observing import Increments, LogTail, merge
from s3capture.demo.outcome import Difference, Outcome
from s3capture.demo.place import Place
from s3capture.demo.script import Call, Request, Rollout, Script, Twist, rebuild
from s3capture.demo.show import Show
from s3capture.demo.verify import LineageJudge, Played
from s3capture.demo.worker import Act, Job, Reply
from s3capture.errors import CaptureError
from s3capture.records import ParentResolutionStatus
from s3capture.source import S3TokenSource
from s3capture.spill import Spill

ORDINARY = (Act.RESOLVE, Act.BEGIN, Act.PUT)
_ROLLOUTS_A_WORKER = 8
_SETTLING_S = 2.0


@dataclass(slots=True)
class _Play:
    """One rollout while it is played; ``putters`` says which worker put a call."""

    rollout: Rollout
    requests: dict[str, Request]
    judge: LineageJudge
    played: dict[str, Played] = field(default_factory=dict)
    putters: dict[str, int] = field(default_factory=dict)


class Conductor:
    """Plays one script at one place, once."""

    def __init__(self, script: Script, place: Place, *, workers: int, seed: int, keep: bool, show: Show) -> None:
        self._script = script
        self._place = place
        self._seed = seed
        self._show = show
        self._crew = Crew(workers, place.settings)
        self._gate = Gate()
        self._active = asyncio.Semaphore(workers * _ROLLOUTS_A_WORKER)
        self._outcome = Outcome(
            title=script.title,
            url=place.url,
            run=place.run,
            embedded=place.server is not None,
            workers=workers,
            kept=keep,
            skipped=script.skipped,
            calls=script.calls,
        )

    async def run(self) -> Outcome:
        """Play everything and return what came of it.

        Raise a ``StoreError`` or ``SettingsError`` when the place cannot be played on, ``WorkerError`` when a worker
        died that should not have. Whatever was started is gone when this returns or raises.
        """
        outcome, started = self._outcome, time.monotonic()
        log, source = LogTail(), S3TokenSource(**self._place.settings)
        costs = Increments((source,))
        logger = logging.getLogger("s3capture")
        logger.addHandler(log)
        propagated, logger.propagate = logger.propagate, False
        try:
            await places.check(self._place, source)
            await self._crew.start()
            self._show.begin(self._script.calls, len(self._script.rollouts))
            closing = Closing(source, outcome)
            try:
                async with asyncio.TaskGroup() as group:
                    for rollout in self._script.rollouts:
                        group.create_task(self._rollout(rollout, closing))
            except BaseExceptionGroup as errors:
                raise first_of(errors) from None
            try:
                self._count_the_spill()
                await closing.count_what_is_left()
            except CaptureError as error:
                # What was found so far must be told all the same.
                outcome.differences.append(Difference("", f"what is left could not be counted: {error}"))
        finally:
            self._crew.stop()
            merge(outcome.operations, costs.since_last())
            await source.close()
            logger.removeHandler(log)
            logger.propagate = propagated
        outcome.rollouts.sort(key=lambda one: one.rollout)
        outcome.log += log.take()
        outcome.seconds = time.monotonic() - started
        return outcome

    # -- one rollout ------------------------------------------------------------------------------------------

    async def _rollout(self, rollout: Rollout, closing: Closing) -> None:
        async with self._active:
            requests = rebuild(rollout)
            play = _Play(rollout, requests, LineageJudge(rollout, requests))
            children: dict[str | None, list[Call]] = {}
            for call in rollout.calls:
                children.setdefault(call.parent, []).append(call)

            async def step(call: Call) -> None:
                await self._call(play, call)
                self._show.call_done()
                for child in children.get(call.call_id, ()):
                    if call.call_id in play.played:
                        group.create_task(step(child))
                    else:
                        self._differs(play, f"call {child.call_id!r} was not played, since its parent was not put")

            async with asyncio.TaskGroup() as group:
                for root in children.get(None, ()):
                    group.create_task(step(root))
            async with self._gate.together():
                late = self._late(play) if rollout.late else None
                await closing.close(rollout, requests, play.played, late)
            self._show.rollout_done()

    async def _call(self, play: _Play, call: Call) -> None:
        if call.twist is Twist.OUTAGE:
            async with self._gate.alone():
                await self._outage(play, call)
            return
        async with self._gate.together():
            match call.twist:
                case Twist.DIES:
                    await self._death(play, call)
                case Twist.REFUSED:
                    await self._refusal(play, call)
                case _:
                    await self._ordinary(play, call)

    async def _ordinary(self, play: _Play, call: Call) -> None:
        """Resolve, begin, put; and for a call with a twist, another put by another worker."""
        worker = self._pick(play, call)
        reply = await self._ask(worker, play, call, ORDINARY)
        if not self._went_well(play, call, reply) or reply.decision is None:
            # What a server does when a put fails.
            await self._ask(worker, play, call, (Act.MARK,))
            return
        self._count(play, call, reply, worker)
        other = (worker + 1) % self._crew.size
        if call.twist is Twist.RETRY:
            again = await self._ask(other, play, call, (Act.PUT,), decision=reply.decision)
            if self._went_well(play, call, again, "the retry"):
                self._outcome.troubles.retries += 1
        elif call.twist is Twist.CONFLICT:
            rebuilt = dataclasses.replace(call, created_at=call.created_at + 1.0)
            refused = await self._ask(other, play, rebuilt, (Act.PUT,), decision=reply.decision)
            if self._failed_with(play, call, refused, "ConflictingPayloadError", "a rebuilt record"):
                self._outcome.troubles.conflicts += 1

    async def _refusal(self, play: _Play, call: Call) -> None:
        reply = await self._ask(self._pick(play, call), play, call, (Act.RESOLVE, Act.BEGIN, Act.REFUSE))
        if self._went_well(play, call, reply):
            self._outcome.troubles.refusals += 1
            self._judge(play, call, reply)

    async def _death(self, play: _Play, call: Call) -> None:
        worker = self._pick(play, call)
        job = Job(play.rollout.rollout_id, call, play.requests[call.call_id], (Act.RESOLVE, Act.BEGIN))
        reply = self._heard(await self._crew.ask_and_kill(worker, job))
        if self._went_well(play, call, reply):
            self._outcome.troubles.deaths += 1
            self._judge(play, call, reply)
        self._show.event(f"worker {worker} was killed while it generated a call of rollout {play.rollout.rollout_id}")

    async def _outage(self, play: _Play, call: Call) -> None:
        server, troubles = self._place.server, self._outcome.troubles
        assert server is not None
        worker = self._pick(play, call)
        reply = await self._ask(worker, play, call, (Act.RESOLVE, Act.BEGIN))
        if self._went_well(play, call, reply):
            self._judge(play, call, reply)
        self._show.event("S3 goes away: the embedded server was killed")
        gone = time.monotonic()
        await asyncio.to_thread(server.kill)
        try:
            failed = await self._ask(worker, play, call, (Act.PUT,), decision=reply.decision, impatient=True)
            self._failed_with(play, call, failed, "StoreUnavailableError", "the put in the outage")
            marked = await self._ask(worker, play, call, (Act.MARK,), impatient=True)
            self._went_well(play, call, marked, "the mark in the outage")
            troubles.spilled = self._spilled_marks()
            if troubles.spilled != 1:
                self._differs(play, f"{troubles.spilled} marks in the local spill during the outage, not 1")
        finally:
            await asyncio.to_thread(server.restart)
            # Nothing tells when a restarted SeaweedFS has settled; see "just after a start" in docs/operations.md.
            await asyncio.sleep(_SETTLING_S)
        troubles.down_s = time.monotonic() - gone
        self._show.event(f"S3 is back after {troubles.down_s:.1f} s; {troubles.spilled} mark waited in the local spill")

    def _late(self, play: _Play) -> Callable[[], Any]:
        """Return the late writer: once the rollout is frozen, it tries to begin a call and to put one."""
        call = play.rollout.late
        assert call is not None
        worker = self._pick(play, call)

        async def write() -> None:
            reply = await self._ask(worker, play, call, (Act.RESOLVE,))
            decision = reply.decision or Decision(ParentResolutionStatus.UNRESOLVED)
            for act in (Act.BEGIN, Act.PUT):
                late = await self._ask(worker, play, call, (act,), decision=decision)
                if self._failed_with(play, call, late, "TokenCaptureFrozenError", f"a late {act}"):
                    self._outcome.troubles.late_writes += 1

        return write

    # -- workers ----------------------------------------------------------------------------------------------

    def _pick(self, play: _Play, call: Call) -> int:
        """The worker of a call: random, yet the same in every run of one seed, in whatever order calls finish."""
        return random.Random(f"{self._seed}/{play.rollout.rollout_id}/{call.call_id}").randrange(self._crew.size)

    async def _ask(
        self,
        worker: int,
        play: _Play,
        call: Call,
        acts: tuple[Act, ...],
        *,
        decision: Decision | None = None,
        impatient: bool = False,
    ) -> Reply:
        request = play.requests[call.call_id]
        job = Job(play.rollout.rollout_id, call, request, acts, decision, impatient)
        return self._heard(await self._crew.ask(worker, job))

    def _heard(self, reply: Reply) -> Reply:
        merge(self._outcome.operations, reply.stats)
        self._outcome.log += reply.log
        return reply

    # -- judging ----------------------------------------------------------------------------------------------

    def _count(self, play: _Play, call: Call, reply: Reply, worker: int) -> None:
        """Count a call whose put returned."""
        outcome, decision = self._outcome, reply.decision
        assert decision is not None
        self._judge(play, call, reply)
        play.played[call.call_id] = Played(decision, reply.digest)
        play.putters[call.call_id] = worker
        outcome.puts += 1
        prompt = len(play.requests[call.call_id].prompt)
        outcome.tokens.prompt += prompt
        outcome.tokens.stored_prompt += reply.stored_prompt
        outcome.tokens.generated += len(call.generation_ids)
        outcome.sizes.raw += reply.raw_bytes

    def _judge(self, play: _Play, call: Call, reply: Reply) -> None:
        """Count the parent decision of a call, and write it down if it is wrong."""
        decision, lineage = reply.decision, self._outcome.lineage
        if decision is None:
            return
        lineage.by_status[decision.status] += 1
        putter = play.putters.get(decision.parent or "")
        lineage.crossed += putter is not None and putter != self._pick(play, call)
        wrong = play.judge.judge(call, decision)
        if wrong:
            self._differs(play, wrong)

    def _went_well(self, play: _Play, call: Call, reply: Reply, what: str = "it") -> bool:
        failure = reply.failure
        if failure is not None:
            whose = "" if what == "it" else f"{what}: "
            self._differs(
                play, f"call {call.call_id!r}: {whose}{failure.act} failed with {failure.error}: {failure.message}"
            )
        return failure is None

    def _failed_with(self, play: _Play, call: Call, reply: Reply, error: str, what: str) -> bool:
        """Whether the reply is the failure that must come; anything else is a difference."""
        failure = reply.failure
        if failure is not None and failure.error == error:
            return True
        came = "it was accepted" if failure is None else f"{failure.error} came: {failure.message}"
        self._differs(play, f"call {call.call_id!r}: {what} must fail with {error}, but {came}")
        return False

    def _differs(self, play: _Play, what: str) -> None:
        self._outcome.differences.append(Difference(play.rollout.rollout_id, what))

    def _spilled_marks(self) -> int:
        return len(Spill(self._place.spill_dir).pending().marks)

    def _count_the_spill(self) -> None:
        troubles, waiting = self._outcome.troubles, self._spilled_marks()
        troubles.drained = troubles.spilled - waiting
        if waiting:
            self._outcome.differences.append(
                Difference("", f"{waiting} marks still wait in the local spill; the bucket never heard of them")
            )


def first_of(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error inside nested groups."""
    first = errors.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first
