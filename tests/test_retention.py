"""Retire, delete and sweep: what they take and leave, and that a rerun finishes whatever died on the way."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
import pytest
from captures import captures, entry
from fakes3 import FakeS3, Reply, on
from fakes3 import Request as Wire
from test_cli import Ran, here
from test_ledger import commit

from s3capture import S3CaptureLedger, S3TokenSink, S3TokenSource
from s3capture.effects import ObjectInfo
from s3capture.errors import StoreConfigError, StoreUnavailableError, TokenCaptureRetiredError
from s3capture.inspection import State, inspect_rollout, list_rollouts
from s3capture.keys import Kind, PackName, RunKeys, parse
from s3capture.local import EmbeddedServer
from s3capture.protocol import bodies
from s3capture.protocol.bodies import Origin
from s3capture.reader import Reader
from s3capture.retention import (
    Act,
    Outcome,
    Plan,
    Request,
    SweepPlan,
    carry_out,
    choose,
    clear,
    leftovers,
    plan_sweep,
    remarks,
    sweep,
)
from s3capture.retention.choosing import Stays
from s3capture.retention.removing import GIVE_UP
from s3capture.retention.sweeping import What
from s3capture.runtime import Runtime
from s3capture.settings import Settings
from s3capture.sink import entry_payload
from s3capture.store.boto import BotoStore
from s3capture.store.boto_facts import BucketFacts, bucket_facts
from s3capture.store.memory import MemoryStore
from s3capture.stored import Selection, StoredRun
from s3capture.stored.run import Packed

DOC = Path(__file__).parent.parent / "docs" / "retention.md"
KEYS = RunKeys("p", "r")
WHO = Origin("elsewhere:1", 1_700_000_000.0, "0" * 32)
DAY = 86_400.0
NOW = 1_800_000_000.0


class Killed(BaseException):
    """The process died here."""


class Aging(MemoryStore):
    """A store with a clock of its own, which may refuse to delete."""

    def __init__(self) -> None:
        super().__init__()
        self.now = NOW
        self.refused: dict[str, str] = {}
        self._times: dict[str, float] = {}

    def create(self, key: str, body: bytes) -> bool:
        """See ``Store``; stamped with the clock."""
        made = super().create(key, body)
        if made:
            self._times[key] = self.now
        return made

    def delete(self, keys: Sequence[str]) -> dict[str, str]:
        """See ``Store``."""
        super().delete([key for key in keys if key not in self.refused])
        return {key: self.refused[key] for key in keys if key in self.refused}

    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        """See ``Store``."""
        stamps = {key: datetime.fromtimestamp(at, UTC).isoformat() for key, at in self._times.items()}
        return [ObjectInfo(row.key, row.size, f"{stamps[row.key]}/{row.stamp}") for row in super().list(prefix)]

    def touch(self, key: str, at: float) -> None:
        """Stamp an object anew."""
        self._times[key] = at

    def keys(self, prefix: str = "") -> set[str]:
        """Every key but scratch keys."""
        return set(captures([row.key for row in super().list(prefix)]))


class Mortal:
    """A store as one process sees it that dies after so many effects, each deleted key being one, and stays dead."""

    def __init__(self, store: Aging, left: int) -> None:
        self.store, self.left = store, left
        self._lock = threading.Lock()

    def create(self, key: str, body: bytes) -> bool:
        """See ``Store``."""
        self._effect()
        return self.store.create(key, body)

    def delete(self, keys: Sequence[str]) -> dict[str, str]:
        """See ``Store``; key by key, so that a death leaves the rest."""
        refused: dict[str, str] = {}
        for key in keys:
            self._effect()
            refused |= self.store.delete([key])
        return refused

    def __getattr__(self, name: str) -> Any:
        """Reading is no effect, but the dead do not read."""
        if self.left < 0:
            raise Killed
        return getattr(self.store, name)

    def _effect(self) -> None:
        with self._lock:
            self.left -= 1
            if self.left < 0:
                raise Killed


class Bench:
    """A run on a store, and the package's own entry points on it."""

    def __init__(self, store: MemoryStore, spill: Path) -> None:
        self.store = store
        self.settings: dict[str, Any] = {
            "url": "s3://bench/p",
            "run": "r",
            "spill_dir": str(spill),
            "max_concurrency": 2,
        }

    def runtime(self) -> Runtime:
        return Runtime(Settings.of(**self.settings), self.store)

    def choose(self, act: Act = Act.DELETE, *globs: str, **more: Any) -> Plan:
        """Plan an act; ``states`` and ``until`` go to the selection, the rest to the request."""
        given = {name: more.pop(name) for name in ("states", "until", "complete") if name in more}
        with Reader(self.store) as reader:
            return choose(StoredRun(reader, KEYS), Request(act, Selection(globs, **given), **more))

    def act(self, act: Act, *globs: str, hand: Any = None, **more: Any) -> list[Outcome]:
        return [*carry_out(self.runtime(), self.choose(act, *globs, **more), hand=hand)]

    def plan_sweep(self, **more: Any) -> SweepPlan:
        with Reader(self.store) as reader:
            return plan_sweep(StoredRun(reader, KEYS), NOW + DAY, **more)

    def sweep(self, **more: Any) -> list[Outcome]:
        return [*sweep(self.runtime(), self.plan_sweep(**more))]

    def states(self) -> dict[str, State]:
        with Reader(self.store) as reader:
            return {found.rollout: found.state for found in list_rollouts(reader, KEYS)}

    def fill(self, *, retention: str = "delete", ledgers: bool = False) -> None:
        """Rollouts ``open``, ``frozen``, ``dropped`` and ``retired``, two calls each, the second never answered."""
        asyncio.run(self._fill(retention, ledgers))

    async def _fill(self, retention: str, ledgers: bool) -> None:
        given = {**self.settings, "store": self.store, "retention": retention}
        sink, source, ledger = S3TokenSink(**given), S3TokenSource(**given), S3CaptureLedger(**given)
        for rollout in ("open", "frozen", "dropped", "retired"):
            await sink.begin_call(rollout, "c1")
            await sink.put(entry("c1", rollout, continuation_fingerprint="f" * 64))
            await sink.begin_call(rollout, "c2")
            if ledgers:
                await ledger.begin_call(rollout, "c1")
                await ledger.record(commit("c1").model_copy(update={"rollout_id": rollout}))
        await source.freeze("frozen")
        snapshot = await source.freeze("dropped")
        assert await source.drop("dropped", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        await source.retire(["retired"])

    def put(self, rollout: str, call: str = "late") -> None:
        asyncio.run(S3TokenSink(store=self.store, **self.settings).put(entry(call, rollout)))


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """A run on a store with a clock."""
    return Bench(Aging(), tmp_path)


def records(store: MemoryStore, rollout: str) -> set[str]:
    """The keys of a rollout that are no fences."""
    keys = KEYS.rollout(rollout)
    rows = [*store.list(keys.base), *store.list(keys.lineage_base)]
    return {row.key for row in rows if not row.key.startswith(keys.fences)}


def outcome(rollout: str, call: str) -> bytes:
    """The object of a record, as a put would store it."""
    record = entry_payload(entry(call, rollout))
    return bodies.entry(KEYS.rollout(rollout), call, record, fingerprint="", by="elsewhere:1").body


def chosen(plan: Plan) -> set[str]:
    """The rollouts of a plan."""
    return {candidate.rollout for candidate in plan.candidates}


# -- choosing -------------------------------------------------------------------------------------------------


def test_a_pattern_takes_only_what_was_consumed(bench: Bench) -> None:
    """A delete by pattern or age takes retired rollouts, and counts the others as protected."""
    bench.fill()
    for plan in (bench.choose(Act.DELETE, "*"), bench.choose(Act.DELETE, until=NOW + DAY)):
        assert chosen(plan) == {"dropped", "retired"}
        assert {(state, n) for state, why, n in plan.stays if why is Stays.PROTECTED} == {
            (State.OPEN, 1),
            (State.FROZEN, 1),
        }


@pytest.mark.parametrize("act", [*Act])
def test_a_full_id_or_a_state_is_a_name(bench: Bench, act: Act) -> None:
    """What nobody consumed is taken by its id in full, by its state, and with the whole run."""
    bench.fill()
    assert chosen(bench.choose(act, "open")) == {"open"}
    assert chosen(bench.choose(act, "op?n")) == set()
    assert chosen(bench.choose(act, states=frozenset({"frozen"}))) == {"frozen"}
    assert {"open", "frozen"} <= chosen(bench.choose(act, everything=True))


def test_retiring_without_deleting_takes_a_pattern(bench: Bench) -> None:
    """``keep`` deletes nothing, so rollouts that nobody consumed are retired by pattern or age as well."""
    bench.fill()
    assert chosen(bench.choose(Act.RETIRE, until=NOW + DAY, keep=True)) == {"open", "frozen"}
    assert chosen(bench.choose(Act.RETIRE, until=NOW + DAY)) == set()


def test_age_is_that_of_the_youngest_object(bench: Bench) -> None:
    """One young object, be it a row of the ledger, makes a rollout young; without its time no age matches."""
    bench.fill(ledgers=True)
    assert "dropped" in chosen(bench.choose(Act.DELETE, until=NOW + 1))
    assert isinstance(bench.store, Aging)
    bench.store.touch(KEYS.ledger("dropped").call("c1"), NOW + 5)
    assert "dropped" not in chosen(bench.choose(Act.DELETE, until=NOW + 1))
    plain = Bench(MemoryStore(), Path(bench.settings["spill_dir"]))
    plain.fill()
    assert chosen(plain.choose(Act.DELETE, until=NOW + DAY)) == set()


def test_a_plan_counts_objects_and_bytes_of_rollout_markers_and_ledger(bench: Bench) -> None:
    """The sums of a plan are what a delete removes."""
    bench.fill(ledgers=True)
    before = {row.key: row.size for row in bench.store.list("") if "/probe/" not in row.key}
    plan = bench.choose(Act.DELETE, "frozen", "dropped")
    assert all(outcome.done for outcome in carry_out(bench.runtime(), plan))
    gone = before.keys() - {row.key for row in bench.store.list("")}
    assert (plan.total.rollouts, plan.total.objects, plan.total.bytes) == (2, len(gone), sum(before[k] for k in gone))
    assert plan.by_state()[State.FROZEN].calls == 1


def test_an_unknown_rollout_is_absent(bench: Bench) -> None:
    """An id in full of which nothing is stored is told as absent and not acted on."""
    bench.fill()
    plan = bench.choose(Act.DELETE, "nobody")
    assert (plan.absent, plan.candidates) == (("nobody",), ())


# -- retire ---------------------------------------------------------------------------------------------------


def test_retire_deletes_records_and_refuses_writers(bench: Bench) -> None:
    """A retired rollout holds fences and seals only, its ledger goes along, and a late put is refused."""
    bench.fill(ledgers=True)
    assert all(outcome.done for outcome in bench.act(Act.RETIRE, "open"))
    assert bench.states()["open"] is State.RETIRED
    assert records(bench.store, "open") == {KEYS.rollout("open").call("c2")}
    ledger = KEYS.ledger("open")
    assert bench.store.keys(ledger.base) == {ledger.closing, ledger.retired}
    with pytest.raises(TokenCaptureRetiredError):
        bench.put("open")


def test_retire_leaves_ledgers_when_told(bench: Bench) -> None:
    """``ledger=False`` leaves a ledger as it is."""
    bench.fill(ledgers=True)
    before = bench.store.keys(KEYS.ledgers)
    bench.act(Act.RETIRE, "open", ledger=False)
    assert bench.store.keys(KEYS.ledgers) == before


def test_retire_makes_no_ledger(bench: Bench) -> None:
    """A rollout without a ledger has none after it was retired."""
    bench.fill()
    bench.act(Act.RETIRE, "open")
    assert bench.store.keys(KEYS.ledgers) == set()


def test_retire_leaves_kept_records_unless_named(bench: Bench) -> None:
    """Records kept by an earlier retirement are not taken by pattern, and are by ``--state retired``."""
    bench.fill()
    bench.act(Act.RETIRE, "open", keep=True)
    kept = records(bench.store, "open")
    bench.act(Act.RETIRE, "*", states=frozenset({"open", "frozen"}))
    assert records(bench.store, "open") == kept
    plan = bench.choose(Act.RETIRE, "*")
    assert (State.RETIRED, Stays.KEPT, 1) in plan.stays
    bench.act(Act.RETIRE, "*", states=frozenset({"retired"}))
    assert records(bench.store, "open") == {KEYS.rollout("open").call("c2")}


KINDS_OF_SELECTION = [{"states": frozenset({"open", "frozen"})}, {"until": NOW + 1}]


@pytest.mark.parametrize("selection", KINDS_OF_SELECTION, ids=["states", "age"])
def test_a_retire_that_dies_is_finished_by_the_same_command(tmp_path: Path, selection: dict[str, Any]) -> None:
    """Killed after any effect, the same selection takes up what was begun and ends where an unbroken one does."""
    named = {**selection, "states": frozenset({"open", "frozen"})}
    _killed_everywhere(tmp_path, lambda bench: bench.act(Act.RETIRE, "*", **named), tick=True)


# -- delete ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("globs", "more"),
    [
        (("*",), {"states": frozenset({"open", "frozen", "retired"})}),
        (("*",), {"until": NOW + 1}),
        (("open", "frozen"), {}),
    ],
    ids=["states", "age", "names"],
)
def test_a_delete_that_dies_is_finished_by_the_same_command(
    tmp_path: Path, globs: tuple[str, ...], more: dict[str, Any]
) -> None:
    """Killed after any effect, the same selection ends where an unbroken one does: nothing of the chosen is left."""
    _killed_everywhere(tmp_path, lambda bench: bench.act(Act.DELETE, *globs, **more), tick=True)


