"""Rollouts of a bucket into a new capture directory that nemo-gym 0.7.0 opens as its own.

The rule of this module: the directory appears whole or not at all. It is written beside its place under another name,
every file of it synced, read back with the eyes of the import and compared, and renamed at the end. It is never written
into one that holds anything. The bucket is only read.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from s3capture.errors import CorruptObjectError, SettingsError
from s3capture.gymdir.checked import CheckedRollout, read_line
from s3capture.gymdir.checking import MAX_LINE, check_rollout
from s3capture.gymdir.layout import ENTRIES, INCOMPLETE, INTENTS, LEDGER, STATE, Files, stamps_of
from s3capture.gymdir.report import ExportReport, Fate, RolloutReport, Show, Silent
from s3capture.gymdir.taking import Taken, TakenLedger, take, take_ledger
from s3capture.keys import RunKeys, parse
from s3capture.reader import Reader
from s3capture.stored import StoredRollout, StoredRun

_TRIES = 100


def export_directory(
    reader: Reader,
    keys: RunKeys,
    target: Path,
    *,
    names: Callable[[str], bool] = lambda _: True,
    show: Show | None = None,
) -> ExportReport:
    """Write the rollouts of a run whose id ``names`` takes, live or archived, into ``target``.

    ``target`` must be empty or not there, its parent must be. Rollouts with a damaged object are reported and left out.
    Raise ``SettingsError`` before anything is read when ``target`` will not do, and ``StoreError``; then ``target`` is
    as it was.
    """
    told, place = show or Silent(), _place(target)
    partial = place.with_name(f".{place.name}.partial-{uuid.uuid4().hex[:12]}")
    try:
        partial.mkdir()
        report = _Export(reader, keys, partial, names, told).run()
        _sync(partial)
        # Only an empty directory gives way; whatever came meanwhile makes this fail.
        partial.rename(place)
    except OSError as error:
        raise SettingsError(f"{target}: the directory cannot be written: {error}") from error
    finally:
        _remove(partial)
    _sync(place.parent)
    return report


def _place(target: Path) -> Path:
    place = target.resolve()
    try:
        if any(place.iterdir()):
            raise SettingsError(f"{target} holds something already; export into a directory that is empty or not there")
    except FileNotFoundError:
        if not place.parent.is_dir():
            raise SettingsError(f"{target}: there is no directory {place.parent} to make it in") from None
    except NotADirectoryError:
        raise SettingsError(f"{target} is a file; export into a directory that is empty or not there") from None
    except OSError as error:
        raise SettingsError(f"{target}: cannot be looked into: {error.strerror}") from error
    return place


class _Export:
    def __init__(self, reader: Reader, keys: RunKeys, root: Path, names: Callable[[str], bool], show: Show) -> None:
        self._reader, self._keys, self._root, self._names, self._show = reader, keys, root, names, show

    def run(self) -> ExportReport:
        strays: list[str] = []
        self._show.phase("exporting", None)
        reports: dict[str, RolloutReport] = {}
        stored = StoredRun(self._reader, self._keys).rollouts(on_stray=strays.append)
        wanted = (rollout for rollout in stored if self._names(rollout.rollout_id))
        for report in self._reader.map(self._records, wanted):
            reports[report.rollout] = report
            self._show.advance()
        self._show.phase("exporting ledgers", None)
        for report in self._reader.map(self._ledger, self._ledgers()):
            before = reports.get(report.rollout)
            reports[report.rollout] = report if before is None else _both(before, report)
            self._show.advance()
        return ExportReport(tuple(reports[rollout] for rollout in sorted(reports)), tuple(strays))

    # -- records ------------------------------------------------------------------------------------------

    def _records(self, stored: StoredRollout) -> RolloutReport:
        rollout = stored.rollout_id
        try:
            taken = take(stored)
        except CorruptObjectError as error:
            return RolloutReport(rollout, Fate.DAMAGED, "-", problems=(str(error),))
        state = "retired" if taken.state.retired else "frozen" if taken.state.frozen else "open"
        if state == "open" and not (taken.lines or taken.intents or taken.marks or taken.state.incomplete):
            return RolloutReport(rollout, Fate.EMPTY, state, notes=tuple(taken.notes))
        if taken.lines:
            self._write(rollout, ENTRIES, (line + b"\n" for line in taken.lines.values()))
        if taken.intents:
            self._write(rollout, INTENTS, (f"{call}\n".encode() for call in taken.intents))
        if taken.marks:
            self._write(rollout, INCOMPLETE, (f"{call}\n".encode() for call in taken.marks))
        self._write(rollout, STATE, [taken.state.dump()])
        read = self._read_back(rollout)
        if read.faults:  # a chain that does not close, say: what the import would refuse is not handed out
            self._unwrite(rollout)
            return RolloutReport(rollout, Fate.DAMAGED, "-", problems=tuple(map(str, read.faults)))
        different = tuple(_differences(taken, read))
        return RolloutReport(
            rollout,
            Fate.DIFFERENT if different else Fate.EXPORTED,
            state,
            calls=len(taken.lines),
            dangling=len(taken.dangling),
            marks=len(taken.marks),
            verified=not different,
            problems=(*different, *taken.problems),
            notes=tuple(taken.notes),
        )

    def _read_back(self, rollout: str) -> CheckedRollout:
        return check_rollout(Files(self._root, rollout, stamps_of(self._root, rollout)), max_bytes=MAX_LINE)

    def _unwrite(self, rollout: str) -> None:
        for suffix in (ENTRIES, INTENTS, INCOMPLETE, STATE):
            (self._root / f"{rollout}{suffix}").unlink(missing_ok=True)

    def _write(self, rollout: str, suffix: str, parts: Iterable[bytes]) -> None:
        with (self._root / f"{rollout}{suffix}").open("xb") as handle:
            for part in parts:
                handle.write(part)
            handle.flush()
            os.fsync(handle.fileno())

    # -- ledgers ------------------------------------------------------------------------------------------

    def _ledgers(self) -> Iterator[str]:
        what = f"list of the ledgers of run {self._keys.run!r}"

        def of_shard(folder: str) -> set[str]:
            parsed = (parse(self._keys.root, row.key) for row in self._reader.list(folder, what))
            return {found.rollout_id for found in parsed if found is not None}

        for folder in self._reader.folders(self._keys.ledgers):
            yield from sorted(filter(self._names, of_shard(folder)))

    def _ledger(self, rollout: str) -> RolloutReport:
        try:
            taken = take_ledger(self._reader, self._keys.ledger(rollout))
        except CorruptObjectError as error:
            return RolloutReport(rollout, Fate.DAMAGED, "-", problems=(str(error),))
        if not (taken.rows or taken.failures):
            return RolloutReport(rollout, Fate.EMPTY, "-", notes=tuple(taken.notes))
        # Rows first: Gym takes a row behind a failure of the same call for a contradiction when it is recorded again.
        self._write(rollout, LEDGER, (*taken.rows.values(), *taken.failures.values()))
        problems = tuple(_ledger_differences(taken, self._read_back(rollout)))
        return RolloutReport(
            rollout,
            Fate.DIFFERENT if problems else Fate.EXPORTED,
            "-",
            rows=len(taken.rows),
            failures=len(taken.failures),
            verified=not problems,
            problems=problems,
            notes=tuple(taken.notes),
        )


def _both(records: RolloutReport, ledger: RolloutReport) -> RolloutReport:
    """One report for a rollout that has records and a ledger: the worse fate, and the sum of the rest."""
    worst = max(records.fate, ledger.fate, key=[Fate.EMPTY, Fate.EXPORTED, Fate.DIFFERENT, Fate.DAMAGED].index)
    verified = all(part.verified for part in (records, ledger) if part.fate is not Fate.EMPTY)
    return dataclasses.replace(
        records,
        fate=worst,
        rows=ledger.rows,
        failures=ledger.failures,
        verified=verified and worst is not Fate.EMPTY,
        problems=(*records.problems, *ledger.problems),
        notes=(*records.notes, *ledger.notes),
    )


def _differences(taken: Taken, read: CheckedRollout) -> Iterator[str]:
    """What the directory says otherwise than what was taken for it."""
    if {line.call: line.digest for line in read.entries} != {
        call: hashlib.sha256(line).hexdigest() for call, line in taken.lines.items()
    }:
        yield "the records of the directory are not those of the bucket"
    if read.intents != tuple(taken.intents):
        yield "the intents of the directory are not those of the bucket"
    # A state that is incomplete without a marker counts as one mark.
    marks = taken.marks or ([""] if taken.state.incomplete else [])
    if [mark.call for mark in read.marks] != marks:
        yield "the marks of the directory are not those of the bucket"
    if read.state != taken.state:
        yield "the state of the directory is not the one that was written"


def _ledger_differences(taken: TakenLedger, read: CheckedRollout) -> Iterator[str]:
    yield from (str(fault) for fault in read.faults if fault.file == read.files.name(LEDGER))
    rows = {line.call: read_line(read.files, LEDGER, line) for line in read.rows}
    if rows != taken.rows or set(read.failures) != set(taken.failures):
        yield "the ledger of the directory is not that of the bucket"


def _remove(partial: Path) -> None:
    # After an error, threads that are still at work may add a file while the others are being removed; once the
    # directory is gone, they cannot.
    for _ in range(_TRIES):
        if not partial.exists():
            return
        shutil.rmtree(partial, ignore_errors=True)


def _sync(directory: Path) -> None:
    with contextlib.suppress(OSError):  # not every file system syncs directories
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
