"""Archives among sweeps, deletions and readers that are under way, and with parts of them lost."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from captures import entry
from inspected import KEYS, RUN
from test_archive import URL, archive, filled, live

from s3capture import S3TokenSink, S3TokenSource
from s3capture.archive.archiver import Archiver
from s3capture.archive.catalog import PackCatalog
from s3capture.archive.deletion import ArchiveDeletion
from s3capture.archive.hand import Hand
from s3capture.errors import CorruptObjectError
from s3capture.inspection import list_rollouts
from s3capture.keys import Kind, RolloutKeys, parse
from s3capture.protocol import archiving
from s3capture.reader import Reader
from s3capture.replay import replay
from s3capture.retention import Act, Request, carry_out, choose
from s3capture.retention.archives import hand_of
from s3capture.runtime import Runtime
from s3capture.settings import Settings
from s3capture.store.memory import MemoryStore
from s3capture.stored import Selection, StoredRun

EVER = 2.0**40


def keys_of(store: MemoryStore, kind: Kind) -> list[str]:
    rows = store.list(KEYS.archive.base)
    return [row.key for row in rows if (parsed := parse(KEYS.root, row.key)) and parsed.kind is kind]


def replayed(store: MemoryStore) -> tuple[dict[str, int], int]:
    """What is replayed as complete, by rollout with its calls, and how many problems were told."""
    with replay(url=URL, run=RUN, store=store) as rollouts:
        found = {rollout.rollout_id: len(rollout.calls) for rollout in rollouts}
        return found, rollouts.counts.problems


class Aged(MemoryStore):
    """Gives every object a time long past, so that age alone never saves it."""

    def list(self, prefix: str) -> list:  # type: ignore[type-arg,override]
        import dataclasses  # noqa: PLC0415

        stamp = "2020-01-01T00:00:00+00:00"
        return [dataclasses.replace(row, stamp=f"{stamp}/{row.stamp}") for row in super().list(prefix)]


class Interrupted(Aged):
    """Does something of others right before the first create of a key of one kind."""

    def __init__(self, kind: Kind, then: Callable[[MemoryStore], None]) -> None:
        super().__init__()
        self.kind, self.then, self.armed = kind, then, False

    def create(self, key: str, body: bytes) -> bool:
        parsed = parse(KEYS.root, key)
        if self.armed and parsed is not None and parsed.kind is self.kind:
            self.armed = False
            self.then(self)
        return super().create(key, body)


def deletion(store: MemoryStore, reader: Reader) -> ArchiveDeletion | None:
    run = StoredRun(reader, KEYS)
    catalog = run.catalog()
    with Hand(store) as hand:
        return ArchiveDeletion(run, catalog, store.create, hand.origin) if isinstance(catalog, PackCatalog) else None


def sweep(store: MemoryStore) -> None:
    with Reader(store) as reader:
        hand = deletion(store, reader)
        if hand is not None:
            store.delete(hand.confirm(hand.sweepable(EVER), EVER))


def delete(store: MemoryStore, rollout: str, spill: Path) -> list[str]:
    """Delete a rollout by name as the command does; return what went wrong."""
    runtime = Runtime(Settings.of(url=URL, run=RUN, spill_dir=str(spill)), store)
    with Reader(store) as reader:
        run = StoredRun(reader, KEYS)
        plan = choose(run, Request(Act.DELETE, Selection((rollout,))))
        outcomes = carry_out(
            runtime, plan, hand=hand_of(run, runtime), again=lambda: hand_of(StoredRun(reader, KEYS), runtime)
        )
        return [outcome.error for outcome in outcomes if not outcome.done]


@pytest.mark.parametrize("moment", [Kind.ARCHIVE_INDEX, Kind.RETIRING, Kind.ARCHIVE_DONE])
def test_a_sweep_of_any_age_beside_an_archiver_loses_nothing(moment: Kind) -> None:
    """Whenever a sweep judges the pack of a running archiver, every rollout is still replayed as it was."""
    store = filled(3, 2, Interrupted(moment, sweep))
    before, _ = replayed(store)
    store.armed = True  # type: ignore[attr-defined]
    with contextlib.suppress(CorruptObjectError):  # a pack that is gone before it was verified: nothing was deleted
        archive(store)
    assert replayed(store) == (before, 0)
    archive(store)
    sweep(store)
    assert replayed(store) == (before, 0)
    assert all(StoredRun(reader, KEYS).rollout(name).archived for name in before for reader in [Reader(store)])


def test_a_pack_without_its_index_is_told_and_kept() -> None:
    """A lost index hides nothing silently: the rollouts are told as unreadable, and no sweep takes the pack."""
    store = filled(2, 2, Aged())
    archive(store)
    store.delete(keys_of(store, Kind.ARCHIVE_INDEX))
    found, problems = replayed(store)
    assert found == {} and problems > 0
    told: dict[str, str] = {}
    with Reader(store) as reader:
        list(list_rollouts(reader, KEYS, on_problem=told.__setitem__))
    assert told
    sweep(store)
    assert keys_of(store, Kind.ARCHIVE_PACK) and keys_of(store, Kind.ARCHIVE_DONE)


def test_a_rollout_in_several_packs_is_read_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one of its packs or indexes lost, a rollout that is split over packs is never given, and is told."""
    monkeypatch.setattr("s3capture.archive.format.GROUP_BYTES", 1500)
    for kind in (Kind.ARCHIVE_INDEX, Kind.ARCHIVE_PACK):
        whole = filled(1, 12)
        archive(whole, pack_bytes=1200)
        assert len(keys_of(whole, kind)) > 2
        for lost in keys_of(whole, kind):
            store = MemoryStore()
            for row in whole.list(""):
                store.create(row.key, whole.get(row.key) or b"")
            store.delete([lost])
            found, problems = replayed(store)
            assert found == {} and problems > 0, lost


