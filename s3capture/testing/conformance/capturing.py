"""Checks of what a sink writes: records, intents, marks, and the ids they go under.

The rule of this module: a check reads back through a *fresh* source, since the instance that wrote may remember what it
never stored.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable
from typing import Any

from s3capture.testing.conformance.bench import Case, by_call, exactly, refuse, resent, wire
from s3capture.testing.conformance.verdicts import Check, check, expect, refusal_of, refusals_of_all, said


async def put_then_freeze_visibility(case: Case) -> None:
    """A record whose put returned is in a fresh source's snapshot, field for field, and the rollout is complete."""
    entry = case.entry()
    await case.sink().put(entry)
    snapshot = await case.freeze()
    expect(by_call(snapshot).keys() == {"call-1"}, f"expected call-1 alone, got {sorted(by_call(snapshot))}")
    expect(by_call(snapshot) == {"call-1": wire(entry)}, "the frozen record is not the one that was put")
    expect(snapshot.rollout_id == case.rollout, f"the snapshot names rollout {snapshot.rollout_id!r}")
    expect(snapshot.snapshot_id, "snapshot_id is empty")
    expect(not snapshot.incomplete, "a clean rollout froze incomplete")


async def idempotent_reput(case: Case) -> None:
    """The same bytes again, from the same or another sink, change nothing."""
    sink, entry = case.sink(), case.entry()
    await sink.put(entry)
    await sink.put(resent(entry))
    await case.sink().put(resent(entry))
    snapshot = await case.freeze()
    expect(by_call(snapshot) == {"call-1": wire(entry)}, "a repeated put changed the records")
    expect(not snapshot.incomplete, "a repeated put made the rollout incomplete")


async def conflicting_reput(case: Case) -> None:
    """Another payload for the same call is a ValueError, or the frozen rollout is incomplete; nothing is replaced."""
    for number, make_sink in enumerate(("the same sink", "another sink")):
        one = case.another(number)
        sink, entry = one.sink(), one.entry()
        await sink.put(entry)
        error = await refusal_of((sink if number == 0 else one.sink()).put(one.other(entry)))
        expect(error is None or case.kinds.is_conflict(error), f"{make_sink}: {said(error)}, which is no ValueError")
        snapshot = await one.freeze()
        if error is None:
            expect(snapshot.incomplete, f"{make_sink}: a conflicting payload was taken and the rollout is complete")
        standing = by_call(snapshot).get("call-1", wire(entry))
        expect(standing == wire(entry), f"{make_sink}: the conflicting payload replaced the first one")


async def payload_fidelity(case: Case) -> None:
    """A record with unusual values comes back as itself, or its put raises."""
    sink = case.sink()
    nested: Any = {"big": 2**70, "small": 5e-324, "text": "żółć 🦀 \u0000", "deep": [[[{}]], None, True]}
    unusual = [
        case.entry("nan", generation_log_probs=[math.nan, -0.5]),
        case.entry("infinite", generation_log_probs=[-math.inf, -0.0]),
        case.entry("exact", generation_log_probs=[-0.1 - 0.2, -1e-310]),
        case.entry("routed", routed_experts=nested),
        case.entry("extra", a_field_of_a_newer_version={"kept": [1.5, "x"]}),
        case.entry("empty", prompt=(), generation=()),
        case.entry("large ids", prompt=(0, 2**31, 2**63)),
    ]
    kept = {entry.model_call_id: wire(entry) for entry in unusual if await refusal_of(sink.put(entry)) is None}
    frozen = by_call(await case.freeze())
    for call, payload in kept.items():
        expect(frozen.get(call) == payload, f"the record {call!r} was acknowledged and did not come back as itself")


async def call_ids_never_collide(case: Case) -> None:
    """Call ids that look alike are either refused or kept apart."""
    sink = case.sink()
    ids = [
        "a/b",
        "a_b",
        "a-b",
        "a%2Fb",
        "a b",
        "A-B",
        "..",
        ".",
        "ä",
        "a\u0308",
        "x" * 300,
        "x" * 299 + "y",
        "!41",
        "%41",
    ]
    entries = [case.entry(call, prompt=(number,)) for number, call in enumerate(ids)]
    kept = {entry.model_call_id: wire(entry) for entry in entries if await refusal_of(sink.put(entry)) is None}
    frozen = by_call(await case.freeze())
    missing = [call[:20] for call, payload in kept.items() if frozen.get(call) != payload]
    expect(not missing, f"acknowledged and lost or changed: {missing}")


async def rollouts_are_separate(case: Case) -> None:
    """The same call id in two rollouts, one id a beginning of the other, is two calls."""
    one, two = case.another("1"), case.another("1-a1")
    sink = case.sink()
    await sink.put(one.entry(prompt=(1,)))
    await sink.put(two.entry(prompt=(2,)))
    first, second = await one.freeze(), await two.freeze()
    expect([entry.prompt_token_ids for entry in first.entries] == [[1]], "the first rollout lost its record")
    expect([entry.prompt_token_ids for entry in second.entries] == [[2]], "the second rollout lost its record")


async def entry_without_intent_is_complete(case: Case) -> None:
    """A record whose call was never begun is as good as any other."""
    await case.sink().put(case.entry())
    expect(not (await case.freeze()).incomplete, "an entry without an intent made the rollout incomplete")


