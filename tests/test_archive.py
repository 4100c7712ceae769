"""Archiving a run: nothing is lost, nothing looks different, and dying anywhere is no harm."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from captures import answered, entry
from inspected import HIDDEN, KEYS, PREFIX, RUN, fill, stored

from s3capture import S3TokenSink, S3TokenSource
from s3capture.archive.archiver import Archiver
from s3capture.archive.catalog import PackCatalog
from s3capture.archive.commit import Report
from s3capture.archive.deletion import ArchiveDeletion
from s3capture.archive.hand import Hand
from s3capture.archive.plan import Planner, Verdict
from s3capture.errors import CorruptObjectError, TokenCaptureFrozenError, TokenCaptureRetiredError
from s3capture.inspection import RolloutDetail, RolloutSummary, detail_of, list_rollouts
from s3capture.keys import Kind, parse
from s3capture.local import EmbeddedServer
from s3capture.reader import Reader
from s3capture.replay import replay
from s3capture.settings import Settings
from s3capture.store.boto import BotoStore
from s3capture.store.memory import MemoryStore
from s3capture.stored import Selection, StoredRun

URL = f"s3://bucket/{PREFIX}"
DECIDED = Selection(states=frozenset({"frozen", "retired"}))


@pytest.fixture
def store() -> MemoryStore:
    """The run of ``inspected``, in memory."""
    made = MemoryStore()
    asyncio.run(fill(made, url=URL))
    return made


def archive(store: MemoryStore, selection: Selection = DECIDED, **options: Any) -> Report:
    with Reader(store) as reader, Hand(store) as hand:
        return Archiver(StoredRun(reader, KEYS), hand, **options).archive(selection)


def details(store: MemoryStore) -> dict[str, RolloutDetail]:
    with Reader(store) as reader:
        return {rollout.rollout_id: detail_of(rollout) for rollout in StoredRun(reader, KEYS).rollouts()}


def summaries(store: MemoryStore) -> dict[str, RolloutSummary]:
    with Reader(store) as reader:
        return {summary.rollout: summary for summary in list_rollouts(reader, KEYS)}


def live(store: MemoryStore, rollout: str) -> set[str]:
    keys = KEYS.rollout(rollout)
    return {row.key for row in (*store.list(keys.base), *store.list(keys.lineage_base))}


def kinds(store: MemoryStore, rollout: str) -> set[Kind | None]:
    return {parsed.kind if (parsed := parse(KEYS.root, key)) else None for key in live(store, rollout)}


def as_before(detail: RolloutDetail) -> RolloutDetail:
    return dataclasses.replace(detail, summary=dataclasses.replace(detail.summary, archived=False))


def test_an_archived_run_reads_as_if_nothing_had_moved(store: MemoryStore) -> None:
    """Every rollout shows the same calls, marks, fences, damage and breaches after its objects were packed."""
    before = details(store)
    report = archive(store)
    after = details(store)
    assert (report.archived, report.packs) == (2, 1) and report.sound
    assert {name for name, detail in after.items() if detail.summary.archived} == {"busy", "late"}
    assert {name: as_before(detail) for name, detail in after.items()} == before


def test_only_fences_and_seals_stay_live(store: MemoryStore) -> None:
    """What refuses late writers stays, what the archive holds goes, and what is not ours is left alone."""
    archive(store)
    assert kinds(store, "busy") <= {Kind.CLOSING, Kind.FROZEN, Kind.RETIRING, Kind.DROP, Kind.CALL}
    assert live(store, "busy") >= {KEYS.rollout("busy").frozen, KEYS.rollout("busy").call("c5")}
    assert kinds(store, "late") <= {Kind.CLOSING, Kind.FROZEN, Kind.RETIRING, Kind.DROP}


def test_an_archived_rollout_refuses_writers_and_consumers(store: MemoryStore) -> None:
    """Late puts, begins and marks of an archived rollout are refused, and so is another freeze."""
    archive(store)

    async def late() -> None:
        async with asyncio.timeout(30):
            sink, source = S3TokenSink(url=URL, run=RUN, store=store), S3TokenSource(url=URL, run=RUN, store=store)
            with pytest.raises(TokenCaptureRetiredError):
                await source.freeze("busy")
            with pytest.raises(TokenCaptureFrozenError):
                await sink.put(entry("new", "busy"))
            with pytest.raises(TokenCaptureFrozenError):
                await sink.begin_call("busy", "new")
            with pytest.raises(TokenCaptureRetiredError):
                await sink.mark_incomplete("busy")
            await sink.close()
            await source.close()

    asyncio.run(late())


def test_what_is_open_or_damaged_stays_live_and_is_told(store: MemoryStore) -> None:
    """Open rollouts are not taken, unless they are to be frozen first; then they are archived as incomplete."""
    report = archive(store, Selection())
    assert (report.verdicts[Verdict.OPEN], report.archived) == (3, 2)
    before = {name: detail.calls for name, detail in details(store).items()}
    report = archive(store, Selection(), freeze_open=True)
    assert report.archived == 2
    after = details(store)
    assert after["open"].summary.archived and after["open"].summary.incomplete
    # Nobody can say whether a damaged outcome is a seal, so its rollout keeps all that it has.
    ((name, why),) = report.left
    assert name == "damaged" and KEYS.rollout("damaged").call("c2") in why
    assert KEYS.rollout("damaged").call("c1") in live(store, "damaged")
    assert {call.call for call in after["open"].calls} == {call.call for call in before["open"]}


def test_a_frozen_rollout_without_records_is_nothing_to_pack() -> None:
    """A rollout that was frozen empty is counted as such, and is no reason to fail."""
    store = MemoryStore()

    async def freeze() -> None:
        source = S3TokenSource(url=URL, run=RUN, store=store)
        await source.freeze("never-begun")
        await source.close()

    asyncio.run(freeze())
    report = archive(store)
    assert report.sound and (report.verdicts[Verdict.EMPTY], report.archived) == (1, 0)


def test_archiving_again_does_nothing(store: MemoryStore) -> None:
    """A second run finds everything archived, and changes no key."""
    archive(store)
    kept = {row.key for row in store.list("")}
    report = archive(store)
    assert (report.archived, report.finished, report.packs) == (0, 0, 0) and report.sound
    assert {row.key for row in store.list("")} == kept


def test_a_selection_takes_what_it_names_and_no_more(store: MemoryStore) -> None:
    """Only the rollouts of the glob are archived."""
    archive(store, Selection(globs=("bu*",), states=frozenset({"frozen"})))
    assert {name for name, summary in summaries(store).items() if summary.archived} == {"busy"}


def test_a_mark_behind_the_pack_keeps_the_rollout_live(store: MemoryStore) -> None:
    """A mark that is acknowledged while its rollout is being packed is not hidden: the rollout stays live."""

    class Marked(MemoryStore):
        """Has the rollout marked when the pack is created."""

        marked = False

        def create(self, key: str, body: bytes) -> bool:
            if "/archive/index/" in key and not self.marked:
                self.marked = True
                asyncio.run(self._mark())
            return super().create(key, body)

        async def _mark(self) -> None:
            sink = S3TokenSink(url=URL, run=RUN, store=self)
            await sink.mark_incomplete("late")
            await sink.close()

    marked = Marked()
    for row in store.list(""):
        marked.create(row.key, store.get(row.key) or b"")
    assert not summaries(marked)["late"].incomplete
    report = archive(marked)
    assert [rollout for rollout, _ in report.left] == ["late"]
    assert not summaries(marked)["late"].archived and summaries(marked)["late"].incomplete
    # The next run packs it again, with its mark.
    assert archive(marked).archived == 1
    assert summaries(marked)["late"].archived and summaries(marked)["late"].incomplete


class Dying(MemoryStore):
    """Performs ``left`` changes and then fails every request: the process that used it is dead."""

    class DeadError(Exception):
        """The process died."""

    def __init__(self, of: MemoryStore, left: int) -> None:
        super().__init__()
        self._objects = dict(of._objects)
        self._made = of._made
        self.left = left
        self.dead = False

    def _spend(self) -> None:
        if self.left <= 0:
            self.dead = True
        if self.dead:
            raise Dying.DeadError
        self.left -= 1

    def create(self, key: str, body: bytes) -> bool:
        self._spend()
        return super().create(key, body)

    def delete(self, keys: Sequence[str]) -> dict[str, str]:
        # A batch of deletes may be cut anywhere.
        for key in keys:
            self._spend()
            super().delete([key])
        return {}

    def revive(self) -> None:
        self.left, self.dead = 10**9, False


def test_killed_after_any_change_the_next_run_finishes(store: MemoryStore) -> None:
    """Whichever change is the last of a run, nothing is lost then, and the next run leaves it all archived."""
    before = details(store)
    changes = 0
    while True:
        dying = Dying(store, changes)
        try:
            archive(dying)
        except Dying.DeadError:
            pass
        else:
            break
        dying.revive()
        assert _calls(details(dying)) == _calls(before), f"killed after {changes} changes"
        archive(dying)
        archive(dying)
        after = details(dying)
        assert _calls(after) == _calls(before), f"killed after {changes} changes, then finished"
        assert {n for n, d in after.items() if d.summary.archived} == {"busy", "late"}
        assert kinds(dying, "busy") <= {Kind.CLOSING, Kind.FROZEN, Kind.RETIRING, Kind.DROP, Kind.CALL}
        changes += 1
    assert changes > 20


def _calls(found: dict[str, RolloutDetail]) -> Any:
    return {
        name: (detail.calls, {mark.mark for mark in detail.marks}, detail.summary.incomplete_reasons)
        for name, detail in found.items()
    }


def filled(rollouts: int, calls: int, store: MemoryStore | None = None) -> MemoryStore:
    """A run of complete, frozen rollouts with continuations."""
    made = store or MemoryStore()

    async def make() -> None:
        sink, source = S3TokenSink(url=URL, run=RUN, store=made), S3TokenSource(url=URL, run=RUN, store=made)
        for number in range(rollouts):
            name = f"r{number}"
            for call in range(calls):
                await sink.begin_call(name, f"c{call}")
                await sink.put(answered(f"c{call}", rollout=name, text=f"{number} {call}", prompt=range(50)))
            await source.freeze(name)
        await sink.close()
        await source.close()

    asyncio.run(make())
    return made


def test_two_runs_at_once_lose_nothing() -> None:
    """Two archivers on one run leave every rollout archived, whole, and nothing but fences live."""
    store = filled(30, 3)
    before = details(store)
    threads = [threading.Thread(target=archive, args=(store,), kwargs={"pack_bytes": 4000}) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    archive(store)
    after = details(store)
    assert all(detail.summary.archived for detail in after.values())
    assert {name: d.calls for name, d in after.items()} == {name: d.calls for name, d in before.items()}
    assert {kind for name in after for kind in kinds(store, name)} <= {
        Kind.CLOSING, Kind.FROZEN, Kind.RETIRING, Kind.DROP
    }  # fmt: skip


def test_a_rollout_larger_than_a_pack_is_read_back_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rollout that is split over packs is archived by one decision, and read back like any other."""
    monkeypatch.setattr("s3capture.archive.format.GROUP_BYTES", 2000)
    store = filled(2, 12)
    before = details(store)
    report = archive(store, pack_bytes=1500)
    assert report.packs > 3 and report.archived == 2
    assert {name: as_before(detail) for name, detail in details(store).items()} == before


