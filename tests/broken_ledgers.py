"""A small correct capture ledger in memory, and ledgers that are each broken in one way.

The rule of this module: as in ``broken_transports``: the contract and nothing of this project's protocol, errors of its
own that only share the contract's names, one small method overridden for each fault.
"""

from __future__ import annotations

# ruff: noqa: ARG002 - a variant takes whatever the method takes that it replaces
import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from s3capture.matching import NativeMatcher


class RolloutRetiredError(LookupError):
    """This ledger's own; the kit knows it by its name."""


class CaptureAdmissionError(ValueError):
    """This ledger's own; the kit knows it by its name."""


@dataclass
class Rows:
    commits: dict[str, Any] = field(default_factory=dict)
    failures: list[tuple[str, str]] = field(default_factory=list)
    intents: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    closed: bool = False

    @property
    def used(self) -> bool:
        return bool(self.commits or self.failures or self.intents or self.refused)


class Backend:
    """The correct one; ``Ledger`` is its client. Each method is atomic: it does not give way."""

    def __init__(self) -> None:
        self.rollouts: dict[str, Rows] = {}
        self.retired: set[str] = set()

    # -- rows ---------------------------------------------------------------------------------------------------

    async def record(self, commit: Any, ledger: Ledger) -> None:
        self.record_now(commit)

    def record_now(self, commit: Any) -> None:
        rows = self.writable(commit.rollout_id)
        if rows is None:
            return
        standing = rows.commits.setdefault(commit.record.model_call_id, commit)
        if self.identity(standing) != self.identity(commit):
            raise ValueError("conflicting rows for one call id")

    def identity(self, commit: Any) -> str:
        return json.dumps(commit.model_dump(mode="json"), sort_keys=True)

    def record_failure(self, rollout_id: str, call: str, reason: str) -> None:
        rows = self.writable(rollout_id)
        if rows is not None and (call, reason) not in rows.failures:
            rows.failures.append((call, reason))

    def writable(self, rollout_id: str) -> Rows | None:
        """The rows to write into; None when a late row is to be discarded."""
        self.check_id(rollout_id)
        return None if rollout_id in self.retired else self.rollouts.setdefault(rollout_id, Rows())

    def readable(self, rollout_id: str) -> Rows:
        self.check_id(rollout_id)
        if rollout_id in self.retired:
            raise RolloutRetiredError(rollout_id)
        return self.rollouts.get(rollout_id, Rows())

    def manifest(self, rollout_id: str) -> dict[str, Any]:
        rows = self.readable(rollout_id)
        whole = {call: commit for call, commit in rows.commits.items() if commit.record.response_id}
        broken = [(call, "ledger_row_missing_response_id") for call in rows.commits if call not in whole]
        failures = [*broken, *rows.failures, *self.unsettled(rows)]
        return {
            "rollout_id": rollout_id,
            "records": [commit.record.model_dump(mode="json") for commit in whole.values()],
            "failures": [{"model_call_id": call, "reason": reason} for call, reason in failures],
        }

    def unsettled(self, rows: Rows) -> list[tuple[str, str]]:
        settled = {*rows.commits, *rows.refused, *(call for call, _ in rows.failures)}
        return [(call, "request_finished_without_staged_coordinates") for call in rows.intents if call not in settled]

    def has_rows(self, rollout_id: str) -> bool:
        rows = self.readable(rollout_id)
        return bool(rows.commits or rows.failures)

    # -- lineage ------------------------------------------------------------------------------------------------

    def parents(self, rollout_id: str, ledger: Ledger) -> list[Any]:
        return [] if rollout_id in self.retired else list(self.rollouts.get(rollout_id, Rows()).commits.values())

    def choose(self, candidates: list[Any], items: list[dict[str, Any]]) -> str | None:
        return NativeMatcher().decide(candidates, items).model_call_id

    def match(self, commit: Any) -> Any:
        record = commit.record
        return SimpleNamespace(
            model_call_id=record.model_call_id,
            cumulative_token_ids=(),
            digest=record.cumulative_hash,
            staging_chain=tuple(commit.staging_chain),
            prev_len=record.cum_len,
            chain_hash=record.chain_hash,
        )

    # -- admissions ---------------------------------------------------------------------------------------------

    async def begin_call(self, rollout_id: str, call: str, ledger: Ledger) -> None:
        rows = self.admitting(rollout_id)
        if call not in rows.intents:
            rows.intents.append(call)

    def admitting(self, rollout_id: str) -> Rows:
        rows = self.writable(rollout_id)
        if rows is None or rows.closed:
            raise CaptureAdmissionError(rollout_id)
        return rows

    async def close_admissions(self, rollout_id: str, ledger: Ledger) -> dict[str, Any]:
        self.readable(rollout_id)
        self.rollouts.setdefault(rollout_id, Rows()).closed = True
        return self.manifest(rollout_id)

    def refuse_call(self, rollout_id: str, call: str) -> None:
        rows = self.writable(rollout_id)
        if rows is not None:
            rows.refused.add(call)

    # -- leaving ------------------------------------------------------------------------------------------------

    async def retire(self, rollout_ids: Sequence[str]) -> dict[str, list[str]]:
        return self.report({name: self.retire_one(name) for name in self.checked_batch(rollout_ids)})

    def retire_one(self, rollout_id: str) -> bool:
        self.retired.add(rollout_id)
        return self.rollouts.pop(rollout_id, Rows()).used

    def delete_one(self, rollout_id: str) -> bool:
        self.retired.discard(rollout_id)
        return self.rollouts.pop(rollout_id, Rows()).used

    def report(self, had: dict[str, bool]) -> dict[str, list[str]]:
        return {"removed": [n for n, used in had.items() if used], "absent": [n for n, used in had.items() if not used]}

    def check_id(self, rollout_id: str) -> None:
        if not re.fullmatch(r"[A-Za-z0-9._-]{1,200}", rollout_id) or rollout_id in (".", ".."):
            raise ValueError(f"invalid rollout id {rollout_id!r}")

    def checked_batch(self, rollout_ids: Sequence[str]) -> list[str]:
        if isinstance(rollout_ids, str):
            raise TypeError("a bare string is no batch")
        for rollout_id in rollout_ids:
            self.check_id(rollout_id)
        return list(dict.fromkeys(rollout_ids))


