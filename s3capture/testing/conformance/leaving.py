"""Checks of the source: freezing, and the three ways to leave (drop, retire, delete).

The rule of this module: the contract's fence may be relaxed, so a late write may return; what it may never do is leave
the consumed snapshot retirable. Retirement has no such latitude: behind it every write raises the retired error.
"""

from __future__ import annotations

from typing import Any

from s3capture.testing.conformance.bench import Case, by_call, exactly, refuse, state, wire
from s3capture.testing.conformance.verdicts import Check, check, expect, refusal_of, refusals_of_all, said


async def freeze_idempotency(case: Case) -> None:
    """Freezing again, by any source, gives the same snapshot: id, version, entries and verdict."""
    sink = case.sink()
    await sink.put(case.entry())
    await sink.put(case.entry("call-2", prompt=(21,)))
    first = await case.freeze()
    for _ in range(2):
        expect(state(await case.freeze()) == state(first), "a repeated freeze gave another snapshot")


async def unknown_rollout_freezes_empty(case: Case) -> None:
    """A rollout that nobody wrote freezes empty and complete, with a snapshot id."""
    snapshot = await case.freeze()
    expect(not snapshot.entries and not snapshot.incomplete, "it is not empty and complete")
    expect(snapshot.snapshot_id and isinstance(snapshot.version, int), "it has no snapshot id or no version")
    expect(state(await case.freeze()) == state(snapshot), "a repeated freeze gave another snapshot")


async def post_freeze_write_safety(case: Case) -> None:
    """A put behind the freeze fails; should it return, the consumed snapshot can no longer be dropped."""
    sink = case.sink()
    await sink.put(case.entry())
    snapshot = await case.freeze()
    for number, writer in enumerate((sink, case.sink())):
        error = await refusal_of(writer.put(case.entry(f"late-{number}", prompt=(21,))))
        if error is None:
            dropped = await case.source().drop(case.rollout, **exactly(snapshot))
            expect(
                dropped is False, f"a put behind the freeze returned, and drop of that snapshot returned {dropped!r}"
            )
            return
    expect(state(await case.freeze()) == state(snapshot), "a put that raised behind the freeze changed the snapshot")
    dropped = await case.source().drop(case.rollout, **exactly(snapshot))
    expect(dropped is True, f"puts that raised staled the snapshot: drop returned {dropped!r}")


async def late_conflict(case: Case) -> None:
    """Another payload behind the freeze raises, or makes another version; the frozen record stays."""
    sink, entry = case.sink(), case.entry()
    await sink.put(entry)
    before = await case.freeze()
    error = await refusal_of(sink.put(case.other(entry)))
    fine = error is None or case.kinds.is_frozen(error) or case.kinds.is_conflict(error)
    expect(fine, f"{said(error)}, which is neither the frozen error nor a ValueError")
    after = await case.freeze()
    expect(by_call(after) == {"call-1": wire(entry)} or after.version != before.version, "the frozen record changed")
    if error is None:
        expect(after.version != before.version and after.incomplete, "a late conflict was taken and changed nothing")
    if after.version == before.version:
        expect(state(after) == state(before), "the snapshot changed and kept its version")


async def repeated_put_behind_freeze(case: Case) -> None:
    """The same bytes of a frozen record again change nothing, whether they are taken or refused as frozen."""
    sink, entry = case.sink(), case.entry()
    await sink.put(entry)
    before = await case.freeze()
    error = await refusal_of(sink.put(entry))
    expect(error is None or case.kinds.is_frozen(error), f"{said(error)}, which is not the frozen error")
    expect(state(await case.freeze()) == state(before), "a repeated put changed the frozen snapshot")


async def typed_errors(case: Case) -> None:
    """Late puts raise the frozen error and not the retired one; after retirement the retired one, a frozen one too."""
    sink = case.sink()
    await sink.put(case.entry())
    await case.freeze()
    for call in ("late-1", "late-2"):
        error = await refusal_of(sink.put(case.entry(call, prompt=(21,))))
        if error is not None:
            expect(case.kinds.is_frozen(error), f"put behind the freeze: {said(error)}, not the frozen error")
            expect(not case.kinds.is_retired(error), "put behind the freeze raised the retired error")
    await case.source().retire([case.rollout])
    for writer in (sink, case.sink()):
        error = await refusal_of(writer.put(case.entry("late-3", prompt=(22,))))
        expect(error is not None, "a put behind the retirement returned")
        assert error is not None
        expect(case.kinds.is_retired(error), f"put behind the retirement: {said(error)}, not the retired error")
        expect(case.kinds.is_frozen(error), f"the retired error {type(error).__name__} is not a frozen error as well")