def test_a_sweep_that_dies_is_finished_by_the_same_command(tmp_path: Path) -> None:
    """Killed after any effect, a sweep ends where an unbroken one does."""
    _killed_everywhere(tmp_path, lambda bench: bench.sweep(kept=True), retention="keep")


def test_a_deletion_of_a_run_that_dies_is_finished_by_the_same_command(tmp_path: Path) -> None:
    """Killed after any effect, the deletion of a run ends with nothing of it left."""
    ends = _killed_everywhere(tmp_path, _delete_run)
    assert ends == set()


def _delete_run(bench: Bench) -> list[Outcome]:
    outcomes = bench.act(Act.DELETE, everything=True)
    with Reader(bench.store) as reader:
        stages = leftovers(reader, KEYS).stages
    return [*outcomes, *clear(bench.runtime(), tuple(tuple(row.key for row in rows) for _, rows in stages))]


def _killed_everywhere(
    tmp_path: Path, act: Callable[[Bench], list[Outcome]], *, tick: bool = False, retention: str = "delete"
) -> set[str]:
    def made() -> Bench:
        bench = Bench(Aging(), tmp_path)
        bench.settings["max_concurrency"] = 1
        bench.fill(retention=retention, ledgers=True)
        bench.store.create(KEYS.probe("left"), b"")
        bench.store.create(f"{KEYS.lineage}{_hh('gone')}/gone/{'f' * 64}/c1", b"")
        return bench

    whole = made()
    assert all(outcome.done for outcome in act(whole))
    expected = whole.store.keys()  # type: ignore[attr-defined]
    for effects in range(400):
        bench = made()
        store = bench.store
        assert isinstance(store, Aging)
        if tick:
            store.now += 5 * DAY  # what the command itself creates is young
        mortal: Any = Mortal(store, effects)
        bench.store = mortal
        with suppress(Killed):
            act(bench)
        if mortal.left >= 0:
            return expected
        bench.store = store
        assert all(outcome.done for outcome in act(bench)), effects
        assert store.keys() == expected, effects
    raise AssertionError("the command never ends")


