"""Archive the rollouts of a run: pack after pack, and what earlier runs left unfinished.

The rule of this module: whatever was selected is taken by the one walk of ``plan``; a rollout that cannot be archived
is told with its reason and left as it is, and the others go on. Killed anywhere, the next run goes on; two runs at once
waste work and lose nothing.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from s3capture.archive.commit import Committer, Report
from s3capture.archive.format import content_of
from s3capture.archive.hand import Hand
from s3capture.archive.packing import Packing
from s3capture.archive.plan import Candidate, Planner, Verdict
from s3capture.errors import CorruptObjectError
from s3capture.stored import Selection, StoredRun

PACK_BYTES = 32 * 1024 * 1024


class Archiver:
    """Archives what a selection takes of one run; ``pack_bytes`` is the size at which a pack is closed.

    With ``freeze_open``, open rollouts are frozen first. ``on_progress`` is told how many rollouts were dealt with.
    """

    def __init__(
        self,
        run: StoredRun,
        hand: Hand,
        *,
        pack_bytes: int = PACK_BYTES,
        freeze_open: bool = False,
        on_progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._run, self._hand, self._reader = run, hand, run.reader
        self._pack_bytes, self._freeze_open, self._on_progress = pack_bytes, freeze_open, on_progress
        self.report = Report()

    def archive(self, selection: Selection) -> Report:
        """Archive; return what was done.

        Raise ``StoreError`` when the store is out of reach, and ``CorruptObjectError`` when a pack does not come back
        as it was written: nothing of it is deleted then.
        """
        committer = Committer(self._run, self._hand, self.report, self._on_progress)
        with tempfile.TemporaryDirectory(prefix="s3capture-archive-") as folder:
            packing = Packing(committer, Path(folder), self._pack_bytes)
            for candidate in Planner(self._run, selection, freeze_open=self._freeze_open).candidates():
                self.report.verdicts[candidate.verdict] += 1
                if candidate.verdict is Verdict.FINISH:
                    self._finish(candidate, committer)
                elif candidate.verdict.acts:
                    packing.take(candidate)
                else:
                    self._on_progress(1)
            packing.close()
        return self.report

    def _finish(self, candidate: Candidate, committer: Committer) -> None:
        """Take away copies that an earlier run left, each compared with the archive first."""
        rollout, wanted = candidate.rollout, sorted(candidate.copies)
        what = committer.what(rollout.rollout_id)
        try:
            packed = rollout.read(wanted)
        except CorruptObjectError as error:
            self.report.left.append((rollout.rollout_id, str(error)))
            return
        found = self._reader.map(lambda key: self._reader.get(key, what), wanted)
        live = {key: body for key, body in zip(wanted, found, strict=True) if body is not None}
        same = frozenset(key for key, body in live.items() if _same(key, body, packed.get(key)))
        for key in sorted(live.keys() - same):
            self.report.left.append((rollout.rollout_id, f"{key}: the archive holds something else; both were kept"))
        committer.delete(same)
        self.report.finished += 1
        self._on_progress(1)


def _same(key: str, live: bytes, packed: bytes | None) -> bool:
    return packed is not None and content_of(key, live) == content_of(key, packed)
