"""What a store must be able to do: perform one effect, once, and say what happened.

The rule of this module: a store makes no decisions and never retries. It turns whatever went wrong
into one of the kinds below, so that the driver alone decides whether to ask again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from s3capture.effects import ObjectInfo
from s3capture.errors import StoreUnavailableError


class TransientStoreError(StoreUnavailableError):
    """This attempt failed; another may succeed.

    ``doubtful`` is True when the request may have been applied all the same (a lost reply, a timeout,
    a 5xx), False when the store surely did nothing (a refused connection, a throttle).
    """

    def __init__(self, message: str, *, doubtful: bool = True) -> None:
        self.doubtful = doubtful
        super().__init__(message)


class ContendedError(TransientStoreError):
    """The store saw a competing request on the same key (409) and asks us to look and ask again."""


class Store(Protocol):
    """A bucket. Safe to call from many threads; every method is one attempt (LIST: one for each page)."""

    def create(self, key: str, body: bytes) -> bool:
        """Create ``key`` if absent; True when this request created it, False when the store says it exists."""
        ...

    def get(self, key: str) -> bytes | None:
        """Return the body of ``key``, or None when there is no such key."""
        ...

    def get_range(self, key: str, start: int, length: int) -> bytes | None:
        """Return ``length`` bytes of ``key`` from ``start``, or None when there is no such key."""
        ...

    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        """Return every key under ``prefix``, each once, in no order."""
        ...

    def list_folders(self, prefix: str) -> Sequence[str]:
        """Return the common prefixes directly below ``prefix`` (which ends in ``/``), each ending in ``/``."""
        ...

    def list_loose(self, prefix: str) -> Sequence[str]:
        """Return the keys directly below ``prefix`` (which ends in ``/``), those in its folders left out."""
        ...

    def delete(self, keys: Sequence[str]) -> dict[str, str]:
        """Delete ``keys`` and return those that are still there, each with the store's reason."""
        ...

    def describe(self) -> str:
        """Name the store for messages: bucket and endpoint, no secrets."""
        ...

    def close(self) -> None:
        """Release connections. Idempotent."""
        ...