def _hh(rollout: str) -> str:
    return KEYS.rollout(rollout).base.split("/")[-3]


def test_a_deleted_id_is_fresh(bench: Bench) -> None:
    """After a delete the id takes records as if it had never been used."""
    bench.fill()
    assert all(outcome.done for outcome in bench.act(Act.DELETE, "dropped"))
    bench.put("dropped")
    assert bench.states()["dropped"] is State.OPEN


def test_a_writer_that_goes_on_while_its_rollout_is_deleted_is_told(bench: Bench) -> None:
    """Objects that come back behind the deletion of a rollout that was not retired make it not done."""
    bench.fill()
    keys, store = KEYS.rollout("open"), bench.store
    delete = store.delete

    def late(names: Sequence[str]) -> dict[str, str]:
        left = delete(names)
        if any("/attempts/" in name for name in names):
            store.create(keys.call("c9"), b"late")
        return left

    store.delete = late  # type: ignore[method-assign]
    (outcome,) = bench.act(Act.DELETE, "open")
    assert (outcome.done, outcome.came_back) == (False, 1)


def test_a_damaged_rollout_can_be_deleted(bench: Bench) -> None:
    """Damage is told in the plan and does not keep a rollout from being deleted."""
    bench.fill()
    bench.store.overwrite(KEYS.rollout("dropped").call("c2"), b"no frame")
    plan = bench.choose(Act.DELETE, "dropped")
    assert len(plan.problems) == 1
    assert all(outcome.done for outcome in carry_out(bench.runtime(), plan))
    assert "dropped" not in bench.states()


def test_a_ledger_alone_is_a_rollout(bench: Bench) -> None:
    """A ledger without records is chosen by its own state: open ones by name, retired ones by pattern."""
    given = {**bench.settings, "store": bench.store}

    async def fill() -> None:
        ledger = S3CaptureLedger(**given)
        for rollout in ("begun", "over"):
            await ledger.begin_call(rollout, "c1")
        await ledger.retire(["over"])

    asyncio.run(fill())
    assert chosen(bench.choose(Act.DELETE, "*")) == {"over"}
    assert all(outcome.done for outcome in bench.act(Act.DELETE, "over", "begun"))
    assert bench.store.keys() == set()  # type: ignore[attr-defined]


def test_keys_that_are_not_ours_survive_the_deletion_of_a_run(bench: Bench) -> None:
    """Foreign keys are listed among the leftovers and stay."""
    bench.fill()
    foreign = f"{KEYS.root}notes/readme.txt"
    bench.store.create(foreign, b"mine")
    assert all(outcome.done for outcome in _delete_run(bench))
    with Reader(bench.store) as reader:
        assert leftovers(reader, KEYS).foreign == (foreign,)


