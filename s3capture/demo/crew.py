"""The worker processes: started, spoken to one job at a time, replaced when killed, and gone at the end.

The rule of this module: nothing waits without a bound, and no worker outlives the crew. A worker has at most one job,
and its reply is far smaller than a pipe's buffer, so neither side can block the other; a worker that dies is
noticed by the end of its pipe, at once.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import signal
import time
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any

from s3capture.demo.worker import Job, Ready, Reply, work
from s3capture.errors import CaptureError

START_TIMEOUT_S = 90.0
JOB_TIMEOUT_S = 180.0
"""Above the deadlines of the three operations that a job may hold, so that it is the library that gives up first."""

_STOP_TIMEOUT_S = 5.0


class WorkerError(CaptureError):
    """A worker died or did not answer; the demo cannot say what would have happened."""


@dataclass(slots=True)
class _Member:
    process: SpawnProcess
    connection: Connection
    ready: asyncio.Future[Ready]
    reply: asyncio.Future[Reply] | None = None
    doomed: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Crew:
    """``size`` workers on the same settings. Use it from one event loop, between ``start`` and ``stop``."""

    def __init__(self, size: int, settings: dict[str, Any]) -> None:
        self.size = size
        self._settings = settings
        # Spawned, not forked: the conductor has threads, and real servers share nothing either.
        self._context = multiprocessing.get_context("spawn")
        self._members: list[_Member] = []
        self._stopped = False

    async def start(self) -> None:
        """Start all workers and wait until they are up; raise ``WorkerError`` when one does not come up in time."""
        for index in range(self.size):
            self._members.append(self._hire(index))
        await asyncio.gather(*(self._up(index) for index in range(self.size)))

    def pids(self) -> list[int]:
        """The process ids of the workers."""
        return [member.process.pid or 0 for member in self._members]

    async def ask(self, index: int, job: Job) -> Reply:
        """Have worker ``index`` do ``job`` when its turn comes; raise ``WorkerError`` when it dies over it."""
        async with self._members[index].lock:
            return await self._ask(self._members[index], index, job)

    async def ask_and_kill(self, index: int, job: Job) -> Reply:
        """Have worker ``index`` do ``job``, then SIGKILL it as the out-of-memory killer would, and start another."""
        member = self._members[index]
        async with member.lock:
            reply = await self._ask(member, index, job)
            member.doomed = True
            member.process.kill()
            await asyncio.to_thread(member.process.join, _STOP_TIMEOUT_S)
            self._forget(member)
            if self._stopped:
                return reply
            successor = self._hire(index)
            # Whoever waits for this worker already holds on to its lock.
            successor.lock = member.lock
            self._members[index] = successor
            await self._up(index)
        return reply

    def stop(self) -> None:
        """End all workers: those that are idle by themselves, the others by SIGTERM, then SIGKILL. Idempotent."""
        self._stopped = True
        members, self._members = self._members, []
        for member in members:
            if member.reply is None and member.ready.done():
                self._send(member, None)
            else:
                member.process.terminate()
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for member in members:
            member.process.join(max(0.0, deadline - time.monotonic()))
            if member.process.is_alive():
                member.process.kill()
                member.process.join(_STOP_TIMEOUT_S)
            self._forget(member)

    def _hire(self, index: int) -> _Member:
        ours, theirs = self._context.Pipe(duplex=True)
        process = self._context.Process(
            target=work, args=(theirs, self._settings), name=f"s3capture-demo-{index}", daemon=True
        )
        # Ctrl-C at a terminal reaches the whole group: a worker that is still importing must not die of it aloud.
        # The tracker is started before, since its start would let the signal through again.
        resource_tracker.ensure_running()
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()  # the worker holds the only other end, so its death is the end of the pipe
        loop = asyncio.get_running_loop()
        member = _Member(process, ours, loop.create_future())
        loop.add_reader(ours.fileno(), self._read, member, index)
        return member

    async def _up(self, index: int) -> None:
        member = self._members[index]
        try:
            await asyncio.wait_for(asyncio.shield(member.ready), START_TIMEOUT_S)
        except TimeoutError:
            raise WorkerError(f"worker {index} was not up within {START_TIMEOUT_S:.0f} s") from None

    async def _ask(self, member: _Member, index: int, job: Job) -> Reply:
        what = f"call {job.call.call_id!r} of rollout {job.rollout_id!r}"
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        member.reply = reply
        try:
            if not self._send(member, job):
                raise WorkerError(f"worker {index} died before it could play {what}: {_how(member.process)}")
            return await asyncio.wait_for(reply, JOB_TIMEOUT_S)
        except TimeoutError:
            raise WorkerError(f"worker {index} did not finish {what} within {JOB_TIMEOUT_S:.0f} s") from None
        finally:
            # Given up on, the worker is still busy: stop() must not wait for it to listen.
            if not reply.cancelled():
                member.reply = None

    def _send(self, member: _Member, job: Job | None) -> bool:
        try:
            member.connection.send(job)
        except OSError:
            return False
        return True

    def _read(self, member: _Member, index: int) -> None:
        try:
            message = member.connection.recv()
        except (EOFError, OSError):
            self._lost(member, index)
            return
        waiting: asyncio.Future[Any] | None = member.ready if isinstance(message, Ready) else member.reply
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def _lost(self, member: _Member, index: int) -> None:
        asyncio.get_running_loop().remove_reader(member.connection.fileno())
        if member.doomed:
            return
        member.process.join(_STOP_TIMEOUT_S)
        error = WorkerError(f"worker {index} (process {member.process.pid}) died: {_how(member.process)}")
        for waiting in (member.ready, member.reply):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # it counts as seen, should nobody wait for it any more

    def _forget(self, member: _Member) -> None:
        if not member.connection.closed:
            asyncio.get_running_loop().remove_reader(member.connection.fileno())
            member.connection.close()


def _how(process: SpawnProcess) -> str:
    code = process.exitcode
    if code is None:
        return "it closed its pipe and still runs"
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    return f"exit status {code}; its last words are on stderr"
