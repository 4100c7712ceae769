"""Each generator alone on a store in memory: what it costs, what it returns, and what it leaves in the bucket.

What happens when generators meet is the explorer's business (test_explorer.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import pytest

from s3capture import codec
from s3capture.effects import (
    Absent,
    Answer,
    Create,
    Created,
    Delete,
    Deleted,
    Effect,
    Exists,
    Found,
    Get,
    List,
    Listed,
    Steps,
)
from s3capture.errors import (
    ConflictingPayloadError,
    CorruptObjectError,
    StoreError,
    TokenCaptureFrozenError,
    TokenCaptureRetiredError,
)
from s3capture.keys import Kind, RunKeys, parse
from s3capture.protocol import bodies
from s3capture.protocol.bodies import Outcome
from s3capture.protocol.freezing import FrozenRollout, freeze
from s3capture.protocol.resolving import candidates, chain
from s3capture.protocol.retiring import Removal, delete, drop, retire
from s3capture.protocol.writing import begin_call, mark_incomplete, put_outcome
from s3capture.store.memory import MemoryStore

T = TypeVar("T")
KEYS = RunKeys("prefix", "run-7").rollout("7-3")
FINGERPRINT = "f" * 64


def origin(nonce: str = "n1") -> bodies.Origin:
    return bodies.Origin("host:1", 1.5, nonce)


def payload(text: str = "a") -> codec.Payload:
    """A payload that does not compress below the size of a seal."""
    noise = "".join(hashlib.sha256(f"{text}{number}".encode()).hexdigest() for number in range(60))
    return codec.canonical({"v": text, "noise": noise})


def entry(call: str, text: str = "a", fingerprint: str = FINGERPRINT, **small: Any) -> Outcome:
    return bodies.entry(KEYS, call, codec.canonical(small) if small else payload(text), fingerprint=fingerprint, by="h")


def refusal(call: str, code: str | None = "busy", **more: Any) -> Outcome:
    return bodies.refusal(KEYS, call, {"model_call_id": call, "code": code, **more}, by="h")


class Stopped(Exception):
    """The process died before this batch."""


@dataclass
class Bucket:
    """A store in memory that runs generators and counts: ``trips`` are batches, ``requests`` are effects."""

    store: MemoryStore = field(default_factory=MemoryStore)
    trips: int = 0
    requests: int = 0
    sent: list[Effect] = field(default_factory=list)
    doubtful: bool = False
    undeletable: str = "nothing"

    def run(self, steps: Steps[T], *, until: int | None = None) -> T:
        """Run ``steps`` to the end, or die before batch number ``until``."""
        self.trips, self.requests, self.sent = 0, 0, []
        answers: tuple[Answer, ...] | None = None
        while True:
            try:
                batch = next(steps) if answers is None else steps.send(answers)
            except StopIteration as stop:
                result: T = stop.value
                return result
            if self.trips == until:
                steps.close()
                raise Stopped
            self.trips += 1
            self.requests += len(batch)
            self.sent.extend(batch)
            answers = tuple(map(self.perform, batch))

    def perform(self, effect: Effect) -> Answer:
        match effect:
            case Create(key, body):
                return Created(not self.doubtful) if self.store.create(key, body) else Exists()
            case Get(key):
                body_ = self.store.get(key)
                return Absent() if body_ is None else Found(body_)
            case List(prefix):
                return Listed(tuple(self.store.list(prefix)))
            case Delete(keys):
                kept = [key for key in keys if self.undeletable in key]
                self.store.delete([key for key in keys if key not in kept])
                return Deleted(tuple((key, "AccessDenied") for key in kept))

    @property
    def cost(self) -> tuple[int, int]:
        return self.trips, self.requests

    @property
    def keys(self) -> set[str]:
        return {row.key for row in self.store.list("")}

    def kinds(self) -> set[Kind]:
        parsed = (parse(KEYS.of.root, key) for key in self.keys)
        return {found.kind for found in parsed if found is not None}

    # -- the operations, shortened --------------------------------------------------------------------------

    def begin(self, call: str) -> bool:
        return self.run(begin_call(KEYS, call, origin()))

    def put(self, outcome: Outcome, *, owned: bool = False) -> None:
        self.run(put_outcome(KEYS, outcome, origin("p"), owned=owned))

    def mark(self, mark_id: str = "m1", call: str = "") -> None:
        self.run(mark_incomplete(KEYS, call, mark_id, bodies.mark(KEYS, call, origin(mark_id))))

    def freeze(self, nonce: str = "n1") -> FrozenRollout:
        return self.run(freeze(KEYS, origin(nonce)))

    def drop(self, frozen: FrozenRollout, *, keep: bool = False) -> bool:
        return self.run(drop(KEYS, frozen.manifest.snapshot_id, frozen.version, origin("d"), keep=keep)).retired

    def retire(self, *, keep: bool = False) -> Removal:
        return self.run(retire(KEYS, origin("r"), keep=keep))

    def delete(self) -> Removal:
        return self.run(delete(KEYS))


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


def filled(bucket: Bucket, calls: int) -> Bucket:
    for number in range(calls):
        owned = bucket.begin(f"c{number}")
        bucket.put(entry(f"c{number}", f"text {number}"), owned=owned)
    return bucket


# -- budgets ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("calls", [0, 7, 100])
def test_writing_costs_the_same_however_long_the_rollout(bucket: Bucket, calls: int) -> None:
    """Begin 2/2, begun put 1/2, other put 2/3, refusal 2/2, mark 2/2 trips and requests, at any length."""
    filled(bucket, calls)
    owned = bucket.begin("x")
    assert (owned, bucket.cost) == (True, (2, 2))
    bucket.put(entry("x"), owned=True)
    assert bucket.cost == (1, 2)
    bucket.put(entry("y"))
    assert bucket.cost == (2, 3)
    bucket.begin("z")
    bucket.put(refusal("z"))
    assert bucket.cost == (2, 2)
    bucket.mark()
    assert bucket.cost == (2, 2)


@pytest.mark.parametrize("calls", [0, 1, 7, 100])
def test_a_first_freeze_costs_four_trips(bucket: Bucket, calls: int) -> None:
    """The first freeze of T calls takes 4 trips and 4 + T requests; open calls add one trip for their seals."""
    filled(bucket, calls).freeze()
    assert bucket.cost == (4, 4 + calls)
    sealed = filled(Bucket(), calls)
    sealed.begin("open 1")
    sealed.begin("open 2")
    sealed.freeze()
    assert sealed.cost == (5, 4 + calls + 2)


@pytest.mark.parametrize("calls", [0, 1, 7, 100])
def test_a_repeated_freeze_costs_three_trips(bucket: Bucket, calls: int) -> None:
    """A frozen rollout is read with a list, the decision, and all records together."""
    filled(bucket, calls).freeze()
    bucket.freeze("again")
    assert bucket.cost == (3 if calls else 2, 2 + calls)


@pytest.mark.parametrize("calls", [0, 1, 7, 100])
def test_a_drop_costs_four_trips_and_its_deletes(bucket: Bucket, calls: int) -> None:
    """The decision takes 4 trips and 5 requests; housekeeping adds a list and one delete, and reads no large record."""
    filled(bucket, calls)
    frozen = bucket.freeze()
    kept = Bucket()
    for row in bucket.store.list(""):
        kept.store.create(row.key, bucket.store.get(row.key) or b"")
    assert kept.drop(frozen, keep=True)
    assert kept.cost == (4, 5)
    assert bucket.drop(frozen)
    assert bucket.cost == ((6, 7) if calls else (5, 6))


@pytest.mark.parametrize("calls", [0, 1, 100])
def test_resolving_costs_two_trips_cold_and_one_when_held(bucket: Bucket, calls: int) -> None:
    """A cold resolve lists and reads its candidates; a held candidate is not read; a miss is one trip."""
    filled(bucket, calls)
    bucket.put(entry("parent", fingerprint="other"))
    found = bucket.run(candidates(KEYS, "other", lambda *_: False))
    assert [candidate.segment for candidate in found] == ["parent"]
    assert bucket.cost == (2, 2)
    held = bucket.run(candidates(KEYS, "other", lambda segment, stamp: (segment, stamp) == ("parent", found[0].stamp)))
    assert (held[0].body, bucket.cost) == (None, (1, 1))
    assert bucket.run(candidates(KEYS, "nobody", lambda *_: False)) == ()
    assert bucket.cost == (1, 1)
    everything = bucket.run(chain(KEYS, lambda segment: segment == "parent"))
    assert (len(everything), bucket.cost) == (calls, (2 if calls else 1, 1 + calls))


# -- begin and put ------------------------------------------------------------------------------------------


def test_only_the_request_that_created_the_intent_owns_the_call(bucket: Bucket) -> None:
    """The second begin of a call succeeds and gives no privilege; so does one whose create was sent twice."""
    assert bucket.begin("c") is True
    assert bucket.begin("c") is False
    bucket.doubtful = True
    assert bucket.begin("d") is False


@pytest.mark.parametrize("owned", [True, False])
def test_the_same_payload_again_is_a_no_op(bucket: Bucket, owned: bool) -> None:
    """Putting the same bytes again returns normally and changes no object."""
    if owned:
        bucket.begin("c")
    bucket.put(entry("c"), owned=owned)
    before = bucket.store.list("")
    bucket.put(entry("c"), owned=owned)
    assert bucket.store.list("") == before


def test_an_owned_put_that_is_resent_looks(bucket: Bucket) -> None:
    """A create that was sent twice costs the privilege: the put looks for the announcement as others do."""
    bucket.begin("c")
    bucket.doubtful = True
    bucket.put(entry("c"), owned=True)
    assert Get(KEYS.closing) in bucket.sent


@pytest.mark.parametrize("call", ["c", "", "a/b", "é\ud800", "x" * 500, "..", "!conflict"])
def test_any_call_id_is_put_and_frozen(bucket: Bucket, call: str) -> None:
    """Whatever string the call id is, its entry comes back with it, and a second begin finds the first."""
    assert bucket.begin(call)
    bucket.put(entry(call), owned=True)
    (stored,) = bucket.freeze().of_kind(bodies.ENTRY).values()
    assert stored.header["call"] == call
    assert stored.payload == payload().data


def test_a_foreign_payload_of_the_same_length_is_a_conflict(bucket: Bucket) -> None:
    """The conflict names both digests, keeps the loser, leaves the winner, and takes the call out of lineage."""
    bucket.put(entry("c", v="aaaa"))
    with pytest.raises(ConflictingPayloadError, match="conflicting") as caught:
        bucket.put(entry("c", v="bbbb"))
    first, second = codec.canonical({"v": "aaaa"}), codec.canonical({"v": "bbbb"})
    assert len(first.data) == len(second.data)
    for part in (first.digest, second.digest, "'c'", "'7-3'", "'run-7'"):
        assert part in str(caught.value)
    assert bucket.store.get(KEYS.call("c")) == entry("c", v="aaaa").body
    assert bucket.store.get(KEYS.conflict("c", second.digest)) == entry("c", v="bbbb").body
    assert bucket.run(candidates(KEYS, FINGERPRINT, lambda *_: False)) == ()
    frozen = bucket.freeze()
    assert (frozen.incomplete, frozen.of_kind(bodies.ENTRY), frozen.version) == (True, {}, 3)


def test_a_conflict_is_no_candidate_under_either_fingerprint(bucket: Bucket) -> None:
    """When the two payloads have different fingerprints, both lose the call as a candidate."""
    bucket.put(entry("c", "a", "one"))
    with pytest.raises(ConflictingPayloadError):
        bucket.put(entry("c", "b", "two"))
    assert bucket.run(candidates(KEYS, "one", lambda *_: False)) == ()
    assert bucket.run(candidates(KEYS, "two", lambda *_: False)) == ()


def test_the_same_conflict_twice_counts_once(bucket: Bucket) -> None:
    """Retrying a conflicting put raises again and leaves the version alone; a third payload raises it."""
    bucket.put(entry("c", "a"))
    for text in ("b", "b", "d"):
        with pytest.raises(ConflictingPayloadError):
            bucket.put(entry("c", text))
    assert bucket.freeze().version == 1 + 1 + 2


def test_refusals_are_the_same_by_code(bucket: Bucket) -> None:
    """The same code again is a no-op whatever else differs; another code, or none, is a conflict."""
    bucket.begin("c")
    bucket.put(refusal("c", "busy", created_at=1.0))
    bucket.put(refusal("c", "busy", created_at=2.0))
    assert bucket.freeze().incomplete is False
    other = Bucket()
    other.put(refusal("c", None))
    with pytest.raises(ConflictingPayloadError, match="refusal of call 'c'"):
        other.put(refusal("c", "busy"))
    other.put(refusal("c", None))
    assert other.freeze().incomplete


def test_a_refusal_settles_its_intent(bucket: Bucket) -> None:
    """A begun and refused call is complete and reported, and a put of it is a conflict."""
    bucket.begin("c")
    bucket.put(refusal("c"))
    with pytest.raises(ConflictingPayloadError, match="stored refusal"):
        bucket.put(entry("c"))
    clean = Bucket()
    clean.begin("c")
    clean.put(refusal("c"))
    frozen = clean.freeze()
    assert frozen.of_kind(bodies.REFUSAL)["c"].value() == {"model_call_id": "c", "code": "busy"}
    assert (frozen.incomplete, frozen.of_kind(bodies.ENTRY)) == (False, {})


def test_a_store_that_contradicts_itself_is_an_error() -> None:
    """'Exists' when created and absent when read, again and again, ends in an error and is never a success."""

    class Liar(Bucket):
        def perform(self, effect: Effect) -> Answer:
            lies = isinstance(effect, Create) and effect.key in (KEYS.call("c"), KEYS.frozen)
            return Exists() if lies else super().perform(effect)

    with pytest.raises(StoreError, match="not consistent"):
        Liar().put(entry("c"))
    with pytest.raises(StoreError, match="not consistent"):
        Liar().freeze()


# -- freeze -------------------------------------------------------------------------------------------------


def test_an_unknown_rollout_freezes_empty_and_complete(bucket: Bucket) -> None:
    """Freezing what nobody wrote gives version 1, no outcome, complete."""
    frozen = bucket.freeze()
    assert (frozen.version, frozen.outcomes, frozen.incomplete) == (1, {}, False)


def test_the_version_counts_outcomes_conflicts_and_marks(bucket: Bucket) -> None:
    """Version = 1 + outcomes (seals and refusals too) + conflicts + marks; marks behind the decision raise it."""
    bucket.put(entry("entry"))
    bucket.put(refusal("refusal"))
    bucket.begin("sealed")
    with pytest.raises(ConflictingPayloadError):
        bucket.put(entry("entry", "b"))
    bucket.mark("m1")
    assert bucket.freeze().version == 1 + 3 + 1 + 1
    bucket.mark("m2")
    bucket.mark("m2")
    again = bucket.freeze("n2")
    assert again.version == 7
    assert (set(again.marks), set(again.manifest.marks)) == ({"m1", "m2"}, {"m1"})


def test_a_begun_call_without_outcome_is_sealed(bucket: Bucket) -> None:
    """An open call masks the rollout, and its late first put is refused as frozen by the seal alone."""
    owned = bucket.begin("c")
    assert bucket.freeze().incomplete
    with pytest.raises(TokenCaptureFrozenError) as caught:
        bucket.put(entry("c"), owned=owned)
    assert not isinstance(caught.value, TokenCaptureRetiredError)
    assert bucket.freeze().of_kind(bodies.ENTRY) == {}


def test_a_repeated_freeze_returns_the_same_snapshot(bucket: Bucket) -> None:
    """The first decision stands: another process gets its id, entries and version."""
    filled(bucket, 3)
    first, second = bucket.freeze("n1"), bucket.freeze("n2")
    assert first == second
    assert second.manifest.snapshot_id == "n1"


def test_a_late_outcome_is_evidence_and_not_in_the_snapshot(bucket: Bucket) -> None:
    """A put behind the decision is refused; what it left in the bucket changes neither entries nor version."""
    filled(bucket, 2)
    first = bucket.freeze()
    for late in (entry("late"), refusal("late refusal")):
        with pytest.raises(TokenCaptureFrozenError):
            bucket.put(late)
    assert KEYS.call("late") in bucket.keys
    assert bucket.freeze("n2") == first
    assert bucket.drop(first)


def test_a_retry_behind_the_freeze_is_acknowledged_if_decided(bucket: Bucket) -> None:
    """A put in the manifest may be repeated; another payload of it is refused as frozen and leaves no evidence."""
    bucket.put(entry("c"))
    first = bucket.freeze()
    bucket.put(entry("c"))
    with pytest.raises(TokenCaptureFrozenError):
        bucket.put(entry("c", "b"))
    assert bucket.freeze() == first


def test_begin_behind_the_freeze_is_refused(bucket: Bucket) -> None:
    """A begin behind the fence raises, its intent changes nothing, and its error says which rollout and what to do."""
    first = bucket.freeze()
    with pytest.raises(TokenCaptureFrozenError, match=r"begin of call 'c'.*'7-3'.*'run-7'.*do not mark"):
        bucket.begin("c")
    assert bucket.freeze() == first


@pytest.mark.parametrize("died_before", [1, 2, 3, 4])
def test_whoever_meets_a_dead_freezer_finishes(bucket: Bucket, died_before: int) -> None:
    """Whatever request a freezer died before, the next put ends, and its verdict is the next freeze's."""
    bucket.begin("open")
    bucket.put(entry("c"))
    with pytest.raises(Stopped):
        bucket.run(freeze(KEYS, origin("dead")), until=died_before)
    try:
        bucket.put(entry("d"))
        acknowledged = True
    except TokenCaptureFrozenError:
        acknowledged = False
    frozen = bucket.freeze("n2")
    assert ("d" in frozen.of_kind(bodies.ENTRY)) is acknowledged is True
    assert frozen.incomplete


