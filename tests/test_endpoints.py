"""The life of an endpoint: built, used from anywhere, cancelled, forked, cut off from the store, closed.

What is judged is what callers and other processes see: what was sent, what is stored, which error came.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from captures import ROLLOUT, captures, continued, entry, on_fake, warm_up
from fakes3 import Exchange, FakeS3, Hold, LoseReply, Reply, on

from s3capture import S3LineageResolver, S3TokenSink, S3TokenSource
from s3capture.effects import ObjectInfo
from s3capture.endpoint import Endpoint
from s3capture.errors import (
    CaptureError,
    ClosedError,
    ConflictingPayloadError,
    InvalidIdError,
    SettingsError,
    SpillError,
    StoreUnavailableError,
    TokenCaptureFrozenError,
    TokenCaptureRetiredError,
)
from s3capture.protocols import TokenCaptureSnapshot
from s3capture.runtime import _MARK_THREADS as MARK_THREADS
from s3capture.store import boto_client
from s3capture.store.memory import MemoryStore

ENDPOINTS: list[type[Any]] = [S3TokenSink, S3TokenSource, S3LineageResolver]
GOOD: dict[str, Any] = {"url": "s3://capture/p", "run": "r"}
CALL = "*/call/*"


@pytest.fixture
def s3() -> Iterator[FakeS3]:
    with FakeS3() as server:
        yield server


@pytest.fixture
def given(s3: FakeS3, tmp_path: Path) -> dict[str, Any]:
    return on_fake(s3, tmp_path / "spill", read_timeout_s=15.0)


@pytest.fixture
def memory() -> dict[str, Any]:
    return {**GOOD, "store": MemoryStore()}


def _keys(s3: FakeS3, part: str) -> list[str]:
    return sorted(key for key in [*s3.objects] if part in key)


# Built


@pytest.mark.parametrize("endpoint", ENDPOINTS)
@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"spil_dir": "/x"}, r"spil_dir.*did you mean 'spill_dir'"),
        ({"endpoint": "http://127.0.0.1"}, r"did you mean 'endpoint_url'"),
        ({"zzz": 1}, "known settings"),
        ({"url": None}, "'url' is required"),
        ({"run": None}, "'run' is required"),
        ({"url": "capture/p"}, "s3://bucket/prefix"),
        ({"url": "http://capture/p"}, "s3://bucket/prefix"),
        ({"url": "s3://"}, "s3://bucket/prefix"),
        ({"url": "s3://capture/a//b"}, "prefix"),
        ({"url": "s3://capture/../b"}, "prefix"),
        ({"run": "a/b"}, "run"),
        ({"run": ".."}, "run"),
        ({"run": 7}, "run 7 is a int"),
        ({"endpoint_url": "127.0.0.1:9000"}, "endpoint_url"),
        ({"endpoint_url": "http://me:hunter2@127.0.0.1"}, "credentials"),
        ({"op_timeout_s": 0}, "op_timeout_s"),
        ({"op_timeout_s": float("nan")}, "op_timeout_s"),
        ({"mark_timeout_s": "5"}, "mark_timeout_s '5' is a str"),
        ({"max_concurrency": True}, "max_concurrency"),
        ({"max_concurrency": 1.5}, "whole number"),
        ({"max_concurrency": 0}, "max_concurrency"),
        ({"retention": "forget"}, "'delete', 'keep'"),
        ({"sse_kms_key_id": "key"}, "aws:kms"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_a_bad_setting_is_refused_by_name(endpoint: type[Any], bad: dict[str, Any], words: str) -> None:
    """The constructor raises one SettingsError that names the setting, what is wrong and what would be right."""
    with pytest.raises(SettingsError, match=words) as refused:
        endpoint(**{**GOOD, **bad})
    assert "hunter2" not in str(refused.value)


def test_constructors_do_no_io_and_start_no_thread(s3: FakeS3, given: dict[str, Any], tmp_path: Path) -> None:
    """Endpoints are built by the dozen, in parents and workers: nothing is sent, made or started until first use."""
    threads = set(threading.enumerate())
    made = [endpoint(**given) for endpoint in ENDPOINTS for _ in range(3)]
    assert set(threading.enumerate()) <= threads
    assert s3.connections == 0
    assert not (tmp_path / "spill").exists()

    async def close_all() -> None:
        for endpoint in made:
            await endpoint.close()

    asyncio.run(close_all())
    assert s3.connections == 0


@pytest.mark.parametrize(
    "rollout",
    ["a b", "é", "x" * 300, "..", ".", "", "a/b", "a%2Fb", "a\n", "\uff17-3"],
    ids=lambda text: ascii(text)[:12],
)
def test_an_invalid_rollout_id_is_refused_before_anything_is_sent(
    s3: FakeS3, given: dict[str, Any], rollout: str
) -> None:
    """Every operation refuses the id by name; no request, no spill file."""
    sink, source, resolver = S3TokenSink(**given), S3TokenSource(**given), S3LineageResolver(**given)
    operations: list[Callable[[], Any]] = [
        lambda: sink.begin_call(rollout, "c1"),
        lambda: sink.put(entry(rollout=rollout)),
        lambda: sink.record_engine_refusal(rollout, model_call_id="c1", code="x"),
        lambda: sink.mark_incomplete(rollout, "c1"),
        lambda: source.freeze(rollout),
        lambda: source.drop(rollout, snapshot_id="x", version=1),
        lambda: source.retire(["fine", rollout]),
        lambda: source.delete(["fine", rollout]),
        lambda: resolver.resolve(rollout, continued()),
    ]

    async def run() -> None:
        for operation in operations:
            with pytest.raises(InvalidIdError, match="rollout id"):
                await operation()

    asyncio.run(run())
    assert s3.connections == 0
    assert not Path(given["spill_dir"]).exists()


@pytest.mark.parametrize("call", ["", "a b", "é/..", "x" * 2000, "\ud800", "!conflict", "../../x"], ids=ascii)
def test_a_call_id_may_be_any_string(memory: dict[str, Any], call: str) -> None:
    """Whatever names a call, it begins, is put and comes back under exactly that name."""

    async def run() -> None:
        sink, source = S3TokenSink(**memory), S3TokenSource(**memory)
        await sink.begin_call(ROLLOUT, call)
        await sink.put(entry(call))
        snapshot = await source.freeze(ROLLOUT)
        assert [found.model_call_id for found in snapshot.entries] == [call]
        assert not snapshot.incomplete

    asyncio.run(run())


# Used from anywhere


def test_one_instance_serves_several_event_loops_in_turn(given: dict[str, Any]) -> None:
    """Loops come and go (a parent's, then a server's); the endpoint is not tied to the first one."""
    sink, source = S3TokenSink(**given), S3TokenSource(**given)
    for number in range(3):
        asyncio.run(sink.put(entry(f"c{number}")))
    assert len(asyncio.run(source.freeze(ROLLOUT)).entries) == 3


@pytest.mark.parametrize("first", ["put", "resolve"])
def test_64_threads_at_first_use_share_one_client(
    s3: FakeS3, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """First use from many loops at the same moment makes one client and one check of the store, and loses nothing.

    Puts wait for that check; resolves need none, and so come to the making of the client all at once.
    """
    made: list[object] = []
    make = boto_client.make_client

    def counting(settings: Any) -> Any:
        made.append(settings)
        return make(settings)

    monkeypatch.setattr(boto_client, "make_client", counting)
    given |= {"max_concurrency": 64}
    sink, resolver, barrier = S3TokenSink(**given), S3LineageResolver(**given), threading.Barrier(64)

    def use(number: int) -> None:
        barrier.wait(60)
        if first == "put":
            asyncio.run(sink.put(entry(f"c{number}")))
        else:
            assert asyncio.run(resolver.resolve(ROLLOUT, continued())).status == "unresolved"

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(use, range(64)))
    assert len(made) == 1
    if first == "put":
        assert len(s3.seen("PutObject", "*/probe/*")) == 2
        assert len(asyncio.run(S3TokenSource(**given).freeze(ROLLOUT)).entries) == 64


def test_endpoints_with_equal_settings_share_connections(s3: FakeS3, given: dict[str, Any]) -> None:
    """Servers build endpoints twice in each worker: the second set costs no check and no client of its own."""

    async def run() -> None:
        for sink in [S3TokenSink(**given) for _ in range(4)]:
            await sink.put(entry())

    first = S3TokenSink(**given)
    asyncio.run(first.put(entry()))
    connections = s3.connections
    asyncio.run(run())
    assert s3.connections == connections
    assert len(s3.seen("PutObject", "*/probe/*")) == 2


# Closed


@pytest.mark.parametrize("endpoint", ENDPOINTS)
def test_close_is_idempotent_and_final(memory: dict[str, Any], endpoint: type[Any]) -> None:
    """Close may be called twice, before or after use; every operation after it says that the endpoint is closed."""
    made = endpoint(**memory)

    async def run() -> None:
        await made.close()
        await made.close()
        operations: list[Callable[[], Any]] = {
            S3TokenSink: [
                lambda: made.put(entry()),
                lambda: made.begin_call(ROLLOUT, "c"),
                lambda: made.mark_incomplete(ROLLOUT),
            ],
            S3TokenSource: [lambda: made.freeze(ROLLOUT), lambda: made.retire([ROLLOUT]), lambda: made.delete([])],
            S3LineageResolver: [lambda: made.resolve(ROLLOUT, [])],
        }[endpoint]
        for operation in operations:
            with pytest.raises(ClosedError):
                await operation()

    asyncio.run(run())


def test_closing_one_endpoint_leaves_the_others_working(given: dict[str, Any]) -> None:
    """Of several endpoints only one is ever closed; the rest, and new ones, go on."""
    first, second = S3TokenSink(**given), S3TokenSink(**given)

    async def run() -> None:
        await first.put(entry("c1"))
        await first.close()
        await second.put(entry("c2"))
        await second.close()
        gc.collect()
        await S3TokenSink(**given).put(entry("c3"))

    asyncio.run(run())
    assert len(asyncio.run(S3TokenSource(**given).freeze(ROLLOUT)).entries) == 3


def test_threads_end_with_the_last_endpoint(given: dict[str, Any]) -> None:
    """Nothing keeps threads alive once every endpoint of a run was closed."""
    before = {thread for thread in threading.enumerate() if thread.name.startswith("s3capture")}

    async def run() -> None:
        sink = S3TokenSink(**given)
        await sink.put(entry())
        await sink.close()

    asyncio.run(run())
    gc.collect()
    for thread in set(threading.enumerate()) - before:
        if thread.name.startswith("s3capture"):
            thread.join(20)
            assert not thread.is_alive()


def test_close_is_bounded_when_the_store_hangs(s3: FakeS3, given: dict[str, Any]) -> None:
    """A request that never ends does not hold up a shutdown for ever."""
    given |= {"op_timeout_s": 0.5, "mark_timeout_s": 0.2, "read_timeout_s": 0.3, "connect_timeout_s": 0.3}
    sink = S3TokenSink(**given)

    def drip(exchange: Exchange) -> None:
        exchange.send_bytes(b"HTTP/1.1 200 OK\r\nx-drip: ")
        while not exchange.server._ending.wait(0.05):
            exchange.send_bytes(b".")

    async def run() -> None:
        await warm_up(sink)
        s3.script(on("PutObject", CALL), drip, times=None)
        with pytest.raises(StoreUnavailableError):
            await sink.put(entry())
        await asyncio.wait_for(sink.close(), 60)

    asyncio.run(run())


# Cancelled


async def _cancel(task: asyncio.Task[None], how: str) -> None:
    if how == "cancel":
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    elif how == "wait_for":
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(task, 0.01)
    else:
        with pytest.raises(ExceptionGroup):
            async with asyncio.TaskGroup() as group:
                group.create_task(_joined(task))
                group.create_task(_failing())


async def _joined(task: asyncio.Task[None]) -> None:
    await task


async def _failing() -> None:
    raise ValueError("a sibling failed")


@pytest.mark.parametrize("how", ["cancel", "wait_for", "sibling"])
@pytest.mark.parametrize("after", [False, True], ids=["before it is applied", "after it is applied"])
def test_a_cancelled_put_lands(s3: FakeS3, given: dict[str, Any], how: str, after: bool) -> None:
    """The client went away while the record was on the wire: close waits, it is stored, unmarked, and repeatable."""
    sink = S3TokenSink(**given)
    hold = Hold(after=after)

    async def run() -> None:
        await sink.begin_call(ROLLOUT, "c1")
        s3.script(on("PutObject", CALL), hold)
        task = asyncio.ensure_future(sink.put(entry()))
        assert await asyncio.to_thread(hold.arrived.wait, 20)
        await _cancel(task, how)
        threading.Timer(0.1, hold.release.set).start()
        await sink.close()
        assert len(_keys(s3, "/call/")) == 1, "close waited"
        await S3TokenSink(**given).put(entry())
        snapshot = await S3TokenSource(**given).freeze(ROLLOUT)
        assert ([e.model_call_id for e in snapshot.entries], snapshot.incomplete) == (["c1"], False)

    asyncio.run(run())
    assert not _keys(s3, "/mark/")


def test_a_cancelled_put_outlives_its_event_loop(
    s3: FakeS3, given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A loop that ends while the record is on the wire changes nothing, and nobody complains of a closed loop."""
    sink, hold = S3TokenSink(**given), Hold()
    s3.script(on("PutObject", CALL), hold)

    async def run() -> None:
        task = asyncio.ensure_future(sink.put(entry()))
        assert await asyncio.to_thread(hold.arrived.wait, 20)
        del task  # cancelled by asyncio.run itself

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
        hold.release.set()
        asyncio.run(sink.close())
    assert len(_keys(s3, "/call/")) == 1
    assert not caplog.records


