"""What the page is made of, gathered while rollouts go by.

The rule of this module: each rollout is turned into its JSON at once and let go, so the memory of an audit with a page
is the size of the page. Counts are of everything; only what is listed has a cap, and whatever a cap leaves out is
said on the page.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from s3capture.audit.findings import MEANING, Finding, Kind, Severity, many
from s3capture.audit.page.bins import histogram, timeline
from s3capture.audit.rollout import RolloutAudit
from s3capture.audit.totals import Totals
from s3capture.inspection import CallDetail

MOST_ROLLOUTS = 20_000
MOST_CALLS = 250_000
MOST_FINDINGS = 50_000
_LONGEST_CALL_S = 7 * 86_400.0

_LETTERS = {"entry": "e", "refusal": "r", "seal": "s", "open": "o", "late": "l", "damaged": "x"}
_FENCE_LANES = {"frozen": "freezes", "drop": "drops", "retired": "retirements"}
_EVIDENCE = (
    Kind.SEALED_CALL,
    Kind.OPEN_CALL,
    Kind.CONFLICT,
    Kind.MARK,
    Kind.LATE,
    Kind.REFUSAL,
    Kind.REFUSED_DROP,
    Kind.UNDELIVERED,
    Kind.RETAINED,
    Kind.RESIDUE,
    Kind.ARCHIVED,
)
"""The kinds that keep something in the bucket, in the order of their lanes."""


def _times() -> array[float]:
    return array("d")


@dataclass(slots=True)
class PageData:
    """Takes audited rollouts one by one, and gives the JSON of the page at the end."""

    _fragments: list[str] = field(default_factory=list)
    _lanes: dict[str, array[float]] = field(
        default_factory=lambda: {name: _times() for name in ("calls", "freezes", "drops", "retirements", "marks")}
    )
    _evidence: dict[Kind, array[float]] = field(default_factory=lambda: {kind: _times() for kind in _EVIDENCE})
    _recorded: array[float] = field(default_factory=_times)
    _stored: array[float] = field(default_factory=_times)
    _sizes: array[float] = field(default_factory=_times)
    _tokens: array[float] = field(default_factory=_times)
    _calls: int = 0
    _findings: int = 0
    _left_rollouts: int = 0
    _left_calls: int = 0
    _left_findings: int = 0
    _undated: int = 0

    def take(self, audit: RolloutAudit) -> None:
        """Gather one rollout."""
        self._count(audit)
        if len(self._fragments) >= MOST_ROLLOUTS:
            self._left_rollouts += 1
            return
        summary = audit.detail.summary
        told = self._told(audit.findings)
        row = {
            "id": audit.rollout_id,
            "state": str(summary.state) if audit.captured else "ledger only",
            "archived": summary.archived,
            "incomplete": summary.incomplete,
            "version": summary.version,
            "calls": summary.calls,
            "bytes": summary.bytes,
            "changed": summary.last_modified,
            "snapshot": audit.detail.snapshot_id if told else None,
            "findings": told,
            "tree": self._tree(audit.detail.calls, detailed=bool(told), fails=any(f.fails for f in audit.findings)),
        }
        self._fragments.append(_json({name: value for name, value in row.items() if value not in (None, False, [])}))

    def dump(self, *, head: Mapping[str, Any], totals: Totals, run: Sequence[Finding], failing: frozenset[Kind]) -> str:
        """Return the data of the page: ``head`` says what was audited, ``run`` are the findings about the run."""
        self._date(run)
        value = {
            **head,
            "totals": totals.as_json(),
            "kinds": [
                {
                    "kind": str(kind),
                    "severity": str(Severity.FAIL if kind in failing else Severity.NOTE),
                    "meaning": MEANING[kind],
                    "count": totals.kinds[kind],
                    "rollouts": totals.rollouts_by_kind[kind],
                }
                for kind in Kind
                if totals.kinds[kind]
            ],
            "timeline": timeline(self._lanes),
            "evidence": timeline({str(kind): times for kind, times in self._evidence.items() if times}),
            "undated": self._undated,
            "recorded": histogram(self._recorded, 0.001),
            "stored": histogram(self._stored, 1.0),
            "sizes": histogram(self._sizes, 100.0),
            "tokens": histogram(self._tokens, 10.0),
            "about": self._told(run),
            "left": self._left(),
        }
        return f'{_json(value)[:-1]},"rollouts":[{",".join(self._fragments)}]}}'

    # -- counted, all of it -------------------------------------------------------------------------------

    def _count(self, audit: RolloutAudit) -> None:
        keys, at = audit.rollout.keys, audit.at
        for call in audit.detail.calls:
            if call.kind in ("open", "late", "seal"):
                continue
            self._sizes.append(call.bytes)
            if call.prompt_tokens is not None:
                self._tokens.append(call.prompt_tokens + (call.generated_tokens or 0))
            stored, begun = at.get(keys.call(call.call)), at.get(keys.intent(call.call))
            if (time := stored or call.created_at) is None:
                self._undated += 1
            else:
                self._lanes["calls"].append(time)
            # Recordings that are played again carry the times of their first life: those say nothing of this run.
            if call.begun_at and call.created_at and 0 <= call.created_at - call.begun_at <= _LONGEST_CALL_S:
                self._recorded.append(call.created_at - call.begun_at)
            if stored and begun and stored >= begun:
                self._stored.append(stored - begun)
        for mark in audit.detail.marks:
            if (when := at.get(keys.mark(mark.mark)) or mark.at) is not None:
                self._lanes["marks"].append(when)
        self._count_fences(audit)
        self._date(audit.findings, at)

    def _count_fences(self, audit: RolloutAudit) -> None:
        for fence in audit.detail.fences:
            kind, _, _ = fence.fence.partition("-")
            lane = _FENCE_LANES.get(kind)
            if lane is None or (kind == "drop" and fence.decision != "retired"):
                continue
            time = audit.at.get(f"{audit.rollout.keys.fences}{fence.fence}") or fence.at
            if time is not None:
                self._lanes[lane].append(time)

    def _date(self, findings: Iterable[Finding], at: Mapping[str, float] | None = None) -> None:
        for finding in findings:
            if finding.kind in self._evidence:
                time = (at or {}).get(finding.key or "") or finding.at
                if time is not None:
                    self._evidence[finding.kind].append(time)

    # -- listed, up to a cap ------------------------------------------------------------------------------

    def _told(self, findings: Sequence[Finding]) -> list[dict[str, Any]]:
        room = max(MOST_FINDINGS - self._findings, 0)
        self._findings += min(len(findings), room)
        self._left_findings += max(len(findings) - room, 0)
        return [_finding(finding) for finding in findings[:room]]

    def _tree(self, calls: Sequence[CallDetail], *, detailed: bool, fails: bool) -> dict[str, Any] | None:
        if not calls:
            return None
        # What went wrong is looked into: it may go beyond the cap, as far again.
        if self._calls + len(calls) > MOST_CALLS * (2 if fails else 1):
            self._left_calls += len(calls)
            return None
        self._calls += len(calls)
        number = {call.call: index for index, call in enumerate(calls)}
        tree: dict[str, Any] = {
            "id": [call.call for call in calls],
            # -1: none; -2: named, and not here.
            "up": [-1 if call.parent_call is None else number.get(call.parent_call, -2) for call in calls],
            "kind": "".join(map(_letter, calls)),
            "bytes": [call.bytes for call in calls],
            "in": [call.prompt_tokens for call in calls],
            "out": [call.generated_tokens for call in calls],
        }
        if detailed:
            for name in ("by", "created_at", "begun_by", "begun_at", "digest", "parent_call", "code"):
                values = [getattr(call, name) for call in calls]
                if any(value is not None for value in values):
                    tree[name] = values
        return tree

    def _left(self) -> list[str]:
        caps = (
            (self._left_rollouts, "rollout", f"beyond {MOST_ROLLOUTS:,} are counted and not listed"),
            (self._left_calls, "call", f"beyond {MOST_CALLS:,} are counted and not drawn; --rollout chooses fewer"),
            (self._left_findings, "finding", f"beyond {MOST_FINDINGS:,} are counted and not listed; --json has all"),
        )
        return [f"{many(count, word)} {what}" for count, word, what in caps if count]


def _letter(call: CallDetail) -> str:
    letter = _LETTERS.get(call.kind, "x")
    if letter == "e":
        return "E" if call.in_snapshot is False else "d" if call.prompt_is_delta else "e"
    return letter


def _finding(finding: Finding) -> dict[str, Any]:
    value: dict[str, Any] = {
        "kind": str(finding.kind),
        "text": finding.sentence,
        "rollout": finding.rollout,
        "call": finding.call,
        "key": finding.key,
        "at": finding.at,
    }
    told = {name: item for name, item in value.items() if item is not None}
    # Of the details only what the page draws; the rest is in the sentence.
    if "differences" in finding.details:
        told["conflict"] = {name: finding.details[name] for name in ("stored", "refused", "differences", "more")}
    return told


def _json(value: Any) -> str:
    """Strict ASCII JSON; what has no number there (NaN, the infinities) is null."""
    return json.dumps(_finite(value), ensure_ascii=True, allow_nan=False, separators=(",", ":"))


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value
