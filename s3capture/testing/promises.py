"""The ten invariants of the protocol as predicates over the end of an execution.

The rule of this module: a promise is judged from what operations returned, when they started, and the bucket; never
from how the protocol works. Each predicate yields one sentence for each breach. The numbers are those of
docs/protocol.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from s3capture.errors import CaptureError, ConflictingPayloadError, TokenCaptureFrozenError, TokenCaptureRetiredError
from s3capture.invariants import ALWAYS, WHEN_QUIET, contents
from s3capture.keys import RolloutKeys, RunKeys, escape
from s3capture.protocol import bodies
from s3capture.protocol.bodies import Manifest, Origin
from s3capture.protocol.freezing import FrozenRollout, freeze
from s3capture.protocol.retiring import delete, retire
from s3capture.protocol.writing import begin_call
from s3capture.testing.explorer import SKIPPED, End, Outcome, Raised, run_alone

KEYS: RolloutKeys = RunKeys("p", "run").rollout("r")
_OF_THE_CONTRACT = (TokenCaptureFrozenError, ConflictingPayloadError)
EPILOGUE = Origin("epilogue", 0.0, "epilogue")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a freeze returned, as far as a consumer can tell states apart."""

    snapshot_id: str
    version: int
    incomplete: bool
    entries: frozenset[tuple[str, str]]
    refusals: frozenset[tuple[str, str]]
    marks: frozenset[str]
    conflicted: frozenset[str]

    @classmethod
    def of(cls, frozen: FrozenRollout) -> Snapshot:
        """Sum up the result of the freeze generator."""
        return cls(
            snapshot_id=frozen.manifest.snapshot_id,
            version=frozen.version,
            incomplete=frozen.incomplete,
            entries=frozenset((s, o.digest) for s, o in frozen.of_kind(bodies.ENTRY).items()),
            refusals=frozenset((s, o.digest) for s, o in frozen.of_kind(bodies.REFUSAL).items()),
            marks=frozen.marks,
            conflicted=frozenset(segment for segment, _ in frozen.conflicts),
        )

    @property
    def calls(self) -> set[str]:
        """The calls with an entry or a refusal."""
        return {segment for segment, _ in self.entries | self.refusals}

    @property
    def judged(self) -> set[str]:
        """The calls that a consumer hears of: as a record, or as the reason why the rollout is masked."""
        return self.calls | self.conflicted


def _call(outcome: Outcome) -> str:
    """Operations are named ``kind:call`` or ``kind:call:anything``."""
    return escape(outcome.op.split(":")[1])


def _frozen(end: End) -> list[tuple[Outcome, Snapshot]]:
    return [(o, o.result) for o in end.of("freeze") if isinstance(o.result, Snapshot)]


def _manifest(end: End) -> Manifest | None:
    body = end.bucket.get(KEYS.frozen)
    return None if body is None else bodies.read_manifest(KEYS, body)


def _writes(end: End) -> list[Outcome]:
    return end.of("put") + end.of("refuse")


def p1_acknowledged_puts_are_in_later_snapshots(end: End) -> Iterator[str]:
    """An acknowledged put is in every snapshot whose freeze starts later, or the rollout is retired."""
    for outcome, snapshot in _frozen(end):
        for put in _writes(end):
            late = (put.actor, put.op) in outcome.before
            if put.acked and late and _call(put) not in snapshot.judged:
                yield f"{put.op} of {put.actor} was acknowledged before {outcome.actor}'s freeze, which lacks it"


def p2_nothing_is_acknowledged_outside_the_decision(end: End) -> Iterator[str]:
    """Every acknowledged put, refusal and begin is in the one freeze decision; nothing is acknowledged after it."""
    manifest = _manifest(end)
    if manifest is None:
        return
    for outcome in _writes(end) + end.of("begin"):
        if outcome.acked and _call(outcome) not in manifest.outcomes:
            yield f"{outcome.op} of {outcome.actor} was acknowledged and is not in the freeze decision"
    for freezer, _ in _frozen(end):
        for begin in end.of("begin"):
            if (freezer.actor, freezer.op) in begin.before and begin.acked:
                yield f"{begin.op} of {begin.actor} started behind {freezer.actor}'s freeze and was admitted"