def test_a_lost_list_costs_no_pack() -> None:
    """Where nobody says that a pack speaks, its records being nowhere else keeps it from any sweep."""
    store = filled(2, 2, Aged())
    archive(store)
    store.delete(keys_of(store, Kind.ARCHIVE_DONE))
    sweep(store)
    assert keys_of(store, Kind.ARCHIVE_PACK) and keys_of(store, Kind.ARCHIVE_INDEX)


def test_a_reader_that_began_before_the_archive_finds_what_it_took() -> None:
    """A replay that is under way while everything is archived gives every rollout all the same."""
    store = filled(40, 2)
    with replay(url=URL, run=RUN, store=store, budget=1) as rollouts:
        names = [next(rollouts).rollout_id]
        archive(store)
        names += [rollout.rollout_id for rollout in rollouts]
        assert (len(names), rollouts.counts.deleted, rollouts.counts.problems) == (40, 0, 0)


def test_deleting_beside_an_archiver_deletes(tmp_path: Path) -> None:
    """A rollout that is packed while it is deleted by name stays deleted."""
    store = filled(2, 2)

    class Racing(MemoryStore):
        """Has the rollouts archived once the deletion begins to delete."""

        raced = False

        def delete(self, keys: Sequence[str]) -> dict[str, str]:
            if not self.raced and any("/attempts/" in key for key in keys):
                self.raced = True
                archive(self)
            return super().delete(keys)

    racing = Racing()
    racing._objects, racing._made = store._objects, store._made
    # The archiver's fences came behind the deletion, which is told; nothing else of the rollout did.
    assert len(delete(racing, "r0", tmp_path)) == 1
    assert replayed(racing)[0] == {"r1": 2}
    assert delete(racing, "r0", tmp_path) == []
    assert not live(racing, "r0") and replayed(racing)[0] == {"r1": 2}


def test_an_id_of_an_archived_rollout_stays_refused(tmp_path: Path) -> None:
    """The fences of an archived rollout are needed: no sweep may take them as long as a pack speaks for it."""
    store = filled(1, 2)
    archive(store)
    with Reader(store) as reader:
        hand = deletion(store, reader)
        assert hand is not None and hand.needs_fences("r0") and not hand.needs_fences("r1")
    delete(store, "r0", tmp_path)
    with Reader(store) as reader:
        hand = deletion(store, reader)
        assert hand is not None and not hand.needs_fences("r0")


