"""What of an archive may go: rollouts that were deleted by name, and packs that speak for nobody any more.

The rule of this module: a pack does not change, so deleting a rollout from it is a tombstone, which hides it at once;
its bytes go when every rollout that the pack speaks for was deleted. A tombstone goes last, in a sweep after the one
that took the packs it names, or the rollout would come back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from s3capture.archive import decisions
from s3capture.archive.catalog import PackCatalog
from s3capture.inspection.summary import newest_of
from s3capture.keys import PackName
from s3capture.protocol.bodies import Origin


class ArchiveDeletion:
    """Deletes from the archive of one run; ``create`` creates a key if it is absent, ``origin`` says who acts."""

    def __init__(
        self, catalog: PackCatalog, create: Callable[[str, bytes], object], origin: Callable[[], Origin]
    ) -> None:
        self._catalog, self._create, self._origin = catalog, create, origin

    def holds(self, rollout_id: str) -> bool:
        """Whether any pack holds anything of the rollout that was not told to forget it. Raise ``StoreError``."""
        return bool(self._catalog.naming(rollout_id))

    def needs_fences(self, rollout_id: str) -> bool:
        """Whether the archive would lose a rollout with its live fences. It lists for whom it speaks, so never."""
        del rollout_id
        return False

    def forget(self, rollout_ids: Iterable[str]) -> None:
        """Delete rollouts from every pack that holds them; again is a no-op. Raise ``StoreError``."""
        for rollout in rollout_ids:
            if names := self._catalog.naming(rollout):
                self._create(*decisions.deleted(self._catalog.keys, rollout, names, self._origin()))

    def sweepable(self, until: float) -> list[str]:
        """The keys of the archive that nobody needs, last changed before ``until`` (Unix seconds), in no order.

        They are packs that speak for no rollout, or only for deleted ones, with their indexes and lists; packs without
        an index; and tombstones of packs that are gone. Where a list of the archive is damaged, nothing may go.
        """
        catalog, keys = self._catalog, self._catalog.keys.archive
        if not self._all_known():
            return []
        gone = [name for name in sorted(catalog.indexes) if self._is_old(name, until) and not self._speaks(name)]
        found = [key for name in gone for key in (keys.index(name), keys.pack(name), *catalog.done_keys.get(name, ()))]
        for name in sorted(catalog.packs.keys() - catalog.indexes.keys()):
            if self._is_old(name, until):
                found += [keys.pack(name), *catalog.done_keys.get(name, ())]
        known = {str(name) for name in catalog.packs.keys() | catalog.indexes.keys()}
        for rollout, tombstones in sorted(catalog.tombstones.items()):
            if not known & catalog.deleted_from(rollout):
                found += tombstones
        return found

    def _all_known(self) -> bool:
        """Whether every list says for whom it speaks: where one is damaged, no pack may go."""
        for name in self._catalog.done_keys:
            self._catalog.done(name)
        lists = {key for keys in self._catalog.done_keys.values() for key in keys}
        return not lists & self._catalog.problems.keys()

    def _is_old(self, name: PackName, until: float) -> bool:
        rows = [row for row in (self._catalog.packs.get(name), self._catalog.indexes.get(name)) if row is not None]
        changed = newest_of(rows)
        return changed is not None and changed < until

    def _speaks(self, name: PackName) -> bool:
        """Whether the pack speaks for any rollout that was not deleted from it."""
        listed = (
            rollout
            for other in self._catalog.done_keys
            for rollout, names in self._catalog.done(other).items()
            if str(name) in names
        )
        return any(str(name) not in self._catalog.deleted_from(rollout) for rollout in listed)
