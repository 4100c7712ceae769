"""``s3capture spill``: the marks that S3 could not take, on this machine's disk.

The rule of this module: whatever is in the spill is shown or accounted for. A mark that is not published is a rollout
that looks complete and is not, so anything left behind is an exit status of 1.
"""

from __future__ import annotations

import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from s3capture.cli.common import (
    EXIT_BAD_DATA,
    AsJson,
    EndpointUrl,
    Region,
    Run,
    SpillDir,
    Url,
    out,
    out_json,
    plural,
    printable,
    say,
    settings_of,
    short,
    when,
)
from s3capture.errors import SettingsError, UnsupportedStoreError
from s3capture.silence import unlogged

if TYPE_CHECKING:
    from s3capture.effects import Steps
    from s3capture.runtime import Runtime
    from s3capture.settings import Settings
    from s3capture.spill import Spill, SpilledMark, Target
    from s3capture.spilling import Drained, Spilling

_FIRST_PATIENCE_S = 3.0

app = typer.Typer(help="Marks that wait on this machine's disk.", no_args_is_help=True)


@app.command("list")
def list_marks(spill_dir: SpillDir = None, as_json: AsJson = False) -> None:
    """List the marks in the local spill.

    They are waiting, late (their rollout was retired first), damaged or unreadable. Exit status 1 when a file is
    damaged or cannot be read; marks that wait are no error.
    """
    from s3capture.spill import Spill  # noqa: PLC0415 - see common.opened

    # The directory is a setting of a run; any run and url will do to learn its default.
    directory = _directory(settings_of("s3://any", spill_dir=spill_dir))
    with unlogged("s3capture"):
        rows = list(_rows(Spill(directory)))
    for row in rows:
        if as_json:
            out_json(row)
        else:
            out(_line(row))
    if not rows:
        say(f"no mark in {directory}{'' if directory.is_dir() else ', which does not exist'}")
    if any(row["state"] in ("damaged", "unreadable") for row in rows):
        raise typer.Exit(EXIT_BAD_DATA)


def _directory(settings: Settings) -> Path:
    """The spill directory; one that was named and is not there is a slip of the pen, never an empty spill."""
    directory = settings.spill_path
    if settings.spill_dir is not None and not os.path.lexists(directory):
        raise SettingsError(f"spill directory {str(directory)!r} does not exist; check --spill-dir")
    return directory


def _rows(spill: Spill) -> Iterator[dict[str, Any]]:
    scan = spill.pending()
    for mark in scan.marks:
        yield _row("waiting", mark)
    for mark, why in spill.late():
        yield _row("late", mark, why)
    for path in spill.damaged():
        yield {**dict.fromkeys(_FIELDS), "state": "damaged", "path": str(path)}
    for unread in scan.unread:
        yield {**dict.fromkeys(_FIELDS), "state": "unreadable", "path": str(unread.path), "why": unread.why}


_FIELDS = ("state", "url", "endpoint_url", "run", "rollout", "call", "mark", "at", "by", "reason", "why", "path")


def _row(state: str, mark: SpilledMark, why: str | None = None) -> dict[str, Any]:
    place = f"s3://{mark.bucket}/{mark.prefix}".rstrip("/")
    values = (state, place, mark.endpoint_url, mark.run, mark.rollout, mark.call, mark.mark_id, mark.at, mark.by)
    return dict(zip(_FIELDS, (*values, mark.reason, why, None), strict=True))


def _line(row: dict[str, Any]) -> str:
    if row["path"] is not None:
        return f"{row['state']:<10} {printable(row['path'])}{': ' + printable(row['why']) if row['why'] else ''}"
    where = row["url"] + (f" at {row['endpoint_url']}" if row["endpoint_url"] else "")
    lines = [
        f"{row['state']:<10} {when(row['at'])}  {row['run']} / {row['rollout']}, call {row['call'] or '(any)'}",
        f"           for {where}, by {row['by']}",
        # The reason of a mark is a whole error of the store, the same for each: --json has all of it.
        f"           {short(row['reason'])}",
        *([f"           late: {short(row['why'])}"] if row["why"] else []),
    ]
    return "\n".join(map(printable, lines))


AnyEndpoint = Annotated[
    bool,
    typer.Option(
        "--any-endpoint",
        help="Publish the marks of this run here that were spilled under another --endpoint-url, too. Say so only when "
        "those addresses lead to this very bucket.",
    ),
]


