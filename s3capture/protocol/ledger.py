"""The capture ledger on the same pattern: rows about calls whose tokens a framework stages elsewhere.

The rule of this module: admission is announced (an intent), surveyed and decided. ``close_admissions`` announces, LISTs
the intents and creates the decision that names them; a ``begin_call`` that meets the announcement finishes the decision
and is admitted exactly if its intent is in it. Writes are never frozen: an admitted call may still commit. A writer
creates its row first and looks for retirement second, so a row that was acknowledged is deleted with the ledger,
or stands in it, and never in between.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from s3capture.effects import Absent, Create, Created, Delete, Deleted, Effect, Get, List, Steps
from s3capture.errors import (
    CaptureAdmissionError,
    ConflictingPayloadError,
    CorruptObjectError,
    RetiredAdmissionError,
    RolloutRetiredError,
)
from s3capture.keys import Kind, LedgerKeys, escape, parse
from s3capture.protocol import ledger_bodies as bodies
from s3capture.protocol.bodies import Origin
from s3capture.protocol.ledger_bodies import REFUSAL, ROW, LedgerContents, LedgerRow, LedgerSurvey, survey
from s3capture.protocol.steps import PATIENCE, contradiction, create_or_adopt, found, listed


def _retired(keys: LedgerKeys, what: str) -> RolloutRetiredError:
    return RolloutRetiredError(
        f"{what}: the ledger of rollout {keys.rollout_id!r} of run {keys.of.run!r} is retired; read it before retiring"
    )


def _look(keys: LedgerKeys) -> Steps[LedgerSurvey]:
    (answer,) = yield (List(keys.base),)
    return survey(keys, listed(answer))


# -- admissions -----------------------------------------------------------------------------------------------


def begin_call(keys: LedgerKeys, call: str, origin: Origin) -> Steps[None]:
    """Admit a call, or raise ``CaptureAdmissionError`` when admissions are closed or the ledger is retired."""
    yield (Create(keys.intent(call), bodies.intent(keys, call, origin)),)
    (closing,) = yield (Get(keys.closing),)
    if isinstance(closing, Absent):
        return
    what = f"begin of call {call!r}"
    admitted = yield from _settle(keys, origin)
    if admitted is None:
        raise RetiredAdmissionError(
            f"{what}: the ledger of rollout {keys.rollout_id!r} of run {keys.of.run!r} is retired; "
            "start no generation. If the rollout should be new, its id or run was used before: "
            "take a fresh run or an attempt id"
        )
    if escape(call) not in admitted:
        raise CaptureAdmissionError(
            f"{what}: admissions of rollout {keys.rollout_id!r} of run {keys.of.run!r} are closed; start no generation"
        )


def close_admissions(keys: LedgerKeys, origin: Origin) -> Steps[LedgerContents]:
    """Close the admissions, or read the decision that stands, and return the ledger; raise when it is retired."""
    yield (Create(keys.closing, bodies.fence("ledger-closing", keys, origin, why="close")),)
    if (yield from _settle(keys, origin)) is None:
        raise _retired(keys, "close of admissions")
    return (yield from contents(keys, "close of admissions"))


def _settle(keys: LedgerKeys, origin: Origin) -> Steps[frozenset[str] | None]:
    """The admitted calls as decided, deciding now if nobody has; None when the ledger is retired.

    Call it only after ``closing`` was seen: the LIST made here is what makes the decision sound.
    """
    seen = yield from _look(keys)
    if seen.retired:
        return None
    body = bodies.fence("ledger-closed", keys, origin, admitted=sorted(seen.intents))
    standing = body
    if seen.closed:
        (answer,) = yield (Get(keys.closed),)
        stored = found(answer)
        if stored is None:
            raise contradiction(keys.closed)
        standing = stored
    else:
        standing = yield from create_or_adopt(keys.closed, body)
    return bodies.read_closed(keys, standing)


# -- rows -----------------------------------------------------------------------------------------------------


def settle_call(keys: LedgerKeys, outcome: LedgerRow) -> Steps[bool]:
    """Create the outcome of a call; False when the ledger is retired and the row was discarded.

    The same outcome again is a no-op; another one raises ``ConflictingPayloadError``.
    """
    key = keys.call(outcome.call)
    effects: list[Effect] = [Create(key, outcome.body)]
    if outcome.fingerprint:
        effects.append(Create(keys.lineage_call(outcome.fingerprint, outcome.call), b""))
    for _ in range(PATIENCE):
        answers = yield tuple(effects)
        if isinstance(answers[0], Created):
            break
        got, gone = yield (Get(key), Get(keys.retired))
        if found(gone) is not None:
            return False
        body = found(got)
        if body is None:
            continue
        stored = bodies.read(keys, key, body, ROW, REFUSAL)
        if stored.kind == outcome.kind and stored.header.get("identity") == outcome.identity:
            break
        raise ConflictingPayloadError(
            f"record of call {outcome.call!r} of rollout {keys.rollout_id!r}, run {keys.of.run!r}: conflicting "
            f"{outcome.kind} for one call id: stored {stored.kind} {stored.digest}, refused {outcome.identity}"
        )
    else:
        raise contradiction(key)
    (gone,) = yield (Get(keys.retired),)
    return isinstance(gone, Absent)


def record_failure(keys: LedgerKeys, call: str, reason: str, origin: Origin) -> Steps[bool]:
    """Create a failure row; False when the ledger is retired and the row was discarded."""
    yield (Create(*bodies.failure(keys, call, reason, origin)),)
    (gone,) = yield (Get(keys.retired),)
    return isinstance(gone, Absent)


def contents(keys: LedgerKeys, what: str = "manifest") -> Steps[LedgerContents]:
    """Read the whole ledger; raise ``RolloutRetiredError`` when it is retired. Two round trips."""
    seen = yield from _look(keys)
    if seen.retired:
        raise _retired(keys, what)
    calls, failures, intents = sorted(seen.outcomes), sorted(seen.failures), sorted(seen.intents - seen.outcomes.keys())
    wanted = [keys.call_at(segment) for segment in calls]
    wanted += [keys.failure_at(segment, digest) for segment, digest in failures]
    wanted += [keys.intent_at(segment) for segment in intents]
    wanted += [keys.closed] if seen.closed else []
    answers = (yield tuple(Get(key) for key in wanted)) if wanted else ()
    read = {key: found(answer) for key, answer in zip(wanted, answers, strict=True)}
    if any(body is None for body in read.values()):
        if (yield from _look(keys)).retired:
            raise _retired(keys, what)
        lost = next(key for key, body in read.items() if body is None)
        raise CorruptObjectError(f"{lost}: listed in the ledger and no longer in the bucket")
    stored = {s: bodies.read(keys, keys.call_at(s), read[keys.call_at(s)] or b"", ROW, REFUSAL) for s in calls}
    admitted = bodies.read_closed(keys, read[keys.closed] or b"") if seen.closed else None
    names = {s: _call_of(keys, keys.intent_at(s), read) for s in intents}
    return LedgerContents(
        rows={s: o.value() for s, o in stored.items() if o.kind == ROW},
        refused={s: o.value() for s, o in stored.items() if o.kind == REFUSAL},
        failures=tuple(
            bodies.read(keys, key, read[key] or b"", "ledger-failure").value()
            for key in (keys.failure_at(segment, digest) for segment, digest in failures)
        ),
        # An intent behind the closing decision was never admitted, so nothing can come of it.
        unsettled=frozenset(intents if admitted is None else admitted.intersection(intents)),
        intents=names,
        admitted=admitted,
    )


def _call_of(keys: LedgerKeys, key: str, read: Mapping[str, bytes | None]) -> str:
    return str(bodies.read(keys, key, read[key] or b"", "ledger-intent").header.get("call"))


def has_rows(keys: LedgerKeys) -> Steps[bool]:
    """Whether any committed or failed row exists; raise ``RolloutRetiredError`` when the ledger is retired."""
    seen = yield from _look(keys)
    if seen.retired:
        raise _retired(keys, "has_rows")
    if seen.failures:
        return True
    # A refusal is no row; it is small, so the largest outcome is looked at first, and rarely another.
    by_size = sorted(seen.outcomes, key=lambda segment: -seen.outcomes[segment].size)
    for segments in filter(None, (by_size[:1], by_size[1:])):
        answers = yield tuple(Get(keys.call_at(segment)) for segment in segments)
        for segment, answer in zip(segments, answers, strict=True):
            body = found(answer)
            if body is not None and bodies.read(keys, keys.call_at(segment), body, ROW, REFUSAL).kind == ROW:
                return True
    return False


def candidates(keys: LedgerKeys, fingerprint: str) -> Steps[dict[str, Any]]:
    """The committed rows with one continuation fingerprint, by segment; none when the ledger is retired."""
    answers = yield (List(keys.lineage(fingerprint)), Get(keys.retired))
    if found(answers[1]) is not None:
        return {}
    parsed = (parse(keys.of.root, info.key) for info in listed(answers[0]))
    segments = sorted({p.call for p in parsed if p is not None and p.kind is Kind.LEDGER_LINEAGE})
    if not segments:
        return {}
    read = yield tuple(Get(keys.call_at(segment)) for segment in segments)
    rows = {}
    for segment, answer in zip(segments, read, strict=True):
        body = found(answer)
        if body is not None:
            stored = bodies.read(keys, keys.call_at(segment), body, ROW, REFUSAL)
            if stored.kind == ROW:
                rows[segment] = stored.value()
    return rows


# -- leaving --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LedgerRemoval:
    """``had_records``: whether there was anything but fences. ``left``: keys not deleted, with reasons."""

    had_records: bool
    left: tuple[tuple[str, str], ...] = ()


def retire(keys: LedgerKeys, origin: Origin, *, keep: bool) -> Steps[LedgerRemoval]:
    """Retire the ledger and delete its rows; the fences stay. Repeating it finishes what a dead process left."""
    yield (Create(keys.closing, bodies.fence("ledger-closing", keys, origin, why="retire")),)
    yield (Create(keys.retired, bodies.fence("ledger-retired", keys, origin, keep=keep)),)
    seen = yield from _look(keys)
    records = [info.key for info in seen.objects if not info.key.startswith(keys.fences)]
    left = () if keep else (yield from _delete(records))
    return LedgerRemoval(bool(records), left)


def delete(keys: LedgerKeys) -> Steps[LedgerRemoval]:
    """Remove the ledger with its fences, so that the id reads as unused; records first, the announcement last."""
    seen = yield from _look(keys)
    fences = {info.key for info in seen.objects if info.key.startswith(keys.fences)}
    records = [info.key for info in seen.objects if info.key not in fences]
    left: tuple[tuple[str, str], ...] = ()
    for stage in (records, sorted(fences & {keys.closed}), sorted(fences - {keys.closed, keys.closing}),
                  sorted(fences & {keys.closing})):  # fmt: skip
        left = yield from _delete(stage)
        if left:
            break
    return LedgerRemoval(bool(records), left)


def _delete(doomed: list[str]) -> Steps[tuple[tuple[str, str], ...]]:
    if not doomed:
        return ()
    (answer,) = yield (Delete(tuple(doomed)),)
    return answer.failed if isinstance(answer, Deleted) else ()
