"""The processes of a run: writers that begin, put, refuse and mark; consumers that freeze, drop and retire.

The rule of this module: a worker does what the plan says, logs every answer, and never judges. It ends by itself, with
status 0 unless something happened that no caller could expect.

    python -m stress.worker writer|consumer NUMBER FOLDER LOAD
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections import Counter, deque
from pathlib import Path
from typing import Any

from s3capture import S3TokenSink, S3TokenSource
from s3capture.protocols import TokenCaptureSnapshot
from stress import plan
from stress.history import Event, Log, Tail

_POLL_S = 0.02
_FENCED = ("TokenCaptureFrozenError", "TokenCaptureRetiredError")
_NOT_OURS_TO_MARK = (*_FENCED, "ConflictingPayloadError")


class Actor:
    """The operations of the two endpoints, each logged."""

    def __init__(self, log: Log, seed: int, settings: dict[str, Any], **store: Any) -> None:
        self.log, self._seed = log, seed
        self.sink = S3TokenSink(**store, **settings)
        self.source = S3TokenSource(**store, **settings)

    async def begin(self, rollout: str, call: str) -> Event:
        return await self.log.perform("begin", rollout, call, self.sink.begin_call(rollout, call))

    async def put(self, rollout: str, call: str, variant: int = 0) -> Event:
        record = plan.entry(self._seed, rollout, call, variant)
        return await self.log.perform("put", rollout, call, self.sink.put(record), sent=plan.digest(record))

    async def refuse(self, rollout: str, call: str) -> Event:
        refusal = self.sink.record_engine_refusal(rollout, model_call_id=call, code="too_long")
        return await self.log.perform("refuse", rollout, call, refusal, sent="too_long")

    async def mark(self, rollout: str, call: str) -> Event:
        return await self.log.perform("mark", rollout, call, self.sink.mark_incomplete(rollout, call))

    async def freeze(self, rollout: str) -> Event:
        return await self.log.perform("freeze", rollout, "", self.source.freeze(rollout), sum_up=sum_up)

    async def drop(self, rollout: str, snapshot: dict[str, Any]) -> Event:
        which = {"snapshot_id": snapshot["snapshot_id"], "version": snapshot["version"]}
        drop = self.source.drop(rollout, **which)
        return await self.log.perform("drop", rollout, "", drop, sum_up=lambda done: {"dropped": done, **which})

    async def retire(self, rollout: str) -> Event:
        return await self.log.perform("retire", rollout, "", self.source.retire([rollout]))

    async def close(self) -> None:
        await self.sink.close()
        await self.source.close()
        self.log.finish()


def sum_up(snapshot: TokenCaptureSnapshot) -> dict[str, Any]:
    """What a consumer can see of a snapshot, small enough for a log line."""
    return {
        "snapshot_id": snapshot.snapshot_id,
        "version": snapshot.version,
        "incomplete": snapshot.incomplete,
        "entries": {record.model_call_id: plan.digest(record) for record in snapshot.entries},
        "refusals": {refusal.model_call_id: refusal.code for refusal in snapshot.engine_refusals},
    }


async def write(actor: Actor, load: plan.Load, number: int) -> None:
    """Work through the jobs of writer ``number``, ``load.tasks`` at a time."""
    waiting = deque(plan.jobs(load, number))

    async def one() -> None:
        while waiting:
            await _handle(actor, waiting.popleft())

    await asyncio.gather(*(one() for _ in range(load.tasks)))


async def _handle(actor: Actor, job: plan.Job) -> None:
    rollout, call = job.rollout, job.call
    if job.kind not in ("bare", "twice", plan.CONFLICT) and not (await actor.begin(rollout, call)).acked:
        return
    match job.kind:
        case "lost":
            return
        case "refusal":
            done = await actor.refuse(rollout, call)
        case "mark":
            done = await actor.mark(rollout, call)
        case _:
            done = await actor.put(rollout, call, job.variant)
    if done.error and done.op != "mark" and done.error not in _NOT_OURS_TO_MARK:
        await actor.mark(rollout, call)


async def consume(actor: Actor, load: plan.Load, number: int, folder: Path) -> None:
    """Freeze each rollout once so many of its operations are over as the plan says, and go on from there."""
    due = _thresholds(load, number)
    tail, over = Tail(folder, "writer-*.log"), Counter[str]()
    running: set[asyncio.Task[None]] = set()
    of_operation: dict[tuple[str, int], str] = {}
    while due:
        for row in tail.new():
            if "start" in row:
                of_operation[row["actor"], row["n"]] = row["rollout"]
            else:
                over[of_operation.pop((row["actor"], row["n"]))] += 1
        ended = len(tail.finished) == load.writers
        for rollout in [name for name, least in due.items() if ended or over[name] >= least]:
            del due[rollout]
            running.add(asyncio.create_task(_take(actor, load, number, rollout)))
        await asyncio.sleep(_POLL_S)  # files cannot be awaited
    await asyncio.gather(*running)


def _thresholds(load: plan.Load, number: int) -> dict[str, float]:
    due: dict[str, float] = {}
    for rollout in load.names:
        draw = random.Random(f"{load.seed}/{rollout}/consumers")
        moment = 1.8 * load.calls * draw.betavariate(1.2, 1.6)
        # Two in five are frozen by every consumer, at the same moment: the race for the one decision.
        if draw.random() < 0.4 or draw.randrange(load.consumers) == number:
            due[rollout] = moment
    return due


async def _take(actor: Actor, load: plan.Load, number: int, rollout: str) -> None:
    draw = random.Random(f"{load.seed}/{rollout}/{number}/take")
    if draw.random() < 0.05:
        await actor.retire(rollout)
        return
    frozen = await actor.freeze(rollout)
    if draw.random() < 0.3:
        return  # left for the end of the run
    for _ in range(3):
        if draw.random() < 0.3 or not frozen.acked:
            frozen = await actor.freeze(rollout)
        if not frozen.acked:
            continue
        dropped = await actor.drop(rollout, frozen.result)
        if dropped.acked and dropped.result["dropped"]:
            break
        frozen = await actor.freeze(rollout)
    if draw.random() < 0.3:
        late = f"late-{number}"
        await asyncio.gather(actor.begin(rollout, late), actor.put(rollout, late), actor.mark(rollout, late))


async def main(role: str, number: int, folder: Path, load: plan.Load) -> None:
    """Run one worker to its end."""
    actor = Actor(Log(folder, f"{role}-{number}"), load.seed, load.settings)
    if role == "writer":
        await write(actor, load, number)
    else:
        await consume(actor, load, number, folder)
    await actor.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), plan.Load.from_json(sys.argv[4])))