def test_a_snapshot_with_a_lost_record_is_an_error(bucket: Bucket) -> None:
    """A record that the decision names and the bucket has lost is never left out in silence."""
    filled(bucket, 2).freeze()
    bucket.store.delete([KEYS.call("c1")])
    with pytest.raises(CorruptObjectError, match="holds call 'c1'"):
        bucket.freeze()


def test_a_record_at_a_wrong_key_is_an_error(bucket: Bucket) -> None:
    """An intact record of another call or another rollout is not taken for the one its key names."""
    bucket.put(entry("c"))
    bucket.store.overwrite(KEYS.call("c"), entry("d").body)
    with pytest.raises(CorruptObjectError, match="says it is call 'd'"):
        bucket.freeze()
    foreign = replace(KEYS, rollout_id="7-4")
    bucket.store.overwrite(KEYS.call("c"), bodies.entry(foreign, "c", payload(), fingerprint="", by="h").body)
    with pytest.raises(CorruptObjectError, match="7-4"):
        bucket.freeze()


# -- marks --------------------------------------------------------------------------------------------------


def test_a_mark_shows_before_and_behind_the_freeze(bucket: Bucket) -> None:
    """A mark on an unknown rollout makes it incomplete; one behind the freeze stales the snapshot's drop."""
    bucket.mark("m1")
    first = bucket.freeze()
    assert (first.incomplete, first.version) == (True, 2)
    bucket.mark("m2")
    assert bucket.drop(first) is False
    assert KEYS.retired not in bucket.keys
    assert bucket.drop(bucket.freeze())


