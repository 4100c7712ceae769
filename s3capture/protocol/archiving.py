"""Archive: survey, pack (announce), retire (decide), list as done, and only then delete.

The rule of this module: a pack says of a rollout what a survey found, and the rollout is retired for exactly that: a
frozen one by a drop at the version that was surveyed, one that was retired before by what retired it. A mark or put
that was acknowledged and is not in the pack makes the drop refuse, and then the rollout stays live and the pack says
nothing of it. Only keys that are in the pack are deleted, so whatever lands late stays as the evidence it is.

The order of effects: ``{create pack}``, ``{create index}``, ``settle``, ``{create done}``, ``swept``, ``take_away``.
Whoever dies before ``done`` leaves every record live; whoever dies behind it leaves copies, which the next run takes
away. A pack that a sweep took, because it was so old that its archiver must be dead, is missed by ``swept``.
"""

from __future__ import annotations

from dataclasses import dataclass

from s3capture.effects import Delete, Deleted, Get, List, ObjectInfo, Steps
from s3capture.keys import ArchiveKeys, PackName, RolloutKeys
from s3capture.protocol import bodies
from s3capture.protocol.bodies import Origin
from s3capture.protocol.freezing import is_retired
from s3capture.protocol.retiring import drop, records_of, seals_of
from s3capture.protocol.steps import found, listed, rows

_BEING_DELETED = "it was retired for deletion, and what is left of it is no whole; sweep takes it away"


@dataclass(frozen=True, slots=True)
class Packable:
    """What is to be packed of a rollout: ``rows`` of the attempt and of its markers.

    ``records`` are the keys that may be deleted once the archive speaks for the rollout: everything but fences and
    seals, which go on refusing late writers. ``fences`` are those of the survey: a rollout that was deleted and begun
    anew has others. ``snapshot_id`` and ``version`` are set when the rollout is frozen and still to be retired, empty
    and 0 when it is retired.
    """

    rows: tuple[ObjectInfo, ...]
    records: frozenset[str]
    fences: frozenset[ObjectInfo]
    snapshot_id: str = ""
    version: int = 0


def examine(keys: RolloutKeys, *, archived: bool = False) -> Steps[Packable | str]:
    """Survey a rollout for packing, or return why there is nothing to pack.

    Of a rollout that was ``archived`` before, only what landed late is taken: the fences that are live are those of its
    archiving.
    """
    answers = yield (List(keys.base), List(keys.lineage_base))
    seen, markers = rows(keys, answers[0]), listed(answers[1])
    seals = yield from seals_of(keys, seen)
    records = frozenset(records_of(keys, seen, markers, seals))
    if not records:
        return "its records are gone or were archived"
    fences = frozenset(row for row in seen.objects if row.key.startswith(keys.fences))
    everything = (*(row for row in seen.objects if row.key not in seen.foreign), *markers)
    if archived:
        return Packable(tuple(row for row in everything if row.key in records), records, fences)
    if seen.retired:
        (answer,) = yield (Get(keys.retired),)
        return Packable(everything, records, fences) if _was_to_be_kept(keys, found(answer)) else _BEING_DELETED
    if not seen.frozen:
        return "it is not frozen"
    (answer,) = yield (Get(keys.frozen),)
    body = found(answer)
    if body is None:
        return _BEING_DELETED
    manifest = bodies.read_manifest(keys, body)
    for version in sorted(seen.drops):
        (answer,) = yield (Get(keys.drop(version)),)
        body = found(answer)
        if body is not None and bodies.read_drop(keys, version, body):
            # A consumer may be deleting it right now, marks first: what is left is no copy of the rollout then.
            landed = 1 + len(manifest.outcomes) + len(seen.conflicts) + len(seen.marks)
            named = manifest.marks <= seen.marks and manifest.conflicts <= seen.conflicts
            whole = named and manifest.outcomes <= seen.outcomes.keys() and landed >= version
            return Packable(everything, records, fences) if whole else _BEING_DELETED
    return Packable(everything, records, fences, manifest.snapshot_id, seen.version(manifest))


def _was_to_be_kept(keys: RolloutKeys, body: bytes | None) -> bool:
    """Whether whoever retired the rollout unconditionally left its records on purpose, and whole."""
    fence = None if body is None else bodies.read(keys.retired, body, "retired").value()
    return isinstance(fence, dict) and fence.get("keep") is True


def settle(keys: RolloutKeys, packable: Packable, origin: Origin) -> Steps[bool]:
    """Retire the rollout for what was packed; False when it changed since, and is live. Call it behind the index."""
    if packable.snapshot_id:
        dropped = yield from drop(keys, packable.snapshot_id, packable.version, origin, keep=True)
        return dropped.retired
    (answer,) = yield (List(keys.fences),)
    # It was retired when it was surveyed; only a deletion of the rollout can have undone that, and then it may have
    # been begun, and retired, anew: the fences of the survey must be there, as they were.
    now = rows(keys, answer)
    return packable.fences <= frozenset(now.objects) and (yield from is_retired(keys, now))


def swept(keys: ArchiveKeys, names: frozenset[PackName]) -> Steps[frozenset[PackName]]:
    """Which of these packs are gone, or have lost their index. Call it behind done, before ``take_away``."""
    (answer,) = yield (List(keys.base),)
    here = {row.key for row in listed(answer)}
    return frozenset(name for name in names if not {keys.pack(name), keys.index(name)} <= here)


def take_away(packed: frozenset[str]) -> Steps[tuple[tuple[str, str], ...]]:
    """Delete records that the archive holds; return those that the store kept, with reasons. Call it behind done."""
    if not packed:
        return ()
    (answer,) = yield (Delete(tuple(sorted(packed))),)
    return answer.failed if isinstance(answer, Deleted) else ()
