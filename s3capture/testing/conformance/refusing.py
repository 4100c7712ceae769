"""Checks of the extension ``record_engine_refusal``: a call that was refused before it generated anything.

The rule of this module: a refusal is an outcome like a record. It settles its intent, stands unchanged, and behind a
fence it must not touch what was delivered.
"""

from __future__ import annotations

from typing import Any

from s3capture.testing.conformance.bench import Case, exactly, refusals_of, refuse, state
from s3capture.testing.conformance.verdicts import Check, check, expect, refusal_of, said


async def refusal_resolution(case: Case) -> None:
    """A refusal settles the intent of its call: the rollout is complete, and the snapshot reports it in order."""
    sink, has_begin = case.sink(), hasattr(case.sink(), "begin_call")
    await sink.put(case.entry())
    parent = {"parent_call_id": "call-1", "parent_resolution": "resolved"}
    named = hasattr(sink, "record_engine_refusal")
    for call, code in (("call-3", "too_long"), ("call-2", None)):
        if has_begin:
            await sink.begin_call(case.rollout, call)
        await refuse(sink, case.rollout, call, code, **(parent if named else {}))
    snapshot = await case.freeze()
    expect(not snapshot.incomplete, "a refused call made the rollout incomplete")
    expect([entry.model_call_id for entry in snapshot.entries] == ["call-1"], "a refused call reads as an entry")
    refusals, reported = refusals_of(snapshot), _reported(snapshot)
    if refusals is None:
        return  # an installed snapshot class that has no field for them
    expect(reported == [("call-3", "too_long"), ("call-2", None)], f"the snapshot reports {reported}")
    if named and hasattr(refusals[0], "parent_call_id"):
        seen = (refusals[0].parent_call_id, str(refusals[0].parent_resolution))
        expect(seen == ("call-1", "resolved"), f"the request-time parent decision came back as {seen}")


async def refusal_idempotency(case: Case) -> None:
    """The same call refused with the same code, by any sink, is a no-op and is reported once."""
    sink = case.sink()
    for again in (sink, sink, case.sink()):
        error = await refusal_of(refuse(again, case.rollout, "call-1", "too_long"))
        expect(error is None, f"the same refusal again: {said(error)}")
    snapshot = await case.freeze()
    expect(not snapshot.incomplete, "a repeated refusal made the rollout incomplete")
    expect(_reported(snapshot) in (None, [("call-1", "too_long")]), f"the snapshot reports {_reported(snapshot)}")


async def conflicting_refusal(case: Case) -> None:
    """The same call refused with another code is a ValueError; the first code stands, or the rollout is incomplete."""
    for number, code in enumerate(("overloaded", None)):
        one = case.another(number)
        await refuse(one.sink(), one.rollout, "call-1", "too_long")
        error = await refusal_of(refuse(one.sink(), one.rollout, "call-1", code))
        conflict = error is not None and case.kinds.is_conflict(error)
        expect(conflict, f"the same call with code {code!r}: {said(error)}, not a ValueError")
        snapshot = await one.freeze()
        fine = (None, [("call-1", "too_long")], *([[]] if snapshot.incomplete else []))
        expect(_reported(snapshot) in fine, f"the snapshot reports {_reported(snapshot)}")


def _reported(snapshot: Any) -> list[tuple[str, Any]] | None:
    refusals = refusals_of(snapshot)
    return None if refusals is None else [(refusal.model_call_id, refusal.code) for refusal in refusals]


async def late_refusal(case: Case) -> None:
    """A refusal behind the freeze raises the frozen error or changes nothing, and never stales the drop."""
    sink = case.sink()
    await sink.put(case.entry())
    await refuse(sink, case.rollout, "refused", "too_long")
    if hasattr(sink, "begin_call"):
        await sink.begin_call(case.rollout, "open")
    before = await case.freeze()
    for call, code in (("open", "too_long"), ("new", "too_long"), ("refused", "too_long"), ("refused", "overloaded")):
        for writer in (sink, case.sink()):
            error = await refusal_of(refuse(writer, case.rollout, call, code))
            conflict = error is not None and call == "refused" and case.kinds.is_conflict(error)
            fine = error is None or case.kinds.is_frozen(error) or conflict
            expect(fine, f"refusal of {call!r}: {said(error)}, not the frozen error")
    expect(state(await case.freeze()) == state(before), "a late refusal changed the frozen snapshot")
    dropped = await case.source().drop(case.rollout, **exactly(before))
    expect(dropped is True, f"a late refusal staled the snapshot: drop returned {dropped!r}")


async def refusal_after_retirement(case: Case) -> None:
    """A refusal behind a retirement, or a drop, raises the retired error."""
    retired, dropped = case.another("retired"), case.another("dropped")
    for one in (retired, dropped):
        sink = one.sink()
        if hasattr(sink, "begin_call"):
            await sink.begin_call(one.rollout, "call-1")
        if one is retired:
            await one.source().retire([one.rollout])
        else:
            await one.source().drop(one.rollout, **exactly(await one.freeze()))
        for writer, call in ((sink, "call-1"), (one.sink(), "call-2")):
            error = await refusal_of(refuse(writer, one.rollout, call, "too_long"))
            expect(error is not None and case.kinds.is_retired(error), f"{said(error)}, not the retired error")


CHECKS: tuple[Check[Case], ...] = (
    check(refusal_resolution, "refusals"),
    check(refusal_idempotency, "refusals"),
    check(conflicting_refusal, "refusals"),
    check(late_refusal, "refusals"),
    check(refusal_after_retirement, "refusals"),
)
