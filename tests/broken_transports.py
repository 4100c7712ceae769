"""A small correct transport in memory, and transports that are each broken in one way.

The rule of this module: it knows the contract and not the protocol of this project (dicts and one lock, errors of its
own that only share the contract's names), so that the conformance kit is tried on something foreign. A broken transport
overrides one small method, and its docstring says what is wrong with it.
"""

from __future__ import annotations

# ruff: noqa: ARG002 - a variant takes whatever the method takes that it replaces
import asyncio
import json
import math
import re
import threading
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from s3capture.matching import NativeMatcher
from s3capture.records import TokenEntry


class TokenCaptureFrozenError(RuntimeError):
    """This transport's own; the kit knows it by its name."""


class TokenCaptureRetiredError(TokenCaptureFrozenError):
    """This transport's own; the kit knows it by its name."""


@dataclass(frozen=True)
class Snapshot:
    rollout_id: str
    entries: tuple[TokenEntry, ...]
    incomplete: bool
    snapshot_id: str
    version: int
    engine_refusals: tuple[Any, ...] = ()


@dataclass
class Rollout:
    """``payloads`` holds every payload of a call, the standing one first."""

    payloads: dict[str, list[str]] = field(default_factory=dict)
    intents: list[str] = field(default_factory=list)
    refusals: dict[str, Any] = field(default_factory=dict)
    marks: int = 0
    conflicts: int = 0
    snapshot: Snapshot | None = None

    @property
    def used(self) -> bool:
        return bool(self.payloads or self.intents or self.refusals or self.marks)

    @property
    def conflicted(self) -> set[str]:
        return {call for call, payloads in self.payloads.items() if len(payloads) > 1}


