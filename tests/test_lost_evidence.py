"""A rollout of which a part is gone is never complete again, for whoever looks; what came late changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from captures import entry

from s3capture import S3TokenSink, S3TokenSource
from s3capture.audit import RunAudit
from s3capture.audit.findings import Finding, Kind
from s3capture.cli.ls import notes_of
from s3capture.effects import ObjectInfo
from s3capture.errors import CorruptObjectError, TokenCaptureRetiredError
from s3capture.inspection import Reason, RolloutSummary, detail_of, list_rollouts, summary_of
from s3capture.inspection.standing import Judge
from s3capture.inspection.summary import summarize
from s3capture.keys import RunKeys, shard
from s3capture.protocol import bodies
from s3capture.protocol.freezing import ONE_PAGE
from s3capture.reader import Reader
from s3capture.replay import replay
from s3capture.store.memory import MemoryStore
from s3capture.stored import Selection, StoredRollout, StoredRun

URL = "s3://bucket/p"
KEYS = RunKeys("p", "r")
A = KEYS.rollout("A")
GHOST = bodies.Origin("ghost:13", 1_700_000_000.0, "0" * 32)


class Refusing(MemoryStore):
    """Will not delete keys that hold ``kept``, as a bucket may answer for any key of a request."""

    kept = "/call/"

    def delete(self, keys: Sequence[str]) -> dict[str, str]:
        """See ``Store``."""
        refused = {key: "InternalError" for key in keys if self.kept in key}
        super().delete([key for key in keys if key not in refused])
        return refused


def captured(
    store: MemoryStore,
    *,
    before: int = 0,
    behind: int = 0,
    end: str = "",
    retention: str = "delete",
    calls: Sequence[str] = ("c1", "c2"),
) -> MemoryStore:
    """Rollout ``A`` in ``store``, frozen, with marks before and behind the freeze; then dropped or retired."""
    given: dict[str, Any] = {"url": URL, "run": "r", "store": store}

    async def go() -> None:
        sink, source = S3TokenSink(**given), S3TokenSource(**given, retention=retention)
        for call in calls:
            await sink.begin_call("A", call)
            await sink.put(entry(call, "A"))
        for _ in range(before):
            await sink.mark_incomplete("A")
        await source.freeze("A")
        for _ in range(behind):
            await sink.mark_incomplete("A")
        if end == "drop":
            snapshot = await source.freeze("A")
            assert await source.drop("A", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        elif end == "retire":
            await source.retire(["A"])
        await sink.close()
        await source.close()

    asyncio.run(go())
    return store


def seen(store: MemoryStore) -> RolloutSummary:
    """The summary of ``A``; the one of its detail must be the same."""
    with Reader(store) as reader:
        (summary,) = list_rollouts(reader, KEYS)
        assert detail_of(StoredRun(reader, KEYS).rollout("A")).summary == summary
    return summary


def audited(store: MemoryStore) -> list[Finding]:
    with Reader(store) as reader:
        run = RunAudit(reader, KEYS)
        return [*(finding for one in run.rollouts() for finding in one.findings), *run.findings]


def given_as_complete(store: MemoryStore) -> list[str]:
    with replay(url=URL, run="r", store=store) as rollouts:
        return [rollout.rollout_id for rollout in rollouts]


def is_lost(store: MemoryStore) -> bool:
    """Whether ``A`` is told as a loss; listing, replay and audit must be of one mind."""
    summary, kinds = seen(store), {finding.kind for finding in audited(store) if finding.fails}
    lost = Reason.LOST_EVIDENCE in summary.incomplete_reasons
    assert (Kind.LOST_EVIDENCE in kinds) is lost
    assert given_as_complete(store) == ([] if summary.incomplete else ["A"])
    assert ("a part of it is gone" in notes_of(summary)) is lost
    return lost


def gone(store: MemoryStore, *places: str) -> MemoryStore:
    """Take what lies under ``places`` of ``A`` away, whatever holds it."""
    doomed = [row.key for place in places for row in store.list(A.base + place)]
    assert doomed
    MemoryStore.delete(store, doomed)
    return store


@pytest.mark.parametrize(("marks", "end"), [("before", "drop"), ("behind", "drop"), ("before", "retire")])
def test_what_a_deletion_left_is_never_complete(marks: str, end: str) -> None:
    """Of a marked rollout the marks were deleted and the calls were not: it is a loss for everyone who looks."""
    more: dict[str, Any] = {marks: 1}
    store = captured(Refusing(), end=end, **more)
    assert not store.list(f"{A.base}mark/") and store.list(A.calls)
    assert is_lost(store)


def test_a_retirement_that_was_to_delete_leaves_nothing_complete() -> None:
    """Whether or not a mark was there behind the freeze: what a deletion cut short left proves nothing."""
    assert is_lost(captured(Refusing(), end="retire", behind=1))


@pytest.mark.parametrize("end", ["drop", "retire"])
def test_what_was_kept_whole_is_complete(end: str) -> None:
    """A kept rollout of which nothing is gone is complete, whoever was refused behind it."""
    store = captured(MemoryStore(), end=end, retention="keep")
    store.create(A.intent("c7"), bodies.intent(A, "c7", GHOST))
    assert not is_lost(store) and not seen(store).incomplete


@pytest.mark.parametrize("place", ["call/c1", "mark/"])
def test_a_part_that_is_gone_is_missed_by_name(place: str) -> None:
    """Of a kept rollout a call or mark of the snapshot was lost; a late mark does not stand in for it."""
    store = gone(captured(MemoryStore(), before=1, end="drop", retention="keep"), place)
    store.create(A.mark("f" * 32), bodies.mark(A, "c1", GHOST, "too late"))
    assert is_lost(store)


def test_a_mark_that_a_drop_counted_is_missed_by_number() -> None:
    """A mark behind the freeze is in no snapshot; that the drop counted it says that it was there."""
    store = captured(MemoryStore(), behind=1, end="drop", retention="keep")
    assert not is_lost(store)
    assert is_lost(gone(store, "mark/"))


@pytest.mark.parametrize("end", ["drop", "retire"])
def test_a_deletion_that_ended_is_no_loss(end: str) -> None:
    """Where no record is left there is nothing to mislead anybody, also when a late put came since."""
    store = captured(MemoryStore(), before=1, end=end)
    assert not is_lost_when_empty(store)
    store.create(A.call("c9"), bodies.refusal(A, "c9", {"code": "x"}, by="ghost:13").body)
    assert not is_lost_when_empty(store)


def is_lost_when_empty(store: MemoryStore) -> bool:
    return Reason.LOST_EVIDENCE in seen(store).incomplete_reasons or any(
        finding.kind is Kind.LOST_EVIDENCE for finding in audited(store)
    )


@pytest.mark.parametrize(("second", "lost"), [(10, True), (12, False)])
def test_without_a_snapshot_the_clock_tells_a_leftover_from_a_late_put(second: int, lost: bool) -> None:
    """A record older than the retirement that was to delete it is a leftover; a later one was refused."""
    store = MemoryStore()
    asyncio.run(S3TokenSource(url=URL, run="r", store=store).retire(["A"]))
    store.create(A.call("c1"), bodies.refusal(A, "c1", {"code": "x"}, by="ghost:13").body)
    rows = [
        replace(row, stamp=f"2026-12-01T08:00:{second if '/call/' in row.key else 11}+00:00")
        for row in store.list(A.base)
    ]
    assert (Reason.LOST_EVIDENCE in summarize(A, rows, store.get).incomplete_reasons) is lost


def test_an_audit_does_not_tell_a_deletion_under_way_as_a_loss() -> None:
    """What is half deleted when it is read, and gone when it is looked at again, is a deleted rollout."""
    store = captured(Refusing(), before=1, end="drop")

    class UnderWay(MemoryStore):
        def list(self, prefix: str) -> Sequence[ObjectInfo]:
            rows = super().list(prefix)
            if prefix.startswith(KEYS.attempts_shard(shard("A"))):
                MemoryStore.delete(self, [row.key for row in rows if "/call/" in row.key])
            return rows

        def get(self, key: str) -> bytes | None:
            return store.get(key)

    under_way = UnderWay()
    under_way._objects = dict(store._objects)
    assert Kind.LOST_EVIDENCE in {finding.kind for finding in audited(store)}
    assert Kind.LOST_EVIDENCE not in {finding.kind for finding in audited(under_way)}


# -- what the archive lost ------------------------------------------------------------------------------------


def archive(store: MemoryStore, **options: Any) -> None:
    pytest.importorskip("pyarrow")
    from s3capture.archive.archiver import Archiver  # noqa: PLC0415
    from s3capture.archive.hand import Hand  # noqa: PLC0415

    with Reader(store) as reader, Hand(store) as hand:
        assert Archiver(StoredRun(reader, KEYS), hand, **options).archive(Selection()).sound


def test_what_the_archive_cannot_give_is_damage_and_a_loss() -> None:
    """A rollout of which the archive lost a part is incomplete, and says where it lies and why."""
    store = captured(MemoryStore())

    def broken(_: object) -> dict[str, bytes]:
        raise CorruptObjectError("the pack is gone")

    with Reader(store) as reader:
        live = tuple(row for row in store.list(A.base) if row.key.startswith(A.fences))
        packed = frozenset(row.key for row in store.list(A.base) if row not in live)
        rows = tuple(row for row in store.list(A.base) if row.key in packed)
        rollout = StoredRollout(A, rows, reader, live, True, packed, (), broken, "the pack is gone")
        for summary in (summary_of(rollout), detail_of(rollout).summary):
            assert (summary.incomplete, summary.incomplete_reasons) == (True, (Reason.LOST_EVIDENCE,))
            assert summary.archived
            assert {damaged.key: damaged.problem for damaged in summary.damaged}[
                KEYS.archive.base
            ] == "the pack is gone"
        assert packed < {damaged.key for damaged in detail_of(rollout).damaged}


def test_a_body_that_cannot_be_unpacked_is_damage_of_its_key() -> None:
    """The error of whatever reads a body is told of that key, and ends nothing."""

    def broken(key: str) -> bytes:
        raise CorruptObjectError(f"{key}: the pack is damaged")

    judge = Judge(broken)
    assert judge.read("one", lambda body: body) is None
    assert [(damaged.key, damaged.problem) for damaged in judge.list()] == [("one", "one: the pack is damaged")]


@pytest.mark.parametrize("what", ["pack", "index"])
def test_a_listed_pack_of_which_a_file_is_gone_is_lost(what: str) -> None:
    """A pack without its file or its index that a list names fails an audit, and its rollouts are lost."""
    store = captured(MemoryStore())
    archive(store)
    assert not [finding for finding in audited(store) if finding.fails]
    (key,) = [row.key for row in store.list(f"{KEYS.archive.base}{what}/")]
    store.delete([key])
    found = audited(store)
    assert {Kind.LOST_PACK, Kind.LOST_EVIDENCE} <= {finding.kind for finding in found if finding.fails}
    assert Kind.ORPHAN_PACK not in {finding.kind for finding in found}
    for complete in (True, None):
        with replay(url=URL, run="r", store=store, complete=complete) as rollouts:
            assert list(rollouts) == []
        assert rollouts.counts.left_out == 1 and "A" in {problem.rollout for problem in rollouts.problems}


def test_one_of_several_packs_is_missed_by_what_the_list_says() -> None:
    """A rollout lies in several packs and the list is filed under the last: the loss of any other is found."""
    store = captured(MemoryStore(), behind=3, calls=[f"c{number}" for number in range(6)])
    archive(store, pack_bytes=1)
    (done,) = [row.key for row in store.list(f"{KEYS.archive.base}done/")]
    indexes = [row.key for row in store.list(f"{KEYS.archive.base}index/")]
    other = next(key for key in indexes if Path(key).stem not in done)
    store.delete([other])
    (lost,) = [finding for finding in audited(store) if finding.kind is Kind.LOST_PACK]
    assert lost.details["rollouts"] == ["A"] and Path(other).stem == lost.details["pack"]


def test_packs_that_a_sweep_took_are_not_missed() -> None:
    """A list whose rollouts were all deleted by name may outlive its pack: that is a sweep under way."""
    from s3capture.archive import decisions  # noqa: PLC0415
    from s3capture.keys import PackName  # noqa: PLC0415

    name, store = PackName("0" * 16, "f" * 16, "a" * 64), MemoryStore()
    store.create(KEYS.archive.done(name, "n"), decisions.done(KEYS, {"A": [name]}, GHOST))
    assert Kind.LOST_PACK in {finding.kind for finding in audited(store)}
    store.create(*decisions.deleted(KEYS, "A", [name], GHOST))
    assert Kind.LOST_PACK not in {finding.kind for finding in audited(store)}


def test_a_pack_that_lost_its_list_is_noted() -> None:
    """Rollouts that lie in a pack which no list names, and nowhere else, are told; live ones are no matter."""
    store = captured(MemoryStore())
    kept = dict(store._objects)
    archive(store)
    (done,) = [row.key for row in store.list(f"{KEYS.archive.base}done/")]
    store.delete([done])
    (note,) = [finding for finding in audited(store) if finding.kind is Kind.UNLISTED_PACK]
    assert not note.fails and note.details["rollouts"] == ["A"]
    for key, (body, _) in kept.items():
        store.create(key, body)
    assert Kind.UNLISTED_PACK not in {finding.kind for finding in audited(store)}


# -- what came behind the archive -----------------------------------------------------------------------------


def refused_mark(store: MemoryStore) -> None:
    async def mark() -> None:
        sink = S3TokenSink(url=URL, run="r", store=store)
        with pytest.raises(TokenCaptureRetiredError):
            await sink.mark_incomplete("A")
        await sink.close()

    asyncio.run(mark())


def refused_put(store: MemoryStore) -> None:
    keys = A.conflict("c1", "ab" * 32)
    store.create(keys, bodies.refusal(A, "c1", {"code": "x"}, by="ghost:13").body)


@pytest.mark.parametrize("refused", [refused_mark, refused_put])
@pytest.mark.parametrize("marked", [0, 1])
def test_what_was_refused_behind_the_archive_is_late(refused: Callable[[MemoryStore], None], marked: int) -> None:
    """A mark or payload that came behind the archiving masks nothing, also once it is packed itself."""
    store = captured(MemoryStore(), before=marked)
    archive(store)
    before = seen(store)
    refused(store)
    for _ in range(2):
        found = seen(store)
        assert (found.late_marks + found.late_conflicts, found.marks, found.conflicts) == (1, marked, 0)
        assert (found.incomplete, found.version) == (before.incomplete, before.version)
        assert given_as_complete(store) == ([] if marked else ["A"])
        assert Kind.LATE in {finding.kind for finding in audited(store)}
        archive(store)


def test_what_was_acknowledged_before_the_archive_is_not_late() -> None:
    """A mark between freeze and archiving masks the rollout, and goes on when a refused one is packed besides."""
    store = captured(MemoryStore(), behind=1)
    archive(store)
    assert (seen(store).marks, seen(store).incomplete) == (1, True)
    refused_mark(store)
    assert (seen(store).marks, seen(store).late_marks) == (1, 1)
    archive(store)
    assert seen(store).incomplete and given_as_complete(store) == []


# -- a LIST of several pages ----------------------------------------------------------------------------------


class Paged(MemoryStore):
    """Lists page after page, and does ``between`` once, behind the first page of a shard."""

    between: Callable[[], None] | None = None

    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        """See ``Store``."""
        rows = sorted(super().list(prefix), key=lambda row: row.key)
        if len(rows) < ONE_PAGE or self.between is None:
            return rows
        act, self.between = self.between, None
        act()
        start = rows[ONE_PAGE - 1].key
        return [*rows[:ONE_PAGE], *(row for row in self.list(prefix) if row.key > start)]


def test_a_drop_between_two_pages_gives_nothing_without_its_marks() -> None:
    """The first page shows the calls, and the marks are gone before the second: it is not given as complete."""
    store = Paged()
    captured(store, behind=1)
    keys = sorted(row.key for row in store.list(A.base))
    first = sum(key < f"{A.base}mark/" for key in keys)
    for number in range(ONE_PAGE - first):
        store.create(f"{KEYS.attempts_shard(shard('A'))}!{number:04}", b"")

    def drop() -> None:
        store.create(A.retiring(4), bodies.fence("retiring", A, GHOST))
        store.create(A.drop(4), bodies.fence("drop", A, GHOST, retired=True))
        store.delete([row.key for row in store.list(f"{A.base}mark/")])

    assert given_as_complete(captured(Paged())) == ["A"]
    store.between = drop
    assert given_as_complete(store) == []
    assert store.between is None