@pytest.mark.parametrize("mark", ["bucket", "disk"])
def test_a_cancelled_put_that_fails_marks_the_rollout(
    s3: FakeS3, given: dict[str, Any], tmp_path: Path, mark: str
) -> None:
    """Nobody else would: the sink marks the rollout itself, in the bucket or on disk, and close waits for that too."""
    short = {**given, "op_timeout_s": 1.0, "mark_timeout_s": 15.0 if mark == "bucket" else 0.6}
    sink, hold = S3TokenSink(**short), Hold()

    def fail(exchange: Exchange) -> None:
        hold.arrived.set()
        hold.release.wait(20)
        Reply(500, "InternalError")(exchange)

    async def run() -> None:
        await warm_up(sink)
        s3.script(on("PutObject", CALL), fail, times=None)
        if mark == "disk":
            s3.script(on("PutObject", "*/mark/*"), Reply(503, "SlowDown"), times=None)
        task = asyncio.ensure_future(sink.put(entry()))
        assert await asyncio.to_thread(hold.arrived.wait, 20)
        await _cancel(task, "cancel")
        hold.release.set()
        await sink.close()

    asyncio.run(run())
    assert len(_keys(s3, "/mark/")) == (1 if mark == "bucket" else 0)
    assert len([*(tmp_path / "spill").glob("*.mark")]) == (0 if mark == "bucket" else 1)
    s3.clear_scripts()
    snapshot = asyncio.run(S3TokenSource(**given).freeze(ROLLOUT))
    assert snapshot.incomplete


