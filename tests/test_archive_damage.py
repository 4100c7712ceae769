"""A damaged archive is told: no flipped bit makes it answer anything else without saying so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from captures import answered, entry
from inspected import KEYS, PREFIX, RUN

from s3capture import S3TokenSink, S3TokenSource
from s3capture.archive.archiver import Archiver
from s3capture.archive.format import Item, PackWriter, decoding, index_bytes, opened, read_index, read_pack
from s3capture.archive.hand import Hand
from s3capture.errors import CorruptObjectError, UnknownFormatError
from s3capture.inspection import RolloutSummary, list_rollouts
from s3capture.reader import Reader
from s3capture.store.memory import MemoryStore
from s3capture.stored import Selection, StoredRun

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

URL = f"s3://bucket/{PREFIX}"
PLACES = 60
ITEMS = [
    Item("a", "call/c1", "2026-01-01T00:00:00+00:00", 1500, True, b"\0\1" * 750),
    Item("a", "intent/c1", "2026-01-01T00:00:00+00:00", 0, False, b""),
    Item("b", "call/c1", "2026-01-01T00:00:01+00:00", 12, False, b"no frame \xff\xfe"),
]


@pytest.fixture(scope="module")
def archived() -> MemoryStore:
    """Two rollouts in one small pack, with contents in the index and some, larger, in the pack alone."""
    store = MemoryStore()

    async def fill() -> None:
        sink, source = S3TokenSink(url=URL, run=RUN, store=store), S3TokenSource(url=URL, run=RUN, store=store)
        first = answered("c1", rollout="one")
        await sink.begin_call("one", "c1")
        await sink.put(first)
        await sink.put(answered("c2", rollout="one", parent=first, before=[1, 2, 3, 4, 5], prompt=[*range(400)]))
        await sink.mark_incomplete("one", "c3")
        await sink.put(entry("c1", "two", model="m" * 1200))
        for rollout in ("one", "two"):
            await source.freeze(rollout)
        await sink.close()
        await source.close()

    asyncio.run(fill())
    with Reader(store) as reader, Hand(store) as hand:
        assert Archiver(StoredRun(reader, KEYS), hand).archive(Selection()).archived == 2
    return store


def key_of(store: MemoryStore, kind: str) -> str:
    (key,) = [row.key for row in store.list(KEYS.archive.base) if f"/{kind}/" in row.key]
    return key


def listing(reader: Reader) -> tuple[list[RolloutSummary], dict[str, str]]:
    told: dict[str, str] = {}
    return [*list_rollouts(reader, KEYS, on_problem=told.__setitem__)], told


def bodies(reader: Reader) -> tuple[dict[str, dict[str, bytes]], bool]:
    """Every body of every rollout, and whether an error or a problem was told meanwhile."""
    run, found, told = StoredRun(reader, KEYS), dict[str, dict[str, bytes]](), False
    for rollout in run.rollouts():
        try:
            found[rollout.rollout_id] = rollout.read([row.key for row in rollout.rows])
        except CorruptObjectError:
            told = True
    return found, told or bool(run.problems())


@pytest.mark.parametrize("kind", ["index", "pack"])
def test_no_flipped_bit_of_an_archive_changes_an_answer_silently(archived: MemoryStore, kind: str) -> None:
    """With a bit of an index or a pack flipped, run and rollouts read as before, or the damage is told."""
    key = key_of(archived, kind)
    body = archived.get(key) or b""
    silent, noticed = [], 0
    with Reader(archived, width=1) as reader:
        summaries, sound = listing(reader), bodies(reader)
        assert len(summaries[0]) == 2 and not summaries[1] and not sound[1]
        try:
            # Spread over the file; the next test takes every byte, at the level of the file.
            for place in range(PLACES):
                at, bent = len(body) * place // PLACES, bytearray(body)
                bent[at] ^= 1 << place % 8
                archived.overwrite(key, bytes(bent))
                told = listing(reader)
                read = bodies(reader)
                damaged = any(summary.damaged for summary in told[0])
                if (told != summaries and not told[1] and not damaged) or (read[0] != sound[0] and not read[1]):
                    silent.append(at)
                noticed += read[1]
        finally:
            archived.overwrite(key, body)
    assert silent == []
    assert noticed > PLACES / 4  # the flips were seen


def packed(folder: Path, items: list[Item], **options: Any) -> tuple[bytes, list[tuple[Item, int]]]:
    writer = PackWriter(KEYS, folder / "pack", **options)
    for item in items:
        writer.add(item)
    rows = writer.close()
    return (folder / "pack").read_bytes(), rows


def flips(body: bytes) -> list[bytes]:
    return [body[:at] + bytes([body[at] ^ (1 << at % 8)]) + body[at + 1 :] for at in range(len(body))]


def outcome(read: Callable[[], Any]) -> Any:
    """What ``read`` gives; None for the error that a damaged file must raise."""
    try:
        return read()
    except CorruptObjectError as error:
        assert "the key" in str(error)
        return None


def test_every_byte_of_both_files_is_guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a bit flipped in any byte of either file, it gives the rows that were written or names the damaged key."""
    monkeypatch.setattr("s3capture.archive.format.GROUP_BYTES", 1000)
    pack, rows = packed(tmp_path, ITEMS, nonce="n1")
    index = index_bytes(KEYS, rows)
    assert [group for _, group in rows] == [0, 1, 1]
    table = read_index("the key", index, KEYS).to_pydict()
    for bent in flips(pack):
        assert outcome(lambda bent=bent: [*read_pack("the key", bent, KEYS)]) in (ITEMS, None)
    for bent in flips(index):
        assert outcome(lambda bent=bent: read_index("the key", bent, KEYS).to_pydict()) in (table, None)


