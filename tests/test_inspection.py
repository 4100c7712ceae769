"""Looking at a bucket: what is counted, what is told apart, and that nothing is changed by it."""

from __future__ import annotations

import asyncio

import pytest
from captures import entry
from inspected import HIDDEN, KEYS, LONG, PREFIX, WEIRD, fill, stored

from s3capture import S3TokenSink, S3TokenSource, codec
from s3capture.errors import StoreConfigError, StoreUnavailableError
from s3capture.inspection import (
    Reason,
    RolloutDetail,
    RolloutSummary,
    State,
    inspect_rollout,
    list_rollouts,
    list_runs,
    run_exists,
)
from s3capture.keys import RunKeys, shard
from s3capture.protocol import bodies
from s3capture.reader import Reader
from s3capture.store.base import TransientStoreError
from s3capture.store.memory import MemoryStore

URL = f"s3://bucket/{PREFIX}"


@pytest.fixture(scope="module")
def store() -> MemoryStore:
    """The run of ``inspected``, in memory; tests only read it."""
    made = MemoryStore()
    asyncio.run(fill(made, url=URL))
    return made


def summaries(store: MemoryStore) -> dict[str, RolloutSummary]:
    with Reader(store) as reader:
        return {summary.rollout: summary for summary in list_rollouts(reader, KEYS)}


def detail(store: MemoryStore, rollout: str) -> RolloutDetail:
    with Reader(store) as reader:
        return inspect_rollout(reader, KEYS.rollout(rollout))


def contents(store: MemoryStore) -> dict[str, bytes | None]:
    return {row.key: store.get(row.key) for row in store.list("")}


def test_each_state_is_told_from_the_others(store: MemoryStore) -> None:
    """Open, announced, decided, dropped and retired rollouts are listed as what they are."""
    assert {rollout: summary.state for rollout, summary in summaries(store).items()} == {
        "busy": State.FROZEN,
        "dropped": State.RETIRED,
        "open": State.OPEN,
        "late": State.FROZEN,
        "freezing": State.FREEZING,
        "damaged": State.OPEN,
        "retired": State.RETIRED,
    }


def test_a_frozen_rollout_is_counted_as_its_snapshot(store: MemoryStore) -> None:
    """Calls, refusals, seals, conflicts and marks of a snapshot are counted, and its version is the source's."""
    busy = summaries(store)["busy"]
    assert (busy.calls, busy.refusals, busy.sealed, busy.conflicts, busy.marks, busy.late) == (3, 1, 1, 1, 2, 0)
    assert busy.version == 1 + 4 + 1 + 2
    assert busy.incomplete
    assert busy.incomplete_reasons == (Reason.SEALED_CALLS, Reason.CONFLICTS, Reason.MARKS)
    assert busy.bytes == sum(row.size for row in store.list(KEYS.rollout("busy").base))


def test_an_open_rollout_is_judged_as_if_frozen_now(store: MemoryStore) -> None:
    """A begun call without an outcome makes an open rollout incomplete; it has no version yet."""
    found = summaries(store)["open"]
    assert (found.calls, found.open_calls, found.version) == (1, 1, None)
    assert found.incomplete_reasons == (Reason.OPEN_CALLS,)


def test_a_late_outcome_is_evidence_and_not_data(store: MemoryStore) -> None:
    """An outcome behind the freeze is counted as late, and neither as a call nor in the version."""
    late = summaries(store)["late"]
    assert (late.calls, late.late, late.version, late.incomplete) == (1, 1, 2, False)
    shown = {call.call: call.in_snapshot for call in detail(store, "late").calls}
    assert shown == {LONG: True, "c9": False, "c8": False}


def test_a_begin_behind_the_freeze_is_no_open_call(store: MemoryStore) -> None:
    """An intent that the freeze did not see was refused: late evidence, and neither open nor a reason to mask."""
    late = summaries(store)["late"]
    assert (late.late_begins, late.open_calls, late.incomplete) == (1, 0, False)
    assert {call.call: call.kind for call in detail(store, "late").calls}["c8"] == "late"


def refused_mark(store: MemoryStore, rollout: str) -> None:
    """What a refused mark leaves behind, and a refused begin."""
    keys = KEYS.rollout(rollout)
    store.create(keys.mark("f" * 32), bodies.mark(keys, "c1", HIDDEN, "too late"))
    store.create(keys.intent("c7"), bodies.intent(keys, "c7", HIDDEN))


