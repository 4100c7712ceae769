"""``s3capture conformance``: the whole contract tried on a real bucket, check by check.

The rule of this module: it works under a run of its own that is removed at the end, so it may be tried on a bucket that
is in use. Exit status: everything holds (0), a check failed (1), the bucket could not be used (2).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from s3capture.cli.common import (
    EXIT_BAD_DATA,
    AsJson,
    EndpointUrl,
    Region,
    Url,
    out,
    out_json,
    plural,
    printable,
    say,
    settings_of,
)
from s3capture.errors import SettingsError

if TYPE_CHECKING:
    from s3capture.settings import Settings


def conformance(
    url: Url,
    *,
    run: Annotated[
        str | None,
        typer.Option("--run", metavar="RUN", help="Work below this run, which must hold nothing. Default: a new one."),
    ] = None,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Try the whole capture contract on a bucket: both conformance kits, races included.

    Writes below a throw-away run and removes it at the end; needs the right to delete. Exit status 1 when a check
    failed, 2 when the bucket could not be used.
    """
    from uuid import uuid4  # noqa: PLC0415 - a fresh name is drawn here and nowhere else

    name = f"conformance-{uuid4().hex[:16]}" if run is None else run
    settings = settings_of(url, name, endpoint_url=endpoint_url, region=region)
    from s3capture.preflight import RunInUseError  # noqa: PLC0415 - --help need not wait for it

    try:
        with _without_expected_warnings():
            passed, failed, skipped = asyncio.run(_judge(settings, as_json=as_json))
    except RunInUseError as error:
        # Its own advice is to a launcher, which may resume a run.
        raise SettingsError(
            f"run {name!r} at {settings.url} holds data already, and nothing was tried: choose another --run, or leave "
            "it out"
        ) from error
    said = f"{plural(passed, 'check')} passed, {failed} failed, {skipped} skipped; run {name!r} was removed"
    say(said)
    if failed:
        raise typer.Exit(EXIT_BAD_DATA)


async def _judge(settings: Settings, *, as_json: bool) -> tuple[int, int, int]:
    from s3capture.testing.bucket_conformance import judge_bucket  # noqa: PLC0415 - --help need not wait for it
    from s3capture.testing.conformance import Ending  # noqa: PLC0415

    count = dict.fromkeys(Ending, 0)
    async with contextlib.aclosing(judge_bucket(settings)) as verdicts:
        async for kit, verdict in verdicts:
            count[verdict.ending] += 1
            if as_json:
                out_json({"kit": kit, "check": verdict.check, "ending": verdict.ending, "detail": verdict.detail})
            else:
                detail = f"  {printable(verdict.detail)}" if verdict.detail else ""
                out(f"{verdict.ending:<8} {kit:<10} {verdict.check}{detail}")
    return count[Ending.PASSED], count[Ending.FAILED], count[Ending.SKIPPED]


@contextmanager
def _without_expected_warnings() -> Iterator[None]:
    """The kits provoke every warning there is; what matters is in the verdicts."""
    log = logging.getLogger("s3capture")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        log.setLevel(before)
