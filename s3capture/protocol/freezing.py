"""Freeze: announce (closing), survey (LIST), decide (frozen). The first decision wins and everyone adopts it.

The rule of this module: the survey that a decision rests on starts after the announcement was created.
A writer creates first and looks for the announcement second, so a write that was acknowledged without seeing
it is in the survey; a writer that sees it finishes the decision (``settle``) and obeys it. Every begun call
without an outcome gets a seal as its outcome, so a late first put of a begun call cannot succeed unseen.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from s3capture.codec import StoredObject
from s3capture.effects import Create, Created, Effect, Get, List, Steps
from s3capture.errors import CorruptObjectError, TokenCaptureFrozenError, TokenCaptureRetiredError
from s3capture.keys import RolloutKeys
from s3capture.protocol import bodies
from s3capture.protocol.bodies import Manifest, Origin
from s3capture.protocol.steps import contradiction, create_or_adopt, found, look, rows
from s3capture.protocol.survey import Survey

ONE_PAGE = 1000
"""Up to here a LIST is one request, and so one moment. A longer one is made of pages, between which a retirement may
begin and take marks away that a later page would have shown; its fence is looked for again."""


@dataclass(frozen=True, slots=True)
class FrozenRollout:
    """What a freeze returns: the decision, what has landed since, and the outcomes of the decision by segment."""

    manifest: Manifest
    version: int
    marks: frozenset[str]
    conflicts: frozenset[tuple[str, str]]
    outcomes: dict[str, StoredObject] = field(default_factory=dict)

    @property
    def incomplete(self) -> bool:
        """Any seal, conflict or mark masks the rollout."""
        sealed = any(stored.kind == bodies.SEAL for stored in self.outcomes.values())
        return bool(sealed or self.marks or self.conflicts)

    def of_kind(self, kind: str) -> dict[str, StoredObject]:
        """The outcomes of one kind that are candidates: a call that was in conflict at the decision is none."""
        conflicted = {call for call, _ in self.manifest.conflicts}
        return {s: o for s, o in self.outcomes.items() if o.kind == kind and s not in conflicted}


def retired_error(keys: RolloutKeys, what: str) -> TokenCaptureRetiredError:
    """The error for anything but a delete of a retired rollout."""
    return TokenCaptureRetiredError(
        f"{what}: capture of rollout {keys.rollout_id!r} of run {keys.of.run!r} is retired; drop this record. "
        "If the rollout should be new, its id or run was used before: take a fresh run or an attempt id"
    )


def frozen_error(keys: RolloutKeys, what: str) -> TokenCaptureFrozenError:
    """The error for a write behind the freeze."""
    return TokenCaptureFrozenError(
        f"{what}: capture of rollout {keys.rollout_id!r} of run {keys.of.run!r} is frozen; drop this record and "
        "do not mark the rollout. If the rollout should be new, its id or run was used before: "
        "take a fresh run or an attempt id"
    )


def is_retired(keys: RolloutKeys, seen: Survey) -> Steps[bool]:
    """Whether a drop or a retire has decided; reads the drop decisions that the survey shows."""
    if seen.retired:
        return True
    if not seen.drops:
        return False
    versions = sorted(seen.drops)
    answers = yield tuple(Get(keys.drop(version)) for version in versions)
    for version, answer in zip(versions, answers, strict=True):
        body = found(answer)
        if body is not None and bodies.read_drop(keys, version, body):
            return True
    return False


def retired_since(keys: RolloutKeys, seen: Survey) -> Steps[bool]:
    """Whether a retirement began while ``seen`` was being listed, page after page."""
    if len(seen.objects) < ONE_PAGE:
        return False
    (answer,) = yield (List(keys.fences),)
    return (yield from is_retired(keys, rows(keys, answer)))


def closed_error(keys: RolloutKeys, what: str) -> Steps[TokenCaptureFrozenError]:
    """Return (not raise) the error for a write that met a fence: retired or frozen, as the fences say."""
    (answer,) = yield (List(keys.fences),)
    if (yield from is_retired(keys, rows(keys, answer))):
        return retired_error(keys, what)
    return frozen_error(keys, what)


def decide(keys: RolloutKeys, seen: Survey, origin: Origin) -> Steps[tuple[Manifest, dict[str, bytes]]]:
    """Create the decision from a survey made behind the announcement, or adopt the one that stands.

    Returns the manifest and the bodies of outcomes read on the way, by segment.
    """
    open_calls = sorted(seen.open_calls)
    known: dict[str, bytes] = {}
    if open_calls:
        sealing = {segment: bodies.seal(keys, segment, origin) for segment in open_calls}
        answers = yield tuple(Create(keys.call_at(segment), sealing[segment]) for segment in open_calls)
        lost = [s for s, made in zip(open_calls, answers, strict=True) if not isinstance(made, Created)]
        known = {segment: sealing[segment] for segment in open_calls if segment not in lost}
        if lost:
            answers = yield tuple(Get(keys.call_at(segment)) for segment in lost)
            for segment, answer in zip(lost, answers, strict=True):
                body = found(answer)
                if body is None:
                    yield from _raise_if_retired(keys, "freeze")
                    raise contradiction(keys.call_at(segment))
                known[segment] = body
    manifest = Manifest(
        snapshot_id=origin.nonce,
        outcomes=frozenset(seen.outcomes) | frozenset(open_calls),
        conflicts=seen.conflicts,
        marks=seen.marks,
        by=origin.by,
        at=origin.at,
    )
    unread = sorted(manifest.outcomes - known.keys())
    effects: list[Effect] = [Create(keys.frozen, bodies.frozen(keys, manifest))]
    effects.extend(Get(keys.call_at(segment)) for segment in unread)
    made, *answers_ = yield tuple(effects)
    for segment, answer in zip(unread, answers_, strict=True):
        body = found(answer)
        if body is not None:
            known[segment] = body
    if not isinstance(made, Created):
        standing = yield from create_or_adopt(keys.frozen, bodies.frozen(keys, manifest))
        manifest = bodies.read_manifest(keys, standing)
    return manifest, known


def _raise_if_retired(keys: RolloutKeys, what: str) -> Steps[None]:
    (answer,) = yield (List(keys.fences),)
    if (yield from is_retired(keys, rows(keys, answer))):
        raise retired_error(keys, what)


def settle(keys: RolloutKeys, origin: Origin, what: str) -> Steps[Manifest]:
    """Finish what ``closing`` announced, for whoever died; raise the retired error when that was retirement.

    Call it only after ``closing`` was seen: the survey made here is what makes the decision sound.
    """
    seen = yield from look(keys)
    if (yield from is_retired(keys, seen)):
        raise retired_error(keys, what)
    if seen.frozen:
        (answer,) = yield (Get(keys.frozen),)
        body = found(answer)
        if body is not None:
            return bodies.read_manifest(keys, body)
    manifest, _ = yield from decide(keys, seen, origin)
    return manifest


def freeze(keys: RolloutKeys, origin: Origin) -> Steps[FrozenRollout]:
    """Freeze the rollout, or read the snapshot that was decided; raise the retired error when it is gone."""
    seen = yield from look(keys)
    if (yield from is_retired(keys, seen)):
        raise retired_error(keys, "freeze")
    known: dict[str, bytes] = {}
    manifest: Manifest | None = None
    if not seen.frozen:
        yield from create_or_adopt_announcement(keys, origin, "freeze")
        seen = yield from look(keys)
        if (yield from is_retired(keys, seen)):
            raise retired_error(keys, "freeze")
    if seen.frozen:
        (answer,) = yield (Get(keys.frozen),)
        body = found(answer)
        if body is None:
            yield from _raise_if_retired(keys, "freeze")
            raise contradiction(keys.frozen)
        manifest = bodies.read_manifest(keys, body)
    else:
        manifest, known = yield from decide(keys, seen, origin)
    outcomes = yield from _read_outcomes(keys, manifest, known)
    if (yield from retired_since(keys, seen)):
        raise retired_error(keys, "freeze")
    return FrozenRollout(
        manifest=manifest,
        version=seen.version(manifest),
        marks=seen.marks_with(manifest),
        conflicts=seen.conflicts_with(manifest),
        outcomes=outcomes,
    )


def create_or_adopt_announcement(keys: RolloutKeys, origin: Origin, why: str) -> Steps[None]:
    """Announce that the rollout closes; one that stands already serves as well, whoever made it."""
    yield (Create(keys.closing, bodies.fence("closing", keys, origin, why=why)),)


def _read_outcomes(keys: RolloutKeys, manifest: Manifest, known: dict[str, bytes]) -> Steps[dict[str, StoredObject]]:
    missing = sorted(manifest.outcomes - known.keys())
    if missing:
        answers = yield tuple(Get(keys.call_at(segment)) for segment in missing)
        gone = []
        for segment, answer in zip(missing, answers, strict=True):
            body = found(answer)
            if body is None:
                gone.append(segment)
            else:
                known[segment] = body
        if gone:
            yield from _raise_if_retired(keys, "freeze")
            raise CorruptObjectError(
                f"rollout {keys.rollout_id!r} of run {keys.of.run!r}: the snapshot holds call {gone[0]!r} "
                f"({len(gone)} in all), which is no longer in the bucket"
            )
    return {s: bodies.read_outcome(keys, s, known[s]) for s in sorted(manifest.outcomes)}
