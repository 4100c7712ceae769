"""How ``s3capture audit`` shows what it found: as text for a person, as JSON for a program.

The rule of this module: the JSON is docs/audit.md, and its fields are only ever added to; the text has totals first, so
that whoever reads one screen has the whole, and cuts what repeats.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from s3capture.cli.common import out, plural, printable, short, size

if TYPE_CHECKING:
    from s3capture.audit import Finding, Kind, RolloutAudit, RunAudit

_SHOWN = 12
"""Findings of one kind in one rollout that the text shows."""

# -- JSON -----------------------------------------------------------------------------------------------------


def rollout_json(one: RolloutAudit, failing: frozenset[Kind]) -> dict[str, Any]:
    """The line of one rollout."""
    summary = one.detail.summary
    return {
        "type": "rollout",
        "rollout": one.rollout_id,
        "state": str(summary.state) if one.captured else None,
        "version": summary.version,
        "incomplete": summary.incomplete,
        "archived": summary.archived,
        "calls": summary.calls,
        "bytes": summary.bytes,
        "last_modified": summary.last_modified,
        "fails": sum(finding.kind in failing for finding in one.findings),
        "findings": [finding_json(finding, failing) for finding in one.findings],
    }


def finding_json(finding: Finding, failing: frozenset[Kind]) -> dict[str, Any]:
    """One finding; ``failing`` are the kinds that fail this audit."""
    return {
        "kind": str(finding.kind),
        "severity": "fail" if finding.kind in failing else "note",
        "rollout": finding.rollout,
        "call": finding.call,
        "key": finding.key,
        "by": finding.by,
        "at": finding.at,
        "sentence": finding.sentence,
        "details": finding.details,
    }


# -- text -----------------------------------------------------------------------------------------------------


class Told:
    """What the text says of one rollout, once the totals were said."""

    def __init__(self, one: RolloutAudit, shown: Sequence[Finding]) -> None:
        summary = one.detail.summary
        words: list[str] = [str(summary.state)] if one.captured else ["a ledger alone"]
        words += [f"version {summary.version}"] if summary.version is not None else []
        words += ["archived"] if summary.archived else []
        words += ["incomplete"] if summary.incomplete else []
        self.head = f"{one.rollout_id}  ({', '.join(words)})"
        self.shown = [(str(finding.kind), finding.sentence) for finding in shown]


def print_audit(done: RunAudit, failing: frozenset[Kind], told: Sequence[Told], *, notes: bool) -> None:
    """Print the text: totals by kind, then the reasons of each rollout, then what concerns the run."""
    totals = done.totals
    out(
        f"run {done.keys.run}: {plural(totals.rollouts, 'rollout')}, {plural(totals.calls, 'call')}, "
        f"{size(totals.bytes)}; {totals.incomplete:,} incomplete"
    )
    out("by state  " + ", ".join(f"{count:,} {state}" for state, count in totals.states.items() if count))
    for fails, title in ((True, "FAILS"), (False, "NOTES")):
        kinds = [kind for kind in totals.kinds if (kind in failing) is fails]
        if kinds:
            out("")
            out(f"{title:<20} {'FINDINGS':>8} {'ROLLOUTS':>8}")
            for kind in sorted(kinds, key=lambda kind: -totals.kinds[kind]):
                out(f"{kind:<20} {totals.kinds[kind]:>8,} {totals.rollouts_by_kind[kind] or '-':>8}  {_meaning(kind)}")
    for one in sorted(told, key=lambda one: one.head):
        out("")
        out(printable(one.head))
        _findings(one.shown)
    about = [(str(finding.kind), finding.sentence) for finding in done.findings if notes or finding.kind in failing]
    if about:
        out("")
        out("the run as a whole")
        _findings(about)
    out("")
    out(verdict_of(done, failing))


def _findings(shown: Sequence[tuple[str, str]]) -> None:
    counted: dict[str, int] = {}
    for kind, sentence in shown:
        counted[kind] = counted.get(kind, 0) + 1
        if counted[kind] <= _SHOWN:
            out(f"  {kind:<18} {printable(short(sentence, 600))}")
    for kind, count in counted.items():
        if count > _SHOWN:
            out(f"  {kind:<18} and {count - _SHOWN:,} more; --json has all")


def _meaning(kind: Kind) -> str:
    from s3capture.audit import MEANING  # noqa: PLC0415 - see common.opened

    return MEANING[kind]


def verdict_of(done: RunAudit, failing: frozenset[Kind]) -> str:
    """The audit in half a sentence."""
    fails = done.totals.failing(failing)
    rest = sum(done.totals.kinds.values()) - fails
    if fails:
        return f"{plural(fails, 'finding')} that {'fails' if fails == 1 else 'fail'}, {plural(rest, 'note')}"
    return f"nothing that fails, {plural(rest, 'note')}"
