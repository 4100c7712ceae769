"""What all endpoints have in common: settings, the shared runtime, waiting, closing.

The rule of this module: a constructor checks settings and does nothing else; work runs in the threads of the runtime
and is only awaited on the caller's event loop, whichever loop that is. So a cancelled await never stops a write
halfway, and ``close`` waits for what is still under way, inside the operations' own deadlines. An await ends with the
operation's timeout even where the store keeps a socket alive without ever answering.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from typing import Any, TypedDict, TypeVar

from s3capture.errors import ClosedError, StoreUnavailableError
from s3capture.runtime import Operation, Runtime, shared
from s3capture.settings import Settings
from s3capture.stats import OpStats
from s3capture.store.base import Store

_T = TypeVar("_T")

_GRACE_S = 2.0
_DRIVER_FIRST_S = 0.25
"""How much longer than the driver the await is patient: the driver's own error says more."""


class SettingsKwargs(TypedDict, total=False):
    """The flat settings of every endpoint; ``url`` and ``run`` are required. See ``s3capture.settings.Settings``."""

    url: str
    run: str
    endpoint_url: str | None
    region: str | None
    spill_dir: str | None
    expected_bucket_owner: str | None
    sse: str | None
    sse_kms_key_id: str | None
    retention: str
    addressing_style: str
    op_timeout_s: float
    mark_timeout_s: float
    connect_timeout_s: float
    read_timeout_s: float
    max_concurrency: int
    max_object_bytes: int
    lineage_cache_tokens: int


class Endpoint:
    """Base of sink, source, resolver and ledger. Safe to use from several threads, event loops and after a fork."""

    def __init__(self, store: Store | None, settings: dict[str, Any]) -> None:
        self.settings = Settings.of(**settings)
        self._store = store
        self._runtime_of: tuple[int, Runtime] | None = None
        self._pending: set[Future[Any]] = set()
        self._pending_lock = threading.Lock()
        self._closed = False

    @property
    def _runtime(self) -> Runtime:
        held = self._runtime_of
        if held is None or held[0] != os.getpid():
            if held is not None:
                self._renew_after_fork()
            held = self._runtime_of = (os.getpid(), shared(self.settings, self._store))
        return held[1]

    def _renew_after_fork(self) -> None:
        """In the child of a fork: what the parent had under way is the parent's; its locks may be held for ever."""
        self._pending, self._pending_lock = set(), threading.Lock()

    def stats(self) -> dict[str, OpStats]:
        """What the operations of this process on this run cost so far, by operation."""
        return self._runtime.stats.snapshot()

    async def close(self) -> None:
        """Wait for what is under way (bounded by the operations' deadlines) and let go. Idempotent."""
        self._closed = True
        if self._runtime_of is None or self._runtime_of[0] != os.getpid():
            return
        given = self.settings
        until = time.monotonic() + given.op_timeout_s + given.mark_timeout_s + given.read_timeout_s + _GRACE_S
        # What is under way may start more: a cancelled put that fails starts a mark.
        while (pending := self._under_way()) and (left := until - time.monotonic()) > 0:
            await asyncio.to_thread(wait_for_futures, pending, left)
        self._runtime_of = None

    def _under_way(self) -> list[Future[Any]]:
        with self._pending_lock:
            return list(self._pending)

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"this {type(self).__name__} of run {self.settings.run!r} was closed")

    def _track(self, future: Future[_T]) -> Future[_T]:
        with self._pending_lock:
            self._pending.add(future)
        future.add_done_callback(self._untrack)
        return future

    def _untrack(self, future: Future[Any]) -> None:
        with self._pending_lock:
            self._pending.discard(future)

    async def _result(self, future: Future[_T], what: str) -> _T:
        """Await ``future``; a cancelled await leaves it running.

        The driver ends an operation at its deadline, unless a single request never ends (a peer that drips, a read
        timeout above the deadline). Then the await of an ``Operation`` ends, and the operation stays under way.
        """
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()

        def answer() -> None:
            if not waiter.done():
                waiter.set_result(None)

        def wake(_: Future[_T]) -> None:
            # A loop that was closed meanwhile has nobody left who waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(answer)

        self._track(future).add_done_callback(wake)
        try:
            while not future.done():
                left = self._time_left(future)
                if left is not None and left <= 0:
                    raise StoreUnavailableError(
                        f"{what}: no answer within {self.settings.op_timeout_s:g} s; the request is still under way "
                        "and may yet be applied; the same call may be repeated"
                    )
                await asyncio.wait([waiter], timeout=left)
            return future.result()
        finally:
            del future  # a failed one holds its error, and the error this frame with the record in it

    def _time_left(self, future: Future[Any]) -> float | None:
        """Seconds until an await should look again or give up; None: as long as it takes."""
        if not isinstance(future, Operation):
            return None
        timeout = self.settings.op_timeout_s + _DRIVER_FIRST_S
        if future.deadline is not None:
            return future.deadline + _DRIVER_FIRST_S - time.monotonic()
        return timeout if future.patient else future.submitted + timeout - time.monotonic()