@app.command()
def drain(
    url: Url,
    *,
    run: Run,
    any_endpoint: AnyEndpoint = False,
    spill_dir: SpillDir = None,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Publish the waiting marks of one run.

    Give the same URL and --endpoint-url as the process that spilled them: marks of the run that were spilled under
    another address are counted as elsewhere and stay, unless --any-endpoint is given. Exit status 1 when a mark was
    not published, elsewhere ones included. Publishing again is harmless.
    """
    settings = settings_of(url, run, endpoint_url=endpoint_url, region=region, spill_dir=spill_dir)
    spill_path = _directory(settings)
    from s3capture.runtime import shared  # noqa: PLC0415 - see common.opened
    from s3capture.spill import Spill, Target  # noqa: PLC0415
    from s3capture.spilling import Drained  # noqa: PLC0415

    spill = Spill(spill_path)
    own = Target(settings.address, settings.bucket, settings.prefix, settings.run)
    runtime = shared(settings)
    with unlogged("s3capture"):
        scan = spill.pending()
    elsewhere = [mark for mark in scan.marks if mark.target != own and _same_run(mark.target, own)]
    others = sorted({mark.target for mark in elsewhere}, key=str) if any_endpoint else []
    if others or any(mark.target == own for mark in scan.marks):
        _check_store(runtime, settings)
    with unlogged("s3capture"):
        # What the scan set aside, no drain meets again.
        aside = {path for target in (own, *others) for path in spill.damaged(target=target)}.intersection(scan.damaged)
        drained = _together(Drained(damaged=tuple(sorted(aside))), runtime.spilling.drain())
        for target in others:
            drained = _together(drained, _spilling(runtime, spill, target).drain())
    left = [] if any_endpoint else elsewhere
    if as_json:
        out_json(
            {
                "published": [_row("published", mark) for mark in drained.published],
                "late": [_row("late", mark) for mark in drained.late],
                "waiting": [{"what": what, "why": why} for what, why in drained.waiting],
                "damaged": [str(path) for path in drained.damaged],
                "elsewhere": [_row("elsewhere", mark) for mark in left],
            }
        )
    else:
        out(
            f"published {len(drained.published)}, late {len(drained.late)}, waiting {len(drained.waiting)}, "
            f"damaged {len(drained.damaged)}, elsewhere {len(left)}"
        )
    _tell(drained, left)
    if drained.waiting or drained.late or drained.damaged or left:
        raise typer.Exit(EXIT_BAD_DATA)


def _spilling(runtime: Runtime, spill: Spill, target: Target) -> Spilling:
    """What drains the marks of ``target`` into the bucket of ``runtime``."""
    from s3capture.spilling import Spilling  # noqa: PLC0415 - see common.opened

    def publish(steps: Steps[None], what: str, deadline: float | None) -> None:
        limit = time.monotonic() + runtime.settings.op_timeout_s if deadline is None else deadline
        runtime.driver.run(steps, deadline=limit, what=what)

    def no_background(_work: Callable[[], Any]) -> Future[Any]:
        raise RuntimeError("a drain by hand drains nothing in the background")

    return Spilling(spill=spill, target=target, keys=runtime.keys, publish=publish, background=no_background)


def _together(one: Drained, other: Drained) -> Drained:
    from s3capture.spilling import Drained  # noqa: PLC0415 - see common.opened

    return Drained(
        one.published + other.published, one.late + other.late, one.waiting + other.waiting, one.damaged + other.damaged
    )


def _tell(drained: Drained, elsewhere: list[SpilledMark]) -> None:
    """Say of everything that was not published what is the matter with it."""
    for what, why in drained.waiting:
        say(f"waiting: {what}: {why}")
    for mark in drained.late:
        say(
            f"late: rollout {mark.rollout!r} was retired before this mark came: it may have been trained on with a hole"
        )
    for path in drained.damaged:
        say(f"damaged: {path}")
    for address, count in sorted(Counter(mark.endpoint_url for mark in elsewhere).items(), key=str):
        how = f"--endpoint-url {address}" if address else "no --endpoint-url"
        waits = "waits that was" if count == 1 else "wait that were"
        say(
            f"elsewhere: {plural(count, 'mark')} of this run {waits} spilled with {how}: drain again with that, or "
            "with --any-endpoint if it is this same bucket"
        )


def _same_run(one: Target, other: Target) -> bool:
    """Whether two targets differ at most in the address: marks elsewhere are easily taken for none at all."""
    return (one.bucket, one.prefix, one.run) == (other.bucket, other.prefix, other.run)


def _check_store(runtime: Runtime, settings: Settings) -> None:
    """Raise what is wrong with the store as such, once, before it is told of every mark."""
    from s3capture.protocol.probing import probe  # noqa: PLC0415 - see common.opened

    deadline = time.monotonic() + _FIRST_PATIENCE_S
    honoured = runtime.driver.run(probe(runtime.keys, uuid.uuid4().hex), deadline=deadline, what="check of the store")
    if not honoured:
        raise UnsupportedStoreError(
            f"{runtime.store.describe()} does not honour create-if-absent, so nothing was published; "
            f"'s3capture doctor {settings.url}' shows what it does"
        )
