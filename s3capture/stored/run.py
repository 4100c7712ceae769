"""All rollouts of a run, shard by shard: what is live, and what the archive speaks for.

The rule of this module: for a rollout that the archive speaks for, the packed rows are the rollout; a live row counts
beside them when it is a record that no pack holds (it came late, and is evidence), and a fence never does: those that
are live and not packed are the archive's own retirement. Rollouts that it does not speak for are what is live. Where
that is a retired rollout, the archive is listed again behind it: what was live a moment ago may be packed by now.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

from s3capture.effects import ObjectInfo
from s3capture.keys import Kind, RunKeys, parse
from s3capture.protocol.bodies import SEAL_LIMIT
from s3capture.reader import Reader
from s3capture.stored.grouping import by_rollout
from s3capture.stored.rollout import StoredRollout

_FENCES = (Kind.CLOSING, Kind.FROZEN, Kind.RETIRING, Kind.DROP, Kind.RETIRED)
SHARDS = tuple(f"{number:02x}" for number in range(256))
SHARDS_AHEAD = 8
"""Shards that are listed ahead: of a large run, or an archived one, each is megabytes of rows."""


@dataclass(frozen=True, slots=True)
class Packed:
    """What the archive says of one rollout: its rows by key (attempt and markers), and how their bodies are read.

    ``problem`` says, where not empty, why the rollout cannot be read whole; no body can be then.
    """

    rows: Mapping[str, ObjectInfo]
    unpack: Callable[..., Mapping[str, bytes]]
    problem: str = ""


class Catalog(Protocol):
    """The archive of one run, as the views need it."""

    def shards(self) -> frozenset[str]:
        """The shards that packs may hold rollouts of."""
        ...

    def of_shard(self, hh: str) -> Mapping[str, Packed]:
        """What the archive speaks for in one shard, by rollout id."""
        ...

    @property
    def problems(self) -> Mapping[str, str]:
        """The keys of the archive that could not be read so far, each with the reason."""
        ...

    def of_rollout(self, rollout_id: str) -> Packed | None:
        """What the archive says of one rollout, if it speaks for it."""
        ...


class StoredRun:
    """One run, for reading; safe to use from the threads of ``reader.map``. It does no I/O until it is asked."""

    def __init__(self, reader: Reader, keys: RunKeys) -> None:
        self.reader, self.keys = reader, keys
        self._lock = threading.Lock()
        self._catalog: Catalog | None = None
        self._rows: tuple[ObjectInfo, ...] | None = None
        self._problems: dict[str, str] = {}

    @property
    def what(self) -> str:
        """What is being read, for errors."""
        return f"list of run {self.keys.run!r}"

    def exists(self) -> bool:
        """Whether anything that makes it a run is stored under its name. Raise ``StoreError``."""
        folders = set(self.keys.parts).intersection(self.reader.folders(self.keys.root))
        return any(self._holds(folder) for folder in sorted(folders))

    def _holds(self, folder: str) -> bool:
        # Part by part, up to the first that is not empty: a LIST of the folder would be one of the whole run.
        parts = chain(self.reader.folders(folder), (folder,))
        return any(self.reader.list(part, "look for a run") for part in parts)

    def shards(self) -> tuple[str, ...]:
        """The shards that hold rollouts, in order. Raise ``StoreError``."""
        start = len(self.keys.attempts)
        # A folder that is no shard is still listed, so that what lies in it is told.
        live = {folder[start:].removesuffix("/") for folder in self.reader.folders(self.keys.attempts)}
        catalog = self.catalog()
        return tuple(sorted(live | (catalog.shards() if catalog else frozenset())))

    def shard(self, hh: str) -> tuple[list[StoredRollout], list[str]]:
        """Return the rollouts of one shard by id, and the keys in it that belong to none. Raise ``StoreError``."""
        live, strays = _owned(self.keys, self.reader.list(self.keys.attempts_shard(hh), self.what))
        catalog = self.catalog()
        packed = catalog.of_shard(hh) if catalog else {}
        if any(self._may_be_packed(rows) for rollout, rows in live.items() if rollout not in packed):
            catalog = self.catalog(again=True)
            packed = catalog.of_shard(hh) if catalog else {}
        return [
            self._stored(rollout, live.get(rollout, ()), packed.get(rollout)) for rollout in sorted({*live, *packed})
        ], strays

    def rollouts(self, *, on_stray: Callable[[str], None] = lambda _: None) -> Iterator[StoredRollout]:
        """Yield every rollout, shard by shard, and by id within one; shards are listed ahead, in parallel.

        ``on_stray`` is told every key among the attempts that belongs to no rollout. Raise ``StoreError``.
        """
        for rollouts, strays in self.reader.map(self.shard, self.shards(), ahead=SHARDS_AHEAD):
            for key in strays:
                on_stray(key)
            yield from rollouts

    def rollout(self, rollout_id: str) -> StoredRollout:
        """Return one rollout; without rows when nothing is stored under the id. Raise ``StoreError``."""
        live = self.reader.list(self.keys.rollout(rollout_id).base, self.what)
        catalog = self.catalog()
        packed = catalog.of_rollout(rollout_id) if catalog else None
        if packed is None and (not live or self._may_be_packed(live)):
            catalog = self.catalog(again=True)
            packed = catalog.of_rollout(rollout_id) if catalog else None
        return self._stored(rollout_id, live, packed)

    def catalog(self, *, again: bool = False) -> Catalog | None:
        """The archive of the run, or None when nothing was ever packed; listed once, or ``again``.

        Raise ``StoreError``, ``MissingExtraError``.
        """
        # Who asks again needs a LIST that began after theirs of what is live, so one after the other.
        with self._lock:
            if self._rows is None or again:
                rows = self.reader.list(self.keys.archive.base, self.what)
                if self._rows is None or {*rows} != {*self._rows}:
                    self._problems |= self._catalog.problems if self._catalog is not None else {}
                    self._rows, self._catalog = rows, self._read(rows)
            return self._catalog

    def _read(self, rows: tuple[ObjectInfo, ...]) -> Catalog | None:
        if not rows:
            return None
        from s3capture.archive.catalog import PackCatalog  # noqa: PLC0415 - only archives need pyarrow

        return PackCatalog(self.reader, self.keys, rows)

    def _may_be_packed(self, live: tuple[ObjectInfo, ...]) -> bool:
        kinds = (parse(self.keys.root, row.key) for row in live)
        return any(found is not None and found.kind in (Kind.RETIRED, Kind.DROP) for found in kinds)

    def problems(self) -> dict[str, str]:
        """What of the archive could not be read so far: keys, each with the reason. Ask after the rollouts."""
        return self._problems | dict(self._catalog.problems if self._catalog is not None else {})

    def _is_record(self, row: ObjectInfo) -> bool:
        """Whether a live object is one that archiving takes away: a small outcome may be a seal, which stays."""
        parsed = parse(self.keys.root, row.key)
        kind = None if parsed is None else parsed.kind
        return kind in (Kind.INTENT, Kind.CONFLICT, Kind.MARK) or (kind is Kind.CALL and row.size > SEAL_LIMIT)

    def _is_fence(self, row: ObjectInfo) -> bool:
        parsed = parse(self.keys.root, row.key)
        return parsed is not None and parsed.kind in _FENCES

    def _stored(self, rollout_id: str, live: tuple[ObjectInfo, ...], packed: Packed | None) -> StoredRollout:
        keys = self.keys.rollout(rollout_id)
        if packed is None or (packed.problem and any(self._is_record(row) for row in live)):
            # Where a pack was lost before its copies were taken away, they are the rollout.
            return StoredRollout(keys, live, self.reader, live)
        if packed.problem:
            self._problems[f"{self.keys.archive.base} {rollout_id}"] = packed.problem
        extra = [row for row in live if row.key not in packed.rows and not self._is_fence(row)]
        own = [row for key, row in packed.rows.items() if key.startswith(keys.base)]
        markers = tuple(row for key, row in packed.rows.items() if not key.startswith(keys.base))
        return StoredRollout(
            keys,
            (*own, *extra),
            self.reader,
            live,
            True,
            frozenset(packed.rows),
            markers,
            packed.unpack,
            packed.problem,
        )


def _owned(keys: RunKeys, rows: tuple[ObjectInfo, ...]) -> tuple[dict[str, tuple[ObjectInfo, ...]], list[str]]:
    grouped, unknown = by_rollout(keys, rows)
    bases = {keys.rollout(rollout).base: rollout for rollout in grouped} if unknown else {}
    strays: list[str] = []
    for row in unknown:
        owner = next((rollout for base, rollout in bases.items() if row.key.startswith(base)), None)
        if owner is None:
            strays.append(row.key)
        else:
            grouped[owner].append(row)
    return {rollout: tuple(found) for rollout, found in grouped.items()}, strays
