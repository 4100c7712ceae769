"""``s3capture spill``: the marks that S3 could not take, on this machine's disk.

The rule of this module: whatever is in the spill is shown or accounted for. A mark that is not published is a rollout
that looks complete and is not, so anything left behind is an exit status of 1.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

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
    when,
)
from s3capture.errors import UnsupportedStoreError

if TYPE_CHECKING:
    from s3capture.runtime import Runtime
    from s3capture.settings import Settings
    from s3capture.spill import SpilledMark

_FIRST_PATIENCE_S = 3.0

app = typer.Typer(help="Marks that wait on this machine's disk.", no_args_is_help=True)


@app.command("list")
def list_marks(spill_dir: SpillDir = None, as_json: AsJson = False) -> None:
    """List the marks in the local spill.

    They are waiting, late (their rollout was retired first), damaged or unreadable. Exit status 1 when a file is
    damaged or cannot be read.
    """
    from s3capture.spill import Spill  # noqa: PLC0415 - see common.opened

    # The directory is a setting of a run; any run and url will do to learn its default.
    directory = settings_of("s3://any", spill_dir=spill_dir).spill_path
    with _unlogged():
        rows = list(_rows(Spill(directory)))
    for row in rows:
        if as_json:
            out_json(row)
        else:
            out(_line(row))
    if not rows:
        say(f"no mark in {directory}")
    if any(row["state"] in ("damaged", "unreadable") for row in rows):
        raise typer.Exit(EXIT_BAD_DATA)


@contextmanager
def _unlogged() -> Iterator[None]:
    """Keep the log of the package silent: these commands report the same, mark by mark."""
    logger = logging.getLogger("s3capture")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def _rows(spill: Any) -> Iterator[dict[str, Any]]:
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
        f"           {row['reason']}",
        *([f"           late: {row['why']}"] if row["why"] else []),
    ]
    return "\n".join(map(printable, lines))


@app.command()
def drain(
    url: Url,
    *,
    run: Run,
    spill_dir: SpillDir = None,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Publish the waiting marks of one run.

    Give the same URL and --endpoint-url as the process that spilled them. Exit status 1 when something could not be
    published. Publishing again is harmless.
    """
    settings = settings_of(url, run, endpoint_url=endpoint_url, region=region, spill_dir=spill_dir)
    from s3capture.runtime import shared  # noqa: PLC0415 - see common.opened
    from s3capture.spill import Spill, Target  # noqa: PLC0415

    spill = Spill(settings.spill_path)
    target = Target(settings.endpoint_url, settings.bucket, settings.prefix, settings.run)
    runtime = shared(settings)
    if spill.pending(target=target).marks:
        _check_store(runtime, settings)
    with _unlogged():
        drained = runtime.spilling.drain()
    if as_json:
        out_json(
            {
                "published": [_row("published", mark) for mark in drained.published],
                "late": [_row("late", mark) for mark in drained.late],
                "waiting": [{"what": what, "why": why} for what, why in drained.waiting],
                "damaged": [str(path) for path in drained.damaged],
            }
        )
    else:
        out(
            f"published {len(drained.published)}, late {len(drained.late)}, waiting {len(drained.waiting)}, "
            f"damaged {len(drained.damaged)}"
        )
    for what, why in drained.waiting:
        say(f"waiting: {what}: {why}")
    for mark in drained.late:
        say(
            f"late: rollout {mark.rollout!r} was retired before this mark came: it may have been trained on with a hole"
        )
    for path in drained.damaged:
        say(f"damaged: {path}")
    _tell_of_others(spill, target)
    if drained.waiting or drained.late or drained.damaged:
        raise typer.Exit(EXIT_BAD_DATA)


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


def _tell_of_others(spill: Any, target: Any) -> None:
    """Marks of the same run under another address are easily taken for none at all."""
    from collections import Counter  # noqa: PLC0415

    elsewhere = Counter(
        mark.endpoint_url
        for mark in spill.pending().marks
        if mark.target != target and (mark.bucket, mark.prefix, mark.run) == (target.bucket, target.prefix, target.run)
    )
    for address, count in sorted(elsewhere.items(), key=str):
        how = f"--endpoint-url {address}" if address else "no --endpoint-url"
        say(f"{plural(count, 'mark')} of this run wait that were spilled with {how}: drain again with that")
