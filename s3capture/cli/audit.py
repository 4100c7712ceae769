"""``s3capture audit``: what went wrong in a run, why, and what is left of it.

The rule of this module: totals first, then reasons; the exit status is the verdict, and what makes it is chosen before
anything is read. The text shows what fails and counts the rest; JSON and the page hold everything.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from s3capture import __version__
from s3capture.cli.audit_view import Told, finding_json, print_audit, rollout_json, verdict_of
from s3capture.cli.common import (
    EXIT_BAD_DATA,
    AsJson,
    EndpointUrl,
    Region,
    Run,
    SpillDir,
    Url,
    opened,
    out_json,
    say,
    settings_of,
    size,
)
from s3capture.errors import SettingsError

if TYPE_CHECKING:
    from s3capture.audit import Kind, RunAudit
    from s3capture.audit.page import PageData
    from s3capture.settings import Settings
    from s3capture.spill import Spill
    from s3capture.stored import Selection


def audit(
    url: Url,
    *,
    run: Run,
    rollout: Annotated[
        list[str] | None,
        typer.Option("--rollout", metavar="GLOB", help="Only rollouts whose id matches; may be given again."),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="TIME", help="Only rollouts changed since: an age (12h, 7d) or time."),
    ] = None,
    until: Annotated[
        str | None, typer.Option("--until", metavar="TIME", help="Only rollouts not changed since: an age or a time.")
    ] = None,
    fail_on: Annotated[
        list[str] | None,
        typer.Option("--fail-on", metavar="KIND", help="Fail on findings of this kind alone; may be given again."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Fail on any finding, notes included.")] = False,
    notes: Annotated[bool, typer.Option("--notes", help="Show the notes of each rollout as well.")] = False,
    page: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write a page that needs no network to FILE.")
    ] = None,
    spill_dir: SpillDir = None,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Read every object of a run again and tell what is wrong.

    Digests, delta chains, lineage markers and invariants are checked; what is incomplete, conflicted, undelivered or
    kept is told with who, when and why, and so is what does not belong there, and marks in this machine's spill. Reads
    only. Exit status 1 when a finding fails (docs/audit.md lists the kinds), or what was named is not there.
    """
    from s3capture.audit import RunAudit  # noqa: PLC0415 - see common.opened
    from s3capture.audit.page import PageData  # noqa: PLC0415
    from s3capture.cli.progress import Bars  # noqa: PLC0415
    from s3capture.keys import RunKeys  # noqa: PLC0415
    from s3capture.spill import Target  # noqa: PLC0415

    settings = settings_of(url, run, endpoint_url=endpoint_url, region=region, spill_dir=spill_dir)
    failing = _failing(fail_on or (), strict=strict)
    selection = _selection(rollout or (), since, until)
    spill = _spill(settings)
    if page is not None:
        _check_place(page)
    data = None if page is None else PageData()
    told: list[Told] = []
    with opened(settings) as reader:
        keys = RunKeys(settings.prefix, settings.run)
        target = Target(settings.address, settings.bucket, settings.prefix, settings.run)
        done = RunAudit(reader, keys, selection, spill, target)
        with Bars("rollouts") as bars:
            for one in done.rollouts():
                bars.advance()
                if data is not None:
                    data.take(one)
                if as_json:
                    if one.findings:
                        out_json(rollout_json(one, failing))
                elif shown := [finding for finding in one.findings if notes or finding.kind in failing]:
                    told.append(Told(one, shown))
        if not done.totals.rollouts and not done.totals.ledgers and not done.findings:
            _nothing(done, settings, selection)
    fails = done.totals.failing(failing)
    if as_json:
        out_json({"type": "run", "run": settings.run, "findings": [finding_json(f, failing) for f in done.findings]})
        out_json({"type": "totals", "run": settings.run, "fails": fails, **done.totals.as_json()})
    else:
        print_audit(done, failing, told, notes=notes)
    if page is not None and data is not None:
        head: dict[str, Any] = {"run": settings.run, "url": settings.url, "made_at": time.time()}
        head |= {"version": __version__, "selection": _words(selection, since, until)}
        _write_page(page, data, done, head=head, failing=failing)
    if fails:
        raise typer.Exit(EXIT_BAD_DATA)


