"""Requests that wait at a named place until the test lets them go, and what the test can know meanwhile.

The rule of this module: no sleeps and no guesses. A test waits until the request *is* there, or until its client *has*
hung up, then acts.
"""

from __future__ import annotations

import select
import socket
import threading
from dataclasses import dataclass, field

PATIENCE_S = 30.0


@dataclass
class Hold:
    """One named place: a request has arrived, its client has hung up, it may go on."""

    name: str
    arrived: threading.Event = field(default_factory=threading.Event)
    abandoned: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)

    def await_arrival(self) -> None:
        """Return when a request waits here."""
        assert self.arrived.wait(PATIENCE_S), f"no request came to {self.name!r}"

    def await_abandoned(self) -> None:
        """Return when the client of the request that waits here has closed its connection."""
        assert self.abandoned.wait(PATIENCE_S), f"nobody hung up at {self.name!r}"

    def release(self) -> None:
        """Let the request go on, and all later ones."""
        self.released.set()


class Holds:
    """The named places of one server."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._at: dict[str, Hold] = {}

    def at(self, name: str) -> Hold:
        """The place of that name, made when first asked for."""
        with self._lock:
            return self._at.setdefault(name, Hold(name))

    def wait(self, name: str, connection: socket.socket) -> None:
        """Wait in a server's thread until the place is released or the client hangs up."""
        hold = self.at(name)
        hold.arrived.set()
        while not hold.released.wait(0.02):
            readable, _, _ = select.select([connection], [], [], 0)
            if readable and connection.recv(1, socket.MSG_PEEK) == b"":
                hold.abandoned.set()
                return

    def release_all(self) -> None:
        """Let everything go: the test is over."""
        with self._lock:
            for hold in self._at.values():
                hold.release()
