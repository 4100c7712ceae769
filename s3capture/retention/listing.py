"""A run as retention sees it: the live objects of each rollout, shard by shard, with markers and ledger.

The rule of this module: it only reads, and it counts live objects, since only those can be deleted one by one. What
belongs to no rollout is a stray, which no command of this package touches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from s3capture.effects import ObjectInfo
from s3capture.reader import Reader
from s3capture.stored import StoredRollout, StoredRun
from s3capture.stored.grouping import by_rollout
from s3capture.stored.run import SHARDS_AHEAD, Catalog

_R = TypeVar("_R")
Rows = tuple[ObjectInfo, ...]


@dataclass(frozen=True, slots=True)
class Tally:
    """Rollouts, calls, objects and bytes of one line of a plan."""

    rollouts: int = 0
    calls: int = 0
    objects: int = 0
    bytes: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(
            self.rollouts + other.rollouts,
            self.calls + other.calls,
            self.objects + other.objects,
            self.bytes + other.bytes,
        )


def tally(rows: Iterable[ObjectInfo], *, rollouts: int = 0, calls: int = 0) -> Tally:
    """Count rows."""
    sizes = [row.size for row in rows]
    return Tally(rollouts, calls, len(sizes), sum(sizes))


@dataclass(frozen=True, slots=True)
class Parts:
    """One rollout: what is kept of it, and its live continuation markers and ledger."""

    stored: StoredRollout
    markers: Rows = ()
    ledger: Rows = ()

    @property
    def rollout(self) -> str:
        """The rollout id."""
        return self.stored.rollout_id

    @property
    def attempt(self) -> Rows:
        """The live objects of the attempt."""
        return self.stored.live


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard: its rollouts by id, in order, and the keys in it that belong to none."""

    rollouts: tuple[Parts, ...]
    strays: tuple[str, ...]


class LiveRun(StoredRun):
    """A run without its archive: only what can be deleted object by object."""

    def catalog(self, *, again: bool = False) -> Catalog | None:
        """None: packs are not looked at."""
        del again
        return None


def parts_of(run: StoredRun, rollout: str) -> Parts:
    """List one rollout: three LISTs. Raise ``StoreError``."""
    keys, what = run.keys, f"list of rollout {rollout!r}"
    markers = run.reader.list(keys.rollout(rollout).lineage_base, what)
    return Parts(run.rollout(rollout), markers, run.reader.list(keys.ledger(rollout).base, what))


def map_shards(run: StoredRun, work: Callable[[Shard], _R]) -> Iterator[_R]:
    """Yield ``work(shard)`` for every shard that holds anything; shards go in parallel.

    Three LISTs for a shard. ``work`` may read from ``run.reader``, and not ``map``. Raise ``StoreError``.
    """
    reader, keys = run.reader, run.keys
    lineage, ledgers = (_folders(reader, base) for base in (keys.lineage, keys.ledgers))
    attempts = frozenset(run.shards())

    def one(hh: str) -> _R:
        stored, strays = run.shard(hh) if hh in attempts else ([], [])
        markers, foreign = by_rollout(keys, reader.list(lineage[hh], run.what) if hh in lineage else ())
        ledger, strange = by_rollout(keys, reader.list(ledgers[hh], run.what) if hh in ledgers else ())
        views = {rollout.rollout_id: rollout for rollout in stored}
        for rollout in {*markers, *ledger} - views.keys():
            views[rollout] = StoredRollout(keys.rollout(rollout), (), reader)
        parts = (Parts(views[r], tuple(markers.get(r, ())), tuple(ledger.get(r, ()))) for r in sorted(views))
        return work(Shard(tuple(parts), (*strays, *(row.key for row in (*foreign, *strange)))))

    yield from reader.map(one, sorted({*attempts, *lineage, *ledgers}), ahead=SHARDS_AHEAD)


def _folders(reader: Reader, base: str) -> dict[str, str]:
    return {path[len(base) :].removesuffix("/"): path for path in reader.folders(base)}
