"""``s3capture ls``: the runs below a url, or the rollouts of one run.

The rule of this module: a row is printed as soon as it is known, in one line that ends with the name, so that a run of
any size can be listed, cut by ``head`` and searched by ``grep``.
"""

from __future__ import annotations

from enum import StrEnum
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

    Reads only, and freezes nothing. Exit status 1 when a stored object is damaged or a key is not ours: it is named
    on stderr and the rest is listed.
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
    from s3capture.inspection import list_rollouts  # noqa: PLC0415 - see common.opened
    from s3capture.keys import RunKeys  # noqa: PLC0415

    strays: list[str] = []

    def stray(key: str) -> None:
        strays.append(key)
        say(f"foreign key {key}")

    sound, found, shown = True, 0, 0
    for rollout in list_rollouts(reader, RunKeys(settings.prefix, settings.run), on_stray=stray):
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
    if found == 0:
        say(f"no rollout in run {settings.run!r} at {settings.url}; 's3capture ls {settings.url}' lists the runs")
    elif shown == 0:
        say(f"none of {plural(found, 'rollout')} matches")
    return sound and not strays


def _row(rollout: RolloutSummary) -> str:
    version = "-" if rollout.version is None else str(rollout.version)
    notes = notes_of(rollout)
    return (
        f"{rollout.state:<8} {rollout.calls:>5} {version:>4} {size(rollout.bytes):>8}  "
        f"{when(rollout.last_modified):<19}  {printable(rollout.rollout)}{f'  ({notes})' if notes else ''}"
    )


def notes_of(rollout: RolloutSummary) -> str:
    """Return what is out of the ordinary, in words: ``incomplete: 1 open call, 2 marks; 1 late``."""
    reasons = [
        plural(count, word)
        for count, word in (
            (rollout.open_calls, "open call"),
            (rollout.sealed, "sealed call"),
            (rollout.conflicts, "conflict"),
            (rollout.marks, "mark"),
        )
        if count
    ]
    parts = [f"incomplete: {', '.join(reasons)}"] if reasons else []
    parts += [plural(rollout.refusals, "refusal")] if rollout.refusals else []
    parts += [f"{plural(rollout.late, 'late outcome')}"] if rollout.late else []
    parts += [f"{len(rollout.damaged)} damaged"] if rollout.damaged else []
    return "; ".join(parts)
