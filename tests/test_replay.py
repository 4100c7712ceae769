"""Replay: what was captured comes back proven and in order, and what cannot be proven is named and left out."""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
import threading
from collections.abc import Callable
from typing import Any

import pytest
from captures import answered, entry
from inspected import PREFIX, RUN, fill
from replayed import capture, entries_of, full_prompts, small

from s3capture import S3TokenSink, S3TokenSource
from s3capture.errors import ConflictingPayloadError, InvalidIdError, SettingsError, StoreUnavailableError
from s3capture.keys import PackName, RunKeys, shard
from s3capture.protocol import bodies
from s3capture.records import ParentResolutionStatus, TokenEntry
from s3capture.replay import ProblemKind, Replay, ReplayedRollout, recapture, replay
from s3capture.sink import entry_payload
from s3capture.store.memory import MemoryStore

URL = "s3://bucket/p"
KEYS = RunKeys("p", "r")
ROLLOUT = "7-3"


def settings(store: MemoryStore, **more: Any) -> dict[str, Any]:
    return {"url": URL, "run": "r", "store": store, **more}


def frozen(*entries: TokenEntry, store: MemoryStore | None = None) -> MemoryStore:
    """A store in which the rollouts of ``entries`` are frozen."""
    made = MemoryStore() if store is None else store

    async def fill_it() -> None:
        sink, source = S3TokenSink(**settings(made)), S3TokenSource(**settings(made))
        for each in entries:
            await sink.put(each)
        for rollout in dict.fromkeys(each.rollout_id for each in entries):
            await source.freeze(rollout)

    asyncio.run(fill_it())
    return made


def overwrite(store: MemoryStore, record: TokenEntry) -> None:
    """Store ``record`` whatever rule it breaks, as a sound object under its own key."""
    keys = KEYS.rollout(record.rollout_id)
    body = bodies.entry(keys, record.model_call_id, entry_payload(record), fingerprint="", by="x").body
    store.overwrite(keys.call(record.model_call_id), body)


def all_of(store: MemoryStore, **given: Any) -> tuple[list[ReplayedRollout], Replay]:
    with replay(**settings(store, **{"complete": None, **given})) as rollouts:
        return list(rollouts), rollouts


def only(store: MemoryStore, **given: Any) -> ReplayedRollout:
    (rollout,), _ = all_of(store, **given)
    return rollout


def kinds(rollout: ReplayedRollout | Replay) -> dict[str | None, ProblemKind]:
    return {problem.call: problem.kind for problem in rollout.problems}


def tree() -> list[TokenEntry]:
    """A root (a), two branches (b: a delta; c: in full), and d, a delta behind b; times run backwards."""
    a = answered("a", created_at=400.0)
    b = answered("b", parent=a, before=[1, 2, 3, 4, 5], prompt=[6], generation=[7], created_at=300.0)
    c = answered("c", parent=a, prompt=[1, 2, 3, 4, 5, 8], generation=[9], created_at=200.0)
    d = answered("d", parent=b, before=[1, 2, 3, 4, 5, 6, 7], prompt=[], generation=[10, 11], created_at=100.0)
    return [a, b, c, d]


@pytest.fixture(scope="module")
def strange() -> MemoryStore:
    """The run of ``inspected``; tests only read it."""
    made = MemoryStore()
    asyncio.run(fill(made, url=f"s3://bucket/{PREFIX}"))
    return made


def of_strange(store: MemoryStore, **given: Any) -> tuple[list[ReplayedRollout], Replay]:
    with replay(store=store, url=f"s3://bucket/{PREFIX}", run=RUN, **given) as rollouts:
        return list(rollouts), rollouts


def test_prompts_come_back_in_full_and_say_how_they_were_stored() -> None:
    """A delta, a delta behind it and a full prompt all have their whole prompt; what was stored is still known."""
    calls = {call.call_id: call for call in only(frozen(*tree())).calls}
    assert {name: call.prompt_token_ids() for name, call in calls.items()} == {
        "a": [1, 2, 3],
        "b": [1, 2, 3, 4, 5, 6],
        "c": [1, 2, 3, 4, 5, 8],
        "d": [1, 2, 3, 4, 5, 6, 7],
    }
    assert {name: call.prompt_tokens for name, call in calls.items()} == {"a": 3, "b": 6, "c": 6, "d": 7}
    assert {name for name, call in calls.items() if call.prompt_was_delta} == {"b", "d"}
    assert calls["d"].stored_prompt_tokens == 0
    whole = calls["d"].entry()
    assert (whole.prompt_token_ids, whole.prompt_is_delta) == ([1, 2, 3, 4, 5, 6, 7], False)
    assert whole.generation_token_ids == [10, 11]
    assert calls["d"].stored_entry() == tree()[3]


