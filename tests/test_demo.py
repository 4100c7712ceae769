"""The demo: what it plays, how it judges, and that it plays and judges through real processes and a real bucket."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fakes3 import Exchange, FakeS3, Response, on

from s3capture import codec
from s3capture.cli import main
from s3capture.cli.demo_view import print_outcome
from s3capture.demo.crew import Crew, WorkerError
from s3capture.demo.entries import Decision, build_entry
from s3capture.demo.gate import Gate
from s3capture.demo.observing import percentile
from s3capture.demo.outcome import Difference, Fate, Outcome, RolloutOutcome
from s3capture.demo.recording import read_recording, write_recording
from s3capture.demo.script import KEEPS_ENTRY, Rollout, Script, Twist, rebuild
from s3capture.demo.verify import LineageJudge, Played, check_snapshot, expected_reasons
from s3capture.demo.worker import Act, Job
from s3capture.demo.workload import REFUSAL_CODE, built_in
from s3capture.local import EmbeddedServer
from s3capture.protocols import TokenCaptureSnapshot
from s3capture.records import EngineRefusal, ParentResolutionStatus, TokenEntry, compute_digest
from s3capture.seaweed import connect
from s3capture.sink import entry_payload
from s3capture.stats import OpStats

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-c", "import sys; from s3capture.cli import main; sys.exit(main())", "demo"]
BOUND_S = 150.0


# -- the workload ---------------------------------------------------------------------------------------------


def fingerprint(script: Script) -> str:
    """A digest of everything in a script."""
    return hashlib.sha256(json.dumps(dataclasses.asdict(script), sort_keys=True).encode()).hexdigest()


def test_one_seed_makes_one_workload_everywhere() -> None:
    """Another process, with other hashes, makes the same script of a seed; another seed makes another one."""
    code = (
        "import dataclasses, hashlib, json; from s3capture.demo.workload import built_in; "
        "print(hashlib.sha256(json.dumps(dataclasses.asdict(built_in(7)), sort_keys=True).encode()).hexdigest())"
    )
    env = {**os.environ, "PYTHONHASHSEED": "12345"}
    other = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert other.stdout.strip() == fingerprint(built_in(7))
    assert fingerprint(built_in(8)) != fingerprint(built_in(7))


@pytest.mark.parametrize("seed", range(5))
def test_the_workload_is_realistic(seed: int) -> None:
    """24 rollouts of 3 to 12 calls with tool calls and results, all kinds of trouble, and half of the deltas."""
    script = built_in(seed)
    calls = [call for rollout in script.rollouts for call in rollout.calls]
    continued = [call for call in calls if call.parent is not None]
    kinds = {item.get("type") for call in calls for item in [*call.new_items, *call.output_items]}
    assert len({rollout.rollout_id for rollout in script.rollouts}) == 24
    assert all(3 <= len(rollout.calls) <= 12 for rollout in script.rollouts)
    assert {call.twist for call in calls} == set(Twist)
    assert sum(rollout.late is not None for rollout in script.rollouts) == 1
    assert {"function_call", "function_call_output"} <= kinds
    assert abs(2 * sum(call.delta for call in calls) - len(continued)) <= 1
    assert any(
        len([call for call in rollout.calls if call.parent == parent.call_id]) == 2
        for rollout in script.rollouts
        for parent in rollout.calls
    )
    assert all(0 < token < 150_000 for call in calls for token in call.suffix_ids)
    assert all(value <= 0 for call in calls for value in call.log_probs)


def test_without_an_outage_the_workload_says_so() -> None:
    """Where S3 cannot be stopped, no call meets an outage, and the script names what it leaves out."""
    script = built_in(outage=False)
    assert Twist.OUTAGE not in {call.twist for rollout in script.rollouts for call in rollout.calls}
    assert len(script.skipped) == 1


def test_a_short_workload_keeps_the_troubles() -> None:
    """Cut to eight rollouts, the workload still has every kind of trouble."""
    script = built_in(rollouts=8)
    assert len(script.rollouts) == 8
    assert {call.twist for rollout in script.rollouts for call in rollout.calls} == set(Twist)


# -- the judgement --------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Case:
    """One rollout with the snapshot that must come of it."""

    rollout: Rollout
    snapshot: TokenCaptureSnapshot
    played: dict[str, Played]

    def differences(self, **changed: Any) -> list[str]:
        """What ``check_snapshot`` finds when the snapshot has the given fields instead."""
        snapshot = dataclasses.replace(self.snapshot, **changed)
        reasons = expected_reasons(self.rollout)
        return check_snapshot(self.rollout, rebuild(self.rollout), self.played, snapshot, reasons)


def right_decisions(rollout: Rollout) -> dict[str, Decision]:
    """The decisions that a resolver must come to, by call."""
    requests, calls = rebuild(rollout), {call.call_id: call for call in rollout.calls}
    found = {}
    for call in rollout.calls:
        if call.parent is None:
            found[call.call_id] = Decision(ParentResolutionStatus.ROOT)
        elif calls[call.parent].twist is Twist.CONFLICT:
            found[call.call_id] = Decision(ParentResolutionStatus.UNRESOLVED, reason="no_match")
        else:
            tokens = [*requests[call.parent].prompt, *calls[call.parent].generation_ids]
            found[call.call_id] = Decision(
                ParentResolutionStatus.RESOLVED, call.parent, "", compute_digest(tokens), len(tokens), True
            )
    return found


def case_of(twist: Twist) -> Case:
    """The rollout of the built-in workload with ``twist`` (or a plain one), made by hand."""
    script = built_in(rollouts=12)
    rollout = next(
        r for r in script.rollouts if {c.twist for c in r.calls} == ({twist, Twist.NONE} if twist else {Twist.NONE})
    )
    requests, decisions = rebuild(rollout), right_decisions(rollout)
    made = {
        call.call_id: build_entry(rollout.rollout_id, call, requests[call.call_id], decisions[call.call_id])
        for call in rollout.calls
        if call.twist not in (Twist.REFUSED, Twist.DIES, Twist.OUTAGE)
    }
    # As they come back from a bucket: through their bytes.
    entries = [TokenEntry.model_validate(codec.parse_payload(entry_payload(entry).data)) for entry in made.values()]
    refused = [call.call_id for call in rollout.calls if call.twist is Twist.REFUSED]
    conflicts = {call.call_id for call in rollout.calls if call.twist is Twist.CONFLICT}
    snapshot = TokenCaptureSnapshot(
        rollout_id=rollout.rollout_id,
        entries=tuple(entry for entry in entries if entry.model_call_id not in conflicts),
        incomplete=rollout.masked,
        snapshot_id="s",
        version=1,
        engine_refusals=tuple(EngineRefusal(model_call_id=call, code=REFUSAL_CODE) for call in refused),
    )
    played = {call: Played(decisions[call], entry_payload(entry).digest) for call, entry in made.items()}
    return Case(rollout, snapshot, played)


@pytest.mark.parametrize("twist", list(Twist))
def test_the_right_snapshot_has_no_difference(twist: Twist) -> None:
    """What must come of a rollout is accepted, whatever befell it."""
    assert case_of(twist).differences() == []


def changed(entries: tuple[TokenEntry, ...], place: int, **fields: Any) -> tuple[TokenEntry, ...]:
    """The entries with some fields of one of them changed."""
    return tuple(
        entry.model_copy(update=fields, deep=True) if at == place else entry for at, entry in enumerate(entries)
    )


def other(entries: tuple[TokenEntry, ...], **fields: Any) -> tuple[TokenEntry, ...]:
    """The entries with ``fields`` of the second one changed."""
    return changed(entries, 1, **fields)


def one_ulp(values: list[float]) -> list[float]:
    """The values with the last bit of the first one changed."""
    return [math.nextafter(values[0], 0), *values[1:]]


def without_roots(entries: tuple[TokenEntry, ...]) -> tuple[TokenEntry, ...]:
    """The entries with their full prompts emptied, so that every delta chain ends in nothing."""
    return tuple(e if e.prompt_is_delta else e.model_copy(update={"prompt_token_ids": []}) for e in entries)


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda e: other(e, generation_log_probs=one_ulp(e[1].generation_log_probs)), "'generation_log_probs'"),
        (lambda e: other(e, generation_token_ids=[*e[1].generation_token_ids[:-1], 1]), "'generation_token_ids'"),
        (lambda e: other(e, prompt_token_ids=e[1].prompt_token_ids[:-1]), "'prompt_token_ids'"),
        (lambda e: other(e, created_at=e[1].created_at + 1e-6), "'created_at'"),
        (lambda e: other(e, digest="0" * 64), "its token digest does not describe its tokens"),
        (lambda e: other(e, unheard_of=1), "'unheard_of'"),
        (lambda e: other(e, output_items=[]), "the record breaks a rule"),
        (lambda e: e[1:], "is missing from the snapshot"),
        (lambda e: (*e, e[0]), "but only"),
        (lambda e: (*e, e[0].model_copy(update={"model_call_id": "foreign"})), "should not be"),
        (without_roots, "its rebuilt prompt"),
    ],
)
def test_a_damaged_snapshot_is_caught(damage: Callable[[Any], Any], said: str) -> None:
    """A single bit, token, field or entry that is not what was put is a difference that names it."""
    case = case_of(Twist.NONE)
    assert said in "\n".join(case.differences(entries=damage(case.snapshot.entries)))


def test_minus_zero_is_not_zero() -> None:
    """Log probabilities are compared by their bits, where == would see no difference."""
    case = case_of(Twist.NONE)
    call = dataclasses.replace(case.rollout.calls[0], log_probs=[0.0] * len(case.rollout.calls[0].log_probs))
    case.rollout = dataclasses.replace(case.rollout, calls=[call, *case.rollout.calls[1:]])
    entries = changed(case.snapshot.entries, 0, generation_log_probs=[-0.0] * len(call.log_probs))
    assert any("field 'generation_log_probs'" in line for line in case.differences(entries=entries))


def test_a_worker_that_put_something_else_is_caught() -> None:
    """The digest that a worker reports must be that of the record which the script gives."""
    case = case_of(Twist.NONE)
    call = case.rollout.calls[0].call_id
    case.played[call] = dataclasses.replace(case.played[call], digest="0" * 64)
    assert any("the worker put payload 000" in line for line in case.differences())


def test_a_wrong_verdict_is_caught() -> None:
    """A masked rollout that came out complete, a complete one that came out masked, and a lost refusal differ."""
    assert case_of(Twist.CONFLICT).differences(incomplete=False) == ["the snapshot is complete, not incomplete"]
    assert case_of(Twist.NONE).differences(incomplete=True) == ["the snapshot is incomplete, not complete"]
    assert len(case_of(Twist.REFUSED).differences(engine_refusals=())) == 1


def test_a_wrong_reason_is_caught() -> None:
    """An incomplete snapshot must be so for the reasons, and the calls, of the script."""
    case = case_of(Twist.OUTAGE)
    reasons = frozenset(sorted(expected_reasons(case.rollout))[:1])
    (found,) = check_snapshot(case.rollout, rebuild(case.rollout), case.played, case.snapshot, reasons)
    assert found.startswith("incomplete because of [dangling intent ")


def test_the_right_parent_decisions_are_accepted() -> None:
    """The judge agrees with every decision that follows from the script, the one behind a conflict included."""
    for rollout in built_in().rollouts:
        judge, decisions = LineageJudge(rollout, rebuild(rollout)), right_decisions(rollout)
        assert [judge.judge(call, decisions[call.call_id]) for call in rollout.calls] == [None] * len(rollout.calls)


def test_wrong_parent_decisions_are_caught() -> None:
    """A wrong status, parent, length or digest, and any parent that is in conflict, are told."""
    rollout = case_of(Twist.NONE).rollout
    judge, right = LineageJudge(rollout, rebuild(rollout)), right_decisions(rollout)
    root, second, third = rollout.calls[:3]
    unresolved = Decision(ParentResolutionStatus.UNRESOLVED, reason="no_match")
    wrong = [
        (root, unresolved),
        (third, unresolved),
        (third, Decision(ParentResolutionStatus.ROOT)),
        (third, right[second.call_id]),
        (third, dataclasses.replace(right[third.call_id], parent_digest="0" * 64)),
        (third, dataclasses.replace(right[third.call_id], parent_tokens=1)),
        (third, dataclasses.replace(right[third.call_id], extends=False)),
        (third, dataclasses.replace(right[third.call_id], parent="nobody")),
    ]
    assert [index for index, (call, decision) in enumerate(wrong) if judge.judge(call, decision) is None] == []

    conflicted = case_of(Twist.CONFLICT).rollout
    bad = next(call for call in conflicted.calls if call.twist is Twist.CONFLICT)
    child = next(call for call in conflicted.calls if call.parent == bad.call_id)
    resolved = dataclasses.replace(right[third.call_id], parent=bad.call_id)
    assert "no candidate" in (LineageJudge(conflicted, rebuild(conflicted)).judge(child, resolved) or "")


def test_a_percentile_is_a_sample() -> None:
    """Percentiles are by nearest rank, and of nothing they are nothing."""
    assert [percentile([3, 1, 2, 4], p) for p in (50, 95, 100)] == [2, 4, 4]
    assert percentile([], 50) == 0.0


def test_whoever_is_alone_is_alone() -> None:
    """Nobody passes the gate while one is alone, and all pass afterwards."""

    async def play() -> list[str]:
        gate, seen = Gate(), list[str]()

        async def together(name: str) -> None:
            async with gate.together():
                seen.append(f"{name} in")
                await asyncio.sleep(0)
                seen.append(f"{name} out")

        async def alone() -> None:
            async with gate.alone():
                seen.append("alone in")
                for _ in range(20):
                    await asyncio.sleep(0)
                seen.append("alone out")

        await asyncio.gather(together("a"), together("b"), alone(), together("c"), together("d"))
        return seen

    seen = asyncio.run(play())
    place = seen.index("alone in")
    assert seen[place + 1] == "alone out"
    assert len(seen) == 10
    assert {"a out", "b out"} <= set(seen[:place])


# -- processes ------------------------------------------------------------------------------------------------


def test_a_worker_that_dies_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of a worker that was killed fails at once, naming the signal, and no worker is left."""
    monkeypatch.chdir(ROOT)
    settings = {"url": "s3://nowhere", "run": "r", "endpoint_url": "http://127.0.0.1:9", "spill_dir": str(tmp_path)}
    call = built_in().rollouts[0].calls[0]

    async def play() -> tuple[str, list[int]]:
        crew = Crew(2, settings)
        try:
            await crew.start()
            pids = crew.pids()
            # Blocked from its first moment on: Ctrl-C is the conductor's, also while a worker is importing.
            assert all(blocks_sigint(pid) for pid in pids)
            request = rebuild(built_in().rollouts[0])[call.call_id]
            reply = await crew.ask(1, Job("7-3", call, request, (Act.RESOLVE,)))
            assert reply.failure is None
            asked = asyncio.ensure_future(crew.ask(0, Job("7-3", call, request, (Act.BEGIN,))))
            await asyncio.sleep(0)
            os.kill(pids[0], signal.SIGKILL)
            with pytest.raises(WorkerError) as caught:
                await asked
            return str(caught.value), pids
        finally:
            crew.stop()

    said, pids = asyncio.run(play())
    assert "killed by SIGKILL" in said
    assert not [pid for pid in pids if alive(pid)]


