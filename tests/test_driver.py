"""What the driver makes of a store that loses replies, contradicts itself, throttles, hangs or refuses.

Mostly through the endpoints on a scripted server, so that what is judged is the promise and not the loop; the driver's
own bookkeeping is tried on fake stores.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from captures import ROLLOUT, answered, captures, entry, on_fake, warm_up
from fakes3 import Exchange, FakeS3, LoseReply, Reply, on

from s3capture import S3TokenSink, S3TokenSource
from s3capture.driver import Driver, Tally
from s3capture.effects import Absent, Answer, Create, Created, Delete, Deleted, Effect, Exists, Get, Steps
from s3capture.errors import (
    ConflictingPayloadError,
    StoreAccessError,
    StoreConfigError,
    StoreError,
    StoreUnavailableError,
    TokenCaptureFrozenError,
    TokenCaptureRetiredError,
    UnsupportedStoreError,
)
from s3capture.store.base import ContendedError, TransientStoreError
from s3capture.store.memory import MemoryStore

CALL = "*/call/*"


@pytest.fixture
def s3() -> Iterator[FakeS3]:
    with FakeS3() as server:
        yield server


@pytest.fixture
def given(s3: FakeS3, tmp_path: Path) -> dict[str, Any]:
    return on_fake(s3, tmp_path / "spill")


def _frozen(given: dict[str, Any]) -> list[str]:
    snapshot = asyncio.run(S3TokenSource(**given).freeze(ROLLOUT))
    assert not snapshot.incomplete
    return [found.model_call_id for found in snapshot.entries]


def _body(call: str = "c1", **fields: Any) -> bytes:
    """The stored bytes of a record, as another process would have written them."""
    store = MemoryStore()
    asyncio.run(S3TokenSink(url="s3://capture/p", run="r", store=store).put(entry(call, **fields)))
    (key,) = [row.key for row in store.list("p/r/attempts") if "/call/" in row.key]
    found = store.get(key)
    assert found is not None
    return found


# Lost replies


@pytest.mark.parametrize(("how", "times"), [("close", 3), ("reset", 1), ("hang", 1)])
def test_a_lost_reply_is_no_conflict(s3: FakeS3, given: dict[str, Any], how: str, times: int) -> None:
    """A create that was applied and whose reply was lost meets its own success as 412 and is acknowledged."""
    s3.script(on("PutObject", CALL), LoseReply(how), times=times)
    asyncio.run(S3TokenSink(**given).put(entry()))
    assert [key for key in s3.objects if "/call/" in key or "/conflict/" in key] == [f"{_base(s3)}call/c1"]
    assert _frozen(given) == ["c1"]


def _base(s3: FakeS3) -> str:
    (key,) = [key for key in s3.objects if "/call/" in key]
    return key.rpartition("call/")[0]


@pytest.mark.parametrize("step", ["begin_call", "record_engine_refusal", "mark_incomplete"])
def test_a_lost_reply_of_any_write(s3: FakeS3, given: dict[str, Any], step: str) -> None:
    """Every write may lose the reply of every create, and stores what it would have stored."""
    s3.script(on("PutObject", "*/attempts/*"), LoseReply())
    sink = S3TokenSink(**given)
    operation: Callable[[], Any] = {
        "begin_call": lambda: sink.begin_call(ROLLOUT, "c1"),
        "record_engine_refusal": lambda: sink.record_engine_refusal(ROLLOUT, model_call_id="c1", code="x"),
        "mark_incomplete": lambda: sink.mark_incomplete(ROLLOUT, "c1"),
    }[step]
    asyncio.run(operation())
    assert len([key for key in s3.objects if "/attempts/" in key]) == 1


@pytest.mark.parametrize("pattern", ["*/fence/closing", "*/fence/frozen", "*/call/open"])
def test_a_freeze_that_lost_a_reply_decides_once(s3: FakeS3, given: dict[str, Any], pattern: str) -> None:
    """Whichever create of a freeze lost its reply, there is one decision, and the snapshot is that decision."""
    sink, source = S3TokenSink(**given), S3TokenSource(**given)

    async def run() -> None:
        await sink.put(entry())
        await sink.begin_call(ROLLOUT, "open")
        s3.script(on("PutObject", pattern), LoseReply())
        first = await source.freeze(ROLLOUT)
        second = await S3TokenSource(**given).freeze(ROLLOUT)
        assert (first.snapshot_id, first.version) == (second.snapshot_id, second.version)
        assert first.incomplete
        assert await source.drop(ROLLOUT, snapshot_id=first.snapshot_id, version=first.version)

    asyncio.run(run())


@pytest.mark.parametrize("applied", [True, False])
def test_a_put_that_was_resent_looks_at_the_fence(s3: FakeS3, given: dict[str, Any], applied: bool) -> None:
    """A begun call whose first wire attempt ended in doubt has lost its privilege: the fence is read."""
    sink = S3TokenSink(**given)
    asyncio.run(sink.begin_call(ROLLOUT, "c1"))
    s3.script(on("PutObject", CALL), LoseReply(apply=applied))
    before = len(s3.seen("GetObject", "*/fence/closing"))
    asyncio.run(sink.put(entry()))
    assert len(s3.seen("GetObject", "*/fence/closing")) == before + 1


def test_a_put_resent_after_its_record_was_consumed_is_refused(
    s3: FakeS3, given: dict[str, Any], tmp_path: Path
) -> None:
    """A first attempt is applied, frozen, dropped and deleted before the resend creates the key anew: no ack."""
    other = {**given, "spill_dir": str(tmp_path / "other")}

    def consume(exchange: Exchange) -> None:
        exchange.apply()

        async def run() -> None:
            source = S3TokenSource(**other)
            snapshot = await source.freeze(ROLLOUT)
            assert await source.drop(ROLLOUT, snapshot_id=snapshot.snapshot_id, version=snapshot.version)

        asyncio.run(run())
        exchange.close()

    sink = S3TokenSink(**{**given, "read_timeout_s": 15.0})
    asyncio.run(sink.begin_call(ROLLOUT, "c1"))
    s3.script(on("PutObject", CALL), consume)
    with pytest.raises(TokenCaptureRetiredError):
        asyncio.run(sink.put(entry()))


# Answers are judged by what is stored

_CONDITION = [(304, ""), (412, ""), (412, "PreconditionFailed"), (412, "SomethingElse")]
_CONTENDED = [
    (409, ""),
    (409, "ConditionalRequestConflict"),
    (409, "OperationAborted"),
    (409, "ConcurrentModification"),
]


@pytest.mark.parametrize(("status", "code"), _CONDITION + _CONTENDED)
@pytest.mark.parametrize("stored", ["ours", "theirs", "nothing"])
def test_a_refused_create_is_judged_by_what_is_stored(
    s3: FakeS3, given: dict[str, Any], status: int, code: str, stored: str
) -> None:
    """Our record there: success. Another there: a conflict. Nothing there: ask again, and create it."""
    sink = S3TokenSink(**given)

    def refuse(exchange: Exchange) -> None:
        if stored != "nothing":
            mine: dict[str, Any] = {} if stored == "ours" else {"prompt_token_ids": [1, 2, 9]}
            s3.objects[exchange.request.key] = _body(**mine)
        Reply(status, code)(exchange)

    s3.script(on("PutObject", CALL), refuse)
    if stored == "theirs":
        with pytest.raises(ConflictingPayloadError):
            asyncio.run(sink.put(entry()))
        return
    asyncio.run(sink.put(entry()))
    assert _frozen(given) == ["c1"]


@pytest.mark.parametrize("times", [1, 4])
def test_contention_that_passes(s3: FakeS3, given: dict[str, Any], times: int) -> None:
    """409 is asked again until it is answered: one object, no conflict."""
    s3.script(on("PutObject", CALL), Reply(409, "ConditionalRequestConflict"), times=times)
    asyncio.run(S3TokenSink(**given).put(entry()))
    assert _frozen(given) == ["c1"]


def test_contention_that_does_not_pass(s3: FakeS3, given: dict[str, Any]) -> None:
    """409 for ever with nothing stored is an error that says try again, and the record can be put later."""
    sink = S3TokenSink(**{**given, "op_timeout_s": 1.0})
    asyncio.run(warm_up(sink))
    s3.script(on("PutObject", CALL), Reply(409, "ConditionalRequestConflict"), times=None)
    with pytest.raises(StoreUnavailableError, match="c1"):
        asyncio.run(sink.put(entry()))
    s3.clear_scripts()
    asyncio.run(S3TokenSink(**given).put(entry()))
    assert _frozen(given) == ["c0", "c1"]


@pytest.mark.parametrize("times", [2, None])
def test_a_false_412(s3: FakeS3, given: dict[str, Any], times: int | None) -> None:
    """A store that says "exists" and shows nothing is asked again, and disbelieved in the end, never acknowledged."""
    s3.script(on("PutObject", CALL), Reply(412, "PreconditionFailed"), times=times)
    sink = S3TokenSink(**given)
    if times:
        asyncio.run(sink.put(entry()))
        assert _frozen(given) == ["c1"]
    else:
        with pytest.raises(StoreError, match="shows nothing"):
            asyncio.run(sink.put(entry()))
        assert not [key for key in s3.objects if "/call/" in key]


@pytest.mark.parametrize(
    ("code", "operation"),
    [("SlowDown", "PutObject"), ("InternalError", "GetObject"), ("ServiceUnavailable", "ListObjectsV2")],
)
def test_a_store_that_asks_for_patience(s3: FakeS3, given: dict[str, Any], code: str, operation: str) -> None:
    """Throttles and passing failures of any request delay a put and a freeze; they change nothing else."""
    sink = S3TokenSink(**given)
    asyncio.run(sink.put(entry("c0")))
    status = 500 if code == "InternalError" else 503
    s3.script(on(operation), Reply(status, code), times=2)
    asyncio.run(sink.put(entry()))
    assert sorted(_frozen(given)) == ["c0", "c1"]


# Deadlines


def _drip(exchange: Exchange) -> None:
    """Send a reply one byte at a time, so that no read ever times out."""
    exchange.send_bytes(b"HTTP/1.1 200 OK\r\nx-drip: ")
    while not exchange.server._ending.wait(0.05):
        exchange.send_bytes(b".")


@pytest.mark.parametrize(
    ("operation", "behaviour", "read_timeout_s"),
    [
        ("put", LoseReply("hang"), 0.4),
        ("put", LoseReply("hang"), 300.0),
        ("put", _drip, 0.4),
        ("begin_call", _drip, 0.4),
        ("freeze", LoseReply("hang"), 300.0),
        ("drop", _drip, 0.4),
        ("retire", LoseReply("hang"), 300.0),
        ("retire", LoseReply("hang"), 0.4),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_hanging_store_ends_in_an_error(
    s3: FakeS3, given: dict[str, Any], behaviour: Any, read_timeout_s: float, operation: str
) -> None:
    """Whatever way a store has of not answering, the operation ends within its own timeout, by name."""
    given |= {"read_timeout_s": read_timeout_s, "op_timeout_s": 0.8}
    sink, source = S3TokenSink(**given), S3TokenSource(**given)
    asyncio.run(warm_up(sink))
    s3.script(on("*", "*/attempts/*"), behaviour, times=None)
    run: Callable[[], Any] = {
        "begin_call": lambda: sink.begin_call(ROLLOUT, "c1"),
        "put": lambda: sink.put(entry()),
        "freeze": lambda: source.freeze(ROLLOUT),
        "drop": lambda: source.drop(ROLLOUT, snapshot_id="x", version=1),
        "retire": lambda: source.retire([ROLLOUT]),
    }[operation]

    async def bounded() -> None:
        # The bound only keeps a broken build from hanging the tests; it is far above the operation's own.
        await asyncio.wait_for(run(), 60)

    with pytest.raises(StoreUnavailableError, match=ROLLOUT):
        asyncio.run(bounded())


def test_a_refused_connection(tmp_path: Path) -> None:
    """Without any server a put is an error that says so, within the operation's timeout."""
    with FakeS3() as gone:
        nowhere = on_fake(gone, tmp_path, op_timeout_s=0.5)
    with pytest.raises(StoreUnavailableError):
        asyncio.run(S3TokenSink(**nowhere).put(entry()))


