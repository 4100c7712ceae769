"""Read a store with patience and in parallel, for commands that look at a whole run.

The rule of this module: it only reads, so nothing it is used for can change a capture; answers come back in the order
of the questions, and only a bounded number is held at once, however large the run is.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import ParamSpec, Self, TypeVar

from tenacity import Retrying, retry_if_exception_type, stop_after_delay, wait_random_exponential

from s3capture.driver import Driver
from s3capture.effects import Answer, Effect, Get, List, ObjectInfo, Steps
from s3capture.protocol.steps import found, listed
from s3capture.store.base import Store, TransientStoreError

_T = TypeVar("_T")
_R = TypeVar("_R")
_P = ParamSpec("_P")


class Reader:
    """Reads ``store``; a context manager, since it has threads. It does not close the store.

    ``patience_s`` bounds the repeating of one request, in seconds. Until the store has answered once it is
    ``first_patience_s``: a wrong address should not take half a minute to show. ``width`` bounds the requests at once.
    """

    def __init__(
        self, store: Store, *, patience_s: float = 30.0, first_patience_s: float = 3.0, width: int = 16
    ) -> None:
        self.store = store
        self._patience_s, self._first_patience_s = patience_s, first_patience_s
        self._answered = False
        self._width = width
        self._pool = ThreadPoolExecutor(width, "s3capture-read")
        self._driver = Driver(store, self._pool)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        # Whoever interrupts a long listing wants the prompt back, not the rest of the requests.
        self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def list(self, prefix: str, what: str) -> tuple[ObjectInfo, ...]:
        """Return every row under ``prefix``; ``what`` names the act in errors. Raise ``StoreError``."""
        return listed(self._ask(List(prefix), what))

    def get(self, key: str, what: str) -> bytes | None:
        """Return the body of ``key``, or None when there is no such key. Raise ``StoreError``."""
        return found(self._ask(Get(key), what))

    def get_range(self, key: str, start: int, length: int) -> bytes | None:
        """Return ``length`` bytes of ``key`` from ``start``, or None when it is gone. Raise ``StoreError``."""
        return self._patiently(self.store.get_range, key, start, length)

    def folders(self, prefix: str) -> tuple[str, ...]:
        """Return the common prefixes directly below ``prefix``, sorted, each ending in ``/``. Raise ``StoreError``."""
        return tuple(sorted(self._patiently(self.store.list_folders, prefix)))

    def loose(self, prefix: str) -> tuple[str, ...]:
        """Return the keys directly below ``prefix``, in none of its folders, sorted. Raise ``StoreError``."""
        return tuple(sorted(self._patiently(self.store.list_loose, prefix)))

    def _patiently(self, ask: Callable[_P, _R], *args: _P.args, **named: _P.kwargs) -> _R:
        retrying = Retrying(
            retry=retry_if_exception_type(TransientStoreError),
            wait=wait_random_exponential(multiplier=0.05, max=2.0),
            stop=stop_after_delay(self._limit()),
            reraise=True,
        )
        answer = retrying(ask, *args, **named)
        self._answered = True
        return answer

    def map(
        self,
        work: Callable[[_T], _R],
        items: Iterable[_T],
        *,
        weigh: Callable[[_T], int] = lambda _: 0,
        room: int = 64 * 1024 * 1024,
        ahead: int | None = None,
    ) -> Generator[_R, None, None]:
        """Yield ``work(item)`` in the order of ``items``; ``work`` may use ``list``, ``get`` and ``folders``.

        At most ``ahead`` results (without it twice ``width``) are held at once, and no more than ``weigh`` puts into
        ``room`` (bytes, say); one item is always let through.
        """
        waiting: deque[tuple[Future[_R], int]] = deque()
        held, most = 0, 2 * self._width if ahead is None else ahead
        try:
            for item in items:
                weight = weigh(item)
                while waiting and (len(waiting) >= most or held + weight > room):
                    future, less = waiting.popleft()
                    held -= less
                    yield future.result()
                waiting.append((self._pool.submit(work, item), weight))
                held += weight
            while waiting:
                yield waiting.popleft()[0].result()
        finally:
            for future, _ in waiting:
                future.cancel()

    def _limit(self) -> float:
        return self._patience_s if self._answered else self._first_patience_s

    def _ask(self, effect: Effect, what: str) -> Answer:
        answer = self._driver.run(_one(effect), deadline=time.monotonic() + self._limit(), what=what)
        self._answered = True
        return answer


def _one(effect: Effect) -> Steps[Answer]:
    (answer,) = yield (effect,)
    return answer
