"""What the endpoints of one process share: client, threads, probe, spill, and who began which call.

The rule of this module: endpoints with equal settings share one runtime, made at first use and never by a
constructor (servers build endpoints twice in each worker and close only one). A forked child makes its own:
threads, sockets and above all the privilege of a begun call are never inherited.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from s3capture.driver import Driver, Tally
from s3capture.effects import Steps
from s3capture.errors import ClosedError, StoreUnavailableError, UnsupportedStoreError
from s3capture.keys import RolloutKeys, RunKeys
from s3capture.protocol.bodies import Origin
from s3capture.protocol.probing import probe
from s3capture.settings import Settings
from s3capture.spill import Spill, Target
from s3capture.spilling import Spilling
from s3capture.stats import Stats
from s3capture.store.base import Store
from s3capture.store.boto import BotoStore

_log = logging.getLogger("s3capture")
_T = TypeVar("_T")

_MAX_BEGUN = 200_000
_MARK_THREADS = 8


class Operation(Future[_T]):
    """An operation under way. ``deadline`` (monotonic seconds) is None until a thread has taken it."""

    def __init__(self, *, patient: bool) -> None:
        super().__init__()
        self.patient = patient
        self.submitted = time.monotonic()
        self.deadline: float | None = None


class Runtime:
    """The shared part of all endpoints with the same settings in this process."""

    def __init__(self, settings: Settings, store: Store | None = None) -> None:
        self.settings = settings
        self.keys = RunKeys(settings.prefix, settings.run)
        self.store: Store = BotoStore(settings) if store is None else store
        self.stats = Stats()
        self.by = f"{socket.gethostname()}:{os.getpid()}"
        width = settings.max_concurrency
        self._ops = ThreadPoolExecutor(width, "s3capture-op")
        self._effects = ThreadPoolExecutor(width, "s3capture-io")
        # Marks have threads of their own, so that a queue of stuck puts cannot delay the call for help.
        # Three pools, since each waits for the next: a pool whose tasks wait for tasks of their own can fill up with
        # waiters and stand still for ever.
        self._marks = ThreadPoolExecutor(_MARK_THREADS, "s3capture-mark")
        self._mark_attempts = ThreadPoolExecutor(_MARK_THREADS, "s3capture-mark-try")
        self._mark_effects = ThreadPoolExecutor(_MARK_THREADS, "s3capture-mark-io")
        self.driver = Driver(self.store, self._effects)
        self.spilling = Spilling(
            spill=Spill(settings.spill_path),
            target=Target(settings.address, settings.bucket, settings.prefix, settings.run),
            keys=self.keys,
            publish=_weakly(self._publish),
            background=self._marks.submit,
        )
        self._probe_lock = threading.Lock()
        self._probed = False
        self._begun_lock = threading.Lock()
        self._begun: OrderedDict[tuple[str, str], bool] = OrderedDict()
        pools = (self._ops, self._effects, self._marks, self._mark_attempts, self._mark_effects)
        # A store of the caller's own is the caller's to close: other runs may be using it.
        self._finalizer = weakref.finalize(self, _shut_down, os.getpid(), pools, self.store if store is None else None)

    # -- who acts -----------------------------------------------------------------------------------------

    def origin(self) -> Origin:
        """Who acts now, with a fresh nonce."""
        return Origin(self.by, time.time(), uuid.uuid4().hex)

    def rollout(self, rollout_id: str) -> RolloutKeys:
        """The keys of a rollout (validated by the caller)."""
        return self.keys.rollout(rollout_id)

    def grant(self, rollout_id: str, call: str) -> None:
        """Remember that this process created the intent of ``call``: its first put may be one trip.

        A call that this process has put already has no first put left, whatever order the calls came in.
        """
        with self._begun_lock:
            self._begun.setdefault((rollout_id, call), True)
            self._forget_oldest()

    def use_grant(self, rollout_id: str, call: str) -> bool:
        """Take the privilege away and say whether it was there; a second put never has it."""
        with self._begun_lock:
            granted = self._begun.pop((rollout_id, call), False)
            self._begun[(rollout_id, call)] = False
            self._forget_oldest()
            return granted

    def _forget_oldest(self) -> None:
        while len(self._begun) > _MAX_BEGUN:
            self._begun.popitem(last=False)

    # -- running operations -------------------------------------------------------------------------------

    def submit(
        self,
        op: str,
        what: str,
        make: Callable[[], Steps[_T]],
        *,
        writes: bool = True,
        publishes: bool | None = None,
        drains: str | None = None,
        patient: bool = False,
    ) -> Operation[_T]:
        """Run the generator of ``make`` in a thread, inside ``op_timeout_s`` from when a thread takes it.

        Whoever ``writes`` has the store checked at first use, and spilled marks published behind a success, unless it
        ``publishes`` nothing: what only reads and deletes must not create, or a deleted rollout comes back as a mark.
        ``drains`` names a rollout whose spilled marks are published first, so that the operation counts them.
        ``patient`` says that it may wait for a thread as long as it takes: a trainer that freezes thousands of
        rollouts at once wants them all. Otherwise that wait is bounded by ``op_timeout_s`` as well.
        """

        def run(deadline: float, tally: Tally) -> _T:
            if writes:
                self._ensure_probed(deadline)
            if drains is not None:
                self.spilling.drain(rollout=drains, deadline=deadline)
            result = self.driver.run(make(), deadline=deadline, what=what, tally=tally)
            if writes if publishes is None else publishes:
                self.spilling.succeeded()
            return result

        return self.work(op, what, run, patient=patient)

    def work(self, op: str, what: str, run: Callable[[float, Tally], _T], *, patient: bool = False) -> Operation[_T]:
        """Run ``run(deadline, tally)`` in a thread: for operations of more than one generator. See ``submit``."""
        operation: Operation[_T] = Operation(patient=patient)
        self._ops.submit(self._take, operation, op, what, run)
        return operation

    def _take(self, operation: Operation[_T], op: str, what: str, run: Callable[[float, Tally], _T]) -> None:
        now, timeout = time.monotonic(), self.settings.op_timeout_s
        operation.set_running_or_notify_cancel()
        try:
            if not operation.patient and now - operation.submitted > timeout:
                raise StoreUnavailableError(
                    f"{what}: waited {timeout:g} s for one of max_concurrency={self.settings.max_concurrency} threads "
                    "and was not begun; the store is slow or out of reach, or this process asks for too much at once"
                )
            operation.deadline = now + timeout
            operation.set_result(self._measured(op, lambda tally: run(now + timeout, tally)))
        except BaseException as error:  # noqa: BLE001 - whatever it was, whoever awaits the operation must see it
            operation.set_exception(error)
        finally:
            del operation  # a failed one holds its error, and the error this frame

    def mark(self, what: str, make: Callable[[], Steps[None]], spill: Callable[[str], None]) -> Future[None]:
        """Run a mark in the threads of its own; past ``mark_timeout_s``, or on any store error, ``spill`` it."""
        deadline = time.monotonic() + self.settings.mark_timeout_s

        def attempt(tally: Tally) -> None:
            self._ensure_probed(deadline)
            Driver(self.store, self._mark_effects).run(make(), deadline=deadline, what=what, tally=tally)

        def run(tally: Tally) -> None:
            if self.spilling.mark(lambda: self._mark_attempts.submit(attempt, tally), deadline, spill):
                self.spilling.succeeded()

        return self._marks.submit(self._measured, "mark_incomplete", run)

    def check_store(self) -> None:
        """Probe the store now, in this thread, instead of at the first write."""
        self._ensure_probed(time.monotonic() + self.settings.op_timeout_s)

    def _measured(self, op: str, run: Callable[[Tally], _T]) -> _T:
        tally, start, failure = Tally(), time.monotonic(), ""
        try:
            return run(tally)
        except BaseException as error:
            failure = type(error).__name__
            raise
        finally:
            self.stats.add(op, time.monotonic() - start, tally, failure)

    def _publish(self, steps: Steps[None], what: str, deadline: float | None) -> None:
        limit = time.monotonic() + self.settings.op_timeout_s if deadline is None else deadline
        self._ensure_probed(limit)
        self.driver.run(steps, deadline=limit, what=what)

    def _ensure_probed(self, deadline: float) -> None:
        if self._probed:
            return
        what = "check of the store at first use"
        if not self._probe_lock.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise StoreUnavailableError(f"{what}: {self.store.describe()} has not answered it in time")
        try:
            if self._probed:
                return
            honoured = self.driver.run(probe(self.keys, uuid.uuid4().hex), deadline=deadline, what=what)
            if not honoured:
                raise UnsupportedStoreError(
                    f"{self.store.describe()} does not honour create-if-absent (If-None-Match: *): a second create of "
                    "one key succeeded, so records could be overwritten unseen. Use a store that supports "
                    "conditional writes (AWS S3, SeaweedFS, recent MinIO, R2), or upgrade this one; "
                    "'s3capture doctor' shows what it does"
                )
            self._probed = True
        finally:
            self._probe_lock.release()


def _weakly(method: Callable[..., None]) -> Callable[..., None]:
    """``method`` without keeping its object alive: threads and sockets must go with the last endpoint."""
    reference = weakref.WeakMethod(method)

    def call(*args: object) -> None:
        alive = reference()
        if alive is None:
            raise ClosedError("every endpoint of this run was closed; the spilled marks stay for the next process")
        alive(*args)

    return call


def _shut_down(pid: int, pools: tuple[ThreadPoolExecutor, ...], store: Store | None) -> None:
    if pid != os.getpid():
        return  # in the child of a fork: the threads are the parent's, and their locks may be held for ever
    for pool in pools:
        pool.shutdown(wait=False)
    if store is not None:
        store.close()


_registry_lock = threading.Lock()
_registry: weakref.WeakValueDictionary[tuple[int, Settings, int], Runtime] = weakref.WeakValueDictionary()


def _after_fork_in_child() -> None:
    global _registry_lock, _registry  # noqa: PLW0603 - a lock held by another thread at the fork never opens again
    _registry_lock = threading.Lock()
    _registry = weakref.WeakValueDictionary()


if hasattr(os, "register_at_fork"):  # not where there is no fork
    os.register_at_fork(after_in_child=_after_fork_in_child)


def shared(settings: Settings, store: Store | None = None) -> Runtime:
    """Return the runtime of this process for ``settings`` (and, in tests, a store of one's own)."""
    key = (os.getpid(), settings, id(store) if store is not None else 0)
    with _registry_lock:
        found = _registry.get(key)
        if found is None:
            found = _registry[key] = Runtime(settings, store)
        return found