def test_a_cancelled_put_behind_the_fence_marks_nothing(s3: FakeS3, given: dict[str, Any]) -> None:
    """A late record that was cancelled and then refused is dropped: a mark would spoil what was delivered."""
    sink, source, hold = S3TokenSink(**given), S3TokenSource(**given), Hold()

    async def run() -> None:
        first = await source.freeze(ROLLOUT)
        s3.script(on("PutObject", CALL), hold)
        task = asyncio.ensure_future(sink.put(entry()))
        assert await asyncio.to_thread(hold.arrived.wait, 20)
        await _cancel(task, "cancel")
        hold.release.set()
        await sink.close()
        second = await source.freeze(ROLLOUT)
        assert (second.version, second.incomplete) == (first.version, False)

    asyncio.run(run())
    assert not _keys(s3, "/mark/")


def test_a_process_that_ends_during_a_cancelled_put_leaves_a_mark(tmp_path: Path) -> None:
    """Without any close: the interpreter waits for the write, and where it fails the mark reaches the disk."""
    spill = tmp_path / "spill"
    with FakeS3() as s3:
        hold = Hold()

        def fail(exchange: Exchange) -> None:
            hold.arrived.set()
            hold.release.wait(20)
            Reply(403, "AccessDenied")(exchange)

        s3.script(on("PutObject", CALL), fail, times=None)
        code = (
            "import asyncio, sys\n"
            "from captures import entry\n"
            "from s3capture import S3TokenSink\n"
            f"sink = S3TokenSink(**{on_fake(s3, spill, read_timeout_s=15.0)!r})\n"
            "async def run():\n"
            "    task = asyncio.ensure_future(sink.put(entry()))\n"
            "    await asyncio.to_thread(sys.stdin.readline)\n"
            "asyncio.run(run())\n"
            "print('ending', flush=True)\n"
        )
        tests = Path(__file__).parent
        path = os.pathsep.join([str(tests), str(tests.parent)])
        with subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        ) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            assert hold.arrived.wait(30)
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == "ending\n"
            # The main thread is past its last line; what is left of the process waits for its threads.
            threading.Timer(0.5, hold.release.set).start()
            assert child.wait(60) == 0
        assert _keys(s3, "/mark/") or len([*spill.glob("*.mark")]) == 1