class PlainLedger:
    """A client without the admission extensions. It gives way before it acts."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    async def record(self, commit: Any) -> None:
        await asyncio.sleep(0)
        await self.backend.record(commit, self)  # type: ignore[arg-type]

    async def record_failure(self, rollout_id: str, model_call_id: str, reason: str) -> None:
        self.backend.record_failure(rollout_id, model_call_id, reason)

    async def manifest(self, rollout_id: str) -> dict[str, Any]:
        return self.backend.manifest(rollout_id)

    async def has_rows(self, rollout_id: str) -> bool:
        return self.backend.has_rows(rollout_id)

    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> Any:
        if not NativeMatcher().fingerprint(request_items):
            return SimpleNamespace(status="root", match=None, reason="")
        commits = {c.record.model_call_id: c for c in self.backend.parents(rollout_id, self)}  # type: ignore[arg-type]
        call = self.backend.choose([_candidate(commit) for commit in commits.values()], request_items)
        if call is None:
            return SimpleNamespace(status="unresolved", match=None, reason="no_match")
        return SimpleNamespace(status="resolved", match=self.backend.match(commits[call]), reason="")

    def is_process_shared(self) -> bool:
        return True

    async def retire(self, rollout_ids: Sequence[str]) -> dict[str, list[str]]:
        await asyncio.sleep(0)
        return await self.backend.retire(rollout_ids)

    async def delete(self, rollout_ids: Sequence[str]) -> dict[str, list[str]]:
        batch = self.backend.checked_batch(rollout_ids)
        return self.backend.report({name: self.backend.delete_one(name) for name in batch})

    async def close(self) -> None:
        """Nothing to release."""


class Ledger(PlainLedger):
    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        await asyncio.sleep(0)
        await self.backend.begin_call(rollout_id, model_call_id, self)

    async def close_admissions(self, rollout_id: str) -> dict[str, Any]:
        await asyncio.sleep(0)
        return await self.backend.close_admissions(rollout_id, self)

    async def refuse_call(self, rollout_id: str, model_call_id: str) -> None:
        self.backend.refuse_call(rollout_id, model_call_id)


def _candidate(commit: Any) -> Any:
    stamped = SimpleNamespace(
        model_call_id=commit.record.model_call_id,
        digest=commit.record.cumulative_hash,
        cum_len=commit.record.cum_len,
        output_items=commit.response_items,
    )
    return NativeMatcher().stamp_continuation(stamped, commit.request_items)


class SilentAboutOpenCalls(Backend):
    """Correct as well: an admitted call without an outcome is not in the manifest, which the contract leaves open."""

    def unsettled(self, rows: Rows) -> list[tuple[str, str]]:
        return []


# -- broken: rows ---------------------------------------------------------------------------------------------


class RowsStayLocal(Backend):
    """A row is published by the next row."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[Any] = []

    def record_now(self, commit: Any) -> None:
        self.queue.append(commit)
        if len(self.queue) > 1:
            super().record_now(self.queue.pop(0))