def test_chains_and_branches_are_explicit() -> None:
    """Parent, children and terminal calls follow from the parent decisions; parents come first, then time and id."""
    rollout = only(frozen(*tree()))
    assert [(call.call_id, call.parent, call.children) for call in rollout.calls] == [
        ("a", None, ("c", "b")),
        ("c", "a", ()),
        ("b", "a", ("d",)),
        ("d", "b", ()),
    ]
    assert rollout.chains == (("a", "c"), ("a", "b", "d"))
    assert rollout.terminal_calls == ("c", "d")
    assert [call.position for call in rollout.calls] == [0, 1, 2, 3]
    assert (rollout.run, rollout.state, rollout.incomplete, rollout.version) == ("r", "frozen", False, 5)


def test_a_workload_comes_back_as_it_was_put() -> None:
    """Every record is given with its whole prompt and as it was stored; rollouts come in the order of their keys."""
    store, script = MemoryStore(), small()
    asyncio.run(capture(script, **settings(store)))
    found, rollouts = all_of(store, complete=True)
    wanted = {rollout.rollout_id: rollout for rollout in script.rollouts}
    assert [each.rollout_id for each in found] == sorted(wanted, key=lambda name: (shard(name), name))
    for each in found:
        stored = {record.model_call_id: record for record in entries_of(wanted[each.rollout_id])}
        assert {call.call_id: call.stored_entry() for call in each.calls} == stored
        prompts = full_prompts(wanted[each.rollout_id])
        assert all(call.prompt_token_ids() == prompts[call.call_id] for call in each.calls)
    assert any(call.prompt_was_delta for each in found for call in each.calls)
    assert (rollouts.counts.given, rollouts.counts.calls) == (len(wanted), script.calls)
    assert not rollouts.problems


def test_every_value_comes_back_to_the_bit() -> None:
    """Non-finite and negative-zero log probabilities, ids of 64 bits and more, and unknown fields are kept."""
    odd = [math.nan, -math.inf, -0.0, 5e-324]
    tokens = [0, 2**64 - 1, 2**70, 1]
    record = entry(generation_token_ids=tokens, generation_log_probs=odd, note={"deep": [1, None]}, created_at=0.1)
    (call,) = only(frozen(record)).calls
    given = call.entry()
    assert struct.pack("4d", *given.generation_log_probs) == struct.pack("4d", *odd)
    assert given.generation_token_ids == record.generation_token_ids
    assert given.model_extra == {"note": {"deep": [1, None]}}
    assert entry_payload(given) == entry_payload(record)


def test_only_what_the_freeze_decided_on_is_given(strange: MemoryStore) -> None:
    """An outcome behind the freeze is evidence and never replayed; open rollouts are given only when asked for."""
    found, rollouts = of_strange(strange)
    assert [(each.rollout_id, len(each.calls)) for each in found] == [("late", 1)]
    counts = rollouts.counts
    assert (counts.seen, counts.given, counts.other, counts.incomplete, counts.deleted) == (7, 1, 3, 1, 2)
    assert not rollouts.problems
    found, _ = of_strange(strange, states=["open"], complete=None)
    assert {each.rollout_id: each.reasons for each in found} == {
        "open": ("open-calls",),
        "damaged": ("left-out-calls",),
    }
    assert found[0].snapshot_id is None


def test_conflicted_calls_are_left_out_with_the_deltas_behind_them(strange: MemoryStore) -> None:
    """Neither payload of a conflicted call is given; refusals are; and the rollout says why it is incomplete."""
    (busy,), rollouts = of_strange(strange, rollouts=["busy"], complete=False)
    assert kinds(busy) == {"c1": ProblemKind.CONFLICT, "c2": ProblemKind.BROKEN_CHAIN}
    assert busy.calls == ()
    assert [refusal.code for refusal in busy.refusals] == ["context_length_exceeded"]
    assert busy.reasons == ("sealed-calls", "conflicts", "marks", "left-out-calls")
    assert rollouts.problems == list(busy.problems)


