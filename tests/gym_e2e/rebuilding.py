"""Plays rollouts on Gym's own store and on our endpoints, and has Gym build responses from the one and from a replay.

Writes ``{"rollouts", "trainable", "masked", "different", "lines"}``: how many were built, and the ids of those of which
the two builds are not the same.
"""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
import tempfile
from pathlib import Path
from typing import Any

from nemo_gym.token_id_capture import trajectories_for_rollout

from gym_e2e.differential import _finite, _serve
from gym_e2e.pairs import Sides
from s3capture.demo.script import Rollout, rebuild
from s3capture.demo.workload import built_in
from s3capture.replay import replay
from s3capture.replay.gym import GymBuilder
from s3capture.replay.writers import gym_writer


async def play(sides: Sides, rollout: Rollout) -> None:
    """Serve every call on both sides, and leave a call of every third rollout without an outcome."""
    requests = rebuild(rollout)
    for call in rollout.calls:
        for sink, lineage in ((sides.their_store, sides.their_lineage), (sides.sink, sides.resolver)):
            await _serve(rollout.rollout_id, call, requests[call.call_id], sink, lineage)
    if rollout.rollout_id.endswith("-1"):
        for sink in (sides.their_store, sides.sink):
            await sink.begin_call(rollout.rollout_id, "lost")
    await sides.source.freeze(rollout.rollout_id)


async def served(root: Path) -> Sides:
    """Both sides with the built-in workload on them."""
    sides = Sides(root)
    for rollout in built_in().rollouts:
        await play(sides, _finite(rollout))
    return sides


def compare(root: Path) -> dict[str, Any]:
    """Build each rollout both ways."""
    sides = asyncio.run(served(root))
    builder, builds, different = GymBuilder(), [], []
    file = io.BytesIO()
    given: dict[str, Any] = {"url": "s3://bucket/p", "run": "r", "store": sides.source._store, "complete": None}
    with replay(**given) as rollouts, gym_writer(file) as writer:
        for rollout in rollouts:
            ours = builder.build(rollout)
            theirs = trajectories_for_rollout(rollout.rollout_id, [sides.their_store.root])
            assert theirs is not None
            identity = ours.pop("_capture_snapshot")
            assert identity == {"snapshot_id": rollout.snapshot_id, "version": rollout.version}
            theirs.pop("_capture_snapshot")
            if ours != theirs:
                different.append(rollout.rollout_id)
            builds.append(ours)
            writer.write(rollout)
        writer.finish()
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    for line in lines:
        line.pop("_capture_snapshot")
    return {
        "rollouts": len(builds),
        "trainable": sum(not build["mask_sample"] for build in builds),
        "masked": sum(build["mask_sample"] for build in builds),
        "different": different,
        "lines": lines == builds,
    }


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as root:
        json.dump(compare(Path(root)), sys.stdout)
