"""The command line as a person or a script meets it: a process with two streams and an exit status."""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
from fakes3 import Exchange, FakeS3, on
from inspected import LONG, RUN, WEIRD, fill

from s3capture import S3TokenSink, errors
from s3capture.cli import common, main
from s3capture.cli.common import printable
from s3capture.codec import canonical
from s3capture.demo.recording import RecordingError
from s3capture.doctor import Check, Verdict
from s3capture.gym import GymNotFoundError
from s3capture.local import EmbeddedServer, LocalServerError
from s3capture.preflight import RunInUseError
from s3capture.seaweed import connect
from s3capture.spill import Spill, SpilledMark

ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-c", "import sys; from s3capture.cli import main; sys.exit(main())"]


@dataclass(frozen=True)
class Ran:
    """One command that ended."""

    status: int
    out: str
    err: str

    @property
    def rows(self) -> list[Any]:
        """The lines of stdout as JSON."""
        return [json.loads(line) for line in self.out.splitlines()]


def run(*arguments: str, **environment: str) -> Ran:
    """Run the command line in a process of its own, 80 columns wide."""
    env = {**os.environ, "COLUMNS": "80", **environment}
    done = subprocess.run([*COMMAND, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    return Ran(done.returncode, done.stdout, done.stderr)


class Screen(io.StringIO):
    """What stands for stdout in this process; a terminal only where a test says so."""


def here(*arguments: str, **environment: str) -> Ran:
    """Run the command line in this process, which saves its imports, where no test rests on the process."""
    out, err = Screen(), io.StringIO()
    with mock.patch.dict(os.environ, {"COLUMNS": "80", **environment}), redirect_stdout(out), redirect_stderr(err):
        status = main(arguments)
    return Ran(status, out.getvalue(), err.getvalue())


def one_line(ran: Ran, *words: str) -> None:
    """Expect exactly one line of error, with ``words`` in it, and exit status 2."""
    assert ran.status == 2, ran
    assert ran.err.startswith("s3capture: ")
    assert ran.err.count("\n") == 1
    assert "Traceback" not in ran.err
    for word in words:
        assert word in ran.err


@dataclass(frozen=True)
class Filled:
    """A bucket on SeaweedFS with the run of ``inspected``."""

    url: str
    endpoint_url: str

    def run(self, *arguments: str, **environment: str) -> Ran:
        """Run a command in a process of its own, with the server in the environment."""
        return run(*arguments, S3CAPTURE_ENDPOINT_URL=self.endpoint_url, **environment)

    def here(self, *arguments: str) -> Ran:
        """Run a command in this process, with the server in the environment."""
        return here(*arguments, S3CAPTURE_ENDPOINT_URL=self.endpoint_url)


@pytest.fixture(scope="module")
def filled(seaweed: EmbeddedServer) -> Iterator[Filled]:
    """The run, once for all tests of this module, which only read it."""
    bucket = f"test-{uuid.uuid4().hex[:20]}"
    seaweed.make_bucket(bucket)
    place = Filled(f"s3://{bucket}/exp", seaweed.endpoint_url)
    asyncio.run(fill(url=place.url, endpoint_url=place.endpoint_url))
    yield place
    client = connect(seaweed.endpoint_url, seaweed.access_key, seaweed.secret_key)
    client.delete_bucket(Bucket=bucket)
    client.close()


def mark(place: Filled, run_: str = RUN, **fields: Any) -> SpilledMark:
    bucket, _, prefix = place.url.removeprefix("s3://").partition("/")
    return SpilledMark(
        **{
            "bucket": bucket,
            "prefix": prefix,
            "endpoint_url": place.endpoint_url,
            "run": run_,
            "rollout": "r",
            "call": "c",
            "mark_id": uuid.uuid4().hex,
            "at": 1_700_000_000.0,
            "reason": "the store was away",
            "by": "host:1",
            **fields,
        }
    )


# -- ls ---------------------------------------------------------------------------------------------------------


def test_ls_lists_runs(filled: Filled) -> None:
    """Without a run there is one line for each run, ending in its name."""
    ran = filled.run("ls", filled.url)
    assert (ran.status, ran.err) == (0, "")
    header, row = ran.out.splitlines()
    assert header.split() == ["ROLLOUTS", "CALLS", "SIZE", "CHANGED", "(UTC)", "RUN"]
    assert row.split()[0] == "7"
    assert row.endswith(RUN)


def test_ls_lists_rollouts_and_goes_on_past_damage(filled: Filled) -> None:
    """With a run there is one line for each rollout; damage and foreign keys are on stderr, and the status is 1."""
    ran = filled.run("ls", filled.url, "--run", RUN)
    assert ran.status == 1
    states = {line.split("  ")[-2 if "(" in line else -1].strip(): line.split()[0] for line in ran.out.splitlines()[1:]}
    assert states == {
        "busy": "frozen",
        "late": "frozen",
        "dropped": "retired",
        "retired": "retired",
        "open": "open",
        "damaged": "open",
        "freezing": "freezing",
    }
    assert "(incomplete: 1 sealed call, 1 conflict, 2 marks; 1 refusal)" in ran.out
    assert sorted(line.split()[1] for line in ran.err.splitlines()) == ["damaged:", "foreign", "foreign"]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--state", "retired"], {"dropped", "retired"}),
        (["--incomplete"], {"busy", "open"}),
        (["--state", "frozen", "--incomplete"], {"busy"}),
    ],
)
def test_ls_selects(filled: Filled, options: list[str], expected: set[str]) -> None:
    """--state and --incomplete select rollouts, and together both must hold."""
    assert {row["rollout"] for row in filled.here("ls", filled.url, "--run", RUN, "--json", *options).rows} == expected


