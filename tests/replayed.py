"""Captures that tests of the replay read back: scripts of the demo put through a sink, without its processes.

The rule of this module: what is put follows from the script alone, so a test can say what must come back.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from s3capture import S3TokenSink, S3TokenSource
from s3capture.demo.entries import Decision, build_entry
from s3capture.demo.script import Rollout, Script, rebuild
from s3capture.demo.workload import built_in
from s3capture.records import ParentResolutionStatus, TokenEntry


def small(rollouts: int = 8) -> Script:
    """Some rollouts of the built-in workload, with tools and branches, and every second continuation a delta."""
    script = built_in(rollouts=24, outage=False)
    taken = sorted(script.rollouts, key=lambda rollout: len(rollout.calls))[:rollouts]
    return dataclasses.replace(script, rollouts=[_deltas(rollout) for rollout in taken])


def _deltas(rollout: Rollout) -> Rollout:
    calls = [
        dataclasses.replace(call, delta=call.parent is not None and number % 2 == 1)
        for number, call in enumerate(rollout.calls)
    ]
    return dataclasses.replace(rollout, calls=calls)


def entries_of(rollout: Rollout) -> list[TokenEntry]:
    """The records of a rollout whose every parent was resolved."""
    requests, found = rebuild(rollout), {}
    generated = {call.call_id: call.generation_ids for call in rollout.calls}
    for call in rollout.calls:
        if call.parent is None:
            decision = Decision(ParentResolutionStatus.ROOT)
        else:
            before = len(requests[call.parent].prompt) + len(generated[call.parent])
            decision = Decision(ParentResolutionStatus.RESOLVED, parent=call.parent, parent_tokens=before, extends=True)
        found[call.call_id] = build_entry(rollout.rollout_id, call, requests[call.call_id], decision)
    return list(found.values())


def full_prompts(rollout: Rollout) -> dict[str, list[int]]:
    """The whole prompt of each call, by call id."""
    requests = rebuild(rollout)
    return {call.call_id: requests[call.call_id].prompt for call in rollout.calls}


async def capture(script: Script, **settings: Any) -> None:
    """Put every call of ``script``, and freeze its rollouts."""
    sink, source = S3TokenSink(**settings), S3TokenSource(**settings)
    for rollout in script.rollouts:
        for entry in entries_of(rollout):
            await sink.begin_call(rollout.rollout_id, entry.model_call_id)
            await sink.put(entry)
        await source.freeze(rollout.rollout_id)
    await sink.close()
    await source.close()
