"""The made run of the benchmark is a run: the endpoints would have written it, and the commands find it as planned.

The rule of this module: it holds tests/benchmarks to what it claims, at a size that shows nothing but that.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from s3capture import S3TokenSource
from s3capture.audit import RunAudit
from s3capture.effects import ObjectInfo
from s3capture.inspection import State, list_rollouts
from s3capture.keys import Kind
from s3capture.local import EmbeddedServer
from s3capture.reader import Reader
from s3capture.settings import Settings
from s3capture.store.boto import BotoStore
from s3capture.store.memory import MemoryStore
from s3capture.stored import StoredRun

sys.path.insert(0, str(Path(__file__).parent / "benchmarks"))

import kept_runs
import made_run
from made_run import End, Place, Plan, Rollout, Story

PLAN = Plan("exp", "run-7", rollouts=6, calls=4)


@pytest.fixture
def place(seaweed: EmbeddedServer, bucket: str) -> Place:
    """The bucket with the whole run in it."""
    found = Place(seaweed.endpoint_url, seaweed.access_key, seaweed.secret_key, bucket)
    stored = made_run.put_rollouts(PLAN, found, range(PLAN.rollouts))
    assert (stored.rollouts, stored.objects) == (6, kept_runs.held(found, PLAN.keys.root).objects)
    return found


def rollout_of(story: Story) -> Rollout:
    return made_run.made(PLAN, next(i for i in range(PLAN.rollouts) if PLAN.story(i) is story))


def test_the_endpoints_write_what_was_made() -> None:
    """One rollout of each story and end has the objects, to the field, that the endpoints write for its records."""
    assert made_run.proved(PLAN) == 6
    assert {PLAN.story(index) for index in range(6)} == {*Story}
    assert {PLAN.end(index) for index in range(6)} == {*End}


@pytest.mark.parametrize("kind", [Kind.INTENT, Kind.CALL, Kind.CONFLICT, Kind.MARK, Kind.LINEAGE, Kind.LINEAGE_CONFLICT,
                                  Kind.CLOSING, Kind.FROZEN, Kind.RETIRED, Kind.RETIRING, Kind.DROP])  # fmt: skip
def test_the_proof_misses_no_object(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    """A made rollout that lacks an object of any kind is not what the endpoints write."""
    make = made_run.objects

    def lacking(rollout: Rollout) -> dict[str, bytes]:
        root = rollout.keys.of.root
        return {k: body for k, body in make(rollout).items() if getattr(made_run.parse(root, k), "kind", None) != kind}

    monkeypatch.setattr(made_run, "objects", lacking)
    with pytest.raises(AssertionError, match="the endpoints write"):
        made_run.proved(PLAN)


def test_a_changed_record_is_no_longer_what_was_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made rollout with one other token is not what the endpoints write."""
    rollout, make = rollout_of(Story.PLAIN), made_run.objects
    other = rollout.entries[2].model_copy(update={"model": "another"})
    changed = dataclasses.replace(rollout, entries=(*rollout.entries[:2], other, *rollout.entries[3:]))
    monkeypatch.setattr(made_run, "objects", lambda _: make(changed))
    assert asyncio.run(made_run.differences(rollout))


def test_the_run_is_found_as_planned(place: Place, tmp_path: Path) -> None:
    """In the bucket, summaries, the audit and a snapshot say of the made run what it was planned to be."""
    settings: dict[str, Any] = {
        "url": f"s3://{place.bucket}/{PLAN.prefix}",
        "run": PLAN.run,
        "endpoint_url": place.endpoint_url,
        "spill_dir": str(tmp_path),
    }
    store = BotoStore(Settings.of(**settings))
    with Reader(store) as reader:
        found = {summary.rollout: summary for summary in list_rollouts(reader, PLAN.keys)}
        audit = RunAudit(reader, PLAN.keys)
        audited = list(audit.rollouts())
    store.close()
    states = {End.OPEN: State.OPEN, End.FROZEN: State.FROZEN, End.DROPPED: State.RETIRED, End.RETIRED: State.RETIRED}
    planned = {PLAN.rollout_id(index): states[PLAN.end(index)] for index in range(6)}
    assert {name: summary.state for name, summary in found.items()} == planned
    assert sum(not one.incomplete for one in found.values()) == PLAN.complete() == 2
    assert len(audited) == 6
    assert audit.totals.kinds == PLAN.findings()

    async def frozen(rollout: Rollout) -> Any:
        source = S3TokenSource(**settings)
        snapshot = await source.freeze(rollout.keys.rollout_id)
        await source.close()
        return snapshot

    for story, incomplete in ((Story.MARKED, True), (Story.SEALED, True), (Story.OPEN, True)):
        rollout = rollout_of(story)
        snapshot = asyncio.run(frozen(rollout))
        assert (snapshot.entries, snapshot.incomplete) == (rollout.entries, incomplete)


def test_looking_for_a_run_does_not_list_it() -> None:
    """That a run exists is said from one part of it, and from no more requests the larger it is."""

    class Counting(MemoryStore):
        rows = 0

        def list(self, prefix: str) -> Sequence[ObjectInfo]:
            found = super().list(prefix)
            self.rows += len(found)
            return found

    store = Counting()
    with Reader(store) as reader:
        assert not StoredRun(reader, PLAN.keys).exists()
        for index in range(PLAN.rollouts):
            for key, body in made_run.objects(made_run.made(PLAN, index)).items():
                store.create(key, body)
        assert StoredRun(reader, PLAN.keys).exists()
    largest = max(len(made_run.objects(made_run.made(PLAN, index))) for index in range(PLAN.rollouts))
    assert 0 < store.rows <= largest


def test_a_measured_command_is_counted_and_judged(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that ends as planned has its requests and memory in the row; one that does not says why."""
    monkeypatch.setenv("S3CAPTURE_ENDPOINT_URL", place.endpoint_url)
    arguments = ("ls", f"s3://{place.bucket}/{PLAN.prefix}", "--run", PLAN.run, "--json")
    good = kept_runs.measure(kept_runs.Step("ls", arguments, check=kept_runs._listed(PLAN)), PLAN, tmp_path)
    assert not good.wrong
    assert good.requests["list"] >= 2 and good.requests["get"] >= 5
    assert 20_000_000 < good.peak_bytes < kept_runs.MOST_BYTES
    more = dataclasses.replace(PLAN, rollouts=7)
    step = kept_runs.Step("ls", arguments, check=kept_runs._listed(more))
    bad = kept_runs.measure(step, PLAN, tmp_path, most=good.peak_bytes // 2)
    assert "rollouts listed: 6 in place of 7" in bad.wrong and "MB, more than" in bad.wrong
    gone = kept_runs.measure(dataclasses.replace(step, arguments=("ls", arguments[1], "--run", "none")), PLAN, tmp_path)
    assert "ended with 1" in gone.wrong
