"""A run as a Ray dataset holds the rows that a replay writes as Parquet."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from replayed import capture, small

from s3capture.errors import MissingExtraError
from s3capture.local import EmbeddedServer
from s3capture.replay import replay
from s3capture.replay.writers import ParquetWriter

ROOT = Path(__file__).parent.parent

# Ray in a process of its own: it stays for the life of a process, and takes signals and logging for itself.
PROGRAM = """
import json, sys
import ray
import s3capture.ray

given = json.load(sys.stdin)
ray.init(num_cpus=2, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False,
         object_store_memory=80 * 1024 * 1024, logging_level="ERROR", _temp_dir=given.pop("temp"))
try:
    ray.data.DataContext.get_current().enable_progress_bars = False
    calls = s3capture.ray.read(**given, ray_options={"override_num_blocks": 3}).materialize()
    rollouts = s3capture.ray.read(**given, table="rollouts", ray_options={"override_num_blocks": 1})
    found = {
        "rows": calls.take_all(),
        "complete": [row["rollout_id"] for row in rollouts.take_all()],
        "blocks": calls.num_blocks(),
        "schema": calls.schema().names,
    }
finally:
    ray.shutdown()
json.dump(found, sys.stdout, default=str)
"""


def test_the_rows_are_those_of_the_parquet_files(
    seaweed: EmbeddedServer, bucket: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """A local Ray with two workers reads every call of a run on SeaweedFS, with equal columns and tokens."""
    given = {"url": f"s3://{bucket}/p", "run": "run-1", "endpoint_url": seaweed.endpoint_url}
    asyncio.run(capture(small(), **given))
    with replay(**given) as rollouts, ParquetWriter(tmp_path / "tables") as writer:
        for rollout in rollouts:
            writer.write(rollout)
        writer.finish()
    calls = pq.read_table(tmp_path / "tables" / "calls.parquet")
    # Ray takes a machine of Linux for part of a cluster and listens on all its addresses, unless told otherwise.
    variables = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "PYTHONPATH": str(ROOT)}
    temp = tmp_path_factory.mktemp("r")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps({**given, "temp": str(temp)}),
        env={**os.environ, **seaweed.environment(), **variables},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["schema"] == calls.schema.names
    assert found["blocks"] >= 3
    columns = ("rollout_id", "position", "model_call_id", "children", "prompt_token_ids", "generation_log_probs")
    ours = sorted(([row[name] for name in columns] for row in calls.to_pylist()), key=lambda row: row[:2])
    theirs = sorted(([row[name] for name in columns] for row in found["rows"]), key=lambda row: row[:2])
    assert theirs == ours
    assert sorted(found["complete"]) == sorted({row[0] for row in ours})


def test_without_ray_one_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The module needs an extra, and the error names it."""
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "s3capture.ray", raising=False)
    with pytest.raises(MissingExtraError, match=r"s3capture\[ray\]"):
        import s3capture.ray  # noqa: F401, PLC0415
