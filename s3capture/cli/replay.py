"""``s3capture replay``: rollouts out of a bucket into a file, a folder of tables, or another run.

The rule of this module: what is written is whole and proven, or the exit status says that something is missing; what
was passed over is counted and told, so that nobody trains on less than they think, or on more.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from s3capture.cli.common import (
    EXIT_BAD_DATA,
    EndpointUrl,
    Region,
    Run,
    Url,
    opened,
    plural,
    say,
    settings_of,
    size,
)
from s3capture.cli.ls import StateName
from s3capture.errors import SettingsError

if TYPE_CHECKING:
    from s3capture.cli.progress import Bars
    from s3capture.replay import Problem, Replay, ReplayedRollout
    from s3capture.replay.writers import Writer
    from s3capture.settings import Settings

_SHOWN_PROBLEMS = 20


class FormatName(StrEnum):
    """What a replay is written as."""

    ENTRIES = "entries"
    RECORDING = "recording"
    GYM = "gym"
    PARQUET = "parquet"


def replay(
    url: Url,
    *,
    run: Run,
    to: Annotated[
        str | None,
        typer.Option(
            "--to",
            metavar="PATH",
            help="Write here: a file, packed if its name ends in .gz or .zst, for parquet a folder; - for stdout.",
        ),
    ] = None,
    form: Annotated[
        FormatName, typer.Option("--format", help="What to write: see docs/replay.md.")
    ] = FormatName.ENTRIES,
    rollout: Annotated[
        list[str] | None,
        typer.Option("--rollout", metavar="GLOB", help="Only this rollout, or those that match; may be repeated."),
    ] = None,
    state: Annotated[
        list[StateName] | None,
        typer.Option("--state", help="Only rollouts in this state; may be repeated. Default: frozen and retired."),
    ] = None,
    take_all: Annotated[
        bool, typer.Option("--all", help="Incomplete rollouts as well. They must be masked in training.")
    ] = False,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="TIME", help="Only rollouts changed since: 7d, 12h, 2026-12-01, ..."),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="TIME", help="Only rollouts not changed since then.")
    ] = None,
    deltas: Annotated[
        bool, typer.Option("--deltas", help="With entries: prompts as they are stored, not in full.")
    ] = False,
    into: Annotated[
        str | None,
        typer.Option("--into", metavar="URL", help="In place of --to: capture again, here, as the run --into-run."),
    ] = None,
    into_run: Annotated[str | None, typer.Option("--into-run", metavar="RUN", help="The run of --into.")] = None,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
) -> None:
    """Replay rollouts as they were captured.

    Complete rollouts that are frozen, kept after retirement, or archived; every token is checked against the digest
    that was recorded with it. Reads the run and changes nothing in it. Nothing appears under PATH before it is
    finished, and what exists is never overwritten. Exit status 1 when a call or a rollout had to be left out because
    it is damaged, in conflict or not to be expressed in that format (it is named on stderr and the rest is given),
    when a rollout named in full is not there, and when the run does not exist. Incomplete rollouts are passed over and
    counted, which is no fault.
    """
    from s3capture.cli.progress import Bars  # noqa: PLC0415 - see common.opened
    from s3capture.keys import RunKeys  # noqa: PLC0415
    from s3capture.replay.stream import DEFAULT_STATES, Replay, selection_of  # noqa: PLC0415
    from s3capture.stored import StoredRun  # noqa: PLC0415

    settings = settings_of(url, run, endpoint_url=endpoint_url, region=region)
    states = [name.value for name in state] if state else DEFAULT_STATES
    selection = selection_of(rollout or (), states, None if take_all else True, since, until)
    target = _target(settings, to, form, into, into_run, deltas=deltas)
    shown = _Problems()
    with opened(settings) as reader:
        stored = StoredRun(reader, RunKeys(settings.prefix, settings.run))
        with Replay(stored, selection, on_problem=shown.take) as rollouts, target() as writer:
            with Bars("listing", quiet=to == "-" and sys.stdout.isatty()) as bars:
                for each in _watched(rollouts, bars):
                    shown.take(*writer.write(each))
            missing = not rollouts.counts.seen and not stored.exists()
            if not missing:
                shown.take(*writer.finish())
            notes = writer.notes() if rollouts.counts.given else []
    shown.finish()
    for note in notes:
        say(note)
    if missing:
        say(f"there is no run {run!r} at {url}; 's3capture ls {url}' lists the runs")
    for name in rollouts.absent:
        say(f"nothing is stored for rollout {name!r} of run {run!r}")
    _tell(rollouts)
    if missing or shown.count or rollouts.absent:
        raise typer.Exit(EXIT_BAD_DATA)


class _Problems:
    """Says what could not be given, until it is too much to read."""

    def __init__(self) -> None:
        self.count = 0

    def take(self, *problems: Problem) -> None:
        for problem in problems:
            self.count += 1
            if self.count <= _SHOWN_PROBLEMS:
                say(str(problem))

    def finish(self) -> None:
        if self.count > _SHOWN_PROBLEMS:
            say(f"... and {plural(self.count - _SHOWN_PROBLEMS, 'more problem')} of that kind; s3capture audit has all")


def _tell(rollouts: Replay) -> None:
    counts = rollouts.counts
    over = [
        (counts.incomplete, "incomplete (--all takes them)"),
        (counts.left_out, "not to be given whole (see above)"),
        (counts.deleted, "retired and deleted"),
        (counts.other, "of another state or time"),
    ]
    rest = ", ".join(f"{count:,} {what}" for count, what in over if count)
    say(
        f"{plural(counts.given, 'rollout')}, {plural(counts.calls, 'call')}, {size(counts.bytes)} as stored"
        f"{f'; passed over: {rest}' if rest else ''}"
    )


def _target(
    settings: Settings, to: str | None, form: FormatName, into: str | None, into_run: str | None, *, deltas: bool
) -> Callable[[], Writer]:
    """What makes the writer; everything that can be refused is refused here, before anything is read."""
    if (to is None) == (into is None):
        raise SettingsError("a replay needs one place to go to: --to PATH, or --into URL with --into-run RUN")
    if (into is None) != (into_run is None):
        raise SettingsError("--into and --into-run belong together: the address and the name of the new run")
    if deltas and (into is not None or form is not FormatName.ENTRIES):
        raise SettingsError("--deltas belongs to --format entries")
    if into is not None:
        if form is not FormatName.ENTRIES:
            raise SettingsError(f"--format {form} writes a file, and --into captures again: leave one out")
        return _into(settings, into, into_run or "")
    return _file(to or "", form, deltas=deltas)


def _file(to: str, form: FormatName, *, deltas: bool) -> Callable[[], Writer]:
    from s3capture.replay import writers  # noqa: PLC0415 - see common.opened
    from s3capture.replay.gym import GymBuilder  # noqa: PLC0415
    from s3capture.replay.output import refuse_taken  # noqa: PLC0415
    from s3capture.replay.table import arrow  # noqa: PLC0415

    if to != "-":
        refuse_taken(Path(to))
    place = sys.stdout.buffer if to == "-" else Path(to)
    match form:
        case FormatName.ENTRIES:
            return lambda: writers.entries_writer(place, deltas=deltas)
        case FormatName.RECORDING:
            return lambda: writers.recording_writer(place)
        case FormatName.GYM:
            GymBuilder()
            return lambda: writers.gym_writer(place)
        case FormatName.PARQUET:
            if not isinstance(place, Path):
                raise SettingsError("--format parquet writes a folder of two files: name it with --to")
            arrow()
            folder = place
            return lambda: writers.ParquetWriter(folder)


def _into(settings: Settings, into: str, into_run: str) -> Callable[[], Writer]:
    from s3capture.replay.recapture import Recapturing  # noqa: PLC0415 - see common.opened

    given = settings_of(into, into_run, endpoint_url=settings.endpoint_url, region=settings.region)
    if (given.bucket, given.prefix, given.run) == (settings.bucket, settings.prefix, settings.run):
        raise SettingsError(f"run {into_run!r} at {into} is what is replayed; name another run with --into-run")
    return lambda: Recapturing(url=given.url, run=given.run, endpoint_url=given.endpoint_url, region=given.region)


def _watched(rollouts: Replay, bars: Bars) -> Iterator[ReplayedRollout]:
    """Pass rollouts on, and show how far they are."""
    for rollout in rollouts:
        counts = rollouts.counts
        told = f"{plural(counts.given, 'rollout')}, {plural(counts.calls, 'call')}, {size(counts.bytes)}"
        bars.show(told, counts.done, counts.total)
        yield rollout
