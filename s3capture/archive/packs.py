"""Reading packs in the bucket, a range at a time.

The rule of this module: what was read is kept only as long as a bounded cache holds it, and no two threads fetch the
same thing at once; a pack that is damaged is an error for the rollouts in it and for nothing else.
"""

from __future__ import annotations

import io
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Generic, TypeVar

from s3capture.archive.format import decoding, opened, rows_of
from s3capture.archive.needs import give_back, parquet
from s3capture.errors import CorruptObjectError
from s3capture.keys import PackName, RunKeys
from s3capture.reader import Reader

_V = TypeVar("_V")
_FOOTER_GUESS = 256 * 1024
_DECODED_AT_ONCE = 2
"""Row groups that are fetched and decoded side by side: each takes some times its size meanwhile."""


class Cache(Generic[_V]):
    """Values by key, the least recently used forgotten once their weights exceed ``limit``; safe to share."""

    def __init__(self, limit: int, weigh: Callable[[_V], int]) -> None:
        self._limit, self._weigh = limit, weigh
        self._lock = threading.Lock()
        self._values: OrderedDict[Hashable, tuple[_V, int]] = OrderedDict()
        self._busy: dict[Hashable, threading.Lock] = {}
        self._weight = 0

    def get(self, key: Hashable, make: Callable[[], _V]) -> _V:
        """Return the value of ``key``, made by the first who asks."""
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key][0]
            busy = self._busy.setdefault(key, threading.Lock())
        with busy:
            with self._lock:
                if key in self._values:
                    self._values.move_to_end(key)
                    return self._values[key][0]
            value = make()
            with self._lock:
                weight = self._weigh(value)
                self._values[key] = (value, weight)
                self._weight += weight
                while self._weight > self._limit and len(self._values) > 1:
                    _, (_, forgotten) = self._values.popitem(last=False)
                    self._weight -= forgotten
                self._busy.pop(key, None)
        return value


class RangeFile(io.RawIOBase):
    """An object of the bucket as a file, read in ranges; the end of it is fetched once."""

    def __init__(self, reader: Reader, key: str, size: int) -> None:
        self._reader, self._key, self._size = reader, key, size
        self._at = 0
        self._tail_at = max(0, size - _FOOTER_GUESS)
        self._tail: bytes | None = None

    def readable(self) -> bool:
        """See ``io.RawIOBase``."""
        return True

    def seekable(self) -> bool:
        """See ``io.RawIOBase``."""
        return True

    def tell(self) -> int:
        """See ``io.RawIOBase``."""
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """See ``io.RawIOBase``."""
        at = offset + (0, self._at, self._size)[whence]
        if at < 0:
            raise ValueError(f"{at} is before the start of the file")
        self._at = at
        return self._at

    def read(self, size: int | None = -1) -> bytes:
        """Return up to ``size`` bytes from where the file stands."""
        rest = self._size - self._at
        length = rest if size is None or size < 0 else min(size, rest)
        if length <= 0:
            return b""
        start, self._at = self._at, self._at + length
        if start >= self._tail_at:
            if self._tail is None:
                self._tail = self._fetch(self._tail_at, self._size - self._tail_at)
            return self._tail[start - self._tail_at : start - self._tail_at + length]
        return self._fetch(start, length)

    def _fetch(self, start: int, length: int) -> bytes:
        body = self._reader.get_range(self._key, start, length)
        if body is None:
            raise CorruptObjectError(f"{self._key}: the archive needs this object and it is gone")
        return body


class PackReader:
    """The packs of one run: row groups on demand. ``sizes`` are their bytes as a LIST gave them."""

    def __init__(self, reader: Reader, keys: RunKeys, sizes: dict[PackName, int]) -> None:
        self._reader, self._keys, self._sizes = reader, keys, sizes
        self._footers: Cache[Any] = Cache(64, lambda _: 1)
        self._decoding = threading.Semaphore(_DECODED_AT_ONCE)
        self._groups: Cache[Any] = Cache(16 * 1024 * 1024, lambda table: int(table.nbytes))

    def group(self, name: PackName, number: int) -> Any:
        """Return one row group as a table. Raise ``CorruptObjectError`` or ``StoreError``."""
        return self._groups.get((name, number), lambda: self._read(name, number))

    def _read(self, name: PackName, number: int) -> Any:
        key = self._keys.archive.pack(name)
        if name not in self._sizes:
            raise CorruptObjectError(f"{key}: the archive needs this object and it is gone")
        size = self._sizes[name]
        with self._decoding, decoding(key):
            footer = self._footers.get(name, lambda: self._footer(key, size))
            with self._open(key, size) as source:
                table = rows_of(key, opened(key, source, "pack", self._keys, footer), number)
            give_back()
            return table

    def _footer(self, key: str, size: int) -> Any:
        with self._open(key, size) as source:
            return opened(key, source, "pack", self._keys).metadata

    def _open(self, key: str, size: int) -> Any:
        pyarrow, _ = parquet()
        return pyarrow.PythonFile(RangeFile(self._reader, key, size), mode="r")
