"""A real Gym model server with three workers over our endpoints, and Gym's own finalizer behind it.

What runs is the published nemo-gym wheel, configured by the very block that docs/nemo-gym.md shows; ours are the
harness, the engine, and what is asserted: tokens compared with those of the engine, keys with those in the bucket.
"""

from __future__ import annotations

import random
import re
import subprocess
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gym_env
import pytest
from gym_e2e.engine import StandInEngine
from gym_e2e.harness import Answer, Conversation, path_of, post, send_and_keep
from gym_e2e.holding import PATIENCE_S
from gym_e2e.relay import Relay
from gym_e2e.server import Collector, GymServer

from s3capture import codec
from s3capture.keys import Kind, ParsedKey, RunKeys, parse
from s3capture.local import EmbeddedServer
from s3capture.seaweed import connect

WORKERS = 3
PREFIX, RUN = "captures/team", "run-7"
DATA = {Kind.CALL, Kind.INTENT, Kind.MARK, Kind.CONFLICT, Kind.LINEAGE, Kind.LINEAGE_CONFLICT}


@dataclass
class Stage:
    """The server under test and all that stands around it."""

    gym: gym_env.GymPlace
    server: GymServer
    engine: StandInEngine
    relay: Relay
    bucket: str
    client: Any
    collector: Collector

    @property
    def port(self) -> int:
        """The port of the model server."""
        return self.server.port

    def talk(self, rollout: str, *turns: str, dialect: str = "chat") -> Conversation:
        """A rollout with these turns, none of them streamed."""
        conversation = Conversation(self.port, rollout, dialect)
        for turn in turns:
            conversation.ask(turn)
        return conversation

    def collect(self, **order: Any) -> dict[str, Any]:
        """Have the collector finalize, retire, freeze or drop rollouts."""
        return self.collector.ask(order)

    def freeze(self, rollout: str) -> dict[str, Any]:
        """The snapshot of one rollout as a collector sees it."""
        (snapshot,) = self.collect(freeze=[rollout])["freeze"]
        return dict(snapshot)

    def all_keys(self) -> list[str]:
        """Every key in the bucket."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.bucket)
        return [row["Key"] for page in pages for row in page.get("Contents", ())]

    def keys_of(self, rollout: str) -> list[ParsedKey]:
        """What the bucket holds of one rollout, every key understood."""
        root = RunKeys(PREFIX, RUN).root
        parsed = {key: parse(root, key) for key in self.all_keys()}
        assert None not in parsed.values(), f"keys that this project never writes: {parsed}"
        return [key for key in parsed.values() if key is not None and key.rollout_id == rollout]

    def count(self, rollout: str, kind: Kind) -> int:
        """How many keys of that kind the bucket holds of one rollout."""
        return [key.kind for key in self.keys_of(rollout)].count(kind)

    def await_count(self, rollout: str, kind: Kind, count: int) -> None:
        """Return when there are that many."""
        until = time.monotonic() + PATIENCE_S
        while (held := self.count(rollout, kind)) < count:
            assert time.monotonic() < until, f"rollout {rollout} has {held} {kind} and not {count}"

    def writers(self) -> set[str]:
        """The processes that wrote an outcome, as host and pid."""
        root = RunKeys(PREFIX, RUN).root
        calls = [key for key in self.all_keys() if (found := parse(root, key)) is not None and found.kind is Kind.CALL]
        bodies = (self.client.get_object(Bucket=self.bucket, Key=key)["Body"].read() for key in calls)
        return {str(codec.decode("an outcome", body).header.get("by")) for body in bodies}


@pytest.fixture(scope="module")
def stage(
    request: pytest.FixtureRequest, seaweed: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Stage]:
    """The server with three workers on a bucket of its own; the log of a failed start is in the failure."""
    gym = gym_env.server(request.config)
    place = tmp_path_factory.mktemp("gym")
    bucket = f"gym-{uuid.uuid4().hex[:20]}"
    seaweed.make_bucket(bucket)
    client = connect(seaweed.endpoint_url, seaweed.access_key, seaweed.secret_key)
    with StandInEngine().running() as engine, Relay(seaweed.endpoint_url).running() as relay:
        given = {"url": f"s3://{bucket}/{PREFIX}", "run": RUN, "endpoint_url": relay.endpoint_url}
        environment = {f"S3CAPTURE_{name.upper()}": value for name, value in given.items()}
        with (
            GymServer(gym, engine.base_url, place / "server.log", environment, WORKERS) as server,
            Collector(gym, given, place / "collector.log") as collector,
        ):
            yield Stage(gym, server, engine, relay, bucket, client, collector)
    client.delete_bucket(Bucket=bucket)
    client.close()


def test_rollouts_over_three_workers(stage: Stage) -> None:
    """Every rollout, in each dialect and streamed or not, is delivered whole and unmasked as one chain, and retired."""
    shapes = ["chat", "chat", "streamed", "mixed", "responses", "anthropic"]
    draw = random.Random(7)
    plans = [(f"{task}-{number}", shape) for number in range(2) for task, shape in enumerate(shapes)]

    def play(plan: tuple[str, str]) -> Conversation:
        rollout, shape = plan
        dialect = shape if shape in ("responses", "anthropic") else "chat"
        conversation = Conversation(stage.port, rollout, dialect)
        for turn in range(5):
            streamed = shape == "streamed" or (shape == "mixed" and turn % 2 == 1)
            conversation.ask(f"question {turn} about {rollout}", stream=streamed)
        return conversation

    draw.shuffle(plans)
    with ThreadPoolExecutor(6) as harnesses:
        played = list(harnesses.map(play, plans))
    assert len(stage.writers()) > 1, "the calls did not spread over the workers"
    deltas = stage.freeze(played[0].rollout)["entries"]
    assert sorted(entry["prompt_is_delta"] for entry in deltas) == [False, True, True, True, True]

    finalized = stage.collect(finalize=[conversation.result() for conversation in played])["finalize"]
    for conversation, answer in zip(played, finalized, strict=True):
        built, metrics = answer["built"], answer["built"]["metrics"]
        assert built["mask_sample"] is False, (conversation.rollout, metrics)
        assert (metrics["n_calls"], metrics["chains"], metrics["roots"]) == (5, 1, 1)
        assert metrics["delivered_fraction"] == 1.0
        assert metrics["generated_tokens_delivered"] == metrics["generated_tokens_captured"]
        items = [item for item in answer["result"]["response"]["output"] if item.get("generation_token_ids")]
        assert [item["generation_token_ids"] for item in items] == [
            stage.engine.generation(text) for text in conversation.said
        ], "the tokens delivered are not those that the engine generated"

    retired = stage.collect(retire=[(c.rollout, f["built"]) for c, f in zip(played, finalized, strict=True)])["retire"]
    assert retired == [True] * len(played)
    for conversation in played:
        left = stage.keys_of(conversation.rollout)
        assert not [key for key in left if key.kind in DATA], "records outlived their retirement"
        assert {Kind.FROZEN, Kind.DROP} <= {key.kind for key in left}, "the fences must stay"


def test_a_client_that_leaves_during_generation(stage: Stage) -> None:
    """Nobody marks such a rollout, and yet its snapshot is incomplete: the call was begun and has no outcome."""
    conversation = stage.talk("leaves-1", "first")
    hold = stage.engine.holds.at("leaves-1")
    conversation.history.append({"role": "user", "content": "[hold leaves-1] second"})
    connection = send_and_keep(stage.port, path_of("leaves-1"), conversation.body())
    hold.await_arrival()
    connection.close()
    hold.await_abandoned()
    (answer,) = stage.collect(finalize=[conversation.result()])["finalize"]
    assert answer["built"]["mask_sample"] is True
    assert answer["built"]["metrics"]["capture_incomplete"] is True
    assert answer["built"]["metrics"]["n_calls"] == 1
    assert (stage.count("leaves-1", Kind.INTENT), stage.count("leaves-1", Kind.MARK)) == (2, 0)
    assert stage.collect(retire=[("leaves-1", answer["built"])])["retire"] == [False], "evidence must be kept"


def test_a_client_that_leaves_during_put(stage: Stage) -> None:
    """A put whose caller was cancelled goes on: the record is there, and the rollout is complete."""
    conversation = stage.talk("leaves-2", "first")
    hold = stage.relay.hold_outcomes_of("leaves-2")
    conversation.history.append({"role": "user", "content": "second"})
    connection = send_and_keep(stage.port, path_of("leaves-2"), conversation.body())
    hold.await_arrival()
    connection.close()
    stage.server.await_hangup("leaves-2")
    assert stage.count("leaves-2", Kind.CALL) == 1
    hold.release()
    stage.await_count("leaves-2", Kind.CALL, 2)
    snapshot = stage.freeze("leaves-2")
    assert (len(snapshot["entries"]), snapshot["incomplete"]) == (2, False)


def test_a_late_call_does_not_spoil_the_snapshot(stage: Stage) -> None:
    """A call after the freeze fails before it reaches the engine, the version stays, and the drop succeeds."""
    conversation = stage.talk("late-1", "first", "second")
    (answer,) = stage.collect(finalize=[conversation.result()])["finalize"]
    late = post(stage.port, path_of("late-1"), conversation.body())
    assert late.status == 500
    assert "TokenCaptureFrozenError" in late.text
    assert "late-1" in late.text
    after = stage.freeze("late-1")
    assert {name: after[name] for name in ("snapshot_id", "version")} == answer["built"]["_capture_snapshot"]
    assert stage.collect(retire=[("late-1", answer["built"])])["retire"] == [True]
    gone = post(stage.port, path_of("late-1"), conversation.body())
    assert gone.status == 500
    assert "TokenCaptureRetiredError" in gone.text


def test_a_call_under_way_at_the_freeze(stage: Stage) -> None:
    """The put that comes too late is refused, 0.7.0's mark for it is dropped, and that snapshot can be dropped."""
    conversation = stage.talk("late-2", "first")
    hold = stage.engine.holds.at("late-2")
    conversation.history.append({"role": "user", "content": "[hold late-2] second"})
    with ThreadPoolExecutor(1) as harness:
        pending = harness.submit(post, stage.port, path_of("late-2"), conversation.body())
        hold.await_arrival()
        snapshot = stage.freeze("late-2")
        hold.release()
        assert pending.result().status == 200, "a capture error never fails the model call"
    assert "failed to write the record for model call" in stage.server.log()
    assert snapshot["incomplete"] is True, "the call was begun, and its record cannot be in this snapshot"
    assert stage.freeze("late-2") == snapshot
    assert stage.count("late-2", Kind.MARK) == 0
    exact = ("late-2", snapshot["snapshot_id"], snapshot["version"])
    assert stage.collect(drop=[exact])["drop"] == [True]


