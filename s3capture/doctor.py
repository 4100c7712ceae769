"""Find out whether a bucket, as seen from here with these credentials, can hold captures: step by step, by trying.

The rule of this module: a verdict rests on what the very bucket did with scratch objects under ``RunKeys.probe``, never
on what a store claims to be; races are judged by what is stored at the end, not by the replies alone; and a check
that fails says what to do. Scratch objects are removed at the end where that is allowed.
"""

from __future__ import annotations

import contextlib
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from s3capture.driver import Driver
from s3capture.effects import Answer, Create, Created, Delete, Deleted, Effect, Get, List, Steps
from s3capture.errors import CaptureError, SpillError, StoreAccessError, StoreError, UnsupportedStoreError
from s3capture.keys import RunKeys
from s3capture.protocol.steps import found, listed
from s3capture.settings import Settings
from s3capture.spill import Spill, memory_file_system
from s3capture.store.base import Store, TransientStoreError
from s3capture.store.boto import BotoStore
from s3capture.store.boto_facts import BucketFacts, bucket_facts, credential_source

ROUNDS, WRITERS = 20, 8
"""A store that is wrong in four rounds of five passes one round now and then, and twenty hardly ever."""

SKEW_WARNING_S = 60.0
"""Stores refuse signatures that are 15 minutes off; a minute already makes the times in records misleading."""

# What the other checks stand on: where one of these fails, the rest would only repeat it.
_GROUND = frozenset({"write-read", "list", "create-once"})
_REPEATS = 20
_SLOW_PUT_S = 1.0
_BARRIER_S = 60.0
_PAUSE_S = 0.05
_LONG_SEGMENT, _LONG_KEY = 240, 900

_CONDITIONAL = (
    "use a store that supports conditional writes (AWS S3, SeaweedFS, recent MinIO, R2), or upgrade this one: "
    "otherwise one writer's record can replace another's unseen"
)
_INCONSISTENT = "use a store whose reads and listings show every finished write at once: the protocol rests on it"
_LONG = "shorten run and rollout ids, or use a store that takes keys of 900 and path segments of 240 bytes"
_DELETES = (
    "grant s3:DeleteObject, or set retention='keep' and let a lifecycle rule remove what is consumed; captures are "
    "safe either way"
)


