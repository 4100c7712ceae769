"""What must come of a script, and whether it did: the judgement of the demo.

The rule of this module: expectations come from the script alone, findings from the bucket alone, and whatever differs
is told, never explained away. Nothing here does I/O, so a test can hand it a damaged snapshot and see it caught.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from s3capture.demo.entries import Decision, bits, build_entry
from s3capture.demo.script import KEEPS_ENTRY, Call, Request, Rollout, Twist
from s3capture.demo.workload import REFUSAL_CODE
from s3capture.errors import CaptureError, UnstorableValueError
from s3capture.matching import NativeMatcher
from s3capture.protocols import TokenCaptureSnapshot
from s3capture.records import ParentResolutionStatus, TokenEntry, compute_digest
from s3capture.sink import entry_payload

_ARRAYS = frozenset({"prompt_token_ids", "generation_token_ids", "generation_log_probs"})


class Reason(StrEnum):
    """Why a snapshot is incomplete, in the words of the table."""

    DANGLING = "dangling intent"
    CONFLICT = "conflict"
    MARK = "mark"


@dataclass(frozen=True, slots=True, order=True)
class Why:
    """One reason, and the call that it concerns ("" for a mark without one)."""

    reason: Reason
    call: str


@dataclass(frozen=True, slots=True)
class Played:
    """What a worker reported of a call whose put returned: the decision, and the digest of the payload it put."""

    decision: Decision
    digest: str


_REASONS: Mapping[Twist, tuple[Reason, ...]] = {
    Twist.CONFLICT: (Reason.CONFLICT,),
    Twist.DIES: (Reason.DANGLING,),
    Twist.OUTAGE: (Reason.DANGLING, Reason.MARK),
}


def expected_reasons(rollout: Rollout) -> frozenset[Why]:
    """Why the snapshot of ``rollout`` must be incomplete; empty for one that must be complete."""
    return frozenset(Why(reason, call.call_id) for call in rollout.calls for reason in _REASONS.get(call.twist, ()))


class LineageJudge:
    """Judges the parent decisions of one rollout.

    The parent that the script names is the right answer. Another call is as right if it has the very same tokens;
    UNRESOLVED is right when the named parent is in conflict, when there is none, or when the matcher, shown all
    calls of the rollout at once, cannot tell them apart. ROOT is right exactly when the model authored nothing.
    """

    def __init__(self, rollout: Rollout, requests: Mapping[str, Request]) -> None:
        self._calls = {call.call_id: call for call in rollout.calls}
        self._requests = requests
        self._matcher = NativeMatcher()
        self._stamped: list[TokenEntry] | None = None

    def judge(self, call: Call, decision: Decision) -> str | None:
        """Return what is wrong with ``decision``, or None."""
        items = self._requests[call.call_id].items
        said = f"request of call {call.call_id!r} was {str(decision.status)!r}"
        if not self._matcher.fingerprint(items):
            right = decision.status is ParentResolutionStatus.ROOT
            return None if right else f"{said}, yet the model authored nothing in it"
        if decision.status is ParentResolutionStatus.ROOT:
            return f"{said}, yet the model authored part of it"
        if decision.status is ParentResolutionStatus.UNRESOLVED:
            return None if self._may_be_unresolved(call) else f"{said} ({decision.reason}), not call {call.parent!r}"
        parent = self._calls.get(decision.parent or "")
        if parent is None or parent.twist not in KEEPS_ENTRY:
            return f"{said} to call {decision.parent!r}, which is no candidate"
        tokens = [*self._requests[parent.call_id].prompt, *parent.generation_ids]
        if decision.parent_digest != compute_digest(tokens) or decision.parent_tokens != len(tokens):
            return f"{said} to call {decision.parent!r}, but not with its tokens"
        if call.parent not in (None, decision.parent) and not self._same_tokens(call.parent, tokens):
            return f"{said} to call {decision.parent!r}, not call {call.parent!r}"
        if not decision.extends and call.parent is not None:
            return f"{said} to call {decision.parent!r}, whose tokens its prompt does not begin with"
        return None

    def _may_be_unresolved(self, call: Call) -> bool:
        if call.parent is None or self._calls[call.parent].twist not in KEEPS_ENTRY:
            return True
        if self._stamped is None:
            self._stamped = [self._stamp(one) for one in self._calls.values()]
        return self._matcher.decide(self._stamped, self._requests[call.call_id].items).model_call_id is None

    def _stamp(self, call: Call) -> TokenEntry:
        root = Decision(ParentResolutionStatus.ROOT)
        return build_entry("any", call, self._requests[call.call_id], root)

    def _same_tokens(self, call_id: str | None, tokens: list[int]) -> bool:
        call = self._calls.get(call_id or "")
        return call is not None and [*self._requests[call.call_id].prompt, *call.generation_ids] == tokens


def check_snapshot(
    rollout: Rollout,
    requests: Mapping[str, Request],
    played: Mapping[str, Played],
    snapshot: TokenCaptureSnapshot,
    reasons: frozenset[Why],
) -> list[str]:
    """Return every difference between ``snapshot`` and what must have come of ``rollout``; [] is the good answer.

    ``reasons`` is why the bucket says that it is incomplete. Every entry is compared with the record made anew
    from the script: payload digest, every field, floats to the bit; and its full prompt is rebuilt from the
    snapshot, through any chain of deltas, and compared with the script's.
    """
    differences: list[str] = []
    wanted = {call.call_id: call for call in rollout.calls if call.twist in KEEPS_ENTRY}
    got = {entry.model_call_id: entry for entry in snapshot.entries}
    if len(got) != len(snapshot.entries):
        differences.append(f"{len(snapshot.entries)} entries, but only {len(got)} call ids")
    differences += [f"call {call!r} is missing from the snapshot" for call in wanted.keys() - got.keys()]
    differences += [f"call {call!r} is in the snapshot and should not be" for call in got.keys() - wanted.keys()]
    for call_id in wanted.keys() & got.keys():
        if call_id not in played:
            differences.append(f"call {call_id!r} is in the snapshot, yet no put of it returned")
            continue
        differences += _check_entry(rollout, wanted[call_id], requests[call_id], played[call_id], got)
    refusals = {refusal.model_call_id: refusal.code for refusal in snapshot.engine_refusals}
    refused = {call.call_id: REFUSAL_CODE for call in rollout.calls if call.twist is Twist.REFUSED}
    if refusals != refused:
        differences.append(f"engine refusals are {refusals}, not {refused}")
    expected = expected_reasons(rollout)
    if snapshot.incomplete != bool(expected):
        differences.append(f"the snapshot is {_completeness(snapshot.incomplete)}, not {_completeness(bool(expected))}")
    if reasons != expected:
        differences.append(f"incomplete because of [{_listed(reasons)}], not [{_listed(expected)}]")
    return sorted(differences)


def _check_entry(
    rollout: Rollout, call: Call, request: Request, played: Played, got: Mapping[str, TokenEntry]
) -> list[str]:
    entry = got[call.call_id]
    who = f"call {call.call_id!r}"
    expected = build_entry(rollout.rollout_id, call, request, played.decision)
    differences = [f"{who}: field {name!r} is not what was put" for name in _differing_fields(entry, expected)]
    digest = entry_payload(expected).digest
    if played.digest != digest:
        differences.append(f"{who}: the worker put payload {played.digest}, the script gives {digest}")
    try:
        read_back = entry_payload(entry).digest
    except UnstorableValueError as error:
        read_back = f"none, since the record breaks a rule: {error}"
    if read_back != digest:
        differences.append(f"{who}: the payload read back has digest {read_back}, not {digest}")
    try:
        prompt = full_prompt(entry, got)
    except BrokenDeltaError as error:
        return [*differences, f"{who}: {error}"]
    if prompt != request.prompt:
        differences.append(f"{who}: its rebuilt prompt ({len(prompt)} tokens) is not the one that was sent")
    if compute_digest([*prompt, *entry.generation_token_ids]) != entry.digest:
        differences.append(f"{who}: its token digest does not describe its tokens")
    return differences


def _differing_fields(entry: TokenEntry, expected: TokenEntry) -> list[str]:
    mine, theirs = _plain(entry), _plain(expected)
    names = [name for name in sorted(mine.keys() | theirs.keys()) if mine.get(name) != theirs.get(name)]
    names += [
        name for name in ("prompt_token_ids", "generation_token_ids") if getattr(entry, name) != getattr(expected, name)
    ]
    if bits(entry.generation_log_probs) != bits(expected.generation_log_probs):
        names.append("generation_log_probs")
    return names


def _plain(entry: TokenEntry) -> dict[str, Any]:
    return entry.model_dump(exclude=set(_ARRAYS))


class BrokenDeltaError(CaptureError):
    """A delta record whose chain of parents is not whole in its snapshot."""


def full_prompt(entry: TokenEntry, by_call: Mapping[str, TokenEntry]) -> list[int]:
    """Return the whole prompt of ``entry`` as a consumer of the snapshot would rebuild it."""
    chain = [entry]
    while chain[-1].prompt_is_delta:
        parent = by_call.get(chain[-1].parent_call_id or "")
        if parent is None or len(chain) > len(by_call):
            raise BrokenDeltaError(f"its delta chain breaks at call {chain[-1].parent_call_id!r}")
        chain.append(parent)
    prompt: list[int] = []
    for link in reversed(chain):
        prompt += link.prompt_token_ids
        if link is not entry:
            prompt += link.generation_token_ids
    return prompt


def _completeness(incomplete: bool) -> str:
    return "incomplete" if incomplete else "complete"


def _listed(reasons: Sequence[Why] | frozenset[Why]) -> str:
    return ", ".join(f"{why.reason} {why.call}".strip() for why in sorted(reasons))