@pytest.mark.parametrize(("code", "status", "marks"), [("policy", 500, 0), ("context", 200, 1)])
def test_an_engine_refusal(stage: Stage, code: str, status: int, marks: int) -> None:
    """0.7.0 knows no refusals: it fails the call or answers an overflow itself, and both mask the rollout."""
    rollout = f"refused-{code}"
    conversation = stage.talk(rollout, "first")
    conversation.history.append({"role": "user", "content": f"[refuse {code}]"})
    answer = post(stage.port, path_of(rollout), conversation.body())
    assert answer.status == status
    held = [stage.count(rollout, kind) for kind in (Kind.INTENT, Kind.CALL, Kind.MARK)]
    assert held == [2, 1, marks]
    snapshot = stage.freeze(rollout)
    assert (len(snapshot["entries"]), snapshot["incomplete"]) == (1, True)


@pytest.mark.parametrize(
    "rollout",
    ["a b", "7-3/../../x", "a%2Fb", "..", ".", "ünï-çødé", "语", "x" * 300, "a\nb", "a\x00b", "*", "a?b#c", "{7-3}"],
    ids=lambda rollout: ascii(rollout[:12]),
)
def test_hostile_rollout_ids(stage: Stage, rollout: str) -> None:
    """Whatever is in the path, the call fails with an error that says why, and not one key is written."""
    before = sorted(stage.all_keys())
    for stream in (False, True):
        body = Conversation(stage.port, rollout, history=[{"role": "user", "content": "hello"}]).body(stream=stream)
        answer = post(stage.port, path_of(rollout), body)
        if "/" in rollout:
            assert answer.status == 404, "a slash ends the segment, whatever spells it"
        else:
            assert _refusal_of(answer) == 500
            assert "InvalidIdError" in answer.text
            assert "rollout id" in answer.text
            assert len(answer.text) < 600, "an error must not repeat an id of any length"
    assert sorted(stage.all_keys()) == before
    assert stage.talk(f"alive-{uuid.uuid4().hex[:8]}", "still there?").said


