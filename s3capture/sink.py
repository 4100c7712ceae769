"""``S3TokenSink``: what a model server writes through.

The rule of this module: when ``put`` returns, the record is in the bucket and visible to every worker's resolver; when
it raises, the caller knows why. A put whose caller was cancelled goes on, and if it then fails, the sink itself marks
the rollout: nobody else would.
"""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future
from typing import Unpack

from s3capture import codec
from s3capture.effects import Steps
from s3capture.endpoint import Endpoint, SettingsKwargs
from s3capture.errors import SpillError, TokenCaptureFrozenError, UnstorableValueError
from s3capture.ids import validate_call_id, validate_rollout_id
from s3capture.protocol import bodies, writing
from s3capture.records import EngineRefusal, ParentResolutionStatus, TokenEntry, check_entry
from s3capture.spill import SpilledMark
from s3capture.store.base import Store

_log = logging.getLogger("s3capture")

_SMALL_TOKENS = 4_000
"""Up to here a record is encoded where ``put`` is called: a thread would take longer."""


class S3TokenSink(Endpoint):
    """A ``TokenSink`` on a bucket, with the extensions ``begin_call`` and ``record_engine_refusal``.

    Takes the flat settings of ``s3capture.settings.Settings``, for example
    ``S3TokenSink(url="s3://bucket/prefix", run="run-7")``; credentials are boto3's own chain. The constructor does no
    I/O; a bad or unknown setting is a ``SettingsError``. ``store`` replaces the bucket in tests.

    Every method raises ``InvalidIdError`` for a bad rollout id before anything is sent, ``ClosedError`` after
    ``close``, ``TokenCaptureFrozenError`` / ``TokenCaptureRetiredError`` behind a fence, and a ``StoreError`` when the
    store gave no usable answer within ``op_timeout_s``.
    """

    def __init__(self, *, store: Store | None = None, **settings: Unpack[SettingsKwargs]) -> None:
        super().__init__(store, dict(settings))

    async def begin_call(self, rollout_id: str, model_call_id: str) -> None:
        """Durably announce that a call is about to be generated; without an outcome it masks the rollout.

        Two round trips. Beginning a call twice is fine.
        """
        self._check_open()
        runtime, rollout = self._runtime, validate_rollout_id(rollout_id)
        call = validate_call_id(model_call_id)
        keys = runtime.rollout(rollout)

        def steps() -> Steps[None]:
            if (yield from writing.begin_call(keys, call, runtime.origin())):
                runtime.grant(rollout, call)

        what = self._what("begin", rollout, call)
        await self._result(runtime.submit("begin_call", what, steps), what)

    async def put(self, entry: TokenEntry) -> None:
        """Store one record; one round trip for a call that this process began, two otherwise.

        ``entry`` is our ``TokenEntry`` or any pydantic model of that shape; do not change it until this returns.
        Repeating it with the same payload is a no-op. Raise ``UnstorableValueError`` (with the path) for a value that
        would not come back as itself, before anything is written, and ``ConflictingPayloadError`` when the call
        id was used with another payload.
        """
        self._check_open()
        rollout, call = validate_rollout_id(entry.rollout_id), validate_call_id(entry.model_call_id)
        # Encoding 100,000 tokens takes tens of milliseconds, for which a server's event loop must not stand still.
        small = entry_payload(entry) if _token_count(entry) <= _SMALL_TOKENS else None
        runtime = self._runtime
        keys, owned = runtime.rollout(rollout), runtime.use_grant(rollout, call)

        def steps() -> Steps[None]:
            payload = entry_payload(entry) if small is None else small
            self._check_size(payload, rollout, call)
            fingerprint = entry.continuation_fingerprint
            outcome = bodies.entry(keys, call, payload, fingerprint=fingerprint, by=runtime.by)
            return writing.put_outcome(keys, outcome, runtime.origin(), owned=owned)

        what = self._what("put", rollout, call)
        await self._finish_alone(rollout, call, runtime.submit("put", what, steps), what)

    async def record_engine_refusal(
        self,
        rollout_id: str,
        *,
        model_call_id: str,
        code: str | None,
        parent_call_id: str | None = None,
        parent_resolution: ParentResolutionStatus | str | None = None,
    ) -> None:
        """Durably record that the engine refused the call before generating; it settles the call's intent.

        The same code again is a no-op, another code (or an entry) a ``ConflictingPayloadError``. Two round trips.
        """
        self._check_open()
        rollout, call = validate_rollout_id(rollout_id), validate_call_id(model_call_id)
        runtime = self._runtime
        keys, origin = runtime.rollout(rollout), runtime.origin()
        record = EngineRefusal(
            model_call_id=call,
            code=code,
            created_at=origin.at,
            parent_call_id=parent_call_id,
            parent_resolution=None if parent_resolution is None else ParentResolutionStatus(parent_resolution),
        )
        runtime.use_grant(rollout, call)
        outcome = bodies.refusal(keys, call, record.model_dump(), by=runtime.by)
        what = self._what("refusal", rollout, call)
        future = runtime.submit(
            "record_engine_refusal", what, lambda: writing.put_outcome(keys, outcome, origin, owned=False)
        )
        await self._finish_alone(rollout, call, future, what)

    async def refuse_call(self, rollout_id: str, *, model_call_id: str, code: str | None) -> None:
        """``record_engine_refusal`` under the name that one public revision of the contract gives it."""
        await self.record_engine_refusal(rollout_id, model_call_id=model_call_id, code=code)

    async def mark_incomplete(self, rollout_id: str, model_call_id: str = "") -> None:
        """Durably record that a call was lost: every later snapshot is incomplete, with another version.

        Two round trips; when the store has not taken the mark within ``mark_timeout_s``, it is written to
        the local spill and published later. Succeeds after freeze; raises the retired error after retirement, and
        ``SpillError`` when the disk fails too.
        """
        self._check_open()
        rollout, call = validate_rollout_id(rollout_id), validate_call_id(model_call_id)
        # Never bounded by op_timeout_s: a mark ends by itself soon after mark_timeout_s, in the bucket or on disk.
        what = self._what("mark", rollout, call)
        await self._result(self._mark(rollout, call, "marked by the caller"), what)

    def _mark(self, rollout: str, call: str, reason: str) -> Future[None]:
        runtime = self._runtime
        keys, origin = runtime.rollout(rollout), runtime.origin()
        body = bodies.mark(keys, call, origin, reason)

        def spill(why: str) -> None:
            runtime.spilling.write(
                SpilledMark(
                    bucket=self.settings.bucket,
                    prefix=self.settings.prefix,
                    endpoint_url=self.settings.address,
                    run=self.settings.run,
                    rollout=rollout,
                    call=call,
                    mark_id=origin.nonce,
                    at=origin.at,
                    reason=f"{reason}; {why}",
                    by=origin.by,
                )
            )

        def steps() -> Steps[None]:
            return writing.mark_incomplete(keys, call, origin.nonce, body)

        try:
            return runtime.mark(self._what("mark", rollout, call), steps, spill)
        except RuntimeError:  # the interpreter is shutting down and takes no more work: the disk still does
            spill("the process was ending")
            done: Future[None] = Future()
            done.set_result(None)
            return done

    async def _finish_alone(self, rollout: str, call: str, future: Future[None], what: str) -> None:
        """Await a write; when the caller is cancelled, see it through and mark the rollout should it fail."""
        try:
            await self._result(future, what)
        except asyncio.CancelledError:
            self._see_through(rollout, call, future)
            raise

    def _see_through(self, rollout: str, call: str, future: Future[None]) -> None:
        # Under way until the verdict is: between the failure of the write and the start of its mark, a ``close`` that
        # waited for either alone would let the process end.
        verdict: Future[None] = self._track(Future())

        def judge(write: Future[None]) -> None:
            error = write.exception()
            if error is None or isinstance(error, TokenCaptureFrozenError):
                verdict.set_result(None)
                return
            _log.warning("run %s, rollout %r, call %r: a cancelled write failed: %s; marking the rollout",
                         self.settings.run, rollout, call, error)  # fmt: skip
            try:
                mark = self._mark(rollout, call, f"a cancelled write failed: {error}")
            except SpillError as lost:
                mark = Future()
                mark.set_exception(lost)
            mark.add_done_callback(report)

        def report(mark: Future[None]) -> None:
            error = mark.exception()
            if error is not None and not isinstance(error, TokenCaptureFrozenError):
                _log.error("run %s, rollout %r, call %r: the write failed and so did its mark: %s",
                           self.settings.run, rollout, call, error)  # fmt: skip
            verdict.set_result(None)

        future.add_done_callback(judge)

    def _check_size(self, payload: codec.Payload, rollout: str, call: str) -> None:
        if len(payload.data) > self.settings.max_object_bytes:
            raise UnstorableValueError(
                "the record",
                f"{len(payload.data)} bytes of JSON for call {call!r} of rollout {rollout!r}; "
                f"max_object_bytes is {self.settings.max_object_bytes}",
            )

    def _what(self, action: str, rollout: str, call: str) -> str:
        return f"{action} of call {call!r}, rollout {rollout!r}, run {self.settings.run!r}"


def _token_count(entry: TokenEntry) -> int:
    arrays = (entry.prompt_token_ids, entry.generation_token_ids)
    return sum(len(array) for array in arrays if isinstance(array, list))


def entry_payload(entry: TokenEntry) -> codec.Payload:
    """Return the canonical payload of a record, or raise ``UnstorableValueError`` with the path.

    The rules of the record are checked again: fields can be assigned after construction, and a record that no
    reader accepts must not be stored.
    """
    check_entry(entry)
    try:
        fields = entry.model_dump(mode="python", warnings=False)
    except (ValueError, RecursionError) as error:
        raise UnstorableValueError("the record", f"it cannot be dumped: {error}") from error
    return codec.canonical(fields)