# Forked


def _in_fork(work: Callable[[], Any]) -> Any:
    """Run ``work`` in a forked child and return its result."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child() -> None:
        try:
            sender.send(work())
        except BaseException as error:  # noqa: BLE001 - told to the parent, whatever it is
            sender.send(repr(error))

    process = context.Process(target=child)
    process.start()
    try:
        assert receiver.poll(60), "the child did not answer"
        return receiver.recv()
    finally:
        process.join(20)
        if process.is_alive():
            process.kill()
            process.join()


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_fork_works_and_inherits_no_privilege(s3: FakeS3, given: dict[str, Any]) -> None:
    """A child writes through the parent's endpoint with threads of its own, and looks at the fence: two trips."""
    sink = S3TokenSink(**given)
    asyncio.run(sink.begin_call(ROLLOUT, "c1"))

    def work() -> Any:
        asyncio.run(sink.put(entry()))
        stats = sink.stats()
        asyncio.run(sink.close())
        return sorted(stats), stats["put"].trips

    assert _in_fork(work) == (["put"], 2)
    assert len(s3.seen("GetObject", "*/fence/closing")) == 2
    asyncio.run(sink.put(entry()))
    asyncio.run(sink.put(entry("c2")))
    assert len(asyncio.run(S3TokenSource(**given).freeze(ROLLOUT)).entries) == 2


