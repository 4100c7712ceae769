"""One rollout as it is kept: its rows, and its bodies on demand.

The rule of this module: a key has one body, wherever it lies: packed if the archive has it, else live. Rows say what a
LIST said when the rollout was live, so sizes and times do not change by being packed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from s3capture.effects import ObjectInfo
from s3capture.keys import RolloutKeys
from s3capture.reader import Reader


@dataclass(frozen=True, slots=True)
class StoredRollout:
    """One rollout, live or archived or both.

    ``rows`` are the objects of the attempt, each key once. ``archived`` is True when the archive speaks for it: it was
    retired for a pack, and the fences of that retirement are not among the rows. ``packed`` are the keys whose bodies
    lie in packs, ``markers`` the continuation markers that do; ``live`` are the rows of the attempt that a LIST still
    shows, among them fences that are no part of what was archived. ``problem`` says why what the archive holds of it
    cannot be read, where it cannot: ``read`` raises that as ``CorruptObjectError`` then.
    """

    keys: RolloutKeys
    rows: tuple[ObjectInfo, ...]
    reader: Reader
    live: tuple[ObjectInfo, ...] = ()
    archived: bool = False
    packed: frozenset[str] = frozenset()
    markers: tuple[ObjectInfo, ...] = ()
    unpack: Callable[[Iterable[str]], Mapping[str, bytes]] = field(default=lambda _: {}, repr=False)
    problem: str = ""

    @property
    def rollout_id(self) -> str:
        """The rollout id, attempt suffix included."""
        return self.keys.rollout_id

    @property
    def what(self) -> str:
        """What is being read, for errors."""
        return f"reading of rollout {self.rollout_id!r} of run {self.keys.of.run!r}"

    def get(self, key: str) -> bytes | None:
        """Return the body of ``key``, one of ``rows`` or of ``lineage``; None when it is gone. Raise ``StoreError``."""
        return self.read((key,)).get(key)

    def read(self, keys: Iterable[str]) -> dict[str, bytes]:
        """Return the bodies of ``keys``, without those that are gone. Raise ``StoreError``.

        Live ones are read one after another: rollouts are what is read in parallel. Packed ones are unpacked together,
        which costs one pass over the part of the pack that holds them.
        """
        wanted = tuple(keys)
        packed = [key for key in wanted if key in self.packed]
        found = dict(self.unpack(packed)) if packed else {}
        for key in wanted:
            if key not in self.packed and (body := self.reader.get(key, self.what)) is not None:
                found[key] = body
        return found

    def read_in_parallel(self, keys: Iterable[str]) -> dict[str, bytes]:
        """As ``read``, with live objects side by side; for one rollout, from outside ``Reader.map``."""
        wanted = tuple(keys)
        found = self.read(key for key in wanted if key in self.packed)
        live = [key for key in wanted if key not in self.packed]
        bodies = self.reader.map(lambda key: self.reader.get(key, self.what), live)
        return found | {key: body for key, body in zip(live, bodies, strict=True) if body is not None}

    def lineage(self) -> tuple[ObjectInfo, ...]:
        """Return the rows of its continuation markers, live and packed: one LIST. Raise ``StoreError``."""
        live = self.reader.list(self.keys.lineage_base, self.what)
        seen = {row.key for row in live}
        return (*live, *(row for row in self.markers if row.key not in seen))
