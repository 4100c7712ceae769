"""The endpoints as nemo_gym's configuration names them, e.g. ``sink: s3capture.gym:GymTokenSink``.

The rule of this module: take and return the installed package's own types and errors, and make its behaviour, old or
new, keep the promises of the contract. Everything else is the base endpoints'.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from dataclasses import fields, is_dataclass
from typing import Any, Unpack

from s3capture.endpoint import SettingsKwargs
from s3capture.errors import TokenCaptureFrozenError
from s3capture.gym.errors import translated
from s3capture.gym.matcher import GymLedgerMatcher, GymMatcher
from s3capture.gym.upstream import Upstream, upstream
from s3capture.keys import RolloutKeys
from s3capture.ledger import S3CaptureLedger
from s3capture.lineage import S3LineageResolver
from s3capture.protocol.freezing import FrozenRollout
from s3capture.protocols import LineageResolution
from s3capture.records import EngineRefusal, ParentResolutionStatus, TokenEntry
from s3capture.sink import S3TokenSink
from s3capture.source import S3TokenSource
from s3capture.store.base import Store

_log = logging.getLogger("s3capture")

_REMEMBERED = 100_000


class GymTokenSink(S3TokenSink):
    """A ``TokenSink`` that takes nemo_gym's own ``TokenEntry``.

    nemo-gym 0.7.0 answers every failed put with a mark for that call, also one that failed because the rollout is
    frozen; such a mark would spoil the snapshot already delivered. Where the installed package is of that kind, the
    mark that follows a frozen put of the same call is dropped and logged; with newer code nothing changes.
    """

    def __init__(self, *, store: Store | None = None, **settings: Unpack[SettingsKwargs]) -> None:
        super().__init__(store=store, **settings)
        self._gym = upstream()
        self._late: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._late_lock = threading.Lock()

    def _renew_after_fork(self) -> None:
        super()._renew_after_fork()
        self._late_lock = threading.Lock()

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """See ``S3TokenSink.begin_call``."""
        with translated(self._gym):
            await super().begin_call(rollout_id, model_call_id)

    async def put(self, entry: TokenEntry) -> None:
        """See ``S3TokenSink.put``; ``entry`` is nemo_gym's ``TokenEntry`` or ours."""
        with translated(self._gym):
            try:
                await super().put(entry)
            except TokenCaptureFrozenError:
                self._remember(str(entry.rollout_id), str(entry.model_call_id))
                raise

    async def record_engine_refusal(
        self,
        rollout_id: str,
        *,
        model_call_id: str,
        code: str | None,
        parent_call_id: str | None = None,
        parent_resolution: ParentResolutionStatus | str | None = None,
    ) -> None:
        """See ``S3TokenSink.record_engine_refusal``; ``parent_resolution`` is nemo_gym's status or ours."""
        with translated(self._gym):
            await super().record_engine_refusal(
                rollout_id,
                model_call_id=model_call_id,
                code=code,
                parent_call_id=parent_call_id,
                parent_resolution=parent_resolution,
            )

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """See ``S3TokenSink.mark_incomplete``, and the class for the one mark that is dropped."""
        if self._is_late(rollout_id, model_call_id):
            _log.info("run %s, rollout %r, call %r: the put came after the freeze; its mark is dropped",
                      self.settings.run, rollout_id, model_call_id)  # fmt: skip
            return
        with translated(self._gym):
            await super().mark_incomplete(rollout_id, model_call_id)

    def _remember(self, rollout_id: str, call: str) -> None:
        if not self._gym.marks_after_a_frozen_put:
            return
        with self._late_lock:
            self._late[(rollout_id, call)] = None
            while len(self._late) > _REMEMBERED:
                self._late.popitem(last=False)

    def _is_late(self, rollout_id: str, call: str) -> bool:
        with self._late_lock:
            return self._late.pop((rollout_id, call), False) is None


