"""What must be true of a rollout in the bucket, as named predicates over its objects alone.

The rule of this module: a predicate takes the objects of one rollout and yields one sentence for each breach; it
asks nobody else. The explorer evaluates them at the end of every schedule, the tests on real servers, and the
audit on what a run left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from s3capture.effects import ObjectInfo
from s3capture.errors import CorruptObjectError
from s3capture.keys import RolloutKeys, parse
from s3capture.protocol import bodies
from s3capture.protocol.bodies import Manifest
from s3capture.protocol.survey import Survey, survey


@dataclass(frozen=True, slots=True)
class Contents:
    """One rollout as stored: the survey, and the bodies that could be read, by key."""

    keys: RolloutKeys
    seen: Survey
    objects: Mapping[str, bytes]

    @property
    def manifest(self) -> Manifest | None:
        """The freeze decision, when there is one and it was read."""
        body = self.objects.get(self.keys.frozen)
        return None if body is None else bodies.read_manifest(self.keys, body)

    @property
    def dropped_at(self) -> tuple[int, ...]:
        """The versions at which a drop was decided as retirement."""
        read = ((v, self.objects.get(self.keys.drop(v))) for v in sorted(self.seen.drops))
        return tuple(v for v, body in read if body is not None and bodies.read_drop(self.keys, v, body))

    @property
    def retired(self) -> bool:
        """Whether the rollout is retired, one way or the other."""
        return self.seen.retired or bool(self.dropped_at)


def contents(keys: RolloutKeys, objects: Mapping[str, bytes]) -> Contents:
    """The rollout of ``keys`` within ``objects`` (key to body)."""
    rows = [ObjectInfo(key, len(body)) for key, body in objects.items() if key.startswith(keys.base)]
    return Contents(keys, survey(keys, rows), objects)


def decisions_were_announced(rollout: Contents) -> Iterator[str]:
    """Every decision stands behind its announcement."""
    seen = rollout.seen
    if (seen.frozen or seen.retired) and not seen.closing:
        yield "a freeze or retire was decided without the announcement 'closing'"
    for version in sorted(seen.drops - seen.retiring):
        yield f"drop-{version} was decided without the announcement retiring-{version}"


def one_drop_retires(rollout: Contents) -> Iterator[str]:
    """A rollout is dropped at one version only."""
    if len(rollout.dropped_at) > 1:
        yield f"drops at versions {rollout.dropped_at} were all decided as retirement"


def objects_are_what_their_keys_say(rollout: Contents) -> Iterator[str]:
    """Every outcome that was read is intact and of the call its key names."""
    for segment in sorted(rollout.seen.outcomes):
        body = rollout.objects.get(rollout.keys.call_at(segment))
        if body is not None:
            try:
                bodies.read_outcome(rollout.keys, segment, body)
            except CorruptObjectError as error:
                yield str(error)


def snapshot_is_whole(rollout: Contents) -> Iterator[str]:
    """Until a rollout is retired, everything its manifest names is there."""
    manifest = rollout.manifest
    if manifest is None or rollout.retired:
        return
    for segment in sorted(manifest.outcomes - rollout.seen.outcomes.keys()):
        yield f"the snapshot names call {segment}, which is not in the bucket"
    if lost := manifest.marks - rollout.seen.marks:
        yield f"the snapshot names {len(lost)} marks that are not in the bucket"
    if gone := manifest.conflicts - rollout.seen.conflicts:
        yield f"the snapshot names {len(gone)} conflicts that are not in the bucket"


def seals_are_decided(rollout: Contents) -> Iterator[str]:
    """A call is sealed only by a freeze or a retirement, and only when it was announced to close."""
    for segment in rollout.seen.small_outcomes:
        body = rollout.objects.get(rollout.keys.call_at(segment))
        if body is None or rollout.seen.closing:
            continue
        if bodies.read_outcome(rollout.keys, segment, body).kind == bodies.SEAL:
            yield f"call {segment} is sealed and the rollout is open"


def no_conflict_with_itself(rollout: Contents) -> Iterator[str]:
    """A conflict holds another payload than the outcome it lost to."""
    for segment, digest in sorted(rollout.seen.conflicts):
        body = rollout.objects.get(rollout.keys.call_at(segment))
        if body is not None and bodies.read_outcome(rollout.keys, segment, body).digest == digest:
            yield f"call {segment} has a conflict with its own payload"


def no_foreign_keys(rollout: Contents) -> Iterator[str]:
    """Nothing lies below the rollout that this project never writes."""
    for key in sorted(rollout.seen.foreign):
        yield f"foreign key {key}"


def conflicts_are_marked_in_lineage(rollout: Contents) -> Iterator[str]:
    """A conflicted entry with a continuation fingerprint is taken out of the candidates of its fingerprint."""
    if rollout.retired:
        return
    for segment, digest in sorted(rollout.seen.conflicts):
        body = rollout.objects.get(rollout.keys.call_at(segment))
        if body is None:
            continue
        stored = bodies.read_outcome(rollout.keys, segment, body)
        fingerprint, call = str(stored.header.get("fingerprint") or ""), stored.header.get("call")
        if fingerprint and rollout.keys.lineage_conflict(fingerprint, str(call)) not in rollout.objects:
            yield f"call {segment} conflicts ({digest[:12]}...) and is still a candidate of its fingerprint"


RolloutInvariant = Callable[[Contents], Iterator[str]]

ALWAYS: tuple[RolloutInvariant, ...] = (
    decisions_were_announced,
    one_drop_retires,
    objects_are_what_their_keys_say,
    snapshot_is_whole,
    seals_are_decided,
    no_conflict_with_itself,
    no_foreign_keys,
)
"""Hold at every moment, in any bucket, whatever died on the way."""

WHEN_QUIET: tuple[RolloutInvariant, ...] = (*ALWAYS, conflicts_are_marked_in_lineage)
"""Hold once nothing is in flight (a writer that died between two requests of one batch is excused)."""


def rollouts_of(root: str, objects: Mapping[str, bytes]) -> list[str]:
    """The rollout ids that have any object below ``attempts/``."""
    attempts = (parse(root, key) for key in objects if key.startswith(f"{root}attempts/"))
    return sorted({parsed.rollout_id for parsed in attempts if parsed is not None})
