"""``s3capture import-gym`` and ``export-gym``: capture directories of nemo-gym 0.7.0, into a bucket and out of one.

The rule of this module: one line for each rollout that is not as it should be or of which there is something to know,
then the sums and what was verified. Both commands create and neither overwrites or deletes, so there is no ``--yes``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from s3capture.cli.common import (
    EXIT_BAD_DATA,
    AsJson,
    EndpointUrl,
    Region,
    Run,
    Url,
    opened,
    out,
    out_json,
    plural,
    printable,
    say,
    settings_of,
)

if TYPE_CHECKING:
    from s3capture.gymdir import ExportReport, ImportReport, RolloutReport

Globs = Annotated[
    list[str] | None,
    typer.Option("--rollout", metavar="GLOB", help="Only rollouts whose id matches; may be given several times."),
]


def import_gym(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The capture directory; it is only read.")],
    url: Url,
    *,
    run: Run,
    rollout: Globs = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and compare, and write nothing: what would be imported.")
    ] = False,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Bring a capture directory of nemo-gym 0.7.0 into a bucket.

    Nothing may write to the directory meanwhile. Every line is checked before anything is written; damaged rollouts,
    and those that the bucket holds otherwise, are reported and left out, the others are imported, read back and
    compared. Doing it again is harmless and finishes what was interrupted. Exit status 1 when anything was left out.
    """
    from s3capture.cli.progress import Bars  # noqa: PLC0415 - see common.opened
    from s3capture.gymdir import import_directory  # noqa: PLC0415
    from s3capture.store.boto import BotoStore  # noqa: PLC0415

    settings = settings_of(url, run, endpoint_url=endpoint_url, region=region)
    names = _names(rollout)
    store = BotoStore(settings)
    try:
        with Bars() as bars:
            report = import_directory(directory, settings, store, names=names, dry_run=dry_run, show=bars)
    finally:
        store.close()
    for problem in report.problems:
        say(problem)
    if as_json:
        _json(report)
    else:
        _lines(report)
        if beside := report.others + report.leftovers:
            out(f"beside     {plural(beside, 'file')} that the token store does not own, left alone")
    _end(report, f"nothing in {directory} to import")


def export_gym(
    url: Url,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="The directory to make: empty or not there.")],
    *,
    run: Run,
    rollout: Globs = None,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Write rollouts of a bucket as a capture directory that nemo-gym 0.7.0 opens.

    The bucket is only read, archived rollouts included. DIR appears when it is whole: every file was read back and
    compared. What Gym has no place for is said of each rollout. Exit status 1 when a rollout is damaged and left out,
    or nothing was found.
    """
    from s3capture.cli.progress import Bars  # noqa: PLC0415 - see common.opened
    from s3capture.gymdir import export_directory  # noqa: PLC0415
    from s3capture.keys import RunKeys  # noqa: PLC0415
    from s3capture.stored import StoredRun  # noqa: PLC0415

    settings = settings_of(url, run, endpoint_url=endpoint_url, region=region)
    names, keys = _names(rollout), RunKeys(settings.prefix, settings.run)
    with opened(settings) as reader:
        if not StoredRun(reader, keys).exists():
            say(f"no run {run!r} in {url}; 's3capture ls {url}' lists those that are there")
            raise typer.Exit(EXIT_BAD_DATA)
        with Bars() as bars:
            report = export_directory(reader, keys, directory, names=names, show=bars)
    for stray in report.strays:
        say(f"left alone, for it belongs to no rollout: {stray}")
    if as_json:
        _json(report)
    else:
        _lines(report)
    _end(report, f"no rollout of run {run!r} matches; {directory} is empty")


def _names(globs: list[str] | None) -> Callable[[str], bool]:
    from s3capture.stored.selection import Selection, globs_of  # noqa: PLC0415 - see common.opened

    return Selection(globs_of(globs or ())).names


def _lines(report: ImportReport | ExportReport) -> None:
    for rollout in report.rollouts:
        for problem in rollout.problems:
            out(f"{rollout.fate.upper():<10} {printable(rollout.rollout)}: {printable(problem)}")
        for note in rollout.notes:
            out(f"note       {printable(rollout.rollout)}: {printable(note)}")
    fates = Counter(rollout.fate for rollout in report.rollouts)
    if fates:
        out(f"rollouts   {', '.join(f'{count:,} {fate}' for fate, count in sorted(fates.items()))}")
        out(f"holding    {_sums([rollout for rollout in report.rollouts if rollout.ok])}")
    verified, of = report.verified
    if of:
        out(f"verified   {verified:,} of {of:,}")


def _sums(rollouts: list[RolloutReport]) -> str:
    sums = {
        "call": sum(r.calls for r in rollouts),
        "dangling intent": sum(r.dangling for r in rollouts),
        "mark": sum(r.marks for r in rollouts),
        "ledger row": sum(r.rows for r in rollouts),
        "ledger failure": sum(r.failures for r in rollouts),
    }
    return ", ".join(plural(count, word) for word, count in sums.items())


def _json(report: ImportReport | ExportReport) -> None:
    for rollout in report.rollouts:
        out_json(rollout)


def _end(report: ImportReport | ExportReport, nothing: str) -> None:
    if not report.rollouts:
        say(nothing)
        raise typer.Exit(EXIT_BAD_DATA)
    if not report.ok:
        bad = sum(not rollout.ok for rollout in report.rollouts)
        if bad:
            say(f"{plural(bad, 'rollout')} of {len(report.rollouts):,} left out or not as it should be")
        raise typer.Exit(EXIT_BAD_DATA)