class GymTokenSource(S3TokenSource):
    """A ``TokenSource`` that returns nemo_gym's own snapshot and records. See also ``install_source``."""

    def __init__(self, *, store: Store | None = None, **settings: Unpack[SettingsKwargs]) -> None:
        super().__init__(store=store, **settings)
        self._gym = upstream()

    async def freeze(self, rollout_id: str) -> Any:
        """See ``S3TokenSource.freeze``; returns the installed package's ``TokenCaptureSnapshot``."""
        with translated(self._gym):
            return await super().freeze(rollout_id)

    def _snapshot(self, keys: RolloutKeys, frozen: FrozenRollout) -> Any:
        ours = super()._snapshot(keys, frozen)
        values: dict[str, Any] = {
            "rollout_id": ours.rollout_id,
            "entries": tuple(_entry(self._gym, entry) for entry in ours.entries),
            "incomplete": ours.incomplete,
            "snapshot_id": ours.snapshot_id,
            "version": ours.version,
        }
        if self._gym.refusals_field is not None:
            values[self._gym.refusals_field] = tuple(
                _refusal(self._gym, ours.rollout_id, refusal) for refusal in ours.engine_refusals
            )
        return self._gym.snapshot(**values)


class GymLineageResolver(S3LineageResolver):
    """A ``LineageResolver`` with nemo_gym's own matcher and hashing, returning its own resolutions."""

    def __init__(self, *, store: Store | None = None, **settings: Unpack[SettingsKwargs]) -> None:
        self._gym = upstream()
        super().__init__(matcher=GymMatcher(), store=store, **settings)

    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> Any:
        """See ``S3LineageResolver.resolve``; returns the installed package's ``LineageResolution``."""
        return _resolution(self._gym, await super().resolve(rollout_id, request_items))


class GymCaptureLedger(S3CaptureLedger):
    """A ``CaptureLedger`` that takes nemo_gym's own commits and embeds its matcher."""

    def __init__(self, *, store: Store | None = None, **settings: Unpack[SettingsKwargs]) -> None:
        self._gym = upstream()
        super().__init__(matcher=GymLedgerMatcher(), store=store, **settings)

    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> Any:
        """See ``S3CaptureLedger.resolve``; returns the installed package's ``LineageResolution``."""
        return _resolution(self._gym, await super().resolve(rollout_id, request_items))

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """See ``S3CaptureLedger.begin_call``."""
        with translated(self._gym):
            await super().begin_call(rollout_id, model_call_id)

    async def close_admissions(self, rollout_id: str) -> dict[str, Any]:
        """See ``S3CaptureLedger.close_admissions``."""
        with translated(self._gym):
            return await super().close_admissions(rollout_id)

    async def manifest(self, rollout_id: str) -> dict[str, Any]:
        """See ``S3CaptureLedger.manifest``."""
        with translated(self._gym):
            return await super().manifest(rollout_id)

    async def has_rows(self, rollout_id: str) -> bool:
        """See ``S3CaptureLedger.has_rows``."""
        with translated(self._gym):
            return await super().has_rows(rollout_id)


def _entry(gym: Upstream, entry: TokenEntry) -> Any:
    return gym.token_entry.model_validate(entry.model_dump(mode="python"))


def _refusal(gym: Upstream, rollout_id: str, refusal: EngineRefusal) -> Any:
    if gym.refusal_record is None:
        return refusal
    status = refusal.parent_resolution
    values = {
        "rollout_id": rollout_id,
        **refusal.model_dump(mode="python"),
        # Its readers compare with their own enumeration, perhaps by identity.
        "parent_resolution": None if status is None else gym.parent_status(status.value),
    }
    record: Any = gym.refusal_record
    known = {field.name for field in fields(record)} if is_dataclass(record) else set(record.model_fields)
    return record(**{name: value for name, value in values.items() if name in known})


def _resolution(gym: Upstream, resolution: LineageResolution) -> Any:
    status = gym.parent_status(resolution.status.value)
    match = resolution.match
    if match is None:
        return gym.lineage_resolution(status, reason=resolution.reason)
    known = {field.name for field in fields(gym.lineage_match)}
    values = {field.name: getattr(match, field.name) for field in fields(match) if field.name in known}
    return gym.lineage_resolution(status, match=gym.lineage_match(**values), reason=resolution.reason)