class Transport:
    """The correct backend; ``Sink``, ``Source`` and ``Resolver`` are clients of it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.rollouts: dict[str, Rollout] = {}
        self.retired: set[str] = set()
        self.dropped: dict[str, tuple[str, int]] = {}

    # -- writing ------------------------------------------------------------------------------------------------

    async def put(self, entry: TokenEntry, sink: Sink) -> None:
        with self.lock:
            self.put_now(entry)

    def put_now(self, entry: TokenEntry) -> None:
        rollout = self.writable(entry.rollout_id)
        standing = rollout.payloads.setdefault(self.call_key(entry), [])
        payload = self.dump(entry)
        if payload in standing:
            return
        if standing:
            self.conflict(rollout, standing, payload)
        else:
            standing.append(payload)

    def conflict(self, rollout: Rollout, standing: list[str], payload: str) -> None:
        standing.append(payload)
        raise ValueError("conflicting payloads for one call id")

    async def begin_call(self, rollout_id: str, call: str, sink: Sink) -> None:
        with self.lock:
            self.writable(rollout_id).intents.append(call)

    async def mark(self, rollout_id: str) -> None:
        with self.lock:
            self.known(rollout_id).marks += 1

    async def refuse(self, rollout_id: str, call: str, code: str | None, parent: dict[str, Any]) -> None:
        with self.lock:
            rollout = self.writable(rollout_id)
            standing = rollout.refusals.get(call)
            if standing is None:
                rollout.refusals[call] = SimpleNamespace(model_call_id=call, code=code, created_at=1.0, **parent)
            elif standing.code != code:
                self.other_code(call)

    def other_code(self, call: str) -> None:
        raise ValueError(f"conflicting refusal of {call}")

    # -- the source ---------------------------------------------------------------------------------------------

    async def freeze(self, rollout_id: str) -> Snapshot:
        with self.lock:
            return self.freeze_now(rollout_id)

    def freeze_now(self, rollout_id: str) -> Snapshot:
        rollout = self.known(rollout_id)
        if rollout.snapshot is None:
            rollout.snapshot = self.decide(rollout_id, rollout)
        return replace(
            rollout.snapshot,
            incomplete=rollout.snapshot.incomplete or rollout.marks > 0,
            version=self.version(rollout),
        )

    def decide(self, rollout_id: str, rollout: Rollout) -> Snapshot:
        calls = [call for call in rollout.payloads if call not in rollout.conflicted]
        open_calls = set(rollout.intents) - rollout.payloads.keys() - rollout.refusals.keys()
        return Snapshot(
            rollout_id=rollout_id,
            entries=tuple(load(rollout.payloads[call][0]) for call in calls),
            incomplete=bool(open_calls or rollout.conflicted or rollout.marks),
            snapshot_id=uuid.uuid4().hex,
            version=1,
            engine_refusals=tuple(rollout.refusals.values()),
        )

    def version(self, rollout: Rollout) -> int:
        return 1 + rollout.marks

    async def drop(self, rollout_id: str, snapshot_id: str, version: int) -> bool:
        with self.lock:
            return self.drop_now(rollout_id, snapshot_id, version)

    def drop_now(self, rollout_id: str, snapshot_id: str, version: int) -> bool:
        if rollout_id in self.dropped:
            return self.dropped[rollout_id] == (snapshot_id, version)
        rollout = self.rollouts.get(rollout_id)
        if rollout is None or rollout.snapshot is None or not self.is_current(rollout, snapshot_id, version):
            return False
        self.dropped[rollout_id] = (snapshot_id, version)
        self.remove(rollout_id, fence=True)
        return True

    def is_current(self, rollout: Rollout, snapshot_id: str, version: int) -> bool:
        assert rollout.snapshot is not None
        return (rollout.snapshot.snapshot_id, self.version(rollout)) == (snapshot_id, version)

    async def retire(self, rollout_ids: Sequence[str]) -> dict[str, list[str]]:
        with self.lock:
            return self.report({name: self.retire_one(name) for name in self.checked_batch(rollout_ids)})

    async def delete(self, rollout_ids: Sequence[str]) -> dict[str, list[str]]:
        with self.lock:
            return self.report({name: self.delete_one(name) for name in self.checked_batch(rollout_ids)})

    def retire_one(self, rollout_id: str) -> bool:
        return self.remove(rollout_id, fence=True)

    def delete_one(self, rollout_id: str) -> bool:
        self.dropped.pop(rollout_id, None)
        return self.remove(rollout_id, fence=False)

    def remove(self, rollout_id: str, *, fence: bool) -> bool:
        rollout = self.rollouts.pop(rollout_id, None)
        (self.retired.add if fence else self.retired.discard)(rollout_id)
        return rollout is not None and rollout.used

    def report(self, had: dict[str, bool]) -> dict[str, list[str]]:
        return {"removed": [n for n, used in had.items() if used], "absent": [n for n, used in had.items() if not used]}

    # -- what all share -----------------------------------------------------------------------------------------

    def known(self, rollout_id: str) -> Rollout:
        self.check_id(rollout_id)
        if rollout_id in self.retired:
            raise self.retired_error()
        return self.rollouts.setdefault(rollout_id, Rollout())

    def writable(self, rollout_id: str) -> Rollout:
        rollout = self.known(rollout_id)
        if rollout.snapshot is not None:
            raise self.frozen_error()
        return rollout

    def retired_error(self) -> Exception:
        return TokenCaptureRetiredError("retired")

    def frozen_error(self) -> Exception:
        return TokenCaptureFrozenError("frozen")

    def check_id(self, rollout_id: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", rollout_id) or rollout_id in (".", ".."):
            raise ValueError(f"invalid rollout id {rollout_id!r}")

    def checked_batch(self, rollout_ids: Sequence[str]) -> list[str]:
        if isinstance(rollout_ids, str):
            raise TypeError("a bare string is no batch")
        for rollout_id in rollout_ids:
            self.check_id(rollout_id)
        return list(dict.fromkeys(rollout_ids))

    def call_key(self, entry: TokenEntry) -> str:
        return entry.model_call_id

    def dump(self, entry: TokenEntry) -> str:
        return json.dumps(entry.model_dump(mode="json"), sort_keys=True)

    # -- the resolver -------------------------------------------------------------------------------------------

    def candidates(self, rollout_id: str, resolver: Resolver) -> list[TokenEntry]:
        rollout = self.rollouts.get(rollout_id, Rollout())
        return [load(payloads[0]) for call, payloads in rollout.payloads.items() if call not in rollout.conflicted]

    def decide_parent(self, candidates: list[TokenEntry], items: list[dict[str, Any]]) -> tuple[str | None, str]:
        decision = NativeMatcher().decide(candidates, items)
        return decision.model_call_id, decision.reason

    def tokens(self, entry: TokenEntry, candidates: list[TokenEntry]) -> list[int]:
        own = [*entry.prompt_token_ids, *entry.generation_token_ids]
        if not entry.prompt_is_delta:
            return own
        parent = next(one for one in candidates if one.model_call_id == entry.parent_call_id)
        return [*self.tokens(parent, candidates), *own]

    async def close(self) -> None:
        """Nothing to release."""


def load(payload: str) -> TokenEntry:
    return TokenEntry.model_validate(json.loads(payload))


class Client:
    """A fresh client; it gives way before it acts, as anything that talks to a server does."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport

    async def close(self) -> None:
        await self.transport.close()


