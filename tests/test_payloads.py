"""Every value that a record may hold comes back as itself, to the bit; every other is refused before anything is sent.

Through put and freeze, on the store in memory and on a real server: what is stored is judged, not what was encoded.
"""

from __future__ import annotations

import asyncio
import datetime
import decimal
import math
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from captures import ROLLOUT, answered, captures, continued, entry

from s3capture import S3LineageResolver, S3TokenSink, S3TokenSource
from s3capture.codec import MAX_DEPTH
from s3capture.errors import ConflictingPayloadError, UnstorableValueError
from s3capture.local import EmbeddedServer
from s3capture.records import ParentResolutionStatus, TokenEntry
from s3capture.settings import Settings
from s3capture.store.base import Store
from s3capture.store.boto import BotoStore
from s3capture.store.memory import MemoryStore

_random = random.Random(20_240_607)


@dataclass
class Place:
    """A bucket and the settings to reach it."""

    settings: dict[str, Any]
    store: Store

    def keys(self) -> list[str]:
        return captures([row.key for row in self.store.list("")])


@pytest.fixture(params=["memory", "seaweed"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    settings: dict[str, Any] = {"url": "s3://capture/p", "run": "r", "spill_dir": str(tmp_path / "spill")}
    if request.param == "memory":
        store = MemoryStore()
        yield Place({**settings, "store": store}, store)
        return
    server: EmbeddedServer = request.getfixturevalue("seaweed")
    bucket: str = request.getfixturevalue("bucket")
    settings |= {"url": f"s3://{bucket}/p", "endpoint_url": server.endpoint_url}
    boto = BotoStore(Settings.of(**settings))
    yield Place(settings, boto)
    boto.close()


def bits(value: Any) -> Any:
    """A form of ``value`` in which equal means equal to the bit: NaN is itself, -0.0 is not 0.0, 1 is not 1.0."""
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, float):
        return "float", struct.pack(">d", math.nan if math.isnan(value) else value)
    if isinstance(value, str):
        return "str", str.__str__(value)
    if isinstance(value, int):
        return "int", value
    if isinstance(value, dict):
        return {str(key): bits(item) for key, item in value.items()}
    return [bits(item) for item in value]


def nested(levels: int) -> Any:
    """Lists within lists, ``levels`` containers in all."""
    value: Any = "deep"
    for _ in range(levels):
        value = [value]
    return value


ODD_FLOATS = [-math.inf, math.inf, math.nan, -9999.0, -0.0, 0.0, 0.031, 5e-324, 1.7976931348623157e308, -1e-45, 0.1]
ODD_TEXT = ["\ud800", "a\udfffb", "\udc00\ud800", "\x00\x1f\x7f", "\u2028é𝄞", "e\u0301", "</Key>&lt;", ""]
LONG = [_random.randrange(151_936) for _ in range(30_000)]

# Fields 1, list 2, item 3: so many levels are used up where nested values of an output item begin.
ROOM = MAX_DEPTH - 3

GOOD: dict[str, dict[str, Any]] = {
    "log probs of every kind": {"generation_token_ids": [7] * len(ODD_FLOATS), "generation_log_probs": ODD_FLOATS},
    "floats in items": {"output_items": [{"values": ODD_FLOATS, "one": -math.inf, "-0": -0.0}]},
    "text": {"output_items": [{"text": text, text + "key": 1} for text in ODD_TEXT if text.isascii()]},
    "lone surrogates": {"output_items": [{"text": text, "of": [text, None]} for text in ODD_TEXT]},
    "lone surrogate beside NaN": {"output_items": [{"text": "\ud800", "value": math.nan, "big": 2**64 + 1}]},
    "big ints": {"output_items": [{"n": [2**64 + 1, -(2**63) - 1, 2**63, 2**64 - 1, -(2**63), 10**300]}]},
    "mixed numbers": {"output_items": [{"n": [1, 1.0, True, None, "1", 2**53 + 1, 0, False, -0.0]}]},
    "token ids beyond 64 bits": {"prompt_token_ids": [0, 2**32, 2**63, 2**64 + 1]},
    "deep": {"output_items": [{"deep": nested(ROOM)}]},
    "unknown fields": {"reward": math.nan, "nested": {"a": [1, {"b": None}]}, "s3capture": 1, "sha256": "x"},
    "nothing generated": {"generation_token_ids": [], "generation_log_probs": [], "finish_reason": "abort"},
    "nothing at all": {"prompt_token_ids": [], "generation_token_ids": [], "generation_log_probs": []},
    "30,000 tokens": {
        "prompt_token_ids": LONG[:1000],
        "generation_token_ids": LONG,
        "generation_log_probs": [-_random.expovariate(1.0) for _ in LONG],
    },
    "routed experts": {"routed_experts": [[[3, 1], [2, 0]], [[None, -math.inf], []]]},
    "dates as numbers": {"created_at": 1_700_000_000.123456789},
    "fields that are no text": {"model": "m\ud800", "response_id": "\udfff", "output_items": [{"\ud800": "\udc00"}]},
    "newlines": {"model": "a\nb\r\n\n{}", "response_id": ""},
}


def test_every_good_value_comes_back_by_bits(place: Place) -> None:
    """Each record of the table is frozen as it was put, field by field and bit by bit."""
    given = {name: entry(f"call {name} \ud83d", **fields) for name, fields in GOOD.items()}
    wanted = {made.model_call_id: bits(made.model_dump()) for made in given.values()}

    async def run() -> tuple[TokenEntry, ...]:
        sink, source = S3TokenSink(**place.settings), S3TokenSource(**place.settings)
        for made in given.values():
            await sink.put(made)
            await sink.put(made.model_copy(deep=True))
        snapshot = await source.freeze(ROLLOUT)
        assert not snapshot.incomplete
        return snapshot.entries

    frozen = {found.model_call_id: bits(found.model_dump()) for found in asyncio.run(run())}
    assert frozen.keys() == wanted.keys()
    for call, fields in wanted.items():
        assert frozen[call] == fields, call


def _assign(**fields: Any) -> Callable[[TokenEntry], None]:
    def breaking(made: TokenEntry) -> None:
        for name, value in fields.items():
            setattr(made, name, value)

    return breaking


def _circle(made: TokenEntry) -> None:
    loop: list[Any] = []
    loop.append(loop)
    made.output_items = [{"loop": loop}]


_NOW = datetime.datetime(2030, 1, 2, tzinfo=datetime.UTC)

BAD: dict[str, tuple[Callable[[TokenEntry], None], str]] = {
    "bytes": (_assign(output_items=[{"raw": b"x"}]), "output_items[0].raw"),
    "a set": (_assign(output_items=[{}, {"tags": {1, 2}}]), "output_items[1].tags"),
    "a datetime": (_assign(routed_experts={"at": [_NOW]}), "routed_experts.at[0]"),
    "a decimal": (_assign(extra=decimal.Decimal("0.1")), "extra"),
    "an object": (_assign(extra=[object()]), "extra[0]"),
    "a number as key": (_assign(output_items=[{"map": {7: "x"}}]), "output_items[0].map[7]"),
    "None as key": (_assign(extra={None: "x"}), "extra[None]"),
    "too deep": (_assign(output_items=[{"deep": nested(ROOM + 1)}]), "output_items[0].deep"),
    "far too deep": (_assign(output_items=[{"deep": nested(5000)}]), ""),
    "a circle": (_circle, ""),
    "a split pair": (_assign(output_items=[{"text": "a\ud83d\ude00b"}]), "output_items[0].text"),
    "a split pair in a key": (_assign(output_items=[{"\ud83d\ude00": 1}]), "output_items[0]"),
    "no log prob": (_assign(generation_log_probs=[-0.1, None]), "generation_log_probs[1]"),
    "a bool as token id": (_assign(prompt_token_ids=[1, True, 3]), "prompt_token_ids[1]"),
    "a float as token id": (_assign(generation_token_ids=[4, 5.0]), "generation_token_ids[1]"),
    "a string as log prob": (_assign(generation_log_probs=["-0.1", -0.2]), "generation_log_probs[0]"),
    "a tuple of ids": (_assign(prompt_token_ids=(1, 2, 3)), "prompt_token_ids"),
    "a lost log prob": (_assign(generation_log_probs=[-0.1]), "generation_log_probs"),
    "an index outside": (_assign(token_item_index=0), "token_item_index"),
    "a parent of a root": (_assign(parent_call_id="c0", parent_resolution="root"), "parent_call_id"),
    "no parent": (_assign(parent_resolution=ParentResolutionStatus.RESOLVED), "parent_call_id"),
    "a delta of nothing": (_assign(prompt_is_delta=True), "prompt_is_delta"),
    "a newer schema": (_assign(schema_version=2), "schema_version"),
    "an item that is no object": (_assign(output_items=["text"]), "output_items[0]"),
    "an int that no text form holds": (_assign(extra=10**5000), "extra"),
    "a log prob beyond floats": (_assign(generation_log_probs=[10**400, -0.1]), "generation_log_probs[0]"),
    "a log prob that a float rounds": (_assign(generation_log_probs=[2**53 + 1, -0.1]), "generation_log_probs[0]"),
    "a time beyond floats": (_assign(created_at=10**400), "created_at"),
    "an unknown field that is no text": (_assign(**{"x\ud800": 1}), "the record"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_would_not_come_back_is_refused(name: str) -> None:
    """Put names the path of the value and sends nothing; the record can be put once the value is mended."""
    breaking, path = BAD[name]
    store = MemoryStore()
    settings: Any = {"url": "s3://capture/p", "run": "r", "store": store}
    made = entry()
    breaking(made)

    async def run() -> None:
        sink = S3TokenSink(**settings)
        with pytest.raises(UnstorableValueError) as refused:
            await sink.put(made)
        assert refused.value.path.startswith(path), refused.value
        assert len(str(refused.value)) < 1000
        assert not store.list("")
        await sink.put(entry())
        assert len((await S3TokenSource(**settings).freeze(ROLLOUT)).entries) == 1

    asyncio.run(run())


def test_refusals_on_a_real_server_leave_the_bucket_alone(place: Place) -> None:
    """Whatever is refused, the listing of the bucket is what it was before."""

    async def run() -> None:
        sink = S3TokenSink(**place.settings)
        await sink.put(entry("good"))
        before = place.keys()
        for breaking, _ in BAD.values():
            made = entry("bad")
            breaking(made)
            with pytest.raises(UnstorableValueError):
                await sink.put(made)
        assert place.keys() == before

    asyncio.run(run())


def test_a_record_above_the_size_limit_is_refused_before_it_is_sent() -> None:
    """A record larger than max_object_bytes is refused by name, and nothing is stored."""
    store = MemoryStore()
    sink = S3TokenSink(url="s3://capture/p", run="r", max_object_bytes=2000, store=store)
    with pytest.raises(UnstorableValueError, match="max_object_bytes is 2000"):
        asyncio.run(sink.put(entry(prompt_token_ids=LONG)))
    assert not store.list("")


def test_the_bytes_are_fixed_when_put_is_called() -> None:
    """A record changed after put was called, and before it ran, is stored as it was at the call."""
    settings: Any = {"url": "s3://capture/p", "run": "r", "store": MemoryStore()}

    async def run() -> TokenEntry:
        made = entry(prompt_token_ids=[1, 2, 3])
        putting = asyncio.ensure_future(S3TokenSink(**settings).put(made))
        await asyncio.sleep(0)  # the task has begun: its first await lies behind the encoding
        made.prompt_token_ids.append(99)
        await putting
        (found,) = (await S3TokenSource(**settings).freeze(ROLLOUT)).entries
        return found

    assert asyncio.run(run()).prompt_token_ids == [1, 2, 3]


def test_two_nan_records_are_the_same_payload(place: Place) -> None:
    """A record that holds NaN, put again from its parts, is no conflict, though NaN is not equal to NaN."""
    fields: dict[str, Any] = {"generation_log_probs": [math.nan, -math.inf], "output_items": [{"score": math.nan}]}

    async def run() -> None:
        await S3TokenSink(**place.settings).put(entry(**fields))
        keys = place.keys()
        await S3TokenSink(**place.settings).put(entry(**fields))
        assert place.keys() == keys
        snapshot = await S3TokenSource(**place.settings).freeze(ROLLOUT)
        assert (len(snapshot.entries), snapshot.incomplete) == (1, False)

    asyncio.run(run())


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"generation_log_probs": [0.0, -0.5]}, {"generation_log_probs": [-0.0, -0.5]}),
        ({"generation_log_probs": [math.nan, -0.5]}, {"generation_log_probs": [math.inf, -0.5]}),
        ({"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [1, 2, 4]}),
        ({"created_at": 1.5}, {"created_at": 2.5}),
        ({"extra": 2**64 + 1}, {"extra": 2**64 + 2}),
        ({"extra": "\ud800"}, {"extra": "\ud801"}),
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_foreign_payload_of_the_same_length_is_a_conflict(first: dict[str, Any], second: dict[str, Any]) -> None:
    """The loser learns both digests; the call is no entry, and the rollout is incomplete, from then on."""
    settings: Any = {"url": "s3://capture/p", "run": "r", "store": MemoryStore()}

    async def run() -> None:
        sink = S3TokenSink(**settings)
        await sink.put(entry(**first))
        await sink.put(entry("other"))
        with pytest.raises(ConflictingPayloadError, match="conflicting") as lost:
            await sink.put(entry(**second))
        digests = [word.strip(",;") for word in str(lost.value).split() if len(word.strip(",;")) == 64]
        assert len(set(digests)) == 2, "stored and refused digest are both named"
        await sink.put(entry(**first))
        snapshot = await S3TokenSource(**settings).freeze(ROLLOUT)
        assert [found.model_call_id for found in snapshot.entries] == ["other"]
        assert snapshot.incomplete

    asyncio.run(run())


def test_a_conflicted_call_is_no_parent(place: Place) -> None:
    """Once two payloads met under one call id, neither answers a continuation, also where it had been resolved."""

    async def run() -> None:
        sink = S3TokenSink(**place.settings)
        warm = S3LineageResolver(**place.settings)
        await sink.put(answered("c1"))
        assert (await warm.resolve(ROLLOUT, continued())).status == "resolved"
        for text in ("It is sunny.", "It rains."):
            with pytest.raises(ConflictingPayloadError):
                await sink.put(answered("c1", text=text, generation=[8, 9]))
        for resolver in (warm, S3LineageResolver(**place.settings)):
            for text in ("It is sunny.", "It rains."):
                answer = await resolver.resolve(ROLLOUT, continued(text=text))
                assert (answer.status, answer.reason) == ("unresolved", "no_match")

    asyncio.run(run())


def test_foreign_records_are_taken_as_they_are() -> None:
    """Any pydantic model of the record's shape is stored with all its fields, its own ones included."""

    class Foreign(TokenEntry):
        reward: float = 0.5

    settings: Any = {"url": "s3://capture/p", "run": "r", "store": MemoryStore()}

    async def run() -> TokenEntry:
        await S3TokenSink(**settings).put(Foreign.model_validate({**entry().model_dump(), "reward": 0.25}))
        (found,) = (await S3TokenSource(**settings).freeze(ROLLOUT)).entries
        return found

    assert asyncio.run(run()).model_dump()["reward"] == 0.25
