"""A TCP gate before the server, as a load balancer is: a server that has just started gets no traffic yet.

The rule of this module: bytes pass unchanged while the gate is open; while it is shut, every connection is dropped.
SeaweedFS's create-if-absent is not exclusive in the first moments after a start (docs/operations.md, measured by
tests/benchmarks/start_window.py), so whoever relies on it keeps writers away for that long.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit


class Gate:
    """Forwards ``self.endpoint_url`` to ``endpoint_url`` while it is open; made by ``gate``."""

    def __init__(self, endpoint_url: str) -> None:
        parts = urlsplit(endpoint_url)
        self._to = (str(parts.hostname), int(parts.port or 0))
        self._loop = asyncio.new_event_loop()
        self._open = True
        self._writers: set[asyncio.StreamWriter] = set()
        self._server = self._loop.run_until_complete(asyncio.start_server(self._pass, "127.0.0.1", 0))
        self.endpoint_url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._thread = threading.Thread(target=self._loop.run_forever, name="gate")
        self._thread.start()

    def shut(self) -> None:
        """Drop every connection, and every new one."""
        self._call(self._shut)

    def open(self) -> None:
        """Let connections pass again."""
        self._call(self._reopen)

    def end(self) -> None:
        """Stop for good."""
        self._call(self._shut)
        self._call(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, act: object) -> None:
        done = threading.Event()

        def run() -> None:
            act()  # type: ignore[operator]
            done.set()

        self._loop.call_soon_threadsafe(run)
        done.wait()

    def _shut(self) -> None:
        self._open = False
        for writer in self._writers:
            writer.transport.abort()

    def _reopen(self) -> None:
        self._open = True

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._open:
            writer.transport.abort()
            return
        self._writers.add(writer)
        try:
            onward_reader, onward = await asyncio.open_connection(*self._to)
            self._writers.add(onward)
            try:
                await asyncio.gather(_copy(reader, onward), _copy(onward_reader, writer))
            finally:
                self._writers.discard(onward)
                onward.transport.abort()
        except OSError:
            pass  # the server is away: the client sees its connection dropped, as it would without the gate
        finally:
            self._writers.discard(writer)
            writer.transport.abort()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    writer.transport.abort()


@contextmanager
def gate(endpoint_url: str) -> Iterator[Gate]:
    """A gate before ``endpoint_url``, open at first."""
    made = Gate(endpoint_url)
    try:
        yield made
    finally:
        made.end()
