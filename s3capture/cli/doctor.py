"""``s3capture doctor``: can this bucket hold captures, from here and with these credentials?

The rule of this module: a verdict is printed when it is known, with its remedy below it; the exit status says which
of the three it is: fit (0), unfit (1), could not be examined (2).
"""

from __future__ import annotations

import textwrap
from shutil import get_terminal_size
from typing import TYPE_CHECKING, Annotated

import typer

from s3capture.cli.common import (
    EXIT_BAD_DATA,
    EXIT_UNUSABLE,
    AsJson,
    EndpointUrl,
    Region,
    SpillDir,
    Url,
    out,
    out_json,
    plural,
    printable,
    say,
    settings_of,
)
from s3capture.errors import StoreError

if TYPE_CHECKING:
    from s3capture.doctor import Check

# Nobody's run: the scratch keys lie beside the runs, and nothing of them stays.
_RUN = "s3capture-doctor"
# Room for text: a store's own words can be 300 characters long.
_INDENT = 8
_BEFORE_RACE = "create-once"


def doctor(
    url: Url,
    *,
    run: Annotated[
        str, typer.Option("--run", metavar="RUN", help="Try below this run, for permissions that depend on it.")
    ] = _RUN,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds of the race for one new key.")] = 20,
    writers: Annotated[int, typer.Option(min=2, max=64, help="Writers in each round.")] = 8,
    spill_dir: SpillDir = None,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Try whether a bucket can hold captures.

    Works step by step, with scratch objects that are removed at the end. Exit status 1 when a check failed, 2 when
    the bucket could not be examined.
    """
    settings = settings_of(url, run, endpoint_url=endpoint_url, region=region, spill_dir=spill_dir)
    from s3capture.doctor import Verdict, examine  # noqa: PLC0415 - see common.opened

    failed = 0
    try:
        for check in examine(settings, rounds=rounds, writers=writers):
            if as_json:
                out_json(check)
            else:
                _print(check)
            failed += check.verdict is Verdict.FAILED
            if (check.name, check.verdict) == (_BEFORE_RACE, Verdict.OK):
                times = plural(rounds, "time")
                say(f"racing {writers} writers for one new key, {times}; some stores need a minute for it")
    except StoreError:
        # The check that failed has said why.
        say(f"{printable(url)} could not be examined: see the last check")
        raise typer.Exit(EXIT_UNUSABLE) from None
    if failed:
        say(f"{plural(failed, 'check')} failed: do not capture on this store")
        raise typer.Exit(EXIT_BAD_DATA)
    say("this store can hold captures")


def _print(check: Check) -> None:
    width = max(get_terminal_size().columns, 40)
    text = f"{check.verdict:<7} {check.name:<17} {printable(check.saw)}"
    out("\n".join(textwrap.wrap(text, width, subsequent_indent=" " * _INDENT, break_on_hyphens=False)))
    if check.remedy:
        indent = " " * _INDENT
        wrapped = textwrap.wrap(
            check.remedy, width, initial_indent=f"{indent}-> ", subsequent_indent=f"{indent}   ", break_on_hyphens=False
        )
        out("\n".join(wrapped))
