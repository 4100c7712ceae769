"""Run protocol generators against a store: the only place that retries, waits and gives up.

The rule of this module: an effect is repeated until its answer is known or the deadline of its operation has come;
what an answer *means* is the protocol's business. A create that ended in doubt and then succeeds is reported as
not the first attempt; a 409 means look, and ask again; whatever is still unknown at the deadline is an error.
Retrying is tenacity's: exponential, with full jitter, so that many writers do not come back in step.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor, wait
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeVar

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from s3capture.effects import (
    Absent,
    Answer,
    Batch,
    Create,
    Created,
    Delete,
    Deleted,
    Effect,
    Exists,
    Found,
    Get,
    List,
    Listed,
    Steps,
)
from s3capture.errors import StoreUnavailableError
from s3capture.store.base import ContendedError, Store, TransientStoreError

_T = TypeVar("_T")

_FIRST_WAIT_S = 0.05
_LONGEST_WAIT_S = 2.0
_WAIT = wait_random_exponential(multiplier=_FIRST_WAIT_S, max=_LONGEST_WAIT_S)
_AGAIN = ("InternalError", "SlowDown", "ServiceUnavailable", "RequestTimeout", "Throttl", "OperationAborted")


@dataclass(slots=True)
class Tally:
    """What one operation cost: sequential round trips, and requests on the wire (retries and probes apart)."""

    trips: int = 0
    requests: int = 0
    retries: int = 0
    _lock: Lock = field(default_factory=Lock)

    def attempt(self, number: int) -> None:
        """Count one wire attempt; ``number`` is 1 for the first of its effect."""
        with self._lock:
            if number == 1:
                self.requests += 1
            else:
                self.retries += 1


class Driver:
    """Performs the effects of one process on one store; ``pool`` runs the effects of a batch side by side."""

    def __init__(
        self,
        store: Store,
        pool: Executor,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._pool = pool
        self._clock = clock
        self._sleep = sleep

    def run(self, steps: Steps[_T], *, deadline: float, what: str, tally: Tally | None = None) -> _T:
        """Run ``steps`` to its end and return its result; ``deadline`` is a reading of the monotonic clock.

        Raise what the protocol raises; ``StoreUnavailableError`` naming ``what`` when the deadline came first;
        another ``StoreError`` when repeating cannot help.
        """
        tally = tally or Tally()
        try:
            batch = next(steps)
            while True:
                batch = steps.send(self._perform(batch, deadline, what, tally))
        except StopIteration as stop:
            result: _T = stop.value
            return result
        finally:
            steps.close()

    def _perform(self, batch: Batch, deadline: float, what: str, tally: Tally) -> tuple[Answer, ...]:
        tally.trips += 1
        first, *others = batch
        # The operation's own thread takes one effect, so a batch of one needs no other thread.
        running = [self._pool.submit(self._repeat, effect, deadline, what, tally) for effect in others]
        try:
            answer = self._repeat(first, deadline, what, tally)
            return (answer, *(future.result() for future in running))
        finally:
            # Whatever failed, nothing of this batch may be under way when the operation ends. The futures are let
            # go of, or the traceback of a failure would keep the bodies of the batch alive.
            wait(running)
            del running, others, batch

    def _repeat(self, effect: Effect, deadline: float, what: str, tally: Tally) -> Answer:
        left = deadline - self._clock()
        if left <= 0:
            raise StoreUnavailableError(
                f"{what}: no time left to ask {self._store.describe()}; it is slow or out of reach, "
                "or more operations wait than max_concurrency lets through"
            )
        doubtful = False
        retrying = Retrying(
            retry=retry_if_exception_type(TransientStoreError),
            # No wait goes past the deadline, so the last try is made with whatever time is left.
            wait=lambda state: min(_WAIT(state), max(0.0, left - (state.seconds_since_start or 0.0))),
            stop=stop_after_delay(left),
            sleep=self._sleep,
            reraise=True,
        )
        try:
            for attempt in retrying:
                with attempt:
                    tally.attempt(attempt.retry_state.attempt_number)
                    try:
                        return self._once(effect, resent=doubtful)
                    except TransientStoreError as error:
                        doubtful = doubtful or error.doubtful
                        raise
        except TransientStoreError as error:
            if isinstance(effect, Delete):
                # Deleting is housekeeping behind a decision: what is left is told, and the decision stands.
                return Deleted(tuple((key, str(error)) for key in effect.keys))
            raise StoreUnavailableError(f"{what}: {error}") from error
        raise AssertionError("unreachable: tenacity returns or raises")

    def _once(self, effect: Effect, *, resent: bool) -> Answer:
        match effect:
            case Create(key, body):
                try:
                    made = self._store.create(key, body)
                except ContendedError as contended:
                    # A competing request, which may have been a delete: only a look can tell. Should the look
                    # fail, the create is still in doubt.
                    try:
                        if self._store.get(key) is not None:
                            return Exists()
                    except TransientStoreError as error:
                        raise TransientStoreError(str(error), doubtful=contended.doubtful) from error
                    raise
                return Created(first_attempt=not resent) if made else Exists()
            case Get(key):
                body_or_none = self._store.get(key)
                return Absent() if body_or_none is None else Found(body_or_none)
            case List(prefix):
                return Listed(tuple(self._store.list(prefix)))
            case Delete(keys):
                return self._delete(keys)

    def _delete(self, keys: tuple[str, ...]) -> Deleted:
        left = self._store.delete(keys)
        for _ in range(3):
            passing = [key for key, reason in left.items() if any(word in reason for word in _AGAIN)]
            if not passing:
                break
            self._sleep(_FIRST_WAIT_S)
            left = {key: reason for key, reason in left.items() if key not in passing} | self._store.delete(passing)
        return Deleted(tuple(sorted(left.items())))
