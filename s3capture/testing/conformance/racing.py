"""Checks of what happens at once: several fresh clients, one rollout, rounds in which another one goes first.

The rule of this module: a race is judged by its sum, never by who won, and the rounds are bounded. A transport that is
driven over a mock server proves nothing here: skip these checks with ``races=False`` there.
"""

from __future__ import annotations

import asyncio
from typing import Any

from s3capture.testing.conformance.bench import Case, by_call, exactly, state, wire
from s3capture.testing.conformance.verdicts import Check, check, expect, refusal_of, said

ROUNDS = 6
WRITERS = 6
RIVALS = 3
"""Writers of one and the same call: contention on one key is slow on real servers, where losers wait for seconds."""


async def racing_puts(case: Case) -> None:
    """Of several payloads put at once for one call one wins and the others are told, or the rollout is incomplete."""
    for number in range(ROUNDS):
        one = case.another(number)
        entries = [one.entry(generation=(100 + writer,), text=f"Answer {writer}.") for writer in range(RIVALS)]
        errors = await asyncio.gather(*(refusal_of(one.sink().put(entry)) for entry in entries))
        wrong = [error for error in errors if error is not None and not case.kinds.is_conflict(error)]
        expect(not wrong, f"a loser was told otherwise: {said(wrong[0]) if wrong else ''}, not a ValueError")
        winners = [wire(entry) for entry, error in zip(entries, errors, strict=True) if error is None]
        expect(winners, "every put raised, so no payload stands")
        snapshot = await one.freeze()
        expect(len(winners) == 1 or snapshot.incomplete, f"{len(winners)} payloads of one call were acknowledged")
        if len(winners) == 1:
            standing = by_call(snapshot).get("call-1", winners[0])
            expect(standing == winners[0], "the payload that stands is not the one that was acknowledged")
            expect("call-1" in by_call(snapshot) or snapshot.incomplete, "the acknowledged payload is not there")


async def racing_equal_puts(case: Case) -> None:
    """The same bytes put at once by several sinks are one record, and every put returns."""
    for number in range(ROUNDS):
        one = case.another(number)
        entry = one.entry()
        errors = await asyncio.gather(*(refusal_of(one.sink().put(entry)) for _ in range(RIVALS)))
        raised = [error for error in errors if error is not None]
        expect(not raised, f"an equal put: {said(raised[0]) if raised else ''}")
        snapshot = await one.freeze()
        expect(by_call(snapshot) == {"call-1": wire(entry)} and not snapshot.incomplete, "equal puts left a trace")


async def racing_freeze(case: Case) -> None:
    """Every put that was acknowledged beside a freeze is in the snapshot, or has made that snapshot undroppable."""
    for number in range(ROUNDS):
        one = case.another(number)
        sinks = [one.sink() for _ in range(WRITERS)]
        begun = [hasattr(sink, "begin_call") and writer % 2 == 0 for writer, sink in enumerate(sinks)]
        for writer, sink in enumerate(sinks):
            if begun[writer]:
                await sink.begin_call(one.rollout, f"call-{writer}")
        puts: list[Any] = [
            refusal_of(sink.put(one.entry(f"call-{writer}", prompt=(writer,)))) for writer, sink in enumerate(sinks)
        ]
        puts.insert(number % (WRITERS + 1), one.freeze())
        results = await asyncio.gather(*puts)
        snapshot = results.pop(number % (WRITERS + 1))
        await _judge_race(one, snapshot, results, begun)


async def _judge_race(one: Case, snapshot: Any, errors: list[Exception | None], begun: list[bool]) -> None:
    frozen, now = by_call(snapshot), await one.freeze()
    late = 0
    for writer, error in enumerate(errors):
        call = f"call-{writer}"
        if error is not None:
            expect(one.kinds.is_frozen(error), f"put of {call} beside a freeze: {said(error)}, not the frozen error")
        elif call not in frozen:
            late += 1
        if begun[writer] and call not in frozen:
            expect(snapshot.incomplete or now.version != snapshot.version, f"{call} was begun and is missing unseen")
    moved = now.version != snapshot.version
    expect(moved or state(now) == state(snapshot), "the snapshot changed and kept its version")
    expect(moved or not late, f"{late} puts were acknowledged beside the freeze and are not in its snapshot")
    if late:
        dropped = await one.source().drop(one.rollout, **exactly(snapshot))
        expect(dropped is False, "a put was acknowledged outside the snapshot, and that snapshot could be dropped")


