"""``S3CaptureLedger``: rows about calls whose tokens a training framework stages elsewhere.

The rule of this module: the manifest is what decides over training, so nothing doubtful is left out of it. A begun call
that neither committed, failed nor was refused stands there as a failure; a row that cannot be read makes the manifest
fail. No row ever holds token ids.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, Unpack

from pydantic import ValidationError

from s3capture.effects import Steps
from s3capture.endpoint import Endpoint, SettingsKwargs
from s3capture.errors import CorruptObjectError
from s3capture.ids import validate_call_id, validate_rollout_id
from s3capture.keys import LedgerKeys
from s3capture.ledger_records import (
    UNCOMMITTED_CALL_REASON,
    CallRecord,
    CaptureLedgerCommit,
    ManifestFailure,
    RolloutManifest,
    manifest_row,
)
from s3capture.matching import LineageMatcher, NativeMatcher
from s3capture.protocol import ledger as steps
from s3capture.protocol import ledger_bodies as bodies
from s3capture.protocol.ledger_bodies import LedgerContents, LedgerRow
from s3capture.protocols import LineageMatch, LineageResolution, RolloutRemoval
from s3capture.records import ParentResolutionStatus
from s3capture.removal import remove_each
from s3capture.source import first_line
from s3capture.store.base import Store

_log = logging.getLogger("s3capture")
_T = TypeVar("_T")


@dataclass(slots=True)
class _Stamps:
    """What the matcher writes at ``record`` and reads at ``resolve``; a row has no entry to carry it.

    ``recorded_version`` is the fingerprint version that the committed record itself names, 0 for none.
    """

    model_call_id: str
    digest: str | None
    cum_len: int | None
    output_items: list[dict[str, Any]] = field(default_factory=list)
    continuation_fingerprint: str = ""
    continuation_context_len: int = 0
    continuation_context_digest: str = ""
    fingerprint_version: int | None = None
    parent_call_id: str | None = None
    prompt_is_delta: bool = False
    recorded_version: int = 0


class S3CaptureLedger(Endpoint):
    """A ``CaptureLedger`` on a bucket, with ``begin_call``, ``close_admissions`` and ``refuse_call``.

    Takes the settings of ``S3TokenSink``, and a ``matcher`` as ``S3LineageResolver`` does. Retiring or deleting a
    ledger leaves token records and staged data untouched. Every method raises ``InvalidIdError`` for a bad rollout id
    before anything is sent, and a ``StoreError`` when the store gave no usable answer in time.
    """

    def __init__(
        self, *, matcher: LineageMatcher | None = None, store: Store | None = None, **settings: Unpack[SettingsKwargs]
    ) -> None:
        super().__init__(store, dict(settings))
        self._matcher: LineageMatcher = NativeMatcher() if matcher is None else matcher

    def is_process_shared(self) -> bool:
        """True: every worker reads the same bucket."""
        return True

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Admit a call before it is generated.

        Raise ``CaptureAdmissionError`` when admissions are closed, ``RetiredAdmissionError`` (that and a
        ``RolloutRetiredError``) when the ledger is retired. Two round trips while admissions are open.
        """
        keys, call = self._keys(rollout_id), validate_call_id(model_call_id)
        origin = self._runtime.origin
        await self._do(
            "ledger.begin_call", f"begin of call {call!r}", keys, lambda: steps.begin_call(keys, call, origin())
        )

    async def close_admissions(self, rollout_id: str) -> dict[str, Any]:
        """Reject new calls from now on and return the manifest; admitted calls may still commit.

        The admitted calls are exactly those whose ``begin_call`` returned normally. Closing again returns the manifest
        as it is by then. Raise ``RolloutRetiredError`` when the ledger is retired.
        """
        keys, origin = self._keys(rollout_id), self._runtime.origin
        held = await self._do("ledger.close_admissions", "close", keys, lambda: steps.close_admissions(keys, origin()))
        return self._manifest_of(keys, held)

    async def record(self, commit: CaptureLedgerCommit) -> None:
        """Publish a completed call; when this returns, every worker's ``resolve`` and ``manifest`` sees it.

        The same row again is a no-op, another one for the same call a ``ConflictingPayloadError``. For a retired ledger
        the row is discarded with a warning. ``commit`` is our model or any of the same shape.
        """
        record: CallRecord = commit.record
        keys, call = self._keys(commit.rollout_id), validate_call_id(record.model_call_id)
        request = list(commit.request_items)
        stamps = _Stamps(call, record.cumulative_hash, record.cum_len, list(commit.response_items))
        self._matcher.stamp_continuation(stamps, request)
        value = {
            "record": record.model_dump(mode="json"),
            "staging_chain": list(commit.staging_chain),
            "fingerprint": stamps.continuation_fingerprint,
            "fingerprint_version": stamps.fingerprint_version,
            "context_len": stamps.continuation_context_len,
            "context_digest": stamps.continuation_context_digest,
        }
        row = bodies.row(keys, call, value, fingerprint=stamps.continuation_fingerprint, by=self._runtime.by)
        kept = await self._settle("ledger.record", keys, row)
        if not kept:
            self._discarded(keys, call, f"the row of staging key {record.staging_key!r}")

    async def record_failure(self, rollout_id: str, model_call_id: str, reason: str) -> None:
        """Record that a call did not complete; it poisons the manifest and never resolves as a parent.

        The same reason for the same call is one row. For a retired ledger the row is discarded with a warning.
        """
        keys, call = self._keys(rollout_id), validate_call_id(model_call_id)
        origin = self._runtime.origin
        kept = await self._do(
            "ledger.record_failure",
            f"failure of call {call!r}",
            keys,
            lambda: steps.record_failure(keys, call, str(reason), origin()),
        )
        if not kept:
            self._discarded(keys, call, f"the failure {reason!r}")

    async def refuse_call(self, rollout_id: str, model_call_id: str) -> None:
        """Settle an admitted call whose worker refused it before generating or staging anything.

        It stays in the bucket for the audit and is left out of the manifest. A call that has a row raises
        ``ConflictingPayloadError``.
        """
        keys, call = self._keys(rollout_id), validate_call_id(model_call_id)
        row = bodies.refusal(keys, call, self._runtime.origin())
        if not await self._settle("ledger.refuse_call", keys, row):
            self._discarded(keys, call, "the refusal")

    async def manifest(self, rollout_id: str) -> dict[str, Any]:
        """Return the ledger as plain wire data that validates as ``RolloutManifest``; two round trips.

        ``failures`` holds the recorded ones, rows without response id or chain digests, and admitted calls without an
        outcome (``request_finished_without_staged_coordinates``). Raise ``RolloutRetiredError`` when it is retired.
        """
        keys = self._keys(rollout_id)
        held = await self._do("ledger.manifest", "manifest", keys, lambda: steps.contents(keys))
        return self._manifest_of(keys, held)

    async def has_rows(self, rollout_id: str) -> bool:
        """Whether any committed or failed row exists; raise ``RolloutRetiredError`` when the ledger is retired."""
        keys = self._keys(rollout_id)
        return await self._do("ledger.has_rows", "has_rows", keys, lambda: steps.has_rows(keys))

    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        """Return the parent decision for a request, from committed rows; nothing is found in a retired ledger.

        A match carries no token ids: ``staging_chain``, ``prev_len`` and ``chain_hash`` say where they are.
        """
        keys, items = self._keys(rollout_id), list(request_items)
        fingerprint = self._matcher.fingerprint(items)
        if not fingerprint:
            return LineageResolution(ParentResolutionStatus.ROOT)
        rows = await self._do("ledger.resolve", "resolve", keys, lambda: steps.candidates(keys, fingerprint))
        by_call = {str(row["record"]["model_call_id"]): row for row in rows.values()}
        decision = self._matcher.decide([_stamps(row) for row in by_call.values()], items)
        if decision.model_call_id is None:
            return LineageResolution(ParentResolutionStatus.UNRESOLVED, reason=decision.reason)
        row = by_call[decision.model_call_id]
        record = row["record"]
        match = LineageMatch(
            model_call_id=decision.model_call_id,
            cumulative_token_ids=(),
            digest=str(record["cumulative_hash"] or ""),
            staging_chain=tuple(row["staging_chain"]),
            prev_len=int(record["cum_len"]),
            chain_hash=str(record["chain_hash"] or ""),
        )
        return LineageResolution(ParentResolutionStatus.RESOLVED, match)

    async def retire(self, rollout_ids: Sequence[str]) -> RolloutRemoval:
        """Remove ledgers and keep a fence; the whole batch is checked first, and retiring again is a no-op."""
        keep, origin = self.settings.retention == "keep", self._runtime.origin

        def one(rollout: str) -> Steps[steps.LedgerRemoval]:
            return steps.retire(self._runtime.keys.ledger(rollout), origin(), keep=keep)

        return await self._remove("ledger.retire", rollout_ids, one)

    async def delete(self, rollout_ids: Sequence[str]) -> RolloutRemoval:
        """Remove ledgers with their fences, so that the ids read as unused. Deleting again is a no-op."""
        return await self._remove(
            "ledger.delete", rollout_ids, lambda rollout: steps.delete(self._runtime.keys.ledger(rollout))
        )

    # -- shared -------------------------------------------------------------------------------------------

    def _keys(self, rollout_id: str) -> LedgerKeys:
        self._check_open()
        return self._runtime.keys.ledger(validate_rollout_id(rollout_id))

    async def _do(self, op: str, action: str, keys: LedgerKeys, make: Callable[[], Steps[_T]]) -> _T:
        what = f"{action} in the ledger of rollout {keys.rollout_id!r}, run {keys.of.run!r}"
        writes = op not in ("ledger.manifest", "ledger.has_rows", "ledger.resolve")
        return await self._result(self._runtime.submit(op, what, make, writes=writes), what)

    async def _settle(self, op: str, keys: LedgerKeys, row: LedgerRow) -> bool:
        return await self._do(op, f"{row.kind} of call {row.call!r}", keys, lambda: steps.settle_call(keys, row))

    async def _remove(
        self, op: str, rollout_ids: Sequence[str], one: Callable[[str], Steps[steps.LedgerRemoval]]
    ) -> RolloutRemoval:
        self._check_open()
        return await remove_each(self, op, rollout_ids, one)

    def _discarded(self, keys: LedgerKeys, call: str, what: str) -> None:
        _log.warning("run %s, rollout %r, call %r: the ledger is retired; %s was discarded",
                     keys.of.run, keys.rollout_id, call, what)  # fmt: skip

    def _manifest_of(self, keys: LedgerKeys, held: LedgerContents) -> dict[str, Any]:
        rows: list[CallRecord | ManifestFailure] = []
        for segment, row in held.rows.items():
            try:
                rows.append(manifest_row(row["record"]))
            except (ValidationError, KeyError, TypeError) as error:
                text = first_line(error) if isinstance(error, ValidationError) else repr(error)
                raise CorruptObjectError(f"{keys.call_at(segment)}: not a ledger row: {text}") from error
        failures = [row for row in rows if isinstance(row, ManifestFailure)]
        failures += [
            ManifestFailure(model_call_id=str(f["model_call_id"]), reason=str(f["reason"]))
            for f in sorted(held.failures, key=lambda f: (f["at"], f["model_call_id"], f["reason"]))
        ]
        failed = {failure.model_call_id for failure in failures}
        failures += [
            ManifestFailure(model_call_id=call, reason=UNCOMMITTED_CALL_REASON)
            for segment in sorted(held.unsettled)
            if (call := held.intents[segment]) not in failed
        ]
        records = sorted(
            (row for row in rows if isinstance(row, CallRecord)), key=lambda r: (r.cum_len, r.model_call_id)
        )
        return RolloutManifest(rollout_id=keys.rollout_id, records=records, failures=failures).model_dump(mode="json")


def _stamps(row: dict[str, Any]) -> _Stamps:
    record = row["record"]
    return _Stamps(
        model_call_id=str(record["model_call_id"]),
        digest=record.get("cumulative_hash"),
        cum_len=record.get("cum_len"),
        continuation_fingerprint=str(row["fingerprint"]),
        continuation_context_len=int(row["context_len"]),
        continuation_context_digest=str(row["context_digest"]),
        fingerprint_version=row["fingerprint_version"],
        recorded_version=int(record.get("fingerprint_version") or 0),
    )
