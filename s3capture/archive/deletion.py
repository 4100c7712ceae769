"""What of an archive may go: rollouts that were deleted by name, and packs that speak for nobody any more.

The rule of this module: a pack does not change, so deleting a rollout from it is a tombstone, which hides it at once;
its bytes go when every rollout in it was deleted. A pack that speaks for nobody goes only if all that it holds is
elsewhere, and not within a day: its archiver may be about to list it. A tombstone goes last, in a sweep after the one
that took the packs it names, or the rollout would come back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping

from s3capture.archive import decisions
from s3capture.archive.catalog import PackCatalog
from s3capture.effects import ObjectInfo
from s3capture.inspection.summary import newest_of
from s3capture.keys import PackName, RolloutKeys, position
from s3capture.protocol.bodies import Origin
from s3capture.stored import StoredRun

_UNDER_WAY_S = 86_400.0
"""For how long an archiver may be between creating a pack and listing it. It takes minutes."""

_LOOK = "look for what a pack holds"


class ArchiveDeletion:
    """Deletes from the archive of one run; ``create`` creates a key if it is absent, ``origin`` says who acts."""

    def __init__(
        self,
        run: StoredRun,
        catalog: PackCatalog,
        create: Callable[[str, bytes], object],
        origin: Callable[[], Origin],
    ) -> None:
        self._run, self._catalog, self._create, self._origin = run, catalog, create, origin

    def holds(self, rollout_id: str) -> bool:
        """Whether any pack holds anything of the rollout that was not told to forget it.

        Raise ``StoreError``, and ``CorruptObjectError`` where an index that may name the rollout cannot be read.
        """
        at = position(rollout_id)
        for name in self._catalog.indexes:
            if name.covers(at, at):
                self._catalog.index(name)
        return bool(self._catalog.naming(rollout_id))

    def needs_fences(self, rollout_id: str) -> bool:
        """Whether the live fences of a rollout are needed: where a pack speaks for it, its id must stay refused.

        Whatever was captured anew under the id would lie in a rollout that reads as the packed one.
        """
        return bool(self._catalog.speaking(rollout_id))

    def forget(self, rollout_ids: Iterable[str]) -> None:
        """Delete rollouts from every pack that holds them; again is a no-op. Raise ``StoreError``."""
        for rollout in rollout_ids:
            if names := self._catalog.naming(rollout):
                self._create(*decisions.deleted(self._catalog.keys, rollout, names, self._origin()))

    def sweepable(self, until: float) -> list[str]:
        """The keys of the archive that nobody needs, last changed before ``until`` (Unix seconds), in no order.

        They are packs of which every rollout was deleted by name; packs that nobody listed and whose rollouts are live
        or spoken for by others, or that have no index; and what packs that are gone left: lists and tombstones of
        deleted rollouts. What nobody listed stays for a day whatever ``until`` says: its archiver may be about to. A
        pack that holds a record which is nowhere else stays: its list may be lost. Where anything of the archive is
        damaged, nothing may go.
        """
        catalog, keys = self._catalog, self._catalog.keys.archive
        lists = catalog.lists()
        every = catalog.indexes.keys() | catalog.packs.keys()
        gone = {name for name in every if self._may_go(name, lists, until)}
        if catalog.problems:
            return []
        found: list[str] = []
        for name in sorted(gone):
            found += [keys.index(name)] if name in catalog.indexes else []
            found += [keys.pack(name)] if name in catalog.packs else []
        for name, done in catalog.done_keys.items():
            if name in gone or (name not in every and self._is_void(name, lists)):
                found += done
        known = {str(name) for name in every}
        listed = frozenset[str]().union(*lists.values())
        for rollout, tombstones in sorted(catalog.tombstones.items()):
            if rollout not in listed and not known & catalog.deleted_from(rollout):
                found += tombstones
        return found

    def confirm(self, keys: Iterable[str], until: float) -> list[str]:
        """Return those of ``keys`` that may still be deleted, judged by the archive as it is now."""
        catalog = self._run.catalog(again=True)
        if not isinstance(catalog, PackCatalog):
            return []
        still = set(ArchiveDeletion(self._run, catalog, self._create, self._origin).sweepable(until))
        return [key for key in keys if key in still]

    def _is_old(self, name: PackName, until: float) -> bool:
        rows = [row for row in (self._catalog.packs.get(name), self._catalog.indexes.get(name)) if row is not None]
        return all(_before(row, until) for row in rows)

    def _speaks(self, name: PackName, lists: Mapping[str, set[str]]) -> bool:
        """Whether the pack speaks for any rollout that was not deleted from it."""
        return any(str(name) not in self._catalog.deleted_from(rollout) for rollout in lists.get(str(name), ()))

    def _is_void(self, name: PackName, lists: Mapping[str, set[str]]) -> bool:
        """Whether what was listed for a pack that is gone was deleted, or is whole elsewhere."""
        for rollout in lists.get(str(name), ()):
            if str(name) not in self._catalog.deleted_from(rollout):
                packed = self._catalog.of_rollout(rollout)
                if packed is None or packed.problem:
                    return False
        return True

    def _may_go(self, name: PackName, lists: Mapping[str, set[str]], until: float) -> bool:
        if self._speaks(name, lists) or not self._is_old(name, until):
            return False
        if name in self._catalog.indexes:
            rollouts = self._catalog.spans(name)
            if all(str(name) in self._catalog.deleted_from(rollout) for rollout in rollouts):
                return True
            elsewhere = all(self._is_elsewhere(self._catalog.keys.rollout(rollout), name) for rollout in rollouts)
        elif str(name) in lists:
            return True  # for rollouts that were all deleted from it
        else:
            elsewhere = True
        return elsewhere and self._is_old(name, time.time() - _UNDER_WAY_S)

    def _is_elsewhere(self, keys: RolloutKeys, name: PackName) -> bool:
        """Whether nothing of a rollout would be lost with a pack."""
        if str(name) in self._catalog.deleted_from(keys.rollout_id):
            return True
        packed = self._catalog.of_rollout(keys.rollout_id)
        if packed is not None:
            return not packed.problem
        live = {row.key for prefix in (keys.base, keys.lineage_base) for row in self._run.reader.list(prefix, _LOOK)}
        return self._catalog.found(keys, name).rows.keys() <= live


def _before(row: ObjectInfo, until: float) -> bool:
    changed = newest_of((row,))
    return changed is not None and changed < until