def test_a_mark_of_a_retired_rollout_is_refused(bucket: Bucket) -> None:
    """Behind a drop and behind a retire a mark raises the retired error."""
    bucket.drop(bucket.freeze())
    with pytest.raises(TokenCaptureRetiredError, match="mark for call 'c'"):
        bucket.mark("m", "c")
    retired = Bucket()
    retired.retire()
    with pytest.raises(TokenCaptureRetiredError):
        retired.mark()


def test_a_mark_finishes_a_drop_that_died(bucket: Bucket) -> None:
    """A drop announced and not decided is decided by the mark, which was created before: not retired."""
    first = bucket.freeze()
    with pytest.raises(Stopped):
        bucket.run(drop(KEYS, "n1", first.version, origin("dead"), keep=False), until=2)
    bucket.mark()
    assert bucket.drop(first) is False
    assert bucket.freeze().incomplete


# -- drop ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [False, True])
def test_a_drop_retires_and_can_be_repeated(bucket: Bucket, keep: bool) -> None:
    """Drop and drop again are True; afterwards every write and freeze is refused as retired, deleted or kept."""
    filled(bucket, 3)
    owned = bucket.begin("open")
    first = bucket.freeze()
    assert bucket.drop(first, keep=keep)
    assert bucket.drop(first, keep=keep)
    assert ({Kind.INTENT, Kind.LINEAGE} <= bucket.kinds()) is keep
    for refused in (
        lambda: bucket.begin("new"),
        lambda: bucket.put(entry("c0")),
        lambda: bucket.put(entry("new")),
        lambda: bucket.put(refusal("new")),
        lambda: bucket.put(entry("open"), owned=owned),
        bucket.mark,
        bucket.freeze,
    ):
        with pytest.raises(TokenCaptureRetiredError):
            refused()