# Stores that cannot be used


def test_a_store_without_conditional_writes_is_refused_at_once(s3: FakeS3, given: dict[str, Any]) -> None:
    """501 to a conditional create is a configuration error after one request, each time, and nothing is stored."""
    s3.script(on("PutObject"), Reply(501, "NotImplemented"), times=None)
    sink = S3TokenSink(**given)
    for number in (1, 2):
        with pytest.raises(UnsupportedStoreError, match=s3.bucket):
            asyncio.run(sink.put(entry()))
        assert len(s3.requests) == number
    assert not s3.objects


def test_a_store_that_ignores_the_condition_is_refused(tmp_path: Path) -> None:
    """A second create that succeeds is found at first use: named, cleaned up, and nothing else was written."""
    with FakeS3(ignores_conditions=True) as s3:
        given = on_fake(s3, tmp_path)
        sink, source = S3TokenSink(**given), S3TokenSource(**given)
        for operation in (
            lambda: sink.put(entry()),
            lambda: sink.begin_call(ROLLOUT, "c1"),
            lambda: source.freeze(ROLLOUT),
            lambda: source.retire([ROLLOUT]),
        ):
            with pytest.raises(UnsupportedStoreError, match=rf"{s3.bucket}.*If-None-Match"):
                asyncio.run(operation())
        assert not s3.objects
        assert all("/probe/" in request.key for request in s3.seen("PutObject"))