class UnknownRaises(Backend):
    """The manifest of a rollout that nobody wrote is an error."""

    def readable(self, rollout_id: str) -> Rows:
        rows = super().readable(rollout_id)
        if rollout_id not in self.rollouts:
            raise LookupError(rollout_id)
        return rows


class RefusesRepetition(Backend):
    """The same row again is an error."""

    def record_now(self, commit: Any) -> None:
        rows = self.writable(commit.rollout_id)
        if rows is not None and commit.record.model_call_id in rows.commits:
            raise ValueError("conflicting: exists")
        super().record_now(commit)


class ComparesLineageOnly(Backend):
    """Rows are the same when their tokens are, whatever else differs."""

    def identity(self, commit: Any) -> str:
        return f"{commit.record.digest} {commit.record.chain_hash} {commit.record.cumulative_hash}"


class ReplacesRows(Backend):
    """A conflicting row replaces the first one, and the writer is told of a conflict."""

    def record_now(self, commit: Any) -> None:
        try:
            super().record_now(commit)
        except ValueError:
            self.rollouts[commit.rollout_id].commits[commit.record.model_call_id] = commit
            raise


class RepeatsFailures(Backend):
    """The same failure twice is two rows."""

    def record_failure(self, rollout_id: str, call: str, reason: str) -> None:
        rows = self.writable(rollout_id)
        if rows is not None:
            rows.failures.append((call, reason))


class FailuresHideRows(Backend):
    """A call that also failed has no committed row."""

    def manifest(self, rollout_id: str) -> dict[str, Any]:
        found = super().manifest(rollout_id)
        failed = {failure["model_call_id"] for failure in found["failures"]}
        return {**found, "records": [row for row in found["records"] if row["model_call_id"] not in failed]}


class CrashesOnOldRows(Backend):
    """A row without response id makes the manifest raise."""

    def manifest(self, rollout_id: str) -> dict[str, Any]:
        if any(not commit.record.response_id for commit in self.readable(rollout_id).commits.values()):
            raise KeyError("response_id")
        return super().manifest(rollout_id)


class LosesTheChain(Backend):
    """A match names the parent's own staging key alone."""

    def match(self, commit: Any) -> Any:
        return SimpleNamespace(**{**vars(super().match(commit)), "staging_chain": (commit.record.staging_key,)})


class FailuresAreParents(Backend):
    """Where no row matches, a failed call of the rollout is taken for the parent."""

    def parents(self, rollout_id: str, ledger: Ledger) -> list[Any]:
        failures = self.rollouts.get(rollout_id, Rows()).failures
        return [*super().parents(rollout_id, ledger), *(self.made_up(call) for call, _ in failures)]

    def made_up(self, call: str) -> Any:
        record = SimpleNamespace(model_call_id=call, cumulative_hash=None, cum_len=0, chain_hash="")
        return SimpleNamespace(record=record, request_items=[], response_items=[], staging_chain=())

    def choose(self, candidates: list[Any], items: list[dict[str, Any]]) -> str | None:
        failed = next((one.model_call_id for one in candidates if one.digest is None), None)
        return super().choose(candidates, items) or failed