def test_a_drop_keeps_fences_and_seals(bucket: Bucket) -> None:
    """What stays behind a drop are the fences and the seals, and nothing else."""
    filled(bucket, 2)
    bucket.put(refusal("refused"))
    bucket.begin("open")
    bucket.drop(bucket.freeze())
    assert bucket.keys == {
        KEYS.closing, KEYS.frozen, KEYS.retiring(5), KEYS.drop(5), KEYS.call("open")
    }  # fmt: skip


def test_a_drop_of_something_else_is_false_and_changes_nothing(bucket: Bucket) -> None:
    """Unknown, not frozen, another snapshot, another version: False with a reason, and no key is made."""
    assert "not frozen" in bucket.run(drop(KEYS, "n1", 1, origin(), keep=False)).why
    filled(bucket, 1).freeze()
    before = bucket.keys
    assert "another snapshot" in bucket.run(drop(KEYS, "n2", 2, origin(), keep=False)).why
    assert "version is 2 now, not 1" in bucket.run(drop(KEYS, "n1", 1, origin(), keep=False)).why
    assert bucket.keys == before
    bucket.retire()
    assert "retired otherwise" in bucket.run(drop(KEYS, "n1", 2, origin(), keep=False)).why


def test_a_drop_without_delete_rights_still_retires(bucket: Bucket) -> None:
    """Keys that could not be deleted are reported with the store's reason; the decision alone retires."""
    filled(bucket, 2)
    first = bucket.freeze()
    bucket.undeletable = "/call/"
    dropped = bucket.run(drop(KEYS, "n1", first.version, origin(), keep=False))
    assert dropped.retired
    assert dropped.left == ((KEYS.call("c0"), "AccessDenied"), (KEYS.call("c1"), "AccessDenied"))
    with pytest.raises(TokenCaptureRetiredError):
        bucket.freeze()


