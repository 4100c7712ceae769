"""A pytest plugin that lets Gym's own integration tests run over our endpoints.

The rule of this module: Gym's test file is not touched. Where it names Gym's file stores, it finds classes with the
same constructor that are our endpoints on a store in memory, one store for each directory it names.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from s3capture.gym import GymCaptureLedger, GymLineageResolver, GymTokenSink, GymTokenSource
from s3capture.store.memory import MemoryStore

_STORES: dict[str, MemoryStore] = {}


def _given(root: Path) -> dict[str, Any]:
    store = _STORES.setdefault(str(root), MemoryStore(str(root)))
    return {"url": "s3://bucket/p", "run": "r", "spill_dir": str(root / "spill"), "store": store}


class TokenStore:
    """Gym's ``TokenCaptureStore`` is sink and source in one; so is this."""

    def __init__(self, root: Path) -> None:
        sink, source = GymTokenSink(**_given(root)), GymTokenSource(**_given(root))
        self.put, self.begin_call, self.mark_incomplete = sink.put, sink.begin_call, sink.mark_incomplete
        self.freeze, self.drop, self.close = source.freeze, source.drop, source.close
        self._root = root

    def read_entries(self, rollout_id: str) -> list[Any]:
        """What the bucket holds so far, in the order it was written, without freezing the rollout itself."""
        copy = MemoryStore("a copy")
        original = _given(self._root)["store"]
        for info in original.list(""):
            copy.create(info.key, original.get(info.key))
        snapshot = asyncio.run(GymTokenSource(**{**_given(self._root), "store": copy}).freeze(rollout_id))
        return sorted(snapshot.entries, key=lambda entry: float(entry.created_at))


class LineageStore(GymCaptureLedger):
    """Gym's ``FileLineageStore`` resolves from token records first and from ledger rows then; so does this."""

    def __init__(self, root: Path) -> None:
        super().__init__(**_given(root))
        self._records = GymLineageResolver(**_given(root))

    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> Any:
        """See ``LineageResolver.resolve``."""
        found = await self._records.resolve(rollout_id, request_items)
        return found if str(found.status) != "unresolved" else await super().resolve(rollout_id, request_items)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put our endpoints where the collected module names Gym's stores; both names must be there."""
    for module in {item.module for item in items if isinstance(item, pytest.Function)}:
        assert module.TokenCaptureStore.__module__.startswith("nemo_gym.")
        assert module.FileLineageStore.__module__.startswith("nemo_gym.")
        module.TokenCaptureStore, module.FileLineageStore = TokenStore, LineageStore


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many stores were written to, so that whoever runs this knows that it was ours that was tested."""
    written = sum(bool(store.list("")) for store in _STORES.values())
    terminalreporter.write_line(f"stores of s3capture written: {written}")