def test_a_damaged_call_takes_only_its_deltas_with_it() -> None:
    """The call and the deltas that rest on it are left out and named; a full prompt behind it stays, as a root."""
    store = frozen(*tree())
    store.overwrite(KEYS.rollout(ROLLOUT).call("a"), b"rubbish")
    rollout = only(store)
    assert kinds(rollout) == {
        "a": ProblemKind.DAMAGED,
        "b": ProblemKind.BROKEN_CHAIN,
        "d": ProblemKind.BROKEN_CHAIN,
    }
    assert [(call.call_id, call.parent, call.facts.parent_call_id) for call in rollout.calls] == [("c", None, "a")]
    assert rollout.reasons == ("left-out-calls",)


def test_a_rollout_that_cannot_be_given_whole_is_no_complete_one() -> None:
    """Whoever asks for complete rollouts gets none with a hole: it is counted, named, and others go on."""
    store = frozen(*tree(), entry(rollout="whole"))
    store.overwrite(KEYS.rollout(ROLLOUT).call("a"), b"rubbish")
    found, rollouts = all_of(store, complete=True)
    assert [each.rollout_id for each in found] == ["whole"]
    assert (rollouts.counts.left_out, rollouts.counts.incomplete, rollouts.counts.problems) == (1, 0, 3)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"digest": "0" * 64}, ProblemKind.MISMATCH),
        ({"cum_len": 9}, ProblemKind.MISMATCH),
        ({"digest": None}, ProblemKind.UNPROVEN),
        ({"prompt_token_ids": [60]}, ProblemKind.MISMATCH),
        ({"parent_call_id": "nobody"}, ProblemKind.BROKEN_CHAIN),
        ({"parent_call_id": "d"}, ProblemKind.CYCLE),
        ({"rollout_id": "7-4"}, ProblemKind.DAMAGED),
    ],
    ids=lambda value: next(iter(value), "") if isinstance(value, dict) else str(value),
)
def test_what_is_not_proven_is_not_given(change: dict[str, Any], kind: ProblemKind) -> None:
    """A delta with other tokens, another digest or length, none, or a chain that does not close is left out."""
    a, b, _, d = tree()
    store = frozen(a, b, d)
    changed = b.model_copy(update=change)
    keys = KEYS.rollout(ROLLOUT)
    body = bodies.entry(keys, "b", entry_payload(changed), fingerprint="", by="x").body
    store.overwrite(keys.call("b"), body)
    rollout = only(store)
    assert kinds(rollout)["b"] is kind
    assert [call.call_id for call in rollout.calls] == ["a"]
    assert rollout.incomplete


def test_a_full_prompt_with_an_unknown_parent_is_given_and_told() -> None:
    """Its tokens rest on nothing; that its parent was never in the rollout is a problem that leaves nothing out."""
    lost = entry("c1", parent_call_id="nobody", parent_resolution=ParentResolutionStatus.RESOLVED)
    rollout = only(frozen(lost))
    assert kinds(rollout) == {"c1": ProblemKind.ORPHAN}
    assert [call.parent for call in rollout.calls] == [None]
    assert not rollout.incomplete


def test_a_missing_call_is_named() -> None:
    """A call of the snapshot whose object is gone is a problem, and the rollout incomplete."""
    store = frozen(*tree())
    store.delete([KEYS.rollout(ROLLOUT).call("c")])
    rollout = only(store)
    assert kinds(rollout) == {"c": ProblemKind.MISSING}
    assert [call.call_id for call in rollout.calls] == ["a", "b", "d"]


def test_without_a_freeze_decision_nothing_is_given() -> None:
    """A damaged snapshot says of no call whether it belongs to the rollout, so the rollout is left out, even of all."""
    store = frozen(*tree(), entry(rollout="whole"))
    store.overwrite(KEYS.rollout(ROLLOUT).frozen, b"rubbish")
    found, rollouts = all_of(store)
    assert [each.rollout_id for each in found] == ["whole"]
    assert kinds(rollouts) == {None: ProblemKind.DAMAGED}
    assert rollouts.counts.left_out == 1