async def mark_incomplete_durability(case: Case) -> None:
    """A mark after the freeze shows in every later snapshot, changes the version, and stales the drop."""
    sink = case.sink()
    await sink.put(case.entry())
    before = await case.freeze()
    await sink.mark_incomplete(case.rollout, "call-2")
    after = await case.freeze()
    expect(after.incomplete, "a fresh source does not see the mark")
    expect(after.version != before.version, f"the mark left the version at {after.version}")
    dropped = await case.source().drop(case.rollout, **exactly(before))
    expect(dropped is False, f"a drop of the snapshot from before the mark returned {dropped!r}")


async def mark_before_freeze(case: Case) -> None:
    """A mark before the freeze, with or without a call id, makes the snapshot incomplete and keeps its entries."""
    for number, mark in enumerate((("call-9",), ())):
        one = case.another(number)
        sink = one.sink()
        await sink.put(one.entry())
        await sink.mark_incomplete(one.rollout, *mark)
        snapshot = await one.freeze()
        expect(snapshot.incomplete, "the snapshot does not show the mark")
        expect(by_call(snapshot).keys() == {"call-1"}, "the mark removed the record")


async def mark_on_unknown_rollout(case: Case) -> None:
    """A mark on a rollout that nobody wrote creates it as incomplete."""
    await case.sink().mark_incomplete(case.rollout)
    snapshot = await case.freeze()
    expect(snapshot.incomplete and not snapshot.entries, "the rollout does not read as incomplete and empty")


async def begin_call_custody(case: Case) -> None:
    """A begun call without an outcome makes the frozen rollout incomplete; with its record it is complete."""
    lost, kept = case.another("lost"), case.another("kept")
    await lost.sink().begin_call(lost.rollout, "call-1")
    snapshot = await lost.freeze()
    expect(snapshot.incomplete and not snapshot.entries, "a begun call without an outcome did not mask the rollout")
    sink = kept.sink()
    await sink.begin_call(kept.rollout, "call-1")
    await sink.put(kept.entry())
    snapshot = await kept.freeze()
    expect(by_call(snapshot).keys() == {"call-1"}, "a begun and recorded call is not in the snapshot")
    expect(not snapshot.incomplete, "a begun and recorded call made the rollout incomplete")


async def begun_here_put_there(case: Case) -> None:
    """A call that one sink began and another one recorded is complete, and an intent beside records still masks."""
    there = case.another("there")
    await there.sink().begin_call(there.rollout, "call-1")
    await there.sink().put(there.entry())
    expect(not (await there.freeze()).incomplete, "the record of another sink did not settle the intent")
    beside = case.another("beside")
    sink = beside.sink()
    await sink.put(beside.entry())
    await sink.begin_call(beside.rollout, "call-2")
    expect((await beside.freeze()).incomplete, "an open intent beside a record did not mask the rollout")


async def begin_twice(case: Case) -> None:
    """Beginning a call again, before or after its record, changes nothing."""
    sink = case.sink()
    await sink.begin_call(case.rollout, "call-1")
    await sink.begin_call(case.rollout, "call-1")
    await sink.put(case.entry())
    await case.sink().begin_call(case.rollout, "call-1")
    snapshot = await case.freeze()
    expect(by_call(snapshot).keys() == {"call-1"} and not snapshot.incomplete, "beginning twice masked the rollout")


BAD_IDS = ("..", ".", "", "with space", "a/b", "żółć", "x" * 300, "new\nline", "null\x00")


async def id_validation(case: Case) -> None:
    """A rollout id that is no plain name ('..', spaces, non-ASCII, 300 characters) is a ValueError everywhere."""
    sink, source = case.sink(), case.source()
    for bad in BAD_IDS:
        attempts: list[tuple[str, Awaitable[Any]]] = [
            ("mark_incomplete", sink.mark_incomplete(bad)),
            ("put", sink.put(case.entry(rollout=bad))),
            ("freeze", source.freeze(bad)),
            ("drop", source.drop(bad, snapshot_id="x", version=1)),
        ]
        if hasattr(sink, "begin_call"):
            attempts.append(("begin_call", sink.begin_call(bad, "call-1")))
        if hasattr(sink, "record_engine_refusal") or hasattr(sink, "refuse_call"):
            attempts.append(("record_engine_refusal", refuse(sink, bad, "call-1", "x")))
        for what, error in await refusals_of_all(attempts):
            expect(isinstance(error, ValueError), f"{what} of rollout id {bad[:20]!r}: {said(error)}, not a ValueError")


CHECKS: tuple[Check[Case], ...] = (
    check(put_then_freeze_visibility),
    check(idempotent_reput),
    check(conflicting_reput),
    check(payload_fidelity),
    check(call_ids_never_collide),
    check(rollouts_are_separate),
    check(entry_without_intent_is_complete),
    check(mark_incomplete_durability),
    check(mark_before_freeze),
    check(mark_on_unknown_rollout),
    check(begin_call_custody, "begin_call"),
    check(begun_here_put_there, "begin_call"),
    check(begin_twice, "begin_call"),
    check(id_validation),
)
