"""Replays as JSON lines: Gym's entries, recordings that ``s3capture demo`` plays, and Gym's trainable responses.

The rule of this module: a line is what was recorded, in the words of its format; what the format has no words for is
reported and left out, and never bent until it fits. The formats are docs/replay.md and docs/recording-format.md.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import ValidationError

from s3capture.codec import canonical
from s3capture.demo.recording import RecordedCall
from s3capture.dialects import is_model_authored
from s3capture.errors import UnrepresentableHistoryError
from s3capture.matching import NativeMatcher
from s3capture.replay.model import Problem, ProblemKind, ReplayedCall, ReplayedRollout
from s3capture.sink import entry_payload

_UNPLAYED = ("routed_experts",)


def entry_lines(rollout: ReplayedRollout, *, deltas: bool = False) -> Iterator[bytes]:
    """Yield each call as nemo-gym 0.7.0 writes a record: one line of JSON, keys sorted, floats exact.

    Prompts are in full; with ``deltas`` as they are stored. A log probability that is no finite number is spelled
    ``-Infinity`` or ``NaN``, which Python's own JSON reads (Gym writes null, and cannot read that back).
    """
    for call in rollout.calls:
        yield entry_payload(call.stored_entry() if deltas else call.entry()).data + b"\n"


class Recorder:
    """Rollouts as lines of a recording. ``dropped`` counts calls by what they held that no recording can hold."""

    def __init__(self) -> None:
        self.dropped: dict[str, int] = {}

    def lines(self, rollout: ReplayedRollout) -> tuple[list[bytes], list[Problem]]:
        """Return the lines of one rollout, and the calls that cannot be expressed, each with all that continue it."""
        lines: list[bytes] = []
        problems: list[Problem] = []
        out: dict[str, ReplayedCall] = {}
        for call in rollout.calls:
            named = call.facts.parent_call_id
            parent = None if named is None else out.get(named)
            try:
                if named is not None and parent is None:
                    raise _InexpressibleError(f"it continues call {named!r}, which is not in the recording")
                lines.append(self._line(rollout, call, parent))
                out[call.call_id] = call
            except _InexpressibleError as error:
                problems.append(
                    Problem(rollout.rollout_id, call.call_id, ProblemKind.INEXPRESSIBLE, f"{error}; left out")
                )
        return lines, problems

    def notes(self) -> list[str]:
        """What the recording lacks, in sentences."""
        told = ["a capture keeps no requests, only their digests: the recording has one stand-in item for each call"]
        return told + [
            f"{name!r} of {count:,} calls was dropped: a recording has no field for it"
            for name, count in sorted(self.dropped.items())
        ]

    def _line(self, rollout: ReplayedRollout, call: ReplayedCall, parent: ReplayedCall | None) -> bytes:
        facts = call.facts
        try:
            recorded = RecordedCall(
                rollout_id=rollout.rollout_id,
                model_call_id=call.call_id,
                parent_call_id=None if parent is None else parent.call_id,
                new_request_items=[_stand_in(call)],
                output_items=facts.output_items,
                prompt_suffix_ids=_suffix(call, parent),
                generation_token_ids=call.generation_token_ids(),
                generation_log_probs=call.generation_log_probs(),
                token_item_index=facts.token_item_index,
                response_id=facts.response_id,
                created_at=facts.created_at,
                model=facts.model,
            )
            NativeMatcher().fingerprint(facts.output_items)
        except ValidationError as error:
            first = error.errors(include_input=False, include_url=False)[0]
            raise _InexpressibleError(f"{'.'.join(map(str, first['loc'][:1]))}: {first['msg']}") from None
        except UnrepresentableHistoryError as error:
            raise _InexpressibleError(str(error)) from None
        for name in (*(facts.model_extra or ()), *(name for name in _UNPLAYED if getattr(facts, name) is not None)):
            self.dropped[name] = self.dropped.get(name, 0) + 1
        # The standard library, because it keeps what a log probability can be: -Infinity and NaN.
        return json.dumps(recorded.model_dump(), separators=(",", ":")).encode("ascii") + b"\n"


class _InexpressibleError(Exception):
    """A recording has no form for this call."""


def _suffix(call: ReplayedCall, parent: ReplayedCall | None) -> list[int]:
    if parent is None:
        return call.prompt_token_ids()
    if not any(map(is_model_authored, parent.facts.output_items)):
        raise _InexpressibleError(
            f"it continues call {parent.call_id!r}, which has no output items that a continuation could be told by"
        )
    if call.prompt_was_delta:
        return list(call.packed.prompt)
    before, prompt = list(parent.packed_cumulative()), call.prompt_token_ids()
    if prompt[: len(before)] != before:
        raise _InexpressibleError(f"its prompt does not begin with the tokens of call {parent.call_id!r}")
    return prompt[len(before) :]


def _stand_in(call: ReplayedCall) -> dict[str, Any]:
    """What stands for the request of a call: a capture keeps its digest and its length, and not the items."""
    digest, count = call.facts.continuation_context_digest, call.facts.continuation_context_len
    content = f"[request of call {call.call_id}, not kept by a capture: {count} items, digest {digest or 'unknown'}]"
    return {"role": "user", "content": content}


def response_line(built: dict[str, Any]) -> bytes:
    """Return what Gym's builder made of a rollout as a line of JSON, keys sorted, floats exact."""
    return canonical(built).data + b"\n"