class PlainSink(Client):
    """A sink without the optional extensions."""

    async def put(self, entry: TokenEntry) -> None:
        await asyncio.sleep(0)
        await self.transport.put(entry, self)  # type: ignore[arg-type]

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        await asyncio.sleep(0)
        await self.transport.mark(rollout_id)


class Sink(PlainSink):
    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        await asyncio.sleep(0)
        await self.transport.begin_call(rollout_id, model_call_id, self)

    async def record_engine_refusal(
        self,
        rollout_id: str,
        *,
        model_call_id: str,
        code: str | None,
        parent_call_id: str | None = None,
        parent_resolution: str | None = None,
    ) -> None:
        await asyncio.sleep(0)
        parent = {"parent_call_id": parent_call_id, "parent_resolution": parent_resolution}
        await self.transport.refuse(rollout_id, model_call_id, code, parent)


class Source(Client):
    async def freeze(self, rollout_id: str) -> Snapshot:
        await asyncio.sleep(0)
        return await self.transport.freeze(rollout_id)

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        await asyncio.sleep(0)
        self.transport.check_id(rollout_id)
        return await self.transport.drop(rollout_id, snapshot_id, version)

    async def retire(self, rollout_ids: Sequence[str]) -> dict[str, list[str]]:
        await asyncio.sleep(0)
        return await self.transport.retire(rollout_ids)

    async def delete(self, rollout_ids: Sequence[str]) -> dict[str, list[str]]:
        await asyncio.sleep(0)
        return await self.transport.delete(rollout_ids)


class Resolver(Client):
    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> Any:
        await asyncio.sleep(0)
        if not NativeMatcher().fingerprint(request_items):
            return SimpleNamespace(status="root", match=None, reason="")
        candidates = self.transport.candidates(rollout_id, self)
        call, reason = self.transport.decide_parent(candidates, request_items)
        if call is None:
            return SimpleNamespace(status="unresolved", match=None, reason=reason)
        entry = next(one for one in candidates if one.model_call_id == call)
        tokens = tuple(self.transport.tokens(entry, candidates))
        match = SimpleNamespace(model_call_id=call, cumulative_token_ids=tokens, digest=entry.digest)
        return SimpleNamespace(status="resolved", match=match, reason="")

    def is_process_shared(self) -> bool:
        return True


class DelegatesConflicts(Transport):
    """Correct as well: conflicts are taken, and found by the reader."""

    def conflict(self, rollout: Rollout, standing: list[str], payload: str) -> None:
        standing.append(payload)


class RelaxedFence(Transport):
    """Correct as well: a put behind the freeze is taken as evidence, which makes another version."""

    async def put(self, entry: TokenEntry, sink: Sink) -> None:
        with self.lock:
            rollout = self.known(entry.rollout_id)
            if rollout.snapshot is None:
                self.put_now(entry)
            elif self.dump(entry) not in rollout.payloads.get(entry.model_call_id, []):
                rollout.marks += 1


# -- broken: writing ------------------------------------------------------------------------------------------


