"""The contract as types: what a sink, a source, a resolver and a ledger promise, and what passes between them.

The rule of this module: it restates the reference page of ``nemo_gym.models.token_capture.protocols`` and
adds nothing to it, so code may be typed against either. A method added to a Protocol here would make
conforming objects fail ``isinstance``; one that is dropped would let incomplete ones pass.

Found by ``getattr``, and therefore in no Protocol, are a sink's optional extensions:

``async begin_call(rollout_id, model_call_id)``
    Durably record, before generation, that the call is about to happen. An intent without an outcome makes the
    frozen rollout incomplete, so the loss of the last record cannot go unseen. Repeating it is fine.
``async record_engine_refusal(rollout_id, *, model_call_id, code, parent_call_id=None, parent_resolution=None)``
    Durably record that the engine refused the call before it generated anything: that resolves the intent, and
    the snapshot reports it in ``engine_refusals``. The same code again is a no-op, another one a ``ValueError``.
    After a freeze it raises ``TokenCaptureFrozenError`` or changes nothing; after retirement it raises
    ``TokenCaptureRetiredError``. One public revision names it ``refuse_call`` and passes no parent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict, runtime_checkable

from s3capture.errors import (
    CaptureAdmissionError,
    RolloutRetiredError,
    TokenCaptureFrozenError,
    TokenCaptureRetiredError,
    UnrepresentableHistoryError,
)
from s3capture.ledger_records import CaptureLedgerCommit
from s3capture.records import EngineRefusal, ParentResolutionStatus, TokenEntry

__all__ = [
    "AdmissionLedger",
    "CaptureAdmissionError",
    "CaptureLedger",
    "LineageMatch",
    "LineageResolution",
    "LineageResolver",
    "RolloutRemoval",
    "RolloutRetiredError",
    "TokenCaptureFrozenError",
    "TokenCaptureRetiredError",
    "TokenCaptureSnapshot",
    "TokenSink",
    "TokenSource",
    "UnrepresentableHistoryError",
    "install_lineage_store",
    "install_token_sink",
    "install_token_source",
    "installed_lineage_store",
    "installed_token_sink",
    "installed_token_source",
]


@dataclass(frozen=True, slots=True)
class TokenCaptureSnapshot:
    """One rollout as its freeze decided it.

    ``entries`` holds each call once, in no meaningful order. ``incomplete`` tells the consumer to mask the
    rollout. ``snapshot_id`` and ``version`` are what ``drop`` compares. ``engine_refusals`` is in the order the
    refusals were recorded, and empty for a sink without that extension.
    """

    rollout_id: str
    entries: tuple[TokenEntry, ...]
    incomplete: bool
    snapshot_id: str
    version: int
    engine_refusals: tuple[EngineRefusal, ...] = ()


@dataclass(frozen=True, slots=True)
class LineageMatch:
    """The one verified parent of a request.

    ``cumulative_token_ids`` are the parent's prompt and generation in full, and ``digest`` their digest; a
    ledger, which knows no tokens, leaves them empty and fills ``staging_chain`` (staging keys, root first),
    ``prev_len`` (the parent's length in tokens) and ``chain_hash`` instead.
    """

    model_call_id: str
    cumulative_token_ids: tuple[int, ...]
    digest: str
    staging_chain: tuple[str, ...] = ()
    prev_len: int = 0
    chain_hash: str = ""


@dataclass(frozen=True, slots=True)
class LineageResolution:
    """The parent decision of one request: a match exactly when ``status`` is RESOLVED, else ``ValueError``."""

    status: ParentResolutionStatus
    match: LineageMatch | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        if (self.status == ParentResolutionStatus.RESOLVED) != (self.match is not None):
            has = "no match" if self.match is None else f"a match ({self.match.model_call_id!r})"
            raise ValueError(f"a lineage resolution has a match exactly when it is resolved: {self.status!s} has {has}")


class RolloutRemoval(TypedDict):
    """What ``retire`` or ``delete`` did: ids that had records, intents or a marker, and ids that had none.

    Duplicates count once and the order asked for is kept. ``ledger_records.RolloutRemoval`` validates it.
    """

    removed: list[str]
    absent: list[str]


@runtime_checkable
class TokenSink(Protocol):
    """Where captured records go. See the module for what a sink may offer besides."""

    async def put(self, entry: TokenEntry) -> None:
        """Make ``entry`` durable, and visible to every worker's resolver, before returning.

        The same bytes again are a no-op; another payload under the same call id is a ``ValueError``. After the
        rollout was frozen or retired it raises ``TokenCaptureFrozenError`` or ``TokenCaptureRetiredError``:
        then the caller drops the record. On any other failure the caller marks the rollout incomplete; a capture
        error never fails the model call.
        """
        ...

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """Durably record that a call was not captured, so that the rollout is masked and not trained on.

        It works after a freeze, where it changes the version that ``drop`` compares, and should outlive an
        outage that fails ``put``: both failing together is how a loss goes unnoticed.
        """
        ...

    async def close(self) -> None:
        """Release resources; there is nothing to flush. Idempotent."""
        ...


@runtime_checkable
class TokenSource(Protocol):
    """Where a trajectory builder freezes, reads and retires rollouts."""

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Close the rollout to writes and return what it holds; the same answer every time.

        An unknown rollout freezes empty, a retired one raises ``TokenCaptureRetiredError``. A write that races
        with the freeze is either in the snapshot, or refused, or raises the version so that ``drop`` fails.
        """
        ...

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Retire exactly the snapshot that was consumed; False, and nothing removed, if it changed since.

        Repeating a successful drop is True. An unknown or unfrozen rollout is False.
        """
        ...

    async def retire(self, rollout_ids: Sequence[str]) -> RolloutRemoval:
        """Remove rollouts whatever their state and keep a fence, so that late writes are refused as retired.

        For masked, failed and abandoned rollouts. The whole batch is checked first; repeating is a no-op.
        """
        ...

    async def delete(self, rollout_ids: Sequence[str]) -> RolloutRemoval:
        """Remove rollouts and their fences: the ids read as unused again.

        Only safe once nothing of those attempts can still write. Repeating is a no-op.
        """
        ...

    async def close(self) -> None:
        """Release resources. Idempotent."""
        ...


@runtime_checkable
class LineageResolver(Protocol):
    """Finds the recorded call that a request continues, among the entries that a sink committed."""

    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        """Decide root, resolved or unresolved for ``request_items``, the harness's items unmodified.

        Every entry whose ``put`` returned anywhere is seen, its recorded context is verified, and a call id with
        conflicting payloads counts as no candidate. Never a guess: UNRESOLVED is always safe. Raises
        ``UnrepresentableHistoryError`` for items that no fingerprint can cover.
        """
        ...

    def is_process_shared(self) -> bool:
        """Whether separate worker processes see each other's committed entries."""
        ...

    async def close(self) -> None:
        """Release resources. Idempotent."""
        ...


@runtime_checkable
class CaptureLedger(LineageResolver, Protocol):
    """Keeps token-free rows of calls whose tokens are staged elsewhere; that staged data it never touches."""

    async def record(self, commit: CaptureLedgerCommit) -> None:
        """Publish a committed call; every worker can read it when this returns.

        The same payload again is a no-op, any differing field a ``ValueError``. For a retired rollout the row
        is discarded with a warning.
        """
        ...

    async def record_failure(self, rollout_id: str, model_call_id: str, reason: str) -> None:
        """Record that a call was not captured: never a parent, always in the manifest, once for each reason."""
        ...

    async def manifest(self, rollout_id: str) -> dict[str, Any]:
        """Return the ledger as the JSON of a ``ledger_records.RolloutManifest``.

        Raises ``RolloutRetiredError`` for a retired rollout, whose empty manifest would look like no calls.
        """
        ...

    async def has_rows(self, rollout_id: str) -> bool:
        """Whether any row, committed or failed, exists; raises ``RolloutRetiredError`` when retired."""
        ...

    async def retire(self, rollout_ids: Sequence[str]) -> RolloutRemoval:
        """Remove ledgers and keep a fence: later rows of those rollouts are discarded. Repeating is a no-op."""
        ...

    async def delete(self, rollout_ids: Sequence[str]) -> RolloutRemoval:
        """Remove ledgers and fences: the ids read as unused again. Repeating is a no-op."""
        ...


@runtime_checkable
class AdmissionLedger(CaptureLedger, Protocol):
    """A ledger with the extensions that framework-owned capture needs: one atomic boundary for admissions."""

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Admit a call before it is generated; raises ``CaptureAdmissionError`` once admissions are closed."""
        ...

    async def close_admissions(self, rollout_id: str) -> dict[str, Any]:
        """Refuse new calls from now on and return the manifest; calls admitted before may still commit."""
        ...

    async def refuse_call(self, rollout_id: str, model_call_id: str) -> None:
        """Settle an intent that the worker acknowledged as refused before it generated or staged anything.

        The call stays in the audit ledger and out of the training manifest. An error status alone is no such
        acknowledgement.
        """
        ...


@dataclass(slots=True)
class _Installed:
    sink: TokenSink | None = None
    source: TokenSource | None = None
    lineage_store: LineageResolver | None = None


_INSTALLED = _Installed()
_REQUIRED_OF_A_SINK = ("put", "mark_incomplete", "close")


def install_token_sink(sink: TokenSink | None) -> None:
    """Make ``sink`` this process's default, or clear it with None.

    Raises ``TypeError`` naming the missing methods, and keeps the one installed before: a sink that cannot mark
    a rollout incomplete would hide losses.
    """
    if sink is not None:
        missing = [name for name in _REQUIRED_OF_A_SINK if not callable(getattr(sink, name, None))]
        if missing:
            raise TypeError(f"a token sink needs the methods {', '.join(missing)}, which {type(sink).__name__} lacks")
    _INSTALLED.sink = sink


def installed_token_sink() -> TokenSink | None:
    """Return this process's default sink, or None."""
    return _INSTALLED.sink


def install_token_source(source: TokenSource | None) -> None:
    """Make ``source`` this process's own, or clear it with None. The caller stays its owner and closes it."""
    _INSTALLED.source = source


def installed_token_source() -> TokenSource | None:
    """Return this process's source, or None."""
    return _INSTALLED.source


def install_lineage_store(store: LineageResolver | None) -> None:
    """Make ``store`` this process's request-time lineage store, or clear it with None."""
    _INSTALLED.lineage_store = store


def installed_lineage_store() -> LineageResolver | None:
    """Return this process's request-time lineage store, or None."""
    return _INSTALLED.lineage_store
