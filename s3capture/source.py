"""``S3TokenSource``: where a trajectory builder freezes, reads and retires records.

The rule of this module: a snapshot is what the freeze decision names, read back and checked; a record that is damaged
or that this version does not understand is an error, never a silent gap.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, Unpack

from pydantic import ValidationError

from s3capture.codec import StoredObject
from s3capture.effects import Steps
from s3capture.endpoint import Endpoint, SettingsKwargs
from s3capture.errors import CorruptObjectError
from s3capture.ids import validate_rollout_id
from s3capture.keys import RolloutKeys
from s3capture.protocol import bodies, freezing, retiring
from s3capture.protocol.freezing import FrozenRollout
from s3capture.protocol.retiring import Dropped, Removal
from s3capture.protocols import RolloutRemoval, TokenCaptureSnapshot
from s3capture.records import EngineRefusal, TokenEntry
from s3capture.removal import remove_each, report_left
from s3capture.store.base import Store

_log = logging.getLogger("s3capture")
_T = TypeVar("_T")


class S3TokenSource(Endpoint):
    """A ``TokenSource`` on a bucket. Takes the settings of ``S3TokenSink``; needs nothing but the bucket.

    Marks in the local spill of this machine are published before a freeze or a drop, so they count at once.
    """

    def __init__(self, *, store: Store | None = None, **settings: Unpack[SettingsKwargs]) -> None:
        super().__init__(store, dict(settings))

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """Freeze a rollout and return its one snapshot; an unknown rollout freezes empty.

        Four round trips the first time, however long the rollout (entries are read in parallel). Entries come in
        order of ``created_at``. ``incomplete`` is True when a begun call has no outcome, a call has conflicting
        payloads, or the rollout was marked. Raise ``TokenCaptureRetiredError`` when it is retired and
        ``CorruptObjectError`` when a record cannot be trusted.
        """
        return await self._freeze(rollout_id, self._snapshot)

    def _snapshot(self, keys: RolloutKeys, frozen: FrozenRollout) -> Any:
        """Build the snapshot, in the operation's thread: it takes a second for a long rollout."""
        return TokenCaptureSnapshot(
            rollout_id=keys.rollout_id,
            entries=tuple(sorted_by_time(read_entry(keys, s, o) for s, o in frozen.of_kind(bodies.ENTRY).items())),
            incomplete=frozen.incomplete,
            snapshot_id=frozen.manifest.snapshot_id,
            version=frozen.version,
            engine_refusals=tuple(
                sorted_by_time(read_refusal(keys, s, o) for s, o in frozen.of_kind(bodies.REFUSAL).items())
            ),
        )

    async def _freeze(self, rollout_id: str, build: Callable[[RolloutKeys, FrozenRollout], _T]) -> _T:
        self._check_open()
        runtime, rollout = self._runtime, validate_rollout_id(rollout_id)
        keys = runtime.rollout(rollout)
        what = self._what("freeze", rollout)

        def steps() -> Steps[_T]:
            return build(keys, (yield from freezing.freeze(keys, runtime.origin())))

        return await self._result(runtime.submit("freeze", what, steps, drains=rollout, patient=True), what)

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Retire exactly the snapshot that was consumed; False when anything changed since, or it was never frozen.

        Repeating a successful drop is True. With ``retention="keep"``, or where deleting is not allowed, nothing is
        deleted and the decision alone retires.
        """
        self._check_open()
        if not isinstance(snapshot_id, str) or isinstance(version, bool) or not isinstance(version, int):
            raise TypeError(
                f"drop of rollout {rollout_id!r} takes the snapshot_id (str) and version (int) of a snapshot, "
                f"got {snapshot_id!r} and {version!r}"
            )
        runtime, rollout = self._runtime, validate_rollout_id(rollout_id)
        keys, keep = runtime.rollout(rollout), self.settings.retention == "keep"
        what = self._what("drop", rollout)

        def steps() -> Steps[Dropped]:
            return retiring.drop(keys, snapshot_id, version, runtime.origin(), keep=keep)

        dropped = await self._result(runtime.submit("drop", what, steps, drains=rollout, patient=True), what)
        if dropped.left:
            report_left(self.settings.run, rollout, "drop", dropped.left)
        if not dropped.retired:
            _log.info("run %s, rollout %r: not dropped: %s", self.settings.run, rollout, dropped.why)
        return dropped.retired

    async def retire(self, rollout_ids: Sequence[str]) -> RolloutRemoval:
        """Retire rollouts whatever their state, and keep a fence; the whole batch is checked first.

        "removed" are those that had records, intents or a marker; order is kept, duplicates count once. Retiring
        again is a no-op.
        """
        self._check_open()
        runtime, keep = self._runtime, self.settings.retention == "keep"

        def one(rollout: str) -> Steps[Removal]:
            return retiring.retire(runtime.rollout(rollout), runtime.origin(), keep=keep)

        return await remove_each(self, "retire", rollout_ids, one)

    async def delete(self, rollout_ids: Sequence[str]) -> RolloutRemoval:
        """Remove rollouts with their fences, so that the ids read as unused. Deleting again is a no-op.

        Call it once nothing of those attempts can still write. Raise ``StoreAccessError`` when the bucket keeps
        something: the id is not fresh then.
        """
        self._check_open()
        rollout_keys = self._runtime.rollout
        return await remove_each(self, "delete", rollout_ids, lambda rollout: retiring.delete(rollout_keys(rollout)))

    def _what(self, action: str, rollout: str) -> str:
        return f"{action} of rollout {rollout!r}, run {self.settings.run!r}"


def read_entry(keys: RolloutKeys, segment: str, stored: StoredObject) -> TokenEntry:
    """Return the record of a stored outcome, or raise ``CorruptObjectError`` naming the call."""
    try:
        entry = TokenEntry.model_validate(stored.value())
    except (ValidationError, ValueError) as error:
        raise CorruptObjectError(
            f"call {segment!r} of rollout {keys.rollout_id!r}, run {keys.of.run!r}: "
            f"the stored record is not one this version understands: {first_line(error)}"
        ) from error
    if entry.rollout_id != keys.rollout_id or entry.model_call_id != stored.header.get("call"):
        raise CorruptObjectError(
            f"{keys.call_at(segment)}: the record says it is call {entry.model_call_id!r} of {entry.rollout_id!r}"
        )
    return entry


def read_refusal(keys: RolloutKeys, segment: str, stored: StoredObject) -> EngineRefusal:
    """Return the refusal of a stored outcome, or raise ``CorruptObjectError`` naming the call."""
    try:
        return EngineRefusal.model_validate(stored.value())
    except (ValidationError, ValueError) as error:
        raise CorruptObjectError(f"{keys.call_at(segment)}: not a refusal: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """The message of an error without the values that pydantic prints: they could be token arrays."""
    if isinstance(error, ValidationError):
        first = error.errors(include_input=False, include_url=False)[0]
        return f"{'.'.join(map(str, first['loc'])) or 'the record'}: {first['msg']}"
    return str(error).splitlines()[0]


def sorted_by_time(records: Any) -> list[Any]:
    """Records in order of ``created_at``; the call id breaks ties, so that equal snapshots look equal."""
    return sorted(records, key=lambda record: (record.created_at, record.model_call_id))
