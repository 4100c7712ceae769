"""What lies in a capture directory of nemo-gym 0.7.0: the names of its files, its locks, and the state of a rollout.

The rule of this module: it is the only one that joins or splits a file name of Gym's, and it opens nothing for writing.
The source of every fact is ``nemo_gym.token_id_capture.store`` and ``.lineage`` of 0.7.0.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from s3capture.errors import CaptureError, InvalidIdError, SettingsError
from s3capture.ids import validate_rollout_id

ENTRIES = ".tokens.jsonl"
INCOMPLETE = ".tokens.incomplete"
INTENTS = ".tokens.intents"
STATE = ".tokens.state.json"
LOCK = ".tokens.lock"
LEDGER = ".lineage.jsonl"
_SUFFIXES = (ENTRIES, INCOMPLETE, INTENTS, STATE, LOCK, LEDGER)
_TEMPORARY = ".tokens-state-"

FINGERPRINT_VERSION = 2
"""The version of fingerprints in nemo-gym 0.7.0; its ledger stamps every row with it and does not write it down."""


class DirectoryInUseError(CaptureError):
    """A process holds a lock in the directory: what is read now may be different a moment later."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong in a file of a directory; ``line`` counts from 1, None where it is the whole file."""

    file: str
    line: int | None
    problem: str

    def __str__(self) -> str:
        return f"{self.file}{'' if self.line is None else f':{self.line}'}: {self.problem}"


@dataclass(frozen=True, slots=True)
class Files:
    """The files of one rollout: which of them are there, and what they looked like (size, time in ns) at first."""

    root: Path
    rollout_id: str
    stamps: Mapping[str, tuple[int, int]]

    def path(self, suffix: str) -> Path:
        """The path of one file, there or not."""
        return self.root / f"{self.rollout_id}{suffix}"

    def name(self, suffix: str) -> str:
        """The name of one file."""
        return f"{self.rollout_id}{suffix}"

    def has(self, suffix: str) -> bool:
        """Whether the file was there."""
        return suffix in self.stamps

    def size(self, suffix: str) -> int:
        """Its size in bytes when it was first looked at; 0 when it was not there."""
        return self.stamps[suffix][0] if suffix in self.stamps else 0

    def changed(self) -> list[str]:
        """The names of the files that are no longer what they were."""
        now = stamps_of(self.root, self.rollout_id)
        return [
            self.name(suffix) for suffix in _SUFFIXES if suffix != LOCK and now.get(suffix) != self.stamps.get(suffix)
        ]


@dataclass(frozen=True, slots=True)
class Scan:
    """What a directory holds: the rollouts by id, names that are no rollout ids of ours, and other files."""

    rollouts: tuple[Files, ...]
    faults: tuple[Fault, ...] = ()
    others: int = 0
    leftovers: int = 0


def scan(root: Path) -> Scan:
    """Look at the names in ``root``. Raise ``SettingsError`` when it is no directory or cannot be read.

    Evaluation captures and whatever else lies there is counted as ``others``, state files that a dead process never
    renamed as ``leftovers``.
    """
    try:
        names = sorted(item.name for item in os.scandir(root) if item.is_file())
    except OSError as error:
        raise SettingsError(f"{root}: not a capture directory that can be read: {error.strerror}") from error
    rollouts: dict[str, None] = {}
    faults: list[Fault] = []
    others = leftovers = 0
    for name in names:
        suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), None)
        if suffix is None:
            leftovers += name.startswith(_TEMPORARY)
            others += not name.startswith(_TEMPORARY)
            continue
        try:
            rollouts.setdefault(validate_rollout_id(name.removesuffix(suffix)))
        except InvalidIdError as error:
            if suffix != LOCK:  # a lock alone holds nothing
                faults.append(Fault(name, None, str(error)))
    found = tuple(Files(root, rollout, stamps_of(root, rollout)) for rollout in sorted(rollouts))
    return Scan(found, tuple(faults), others, leftovers)


def stamps_of(root: Path, rollout_id: str) -> dict[str, tuple[int, int]]:
    """Size and time of change, in ns, of each file of a rollout that is there."""
    found = {}
    for suffix in _SUFFIXES:
        try:
            status = (root / f"{rollout_id}{suffix}").stat()
        except FileNotFoundError:
            continue
        found[suffix] = (status.st_size, status.st_mtime_ns)
    return found


def check_quiet(files: Files) -> None:
    """Raise ``DirectoryInUseError`` when a process holds the lock of the rollout, ``SettingsError`` if none can tell.

    The lock is taken shared, not waited for and given back at once. Gym holds it for moments, so this catches a server
    at work only by luck; the files are compared again at the end.
    """
    if not files.has(LOCK):
        return
    try:
        descriptor = os.open(files.path(LOCK), os.O_RDONLY)
    except FileNotFoundError:
        return
    except OSError as error:
        raise SettingsError(
            f"{files.path(LOCK)}: {error.strerror}, so it cannot be told whether the directory is in use"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise DirectoryInUseError(
                f"{files.path(LOCK)}: a process holds this lock, so the directory is in use; stop the model servers "
                "and collectors that write to it, and import again"
            ) from error
        # A file system without locks: Gym could not have used it, so it is a copy.
    finally:
        os.close(descriptor)


@dataclass(frozen=True, slots=True)
class GymState:
    """The state of a rollout as Gym keeps it beside the records.

    ``digests`` is the SHA-256 of each indexed line by call, ``indexed`` the bytes of the records file that they cover;
    both are None in a state that was written before there was an index.
    """

    frozen: bool = False
    retired: bool = False
    incomplete: bool = False
    snapshot_id: str = ""
    version: int = 0
    digests: Mapping[str, str] | None = field(default_factory=dict)
    indexed: int | None = 0

    def dump(self) -> bytes:
        """The bytes of the state file."""
        value = {
            "frozen": self.frozen,
            "retired": self.retired,
            "incomplete": self.incomplete,
            "snapshot_id": self.snapshot_id,
            "version": self.version,
            "entry_digests": dict(self.digests or {}),
            "indexed_size": self.indexed or 0,
        }
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS | orjson.OPT_APPEND_NEWLINE)


def read_state(data: bytes) -> GymState:
    """Return the state of a state file, or raise ``ValueError`` saying what is wrong with it."""
    value = orjson.loads(data)
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__}, not an object")
    for name, kind in (("frozen", bool), ("retired", bool), ("incomplete", bool), ("snapshot_id", str)):
        _typed(value, name, kind)
    _typed(value, "version", int)
    digests, indexed = value.get("entry_digests"), value.get("indexed_size")
    if not isinstance(digests, dict) or isinstance(indexed, bool) or not isinstance(indexed, int):
        digests = indexed = None  # Gym builds the index anew from such a state
    elif not all(isinstance(digest, str) for digest in digests.values()):
        raise ValueError("entry_digests holds something that is no string")
    return GymState(
        frozen=value.get("frozen", False),
        retired=value.get("retired", False),
        incomplete=value.get("incomplete", False),
        snapshot_id=value.get("snapshot_id", ""),
        version=value.get("version", 0),
        digests=digests,
        indexed=indexed,
    )


def _typed(value: Mapping[str, Any], name: str, kind: type) -> None:
    found = value.get(name, kind())
    if not isinstance(found, kind) or (kind is int and isinstance(found, bool)):
        raise ValueError(f"{name} is a {type(found).__name__}, not a {kind.__name__}")
