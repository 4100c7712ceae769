"""What a trainer does when a rollout ends: freeze it, read it back, compare, and drop it if that is allowed.

The rule of this module: why a snapshot is incomplete is read from the bucket, not from the script; and only a
complete snapshot without any difference is dropped, since dropping deletes the evidence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from s3capture.demo.outcome import Difference, Fate, Outcome, RolloutOutcome
from s3capture.demo.script import Request, Rollout
from s3capture.demo.verify import Played, Reason, Why, check_snapshot
from s3capture.errors import CaptureError
from s3capture.keys import escape, unescape
from s3capture.protocol import bodies
from s3capture.protocol.survey import survey
from s3capture.protocols import TokenCaptureSnapshot
from s3capture.source import S3TokenSource


class Closing:
    """Closes the rollouts of one demo; findings go into ``outcome``."""

    def __init__(self, source: S3TokenSource, outcome: Outcome) -> None:
        self._source = source
        self._outcome = outcome

    async def close(
        self,
        rollout: Rollout,
        requests: Mapping[str, Request],
        played: Mapping[str, Played],
        late: Callable[[], Awaitable[None]] | None,
    ) -> None:
        """Freeze, try a late write if there is one, compare, and drop or retain."""
        rollout_id, outcome = rollout.rollout_id, self._outcome
        try:
            snapshot = await self._source.freeze(rollout_id)
            await self._measure(rollout_id, played)
            differences = []
            if late is not None:
                await late()
                again = await self._source.freeze(rollout_id)
                if (again.snapshot_id, again.version) != (snapshot.snapshot_id, snapshot.version):
                    differences.append("a late write changed the frozen snapshot")
                snapshot = again
            reasons = await self._reasons(rollout_id) if snapshot.incomplete else frozenset[Why]()
            differences += await asyncio.to_thread(check_snapshot, rollout, requests, played, snapshot, reasons)
            outcome.differences += [Difference(rollout_id, what) for what in differences]
            fate, why = await self._fate(snapshot)
        except CaptureError as error:
            outcome.differences.append(Difference(rollout_id, f"{type(error).__name__}: {error}"))
            return
        outcome.rollouts.append(
            RolloutOutcome(
                rollout=rollout_id,
                calls=len(rollout.calls),
                entries=len(snapshot.entries),
                deltas=sum(entry.prompt_is_delta for entry in snapshot.entries),
                refusals=len(snapshot.engine_refusals),
                verified=0 if differences else len(snapshot.entries),
                complete=not snapshot.incomplete,
                reasons=sorted(reasons),
                fate=fate,
                why=why,
            )
        )

    async def _fate(self, snapshot: TokenCaptureSnapshot) -> tuple[Fate, str]:
        rollout_id = snapshot.rollout_id
        if any(one.rollout == rollout_id for one in self._outcome.differences):
            return Fate.RETAINED, "it differs from what it should be"
        if snapshot.incomplete:
            return Fate.RETAINED, "incomplete"
        if self._outcome.kept:
            return Fate.RETAINED, "kept as asked"
        if await self._source.drop(rollout_id, snapshot_id=snapshot.snapshot_id, version=snapshot.version):
            return Fate.DROPPED, "complete and verified"
        self._outcome.differences.append(Difference(rollout_id, "the drop of its unchanged snapshot was refused"))
        return Fate.RETAINED, "its drop was refused"

    async def _reasons(self, rollout_id: str) -> frozenset[Why]:
        """Read from the bucket why a snapshot is incomplete."""
        frozen = await self._source._freeze(rollout_id, lambda _, frozen: frozen)
        keys, store = self._source._runtime.rollout(rollout_id), self._source._runtime.store
        found = [Why(Reason.DANGLING, _call(s)) for s, o in frozen.outcomes.items() if o.kind == bodies.SEAL]
        found += [Why(Reason.CONFLICT, _call(segment)) for segment, _ in frozen.conflicts]
        for mark in frozen.marks:
            body = await asyncio.to_thread(store.get, keys.mark(mark))
            call = "" if body is None else bodies.read(keys.mark(mark), body, "mark").header.get("call")
            found.append(Why(Reason.MARK, str(call or "")))
        return frozenset(found)

    async def _measure(self, rollout_id: str, played: Mapping[str, Played]) -> None:
        """Add up what the rollout holds in the bucket, before anything of it is dropped."""
        keys, store, sizes = self._source._runtime.rollout(rollout_id), self._source._runtime.store, self._outcome.sizes
        rows = [
            *await asyncio.to_thread(store.list, keys.base),
            *await asyncio.to_thread(store.list, keys.lineage_base),
        ]
        outcomes = survey(keys, rows).outcomes
        sizes.records += sum(outcomes[escape(call)].size for call in played if escape(call) in outcomes)
        sizes.all_objects += sum(row.size for row in rows)
        sizes.objects += len(rows)

    async def count_what_is_left(self) -> None:
        """Count the objects of the run that are still in the bucket."""
        keys, store, sizes = self._source._runtime.keys, self._source._runtime.store, self._outcome.sizes
        rows = [*await asyncio.to_thread(store.list, keys.attempts), *await asyncio.to_thread(store.list, keys.lineage)]
        sizes.left, sizes.objects_left = sum(row.size for row in rows), len(rows)


def _call(segment: str) -> str:
    """The call id of a key segment; a very long one stays as it stands in the key."""
    return unescape(segment) or segment
