"""The disk under the spill: folders of our own, files that appear whole, syncs in their order.

The rule of this module: every name is relative to an open folder that was checked on its descriptor, and a file
appears by rename after all its bytes are synced, or not at all. If a sync moves behind what it protects, only a
power cut shows it; if a check moves to a path, whoever renames the folder in between goes unnoticed. POSIX
only.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from s3capture.spill.content import DamagedError

STALE_TEMP_S = 24 * 3600.0

TEMP = ".tmp-"  # no scan reads such a name, and it goes after a day should its writer die
_MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs"})

_log = logging.getLogger(__name__)


@contextlib.contextmanager
def opened(path: Path | str, *, create: bool = False, parent: int | None = None) -> Iterator[int]:
    """Open a folder that is ours alone to write; what was checked stays open, whoever renames it.

    ``path`` is absolute, or a name in the open folder ``parent``. Raises ``OSError`` when the folder is missing
    or cannot be trusted: a symbolic link, another user's, or writable by others.
    """
    if os.name != "posix":
        raise OSError(errno.ENOTSUP, "the local spill needs a POSIX system")
    if create and parent is None:
        _make(Path(path))
        _warn_of_memory(Path(path))
    elif create:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o700, dir_fd=parent)
    if stat.S_ISLNK(os.lstat(path, dir_fd=parent).st_mode):
        raise PermissionError(errno.EPERM, "it is a symbolic link; name the directory itself", str(path))
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
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


def names(folder: int) -> list[str]:
    """Return the names in ``folder``, after removing temp files that no living writer can still own."""
    found = os.listdir(folder)
    for name in found:
        if name.startswith(TEMP):
            with contextlib.suppress(OSError):
                if time.time() - os.lstat(name, dir_fd=folder).st_mtime > STALE_TEMP_S:
                    os.unlink(name, dir_fd=folder)
    return found


def read(folder: int, name: str) -> bytes:
    """Return the content of a regular file; raise ``DamagedError`` without opening anything else."""
    # A pipe that someone left under such a name would block, and a link would lead out of the folder.
    if not stat.S_ISREG(os.lstat(name, dir_fd=folder).st_mode):
        raise DamagedError("it is no regular file")
    with os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder), "rb") as file:
        return file.read()


def place(folder: int, name: str, data: bytes) -> None:
    """Make ``name`` appear with all of ``data``, or leave nothing behind. The caller syncs the folder."""
    temp = TEMP + secrets.token_hex(16)  # not the pid: containers that share a volume share pids
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=folder)
    try:
        try:
            rest = memoryview(data)
            while rest:
                written = os.write(fd, rest)
                if not written:
                    raise OSError(errno.EIO, "the file system took nothing of a write")
                rest = rest[written:]
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temp, name, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):  # the error that led here is the one to tell
            os.unlink(temp, dir_fd=folder)
        raise


def sync(folder: int, path: Path) -> None:
    """Make renames in ``folder``, which is at ``path``, durable where the file system can do that."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        _warn_once(f"directory {str(path)!r} cannot be synced ({error}): a power cut may undo a spilled mark")


def sync_ancestor(path: Path) -> None:
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


def memory_file_system(directory: Path, mounts: bytes) -> str | None:
    """Return the type of the file system under ``directory`` if it lives in memory, else None.

    ``mounts`` is in the form of ``/proc/self/mounts`` (space, tab, newline and backslash as octal escapes).
    """
    place_of = os.fsencode(os.path.realpath(directory)) + b"/"
    best, kind = -1, ""
    for line in mounts.splitlines():
        columns = line.split(b" ")
        if len(columns) < 3:
            continue
        point = re.sub(rb"\\([0-3][0-7]{2})", lambda found: bytes([int(found[1], 8)]), columns[1]).rstrip(b"/") + b"/"
        # Of two mounts on one point the later one is on top, hence "at least as long".
        if place_of.startswith(point) and len(point) >= best:
            best, kind = len(point), columns[2].decode("ascii", "replace")
    return kind if kind in _MEMORY_FILE_SYSTEMS else None


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
        sync_ancestor(ancestor)
    with contextlib.suppress(FileExistsError):
        directory.mkdir(mode=0o700)


def _warn_of_memory(directory: Path) -> None:
    with contextlib.suppress(OSError):
        kind = memory_file_system(directory, Path("/proc/self/mounts").read_bytes())
        if kind is not None:
            _warn_once(
                f"spill directory {str(directory)!r} lies in memory ({kind}), and marks kept there are lost when "
                "the machine restarts; set spill_dir to a directory on a disk"
            )


@functools.cache  # each text once in the life of the process
def _warn_once(text: str) -> None:
    _log.warning("%s", text)
