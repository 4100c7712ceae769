"""What a replay is written as: entries, recordings and tables that hold what was captured, whole or not at all."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import math
import re
import struct
import sys
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from captures import answered, entry
from inspected import fill
from replayed import capture, entries_of, full_prompts, small

from s3capture import S3TokenSink, S3TokenSource
from s3capture.cli import main
from s3capture.demo.recording import read_recording
from s3capture.demo.script import Script, rebuild
from s3capture.errors import MissingExtraError
from s3capture.keys import shard
from s3capture.local import EmbeddedServer
from s3capture.records import ParentResolutionStatus, TokenEntry
from s3capture.replay import ProblemKind, ReplayedRollout, parquet, replay
from s3capture.replay.lines import Recorder, entry_lines
from s3capture.replay.parquet import ParquetFolder
from s3capture.replay.table import CALL_COLUMNS, ROLLOUT_COLUMNS
from s3capture.replay.writers import entries_writer
from s3capture.sink import entry_payload
from s3capture.store.memory import MemoryStore

SCRIPT = small()


def replayed(*entries: TokenEntry) -> ReplayedRollout:
    """One rollout of these records, captured and replayed."""
    given: dict[str, Any] = {"url": "s3://bucket/p", "run": "r", "store": MemoryStore()}

    async def put() -> None:
        sink = S3TokenSink(**given)
        for each in entries:
            await sink.put(each)
        await S3TokenSource(**given).freeze(entries[0].rollout_id)

    asyncio.run(put())
    with replay(**given) as rollouts:
        (found,) = rollouts
    return found


def tables(folder: Path, *rollouts: ReplayedRollout) -> tuple[pa.Table, pa.Table, list[Any]]:
    with ParquetFolder(folder) as writer:
        problems = [problem for rollout in rollouts for problem in writer.write(rollout)]
    return pq.read_table(folder / "calls.parquet"), pq.read_table(folder / "rollouts.parquet"), problems


def test_entries_are_the_lines_that_gym_writes() -> None:
    """A line is the canonical JSON of the record with its prompt in full, or of the record as it is stored."""
    first = answered("a")
    delta = answered("b", parent=first, before=[1, 2, 3, 4, 5], prompt=[6], created_at=1_700_000_001.0)
    rollout = replayed(first, delta)
    assert list(entry_lines(rollout, deltas=True)) == [entry_payload(each).data + b"\n" for each in (first, delta)]
    whole = delta.model_copy(update={"prompt_token_ids": [1, 2, 3, 4, 5, 6], "prompt_is_delta": False})
    assert list(entry_lines(rollout))[1] == entry_payload(whole).data + b"\n"


def test_odd_numbers_survive_as_lines_and_as_columns(tmp_path: Path) -> None:
    """NaN, infinities and the last bit of a double come back from a line of entries, a recording, and a column."""
    odd = [math.nan, -math.inf, -0.0, 0.1 + 0.2]
    rollout = replayed(entry(generation_token_ids=[1, 2, 3, 2**63 - 1], generation_log_probs=odd))
    (line,), _ = Recorder().lines(rollout)
    calls, _, problems = tables(tmp_path, rollout)
    found = [
        json.loads(next(entry_lines(rollout)))["generation_log_probs"],
        json.loads(line)["generation_log_probs"],
        calls["generation_log_probs"][0].as_py(),
    ]
    assert {struct.pack("4d", *each) for each in found} == {struct.pack("4d", *odd)}
    assert calls["generation_token_ids"][0].as_py() == [1, 2, 3, 2**63 - 1]
    assert not problems


def test_a_recording_leaves_out_what_it_cannot_say() -> None:
    """A prompt that does not extend its parent's, and a continuation of a call without items, go with what follows."""
    resolved = ParentResolutionStatus.RESOLVED
    first = answered("a")
    bent = answered("b", parent=first, prompt=[1, 9, 9, 9, 9, 9], created_at=1_700_000_001.0)
    after = answered("c", parent=bent, prompt=[1, 9, 9, 9, 9, 9, 4, 5, 6], created_at=1_700_000_002.0)
    silent = entry("d", created_at=1_700_000_003.0)
    behind = entry("e", parent_call_id="d", parent_resolution=resolved, prompt_token_ids=[1, 2, 3, 4, 5, 6])
    recorder = Recorder()
    lines, problems = recorder.lines(replayed(first, bent, after, silent, behind))
    assert [json.loads(line)["model_call_id"] for line in lines] == ["a", "d"]
    assert {problem.call for problem in problems} == {"b", "c", "e"}
    assert {problem.kind for problem in problems} == {ProblemKind.INEXPRESSIBLE}
    Recorder.lines(recorder, replayed(entry(routed_experts=[1], note="x")))
    assert recorder.dropped == {"note": 1, "routed_experts": 1}