async def conditional_retirement(case: Case) -> None:
    """Drop of another version is False and loses nothing; drop of the exact snapshot is True."""
    await case.sink().put(case.entry())
    snapshot = await case.freeze()
    for version in (snapshot.version + 1, snapshot.version - 1):
        dropped = await case.source().drop(case.rollout, snapshot_id=snapshot.snapshot_id, version=version)
        expect(dropped is False, f"drop of a version that never was returned {dropped!r}")
    expect(state(await case.freeze()) == state(snapshot), "a failed drop changed the snapshot")
    dropped = await case.source().drop(case.rollout, **exactly(snapshot))
    expect(dropped is True, f"drop of the exact snapshot returned {dropped!r}")


async def drop_checks_the_snapshot_id(case: Case) -> None:
    """Drop with the right version and another snapshot id is False and loses nothing."""
    await case.sink().put(case.entry())
    snapshot = await case.freeze()
    for other in ("no-such-snapshot", ""):
        dropped = await case.source().drop(case.rollout, snapshot_id=other, version=snapshot.version)
        expect(dropped is False, f"drop of snapshot id {other!r} returned {dropped!r}")
    expect(state(await case.freeze()) == state(snapshot), "a failed drop changed the snapshot")


async def drop_of_unknown_or_unfrozen(case: Case) -> None:
    """Drop of a rollout that is unknown or not frozen is False, and it can be written and frozen afterwards."""
    unknown, unfrozen = case.another("unknown"), case.another("unfrozen")
    for one in (unknown, unfrozen):
        if one is unfrozen:
            await one.sink().put(one.entry())
        dropped = await one.source().drop(one.rollout, snapshot_id="", version=1)
        expect(dropped is False, f"drop returned {dropped!r}")
        await one.sink().put(one.entry("call-2", prompt=(21,)))
        snapshot = await one.freeze()
        expect("call-2" in by_call(snapshot) and not snapshot.incomplete, "the rollout was spoilt by a failed drop")


async def repeated_drop(case: Case) -> None:
    """A drop that succeeded is True again; behind it records are gone, and puts and marks raise the frozen kind."""
    sink = case.sink()
    await sink.put(case.entry())
    snapshot = await case.freeze()
    for _ in range(2):
        dropped = await case.source().drop(case.rollout, **exactly(snapshot))
        expect(dropped is True, f"drop returned {dropped!r}")
    attempts = [
        ("put", sink.put(case.entry("late", prompt=(21,)))),
        ("put of the dropped record", sink.put(case.entry())),
        ("mark", sink.mark_incomplete(case.rollout, "lost")),
    ]
    for what, error in await refusals_of_all(attempts):
        expect(error is not None and case.kinds.is_frozen(error), f"{what} behind the drop: {said(error)}")
    await _gone(case)


async def version_follows_marks(case: Case) -> None:
    """Each mark makes another version; the newest one can be dropped, no earlier one."""
    sink = case.sink()
    await sink.put(case.entry())
    seen = [await case.freeze()]
    for number in range(2):
        await sink.mark_incomplete(case.rollout, f"lost-{number}")
        seen.append(await case.freeze())
    versions = [snapshot.version for snapshot in seen]
    expect(len(set(versions)) == len(versions), f"marks repeated a version: {versions}")
    for stale in seen[:-1]:
        dropped = await case.source().drop(case.rollout, **exactly(stale))
        expect(dropped is False, f"drop of a stale version returned {dropped!r}")
    dropped = await case.source().drop(case.rollout, **exactly(seen[-1]))
    expect(dropped is True, f"drop of the newest version returned {dropped!r}")


async def unconditional_retirement(case: Case) -> None:
    """Retire works in any state: every later write raises the retired error, and a freeze is empty or raises it."""
    for number, prepare in enumerate(("open", "frozen", "incomplete")):
        one = case.another(number)
        sink = one.sink()
        await sink.put(one.entry())
        if prepare != "open":
            await one.freeze()
        if prepare == "incomplete":
            await sink.mark_incomplete(one.rollout)
        report = await one.source().retire([one.rollout])
        expect(list(report["removed"]) == [one.rollout], f"{prepare}: retire reported {dict(report)}")
        for writer in (sink, one.sink()):
            await _expect_retired(one, writer, prepare)
        await one.source().retire([one.rollout])
        await _expect_retired(one, sink, f"{prepare}, retired twice")
        await _gone(one)


async def retirement_of_unknown(case: Case) -> None:
    """Retiring a rollout that nobody wrote reports it absent and fences it all the same."""
    report = await case.source().retire([case.rollout])
    expect((list(report["removed"]), list(report["absent"])) == ([], [case.rollout]), f"it reported {dict(report)}")
    await _expect_retired(case, case.sink(), "unknown")


