"""When a mark goes to the local disk, and when it comes back from there.

The rule of this module: a mark is acknowledged only when it is in the bucket or durably on disk. A spilled mark
is published under the id it was given at first, so publishing twice changes nothing; it is drained at first
use, after the next success, and by a freeze or drop of its rollout in any process that shares the directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from s3capture.effects import Steps
from s3capture.errors import CaptureError, SpillError, StoreError, TokenCaptureRetiredError
from s3capture.keys import RunKeys
from s3capture.protocol import bodies
from s3capture.protocol.bodies import Origin
from s3capture.protocol.writing import mark_incomplete
from s3capture.spill import Spill, SpilledMark, Target

_log = logging.getLogger("s3capture")

_REST_S = 5.0
"""How long a drain that left something behind is not repeated: what it left may be nothing that a drain can take."""


@dataclass(frozen=True, slots=True)
class Drained:
    """What a drain did: marks published, marks whose rollout was retired before, and what still waits and why."""

    published: tuple[SpilledMark, ...] = ()
    late: tuple[SpilledMark, ...] = ()
    waiting: tuple[tuple[str, str], ...] = ()
    damaged: tuple[Path, ...] = ()


def mark_steps(keys: RunKeys, mark: SpilledMark) -> Steps[None]:
    """The protocol steps that publish a spilled mark."""
    rollout = keys.rollout(mark.rollout)
    body = bodies.mark(rollout, mark.call, Origin(mark.by, mark.at, mark.mark_id), mark.reason)
    return mark_incomplete(rollout, mark.call, mark.mark_id, body)


class Spilling:
    """The spill of one run in one process."""

    def __init__(
        self,
        *,
        spill: Spill,
        target: Target,
        keys: RunKeys,
        publish: Callable[[Steps[None], str, float | None], None],
        background: Callable[[Callable[[], Any]], Future[Any]],
    ) -> None:
        self._spill = spill
        self._target = target
        self._keys = keys
        self._publish = publish
        self._background = background
        self._lock = threading.Lock()
        # At first use there may be files of a process that died.
        self._due = True
        self._draining = False
        self._blind = False
        self._not_before = 0.0

    def mark(self, attempt: Callable[[], Future[None]], deadline: float, spill: Callable[[str], None]) -> bool:
        """Wait for ``attempt`` until ``deadline``; on any store error, or no answer by then, call ``spill``.

        Return whether the store has the mark. Where it was spilled after no answer, the attempt may still
        succeed: the mark is then in both places, under one id.
        """
        left = deadline - time.monotonic()
        try:
            if left <= 0:
                raise StoreError("no time was left to ask the store")
            attempt().result(timeout=left)
            return True
        except TokenCaptureRetiredError:
            raise
        except FutureTimeoutError:
            self._to_disk(spill, StoreError("the store did not answer in time"))
        except Exception as error:  # noqa: BLE001 - whatever kept the mark from the store, it must not be lost
            self._to_disk(spill, error)
        return False

    def _to_disk(self, spill: Callable[[str], None], error: Exception) -> None:
        try:
            spill(str(error) or type(error).__name__)
        except SpillError as disk:
            raise SpillError(f"{disk}; before that the store had failed: {error}") from error
        with self._lock:
            self._due = True

    def write(self, mark: SpilledMark) -> None:
        """Write ``mark`` durably; raise ``SpillError`` when the disk fails too."""
        path = self._spill.write(mark)
        _log.warning(
            "run %s, rollout %r, call %r: marked incomplete in the local spill (%s), since %s",
            mark.run, mark.rollout, mark.call, path, mark.reason,
        )  # fmt: skip

    def succeeded(self) -> None:
        """The store answered: drain in the background what waits, if anything may."""
        with self._lock:
            if not self._due or self._draining or time.monotonic() < self._not_before:
                return
            self._draining, self._due = True, False
        try:
            self._background(self._drain_quietly)
        except RuntimeError:  # the interpreter or the runtime is shutting down; the files stay for the next process
            with self._lock:
                self._draining = False

    def _drain_quietly(self) -> None:
        try:
            drained = self.drain()
            again = bool(drained.waiting)
        except CaptureError as error:
            _log.warning("the local spill of run %s could not be drained: %s", self._keys.run, error)
            again = True
        finally:
            with self._lock:
                self._draining = False
        if again:
            with self._lock:
                self._due, self._not_before = True, time.monotonic() + _REST_S

    def drain(self, *, rollout: str | None = None, deadline: float | None = None) -> Drained:
        """Publish the marks that wait, of one rollout or of all.

        With ``rollout``, a store error that keeps one of its marks from being published is raised, and so is a spill
        that cannot be read: the caller is about to judge that rollout and must not do so without them. Without
        ``rollout``, it is reported in ``waiting``.
        A mark whose rollout was retired meanwhile is set aside as evidence.
        """
        try:
            scan = self._spill.pending(target=self._target, rollout=rollout)
            damaged = tuple(self._spill.damaged(target=self._target, rollout=rollout)) if rollout else scan.damaged
        except SpillError as error:
            if rollout is not None:
                # Cannot tell whether a mark of this rollout waits there, so nothing may be judged.
                raise
            if not self._blind:
                _log.error("the local spill cannot be read, so marks spilled there are not published: %s", error)
            self._blind = True
            return Drained(waiting=(("", str(error)),))
        published: list[SpilledMark] = []
        late: list[SpilledMark] = []
        waiting = [(unread.path.name, unread.why) for unread in scan.unread]
        for mark in scan.marks:
            try:
                self._publish(mark_steps(self._keys, mark), _name(mark), deadline)
            except TokenCaptureRetiredError as error:
                self._spill.set_late(mark, str(error))
                late.append(mark)
                _log.error("%s: the rollout was retired before this spilled mark came back: %s", _name(mark), error)
            except CaptureError as error:
                if rollout is not None:
                    raise
                waiting.append((_name(mark), str(error)))
                if isinstance(error, StoreError):
                    waiting.extend((_name(m), "not tried") for m in scan.marks[scan.marks.index(mark) + 1 :])
                    break
            else:
                self._spill.settle(mark)
                published.append(mark)
        if rollout is not None:
            self._mark_for_unreadable(rollout, [*damaged, *(u.path for u in scan.unread)], deadline)
        return Drained(tuple(published), tuple(late), tuple(waiting), damaged)

    def _mark_for_unreadable(self, rollout: str, paths: list[Path], deadline: float | None) -> None:
        """A file that cannot be read still says by its name which rollout it would have marked."""
        for path in paths:
            # One id for one file, so that reading it again marks nothing twice.
            mark_id = hashlib.sha256(path.name.encode("utf-8", "surrogateescape")).hexdigest()[:32]
            mark = SpilledMark(
                bucket=self._target.bucket, prefix=self._target.prefix, endpoint_url=self._target.endpoint_url,
                run=self._target.run, rollout=rollout, call="", mark_id=mark_id, at=0.0,
                reason="a spilled mark of this rollout cannot be read", by="",
            )  # fmt: skip
            with contextlib.suppress(TokenCaptureRetiredError):
                self._publish(mark_steps(self._keys, mark), _name(mark), deadline)


def _name(mark: SpilledMark) -> str:
    return f"spilled mark of run {mark.run!r}, rollout {mark.rollout!r}, call {mark.call!r}"
