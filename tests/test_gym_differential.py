"""Gym's own stores and our endpoints, asked the same, answer the same; where they may not is written down by name."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gym_env
import pytest

SEEDS = ("one", "two")
SEQUENCES = 500  # for each seed; a sequence is two rollouts and two ledgers
PAGE = gym_env.REPOSITORY / "docs" / "gym-differences.md"
RECORDING = gym_env.REPOSITORY.parent / "shared" / "data" / "rollouts.jsonl.gz"


def _recording() -> str | None:
    """The recording to replay; None plays the built-in workload."""
    named = os.environ.get("S3CAPTURE_RECORDING")
    if named:
        assert Path(named).is_file(), f"S3CAPTURE_RECORDING names {named}, which is not there"
        return named
    return str(RECORDING) if RECORDING.is_file() else None


@pytest.fixture(scope="module")
def plays(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What came of each seed, played side by side in processes that can import nemo-gym."""
    gym = gym_env.beside(request.config)
    orders = [{"seed": seed, "sequences": SEQUENCES, "recording": _recording()} for seed in SEEDS]
    with ThreadPoolExecutor(len(orders)) as pool:
        done = pool.map(lambda order: gym.run("-m", "gym_e2e.differential", given=order, timeout=500), orders)
        return list(done)


def test_the_same_answers(plays: list[dict[str, Any]]) -> None:
    """Recorded rollouts and random lives give the same statuses, entries, masks, parents and errors on both sides."""
    faults = [fault for play in plays for fault in play["faults"]]
    assert not faults, f"{len(faults)} differences that no rule names:\n" + "\n".join(faults[:10])
    assert min(play["rollouts"] for play in plays) > 10
    assert sum(play["operations"] for play in plays) > 10_000
    assert all(play["compared"] > play["operations"] for play in plays)


def test_every_rule_is_needed(plays: list[dict[str, Any]]) -> None:
    """Each exception was met: one that is met no more must go, or it would hide a fault some day."""
    met = {rule: sum(play["by_rule"][rule] for play in plays) for rule in plays[0]["rules"]}
    assert all(met.values()), met


def test_the_page_lists_the_rules(plays: list[dict[str, Any]]) -> None:
    """docs/gym-differences.md and the test name the same exceptions in the same words."""
    told = re.findall(r"^\| `([a-z-]+)` \| (.+?) \|$", PAGE.read_text(), re.MULTILINE)
    assert dict(told) == plays[0]["rules"]
    assert len(told) == len(plays[0]["rules"])
