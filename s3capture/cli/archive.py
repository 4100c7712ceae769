"""``s3capture archive``: what would be packed and what it would cost, and, with ``--yes``, the packing.

The rule of this module: the dry run and the real run walk the same plan; nothing is retired or deleted without
``--yes``; and what was left as it was is named with its reason.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

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
    say,
    settings_of,
    size,
)
from s3capture.cli.ls import StateName

if TYPE_CHECKING:
    from s3capture.archive.commit import Report
    from s3capture.archive.plan import Planner, Verdict
    from s3capture.settings import Settings
    from s3capture.stored import Selection, StoredRun

_MB = 1_000_000
_NAMED = 20
_SEEN_LIVE = "STANDARD"


def archive(
    url: Url,
    *,
    run: Run,
    rollout: Annotated[
        list[str] | None,
        typer.Option("--rollout", metavar="GLOB", help="Only rollouts whose id matches; may be repeated."),
    ] = None,
    state: Annotated[
        list[StateName] | None,
        typer.Option("--state", help="Only rollouts in this state; may be repeated. Without it: frozen and retired."),
    ] = None,
    older_than: Annotated[
        str,
        typer.Option("--older-than", metavar="AGE", help="Only rollouts last changed longer ago; 0s takes all."),
    ] = "1d",
    freeze_open: Annotated[
        bool, typer.Option("--freeze-open", help="Freeze open rollouts first; their open calls are lost calls then.")
    ] = False,
    pack_size: Annotated[
        int, typer.Option("--pack-size", metavar="MB", min=1, max=128, help="Close a pack at about this size.")
    ] = 32,
    storage_class: Annotated[
        str, typer.Option("--storage-class", metavar="CLASS", help="S3's name of the class of the packs.")
    ] = "STANDARD",
    price: Annotated[
        list[str] | None,
        typer.Option("--price", metavar="CLASS=DOLLARS", help="Your price of a GB for a month; may be repeated."),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Do it. Without it nothing is changed.")] = False,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Pack decided rollouts into few large objects.

    Takes rollouts that are frozen, or were retired and kept, and shows what would become of them, with the monthly
    cost before and after; --yes does it. Packed rollouts are retired: no consumer can freeze or drop them any more,
    while replay, show, ls and audit read them as before. Every object is read back from its pack and compared before
    anything is deleted. Killed at any point, the same command goes on. Needs s3capture[parquet]. Exit status 1 when a
    rollout had to be left as it was, or something could not be deleted: repeat the command.
    """
    from s3capture.archive.needs import parquet  # noqa: PLC0415 - see common.opened
    from s3capture.costs import prices  # noqa: PLC0415
    from s3capture.costs import storage_class as class_of  # noqa: PLC0415
    from s3capture.keys import RunKeys  # noqa: PLC0415
    from s3capture.stored import Selection, StoredRun  # noqa: PLC0415
    from s3capture.stored.selection import globs_of, instant  # noqa: PLC0415

    parquet()
    settings = settings_of(url, run, endpoint_url=endpoint_url, region=region)
    names = frozenset(name.value for name in state or ())
    selection = Selection(globs_of(rollout or ()), names, until=instant(older_than, time.time()))
    given = prices(price or ())
    cold = class_of(storage_class, given)
    pack = pack_size * _MB
    if cold.restore:
        say(f"packs in {cold.name} cannot be read until they are restored: replay and show fail on them until then")
    with opened(settings) as reader:
        stored = StoredRun(reader, RunKeys(settings.prefix, settings.run))
        if not stored.exists():
            say(f"there is no run {run!r} at {url}; 's3capture ls {url}' lists the runs")
            raise typer.Exit(EXIT_BAD_DATA)
        if yes:
            sound = _archive(
                settings, stored, selection, storage_class=storage_class, pack=pack, freeze=freeze_open, as_json=as_json
            )
        else:
            sound = _plan(stored, selection, storage_class, given, pack=pack, freeze=freeze_open, as_json=as_json)
        for problem in stored.problems().values():
            say(f"archive: {problem}")
            sound = False
    if not sound:
        raise typer.Exit(EXIT_BAD_DATA)


