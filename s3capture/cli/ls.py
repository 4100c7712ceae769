"""``s3capture ls``: the runs below a url, or the rollouts of one run.

The rule of this module: where a program reads, a row is one line that can be cut by ``head`` and searched by ``grep``,
and a run of any size can be listed: only so many rollouts as a person might read are held back, to be sorted.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from enum import StrEnum
from itertools import chain, islice
from typing import TYPE_CHECKING, Annotated

import typer

from s3capture.cli.common import (
    EXIT_BAD_DATA,
    AnyRun,
    AsJson,
    EndpointUrl,
    Region,
    Url,
    opened,
    out,
    out_json,
    plural,
    printable,
    say,
    screen_width,
    settings_of,
    size,
    when,
)
from s3capture.errors import SettingsError

if TYPE_CHECKING:
    from s3capture.inspection import RolloutSummary
    from s3capture.reader import Reader
    from s3capture.settings import Settings


_FOLDERS = 8
_SORTED = 10_000
_INDENT = 10


class StateName(StrEnum):
    """The states of a rollout, for ``--state``; here, so that --help need not import what knows them."""

    OPEN = "open"
    FREEZING = "freezing"
    FROZEN = "frozen"
    RETIRED = "retired"


def ls(
    url: Url,
    *,
    run: AnyRun = None,
    state: Annotated[StateName | None, typer.Option("--state", help="Only rollouts in this state.")] = None,
    incomplete: Annotated[
        bool, typer.Option("--incomplete", help="Only rollouts whose snapshot is, or now would be, incomplete.")
    ] = False,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """List runs, or the rollouts of one run.

    Reads only, and freezes nothing. Rollouts are listed by id; in a run of more than 10,000, and with --json, in the
    order of their keys, which is that of a hash. Exit status 1 when a stored object is damaged or a key is not ours
    (it is named on stderr and the rest is listed), and when the run does not exist. A URL without runs is no error.
    """
    if run is None and (state is not None or incomplete):
        raise SettingsError("--state and --incomplete select rollouts: name their run with --run")
    settings = settings_of(url, run, endpoint_url=endpoint_url, region=region)
    with opened(settings) as reader:
        if run is None:
            _runs(reader, settings, as_json=as_json)
            return
        sound = _rollouts(reader, settings, state, incomplete=incomplete, as_json=as_json)
    if not sound:
        raise typer.Exit(EXIT_BAD_DATA)


def _runs(reader: Reader, settings: Settings, *, as_json: bool) -> None:
    from s3capture.inspection import list_runs  # noqa: PLC0415 - see common.opened
    from s3capture.keys import run_folder  # noqa: PLC0415

    count = 0
    for run in list_runs(reader, settings.prefix):
        if as_json:
            out_json(run)
        else:
            if count == 0:
                out(f"{'ROLLOUTS':>10} {'CALLS':>11} {'SIZE':>8}  {'CHANGED (UTC)':<19}  RUN")
            changed = when(run.last_modified)
            out(f"{run.rollouts:>10,} {run.calls:>11,} {size(run.bytes):>8}  {changed:<19}  {run.run}")
        count += 1
    if count == 0:
        below = [path.removesuffix("/").rpartition("/")[2] for path in reader.folders(run_folder(settings.prefix))]
        hint = f"; folders there: {', '.join(below[:_FOLDERS])}{', ...' if len(below) > _FOLDERS else ''}"
        say(f"no run below {settings.url}{hint if below else ''}")


def _rollouts(reader: Reader, settings: Settings, state: StateName | None, *, incomplete: bool, as_json: bool) -> bool:
    from s3capture.inspection import list_rollouts, run_exists  # noqa: PLC0415 - see common.opened
    from s3capture.keys import RunKeys  # noqa: PLC0415

    keys = RunKeys(settings.prefix, settings.run)
    strays: list[str] = []

    def stray(key: str) -> None:
        strays.append(key)
        say(f"foreign key {key}")

    def problem(key: str, why: str) -> None:
        strays.append(key)
        say(f"archive: {why}")

    sound, found, shown = True, 0, 0
    rollouts = list_rollouts(reader, keys, on_stray=stray, on_problem=problem)
    for rollout in rollouts if as_json else _by_id(rollouts):
        found += 1
        sound = sound and rollout.sound
        for damaged in rollout.damaged:
            say(f"damaged: {damaged.problem}")
        for key in rollout.foreign:
            say(f"foreign key {key}")
        if (state is not None and rollout.state != state.value) or (incomplete and not rollout.incomplete):
            continue
        if as_json:
            out_json(rollout)
        else:
            if shown == 0:
                out(f"{'STATE':<8} {'CALLS':>5} {'VER':>4} {'SIZE':>8}  {'CHANGED (UTC)':<19}  ROLLOUT")
            out(_row(rollout))
        shown += 1
    if found == 0 and not strays and not run_exists(reader, keys):
        say(f"there is no run {settings.run!r} at {settings.url}; 's3capture ls {settings.url}' lists the runs")
        return False
    if found == 0:
        say(f"no rollout in run {settings.run!r} at {settings.url}")
    elif shown == 0:
        say(f"none of {plural(found, 'rollout')} matches")
    return sound and not strays


def _by_id(rollouts: Iterator[RolloutSummary]) -> Iterable[RolloutSummary]:
    """Sort by id, numbers by their value; what is too much to hold comes as it comes."""
    first = list(islice(rollouts, _SORTED + 1))
    if len(first) > _SORTED:
        say(f"more than {_SORTED:,} rollouts: they are listed in the order of their keys")
        return chain(first, rollouts)
    return sorted(first, key=lambda rollout: (_natural(rollout.rollout), rollout.rollout))


def _natural(rollout: str) -> list[str | int]:
    return [int(part) if number % 2 else part for number, part in enumerate(re.split(r"([0-9]+)", rollout))]


def _row(rollout: RolloutSummary) -> str:
    version = "-" if rollout.version is None else str(rollout.version)
    row = (
        f"{rollout.state:<8} {rollout.calls:>5} {version:>4} {size(rollout.bytes):>8}  "
        f"{when(rollout.last_modified):<19}  {printable(rollout.rollout)}"
    )
    notes, width = notes_of(rollout), screen_width()
    if not notes:
        return row
    if width is None or len(row) + len(notes) + 4 <= width:
        return f"{row}  ({notes})"
    indent = " " * _INDENT
    return "\n".join([row, *textwrap.wrap(f"({notes})", width, initial_indent=indent, subsequent_indent=indent)])


def notes_of(rollout: RolloutSummary) -> str:
    """Return what is out of the ordinary, in words: ``incomplete: 1 open call, 2 marks; late, refused: 1 outcome``."""
    from s3capture.inspection import Reason  # noqa: PLC0415 - see common.opened

    incomplete = _counted(
        (rollout.open_calls, "open call"),
        (rollout.sealed, "sealed call"),
        (rollout.conflicts, "conflict"),
        (rollout.marks, "mark"),
    )
    lost = "a part of it is gone" if Reason.LOST_EVIDENCE in rollout.incomplete_reasons else ""
    incomplete = ", ".join(filter(None, (incomplete, lost)))
    late = _counted(
        (rollout.late, "outcome"),
        (rollout.late_begins, "begin"),
        (rollout.late_conflicts, "conflict"),
        (rollout.late_marks, "mark"),
    )
    parts = ["archived"] if rollout.archived else []
    parts += [f"incomplete: {incomplete}"] if incomplete else []
    parts += [plural(rollout.refusals, "refusal")] if rollout.refusals else []
    parts += [f"late, refused: {late}"] if late else []
    parts += [f"{len(rollout.damaged)} damaged"] if rollout.damaged else []
    return "; ".join(parts)


def _counted(*counts: tuple[int, str]) -> str:
    return ", ".join(plural(count, word) for count, word in counts if count)