def test_what_the_store_refuses_is_told_by_key(bench: Bench) -> None:
    """A refused key is in the outcome with its reason, others go on, and a rerun finishes only the rest."""
    bench.fill()
    assert isinstance(bench.store, Aging)
    key = KEYS.rollout("frozen").call("c1")
    bench.store.refused[key] = "AccessDenied: no"
    outcomes = {outcome.what: outcome for outcome in bench.act(Act.RETIRE, "open", "frozen")}
    assert outcomes["open"].done
    assert outcomes["frozen"].left == ((key, "AccessDenied: no"),)
    bench.store.refused.clear()
    assert chosen(bench.choose(Act.RETIRE, "*", states=frozenset({"open", "frozen"}))) == {"frozen"}
    assert all(outcome.done for outcome in bench.act(Act.RETIRE, "*", states=frozenset({"open", "frozen"})))
    assert records(bench.store, "frozen") == {KEYS.rollout("frozen").call("c2")}


def test_a_store_that_is_away_is_given_up(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """After so many failures in a row the rest is not tried, and each is told."""
    for number in range(GIVE_UP + 5):
        keys = KEYS.rollout(f"x{number}")
        bench.store.create(keys.retired, bodies.fence("retired", keys, WHO))
    plan, tried = bench.choose(Act.DELETE, "*"), []

    def away(prefix: str) -> Sequence[ObjectInfo]:
        tried.append(prefix)
        raise StoreConfigError("no such bucket")

    monkeypatch.setattr(bench.store, "list", away)
    outcomes = [*carry_out(bench.runtime(), plan)]
    assert not [outcome for outcome in outcomes if outcome.done]
    assert len(outcomes) == GIVE_UP + 5
    assert outcomes[-1].error.startswith("not tried")


# -- sweep ----------------------------------------------------------------------------------------------------


def test_kept_records_are_swept_only_when_asked_for(bench: Bench) -> None:
    """What a drop or a retirement left whole stays, and its fences too, until ``kept``."""
    bench.fill(retention="keep")
    before = bench.store.keys()  # type: ignore[attr-defined]
    plan = bench.plan_sweep()
    assert plan.empty
    assert plan.kept[What.KEPT].rollouts == 2
    bench.sweep()
    assert bench.store.keys() == before  # type: ignore[attr-defined]
    bench.sweep(kept=True)
    assert bench.states().keys() == {"open", "frozen"}
    assert not records(bench.store, "dropped")


def test_a_deletion_that_had_begun_is_swept(bench: Bench) -> None:
    """One object of the snapshot gone proves that the rest of a dropped rollout is residue."""
    bench.fill(retention="keep")
    bench.store.delete([KEYS.rollout("dropped").call("c1")])
    plan = bench.plan_sweep()
    assert plan.tallies[What.RESIDUE].rollouts == 1
    bench.sweep()
    assert bench.states().keys() == {"open", "frozen", "retired"}


def test_a_retirement_that_says_delete_is_swept(bench: Bench) -> None:
    """Where the bucket refused to delete behind an unconditional retirement, its decision is proof enough."""
    bench.fill()
    assert isinstance(bench.store, Aging)
    bench.store.refused = dict.fromkeys(records(bench.store, "frozen"), "AccessDenied: no")
    bench.act(Act.RETIRE, "frozen")
    bench.store.refused = {}
    assert bench.plan_sweep().tallies[What.RESIDUE].rollouts == 1
    bench.sweep()
    assert bench.states().keys() == {"open"}


def test_late_objects_are_swept_from_kept_rollouts(bench: Bench) -> None:
    """An outcome behind the freeze of a kept rollout goes, and the kept records stay."""
    bench.fill(retention="keep")
    keys, kept = KEYS.rollout("dropped"), records(bench.store, "dropped")
    bench.store.create(keys.call("c9"), outcome("dropped", "c9"))
    bench.store.create(keys.lineage_call("e" * 64, "c9"), b"")
    assert bench.plan_sweep().tallies[What.LATE].objects == 2
    bench.sweep()
    assert records(bench.store, "dropped") == kept


def test_what_landed_after_a_retirement_is_late_by_the_clock(bench: Bench) -> None:
    """Behind an unconditional retirement that kept its records, only the store's time tells what came late."""
    bench.fill(retention="keep")
    assert isinstance(bench.store, Aging)
    keys, kept = KEYS.rollout("retired"), records(bench.store, "retired")
    bench.store.now = NOW + 59
    bench.store.create(keys.call("soon"), outcome("retired", "soon"))
    bench.store.now = NOW + 62
    bench.store.create(keys.call("later"), outcome("retired", "later"))
    bench.sweep()
    assert records(bench.store, "retired") == kept | {keys.call("soon")}


def test_fences_go_when_old_and_alone(bench: Bench) -> None:
    """Fences of retired rollouts go once all is old, and a late writer is accepted again; young ones stay."""
    bench.fill()
    assert isinstance(bench.store, Aging)
    bench.store.touch(KEYS.rollout("retired").retired, NOW + 2 * DAY)
    bench.sweep()
    assert bench.states().keys() == {"open", "frozen", "retired"}
    with pytest.raises(TokenCaptureRetiredError):
        bench.put("retired")
    bench.put("dropped")


def test_what_is_not_retired_is_left_alone(bench: Bench) -> None:
    """Open and frozen rollouts lose nothing to a sweep, however old."""
    bench.fill(ledgers=True)
    before = {name: records(bench.store, name) for name in ("open", "frozen")}
    bench.sweep(kept=True)
    assert {name: records(bench.store, name) for name in ("open", "frozen")} == before
    assert bench.store.keys(KEYS.ledger("open").base)  # type: ignore[attr-defined]


def test_markers_and_scratch_keys_of_nobody_are_swept(bench: Bench) -> None:
    """Markers of a rollout without any object go, and old scratch keys, and foreign keys do not."""
    bench.fill()
    keys = KEYS.rollout("gone")
    bench.store.create(keys.lineage_call("f" * 64, "c1"), b"")
    bench.store.create(KEYS.probe("left"), b"")
    foreign = f"{KEYS.attempts}zz/readme"
    bench.store.create(foreign, b"")
    plan = bench.plan_sweep()
    assert plan.tallies[What.MARKERS].objects == 1
    assert foreign in plan.strays
    bench.sweep()
    assert not bench.store.list(keys.lineage_base)
    assert bench.store.get(KEYS.probe("left")) is None
    assert bench.store.get(foreign) == b""


def test_ledgers_are_swept_by_their_own_decision(bench: Bench) -> None:
    """Rows of a ledger that was retired with ``keep`` stay without ``kept``; others and old fences go."""
    bench.fill(ledgers=True)
    given = {**bench.settings, "store": bench.store}
    asyncio.run(S3CaptureLedger(**given, retention="keep").retire(["dropped"]))
    asyncio.run(S3CaptureLedger(**given).retire(["retired"]))
    bench.store.create(KEYS.ledger("retired").call("late"), b"a row that was refused")
    plan = bench.plan_sweep()
    assert (plan.kept[What.KEPT_ROWS].rollouts, plan.tallies[What.LEDGER_FENCES].rollouts) == (1, 1)
    assert plan.tallies[What.ROWS].objects == 1
    bench.sweep()
    assert not bench.store.list(KEYS.ledger("retired").base)
    assert bench.store.get(KEYS.ledger("dropped").call("c1")) is not None
    bench.sweep(kept=True)
    assert not bench.store.list(KEYS.ledger("dropped").base)


def test_a_damaged_decision_is_left_alone(bench: Bench) -> None:
    """A rollout whose drop cannot be read is told and loses nothing."""
    bench.fill()
    keys = KEYS.rollout("dropped")
    (decision,) = [row.key for row in bench.store.list(keys.fences) if "/drop-" in row.key]
    bench.store.overwrite(decision, b"no frame")
    before = bench.store.keys(keys.base)  # type: ignore[attr-defined]
    assert len(bench.plan_sweep().problems) == 1
    bench.sweep()
    assert bench.store.keys(keys.base) == before  # type: ignore[attr-defined]


def test_what_came_after_the_plan_stays(bench: Bench) -> None:
    """An object that lands between plan and deed is not deleted, nor are the fences that refuse its writer."""
    bench.fill()
    plan = bench.plan_sweep()
    late = KEYS.rollout("dropped").call("c9")
    bench.store.create(late, b"late")
    outcomes = {outcome.what: outcome for outcome in sweep(bench.runtime(), plan)}
    assert "sweep again" in outcomes["dropped"].error
    assert bench.store.get(late) == b"late"
    assert bench.states()["dropped"] is State.RETIRED


# -- archives -------------------------------------------------------------------------------------------------


class Hand:
    """An archive that holds ``dropped``."""

    def __init__(self, store: MemoryStore, *, fences: bool = False, fails: bool = False) -> None:
        self.store, self.fences, self.fails = store, fences, fails
        self.forgotten: list[tuple[str, bool]] = []
        self.name = PackName("0" * 16, "f" * 16, "a" * 64)
        self.needed: frozenset[str] = frozenset()

    def holds(self, rollout_id: str) -> bool:
        """See ``ArchiveHand``."""
        return rollout_id == "dropped"

    def needs_fences(self, rollout_id: str) -> bool:  # noqa: ARG002
        """See ``ArchiveHand``."""
        return self.fences

    def forget(self, rollout_ids: Sequence[str]) -> None:
        """See ``ArchiveHand``; notes whether the rollout was still there."""
        if self.fails:
            raise StoreUnavailableError("the store is away")
        self.forgotten += [(name, bool(self.store.list(KEYS.rollout(name).base))) for name in rollout_ids]

    def sweepable(self, until: float) -> Sequence[str]:  # noqa: ARG002
        """See ``ArchiveHand``."""
        return (KEYS.archive.pack(self.name), KEYS.archive.index(self.name), KEYS.archive.done(self.name, "n"))

    def confirm(self, keys: Sequence[str], until: float) -> Sequence[str]:  # noqa: ARG002
        """See ``ArchiveHand``."""
        return [key for key in keys if key not in self.needed]


def test_packs_forget_before_anything_live_goes(bench: Bench) -> None:
    """A delete creates the tombstone of a packed rollout first; where that fails nothing of it is deleted."""
    bench.fill()
    before = bench.store.keys(KEYS.rollout("dropped").base)  # type: ignore[attr-defined]
    (outcome,) = bench.act(Act.DELETE, "dropped", hand=Hand(bench.store, fails=True))
    assert "the store is away" in outcome.error
    assert bench.store.keys(KEYS.rollout("dropped").base) == before  # type: ignore[attr-defined]
    hand = Hand(bench.store)
    bench.act(Act.DELETE, "dropped", "retired", hand=hand)
    assert hand.forgotten == [("dropped", True)]


class Catalog:
    """A catalog whose one pack speaks for ``dropped``, as it was before it was dropped."""

    def __init__(self, rows: Sequence[ObjectInfo]) -> None:
        self.packed = Packed({row.key: row for row in rows}, lambda _: {})

    def shards(self) -> frozenset[str]:
        """See ``s3capture.stored.run.Catalog``."""
        return frozenset({_hh("dropped")})

    def of_shard(self, hh: str) -> dict[str, Packed]:
        """See ``s3capture.stored.run.Catalog``."""
        return {"dropped": self.packed} if hh == _hh("dropped") else {}

    def of_rollout(self, rollout_id: str) -> Packed | None:
        """See ``s3capture.stored.run.Catalog``."""
        return self.packed if rollout_id == "dropped" else None


def archived_sweep(bench: Bench, *, fences: bool) -> SweepPlan:
    """Sweep a run in which a pack holds what there was of ``dropped``."""
    keys = KEYS.rollout("dropped")
    rows = (*bench.store.list(keys.base), *bench.store.list(keys.lineage_base))
    small = [row for row in rows if not row.key.startswith(keys.fences)]
    hand = Hand(bench.store, fences=fences)
    with Reader(bench.store) as reader:
        run = StoredRun(reader, KEYS)
        run.catalog = lambda again=False: Catalog(small)  # type: ignore[method-assign, assignment, misc] # noqa: ARG005
        plan = plan_sweep(run, NOW + DAY, hand=hand)
    assert all(outcome.done for outcome in sweep(bench.runtime(), plan, hand=hand) if outcome.what == "dropped")
    return plan


def test_copies_of_archived_records_are_left_to_the_archiver(bench: Bench) -> None:
    """Small objects that a pack holds are told and stay: a sweep compares nothing, and the pack may be lost."""
    bench.fill(retention="keep")
    before = records(bench.store, "dropped")
    plan = archived_sweep(bench, fences=False)
    assert What.COPIES in plan.kept and What.COPIES not in plan.tallies
    assert records(bench.store, "dropped") == before and bench.store.list(KEYS.rollout("dropped").fences)


@pytest.mark.parametrize("fences", [True, False])
def test_fences_of_an_archived_rollout_stay_while_a_pack_needs_them(bench: Bench, fences: bool) -> None:
    """Without copies, the fences of an archived rollout go only when no pack speaks for it."""
    bench.fill()
    archived_sweep(bench, fences=fences)
    assert bool(bench.store.list(KEYS.rollout("dropped").fences)) is fences


def test_nothing_is_swept_beside_a_damaged_archive(bench: Bench) -> None:
    """Where an index cannot be read, a rollout that only a pack still has looks deleted, so no rollout is swept."""
    bench.fill()
    before = bench.store.keys()  # type: ignore[attr-defined]
    with Reader(bench.store) as reader:
        run = StoredRun(reader, KEYS)
        run.problems = lambda: {"index": "the index is damaged"}  # type: ignore[method-assign]
        plan = plan_sweep(run, NOW + DAY, hand=Hand(bench.store))
    assert (plan.rollouts, plan.archive) == ((), ())
    assert "the index is damaged" in plan.problems[0]
    assert all(outcome.done for outcome in sweep(bench.runtime(), plan))
    assert bench.store.keys() == before  # type: ignore[attr-defined]


def test_archive_files_go_index_first(bench: Bench) -> None:
    """What the archive no longer needs goes in an order in which no index outlives its pack."""
    hand, order = Hand(bench.store), []
    for key in hand.sweepable(0.0):
        bench.store.create(key, b"x")
    delete = bench.store.delete

    def noted(names: Sequence[str]) -> dict[str, str]:
        order.extend(names)
        return delete(names)

    bench.store.delete = noted  # type: ignore[method-assign]
    plan = SweepPlan((), (), tuple(hand.sweepable(0.0)), {}, {}, (), ())
    assert all(outcome.done for outcome in sweep(bench.runtime(), plan, hand=hand))
    kinds = [parsed.kind for key in order if (parsed := parse(KEYS.root, key)) is not None]
    assert kinds == [Kind.ARCHIVE_INDEX, Kind.ARCHIVE_PACK, Kind.ARCHIVE_DONE]


def test_an_archive_file_that_is_needed_meanwhile_stays(bench: Bench) -> None:
    """What was planned is judged again right before it goes, and without anyone to judge nothing goes."""
    hand = Hand(bench.store)
    names = hand.sweepable(0.0)
    for key in names:
        bench.store.create(key, b"x")
    plan = SweepPlan((), (), tuple(names), {}, {}, (), ())
    assert list(sweep(bench.runtime(), plan)) == []
    hand.needed = frozenset(names[:2])
    assert all(outcome.done for outcome in sweep(bench.runtime(), plan, hand=hand))
    assert {row.key for row in bench.store.list(KEYS.archive.base)} == hand.needed


# -- keeping, and the bucket's own rules ----------------------------------------------------------------------


def test_kept_records_stay_readable_after_a_drop(bench: Bench) -> None:
    """With ``retention="keep"`` a dropped rollout shows its entry as it was put."""
    bench.fill(retention="keep")
    with Reader(bench.store) as reader:
        detail = inspect_rollout(reader, KEYS.rollout("dropped"))
    assert detail.summary.state is State.RETIRED
    assert [(call.call, call.kind) for call in detail.calls] == [("c1", "entry"), ("c2", "seal")]
    stored = bodies.read_outcome(
        KEYS.rollout("dropped"), "c1", bench.store.get(KEYS.rollout("dropped").call("c1")) or b""
    )
    assert stored.value()["generation_token_ids"] == entry().generation_token_ids


def _recipe() -> dict[str, Any]:
    (block,) = re.findall(r"```json\n(.*?)```", DOC.read_text("utf-8"), re.DOTALL)
    rules: dict[str, Any] = json.loads(block)
    return rules


def test_the_lifecycle_recipe_is_accepted_and_matches_our_keys(moto_server: str, moto_bucket: str) -> None:
    """The JSON of the page is a valid configuration whose run rules cover every key of a run but its archive."""
    client = boto3.session.Session().client("s3", endpoint_url=moto_server, region_name="us-east-1")
    client.put_bucket_lifecycle_configuration(Bucket=moto_bucket, LifecycleConfiguration=_recipe())
    rules = client.get_bucket_lifecycle_configuration(Bucket=moto_bucket)["Rules"]
    client.close()
    expiring = [rule["Filter"]["Prefix"] for rule in rules if "Days" in rule.get("Expiration", {})]
    keys = RunKeys("captures", "run-7")
    rollout, ledger = keys.rollout("7-3"), keys.ledger("7-3")
    ours = [rollout.call("c"), rollout.frozen, rollout.lineage_call("f", "c"), ledger.call("c"), ledger.retired]
    assert all(sum(key.startswith(prefix) for prefix in expiring) == 1 for key in ours)
    assert not [prefix for prefix in expiring if keys.archive.base.startswith(prefix)]
    assert all(rule["NoncurrentVersionExpiration"]["NoncurrentDays"] > 0 for rule in rules)


@pytest.fixture
def versioned(moto_server: str) -> Iterator[Callable[..., tuple[str, Any]]]:
    """Makes a versioned bucket on moto, locked if asked, and returns its name and a client."""
    client: Any = boto3.session.Session().client("s3", endpoint_url=moto_server, region_name="us-east-1")

    def make(name: str, *, locked: bool = False) -> tuple[str, Any]:
        client.create_bucket(Bucket=name, ObjectLockEnabledForBucket=locked)
        if locked:
            rule = {"DefaultRetention": {"Mode": "GOVERNANCE", "Days": 30}}
            configuration = {"ObjectLockEnabled": "Enabled", "Rule": rule}
            client.put_object_lock_configuration(Bucket=name, ObjectLockConfiguration=configuration)
        else:
            client.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
        return name, client

    yield make
    client.close()


@pytest.mark.parametrize("locked", [False, True])
def test_on_a_versioned_bucket_the_commands_say_what_stays(
    moto_server: str, versioned: Callable[..., tuple[str, Any]], tmp_path: Path, locked: bool
) -> None:
    """A delete hides everything, the versions stay, and the command says so, with the retention of a locked bucket."""
    bucket, client = versioned(f"kept-{'locked' if locked else 'versioned'}", locked=locked)
    given: dict[str, Any] = {"url": f"s3://{bucket}/p", "run": "r", "endpoint_url": moto_server, "region": "us-east-1"}

    async def with_sink(settings: dict[str, Any], spill: Path) -> None:
        sink = S3TokenSink(**settings, spill_dir=str(spill))
        await sink.put(entry("c1", "x"))
        await sink.close()

    asyncio.run(with_sink(given, tmp_path))
    place = ("--run", "r", "--endpoint-url", moto_server, "--region", "us-east-1")
    done = here("delete", given["url"], *place, "--rollout", "x", "--yes")
    assert done.status == 0, done.err
    assert "NoncurrentVersionExpiration" in done.err
    assert ("30 days (GOVERNANCE)" in done.err) is locked
    assert not client.list_objects_v2(Bucket=bucket).get("Contents")
    versions = [row["Key"] for row in client.list_object_versions(Bucket=bucket).get("Versions", ())]
    assert KEYS.rollout("x").call("c1") in versions
    facts = bucket_facts(Settings.of(**given))
    assert (facts.versioning, facts.object_lock) == ("enabled", "30 days (GOVERNANCE)" if locked else "off")


def test_plain_buckets_need_no_remark() -> None:
    """Nothing is said where deleting deletes, or where the store does not tell."""
    assert remarks(BucketFacts("off", 0.0, "off"), KEYS) == ()
    assert remarks(BucketFacts(None, None), KEYS) == ()
    assert len(remarks(BucketFacts("suspended", None, "on"), KEYS)) == 1


def _wants_checksum(request: Wire) -> bool:
    return request.operation == "PutObject" and not any(
        name == "content-md5" or name.startswith("x-amz-checksum-") for name in request.headers
    )


def test_a_bucket_that_wants_checksums_gets_them(tmp_path: Path) -> None:
    """Where a PUT without checksum is refused, each later one carries the right Content-MD5, and captures work."""
    with FakeS3() as s3:
        message = "Content-MD5 OR x-amz-checksum- HTTP header is required for Put Object requests with Object Lock"
        s3.script(_wants_checksum, Reply(400, "InvalidRequest", message), times=None)
        given: dict[str, Any] = {"url": f"s3://{s3.bucket}/p", "run": "r", "endpoint_url": s3.endpoint_url}
        given |= {"region": "us-east-1", "spill_dir": str(tmp_path)}

        async def capture() -> int:
            sink, source = S3TokenSink(**given), S3TokenSource(**given)
            await sink.begin_call("x", "c1")
            await sink.put(entry("c1", "x"))
            return len((await source.freeze("x")).entries)

        assert asyncio.run(capture()) == 1
        puts = s3.seen("PutObject")
        assert sum(map(_wants_checksum, puts)) == 1
        for put in puts[1:]:
            assert put.headers["content-md5"] == base64.b64encode(hashlib.md5(put.body).digest()).decode()


def test_no_checksum_is_sent_where_none_is_wanted_and_other_refusals_stay_errors() -> None:
    """A store that takes PUTs is sent no checksum; one that refuses them all the same ends in an error, not a loop."""
    with FakeS3() as s3:
        given = Settings.of(url=f"s3://{s3.bucket}/p", run="r", endpoint_url=s3.endpoint_url, region="us-east-1")
        store = BotoStore(given)
        assert store.create("p/a", b"x")
        assert not [put for put in s3.seen("PutObject") if not _wants_checksum(put)]
        s3.script(on("PutObject"), Reply(400, "InvalidRequest"), times=None)
        with pytest.raises(StoreUnavailableError):
            store.create("p/b", b"x")
        with pytest.raises(StoreConfigError):
            store.create("p/b", b"x")
        store.close()


# -- the command line -----------------------------------------------------------------------------------------


class Server:
    """A scripted server with a run on it."""

    def __init__(self, s3: FakeS3, spill: Path) -> None:
        self.s3 = s3
        self.given: dict[str, Any] = {"url": f"s3://{s3.bucket}/p", "run": "r", "endpoint_url": s3.endpoint_url}
        self.given |= {"region": "us-east-1", "spill_dir": str(spill)}

    def put(self, rollout: str, *calls: str) -> None:
        """Capture calls."""

        async def capture() -> None:
            sink = S3TokenSink(**self.given)
            for call in calls:
                await sink.put(entry(call, rollout))
            await sink.close()

        asyncio.run(capture())

    def run(self, command: str, *options: str) -> Ran:
        """Run a command on the run."""
        place = ("--run", "r", "--endpoint-url", self.s3.endpoint_url, "--region", "us-east-1")
        return here(command, self.given["url"], *place, *options)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A scripted server."""
    with FakeS3() as s3:
        yield Server(s3, tmp_path)


@pytest.mark.parametrize("command", ["retire", "delete"])
def test_nothing_selected_is_refused(server: Server, command: str) -> None:
    """Without a rollout, a state, an age or --all nothing is even asked of the store; --all stands alone."""
    assert server.run(command, "--yes").status == 2
    assert server.run(command, "--complete", "--yes").status == 2
    assert server.run(command, "--all", "--rollout", "x", "--yes").status == 2
    assert server.s3.requests == []


@pytest.mark.parametrize("command", ["retire", "delete", "sweep"])
def test_a_run_that_is_not_there_is_an_error(server: Server, command: str) -> None:
    """A run without anything is named on stderr, with exit status 1."""
    done = server.run(command, *(() if command == "sweep" else ("--all",)), "--yes")
    assert (done.status, done.out) == (1, "")
    assert "there is no run 'r'" in done.err


@pytest.mark.parametrize("command", ["retire", "delete"])
def test_a_dry_run_prints_the_plan_of_the_real_one_and_changes_nothing(server: Server, command: str) -> None:
    """Without --yes no request changes anything, and the lines are the first ones of the real run."""
    server.put("x", "c1", "c2")
    server.put("y", "c1")
    before = dict(server.s3.objects)
    dry = server.run(command, "--rollout", "x")
    assert dry.status == 0
    assert server.s3.objects == before
    assert "--yes" in dry.err
    real = server.run(command, "--rollout", "x", "--yes")
    assert real.status == 0, real.err
    assert real.out.startswith(dry.out)
    assert not [key for key in server.s3.objects if key == KEYS.rollout("x").call("c1")]
    assert KEYS.rollout("y").call("c1") in server.s3.objects


def test_protected_rollouts_are_told_and_nothing_done_is_an_error(server: Server) -> None:
    """A pattern that matches only what nobody consumed takes nothing, says how to name it, and exits with 1."""
    server.put("x", "c1")
    before = dict(server.s3.objects)
    done = server.run("delete", "--rollout", "x*", "--yes")
    assert done.status == 1
    assert "stays: 1 open" in done.out
    assert "--state open" in done.err
    assert server.s3.objects == before


def test_refused_keys_are_named_and_a_rerun_finishes(server: Server) -> None:
    """Errors inside a 200 of DeleteObjects: key and reason on stderr, exit 1; a rerun does only the rest."""
    server.put("x", "c1", "c2")
    server.put("y", "c1")
    key = KEYS.rollout("x").call("c2")
    server.s3.undeletable.add(key)
    done = server.run("delete", "--rollout", "x", "--rollout", "y", "--yes", "--json")
    assert done.status == 1
    (failed,) = [row for row in done.rows if "failed" in row and "left" in row]
    assert failed["left"][0]["key"] == key
    assert "AccessDenied" in failed["left"][0]["reason"]
    assert f"not deleted: {key}: AccessDenied" in done.err
    assert not [name for name in server.s3.objects if "/y/" in name]
    server.s3.undeletable.clear()
    again = server.run("delete", "--rollout", "x", "--rollout", "y", "--yes")
    assert again.status == 0
    assert "'y'" in again.err
    assert captures([*server.s3.objects]) == []


def test_large_rollouts_go_in_batches_that_every_store_takes(server: Server) -> None:
    """2,501 objects are deleted by requests of at most 1,000 keys."""
    keys = KEYS.rollout("big")
    server.s3.objects.update({keys.mark(f"{number:04}"): b"" for number in range(2501)})
    done = server.run("delete", "--rollout", "big", "--yes")
    assert done.status == 0, done.err
    sizes = [request.body.count(b"<Key>") for request in server.s3.seen("DeleteObjects")]
    assert max(sizes) <= 1000
    assert sum(sizes) == 2501
    assert server.s3.objects == {}


def test_json_has_the_plan_each_rollout_and_the_result(server: Server) -> None:
    """--json prints one object on each line: the plan, the rollouts, what was done."""
    server.put("x", "c1")
    rows = server.run("retire", "--rollout", "x", "--yes", "--json").rows
    assert (rows[0]["plan"], rows[0]["total"]["rollouts"], rows[0]["total"]["calls"]) == ("retire", 1, 1)
    assert (rows[1]["rollout"], rows[1]["state"]) == ("x", "open")
    assert rows[-1] == {"done": "retired", "succeeded": 1, "failed": 0}


def test_keep_retires_and_deletes_nothing(server: Server) -> None:
    """--retention keep refuses writers from then on and leaves every object."""
    server.put("x", "c1")
    before = dict(server.s3.objects)
    assert server.run("retire", "--older-than", "2031-01-01", "--retention", "keep", "--yes").status == 0
    assert before.items() <= server.s3.objects.items()
    assert KEYS.rollout("x").retired in server.s3.objects


def test_sweep_from_the_command_line(server: Server) -> None:
    """A dry sweep changes nothing; with --yes what is older than the limit goes, and a younger limit leaves it."""
    server.put("x", "c1")
    assert server.run("retire", "--rollout", "x", "--yes").status == 0
    before = dict(server.s3.objects)
    assert "nothing to sweep" in server.run("sweep", "--older-than", "2029-01-01", "--yes").err
    dry = server.run("sweep", "--older-than", "2031-01-01")
    assert server.s3.objects == before
    done = server.run("sweep", "--older-than", "2031-01-01", "--yes")
    assert (done.status, done.out.startswith(dry.out)) == (0, True)
    assert captures([*server.s3.objects]) == []


def test_the_whole_run_goes_with_all(server: Server) -> None:
    """--all leaves nothing of the run but keys that are not ours, which are named, with exit status 1."""
    server.put("x", "c1")
    archive = KEYS.archive.pack(PackName("0" * 16, "f" * 16, "a" * 64))
    server.s3.objects.update({archive: b"", KEYS.probe("left"): b"", "p/r2/attempts/x": b"", "p/r/notes": b""})
    done = server.run("delete", "--all", "--yes")
    assert done.status == 1
    assert "foreign key p/r/notes" in done.err
    assert [*server.s3.objects] == ["p/r2/attempts/x", "p/r/notes"]


def test_end_to_end_on_a_real_server(seaweed: EmbeddedServer, bucket: str, tmp_path: Path) -> None:
    """Captured with keep and dropped, a rollout stays readable; sweep leaves it; --all takes the whole run."""
    given: dict[str, Any] = {"url": f"s3://{bucket}/p", "run": "r", "endpoint_url": seaweed.endpoint_url}
    given |= {"region": "us-east-1", "spill_dir": str(tmp_path)}

    async def capture() -> None:
        sink, source = S3TokenSink(**given, retention="keep"), S3TokenSource(**given, retention="keep")
        for rollout in ("a", "a1", "b"):
            await sink.begin_call(rollout, "c1")
            await sink.put(entry("c1", rollout, continuation_fingerprint="f" * 64))
        snapshot = await source.freeze("a")
        assert await source.drop("a", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        await sink.close()
        await source.close()

    asyncio.run(capture())
    place = (given["url"], "--run", "r", "--endpoint-url", seaweed.endpoint_url, "--region", "us-east-1")
    swept = here("sweep", *place, "--older-than", "2100-01-01", "--yes")
    assert swept.status == 0, swept.err
    store = BotoStore(Settings.of(**given))
    assert store.get(KEYS.rollout("a").call("c1")) is not None
    assert here("retire", *place, "--rollout", "a1", "--yes").status == 0
    assert store.get(KEYS.rollout("a1").call("c1")) is None
    assert store.get(KEYS.rollout("b").call("c1")) is not None
    done = here("delete", *place, "--all", "--yes")
    assert done.status == 0, done.err
    assert [*store.list("p/r/")] == []
    store.close()
