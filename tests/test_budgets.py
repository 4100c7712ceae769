"""What each operation costs: the table of the design, measured by the endpoints and counted on the wire.

Trips are sequential round trips, requests are what went over the wire. Both must not grow with the length of a
rollout (a freeze and a cold resolve read records, so their requests do, their trips do not), and ``stats`` must say
what was really sent.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest
from captures import QUESTION, ROLLOUT, answered, continued, entry, on_fake
from fakes3 import FakeS3

from s3capture import S3LineageResolver, S3TokenSink, S3TokenSource
from s3capture.store.memory import MemoryStore

_T = TypeVar("_T")
LENGTHS = [1, 40]


@dataclass
class Bench:
    """Endpoints on one store; ``cost`` runs one operation and returns (trips, requests), wire-checked if possible."""

    settings: dict[str, Any]
    s3: FakeS3 | None

    def __post_init__(self) -> None:
        self.sink = S3TokenSink(**self.settings)
        self.source = S3TokenSource(**self.settings)
        self.resolver = S3LineageResolver(**self.settings)

    def wire(self) -> int:
        return len([r for r in self.s3.requests if "/probe/" not in r.key]) if self.s3 else 0

    def totals(self) -> tuple[int, int]:
        stats = self.sink.stats().values()
        return sum(s.trips for s in stats), sum(s.requests for s in stats)

    def cost(self, operation: Awaitable[_T]) -> tuple[int, int]:
        (trips, requests), wire = self.totals(), self.wire()

        async def run() -> _T:
            return await operation

        asyncio.run(run())
        after = self.totals()
        if self.s3:
            assert self.wire() - wire == after[1] - requests
        return after[0] - trips, after[1] - requests

    def fill(self, length: int) -> None:
        async def put_all() -> None:
            for number in range(length):
                request = QUESTION if number == 0 else [{"role": "user", "content": f"question {number}"}]
                await self.sink.put(answered(f"c{number}", request, created_at=float(number)))

        asyncio.run(put_all())


@pytest.fixture(params=["memory", "wire"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    if request.param == "memory":
        yield Bench({"url": "s3://capture/p", "run": "r", "store": MemoryStore(), "spill_dir": str(tmp_path)}, None)
        return
    with FakeS3() as s3:
        made = Bench(on_fake(s3, tmp_path / "spill", read_timeout_s=10.0), s3)
        # The first use pays for the check of the store; what follows is the price of the operation alone.
        asyncio.run(made.sink.mark_incomplete("another"))
        yield made


def test_the_check_at_first_use_comes_once(tmp_path: Path) -> None:
    """The first write of a process is preceded by four scratch requests, and no later one is; reads need none."""
    with FakeS3() as s3:
        given = on_fake(s3, tmp_path)
        sink, source, resolver = S3TokenSink(**given), S3TokenSource(**given), S3LineageResolver(**given)
        asyncio.run(resolver.resolve(ROLLOUT, continued()))
        assert not s3.seen(key="*/probe/*")
        asyncio.run(sink.put(entry("c1")))
        asyncio.run(sink.put(entry("c2")))
        asyncio.run(source.freeze(ROLLOUT))
        scratch = [r for r in s3.requests if "/probe/" in r.key or r.operation == "DeleteObjects"]
        assert [r.operation for r in scratch] == ["PutObject", "PutObject", "GetObject", "DeleteObjects"]
        assert not [key for key in s3.objects if "/probe/" in key]


@pytest.mark.parametrize("length", LENGTHS)
def test_writes(bench: Bench, length: int) -> None:
    """Begin, put, refusal and mark cost what the design says, however many calls came before."""
    bench.fill(length)
    assert bench.cost(bench.sink.begin_call(ROLLOUT, "x1")) == (2, 2)
    assert bench.cost(bench.sink.put(answered("x1"))) == (1, 2)
    assert bench.cost(bench.sink.put(answered("x1"))) == (3, 4), "a repeated put reads what stands and looks"
    assert bench.cost(bench.sink.put(answered("x2"))) == (2, 3)
    assert bench.cost(bench.sink.put(entry("x3"))) == (2, 2), "an unstamped record needs no lineage marker"
    assert bench.cost(bench.sink.begin_call(ROLLOUT, "x4")) == (2, 2)
    assert bench.cost(bench.sink.record_engine_refusal(ROLLOUT, model_call_id="x4", code="too_long")) == (2, 2)
    assert bench.cost(bench.sink.mark_incomplete(ROLLOUT, "x5")) == (2, 2)


@pytest.mark.parametrize("length", LENGTHS)
def test_resolve(bench: Bench, length: int) -> None:
    """A root sends nothing, a cold parent costs a LIST and a read, a parent in memory the LIST alone."""
    bench.fill(length)
    assert bench.cost(bench.resolver.resolve(ROLLOUT, QUESTION)) == (0, 0)
    assert bench.cost(bench.resolver.resolve(ROLLOUT, continued())) == (2, 1 + length), "one read for each candidate"
    again = 1 if length == 1 else 2
    assert bench.cost(bench.resolver.resolve(ROLLOUT, continued()))[0] == again
    assert bench.cost(bench.resolver.resolve(ROLLOUT, continued(text="never said"))) == (1, 1)


@pytest.mark.parametrize("length", LENGTHS)
def test_resolve_of_one_candidate(bench: Bench, length: int) -> None:
    """With one candidate the costs are 2 / 2 cold and 1 / 1 in memory, however long the rollout is."""
    for number in range(length):
        asyncio.run(bench.sink.put(answered(f"c{number}", text=f"answer {number}")))
    text = f"answer {length - 1}"
    assert bench.cost(bench.resolver.resolve(ROLLOUT, continued(text=text))) == (2, 2)
    assert bench.cost(bench.resolver.resolve(ROLLOUT, continued(text=text))) == (1, 1)


@pytest.mark.parametrize("length", LENGTHS)
def test_cold_delta_chain(bench: Bench, length: int) -> None:
    """Behind a delta, a cold resolve lists once more and reads the chain side by side: four trips at any length."""
    tokens: list[int] = []
    request, parent = list(QUESTION), None
    for number in range(length + 1):
        text = f"answer {number}"
        made = answered(f"c{number}", request, text, parent=parent, before=tokens if parent else None)
        asyncio.run(bench.sink.put(made))
        tokens += [*made.prompt_token_ids, *made.generation_token_ids]
        request, parent = continued(request, text), made
    assert bench.cost(bench.resolver.resolve(ROLLOUT, request)) == (4, 2 + 1 + length)


@pytest.mark.parametrize("length", LENGTHS)
def test_freeze(bench: Bench, length: int) -> None:
    """A first freeze of T calls costs 4 trips and 4 + T requests, a repeated one 3 trips and 2 + T."""
    bench.fill(length)
    assert bench.cost(bench.source.freeze(ROLLOUT)) == (4, 4 + length)
    assert bench.cost(bench.source.freeze(ROLLOUT)) == (3, 2 + length)


@pytest.mark.parametrize("length", LENGTHS)
def test_drop(bench: Bench, length: int) -> None:
    """A drop decides in 4 trips and 5 requests; deleting behind the decision adds a fixed number of trips."""
    bench.fill(length)
    snapshot = asyncio.run(bench.source.freeze(ROLLOUT))
    exact: dict[str, Any] = {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}
    assert bench.cost(bench.source.drop(ROLLOUT, snapshot_id="other", version=1)) == (1, 2)
    keeping = S3TokenSource(**{**bench.settings, "retention": "keep"})
    before = bench.wire()
    assert asyncio.run(keeping.drop(ROLLOUT, **exact)) is True
    kept = keeping.stats()["drop"]
    assert (kept.trips, kept.requests) == (4, 5)
    if bench.s3:
        assert bench.wire() - before == 5 + 1, "the check at first use deletes its scratch key by DeleteObjects"


@pytest.mark.parametrize("length", LENGTHS)
def test_drop_with_deletes(bench: Bench, length: int) -> None:
    """Seals are told apart, lineage is listed, everything is deleted: 3 trips more at any length."""
    bench.fill(length)
    snapshot = asyncio.run(bench.source.freeze(ROLLOUT))
    exact: dict[str, Any] = {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}
    trips, requests = bench.cost(bench.source.drop(ROLLOUT, **exact))
    assert trips == 4 + 3
    assert requests <= 5 + length + 2