class Verdict(StrEnum):
    """How a check ended; only ``failed`` makes the store unfit. ``skipped``: an earlier failure forbade the check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Check:
    """One step: its stable ``name``, the verdict, what was seen, and what to do about it ("" for nothing)."""

    name: str
    verdict: Verdict
    saw: str
    remedy: str = ""


def examine(
    settings: Settings,
    *,
    store: Store | None = None,
    rounds: int = ROUNDS,
    writers: int = WRITERS,
    patience_s: float = 3.0,
) -> Iterator[Check]:
    """Yield each check as it ends; ``store`` replaces the bucket in tests, and boto3's own checks then fall away.

    The race runs ``rounds`` times, each with ``writers`` threads on one new key. When the store does not answer
    within ``patience_s``, or refuses to be examined, the failed check is yielded and its ``StoreError`` raised.
    """
    yield Check("settings", Verdict.OK, f"{settings.url}, run {settings.run}")
    yield _spill(settings.spill_path)
    if store is None:
        yield _credentials()
    examination = _Examination(settings, store, rounds, writers)
    try:
        yield from examination.run(patience_s)
    finally:
        examination.close()


def _credentials() -> Check:
    source = credential_source()
    if source is None:
        return Check("credentials", Verdict.FAILED, "boto3 finds none in its chain")
    return Check("credentials", Verdict.OK, f"found by boto3 in {source!r}")


def _spill(directory: Path) -> Check:
    try:
        Spill(directory).probe()
    except SpillError as error:
        return Check("spill", Verdict.FAILED, str(error))
    kind = None
    with contextlib.suppress(OSError):  # only Linux says
        kind = memory_file_system(directory, Path("/proc/self/mounts").read_bytes())
    if kind is not None:
        saw = f"{directory} lies in memory ({kind}): marks kept there are lost when the machine restarts"
        return Check("spill", Verdict.WARNING, saw, "set spill_dir to a directory on a disk")
    return Check("spill", Verdict.OK, f"{directory} takes marks")


class _FailedError(Exception):
    """A check saw what must not be."""

    def __init__(self, saw: str, remedy: str) -> None:
        self.saw, self.remedy = saw, remedy
        super().__init__(saw)


class _Examination:
    """The checks that need the store, and their scratch keys."""

    def __init__(self, settings: Settings, store: Store | None, rounds: int, writers: int) -> None:
        self._settings = settings
        self._real = store is None
        self._store = BotoStore(settings) if store is None else store
        # Reads that must see a write come over another connection than the write, as they do between machines.
        self._other = BotoStore(settings) if store is None else store
        self._rounds, self._writers = rounds, writers
        self._keys = RunKeys(settings.prefix, settings.run)
        self._name = f"doctor-{secrets.token_hex(6)}"
        self._made: dict[str, None] = {}
        self._pool = ThreadPoolExecutor(writers, "s3capture-doctor")
        self._puts: list[float] = []

    def run(self, patience_s: float) -> Iterator[Check]:
        """Every check, in order; those that an earlier failure makes meaningless are skipped."""
        try:
            self._reach(patience_s)
        except StoreError as error:
            yield Check("bucket", Verdict.FAILED, str(error))
            raise
        yield Check("bucket", Verdict.OK, f"{self._store.describe()} answers")
        steps: tuple[tuple[str, Callable[[], str | Check]], ...] = (
            ("write-read", self._write_read),
            ("list", self._list),
            ("create-once", self._create_once),
            ("create-race", self._race),
            ("read-after-write", self._read_after_write),
            ("empty-body", self._empty_body),
            ("long-keys", self._long_keys),
            ("delete", self._delete),
        )
        fit = True
        for name, step in steps:
            check = self._judged(name, step) if fit else Check(name, Verdict.SKIPPED, "an earlier check failed")
            yield check
            fit = fit and not (check.verdict is Verdict.FAILED and name in _GROUND)
        if self._real:
            yield from _told(bucket_facts(self._settings))
        if self._puts:
            yield self._speed()
        yield self._clean_up()

    def close(self) -> None:
        """Remove the scratch keys of an examination that was stopped, and let go."""
        with contextlib.suppress(CaptureError):  # the reason to stop is the one to tell
            self._sweep()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._real:
            self._store.close()
            self._other.close()

    # -- the checks -----------------------------------------------------------------------------------------

    def _reach(self, patience_s: float) -> None:
        """One request that needs address, bucket and credentials, and changes nothing."""
        try:
            self._ask(List(self._key("")), patience_s=patience_s)
        except StoreAccessError as refused:
            # Perhaps only listing is refused; whoever may write is known here, and ``list`` tells the rest.
            try:
                self._create("reach", b"reach")
            except StoreError:
                raise refused from None

    def _write_read(self) -> str:
        if not self._create("first", b"first"):
            raise _FailedError("a new key is said to exist already", _INCONSISTENT)
        self._expect("first", b"first", "an object that was just written")
        return "an object comes back as it was written"

    def _list(self) -> str:
        self._create("listed", b"12345")
        rows = listed(self._ask(List(self._key(""))))
        sizes = {row.key: row.size for row in rows}
        if sizes.get(self._key("listed")) != 5:
            raise _FailedError("a listing does not show, or wrongly shows, an object just written", _INCONSISTENT)
        return "a listing shows what was written"

    def _create_once(self) -> str:
        self._create("once", b"first")
        again = self._create("once", b"second")
        stored = self._read("once")
        if again or stored != b"first":
            said = "a second create of one key succeeded" if again else "a second create was refused"
            kept = {b"first": "the first body stays", b"second": "the second body replaced the first"}
            saw = f"{said}, and {kept.get(stored or b'', 'the key holds neither body')}: If-None-Match is not honoured"
            raise _FailedError(saw, _CONDITIONAL)
        return "a second create of one key is refused, and the first body stays"

    def _race(self) -> str:
        barrier = threading.Barrier(self._writers)
        slowest = 0.0
        for number in range(self._rounds):
            name = f"race-{number}"
            bodies = [f"{name}/{writer}/{secrets.token_hex(8)}".encode() for writer in range(self._writers)]
            contend = [self._pool.submit(self._contend, barrier, name, body) for body in bodies]
            results = [future.result() for future in contend]
            slowest = max(slowest, *(seconds for _, seconds in results))
            winners = [body for body, (won, _) in zip(bodies, results, strict=True) if won]
            stored = self._read(name)
            where = f"round {number + 1} of {self._rounds}, {self._writers} writers on one new key"
            if len(winners) > 1:
                raise _FailedError(f"{where}: {len(winners)} were told that they were first", _CONDITIONAL)
            if stored not in bodies or (winners and stored != winners[0]):
                raise _FailedError(f"{where}: the body that is stored is not the winner's", _CONDITIONAL)
        return (
            f"{self._rounds} round{'' if self._rounds == 1 else 's'} of {self._writers} writers on one new key: one "
            f"winner each, whose body is stored; the slowest waited {slowest:.1f} s"
        )

    def _contend(self, barrier: threading.Barrier, name: str, body: bytes) -> tuple[bool, float]:
        """Create as the others do, at the same moment; return whether *this* attempt surely won, and the seconds."""
        key, doubtful = self._key(name), False
        self._made[key] = None
        barrier.wait(_BARRIER_S)
        start = time.monotonic()
        while True:
            try:
                made = self._store.create(key, body)
            except TransientStoreError as error:
                # 409 or a lost reply: ask again, as the driver does. After a doubt only the stored body can tell.
                doubtful = doubtful or error.doubtful
                if time.monotonic() - start > self._settings.op_timeout_s:
                    raise
                time.sleep(_PAUSE_S)
            else:
                return made and not doubtful, time.monotonic() - start

    def _read_after_write(self) -> str:
        for number in range(_REPEATS):
            name, body = f"seen-{number}", f"seen {number}".encode()
            start = time.monotonic()
            self._create(name, body)
            self._puts.append(time.monotonic() - start)
            self._expect(name, body, "an object just written, read over another connection")
            if not listed(self._ask(List(self._key(name)), store=self._other)):
                raise _FailedError("a listing over another connection misses an object just written", _INCONSISTENT)
        return f"{_REPEATS} writes were seen at once by reads and listings over another connection"

    def _empty_body(self) -> str:
        self._create("empty", b"")
        again = self._create("empty", b"x")
        if again or self._read("empty") != b"":
            raise _FailedError("an empty object can be created twice, or does not come back empty", _CONDITIONAL)
        return "an empty object is created once and comes back empty"

    def _long_keys(self) -> str:
        # Below the prefix of the scratch keys: ``RunKeys`` shortens a long name, and the length is what is tried here.
        segment = self._key("long") + "/" + "s" * _LONG_SEGMENT
        key = self._key("deep")
        while len(key) < _LONG_KEY - 1:
            key += "/" + "k" * min(100, _LONG_KEY - len(key) - 1)
        for long_key, what in ((segment, f"segment of {_LONG_SEGMENT}"), (key, f"key of {len(key)}")):
            self._made[long_key] = None
            try:
                self._ask(Create(long_key, b"long"))
                stored = found(self._ask(Get(long_key)))
            except StoreError as error:
                raise _FailedError(f"a {what} bytes is refused: {error}", _LONG) from error
            if stored != b"long":
                raise _FailedError(f"an object under a {what} bytes does not come back", _LONG)
        return f"keys of {len(key)} and path segments of {_LONG_SEGMENT} bytes are kept"

    def _delete(self) -> str | Check:
        self._create("deleted", b"old")
        key = self._key("deleted")
        answer = self._ask(Delete((key,)))
        if isinstance(answer, Deleted) and answer.failed:
            return Check("delete", Verdict.WARNING, f"deleting is refused: {answer.failed[0][1]}", _DELETES)
        if self._read("deleted") is not None or listed(self._ask(List(key), store=self._other)):
            raise _FailedError("a deleted object can still be read or listed", _INCONSISTENT)
        if not self._create("deleted", b"new") or self._read("deleted") != b"new":
            raise _FailedError("a deleted key cannot be created anew", _INCONSISTENT)
        return "a deleted object is gone at once, and its key can be created anew"

    def _speed(self) -> Check:
        middle = statistics.median(self._puts)
        saw = f"a small PUT takes {middle * 1000:.0f} ms (median of {len(self._puts)})"
        if middle > _SLOW_PUT_S:
            return Check(
                "put-time", Verdict.WARNING, saw, "every model call waits for one: use a nearer or faster store"
            )
        return Check("put-time", Verdict.OK, saw)

    def _clean_up(self) -> Check:
        left = self._sweep()
        if left:
            saw = f"{left} scratch objects stay under {self._key('')}"
            return Check("clean-up", Verdict.WARNING, saw, "remove them by hand, or with a lifecycle rule")
        return Check("clean-up", Verdict.OK, "no scratch object is left")

    # -- how they ask ---------------------------------------------------------------------------------------

    def _judged(self, name: str, step: Callable[[], str | Check]) -> Check:
        try:
            saw = step()
        except _FailedError as failure:
            return Check(name, Verdict.FAILED, failure.saw, failure.remedy)
        except UnsupportedStoreError as error:
            return Check(name, Verdict.FAILED, str(error), _CONDITIONAL)
        except (CaptureError, threading.BrokenBarrierError) as error:
            return Check(name, Verdict.FAILED, str(error) or "the writers did not start together; run doctor again")
        return saw if isinstance(saw, Check) else Check(name, Verdict.OK, saw)

    def _key(self, name: str) -> str:
        return self._keys.probe(f"{self._name}-{name}")

    def _create(self, name: str, body: bytes) -> bool:
        key = self._key(name)
        self._made[key] = None
        return isinstance(self._ask(Create(key, body)), Created)

    def _read(self, name: str) -> bytes | None:
        return found(self._ask(Get(self._key(name)), store=self._other))

    def _expect(self, name: str, body: bytes, what: str) -> None:
        if (stored := self._read(name)) != body:
            problem = "is absent" if stored is None else "does not come back as it was written"
            raise _FailedError(f"{what} {problem}", _INCONSISTENT)

    def _ask(self, effect: Effect, *, store: Store | None = None, patience_s: float | None = None) -> Answer:
        limit = self._settings.op_timeout_s if patience_s is None else patience_s
        driver = Driver(store or self._store, self._pool)
        return driver.run(_one(effect), deadline=time.monotonic() + limit, what="doctor")

    def _sweep(self) -> int:
        """Delete the scratch keys and return how many stay."""
        if not self._made:
            return 0
        answer = self._ask(Delete(tuple(self._made)))
        failed = dict(answer.failed) if isinstance(answer, Deleted) else {}
        self._made = {key: None for key in self._made if key in failed}
        return len(self._made)


def _one(effect: Effect) -> Steps[Answer]:
    (answer,) = yield (effect,)
    return answer


def _told(facts: BucketFacts) -> Iterator[Check]:
    """What the store says of itself; never a failure."""
    hint = "records that were deleted stay as old versions until a lifecycle rule expires them"
    match facts.versioning:
        case None:
            yield Check("versioning", Verdict.UNKNOWN, "the store does not tell (s3:GetBucketVersioning)")
        case "off":
            yield Check("versioning", Verdict.OK, "off")
        case state:
            yield Check("versioning", Verdict.OK, f"{state}: {hint}")
    match facts.object_lock:
        case None:
            yield Check("object-lock", Verdict.UNKNOWN, "the store does not tell (s3:GetBucketObjectLockConfiguration)")
        case "off" | "on" as state:
            yield Check("object-lock", Verdict.OK, "off" if state == "off" else "on, without a default retention")
        case retention:
            saw = f"each object is locked for {retention}: deleting hides it and frees nothing before that"
            yield Check("object-lock", Verdict.OK, saw)
    if facts.skew_s is None:
        yield Check("clock", Verdict.UNKNOWN, "the store sends no date")
    elif abs(facts.skew_s) > SKEW_WARNING_S:
        side = "ahead of" if facts.skew_s > 0 else "behind"
        saw = f"this machine is {abs(facts.skew_s):.0f} s {side} the store"
        yield Check("clock", Verdict.WARNING, saw, "set the clock right (NTP): at 15 minutes requests are refused")
    else:
        yield Check("clock", Verdict.OK, f"within {SKEW_WARNING_S:.0f} s of the store's")
