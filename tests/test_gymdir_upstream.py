"""Gym's own stores on what we import and export: the directory it wrote, and the directory it opens."""

from __future__ import annotations

import asyncio
import json
import math
import os
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import gym_env
import pytest
from captures import entry
from gymdirs import GIVEN, chain, copy_of, put, settings

from s3capture import S3TokenSink, S3TokenSource
from s3capture.cli import main
from s3capture.errors import ConflictingPayloadError, TokenCaptureFrozenError
from s3capture.gymdir import export_directory, import_directory
from s3capture.keys import RunKeys
from s3capture.local import EmbeddedServer
from s3capture.reader import Reader
from s3capture.sink import entry_payload
from s3capture.store.memory import MemoryStore

RECORDING = gym_env.REPOSITORY.parent / "shared" / "data" / "rollouts.jsonl.gz"
RECORDED = os.environ.get("S3CAPTURE_RECORDING") or (str(RECORDING) if RECORDING.is_file() else None)


@pytest.fixture(scope="module")
def place(request: pytest.FixtureRequest) -> gym_env.GymPlace:
    """A Python that can import nemo-gym."""
    return gym_env.beside(request.config)


def ask(place: gym_env.GymPlace, do: str, **order: Any) -> Any:
    """Have Gym's own code do something."""
    return place.run("-m", "gym_e2e.directories", given={"do": do, "recording": RECORDED, **order})


