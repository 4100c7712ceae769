"""nemo-gym's public conformance kit passes over our endpoints, on every store and with its own matcher.

nemo-gym is installed beside the tests, not into them: a directory under pytest's cache that only a child process
has on its path, so that nothing here can come to depend on it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import gym_env
import pytest

from s3capture.local import EmbeddedServer

TESTS = Path(__file__).parent
CHECKS = [
    "put_then_freeze_visibility",
    "idempotent_reput",
    "conflicting_reput",
    "mark_incomplete_durability",
    "freeze_idempotency",
    "post_freeze_write_safety",
    "conditional_retirement",
    "lineage_visibility",
    "fresh_client_lineage_visibility",
    "begin_call_custody",
]


@pytest.fixture(scope="session")
def nemo_gym(request: pytest.FixtureRequest) -> Path:
    """The directory that holds nemo-gym; a failed install fails the tests."""
    return gym_env.beside(request.config).path[0]


def _passed(nemo_gym: Path, settings: dict[str, Any], *, memory: bool = False, strangers: bool = False) -> list[str]:
    kit = {"settings": settings, "memory": memory, "strangers": strangers}
    path = [str(nemo_gym), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(TESTS / "gym_matcher.py"), json.dumps(kit)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: list[str] = json.loads(done.stdout)
    return found


@pytest.fixture
def settings(tmp_path: Path) -> dict[str, Any]:
    return {"url": "s3://capture/p", "run": "r", "spill_dir": str(tmp_path / "spill")}


def test_memory(nemo_gym: Path, settings: dict[str, Any]) -> None:
    """All ten checks pass on the store in memory, between endpoints that share nothing else."""
    assert _passed(nemo_gym, settings, memory=True, strangers=True) == CHECKS


def test_moto(nemo_gym: Path, settings: dict[str, Any], moto_server: str, moto_bucket: str) -> None:
    """All ten checks pass on moto's server."""
    url = f"s3://{moto_bucket}/p"
    assert _passed(nemo_gym, {**settings, "url": url, "endpoint_url": moto_server}) == CHECKS


@pytest.mark.parametrize("strangers", [False, True], ids=["one runtime", "a runtime each"])
def test_seaweed(
    nemo_gym: Path, settings: dict[str, Any], seaweed: EmbeddedServer, bucket: str, strangers: bool
) -> None:
    """All ten checks pass on a real server, for endpoints of one process and for strangers."""
    url = f"s3://{bucket}/p"
    given = {**settings, "url": url, "endpoint_url": seaweed.endpoint_url}
    assert _passed(nemo_gym, given, strangers=strangers) == CHECKS
