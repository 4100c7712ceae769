"""The spill itself: keep a mark, find it again, let it go.

The rule of this module: a mark's file goes only after something as durable stands for it (the mark in S3, a copy
in ``late/``, or the same bytes in ``damaged/``), and what cannot be judged stays and is reported. If a removal moves
before what replaces it, a crash in between loses the mark.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from s3capture.errors import SpillError
from s3capture.spill import content, disk
from s3capture.spill.content import DamagedError, NewerError, SpilledMark, Target

_LATE, _DAMAGED, _PROBE = "late", "damaged", f"{disk.TEMP}probe"

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class UnreadFile:
    """A file that was left in place because this process cannot judge it, and why."""

    path: Path
    why: str


@dataclass(frozen=True, slots=True)
class SpillScan:
    """What a scan found.

    ``marks`` wait to be published, oldest first. ``damaged`` are files that this scan set aside, at their new
    place. ``unread`` are files of a newer format, or that may not or could not be read: each may be a mark,
    so a caller must not take an empty ``marks`` for "nothing waits" while ``unread`` is not empty.
    """

    marks: tuple[SpilledMark, ...] = ()
    damaged: tuple[Path, ...] = ()
    unread: tuple[UnreadFile, ...] = ()


class Spill:
    """The local directory of marks. Thread-safe, process-safe, usable after a fork.

    Nothing is opened or made before the first call. A relative ``directory`` is pinned to the working
    directory of this moment, so that a later chdir does not lead to two spills.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = Path(directory).absolute()

    def write(self, mark: SpilledMark) -> Path:
        """Keep ``mark`` durably and return its file; a mark that is there already stays as it is.

        The first write makes the directory, and missing parents, for this user alone. Raises ``SpillError``,
        and leaves no partial file, when the disk refuses or the directory cannot be trusted: a symbolic link,
        another user's, or writable by others. After it the mark may be there, but is not promised.
        """
        run, rollout, call = map(content.short, (mark.run, mark.rollout, mark.call))
        what = f"cannot keep the incomplete mark of run {run}, rollout {rollout}, call {call} in the spill directory"
        advice = "this mark is lost unless S3 takes it: free or fix that directory, or set another spill_dir"
        with self._telling(what, advice), disk.opened(self.directory, create=True) as folder:
            _keep(folder, self.directory, mark)
            disk.sync_ancestor(self.directory.parent)
        return self.directory / content.file_name(mark)

    def pending(self, *, target: Target | None = None, rollout: str | None = None) -> SpillScan:
        """Read the marks that wait, of one ``target`` and ``rollout`` if given; a missing directory has none.

        A damaged file is moved to ``damaged/`` and stops nothing. Temp files that a crash left are removed
        after a day. Raises ``SpillError`` when the directory itself cannot be read or trusted.
        """
        marks: list[SpilledMark] = []
        damaged: list[Path] = []
        unread: list[UnreadFile] = []
        for folder, name in self._listed("", content.pattern(target, rollout)):
            try:
                found = self._judge(folder, name)
            except FileNotFoundError:
                continue  # settled by another process after we listed it
            except (NewerError, OSError) as problem:
                unread.append(UnreadFile(self.directory / name, str(problem)))
                _log.warning("spill file %r was left in place: %s", str(self.directory / name), problem)
                continue
            if isinstance(found, Path):
                damaged.append(found)
            elif target in (None, found.target) and rollout in (None, found.rollout):
                marks.append(found)  # compared in full: the name holds only 64 bits of each digest
        marks.sort(key=lambda mark: (mark.at, mark.mark_id))
        return SpillScan(tuple(marks), tuple(damaged), tuple(unread))

    def settle(self, mark: SpilledMark) -> bool:
        """Remove the file of ``mark``, which is published; False if it stays (publishing again is harmless).

        Not synced: a removal that a power cut undoes costs one more publication.
        """
        try:
            with contextlib.suppress(FileNotFoundError), disk.opened(self.directory) as folder:
                os.unlink(content.file_name(mark), dir_fd=folder)
        except OSError as error:
            self._warn_stays(mark, error)
            return False
        return True

    def set_late(self, mark: SpilledMark, why: str) -> bool:
        """Move ``mark`` to ``late/`` with the reason; False if it could not be, and then it goes on waiting.

        For a mark whose rollout was retired before it could be published: no longer a mark to publish, but
        evidence that a consumer may have trained on a hole. The copy is durable before the original goes.
        Doing it again is a no-op, and the first reason stays.
        """
        try:
            with disk.opened(self.directory, create=True) as folder:
                with disk.opened(_LATE, create=True, parent=folder) as late:
                    _keep(late, self.directory / _LATE, mark, why)
                disk.sync(folder, self.directory)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(content.file_name(mark), dir_fd=folder)
        except OSError as error:
            self._warn_stays(mark, error)
            return False
        return True

    def late(self) -> list[tuple[SpilledMark, str]]:
        """Return the marks that came too late, each with its reason, oldest first; log those unreadable."""
        found: list[tuple[SpilledMark, str]] = []
        for folder, name in self._listed(_LATE, content.pattern(None, None)):
            try:
                mark, why = content.decode(name, disk.read(folder, name))
                found.append((mark, why or ""))
            except (DamagedError, NewerError, OSError) as problem:
                _log.warning("late mark %r was left in place: %s", str(self.directory / _LATE / name), problem)
        return sorted(found, key=lambda item: (item[0].at, item[0].mark_id))

    def damaged(self, *, target: Target | None = None, rollout: str | None = None) -> list[Path]:
        """Return every file set aside so far, selected by the digests in its name.

        The name outlives the content: a damaged file of a rollout still proves that the rollout was marked.
        """
        wanted = f"{content.pattern(target, rollout)}.{'?' * 16}"
        return sorted(self.directory / _DAMAGED / name for _, name in self._listed(_DAMAGED, wanted))

    def probe(self) -> None:
        """Try, without leaving a file, whether a mark could be kept now; raise ``SpillError`` if not."""
        what, advice = "cannot take a mark in the spill directory", "fix that directory, or set another spill_dir"
        with self._telling(what, advice), disk.opened(self.directory, create=True) as folder:
            disk.place(folder, _PROBE, b"probe\n")
            with contextlib.suppress(FileNotFoundError):  # another probe was quicker
                os.unlink(_PROBE, dir_fd=folder)
            disk.sync(folder, self.directory)

    def _listed(self, sub: str, wanted: str) -> Iterator[tuple[int, str]]:
        """Yield ``(folder, name)`` of each ``wanted`` file in the directory or in ``sub``, which may be missing."""
        what = f"cannot read the {sub or 'waiting'} marks in the spill directory"
        advice = "marks may wait there, so fix it and scan again"
        with self._telling(what, advice), contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
            folder = stack.enter_context(disk.opened(self.directory))
            if sub:
                folder = stack.enter_context(disk.opened(sub, parent=folder))
            for name in disk.names(folder):
                if fnmatchcase(name, wanted):
                    yield folder, name

    @contextlib.contextmanager
    def _telling(self, what: str, advice: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError) as error:
            raise SpillError(f"{what} {str(self.directory)!r}: {error}; {advice}") from error

    def _judge(self, folder: int, name: str) -> SpilledMark | Path:
        """Return the mark in a file, or the place to which the file was moved because it is damaged."""
        try:
            return content.decode(name, disk.read(folder, name))[0]
        except DamagedError as problem:
            try:
                path = self._set_aside(folder, name)
            except OSError as error:
                # Of the same errno, hence of the same type: a file that is gone must still be told as gone.
                raise OSError(error.errno, f"{problem}, and it cannot be set aside: {error}") from error
            if path is None:
                return self._judge(folder, name)
            _log.error("spill file %r is damaged (%s) and was moved to %r", name, problem, str(path))
            return path

    def _set_aside(self, folder: int, name: str) -> Path | None:
        """Move a damaged file away and return its new path; None if it is damaged no more and stays."""
        aside = f"{name}.{secrets.token_hex(8)}"  # never a name in use: nothing set aside is overwritten
        with disk.opened(_DAMAGED, create=True, parent=folder) as damaged:
            os.rename(name, aside, src_dir_fd=folder, dst_dir_fd=damaged)
            # Between our read and our rename a writer may have healed the file: judge what was really moved.
            try:
                content.decode(name, disk.read(damaged, aside))
            except (DamagedError, OSError):
                return self.directory / _DAMAGED / aside
            except NewerError:
                pass
            os.rename(aside, name, src_dir_fd=damaged, dst_dir_fd=folder)
            return None

    def _warn_stays(self, mark: SpilledMark, error: OSError) -> None:
        path = str(self.directory / content.file_name(mark))
        _log.warning("spill file %r stays and will be published again, which is harmless: %s", path, error)


def _keep(folder: int, path: Path, mark: SpilledMark, why: str | None = None) -> None:
    """Make ``mark`` durable in ``folder``, which is at ``path``, unless it is there, and then durable all the same."""
    name = content.file_name(mark)
    try:
        content.decode(name, disk.read(folder, name))
    except (DamagedError, OSError):
        # A damaged file of this name is this same mark, so writing over it heals it.
        disk.place(folder, name, content.encode(mark, why))
    except NewerError:
        pass
    # Also when it was there: its writer may have died, or still be, between rename and fsync.
    disk.sync(folder, path)