def test_ls_of_nothing_says_so(filled: Filled) -> None:
    """A url without runs is no error, a run that was named and does not exist is one; stderr says what is there."""
    ran = filled.here("ls", filled.url, "--run", "run-99")
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith("s3capture: there is no run 'run-99'")
    assert ran.err.count("\n") == 1
    ran = filled.here("ls", filled.url.removesuffix("/exp"))
    assert (ran.status, ran.out) == (0, "")
    assert "folders there: exp" in ran.err


def test_ls_lists_rollouts_by_id(moto_server: str, moto_bucket: str) -> None:
    """A person gets the rollouts sorted by id, numbers by value; in one line each where a program reads."""
    url = f"s3://{moto_bucket}/p"
    asyncio.run(mark_all(url, moto_server, ["7-10", "7-2", "12-1", "7-2-a1", "b"]))
    ran = here("ls", url, "--run", RUN, "--endpoint-url", moto_server)
    assert ran.status == 0
    assert [line.split()[-4] for line in ran.out.splitlines()[1:]] == ["7-2", "7-2-a1", "7-10", "12-1", "b"]
    assert all(line.endswith("  (incomplete: 1 mark)") for line in ran.out.splitlines()[1:])


def test_ls_of_very_many_rollouts_holds_none_back(
    moto_server: str, moto_bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More rollouts than are sorted are all listed, once each, and stderr says in what order."""
    monkeypatch.setattr(sys.modules["s3capture.cli.ls"], "_SORTED", 2)
    url, rollouts = f"s3://{moto_bucket}/p", ["a", "b", "c", "d"]
    asyncio.run(mark_all(url, moto_server, rollouts))
    ran = here("ls", url, "--run", RUN, "--endpoint-url", moto_server)
    assert sorted(line.split()[-4] for line in ran.out.splitlines()[1:]) == rollouts
    assert "more than 2 rollouts" in ran.err


def test_ls_on_a_terminal_keeps_to_its_width(filled: Filled, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, notes that do not fit beside the name stand below it."""
    monkeypatch.setattr(Screen, "isatty", lambda _: True)
    ran = filled.here("ls", filled.url, "--run", RUN, "--state", "frozen")
    assert max(map(len, ran.out.splitlines())) <= 80
    assert "          (incomplete: 1 sealed call, 1 conflict, 2 marks; 1 refusal)" in ran.out.splitlines()


async def mark_all(url: str, endpoint_url: str, rollouts: list[str]) -> None:
    """Mark each of ``rollouts`` incomplete."""
    sink = S3TokenSink(url=url, run=RUN, endpoint_url=endpoint_url)
    for rollout in rollouts:
        await sink.mark_incomplete(rollout)
    await sink.close()


# -- show -------------------------------------------------------------------------------------------------------


def test_show_fits_80_columns_and_cuts_no_id(filled: Filled) -> None:
    """Every id and digest of a rollout is on the screen in whole pieces, no line is wider than 80 columns."""
    ran = filled.here("show", filled.url, "busy", "--run", RUN)
    assert (ran.status, ran.err) == (0, "")
    assert max(map(len, ran.out.splitlines())) <= 80
    shown = "".join(ran.out.split())
    [detail] = filled.here("show", filled.url, "busy", "--run", RUN, "--json").rows
    first = next(call for call in detail["calls"] if call["call"] == "c1")
    for digest in (first["digest"], first["conflicts"][0]["digest"]):
        assert digest[:32] in shown
        assert digest[32:] in shown
    assert detail["snapshot_id"] in shown
    assert "frozen,version8" in shown
    assert "snapshotof4outcomes,1conflict,1mark" in shown


def test_show_freezes_nothing(filled: Filled) -> None:
    """Showing an open rollout leaves it open."""
    assert filled.here("show", filled.url, "open", "--run", RUN).status == 0
    [row] = filled.here("ls", filled.url, "--run", RUN, "--json", "--state", "open", "--incomplete").rows
    assert row["rollout"] == "open"


def test_show_names_its_times_and_digests(filled: Filled) -> None:
    """A record's own time, that of its begin and its digest each stand under their word."""
    lines = filled.here("show", filled.url, "busy", "--run", RUN).out.splitlines()
    created = next(number for number, line in enumerate(lines) if line.endswith("2023-11-14 22:13:20"))
    assert lines[created - 1].endswith("created")
    digest = next(number for number, line in enumerate(lines) if re.match(r" +[0-9a-f]{32} ", line))
    assert lines[digest - 1].split()[0] == "sha256"
    assert any(line.endswith("sealed") for line in lines)


def test_show_says_who_decided_a_drop(filled: Filled) -> None:
    """A drop decision, which names nobody, says so."""
    shown = " ".join(filled.here("show", filled.url, "dropped", "--run", RUN).out.split())
    assert "drop-2" in shown
    assert "decided by whoever finished it" in shown


def test_show_calls_late_what_was_refused(filled: Filled) -> None:
    """A begin behind the freeze is shown as late and refused, in words and in the JSON, not as an open call."""
    ran = filled.here("show", filled.url, "late", "--run", RUN)
    assert "late, refused: 1 outcome, 1 begin" in ran.out
    assert not re.search(r"\bopen\b", ran.out)
    [detail] = filled.here("show", filled.url, "late", "--run", RUN, "--json").rows
    assert {call["call"]: call["kind"] for call in detail["calls"]} == {LONG: "entry", "c8": "late", "c9": "entry"}


def test_show_lets_no_control_character_through(filled: Filled) -> None:
    """A call id with escapes and markup is shown escaped, and comes back whole in the JSON."""
    ran = filled.here("show", filled.url, "open", "--run", RUN)
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", ran.out)
    # Shown escaped: typer and rich drop some of them on their own, and an id that lost characters is another id.
    assert r"bell \x07 and escape \x1b[31m" in ran.out
    assert "[bold]" in ran.out
    [detail] = filled.here("show", filled.url, "open", "--run", RUN, "--json").rows
    assert WEIRD in {call["call"] for call in detail["calls"]}


def test_show_wraps_long_ids(filled: Filled) -> None:
    """An id of 300 characters is whole in the JSON and wrapped on the screen."""
    assert filled.here("show", filled.url, "late", "--run", RUN).out.count("x") >= len(LONG)
    [detail] = filled.here("show", filled.url, "late", "--run", RUN, "--json").rows
    assert LONG in {call["call"] for call in detail["calls"]}


def test_show_reports_damage_and_shows_the_rest(filled: Filled) -> None:
    """A damaged rollout is shown, its damage and breaches named, and the status is 1."""
    ran = filled.run("show", filled.url, "damaged", "--run", RUN)
    assert ran.status == 1
    assert "DAMAGED" in ran.out
    assert "BREACH    foreign key" in ran.out
    assert "entry" in ran.out


def test_show_of_nothing_is_status_1(filled: Filled) -> None:
    """A rollout of which nothing is stored gets one line that says how to find those that exist."""
    ran = filled.here("show", filled.url, "nobody", "--run", RUN)
    assert (ran.status, ran.out) == (1, "")
    assert "nothing is stored" in ran.err
    assert ran.err.count("\n") == 1


# -- doctor -----------------------------------------------------------------------------------------------------


def test_doctor_passes_a_good_store(filled: Filled, tmp_path: Path) -> None:
    """On SeaweedFS every check passes, one line or paragraph each within 80 columns, and the status is 0."""
    ran = filled.run("doctor", filled.url, "--rounds", "2", "--writers", "3", "--spill-dir", str(tmp_path / "s"))
    assert ran.status == 0, ran
    assert "failed" not in ran.out
    assert re.search(r"^ok +create-race ", ran.out, re.MULTILINE)
    assert max(map(len, ran.out.splitlines())) <= 80
    assert "can hold captures" in ran.err


def test_doctor_gives_a_long_error_the_width(monkeypatch: pytest.MonkeyPatch) -> None:
    """The words of a failed check are wrapped over the whole terminal, not squeezed into a narrow column."""
    saw = "the store said no for a reason that it explains at length and in great detail " * 4
    monkeypatch.setattr("s3capture.doctor.examine", lambda *_, **__: [Check("bucket", Verdict.FAILED, saw, "ask it")])
    lines = here("doctor", "s3://bucket/p").out.splitlines()
    assert len(lines) <= 7
    assert max(map(len, lines)) <= 80


def test_doctor_fails_a_bad_store() -> None:
    """On a store that ignores conditions the failed check is printed with its remedy, and the status is 1."""
    with FakeS3(ignores_conditions=True) as s3:
        ran = run("doctor", f"s3://{s3.bucket}/p", "--endpoint-url", s3.endpoint_url)
    assert ran.status == 1
    assert re.search(r"^failed +create-once ", ran.out, re.MULTILINE)
    assert "-> use a store that supports conditional writes" in ran.out
    assert "do not capture on this store" in ran.err


def test_doctor_says_when_it_cannot_look() -> None:
    """A bucket that is not there is a failed check, one line on stderr, and status 2."""
    with FakeS3() as s3:
        ran = run("doctor", "s3://absent/p", "--endpoint-url", s3.endpoint_url)
    one_line(ran, "could not be examined")
    assert "NoSuchBucket" in ran.out


# -- spill ------------------------------------------------------------------------------------------------------


def test_spilled_marks_are_listed_and_drained(filled: Filled, tmp_path: Path) -> None:
    """Waiting marks are listed, published by a drain, and gone from the list; the rollout then shows them."""
    spill = Spill(tmp_path / "spill")
    spill.write(mark(filled, "run-8", rollout="spilled"))
    where = ("--spill-dir", str(spill.directory))
    listed = run("spill", "list", *where)
    assert listed.status == 0
    assert "run-8 / spilled, call c" in listed.out
    assert "the store was away" in listed.out
    drained = filled.run("spill", "drain", filled.url, "--run", "run-8", *where)
    assert (drained.status, drained.out, drained.err) == (
        0,
        "published 1, late 0, waiting 0, damaged 0, elsewhere 0\n",
        "",
    )
    assert here("spill", "list", *where).out == ""
    [row] = filled.here("ls", filled.url, "--run", "run-8", "--json").rows
    assert (row["rollout"], row["marks"]) == ("spilled", 1)


def test_a_mark_that_comes_too_late_is_status_1(filled: Filled, tmp_path: Path) -> None:
    """A mark whose rollout was retired first is set aside, said aloud, and listed as late with the reason."""
    spill = Spill(tmp_path / "spill")
    spill.write(mark(filled, rollout="retired"))
    where = ("--spill-dir", str(spill.directory))
    drained = filled.here("spill", "drain", filled.url, "--run", RUN, *where)
    assert drained.status == 1
    assert drained.out == "published 0, late 1, waiting 0, damaged 0, elsewhere 0\n"
    assert "may have been trained on with a hole" in drained.err
    assert drained.err.count("\n") == 1
    [row] = here("spill", "list", *where, "--json").rows
    assert (row["state"], row["rollout"]) == ("late", "retired")
    assert "retired" in row["why"]


def test_a_drain_tells_of_marks_under_another_address(filled: Filled, tmp_path: Path) -> None:
    """Marks of the run that were spilled under another address are counted, stay, and make the status 1."""
    spill = Spill(tmp_path / "spill")
    spill.write(mark(filled, endpoint_url=None))
    spill.write(mark(filled, "another", endpoint_url=None))
    arguments = ("spill", "drain", filled.url, "--run", RUN, "--spill-dir", str(spill.directory))
    ran = filled.here(*arguments)
    assert (ran.status, ran.out) == (1, "published 0, late 0, waiting 0, damaged 0, elsewhere 1\n")
    assert "1 mark of this run waits that was spilled with no --endpoint-url" in ran.err
    assert "--any-endpoint" in ran.err
    [row] = filled.here(*arguments, "--json").rows
    assert [found["state"] for found in row["elsewhere"]] == ["elsewhere"]
    assert len(spill.pending().marks) == 2


def test_a_drain_takes_marks_of_any_address_when_told(filled: Filled, tmp_path: Path) -> None:
    """With --any-endpoint every mark of the run is published here, and those of other runs stay."""
    spill = Spill(tmp_path / "spill")
    spill.write(mark(filled, "run-9", rollout="here"))
    spill.write(mark(filled, "run-9", rollout="none", endpoint_url=None))
    spill.write(mark(filled, "run-9", rollout="old", endpoint_url="http://old.example"))
    spill.write(mark(filled, "run-10", endpoint_url=None))
    where = ("--run", "run-9", "--spill-dir", str(spill.directory))
    ran = filled.here("spill", "drain", filled.url, *where, "--any-endpoint")
    assert (ran.status, ran.err) == (0, "")
    assert ran.out == "published 3, late 0, waiting 0, damaged 0, elsewhere 0\n"
    assert {row["rollout"] for row in filled.here("ls", filled.url, "--run", "run-9", "--json").rows} == {
        *("here", "none", "old")
    }
    assert [left.run for left in spill.pending().marks] == ["run-10"]


def test_a_drain_reports_a_damaged_file(filled: Filled, tmp_path: Path) -> None:
    """A file of the run that does not read back makes the status 1 and is named; one of another run does not."""
    spill = Spill(tmp_path / "spill")
    spill.write(mark(filled)).write_bytes(b"{")
    spill.write(mark(filled, "another")).write_bytes(b"{")
    ran = filled.here("spill", "drain", filled.url, "--run", RUN, "--spill-dir", str(spill.directory))
    assert (ran.status, ran.out) == (1, "published 0, late 0, waiting 0, damaged 1, elsewhere 0\n")
    assert "damaged: " in ran.err


def test_marks_are_found_by_an_address_of_the_environment(filled: Filled, tmp_path: Path) -> None:
    """Where boto3's AWS_ENDPOINT_URL gives the address, a drain takes the marks that were spilled under it."""
    spill = Spill(tmp_path / "spill")
    spill.write(mark(filled, "run-11"))
    where = ("--run", "run-11", "--spill-dir", str(spill.directory))
    ran = here("spill", "drain", filled.url, *where, AWS_ENDPOINT_URL=filled.endpoint_url)
    assert (ran.status, ran.out) == (0, "published 1, late 0, waiting 0, damaged 0, elsewhere 0\n")


def test_a_spill_directory_that_was_named_must_be_there(filled: Filled, tmp_path: Path) -> None:
    """A slip in --spill-dir is an error and no empty spill; the default one need not exist."""
    missing = str(tmp_path / "none")
    one_line(here("spill", "list", "--spill-dir", missing), f"{missing!r} does not exist")
    one_line(filled.here("spill", "drain", filled.url, "--run", RUN, "--spill-dir", missing), "does not exist")
    ran = here("spill", "list", XDG_STATE_HOME=missing)
    assert ran.status == 0
    assert "which does not exist" in ran.err


def test_a_long_reason_is_cut_in_the_list(filled: Filled, tmp_path: Path) -> None:
    """The reason of a mark takes one short line for a person, and is whole in the JSON."""
    spill, reason = Spill(tmp_path / "spill"), "the store said " + "no " * 200
    spill.write(mark(filled, reason=reason))
    where = ("--spill-dir", str(spill.directory))
    assert max(map(len, here("spill", "list", *where).out.splitlines())) <= 130
    [row] = here("spill", "list", *where, "--json").rows
    assert row["reason"] == reason


def test_a_damaged_spill_file_is_status_1(filled: Filled, tmp_path: Path) -> None:
    """A file that does not read back is listed as damaged with its path; the whole marks are still listed."""
    spill = Spill(tmp_path / "spill")
    damaged = spill.write(mark(filled))
    damaged.write_bytes(b"{")
    spill.write(mark(filled))
    ran = here("spill", "list", "--spill-dir", str(spill.directory), "--json")
    assert ran.status == 1
    assert sorted(row["state"] for row in ran.rows) == ["damaged", "waiting"]


# -- errors -----------------------------------------------------------------------------------------------------


def test_bad_settings_are_one_line() -> None:
    """A bad url, id or combination of options is refused before anything is asked, in one line."""
    one_line(here("ls", "http://bucket/p"), "not of the form s3://bucket/prefix")
    one_line(here("ls", "s3://bucket/p", "--run", "a/b"), "invalid run 'a/b'")
    one_line(here("show", "s3://bucket/p", "a/b", "--run", "r"), "invalid rollout id 'a/b'")
    one_line(here("show", "s3://bucket/p", "", "--run", "r"), "empty rollout id")
    one_line(here("ls", "s3://bucket/p", "--state", "open"), "--run")
    one_line(here("explore", "--scenario", "no such"), "no scenario 'no such'", "'begun put meets freeze'")


def test_an_unreachable_endpoint_is_one_line() -> None:
    """Where nothing listens, the line names the address and what to check."""
    with FakeS3() as s3:
        address = s3.endpoint_url
    one_line(run("ls", "s3://bucket/p", "--endpoint-url", address), address, "check that the endpoint is right")


def test_wrong_credentials_are_one_line(filled: Filled) -> None:
    """A wrong secret is named as such, and does not appear in the line."""
    ran = filled.run("show", filled.url, "busy", "--run", RUN, AWS_SECRET_ACCESS_KEY="wrong-secret")
    one_line(ran, "SignatureDoesNotMatch")
    assert "wrong-secret" not in ran.err


def test_missing_credentials_are_one_line(filled: Filled) -> None:
    """Without credentials the line says where boto3 looks for them."""
    ran = filled.run("ls", filled.url, AWS_ACCESS_KEY_ID="", AWS_SECRET_ACCESS_KEY="")
    one_line(ran, "AWS_ACCESS_KEY_ID", "~/.aws/credentials")


def test_a_missing_bucket_is_one_line(moto_server: str) -> None:
    """A bucket that does not exist is named, and that it must be made."""
    one_line(run("ls", "s3://absent/p", "--endpoint-url", moto_server), "NoSuchBucket", "make the bucket")


def test_a_store_without_conditional_writes_is_one_line(filled: Filled, tmp_path: Path) -> None:
    """A drain publishes nothing on a store that ignores conditions, says so once, and the mark stays."""
    spill = Spill(tmp_path / "spill")
    with FakeS3(ignores_conditions=True) as s3:
        spill.write(mark(filled, bucket=s3.bucket, endpoint_url=s3.endpoint_url))
        arguments = ("--run", RUN, "--endpoint-url", s3.endpoint_url, "--spill-dir", str(spill.directory))
        one_line(run("spill", "drain", f"s3://{s3.bucket}/exp", *arguments), "does not honour create-if-absent")
    assert len(spill.pending().marks) == 1


@pytest.mark.parametrize("arguments", [("--debug", "ls", "http://bucket/p"), ("ls", "http://bucket/p", "--debug")])
def test_debug_shows_the_traceback(arguments: tuple[str, ...]) -> None:
    """--debug, before or behind the command, shows where an error came from, and changes no status."""
    ran = run(*arguments)
    assert ran.status == 2
    assert "Traceback" in ran.err
    assert "SettingsError" in ran.err


def test_debug_behind_two_dashes_is_a_name() -> None:
    """Behind -- everything is an argument, as everywhere."""
    assert "Traceback" not in here("show", "--run", "r", "--", "http://bucket/p", "--debug").err


def test_a_bug_is_one_line_of_its_own(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """An error that nobody raised on purpose has a status of its own and points to --debug."""

    def broken(*_: object, **__: object) -> None:
        raise KeyError("oops")

    monkeypatch.setattr("s3capture.testing.scenarios.scenarios", broken)
    assert main(["explore"]) == 3
    assert "unexpected KeyError" in capsys.readouterr().err
    assert main(["--debug", "explore"]) == 3
    assert "Traceback" in capsys.readouterr().err


def test_usage_errors_are_status_2() -> None:
    """What typer refuses ends with 2 and its own words."""
    ran = run("ls")
    assert ran.status == 2
    assert "URL" in ran.err


# -- the process ------------------------------------------------------------------------------------------------


def test_ctrl_c_ends_at_once() -> None:
    """Interrupted while a store answers without end, a command ends with 130 and no traceback, and does not wait."""
    arrived = threading.Event()

    def drip(exchange: Exchange) -> None:
        # Each byte comes within the read timeout, so whoever waits for this reply waits as long as the server lives.
        exchange.send_bytes(b"HTTP/1.1 200 OK\r\nX-Slow: ")
        arrived.set()
        while not exchange.server._ending.wait(1):
            exchange.send_bytes(b"x")

    with FakeS3() as s3:
        s3.objects["p/r/attempts/00/x/intent/c"] = b""
        s3.script(on("ListObjectsV2", "p/r/attempts/00/"), drip, times=None)
        arguments = [*COMMAND, "ls", f"s3://{s3.bucket}/p", "--run", "r", "--endpoint-url", s3.endpoint_url]
        with subprocess.Popen(arguments, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert arrived.wait(60)
                process.send_signal(signal.SIGINT)
                assert process.wait(60) == 130
                assert process.stderr is not None
                assert "Traceback" not in process.stderr.read()
            finally:
                process.kill()


def test_a_closed_pipe_is_quiet(filled: Filled) -> None:
    """When the reader of stdout has gone, the command ends with 141 and says nothing about it."""
    reading, writing = os.pipe()
    os.close(reading)
    environment = {**os.environ, "S3CAPTURE_ENDPOINT_URL": filled.endpoint_url}
    arguments = [*COMMAND, "ls", filled.url, "--run", RUN, "--state", "frozen"]
    with subprocess.Popen(arguments, cwd=ROOT, env=environment, stdout=writing, stderr=subprocess.PIPE) as process:
        os.close(writing)
        _, said = process.communicate(timeout=60)
    assert process.returncode == 141
    assert b"Broken" not in said
    assert b"Traceback" not in said


def test_help_is_quick_and_names_every_command() -> None:
    """--help shows each command and imports neither boto3, nor rich, nor pydantic."""
    code = (
        "import sys; from s3capture.cli import main; status = main(['--help']); "
        "print([m for m in ('boto3', 'rich', 'pydantic', 'moto') if m in sys.modules]); sys.exit(status)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "[]"
    for command in ("serve", "demo", "ls", "show", "doctor", "explore", "spill"):
        assert re.search(rf"^  {command} ", done.stdout, re.MULTILINE)


def test_version() -> None:
    """--version prints the name and the version, on stdout."""
    assert run("--version") == Ran(0, "s3capture 0.1.0\n", "")


def test_explore_reports_each_scenario() -> None:
    """A chosen scenario is explored and reported on one line."""
    ran = run("explore", "--scenario", "delete dies on the way")
    assert ran.status == 0
    assert ran.out.startswith("delete dies on the way: ")
    assert ran.out.endswith("holds\n")


def test_explore_ends_with_1_when_a_promise_is_broken(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A violation is printed with its schedule, and the status is 1."""
    from s3capture.testing.scenarios import KNOWN_LIMIT  # noqa: PLC0415 - needed by this test alone

    monkeypatch.setattr("s3capture.testing.scenarios.scenarios", lambda **_: {KNOWN_LIMIT.name: KNOWN_LIMIT})
    assert main(["explore"]) == 1
    printed = capsys.readouterr()
    assert "VIOLATED" in printed.out
    assert "1 with a broken promise" in printed.err


def test_text_from_a_bucket_is_made_printable() -> None:
    """Everything that a terminal would act upon, or cannot show, is escaped; other text stays as it is."""
    assert printable("a\x1b[31m\x07\n\u202e\ud800 [b] é") == "a\\x1b[31m\\x07\\n\\u202e\\ud800 [b] é"


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (123_456, "123 kB"), (5_600_000_000_000, "5.6 TB")],
)
def test_sizes_for_people(count: int, text: str) -> None:
    """Sizes are in powers of 1000, with at most one decimal."""
    assert common.size(count) == text


def test_times_that_are_none_are_a_dash() -> None:
    """A time beyond the calendar is shown as a dash and never raised."""
    assert [common.when(value) for value in (None, 1e30, 0.0)] == ["-", "-", "1970-01-01 00:00:00"]


# -- the pages --------------------------------------------------------------------------------------------------


def _make_cli() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_cli", ROOT / "tests" / "pages" / "make_cli.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_reference_is_current() -> None:
    """docs/cli.md is what its script writes from the commands of today."""
    assert (ROOT / "docs" / "cli.md").read_text("utf-8") == _make_cli().page(), "run: python tests/pages/make_cli.py"


def shape(value: Any) -> Any:
    """The keys of a JSON value, all the way down; what a list holds is the union of its items."""
    if isinstance(value, dict):
        return {key: shape(item) for key, item in value.items()}
    if isinstance(value, list):
        kinds = {canonical(found).data: found for item in value if (found := shape(item)) is not None}
        return [kinds[key] for key in sorted(kinds)] or None
    return None


def agrees(real: Any, page: Any) -> bool:
    """Whether ``real`` has the keys of ``page``, where lists may be empty and objects null."""
    if isinstance(page, dict):
        return real is None or (real.keys() == page.keys() and all(agrees(real[key], page[key]) for key in page))
    if isinstance(page, list):
        return real is None or all(agrees(item, page[0]) for item in real)
    return real is None


Produce = Callable[[Filled, Path], list[Any]]
EXAMPLES: dict[str, Produce] = {
    "ls": lambda place, _: place.here("ls", place.url, "--json").rows,
    "ls --run": lambda place, _: place.here("ls", place.url, "--run", RUN, "--json").rows,
    "show": lambda place, _: [
        row for name in ("busy", "damaged") for row in place.here("show", place.url, name, "--run", RUN, "--json").rows
    ],
    "doctor": lambda place, tmp: (
        place.here(*("doctor", place.url, "--json", "--rounds", "1", "--writers", "2", "--spill-dir", str(tmp))).rows
    ),
    "spill list": lambda place, tmp: _spilled(place, tmp, "list"),
    "spill drain": lambda place, tmp: _spilled(place, tmp, "drain", place.url, "--run", "run-8"),
    "archive": lambda place, _: place.here("archive", place.url, *_FROZEN_NOW, "--json").rows,
    "archive --yes": lambda place, _: _archived(place),
    "import-gym` and `export-gym": lambda place, tmp: (
        place.here("export-gym", place.url, str(tmp / "gym"), "--run", RUN, "--json").rows
    ),
    "explore": lambda *_: here("explore", "--json", "--scenario", "delete dies on the way").rows,
}


_FROZEN_NOW = ("--run", RUN, "--older-than", "0s", "--rollout", "busy", "--rollout", "late")


def _archived(place: Filled) -> list[Any]:
    asyncio.run(fill(url=f"{place.url}/again", endpoint_url=place.endpoint_url))
    return place.here("archive", f"{place.url}/again", *_FROZEN_NOW, "--json", "--yes").rows


def _spilled(place: Filled, tmp: Path, *arguments: str) -> list[Any]:
    Spill(tmp / "spill").write(mark(place, "run-8"))
    return place.here("spill", *arguments, "--json", "--spill-dir", str(tmp / "spill")).rows


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_json_is_as_documented(name: str, filled: Filled, tmp_path: Path) -> None:
    """What a command prints with --json has exactly the fields of the example on the page."""
    page = (ROOT / "docs" / "cli.md").read_text("utf-8")
    found = re.search(rf"^### `{re.escape(name)}`\n.*?^```json\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    rows = EXAMPLES[name](filled, tmp_path)
    assert rows
    for row in rows:
        assert agrees(shape(row), shape(json.loads(found[1]))), (row, found[1])


def test_every_kind_of_error_is_on_its_page() -> None:
    """docs/errors.md has a row for each public error, with the bases that the code gives it."""
    page = (ROOT / "docs" / "errors.md").read_text("utf-8")
    rows = dict(re.findall(r"^\| `(\w+Error)`([^|]*)\|", page, re.MULTILINE))
    kinds = {name: kind for name, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, Exception)}
    kinds = {name: kind for name, kind in kinds.items() if kind.__module__ == errors.__name__}
    kinds |= {kind.__name__: kind for kind in (RunInUseError, GymNotFoundError, LocalServerError, RecordingError)}
    assert set(rows) == set(kinds)
    for name, kind in kinds.items():
        bases = {base.__name__ for base in kind.__bases__} - {"CaptureError", "Exception"}
        assert set(re.findall(r"`(\w+)`", rows[name])) == bases, name
