"""The archive of one run, as the views need it: which rollouts it speaks for, their rows, and their bodies.

The rule of this module: a pack speaks for the rollouts that are listed as done for it, and for no other: whatever else
it holds is a copy of what is still live, or was changed or taken away by others after it was packed. A list names all
the packs that hold a rollout, and they are read whole or not at all: where one of them, or its index, is damaged or
gone, that list does not count, and where no list does, the rollout is served with that ``problem`` and none of its
packed bodies. What several lists say of one rollout is one: a key has one content. What is damaged is noted among the
``problems`` for whoever looks at the run to tell, and touches its own rollouts only. An unreadable tombstone goes on
hiding its rollout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from s3capture.archive import decisions
from s3capture.archive.format import body_of, decoding, read_index
from s3capture.archive.needs import give_back
from s3capture.archive.packs import Cache, PackReader
from s3capture.effects import ObjectInfo
from s3capture.errors import CorruptObjectError
from s3capture.keys import Kind, PackName, RolloutKeys, RunKeys, parse, position, shard
from s3capture.reader import Reader
from s3capture.stored.run import Packed

_T = TypeVar("_T")
Lists = frozenset[frozenset[str]]
"""The lists that name a rollout: of each, the names of the packs that hold it."""

_INDEX_BYTES = 16 * 1024 * 1024
"""Views go through a run shard by shard, so few indexes are in use at once, however many there are."""


@dataclass(frozen=True, slots=True)
class Index:
    """One index in memory: its table, and where the rows of each rollout start and end."""

    table: Any
    spans: Mapping[str, tuple[int, int]]

    def of_shard(self, hh: str) -> Iterator[str]:
        """The rollouts of one shard."""
        return (rollout for rollout in self.spans if shard(rollout) == hh)


@dataclass(frozen=True, slots=True)
class Found:
    """One rollout in one pack. ``places`` holds, by key, the row group and, where it is known, framing and content."""

    name: PackName
    rows: dict[str, ObjectInfo]
    places: dict[str, tuple[int, bool, bytes | None]]


class PackCatalog:
    """See ``s3capture.stored.run.Catalog``; safe to share between threads. ``rows`` are the LIST of the archive."""

    def __init__(self, reader: Reader, keys: RunKeys, rows: Iterable[ObjectInfo]) -> None:
        self._reader, self.keys = reader, keys
        self.what = f"reading of the archive of run {keys.run!r}"
        self.packs: dict[PackName, ObjectInfo] = {}
        self.indexes: dict[PackName, ObjectInfo] = {}
        self.done_keys: dict[PackName, list[str]] = {}
        self.tombstones: dict[str, list[str]] = {}
        self._deleted: dict[str, frozenset[str]] = {}
        self.foreign: list[str] = []
        self.problems: dict[str, str] = {}
        for row in rows:
            self._sort(row)
        self._packs = PackReader(reader, keys, {name: row.size for name, row in self.packs.items()})
        self._tables: Cache[Index] = Cache(_INDEX_BYTES, lambda index: int(index.table.nbytes) + 200 * len(index.spans))
        self._lists: Cache[Mapping[str, Lists]] = Cache(len(self.done_keys), lambda _: 1)

    def _sort(self, row: ObjectInfo) -> None:
        parsed = parse(self.keys.root, row.key)
        name = PackName.of(parsed.detail) if parsed is not None else None
        match parsed.kind if parsed else None:
            case Kind.ARCHIVE_PACK if name:
                self.packs[name] = row
            case Kind.ARCHIVE_INDEX if name:
                self.indexes[name] = row
            case Kind.ARCHIVE_DONE if name:
                self.done_keys.setdefault(name, []).append(row.key)
            case Kind.ARCHIVE_DELETED if parsed:
                self.tombstones.setdefault(parsed.rollout_id, []).append(row.key)
            case _:
                self.foreign.append(row.key)

    def shards(self) -> frozenset[str]:
        """See ``Catalog``."""
        numbers: set[int] = set()
        for name in self.indexes.keys() | self.done_keys.keys():
            numbers.update(range(int(name.first[:2], 16), int(name.last[:2], 16) + 1))
        return frozenset(f"{number:02x}" for number in numbers)

    def of_shard(self, hh: str) -> Mapping[str, Packed]:
        """See ``Catalog``. Raise ``StoreError``."""
        rollouts = {rollout for rollout in self._listed(hh) if shard(rollout) == hh}
        found = {rollout: self.of_rollout(rollout) for rollout in rollouts}
        return {rollout: packed for rollout, packed in found.items() if packed is not None}

    def of_rollout(self, rollout_id: str) -> Packed | None:
        """See ``Catalog``."""
        lists = self.speaking(rollout_id)
        return self._packed(self.keys.rollout(rollout_id), lists) if lists else None

    def speaking(self, rollout_id: str) -> Lists:
        """The lists that name a rollout, without those of which a pack was told to forget it."""
        lists = self._listed(position(rollout_id)).get(rollout_id, frozenset())
        gone = self.deleted_from(rollout_id) if lists else frozenset()
        return frozenset(names for names in lists if not names & gone)

    def naming(self, rollout_id: str) -> list[PackName]:
        """The packs that hold anything of a rollout, and were not told to forget it, whoever speaks for it."""
        at = position(rollout_id)
        holding = {n for n in self.indexes if n.covers(at, at) and rollout_id in self.spans(n)}
        listed = (PackName.of(text) for names in self.speaking(rollout_id) for text in names)
        gone = self.deleted_from(rollout_id)
        return sorted(name for name in {*holding, *filter(None, listed)} if str(name) not in gone)

    def deleted_from(self, rollout_id: str) -> frozenset[str]:
        """The names of the packs that a rollout was deleted from; all of them where a tombstone cannot be read."""
        keys = self.tombstones.get(rollout_id)
        if keys is None:
            return frozenset()
        if rollout_id not in self._deleted:
            self._deleted[rollout_id] = self._read_deleted(keys)
        return self._deleted[rollout_id]

    def _read_deleted(self, keys: Iterable[str]) -> frozenset[str]:
        found: set[str] = set()
        for key in keys:
            names = self._decoded(key, decisions.read_deleted)
            found |= {str(name) for name in self.indexes.keys() | self.packs.keys()} if names is None else names
        return frozenset(found)

    def lists(self) -> dict[str, set[str]]:
        """For each pack that was ever listed, by name, the rollouts that it speaks for, deleted ones included."""
        found: dict[str, set[str]] = {}
        for name in self.done_keys:
            for rollout, lists in self._done(name).items():
                for listed in frozenset().union(*lists):
                    found.setdefault(listed, set()).add(rollout)
        return found

    def _listed(self, place: str) -> dict[str, Lists]:
        """The rollouts that are listed, as far as the span of the list covers ``place``."""
        found: dict[str, Lists] = {}
        for name in self.done_keys:
            if name.covers(place, place):
                for rollout, lists in self._done(name).items():
                    found[rollout] = found.get(rollout, frozenset()) | lists
        return found

    def _done(self, name: PackName) -> Mapping[str, Lists]:
        return self._lists.get(name, lambda: self._read_done(name))

    def index(self, name: PackName) -> Index:
        """The index of a pack. Raise ``CorruptObjectError`` when it is damaged or gone."""
        return self._tables.get(name, lambda: self._read_index(name))

    def found(self, keys: RolloutKeys, name: PackName) -> Found:
        """What a pack holds of a rollout."""
        index = self.index(name)
        start, stop = index.spans[keys.rollout_id]
        table = index.table.slice(start, stop - start)
        names = ("place", "stamp", "size", "framed", "content", "row_group")
        with decoding(self.keys.archive.index(name)):
            columns = [table.column(column).to_pylist() for column in names]
        rows: dict[str, ObjectInfo] = {}
        places: dict[str, tuple[int, bool, bytes | None]] = {}
        for place, stamp, size, framed, content, group in zip(*columns, strict=True):
            key = keys.at(place)
            rows[key] = ObjectInfo(key, size, stamp)
            places[key] = (group, framed, content)
        return Found(name, rows, places)

    def _packed(self, keys: RolloutKeys, lists: Lists) -> Packed:
        told: dict[str, Found] = {}
        problems: list[str] = []
        for names in sorted(map(sorted, lists)):
            try:
                told |= {text: self._whole(keys, text) for text in names}
            except CorruptObjectError as error:
                problems.append(f"what the archive holds of rollout {keys.rollout_id!r} cannot be read: {error}")
        problem = problems[0] if problems and not told else ""
        rows: dict[str, ObjectInfo] = {}
        for one in told.values():
            for key, row in one.rows.items():
                if rows.setdefault(key, row).size != row.size:
                    problem = f"two packs hold different objects for {key}"
        return Packed(rows, partial(self._unpack, keys, tuple(told.values()), problem), problem)

    def _whole(self, keys: RolloutKeys, text: str) -> Found:
        name = PackName.of(text)
        if name is None or name not in self.packs or name not in self.indexes:
            raise CorruptObjectError(f"pack {text}, or its index, is gone")
        if keys.rollout_id not in self.index(name).spans:
            raise CorruptObjectError(f"{self.keys.archive.index(name)}: does not name the rollout")
        return self.found(keys, name)

    def _unpack(
        self, keys: RolloutKeys, told: tuple[Found, ...], problem: str, wanted: Iterable[str]
    ) -> dict[str, bytes]:
        if problem:
            raise CorruptObjectError(problem)
        bodies_: dict[str, bytes] = {}
        missing: dict[tuple[PackName, int], dict[str, str]] = {}
        for key in wanted:
            one = next((one for one in told if key in one.places), None)
            if one is None:
                continue
            group, framed, content = one.places[key]
            if content is not None:
                bodies_[key] = body_of(framed, content)
            else:
                missing.setdefault((one.name, group), {})[keys.place(key) or ""] = key
        for (name, group), places in missing.items():
            bodies_ |= self._of_group(keys, name, group, places)
        return bodies_

    def _of_group(self, keys: RolloutKeys, name: PackName, group: int, places: dict[str, str]) -> dict[str, bytes]:
        table = self._packs.group(name, group)
        found: dict[str, bytes] = {}
        with decoding(self.keys.archive.pack(name)):
            rollouts, names = table.column("rollout").to_pylist(), table.column("place").to_pylist()
            for row, (rollout, place) in enumerate(zip(rollouts, names, strict=True)):
                if rollout == keys.rollout_id and place in places:
                    framed, content = table.column("framed")[row].as_py(), table.column("content")[row].as_py()
                    found[places[place]] = body_of(framed, content)
        if lost := places.keys() - {keys.place(key) for key in found}:
            raise CorruptObjectError(
                f"{self.keys.archive.pack(name)}: does not hold {sorted(lost)[0]!r} of rollout {keys.rollout_id!r}, "
                f"which its index places in row group {group}"
            )
        return found

    def spans(self, name: PackName, hh: str | None = None) -> Iterable[str]:
        """The rollouts of a pack, of one shard or all; none where its index cannot be read, which is noted."""
        try:
            index = self.index(name)
        except CorruptObjectError as error:
            self.problems[self.keys.archive.index(name)] = str(error)
            return ()
        return index.spans.keys() if hh is None else index.of_shard(hh)

    def _decoded(self, key: str, decode: Callable[[str, bytes], _T]) -> _T | None:
        """What a small object says; None where it is gone, or damaged, which is noted."""
        body = self._reader.get(key, self.what)
        try:
            return None if body is None else decode(key, body)
        except CorruptObjectError as error:
            self.problems[key] = str(error)
            return None

    def _read_done(self, name: PackName) -> dict[str, Lists]:
        found: dict[str, Lists] = {}
        for key in self.done_keys.get(name, ()):
            for rollout, names in (self._decoded(key, decisions.read_done) or {}).items():
                found[rollout] = found.get(rollout, frozenset()) | {frozenset(names)}
        return found

    def _read_index(self, name: PackName) -> Index:
        key = self.keys.archive.index(name)
        body = self._reader.get(key, self.what)
        if body is None:
            raise CorruptObjectError(f"{key}: the archive needs this object and it is gone")
        table = read_index(key, body, self.keys)
        with decoding(key):
            rollouts = table.column("rollout").to_pylist()
        spans: dict[str, tuple[int, int]] = {}
        start, of = 0, None
        for row, rollout in enumerate([*rollouts, None]):
            if rollout != of:
                if of is not None:
                    if of in spans:
                        raise CorruptObjectError(f"{key}: the rows of rollout {of!r} do not lie together")
                    if not name.covers(position(of), position(of)):
                        raise CorruptObjectError(f"{key}: rollout {of!r} does not lie in the span of its name")
                    spans[of] = (start, row)
                start, of = row, rollout
        give_back()
        return Index(table, spans)