class Counting(MemoryStore):
    """Another view of a store, which notes the keys that are read."""

    def __init__(self, of: MemoryStore) -> None:
        super().__init__()
        self._objects = of._objects
        self.asked: list[str] = []

    def get(self, key: str) -> bytes | None:
        self.asked.append(key)
        return super().get(key)

    def get_range(self, key: str, start: int, length: int) -> bytes | None:
        self.asked.append(key)
        return super().get_range(key, start, length)


def test_one_rollout_is_read_without_scanning_the_archive() -> None:
    """Reading one of many archived rollouts takes a handful of requests, whatever the archive holds."""
    store = filled(40, 3)
    archive(store, pack_bytes=3000)
    counting = Counting(store)
    with Reader(counting) as reader:
        detail = detail_of(StoredRun(reader, KEYS).rollout("r7"))
    assert len(detail.calls) == 3 and detail.sound
    packs = {key for key in counting.asked if "/archive/pack/" in key}
    assert len(packs) == 1 and len([row for row in store.list(KEYS.archive.base) if "/pack/" in row.key]) > 5


def test_a_whole_archived_run_is_replayed_from_its_archive_alone() -> None:
    """No object beside the archive is read: a request for each rollout would be most of what the replay costs."""
    store = filled(40, 3)
    archive(store, pack_bytes=3000)
    counting = Counting(store)
    with replay(url=URL, run=RUN, store=counting) as rollouts:
        assert sum(len(rollout.calls) for rollout in rollouts) == 120
    assert all(key.startswith(KEYS.archive.base) for key in counting.asked)


