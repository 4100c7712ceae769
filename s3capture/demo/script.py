"""What a demo plays: rollouts of model calls, each stored as what it adds to the call that it continues.

The rule of this module: a script is data, complete before anything is played, and rebuilding a request from it is
the one rule of the recording format (docs/recording-format.md). The harness, the workers and the verification all
rebuild through here; were it done twice, a demo could agree with itself about the wrong tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Twist(StrEnum):
    """What befalls a call. Only calls with ``NONE`` or ``RETRY`` end in an entry of the snapshot."""

    NONE = "none"
    RETRY = "retry"
    """The response is lost and the same bytes are put again by another process: a no-op."""
    CONFLICT = "conflict"
    """Another process puts another payload under the same call id: refused, and the rollout is masked."""
    REFUSED = "refused"
    """The engine refuses the call before it generates anything: an outcome, and the rollout stays complete."""
    DIES = "dies"
    """The worker process is killed between ``begin_call`` and ``put``: the intent stays open."""
    OUTAGE = "outage"
    """S3 is gone between ``begin_call`` and ``put``: the put fails and the mark goes to the local spill."""


KEEPS_ENTRY = frozenset({Twist.NONE, Twist.RETRY})
MASKS = frozenset({Twist.CONFLICT, Twist.DIES, Twist.OUTAGE})


@dataclass(frozen=True, slots=True)
class Call:
    """One model call as a delta against its parent; ``parent`` None is a root.

    Items are Responses or Chat items. ``suffix_ids`` are the prompt tokens behind the parent's prompt and generation.
    ``delta`` asks for a delta record, should the parent be resolved.
    """

    call_id: str
    parent: str | None
    new_items: list[dict[str, Any]]
    output_items: list[dict[str, Any]]
    token_item_index: int | None
    suffix_ids: list[int]
    generation_ids: list[int]
    log_probs: list[float]
    response_id: str | None
    created_at: float
    model: str
    delta: bool = False
    twist: Twist = Twist.NONE


@dataclass(frozen=True, slots=True)
class Rollout:
    """The calls of one rollout, every parent before its children; ``late`` is tried once it is frozen."""

    rollout_id: str
    calls: Sequence[Call]
    late: Call | None = None

    @property
    def masked(self) -> bool:
        """Whether something befalls it that must make its snapshot incomplete."""
        return any(call.twist in MASKS for call in self.calls)


@dataclass(frozen=True, slots=True)
class Script:
    """Everything that one demo plays. ``skipped`` says, for a person, what could not be played here."""

    title: str
    rollouts: Sequence[Rollout]
    skipped: Sequence[str] = field(default=())

    @property
    def calls(self) -> int:
        """The number of model calls, without the late ones."""
        return sum(len(rollout.calls) for rollout in self.rollouts)


@dataclass(frozen=True, slots=True)
class Request:
    """What the harness sends and the engine sees: all items, and the whole prompt as token ids."""

    items: list[dict[str, Any]]
    prompt: list[int]


def rebuild(rollout: Rollout) -> dict[str, Request]:
    """Return the request of every call of ``rollout``, the late one included, by call id.

    Items are shared between requests, not copied: treat them as read-only.
    """
    requests: dict[str, Request] = {}
    outputs: dict[str, Call] = {}
    for call in [*rollout.calls, *([rollout.late] if rollout.late else [])]:
        if call.parent is None:
            request = Request([*call.new_items], [*call.suffix_ids])
        else:
            before, parent = requests[call.parent], outputs[call.parent]
            request = Request(
                [*before.items, *parent.output_items, *call.new_items],
                [*before.prompt, *parent.generation_ids, *call.suffix_ids],
            )
        requests[call.call_id], outputs[call.call_id] = request, call
    return requests
