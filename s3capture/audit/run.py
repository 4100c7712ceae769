"""A whole run, audited: its rollouts shard by shard, and then what belongs to none of them.

The rule of this module: the key space is listed once, one LIST a shard for attempts, lineage and ledger each, ahead and
in parallel; what is held is bounded by the width of the reader and by ``MAX_BYTES``, and of a rollout that was
audited only its totals stay. Lineage and ledgers are listed before the attempts,
so that a put that comes in between shows as an outcome whose marker is looked for again, and never as an orphan.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from s3capture.audit.archives import archive_findings
from s3capture.audit.findings import Finding, Kind, many
from s3capture.audit.rollout import Budget, RolloutAudit, audit_rollout
from s3capture.audit.spilled import spilled
from s3capture.audit.totals import Totals
from s3capture.effects import ObjectInfo
from s3capture.inspection.summary import newest_of
from s3capture.keys import Kind as KeyKind
from s3capture.keys import RunKeys, parse
from s3capture.reader import Reader
from s3capture.spill import Spill, Target
from s3capture.stored import Selection, StoredRollout, StoredRun
from s3capture.stored.grouping import by_rollout
from s3capture.stored.run import SHARDS_AHEAD

MAX_BYTES = 128 * 1024 * 1024
"""Of rollouts being judged at once, in bytes as stored; one that is larger is judged alone."""


@dataclass(frozen=True, slots=True)
class _Shard:
    """One shard as listed: rollouts, the markers and ledgers by rollout id, and keys that are of none."""

    rollouts: tuple[StoredRollout, ...]
    markers: dict[str, list[ObjectInfo]]
    ledgers: dict[str, list[ObjectInfo]]
    foreign: tuple[str, ...]


@dataclass(slots=True)
class RunAudit:
    """The audit of one run. Walk ``rollouts()`` to its end, then ``findings`` and ``totals`` are whole.

    ``selection`` chooses rollouts by id and time of the last change (its states and completeness are not looked at);
    what belongs to no rollout is told all the same, unless ids are chosen. ``spill`` and ``target`` add the marks that
    wait on this machine's disk.
    """

    reader: Reader
    keys: RunKeys
    selection: Selection = field(default_factory=Selection)
    spill: Spill | None = None
    target: Target | None = None
    findings: list[Finding] = field(default_factory=list)
    totals: Totals = field(default_factory=Totals)
    _both: int = 0
    _without_ledger: list[str] = field(default_factory=list)
    _without_capture: list[str] = field(default_factory=list)

    def rollouts(self) -> Iterator[RolloutAudit]:
        """Yield every chosen rollout, audited, in the order of the key space. Raise ``StoreError``, ``SpillError``."""
        run, budget = StoredRun(self.reader, self.keys), Budget(MAX_BYTES)

        def judged(item: tuple[StoredRollout, tuple[ObjectInfo, ...], tuple[ObjectInfo, ...]]) -> RolloutAudit:
            rollout, markers, ledger = item
            return audit_rollout(
                rollout,
                again=lambda: run.rollout(rollout.rollout_id),
                markers=markers,
                ledger=ledger,
                budget=budget,
            )

        for audit in self.reader.map(judged, self._chosen(run)):
            self.totals.take(audit)
            yield audit
        if self.selection == Selection():
            self._strays(run)
        for key, problem in sorted(run.problems().items()):
            self.findings.append(Finding(Kind.DAMAGED_OBJECT, problem, key=key))
        if self.spill is not None and self.target is not None:
            found = spilled(self.spill, self.target)
            self.findings += (one for one in found if one.rollout is None or self.selection.names(one.rollout))
        self.totals.take_findings(self.findings)

    # -- the key space ------------------------------------------------------------------------------------

    def _chosen(self, run: StoredRun) -> Iterator[tuple[StoredRollout, tuple[ObjectInfo, ...], tuple[ObjectInfo, ...]]]:
        for shard in self._shards(run):
            self._compare(shard)
            for rollout in shard.rollouts:
                if self._takes(rollout):
                    name = rollout.rollout_id
                    yield rollout, tuple(shard.markers.get(name, ())), tuple(shard.ledgers.get(name, ()))
            known = {rollout.rollout_id for rollout in shard.rollouts}
            for name, rows in shard.ledgers.items():
                alone = StoredRollout(self.keys.rollout(name), (), self.reader)
                if name not in known and self.selection.names(name) and self._in_time(tuple(rows)):
                    yield alone, (), tuple(rows)

    def _shards(self, run: StoredRun) -> Iterator[_Shard]:
        lineage = {folder[len(self.keys.lineage) :]: folder for folder in self.reader.folders(self.keys.lineage)}
        ledgers = {folder[len(self.keys.ledgers) :]: folder for folder in self.reader.folders(self.keys.ledgers)}
        attempts = {f"{hh}/" for hh in run.shards()}

        def listed(place: str) -> _Shard:
            what = f"list of run {self.keys.run!r}"
            markers, odd = by_rollout(self.keys, self.reader.list(lineage[place], what) if place in lineage else ())
            rows, odd_too = by_rollout(self.keys, self.reader.list(ledgers[place], what) if place in ledgers else ())
            rollouts, strays = run.shard(place.removesuffix("/")) if place in attempts else ([], [])
            return _Shard(tuple(rollouts), markers, rows, (*strays, *(row.key for row in (*odd, *odd_too))))

        return self.reader.map(listed, sorted(attempts | lineage.keys() | ledgers.keys()), ahead=SHARDS_AHEAD)

    def _takes(self, rollout: StoredRollout) -> bool:
        return self.selection.names(rollout.rollout_id) and self._in_time(rollout.rows)

    def _in_time(self, rows: tuple[ObjectInfo, ...]) -> bool:
        since, until = self.selection.since, self.selection.until
        if since is None and until is None:
            return True
        changed = newest_of(rows)
        return changed is not None and (since is None or changed >= since) and (until is None or changed < until)

    # -- what belongs to no rollout ---------------------------------------------------------------------

    def _compare(self, shard: _Shard) -> None:
        """Note what attempts, lineage and ledger of one shard do not agree on."""
        if self.selection != Selection(globs=self.selection.globs):
            return
        if not self.selection.globs:
            self.findings += (_foreign(key) for key in shard.foreign)
        known = {rollout.rollout_id for rollout in shard.rollouts}
        for rollout_id, rows in shard.markers.items():
            if rollout_id not in known and self.selection.names(rollout_id):
                self._orphan_markers(rollout_id, rows)
        self._both += len(known & shard.ledgers.keys())
        self._without_ledger += sorted(known - shard.ledgers.keys())
        self._without_capture += sorted(shard.ledgers.keys() - known)

    def _orphan_markers(self, rollout_id: str, rows: list[ObjectInfo]) -> None:
        # Looked at again: it may have been its first put that came in between, or a delete that was under way.
        keys = self.keys.rollout(rollout_id)
        left = self.reader.list(keys.lineage_base, "look again for a rollout")
        if not left or self.reader.list(keys.base, "look again for a rollout"):
            return
        sentence = f"{many(len(rows), 'lineage marker')} of rollout {rollout_id!r}, of which nothing else is stored"
        more = {"markers": len(rows), "keys": [row.key for row in rows[:20]]}
        self.findings.append(Finding(Kind.ORPHAN_LINEAGE, sentence, rollout_id, key=rows[0].key, details=more))

    def _strays(self, run: StoredRun) -> None:
        """What lies beside the shards: probes, the archive, folders of others, and halves of ledger and capture."""
        if self._both:
            # Only then are both kept in this run; a run may well keep its tokens elsewhere, and have a ledger alone.
            for rollout_id in self._without_capture:
                sentence = f"rollout {rollout_id!r} has a ledger and no capture, while others of this run have both"
                self.findings.append(Finding(Kind.ORPHAN_LEDGER, sentence, rollout_id))
            for rollout_id in self._without_ledger:
                sentence = f"rollout {rollout_id!r} has a capture and no ledger, while others of this run have both"
                self.findings.append(Finding(Kind.ORPHAN_CAPTURE, sentence, rollout_id))
        sharded = (self.keys.attempts, self.keys.lineage, self.keys.ledgers)
        for place in (self.keys.root, *sharded):
            self.findings += (_foreign(key) for key in self.reader.loose(place))
        for folder in self.reader.folders(self.keys.root):
            if folder not in sharded:
                rows = self.reader.list(folder, f"list of run {self.keys.run!r}")
                self.findings += archive_findings(run, rows) if folder == self.keys.archive.base else self._beside(rows)

    def _beside(self, rows: Iterable[ObjectInfo]) -> Iterator[Finding]:
        for row in rows:
            parsed = parse(self.keys.root, row.key)
            if parsed is not None and parsed.kind is KeyKind.PROBE:
                sentence = f"{row.key}: left by a check at first use whose process died; it may be deleted"
                yield Finding(Kind.PROBE_LEFTOVER, sentence, key=row.key)
            elif parsed is None:
                yield _foreign(row.key)


def _foreign(key: str) -> Finding:
    return Finding(Kind.FOREIGN_KEY, f"{key}: nothing that this project writes is called so", key=key)
