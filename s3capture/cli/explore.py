"""``s3capture explore``: the shipped protocol through every interleaving, crash and lost reply.

The rule of this module: it explores the very generators that the endpoints run, and prints a report for each scenario
as it ends; a broken promise comes with a shortest schedule that breaks it.
"""

from __future__ import annotations

from typing import Annotated

import typer

from s3capture.cli.common import EXIT_BAD_DATA, AsJson, out, out_json, plural, say
from s3capture.errors import SettingsError


def explore(
    *,
    deep: Annotated[bool, typer.Option("--deep", help="Add the scenarios that take minutes each.")] = False,
    scenario: Annotated[
        list[str] | None, typer.Option("--scenario", metavar="NAME", help="Only this one; may be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Explore the protocol exhaustively.

    Every order of every request, with crashes and lost replies; takes minutes. Needs no store. Exit status 1 when a
    promise is broken.
    """
    from s3capture.testing.archive_scenarios import archive_scenarios  # noqa: PLC0415
    from s3capture.testing.explorer import explore as run  # noqa: PLC0415 - --help need not wait for it
    from s3capture.testing.scenarios import scenarios  # noqa: PLC0415

    known = scenarios(deep=deep) | archive_scenarios(deep=deep)
    for name in scenario or ():
        if name not in known:
            raise SettingsError(f"no scenario {name!r}; known are: {', '.join(map(repr, known))}")
    broken = 0
    for name in scenario or known:
        report = run(known[name])
        broken += report.violation is not None
        if as_json:
            out_json(report)
        else:
            out(str(report))
    say(f"{plural(len(scenario or known), 'scenario')}, {broken} with a broken promise")
    if broken:
        raise typer.Exit(EXIT_BAD_DATA)
