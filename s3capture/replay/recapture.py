"""A replayed rollout captured again, through the protocol that every capture goes through.

The rule of this module: at no moment may the copy look complete when it is not. Every call is begun before the first is
put, so whoever freezes the copy too early gets a masked rollout; and what is incomplete in the replay is marked in the
copy. Records go in as they are stored, deltas as deltas, so the copy has the same payloads, digests and lineage.
"""

from __future__ import annotations

import asyncio
from collections import deque
from types import TracebackType
from typing import Self, Unpack

from s3capture.endpoint import SettingsKwargs
from s3capture.errors import CaptureError, StoreError
from s3capture.replay.model import Problem, ProblemKind, ReplayedRollout
from s3capture.sink import S3TokenSink
from s3capture.store.base import Store

_AT_ONCE = 8


async def recapture(rollout: ReplayedRollout, sink: S3TokenSink) -> None:
    """Capture ``rollout`` again under its own id, in the run of ``sink``; frozen there, it gives the same entries.

    The copy is left open: who consumes it freezes it. Refusals are recorded with the same code and the time of now.
    Doing it again changes nothing. Raise what the sink raises: ``ConflictingPayloadError`` when other payloads are
    there under the same ids, ``TokenCaptureFrozenError`` when the copy was closed, a ``StoreError``.
    """
    if rollout.incomplete:
        await sink.mark_incomplete(rollout.rollout_id)
    begun = [call.call_id for call in rollout.calls] + [refusal.model_call_id for refusal in rollout.refusals]
    answers = await asyncio.gather(
        *(sink.begin_call(rollout.rollout_id, call) for call in begun), return_exceptions=True
    )
    if failed := next((answer for answer in answers if isinstance(answer, BaseException)), None):
        raise failed
    for call in rollout.calls:
        await sink.put(call.stored_entry())
    for refusal in rollout.refusals:
        await sink.record_engine_refusal(
            rollout.rollout_id,
            model_call_id=refusal.model_call_id,
            code=refusal.code,
            parent_call_id=refusal.parent_call_id,
            parent_resolution=refusal.parent_resolution,
        )


class Recapturing:
    """Captures rollouts again, a few side by side, for callers without an event loop; a context manager.

    A rollout that the new run refuses (it is frozen there, or holds other payloads) is a problem, and the others go on;
    a ``StoreError`` ends it.
    """

    def __init__(self, *, store: Store | None = None, **settings: Unpack[SettingsKwargs]) -> None:
        self._sink = S3TokenSink(store=store, **settings)
        self._runner = asyncio.Runner()
        self._under_way: deque[tuple[ReplayedRollout, asyncio.Task[None]]] = deque()

    def write(self, rollout: ReplayedRollout) -> list[Problem]:
        """Begin with ``rollout``; return what was refused of those that ended meanwhile. Raise ``StoreError``."""
        return self._runner.run(self._take(rollout))

    def finish(self) -> list[Problem]:
        """Wait for what is under way; return what was refused of it. Raise ``StoreError``."""
        return self._runner.run(self._wait(0))

    def notes(self) -> list[str]:
        """What is left to do, in sentences."""
        return [f"the rollouts of run {self._sink.settings.run!r} are open: whoever consumes them freezes them"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        try:
            self._runner.run(self._sink.close())
        finally:
            self._runner.close()

    async def _take(self, rollout: ReplayedRollout) -> list[Problem]:
        refused = await self._wait(_AT_ONCE - 1)
        self._under_way.append((rollout, asyncio.ensure_future(recapture(rollout, self._sink))))
        return refused

    async def _wait(self, most: int) -> list[Problem]:
        refused = []
        while len(self._under_way) > most:
            rollout, task = self._under_way.popleft()
            try:
                await task
            except StoreError:
                raise
            except CaptureError as error:
                text = f"the run {self._sink.settings.run!r} does not take it: {error}"
                refused.append(Problem(rollout.rollout_id, None, ProblemKind.INEXPRESSIBLE, text))
        return refused
