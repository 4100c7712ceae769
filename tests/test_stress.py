"""Load and faults on a real server, in the form small enough for every change; tests/stress has the full form.

The rule of this module: a run proves something only if what it is about took place, so each test also demands that
puts met fences, drops were granted, processes died. And the judge itself is tested: each lie about an honest history
must be found.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fakes3 import FakeS3, Reply, on
from stress import judge, plan, scenarios
from stress.history import UNFINISHED, Event
from stress.run import Report

from s3capture import S3TokenSink, S3TokenSource
from s3capture.effects import ObjectInfo
from s3capture.errors import StoreUnavailableError
from s3capture.keys import RunKeys
from s3capture.local import EmbeddedServer
from s3capture.protocol import bodies
from s3capture.protocol.bodies import Origin
from s3capture.store.memory import MemoryStore

_FROZEN, _RETIRED = "TokenCaptureFrozenError", "TokenCaptureRetiredError"


@pytest.fixture
def own_seaweed(unstarted_seaweed: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """A server to kill, with the keys that this process has in its environment."""
    known = unstarted_seaweed
    with EmbeddedServer(access_key=known.access_key, secret_key=known.secret_key) as server:
        yield server


def _spoken(report: Report) -> str:
    return "\n".join(report.lines())


def test_writers_against_freezes_and_drops(seaweed: EmbeddedServer) -> None:
    """Under 400 writers no acknowledged put or mark is missing from any snapshot, and no snapshot changes."""
    report = scenarios.load(seaweed, seed=1, calls=2000)
    assert not report.breaches, _spoken(report)
    puts, drops = report.count("put"), [e.result["dropped"] for e in report.events if e.op == "drop" and e.acked]
    assert puts["ok"] > 300, _spoken(report)
    assert puts[_FROZEN], "no put met a freeze, so nothing was raced"
    assert puts["ConflictingPayloadError"], _spoken(report)
    assert report.count("mark")["ok"], _spoken(report)
    assert any(drops), _spoken(report)


def test_server_killed_five_times(own_seaweed: EmbeddedServer) -> None:
    """With the server killed and restarted five times nothing acknowledged is lost, every caller is answered by the
    deadline of its operation, and the run ends by itself."""
    report = scenarios.server_kills(own_seaweed, seed=1, calls=600)
    assert not report.breaches, _spoken(report)
    assert report.count("put")["ok"], _spoken(report)
    assert report.count("put")["StoreUnavailableError"] + report.count("begin")["StoreUnavailableError"]
    assert report.count("mark")["ok"], _spoken(report)


def test_processes_killed_beside_each_other(seaweed: EmbeddedServer) -> None:
    """Whatever request a process was killed at, the other one can freeze and drop, and the bucket is sound."""
    report = scenarios.duels(seaweed, seed=1, rollouts=100)
    assert not report.breaches, _spoken(report)
    assert report.deaths >= 10, _spoken(report)
    unfinished = {event.op for event in report.events if event.error == UNFINISHED}
    assert {"begin", "put", "freeze"} <= unfinished, f"killed only in {unfinished}"


def _settings(server: FakeS3, folder: Path, **more: Any) -> dict[str, Any]:
    where = {"url": f"s3://{server.bucket}/p", "run": "r", "endpoint_url": server.endpoint_url}
    return {**where, "spill_dir": str(folder / "spill"), "max_concurrency": 64, **more}


async def _put_all(sink: S3TokenSink, count: int) -> list[BaseException | None]:
    puts = (sink.put(plan.entry(1, "busy", f"c{number}")) for number in range(count))
    return await asyncio.gather(*puts, return_exceptions=True)


def test_throttling_that_passes(tmp_path: Path) -> None:
    """64 writers that are told SlowDown for a while all end with their record stored once."""

    async def run(server: FakeS3) -> list[BaseException | None]:
        sink = S3TokenSink(**_settings(server, tmp_path))
        await sink.put(plan.entry(1, "busy", "first"))
        server.script(on("*"), Reply(503, "SlowDown"), times=300)
        done = await _put_all(sink, 64)
        await sink.close()
        return done

    with FakeS3() as server:
        done = asyncio.run(run(server))
        assert done == [None] * 64
        calls = RunKeys("p", "r").rollout("busy").calls
        assert sum(key.startswith(calls) for key in server.objects) == 65


def test_throttling_that_stays(tmp_path: Path) -> None:
    """64 writers under an endless SlowDown are all told so, and their marks, taken by the spill, mask the rollout."""

    async def run(server: FakeS3) -> tuple[list[BaseException | None], bool]:
        patience = {"op_timeout_s": 2.0, "mark_timeout_s": 0.5}
        sink = S3TokenSink(**_settings(server, tmp_path, **patience))
        await sink.put(plan.entry(1, "busy", "first"))
        server.script(on("*"), Reply(503, "SlowDown"), times=None)
        done = await _put_all(sink, 64)
        await asyncio.gather(*(sink.mark_incomplete("busy", f"c{number}") for number in range(64)))
        await sink.close()
        server.clear_scripts()
        source = S3TokenSource(**_settings(server, tmp_path))
        snapshot = await source.freeze("busy")
        await source.close()
        return done, snapshot.incomplete

    with FakeS3() as server:
        done, incomplete = asyncio.run(run(server))
    assert {type(answer) for answer in done} == {StoreUnavailableError}
    assert incomplete


class _TogetherStore(MemoryStore):
    """Lets ``crowd`` LISTs of fences go on only together."""

    crowd: threading.Barrier | None = None

    def list(self, prefix: str) -> list[ObjectInfo]:
        if self.crowd is not None and prefix.endswith("/fence/"):
            self.crowd.wait(20)
        return [*super().list(prefix)]


def test_many_marks_finish_dead_drops_at_once(tmp_path: Path) -> None:
    """Eight marks at once that each finish the drop of a dead process reach the store, and so do those after them."""
    store, keys = _TogetherStore(), RunKeys("p", "r")
    rollouts = [f"r{number}" for number in range(8)]

    async def run() -> None:
        settings: dict[str, Any] = {"url": "s3://bucket/p", "run": "r", "spill_dir": str(tmp_path / "spill")}
        sink, source = S3TokenSink(store=store, **settings), S3TokenSource(store=store, **settings)
        for rollout in rollouts:
            version = (await source.freeze(rollout)).version
            announced = bodies.fence("retiring", keys.rollout(rollout), Origin("dead", 0.0, "n"))
            store.create(keys.rollout(rollout).retiring(version), announced)
        store.crowd = threading.Barrier(len(rollouts))
        await asyncio.gather(*(sink.mark_incomplete(rollout) for rollout in rollouts))
        store.crowd = None
        await sink.mark_incomplete("another")
        await sink.close()
        await source.close()

    asyncio.run(run())
    assert not [*(tmp_path / "spill").glob("*.mark")]
    assert any(row.key.startswith(f"{keys.rollout('another').base}mark/") for row in store.list(keys.attempts))


# The judge


def _event(op: str, start: float, end: float, call: str = "", **more: Any) -> Event:
    return Event("a", op, "r", call, start, end, **more)


def _snapshot(start: float, end: float, version: int, *, incomplete: bool) -> Event:
    result = {
        "snapshot_id": "s",
        "version": version,
        "incomplete": incomplete,
        "entries": {"one": _ONE},
        "refusals": {"two": "too_long"},
    }
    return _event("freeze", start, end, result=result)


_ONE = plan.digest(plan.entry(1, "r", "one"))
_HONEST = judge.Story(
    seed=1,
    rollout="r",
    events=(
        _event("begin", 0, 1, "one"),
        _event("put", 1, 2, "one", sent=_ONE),
        _event("begin", 0, 1, "two"),
        _event("refuse", 1, 2, "two", sent="too_long"),
        _snapshot(3, 4, 3, incomplete=False),
        _event("put", 5, 6, "late", error=_FROZEN, sent="x"),
        _event("begin", 5, math.inf, "dead", error=UNFINISHED),
        _event("mark", 5, 6, "m"),
        _snapshot(7, 8, 4, incomplete=True),
        _event("drop", 9, 10, result={"dropped": True, "snapshot_id": "s", "version": 4}),
        _event("put", 11, 12, "late", error=_RETIRED, sent="x"),
        _event("mark", 11, 12, "later", error=_RETIRED),
    ),
    bounds={"put": 5.0},
)


def _changed(index: int, **fields: Any) -> Callable[[judge.Story], judge.Story]:
    """Change the event at ``index``; fields of its result by the name ``result_<field>``."""

    def change(story: judge.Story) -> judge.Story:
        event = story.events[index]
        of_result = {name.removeprefix("result_"): v for name, v in fields.items() if name.startswith("result_")}
        plain = {name: value for name, value in fields.items() if not name.startswith("result_")}
        changed = replace(event, **plain, result=event.result | of_result)
        return replace(story, events=(*story.events[:index], changed, *story.events[index + 1 :]))

    return change


_LIES: list[tuple[str, Callable[[judge.Story], judge.Story]]] = [
    ("every_acknowledged_outcome_is_in_every_snapshot", _changed(8, result_entries={})),
    ("every_acknowledged_outcome_is_in_every_snapshot", _changed(4, result_refusals={})),
    ("every_acknowledged_outcome_is_in_every_snapshot", _changed(5, error="")),
    ("snapshots_hold_only_what_was_sent", _changed(4, result_entries={"one": _ONE, "more": "0" * 64})),
    ("one_payload_of_a_call_is_acknowledged", _changed(5, error="", call="one")),
    ("snapshots_do_not_change", _changed(8, result_entries={})),
    ("snapshots_do_not_change", _changed(8, result_snapshot_id="another")),
    ("snapshots_do_not_change", _changed(8, result_version=2)),
    ("snapshots_do_not_change", _changed(8, result_version=3)),
    ("acknowledged_marks_show", _changed(8, result_incomplete=False)),
    ("acknowledged_marks_show", _changed(8, result_version=3)),
    ("acknowledged_marks_are_kept", lambda story: replace(story, marks=Counter({"other": 1}))),
    ("holes_mask", _changed(0, call="three")),
    ("holes_mask", _changed(1, error="ConflictingPayloadError")),
    ("nothing_begins_behind_a_freeze", _changed(6, error="", end=6)),
    ("refusals_have_a_reason", _changed(5, start=0, end=1)),
    ("refusals_have_a_reason", _changed(10, start=5, end=6)),
    ("a_drop_saw_everything", _changed(9, result_version=3)),
    ("a_drop_saw_everything", _changed(9, result_version=7)),
    ("a_drop_saw_everything", _changed(11, error="", start=8.5, end=8.7)),
    ("retirement_is_final", _changed(10, error=_FROZEN)),
    ("retirement_is_final", _changed(11, error="")),
    ("errors_are_expected", _changed(3, error="StoreUnavailableError")),
    ("callers_are_answered_in_time", _changed(1, start=-5)),
]


def test_the_judge_accepts_an_honest_history() -> None:
    """A history in which every promise was kept has no breach."""
    assert judge.breaches(_HONEST) == []


@pytest.mark.parametrize(("promise", "lie"), _LIES)
def test_the_judge_finds_each_lie(promise: str, lie: Callable[[judge.Story], judge.Story]) -> None:
    """A history changed in one place is found out by the promise that the change breaks."""
    assert promise in {breach.split(":")[0] for breach in judge.breaches(lie(_HONEST))}


def test_every_promise_has_a_lie() -> None:
    """No predicate of the judge goes untested."""
    assert {promise.__name__ for promise in judge.PROMISES} == {name for name, _ in _LIES}