def _refusal_of(answer: Answer) -> int:
    return int(answer.body["error"]["code"]) if isinstance(answer.body, dict) else answer.status


def test_a_run_that_holds_data_is_not_started_again(stage: Stage, tmp_path: Path) -> None:
    """The launcher of the page refuses a second start under the same run id and says what to do."""
    given = {"URL": f"s3://{stage.bucket}/{PREFIX}", "RUN": RUN, "ENDPOINT_URL": stage.relay.endpoint_url}
    environment = {f"S3CAPTURE_{name}": value for name, value in given.items()}
    again = GymServer(stage.gym, stage.engine.base_url, tmp_path / "again.log", environment)
    stage.talk("in-use", "first")
    with pytest.raises(AssertionError, match=r"RunInUseError: run 'run-7' .*resume=True"), again:
        pass


def test_nothing_was_said_that_must_not_be(stage: Stage, seaweed: EmbeddedServer) -> None:
    """The server's log, errors of all the tests above included, holds neither secrets nor token arrays."""
    stage.talk("quiet", "first")
    log = stage.server.log()
    assert seaweed.secret_key not in log
    assert re.search(r"\[\d{3,},( ?\d{3,},)+", log) is None


INTEGRATION = "responses_api_models.vllm_model.tests.test_token_capture_integration"


@pytest.mark.parametrize(("plugin", "stores"), [(None, None), ("gym_e2e.stand_in", 34)], ids=["as it is", "over ours"])
def test_gyms_own_integration_tests(
    request: pytest.FixtureRequest, tmp_path: Path, plugin: str | None, stores: int | None
) -> None:
    """The integration tests in the wheel pass beside our package, and with our endpoints in place of Gym's stores."""
    gym = gym_env.server(request.config)
    (tmp_path / "none.ini").write_text("[pytest]\n")
    own = ["-q", "-p", "no:cacheprovider", "-c", str(tmp_path / "none.ini"), "--rootdir", str(tmp_path)]
    chosen = ["-p", plugin] if plugin else []
    done = subprocess.run(
        [str(gym.python), "-m", "pytest", *own, *chosen, "--pyargs", INTEGRATION],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=120,
        env=gym.environment(PYTEST_ADDOPTS=""),
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    assert "35 passed" in done.stdout
    if stores is not None:
        assert f"stores of s3capture written: {stores}" in done.stdout
