"""Candidates becoming packs: surveyed, read and written one after the other, in the order of the key space.

The rule of this module: what is packed of a rollout is what one survey found; an object that is gone when it is read
makes the rollout torn, and a torn rollout is never retired for a pack. Memory holds a bounded number of bodies and one
open row group, however large a rollout is.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from s3capture.archive.commit import Committer, Pack, Packed
from s3capture.archive.format import Item, PackWriter, content_of
from s3capture.archive.plan import Candidate, Verdict
from s3capture.effects import ObjectInfo, Steps
from s3capture.errors import CaptureError, StoreError
from s3capture.keys import RolloutKeys
from s3capture.protocol.archiving import Packable, examine
from s3capture.protocol.bodies import Origin
from s3capture.protocol.freezing import create_or_adopt_announcement, settle

_TOGETHER = 64


@dataclass(frozen=True, slots=True)
class _Fetch:
    """One object to be read; ``last`` of its rollout or not."""

    rollout: Packed
    row: ObjectInfo
    last: bool


class Packing:
    """Takes candidates and hands packs of about ``pack_bytes`` to ``committer``; files are written in ``folder``."""

    def __init__(self, committer: Committer, folder: Path, pack_bytes: int) -> None:
        self._committer, self._folder, self._pack_bytes = committer, folder, pack_bytes
        self._hand, self._reader, self._report = committer.hand, committer.run.reader, committer.report
        self._waiting: list[Candidate] = []
        self._pack: Pack | None = None
        self._number = 0

    def take(self, candidate: Candidate) -> None:
        """Pack a rollout. Some are gathered first, so that they are surveyed side by side."""
        self._waiting.append(candidate)
        if len(self._waiting) >= _TOGETHER:
            self._drain()

    def close(self) -> None:
        """Pack what waits, and commit the last pack."""
        self._drain()
        self._commit()

    def _drain(self) -> None:
        waiting, self._waiting = self._waiting, []
        fetches: list[_Fetch] = []
        for candidate, found in zip(waiting, self._reader.map(self._examine, waiting), strict=True):
            if isinstance(found, Packable):
                rollout = Packed(candidate.rollout.keys, found)
                # Sorted, so that what is read together lies together.
                rows = sorted(found.rows, key=lambda row: row.key)
                fetches.extend(_Fetch(rollout, row, row is rows[-1]) for row in rows)
            else:
                self._committer.leave(candidate.rollout.rollout_id, found)
        bodies = self._reader.map(self._get, fetches, weigh=lambda fetch: fetch.row.size)
        for fetch, body in zip(fetches, bodies, strict=True):
            self._add(fetch, body)

    def _examine(self, candidate: Candidate) -> Packable | str:
        keys, what = candidate.rollout.keys, self._committer.what(candidate.rollout.rollout_id)
        try:
            if candidate.verdict is Verdict.FREEZE:
                self._hand.run(_freeze(keys, self._hand.origin()), what)
            return self._hand.run(examine(keys, archived=candidate.rollout.archived), what)
        except StoreError:
            raise
        except CaptureError as error:  # damaged decisions: told, and left as it is
            return str(error)

    def _get(self, fetch: _Fetch) -> bytes | None:
        return self._reader.get(fetch.row.key, self._committer.what(fetch.rollout.keys.rollout_id))

    def _add(self, fetch: _Fetch, body: bytes | None) -> None:
        rollout, row = fetch.rollout, fetch.row
        if body is None:
            rollout.torn = "it was archived or deleted by someone else meanwhile"
        else:
            if self._pack is None:
                self._number += 1
                self._pack = Pack(self._writer())
            framed, content = content_of(row.key, body)
            place, changed = rollout.keys.place(row.key) or "", row.stamp.partition("/")[0]
            self._pack.add(rollout, row, Item(rollout.keys.rollout_id, place, changed, row.size, framed, content))
            self._report.objects_packed += 1
            self._report.bytes_packed += row.size
        if fetch.last:
            rollout.whole = True
            if self._pack is None or rollout.keys.rollout_id not in self._pack.rollouts:
                self._committer.leave(rollout.keys.rollout_id, rollout.torn)
        # A rollout is split over packs only when it is larger than one.
        if self._pack is not None and self._pack.writer.bytes >= (1 if fetch.last else 2) * self._pack_bytes:
            self._commit()

    def _writer(self) -> PackWriter:
        # A nonce, so that no other pack has this name: what a sweep judges by its age is of one archiver.
        path = self._folder / f"{self._number}.parquet"
        return PackWriter(self._committer.run.keys, path, nonce=self._hand.origin().nonce)

    def _commit(self) -> None:
        pack, self._pack = self._pack, None
        if pack is not None:
            self._committer.commit(pack)


def _freeze(keys: RolloutKeys, origin: Origin) -> Steps[None]:
    yield from create_or_adopt_announcement(keys, origin, "archive")
    yield from settle(keys, origin, "archive")