def p3_one_snapshot_for_each_version(end: End) -> Iterator[str]:
    """Same (snapshot_id, version): same entries, refusals, flag. Entries never change after the decision."""
    snapshots = [snapshot for _, snapshot in _frozen(end)]
    for one in snapshots:
        for other in snapshots:
            if one.snapshot_id != other.snapshot_id:
                yield f"two snapshots were decided: {one.snapshot_id} and {other.snapshot_id}"
            elif (one.entries, one.refusals) != (other.entries, other.refusals):
                yield "the entries of one snapshot changed"
            elif one.version == other.version and one != other:
                yield f"version {one.version} was returned with two contents"


def p4_a_drop_saw_everything(end: End) -> Iterator[str]:
    """A drop that returned True saw that snapshot: no acknowledged put or mark outside it, no write after it."""
    for drop in end.of("drop"):
        if drop.result is not True:
            continue
        mine = [snapshot for outcome, snapshot in _frozen(end) if outcome.actor == drop.actor]
        snapshot = mine[-1]
        for put in _writes(end):
            if put.acked and _call(put) not in snapshot.judged:
                yield f"{drop.actor} dropped a snapshot without the acknowledged {put.op} of {put.actor}"
        for mark in end.of("mark"):
            if mark.acked and mark.op.split(":")[1] not in snapshot.marks:
                yield f"{drop.actor} dropped a snapshot without the acknowledged {mark.op} of {mark.actor}"
        yield from _refused_after(end, drop)


def p5_acknowledged_marks_show(end: End) -> Iterator[str]:
    """An acknowledged mark makes every later snapshot incomplete, with a version of its own."""
    for outcome, snapshot in _frozen(end):
        for mark in end.of("mark"):
            due = mark.acked and (mark.actor, mark.op) in outcome.before
            if due and not (snapshot.incomplete and mark.op.split(":")[1] in snapshot.marks):
                yield f"{outcome.actor}'s later snapshot does not show {mark.op} of {mark.actor}"


def p6_a_begun_call_without_outcome_masks(end: End) -> Iterator[str]:
    """A begun call without an outcome makes every snapshot incomplete."""
    for outcome, snapshot in _frozen(end):
        for begin in end.of("begin"):
            if begin.acked and _call(begin) not in snapshot.calls and not snapshot.incomplete:
                yield f"{outcome.actor}'s snapshot is complete without {begin.op} of {begin.actor}"


def p7_late_refusals_change_nothing(end: End) -> Iterator[str]:
    """A refusal that starts behind a freeze raises, or is of the snapshot already."""
    for outcome, snapshot in _frozen(end):
        for refuse in end.of("refuse"):
            late = (outcome.actor, outcome.op) in refuse.before
            if late and refuse.acked and _call(refuse) not in {segment for segment, _ in snapshot.refusals}:
                yield f"{refuse.op} of {refuse.actor} was acknowledged behind the freeze"


def p8_retirement_is_final(end: End) -> Iterator[str]:
    """After a retire returned, nothing is acknowledged."""
    for retirement in end.of("retire"):
        if retirement.acked:
            yield from _refused_after(end, retirement)


def _refused_after(end: End, retirement: Outcome) -> Iterator[str]:
    for outcome in end.outcomes:
        kind = outcome.op.split(":")[0]
        late = (retirement.actor, retirement.op) in outcome.before and outcome.result != SKIPPED
        bound = kind in ("put", "begin", "mark", "refuse", "freeze")
        if late and bound and not outcome.raised(TokenCaptureRetiredError):
            yield f"{outcome.op} of {outcome.actor} started after {retirement.op} returned and was not refused"


def p9_the_living_finish(end: End) -> Iterator[str]:
    """Whoever dies, the others finish: with an answer, or with an error of the contract."""
    for outcome in end.outcomes:
        if isinstance(outcome.result, Raised) and not issubclass(outcome.result.kind, _OF_THE_CONTRACT):
            yield f"{outcome.op} of {outcome.actor} ended in {outcome.result.kind.__name__}: {outcome.result.text}"


def bucket_is_sound(end: End) -> Iterator[str]:
    """The invariants that the audit checks hold at the end of every execution."""
    for invariant in ALWAYS:
        for message in invariant(contents(KEYS, end.bucket)):
            yield f"{invariant.__name__}: {message}"