@pytest.mark.parametrize("died_before", [1, 2, 3, 4, 5])
def test_a_drop_that_died_is_finished_by_repeating_it(bucket: Bucket, died_before: int) -> None:
    """Whatever request a drop died before, the same drop again is True and leaves fences alone."""
    filled(bucket, 2)
    first = bucket.freeze()
    with pytest.raises(Stopped):
        bucket.run(drop(KEYS, "n1", first.version, origin("dead"), keep=False), until=died_before)
    assert bucket.drop(first)
    assert {parsed.kind for key in bucket.keys if (parsed := parse(KEYS.of.root, key))} == {
        Kind.CLOSING, Kind.FROZEN, Kind.RETIRING, Kind.DROP
    }  # fmt: skip


# -- retire and delete --------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["unknown", "open", "frozen", "dropped"])
def test_retire_works_from_every_state_and_repeats_as_nothing(bucket: Bucket, state: str) -> None:
    """Retire ends in the retired fence whatever was; only what had records counts; the second one changes nothing."""
    if state != "unknown":
        filled(bucket, 2)
        bucket.begin("open")
    if state in ("frozen", "dropped"):
        frozen = bucket.freeze()
        if state == "dropped":
            bucket.drop(frozen)
    assert bucket.retire().had_records is (state in ("open", "frozen"))
    assert KEYS.retired in bucket.keys and not {Kind.INTENT, Kind.LINEAGE, Kind.MARK} & bucket.kinds()
    before = bucket.store.list("")
    assert bucket.retire() == Removal(had_records=False)
    assert bucket.store.list("") == before


