"""The endpoints against an independent model of the contract, through random histories.

The model is plain Python, written from the contract, and knows nothing of keys, fences or how versions are counted.
Several endpoints that share only the store act in turn, so an operation rarely runs where the one before it did. With
CI set every run plays the same histories; a failure prints the blob that repeats it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from captures import answered, continued
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from s3capture import S3LineageResolver, S3TokenSink, S3TokenSource
from s3capture.errors import TokenCaptureFrozenError, TokenCaptureRetiredError
from s3capture.protocols import TokenCaptureSnapshot
from s3capture.records import TokenEntry
from s3capture.store.memory import MemoryStore

_T = TypeVar("_T")
ROLLOUTS = ["7-3", "7-3-a1"]
CALLS = ["c1", "c2", "c3"]
VARIANTS = [0, 1]
CODES = ["too_long", None]
PROCESSES = 3
CI = bool(os.environ.get("CI"))

Outcome = tuple[str, Any]
"""("entry", variant) or ("refusal", code)."""


def _text(call: str, variant: int) -> str:
    return f"{call} says {variant}"


def _entry(rollout: str, call: str, variant: int) -> TokenEntry:
    number = 10 * CALLS.index(call) + variant
    return answered(
        call, text=_text(call, variant), rollout=rollout, prompt=[1, 2], generation=[100 + number], created_at=1.0
    )


@dataclass
class Rollout:
    """What the contract promises about one rollout.

    ``late`` is set by writes that were refused behind a fence: they may leave traces in the bucket, which only
    the answer of a removal (and of a resolver, for that very call) may show.
    """

    state: str = "open"
    begun: set[str] = field(default_factory=set)
    outcomes: dict[str, Outcome] = field(default_factory=dict)
    conflicted: set[str] = field(default_factory=set)
    marks: int = 0
    late: bool = False
    late_calls: set[str] = field(default_factory=set)
    frozen: Frozen | None = None
    dropped: tuple[str, int] | None = None

    @property
    def has_records(self) -> bool:
        return bool(self.begun or self.outcomes or self.marks)

    def retire(self) -> None:
        self.state = "retired"
        self.begun, self.outcomes, self.conflicted, self.marks = set(), {}, set(), 0
        self.late, self.late_calls = False, set()


@dataclass
class Frozen:
    """The one snapshot of a rollout, and what marks have done to it since."""

    snapshot_id: str
    versions: list[int]
    outcomes: dict[str, Outcome]
    conflicted: set[str]
    incomplete: bool
    marks_seen: int


class Contract(RuleBasedStateMachine):
    """Each rule does the same to the endpoints and to the model, and compares."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.store = MemoryStore()
        given: list[dict[str, Any]] = [
            {"url": "s3://capture/p", "run": "r", "store": self.store, "max_concurrency": 4 + number}
            for number in range(PROCESSES)
        ]
        self.sinks = [S3TokenSink(**g) for g in given]
        self.sources = [S3TokenSource(**g) for g in given]
        self.resolvers = [S3LineageResolver(**g) for g in given]
        self.rollouts = {rollout: Rollout() for rollout in ROLLOUTS}

    def teardown(self) -> None:
        for endpoint in (*self.sinks, *self.sources, *self.resolvers):
            self._run(endpoint.close())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()

    def _run(self, operation: Awaitable[_T]) -> _T:
        return self.loop.run_until_complete(asyncio.ensure_future(operation, loop=self.loop))

    def _outcome(self, operation: Awaitable[Any]) -> str:
        """What came of a write: ok, frozen, retired or conflict; any other error is a fault."""
        try:
            self._run(operation)
        except TokenCaptureRetiredError:
            return "retired"
        except TokenCaptureFrozenError:
            return "frozen"
        except ValueError as error:
            assert "conflicting" in str(error)
            return "conflict"
        return "ok"

    # Writes

    @rule(at=st.integers(0, PROCESSES - 1), rollout=st.sampled_from(ROLLOUTS), call=st.sampled_from(CALLS))
    def begin(self, at: int, rollout: str, call: str) -> None:
        """begin_call is admitted while the rollout is open, any number of times."""
        model = self.rollouts[rollout]
        came = self._outcome(self.sinks[at].begin_call(rollout, call))
        assert came == ("ok" if model.state == "open" else model.state)
        if model.state == "open":
            model.begun.add(call)
        else:
            model.late = True

    def _write(self, rollout: str, call: str, outcome: Outcome, came: str) -> None:
        model = self.rollouts[rollout]
        if model.state == "retired":
            assert came == "retired"
        elif model.state == "frozen":
            assert model.frozen is not None
            # A repetition of what is in the snapshot changes nothing and may be acknowledged.
            repeated = model.frozen.outcomes.get(call) == outcome
            assert came in (("ok", "frozen") if repeated else ("frozen",))
        elif model.outcomes.setdefault(call, outcome) == outcome:
            assert came == "ok"
        else:
            assert came == "conflict"
            model.conflicted.add(call)
        if model.state != "open" and came != "ok":
            model.late = True
            model.late_calls.add(call)

    @rule(
        at=st.integers(0, PROCESSES - 1),
        rollout=st.sampled_from(ROLLOUTS),
        call=st.sampled_from(CALLS),
        variant=st.sampled_from(VARIANTS),
    )
    def put(self, at: int, rollout: str, call: str, variant: int) -> None:
        """The first payload of a call is kept, repeated it is a no-op, another one conflicts."""
        came = self._outcome(self.sinks[at].put(_entry(rollout, call, variant)))
        self._write(rollout, call, ("entry", variant), came)

    @rule(
        at=st.integers(0, PROCESSES - 1),
        rollout=st.sampled_from(ROLLOUTS),
        call=st.sampled_from(CALLS),
        variant=st.sampled_from(VARIANTS),
    )
    def begin_and_put(self, at: int, rollout: str, call: str, variant: int) -> None:
        """What a server does for every call, in one process: the put that may be one round trip."""
        self.begin(at, rollout, call)
        self.put(at, rollout, call, variant)

    @rule(
        at=st.integers(0, PROCESSES - 1),
        rollout=st.sampled_from(ROLLOUTS),
        call=st.sampled_from(CALLS),
        code=st.sampled_from(CODES),
    )
    def refuse(self, at: int, rollout: str, call: str, code: str | None) -> None:
        """A refusal is the outcome of its call; the same code again is a no-op."""
        came = self._outcome(self.sinks[at].record_engine_refusal(rollout, model_call_id=call, code=code))
        self._write(rollout, call, ("refusal", code), came)

    @rule(at=st.integers(0, PROCESSES - 1), rollout=st.sampled_from(ROLLOUTS), call=st.sampled_from(["", *CALLS]))
    def mark(self, at: int, rollout: str, call: str) -> None:
        """A mark lands in every state but retired."""
        model = self.rollouts[rollout]
        came = self._outcome(self.sinks[at].mark_incomplete(rollout, call))
        if model.state == "retired":
            assert came == "retired"
            model.late = True
        else:
            assert came == "ok"
            model.marks += 1

    # Reads

    @rule(at=st.integers(0, PROCESSES - 1), rollout=st.sampled_from(ROLLOUTS))
    def freeze(self, at: int, rollout: str) -> None:
        """The first freeze decides; later ones return the same, and marks alone change flag and version."""
        model = self.rollouts[rollout]
        if model.state == "retired":
            assert self._outcome(self.sources[at].freeze(rollout)) == "retired"
            return
        snapshot = self._run(self.sources[at].freeze(rollout))
        if model.frozen is None:
            incomplete = bool(model.begun - model.outcomes.keys() or model.conflicted or model.marks)
            model.state = "frozen"
            model.frozen = Frozen(
                snapshot.snapshot_id,
                [snapshot.version],
                dict(model.outcomes),
                set(model.conflicted),
                incomplete,
                model.marks,
            )
        frozen = model.frozen
        if model.marks > frozen.marks_seen:
            assert snapshot.version > frozen.versions[-1], "a mark changes the observable version"
            frozen.versions.append(snapshot.version)
            frozen.incomplete, frozen.marks_seen = True, model.marks
        assert snapshot.version == frozen.versions[-1]
        self._compare(rollout, snapshot, frozen)

    def _compare(self, rollout: str, snapshot: TokenCaptureSnapshot, frozen: Frozen) -> None:
        assert (snapshot.rollout_id, snapshot.snapshot_id) == (rollout, frozen.snapshot_id)
        assert snapshot.snapshot_id
        assert snapshot.incomplete is frozen.incomplete
        good = {call: made for call, made in frozen.outcomes.items() if call not in frozen.conflicted}
        entries = {call: _entry(rollout, call, made[1]) for call, made in good.items() if made[0] == "entry"}
        assert {found.model_call_id: found for found in snapshot.entries} == entries
        assert len(snapshot.entries) == len(entries), "unique by call"
        refusals = {call: made[1] for call, made in good.items() if made[0] == "refusal"}
        assert {found.model_call_id: found.code for found in snapshot.engine_refusals} == refusals
        assert len(snapshot.engine_refusals) == len(refusals)

    @rule(
        at=st.integers(0, PROCESSES - 1),
        rollout=st.sampled_from(ROLLOUTS),
        call=st.sampled_from(CALLS),
        variant=st.sampled_from(VARIANTS),
    )
    def resolve(self, at: int, rollout: str, call: str, variant: int) -> None:
        """A continuation finds its call exactly if that payload was acknowledged and nothing contradicts it."""
        model = self.rollouts[rollout]
        answer = self._run(self.resolvers[at].resolve(rollout, continued(text=_text(call, variant))))
        known = model.outcomes.get(call) == ("entry", variant) and call not in model.conflicted
        if known or answer.match is not None:
            assert known or call in model.late_calls, "resolved to what was never acknowledged"
            assert answer.status == "resolved"
            assert answer.match is not None
            made = _entry(rollout, call, variant)
            assert answer.match.model_call_id == call
            assert list(answer.match.cumulative_token_ids) == [*made.prompt_token_ids, *made.generation_token_ids]
        else:
            assert answer.status == "unresolved"

    # Removal

    @rule(
        at=st.integers(0, PROCESSES - 1),
        rollout=st.sampled_from(ROLLOUTS),
        how=st.sampled_from(["exact", "exact", "older", "newer", "other snapshot"]),
    )
    def drop(self, at: int, rollout: str, how: str) -> None:
        """Only the exact state that was consumed is dropped; once dropped, saying so again is True."""
        model = self.rollouts[rollout]
        snapshot_id, version = "none", 1
        if model.frozen is not None:
            snapshot_id, version = model.frozen.snapshot_id, model.frozen.versions[-1]
            if how == "older":
                version = model.frozen.versions[0] - (len(model.frozen.versions) == 1)
        version += how == "newer"
        snapshot_id += "x" if how == "other snapshot" else ""
        came = self._run(self.sources[at].drop(rollout, snapshot_id=snapshot_id, version=version))
        if model.dropped is not None:
            assert came is (model.dropped == (snapshot_id, version))
            return
        current = (
            how == "exact"
            and model.state == "frozen"
            and model.frozen is not None
            and model.marks == model.frozen.marks_seen
        )
        assert came is current
        if came:
            model.retire()
            model.dropped = (snapshot_id, version)

    @rule(
        at=st.integers(0, PROCESSES - 1),
        batch=st.lists(st.sampled_from(ROLLOUTS), max_size=3),
        operation=st.sampled_from(["retire", "delete"]),
    )
    def remove(self, at: int, batch: list[str], operation: str) -> None:
        """Retire fences whatever the state, delete makes the id fresh; both say who had anything."""
        removal = self._run(getattr(self.sources[at], operation)(batch))
        distinct = [*dict.fromkeys(batch)]
        assert sorted([*removal["removed"], *removal["absent"]]) == sorted(distinct)
        assert [rollout for rollout in distinct if rollout in removal["removed"]] == removal["removed"]
        for rollout in distinct:
            model = self.rollouts[rollout]
            if not model.late:
                assert (rollout in removal["removed"]) is model.has_records
            elif model.has_records:
                assert rollout in removal["removed"]
            if operation == "delete":
                self.rollouts[rollout] = Rollout()
            else:
                model.retire()

    @precondition(lambda self: all(r == Rollout() for r in self.rollouts.values()))
    @invariant()
    def nothing_is_left_of_what_was_deleted(self) -> None:
        """When every id is fresh, the bucket holds nothing."""
        assert not [row.key for row in self.store.list("") if "/probe/" not in row.key]


TestContract = Contract.TestCase
TestContract.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    print_blob=True,
    derandomize=CI,
    # Making a failure small may take minutes; where nobody waits at the screen, the blob is enough.
    phases=[phase for phase in Phase if not (CI and phase in (Phase.shrink, Phase.explain))],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