async def racing_freezers(case: Case) -> None:
    """Sources that freeze at once, beside puts, all return one snapshot."""
    for number in range(ROUNDS):
        one = case.another(number)
        await one.sink().put(one.entry("call-0", prompt=(9,)))
        putting = [refusal_of(one.sink().put(one.entry(f"call-{w}", prompt=(w,)))) for w in range(1, WRITERS)]
        *snapshots, _ = await asyncio.gather(*(one.freeze() for _ in range(3)), asyncio.gather(*putting))
        for snapshot in snapshots:
            expect(snapshot.snapshot_id == snapshots[0].snapshot_id, "two freezers returned two snapshot ids")
            same = snapshot.version != snapshots[0].version or state(snapshot) == state(snapshots[0])
            expect(same, "two freezers returned one version with other contents")
            expect("call-0" in by_call(snapshot), "a snapshot lacks a record that was acknowledged before the race")


async def racing_begins(case: Case) -> None:
    """A call whose begin was acknowledged beside a freeze masks that snapshot, or has moved its version."""
    for number in range(ROUNDS):
        one = case.another(number)
        acts: list[Any] = [refusal_of(one.sink().begin_call(one.rollout, f"call-{w}")) for w in range(WRITERS)]
        acts.insert(number % (WRITERS + 1), one.freeze())
        errors = await asyncio.gather(*acts)
        snapshot = errors.pop(number % (WRITERS + 1))
        for error in errors:
            fine = error is None or case.kinds.is_frozen(error)
            expect(fine, f"begin beside a freeze: {said(error)}, not the frozen error")
        if None in errors:
            moved = (await one.freeze()).version != snapshot.version
            expect(snapshot.incomplete or moved, "a begun call is missing from the snapshot and nothing shows it")


async def racing_mark_and_drop(case: Case) -> None:
    """Of a mark and a drop at once only one succeeds: an acknowledged mark is never dropped unseen."""
    for number in range(ROUNDS):
        one = case.another(number)
        await one.sink().put(one.entry())
        snapshot = await one.freeze()
        acts: list[Any] = [
            refusal_of(one.sink().mark_incomplete(one.rollout, "lost")),
            one.source().drop(one.rollout, **exactly(snapshot)),
        ]
        first, second = await asyncio.gather(*(acts if number % 2 else reversed(acts)))
        error, dropped = (first, second) if number % 2 else (second, first)
        if error is not None:
            expect(case.kinds.is_retired(error), f"mark beside a drop: {said(error)}, not the retired error")
        expect(isinstance(dropped, bool), f"drop returned {dropped!r}")
        expect(not (dropped and error is None), "a mark was acknowledged and the snapshot without it was dropped")
        if not dropped:
            later = await refusal_of(one.source().drop(one.rollout, **exactly(snapshot)))
            expect(later is None, f"drop after the race: {said(later)}")


async def racing_retirement(case: Case) -> None:
    """Puts beside a retire return or raise the retired error; behind it nothing is left and nothing gets in."""
    for number in range(ROUNDS):
        one = case.another(number)
        acts: list[Any] = [refusal_of(one.sink().put(one.entry(f"call-{w}", prompt=(w,)))) for w in range(WRITERS)]
        acts.insert(number % (WRITERS + 1), one.source().retire([one.rollout]))
        errors = await asyncio.gather(*acts)
        errors.pop(number % (WRITERS + 1))
        for error in errors:
            fine = error is None or case.kinds.is_retired(error)
            expect(fine, f"put beside a retire: {said(error)}, not the retired error")
        error = await refusal_of(one.sink().put(one.entry("late", prompt=(77,))))
        expect(error is not None and case.kinds.is_retired(error), f"put behind the retire: {said(error)}")
        try:
            snapshot = await one.source().freeze(one.rollout)
        except Exception as raised:  # noqa: BLE001 - judged here
            expect(case.kinds.is_retired(raised), f"freeze behind the retire: {said(raised)}")
        else:
            expect(not snapshot.entries, "a retired rollout holds records")


CHECKS: tuple[Check[Case], ...] = (
    check(racing_puts, "races"),
    check(racing_equal_puts, "races"),
    check(racing_freeze, "races"),
    check(racing_freezers, "races"),
    check(racing_begins, "races", "begin_call"),
    check(racing_mark_and_drop, "races"),
    check(racing_retirement, "races"),
)