def _plan(
    stored: StoredRun,
    selection: Selection,
    cold_name: str,
    given: dict[str, float],
    *,
    pack: int,
    freeze: bool,
    as_json: bool,
) -> bool:
    from s3capture.archive.plan import Planner, Verdict  # noqa: PLC0415 - see common.opened
    from s3capture.costs import Usage  # noqa: PLC0415
    from s3capture.costs import storage_class as class_of  # noqa: PLC0415

    live, cold = class_of(_SEEN_LIVE, given), class_of(cold_name, given)
    before, staying, verdicts, names = Usage(), Usage(), Counter[Verdict](), list[str]()
    planner: Planner = Planner(stored, selection, freeze_open=freeze)
    for candidate in planner.candidates():
        verdicts[candidate.verdict] += 1
        if candidate.verdict.acts:
            if candidate.verdict is not Verdict.FINISH:
                names.append(candidate.rollout.rollout_id)
            for row in candidate.records:
                before.add(row.size)
            # Fences and seals stay, and a retirement adds two: each is billed by itself.
            staying.add(300, candidate.staying + 2)
    packs, after = max(1, round(before.bytes / pack)) if before.objects else 0, Usage()
    if packs:
        after.add(before.bytes // packs, packs)
    then = after.monthly_cost(cold) + staying.monthly_cost(live)
    figures = {
        "rollouts": {str(verdict): count for verdict, count in sorted(verdicts.items())},
        "objects": before.objects,
        "bytes": before.bytes,
        "packs_about": packs,
        "objects_staying": staying.objects,
        "storage_class": cold.name,
        "monthly_before": before.monthly_cost(live),
        "monthly_after_at_most": then,
    }
    if as_json:
        out_json({**figures, "rollout_ids": names})
        return True
    _say_verdicts(verdicts)
    out(f"to pack         {before.objects:,} objects, {size(before.bytes)}")
    out(f"into            about {plural(packs, 'pack')} of {size(pack)} in {cold.name}, each with an index; fewer and")
    out("                smaller where the records compress together, which is not known before they are read")
    out(f"staying         {staying.objects:,} fences and seals, which go on refusing late writers; sweep ends that")
    out(f"a month now     {_dollars(before.monthly_cost(live))} as small objects in {live.name}")
    out(f"a month then    {_dollars(then)} at most; {_minimums(cold)}")
    for other in ("STANDARD_IA", "GLACIER_IR"):
        moved = _dollars(before.monthly_cost(class_of(other, given)))
        out(f"                {moved} if the small objects moved to {other} instead")
    if verdicts and any(verdict.acts for verdict in verdicts):
        say("nothing was changed; --yes archives. Prices are examples unless --price gives yours")
    return True


def _dollars(amount: float) -> str:
    return f"${amount:,.2f}" if amount >= 0.01 or not amount else "under $0.01"


def _minimums(cold: Any) -> str:
    parts = [f"billed as at least {cold.minimum_bytes // 1024} KB an object"] if cold.minimum_bytes else []
    overhead = cold.overhead_bytes + cold.standard_overhead_bytes
    parts += [f"{overhead // 1024} KB of overhead an object"] if overhead else []
    parts += [f"at least {cold.minimum_days} days"] if cold.minimum_days else []
    return ", ".join(parts) or "no minimum"


def _say_verdicts(verdicts: Counter[Verdict]) -> None:
    for verdict, count in sorted(verdicts.items()):
        out(f"{count:>8,}  {verdict}")


def _archive(
    settings: Settings,
    stored: StoredRun,
    selection: Selection,
    *,
    storage_class: str,
    pack: int,
    freeze: bool,
    as_json: bool,
) -> bool:
    from s3capture.archive.archiver import Archiver  # noqa: PLC0415 - see common.opened
    from s3capture.archive.hand import Hand  # noqa: PLC0415
    from s3capture.cli.progress import Bars  # noqa: PLC0415
    from s3capture.store.boto import BotoStore  # noqa: PLC0415

    packs = BotoStore(settings, storage_class=None if storage_class == _SEEN_LIVE else storage_class)
    try:
        with Hand(stored.reader.store, packs) as hand, Bars("rollouts") as bars:
            archiver = Archiver(stored, hand, pack_bytes=pack, freeze_open=freeze, on_progress=bars.advance)
            report = archiver.archive(selection)
    finally:
        packs.close()
    _print(report, as_json)
    return report.sound


def _print(report: Report, as_json: bool) -> None:
    if as_json:
        out_json(report)
        return
    out(f"archived        {plural(report.archived, 'rollout')} in {plural(report.packs, 'pack')}")
    if report.finished:
        out(f"finished        {plural(report.finished, 'rollout')} that an earlier run had packed")
    out(f"packed          {report.objects_packed:,} objects, {size(report.bytes_packed)}, compared one by one")
    out(f"into            {size(report.pack_bytes)} of packs and {size(report.index_bytes)} of indexes")
    out(f"deleted         {report.objects_deleted:,} objects")
    for rollout, why in report.left[:_NAMED]:
        say(f"left as it was: rollout {rollout!r}: {why}")
    for key, reason in report.failed[:_NAMED]:
        say(f"not deleted: {key} ({reason})")
    for kind, found in (("rollouts left as they were", report.left), ("objects not deleted", report.failed)):
        if len(found) > _NAMED:
            say(f"{len(found):,} {kind} in all; --json names each")