def bucket_is_quiet(end: End) -> Iterator[str]:
    """Nothing is missing once nothing is in flight; for scenarios in which nobody dies."""
    for invariant in WHEN_QUIET:
        for message in invariant(contents(KEYS, end.bucket)):
            yield f"{invariant.__name__}: {message}"


def one_outcome_is_acknowledged(end: End) -> Iterator[str]:
    """Of two outcomes of one call only one is ever acknowledged; a write returns the identity of its outcome here."""
    acknowledged: dict[str, Outcome] = {}
    for write in _writes(end):
        if write.acked:
            other = acknowledged.setdefault(_call(write), write)
            if other.result != write.result:
                yield f"{write.op} of {write.actor} and {other.op} of {other.actor} differ and were both acknowledged"


def a_half_deleted_rollout_refuses(end: End) -> Iterator[str]:
    """Whoever is admitted beside a delete, finished or dead, finds nothing left of the old rollout."""
    for begin in end.of("begin"):
        left = end.bucket.keys() - {KEYS.intent(begin.op.split(":")[1])}
        if begin.acked and left:
            yield f"{begin.op} of {begin.actor} was admitted to a rollout of which {len(left)} keys are left"


def a_later_consumer_sees_the_truth(end: End) -> Iterator[str]:
    """A freeze alone, after everything, agrees with every earlier answer; then retire and delete do their work."""
    bucket = dict(end.bucket)
    retired = contents(KEYS, bucket).retired
    try:
        snapshot = Snapshot.of(run_alone(freeze(KEYS, EPILOGUE), bucket))
    except TokenCaptureRetiredError:
        if not retired:
            yield "a rollout that nobody retired reads as retired"
    except CaptureError as error:
        yield f"a later freeze ends in {type(error).__name__}: {error}"
    else:
        if retired:
            yield "a retired rollout can be frozen"
        yield from _agrees(end, snapshot)
    yield from _leaves_cleanly(bucket)


def _agrees(end: End, snapshot: Snapshot) -> Iterator[str]:
    for put in _writes(end):
        if put.acked and _call(put) not in snapshot.judged:
            yield f"a later freeze lacks {put.op} of {put.actor}, which was acknowledged"
        if put.raised(ConflictingPayloadError) and not snapshot.incomplete:
            yield f"{put.op} of {put.actor} was refused as conflicting and a later freeze is complete"
    for mark in end.of("mark"):
        if mark.acked and not (snapshot.incomplete and mark.op.split(":")[1] in snapshot.marks):
            yield f"a later freeze does not show {mark.op} of {mark.actor}"
    for begin in end.of("begin"):
        if begin.acked and _call(begin) not in snapshot.calls and not snapshot.incomplete:
            yield f"a later freeze is complete without {begin.op} of {begin.actor}"
    for outcome, earlier in _frozen(end):
        if (earlier.snapshot_id, earlier.entries) != (snapshot.snapshot_id, snapshot.entries):
            yield f"a later freeze differs from {outcome.actor}'s snapshot"
        if earlier.version > snapshot.version:
            yield f"the version fell from {earlier.version} to {snapshot.version}"


def _leaves_cleanly(bucket: dict[str, bytes]) -> Iterator[str]:
    run_alone(retire(KEYS, EPILOGUE, keep=False), bucket)
    before = dict(bucket)
    run_alone(retire(KEYS, EPILOGUE, keep=False), bucket)
    if before != bucket:
        yield "retiring again changed the bucket"
    try:
        run_alone(begin_call(KEYS, "late", EPILOGUE), dict(bucket))
        yield "a retired rollout admits a call"
    except TokenCaptureRetiredError:
        pass
    run_alone(delete(KEYS), bucket)
    if bucket:
        yield f"delete left {sorted(bucket)}"


PROMISES = (
    p1_acknowledged_puts_are_in_later_snapshots,
    p2_nothing_is_acknowledged_outside_the_decision,
    p3_one_snapshot_for_each_version,
    p4_a_drop_saw_everything,
    p5_acknowledged_marks_show,
    p6_a_begun_call_without_outcome_masks,
    p7_late_refusals_change_nothing,
    p8_retirement_is_final,
    p9_the_living_finish,
    one_outcome_is_acknowledged,
    bucket_is_sound,
    a_later_consumer_sees_the_truth,
)