class AcksBeforeVisible(Transport):
    """A put returns when its record is queued; the queue is emptied by the next put."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[TokenEntry] = []

    def put_now(self, entry: TokenEntry) -> None:
        if self.queue:
            super().put_now(self.queue.pop(0))
        self.writable(entry.rollout_id)
        self.queue.append(entry)


class Overwrites(Transport):
    """A conflicting payload replaces the first one."""

    def conflict(self, rollout: Rollout, standing: list[str], payload: str) -> None:
        standing[:] = [payload]


class OverwritesAndRaises(Transport):
    """A conflicting payload replaces the first one, and the writer is told of a conflict."""

    def conflict(self, rollout: Rollout, standing: list[str], payload: str) -> None:
        standing[:] = [payload]
        raise ValueError("conflicting payloads")


class DedupesByCall(Transport):
    """Whatever comes second for a call id is taken for a repetition."""

    def conflict(self, rollout: Rollout, standing: list[str], payload: str) -> None:
        """Nothing to see here."""


class RefusesRepetition(Transport):
    """The same bytes again are an error."""

    def put_now(self, entry: TokenEntry) -> None:
        if entry.model_call_id in self.writable(entry.rollout_id).payloads:
            raise ValueError("exists")
        super().put_now(entry)


class LosesNaN(Transport):
    """NaN is stored as 0.0."""

    def dump(self, entry: TokenEntry) -> str:
        probs = [0.0 if math.isnan(p) else p for p in entry.generation_log_probs]
        return super().dump(entry.model_copy(update={"generation_log_probs": probs}))


class LosesUnknownFields(Transport):
    """Fields that this version does not know are dropped."""

    def dump(self, entry: TokenEntry) -> str:
        return json.dumps(entry.model_dump(mode="json", include=set(type(entry).model_fields)), sort_keys=True)


class CallIdsCollide(Transport):
    """Call ids are written with unusual characters replaced."""

    def call_key(self, entry: TokenEntry) -> str:
        return re.sub(r"[^A-Za-z0-9-]", "_", entry.model_call_id)

    def conflict(self, rollout: Rollout, standing: list[str], payload: str) -> None:
        """Taken for a repetition of the same call."""
        if load(standing[0]).model_call_id == load(payload).model_call_id:
            super().conflict(rollout, standing, payload)


class RolloutsRunTogether(Transport):
    """A freeze takes in every rollout whose id begins like its own."""

    def decide(self, rollout_id: str, rollout: Rollout) -> Snapshot:
        decided = super().decide(rollout_id, rollout)
        payloads = [
            p for name, one in self.rollouts.items() if name.startswith(rollout_id) for p in one.payloads.values()
        ]
        entries = (load(payload[0]).model_copy(update={"rollout_id": rollout_id}) for payload in payloads)
        return replace(decided, entries=tuple({entry.model_call_id: entry for entry in entries}.values()))


class WantsIntents(Transport):
    """An entry without an intent makes the rollout incomplete."""

    def decide(self, rollout_id: str, rollout: Rollout) -> Snapshot:
        decided = super().decide(rollout_id, rollout)
        return replace(decided, incomplete=decided.incomplete or bool(rollout.payloads.keys() - set(rollout.intents)))


class IgnoresLateMarks(Transport):
    """A mark behind the freeze is acknowledged and forgotten."""

    async def mark(self, rollout_id: str) -> None:
        if self.known(rollout_id).snapshot is None:
            await super().mark(rollout_id)


class MarksKeepTheVersion(Transport):
    """A mark shows, under the same version."""

    def version(self, rollout: Rollout) -> int:
        return 1


class CountsOneMark(Transport):
    """The version says whether there are marks, and not how many."""

    def version(self, rollout: Rollout) -> int:
        return 1 + (rollout.marks > 0)


class IgnoresEarlyMarks(Transport):
    """A mark before the freeze is forgotten when the snapshot is decided."""

    def decide(self, rollout_id: str, rollout: Rollout) -> Snapshot:
        rollout.marks = 0
        return super().decide(rollout_id, rollout)


class MarksOnlyKnownRollouts(Transport):
    """A mark on a rollout without records is ignored."""

    async def mark(self, rollout_id: str) -> None:
        self.check_id(rollout_id)
        if rollout_id in self.rollouts or rollout_id in self.retired:
            await super().mark(rollout_id)


class IgnoresIntents(Transport):
    """A begun call without an outcome goes unseen."""

    async def begin_call(self, rollout_id: str, call: str, sink: Sink) -> None:
        self.writable(rollout_id)


class IntentsBelongToSinks(Transport):
    """An intent is settled only by a record of the sink that began the call."""

    def __init__(self) -> None:
        super().__init__()
        self.began: dict[tuple[str, str], Sink] = {}

    async def begin_call(self, rollout_id: str, call: str, sink: Sink) -> None:
        await super().begin_call(rollout_id, call, sink)
        self.began[rollout_id, call] = sink

    async def put(self, entry: TokenEntry, sink: Sink) -> None:
        await super().put(entry, sink)
        if self.began.get((entry.rollout_id, entry.model_call_id), sink) is not sink:
            self.rollouts[entry.rollout_id].intents.append("unsettled")


class CountsIntents(Transport):
    """A call that was begun twice needs two outcomes."""

    def decide(self, rollout_id: str, rollout: Rollout) -> Snapshot:
        decided = super().decide(rollout_id, rollout)
        return replace(decided, incomplete=decided.incomplete or len(set(rollout.intents)) < len(rollout.intents))


class TakesAnyId(Transport):
    """Rollout ids are not checked."""

    def check_id(self, rollout_id: str) -> None:
        """Anything goes."""


# -- broken: the source ---------------------------------------------------------------------------------------


class FreezesAnew(Transport):
    """Every freeze makes a snapshot of its own."""

    def freeze_now(self, rollout_id: str) -> Snapshot:
        return replace(super().freeze_now(rollout_id), snapshot_id=uuid.uuid4().hex)


class KnowsNoUnknown(Transport):
    """A rollout that nobody wrote cannot be frozen."""

    def freeze_now(self, rollout_id: str) -> Snapshot:
        self.check_id(rollout_id)
        if rollout_id not in self.rollouts and rollout_id not in self.retired:
            raise LookupError(rollout_id)
        return super().freeze_now(rollout_id)


class TakesLatePuts(Transport):
    """A put behind the freeze is acknowledged, and nothing shows it."""

    def put_now(self, entry: TokenEntry) -> None:
        if self.known(entry.rollout_id).snapshot is None:
            super().put_now(entry)


class LateConflictsReplace(Transport):
    """Another payload behind the freeze replaces the frozen one, under the same version."""

    def put_now(self, entry: TokenEntry) -> None:
        rollout = self.known(entry.rollout_id)
        frozen = rollout.snapshot
        if frozen is not None and entry.model_call_id in rollout.payloads:
            others = (one for one in frozen.entries if one.model_call_id != entry.model_call_id)
            rollout.snapshot = replace(frozen, entries=(*others, entry))
        super().put_now(entry)


class RepetitionsMoveTheVersion(Transport):
    """The same bytes again, behind the freeze, make another version."""

    def put_now(self, entry: TokenEntry) -> None:
        rollout = self.known(entry.rollout_id)
        if rollout.snapshot is not None and self.dump(entry) in rollout.payloads.get(entry.model_call_id, []):
            rollout.marks += 1
            return
        super().put_now(entry)


class DropIgnoresVersion(Transport):
    """Drop compares the snapshot id alone."""

    def is_current(self, rollout: Rollout, snapshot_id: str, version: int) -> bool:
        return rollout.snapshot is not None and rollout.snapshot.snapshot_id == snapshot_id


class DropIgnoresSnapshotId(Transport):
    """Drop compares the version alone."""

    def is_current(self, rollout: Rollout, snapshot_id: str, version: int) -> bool:
        return self.version(rollout) == version


class DropOnce(Transport):
    """A drop that succeeded is False when it is repeated."""

    def drop_now(self, rollout_id: str, snapshot_id: str, version: int) -> bool:
        return rollout_id not in self.dropped and super().drop_now(rollout_id, snapshot_id, version)


class DropLeavesNoFence(Transport):
    """Drop removes the records and keeps no fence."""

    def drop_now(self, rollout_id: str, snapshot_id: str, version: int) -> bool:
        dropped = super().drop_now(rollout_id, snapshot_id, version)
        if dropped:
            self.retired.discard(rollout_id)
        return dropped


class DropOfUnfrozen(Transport):
    """Drop of a rollout that is not frozen says True."""

    def drop_now(self, rollout_id: str, snapshot_id: str, version: int) -> bool:
        known = rollout_id in self.retired or self.rollouts.get(rollout_id, Rollout()).snapshot is not None
        return super().drop_now(rollout_id, snapshot_id, version) if known else True


class RetireLeavesNoFence(Transport):
    """Retire removes the records and keeps no fence."""

    def retire_one(self, rollout_id: str) -> bool:
        return self.remove(rollout_id, fence=False)


class RetiresOnlyTheKnown(Transport):
    """Retire of a rollout that nobody wrote keeps no fence."""

    def retire_one(self, rollout_id: str) -> bool:
        known = rollout_id in self.rollouts or rollout_id in self.retired
        return known and super().retire_one(rollout_id)


class RetiredIsNotFrozen(Transport):
    """The retired error is no frozen error."""

    def retired_error(self) -> Exception:
        return type("TokenCaptureRetiredError", (RuntimeError,), {})("retired")


class RetiredIsFrozenOnly(Transport):
    """Behind a retirement the plain frozen error is raised."""

    def retired_error(self) -> Exception:
        return TokenCaptureFrozenError("retired")


class FrozenIsPlain(Transport):
    """Behind a freeze a plain RuntimeError is raised, as before there were types."""

    def frozen_error(self) -> Exception:
        return RuntimeError("frozen")


class FrozenIsRetired(Transport):
    """Behind a freeze the retired error is raised."""

    def frozen_error(self) -> Exception:
        return TokenCaptureRetiredError("frozen")


class DeleteKeepsTheFence(Transport):
    """After delete the id is still fenced."""

    def delete_one(self, rollout_id: str) -> bool:
        fenced = rollout_id in self.retired
        had = super().delete_one(rollout_id)
        if fenced:
            self.retired.add(rollout_id)
        return had


class ReportsInAnyOrder(Transport):
    """The report is sorted by name."""

    def report(self, had: dict[str, bool]) -> dict[str, list[str]]:
        return {name: sorted(ids) for name, ids in super().report(had).items()}


class BatchPartlyApplied(Transport):
    """A batch is checked id by id, as it is worked off."""

    async def retire(self, rollout_ids: Sequence[str]) -> dict[str, list[str]]:
        parts = [self.retire_one(self.checked_batch([name])[0]) for name in self.checked_batch_type(rollout_ids)]
        return self.report(dict(zip(dict.fromkeys(rollout_ids), parts, strict=True)))

    def checked_batch_type(self, rollout_ids: Sequence[str]) -> list[str]:
        if isinstance(rollout_ids, str):
            raise TypeError("a bare string is no batch")
        return list(dict.fromkeys(rollout_ids))


class BareStringAccepted(Transport):
    """A bare string is taken for a batch of its characters."""

    def checked_batch(self, rollout_ids: Sequence[str]) -> list[str]:
        return super().checked_batch(list(rollout_ids))


class CloseRaises(Transport):
    """Closing a client fails."""

    async def close(self) -> None:
        raise RuntimeError("flush failed")


# -- broken: refusals -----------------------------------------------------------------------------------------


class RefusalSettlesNothing(Transport):
    """A refusal is reported, and its intent dangles."""

    def decide(self, rollout_id: str, rollout: Rollout) -> Snapshot:
        decided = super().decide(rollout_id, rollout)
        return replace(decided, incomplete=decided.incomplete or bool(rollout.refusals.keys() & set(rollout.intents)))


class RefusalUnreported(Transport):
    """A refusal settles its intent and is not in the snapshot."""

    def decide(self, rollout_id: str, rollout: Rollout) -> Snapshot:
        return replace(super().decide(rollout_id, rollout), engine_refusals=())


class RefusalOnce(Transport):
    """The same refusal again is an error."""

    async def refuse(self, rollout_id: str, call: str, code: str | None, parent: dict[str, Any]) -> None:
        if call in self.writable(rollout_id).refusals:
            raise ValueError("refused already")
        await super().refuse(rollout_id, call, code, parent)


class OtherCodeAccepted(Transport):
    """A refusal with another code is taken for a repetition."""

    def other_code(self, call: str) -> None:
        """The first one stands."""


class LateRefusalShows(Transport):
    """A refusal behind the freeze is added to the frozen snapshot."""

    async def refuse(self, rollout_id: str, call: str, code: str | None, parent: dict[str, Any]) -> None:
        frozen = self.known(rollout_id).snapshot
        if frozen is None:
            await super().refuse(rollout_id, call, code, parent)
        else:
            late = SimpleNamespace(model_call_id=call, code=code, created_at=2.0, **parent)
            self.rollouts[rollout_id].snapshot = replace(frozen, engine_refusals=(*frozen.engine_refusals, late))


class LateRefusalStales(Transport):
    """A refusal behind the freeze raises, and has moved the version."""

    async def refuse(self, rollout_id: str, call: str, code: str | None, parent: dict[str, Any]) -> None:
        rollout = self.known(rollout_id)
        rollout.marks += rollout.snapshot is not None
        await super().refuse(rollout_id, call, code, parent)


class RefusalOfTheRetired(Transport):
    """A refusal behind a retirement is acknowledged."""

    async def refuse(self, rollout_id: str, call: str, code: str | None, parent: dict[str, Any]) -> None:
        if rollout_id not in self.retired:
            await super().refuse(rollout_id, call, code, parent)


# -- broken: the resolver -------------------------------------------------------------------------------------


class FindsNothing(Transport):
    """Every request with model history is unresolved."""

    def candidates(self, rollout_id: str, resolver: Resolver) -> list[TokenEntry]:
        return []


class RemembersNothingFound(Transport):
    """A resolver that found no candidates in a rollout never looks again."""

    def candidates(self, rollout_id: str, resolver: Resolver) -> list[TokenEntry]:
        remembered = resolver.__dict__.setdefault("remembered", {})
        if rollout_id not in remembered:
            remembered[rollout_id] = super().candidates(rollout_id, resolver)
        return remembered[rollout_id]  # type: ignore[no-any-return]


class Guesses(Transport):
    """Among several candidates the first one is taken."""

    def decide_parent(self, candidates: list[TokenEntry], items: list[dict[str, Any]]) -> tuple[str | None, str]:
        verdicts = (super(Guesses, self).decide_parent([one], items) for one in candidates)
        return next((verdict for verdict in verdicts if verdict[0] is not None), (None, "no_match"))


class IgnoresContext(Transport):
    """What the user said before is not compared."""

    def decide_parent(self, candidates: list[TokenEntry], items: list[dict[str, Any]]) -> tuple[str | None, str]:
        wanted = NativeMatcher().fingerprint(items)
        found = [one.model_call_id for one in candidates if one.continuation_fingerprint == wanted]
        return (found[0], "") if len(found) == 1 else (None, "ambiguous")


class ReturnsConflicted(DelegatesConflicts):
    """A call with two payloads that were both taken still resolves, to the first."""

    def candidates(self, rollout_id: str, resolver: Resolver) -> list[TokenEntry]:
        return [load(payloads[0]) for payloads in self.rollouts.get(rollout_id, Rollout()).payloads.values()]


class ReturnsTheLoser(Transport):
    """The payload that lost resolves as a parent."""

    def candidates(self, rollout_id: str, resolver: Resolver) -> list[TokenEntry]:
        return [load(payloads[-1]) for payloads in self.rollouts.get(rollout_id, Rollout()).payloads.values()]


class ForgetsTheParents(Transport):
    """A delta record is returned without the tokens of its parents."""

    def tokens(self, entry: TokenEntry, candidates: list[TokenEntry]) -> list[int]:
        return [*entry.prompt_token_ids, *entry.generation_token_ids]


class LooksInOtherRollouts(Transport):
    """Candidates come from every rollout whose id begins like the one asked for."""

    def candidates(self, rollout_id: str, resolver: Resolver) -> list[TokenEntry]:
        alike = [name for name in self.rollouts if name.startswith(rollout_id)]
        return [one for name in alike for one in super(LooksInOtherRollouts, self).candidates(name, resolver)]


class RemembersTheDeleted(Transport):
    """A resolver answers from memory although the rollout was deleted."""

    def candidates(self, rollout_id: str, resolver: Resolver) -> list[TokenEntry]:
        remembered = resolver.__dict__.setdefault("remembered", {}).setdefault(rollout_id, {})
        remembered.update({one.model_call_id: one for one in super().candidates(rollout_id, resolver)})
        return list(remembered.values())


# -- broken: races --------------------------------------------------------------------------------------------


class LooksThenPuts(Transport):
    """A put looks whether the call is free, and writes a moment later."""

    async def put(self, entry: TokenEntry, sink: Sink) -> None:
        payloads = self.writable(entry.rollout_id).payloads.get(entry.model_call_id)
        await asyncio.sleep(0)
        if payloads:
            await super().put(entry, sink)
        else:
            self.writable(entry.rollout_id).payloads[entry.model_call_id] = [self.dump(entry)]


class EqualPutsCollide(Transport):
    """A put that meets another one of the same call under way is turned away."""

    def __init__(self) -> None:
        super().__init__()
        self.under_way: set[tuple[str, str]] = set()

    async def put(self, entry: TokenEntry, sink: Sink) -> None:
        key = (entry.rollout_id, entry.model_call_id)
        if key in self.under_way:
            raise ValueError("conflicting: a put of this call is under way")
        self.under_way.add(key)
        await asyncio.sleep(0)
        self.under_way.discard(key)
        await super().put(entry, sink)


class FreezesBeforeItCloses(Transport):
    """The snapshot is taken first and the fence follows a moment later."""

    async def freeze(self, rollout_id: str) -> Snapshot:
        rollout = self.known(rollout_id)
        decided = rollout.snapshot or self.decide(rollout_id, rollout)
        await asyncio.sleep(0)
        rollout.snapshot = rollout.snapshot or decided
        return await super().freeze(rollout_id)


class FreezersDiffer(Transport):
    """Two freezers at once both return what they decided."""

    async def freeze(self, rollout_id: str) -> Snapshot:
        rollout = self.known(rollout_id)
        if rollout.snapshot is not None:
            return await super().freeze(rollout_id)
        decided = self.decide(rollout_id, rollout)
        await asyncio.sleep(0)
        rollout.snapshot = rollout.snapshot or decided
        return decided


class BeginsUnseen(Transport):
    """A begin looks for the fence first and writes its intent a moment later."""

    async def begin_call(self, rollout_id: str, call: str, sink: Sink) -> None:
        rollout = self.writable(rollout_id)
        await asyncio.sleep(0)
        rollout.intents.append(call)


class DropsUnseen(Transport):
    """A drop compares first and retires a moment later."""

    async def drop(self, rollout_id: str, snapshot_id: str, version: int) -> bool:
        rollout = self.rollouts.get(rollout_id)
        if rollout is None or rollout.snapshot is None or not self.is_current(rollout, snapshot_id, version):
            return await super().drop(rollout_id, snapshot_id, version)
        await asyncio.sleep(0)
        self.dropped[rollout_id] = (snapshot_id, version)
        self.remove(rollout_id, fence=True)
        return True


class PutsBehindRetirement(Transport):
    """A put looks for the fence first and writes a moment later, into a rollout that it makes anew."""

    async def put(self, entry: TokenEntry, sink: Sink) -> None:
        self.writable(entry.rollout_id)
        await asyncio.sleep(0)
        self.retired.discard(entry.rollout_id)
        await super().put(entry, sink)


CORRECT: tuple[type[Transport], ...] = (Transport, DelegatesConflicts, RelaxedFence)

BROKEN: tuple[tuple[type[Transport], str], ...] = (
    (AcksBeforeVisible, "put_then_freeze_visibility"),
    (RefusesRepetition, "idempotent_reput"),
    (Overwrites, "conflicting_reput"),
    (OverwritesAndRaises, "conflicting_reput"),
    (DedupesByCall, "conflicting_reput"),
    (LosesNaN, "payload_fidelity"),
    (LosesUnknownFields, "payload_fidelity"),
    (CallIdsCollide, "call_ids_never_collide"),
    (RolloutsRunTogether, "rollouts_are_separate"),
    (WantsIntents, "entry_without_intent_is_complete"),
    (IgnoresLateMarks, "mark_incomplete_durability"),
    (MarksKeepTheVersion, "mark_incomplete_durability"),
    (CountsOneMark, "version_follows_marks"),
    (IgnoresEarlyMarks, "mark_before_freeze"),
    (MarksOnlyKnownRollouts, "mark_on_unknown_rollout"),
    (IgnoresIntents, "begin_call_custody"),
    (IntentsBelongToSinks, "begun_here_put_there"),
    (CountsIntents, "begin_twice"),
    (TakesAnyId, "id_validation"),
    (FreezesAnew, "freeze_idempotency"),
    (KnowsNoUnknown, "unknown_rollout_freezes_empty"),
    (TakesLatePuts, "post_freeze_write_safety"),
    (LateConflictsReplace, "late_conflict"),
    (RepetitionsMoveTheVersion, "repeated_put_behind_freeze"),
    (FrozenIsPlain, "typed_errors"),
    (FrozenIsRetired, "typed_errors"),
    (RetiredIsNotFrozen, "typed_errors"),
    (RetiredIsFrozenOnly, "typed_errors"),
    (DropIgnoresVersion, "conditional_retirement"),
    (DropIgnoresSnapshotId, "drop_checks_the_snapshot_id"),
    (DropOfUnfrozen, "drop_of_unknown_or_unfrozen"),
    (DropOnce, "repeated_drop"),
    (DropLeavesNoFence, "repeated_drop"),
    (RetireLeavesNoFence, "unconditional_retirement"),
    (RetiresOnlyTheKnown, "retirement_of_unknown"),
    (ReportsInAnyOrder, "removal_report"),
    (DeleteKeepsTheFence, "delete_clears_retirement"),
    (BatchPartlyApplied, "batch_validation"),
    (BareStringAccepted, "batch_validation"),
    (FindsNothing, "lineage_visibility"),
    (RemembersNothingFound, "fresh_client_lineage_visibility"),
    (IgnoresContext, "rewritten_context"),
    (Guesses, "ambiguous_candidates"),
    (ReturnsConflicted, "conflict_is_no_candidate"),
    (ReturnsTheLoser, "conflict_is_no_candidate"),
    (ForgetsTheParents, "delta_prompt_is_materialized"),
    (LooksInOtherRollouts, "lineage_is_per_rollout"),
    (RemembersTheDeleted, "lineage_after_delete"),
    (RefusalSettlesNothing, "refusal_resolution"),
    (RefusalUnreported, "refusal_resolution"),
    (RefusalOnce, "refusal_idempotency"),
    (OtherCodeAccepted, "conflicting_refusal"),
    (LateRefusalShows, "late_refusal"),
    (LateRefusalStales, "late_refusal"),
    (RefusalOfTheRetired, "refusal_after_retirement"),
    (LooksThenPuts, "racing_puts"),
    (EqualPutsCollide, "racing_equal_puts"),
    (FreezesBeforeItCloses, "racing_freeze"),
    (FreezersDiffer, "racing_freezers"),
    (BeginsUnseen, "racing_begins"),
    (DropsUnseen, "racing_mark_and_drop"),
    (PutsBehindRetirement, "racing_retirement"),
    (CloseRaises, "close"),
)
"""Each broken transport and the check that must catch it."""