class Guesses(Backend):
    """Among several candidates the first one is taken."""

    def choose(self, candidates: list[Any], items: list[dict[str, Any]]) -> str | None:
        chosen = (super(Guesses, self).choose([one], items) for one in candidates)
        return next((call for call in chosen if call is not None), None)


# -- broken: leaving ------------------------------------------------------------------------------------------


class RetireKeepsRows(Backend):
    """A retired ledger can still be read."""

    def retire_one(self, rollout_id: str) -> bool:
        return self.rollouts.get(rollout_id, Rows()).used


class RetiredReadsEmpty(Backend):
    """A retired ledger reads as one without calls."""

    def readable(self, rollout_id: str) -> Rows:
        self.check_id(rollout_id)
        return self.rollouts.get(rollout_id, Rows())


class LateRowsStartAnew(Backend):
    """A row behind the retirement starts a new ledger."""

    def writable(self, rollout_id: str) -> Rows | None:
        self.retired.discard(rollout_id)
        return super().writable(rollout_id)


class LateRowsRaise(Backend):
    """A row behind the retirement is an error."""

    def writable(self, rollout_id: str) -> Rows | None:
        rows = super().writable(rollout_id)
        if rows is None:
            raise RolloutRetiredError(rollout_id)
        return rows


class RetiredResolves(Backend):
    """A resolver still finds the rows of a retired ledger."""

    def __init__(self) -> None:
        super().__init__()
        self.remembered: dict[str, list[Any]] = {}

    def retire_one(self, rollout_id: str) -> bool:
        self.remembered.setdefault(rollout_id, list(self.rollouts.get(rollout_id, Rows()).commits.values()))
        return super().retire_one(rollout_id)

    def parents(self, rollout_id: str, ledger: Ledger) -> list[Any]:
        return super().parents(rollout_id, ledger) or self.remembered.get(rollout_id, [])


class DeleteKeepsTheFence(Backend):
    """After delete the id is still fenced."""

    def delete_one(self, rollout_id: str) -> bool:
        return self.rollouts.pop(rollout_id, Rows()).used


class ReportsInAnyOrder(Backend):
    """The report is sorted by name."""

    def report(self, had: dict[str, bool]) -> dict[str, list[str]]:
        return {name: sorted(ids) for name, ids in super().report(had).items()}


class BatchPartlyApplied(Backend):
    """A batch is checked id by id, as it is worked off."""

    async def retire(self, rollout_ids: Sequence[str]) -> dict[str, list[str]]:
        if isinstance(rollout_ids, str):
            raise TypeError("a bare string is no batch")
        return self.report({name: self.retire_one(self.checked_batch([name])[0]) for name in rollout_ids})


class TakesAnyId(Backend):
    """Rollout ids are not checked."""

    def check_id(self, rollout_id: str) -> None:
        """Anything goes."""


# -- broken: admissions ---------------------------------------------------------------------------------------


