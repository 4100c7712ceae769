"""``s3capture archive`` on a real server: priced first, done with ``--yes``, and invisible to whoever reads."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from replayed import capture, small

from s3capture.cli import main
from s3capture.keys import RunKeys
from s3capture.local import EmbeddedServer
from s3capture.seaweed import connect

RUN = "run-1"


@pytest.fixture(scope="module")
def captured(seaweed: EmbeddedServer) -> str:
    """A bucket with a run of eight complete rollouts."""
    name = "archive-cli"
    seaweed.make_bucket(name)
    asyncio.run(capture(small(), url=f"s3://{name}/exp", run=RUN, endpoint_url=seaweed.endpoint_url))
    return name


def objects(seaweed: EmbeddedServer, bucket: str) -> dict[str, int]:
    client = connect(seaweed.endpoint_url, seaweed.access_key, seaweed.secret_key)
    pages = client.get_paginator("list_objects_v2").paginate(Bucket=bucket)
    found = {item["Key"]: item["Size"] for page in pages for item in page.get("Contents", ())}
    client.close()
    return found


def run(seaweed: EmbeddedServer, *arguments: str) -> int:
    return main([*arguments, "--endpoint-url", seaweed.endpoint_url])


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_an_archived_run_is_replayed_shown_and_listed_as_before(
    captured: str, seaweed: EmbeddedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The dry run changes nothing; --yes leaves few objects; replay gives the same bytes, show and ls the same."""
    url = f"s3://{captured}/exp"
    base = ("--run", RUN)
    before = objects(seaweed, captured)
    assert run(seaweed, "replay", url, *base, "--to", str(tmp_path / "before.jsonl")) == 0
    capsys.readouterr()
    assert run(seaweed, "ls", url, *base, "--json") == 0
    listed = lines(capsys)
    name = listed[0]["rollout"]
    assert run(seaweed, "show", url, name, *base, "--json") == 0
    (shown,) = lines(capsys)

    assert run(seaweed, "archive", url, *base, "--older-than", "0s", "--json") == 0
    (planned,) = lines(capsys)
    assert objects(seaweed, captured) == before
    assert planned["rollouts"] == {"pack": 8}

    assert run(seaweed, "archive", url, *base, "--older-than", "0s", "--json", "--yes") == 0
    (report,) = lines(capsys)
    after = objects(seaweed, captured)
    assert (report["archived"], report["packs"], report["objects_deleted"]) == (8, 1, planned["objects"])
    assert report["bytes_packed"] == planned["bytes"] + sum(size for key, size in before.items() if "/fence/" in key)
    archive = RunKeys("exp", RUN).archive.base
    assert sum(size for key, size in after.items() if key.startswith(archive)) < sum(before.values())
    assert {key.split("/")[5] for key in after if not key.startswith(archive)} == {"fence"}

    assert run(seaweed, "replay", url, *base, "--to", str(tmp_path / "after.jsonl")) == 0
    assert (tmp_path / "after.jsonl").read_bytes() == (tmp_path / "before.jsonl").read_bytes()
    capsys.readouterr()
    assert run(seaweed, "ls", url, *base, "--json") == 0
    assert [row | {"archived": False} for row in lines(capsys)] == listed
    assert run(seaweed, "show", url, name, *base, "--json") == 0
    (again,) = lines(capsys)
    assert again["summary"].pop("archived") and not shown["summary"].pop("archived")
    assert again == shown
    assert run(seaweed, "archive", url, *base, "--older-than", "0s", "--yes") == 0
    assert objects(seaweed, captured) == after


def test_a_young_rollout_is_not_taken_by_default(
    bucket: str, seaweed: EmbeddedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --older-than, rollouts changed within the last day are left to their consumers."""
    url = f"s3://{bucket}/exp"
    asyncio.run(capture(small(2), url=url, run=RUN, endpoint_url=seaweed.endpoint_url))
    kept = objects(seaweed, bucket)
    assert run(seaweed, "archive", url, "--run", RUN, "--yes") == 0
    assert objects(seaweed, bucket) == kept
    assert "0 rollouts in 0 packs" in capsys.readouterr().out


def test_the_storage_class_goes_to_the_packs_alone(
    moto_server: str, moto_bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Packs are created in the class that was asked for, and their indexes, which are read often, in the usual one."""
    url = f"s3://{moto_bucket}/exp"
    asyncio.run(capture(small(2), url=url, run=RUN, endpoint_url=moto_server))
    arguments = ["archive", url, "--run", RUN, "--older-than", "0s", "--storage-class", "GLACIER_IR", "--yes"]
    assert main([*arguments, "--endpoint-url", moto_server]) == 0
    client = connect(moto_server, "x", "y")
    rows = client.list_objects_v2(Bucket=moto_bucket, Prefix=RunKeys("exp", RUN).archive.base)["Contents"]
    client.close()
    classes = {row["Key"].split("/")[3]: row.get("StorageClass", "STANDARD") for row in rows}
    assert classes == {"pack": "GLACIER_IR", "index": "STANDARD", "done": "STANDARD"}
    capsys.readouterr()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--storage-class", "COLD"), "unknown storage class 'COLD'"),
        (("--price", "GLACIER_IR"), "cannot read the price"),
        (("--older-than", "soon"), "'soon' is neither an age"),
        (("--run", "absent"), "there is no run 'absent'"),
    ],
)
def test_what_cannot_be_done_is_told_before_anything_is(
    bucket: str,
    seaweed: EmbeddedServer,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, str],
    words: str,
) -> None:
    """A wrong option is named with its value, and nothing is created."""
    arguments = ("archive", f"s3://{bucket}/exp", *(() if "--run" in options else ("--run", RUN)), *options, "--yes")
    assert run(seaweed, *arguments) in (1, 2)
    assert words in capsys.readouterr().err
    assert not objects(seaweed, bucket)