def test_what_lands_behind_the_archive_is_shown_as_late_and_packed_next(store: MemoryStore) -> None:
    """An outcome that lands after its rollout was archived is evidence, and the next run takes it along."""
    archive(store)
    keys = KEYS.rollout("late")
    store.create(keys.call("c77"), stored(entry("c77", "late")))
    assert summaries(store)["late"].late == 2
    report = archive(store)
    assert report.archived == 1
    assert summaries(store)["late"].late == 2 and not store.get(keys.call("c77"))


def test_a_pack_that_comes_back_changed_deletes_nothing(store: MemoryStore) -> None:
    """A store that returns other bytes for a pack than were written ends the run, and every object stays."""

    class Lying(MemoryStore):
        def get(self, key: str) -> bytes | None:
            body = super().get(key)
            return body[:-9] + b"x" + body[-8:] if body and "/archive/pack/" in key else body

    lying = Lying()
    lying._objects = dict(store._objects)
    before = {row.key for row in store.list(KEYS.attempts)}
    with pytest.raises(CorruptObjectError, match="nothing of it was deleted"):
        archive(lying)
    assert {row.key for row in lying.list(KEYS.attempts)} == before


@pytest.mark.parametrize("bend", [lambda body: body[: len(body) // 2], lambda body: b"PAR1" + body[4:-20] + b"x" * 20])
def test_a_damaged_pack_is_told_for_its_rollouts_only(store: MemoryStore, bend: Callable[[bytes], bytes]) -> None:
    """With a damaged pack, the bodies of its rollouts are damaged and say so; live ones are read as ever."""
    archive(store)
    (pack,) = [row.key for row in store.list(KEYS.archive.base) if "/pack/" in row.key]
    store.overwrite(pack, bend(store.get(pack) or b""))
    with Reader(store) as reader:
        run = StoredRun(reader, KEYS)
        assert detail_of(run.rollout("open")).calls
        damaged = detail_of(run.rollout("busy")).damaged
        assert damaged and all("/archive/pack/" in one.problem for one in damaged)


def test_an_archive_of_the_future_is_told_and_the_rest_is_read(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index of an unknown format version is told with the advice to upgrade, and hides its own rollouts only."""
    monkeypatch.setattr("s3capture.archive.format.FORMAT", 2)
    archive(store)
    monkeypatch.undo()
    told: dict[str, str] = {}
    with Reader(store) as reader:
        found = {s.rollout: s for s in list_rollouts(reader, KEYS, on_problem=told.__setitem__)}
    assert found["open"].calls == 1 and found["open"].sound
    assert not found["busy"].sound and found["busy"].incomplete
    assert any("/archive/index/" in problem and "upgrade s3capture" in problem for problem in told.values())


def test_a_damaged_list_is_told_and_keeps_every_pack(store: MemoryStore) -> None:
    """Where it is not known for whom the archive speaks, the run is listed, the damage told, and no pack may go."""
    archive(store)
    (done,) = [row.key for row in store.list(KEYS.archive.base) if "/done/" in row.key]
    store.overwrite(done, b"no list")
    told: dict[str, str] = {}
    with Reader(store) as reader:
        assert "open" in {s.rollout for s in list_rollouts(reader, KEYS, on_problem=told.__setitem__)}
        assert [*told] == [done]
        run = StoredRun(reader, KEYS)
        catalog = run.catalog()
        assert isinstance(catalog, PackCatalog)
        assert ArchiveDeletion(run, catalog, store.create, lambda: HIDDEN).sweepable(2**40) == []


def test_a_rollout_deleted_by_name_is_gone_from_the_archive_and_its_pack_when_the_last_is(
    bucket: str, seaweed: EmbeddedServer
) -> None:
    """A deleted rollout is hidden at once, the others stay; once all of a pack are deleted, the pack may go, then the
    tombstones, and until then nothing of the archive may."""
    settings = Settings.of(url=f"s3://{bucket}/{PREFIX}", run=RUN, endpoint_url=seaweed.endpoint_url)
    store = BotoStore(settings)
    asyncio.run(fill(url=settings.url, endpoint_url=seaweed.endpoint_url))
    with Reader(store) as reader, Hand(store) as hand:
        assert Archiver(StoredRun(reader, KEYS), hand).archive(DECIDED).archived == 2

        def deletion() -> tuple[StoredRun, ArchiveDeletion]:
            run = StoredRun(reader, KEYS)
            catalog = run.catalog()
            assert isinstance(catalog, PackCatalog)
            return run, ArchiveDeletion(run, catalog, store.create, hand.origin)

        run, of = deletion()
        assert of.holds("busy") and not of.holds("open")
        of.forget(["busy", "open"])
        run, of = deletion()
        assert not of.holds("busy") and not run.rollout("busy").archived and run.rollout("late").archived
        assert of.sweepable(2**40) == []
        of.forget(["late"])
        run, of = deletion()
        assert of.sweepable(0) == []
        going = of.sweepable(2**40)
        assert {parsed.kind for key in going if (parsed := parse(KEYS.root, key))} == {
            Kind.ARCHIVE_INDEX, Kind.ARCHIVE_PACK, Kind.ARCHIVE_DONE
        }  # fmt: skip
        assert sorted(of.confirm(going, 2**40)) == sorted(going)
        store.delete(going)
        run, of = deletion()
        store.delete(of.sweepable(2**40))
        assert not store.list(KEYS.archive.base)
    store.close()


def test_the_plan_says_what_the_run_then_does(store: MemoryStore) -> None:
    """The dry run counts the rollouts and objects that the real one takes, and changes nothing."""
    keys = {row.key for row in store.list("")}
    with Reader(store) as reader:
        planned = [c for c in Planner(StoredRun(reader, KEYS), DECIDED).candidates() if c.verdict.acts]
    assert {row.key for row in store.list("")} == keys
    report = archive(store)
    assert len(planned) == report.archived
    assert sum(len(candidate.records) for candidate in planned) == report.objects_deleted


def test_a_resolver_finds_nothing_of_an_archived_rollout(store: MemoryStore) -> None:
    """Continuation markers go with the records, so nothing resolves to a call that is no longer there."""
    archive(store)
    assert not store.list(KEYS.rollout("busy").lineage_base)


def test_the_catalog_tells_foreign_keys(store: MemoryStore) -> None:
    """A key below the archive that is not of the archive is told, and disturbs nothing."""
    archive(store)
    store.create(f"{KEYS.archive.base}notes.txt", b"x")
    with Reader(store) as reader:
        catalog = StoredRun(reader, KEYS).catalog()
    assert isinstance(catalog, PackCatalog) and catalog.foreign == [f"{KEYS.archive.base}notes.txt"]
