"""A capture directory as nemo-gym 0.7.0 leaves it, made by hand so that tests can spoil it byte by byte.

The rule of this module: it writes what Gym's file store writes, and ``test_gymdir_upstream`` holds the two together:
there Gym itself fills and opens directories.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import orjson
from captures import answered, continued, entry

from s3capture import S3TokenSink, S3TokenSource
from s3capture.gymdir import ImportReport, import_directory
from s3capture.records import TokenEntry
from s3capture.settings import Settings
from s3capture.store.memory import MemoryStore

GIVEN: dict[str, Any] = {"url": "s3://bucket/p", "run": "r"}


def settings(**more: Any) -> Settings:
    """The settings that go with a store in memory."""
    return Settings.of(**{**GIVEN, **more})


def line(record: TokenEntry | dict[str, Any]) -> bytes:
    """The line of a record, without its end."""
    value = record if isinstance(record, dict) else record.model_dump(mode="json")
    return orjson.dumps(value, option=orjson.OPT_SORT_KEYS)


def row(call: str = "c1", parent: str | None = None, before: int = 0, **more: Any) -> dict[str, Any]:
    """A ledger row as Gym's file store writes it."""
    sha = hashlib.sha256(call.encode()).hexdigest()
    return {
        "model_call_id": call, "fingerprint": sha, "context_len": 1, "context_digest": sha, "digest": sha,
        "parent_call_id": parent, "staging_key": f"k-{call}", "weight_version": 3, "prev_len": before, "delta_len": 4,
        "cum_len": before + 4, "staging_digest": sha, "extras_digest": sha, "mode": "token_in" if parent else "text",
        "admitted_at": 12.5, "staging_chain": [], "chain_hash": sha, "cumulative_hash": sha, "response_id": f"r-{call}",
        "output_fingerprint": None, "continuation_fingerprint": None, "fingerprint_version": 2, **more,
    }  # fmt: skip


class GymDirectory:
    """Writes the files of rollouts below ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(exist_ok=True)

    def file(self, rollout: str, suffix: str) -> Path:
        """The path of one file, by what follows the rollout id."""
        return self.root / f"{rollout}.{suffix}"

    def rollout(
        self,
        name: str,
        records: list[Any],
        *,
        intents: list[str] | None = None,
        marks: list[str] | None = None,
        **state: Any,
    ) -> None:
        """Write one rollout with its state; ``state`` replaces fields of it."""
        lines = [line(record) for record in records]
        data = b"".join(each + b"\n" for each in lines)
        if lines:
            self.file(name, "tokens.jsonl").write_bytes(data)
        if intents is not None:
            self.file(name, "tokens.intents").write_text("".join(f"{call}\n" for call in intents))
        if marks is not None:
            self.file(name, "tokens.incomplete").write_text("".join(f"{call}\n" for call in marks))
        calls = [orjson.loads(each)["model_call_id"] for each in lines]
        self.file(name, "tokens.lock").touch()
        self.state(
            name,
            **{
                "incomplete": bool(marks),
                "version": len(lines),
                "entry_digests": {
                    call: hashlib.sha256(each).hexdigest() for call, each in zip(calls, lines, strict=True)
                },
                "indexed_size": len(data),
                **state,
            },
        )

    def state(self, name: str, **state: Any) -> None:
        """Write the state of one rollout."""
        value = {"frozen": False, "retired": False, "incomplete": False, "snapshot_id": "", "version": 0, **state}
        if value["frozen"]:
            value["snapshot_id"] = value["snapshot_id"] or "a" * 32
        self.file(name, "tokens.state.json").write_bytes(orjson.dumps(value, option=orjson.OPT_SORT_KEYS) + b"\n")

    def ledger(self, name: str, rows: list[dict[str, Any]]) -> None:
        """Write the ledger of one rollout."""
        text = "".join(json.dumps(each, sort_keys=True, separators=(",", ":")) + "\n" for each in rows)
        self.file(name, "lineage.jsonl").write_text(text)

    def bytes(self) -> dict[str, tuple[bytes, int]]:
        """Everything in the directory, with the times of change."""
        return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in sorted(self.root.iterdir())}

    def bring(self, store: MemoryStore, **more: Any) -> ImportReport:
        """Import it all."""
        return import_directory(self.root, settings(), store, **more)


def chain(rollout: str, *, delta: bool = True) -> list[TokenEntry]:
    """Three calls, each continuing the one before it; the second as a delta, as Gym stores it by default."""
    first = answered("c1", rollout=rollout)
    before = [1, 2, 3, 4, 5]
    second = answered(
        "c2",
        continued(),
        "Cloudy.",
        rollout=rollout,
        parent=first,
        before=before if delta else None,
        prompt=[7] if delta else [*before, 7],
        created_at=1_700_000_001.0,
    )
    third = answered(
        "c3",
        continued(continued(), "Cloudy."),
        "Rain.",
        rollout=rollout,
        parent=second,
        before=[*before, 7, 4, 5] if delta else None,
        prompt=[8] if delta else [*before, 7, 4, 5, 8],
        created_at=1_700_000_002.0,
    )
    return [first, second, third]


def everything(root: Path) -> GymDirectory:
    """A directory with one rollout of each kind that Gym's store knows."""
    gym = GymDirectory(root)
    gym.rollout("open", chain("open"), intents=["c1", "c2", "c3"])
    gym.rollout("frozen", chain("frozen", delta=False), intents=["c1", "c2", "c3"], frozen=True, version=4)
    gym.rollout("dangling", [entry("c1", "dangling")], intents=["c1", "c2"], frozen=True)
    gym.rollout("marked", [entry("c1", "marked")], marks=["c2", "", "c2"])
    gym.rollout("stated", [entry("c1", "stated")], incomplete=True)
    gym.rollout("empty", [], frozen=True)
    gym.rollout("retired", [], frozen=True, retired=True, snapshot_id="b" * 32, version=2)
    gym.file("locked-once", "tokens.lock").touch()
    gym.ledger("staged", [row("c1"), row("c2", "c1", 4), {"model_call_id": "c3", "failure_reason": "lost"}])
    gym.file("7-3", "capture.jsonl").write_text("{}\n")
    return gym


def held(store: MemoryStore) -> dict[str, bytes]:
    """Everything in a store but scratch keys."""
    return {row.key: store.get(row.key) or b"" for row in store.list("") if "/probe/" not in row.key}


def copy_of(store: MemoryStore) -> MemoryStore:
    """A store with the same objects."""
    copy = MemoryStore("a copy")
    for key, body in held(store).items():
        copy.create(key, body)
    return copy


def frozen(store: MemoryStore, rollout: str) -> Any:
    """The snapshot of a rollout, frozen in a copy of the store."""
    return asyncio.run(S3TokenSource(store=copy_of(store), **GIVEN).freeze(rollout))


def put(store: MemoryStore, *records: TokenEntry) -> None:
    """Put records as a sink does."""

    async def all_of_them() -> None:
        sink = S3TokenSink(store=store, **GIVEN)
        for record in records:
            await sink.put(record)

    asyncio.run(all_of_them())