@pytest.mark.parametrize(
    ("reply", "kind"),
    [
        (Reply(403, "AccessDenied"), StoreAccessError),
        (Reply(403, "InvalidAccessKeyId"), StoreAccessError),
        (Reply(404, "NoSuchBucket"), StoreConfigError),
        (Reply(301, "PermanentRedirect"), StoreConfigError),
    ],
)
def test_what_repeating_cannot_mend_is_not_repeated(
    s3: FakeS3, given: dict[str, Any], reply: Reply, kind: type[StoreError]
) -> None:
    """A refusal that a person must act on is raised at once, without a second attempt."""
    sink = S3TokenSink(**given)
    asyncio.run(sink.put(entry("c0")))
    s3.script(on("PutObject", CALL), reply, times=None)
    before = len(s3.seen("PutObject", CALL))
    with pytest.raises(kind):
        asyncio.run(sink.put(entry()))
    assert len(s3.seen("PutObject", CALL)) == before + 1


# Deleting is housekeeping


def _consume(given: dict[str, Any]) -> bool:
    async def run() -> bool:
        sink, source = S3TokenSink(**given), S3TokenSource(**given)
        await sink.put(answered("c1"))
        await sink.put(entry("c2"))
        snapshot = await source.freeze(ROLLOUT)
        exact: dict[str, Any] = {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}
        first = await source.drop(ROLLOUT, **exact)
        assert await source.drop(ROLLOUT, **exact) is first
        return first

    return asyncio.run(run())