@pytest.mark.parametrize("rollout", ["dropped", "retired"])
def test_what_comes_behind_the_retirement_masks_nothing(rollout: str) -> None:
    """A mark and a begin that were refused as retired do not make a verified rollout look incomplete."""
    store = MemoryStore()
    asyncio.run(fill(store, url=URL))
    refused_mark(store, rollout)
    found = summaries(store)[rollout]
    assert (found.state, found.incomplete, found.incomplete_reasons) == (State.RETIRED, False, ())
    assert (found.marks, found.late_marks, found.open_calls, found.late_begins) == (0, 1, 0, 1)
    seen = detail(store, rollout)
    assert [(mark.late, mark.reason) for mark in seen.marks] == [(True, "too late")]
    assert {call.call: call.kind for call in seen.calls}["c7"] == "late"


@pytest.mark.parametrize("retention", ["delete", "keep"])
@pytest.mark.parametrize("conditional", [True, False])
def test_a_mark_that_was_acknowledged_is_never_called_late(retention: str, conditional: bool) -> None:
    """A mark between freeze and retirement masks its rollout as long as the mark is there."""

    async def close_marked(store: MemoryStore) -> None:
        sink = S3TokenSink(store=store, url=URL, run=KEYS.run)
        source = S3TokenSource(store=store, url=URL, run=KEYS.run, retention=retention)
        await sink.put(entry("c1", "r"))
        await source.freeze("r")
        await sink.mark_incomplete("r")
        snapshot = await source.freeze("r")
        if conditional:
            assert await source.drop("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        else:
            await source.retire(["r"])
        await sink.close()
        await source.close()

    store = MemoryStore()
    asyncio.run(close_marked(store))
    found = summaries(store)["r"]
    kept = retention == "keep"
    assert (found.state, found.marks, found.late_marks, found.incomplete) == (State.RETIRED, int(kept), 0, kept)
    if kept:
        refused_mark(store, "r")
        assert summaries(store)["r"].incomplete


def test_rollouts_come_in_order_of_shard_and_id(store: MemoryStore) -> None:
    """The order of a listing is that of the shards, however parallel it is made."""
    listed = list(summaries(store))
    assert listed == sorted(listed, key=lambda rollout: (shard(rollout), rollout))


def test_damage_and_foreign_keys_are_named_and_hide_nothing(store: MemoryStore) -> None:
    """A damaged outcome and a foreign key are in the summary of their rollout; every other rollout is listed."""
    strays: list[str] = []
    with Reader(store) as reader:
        found = {summary.rollout: summary for summary in list_rollouts(reader, KEYS, on_stray=strays.append)}
    keys = KEYS.rollout("damaged")
    assert [damage.key for damage in found["damaged"].damaged] == [keys.call("c2")]
    assert found["damaged"].foreign == (f"{keys.base}notes/readme.txt",)
    assert strays == [f"{KEYS.attempts}ab/nobody/readme.txt"]
    assert {rollout for rollout, summary in found.items() if not summary.sound} == {"damaged"}
    assert len(found) == 7


@pytest.mark.parametrize("fence", ["frozen", "drop-2"])
def test_a_damaged_decision_is_reported_and_not_believed(fence: str) -> None:
    """A rollout whose decision is damaged says so, and the decision decides nothing."""
    store = MemoryStore()
    asyncio.run(fill(store, url=URL))
    keys = KEYS.rollout("dropped")
    store.overwrite(f"{keys.fences}{fence}", b"damaged")
    found = summaries(store)["dropped"]
    assert [damage.key for damage in found.damaged] == [f"{keys.fences}{fence}"]
    assert found.state is (State.FROZEN if fence == "drop-2" else State.RETIRED)
    seen = detail(store, "dropped")
    assert [damage.key for damage in seen.damaged] == [f"{keys.fences}{fence}"]
    assert {fence: "damaged"}.items() <= {each.fence: each.decision for each in seen.fences}.items()


def test_looking_changes_nothing(store: MemoryStore) -> None:
    """Neither listing nor inspecting creates or deletes any object."""
    before = contents(store)
    with Reader(store) as reader:
        list(list_runs(reader, PREFIX))
    for rollout in summaries(store):
        detail(store, rollout)
    assert contents(store) == before


def test_runs_are_counted_and_other_folders_passed_over(store: MemoryStore) -> None:
    """A run is listed with its rollouts, calls and bytes; a folder that is no run is not."""
    more = MemoryStore()
    for key, body in contents(store).items():
        more.create(key, body or b"")
    more.create(f"{PREFIX}/models/step-1/weights.bin", b"w")
    more.create(f"{PREFIX}/not a run/attempts/x", b"w")
    more.create(RunKeys(PREFIX, "run-8").rollout("a").intent("c"), b"i")
    more.create(f"{RunKeys(PREFIX, 'run-9').archive.base}pack-1", b"a")
    with Reader(more) as reader:
        runs = {run.run: run for run in list_runs(reader, PREFIX)}
    assert list(runs) == ["run-7", "run-8", "run-9"]
    attempts = list(store.list(KEYS.attempts))
    ours = [row for row in attempts if any(row.key.startswith(KEYS.rollout(r).base) for r in summaries(store))]
    assert (runs["run-7"].rollouts, runs["run-7"].bytes) == (7, sum(row.size for row in ours))
    assert runs["run-7"].calls == sum("/call/" in row.key for row in attempts)
    assert (runs["run-8"].rollouts, runs["run-8"].calls, runs["run-9"].rollouts) == (1, 0, 0)


class Haunted(MemoryStore):
    """Keeps an empty folder of everything that was deleted, as SeaweedFS does."""

    def __init__(self) -> None:
        super().__init__()
        self.ghosts: set[str] = set()

    def create(self, key: str, body: bytes) -> bool:
        parts = key.split("/")[:-1]
        self.ghosts |= {"/".join(parts[: n + 1]) + "/" for n in range(len(parts))}
        return super().create(key, body)

    def list_folders(self, prefix: str) -> tuple[str, ...]:
        below = {ghost for ghost in self.ghosts if ghost.startswith(prefix) and ghost != prefix}
        return tuple(sorted(ghost for ghost in below if ghost[len(prefix) :].count("/") == 1))


def test_a_run_that_was_removed_is_not_listed() -> None:
    """Empty folders make no run; a run that holds a ledger alone, or one object, does."""
    store = Haunted()
    gone, ledger, one = (RunKeys(PREFIX, name) for name in ("gone", "ledger-only", "one"))
    store.create(gone.rollout("a").intent("c"), b"i")
    store.create(f"{gone.root}ledger/x", b"i")
    store.delete([row.key for row in store.list("")])
    store.create(f"{ledger.root}ledger/x", b"i")
    store.create(one.rollout("a").intent("c"), b"i")
    with Reader(store) as reader:
        assert [run.run for run in list_runs(reader, PREFIX)] == ["ledger-only", "one"]
        assert [run_exists(reader, keys) for keys in (gone, ledger, one)] == [False, True, True]


def test_a_call_is_told_in_full(store: MemoryStore) -> None:
    """Kind, tokens, parent, conflict, who and when of every call are in the inspection."""
    calls = {call.call: call for call in detail(store, "busy").calls}
    assert {call: found.kind for call, found in calls.items()} == {
        "c1": "entry",
        "c2": "entry",
        "c3": "refusal",
        "c5": "seal",
    }
    first, child = calls["c1"], calls["c2"]
    assert (first.prompt_tokens, first.generated_tokens, first.prompt_is_delta) == (3, 2, False)
    assert (first.created_at, first.parent_call, first.parent_resolution) == (1_700_000_000.0, None, "root")
    assert (child.prompt_tokens, child.prompt_is_delta, child.parent_call) == (1, True, "c1")
    assert first.by is not None
    assert first.begun_by == first.by
    assert first.begun_at is not None
    assert child.begun_at is None
    assert calls["c3"].code == "context_length_exceeded"
    [conflict] = first.conflicts
    assert conflict.kind == "entry"
    assert conflict.digest not in (first.digest, None)
    assert all(call.in_snapshot for call in calls.values())


def test_marks_and_fences_say_who_when_and_why(store: MemoryStore) -> None:
    """A mark names its call and whether the snapshot counts it; a fence says what was decided."""
    busy = detail(store, "busy")
    assert {(mark.call, mark.in_snapshot) for mark in busy.marks} == {("c4", True), ("", False)}
    assert all(mark.by and mark.at and mark.reason == "marked by the caller" for mark in busy.marks)
    assert [fence.fence for fence in busy.fences] == ["closing", "frozen"]
    assert busy.fences[1].decision == "snapshot of 4 outcomes, 1 conflict, 1 mark"
    dropped = detail(store, "dropped")
    assert [(fence.fence, fence.decision) for fence in dropped.fences if fence.decision] == [
        ("frozen", "snapshot of 1 outcome, 0 conflicts, 0 marks"),
        ("drop-2", "retired"),
    ]


def test_ids_come_back_whole(store: MemoryStore) -> None:
    """A call id that its key shortens or escapes is shown as it was given."""
    assert [call.call for call in detail(store, "late").calls if call.in_snapshot] == [LONG]
    assert WEIRD in {call.call for call in detail(store, "open").calls}


def test_damage_is_shown_beside_what_is_sound(store: MemoryStore) -> None:
    """Inspection names the damaged outcome and the foreign key, and still shows the other call."""
    seen = detail(store, "damaged")
    assert {call.call: call.kind for call in seen.calls} == {"c1": "entry", "c2": "damaged"}
    assert [damage.key for damage in seen.damaged] == [KEYS.rollout("damaged").call("c2")]
    assert seen.breaches == (f"foreign key {KEYS.rollout('damaged').base}notes/readme.txt",)
    assert not seen.sound


def test_a_record_that_is_no_record_is_damage() -> None:
    """An intact object that is of another rollout, or holds no record, is reported as damaged and not raised."""
    store, keys = MemoryStore(), KEYS.rollout("r")
    store.create(keys.call("c1"), stored(entry("c1", "another")))
    store.create(keys.call("c2"), bodies.entry(keys, "c2", codec.canonical({"v": 1}), fingerprint="", by="x").body)
    assert [damage.key for damage in detail(store, "r").damaged] == [keys.call("c1"), keys.call("c2")]


def test_a_breached_invariant_is_a_sentence() -> None:
    """A snapshot that names a call which is gone shows as a breach."""
    store = MemoryStore()
    asyncio.run(fill(store, url=URL))
    store.delete([KEYS.rollout("busy").call("c2")])
    assert detail(store, "busy").breaches == ("the snapshot names call c2, which is not in the bucket",)


def test_nothing_stored_is_told_from_something() -> None:
    """A rollout id that was never used does not exist; one begun call is enough to exist."""
    store = MemoryStore()
    assert not detail(store, "r").exists

    async def begin() -> None:
        sink = S3TokenSink(store=store, url=URL, run=KEYS.run)
        await sink.begin_call("r", "c")
        await sink.close()

    asyncio.run(begin())
    assert detail(store, "r").exists


class Flaky(MemoryStore):
    """Fails the first attempts of every kind of read."""

    def __init__(self, failures: int, error: Exception) -> None:
        super().__init__()
        self.left, self.error = {"list": failures, "get": failures, "folders": failures}, error

    def _fail(self, kind: str) -> None:
        if self.left[kind]:
            self.left[kind] -= 1
            raise self.error

    def list(self, prefix: str):  # type: ignore[no-untyped-def]
        self._fail("list")
        return super().list(prefix)

    def get(self, key: str) -> bytes | None:
        self._fail("get")
        return super().get(key)

    def list_folders(self, prefix: str):  # type: ignore[no-untyped-def]
        self._fail("folders")
        return super().list_folders(prefix)


def test_a_reader_outlasts_passing_failures() -> None:
    """Each kind of read is repeated while the store fails in passing."""
    store = Flaky(2, TransientStoreError("busy"))
    store.create("a/b", b"x")
    with Reader(store) as reader:
        assert reader.folders("") == ("a/",)
        assert [row.key for row in reader.list("a/", "test")] == ["a/b"]
        assert reader.get("a/b", "test") == b"x"


def test_a_reader_gives_up_on_a_store_that_never_answers() -> None:
    """Transient failure without end is an unavailable store, and a wrong setting is raised at once."""
    with Reader(Flaky(10**6, TransientStoreError("gone")), first_patience_s=0.2) as reader:
        with pytest.raises(StoreUnavailableError, match="test: gone"):
            reader.list("", "test")
        with pytest.raises(StoreUnavailableError, match="gone"):
            reader.folders("")
    with Reader(Flaky(1, StoreConfigError("no bucket"))) as reader, pytest.raises(StoreConfigError):
        reader.folders("")


def test_a_reader_keeps_order_and_holds_a_bounded_number() -> None:
    """Answers come in the order of the questions, and questions are taken only as answers are."""
    taken: list[int] = []

    def questions():  # type: ignore[no-untyped-def]
        for number in range(1000):
            taken.append(number)
            yield number

    with Reader(MemoryStore(), width=2) as reader:
        answers = reader.map(lambda number: number * 2, questions())
        assert [next(answers) for _ in range(3)] == [0, 2, 4]
        assert len(taken) <= 3 + 4
        answers.close()