@pytest.mark.filterwarnings("ignore:This process.*multi-threaded:DeprecationWarning")
def test_a_fork_during_a_put_works(s3: FakeS3, given: dict[str, Any]) -> None:
    """A child made while the parent's request is on the wire, its locks held, is not stuck behind it."""
    sink, hold = S3TokenSink(**given), Hold()

    async def run() -> Any:
        await sink.put(entry("c0"))
        s3.script(on("PutObject", CALL), hold)
        putting = asyncio.ensure_future(sink.put(entry("c1")))
        assert await asyncio.to_thread(hold.arrived.wait, 20)

        def work() -> str:
            asyncio.run(sink.put(entry("c2")))
            asyncio.run(sink.close())
            return "done"

        try:
            return await asyncio.to_thread(_in_fork, work)
        finally:
            hold.release.set()
            await putting

    assert asyncio.run(run()) == "done"
    assert len(asyncio.run(S3TokenSource(**given).freeze(ROLLOUT)).entries) == 3


# Cut off from the store


@contextlib.contextmanager
def _out_of_reach(s3: FakeS3) -> Iterator[None]:
    s3.script(on("*", "*/attempts/*"), LoseReply(apply=False), times=None)
    yield
    s3.clear_scripts()


def _spilled(given: dict[str, Any]) -> list[Path]:
    return [*Path(given["spill_dir"]).glob("*.mark")]


def test_a_mark_that_the_store_cannot_take_is_spilled_and_drained(s3: FakeS3, given: dict[str, Any]) -> None:
    """mark_incomplete returns with the mark on disk; the next success publishes it, once, and removes the file."""
    given |= {"mark_timeout_s": 0.4}
    sink = S3TokenSink(**given)
    asyncio.run(sink.put(entry()))
    with _out_of_reach(s3):
        asyncio.run(sink.mark_incomplete(ROLLOUT, "c9"))
        assert len(_spilled(given)) == 1
        assert not _keys(s3, "/mark/")
    asyncio.run(sink.put(entry("c2")))
    _await(lambda: not _spilled(given))
    assert len(_keys(s3, "/mark/")) == 1
    snapshot = asyncio.run(S3TokenSource(**given).freeze(ROLLOUT))
    assert (snapshot.incomplete, snapshot.version) == (True, 1 + 2 + 1)


def _await(condition: Callable[[], bool]) -> None:
    """Wait for what happens in the background; the bound only ends a broken build."""
    for _ in range(600):
        if condition():
            return
        threading.Event().wait(0.05)
    raise AssertionError("it did not come to pass within 30 s")