def test_a_rollout_begun_anew_is_not_taken_for_the_one_that_was_packed() -> None:
    """Deleted, captured and retired again between survey and retirement, a rollout is live and not the packed one."""
    store = MemoryStore()

    async def capture(model: str) -> None:
        sink = S3TokenSink(url=URL, run=RUN, store=store)
        source = S3TokenSource(url=URL, run=RUN, store=store, retention="keep")
        await sink.begin_call("r0", "c1")
        await sink.put(entry("c1", "r0", model=model))
        snapshot = await source.freeze("r0")
        assert await source.drop("r0", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        await sink.close()
        await source.close()

    async def forget() -> None:
        source = S3TokenSource(url=URL, run=RUN, store=store)
        await source.delete(["r0"])
        await source.close()

    asyncio.run(capture("old"))
    keys: RolloutKeys = KEYS.rollout("r0")
    with Reader(store) as reader, Hand(store) as hand:
        packable = hand.run(archiving.examine(keys), "test")
        assert isinstance(packable, archiving.Packable)
        assert hand.run(archiving.settle(keys, packable, hand.origin()), "test")
        asyncio.run(forget())
        asyncio.run(capture("new"))
        assert not hand.run(archiving.settle(keys, packable, hand.origin()), "test")
        assert Archiver(StoredRun(reader, KEYS), hand).archive(Selection()).archived == 1
    with replay(url=URL, run=RUN, store=store) as rollouts:
        assert [call.entry().model for rollout in rollouts for call in rollout.calls] == ["new"]


def test_a_damaged_tombstone_goes_on_hiding(tmp_path: Path) -> None:
    """A rollout that was deleted from the archive does not come back when its tombstone cannot be read."""
    store = filled(2, 2)
    archive(store)
    delete(store, "r0", tmp_path)
    (tombstone,) = keys_of(store, Kind.ARCHIVE_DELETED)
    store.overwrite(tombstone, b"damaged")
    assert replayed(store)[0] == {"r1": 2}
    assert "r0" not in {parsed.rollout_id for key in live(store, "r0") if (parsed := parse(KEYS.root, key))}


def test_a_rollout_is_not_deleted_where_an_index_cannot_be_read(tmp_path: Path) -> None:
    """Where it cannot be told what the archive holds of a rollout, deleting it is an error, and it comes back whole."""
    store = filled(2, 2)
    archive(store)
    (index,) = keys_of(store, Kind.ARCHIVE_INDEX)
    sound = store.get(index)
    store.overwrite(index, b"damaged")
    assert any("forget" in error for error in delete(store, "r0", tmp_path))
    assert sound is not None
    store.overwrite(index, sound)
    assert replayed(store)[0] == {"r0": 2, "r1": 2}


def test_sweeps_end_in_an_empty_archive_whatever_is_deleted_first(tmp_path: Path) -> None:
    """Packs, indexes, lists, announcements and tombstones of deleted rollouts all go, whichever deletion is cut off."""
    store = filled(2, 2, Aged())
    archive(store)
    delete(store, "r0", tmp_path)
    delete(store, "r1", tmp_path)
    for _ in range(12):
        with Reader(store) as reader:
            hand = deletion(store, reader)
            # One key at a time, the last first: each sweep dies after its first deletion.
            going = [] if hand is None else hand.confirm(hand.sweepable(EVER), EVER)
            order = [Kind.ARCHIVE_INDEX, Kind.ARCHIVE_PACK, Kind.ARCHIVE_DONE, Kind.ARCHIVE_DELETED]
            kinds = {key: parsed.kind for key in going if (parsed := parse(KEYS.root, key))}
            store.delete(sorted(going, key=lambda key: order.index(kinds[key]))[:1])
    assert not store.list(KEYS.archive.base)
