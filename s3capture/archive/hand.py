"""What an archiver may do to the bucket: run protocol steps, patiently, and create the files of the archive.

The rule of this module: an archiver has all the time it needs, so one slow request costs patience and not the pack; a
file of the archive is created once, under a name that holds its digest, so creating it again changes nothing.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Self, TypeVar

from s3capture.driver import Driver
from s3capture.effects import Create, Created, Steps
from s3capture.protocol.bodies import Origin
from s3capture.store.base import Store

_T = TypeVar("_T")
_WIDTH = 16


class Hand:
    """Acts on ``store``, and creates packs in ``pack_store`` (the same bucket, another storage class, say).

    A context manager, since it has threads; it closes neither store. ``patience_s`` bounds one step, in seconds.
    """

    def __init__(self, store: Store, pack_store: Store | None = None, *, patience_s: float = 300.0) -> None:
        self.store = store
        self._patience_s = patience_s
        self._pool = ThreadPoolExecutor(_WIDTH, "s3capture-archive")
        self._driver = Driver(store, self._pool)
        self._pack_driver = Driver(pack_store or store, self._pool)
        self._by = f"{socket.gethostname()}:{os.getpid()}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=kind is None, cancel_futures=True)

    def origin(self) -> Origin:
        """Who acts now, with a fresh nonce."""
        return Origin(self._by, time.time(), uuid.uuid4().hex)

    def run(self, steps: Steps[_T], what: str) -> _T:
        """Run protocol steps; ``what`` names the act in errors. Raise ``StoreError`` and what the protocol raises."""
        return self._driver.run(steps, deadline=time.monotonic() + self._patience_s, what=what)

    def create(self, key: str, body: bytes, what: str, *, pack: bool = False) -> bool:
        """Create ``key``; False when it exists, and then holds ``body`` if its name is the digest of it."""
        driver = self._pack_driver if pack else self._driver
        return driver.run(_create(key, body), deadline=time.monotonic() + self._patience_s, what=what)


def _create(key: str, body: bytes) -> Steps[bool]:
    (answer,) = yield (Create(key, body),)
    return isinstance(answer, Created)