def _assert_retired(given: dict[str, Any]) -> None:
    async def run() -> None:
        sink, source = S3TokenSink(**given), S3TokenSource(**given)
        for write in (
            lambda: sink.put(entry("c1")),
            lambda: sink.put(entry("c9")),
            lambda: sink.begin_call(ROLLOUT, "c9"),
            lambda: sink.mark_incomplete(ROLLOUT, "c9"),
            lambda: source.freeze(ROLLOUT),
        ):
            with pytest.raises(TokenCaptureRetiredError):
                await write()

    asyncio.run(run())


@pytest.mark.parametrize("single", [False, True], ids=["whole request", "each key"])
def test_without_the_right_to_delete_a_drop_still_retires(
    s3: FakeS3, given: dict[str, Any], single: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """AccessDenied on deleting leaves the records, says so, and the decision alone fences every later write."""
    if single:

        def deny(exchange: Exchange) -> None:
            s3.undeletable |= set(s3.objects)
            exchange.send(exchange.apply())

        s3.script(on("DeleteObjects"), deny, times=None)
    else:
        s3.script(on("DeleteObjects"), Reply(403, "AccessDenied"), times=None)
    assert _consume(given) is True
    assert [key for key in s3.objects if "/call/c1" in key]
    assert "AccessDenied" in caplog.text
    _assert_retired(given)


def test_a_partial_delete_is_finished_by_repeating(s3: FakeS3, given: dict[str, Any]) -> None:
    """Keys that the store kept are reported, the rest goes; drop again, once it may, removes what was left."""
    sink, source = S3TokenSink(**given), S3TokenSource(**given)

    async def run() -> None:
        await sink.put(answered("c1"))
        await sink.put(entry("c2"))
        snapshot = await source.freeze(ROLLOUT)
        exact: dict[str, Any] = {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}
        (stubborn,) = [key for key in s3.objects if key.endswith("/call/c2")]
        s3.undeletable.add(stubborn)
        assert await source.drop(ROLLOUT, **exact)
        assert [key for key in captures([*s3.objects]) if "/fence/" not in key] == [stubborn]
        s3.undeletable.clear()
        assert await source.drop(ROLLOUT, **exact)
        assert not [key for key in captures([*s3.objects]) if "/fence/" not in key]

    asyncio.run(run())
    _assert_retired(given)


def test_a_delete_that_left_something_is_an_error_and_the_id_is_not_fresh(s3: FakeS3, given: dict[str, Any]) -> None:
    """While a record stays the fences stay too; delete again, once it may, makes the id new."""
    sink, source = S3TokenSink(**given), S3TokenSource(**given)

    async def run() -> None:
        await sink.put(entry("c1"))
        await source.freeze(ROLLOUT)
        (stubborn,) = [key for key in s3.objects if key.endswith("/call/c1")]
        s3.undeletable.add(stubborn)
        with pytest.raises(StoreAccessError, match="DeleteObject"):
            await source.delete([ROLLOUT])
        with pytest.raises(TokenCaptureFrozenError):
            await sink.put(entry("c2"))
        s3.undeletable.clear()
        assert await source.delete([ROLLOUT]) == {"removed": [ROLLOUT], "absent": []}
        assert not captures([*s3.objects])
        await sink.put(entry("c2"))

    asyncio.run(run())


# The driver itself


class _Scripted(MemoryStore):
    """Raises what it is told to, then behaves."""

    def __init__(self, *errors: Exception) -> None:
        super().__init__()
        self.errors = list(errors)
        self.asked = 0

    def create(self, key: str, body: bytes) -> bool:
        self.asked += 1
        if self.errors:
            raise self.errors.pop(0)
        return super().create(key, body)


def _once(*effects: Effect) -> Steps[tuple[Answer, ...]]:
    return (yield effects)


def _drive(store: Any, steps: Steps[Any], tally: Tally | None = None, seconds: float = 600.0) -> Any:
    with ThreadPoolExecutor(4) as pool:
        driver = Driver(store, pool, sleep=lambda _: None)
        return driver.run(steps, deadline=time.monotonic() + seconds, what="a test", tally=tally)


@pytest.mark.parametrize(("doubtful", "first"), [(True, False), (False, True)])
def test_only_a_doubtful_attempt_spoils_the_first(doubtful: bool, first: bool) -> None:
    """A create after an attempt that surely did nothing is still the first; after one in doubt it is not."""
    store = _Scripted(TransientStoreError("x", doubtful=doubtful), TransientStoreError("x", doubtful=False))
    tally = Tally()
    assert _drive(store, _once(Create("k", b"")), tally) == (Created(first_attempt=first),)
    assert (tally.trips, tally.requests, tally.retries) == (1, 1, 2)


def test_contention_on_a_key_that_is_there_is_exists() -> None:
    """A 409 whose key can be read is an answer and not repeated."""
    store = _Scripted(ContendedError("409"))
    store.overwrite("k", b"theirs")
    assert _drive(store, _once(Create("k", b"ours"))) == (Exists(),)
    assert store.asked == 1


def test_a_store_is_asked_for_as_long_as_there_is_time() -> None:
    """A store that fails at once a hundred times, as one that is starting does, is still asked when it answers."""
    store = _Scripted(*(TransientStoreError("down", doubtful=False) for _ in range(100)))
    assert _drive(store, _once(Create("k", b""))) == (Created(),)


def test_the_deadline_ends_the_asking() -> None:
    """A store that fails at once, and for ever, is given up at the deadline with its own last words."""
    store = MemoryStore()
    store.create = lambda *_: (_ for _ in ()).throw(TransientStoreError("down"))  # type: ignore[method-assign]
    with pytest.raises(StoreUnavailableError, match="a test: down"):
        _drive(store, _once(Create("k", b"")), seconds=0.2)


def test_a_failed_look_after_a_409_leaves_the_create_in_doubt() -> None:
    """409, then no answer to the look, then success: the first create may have been applied, so it is not the first."""

    class Store(_Scripted):
        looks = 0

        def get(self, key: str) -> bytes | None:
            del key
            self.looks += 1
            raise TransientStoreError("503", doubtful=False)

    store = Store(ContendedError("409"))
    assert _drive(store, _once(Create("k", b""))) == (Created(first_attempt=False),)
    assert store.looks == 1


def test_a_delete_that_finds_no_store_tells_what_is_left() -> None:
    """Deleting is housekeeping behind a decision: at the deadline it returns the keys that are left, and why."""
    store = MemoryStore()
    store.delete = lambda _: (_ for _ in ()).throw(TransientStoreError("down"))  # type: ignore[method-assign]
    (answer,) = _drive(store, _once(Delete(("a", "b"))), seconds=0.2)
    assert answer == Deleted((("a", "down"), ("b", "down")))


def test_nothing_is_asked_after_the_deadline() -> None:
    """An operation that waited too long for a thread sends nothing and says why."""
    store = _Scripted()
    with pytest.raises(StoreUnavailableError, match="max_concurrency"):
        _drive(store, _once(Create("k", b"")), seconds=-1.0)
    assert store.asked == 0


def test_a_failed_batch_ends_only_when_all_of_it_has_ended() -> None:
    """When one effect of a batch fails, the others are waited for, so nothing is under way behind an error."""
    slow_began, release = threading.Event(), threading.Event()

    class Store(MemoryStore):
        def get(self, key: str) -> bytes | None:
            if key == "bad":
                slow_began.wait(30)
                threading.Timer(0.1, release.set).start()
                raise StoreConfigError("no")
            slow_began.set()
            release.wait(30)
            self.overwrite("done", b"")
            return None

    store = Store()
    with pytest.raises(StoreConfigError):
        _drive(store, _once(Get("bad"), Get("slow")))
    assert [row.key for row in store.list("")] == ["done"]


def test_answers_come_in_the_order_of_the_batch() -> None:
    """However the effects of a batch finish, the answers line up with them."""
    store = MemoryStore()
    store.overwrite("old", b"x")
    effects: list[Effect] = [Create("old", b""), Get("none"), Create("new", b""), Delete(("gone",))]
    assert _drive(store, _once(*effects)) == (Exists(), Absent(), Created(), Deleted())


def test_passing_refusals_of_a_delete_are_repeated_and_others_not() -> None:
    """Of the keys that a batch delete left, those with a passing reason are tried again."""
    asked: list[list[str]] = []

    class Store(MemoryStore):
        def delete(self, keys: Sequence[str]) -> dict[str, str]:
            asked.append(sorted(keys))
            if len(asked) == 1:
                return {"a": "InternalError: x", "b": "AccessDenied: x", "c": "SlowDown: x"}
            return {}

    assert _drive(Store(), _once(Delete(("a", "b", "c", "d")))) == (Deleted((("b", "AccessDenied: x"),)),)
    assert asked == [["a", "b", "c", "d"], ["a", "c"]]
