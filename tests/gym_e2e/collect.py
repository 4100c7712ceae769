"""A collector: Gym's own finalizer over the source that ``install_source`` installed.

The rule of this module: nothing but Gym's own functions judges a rollout. The first line of its input is the settings,
every other one an order, each answered by one line under the same names: ``{"finalize": [results], "retire": [[rollout,
built]], "freeze": [rollouts], "drop": [[rollout, snapshot_id, version]]}``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import warnings
from typing import Any

from nemo_gym.token_id_capture.delivery import finalize_rollout_token_capture, retire_rollout_token_capture
from nemo_gym.token_id_capture.protocols import TokenCaptureSnapshot, TokenSource, installed_token_source

from s3capture.gym import install_source


async def collect(source: TokenSource, order: dict[str, Any]) -> dict[str, Any]:
    """Do what is ordered and return the answers under the same names."""
    finalized = []
    for result in order.get("finalize", ()):
        built = await finalize_rollout_token_capture(result, source)
        finalized.append({"built": built, "result": result})
    return {
        "finalize": finalized,
        "retire": [await retire_rollout_token_capture(r, source, built) for r, built in order.get("retire", ())],
        "freeze": [_plain(await source.freeze(rollout)) for rollout in order.get("freeze", ())],
        "drop": [
            await source.drop(rollout, snapshot_id=snapshot_id, version=version)
            for rollout, snapshot_id, version in order.get("drop", ())
        ],
    }


def _plain(snapshot: TokenCaptureSnapshot) -> dict[str, Any]:
    assert type(snapshot) is TokenCaptureSnapshot
    return {
        "entries": [entry.model_dump(mode="json") for entry in snapshot.entries],
        "incomplete": snapshot.incomplete,
        "snapshot_id": snapshot.snapshot_id,
        "version": snapshot.version,
    }


async def main() -> None:
    """Install the source, then take orders until the input ends."""
    owned = install_source(**json.loads(sys.stdin.readline()))
    source = installed_token_source()
    assert source is owned
    for line in sys.stdin:
        sys.stdout.write(f"{json.dumps(await collect(source, json.loads(line)))}\n")
        sys.stdout.flush()
    await owned.close()


if __name__ == "__main__":
    warnings.simplefilter("ignore")  # Gym warns about every masked rollout; the answers say so
    asyncio.run(main())
