"""The archive of a run, audited: packs, their indexes, and the lists that say for which rollouts they speak.

The rule of this module: what a list says counts, and not what its key is called: a rollout may lie in several packs,
and is lost if one of them is. A pack that no list names is read by nobody; that is worth a word when no other records
of its rollouts are left, since then its list may be what was lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from s3capture.archive import decisions
from s3capture.audit.findings import Finding, Kind, many
from s3capture.effects import ObjectInfo
from s3capture.errors import CorruptObjectError
from s3capture.inspection import State, summary_of
from s3capture.keys import Kind as KeyKind
from s3capture.keys import PackName, parse
from s3capture.stored import StoredRun


@dataclass(slots=True)
class _Archive:
    """The keys of an archive by what they are: packs and indexes by name, lists, tombstones by rollout."""

    packs: dict[str, str] = field(default_factory=dict)
    indexes: dict[str, str] = field(default_factory=dict)
    lists: list[tuple[str, str]] = field(default_factory=list)
    tombstones: dict[str, list[str]] = field(default_factory=dict)
    foreign: list[str] = field(default_factory=list)


def archive_findings(run: StoredRun, rows: Iterable[ObjectInfo]) -> Iterator[Finding]:
    """Yield what is wrong with the archive of ``run`` as a whole; ``rows`` are its LIST. Raise ``StoreError``.

    An index that cannot be read is among ``run.problems()`` afterwards.
    """
    found = _sorted(run, rows)
    for key in found.foreign:
        yield Finding(Kind.FOREIGN_KEY, f"{key}: nothing that this project writes is called so", key=key)
    listed = _listed(run, found)
    for name in sorted(found.packs.keys() - found.indexes.keys() - listed.keys()):
        key = found.packs[name]
        sentence = f"{key}: a pack without an index: an archive run or a sweep is under way, or died"
        yield Finding(Kind.ORPHAN_PACK, sentence, key=key, details={"pack": name})
    for name in sorted(found.indexes.keys() - found.packs.keys()):
        key = found.indexes[name]
        sentence = f"{key}: an index whose pack is gone: what was archived in it cannot be read"
        yield Finding(Kind.LOST_PACK, sentence, key=key, details={"pack": name})
    for name in sorted(listed.keys() - found.indexes.keys()):
        key, rollouts = listed[name]
        what = "a pack" if name in found.packs else "a pack that is gone, and"
        whose = many(len(rollouts), "rollout") if rollouts else "rollouts"
        sentence = f"{key}: {whose} were retired for {what} whose index is gone"
        if name in found.packs:
            sentence += f"; the pack is still there: {found.packs[name]}"
        details = {"pack": name, "rollouts": sorted(rollouts)[:20]}
        yield Finding(Kind.LOST_PACK, sentence, key=key, details=details)
    for name in sorted(found.indexes.keys() - listed.keys()):
        yield from _unlisted(run, found, name)


def _sorted(run: StoredRun, rows: Iterable[ObjectInfo]) -> _Archive:
    found = _Archive()
    for row in rows:
        parsed = parse(run.keys.root, row.key)
        match parsed.kind if parsed else None:
            case KeyKind.ARCHIVE_PACK if parsed:
                found.packs[parsed.detail] = row.key
            case KeyKind.ARCHIVE_INDEX if parsed:
                found.indexes[parsed.detail] = row.key
            case KeyKind.ARCHIVE_DONE if parsed:
                found.lists.append((parsed.detail, row.key))
            case KeyKind.ARCHIVE_DELETED if parsed:
                found.tombstones.setdefault(parsed.rollout_id, []).append(row.key)
            case None:
                found.foreign.append(row.key)
    return found


def _listed(run: StoredRun, found: _Archive) -> dict[str, tuple[str, set[str]]]:
    """By the name of a pack, a list that names it and the rollouts listed for it; without those deleted by name.

    A list that cannot be read names at least the pack that its key does; that it is damaged is told by the catalog.
    """

    def read(item: tuple[str, str]) -> dict[str, list[str]] | None:
        try:
            body = run.reader.get(item[1], run.what)
            return {} if body is None else decisions.read_done(item[1], body)
        except CorruptObjectError:
            return None

    listed: dict[str, tuple[str, set[str]]] = {}
    for (name, key), said in zip(found.lists, run.reader.map(read, found.lists), strict=True):
        if said is None:
            listed.setdefault(name, (key, set()))
        for rollout, names in (said or {}).items():
            for one in names:
                here = one in found.indexes and one in found.packs
                if here or not _deleted_from(run, found, rollout, one):
                    listed.setdefault(one, (key, set()))[1].add(rollout)
    return listed


def _deleted_from(run: StoredRun, found: _Archive, rollout_id: str, name: str) -> bool:
    """Whether a rollout was deleted from a pack; yes where its tombstone cannot be read, as for any reader."""
    for key in found.tombstones.get(rollout_id, ()):
        try:
            body = run.reader.get(key, run.what)
            if body is not None and name in decisions.read_deleted(key, body):
                return True
        except CorruptObjectError:
            return True
    return False


def _unlisted(run: StoredRun, found: _Archive, name: str) -> Iterator[Finding]:
    """A pack that nobody listed; usually its archiver died, and its rollouts are live or lie in another pack."""
    from s3capture.archive.catalog import PackCatalog  # noqa: PLC0415 - only archives need pyarrow

    catalog, pack = run.catalog(), PackName.of(name)
    if not isinstance(catalog, PackCatalog) or pack is None:
        return

    def alone(rollout_id: str) -> str:
        stored = run.rollout(rollout_id)
        if stored.archived or _deleted_from(run, found, rollout_id, name):
            return ""
        summary = summary_of(stored)
        return "" if stored.rows and (summary.state is not State.RETIRED or summary.calls) else rollout_id

    rollouts = list(filter(None, run.reader.map(alone, catalog.spans(pack))))
    if rollouts:
        key = found.indexes[name]
        sentence = (
            f"{key}: no list names this pack, and {many(len(rollouts), 'rollout')} in it, such as {rollouts[0]!r}, "
            "were retired or deleted and have no other records: nobody reads it, and sweep keeps it"
        )
        details = {"pack": name, "rollouts": rollouts[:20]}
        yield Finding(Kind.UNLISTED_PACK, sentence, key=key, details=details)
