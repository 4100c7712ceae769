"""Where a replay is written to: whole or not at all, and never over something.

The rule of this module: what stands under the name that was asked for is finished. Until then it has a hidden name
beside it, which goes when the writing fails; a name that is taken is refused before anything is read.
"""

from __future__ import annotations

import gzip
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

import zstandard

from s3capture.errors import SettingsError

_LEVEL = 6


def refuse_taken(path: Path) -> None:
    """Raise ``SettingsError`` when something is at ``path``, or its folder is not there."""
    if path.exists() or path.is_symlink():
        raise SettingsError(f"{path} exists, and a replay never overwrites; move it away or choose another name")
    if not path.parent.is_dir():
        raise SettingsError(f"there is no folder {path.parent} to write {path.name} to; make it first")


@contextmanager
def new_file(path: Path) -> Iterator[IO[bytes]]:
    """Give a file to write that appears as ``path`` at the end; packed when the name ends in ``.gz`` or ``.zst``.

    Raise ``SettingsError`` when the name is taken or cannot be written to.
    """
    refuse_taken(path)
    temporary = _beside(path)
    try:
        with _told(path), temporary.open("xb") as file:
            with _packing(file, path.suffix) as packing:
                yield packing
            file.flush()
            os.fsync(file.fileno())
        _finish(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give a folder to fill that appears as ``path`` at the end. Raise ``SettingsError`` as ``new_file`` does."""
    refuse_taken(path)
    temporary = _beside(path)
    try:
        with _told(path):
            temporary.mkdir()
            yield temporary
        _finish(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            shutil.rmtree(temporary)


@contextmanager
def _packing(file: IO[bytes], suffix: str) -> Iterator[IO[bytes]]:
    # The same records make the same bytes: no name and no time go into the headers.
    if suffix == ".gz":
        with gzip.GzipFile("", "wb", compresslevel=_LEVEL, fileobj=file, mtime=0) as packing:
            yield packing  # type: ignore[misc] # GzipFile is no IO[bytes] by name, and is written to alike
    elif suffix == ".zst":
        with zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).stream_writer(file, closefd=False) as packing:
            yield packing
    else:
        yield file


@contextmanager
def _told(path: Path) -> Iterator[None]:
    """Say which output could not be written, and why."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise SettingsError(f"cannot write {path}: {error.strerror}") from error


def _finish(temporary: Path, path: Path) -> None:
    refuse_taken(path)  # someone may have been faster
    temporary.rename(path)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
