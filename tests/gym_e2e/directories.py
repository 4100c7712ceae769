"""Gym's own stores on capture directories: fill one as its model server does, and say what a directory holds.

Reads ``{"do", "dir", ...}`` from its input and writes JSON. ``fill`` plays a recording and the odd lives of rollouts,
``snapshots`` freezes a copy of a directory and tells of each rollout what Gym's store and ledger return,
``sourced`` tells what our source and ledger return for the same, ``resume`` goes on in a directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import math
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import orjson
from nemo_gym.token_id_capture.lineage import FileLineageStore
from nemo_gym.token_id_capture.records import TokenEntry, compute_digest
from nemo_gym.token_id_capture.staging.records import CallRecord, CaptureLedgerCommit
from nemo_gym.token_id_capture.store import TokenCaptureStore

from gym_e2e.differential import _serve
from s3capture.demo.recording import read_recording
from s3capture.demo.script import rebuild
from s3capture.demo.workload import built_in
from s3capture.gym import GymCaptureLedger, GymTokenSource

SUFFIX = ".tokens.state.json"


async def fill(given: dict[str, Any]) -> dict[str, Any]:
    """Play a recording (``rollouts`` of it) and freeze every second rollout; then the odd ones, by name."""
    root = Path(given["dir"])
    store, lineage = TokenCaptureStore(root), FileLineageStore(root)
    script = read_recording(Path(given["recording"])) if given["recording"] else built_in()
    calls = 0
    for number, rollout in enumerate(script.rollouts[: given["rollouts"]]):
        requests = rebuild(rollout)
        for call in rollout.calls:
            if all(map(math.isfinite, call.log_probs)):
                await _serve(rollout.rollout_id, call, requests[call.call_id], store, lineage)
                calls += 1
        if number % 2:
            await store.freeze(rollout.rollout_id)
    await store.put(entry("odd-marked", "c1"))
    await store.mark_incomplete("odd-marked", "c2")
    await store.mark_incomplete("odd-marked")
    await store.begin_call("odd-dangling", "c1")
    await store.put(entry("odd-dangling", "c1"))
    await store.begin_call("odd-dangling", "c 2/é")
    await store.freeze("odd-dangling")
    await store.put(entry("odd-conflict", "c1"))
    with contextlib.suppress(ValueError):
        await store.put(entry("odd-conflict", "c1", created_at=2.0))
    await store.put(entry("odd-retired", "c1"))
    frozen = await store.freeze("odd-retired")
    await store.drop("odd-retired", snapshot_id=frozen.snapshot_id, version=frozen.version)
    await store.freeze("odd-empty")
    store.read_entries("odd-lock")  # makes a lock and nothing else
    await store.put(entry("odd-late-mark", "c1"))
    await store.freeze("odd-late-mark")
    await store.mark_incomplete("odd-late-mark", "c2")
    for each in commits():
        await lineage.record(each)
    await lineage.record_failure("odd-ledger", "c3", "worker_capture_failed")
    await lineage.record_failure("odd-ledger", "c1", "said twice")
    (root / "7-3.capture.jsonl").write_text("{}\n")  # an evaluation capture, which is none of ours
    return {"calls": calls, "rollouts": len(script.rollouts[: given["rollouts"]])}


def entry(rollout: str, call: str, **more: Any) -> TokenEntry:
    """A small record."""
    fields = {"generation_token_ids": [4, 5], "generation_log_probs": [-0.25, -1.0], "created_at": 1.5, **more}
    return TokenEntry(rollout_id=rollout, model_call_id=call, prompt_token_ids=[1, 2, 3], **fields)


def commits() -> list[CaptureLedgerCommit]:
    """A chain of two ledger rows."""
    request = [{"role": "user", "content": "hello"}]
    said = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "hi"}]}]
    more = [*request, *said, {"role": "user", "content": "and now?"}]
    answer = [{**said[0], "content": [{"type": "output_text", "text": "bye"}]}]
    return [
        CaptureLedgerCommit(
            rollout_id="odd-ledger", record=_record("c1", None, 0), request_items=request, response_items=said
        ),
        CaptureLedgerCommit(
            rollout_id="odd-ledger",
            record=_record("c2", "c1", 4),
            staging_chain=("k-c1",),
            request_items=more,
            response_items=answer,
        ),
    ]


def _record(call: str, parent: str | None, before: int) -> CallRecord:
    return CallRecord(
        model_call_id=call,
        parent_call_id=parent,
        prev_len=before,
        delta_len=4,
        cum_len=before + 4,
        weight_version=7,
        digest=_hex(call, "digest"),
        extras_digest=_hex(call, "extras"),
        staging_key=f"k-{call}",
        mode="text" if parent is None else "token_in",
        chain_hash=_hex(call, "chain"),
        cumulative_hash=_hex(call, "cumulative"),
        response_id=f"resp-{call}",
        admitted_at=12.5,
        fingerprint_version=2,
    )


def _hex(*parts: str) -> str:
    return hashlib.sha256("/".join(parts).encode()).hexdigest()


async def snapshots(given: dict[str, Any]) -> dict[str, Any]:
    """What Gym's store and ledger return for every rollout of a copy of the directory, by id."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "copy"
        shutil.copytree(given["dir"], copy)
        store, lineage = TokenCaptureStore(copy), FileLineageStore(copy)
        names = {path.name.removesuffix(SUFFIX) for path in copy.glob(f"*{SUFFIX}")}
        names |= {path.name.removesuffix(".lineage.jsonl") for path in copy.glob("*.lineage.jsonl")}
        states = {name: orjson.loads(path.read_bytes()) if (path := copy / f"{name}{SUFFIX}").exists() else {}
                  for name in names}  # fmt: skip
        return {name: await _told(store, lineage, name, states[name]) for name in sorted(names)}