# -- what is asked --------------------------------------------------------------------------------------------


def _failing(names: Sequence[str], *, strict: bool) -> frozenset[Kind]:
    from s3capture.audit import SEVERITY, Kind, Severity  # noqa: PLC0415 - see common.opened

    if strict and names:
        raise SettingsError("--strict fails on every kind and --fail-on on some: give one of them")
    if strict:
        return frozenset(Kind)
    unknown = [name for name in names if name not in list(Kind)]
    if unknown:
        raise SettingsError(f"--fail-on {unknown[0]!r} is no kind of finding; the kinds are {', '.join(Kind)}")
    return frozenset(map(Kind, names)) or frozenset(k for k in Kind if SEVERITY[k] is Severity.FAIL)


def _selection(globs: Sequence[str], since: str | None, until: str | None) -> Selection:
    from s3capture.stored import Selection  # noqa: PLC0415 - see common.opened
    from s3capture.stored.selection import globs_of, instant  # noqa: PLC0415

    now = time.time()
    return Selection(
        globs=globs_of(globs),
        since=None if since is None else instant(since, now),
        until=None if until is None else instant(until, now),
    )


def _words(selection: Selection, since: str | None, until: str | None) -> str:
    times = [f"{word} {text}" for word, text in (("since", since), ("until", until)) if text is not None]
    return ", ".join([*(f"rollouts {glob}" for glob in selection.globs), *times])


def _spill(settings: Settings) -> Spill:
    from s3capture.spill import Spill  # noqa: PLC0415 - see common.opened

    if settings.spill_dir is not None and not os.path.lexists(settings.spill_path):
        raise SettingsError(f"spill directory {str(settings.spill_path)!r} does not exist; check --spill-dir")
    return Spill(settings.spill_path)


def _check_place(page: Path) -> None:
    """Refuse a place that no file can be written to, before the run is read."""
    if page.is_dir() or not page.parent.is_dir():
        raise SettingsError(f"--html {str(page)!r}: {'is a directory' if page.is_dir() else 'has no such directory'}")
    if not os.access(page.parent, os.W_OK):
        raise SettingsError(f"--html {str(page)!r}: its directory may not be written to")


def _nothing(done: RunAudit, settings: Settings, selection: Selection) -> None:
    """Say that there is nothing to audit; what was named and is not there fails."""
    from s3capture.stored import StoredRun  # noqa: PLC0415 - see common.opened

    if not StoredRun(done.reader, done.keys).exists():
        say(f"there is no run {settings.run!r} at {settings.url}; 's3capture ls {settings.url}' lists the runs")
        raise typer.Exit(EXIT_BAD_DATA)
    say(f"no rollout of run {settings.run!r} at {settings.url} is chosen")
    if selection.globs:
        raise typer.Exit(EXIT_BAD_DATA)


# -- the page -------------------------------------------------------------------------------------------------


def _write_page(page: Path, data: PageData, done: RunAudit, *, head: dict[str, Any], failing: frozenset[Kind]) -> None:
    from s3capture.audit.page import render  # noqa: PLC0415 - see common.opened

    dumped = data.dump(head=head, totals=done.totals, run=done.findings, failing=failing)
    verdict = verdict_of(done, failing)
    text = render(
        title=f"Run {done.keys.run}",
        verdict=f"{verdict[0].upper()}{verdict[1:]}.",
        passed=not done.totals.failing(failing),
        data=dumped,
    )
    # A page that is being written is never taken for a whole one: it appears, or the one before stays.
    draft = page.with_name(f".{page.name}.{uuid.uuid4().hex}")
    try:
        with draft.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)
        draft.replace(page)
    except OSError as error:
        raise SettingsError(f"cannot write --html {str(page)!r}: {error.strerror or error}") from error
    finally:
        draft.unlink(missing_ok=True)
    say(f"wrote {page} ({size(page.stat().st_size)})")