async def removal_report(case: Case) -> None:
    """Retire and delete report removed and absent in the order asked, duplicates once; no ids is fine."""
    names = [case.another(letter) for letter in "dbeac"]
    for one in names[:3]:
        await one.sink().put(one.entry())
    marked = names[3]
    await marked.sink().mark_incomplete(marked.rollout)
    ids = [one.rollout for one in names]
    for action in ("retire", "delete"):
        if action == "delete":
            ids = [f"{name}-again" for name in ids]
            for name in ids[:4]:
                await case.sink().put(case.entry(rollout=name))
        report = await getattr(case.source(), action)([*ids, ids[1], ids[4]])
        expect(list(report["removed"]) == ids[:4], f"{action}: removed is {report['removed']}, asked for {ids}")
        expect(list(report["absent"]) == ids[4:], f"{action}: absent is {report['absent']}")
        again = await getattr(case.source(), action)(ids)
        expect(sorted([*again["removed"], *again["absent"]]) == sorted(ids), f"{action} again lost an id")
        report = await getattr(case.source(), action)([])
        expect((list(report["removed"]), list(report["absent"])) == ([], []), f"{action} of nothing: {dict(report)}")


async def delete_clears_retirement(case: Case) -> None:
    """After delete the id reads as unused: it can be written and frozen anew, and holds nothing old."""
    for number, how in enumerate(("retired", "dropped", "open")):
        one = case.another(number)
        await one.sink().put(one.entry())
        if how == "retired":
            await one.source().retire([one.rollout])
        if how == "dropped":
            await one.source().drop(one.rollout, **exactly(await one.freeze()))
        await one.source().delete([one.rollout])
        again = await one.source().delete([one.rollout])
        expect(list(again["absent"]) == [one.rollout], f"{how}: deleting again reported {dict(again)}")
        fresh = one.entry(prompt=(31,))
        error = await refusal_of(one.sink().put(fresh))
        expect(error is None, f"{how}: put after delete: {said(error)}")
        snapshot = await one.freeze()
        expect(by_call(snapshot) == {"call-1": wire(fresh)}, f"{how}: the id holds something old")
        expect(not snapshot.incomplete, f"{how}: the new rollout is incomplete")


async def batch_validation(case: Case) -> None:
    """A bare string is a TypeError; a batch with one invalid id is a ValueError and changes nothing."""
    entry = case.entry()
    await case.sink().put(entry)
    for action in ("retire", "delete"):
        error = await refusal_of(getattr(case.source(), action)(case.rollout))
        expect(isinstance(error, TypeError), f"{action} of a bare string: {said(error)}, not a TypeError")
        for bad in ("..", "with space", "x" * 300):
            error = await refusal_of(getattr(case.source(), action)([case.rollout, bad]))
            expect(isinstance(error, ValueError), f"{action} of a batch with an invalid id: {said(error)}")
    error = await refusal_of(case.sink().put(case.entry("call-2", prompt=(21,))))
    expect(error is None, f"a refused batch fenced a rollout: {said(error)}")
    expect(by_call(await case.freeze()).get("call-1") == wire(entry), "a refused batch removed a record")


async def _expect_retired(case: Case, sink: Any, state_of: str) -> None:
    attempts = [
        ("put", sink.put(case.entry("late", prompt=(21,)))),
        ("put of the retired record", sink.put(case.entry())),
        ("mark_incomplete", sink.mark_incomplete(case.rollout, "lost")),
    ]
    if hasattr(sink, "begin_call"):
        attempts.append(("begin_call", sink.begin_call(case.rollout, "late")))
    if hasattr(sink, "record_engine_refusal") or hasattr(sink, "refuse_call"):
        attempts.append(("record_engine_refusal", refuse(sink, case.rollout, "refused", "x")))
    for what, error in await refusals_of_all(attempts):
        retired = error is not None and case.kinds.is_retired(error)
        expect(retired, f"{state_of}: {what} behind the retirement: {said(error)}, not the retired error")


async def _gone(case: Case) -> None:
    """A retired rollout freezes empty or raises the retired error."""
    try:
        snapshot = await case.source().freeze(case.rollout)
    except Exception as error:  # noqa: BLE001 - judged here
        expect(case.kinds.is_retired(error), f"freeze of a retired rollout: {said(error)}, not the retired error")
    else:
        expect(not snapshot.entries, "a retired rollout still holds records")


CHECKS: tuple[Check[Case], ...] = (
    check(freeze_idempotency),
    check(unknown_rollout_freezes_empty),
    check(post_freeze_write_safety),
    check(late_conflict),
    check(repeated_put_behind_freeze),
    check(typed_errors),
    check(conditional_retirement),
    check(drop_checks_the_snapshot_id),
    check(drop_of_unknown_or_unfrozen),
    check(repeated_drop),
    check(version_follows_marks),
    check(unconditional_retirement),
    check(retirement_of_unknown),
    check(removal_report),
    check(delete_clears_retirement),
    check(batch_validation),
)