def test_a_spilled_mark_counts_at_once_in_another_process(s3: FakeS3, given: dict[str, Any]) -> None:
    """The freezer shares only bucket and directory: its snapshot is incomplete, and the older version cannot drop."""
    given |= {"mark_timeout_s": 0.4}
    sink, source = S3TokenSink(**given), S3TokenSource(**given)

    async def frozen() -> tuple[str, int]:
        await sink.put(entry())
        snapshot = await source.freeze(ROLLOUT)
        assert not snapshot.incomplete
        return snapshot.snapshot_id, snapshot.version

    snapshot_id, version = asyncio.run(frozen())
    with _out_of_reach(s3):
        asyncio.run(sink.mark_incomplete(ROLLOUT, "c9"))
    code = (
        "import asyncio, json\n"
        "from s3capture import S3TokenSource\n"
        f"source = S3TokenSource(**{given!r})\n"
        f"dropped = asyncio.run(source.drop({ROLLOUT!r}, snapshot_id={snapshot_id!r}, version={version}))\n"
        f"snapshot = asyncio.run(source.freeze({ROLLOUT!r}))\n"
        "print(json.dumps([dropped, snapshot.incomplete, snapshot.version, snapshot.snapshot_id]))\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True, timeout=60)
    assert done.stdout.strip() == f'[false, true, {version + 1}, "{snapshot_id}"]'
    assert not _spilled(given)


def test_a_mark_that_nothing_can_take_is_said_aloud(s3: FakeS3, given: dict[str, Any], tmp_path: Path) -> None:
    """With store and disk both failing, the error names both and the rollout."""
    (tmp_path / "file").write_text("not a directory")
    given |= {"mark_timeout_s": 15.0, "spill_dir": str(tmp_path / "file" / "spill")}
    s3.script(on("PutObject", "*/mark/*"), Reply(403, "AccessDenied"), times=None)
    with pytest.raises(SpillError, match=ROLLOUT) as lost:
        asyncio.run(S3TokenSink(**given).mark_incomplete(ROLLOUT, "c9"))
    assert "AccessDenied" in str(lost.value)
    assert str(tmp_path / "file" / "spill") in str(lost.value)


def test_marks_are_not_delayed_by_stuck_puts(s3: FakeS3, given: dict[str, Any]) -> None:
    """With every thread of the puts held by the store, marks still reach the bucket, and none goes to the disk."""
    given |= {"max_concurrency": 2, "read_timeout_s": 30.0, "op_timeout_s": 60.0, "mark_timeout_s": 30.0}
    sink, hold = S3TokenSink(**given), Hold()

    async def run() -> None:
        await sink.put(entry("c0"))
        s3.script(on("PutObject", CALL), hold, times=2)
        puts = [asyncio.ensure_future(sink.put(entry(f"p{number}"))) for number in range(6)]
        assert await asyncio.to_thread(hold.arrived.wait, 20)
        await asyncio.gather(*(sink.mark_incomplete(ROLLOUT, f"m{number}") for number in range(20)))
        hold.release.set()
        await asyncio.gather(*puts)

    asyncio.run(run())
    assert len(_keys(s3, "/mark/")) == 20
    assert not _spilled(given)


class _Gathering(MemoryStore):
    """Lets as many marks as there are threads for them pass the look at the fences together."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier = threading.Barrier(MARK_THREADS)

    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        found = super().list(prefix)
        if prefix.endswith("/fence/"):
            with contextlib.suppress(threading.BrokenBarrierError):
                self.barrier.wait(20)
        return found


def test_many_marks_may_finish_a_drop_that_nobody_finished(tmp_path: Path) -> None:
    """As many marks as threads meet an announced drop at one moment, decide it together and none is stuck."""
    store = _Gathering()
    given: dict[str, Any] = {**GOOD, "store": store, "spill_dir": str(tmp_path / "spill"), "mark_timeout_s": 10.0}

    async def run() -> None:
        sink, source = S3TokenSink(**given), S3TokenSource(**given)
        await sink.put(entry())
        snapshot = await source.freeze(ROLLOUT)
        (closing,) = [row.key for row in store.list("") if row.key.endswith("/fence/closing")]
        store.create(closing.replace("closing", f"retiring-{snapshot.version}"), store.get(closing) or b"")
        await asyncio.gather(*(sink.mark_incomplete(ROLLOUT, f"m{number}") for number in range(MARK_THREADS)))
        assert not _spilled(given)
        late = await source.freeze(ROLLOUT)
        assert (late.incomplete, late.version) == (True, snapshot.version + MARK_THREADS)
        assert not await source.drop(ROLLOUT, snapshot_id=snapshot.snapshot_id, version=snapshot.version)

    asyncio.run(run())


def test_a_mark_on_a_retired_rollout_raises(memory: dict[str, Any]) -> None:
    """After drop and after retire a mark is refused by the retired error, not spilled and not swallowed."""

    async def run() -> None:
        sink, source = S3TokenSink(**memory), S3TokenSource(**memory)
        snapshot = await source.freeze("dropped")
        assert await source.drop("dropped", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        await source.retire(["retired"])
        for rollout in ("dropped", "retired"):
            with pytest.raises(TokenCaptureRetiredError, match=rollout):
                await sink.mark_incomplete(rollout, "c1")

    asyncio.run(run())


# Batches and retention


@pytest.mark.parametrize("operation", ["retire", "delete"])
@pytest.mark.parametrize(
    ("batch", "error"),
    [("7-3", TypeError), (b"7-3", TypeError), (None, TypeError), (7, TypeError), (["7-3", "a b", "7-4"], ValueError),
     (["7-3", None], ValueError), (["7-3", 7], ValueError)],
)  # fmt: skip
def test_a_bad_batch_changes_nothing(
    memory: dict[str, Any], operation: str, batch: Any, error: type[Exception]
) -> None:
    """A bare string or one bad id refuses the whole batch before anything is removed."""
    store: MemoryStore = memory["store"]

    async def run() -> None:
        await S3TokenSink(**memory).put(entry())
        before = {row.key for row in store.list("")}
        with pytest.raises(error):
            await getattr(S3TokenSource(**memory), operation)(batch)
        assert {row.key for row in store.list("")} == before

    asyncio.run(run())


@pytest.mark.parametrize("operation", ["retire", "delete"])
def test_removed_are_those_that_had_anything(memory: dict[str, Any], operation: str) -> None:
    """Records, intents and markers count, a freeze of nothing does not; order is kept, duplicates count once."""

    async def run() -> None:
        sink, source = S3TokenSink(**memory), S3TokenSource(**memory)
        await sink.put(entry(rollout="put"))
        await sink.begin_call("begun", "c1")
        await sink.mark_incomplete("marked")
        await sink.record_engine_refusal("refused", model_call_id="c1", code="x")
        await source.freeze("frozen")
        batch = ["marked", "never", "put", "frozen", "begun", "put", "refused", "never"]
        remove = getattr(source, operation)
        expected = {"removed": ["marked", "put", "begun", "refused"], "absent": ["never", "frozen"]}
        assert await remove(iter(batch)) == expected
        again = await remove(batch)
        assert again == {"removed": [], "absent": [*dict.fromkeys(batch)]}
        assert await remove([]) == {"removed": [], "absent": []}

    asyncio.run(run())


def test_a_large_batch_is_not_timed_out_by_its_own_queue(s3: FakeS3, given: dict[str, Any]) -> None:
    """The time of each rollout runs from its own start: a batch may take longer than one operation may."""
    given |= {"max_concurrency": 2, "op_timeout_s": 3.0}

    def slowly(exchange: Exchange) -> None:
        threading.Event().wait(0.15)
        exchange.send(exchange.apply())

    async def run() -> None:
        source = S3TokenSource(**given)
        await warm_up(S3TokenSink(**given))
        s3.script(on("PutObject"), slowly, times=None)
        batch = [f"r{number}" for number in range(30)]
        assert (await source.retire(batch))["absent"] == batch

    asyncio.run(run())


def test_retention_keep_retires_without_deleting(memory: dict[str, Any]) -> None:
    """The decision alone fences; every record stays in the bucket."""
    store: MemoryStore = memory["store"]
    keeping = {**memory, "retention": "keep"}

    async def run() -> None:
        sink, source = S3TokenSink(**keeping), S3TokenSource(**keeping)
        for rollout in ("dropped", "retired"):
            await sink.put(entry(rollout=rollout))
        snapshot = await source.freeze("dropped")
        before = captures([row.key for row in store.list("")])
        exact: dict[str, Any] = {"snapshot_id": snapshot.snapshot_id, "version": snapshot.version}
        assert await source.drop("dropped", **exact)
        assert await source.drop("dropped", **exact)
        await source.retire(["retired"])
        assert set(before) < set(captures([row.key for row in store.list("")]))
        for rollout in ("dropped", "retired"):
            with pytest.raises(TokenCaptureRetiredError):
                await sink.put(entry("c2", rollout))
            with pytest.raises(TokenCaptureRetiredError):
                await source.freeze(rollout)

    asyncio.run(run())


# Errors


def test_errors_can_be_caught_by_code_written_for_the_contract(memory: dict[str, Any]) -> None:
    """Frozen and retired are RuntimeErrors, a conflict and a bad id ValueErrors, and all are CaptureErrors."""

    async def run() -> None:
        sink, source = S3TokenSink(**memory), S3TokenSource(**memory)
        await sink.put(entry())
        with pytest.raises(ValueError, match="conflicting") as conflict:
            await sink.put(entry(prompt_token_ids=[9]))
        await source.freeze(ROLLOUT)
        with pytest.raises(RuntimeError) as frozen:
            await sink.put(entry("late"))
        await source.retire([ROLLOUT])
        with pytest.raises(RuntimeError) as retired:
            await sink.put(entry("late"))
        assert type(conflict.value) is ConflictingPayloadError
        assert type(frozen.value) is TokenCaptureFrozenError
        assert type(retired.value) is TokenCaptureRetiredError
        for error in (conflict.value, frozen.value, retired.value):
            assert isinstance(error, CaptureError)
            assert ROLLOUT in str(error)
            assert "'r'" in str(error), "the run is named"

    asyncio.run(run())


def test_stats_count_operations_and_failures(memory: dict[str, Any]) -> None:
    """Each operation counts once, a failed one under its error's name too."""

    async def run() -> Endpoint:
        sink, source = S3TokenSink(**memory), S3TokenSource(**memory)
        await sink.put(entry())
        await source.freeze(ROLLOUT)
        with pytest.raises(TokenCaptureFrozenError):
            await sink.put(entry("late"))
        return sink

    stats = asyncio.run(run()).stats()
    assert (stats["put"].count, stats["put"].failures) == (2, {"TokenCaptureFrozenError": 1})
    assert (stats["freeze"].count, stats["freeze"].failures) == (1, {})
    assert len(stats["put"].seconds) == 2


def test_a_call_put_before_it_began_has_no_first_put_left() -> None:
    """put, begin, freeze, drop, put again, in one process: the last one is refused as retired, not acknowledged."""
    where: dict[str, Any] = {"url": "s3://bucket/p", "run": "order", "store": MemoryStore()}
    sink, source = S3TokenSink(**where), S3TokenSource(**where)

    async def in_this_order() -> None:
        await sink.put(entry("c", "r"))
        await sink.begin_call("r", "c")
        snapshot = await source.freeze("r")
        assert await source.drop("r", snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        await sink.put(entry("c", "r"))

    with pytest.raises(TokenCaptureRetiredError):
        asyncio.run(in_this_order())


@pytest.mark.parametrize("version", [2.0, True, "2", None])
def test_drop_takes_the_version_of_a_snapshot_and_nothing_like_it(version: Any) -> None:
    """A version that is no int is a TypeError before anything changed, also where it equals the right one."""
    store = MemoryStore()
    sink, source = (made(url="s3://bucket/p", run="r", store=store) for made in (S3TokenSink, S3TokenSource))

    async def drop() -> None:
        await sink.put(entry("c", "r"))
        snapshot = await source.freeze("r")
        assert snapshot.version == 2
        await source.drop("r", snapshot_id=snapshot.snapshot_id, version=version)

    with pytest.raises(TypeError, match="version"):
        asyncio.run(drop())
    assert not [row.key for row in store.list("") if "retiring" in row.key]


def test_a_spill_that_cannot_be_read_judges_nothing(tmp_path: Path) -> None:
    """Whether a mark waits in a spill that others may write cannot be told, so a freeze is an error, not a guess."""
    spill = tmp_path / "spill"
    spill.mkdir(mode=0o700)
    source = S3TokenSource(url="s3://bucket/p", run="r", store=MemoryStore(), spill_dir=str(spill))
    assert not asyncio.run(source.freeze("r")).incomplete
    spill.chmod(0o777)
    with pytest.raises(SpillError, match="spill"):
        asyncio.run(source.freeze("r"))


class _Broken(MemoryStore):
    def create(self, key: str, body: bytes) -> bool:
        del key, body
        raise MemoryError


def test_a_mark_survives_whatever_goes_wrong(tmp_path: Path) -> None:
    """A mark that the store failed to take by an error of no known kind is in the spill when the call returns."""
    sink = S3TokenSink(url="s3://bucket/p", run="r", store=_Broken(), spill_dir=str(tmp_path / "spill"))
    asyncio.run(sink.mark_incomplete("7-3", "c"))
    assert len(list((tmp_path / "spill").glob("*.mark"))) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("http://s3.local:8333", "http://S3.local:8333/"),
        ("https://s3.local", "https://s3.local:443"),
        ("http://s3.local:80/", "http://s3.local"),
    ],
)
def test_a_mark_is_found_under_every_spelling_of_the_address(one: str, other: str, tmp_path: Path) -> None:
    """A mark spilled under one spelling of the store's address counts for a source that uses another."""
    spill = str(tmp_path / "spill")
    sink = S3TokenSink(url="s3://bucket/p", run="r", store=_Broken(), spill_dir=spill, endpoint_url=one)
    asyncio.run(sink.mark_incomplete("7-3", "c"))
    source = S3TokenSource(url="s3://bucket/p", run="r", store=MemoryStore(), spill_dir=spill, endpoint_url=other)
    assert asyncio.run(source.freeze("7-3")).incomplete


