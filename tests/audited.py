"""A run with one of everything that an audit can find, made through the endpoints as far as those would ever make it.

The rule of this module: each rollout is named after what is wrong with it, and nothing else is; what only a crash, a
bug or a stranger leaves behind is written to the store itself. What must be found is said in the tests.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from captures import QUESTION, answered, continued, entry

from s3capture import S3CaptureLedger, S3TokenSink, S3TokenSource, codec
from s3capture.errors import ConflictingPayloadError
from s3capture.keys import PackName, RunKeys
from s3capture.ledger_records import CallRecord, CaptureLedgerCommit
from s3capture.protocol import bodies
from s3capture.protocol.bodies import Origin
from s3capture.reader import Reader
from s3capture.records import TokenEntry
from s3capture.sink import entry_payload
from s3capture.spill import Spill, SpilledMark
from s3capture.store.memory import MemoryStore

RUN, PREFIX, URL = "run-9", "exp", "s3://bucket/exp"
KEYS = RunKeys(PREFIX, RUN)
GHOST = Origin("ghost:13", 1_700_000_100.0, "0" * 32)
HOSTILE = "</script><script>document.title='owned'</script>"
PACK = PackName("0" * 16, "f" * 16, "ab" * 32)


@contextmanager
def conflicting() -> Iterator[None]:
    """Expect the refusal of a second payload."""
    with pytest.raises(ConflictingPayloadError):
        yield


def stored(record: TokenEntry, **header: Any) -> bytes:
    """The object of a record as a put would store it; ``header`` replaces fields of the header."""
    keys = KEYS.rollout(record.rollout_id)
    payload = entry_payload(record)
    fingerprint = record.continuation_fingerprint
    body = bodies.entry(keys, record.model_call_id, payload, fingerprint=fingerprint, by="elsewhere:1").body
    if not header:
        return body
    fields = {**codec.decode("key", body).header, **header}
    kind = fields.pop("kind")
    for name in ("s3capture", "sha256"):
        fields.pop(name)
    return codec.encode(kind, fields, payload)


class Maker:
    """Endpoints of one run on one store."""

    def __init__(self, store: MemoryStore, spill: Path) -> None:
        settings: dict[str, Any] = {"url": URL, "run": RUN, "store": store, "spill_dir": str(spill)}
        self.store, self.spill = store, spill
        self.sink = S3TokenSink(**settings)
        self.source = S3TokenSource(**settings)
        self.keeping = S3TokenSource(**settings, retention="keep")
        self.ledger = S3CaptureLedger(**settings)

    async def close(self) -> None:
        """Close them all."""
        for endpoint in (self.sink, self.source, self.keeping, self.ledger):
            await endpoint.close()

    async def chain(self, rollout: str) -> list[TokenEntry]:
        """Put a root, a delta and a delta of that, all sound; each is found by its continuation."""
        first = answered("c1", rollout=rollout)
        second = answered(
            "c2",
            continued(),
            "Rain.",
            rollout=rollout,
            parent=first,
            before=[1, 2, 3, 4, 5],
            prompt=[9],
            generation=[7],
        )
        third = answered(
            "c3", continued(text="Rain."), "Snow.", rollout=rollout, parent=second,
            before=[1, 2, 3, 4, 5, 9, 7], prompt=[8], generation=[6],
        )  # fmt: skip
        for record in (first, second, third):
            await self.sink.begin_call(rollout, record.model_call_id)
            await self.sink.put(record)
        return [first, second, third]

    async def delivered(self, rollout: str, *, keep: bool = False) -> None:
        """Freeze a rollout and drop what was frozen."""
        source = self.keeping if keep else self.source
        snapshot = await source.freeze(rollout)
        assert await source.drop(rollout, snapshot_id=snapshot.snapshot_id, version=snapshot.version)


async def fill_sound(make: Maker) -> None:
    """Only what a healthy run leaves: open, frozen, dropped, kept and retired rollouts, with ledgers."""
    for rollout in ("open-1", "frozen-1", "dropped-1", "kept-1", "retired-1"):
        await make.chain(rollout)
    await make.source.freeze("frozen-1")
    await make.delivered("dropped-1")
    await make.delivered("kept-1", keep=True)
    await make.source.retire(["retired-1"])


async def fill_bad(make: Maker) -> None:
    """One rollout for each kind of finding."""
    await _incomplete(make)
    await _standing(make)
    await _untrusted(make)
    await _ledgers(make)
    _strays(make)


async def _incomplete(make: Maker) -> None:
    sink, source = make.sink, make.source
    await make.chain("sealed")
    await sink.begin_call("sealed", "c4")
    await make.delivered("sealed", keep=True)

    await make.chain("conflict")
    with conflicting():
        await sink.put(answered("c1", text="It pours.", rollout="conflict", generation=(4, 6), model="other"))
    await source.freeze("conflict")

    await sink.put(entry("c1", "marked"))
    await sink.mark_incomplete("marked", HOSTILE)
    await source.freeze("marked")

    Spill(make.spill).write(
        SpilledMark("bucket", PREFIX, None, RUN, "spilled", "c1", "ab12", 1_700_000_200.0, "S3 was away", "host:2")
    )
    Spill(make.spill).write(
        SpilledMark("bucket", PREFIX, "http://x:1", RUN, "spilled", "c1", "cd34", 1_700_000_200.0, "away", "host:2")
    )


async def _standing(make: Maker) -> None:
    sink, source = make.sink, make.source
    await sink.put(entry("c1", "open"))
    await sink.begin_call("open", HOSTILE)

    await sink.put(entry("c1", "freezing"))
    keys = KEYS.rollout("freezing")
    make.store.create(keys.closing, bodies.fence("closing", keys, GHOST, why="freeze"))

    await sink.put(entry("c1", "half-dropped"))
    version = (await source.freeze("half-dropped")).version
    keys = KEYS.rollout("half-dropped")
    make.store.create(keys.retiring(version), bodies.fence("retiring", keys, GHOST))

    # The announcement of a drop stands, a mark comes, and whoever finishes the drop refuses it.
    await sink.put(entry("c1", "changed"))
    snapshot = await source.freeze("changed")
    keys = KEYS.rollout("changed")
    make.store.create(keys.retiring(snapshot.version), bodies.fence("retiring", keys, GHOST))
    make.store.create(keys.mark("1" * 32), bodies.mark(keys, "c1", GHOST, "a late loss"))
    assert not await source.drop("changed", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
    await sink.mark_incomplete("changed", "c2")

    await make.chain("residue")
    keys = KEYS.rollout("residue")
    left = {key: make.store.get(key) for key in (keys.call("c2"), keys.intent("c2"))}
    await make.delivered("residue")
    for key, body in left.items():
        make.store.create(key, body or b"")

    await sink.begin_call("refused", "c1")
    await sink.record_engine_refusal("refused", model_call_id="c1", code="context_length_exceeded")

    await sink.put(entry("c1", "late"))
    await source.freeze("late")
    keys = KEYS.rollout("late")
    make.store.create(keys.call("c2"), stored(entry("c2", "late")))
    make.store.create(keys.intent("c3"), bodies.intent(keys, "c3", GHOST))


async def _untrusted(make: Maker) -> None:
    store = make.store
    for rollout in ("damaged", "misplaced", "broken-record", "broken-chain", "wrong-tokens", "markers", "breach"):
        await make.chain(rollout)
    keys = KEYS.rollout("damaged")
    body = store.get(keys.call("c2")) or b""
    store.overwrite(keys.call("c2"), body[:-9] + bytes([body[-9] ^ 1]) + body[-8:])
    store.overwrite(keys.intent("c1"), b"no frame at all")
    # Intact, and of another call.
    keys = KEYS.rollout("misplaced")
    store.overwrite(keys.intent("c3"), store.get(keys.intent("c1")) or b"")

    keys = KEYS.rollout("broken-record")
    payload = codec.canonical({**answered("c3", rollout="broken-record").model_dump(mode="json"), "created_at": "soon"})
    sound = codec.decode("key", store.get(keys.call("c3")) or b"").header
    fields = {name: sound[name] for name in ("run", "rollout", "call", "fingerprint", "by")}
    store.overwrite(keys.call("c3"), codec.encode("entry", {**fields, "identity": payload.digest}, payload))
    store.overwrite(keys.lineage_call(str(fields["fingerprint"]), "c3"), payload.digest.encode())

    keys = KEYS.rollout("broken-chain")
    for kept in store.list(keys.lineage_base):
        if kept.key.endswith("/c1"):
            store.delete([kept.key])
    store.delete([keys.call("c1")])
    child = answered("c4", continued(), "Hail.", rollout="broken-chain", parent=entry("gone"), prompt=[1, 2])
    await make.sink.put(child)

    keys = KEYS.rollout("wrong-tokens")
    lies = answered("c5", [*QUESTION, *QUESTION], rollout="wrong-tokens")
    lies.digest = "0" * 64
    store.create(keys.call("c5"), stored(lies))
    store.create(keys.lineage_call(lies.continuation_fingerprint, "c5"), entry_payload(lies).digest.encode())

    keys = KEYS.rollout("markers")
    by_call = {row.key.rsplit("/", 1)[1]: row.key for row in store.list(keys.lineage_base)}
    store.delete([by_call["c1"]])
    store.overwrite(by_call["c2"], b"f" * 64)
    store.create(keys.lineage_call("1" * 64, "never"), b"e" * 64)

    keys = KEYS.rollout("breach")
    store.create(keys.drop(9), bodies.fence("drop", keys, Origin("", 0.0, ""), retired=False))


def ledger_row(rollout: str, call: str) -> CaptureLedgerCommit:
    """A committed call without a parent."""
    digest = hashlib.sha256(call.encode()).hexdigest()
    record = CallRecord(
        model_call_id=call, prev_len=0, delta_len=5, cum_len=5, weight_version=1, digest=digest, extras_digest=digest,
        staging_key=f"stage/{call}", mode="text", chain_hash=digest, cumulative_hash=digest, response_id=f"resp-{call}",
    )  # fmt: skip
    return CaptureLedgerCommit(rollout_id=rollout, record=record, request_items=QUESTION, response_items=[])


async def _ledgers(make: Maker) -> None:
    ledger = make.ledger
    await make.chain("both")
    for call in ("c1", "c2", "alone"):
        await ledger.begin_call("both", call)
        await ledger.record(ledger_row("both", call))
    await ledger.begin_call("both", "unsettled")
    await ledger.record_failure("both", "failed", "worker_capture_failed")
    await make.source.freeze("both")
    await ledger.close_admissions("both")

    await ledger.begin_call("ledger-only", "c1")


def _strays(make: Maker) -> None:
    store = make.store
    store.create(f"{KEYS.rollout('late').base}notes.txt", b"not ours")
    store.create(f"{KEYS.attempts}ab/nobody/readme.txt", b"not ours")
    store.create(f"{KEYS.root}scratch/readme.txt", b"not ours")
    store.create(KEYS.probe("f00"), b"probe")
    store.create(KEYS.rollout("gone").lineage_call("2" * 64, "c1"), b"a" * 64)
    store.create(KEYS.archive.pack(PACK), b"a pack")


def made(tmp: Path, *, bad: bool) -> MemoryStore:
    """A store with the sound run, and with everything that can be wrong if ``bad``."""
    store = MemoryStore()

    async def fill() -> None:
        make = Maker(store, tmp / "spill")
        await fill_sound(make)
        if bad:
            await fill_bad(make)
        await make.close()

    asyncio.run(fill())
    return store


@contextmanager
def reading(store: MemoryStore) -> Iterator[Reader]:
    """A reader of ``store``."""
    with Reader(store) as reader:
        yield reader