def test_tables_keep_their_types_and_say_what_is_complete(tmp_path: Path) -> None:
    """Columns have the documented types also where all values are absent, and each call knows whether to be masked."""
    first = answered("a", note={"z": 1})
    child = answered("b", parent=first, before=[1, 2, 3, 4, 5], prompt=[6], generation=[7], created_at=1_700_000_001.5)
    calls, rollouts, _ = tables(tmp_path, replayed(first, child))
    assert calls.schema.field("prompt_token_ids").type == pa.list_(pa.int64())
    assert calls.schema.field("generation_log_probs").type == pa.list_(pa.float64())
    assert calls.schema.field("created_at").type == pa.timestamp("us", tz="UTC")
    assert calls.schema.field("routed_experts").type == pa.string()
    assert calls.schema.metadata[b"s3capture.table_version"] == b"1"
    row = calls.to_pylist()[1]
    assert row["prompt_token_ids"] == [1, 2, 3, 4, 5, 6]
    wanted = {"model_call_id": "b", "parent_call_id": "a", "children": [], "terminal": True, "rollout_complete": True}
    wanted |= {
        "position": 1,
        "prompt_was_delta": True,
        "stored_prompt_tokens": 1,
        "prompt_tokens": 6,
        "digest": child.digest,
    }
    assert {name: row[name] for name in wanted} == wanted
    assert row["created_at"].timestamp() == 1_700_000_001.5
    assert json.loads(row["output_items"]) == child.output_items
    assert json.loads(calls["extra"][0].as_py()) == {"note": {"z": 1}}
    (summary,) = rollouts.to_pylist()
    assert (summary["complete"], summary["calls"], summary["roots"], summary["terminal_calls"]) == (
        True,
        2,
        ["a"],
        ["b"],
    )


def test_a_table_refuses_what_a_column_cannot_hold(tmp_path: Path) -> None:
    """A token id above 63 bits and an id that is no Unicode are reported and left out, and the rest is written."""
    rollout = replayed(entry("ok"), entry("big", generation_token_ids=[1, 2**63]), entry("half\ud800"))
    calls, _, problems = tables(tmp_path, rollout)
    assert calls["model_call_id"].to_pylist() == ["ok"]
    assert {problem.call for problem in problems} == {"big", "half\ud800"}


