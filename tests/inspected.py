"""A run in which everything that ``inspection`` and the command line tell apart is there once.

The rule of this module: it makes the run through the endpoints, and writes to the store directly only what they would
never leave behind. What must be seen in it is said in the tests.
"""

from __future__ import annotations

from typing import Any

import pytest
from captures import answered, entry

from s3capture import S3TokenSink, S3TokenSource
from s3capture.errors import ConflictingPayloadError
from s3capture.keys import RunKeys
from s3capture.protocol import bodies
from s3capture.protocol.bodies import Origin
from s3capture.records import TokenEntry
from s3capture.settings import Settings
from s3capture.sink import entry_payload
from s3capture.store.base import Store
from s3capture.store.boto import BotoStore

RUN = "run-7"
PREFIX = "exp"
KEYS = RunKeys(PREFIX, RUN)
WEIRD = "bell \x07 and escape \x1b[31m [bold]"
LONG = "x" * 300
HIDDEN = Origin("elsewhere:1", 1_700_000_000.0, "0" * 32)


async def fill(store: Store | None = None, **settings: Any) -> None:
    """Fill run ``RUN`` with seven rollouts: busy, dropped, open, late, freezing, damaged and retired.

    ``busy`` is frozen with every kind of call; ``late`` is frozen and complete, with an outcome and a begin behind the
    freeze.
    """
    sink = S3TokenSink(store=store, run=RUN, **settings)
    source = S3TokenSource(store=store, run=RUN, **settings)
    first = answered("c1", rollout="busy")
    await sink.begin_call("busy", "c1")
    await sink.put(first)
    child = answered("c2", rollout="busy", parent=first, before=[1, 2, 3, 4, 5], prompt=[9], created_at=1_700_000_005.0)
    await sink.put(child)
    await sink.begin_call("busy", "c3")
    await sink.record_engine_refusal("busy", model_call_id="c3", code="context_length_exceeded")
    with pytest.raises(ConflictingPayloadError):
        await sink.put(entry("c1", "busy", model="another"))
    await sink.mark_incomplete("busy", "c4")
    await sink.begin_call("busy", "c5")
    await source.freeze("busy")
    await sink.mark_incomplete("busy")

    await sink.put(entry("c1", "dropped"))
    snapshot = await source.freeze("dropped")
    assert await source.drop("dropped", snapshot_id=snapshot.snapshot_id, version=snapshot.version)

    await sink.put(entry("c1", "open"))
    await sink.begin_call("open", WEIRD)
    await sink.put(entry(LONG, "late"))
    await source.freeze("late")
    await sink.put(entry("c1", "freezing"))
    await sink.put(entry("c1", "damaged"))
    await sink.put(entry("c1", "retired"))
    await source.retire(["retired"])
    await sink.close()
    await source.close()

    raw = store or BotoStore(Settings.of(run=RUN, **settings))
    behind = KEYS.rollout("late")
    raw.create(behind.call("c9"), stored(entry("c9", "late")))
    raw.create(behind.intent("c8"), bodies.intent(behind, "c8", HIDDEN))
    freezing = KEYS.rollout("freezing")
    raw.create(freezing.closing, bodies.fence("closing", freezing, HIDDEN, why="freeze"))
    damaged = KEYS.rollout("damaged")
    raw.create(damaged.call("c2"), b"no frame at all")
    raw.create(f"{damaged.base}notes/readme.txt", b"not ours")
    raw.create(f"{KEYS.attempts}ab/nobody/readme.txt", b"not ours")
    if store is None:
        raw.close()


def stored(record: TokenEntry) -> bytes:
    """The object of a record, as a put would store it."""
    keys = KEYS.rollout(record.rollout_id)
    return bodies.entry(keys, record.model_call_id, entry_payload(record), fingerprint="", by="elsewhere:1").body
