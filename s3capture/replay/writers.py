"""Where replayed rollouts can go, each under the same three words: write, finish, close.

The rule of this module: a writer is told of every rollout once, answers with what it could not express, and what it
writes to a disk appears under its name only by ``finish``. Left without it, nothing appears.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self

from s3capture.replay.lines import Recorder, entry_lines, response_line
from s3capture.replay.model import Problem, ReplayedRollout
from s3capture.replay.output import new_file, new_folder


class Writer(Protocol):
    """Something that takes replayed rollouts; a context manager."""

    def write(self, rollout: ReplayedRollout) -> list[Problem]:
        """Take one rollout; return what was found meanwhile that cannot be expressed, and is left out."""
        ...

    def finish(self) -> list[Problem]:
        """Complete what was written; return what was still found."""
        ...

    def notes(self) -> list[str]:
        """What a person should know about the whole, as sentences."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...


LinesOf = Callable[[ReplayedRollout], tuple[Iterable[bytes], list[Problem]]]


class LinesWriter:
    """Writes lines to ``to``: a path (see ``output.new_file``) or an open binary file, which stays open."""

    def __init__(self, to: Path | IO[bytes], lines_of: LinesOf, notes: Callable[[], list[str]] = list) -> None:
        self._files = ExitStack()
        self._lines_of, self.notes = lines_of, notes
        self._file = self._files.enter_context(new_file(to)) if isinstance(to, Path) else to

    def write(self, rollout: ReplayedRollout) -> list[Problem]:
        """See ``Writer.write``."""
        lines, problems = self._lines_of(rollout)
        for line in lines:  # what packs has no ``writelines``
            self._file.write(line)
        return problems

    def finish(self) -> list[Problem]:
        """See ``Writer.finish``."""
        self._file.flush()
        self._files.close()
        return []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        _abandon(self._files)


class ParquetWriter:
    """Writes ``calls.parquet`` and ``rollouts.parquet`` into the new folder ``to``. Raise ``MissingExtraError``."""

    def __init__(self, to: Path) -> None:
        from s3capture.replay.parquet import ParquetFolder  # noqa: PLC0415 - only tables need pyarrow

        self._files = ExitStack()
        with ExitStack() as opening:
            folder = opening.enter_context(new_folder(to))
            self._tables = opening.enter_context(ParquetFolder(folder))
            self._files = opening.pop_all()

    def write(self, rollout: ReplayedRollout) -> list[Problem]:
        """See ``Writer.write``."""
        return self._tables.write(rollout)

    def finish(self) -> list[Problem]:
        """See ``Writer.finish``."""
        self._files.close()
        return []

    def notes(self) -> list[str]:
        """See ``Writer.notes``."""
        return []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        _abandon(self._files)


def entries_writer(to: Path | IO[bytes], *, deltas: bool = False) -> LinesWriter:
    """Write Gym's entries; see ``lines.entry_lines``."""
    return LinesWriter(to, lambda rollout: (entry_lines(rollout, deltas=deltas), []))


def recording_writer(to: Path | IO[bytes]) -> LinesWriter:
    """Write a recording that ``s3capture demo`` plays; see ``lines.Recorder``."""
    recorder = Recorder()
    return LinesWriter(to, recorder.lines, recorder.notes)


def gym_writer(to: Path | IO[bytes]) -> LinesWriter:
    """Write what Gym's builder makes of each rollout. Raise ``GymNotFoundError`` without nemo_gym."""
    from s3capture.replay.gym import GymBuilder  # noqa: PLC0415 - only this needs nemo_gym

    builder = GymBuilder()
    return LinesWriter(to, lambda rollout: ([response_line(builder.build(rollout))], []))


class _Abandoned(Exception):
    """What was written is not finished."""


def _abandon(files: ExitStack) -> None:
    """Take back what was not finished; nothing after ``finish``, which leaves nothing open."""
    error = _Abandoned()
    with suppress(_Abandoned):
        files.__exit__(_Abandoned, error, None)