def test_an_open_call_of_a_retired_rollout_is_refused_by_its_seal(bucket: Bucket) -> None:
    """The one-trip put of a begun call, which looks at nothing else, meets the seal that retire made."""
    owned = bucket.begin("c")
    assert bucket.retire().had_records
    assert KEYS.call("c") in bucket.keys
    with pytest.raises(TokenCaptureRetiredError):
        bucket.put(entry("c"), owned=owned)


def test_retire_with_keep_deletes_nothing(bucket: Bucket) -> None:
    """With retention by the bucket, every record stays and the rollout is retired all the same."""
    before = filled(bucket, 2).keys
    bucket.retire(keep=True)
    assert bucket.keys == before | {KEYS.closing, KEYS.retired}
    with pytest.raises(TokenCaptureRetiredError):
        bucket.freeze()


@pytest.mark.parametrize("marked", [False, True])
def test_a_mark_alone_counts_as_records(bucket: Bucket, marked: bool) -> None:
    """A rollout that has only a marker was there; one that has nothing was not."""
    if marked:
        bucket.mark()
    assert bucket.delete().had_records is marked


def test_delete_makes_the_id_new(bucket: Bucket) -> None:
    """After a delete nothing of the rollout is left, deleting again is a no-op, and the id starts empty."""
    filled(bucket, 2)
    bucket.begin("open")
    with pytest.raises(ConflictingPayloadError):
        bucket.put(entry("c0", "b"))
    bucket.mark()
    neighbour = replace(KEYS, rollout_id="7-30")
    bucket.store.create(neighbour.intent("c"), b"")
    bucket.retire()
    assert bucket.delete() == Removal(had_records=False)
    assert bucket.keys == {neighbour.intent("c")}
    assert bucket.delete() == Removal(had_records=False)
    assert bucket.begin("c0")
    bucket.put(entry("c0", "new"), owned=True)
    assert bucket.freeze().version == 2