def test_tables_are_written_in_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row group holds no more tokens than its bound, so memory does not grow with the run."""
    monkeypatch.setattr(parquet, "_GROUP_TOKENS", 100)
    rollout = replayed(*(entry(f"c{number}", prompt_token_ids=[1] * 30) for number in range(12)))
    calls, _, _ = tables(tmp_path, rollout)
    assert calls.num_rows == 12
    assert pq.ParquetFile(tmp_path / "calls.parquet").num_row_groups == 4


def test_without_pyarrow_one_is_told_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables need an extra, and the error names it."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtraError, match=r"s3capture\[parquet\]"):
        ParquetFolder(tmp_path)


@dataclass(frozen=True)
class Ran:
    status: int
    out: bytes
    err: str


class _Out(io.TextIOWrapper):
    """Stands for stdout with a binary buffer beneath."""


def command(*arguments: str) -> Ran:
    """Run the command line in this process."""
    out, err = _Out(io.BytesIO(), "utf-8"), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        status = main(arguments)
    out.flush()
    return Ran(status, out.buffer.getvalue(), err.getvalue())  # type: ignore[attr-defined] # a BytesIO


@dataclass(frozen=True)
class Place:
    """A run of ``SCRIPT`` on SeaweedFS."""

    url: str
    run: str
    endpoint_url: str

    def replay(self, *arguments: str, run: str | None = None) -> Ran:
        return command("replay", self.url, "--run", run or self.run, "--endpoint-url", self.endpoint_url, *arguments)


@pytest.fixture
def place(seaweed: EmbeddedServer, bucket: str) -> Iterator[Place]:
    made = Place(f"s3://{bucket}/p", "run-1", seaweed.endpoint_url)
    asyncio.run(capture(SCRIPT, url=made.url, run=made.run, endpoint_url=made.endpoint_url))
    yield made


def in_key_order(script: Script) -> list[Any]:
    return sorted(script.rollouts, key=lambda rollout: (shard(rollout.rollout_id), rollout.rollout_id))


def test_on_a_real_store_each_format_holds_the_workload(place: Place, tmp_path: Path) -> None:
    """Entries, plain and packed, a recording and tables all hold every call with its tokens; a copy gives the same."""
    ran = place.replay("--to", "-")
    assert (ran.status, ran.err.count("\n")) == (0, 1), ran.err
    lines = [json.loads(line) for line in ran.out.splitlines()]
    wanted = {
        (rollout.rollout_id, name): prompt
        for rollout in in_key_order(SCRIPT)
        for name, prompt in full_prompts(rollout).items()
    }
    assert {(line["rollout_id"], line["model_call_id"]): line["prompt_token_ids"] for line in lines} == wanted
    for name, unpack in (("e.jsonl.gz", gzip.decompress), ("e.jsonl.zst", _unzstd)):
        assert place.replay("--to", str(tmp_path / name)).status == 0
        assert unpack((tmp_path / name).read_bytes()) == ran.out

    assert place.replay("--to", str(tmp_path / "tables"), "--format", "parquet").status == 0
    calls = pq.read_table(tmp_path / "tables" / "calls.parquet").to_pylist()
    assert [entry_of(call) for call in calls] == [entry_of(line) for line in lines]

    assert place.replay("--to", str(tmp_path / "again.zst"), "--format", "recording").status == 0
    again = read_recording(tmp_path / "again.zst")
    found = {
        (rollout.rollout_id, call): each.prompt for rollout in again.rollouts for call, each in rebuild(rollout).items()
    }
    assert found == wanted

    assert place.replay("--into", place.url, "--into-run", "copy").status == 0
    copied = place.replay("--to", "-", "--deltas", "--state", "open", run="copy")
    assert copied.out == place.replay("--to", "-", "--deltas").out
    assert {each["rollout_id"]: each["prompt_is_delta"] for each in map(json.loads, copied.out.splitlines())}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["again.zst", "e.jsonl.gz", "e.jsonl.zst", "tables"]


def test_an_archived_run_replays_to_the_same_bytes(place: Place) -> None:
    """Packed and retired, the run gives the very lines that it gave before; the tables alone say where they lay."""
    before = place.replay("--to", "-", "--deltas")
    ran = command(
        "archive", place.url, "--run", place.run, "--endpoint-url", place.endpoint_url, "--older-than", "0s", "--yes"
    )
    assert ran.status == 0, ran.err
    given = {"url": place.url, "run": place.run, "endpoint_url": place.endpoint_url}
    with replay(**given) as rollouts:
        found = [line for rollout in rollouts if rollout.archived for line in entry_lines(rollout, deltas=True)]
    assert b"".join(found) == before.out
    one = min(rollout.rollout_id for rollout in SCRIPT.rollouts)
    lines = [line for line in before.out.splitlines() if json.loads(line)["rollout_id"] == one]
    assert place.replay("--to", "-", "--deltas", "--rollout", one).out.splitlines() == lines


def _unzstd(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(data)


def entry_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """What rows of both formats say in the same words."""
    names = (
        "rollout_id",
        "model_call_id",
        "prompt_token_ids",
        "generation_token_ids",
        "generation_log_probs",
        "digest",
    )
    return tuple(row[name] for name in names)


def test_a_recording_of_a_replay_plays_in_the_demo(place: Place, tmp_path: Path) -> None:
    """The demo plays it through real processes and finds every record as the recording says."""
    chosen = max(SCRIPT.rollouts, key=lambda rollout: len(rollout.calls))
    to = ("--to", str(tmp_path / "r.jsonl"), "--format", "recording", "--rollout", chosen.rollout_id)
    assert place.replay(*to).status == 0
    arguments = (
        "--url",
        place.url,
        "--run",
        "played",
        "--endpoint-url",
        place.endpoint_url,
        "--workers",
        "2",
        "--json",
    )
    ran = command("demo", str(tmp_path / "r.jsonl"), *arguments)
    assert ran.status == 0, ran.err
    outcome = json.loads(ran.out)
    assert outcome["verified_entries"] == len(chosen.calls)
    assert outcome["lineage"]["resolved"] > 0


def test_what_is_left_out_is_told_and_the_rest_is_given(seaweed: EmbeddedServer, bucket: str, tmp_path: Path) -> None:
    """Incomplete rollouts are counted; with --all conflicts are named and give status 1, and tables know the rest."""
    url = f"s3://{bucket}/exp"
    asyncio.run(fill(url=url, endpoint_url=seaweed.endpoint_url))
    strange = Place(url, "run-7", seaweed.endpoint_url)
    ran = strange.replay("--to", "-")
    assert ran.status == 0
    assert "passed over: 1 incomplete (--all takes them), 2 retired and deleted, 3 of another state or time" in ran.err
    assert [json.loads(line)["rollout_id"] for line in ran.out.splitlines()] == ["late"]
    ran = strange.replay(
        "--to", str(tmp_path / "all"), "--all", "--format", "parquet", "--state", "frozen", "--state", "open"
    )
    assert ran.status == 1
    assert "rollout 'busy', call 'c1': conflict" in ran.err
    assert "rollout 'damaged', call 'c2': damaged" in ran.err
    rows = pq.read_table(tmp_path / "all" / "calls.parquet").to_pylist()
    assert {row["rollout_id"]: row["rollout_complete"] for row in rows} == {
        "late": True,
        "open": False,
        "damaged": False,
    }
    rows = pq.read_table(tmp_path / "all" / "rollouts.parquet").to_pylist()
    assert {row["rollout_id"]: row["incomplete_reasons"] for row in rows}["damaged"] == ["left-out-calls"]

    ran = strange.replay("--rollout", "nobody", "--to", str(tmp_path / "n"))
    assert (ran.status, "nothing is stored for rollout 'nobody'" in ran.err) == (1, True)
    ran = strange.replay("--to", str(tmp_path / "no"), run="no-run")
    assert (ran.status, "there is no run 'no-run'" in ran.err) == (1, True)
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "--to PATH, or --into URL"),
        (("--to", "x", "--into", "s3://b12/p", "--into-run", "r"), "--to PATH, or --into URL"),
        (("--into", "s3://b12/p"), "belong together"),
        (("--into", "s3://b12/p", "--into-run", "run-1"), "name another run"),
        (("--into", "s3://b12/p", "--into-run", "r", "--format", "gym"), "leave one out"),
        (("--to", "-", "--format", "parquet"), "folder of two files"),
        (("--to", "x", "--format", "recording", "--deltas"), "--deltas belongs"),
        (("--to", "nowhere/x"), "there is no folder"),
        (("--to", "x", "--since", "when"), "neither an age"),
        (("--to", "taken"), "never overwrites"),
        (("--to", "taken", "--format", "parquet"), "never overwrites"),
    ],
)
def test_bad_requests_are_refused_before_anything_is_read(
    arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong combination or a taken name is status 2 and one line, without a request to the store."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "taken").write_text("mine")
    ran = Place("s3://b12/p", "run-1", "http://127.0.0.1:1").replay(*arguments)
    assert (ran.status, words in ran.err, ran.err.count("\n")) == (2, True, 1), ran.err
    assert (tmp_path / "taken").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_a_replay_that_fails_leaves_nothing(tmp_path: Path) -> None:
    """When the store cannot be reached, or a writer is left early, not even a part of the output stays behind."""
    dead = Place("s3://b12/p", "run-1", "http://127.0.0.1:1")
    assert dead.replay("--to", str(tmp_path / "x"), "--format", "parquet").status == 2
    rollout = replayed(entry())
    for name in ("x", "x.gz", "x.zst"):
        with entries_writer(tmp_path / name) as writer:
            writer.write(rollout)
    assert list(tmp_path.iterdir()) == []


def test_records_of_the_script_are_what_is_compared() -> None:
    """The workload of these tests has branches and deltas, or they would show little."""
    records = [record for rollout in SCRIPT.rollouts for record in entries_of(rollout)]
    parents = [(record.rollout_id, record.parent_call_id) for record in records if record.parent_call_id]
    assert any(record.prompt_is_delta for record in records)
    assert len(parents) > len(set(parents))


def test_the_page_lists_the_columns_and_the_kinds() -> None:
    """docs/replay.md names every column with its type, in order, and every kind of problem."""
    page = (Path(__file__).parent.parent / "docs" / "replay.md").read_text("utf-8")
    told = re.findall(r"^\| `(\w+)` \| `([a-z0-9<>]+)` \|", page, re.MULTILINE)
    assert told == [*CALL_COLUMNS.items(), *ROLLOUT_COLUMNS.items()]
    assert re.findall(r"^\| `([a-z-]+)` \| [^`|]+ \|", page, re.MULTILINE) == [kind.value for kind in ProblemKind]