async def _told(store: Any, lineage: Any, name: str, state: dict[str, Any]) -> dict[str, Any]:
    manifest = await lineage.manifest(name)
    manifest["records"].sort(key=lambda record: record["cum_len"])
    manifest["failures"].sort(key=lambda failure: (failure["model_call_id"], failure["reason"]))
    try:
        snapshot = await store.freeze(name)
    except RuntimeError as error:
        return {"error": "retired" if "retired" in str(error) else str(error), "manifest": manifest}
    return {**told(snapshot), "frozen": bool(state.get("frozen")), "manifest": manifest}


def told(snapshot: Any) -> dict[str, Any]:
    """Entries by call, each as the digest of Gym's own bytes of it, and the verdict."""
    entries = {
        each.model_call_id: hashlib.sha256(
            orjson.dumps(each.model_dump(mode="json"), option=orjson.OPT_SORT_KEYS)
        ).hexdigest()
        for each in snapshot.entries
    }
    return {"entries": entries, "incomplete": snapshot.incomplete}


async def sourced(given: dict[str, Any]) -> dict[str, Any]:
    """What ``GymTokenSource`` and ``GymCaptureLedger`` return for rollouts of a bucket, by id."""
    source, ledger = GymTokenSource(**given["settings"]), GymCaptureLedger(**given["settings"])
    found = {}
    for name in given["names"]:
        try:
            answer = told(await source.freeze(name))
        except RuntimeError:
            answer = {"error": "retired"}
        found[name] = {**answer, "manifest": await ledger.manifest(name)}
        found[name]["manifest"]["failures"].sort(key=lambda failure: (failure["model_call_id"], failure["reason"]))
    for each in commits():  # the rows that were imported are the very rows of these commits, or this is a conflict
        await ledger.record(each)
    more = [*commits()[1].request_items, *commits()[1].response_items, {"role": "user", "content": "?"}]
    resolved = await ledger.resolve("odd-ledger", more)
    found["resolved"] = resolved.match.model_call_id if resolved.match else None
    await source.close()
    await ledger.close()
    return found


async def resume(given: dict[str, Any]) -> dict[str, Any]:
    """Go on with an open rollout in a directory: the same put again, another payload, a new call, a continuation."""
    root = Path(given["dir"])
    store, lineage = TokenCaptureStore(root), FileLineageStore(root)
    name = given["rollout"]
    first = store.read_entries(name)[0]
    await store.put(first)
    before = len(store.read_entries(name))
    try:
        await store.put(first.model_copy(update={"created_at": first.created_at + 1}))
        refused = False
    except ValueError:
        refused = True
    await store.put(entry(name, "a-new-call"))
    script = read_recording(Path(given["recording"])) if given["recording"] else built_in()
    rollout = next(each for each in script.rollouts if each.rollout_id == name)
    last = rollout.calls[-1]
    items = [*rebuild(rollout)[last.call_id].items, *last.output_items, {"role": "user", "content": "go on"}]
    resolution = await lineage.resolve(name, items)
    match = resolution.match
    return {
        "before": before,
        "refused": refused,
        "after": len(store.read_entries(name)),
        "parent": match.model_call_id if match else None,
        "proven": bool(match) and compute_digest(list(match.cumulative_token_ids)) == match.digest,
        "last": last.call_id,
    }


if __name__ == "__main__":
    order = json.loads(sys.stdin.read())
    deeds = {"fill": fill, "snapshots": snapshots, "resume": resume, "sourced": sourced}
    sys.stdout.write(json.dumps(asyncio.run(deeds[order["do"]](order))))
