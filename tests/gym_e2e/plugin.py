"""What the plug-in does with the nemo-gym that is installed, told as facts; ``test_gym_plugin`` judges them.

``python -m gym_e2e.plugin NAME`` calls the function of that name with the JSON of its input as keywords and writes what
it returns.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Awaitable
from typing import Any

from nemo_gym.token_id_capture.lineage import stamp_continuation
from nemo_gym.token_id_capture.records import ParentResolutionStatus, TokenEntry, stamp_lineage

from gym_e2e import newer as upcoming
from s3capture.gym import (
    GymCaptureLedger,
    GymLineageResolver,
    GymTokenSink,
    GymTokenSource,
    RunInUseError,
    preflight,
)
from s3capture.gym.upstream import upstream
from s3capture.settings import Settings
from s3capture.store.boto import BotoStore
from s3capture.store.memory import MemoryStore

ROLLOUT = "7-3"
QUESTION = [{"role": "user", "content": "what now?"}]


def _given(**more: Any) -> dict[str, Any]:
    return {"url": "s3://bucket/p", "run": "r", **more}


def _entry(call: str, text: str = "that", request: list[dict[str, Any]] = QUESTION, **more: Any) -> Any:
    entry = TokenEntry(
        rollout_id=ROLLOUT,
        model_call_id=call,
        prompt_token_ids=[1, 2, 3],
        generation_token_ids=[4, 5],
        generation_log_probs=[-0.5, -0.25],
        output_items=[{"role": "assistant", "content": text}],
        token_item_index=0,
        created_at=1.0,
        **more,
    )
    return stamp_lineage(stamp_continuation(entry, request), None, parent_resolution=ParentResolutionStatus.ROOT)


def _continued(text: str = "that") -> list[dict[str, Any]]:
    return [*QUESTION, {"role": "assistant", "content": text}, {"role": "user", "content": "and then?"}]


async def _raised(awaited: Awaitable[Any]) -> list[str]:
    """The names of all classes of what was raised, with their modules; nothing when nothing was."""
    try:
        await awaited
    except Exception as error:  # noqa: BLE001 - what is raised is the fact to tell
        return [f"{each.__module__}.{each.__name__}" for each in type(error).__mro__]
    return []


def constructing() -> dict[str, Any]:
    """What constructors do besides remembering: audit events, threads, and whether a second one is the same."""
    upstream()  # reading nemo_gym's code is not the constructor's doing
    seen: list[str] = []
    quiet = ("object.", "compile", "exec", "import", "sys.", "code.")
    sys.addaudithook(lambda event, _: seen.append(event) if armed and not event.startswith(quiet) else None)
    threads, armed = threading.active_count(), True
    made = [
        make(**_given()) for make in (GymTokenSink, GymTokenSource, GymLineageResolver, GymCaptureLedger) for _ in "12"
    ]
    armed = False
    return {"events": seen, "threads": threading.active_count() - threads, "made": len(made)}


def late_marks(newer: str | None = None) -> dict[str, Any]:
    """Marks after a put that a freeze refused: which of them changed the snapshot."""
    if newer:
        upcoming.pretend(newer)

    async def run() -> dict[str, Any]:
        store = MemoryStore()
        sink, source = GymTokenSink(**_given(), store=store), GymTokenSource(**_given(), store=store)
        await sink.put(_entry("a"))

        async def changed(mark: Awaitable[Any]) -> bool:
            before = await source.freeze(ROLLOUT)
            await mark
            after = await source.freeze(ROLLOUT)
            return bool(before.version != after.version)

        await source.freeze(ROLLOUT)
        refused = await _raised(sink.put(_entry("late")))
        return {
            "refused": refused,
            "another call": await changed(sink.mark_incomplete(ROLLOUT, "other")),
            "no call": await changed(sink.mark_incomplete(ROLLOUT)),
            "that call": await changed(sink.mark_incomplete(ROLLOUT, "late")),
            "that call again": await changed(sink.mark_incomplete(ROLLOUT, "late")),
        }

    return asyncio.run(run())


def conflicts_are_marked() -> bool:
    """Whether the mark after a put that failed for another reason than a fence is kept."""

    async def run() -> bool:
        store = MemoryStore()
        sink, source = GymTokenSink(**_given(), store=store), GymTokenSource(**_given(), store=store)
        await sink.put(_entry("a"))
        assert "s3capture.errors.ConflictingPayloadError" in await _raised(sink.put(_entry("a", "something else")))
        before = (await source.freeze(ROLLOUT)).version
        await sink.mark_incomplete(ROLLOUT, "a")
        return bool((await source.freeze(ROLLOUT)).version != before)

    return asyncio.run(run())


def errors_of(newer: str) -> dict[str, Any]:
    """Every contract error that an endpoint raises with the newer package installed, by all its classes."""
    upcoming.pretend(newer)

    async def run() -> dict[str, Any]:
        store = MemoryStore()
        sink, source = GymTokenSink(**_given(), store=store), GymTokenSource(**_given(), store=store)
        ledger = GymCaptureLedger(**_given(), store=store)
        frozen = await source.freeze(ROLLOUT)
        refusal = {"model_call_id": "c", "code": "x"}
        told = {
            "frozen put": await _raised(sink.put(_entry("late"))),
            "frozen begin": await _raised(sink.begin_call(ROLLOUT, "late")),
            "frozen refusal": await _raised(sink.record_engine_refusal(ROLLOUT, **refusal)),
        }
        await source.drop(ROLLOUT, snapshot_id=frozen.snapshot_id, version=frozen.version)
        told |= {
            "retired put": await _raised(sink.put(_entry("late"))),
            "retired begin": await _raised(sink.begin_call(ROLLOUT, "late")),
            "retired mark": await _raised(sink.mark_incomplete(ROLLOUT, "other")),
            "retired refusal": await _raised(sink.refuse_call(ROLLOUT, **refusal)),
            "retired freeze": await _raised(source.freeze(ROLLOUT)),
        }
        await ledger.begin_call(ROLLOUT, "c")
        await ledger.retire([ROLLOUT])
        return told | {
            "ledger manifest": await _raised(ledger.manifest(ROLLOUT)),
            "ledger has_rows": await _raised(ledger.has_rows(ROLLOUT)),
            "ledger close": await _raised(ledger.close_admissions(ROLLOUT)),
            "ledger begin": await _raised(ledger.begin_call(ROLLOUT, "d")),
        }

    return asyncio.run(run())


def refusals(newer: str, refusals_field: str = "engine_refusals") -> dict[str, Any]:
    """A refused call and its parent's status, as the newer package's snapshot shows it."""
    protocols = upcoming.pretend(newer, refusals_field)

    async def run() -> dict[str, Any]:
        store = MemoryStore()
        sink, source = GymTokenSink(**_given(), store=store), GymTokenSource(**_given(), store=store)
        await sink.begin_call(ROLLOUT, "c")
        await sink.record_engine_refusal(
            ROLLOUT,
            model_call_id="c",
            code="length",
            parent_call_id="a",
            parent_resolution=upcoming.ParentResolutionStatus.RESOLVED,
        )
        snapshot = await source.freeze(ROLLOUT)
        (refusal,) = getattr(snapshot, refusals_field)
        return {
            "snapshot": type(snapshot) is protocols.TokenCaptureSnapshot,
            "record": upcoming.RECORDS[newer] is None or type(refusal) is upcoming.RECORDS[newer],
            "theirs": upcoming.RECORDS[newer] is None
            or refusal.parent_resolution is upcoming.ParentResolutionStatus.RESOLVED,
            "incomplete": snapshot.incomplete,
            "values": [refusal.model_call_id, refusal.code, refusal.parent_call_id, str(refusal.parent_resolution)],
            "rollout": getattr(refusal, "rollout_id", None),
        }

    return asyncio.run(run())


def budgets(length: int) -> dict[str, Any]:
    """Trips and requests of each operation in a rollout of ``length`` calls, from ``stats``."""

    async def run() -> dict[str, Any]:
        store = MemoryStore()
        sink, source = GymTokenSink(**_given(), store=store), GymTokenSource(**_given(), store=store)
        resolver = GymLineageResolver(**_given(), store=store)
        await sink.mark_incomplete("another")  # pays for the check of the store
        for number in range(length - 1):
            await sink.put(_entry(f"c{number}", f"answer {number}"))
        told = {}

        async def cost(name: str, operation: Awaitable[Any]) -> Any:
            before = _totals(sink)
            result = await operation
            told[name] = [now - then for now, then in zip(_totals(sink), before, strict=True)]
            return result

        await cost("resolve root", resolver.resolve(ROLLOUT, QUESTION))
        await cost("begin_call", sink.begin_call(ROLLOUT, "x1"))
        await cost("put begun here", sink.put(_entry("x1")))
        await cost("resolve cold", resolver.resolve(ROLLOUT, _continued()))
        await cost("resolve held", resolver.resolve(ROLLOUT, _continued()))
        snapshot = await cost("freeze", source.freeze(ROLLOUT))
        exact = {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}
        await cost("drop", source.drop(ROLLOUT, **exact))
        other = _entry("x2")
        other.rollout_id = "7-4"
        await cost("put not begun here", sink.put(other))
        await cost("mark_incomplete", sink.mark_incomplete("7-4"))
        return told

    return asyncio.run(run())


def _totals(endpoint: GymTokenSink) -> tuple[int, int]:
    stats = endpoint.stats().values()
    return sum(each.trips for each in stats), sum(each.requests for each in stats)


def a_run(settings: dict[str, Any]) -> dict[str, Any]:
    """``preflight`` on a run before and after it holds data."""

    def tried(**more: Any) -> Any:
        try:
            return preflight(**{**settings, **more})
        except RunInUseError as error:
            return str(error)

    told = {"fresh": [tried(), tried()], "left": _keys(settings)}

    async def put() -> None:
        sink = GymTokenSink(**settings)
        await sink.put(_entry("a"))
        await sink.close()

    asyncio.run(put())
    return told | {"used": tried(), "resumed": tried(resume=True), "another": tried(run="another")}


def _keys(settings: dict[str, Any]) -> list[str]:
    return [info.key for info in BotoStore(Settings.of(**settings)).list("")]


if __name__ == "__main__":
    keywords = json.load(sys.stdin) or {}
    sys.stdout.write(json.dumps(globals()[sys.argv[1]](**keywords)))
