"""Marks that S3 could not take, kept on the local disk until it can.

The rule of this module: when ``write`` returns, the mark survives the death of the process and of the
machine (not of the disk), and nothing here ever makes a mark vanish unpublished. It is the only module
that touches the local disk; it knows nothing of S3, of asyncio, or of what a mark means. If the order of
effects in ``write`` moves, a mark can be acknowledged and then be gone: the one silent loss of tokens
that the contract names.

There is no state but the directory, and no lock: a file appears by rename, never changes, and goes by
unlink or rename, so any number of threads and processes may write, scan and settle at once::

    <dir>/<16 hex: target>-<16 hex: rollout>-<mark_id>.mark   waiting to be published
    <dir>/late/<the same name>                                its rollout was retired before we came
    <dir>/damaged/<the same name>.<16 hex>                    does not read back as what was written
    <dir>/.tmp-<32 hex>                                       being written, or left by a crash

Names are made of digests alone, because file systems fold case and normalise Unicode; ids come back from
inside the file, exactly. POSIX only: the directory is held open and everything goes through its descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import math
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from s3capture.errors import SpillError

FORMAT_VERSION = 1
STALE_TEMP_S = 24 * 3600.0

_MARK, _LATE = "mark", "late"
_LATE_DIR, _DAMAGED_DIR = "late", "damaged"
_TEMP = ".tmp-"
_MARK_ID = re.compile(r"[0-9a-f]{1,64}")
_ESCAPED = "utf-8+surrogatepass"
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})

_log = logging.getLogger(__name__)
_said: set[tuple[str, str]] = set()  # what this process has warned of already; never consulted for anything else


@dataclass(frozen=True, slots=True)
class Target:
    """Where marks are to be published: one run under one prefix of one bucket."""

    endpoint_url: str | None
    bucket: str
    prefix: str
    run: str


@dataclass(frozen=True, slots=True)
class SpilledMark:
    """One "incomplete" mark that waits for S3.

    ``call`` is any string, lone surrogates included. ``mark_id`` (1 to 64 lowercase hex digits, unique) is
    the name under which the mark is created in S3, so publishing it twice is harmless. ``at`` is in seconds
    since the epoch; ``by`` names the process that wrote it. A value that could not be read back is a
    ``TypeError`` or ``ValueError`` here, before anything is promised.
    """

    bucket: str
    prefix: str
    endpoint_url: str | None
    run: str
    rollout: str
    call: str
    mark_id: str
    at: float
    reason: str
    by: str

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "at":
                if isinstance(value, bool) or not isinstance(value, (int, float)):
                    raise TypeError(f"at {value!r} is not a number of seconds")
            elif not isinstance(value, str) and not (value is None and field.name == "endpoint_url"):
                raise TypeError(f"{field.name} {value!r} of a spilled mark is not a string")
        if not math.isfinite(self.at):
            raise ValueError(f"at {self.at!r} is not a finite number of seconds")
        if not _MARK_ID.fullmatch(self.mark_id):
            raise ValueError(f"mark id {_short(self.mark_id)} is not 1 to 64 lowercase hex digits")

    @property
    def target(self) -> Target:
        """Where this mark is to be published."""
        return Target(self.endpoint_url, self.bucket, self.prefix, self.run)


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


class _DamagedError(Exception):
    """The file does not read back as a mark that this version wrote."""


class _NewerError(Exception):
    """The file was written by a newer version, which alone can judge it."""


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
        name = _name(mark)
        try:
            with self._opened(create=True) as folder:
                # A damaged file of this name is this same mark, so writing over it heals it.
                if not _holds(folder, name, _MARK):
                    _place(folder, name, _encode(mark))
                # Also when it was there: its writer may have died, or still be, between rename and fsync.
                _sync_directory(folder, self.directory)
                _sync_ancestor(self.directory.parent)
        except (OSError, ValueError) as error:
            raise SpillError(
                f"cannot keep the incomplete mark of run {_short(mark.run)}, rollout {_short(mark.rollout)}, "
                f"call {_short(mark.call)} in the spill directory {str(self.directory)!r}: {error}; "
                "this mark is lost unless S3 takes it: free or fix that directory, or set another spill_dir"
            ) from error
        self._warn_of_memory()
        return self.directory / name

    def pending(self, *, target: Target | None = None, rollout: str | None = None) -> SpillScan:
        """Read the marks that wait, of one ``target`` and ``rollout`` if given; a missing directory has none.

        A damaged file is moved to ``damaged/`` and stops nothing. Temp files that a crash left are removed
        after a day. Raises ``SpillError`` when the directory itself cannot be read or trusted.
        """
        marks: list[SpilledMark] = []
        damaged: list[Path] = []
        unread: list[UnreadFile] = []
        wanted = _selector(target, rollout)
        for folder, name in self._listed():
            if not wanted.fullmatch(name):
                continue
            try:
                found: SpilledMark | Path | None = _read(folder, name, _MARK)[0]
            except FileNotFoundError:
                continue  # settled by another process after we listed it
            except _DamagedError as problem:
                try:
                    found = self._set_aside(folder, name, str(problem))
                except OSError as error:
                    why = f"{problem}, and it cannot be set aside: {error}"
                    unread.append(UnreadFile(self.directory / name, why))
                    continue
            except (_NewerError, OSError) as problem:
                unread.append(UnreadFile(self.directory / name, str(problem)))
                continue
            if isinstance(found, Path):
                damaged.append(found)
            elif found is not None and target in (None, found.target) and rollout in (None, found.rollout):
                marks.append(found)  # compared in full: the name holds only 64 bits of each digest
        for left in unread:
            _log.warning("spill file %r was left in place: %s", str(left.path), left.why)
        marks.sort(key=lambda mark: (mark.at, mark.mark_id))
        return SpillScan(tuple(marks), tuple(damaged), tuple(unread))

    def settle(self, mark: SpilledMark) -> bool:
        """Remove the file of ``mark``, which is published; False if it stays (publishing again is harmless).

        Not synced: a removal that a power cut undoes costs one more publication.
        """
        try:
            with self._opened(create=False) as folder:
                os.unlink(_name(mark), dir_fd=folder)
        except FileNotFoundError:
            pass
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
        name = _name(mark)
        try:
            with self._opened(create=True) as folder:
                with _subfolder(folder, _LATE_DIR, create=True) as late:
                    if not _holds(late, name, _LATE):
                        _place(late, name, _encode(mark, why))
                    _sync_directory(late, self.directory / _LATE_DIR)
                _sync_directory(folder, self.directory)
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=folder)
        except OSError as error:
            self._warn_stays(mark, error)
            return False
        return True

    def late(self) -> list[tuple[SpilledMark, str]]:
        """Return the marks that came too late, each with its reason, oldest first; log those unreadable."""
        found: list[tuple[SpilledMark, str]] = []
        for folder, name in self._listed(_LATE_DIR):
            if not _selector(None, None).fullmatch(name):
                continue
            try:
                found.append(_read(folder, name, _LATE))
            except FileNotFoundError:
                continue
            except (_DamagedError, _NewerError, OSError) as problem:
                _log.warning("late mark %r was left in place: %s", str(self.directory / _LATE_DIR / name), problem)
        return sorted(found, key=lambda item: (item[0].at, item[0].mark_id))

    def damaged(self, *, target: Target | None = None, rollout: str | None = None) -> list[Path]:
        """Return every file set aside so far, selected by the digests in its name.

        The name outlives the content: a damaged file of a rollout still proves that the rollout was marked.
        """
        wanted = _selector(target, rollout, suffix=r"\.[0-9a-f]{16}")
        names = sorted(name for _, name in self._listed(_DAMAGED_DIR) if wanted.fullmatch(name))
        return [self.directory / _DAMAGED_DIR / name for name in names]

    def probe(self) -> None:
        """Try, without leaving a file, whether a mark could be kept now; raise ``SpillError`` if not."""
        try:
            with self._opened(create=True) as folder:
                os.unlink(_write_temp(folder, b"probe\n"), dir_fd=folder)
                _sync_directory(folder, self.directory)
        except (OSError, ValueError) as error:
            raise SpillError(
                f"the spill directory {str(self.directory)!r} cannot take a mark: {error}; "
                "fix that directory, or set another spill_dir"
            ) from error
        self._warn_of_memory()

    @contextlib.contextmanager
    def _opened(self, *, create: bool) -> Iterator[int]:
        if os.name != "posix":
            raise OSError(errno.ENOTSUP, "the local spill needs a POSIX system")
        if create:
            _make(self.directory)
        with _folder(self.directory) as folder:
            yield folder

    def _listed(self, sub: str | None = None) -> Iterator[tuple[int, str]]:
        """Yield ``(folder, name)`` of each file in the directory or in ``sub``, which may be missing."""
        try:
            with contextlib.ExitStack() as stack:
                folder = stack.enter_context(self._opened(create=False))
                if sub is not None:
                    folder = stack.enter_context(_subfolder(folder, sub, create=False))
                names = os.listdir(folder)  # noqa: PTH208 - a descriptor, not a path
                _sweep(folder, names)
                for name in names:
                    yield folder, name
        except FileNotFoundError:
            return
        except (OSError, ValueError) as error:
            where = self.directory / (sub or "")
            raise SpillError(
                f"cannot read the spill directory {str(where)!r}: {error}; "
                "marks may wait there, so fix it and scan again"
            ) from error

    def _set_aside(self, folder: int, name: str, why: str) -> SpilledMark | Path | None:
        """Move a damaged file away: its new path; or the mark, if it proved whole; or None, if it is gone."""
        aside = f"{name}.{secrets.token_hex(8)}"  # never a name in use: nothing set aside is overwritten
        mark = None
        with _subfolder(folder, _DAMAGED_DIR, create=True) as damaged:
            try:
                os.rename(name, aside, src_dir_fd=folder, dst_dir_fd=damaged)
            except FileNotFoundError:
                return None
            # Between our read and our rename a writer may have healed the file: judge what was really moved.
            try:
                mark = _read(damaged, aside, _MARK, named=name)[0]
            except (_DamagedError, OSError):
                path = self.directory / _DAMAGED_DIR / aside
                _log.error("spill file %r is damaged (%s) and was moved to %r", name, why, str(path))
                return path
            except _NewerError:
                pass
            os.rename(aside, name, src_dir_fd=damaged, dst_dir_fd=folder)
            return mark

    def _warn_stays(self, mark: SpilledMark, error: OSError) -> None:
        _log.warning(
            "spill file %r of rollout %s stays and will be published again, which is harmless: %s",
            str(self.directory / _name(mark)), _short(mark.rollout), error,
        )  # fmt: skip

    def _warn_of_memory(self) -> None:
        key = ("memory", str(self.directory))
        if key in _said:
            return
        _said.add(key)
        with contextlib.suppress(OSError, ValueError):
            kind = memory_file_system(self.directory, Path("/proc/self/mounts").read_bytes())
            if kind is not None:
                _log.warning(
                    "spill directory %r lies in memory (%s), and marks kept there are lost when the machine "
                    "restarts; set spill_dir to a directory on a disk",
                    str(self.directory), kind,
                )  # fmt: skip


def memory_file_system(directory: Path, mounts: bytes) -> str | None:
    """Return the type of the file system under ``directory`` if it lives in memory, else None.

    ``mounts`` is in the form of ``/proc/self/mounts`` (space, tab, newline and backslash as octal escapes).
    """
    place = os.fsencode(os.path.realpath(directory)) + b"/"
    best, kind = -1, ""
    for line in mounts.splitlines():
        columns = line.split(b" ")
        if len(columns) < 3:
            continue
        raw = re.sub(rb"\\([0-7]{3})", lambda found: bytes([int(found[1], 8) & 0xFF]), columns[1])
        point = raw.rstrip(b"/") + b"/"
        # Of two mounts on one point the later one is on top, hence "at least as long".
        if place.startswith(point) and len(point) >= best:
            best, kind = len(point), columns[2].decode("ascii", "replace")
    return kind if kind in _MEMORY_FILE_SYSTEMS else None


# ---- names and content -------------------------------------------------------------------------------


def _short(text: str) -> str:
    shown = repr(text)
    return shown if len(shown) <= 100 else f"{shown[:100]}..."


def _plain(text: str | None) -> str | dict[str, str] | None:
    """Return what stands for ``text`` in JSON so that it comes back exactly.

    JSON writes two lone surrogates in a row as it writes the one character they would form, and reads that
    character back; such a string goes as the hex of its own bytes instead.
    """
    if text is None or json.loads(json.dumps(text)) == text:
        return text
    return {_ESCAPED: text.encode("utf-8", "surrogatepass").hex()}


def _text(value: Any) -> Any:
    if isinstance(value, dict) and set(value) == {_ESCAPED}:
        return bytes.fromhex(value[_ESCAPED]).decode("utf-8", "surrogatepass")
    return value


def _canonical(value: object) -> str:
    return json.dumps(value, ensure_ascii=True, allow_nan=False, sort_keys=True, separators=(",", ":"))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _target_digest(target: Target) -> str:
    # A JSON list keeps the parts apart, and None apart from "", where a separator would not.
    return _digest(_canonical([_plain(getattr(target, field.name)) for field in fields(Target)]))[:16]


def _rollout_digest(rollout: str) -> str:
    return _digest(rollout)[:16]


def _name(mark: SpilledMark) -> str:
    return f"{_target_digest(mark.target)}-{_rollout_digest(mark.rollout)}-{mark.mark_id}.mark"


def _selector(target: Target | None, rollout: str | None, *, suffix: str = "") -> re.Pattern[str]:
    """Return a pattern of the names to read; without a selection misnamed ``.mark`` files too."""
    if target is None and rollout is None:
        return re.compile(rf"[^.].*\.mark{suffix}", re.DOTALL)
    any_digest = "[0-9a-f]{16}"
    first = any_digest if target is None else _target_digest(target)
    second = any_digest if rollout is None else _rollout_digest(rollout)
    return re.compile(rf"{first}-{second}-.*\.mark{suffix}", re.DOTALL)


def _encode(mark: SpilledMark, why: str | None = None) -> bytes:
    """Return the file content: one line of ASCII JSON, as kind ``late`` when there is a ``why``."""
    content: dict[str, object] = {
        field.name: float(mark.at) if field.name == "at" else _plain(getattr(mark, field.name))
        for field in fields(SpilledMark)
    }
    if why is not None:
        content["why"] = _plain(why)
    line = {
        "version": FORMAT_VERSION,
        "kind": _MARK if why is None else _LATE,
        "sha256": _digest(_canonical(content)),
        "fields": content,
    }
    return _canonical(line).encode("ascii") + b"\n"


def _decode(data: bytes, kind: str) -> tuple[SpilledMark, str]:
    """Return the mark, and why it is late (empty for kind ``mark``), or say that it is none of ours."""
    try:
        line = json.loads(data.decode("ascii"))
        version = line["version"]
        if type(version) is int and version > FORMAT_VERSION:
            raise _NewerError(f"it has format version {version}, and this version of s3capture reads {FORMAT_VERSION}")
        content = {name: _text(value) for name, value in line["fields"].items()}
        why = content.pop("why") if kind == _LATE else None
        mark = SpilledMark(**content)
        # One form is allowed, byte for byte: version, kind and digest, with nothing added or cut.
        whole = _encode(mark, why) == data
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise _DamagedError(f"it is no whole spill file: {type(error).__name__}") from error
    if not whole:
        raise _DamagedError("its content is not what was written")
    return mark, why or ""


# ---- the disk: every name below is relative to an open folder ------------------------------------------


def _read(folder: int, name: str, kind: str, *, named: str | None = None) -> tuple[SpilledMark, str]:
    """Read one file; raise ``_DamagedError``, ``_NewerError`` or ``OSError`` (gone, or not ours to read)."""
    try:
        # Not following links, and not blocking on a pipe that someone left under such a name.
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise _DamagedError("it is no regular file") from error
        raise
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise _DamagedError("it is no regular file")
        with open(fd, "rb", closefd=False) as file:
            data = file.read()
    finally:
        os.close(fd)
    mark, why = _decode(data, kind)
    if _name(mark) != (named or name):
        raise _DamagedError("its name belongs to another mark")  # settling that mark would never remove this file
    return mark, why


def _holds(folder: int, name: str, kind: str) -> bool:
    try:
        _read(folder, name, kind)
    except _NewerError:
        return True
    except (_DamagedError, OSError):
        return False
    return True


def _place(folder: int, name: str, data: bytes) -> None:
    """Make ``name`` appear with all of ``data``, or not at all. The caller syncs the folder."""
    temp = _write_temp(folder, data)
    try:
        os.rename(temp, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        _discard(folder, temp)
        raise


def _write_temp(folder: int, data: bytes) -> str:
    """Write ``data`` durably under a fresh name in ``folder``; leave nothing behind on any failure."""
    temp = _TEMP + secrets.token_hex(16)  # not the pid: containers that share a volume share pids
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        try:
            rest = memoryview(data)
            while rest:
                written = os.write(fd, rest)
                if written == 0:
                    raise OSError(errno.EIO, "the disk took no bytes and gave no reason")
                rest = rest[written:]
            os.fsync(fd)
        finally:
            os.close(fd)
    except BaseException:
        _discard(folder, temp)
        raise
    return temp


def _discard(folder: int, name: str) -> None:
    with contextlib.suppress(OSError):  # the error that led here is the one to tell
        os.unlink(name, dir_fd=folder)


def _sweep(folder: int, names: list[str]) -> None:
    """Remove temp files that no living writer can still own."""
    for name in names:
        if name.startswith(_TEMP):
            with contextlib.suppress(OSError):
                if time.time() - os.lstat(name, dir_fd=folder).st_mtime > STALE_TEMP_S:
                    os.unlink(name, dir_fd=folder)


@contextlib.contextmanager
def _folder(path: str | Path, *, parent: int | None = None) -> Iterator[int]:
    """Open a directory that is ours alone to write; what was checked stays open, whoever renames it."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP) and stat.S_ISLNK(os.lstat(path, dir_fd=parent).st_mode):
            raise PermissionError(errno.EPERM, "it is a symbolic link; name the directory itself", str(path)) from error
        raise
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid():
            owners = f"it belongs to uid {status.st_uid}, and this process runs as uid {os.geteuid()}"
            raise PermissionError(errno.EPERM, owners, str(path))
        if status.st_mode & 0o022:
            mode = f"others may write to it (mode {stat.S_IMODE(status.st_mode):04o}); chmod go-w it"
            raise PermissionError(errno.EPERM, mode, str(path))
        yield folder
    finally:
        os.close(folder)


@contextlib.contextmanager
def _subfolder(folder: int, name: str, *, create: bool) -> Iterator[int]:
    if create:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, 0o700, dir_fd=folder)
    with _folder(name, parent=folder) as sub:
        yield sub


def _make(directory: Path) -> None:
    """Make ``directory`` and its missing parents, so that a power cut cannot take the path away again.

    The ancestors are synced before the directory appears: whoever finds it there need only sync its parent.
    """
    if os.path.lexists(directory):
        return
    for ancestor in reversed(directory.parents):
        if not os.path.lexists(ancestor):
            with contextlib.suppress(FileExistsError):
                ancestor.mkdir(mode=0o700)
    for ancestor in directory.parents:
        _sync_ancestor(ancestor)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)


def _sync_directory(folder: int, path: Path) -> None:
    """Make renames in ``folder`` durable, where the file system can do that for a directory."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        if ("sync", str(path)) not in _said:
            _said.add(("sync", str(path)))
            _log.warning("directory %r cannot be synced (%s): a power cut may undo a spilled mark", str(path), error)


def _sync_ancestor(path: Path) -> None:
    """Sync a directory above the spill; one that we may not open was there before us."""
    try:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        if error.errno == errno.EIO:
            raise