@pytest.mark.parametrize("state", ["frozen", "dropped", "retired", "kept"])
@pytest.mark.parametrize("died_before", range(1, 8))
def test_a_delete_that_died_is_finished_by_repeating_it(bucket: Bucket, state: str, died_before: int) -> None:
    """Whatever request a delete died before: a write is refused while anything but the announcement is left, no
    snapshot with holes is returned, and deleting again leaves nothing."""
    filled(bucket, 2)
    bucket.begin("open")
    frozen = bucket.freeze()
    if state == "dropped":
        bucket.drop(frozen)
    elif state != "frozen":
        bucket.retire(keep=state == "kept")
    try:
        bucket.run(delete(KEYS), until=died_before)
    except Stopped:
        left = bucket.keys
        assert KEYS.closing in left
        with pytest.raises(TokenCaptureFrozenError):
            bucket.begin("late")
        with pytest.raises(TokenCaptureFrozenError) if left != {KEYS.closing} else nullcontext():
            bucket.put(entry("late"))
        with suppress(TokenCaptureRetiredError, CorruptObjectError):
            assert bucket.freeze("n2").outcomes.keys() in ({"c0", "c1", "open"}, {"late"})
    bucket.delete()
    assert bucket.keys == set()


def test_a_delete_that_may_not_delete_keeps_its_fences(bucket: Bucket) -> None:
    """When records cannot be deleted, the fences stay, so that nothing is admitted to a half-deleted rollout."""
    filled(bucket, 1)
    bucket.retire(keep=True)
    bucket.undeletable = "/call/"
    assert bucket.delete().left == ((KEYS.call("c0"), "AccessDenied"),)
    assert {KEYS.closing, KEYS.retired} <= bucket.keys
    with pytest.raises(TokenCaptureRetiredError):
        bucket.begin("c")


def test_generators_yield_no_empty_batch(bucket: Bucket) -> None:
    """Every batch holds something to do, whatever the rollout holds."""

    def batches(steps: Steps[Any]) -> Iterable[int]:
        answers: tuple[Answer, ...] | None = None
        while True:
            try:
                batch = next(steps) if answers is None else steps.send(answers)
            except StopIteration:
                return
            yield len(batch)
            answers = tuple(map(bucket.perform, batch))

    for steps in (
        freeze(KEYS, origin()),
        drop(KEYS, "n1", 1, origin(), keep=False),
        retire(KEYS, origin(), keep=False),
    ):
        assert all(batches(steps))
    assert all(batches(delete(KEYS)))
