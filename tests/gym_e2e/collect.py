"""A collector: Gym's own finalizer over the source that ``install_source`` installed.

The rule of this module: nothing but Gym's own functions judges a rollout. It reads ``{"settings", "finalize": [results],
"retire": [[rollout, built]], "freeze": [rollouts], "drop": [[rollout, snapshot_id, version]]}`` from its input, does
each in that order, and writes the answers as JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
import warnings
from typing import Any

from nemo_gym.token_id_capture.delivery import finalize_rollout_token_capture, retire_rollout_token_capture
from nemo_gym.token_id_capture.protocols import TokenCaptureSnapshot, installed_token_source

from s3capture.gym import install_source


async def collect(given: dict[str, Any]) -> dict[str, Any]:
    """Do what is asked and return the answers under the same names."""
    owned = install_source(**given["settings"])
    source = installed_token_source()
    assert source is owned
    finalized = []
    for result in given.get("finalize", ()):
        built = await finalize_rollout_token_capture(result, source)
        finalized.append({"built": built, "result": result})
    answers = {
        "finalize": finalized,
        "retire": [await retire_rollout_token_capture(r, source, built) for r, built in given.get("retire", ())],
        "freeze": [_plain(await source.freeze(rollout)) for rollout in given.get("freeze", ())],
        "drop": [
            await source.drop(rollout, snapshot_id=snapshot_id, version=version)
            for rollout, snapshot_id, version in given.get("drop", ())
        ],
    }
    await owned.close()
    return answers


def _plain(snapshot: TokenCaptureSnapshot) -> dict[str, Any]:
    assert type(snapshot) is TokenCaptureSnapshot
    return {
        "entries": [entry.model_dump(mode="json") for entry in snapshot.entries],
        "incomplete": snapshot.incomplete,
        "snapshot_id": snapshot.snapshot_id,
        "version": snapshot.version,
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # Gym warns about every masked rollout; the answers say so
    sys.stdout.write(json.dumps(asyncio.run(collect(json.load(sys.stdin)))))
