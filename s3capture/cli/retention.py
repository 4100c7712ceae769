"""``s3capture retire``, ``delete`` and ``sweep``: what goes, told first and done only with ``--yes``.

The rule of this module: nothing is changed before the whole plan is made and printed, nor without ``--yes``; and the
same command again does the rest of what could not be done.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from s3capture.cli.common import (
    EXIT_BAD_DATA,
    AsJson,
    EndpointUrl,
    Region,
    Run,
    Url,
    plural,
    say,
    settings_of,
)
from s3capture.cli.ls import StateName
from s3capture.cli.retention_view import print_plan, print_sweep, protected, report, tell_problems
from s3capture.errors import SettingsError

if TYPE_CHECKING:
    from s3capture.keys import RunKeys
    from s3capture.reader import Reader
    from s3capture.retention import ArchiveHand, Leftovers, Outcome, Plan, Request
    from s3capture.runtime import Runtime
    from s3capture.settings import Settings
    from s3capture.stored import Selection, StoredRun

_NAMED = 20
"""How many keys that are still there a person is shown."""


class Keeping(StrEnum):
    """The values of the setting ``retention``; here, so that --help need not import what knows them."""

    DELETE = "delete"
    KEEP = "keep"


Rollouts = Annotated[
    list[str] | None,
    typer.Option("--rollout", metavar="GLOB", help="Rollouts whose id matches; an id in full names one. May repeat."),
]
States = Annotated[list[StateName] | None, typer.Option("--state", help="Rollouts in this state. May repeat.")]
OlderThan = Annotated[
    str | None,
    typer.Option(
        "--older-than",
        metavar="AGE",
        help="Rollouts last changed longer ago (12h, 30d), or before a time (2026-12-01).",
    ),
]
Complete = Annotated[
    bool | None, typer.Option("--complete/--incomplete", help="Only complete or only incomplete rollouts.")
]
Yes = Annotated[bool, typer.Option("--yes", help="Do it. Without it nothing is changed.")]
NoLedger = Annotated[bool, typer.Option("--no-ledger", help="Leave the ledgers of the rollouts as they are.")]


def retire(
    url: Url,
    *,
    run: Run,
    rollout: Rollouts = None,
    state: States = None,
    older_than: OlderThan = None,
    complete: Complete = None,
    everything: Annotated[bool, typer.Option("--all", help="All rollouts of the run.")] = False,
    no_ledger: NoLedger = False,
    retention: Annotated[
        Keeping, typer.Option("--retention", help="'keep' retires and deletes nothing; 'delete' deletes the records.")
    ] = Keeping.DELETE,
    yes: Yes = False,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Retire rollouts: no write is accepted any more, the records are deleted, and fences stay.

    Shows what would be done; --yes does it. Open, freezing and frozen rollouts, which nobody consumed, lose their
    records only when named by their id in full, by --state, or with --all. Exit status 1 when something could not be
    deleted (repeat the command), something is damaged, nothing was taken but protected rollouts, or there is no run.
    """
    from s3capture.retention import Act, Request  # noqa: PLC0415 - see common.opened

    settings = settings_of(url, run, endpoint_url=endpoint_url, region=region)
    selection = _selection(rollout, state, older_than, complete, everything=everything)
    keep = retention is Keeping.KEEP
    _act(settings, Request(Act.RETIRE, selection, everything, keep, not no_ledger), yes=yes, as_json=as_json)


