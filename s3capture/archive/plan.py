"""Which rollouts an archive run would take, and what the rest are left for.

The rule of this module: the same walk serves the dry run and the real one, so what was printed is what is done; and
what an earlier run began is finished whatever was selected, since nothing else would. It only reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from s3capture.archive.catalog import PackCatalog
from s3capture.archive.packs import Cache
from s3capture.effects import ObjectInfo
from s3capture.errors import CorruptObjectError
from s3capture.inspection import RolloutSummary, State, summary_of
from s3capture.keys import Kind, parse, shard
from s3capture.protocol import bodies
from s3capture.protocol.bodies import SEAL_LIMIT
from s3capture.stored import Selection, StoredRollout, StoredRun

_RECORDS = (Kind.INTENT, Kind.CALL, Kind.CONFLICT, Kind.MARK, Kind.LINEAGE, Kind.LINEAGE_CONFLICT)


class Verdict(StrEnum):
    """What becomes of a rollout. ``finish``: it was archived, and copies are left to take away."""

    PACK = "pack"
    FINISH = "finish"
    FREEZE = "freeze and pack"
    ARCHIVED = "archived already"
    EMPTY = "without records"
    OPEN = "not frozen"
    OTHERWISE = "not selected"

    @property
    def acts(self) -> bool:
        """Whether an archive run does anything to the rollout."""
        return self in (Verdict.PACK, Verdict.FINISH, Verdict.FREEZE)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One rollout of the run and what becomes of it.

    ``records`` are the small objects that would go: live, and neither fence nor seal. ``copies`` are those of them that
    the archive holds already. ``staying`` counts the fences and seals.
    """

    rollout: StoredRollout
    summary: RolloutSummary
    verdict: Verdict
    records: tuple[ObjectInfo, ...]
    copies: frozenset[str]
    staying: int


class Planner:
    """Judges the rollouts of ``run`` by ``selection``; with ``freeze_open``, open ones are taken too."""

    def __init__(self, run: StoredRun, selection: Selection, *, freeze_open: bool = False) -> None:
        self._run, self._selection, self._freeze_open = run, selection, freeze_open
        # Rollouts come shard by shard, and a few shards are under way at once.
        self._markers: Cache[dict[str, list[ObjectInfo]]] = Cache(32, lambda _: 1)

    def candidates(self) -> Iterator[Candidate]:
        """Yield every rollout whose id the selection names, in order of the key space. Raise ``StoreError``."""
        rollouts = (rollout for rollout in self._run.rollouts() if self._selection.names(rollout.rollout_id))
        yield from self._run.reader.map(self.judge, rollouts)

    def judge(self, rollout: StoredRollout) -> Candidate:
        """Judge one rollout."""
        summary = summary_of(rollout)
        live = (*rollout.live, *self._markers_of(rollout.rollout_id))
        records = self._without_seals(rollout, [row for row in live if self._is_record(row.key)])
        copies = frozenset(row.key for row in records if row.key in rollout.packed)
        verdict = self._verdict(rollout, summary, records, copies)
        return Candidate(rollout, summary, verdict, records, copies, len(live) - len(records))

    def _verdict(
        self, rollout: StoredRollout, summary: RolloutSummary, records: tuple[ObjectInfo, ...], copies: frozenset[str]
    ) -> Verdict:
        if rollout.archived:
            # What is live and not packed came late: the rollout is packed again, for that alone.
            return Verdict.PACK if len(records) > len(copies) else Verdict.FINISH if copies else Verdict.ARCHIVED
        if summary.state in (State.FROZEN, State.RETIRED) and not records:
            return Verdict.EMPTY
        if summary.state is State.RETIRED and self._was_packed(rollout.rollout_id):
            return Verdict.PACK
        if not self._selection.takes(summary):
            return Verdict.OTHERWISE
        if summary.state in (State.FROZEN, State.RETIRED):
            return Verdict.PACK
        return Verdict.FREEZE if self._freeze_open else Verdict.OPEN

    def _was_packed(self, rollout_id: str) -> bool:
        catalog = self._run.catalog()
        return isinstance(catalog, PackCatalog) and bool(catalog.naming(rollout_id))

    def _is_record(self, key: str) -> bool:
        parsed = parse(self._run.keys.root, key)
        return parsed is not None and parsed.kind in _RECORDS

    def _markers_of(self, rollout_id: str) -> tuple[ObjectInfo, ...]:
        hh = shard(rollout_id)
        return tuple(self._markers.get(hh, lambda: self._list_markers(hh)).get(rollout_id, ()))

    def _list_markers(self, hh: str) -> dict[str, list[ObjectInfo]]:
        keys, found = self._run.keys, dict[str, list[ObjectInfo]]()
        for row in self._run.reader.list(keys.lineage_shard(hh), self._run.what):
            if (parsed := parse(keys.root, row.key)) is not None:
                found.setdefault(parsed.rollout_id, []).append(row)
        return found

    def _without_seals(self, rollout: StoredRollout, rows: Iterable[ObjectInfo]) -> tuple[ObjectInfo, ...]:
        kept = []
        for row in rows:
            parsed = parse(self._run.keys.root, row.key)
            small = parsed is not None and parsed.kind is Kind.CALL and row.size <= SEAL_LIMIT
            if not (small and parsed is not None and self._is_seal(rollout, parsed.call, row.key)):
                kept.append(row)
        return tuple(kept)

    def _is_seal(self, rollout: StoredRollout, segment: str, key: str) -> bool:
        body = rollout.get(key)
        try:
            return body is not None and bodies.read_outcome(rollout.keys, segment, body).kind == bodies.SEAL
        except CorruptObjectError:
            return False
