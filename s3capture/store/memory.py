"""A bucket in memory: the exact semantics the protocol rests on, for tests and the explorer.

The rule of this module: create-if-absent is atomic, reads and lists see every write that returned. It is
never durable, so nothing but tests uses it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from s3capture.effects import ObjectInfo


class MemoryStore:
    """A strongly consistent store in a dict; safe to share between threads and endpoints."""

    def __init__(self, name: str = "memory") -> None:
        self._name = name
        self._lock = threading.Lock()
        self._objects: dict[str, tuple[bytes, str]] = {}
        self._made = 0

    def create(self, key: str, body: bytes) -> bool:
        """See ``Store.create``."""
        with self._lock:
            if key in self._objects:
                return False
            self._made += 1
            self._objects[key] = (body, str(self._made))
            return True

    def get(self, key: str) -> bytes | None:
        """See ``Store.get``."""
        with self._lock:
            found = self._objects.get(key)
        return None if found is None else found[0]

    def get_range(self, key: str, start: int, length: int) -> bytes | None:
        """See ``Store.get_range``."""
        body = self.get(key)
        return None if body is None else body[start : start + length]

    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        """See ``Store.list``."""
        with self._lock:
            return [
                ObjectInfo(key, len(body), stamp)
                for key, (body, stamp) in self._objects.items()
                if key.startswith(prefix)
            ]

    def list_folders(self, prefix: str) -> Sequence[str]:
        """See ``Store.list_folders``."""
        with self._lock:
            rests = [key[len(prefix) :] for key in self._objects if key.startswith(prefix)]
        return sorted({prefix + rest.split("/", 1)[0] + "/" for rest in rests if "/" in rest})

    def list_loose(self, prefix: str) -> Sequence[str]:
        """See ``Store.list_loose``."""
        with self._lock:
            return [key for key in self._objects if key.startswith(prefix) and "/" not in key[len(prefix) :]]

    def delete(self, keys: Sequence[str]) -> dict[str, str]:
        """See ``Store.delete``."""
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)
        return {}

    def overwrite(self, key: str, body: bytes) -> None:
        """Put ``body`` whatever was there: what no endpoint ever does, for tests of damage."""
        with self._lock:
            self._made += 1
            self._objects[key] = (body, str(self._made))

    def describe(self) -> str:
        """See ``Store.describe``."""
        return f"the in-memory store {self._name!r}"

    def close(self) -> None:
        """See ``Store.close``."""