@pytest.fixture(scope="module")
def captures(place: gym_env.GymPlace, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that Gym's own serving path and stores wrote; not to be changed."""
    root = tmp_path_factory.mktemp("gym") / "captures"
    assert ask(place, "fill", dir=str(root), rollouts=16)["calls"] > 20
    return root


@pytest.fixture(scope="module")
def as_gym_reads(place: gym_env.GymPlace, captures: Path) -> dict[str, Any]:
    """What Gym's store and ledger return for every rollout of ``captures``."""
    found: dict[str, Any] = ask(place, "snapshots", dir=str(captures))
    assert len(found) > 16
    return found


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of one command."""
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(arguments)
    return status, out.getvalue(), err.getvalue()


@pytest.fixture
def given(seaweed: EmbeddedServer, bucket: str) -> dict[str, Any]:
    """Settings for a bucket on SeaweedFS."""
    return {"url": f"s3://{bucket}/p", "run": "r", "endpoint_url": seaweed.endpoint_url}


def test_both_ways_through_a_real_bucket(
    place: gym_env.GymPlace, captures: Path, as_gym_reads: dict[str, Any], given: dict[str, Any], tmp_path: Path
) -> None:
    """What Gym wrote is imported, exported, and read by Gym as before; and our source gives Gym's snapshots."""
    url, where = given["url"], ["--run", given["run"], "--endpoint-url", given["endpoint_url"]]
    status, out, err = run("import-gym", str(captures), url, *where)
    assert (status, err) == (0, ""), err
    rollouts = len(as_gym_reads)
    assert f"verified   {rollouts} of {rollouts}\n" in out
    status, out, _ = run("import-gym", str(captures), url, *where, "--json")
    assert status == 0
    assert {json.loads(row)["fate"] for row in out.splitlines()} == {"present", "empty"}

    back = tmp_path / "back"
    status, out, err = run("export-gym", url, str(back), *where)
    assert (status, err) == (0, ""), err
    assert f"verified   {rollouts} of {rollouts}\n" in out
    assert ask(place, "snapshots", dir=str(back)) == as_gym_reads

    ours = ask(place, "sourced", settings=given, names=list(as_gym_reads))
    assert ours.pop("resolved") == "c2"
    assert ours == {name: _without_frozen(each) for name, each in as_gym_reads.items()}


def _without_frozen(told: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in told.items() if key != "frozen"}


def test_gym_goes_on_in_what_was_exported(place: gym_env.GymPlace, captures: Path, tmp_path: Path) -> None:
    """In an exported directory a put again is a no-op, another payload is refused, and a continuation finds its parent.

    The rollout was open, so it takes new calls.
    """
    store = MemoryStore()
    assert import_directory(captures, settings(), store).ok
    with Reader(store) as reader:
        export_directory(reader, RunKeys("p", "r"), tmp_path / "back")
    name = next(
        path.name.removesuffix(".tokens.state.json")
        for path in sorted(captures.glob("*.tokens.state.json"))
        if not json.loads(path.read_bytes())["frozen"] and not path.name.startswith("odd")
    )
    told = ask(place, "resume", dir=str(tmp_path / "back"), rollout=name)
    assert told["refused"]
    assert told["after"] == told["before"] + 1
    assert told["proven"]
    assert told["parent"] == told["last"]


NO_TEXT = "\ud800"
ODD_NAMES = ("c\n1", " c2", "c\x003", "ü4", "x" * 300, "", NO_TEXT)


async def odd_lives(store: MemoryStore) -> None:
    """Rollouts with everything that Gym's files have no place for."""
    sink, source = S3TokenSink(store=store, **GIVEN), S3TokenSource(store=store, **GIVEN)
    for name in ("open", "frozen"):
        await sink.put(entry("c1", f"refused-{name}"))
        await sink.begin_call(f"refused-{name}", "c2")
        await sink.record_engine_refusal(f"refused-{name}", model_call_id="c2", code="context_length_exceeded")
        for record in chain(f"conflicted-{name}"):
            await sink.put(record)
        with pytest.raises(ConflictingPayloadError):
            await sink.put(entry("c1", f"conflicted-{name}"))
        for number, call in enumerate(ODD_NAMES):
            if call != NO_TEXT:  # a record of that name is one that Gym cannot read
                await sink.begin_call(f"named-{name}", call)
                await sink.put(entry(call, f"named-{name}"))
            await sink.begin_call(f"lost-{name}-{number}", call)
        await sink.mark_incomplete(f"marked-{name}", "c\n1")
        await sink.mark_incomplete(f"marked-{name}", "x" * 300)
        await sink.put(entry("c1", f"whole-{name}"))
        if name == "frozen":
            for rollout in ("refused", "conflicted", "named", "marked", "whole"):
                await source.freeze(f"{rollout}-{name}")
            for number in range(len(ODD_NAMES)):
                await source.freeze(f"lost-{name}-{number}")
    with pytest.raises(TokenCaptureFrozenError):
        await sink.begin_call("whole-frozen", "c8")
    with pytest.raises(TokenCaptureFrozenError):
        await sink.put(entry("c9", "whole-frozen"))


def test_gym_gives_our_snapshots(place: gym_env.GymPlace, tmp_path: Path) -> None:
    """Of refusals, conflicts, late objects and odd names Gym's store makes the same snapshot as our source."""
    store = MemoryStore()
    asyncio.run(odd_lives(store))
    with Reader(store) as reader:
        report = export_directory(reader, RunKeys("p", "r"), tmp_path / "back")
    assert report.ok
    theirs = ask(place, "snapshots", dir=str(tmp_path / "back"))
    assert theirs.keys() == {rollout.rollout for rollout in report.rollouts}
    for name, told in theirs.items():
        snapshot = asyncio.run(S3TokenSource(store=copy_of(store), **GIVEN).freeze(name))
        entries = {each.model_call_id: entry_payload(each).digest for each in snapshot.entries}
        assert (told["entries"], told["incomplete"]) == (entries, snapshot.incomplete), name
    said = {rollout.rollout: " ".join(rollout.notes) for rollout in report.rollouts}
    assert "refused by the engine" in said["refused-frozen"]
    assert "lost a conflict" in said["conflicted-open"]
    assert "1 records and 1 intents came behind the fence" in said["whole-frozen"]
    assert "another matcher" in said["conflicted-frozen"]


UNREADABLE = {
    "nan": entry("c2", "nan").model_copy(update={"generation_log_probs": [-1.0, math.nan]}),
    "inf": entry("c2", "inf").model_copy(update={"generation_log_probs": [-math.inf, -1.0]}),
    "large": entry("c2", "large", seed=2**80),
    "no-text": entry(NO_TEXT, "no-text"),
}


def test_what_gym_cannot_read_masks_the_rollout(place: gym_env.GymPlace, tmp_path: Path) -> None:
    """A record that Gym's reader would fail on is left out so that Gym opens the rollout and masks it."""
    store = MemoryStore()
    for name, odd in UNREADABLE.items():
        put(store, entry("c1", name), odd)
    with Reader(store) as reader:
        report = export_directory(reader, RunKeys("p", "r"), tmp_path / "back")
    assert all("it is left out" in " ".join(rollout.problems) for rollout in report.rollouts)
    told = ask(place, "snapshots", dir=str(tmp_path / "back"))
    assert {name: (list(each["entries"]), each["incomplete"]) for name, each in told.items()} == {
        name: (["c1"], True) for name in UNREADABLE
    }
