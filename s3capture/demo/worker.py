"""A worker process: does with each call what a Gym model server does, on its own sink and resolver.

The rule of this module: a worker does what its job says, act by act, stops at the first that fails and reports
it; whether a failure was expected is not its business. It knows the bucket and the job, nothing of other workers:
whatever it learns about their calls, it learned from the bucket.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from dataclasses import dataclass
from enum import StrEnum
from multiprocessing.connection import Connection
from typing import Any

from s3capture.demo.entries import Decision, build_entry
from s3capture.demo.observing import Increments, LogTail
from s3capture.demo.script import Call, Request
from s3capture.demo.workload import REFUSAL_CODE
from s3capture.lineage import S3LineageResolver
from s3capture.records import TokenEntry
from s3capture.sink import S3TokenSink, entry_payload
from s3capture.stats import OpStats

_MESSAGE_LIMIT = 600  # characters: replies stay far below the size of a pipe, so that sending one never blocks

# How long the call in the outage tries: the demo shall not last as long as a server's patience.
IMPATIENCE = {"op_timeout_s": 2.0, "mark_timeout_s": 1.0}


class Act(StrEnum):
    """One step of a job."""

    RESOLVE = "resolve"
    BEGIN = "begin"
    PUT = "put"
    REFUSE = "refuse"
    MARK = "mark"


@dataclass(frozen=True, slots=True)
class Job:
    """What to do for one call. ``decision`` stands in for a RESOLVE that an earlier job has done."""

    rollout_id: str
    call: Call
    request: Request
    acts: tuple[Act, ...]
    decision: Decision | None = None
    impatient: bool = False


@dataclass(frozen=True, slots=True)
class Failure:
    """The act that failed, the name of the error's class, and its message."""

    act: Act
    error: str
    message: str


@dataclass(frozen=True, slots=True)
class Reply:
    """What came of a job.

    ``digest`` and ``raw_bytes`` are of the payload handed to ``put``, ``stored_prompt`` counts its prompt tokens.
    ``stats`` holds what the operations since the last reply cost; ``log`` what the library had to say meanwhile.
    """

    failure: Failure | None
    decision: Decision | None
    digest: str
    raw_bytes: int
    stored_prompt: int
    stats: dict[str, OpStats]
    log: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ready:
    """The first message of a worker: it is up."""

    pid: int


def work(connection: Connection, settings: dict[str, Any]) -> None:
    """The whole life of a worker process: do the jobs that come, until None or the end of the pipe."""
    # Ctrl-C is the conductor's to handle, which then ends its workers.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    log = LogTail()
    logger = logging.getLogger("s3capture")
    logger.addHandler(log)
    logger.propagate = False
    worker = _Worker(settings, log)
    with asyncio.Runner() as runner:
        try:
            connection.send(Ready(os.getpid()))
            while (job := connection.recv()) is not None:
                connection.send(runner.run(worker.do(job)))
        except (EOFError, BrokenPipeError, ConnectionResetError):
            pass  # the conductor is gone, and nobody is left to tell
        finally:
            runner.run(worker.close())


class _Worker:
    def __init__(self, settings: dict[str, Any], log: LogTail) -> None:
        self._sink = S3TokenSink(**settings)
        self._resolver = S3LineageResolver(**settings)
        self._impatient = S3TokenSink(**{**settings, **IMPATIENCE})
        self._log = log
        self._costs = Increments((self._sink, self._impatient))

    async def do(self, job: Job) -> Reply:
        """Do the acts of ``job`` in order, up to the first that fails."""
        decision, entry, failure = job.decision, None, None
        sink = self._impatient if job.impatient else self._sink
        for act in job.acts:
            try:
                if act is Act.RESOLVE:
                    decision = await self._resolve(job)
                elif act is Act.PUT:
                    assert decision is not None
                    entry = build_entry(job.rollout_id, job.call, job.request, decision)
                    await sink.put(entry)
                else:
                    await _perform(act, sink, job, decision)
            except Exception as error:  # noqa: BLE001 - whatever it is, the conductor must hear of it
                failure = Failure(act, type(error).__name__, str(error)[:_MESSAGE_LIMIT])
                break
        digest, raw_bytes, stored_prompt = _payload(entry)
        return Reply(failure, decision, digest, raw_bytes, stored_prompt, self._costs.since_last(), self._log.take())

    async def _resolve(self, job: Job) -> Decision:
        resolution = await self._resolver.resolve(job.rollout_id, job.request.items)
        match = resolution.match
        if match is None:
            return Decision(resolution.status, reason=resolution.reason)
        length = len(match.cumulative_token_ids)
        return Decision(
            status=resolution.status,
            parent=match.model_call_id,
            reason=resolution.reason,
            parent_digest=match.digest,
            parent_tokens=length,
            extends=[*match.cumulative_token_ids] == job.request.prompt[:length],
        )

    async def close(self) -> None:
        """Let the endpoints finish."""
        for endpoint in (self._resolver, self._impatient, self._sink):
            await endpoint.close()


async def _perform(act: Act, sink: S3TokenSink, job: Job, decision: Decision | None) -> None:
    rollout, call = job.rollout_id, job.call.call_id
    if act is Act.BEGIN:
        await sink.begin_call(rollout, call)
    elif act is Act.REFUSE:
        await sink.record_engine_refusal(
            rollout,
            model_call_id=call,
            code=REFUSAL_CODE,
            parent_call_id=None if decision is None else decision.parent,
            parent_resolution=None if decision is None else decision.status,
        )
    elif act is Act.MARK:
        await sink.mark_incomplete(rollout, call)


def _payload(entry: TokenEntry | None) -> tuple[str, int, int]:
    if entry is None:
        return "", 0, 0
    payload = entry_payload(entry)
    return payload.digest, len(payload.data), len(entry.prompt_token_ids)
