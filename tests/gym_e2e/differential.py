"""Plays the same on Gym's own stores and on our endpoints, and says where the answers differ.

Reads ``{"seed", "sequences", "recording": path or null}`` from its input and writes ``{"rollouts", "calls",
"operations", "compared", "by_rule", "rules", "faults"}``. Run it by hand with a seed to see one sequence again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import math
import os
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from nemo_gym.token_id_capture.lineage import stamp_continuation
from nemo_gym.token_id_capture.records import TokenEntry
from nemo_gym.token_id_capture.sink import (
    CaptureContext,
    commit_entry,
    register_call_intent,
    reset_token_sink,
    resolve_parent,
    set_token_sink,
)

from gym_e2e.capturing import Capturing
from gym_e2e.ledgers import Ledgers
from gym_e2e.pairs import RULES, Differences, Sides, answer, resolution, snapshot
from s3capture.demo.recording import read_recording
from s3capture.demo.script import Call, Request, Rollout, Script, rebuild
from s3capture.demo.workload import built_in

PER_PAIR = 20  # a MemoryStore lists all it holds, so a pair of sides is replaced before it grows slow


async def replay(sides: Sides, found: Differences, rollout: Rollout) -> None:
    """Take one rollout through Gym's own serving path on both sides; then freeze, compare and drop."""
    requests = rebuild(rollout)
    for call in rollout.calls:
        contexts = []
        for sink, lineage in ((sides.their_store, sides.their_lineage), (sides.sink, sides.resolver)):
            contexts.append(await _serve(rollout.rollout_id, call, requests[call.call_id], sink, lineage))
        theirs, ours = (resolution(("ok", context.parent_resolution)) for context in contexts)
        found.same(f"parent of call {call.call_id} of {rollout.rollout_id}", theirs, ours)
        found.same("committed", *(context.committed for context in contexts))
    frozen = [await source.freeze(rollout.rollout_id) for source in (sides.their_store, sides.source)]
    found.same(f"freeze of {rollout.rollout_id}", *(snapshot(("ok", each)) for each in frozen))
    found.same("every call is there", len(rollout.calls), len(frozen[1].entries))
    dropped = []
    for source, each in zip((sides.their_store, sides.source), frozen, strict=True):
        exact = {"snapshot_id": each.snapshot_id, "version": each.version}
        dropped.append([await answer(lambda: source.drop(rollout.rollout_id, **exact)) for _ in range(2)])  # noqa: B023
    found.same(f"drop of {rollout.rollout_id}", *dropped)


async def replay_non_finite(sides: Sides, found: Differences, rollout: Rollout) -> None:
    """The first call of a rollout with log probabilities that JSON cannot spell: -inf, inf and NaN."""
    first = rollout.calls[0]
    odd = [-math.inf, math.inf, math.nan, *first.log_probs][: len(first.log_probs)]
    call, request = dataclasses.replace(first, log_probs=odd), rebuild(rollout)[first.call_id]
    name = f"{rollout.rollout_id}-odd"
    for sink, lineage in ((sides.their_store, sides.their_lineage), (sides.sink, sides.resolver)):
        await _serve(name, call, request, sink, lineage)
    theirs = await answer(lambda: sides.their_store.freeze(name))
    found.same("their odd log probabilities", True, theirs[0] == "error" and theirs[1].startswith("ValidationError"))
    (entry,) = (await sides.source.freeze(name)).entries
    found.same("our odd log probabilities", list(map(repr, odd)), list(map(repr, entry.generation_log_probs)))
    found.excused("non-finite")


async def _serve(rollout: str, call: Call, request: Request, sink: Any, lineage: Any) -> CaptureContext:
    context = CaptureContext(
        rollout_id=rollout, model_call_id=call.call_id, token_sink=sink, lineage_store=lineage, delta_records=True
    )
    token = set_token_sink(context)
    try:
        await resolve_parent(request.items)
        await register_call_intent()
        entry = TokenEntry(
            rollout_id=rollout,
            model_call_id=call.call_id,
            model=call.model,
            prompt_token_ids=list(request.prompt),
            generation_token_ids=list(call.generation_ids),
            generation_log_probs=list(call.log_probs),
            output_items=list(call.output_items),
            token_item_index=call.token_item_index,
            response_id=call.response_id,
            created_at=call.created_at,
        )
        await commit_entry(stamp_continuation(entry, request.items))
    finally:
        reset_token_sink(token)
    return context


def _finite(rollout: Rollout) -> Rollout:
    """``rollout`` without the values that the file store cannot read back; they are compared apart."""
    calls = [
        dataclasses.replace(call, log_probs=[value if math.isfinite(value) else -9999.0 for value in call.log_probs])
        for call in rollout.calls
    ]
    return dataclasses.replace(rollout, calls=calls)


async def play(given: dict[str, Any], root: Path) -> dict[str, Any]:
    """Replay the recording, then the random sequences of the seed."""
    found = Differences()
    script: Script = read_recording(Path(given["recording"])) if given["recording"] else built_in()
    sides = Sides(root)
    for rollout in script.rollouts:
        await replay(sides, found, _finite(rollout))
    await replay_non_finite(sides, found, script.rollouts[0])
    operations = 0
    for number in range(given["sequences"]):
        if number % PER_PAIR == 0:
            await sides.close()
            sides = Sides(root)
        rng = random.Random(f"{given['seed']} {number}")
        for kind in (Capturing, Ledgers):
            player = kind(sides, found, rng)
            before = len(found.faults)
            await player.sequence(f"s{number}")
            operations += player.operations
            found.faults[before:] = [f"seed {given['seed']} {number}: {fault}" for fault in found.faults[before:]]
    await sides.close()
    return {
        "rollouts": len(script.rollouts),
        "calls": script.calls,
        "operations": operations,
        "compared": found.compared,
        "by_rule": found.by_rule,
        "rules": RULES,
        "faults": found.faults,
    }


def _no_sync(fd: object) -> None:
    """Gym's files are thrown away at the end: whether they outlive a power cut is not the question here."""
    del fd


if __name__ == "__main__":
    os.fsync = _no_sync
    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory() as place:
        sys.stdout.write(json.dumps(asyncio.run(play(json.load(sys.stdin), Path(place)))))