@pytest.mark.parametrize(
    "bad",
    [
        {"url": "s3://AKIA:sesame@bucket/p"},
        {"endpoint_url": "http://AKIA:sesame@host:1"},
        {"endpoint_url": "ftp://AKIA:sesame@host"},
        {"endpoint_url": "http://host:99999"},
        {"endpoint_url": "http://host:abc"},
        {"endpoint_url": "http://[::1"},
        {"endpoint_url": "http://host/?x=1"},
        {"max_concurrency": float("nan")},
        {"max_concurrency": float("inf")},
        {"op_timeout_s": 10**400},
    ],
    ids=str,
)
def test_bad_settings_are_refused_without_telling_secrets(bad: dict[str, Any]) -> None:
    """Addresses with credentials, ports or queries that cannot be, and numbers out of range are SettingsErrors."""
    with pytest.raises(SettingsError) as caught:
        S3TokenSink(**{"url": "s3://bucket/p", "run": "r", **bad})
    assert "sesame" not in str(caught.value)


def test_a_store_of_the_callers_own_stays_open() -> None:
    """Closing the endpoints of one run leaves a shared store usable for another."""

    class Store(MemoryStore):
        closed = False

        def close(self) -> None:
            self.closed = True

    store = Store()
    sink = S3TokenSink(url="s3://bucket/p", run="r", store=store)
    asyncio.run(sink.put(entry("c", "r")))
    asyncio.run(sink.close())
    del sink
    gc.collect()
    assert not store.closed


def test_many_freezes_at_once_all_succeed() -> None:
    """A trainer may freeze more rollouts at once than an operation's timeout has room for: they wait for a thread."""

    class Slow(MemoryStore):
        def list(self, prefix: str) -> Sequence[ObjectInfo]:
            time.sleep(0.02)
            return super().list(prefix)

    source = S3TokenSource(url="s3://bucket/p", run="r", store=Slow(), max_concurrency=2, op_timeout_s=0.5)

    async def freeze_all() -> list[TokenCaptureSnapshot]:
        return await asyncio.gather(*(source.freeze(f"r{n}") for n in range(60)))

    assert len(asyncio.run(freeze_all())) == 60