def blocks_sigint(pid: int) -> bool:
    """Whether SIGINT is blocked in a process (Linux)."""
    (mask,) = re.findall(r"^SigBlk:\s*([0-9a-f]+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(mask, 16) & 1 << (signal.SIGINT - 1))


def alive(pid: int) -> bool:
    """Whether a process runs; one that waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def descendants(pid: int) -> list[int]:
    """The processes below ``pid`` (Linux)."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, path.read_text().split()):
                found += [child, *descendants(child)]
    return found


# -- end to end -----------------------------------------------------------------------------------------------


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """The temporary directory of a demo; it must be empty again at the end."""
    path = tmp_path / "tmp"
    path.mkdir()
    yield path
    assert list(path.iterdir()) == []


def play(scratch: Path, *arguments: str) -> tuple[int, dict[str, Any], str]:
    """Run ``s3capture demo --json`` as a person would; return status, object and stderr."""
    env = {**os.environ, "TMPDIR": str(scratch)}
    done = subprocess.run(
        [*COMMAND, "--json", *arguments],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=BOUND_S,
        check=False,
    )
    return done.returncode, json.loads(done.stdout) if done.stdout else {}, done.stderr


def keys_in(server: EmbeddedServer, bucket: str) -> list[str]:
    """Every key of a bucket."""
    with contextlib.closing(connect(server.endpoint_url, server.access_key, server.secret_key)) as client:
        pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
        return [row["Key"] for page in pages for row in page.get("Contents", ())]


def test_the_demo_gives_what_its_workload_must_give(scratch: Path) -> None:
    """On a server of its own, every trouble comes out as it must, all entries are verified, and nothing is left."""
    status, found, said = play(scratch, "--rollouts", "8", "--workers", "2")
    script = built_in(rollouts=8)
    calls = [call for rollout in script.rollouts for call in rollout.calls]
    kept = [call for call in calls if call.twist in KEEPS_ENTRY]
    masked = [rollout for rollout in script.rollouts if rollout.masked]
    conflict = next(call.call_id for call in calls if call.twist is Twist.CONFLICT)
    orphans = [call for call in calls if call.parent == conflict]
    assert (status, found["differences"]) == (0, []), said
    assert found["verified_entries"] == len(kept)
    assert found["calls"] == {"planned": len(calls), "put": len(kept) + 1}
    assert found["rollouts"] == {"played": 8, "complete": 5, "incomplete": 3, "dropped": 5, "retained": 3}
    assert {(row["rollout"], why["reason"], why["call"]) for row in found["incomplete"] for why in row["reasons"]} == {
        (rollout.rollout_id, str(why.reason), why.call) for rollout in masked for why in expected_reasons(rollout)
    }
    assert found["lineage"]["root"] == 8
    assert found["lineage"]["unresolved"] == len(orphans)
    assert found["lineage"]["resolved"] == len(calls) - 8 - len(orphans)
    assert found["lineage"]["crossed_processes"] > 0
    assert found["lineage"]["deltas"] > 10
    troubles = found["troubles"]
    assert troubles.pop("outage_seconds") > 0
    once = ("retries", "conflicts", "refusals", "deaths", "spilled", "drained")
    assert troubles == {**dict.fromkeys(once, 1), "late_writes": 2}
    assert found["operations"]["drop"]["count"] == 5
    assert found["operations"]["put"]["failures"] == {
        "ConflictingPayloadError": 1,
        "StoreUnavailableError": 1,
        "TokenCaptureFrozenError": 1,
    }
    assert "S3 goes away" in said


def recording(folder: Path) -> Path:
    """The recorded rollouts where there are any, else a recording made from the workload."""
    given = os.environ.get("S3CAPTURE_RECORDING")
    for path in (Path(given) if given else None, ROOT.parent / "shared" / "data" / "rollouts.jsonl.gz"):
        if path is not None and path.is_file():
            return path
    made = folder / "made.jsonl"
    write_recording(built_in(rollouts=8), made)
    return made


def test_a_recording_is_played_on_a_bucket(
    scratch: Path, tmp_path: Path, seaweed: EmbeddedServer, bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every rollout of a recording ends complete, verified and dropped, and its run is not played twice."""
    path = recording(tmp_path)
    script = read_recording(path)
    where = ["--url", f"s3://{bucket}/some/prefix", "--endpoint-url", seaweed.endpoint_url, "--run", "once"]
    status, found, said = play(scratch, str(path), *where)
    many = len(script.rollouts)
    assert (status, found["differences"]) == (0, []), said
    assert found["verified_entries"] == script.calls
    assert found["rollouts"] == {"played": many, "complete": many, "incomplete": 0, "dropped": many, "retained": 0}
    left = keys_in(seaweed, bucket)
    assert len(left) == found["bytes"]["objects_left"] > 0
    assert all("/fence/" in key for key in left)

    assert main(["demo", str(path), *where]) == 2
    assert "run 'once' in s3://" in capsys.readouterr().err


def short_recording(folder: Path) -> Path:
    """A recording of one rollout."""
    made = folder / "short.jsonl"
    plain = case_of(Twist.NONE).rollout
    write_recording(Script("short", [plain]), made)
    return made


def test_a_record_that_comes_back_changed_fails_the_demo(scratch: Path, tmp_path: Path) -> None:
    """A well-formed object with one other log probability is a difference, exit status 1, and is not dropped."""
    path = short_recording(tmp_path)
    victim = read_recording(path).rollouts[0].calls[-1].call_id

    def tamper(exchange: Exchange) -> None:
        answer = exchange.apply()
        stored = codec.decode("key", answer.body)
        record = stored.value()
        record["generation_log_probs"][0] -= 1e-9
        fields = {name: value for name, value in stored.header.items() if name not in ("s3capture", "kind", "sha256")}
        body = codec.encode(stored.kind, fields, codec.canonical(record))
        exchange.send(Response(answer.status, body, answer.headers))

    with FakeS3() as s3:
        s3.script(on("GetObject", f"*/call/{victim}"), tamper, times=None)
        status, found, said = play(
            scratch, str(path), "--workers", "1", "--url", f"s3://{s3.bucket}/p", "--endpoint-url", s3.endpoint_url
        )
        kept = [key for key in s3.objects if key.endswith(f"/call/{victim}")]
    assert status == 1
    assert not found["ok"]
    assert any(victim in row["what"] and "generation_log_probs" in row["what"] for row in found["differences"])
    assert found["rollouts"]["dropped"] == 0
    assert len(kept) == 1
    assert "things differ" in said


def test_the_records_can_be_kept(scratch: Path, tmp_path: Path) -> None:
    """With --keep everything is verified and nothing is dropped."""
    path = short_recording(tmp_path)
    calls = read_recording(path).calls
    with FakeS3() as s3:
        status, found, said = play(
            scratch,
            str(path),
            "--workers",
            "2",
            "--keep",
            "--url",
            f"s3://{s3.bucket}",
            "--endpoint-url",
            s3.endpoint_url,
        )
        kept = [key for key in s3.objects if "/call/" in key and "/attempts/" in key]
    assert (status, found["verified_entries"]) == (0, calls), said
    assert found["retained"] == [{"rollout": read_recording(path).rollouts[0].rollout_id, "why": "kept as asked"}]
    assert len(kept) == calls


def test_ctrl_c_ends_everything(scratch: Path) -> None:
    """Ctrl-C at a terminal ends workers and server, leaves no files, prints no traceback, and exits with 130."""
    env = {**os.environ, "TMPDIR": str(scratch)}
    demo = subprocess.Popen(
        COMMAND, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    assert demo.stderr is not None
    said, deadline = "", time.monotonic() + BOUND_S
    while "embedded server that is removed" not in said:
        assert time.monotonic() < deadline
        said += demo.stderr.readline()
    while len(below := descendants(demo.pid)) < 5 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.killpg(demo.pid, signal.SIGINT)
    out, rest = demo.communicate(timeout=BOUND_S)
    assert demo.returncode == 130
    assert out == ""
    assert "Traceback" not in said + rest
    assert rest.splitlines()[-1].startswith("s3capture: stopped by SIGINT")
    while any(map(alive, below)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not [pid for pid in below if alive(pid)]


# -- what cannot be played ------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The last line that a demo says which cannot be played."""
    assert main(["demo", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert "Traceback" not in said.err
    last = said.err.strip().splitlines()[-1]
    assert last.startswith("s3capture: ")
    return last


def test_an_unreachable_endpoint_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """Nobody listens: one line that names the endpoint."""
    said = refused(capsys, "--url", "s3://bucket", "--endpoint-url", "http://127.0.0.1:9")
    assert "http://127.0.0.1:9" in said
    assert "check that the endpoint is right and running" in said


def test_wrong_credentials_are_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, seaweed: EmbeddedServer, bucket: str
) -> None:
    """A wrong secret: one line, which does not hold it."""
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "not-the-secret")
    said = refused(capsys, "--url", f"s3://{bucket}", "--endpoint-url", seaweed.endpoint_url)
    assert "the access key, secret or token is not the store's" in said
    assert "not-the-secret" not in said


def test_a_missing_bucket_is_told(capsys: pytest.CaptureFixture[str], seaweed: EmbeddedServer) -> None:
    """No such bucket: one line that says what to do."""
    said = refused(capsys, "--url", "s3://no-such-bucket", "--endpoint-url", seaweed.endpoint_url)
    assert "make the bucket" in said


def test_a_store_without_conditional_writes_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A store that overwrites in spite of If-None-Match is refused before anything is played."""
    with FakeS3(ignores_conditions=True) as s3:
        said = refused(capsys, "--url", f"s3://{s3.bucket}", "--endpoint-url", s3.endpoint_url)
    assert "does not honour create-if-absent" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--url", "http://bucket"], "is not of the form s3://"),
        (["--run", "a/b"], "invalid run"),
        (["--endpoint-url", "http://127.0.0.1:9"], "--endpoint-url needs --url"),
        (["--region", "eu-west-1"], "--region needs --url"),
        (["some.jsonl", "--rollouts", "9"], "--rollouts cuts the built-in workload"),
        (["no-such-file.jsonl"], "cannot read recording no-such-file.jsonl"),
    ],
)
def test_bad_options_are_told(capsys: pytest.CaptureFixture[str], arguments: list[str], said: str) -> None:
    """What cannot be right is refused before anything is started."""
    assert said in refused(capsys, *arguments)


def test_the_faults_of_a_recording_are_listed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Each bad line has a line of its own on stderr, with file and number."""
    path = tmp_path / "bad.jsonl"
    path.write_text("{\n[]\n")
    assert main(["demo", str(path)]) == 2
    head, *faults = capsys.readouterr().err.strip().splitlines()
    assert head.startswith(f"s3capture: recording {path} has 2 faults")
    assert [fault.split(": ")[0] for fault in faults] == [f"{path}:1", f"{path}:2"]


def one_rollout(**given: Any) -> Outcome:
    """What came of a play of one rollout of one call, whose put was refused once."""
    rollout = RolloutOutcome("7-3", 1, 1, 0, 0, 1, True, (), Fate.DROPPED, "complete and verified")
    settings = {"url": "s3://b", "run": "r", "embedded": False, "workers": 1, "kept": False, "skipped": ()}
    return Outcome(title="one", calls=1, puts=1, rollouts=[rollout], seconds=2.0, **settings, **given)


def said_of(outcome: Outcome, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, width: int) -> str:
    """What a terminal of ``width`` columns shows of ``outcome``."""
    monkeypatch.setenv("COLUMNS", str(width))
    print_outcome(outcome)
    return capsys.readouterr().out


def test_only_what_was_done_is_claimed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without delta records no prompt is said to be rebuilt; with one, one is; and one of a thing is singular."""
    said = said_of(one_rollout(), capsys, monkeypatch, 80)
    assert "1 entry read back equal, bit for bit, in 2.0 s" in said
    assert not re.search(r" 1  ?(rollouts|requests)", said)
    outcome = one_rollout()
    outcome.rollouts[0] = dataclasses.replace(outcome.rollouts[0], deltas=1)
    assert "bit for bit, with 1 prompt rebuilt from a delta, in" in said_of(outcome, capsys, monkeypatch, 120)


def test_a_number_stays_with_its_unit(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """However narrow the terminal, no line begins with the unit of the number above it."""
    for width in range(40, 60):
        assert not re.search(r"^ *s$", said_of(one_rollout(), capsys, monkeypatch, width), re.MULTILINE)


def test_costs_that_puzzle_are_explained(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures are named and called staged only if all is well; a resolve not counted and a request of 0 are told."""
    operations = {
        "put": OpStats(2, {"ConflictingPayloadError": 1}, 2, 4, 0, (0.1, 0.2)),
        "mark_incomplete": OpStats(1, {}, 0, 0, 0, (1.0,)),
        "resolve": OpStats(1, {}, 1, 1, 0, (0.1,)),
    }
    outcome = one_rollout(operations=operations)
    outcome.lineage.by_status[ParentResolutionStatus.ROOT] = 2
    said = said_of(outcome, capsys, monkeypatch, 120)
    assert "failed, as staged: put 1 ConflictingPayloadError" in said
    assert "resolve: a root that holds nothing a model wrote asks nothing" in said
    assert "requests 0: it got no further than the check of the store" in said
    outcome.differences.append(Difference("7-3", "something"))
    assert "failed: put 1 ConflictingPayloadError" in said_of(outcome, capsys, monkeypatch, 120)


def test_a_reply_fits_into_a_pipe() -> None:
    """The largest reply of a worker is far below the 64 KiB that a pipe holds, so sending it never blocks."""
    from s3capture.demo.worker import Failure, Reply  # noqa: PLC0415

    stats = {op: OpStats(3, {"StoreUnavailableError": 3}, 9, 9, 9, (0.1,) * 3) for op in map(str, range(6))}
    decision = Decision(ParentResolutionStatus.RESOLVED, "p" * 1000, "r" * 100, "d" * 64, 1, True)
    reply = Reply(Failure(Act.PUT, "E" * 60, "m" * 600), decision, "d" * 64, 1, 1, stats, ("l" * 420,) * 8)
    assert len(pickle.dumps(reply)) < 16 * 1024
