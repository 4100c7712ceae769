"""What a check works with: fresh endpoints, a rollout id of its own, and records that any transport must take.

The rule of this module: every check gets other rollout ids and fresh instances, so no check can spoil or help another
one; and records are built from the contract's fields alone, so that they can be of this package's ``TokenEntry`` or of
any type of that shape.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from s3capture.matching import stamp_continuation
from s3capture.records import TokenEntry, compute_digest
from s3capture.testing.conformance.verdicts import Closing, ErrorKinds, Fault, expect

Items = Sequence[dict[str, Any]]
Factory = Callable[[], Any]

QUESTION: tuple[dict[str, Any], ...] = ({"role": "user", "content": "Which river runs through Vienna?"},)
ANSWER = "The Danube."


def answer(text: str) -> dict[str, Any]:
    """One output item of the model."""
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def continuation(request: Items = QUESTION, text: str = ANSWER) -> list[dict[str, Any]]:
    """The request of a harness that goes on after the answer ``text`` to ``request``."""
    return [*request, answer(text), {"role": "user", "content": "And through Budapest?"}]


@dataclass(frozen=True, slots=True)
class Makers:
    """How to make what is under test, and what it speaks."""

    sink: Factory
    source: Factory
    resolver: Factory | None
    kinds: ErrorKinds
    entry_type: Callable[..., Any] = TokenEntry
    stamp: Callable[[Any, Any], Any] = stamp_continuation


class Case:
    """One check's own rollout, records and instances."""

    def __init__(self, makers: Makers, rollout: str, closing: Closing) -> None:
        self._makers = makers
        self._closing = closing
        self.rollout = rollout
        self.kinds = makers.kinds

    # -- instances --------------------------------------------------------------------------------------------

    def sink(self) -> Any:
        """A fresh sink."""
        return self._closing.keep(self._makers.sink())

    def source(self) -> Any:
        """A fresh source."""
        return self._closing.keep(self._makers.source())

    def resolver(self) -> Any:
        """A fresh resolver."""
        if self._makers.resolver is None:
            raise Fault("this check needs a lineage_factory")
        return self._closing.keep(self._makers.resolver())

    def another(self, suffix: object) -> Case:
        """A case like this one on a rollout of its own."""
        return Case(self._makers, f"{self.rollout}-{suffix}", self._closing)

    # -- records ----------------------------------------------------------------------------------------------

    def entry(
        self,
        call: str = "call-1",
        *,
        prompt: Sequence[int] = (11, 12),
        generation: Sequence[int] = (13, 14),
        request: Items = QUESTION,
        text: str = ANSWER,
        parent: Any = None,
        delta_of: Sequence[int] | None = None,
        rollout: str | None = None,
        **more: Any,
    ) -> Any:
        """A valid record, stamped so that a continuation of ``request`` + ``text`` finds it.

        ``parent`` is the entry that it resolved to; with ``delta_of``, the cumulative tokens of that parent, ``prompt``
        is only the suffix.
        """
        cumulative = [*(delta_of or ()), *prompt, *generation]
        fields: dict[str, Any] = {
            "rollout_id": self.rollout if rollout is None else rollout,
            "model_call_id": call,
            "model": "conformance",
            "prompt_token_ids": list(prompt),
            "generation_token_ids": list(generation),
            "generation_log_probs": [-0.25] * len(generation),
            "output_items": [answer(text)],
            "token_item_index": 0,
            "created_at": 1_700_000_000.0,
            "parent_call_id": None if parent is None else parent.model_call_id,
            "parent_resolution": "root" if parent is None else "resolved",
            "cum_len": len(cumulative),
            "digest": compute_digest(cumulative),
            "prompt_is_delta": delta_of is not None,
            **more,
        }
        made = self._makers.entry_type(**fields)
        self._makers.stamp(made, list(request))
        return made

    def other(self, entry: Any) -> Any:
        """The same call with another payload."""
        return self.entry(entry.model_call_id, generation=(15, 16, 17), text="The Rhine.", rollout=entry.rollout_id)

    # -- what was frozen --------------------------------------------------------------------------------------

    async def freeze(self) -> Any:
        """Freeze the rollout by a fresh source; its entries must be unique and of this rollout."""
        snapshot = await self.source().freeze(self.rollout)
        calls = [entry.model_call_id for entry in snapshot.entries]
        expect(len(set(calls)) == len(calls), f"the snapshot holds a call twice: {sorted(calls)}")
        expect(
            all(entry.rollout_id == self.rollout for entry in snapshot.entries),
            "the snapshot holds an entry of another rollout",
        )
        return snapshot


def resent(entry: Any) -> Any:
    """The record as a retry builds it: from the bytes of the first attempt."""
    return type(entry).model_validate(entry.model_dump(mode="json"))


def wire(entry: Any) -> str:
    """A record as text that is equal exactly for equal payloads (NaN included)."""
    return json.dumps(entry.model_dump(mode="json"), sort_keys=True)


def by_call(snapshot: Any) -> dict[str, str]:
    """The payloads of a snapshot, by call."""
    return {entry.model_call_id: wire(entry) for entry in snapshot.entries}


def state(snapshot: Any) -> tuple[Any, ...]:
    """All of a snapshot that a consumer can tell apart."""
    refused = None if (found := refusals_of(snapshot)) is None else tuple(map(_refusal, found))
    return snapshot.snapshot_id, snapshot.version, snapshot.incomplete, by_call(snapshot), refused


def exactly(snapshot: Any) -> dict[str, Any]:
    """What ``drop`` is given to retire exactly ``snapshot``."""
    return {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}


def refusals_of(snapshot: Any) -> tuple[Any, ...] | None:
    """The refusals that a snapshot reports, under either public name; None when its class has no such field."""
    for name in ("engine_refusals", "refusals"):
        if hasattr(snapshot, name):
            return tuple(getattr(snapshot, name))
    return None


def _refusal(refusal: Any) -> tuple[str, Any]:
    return str(refusal.model_call_id), refusal.code


async def refuse(sink: Any, rollout: str, call: str, code: str | None, **parent: Any) -> None:
    """Record a refusal through whichever name of the extension the sink has."""
    record = getattr(sink, "record_engine_refusal", None)
    if record is not None:
        await record(rollout, model_call_id=call, code=code, **parent)
    else:
        await sink.refuse_call(rollout, model_call_id=call, code=code)
