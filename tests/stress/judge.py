"""The judge: what the logs promised, held against every snapshot taken and against the bucket at the end.

The rule of this module: a predicate takes the story of one rollout and yields one sentence for each breach. It uses
acknowledgements, their order in time, and what snapshots showed; it knows nothing of intents, fences or manifests.
An order is used only where one operation had returned before the other was called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from s3capture import invariants
from s3capture.protocol import bodies
from stress import plan
from stress.history import UNFINISHED, Event

CONTRACT = frozenset({"TokenCaptureFrozenError", "TokenCaptureRetiredError", "ConflictingPayloadError"})
UNAVAILABLE = frozenset({"StoreUnavailableError"})
_RETIRED = "TokenCaptureRetiredError"


@dataclass(frozen=True, slots=True)
class Story:
    """Everything known of one rollout.

    ``marks`` counts the marks in the bucket at the end by call; None when the rollout was retired, and its marks
    perhaps deleted. ``late`` are the calls whose spilled mark met a retired rollout and was set aside as evidence.
    ``allowed`` are errors that may occur in this run besides those of the contract.
    """

    seed: int
    rollout: str
    events: tuple[Event, ...]
    marks: Counter[str] | None = None
    late: frozenset[str] = frozenset()
    allowed: frozenset[str] = frozenset()
    # Seconds that an operation may take; those not named are not judged.
    bounds: Mapping[str, float] = field(default_factory=dict)

    def of(self, *ops: str) -> list[Event]:
        """The events of these kinds."""
        return [event for event in self.events if event.op in ops]

    def acked(self, *ops: str) -> list[Event]:
        """Those that returned."""
        return [event for event in self.of(*ops) if event.acked]

    @property
    def contested(self) -> frozenset[str]:
        """Calls for which more than one outcome was sent: they may be no candidates in any snapshot."""
        sent = {(write.call, write.sent) for write in self.of("put", "refuse")}
        return frozenset(call for call, count in Counter(call for call, _ in sent).items() if count > 1)

    @property
    def retirements(self) -> list[Event]:
        """What returned and thereby retired the rollout."""
        return self.acked("retire") + [drop for drop in self.acked("drop") if drop.result["dropped"]]


def _calls(snapshot: Mapping[str, Any]) -> set[str]:
    return {*snapshot["entries"], *snapshot["refusals"]}


def every_acknowledged_outcome_is_in_every_snapshot(story: Story) -> Iterator[str]:
    """Whenever a put or refusal was acknowledged, each snapshot ever returned holds it, unchanged."""
    for write in story.acked("put", "refuse"):
        kept = "entries" if write.op == "put" else "refusals"
        for frozen in story.acked("freeze"):
            found = frozen.result[kept].get(write.call)
            masked = write.call in story.contested and found is None and frozen.result["incomplete"]
            if found != write.sent and not masked:
                yield f"{write} was acknowledged; the snapshot of {frozen.actor} holds {found!r} for it"


def snapshots_hold_only_what_was_sent(story: Story) -> Iterator[str]:
    """No snapshot holds a payload that nobody can have sent."""
    for frozen in story.acked("freeze"):
        for call, digest in frozen.result["entries"].items():
            if digest not in plan.digests(story.seed, story.rollout, call):
                yield f"the snapshot of {frozen.actor} holds a payload of call {call!r} that nobody sent"


def one_payload_of_a_call_is_acknowledged(story: Story) -> Iterator[str]:
    """Of two payloads for one call at most one is ever acknowledged."""
    sent: dict[str, str] = {}
    for write in story.acked("put", "refuse"):
        if sent.setdefault(write.call, write.sent) != write.sent:
            yield f"two payloads were acknowledged, the later by {write}"


def snapshots_do_not_change(story: Story) -> Iterator[str]:
    """One snapshot for each rollout; the same version is the same in all; versions never fall."""
    snapshots = story.acked("freeze")
    for one in snapshots:
        for other in snapshots:
            a, b = one.result, other.result
            if a["snapshot_id"] != b["snapshot_id"]:
                yield f"{one.actor} and {other.actor} hold different snapshots of {story.rollout!r}"
            elif (a["entries"], a["refusals"]) != (b["entries"], b["refusals"]):
                yield f"the entries of one snapshot differ between {one.actor} and {other.actor} in {story.rollout!r}"
            elif a["version"] == b["version"] and a["incomplete"] != b["incomplete"]:
                yield f"version {a['version']} of {story.rollout!r} is both complete and incomplete"
            elif one.end < other.start and a["version"] > b["version"]:
                yield f"the version of {story.rollout!r} fell from {a['version']} to {b['version']}"


def acknowledged_marks_show(story: Story) -> Iterator[str]:
    """Each snapshot taken after a mark is incomplete, and of a higher version than each one taken before it."""
    snapshots = story.acked("freeze")
    for mark in story.acked("mark"):
        later = [frozen for frozen in snapshots if mark.end < frozen.start]
        for frozen in later:
            if not frozen.result["incomplete"]:
                yield f"{mark} was acknowledged; the later snapshot of {frozen.actor} is complete"
        for earlier in (frozen for frozen in snapshots if frozen.end < mark.start):
            for frozen in later:
                if frozen.result["version"] <= earlier.result["version"]:
                    yield f"{mark} lies between two snapshots, and the version did not rise"


def acknowledged_marks_are_kept(story: Story) -> Iterator[str]:
    """At the end each acknowledged mark is in the bucket, unless the rollout was retired."""
    if story.marks is not None:
        given = Counter(mark.call for mark in story.acked("mark"))
        for call, count in (given - story.marks).items():
            yield f"{count} acknowledged marks of call {call!r}, rollout {story.rollout!r}, are not in the bucket"


def holes_mask(story: Story) -> Iterator[str]:
    """A begun call without an outcome, and a conflict that was reported, make the snapshot incomplete."""
    for frozen in story.acked("freeze"):
        if frozen.result["incomplete"]:
            continue
        for begin in story.acked("begin"):
            if begin.call not in _calls(frozen.result):
                yield f"{begin} was acknowledged, has no outcome, and the snapshot of {frozen.actor} is complete"
        for put in story.of("put"):
            if put.error == "ConflictingPayloadError" and put.end < frozen.start:
                yield f"{put} was refused as conflicting, and the later snapshot of {frozen.actor} is complete"


def nothing_begins_behind_a_freeze(story: Story) -> Iterator[str]:
    """A begin that is called after a freeze returned is refused."""
    first = min((frozen.end for frozen in story.acked("freeze")), default=None)
    for begin in story.acked("begin"):
        if first is not None and first < begin.start:
            yield f"{begin} was admitted behind a freeze"


def refusals_have_a_reason(story: Story) -> Iterator[str]:
    """Nobody is told "frozen" or "retired" before anyone asked for it."""
    closers = [event.start for event in story.of("freeze", "retire")]
    for event in story.events:
        if event.error in CONTRACT - {"ConflictingPayloadError"} and event.end < min(closers, default=event.end + 1):
            yield f"{event} was refused with {event.error} before anyone froze or retired the rollout"
    quitters = [event.start for event in story.of("drop", "retire")]
    for event in story.events:
        if event.error == _RETIRED and event.end < min(quitters, default=event.end + 1):
            yield f"{event} was told that the rollout is retired before anyone dropped or retired it"


def a_drop_saw_everything(story: Story) -> Iterator[str]:
    """A drop that returned True consumed a snapshot with every acknowledged mark in it; only one version is dropped."""
    dropped = [drop for drop in story.acked("drop") if drop.result["dropped"]]
    if len({drop.result["version"] for drop in dropped}) > 1:
        yield f"{story.rollout!r} was dropped at two versions"
    for drop in dropped:
        wanted = (drop.result["snapshot_id"], drop.result["version"])
        consumed = [f for f in story.acked("freeze") if (f.result["snapshot_id"], f.result["version"]) == wanted]
        if not consumed:
            yield f"{drop} returned True for a snapshot that nobody was given"
            continue
        for mark in story.acked("mark"):
            if mark.call in story.late and not mark.end < drop.start:
                continue
            if not consumed[0].result["incomplete"]:
                yield f"{drop} returned True for a complete snapshot; {mark} was acknowledged"
            elif min(frozen.end for frozen in consumed) < mark.start:
                yield f"{drop} returned True for a snapshot older than the acknowledged {mark}"


def retirement_is_final(story: Story) -> Iterator[str]:
    """Whatever starts after the rollout was retired is told so; a spilled mark is set aside when it comes back."""
    retired_at = min((event.end for event in story.retirements), default=None)
    for event in story.of("begin", "put", "refuse", "mark", "freeze"):
        if retired_at is None or event.start < retired_at or event.error in {_RETIRED, UNFINISHED, *story.allowed}:
            continue
        if not (event.op == "mark" and event.acked and event.call in story.late):
            yield f"{event} started after the rollout was retired and ended in {event.error or 'success'}"


def errors_are_expected(story: Story) -> Iterator[str]:
    """Every operation of a living process ends normally or in an error that its caller must expect."""
    for event in story.events:
        if event.error and event.error not in CONTRACT | story.allowed | {UNFINISHED}:
            yield f"{event} ended in {event.error}: {event.text}"


def callers_are_answered_in_time(story: Story) -> Iterator[str]:
    """No caller waits longer than the deadline of its operation and the stated grace."""
    for event in story.events:
        if event.error != UNFINISHED and event.seconds > story.bounds.get(event.op, event.seconds):
            yield f"{event} took {event.seconds:.1f} s; its bound is {story.bounds[event.op]:.1f} s"


PROMISES: tuple[Callable[[Story], Iterator[str]], ...] = (
    every_acknowledged_outcome_is_in_every_snapshot,
    snapshots_hold_only_what_was_sent,
    one_payload_of_a_call_is_acknowledged,
    snapshots_do_not_change,
    acknowledged_marks_show,
    acknowledged_marks_are_kept,
    holes_mask,
    nothing_begins_behind_a_freeze,
    refusals_have_a_reason,
    a_drop_saw_everything,
    retirement_is_final,
    errors_are_expected,
    callers_are_answered_in_time,
)


def breaches(story: Story) -> list[str]:
    """Every broken promise of one rollout."""
    return [f"{promise.__name__}: {message}" for promise in PROMISES for message in promise(story)]


def marks_in(found: invariants.Contents) -> Counter[str] | None:
    """The marks of a rollout in the bucket by call, or None when the rollout is retired."""
    if found.retired:
        return None
    of_key = ((key, found.objects[key]) for key in map(found.keys.mark, found.seen.marks))
    return Counter(str(bodies.read(key, body, "mark").header["call"]) for key, body in of_key)


def unsound(found: invariants.Contents, rules: Iterable[invariants.RolloutInvariant]) -> list[str]:
    """What the named invariants of the package find in one rollout of the bucket."""
    return [f"{rule.__name__}, {found.keys.rollout_id!r}: {message}" for rule in rules for message in rule(found)]
