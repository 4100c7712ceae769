"""``s3capture show``: one rollout in full, without touching it.

The rule of this module: ids are wrapped and never cut, so what is on the screen can be copied; the JSON holds the
same and more.
"""

from __future__ import annotations

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
    out_table,
    plural,
    printable,
    say,
    settings_of,
    size,
    when,
)

if TYPE_CHECKING:
    from rich.table import Table

    from s3capture.inspection import CallDetail, RolloutDetail


def show(
    url: Url,
    rollout: Annotated[str, typer.Argument(metavar="ROLLOUT", help="The rollout id, attempt suffix included.")],
    *,
    run: Run,
    endpoint_url: EndpointUrl = None,
    region: Region = None,
    as_json: AsJson = False,
) -> None:
    """Show one rollout in full.

    Its calls, marks, conflicts and fences, with who and when; a drop decision names neither, since whoever finishes
    the drop writes the same one. Reads only, and freezes nothing. Exit status 1 when nothing is stored under that id,
    an object is damaged, or an invariant is breached.
    """
    from s3capture.ids import validate_rollout_id  # noqa: PLC0415 - see common.opened
    from s3capture.inspection import inspect_rollout  # noqa: PLC0415
    from s3capture.keys import RunKeys  # noqa: PLC0415

    settings = settings_of(url, run, endpoint_url=endpoint_url, region=region)
    keys = RunKeys(settings.prefix, settings.run).rollout(validate_rollout_id(rollout))
    with opened(settings) as reader:
        detail = inspect_rollout(reader, keys)
    if not detail.exists:
        say(f"nothing is stored for rollout {rollout!r} of run {run!r}; 's3capture ls {url} --run {run}' lists it all")
        raise typer.Exit(EXIT_BAD_DATA)
    if as_json:
        out_json(detail)
    else:
        _print(detail)
    if not detail.sound:
        raise typer.Exit(EXIT_BAD_DATA)


def _print(detail: RolloutDetail) -> None:
    from s3capture.cli.ls import notes_of  # noqa: PLC0415

    summary = detail.summary
    version = "" if summary.version is None else f", version {summary.version}"
    out(f"rollout   {printable(summary.rollout)}")
    out(f"state     {summary.state}{version}")
    out(f"snapshot  {detail.snapshot_id or '-'}")
    out(
        f"holds     {plural(summary.calls, 'call')}, {size(summary.bytes)}, "
        f"last change {when(summary.last_modified)} UTC"
    )
    if notes := notes_of(summary):
        out(f"note      {notes}")
    if detail.calls:
        out_table("calls", _calls(detail.calls))
    if detail.marks:
        out_table("marks", _marks(detail))
    if detail.fences:
        out_table("fences", _fences(detail))
    for damaged in detail.damaged:
        out(f"DAMAGED   {printable(damaged.problem)}")
    for breach in detail.breaches:
        out(f"BREACH    {printable(breach)}")


def _table(gap: int = 1, **columns: int | None) -> Table:
    """A table of ``columns``; a number is the width that a column keeps however narrow the terminal is."""
    from rich.box import SIMPLE_HEAD  # noqa: PLC0415 - see common.out_table
    from rich.table import Table  # noqa: PLC0415

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap, 0, 0))
    for name, width in columns.items():
        table.add_column(name.replace("_", " "), overflow="fold", min_width=width, max_width=width)
    return table


def _row(table: Table, *cells: str) -> None:
    from rich.text import Text  # noqa: PLC0415 - a Text, since a str would be read as markup

    table.add_row(*(Text("\n".join(map(printable, cell.split("\n")))) for cell in cells))


def _calls(calls: tuple[CallDetail, ...]) -> Table:
    # 32 columns hold a call id of the usual form, and half a digest; the whole fits 80.
    table = _table(0, nr=None, call_and_digest=32, kind=11, parent=10, UTC_and_by=19)
    numbers = {call.call: f"#{number}" for number, call in enumerate(calls, 1)}
    for number, call in enumerate(calls, 1):
        parent = "" if call.parent_call is None else numbers.get(call.parent_call, call.parent_call)
        late = "late,\nrefused" if call.in_snapshot is False and call.kind not in ("open", "late") else None
        kind = "late,\nrefused" if call.kind == "late" else call.kind
        # What is in a seal is no payload of anyone's.
        digest = None if call.kind == "seal" else call.digest
        _row(
            table,
            f"#{number}",
            _lines(call.call or "(empty id)", digest and f"sha256\n{digest}"),
            _lines(kind, *_tokens(call), call.code, late),
            _lines(parent, call.parent_resolution),
            _lines(*_history(call)),
        )
        for conflict in call.conflicts:
            _row(
                table,
                "",
                _lines("refused payload, sha256", conflict.digest),
                f"conflict\n{conflict.kind}",
                "",
                conflict.by or "-",
            )
    return table


def _lines(*parts: str | None) -> str:
    return "\n".join(part for part in parts if part)


def _history(call: CallDetail) -> list[str | None]:
    # The record's own time is its writer's, and may be years from the others: each time is named.
    created, begun = when(call.created_at), when(call.begun_at)
    made = [] if call.created_at is None else ["sealed" if call.kind == "seal" else "created", created]
    begun_by = None if call.begun_by == call.by else call.begun_by
    if call.begun_at is None:
        return [*made, call.by]
    if made and begun.split()[0] == created.split()[0]:
        return [*made, call.by, f"begun {begun.split()[1]}", begun_by]
    return [*made, call.by if made else None, "begun", begun, begun_by]


def _tokens(call: CallDetail) -> list[str]:
    if call.prompt_tokens is None:
        return []
    return [f"{'+' if call.prompt_is_delta else ''}{call.prompt_tokens:,} in", f"{call.generated_tokens:,} out"]


def _marks(detail: RolloutDetail) -> Table:
    table = _table(UTC_and_by=19, call=None, reason=None)
    for mark in detail.marks:
        late = "\n(late, refused)" if mark.late else "\n(after the freeze)" if mark.in_snapshot is False else ""
        _row(table, f"{when(mark.at)}\n{mark.by or '-'}{late}", mark.call or "(any)", mark.reason or "-")
    return table


def _fences(detail: RolloutDetail) -> Table:
    table = _table(fence=None, UTC=19, by=None, decision=None)
    for fence in detail.fences:
        # Whoever meets an announced drop decides it, and all write the same: a decision names nobody.
        whoever = (
            "; decided by whoever finished it"
            if fence.fence.startswith("drop-") and fence.decision != "damaged"
            else ""
        )
        _row(table, fence.fence, when(fence.at), fence.by or "-", fence.decision + whoever)
    return table
