"""Drop, retire and delete: how a rollout leaves, and what stays so that late writers are refused.

The rule of this module: the decision comes first and alone retires; deleting is only housekeeping behind it,
may be repeated, and may fail without harm. Fences and seals stay until ``delete``: a seal is what stops the
late first put of a begun call, which looks at nothing else.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from s3capture.effects import Create, Created, Delete, Deleted, Get, List, ObjectInfo, Steps
from s3capture.errors import CorruptObjectError
from s3capture.keys import Kind, RolloutKeys, parse
from s3capture.protocol import bodies
from s3capture.protocol.bodies import Manifest, Origin
from s3capture.protocol.freezing import create_or_adopt_announcement, is_retired, retired_since
from s3capture.protocol.steps import create_or_adopt, found, listed, look, rows
from s3capture.protocol.survey import Survey


@dataclass(frozen=True, slots=True)
class Removal:
    """What a removal found and left: ``had_records`` before it, ``left`` are keys not deleted, with reasons."""

    had_records: bool
    left: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Dropped:
    """The verdict of a conditional drop, why not if not, and what housekeeping left behind."""

    retired: bool
    why: str = ""
    left: tuple[tuple[str, str], ...] = ()


def finish_drop(keys: RolloutKeys, version: int) -> Steps[bool]:
    """Decide the drop that ``retiring-<version>`` announced, or adopt its decision; True: retired.

    The survey is made here, behind the announcement: a mark that did not see the announcement is in it.
    """
    answers = yield (List(keys.base), Get(keys.frozen))
    seen, frozen = rows(keys, answers[0]), found(answers[1])
    manifest = None if frozen is None else bodies.read_manifest(keys, frozen)
    return (yield from _decide_drop(keys, version, seen, manifest))


def _decide_drop(keys: RolloutKeys, version: int, seen: Survey, manifest: Manifest | None) -> Steps[bool]:
    # Whoever retired the rollout otherwise may be deleting its marks right now: a version counted from what
    # is left would fall back to one that was consumed before them.
    gone = (yield from is_retired(keys, seen)) or (yield from retired_since(keys, seen))
    # A drop of an earlier version that was announced and not decided comes first: its survey may be older than
    # what raised the version, and two consumers would both be told that they alone consumed the rollout.
    for earlier in sorted(number for number in seen.retiring - seen.drops if number < version):
        gone = (yield from finish_drop(keys, earlier)) or gone
    still = not gone and manifest is not None and seen.version(manifest) == version
    body = bodies.fence("drop", keys, Origin("", 0.0, ""), retired=still)
    standing = yield from create_or_adopt(keys.drop(version), body)
    return bodies.read_drop(keys, version, standing)


def drop(keys: RolloutKeys, snapshot_id: str, version: int, origin: Origin, *, keep: bool) -> Steps[Dropped]:
    """Retire exactly the snapshot that was consumed; refused when anything has changed since.

    With ``keep`` nothing is deleted: the decision alone retires, and retention is the bucket's.
    """
    answers = yield (List(keys.base), Get(keys.frozen))
    seen, body = rows(keys, answers[0]), found(answers[1])
    if body is None:
        return Dropped(False, "the rollout is not frozen")
    manifest = bodies.read_manifest(keys, body)
    if manifest.snapshot_id != snapshot_id:
        return Dropped(False, "another snapshot was decided for this rollout")
    if version in seen.drops:
        (answer,) = yield (Get(keys.drop(version)),)
        decided = found(answer)
        retired = decided is not None and bodies.read_drop(keys, version, decided)
    elif seen.retired or (yield from is_retired(keys, seen)):
        return Dropped(False, "the rollout was retired otherwise")
    elif seen.version(manifest) != version:
        return Dropped(False, f"the version is {seen.version(manifest)} now, not {version}")
    else:
        yield (Create(keys.retiring(version), bodies.fence("retiring", keys, origin)),)
        seen = yield from look(keys)
        retired = yield from _decide_drop(keys, version, seen, manifest)
    if not retired:
        return Dropped(False, f"the rollout changed after version {version}")
    if keep:
        return Dropped(True)
    seals = yield from seals_of(keys, seen)
    return Dropped(True, left=(yield from _sweep(keys, seen, seals)))


def retire(keys: RolloutKeys, origin: Origin, *, keep: bool) -> Steps[Removal]:
    """Retire the rollout whatever its state; repeating it finishes what a dead process left, and no more.

    The decision says whether the records were to stay (``keep``), so that whoever finds them later can tell a
    retirement that was cut short from one that left them on purpose.
    """
    yield from create_or_adopt_announcement(keys, origin, "retire")
    yield (Create(keys.retired, bodies.fence("retired", keys, origin, keep=keep)),)
    seen = yield from look(keys)
    open_calls = sorted(seen.open_calls)
    if open_calls:
        answers = yield tuple(Create(keys.call_at(s), bodies.seal(keys, s, origin)) for s in open_calls)
        if not all(isinstance(made, Created) for made in answers):
            # A put was faster, or another retirer: look again, so that what is swept is what is there.
            seen = yield from look(keys)
    seals = yield from seals_of(keys, seen)
    left = () if keep else (yield from _sweep(keys, seen, seals))
    return Removal(_has_records(seen, seals), left)


def seals_of(keys: RolloutKeys, seen: Survey) -> Steps[frozenset[str]]:
    """Which of the listed outcomes are seals; reads only those small enough to be one."""
    small = seen.small_outcomes
    if not small:
        return frozenset()
    answers = yield tuple(Get(keys.call_at(segment)) for segment in small)
    read = {segment: found(answer) for segment, answer in zip(small, answers, strict=True)}
    return frozenset(
        segment
        for segment, body in read.items()
        if body is not None and bodies.read_outcome(keys, segment, body).kind == bodies.SEAL
    )


def _has_records(seen: Survey, seals: frozenset[str]) -> bool:
    return bool(seen.intents or seen.conflicts or seen.marks or seen.outcomes.keys() - seals)


def records_of(
    keys: RolloutKeys, seen: Survey, markers: Iterable[ObjectInfo], seals: frozenset[str]
) -> tuple[str, ...]:
    """The keys that may go once a rollout is retired: all that is ours but fences and seals."""
    own = (
        row.key
        for row in seen.objects
        if (parsed := parse(keys.of.root, row.key)) is not None
        and parsed.kind in (Kind.INTENT, Kind.CALL, Kind.CONFLICT, Kind.MARK)
        and not (parsed.kind is Kind.CALL and parsed.call in seals)
    )
    return (*own, *(row.key for row in markers))


def _sweep(keys: RolloutKeys, seen: Survey, seals: frozenset[str]) -> Steps[tuple[tuple[str, str], ...]]:
    """Delete the records of a retired rollout; fences and seals stay."""
    (answer,) = yield (List(keys.lineage_base),)
    return (yield from _delete(list(records_of(keys, seen, listed(answer), seals))))


def _delete(doomed: list[str]) -> Steps[tuple[tuple[str, str], ...]]:
    if not doomed:
        return ()
    (answer,) = yield (Delete(tuple(doomed)),)
    return answer.failed if isinstance(answer, Deleted) else ()


def delete(keys: RolloutKeys) -> Steps[Removal]:
    """Remove everything of the rollout, so that its id reads as unused; records first, the announcement last.

    Whoever dies on the way leaves a rollout that refuses writes for as long as anything but the announcement is left,
    and deleting again finishes.
    """
    answers = yield (List(keys.base), List(keys.lineage_base))
    seen = rows(keys, answers[0])
    try:
        seals = yield from seals_of(keys, seen)
    except CorruptObjectError:
        seals = frozenset()  # only what is reported hangs on it: damage does not keep a rollout from being deleted
    had_records = _has_records(seen, seals)
    fences = [row.key for row in seen.objects if row.key.startswith(keys.fences)]
    records = [row.key for row in seen.objects if not row.key.startswith(keys.fences)]
    records.extend(row.key for row in listed(answers[1]))
    # The decision to freeze goes before the decisions to retire: without its records it must not be read.
    first = [key for key in fences if key == keys.frozen]
    middle = [key for key in fences if key not in (keys.frozen, keys.closing)]
    last = [key for key in fences if key == keys.closing]
    left: tuple[tuple[str, str], ...] = ()
    for stage in (records, first, middle, last):
        left = yield from _delete(stage)
        if left:
            break
    return Removal(had_records, left)
