"""What retention asks of the archive of a run, and where the archive is plugged in.

The rule of this module: packs never change, so a rollout leaves them by a tombstone, and whatever reads packs is the
archive's business; retention only deletes keys that the archive names.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from s3capture.effects import Create, Steps
from s3capture.stored import StoredRun

if TYPE_CHECKING:
    from s3capture.runtime import Runtime


class ArchiveHand(Protocol):
    """What the archive of one run does for retention; safe to use from several threads."""

    def holds(self, rollout_id: str) -> bool:
        """Whether any pack holds anything of the rollout that was not told to forget it. Raise ``StoreError``."""
        ...

    def needs_fences(self, rollout_id: str) -> bool:
        """Whether a pack speaks for the rollout only because of its live fences, which must not be swept then."""
        ...

    def forget(self, rollout_ids: Sequence[str]) -> None:
        """Create the tombstones that delete rollouts from every pack; again is a no-op. Raise ``StoreError``."""
        ...

    def sweepable(self, until: float) -> Sequence[str]:
        """The keys of the archive that nobody needs: packs whose every rollout is deleted, with their indexes, lists
        and tombstones, and packs without an index that are older than ``until`` (Unix seconds)."""
        ...

    def confirm(self, keys: Sequence[str], until: float) -> Sequence[str]:
        """Those of ``keys`` that may still be deleted, judged by the archive as it is now. Raise ``StoreError``."""
        ...


def hand_of(run: StoredRun, runtime: Runtime) -> ArchiveHand | None:
    """The hand of the archive of ``run``; None where nothing was ever packed. Raise ``StoreError``.

    ``runtime`` is how it creates tombstones, ``run`` how it reads.
    """
    catalog = run.catalog()
    if catalog is None:
        return None
    from s3capture.archive.catalog import PackCatalog  # noqa: PLC0415 - only archives need pyarrow
    from s3capture.archive.deletion import ArchiveDeletion  # noqa: PLC0415

    if not isinstance(catalog, PackCatalog):
        raise AssertionError(f"no hand is known for a {type(catalog).__name__}")

    def create(key: str, body: bytes) -> None:
        what = f"deletion from the archive of run {run.keys.run!r}"
        runtime.submit("delete", what, lambda: _create(key, body), patient=True, publishes=False).result()

    return ArchiveDeletion(run, catalog, create, runtime.origin)


def _create(key: str, body: bytes) -> Steps[None]:
    # A tombstone that stands already names the same packs: its key is their digest.
    yield (Create(key, body),)