def test_retired_rollouts_are_given_where_their_records_were_kept() -> None:
    """Kept records are replayed, deleted ones counted and no fault; without a snapshot a rollout is never complete."""
    store = frozen(entry(rollout="kept"), entry(rollout="gone"))

    async def retire() -> None:
        keeping = S3TokenSource(**settings(store, retention="keep"))
        snapshot = await keeping.freeze("kept")
        assert await keeping.drop("kept", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        await S3TokenSink(**settings(store)).put(entry(rollout="abandoned"))
        await keeping.retire(["abandoned"])
        await S3TokenSource(**settings(store)).retire(["gone"])

    asyncio.run(retire())
    found, rollouts = all_of(store)
    assert {each.rollout_id: (each.state, each.reasons) for each in found} == {
        "kept": ("retired", ()),
        "abandoned": ("retired", ("no-snapshot",)),
    }
    assert (rollouts.counts.deleted, rollouts.problems) == (1, [])
    assert [each.rollout_id for each in all_of(store, complete=True)[0]] == ["kept"]


def test_rollouts_are_chosen_by_id_and_pattern() -> None:
    """Ids, patterns and both; an id that holds nothing is named; a bad one is refused before anything is read."""
    store = frozen(*(entry(rollout=f"{task}-{number}") for task in range(3) for number in range(3)))
    assert {each.rollout_id for each in all_of(store, rollouts=["1-*", "2-0"])[0]} == {"1-0", "1-1", "1-2", "2-0"}
    found, rollouts = all_of(store, rollouts=["2-2", "9-9"])
    assert [each.rollout_id for each in found] == ["2-2"]
    assert (rollouts.absent, rollouts.counts.seen) == (["9-9"], 1)
    with pytest.raises(InvalidIdError):
        all_of(store, rollouts=["a/b"])
    for wrong in ({"states": ["melted"]}, {"since": "yesterday-ish"}, {"rollouts": [""]}, {"budget": 0}):
        with pytest.raises(SettingsError):
            all_of(store, **wrong)


class Watched(MemoryStore):
    """Notes of which rollouts records were read, and acts before it gives the next ones."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[str] = set()
        self.acts: list[Callable[[], object]] = []

    def get(self, key: str) -> bytes | None:
        if "/call/" in key:
            self.read.add(key.split("/")[4])
            with contextlib.suppress(IndexError):
                self.acts.pop()()
        return super().get(key)


def test_what_is_read_ahead_is_bounded_by_bytes() -> None:
    """With a budget below any rollout each is read alone, and still given."""
    store = Watched()
    frozen(*(entry(rollout=f"7-{number}") for number in range(20)), store=store)
    store.read.clear()
    with replay(**settings(store, budget=1)) as rollouts:
        for number, _ in enumerate(rollouts, 1):
            assert len(store.read) == number
    assert rollouts.counts.given == 20


def test_rollouts_are_read_side_by_side() -> None:
    """Within the budget several rollouts are read at once: two readers meet before either has its record."""
    store, meeting = Watched(), threading.Barrier(2)
    frozen(entry(rollout="7-1"), entry(rollout="7-2"), store=store)
    store.acts += [lambda: meeting.wait(timeout=20)] * 2
    assert len(all_of(store)[0]) == 2


def test_a_rollout_dropped_while_it_is_read_is_judged_again() -> None:
    """What is dropped between the listing and the reading is a deleted rollout and no damage."""
    store = Watched()
    frozen(*tree(), store=store)
    gone = [row.key for row in store.list(KEYS.rollout(ROLLOUT).calls)]

    def drop() -> None:
        keys = KEYS.rollout(ROLLOUT)
        store.create(keys.drop(5), bodies.fence("drop", keys, bodies.Origin("x", 0.0, "n"), retired=True))
        store.delete(gone)

    store.acts.append(drop)
    found, rollouts = all_of(store)
    assert (found, rollouts.counts.deleted, rollouts.problems) == ([], 1, [])


def test_leaving_early_ends_the_threads() -> None:
    """A replay that is left in the middle, or closed without being read at all, leaves no thread behind."""
    store = frozen(*(entry(rollout=f"7-{number}") for number in range(50)))
    before = set(threading.enumerate())
    with replay(**settings(store)) as rollouts:
        next(rollouts)
    replay(**settings(store)).close()
    left = [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("s3capture-re")]
    assert not left


class Down(MemoryStore):
    """A store that can stop giving bodies, while it still lists."""

    down = False

    def get(self, key: str) -> bytes | None:
        if self.down:
            raise StoreUnavailableError(f"no answer for {key}")
        return super().get(key)


def test_an_outage_is_an_error_and_never_a_gap() -> None:
    """When the store fails, the replay fails: a record that could not be read is not a record that is not there."""
    store = Down()
    frozen(entry(), store=store)
    store.down = True
    with replay(**settings(store)) as rollouts, pytest.raises(StoreUnavailableError):
        list(rollouts)


def snapshot_of(store: MemoryStore, run: str, rollout: str = ROLLOUT) -> Any:
    return asyncio.run(S3TokenSource(**settings(store, run=run)).freeze(rollout))


def test_captured_again_it_gives_the_same_entries() -> None:
    """A replayed rollout put into another run and frozen there has equal entries, twice over."""
    store = frozen(*tree())
    copy = S3TokenSink(**settings(store, run="copy"))
    for _ in range(2):
        asyncio.run(recapture(only(store), copy))
    again = snapshot_of(store, "copy")
    assert (again.entries, again.incomplete) == (snapshot_of(store, "r").entries, False)


def test_a_copy_of_something_incomplete_is_incomplete(strange: MemoryStore) -> None:
    """What must be masked stays masked in the copy, whose refusals are those of the original."""
    (busy,), _ = of_strange(strange, rollouts=["busy"], complete=None)
    store = MemoryStore()
    asyncio.run(recapture(busy, S3TokenSink(**settings(store))))
    again = snapshot_of(store, "r", "busy")
    assert again.incomplete
    assert [(each.model_call_id, each.code) for each in again.engine_refusals] == [("c3", "context_length_exceeded")]


class Stops(S3TokenSink):
    """Is cut off right behind the first put."""

    async def put(self, entry: TokenEntry) -> None:
        await super().put(entry)
        raise StoreUnavailableError("the network is gone")


def test_a_copy_that_was_cut_short_does_not_look_complete() -> None:
    """Frozen before it was finished, the copy is masked; finished later, it would have been whole."""
    store = frozen(*tree())
    with pytest.raises(StoreUnavailableError):
        asyncio.run(recapture(only(store), Stops(**settings(store, run="copy"))))
    assert snapshot_of(store, "copy").incomplete


def test_a_copy_onto_other_payloads_is_refused() -> None:
    """Where the new run holds another payload under the same call id, the copy ends with that conflict."""
    store = frozen(*tree())
    copy = S3TokenSink(**settings(store, run="copy"))
    asyncio.run(copy.put(entry("a", model="another")))
    with pytest.raises(ConflictingPayloadError):
        asyncio.run(recapture(only(store), copy))


def test_what_stands_behind_a_circle_in_full_is_given() -> None:
    """Calls that are each other's ancestors are left out, and a full prompt behind them stays, as a root."""
    a, b, c, d = tree()
    store = frozen(a, b, d, c.model_copy(update={"parent_call_id": "d"}))
    overwrite(store, b.model_copy(update={"parent_call_id": "d"}))
    rollout = only(store)
    assert kinds(rollout) == {"b": ProblemKind.CYCLE, "d": ProblemKind.CYCLE}
    assert [(call.call_id, call.parent) for call in rollout.calls] == [("c", None), ("a", None)]


def test_a_damaged_archive_is_told_and_hides_only_its_own() -> None:
    """An index that cannot be read may hide rollouts: that is a problem of its own, and live rollouts are given."""
    store = frozen(*tree())
    name = PackName("0" * 16, "f" * 16, "a" * 64)
    store.create(KEYS.archive.index(name), b"rubbish")
    store.create(KEYS.archive.done(name, "n"), b"rubbish")
    found, rollouts = all_of(store, complete=True)
    assert [each.rollout_id for each in found] == [ROLLOUT]
    assert {(problem.rollout, problem.kind) for problem in rollouts.problems} == {("", ProblemKind.DAMAGED)}
    assert str(rollouts.problems[0]).startswith("archive: damaged: ")