def delete(
    url: Url,
    *,
    run: Run,
    rollout: Rollouts = None,
    state: States = None,
    older_than: OlderThan = None,
    complete: Complete = None,
    everything: Annotated[
        bool, typer.Option("--all", help="The whole run: rollouts, ledgers, archives, scratch keys.")
    ] = False,
    no_ledger: NoLedger = False,
    yes: Yes = False,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Delete rollouts with their fences: their ids read as unused.

    Shows what would be done; --yes does it. Call it once nothing of those rollouts can still write: without fences a
    late writer is not refused. Open, freezing and frozen rollouts, which nobody consumed, are taken only when named by
    their id in full, by --state, or with --all. Exit status as for retire; also 1 when objects came back meanwhile.
    """
    from s3capture.retention import Act, Request  # noqa: PLC0415 - see common.opened

    settings = settings_of(url, run, endpoint_url=endpoint_url, region=region)
    selection = _selection(rollout, state, older_than, complete, everything=everything)
    if everything and no_ledger:
        raise SettingsError("--all deletes the whole run, ledgers included: leave out --no-ledger")
    _act(settings, Request(Act.DELETE, selection, everything, False, not no_ledger), yes=yes, as_json=as_json)


def sweep(
    url: Url,
    *,
    run: Run,
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="AGE", help="What was last changed longer ago, rollout by rollout.")
    ] = "30d",
    kept: Annotated[
        bool,
        typer.Option(
            "--kept", help="Also records behind a retirement that may have been kept on purpose (retention='keep')."
        ),
    ] = False,
    yes: Yes = False,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Clear up behind retired rollouts: residue, late objects, then fences and seals.

    Shows what would be done; --yes does it. Only what is older than the limit goes, and fences only where no record is
    left: from then on a writer with that id, however late, is not refused. Rollouts that are not retired are left
    alone. Exit status 1 when something could not be deleted (repeat the command) or cannot be judged, or there is no
    run.
    """
    settings = settings_of(url, run, endpoint_url=endpoint_url, region=region)
    from s3capture.retention import plan_sweep  # noqa: PLC0415 - see common.opened
    from s3capture.retention import sweep as sweep_run  # noqa: PLC0415
    from s3capture.retention.archives import hand_of  # noqa: PLC0415
    from s3capture.stored.selection import instant  # noqa: PLC0415

    until = instant(older_than, time.time())
    with _run(settings) as (stored, runtime):
        hand = hand_of(stored, runtime)
        plan = plan_sweep(stored, until, kept=kept, hand=hand)
        print_sweep(plan, settings, until, as_json=as_json)
        sound = tell_problems(plan.problems, plan.strays)
        if plan.empty:
            say("nothing to sweep")
        elif not yes:
            say("dry run: nothing was changed; --yes sweeps this")
        else:
            outcomes = _watched(sweep_run(runtime, plan, hand=hand), len(plan.rollouts), "sweep")
            sound = report(outcomes, "swept", as_json=as_json) and sound
            _remark(settings)
    if not sound:
        raise typer.Exit(EXIT_BAD_DATA)


def _selection(
    rollout: list[str] | None,
    state: list[StateName] | None,
    older_than: str | None,
    complete: bool | None,
    *,
    everything: bool,
) -> Selection:
    from s3capture.stored.selection import Selection, globs_of, instant  # noqa: PLC0415 - see common.opened

    filtered = bool(rollout or state or older_than)
    if everything and (filtered or complete is not None):
        raise SettingsError("--all takes the whole run: leave out --rollout, --state, --older-than and --complete")
    if not everything and not filtered:
        raise SettingsError(
            "nothing is selected: name rollouts (--rollout), a state (--state), an age (--older-than), or --all"
        )
    return Selection(
        globs_of(rollout or ()),
        frozenset(map(str, state or ())),
        complete,
        until=None if older_than is None else instant(older_than, time.time()),
    )


@contextmanager
def _run(settings: Settings) -> Iterator[tuple[StoredRun, Runtime]]:
    """Open the run, to be read and to be changed; a run that is not there ends the command."""
    from s3capture.keys import RunKeys  # noqa: PLC0415 - see common.opened
    from s3capture.reader import Reader  # noqa: PLC0415
    from s3capture.runtime import shared  # noqa: PLC0415
    from s3capture.stored import StoredRun  # noqa: PLC0415

    runtime = shared(settings)
    with Reader(runtime.store) as reader:
        stored = StoredRun(reader, RunKeys(settings.prefix, settings.run))
        if not reader.folders(stored.keys.root):
            _no_run(settings)
        yield stored, runtime


def _no_run(settings: Settings) -> NoReturn:
    say(f"there is no run {settings.run!r} at {settings.url}; 's3capture ls {settings.url}' lists the runs")
    raise typer.Exit(EXIT_BAD_DATA)


def _act(settings: Settings, request: Request, *, yes: bool, as_json: bool) -> None:
    from s3capture.retention import Act, carry_out, choose  # noqa: PLC0415 - see common.opened
    from s3capture.retention.archives import hand_of  # noqa: PLC0415
    from s3capture.stored import StoredRun  # noqa: PLC0415

    whole = request.everything and request.act is Act.DELETE
    with _run(settings) as (stored, runtime):
        plan = choose(stored, request)
        rest = _rest(stored.reader, stored.keys, plan) if whole else None
        nothing = not plan.candidates and not (rest is not None and rest.stages)
        if nothing and not plan.stays and not stored.exists():
            _no_run(settings)  # some stores keep the empty folders of a run that was deleted
        print_plan(plan, rest, settings, as_json=as_json)
        sound = tell_problems(plan.problems, rest.foreign if rest is not None else plan.strays)
        for rollout in plan.absent:
            say(f"nothing is stored of rollout {rollout!r} in run {settings.run!r}")
        if nothing:
            say(f"nothing to {request.act}")
            sound = sound and not protected(plan)
        elif not yes:
            say(f"dry run: nothing was changed; --yes {request.act}s {plural(len(plan.candidates), 'rollout')}")
        else:
            hand = None if whole else hand_of(stored, runtime)

            def again() -> ArchiveHand | None:
                return hand_of(StoredRun(stored.reader, stored.keys), runtime)

            done = "retired" if request.act is Act.RETIRE else "deleted"
            outcomes = _watched(
                carry_out(runtime, plan, hand=hand, again=again), len(plan.candidates), str(request.act)
            )
            sound = report(outcomes, done, as_json=as_json) and sound
            if whole:
                sound = _clear_rest(stored.reader, runtime, settings, as_json=as_json) and sound
            if not request.keep:
                _remark(settings)
    if not sound:
        raise typer.Exit(EXIT_BAD_DATA)


def _rest(reader: Reader, keys: RunKeys, plan: Plan) -> Leftovers:
    from s3capture.retention import leftovers  # noqa: PLC0415 - see common.opened

    return leftovers(reader, keys, without=frozenset(candidate.rollout for candidate in plan.candidates))


def _clear_rest(reader: Reader, runtime: Runtime, settings: Settings, *, as_json: bool) -> bool:
    """Delete what lies beside the rollouts, looked up anew, and say what is left of the run then."""
    from s3capture.retention import clear, leftovers  # noqa: PLC0415 - see common.opened

    rest = leftovers(reader, runtime.keys)
    if rest.captures:
        say(
            f"{plural(rest.captures, 'object')} of rollouts and ledgers are still there: they could not be "
            "deleted, or writers are at work; stop those and repeat. The rest of the run stays until then"
        )
        return False
    stages = tuple(tuple(row.key for row in rows) for _, rows in rest.stages)
    cleared = not stages or report(clear(runtime, stages), "cleared", as_json=as_json)
    left = [row.key for row in reader.list(runtime.keys.root, f"list of run {settings.run!r}")]
    ours = sorted({*left}.difference(rest.foreign))
    for key in ours[:_NAMED]:
        say(f"still there: {key}")
    return cleared and not ours


def _watched(outcomes: Iterator[Outcome], total: int, what: str) -> Iterator[Outcome]:
    """Pass outcomes on, and show how far they are."""
    from s3capture.cli.progress import Bars  # noqa: PLC0415 - see common.opened

    with Bars(what, total) as bars:
        for outcome in outcomes:
            bars.advance()
            yield outcome


def _remark(settings: Settings) -> None:
    from s3capture.keys import RunKeys  # noqa: PLC0415 - see common.opened
    from s3capture.retention import remarks  # noqa: PLC0415
    from s3capture.store.boto_facts import bucket_facts  # noqa: PLC0415

    for remark in remarks(bucket_facts(settings), RunKeys(settings.prefix, settings.run)):
        say(remark)