def test_a_cut_file_is_damaged(tmp_path: Path) -> None:
    """A pack or index that was cut anywhere, or emptied, is an error that names its key."""
    pack, rows = packed(tmp_path, ITEMS)
    index = index_bytes(KEYS, rows)
    for share in range(16):
        with pytest.raises(CorruptObjectError, match="the key"):
            [*read_pack("the key", pack[: len(pack) * share // 16], KEYS)]
        with pytest.raises(CorruptObjectError, match="the key"):
            read_index("the key", index[: len(index) * share // 16], KEYS)


def test_another_schema_is_told_by_name(tmp_path: Path) -> None:
    """A file that claims to be ours and has other columns, or columns of other types, is damaged, not a KeyError."""
    body, rows = packed(tmp_path, ITEMS)
    file = opened("the key", pyarrow.BufferReader(body), "pack", KEYS)
    told, table = file.metadata.metadata, file.read()
    for other in (
        table.drop_columns(["place"]),
        table.rename_columns(["rollouts", *table.column_names[1:]]),
        table.set_column(3, "size", table.column("size").cast(pyarrow.int32())),
        table.append_column("more", table.column("size")),
    ):
        with parquet.ParquetWriter(tmp_path / "other", other.schema, store_schema=False) as writer:
            writer.write_table(other)
            writer.add_key_value_metadata(told)
        with pytest.raises(CorruptObjectError, match="the key: its columns"):
            [*read_pack("the key", (tmp_path / "other").read_bytes(), KEYS)]
    with pytest.raises(CorruptObjectError, match="not the pack"):
        [*read_pack("the key", index_bytes(KEYS, rows), KEYS)]


def test_a_nonce_makes_a_pack_the_file_of_one_writer(tmp_path: Path) -> None:
    """The same objects make the same bytes, other ones with another nonce, and are read alike."""
    plain, same = packed(tmp_path, ITEMS)[0], packed(tmp_path, ITEMS)[0]
    one, other = (packed(tmp_path, ITEMS, nonce=nonce)[0] for nonce in ("n1", "n2"))
    assert plain == same and len({plain, one, other}) == 3
    for body in (plain, one, other):
        assert [*read_pack("the key", body, KEYS)] == ITEMS


@pytest.mark.parametrize(
    "error",
    [KeyError("rollout"), b"\xff", OSError("gone"), OverflowError(), ValueError("no"), pyarrow.ArrowInvalid("no")],
    ids=repr,
)
def test_whatever_decoding_raises_names_the_object(error: Exception | bytes) -> None:
    """Any failure of decoding becomes the one error of damaged objects, with the key in it."""
    with pytest.raises(CorruptObjectError, match="the key"), decoding("the key"):
        if isinstance(error, bytes):
            error.decode()
        else:
            raise error


def test_what_was_told_already_is_not_told_otherwise() -> None:
    """An error of this package passes through decoding as it is, advice and all."""
    with pytest.raises(UnknownFormatError, match=r"^upgrade$"), decoding("the key"):
        raise UnknownFormatError("upgrade")