def test_without_pyarrow_the_extra_is_named() -> None:
    """Where pyarrow is not installed, one sentence says what to install."""
    code = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from s3capture.cli import main\n"
        "sys.exit(main(['archive', 's3://bucket/x', '--run', 'r']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "install s3capture[parquet]" in done.stderr


_CHILD = """
import sys
from s3capture.archive.archiver import Archiver
from s3capture.archive.hand import Hand
from s3capture.keys import RunKeys
from s3capture.reader import Reader
from s3capture.settings import Settings
from s3capture.store.boto import BotoStore
from s3capture.stored import Selection, StoredRun

store = BotoStore(Settings.of(url=sys.argv[1], run=sys.argv[2], endpoint_url=sys.argv[3]))
with Reader(store) as reader, Hand(store) as hand:
    run = StoredRun(reader, RunKeys("exp", sys.argv[2]))
    print("ready", flush=True)
    Archiver(run, hand, pack_bytes=40_000).archive(Selection())
"""


def test_killed_processes_two_at_once_leave_nothing_half_done(
    bucket: str, seaweed: EmbeddedServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pairs of archivers, each killed (SIGKILL) at another moment, lose nothing; the next run finishes."""
    url = f"s3://{bucket}/exp"
    asyncio.run(capture(small(10), url=url, run=RUN, endpoint_url=seaweed.endpoint_url))
    assert run(seaweed, "replay", url, "--run", RUN, "--to", str(tmp_path / "before.jsonl")) == 0
    total = len(objects(seaweed, bucket))
    for number in range(2):
        started = [
            subprocess.Popen(
                [sys.executable, "-c", _CHILD, url, RUN, seaweed.endpoint_url],
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "TMPDIR": str(tmp_path)},  # who is killed leaves its packs behind
            )
            for _ in range(2)
        ]
        for child in started:
            assert child.stdout is not None and child.stdout.readline() == "ready\n"
        # Each pair is let live until it has changed something more than the one before.
        changed = len(objects(seaweed, bucket))
        while len(objects(seaweed, bucket)) == changed and any(child.poll() is None for child in started):
            pass
        for child in started:
            child.kill()
            child.communicate()
        path = tmp_path / f"{number}.jsonl"
        assert run(seaweed, "replay", url, "--run", RUN, "--to", str(path)) == 0
        assert path.read_bytes() == (tmp_path / "before.jsonl").read_bytes()
    assert run(seaweed, "archive", url, "--run", RUN, "--older-than", "0s", "--yes") == 0
    assert run(seaweed, "replay", url, "--run", RUN, "--to", str(tmp_path / "after.jsonl")) == 0
    assert (tmp_path / "after.jsonl").read_bytes() == (tmp_path / "before.jsonl").read_bytes()
    left = [key for key in objects(seaweed, bucket) if "/archive/" not in key]
    assert {key.split("/")[5] for key in left} == {"fence"} and len(left) < total
    capsys.readouterr()


def test_archived_rollouts_are_deleted_by_name_and_their_pack_is_swept_with_the_last(
    bucket: str, seaweed: EmbeddedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    """``delete`` hides an archived rollout and no other; when all are deleted, ``sweep`` empties the archive."""
    url, base = f"s3://{bucket}/exp", ("--run", RUN)
    asyncio.run(capture(small(3), url=url, run=RUN, endpoint_url=seaweed.endpoint_url))
    assert run(seaweed, "archive", url, *base, "--older-than", "0s", "--yes") == 0
    capsys.readouterr()

    def names() -> list[str]:
        assert run(seaweed, "ls", url, *base, "--json") == 0
        return [row["rollout"] for row in lines(capsys)]

    first, *others = names()
    assert run(seaweed, "delete", url, *base, "--rollout", first) == 0
    capsys.readouterr()
    assert names() == [first, *others]
    assert run(seaweed, "delete", url, *base, "--rollout", first, "--yes") == 0
    capsys.readouterr()
    assert names() == others
    assert run(seaweed, "sweep", url, *base, "--older-than", "0s", "--yes") == 0
    capsys.readouterr()
    # The fences of what is archived stay: under their ids nothing new may be captured.
    assert names() == others
    left = [key for key in objects(seaweed, bucket) if "/archive/" not in key]
    assert {key.split("/")[4] for key in left} == set(others) and {key.split("/")[5] for key in left} == {"fence"}
    assert run(seaweed, "delete", url, *base, *(part for name in others for part in ("--rollout", name)), "--yes") == 0
    for _ in range(3):
        assert run(seaweed, "sweep", url, *base, "--older-than", "0s", "--yes") == 0
    assert objects(seaweed, bucket) == {}
    capsys.readouterr()
