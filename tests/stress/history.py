"""The logs: one append-only file for each process, two lines for each operation.

The rule of this module: the first line of an operation is written before it starts, the second after its answer is
known, each with one ``write`` to a file opened for appending. A process that is killed loses no line it wrote, and an
operation without a second line is one of which nothing is known. Times are the machine's monotonic clock, the same
for all processes: when one operation's ``end`` is below another's ``start``, the first had returned before the
second began.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from s3capture.errors import CaptureError

_T = TypeVar("_T")

UNFINISHED = "Unfinished"
FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class Event:
    """One operation: what was asked, when, and what came back.

    ``error`` is the class name of what it raised, empty when it returned, and ``Unfinished`` when its process died
    first (``end`` is infinite then). ``sent`` is what a write carried, ``result`` what a read returned.
    """

    actor: str
    op: str
    rollout: str
    call: str
    start: float
    end: float
    error: str = ""
    text: str = ""
    sent: str = ""
    result: dict[str, Any] = field(default_factory=dict)

    @property
    def acked(self) -> bool:
        """It returned normally."""
        return not self.error

    @property
    def seconds(self) -> float:
        """How long its caller waited."""
        return self.end - self.start

    def __str__(self) -> str:
        return f"{self.op} of call {self.call!r}, rollout {self.rollout!r}, by {self.actor}"


class Log:
    """The log of one process."""

    def __init__(self, folder: Path, actor: str) -> None:
        self.actor = actor
        self._fd = os.open(folder / f"{actor}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._numbers = itertools.count()

    async def perform(
        self,
        op: str,
        rollout: str,
        call: str,
        awaited: Awaitable[_T],
        *,
        sent: str = "",
        sum_up: Callable[[_T], dict[str, Any]] = lambda _: {},
    ) -> Event:
        """Await an operation and log it; an error of the package is a result, any other ends the process."""
        number, start = next(self._numbers), time.monotonic()
        self._write(n=number, op=op, rollout=rollout, call=call, sent=sent, start=start)
        error, text, result = "", "", {}
        try:
            result = sum_up(await awaited)
        except CaptureError as raised:
            error, text = type(raised).__name__, str(raised)[:400]
        end = time.monotonic()
        self._write(n=number, error=error, text=text, result=result, end=end)
        return Event(self.actor, op, rollout, call, start, end, error, text, sent, result)

    def finish(self) -> None:
        """Say that this process has done all it had to do."""
        self._write(n=-1, op=FINISHED)

    def _write(self, **fields: Any) -> None:
        os.write(self._fd, json.dumps(fields, separators=(",", ":")).encode() + b"\n")


def read(folder: Path) -> list[Event]:
    """All events of all logs in ``folder``, in order of their start."""
    events = [event for path in sorted(folder.glob("*.log")) for event in _read_one(path)]
    return sorted(events, key=lambda event: event.start)


def _read_one(path: Path) -> Iterator[Event]:
    started: dict[int, dict[str, Any]] = {}
    # Killed in the middle of a write, a process may leave half a line at the end, and only there.
    lines = path.read_bytes().split(b"\n")[:-1]
    for row in map(json.loads, lines):
        if row.get("op") == FINISHED:
            continue
        if "start" in row:
            started[row["n"]] = row
        else:
            first = started.pop(row.pop("n"))
            yield Event(actor=path.stem, **{k: v for k, v in first.items() if k != "n"}, **row)
    for row in started.values():
        yield Event(actor=path.stem, **{k: v for k, v in row.items() if k != "n"}, end=math.inf, error=UNFINISHED)


class Tail:
    """Follows the logs of processes that are still writing."""

    def __init__(self, folder: Path, pattern: str) -> None:
        self._folder, self._pattern = folder, pattern
        self._offsets: dict[Path, int] = {}
        self.finished: set[str] = set()

    def new(self) -> list[dict[str, Any]]:
        """The lines written since the last call, as they are in the logs."""
        rows: list[dict[str, Any]] = []
        for path in self._folder.glob(self._pattern):
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = self._offsets.get(path, 0) + len(whole)
            for row in map(json.loads, whole.splitlines()):
                if row.get("op") == FINISHED:
                    self.finished.add(path.stem)
                else:
                    rows.append(row | {"actor": path.stem})
        return rows
