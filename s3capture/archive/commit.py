"""A pack becoming part of the archive, and its rollouts leaving the key space.

The rule of this module is an order: the pack is created; it is read back and every object of it taken apart and
compared with what was read live; its index is created and read back; each rollout that is in the archive as a whole is
retired for what was packed; those that were are listed as done; and then, not before, their small objects are deleted.
Every step may be repeated, and nothing that a step needs is lost by dying before it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice

from s3capture import codec
from s3capture.archive import decisions
from s3capture.archive.format import Item, PackWriter, body_of, decoding, index_bytes, items_of, read_index, read_pack
from s3capture.archive.hand import Hand
from s3capture.archive.plan import Verdict
from s3capture.effects import ObjectInfo
from s3capture.errors import CorruptObjectError
from s3capture.keys import PackName, RolloutKeys, position
from s3capture.protocol.archiving import Packable, settle, swept, take_away
from s3capture.stored import StoredRun

_DELETE_BATCH = 1000


@dataclass(slots=True)
class Report:
    """What a run did: rollouts, objects, and bytes as stored.

    ``archived`` rollouts were packed and retired, ``finished`` ones had been before. ``left`` are rollouts that are as
    they were, with the reason; ``failed`` are keys that the store would not delete, with its reason. ``verdicts``
    counts what the plan said of each rollout.
    """

    archived: int = 0
    finished: int = 0
    packs: int = 0
    pack_bytes: int = 0
    index_bytes: int = 0
    objects_packed: int = 0
    bytes_packed: int = 0
    objects_deleted: int = 0
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    left: list[tuple[str, str]] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        """Whether everything that was to be archived was, and everything that was to be deleted is gone."""
        return not self.failed and not self.left


@dataclass(slots=True)
class Packed:
    """A rollout on its way into the archive. It is ``whole`` once its last object was read, ``torn`` says why not all
    of them could be. ``taken`` are the keys that are in packs, ``packs`` those that were committed.
    """

    keys: RolloutKeys
    packable: Packable
    whole: bool = False
    torn: str = ""
    taken: set[str] = field(default_factory=set)
    packs: list[PackName] = field(default_factory=list)


class Pack:
    """One pack being written, and what must come back from it."""

    def __init__(self, writer: PackWriter) -> None:
        self.writer = writer
        self.digests: dict[tuple[str, str], bytes] = {}
        self.rollouts: dict[str, Packed] = {}

    def add(self, rollout: Packed, row: ObjectInfo, item: Item) -> None:
        """Append one object of a rollout."""
        self.writer.add(item)
        self.digests[item.rollout, item.place] = item.digest
        self.rollouts[item.rollout] = rollout
        rollout.taken.add(row.key)


class Committer:
    """Commits packs of ``run``; what happens is added to ``report``."""

    def __init__(self, run: StoredRun, hand: Hand, report: Report, on_progress: Callable[[int], None]) -> None:
        self.run, self.hand, self.report, self._on_progress = run, hand, report, on_progress

    def what(self, rollout_id: str) -> str:
        """What is being done, for errors."""
        return f"archiving of rollout {rollout_id!r} of run {self.run.keys.run!r}"

    def leave(self, rollout_id: str, why: str) -> None:
        """Say that a rollout stays as it is."""
        self.report.left.append((rollout_id, why))
        self._on_progress(1)

    def commit(self, pack: Pack) -> None:
        """Make ``pack`` part of the archive. Raise ``StoreError``, ``CorruptObjectError``: nothing was deleted then."""
        archive, what = self.run.keys.archive, f"archiving of run {self.run.keys.run!r}"
        rows = pack.writer.close()
        body = pack.writer.path.read_bytes()
        pack.writer.path.unlink()
        places = sorted(map(position, pack.rollouts))
        name = PackName(places[0], places[-1], hashlib.sha256(body).hexdigest())
        self.hand.create(archive.pack(name), body, what, pack=True)
        self.report.pack_bytes += len(body)
        del body
        self._verify_pack(archive.pack(name), name, pack, what)
        index = index_bytes(self.run.keys, rows)
        self.hand.create(archive.index(name), index, what)
        self._verify_index(archive.index(name), rows, what)
        self.report.packs += 1
        self.report.index_bytes += len(index)
        for rollout in pack.rollouts.values():
            rollout.packs.append(name)
        self._conclude(name, [rollout for rollout in pack.rollouts.values() if rollout.whole], what)

    def _verify_pack(self, key: str, name: PackName, pack: Pack, what: str) -> None:
        body = self.run.reader.get(key, what)
        if body is None or hashlib.sha256(body).hexdigest() != name.digest:
            raise CorruptObjectError(f"{key}: does not hold what was written there; nothing of it was deleted")
        missing = dict(pack.digests)
        for item in read_pack(key, body, self.run.keys):
            if missing.pop((item.rollout, item.place), b"") != item.digest:
                raise CorruptObjectError(
                    f"{key}: {item.place!r} of rollout {item.rollout!r} is not what was read live; nothing was deleted"
                )
            if item.framed:
                # Put together and taken apart as any reader would: the payload has the digest that its header names.
                codec.decode(f"{key} {item.rollout} {item.place}", body_of(True, item.content))
        if missing:
            raise CorruptObjectError(f"{key}: lacks {len(missing)} of the objects packed; nothing of it was deleted")

    def _verify_index(self, key: str, rows: list[tuple[Item, int]], what: str) -> None:
        body = self.run.reader.get(key, what)
        if body is None:
            raise CorruptObjectError(f"{key}: is not there after it was written; nothing of it was deleted")
        table = read_index(key, body, self.run.keys)
        # Another run may have made it, from the same pack: what it says counts, not its bytes.
        with decoding(key):
            said = list(zip(items_of(table), table.column("row_group").to_pylist(), strict=True))
        if [(i.rollout, i.place, i.size, g) for i, g in said] != [(i.rollout, i.place, i.size, g) for i, g in rows]:
            raise CorruptObjectError(f"{key}: does not say what the pack holds; nothing of it was deleted")

    def _conclude(self, name: PackName, whole: list[Packed], what: str) -> None:
        ready = [rollout for rollout in whole if not rollout.torn]
        settled = list(self.run.reader.map(self._settle, ready))
        granted = [rollout for rollout, yes in zip(ready, settled, strict=True) if yes]
        if granted:
            origin = self.hand.origin()
            body = decisions.done(self.run.keys, {r.keys.rollout_id: r.packs for r in granted}, origin)
            self.hand.create(self.run.keys.archive.done(name, origin.nonce), body, what)
        names = frozenset(name for rollout in granted for name in rollout.packs)
        kept = self.hand.run(swept(self.run.keys.archive, names), what) if names else names
        for rollout in granted:
            if kept.intersection(rollout.packs):
                rollout.torn = "a sweep took its pack away meanwhile, so its records were kept; archive it again"
        granted = [rollout for rollout in granted if not rollout.torn]
        self.delete(frozenset(key for rollout in granted for key in rollout.packable.records & rollout.taken))
        self.report.archived += len(granted)
        self._on_progress(len(granted))
        for rollout in ready:
            if rollout not in granted and not rollout.torn:
                self.leave(rollout.keys.rollout_id, "it changed after it was packed, and stays live; archive it again")
        for rollout in whole:
            if rollout.torn:
                self.leave(rollout.keys.rollout_id, rollout.torn)

    def _settle(self, rollout: Packed) -> bool:
        steps = settle(rollout.keys, rollout.packable, self.hand.origin())
        return self.hand.run(steps, self.what(rollout.keys.rollout_id))

    def delete(self, keys: frozenset[str]) -> None:
        """Delete what the archive holds, in requests of at most 1,000 keys."""
        rest = iter(sorted(keys))
        while batch := frozenset(islice(rest, _DELETE_BATCH)):
            left = self.hand.run(take_away(batch), f"taking archived objects of run {self.run.keys.run!r} away")
            self.report.failed.extend(left)
            self.report.objects_deleted += len(batch) - len(left)
