"""A capture directory into a bucket: check everything, compare everything, then write what is missing and prove it.

The rule of this module: it writes through the endpoints alone, which create and never overwrite, so that every fence is
asked; the first write comes after the last check. Every call of a rollout is begun before any of its records is put:
an import that dies leaves a rollout that is masked, and doing it again finishes it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import orjson

from s3capture.endpoint import SettingsKwargs
from s3capture.errors import CaptureError, CorruptObjectError, StoreError
from s3capture.gymdir.checked import CheckedRollout, Line, Mark, read_line
from s3capture.gymdir.checking import check_rollout, parse_entry
from s3capture.gymdir.holding import hold, hold_ledger
from s3capture.gymdir.layout import ENTRIES, LEDGER, Files, check_quiet, scan
from s3capture.gymdir.planning import Plan, plan
from s3capture.gymdir.report import Fate, ImportReport, RolloutReport, Show, Silent
from s3capture.gymdir.rows import KeptStamps, Row, read_row
from s3capture.keys import RunKeys
from s3capture.ledger import S3CaptureLedger
from s3capture.protocol import bodies, writing
from s3capture.protocol.bodies import Origin
from s3capture.reader import Reader
from s3capture.settings import Settings
from s3capture.sink import S3TokenSink, entry_payload
from s3capture.source import S3TokenSource
from s3capture.store.base import Store
from s3capture.stored import StoredRun

ROLLOUTS_AT_ONCE = 8
"""Rollouts that are written side by side; each holds a few records in memory at a time."""
_CALLS_AT_ONCE = 8
_T = TypeVar("_T")


class _Changed(CaptureError):
    """A file of the directory is no longer what was checked."""


def import_directory(
    root: Path,
    settings: Settings,
    store: Store,
    *,
    names: Callable[[str], bool] = lambda _: True,
    dry_run: bool = False,
    show: Show | None = None,
) -> ImportReport:
    """Bring the rollouts of ``root`` whose id ``names`` takes into the run of ``settings``; ``store`` is its bucket.

    Damaged rollouts, and those that the bucket holds otherwise, are reported and left out; the others are imported,
    read back and compared. With ``dry_run`` nothing is written. Repeating it is a no-op, after a crash it goes on.
    Raise ``SettingsError`` for a directory that cannot be read, ``DirectoryInUseError`` when a process holds a lock in
    it, and ``StoreError`` when the bucket cannot be used (then import again).
    """
    told = show or Silent()
    scanned = scan(root)
    wanted = [files for files in scanned.rollouts if names(files.rollout_id)]
    checked = list(_checked(wanted, settings, told))
    keys = RunKeys(settings.prefix, settings.run)
    with Reader(store) as reader:
        told.phase("comparing", len(checked))
        run = StoredRun(reader, keys)
        planned = list(zip(checked, _planned(run, checked, told), strict=True))
        work = [(rollout, todo) for rollout, todo in planned if isinstance(todo, Plan) and _is_work(rollout, todo)]
        done: dict[str, RolloutReport] = {}
        if not dry_run and work:
            told.phase("importing", len(work))
            importer = _Import(settings, store, run, told)
            done = {report.rollout: report for report in asyncio.run(importer.run(work))}
    reports = tuple(
        done[rollout.rollout_id] if rollout.rollout_id in done else _unwritten(rollout, todo)
        for rollout, todo in planned
    )
    return ImportReport(reports, tuple(map(str, scanned.faults)), scanned.others, scanned.leftovers)


def _checked(wanted: Sequence[Files], settings: Settings, show: Show) -> Iterator[CheckedRollout]:
    for files in wanted:
        check_quiet(files)
    show.phase("checking", len(wanted))
    for files in wanted:
        yield check_rollout(files, max_bytes=settings.max_object_bytes)
        show.advance()


def _planned(run: StoredRun, checked: Iterable[CheckedRollout], show: Show) -> Iterator[Plan | CorruptObjectError]:
    def one(rollout: CheckedRollout) -> Plan | CorruptObjectError:
        if rollout.faults or rollout.empty:
            return Plan()
        try:
            return _compare(run, rollout)
        except CorruptObjectError as error:
            return error

    for found in run.reader.map(one, checked):
        show.advance()
        yield found


def _compare(run: StoredRun, rollout: CheckedRollout) -> Plan:
    ledger = hold_ledger(run.reader, run.keys.ledger(rollout.rollout_id))
    return plan(run.keys, rollout, hold(run, rollout.rollout_id), ledger)


def _is_work(rollout: CheckedRollout, todo: Plan) -> bool:
    return not (rollout.faults or rollout.empty or todo.conflicts or todo.done)


def _unwritten(rollout: CheckedRollout, todo: Plan | CorruptObjectError) -> RolloutReport:
    if rollout.faults:
        return _report(rollout, Fate.DAMAGED, problems=tuple(map(str, rollout.faults)))
    if isinstance(todo, CorruptObjectError):
        return _report(rollout, Fate.CONFLICT, problems=(f"damaged in the bucket: {todo}",))
    if todo.conflicts:
        return _report(rollout, Fate.CONFLICT, problems=tuple(todo.conflicts), notes=tuple(todo.notes))
    if rollout.empty:
        return _report(rollout, Fate.EMPTY)
    if todo.done:
        return _report(rollout, Fate.PRESENT, verified=True, notes=tuple(todo.notes))
    return _report(rollout, Fate.PLANNED, notes=tuple(todo.notes))


def _report(
    rollout: CheckedRollout,
    fate: Fate,
    *,
    verified: bool = False,
    problems: tuple[str, ...] = (),
    notes: tuple[str, ...] = (),
) -> RolloutReport:
    state = rollout.state
    return RolloutReport(
        rollout=rollout.rollout_id,
        fate=fate,
        state="retired" if state.retired else "frozen" if state.frozen else "open",
        calls=len(rollout.entries),
        dangling=len(rollout.dangling),
        marks=len(rollout.marks),
        rows=len(rollout.rows),
        failures=len(rollout.failures),
        verified=verified,
        problems=problems,
        notes=(*rollout.notes, *notes),
    )


class _Import:
    """The endpoints of one import, and the writes of its rollouts."""

    def __init__(self, settings: Settings, store: Store, run: StoredRun, show: Show) -> None:
        # Retiring an empty rollout deletes nothing, and with "keep" it never could, whoever wrote in between.
        given = SettingsKwargs(**{**dataclasses.asdict(settings), "retention": "keep"})  # type: ignore[typeddict-item]
        self._sink = _ImportSink(store=store, **given)
        self._source = S3TokenSource(store=store, **given)
        self._ledger = S3CaptureLedger(matcher=KeptStamps(), store=store, **given)
        self._run, self._show = run, show

    async def run(self, work: Sequence[tuple[CheckedRollout, Plan]]) -> list[RolloutReport]:
        """Write every plan; a bucket that cannot be used ends it all, whatever else goes wrong its rollout alone.

        What is under way then is awaited and never cancelled: it may well succeed.
        """
        room, stopped = asyncio.Semaphore(ROLLOUTS_AT_ONCE), asyncio.Event()

        async def one(rollout: CheckedRollout, todo: Plan) -> RolloutReport | None:
            async with room:
                if stopped.is_set():
                    return None
                try:
                    report = await self._one(rollout, todo)
                except BaseException:
                    stopped.set()
                    raise
            self._show.advance()
            return report

        try:
            results = await asyncio.gather(*(one(*each) for each in work), return_exceptions=True)
        finally:
            for endpoint in (self._sink, self._source, self._ledger):
                await endpoint.close()
        for result in results:
            if isinstance(result, StoreError):
                result.add_note("what was written stays, masked where it is unfinished; import again to go on")
            if isinstance(result, BaseException):
                raise result
        return [result for result in results if isinstance(result, RolloutReport)]

    async def _one(self, rollout: CheckedRollout, todo: Plan) -> RolloutReport:
        try:
            await self._write(rollout, todo)
            left = await asyncio.to_thread(_compare, self._run, rollout)
        except StoreError:
            raise
        except CaptureError as error:
            return _report(rollout, Fate.FAILED, problems=(str(error),), notes=tuple(todo.notes))
        notes = tuple(dict.fromkeys((*todo.notes, *left.notes)))
        if changed := rollout.files.changed():
            problem = f"{changed[0]} changed while it was imported; import again when nothing writes to the directory"
            return _report(rollout, Fate.FAILED, problems=(problem,), notes=notes)
        if not left.done:
            return _report(rollout, Fate.DIFFERENT, problems=tuple(_missing(left)), notes=notes)
        return _report(rollout, Fate.IMPORTED, verified=True, notes=notes)

    async def _write(self, rollout: CheckedRollout, todo: Plan) -> None:
        name, files = rollout.rollout_id, rollout.files
        await _each(lambda call: self._sink.begin_call(name, call), todo.begin)
        await _each(lambda call: self._ledger.begin_call(name, call), todo.admit)
        await _each(lambda mark: self._sink.mark_as(name, mark), todo.marks)
        await _each(lambda line: self._put(files, line), todo.put)
        await _each(lambda line: self._record(files, line), todo.record)
        await _each(lambda row: self._ledger.record_failure(name, row.call, row.reason), todo.fail)
        if todo.freeze:
            await self._source.freeze(name)
        if todo.retire:
            await self._source.retire([name])

    async def _put(self, files: Files, line: Line) -> None:
        with _unchanged(files, ENTRIES, line):
            entry = parse_entry(orjson.loads(await asyncio.to_thread(read_line, files, ENTRIES, line)))
            if entry_payload(entry).digest != line.digest:
                raise ValueError("its digest is another one")
        await self._sink.put(entry)

    async def _record(self, files: Files, line: Line) -> None:
        with _unchanged(files, LEDGER, line):
            row = read_row(files.rollout_id, await asyncio.to_thread(read_line, files, LEDGER, line))
            if not isinstance(row, Row) or row.call != line.call:
                raise ValueError("it is another row")
        await self._ledger.record(row)  # type: ignore[arg-type] # of the shape of a commit


class _ImportSink(S3TokenSink):
    """A sink for records that are safe elsewhere: it marks only what it is told to, under ids that it is given."""

    async def mark_as(self, rollout_id: str, mark: Mark) -> None:
        """Publish ``mark``; a second time changes nothing. Nothing is spilled: the directory still has it."""
        runtime = self._runtime
        keys, now = runtime.rollout(rollout_id), runtime.origin()
        body = bodies.mark(keys, mark.call, Origin(now.by, now.at, mark.mark_id), mark.reason)
        what = self._what("mark", rollout_id, mark.call)
        future = runtime.submit(
            "mark_incomplete", what, lambda: writing.mark_incomplete(keys, mark.call, mark.mark_id, body)
        )
        await self._result(future, what)

    def _see_through(self, rollout: str, call: str, future: Future[None]) -> None:
        """Mark nothing when a cancelled write fails: the record is still in the directory, and is put the next time."""


@contextmanager
def _unchanged(files: Files, suffix: str, line: Line) -> Iterator[None]:
    """Turn whatever a line that was sound before now fails with into one error that says so."""
    try:
        yield
    except (CaptureError, ValueError, OSError) as error:
        raise _Changed(
            f"{files.name(suffix)}:{line.number}: no longer the line that was checked ({error}); import again when "
            "nothing writes to the directory"
        ) from error


async def _each(work: Callable[[_T], Awaitable[None]], items: Sequence[_T]) -> None:
    """Do ``work`` for all items, a few side by side and in their order; the first error ends it."""
    for start in range(0, len(items), _CALLS_AT_ONCE):
        results = await asyncio.gather(
            *(work(item) for item in items[start : start + _CALLS_AT_ONCE]), return_exceptions=True
        )
        for result in results:
            if isinstance(result, BaseException):
                raise result


def _missing(left: Plan) -> Iterator[str]:
    """What a plan that should be empty still wants: the read-back of an import that did not come out."""
    yield from left.conflicts
    wanted: dict[str, Sequence[object]] = {
        "begun calls": left.begin, "marks": left.marks, "records": left.put, "ledger admissions": left.admit,
        "ledger rows": left.record, "ledger failures": left.fail,
    }  # fmt: skip
    for what, items in wanted.items():
        if items:
            yield f"{len(items)} {what} are not in the bucket although they were written"
    if left.freeze or left.retire:
        yield f"not {'frozen' if left.freeze else 'retired'} in the bucket although that was asked for"
