"""Each invariant is quiet about a sound rollout in every state, and speaks about exactly the breach it is for."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest

from s3capture import codec, invariants
from s3capture.errors import ConflictingPayloadError
from s3capture.invariants import ALWAYS, WHEN_QUIET, RolloutInvariant, contents, rollouts_of
from s3capture.keys import RunKeys
from s3capture.protocol import bodies
from s3capture.protocol.freezing import freeze
from s3capture.protocol.retiring import drop, retire
from s3capture.protocol.writing import begin_call, mark_incomplete, put_outcome
from s3capture.testing.explorer import run_alone

KEYS = RunKeys("p", "run").rollout("7-3")
ORIGIN = bodies.Origin("host", 1.0, "n1")
Objects = dict[str, bytes]


def entry(call: str, value: str = "a") -> bodies.Outcome:
    return bodies.entry(KEYS, call, codec.canonical({"v": value}), fingerprint="f", by="h")


def rollout(state: str = "frozen") -> Objects:
    """A rollout with an entry, a conflict, a mark and an open call, as far as ``state``."""
    bucket: Objects = {}
    for call in ("kept", "contested", "open"):
        run_alone(begin_call(KEYS, call, ORIGIN), bucket)
    run_alone(put_outcome(KEYS, entry("kept"), ORIGIN, owned=True), bucket)
    run_alone(put_outcome(KEYS, entry("contested"), ORIGIN, owned=True), bucket)
    with pytest.raises(ConflictingPayloadError):
        run_alone(put_outcome(KEYS, entry("contested", "b"), ORIGIN, owned=False), bucket)
    run_alone(mark_incomplete(KEYS, "", "m", bodies.mark(KEYS, "", ORIGIN)), bucket)
    if state == "open":
        return bucket
    frozen = run_alone(freeze(KEYS, ORIGIN), bucket)
    if state in ("dropped", "kept"):
        args = (KEYS, frozen.manifest.snapshot_id, frozen.version, ORIGIN)
        assert run_alone(drop(*args, keep=state == "kept"), bucket).retired
    if state == "retired":
        run_alone(retire(KEYS, ORIGIN, keep=False), bucket)
    return bucket


def breaches(bucket: Objects) -> dict[str, list[str]]:
    found = {check.__name__: list(check(contents(KEYS, bucket))) for check in WHEN_QUIET}
    return {name: messages for name, messages in found.items() if messages}


@pytest.mark.parametrize("state", ["open", "frozen", "dropped", "kept", "retired"])
def test_a_sound_rollout_breaks_nothing(state: str) -> None:
    """In every state that the protocol reaches, no invariant speaks; an empty rollout is sound as well."""
    assert breaches(rollout(state)) == {}
    assert breaches({}) == {}


def _without(*keys: str) -> Callable[[Objects], Objects]:
    return lambda bucket: {key: body for key, body in bucket.items() if key not in keys}


def _with(**more: Callable[[], tuple[str, bytes]]) -> Callable[[Objects], Objects]:
    return lambda bucket: {**bucket, **dict(make() for make in more.values())}


def _drop(version: int, *, retired: bool = True) -> Callable[[], tuple[str, bytes]]:
    return lambda: (KEYS.drop(version), bodies.fence("drop", KEYS, ORIGIN, retired=retired))


def _put(key: str, body: bytes) -> Callable[[], tuple[str, bytes]]:
    return lambda: (key, body)


CONFLICT = KEYS.conflict("contested", entry("contested", "b").digest)
FOREIGN = bodies.entry(replace(KEYS, rollout_id="7-4"), "kept", codec.canonical({"v": "a"}), fingerprint="f", by="h")
NEIGHBOUR = replace(KEYS, rollout_id="7-30")

BREACHES: list[tuple[str, str, Callable[[Objects], Objects], str]] = [
    ("frozen", "decisions_were_announced", _without(KEYS.closing), "without the announcement 'closing'"),
    ("retired", "decisions_were_announced", _without(KEYS.closing, KEYS.frozen), "freeze or retire was decided"),
    ("frozen", "decisions_were_announced", _with(drop=_drop(9, retired=False)), "drop-9 was decided without"),
    (
        "dropped",
        "one_drop_retires",
        _with(drop=_drop(9), announced=_put(KEYS.retiring(9), b"")),
        r"versions \(6, 9\) were all",
    ),
    ("frozen", "objects_are_what_their_keys_say", _with(x=_put(KEYS.call("kept"), b"junk" * 999)), "not a zstd frame"),
    ("frozen", "objects_are_what_their_keys_say", _with(x=_put(KEYS.call("kept"), FOREIGN.body)), "'7-4'"),
    ("frozen", "objects_are_what_their_keys_say", _with(x=_put(KEYS.call("kept"), entry("c").body)), "is call 'c'"),
    ("frozen", "snapshot_is_whole", _without(KEYS.call("kept")), "names call kept"),
    ("frozen", "snapshot_is_whole", _without(KEYS.mark("m")), "1 marks"),
    ("frozen", "snapshot_is_whole", _without(CONFLICT), "1 conflicts"),
    ("frozen", "seals_are_decided", _without(KEYS.closing, KEYS.frozen), "call open is sealed"),
    (
        "frozen",
        "no_conflict_with_itself",
        _with(x=_put(KEYS.conflict("kept", entry("kept").digest), entry("kept").body)),
        "call kept has a conflict with its own",
    ),
    ("open", "no_foreign_keys", _with(x=_put(KEYS.base + "notes.txt", b"")), "notes.txt"),
    (
        "frozen",
        "conflicts_are_marked_in_lineage",
        _without(KEYS.lineage_conflict("f", "contested")),
        "still a candidate",
    ),
]


@pytest.mark.parametrize(("state", "name", "damage", "message"), BREACHES)
def test_a_breach_is_named(state: str, name: str, damage: Callable[[Objects], Objects], message: str) -> None:
    """Damage of one kind is reported by its invariant, in one sentence that says where."""
    rows = contents(KEYS, damage(rollout(state)))
    check: RolloutInvariant = getattr(invariants, name)
    (found,) = check(rows)
    assert re.search(message, found)


def test_every_invariant_has_a_breach_here() -> None:
    """No predicate is listed without a case that it catches, and the quiet ones are all of the others and one more."""
    assert {name for _, name, _, _ in BREACHES} == {check.__name__ for check in WHEN_QUIET}
    assert set(WHEN_QUIET) - set(ALWAYS) == {invariants.conflicts_are_marked_in_lineage}


def test_a_retired_rollout_may_have_lost_its_records() -> None:
    """What retirement deletes is missed in a frozen rollout and not in a retired one, finished or half swept."""
    swept = _without(KEYS.call("kept"), KEYS.mark("m"), CONFLICT, KEYS.lineage_conflict("f", "contested"))
    assert set(breaches(swept(rollout("frozen")))) == {"snapshot_is_whole"}
    assert breaches(swept(rollout("kept"))) == {}
    assert breaches(_without(KEYS.lineage_conflict("f", "contested"))(rollout("kept"))) == {}


def test_a_drop_that_was_refused_retires_nothing() -> None:
    """Only a decision that says so retires, and any number of refused drops may stand beside it."""
    refused = _with(a=_put(KEYS.retiring(1), b""), b=_drop(1, retired=False))(rollout("frozen"))
    assert contents(KEYS, refused).retired is False and breaches(refused) == {}
    beside = _with(a=_put(KEYS.retiring(1), b""), b=_drop(1, retired=False))(rollout("dropped"))
    assert contents(KEYS, beside).dropped_at == (6,) and breaches(beside) == {}


def test_what_was_not_read_is_not_judged() -> None:
    """Bodies that a caller did not read are passed over: keys alone make no breach."""
    frozen = rollout("frozen")
    seen = contents(KEYS, frozen)
    assert not [message for check in WHEN_QUIET for message in check(replace(seen, objects={}))]
    assert replace(seen, objects={}).manifest is None


def test_a_neighbour_is_not_judged() -> None:
    """Objects of other rollouts are no part of this one, whatever they are."""
    assert breaches({**rollout("frozen"), NEIGHBOUR.frozen: b"", NEIGHBOUR.base + "junk": b""}) == {}


def test_rollouts_are_found_by_their_attempts() -> None:
    """A run's rollouts are those with any object below attempts/, each once, and nothing foreign."""
    bucket = {
        **rollout("frozen"),
        NEIGHBOUR.mark("m"): b"",
        KEYS.of.rollout("only-lineage").lineage_call("f", "c"): b"",
        KEYS.of.ledger("only-ledger").closing: b"",
        KEYS.of.probe("x"): b"",
        KEYS.of.root + "attempts/00/stray": b"",
        RunKeys("p", "run2").rollout("other-run").closing: b"",
    }
    assert rollouts_of(KEYS.of.root, bucket) == ["7-3", "7-30"]
