"""The record of a played call: made by a worker that puts it, and made again by the verification.

The rule of this module: the record follows from the script and the parent decision alone, so that what came out of
the bucket is compared with what should have gone in, not with what some process says it put.
"""

from __future__ import annotations

import array
import sys
from dataclasses import dataclass

from s3capture.demo.script import Call, Request
from s3capture.matching import stamp_continuation
from s3capture.records import ParentResolutionStatus, TokenEntry, stamp_lineage


@dataclass(frozen=True, slots=True)
class Decision:
    """What ``resolve`` said about a request: ``parent_tokens`` is the length of the parent's prompt and generation.

    ``extends`` is whether the prompt begins with exactly those tokens; only then a delta record is possible.
    """

    status: ParentResolutionStatus
    parent: str | None = None
    reason: str = ""
    parent_digest: str = ""
    parent_tokens: int = 0
    extends: bool = False


def build_entry(rollout_id: str, call: Call, request: Request, decision: Decision) -> TokenEntry:
    """Return the record that a Gym model server would put for ``call``, all stamps included."""
    delta = call.delta and decision.status is ParentResolutionStatus.RESOLVED and decision.extends
    entry = TokenEntry(
        rollout_id=rollout_id,
        model_call_id=call.call_id,
        model=call.model,
        prompt_token_ids=request.prompt[decision.parent_tokens :] if delta else request.prompt,
        generation_token_ids=call.generation_ids,
        generation_log_probs=call.log_probs,
        output_items=call.output_items,
        token_item_index=call.token_item_index,
        response_id=call.response_id,
        created_at=call.created_at,
        parent_call_id=decision.parent,
        parent_resolution=decision.status,
        parent_resolution_reason=decision.reason,
        prompt_is_delta=delta,
    )
    stamp_continuation(entry, request.items)
    return stamp_lineage(
        entry,
        decision.parent,
        parent_resolution=decision.status,
        cumulative=[*request.prompt, *call.generation_ids],
    )


def bits(values: list[float]) -> bytes:
    """The IEEE bits of log probabilities: what ``==`` cannot tell apart (NaN, -0.0), these can."""
    packed = array.array("d", values)
    if sys.byteorder == "little":
        packed.byteswap()
    return packed.tobytes()