class ClosedForOneInstance(Backend):
    """Only the instance that closed the admissions knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.closers: dict[str, Ledger] = {}

    async def begin_call(self, rollout_id: str, call: str, ledger: Ledger) -> None:
        rows = self.rollouts.setdefault(rollout_id, Rows())
        rows.closed = self.closers.get(rollout_id) is ledger
        await super().begin_call(rollout_id, call, ledger)

    async def close_admissions(self, rollout_id: str, ledger: Ledger) -> dict[str, Any]:
        self.closers[rollout_id] = ledger
        return await super().close_admissions(rollout_id, ledger)


class ClosingFreezes(Backend):
    """Behind a close no row can be written."""

    def record_now(self, commit: Any) -> None:
        rows = self.rollouts.get(commit.rollout_id)
        if rows is not None and rows.closed:
            raise CaptureAdmissionError("closed")
        super().record_now(commit)


class AdmitsTheRetired(Backend):
    """A retired ledger admits calls."""

    def admitting(self, rollout_id: str) -> Rows:
        return Rows() if rollout_id in self.retired else super().admitting(rollout_id)


class RefusedIsAFailure(Backend):
    """A refused call stands in the manifest."""

    def refuse_call(self, rollout_id: str, call: str) -> None:
        self.record_failure(rollout_id, call, "engine_refused_request")


class CloseIsNotAtomic(Backend):
    """A close reads the manifest first and shuts a moment later."""

    async def close_admissions(self, rollout_id: str, ledger: Ledger) -> dict[str, Any]:
        if self.rollouts.get(rollout_id, Rows()).closed:
            return await super().close_admissions(rollout_id, ledger)
        manifest = self.manifest(rollout_id)
        await asyncio.sleep(0)
        await super().close_admissions(rollout_id, ledger)
        return manifest


class BeginIsNotAtomic(Backend):
    """A begin looks whether the admissions are closed, and writes its intent a moment later."""

    async def begin_call(self, rollout_id: str, call: str, ledger: Ledger) -> None:
        rows = self.admitting(rollout_id)
        await asyncio.sleep(0)
        rows.intents.append(call)


class LooksThenRecords(Backend):
    """A row looks whether its call is free, and is written a moment later."""

    async def record(self, commit: Any, ledger: Ledger) -> None:
        rows = self.writable(commit.rollout_id)
        free = rows is not None and commit.record.model_call_id not in rows.commits
        await asyncio.sleep(0)
        if free and rows is not None:
            rows.commits[commit.record.model_call_id] = commit
        else:
            await super().record(commit, ledger)


class RecordsBehindRetirement(Backend):
    """A row looks for the fence first and is written a moment later, into a ledger that it makes anew."""

    async def record(self, commit: Any, ledger: Ledger) -> None:
        late = self.writable(commit.rollout_id) is None
        await asyncio.sleep(0)
        if not late:
            self.retired.discard(commit.rollout_id)
        await super().record(commit, ledger)


CORRECT: tuple[type[Backend], ...] = (Backend, SilentAboutOpenCalls)

BROKEN: tuple[tuple[type[Backend], str], ...] = (
    (RowsStayLocal, "record_then_manifest_visibility"),
    (UnknownRaises, "empty_ledger"),
    (RefusesRepetition, "idempotent_rerecord"),
    (ComparesLineageOnly, "conflicting_rerecord"),
    (ReplacesRows, "conflicting_rerecord"),
    (RepeatsFailures, "failure_rows"),
    (FailuresHideRows, "failure_rows"),
    (CrashesOnOldRows, "incomplete_row_is_a_failure"),
    (LosesTheChain, "lineage"),
    (FailuresAreParents, "no_doubtful_parents"),
    (Guesses, "no_doubtful_parents"),
    (RetireKeepsRows, "retirement"),
    (RetiredReadsEmpty, "retirement"),
    (LateRowsStartAnew, "retirement"),
    (LateRowsRaise, "retirement"),
    (RetiredResolves, "retirement"),
    (DeleteKeepsTheFence, "delete_clears_retirement"),
    (ReportsInAnyOrder, "removal_report"),
    (BatchPartlyApplied, "id_and_batch_validation"),
    (TakesAnyId, "id_and_batch_validation"),
    (ClosedForOneInstance, "admission_boundary"),
    (ClosingFreezes, "admission_boundary"),
    (AdmitsTheRetired, "retired_admissions"),
    (RefusedIsAFailure, "refused_call_is_excluded"),
    (CloseIsNotAtomic, "racing_admissions"),
    (BeginIsNotAtomic, "racing_admissions"),
    (LooksThenRecords, "racing_records"),
    (RecordsBehindRetirement, "racing_retirement"),
)
"""Each broken ledger and the check that must catch it."""
