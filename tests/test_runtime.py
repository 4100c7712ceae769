"""The runtime that endpoints and commands share: when spilled marks come back, and when they must not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from captures import entry

from s3capture import S3TokenSink
from s3capture.effects import List, Steps
from s3capture.keys import RunKeys
from s3capture.reader import Reader
from s3capture.retention import Act, Request, carry_out, choose
from s3capture.runtime import Runtime
from s3capture.settings import Settings
from s3capture.spill import Spill, SpilledMark
from s3capture.store.memory import MemoryStore
from s3capture.stored import Selection, StoredRun

KEYS = RunKeys("p", "r")


def waiting(spill: Path, rollout: str) -> None:
    """Put a mark of ``rollout`` on the disk."""
    Spill(spill).write(SpilledMark("bucket", "p", None, "r", rollout, "c1", "ab" * 16, 1.0, "no answer", "host:1"))


def looking() -> Steps[None]:
    yield (List(KEYS.root),)


def settled(runtime: Runtime) -> None:
    """Return once everything that the runtime does in the background is done."""
    runtime._marks.shutdown(wait=True)


@pytest.mark.parametrize(
    ("given", "published"),
    [
        ({}, True),
        ({"writes": False}, False),
        ({"publishes": False}, False),
        ({"writes": False, "publishes": True}, True),
    ],
)
def test_spilled_marks_come_back_behind_what_writes(tmp_path: Path, given: dict[str, bool], published: bool) -> None:
    """The next success of a writer publishes what waits; an operation that only reads and deletes does not."""
    store = MemoryStore()
    runtime = Runtime(Settings.of(url="s3://bucket/p", run="r", spill_dir=str(tmp_path)), store)
    waiting(tmp_path, "A")
    runtime.submit("look", "a look", looking, **given).result()
    settled(runtime)
    assert bool(store.list(KEYS.rollout("A").base)) is published
    assert bool(Spill(tmp_path).pending().marks) is not published


def test_a_deleted_rollout_does_not_come_back_as_its_spilled_mark(tmp_path: Path) -> None:
    """A mark that waits on this disk is published by no deletion: the id stays fresh, and the mark on the disk."""
    store = MemoryStore()
    given: dict[str, Any] = {"url": "s3://bucket/p", "run": "r", "spill_dir": str(tmp_path)}

    async def put() -> None:
        sink = S3TokenSink(store=store, **given)
        await sink.put(entry("c1", "A"))
        await sink.close()

    asyncio.run(put())
    runtime = Runtime(Settings.of(**given), store)
    waiting(tmp_path, "A")
    with Reader(store) as reader:
        plan = choose(StoredRun(reader, KEYS), Request(Act.DELETE, Selection(("A",))))
    (outcome,) = carry_out(runtime, plan)
    settled(runtime)
    assert outcome.done and not store.list(KEYS.rollout("A").base)
    assert len(Spill(tmp_path).pending().marks) == 1
