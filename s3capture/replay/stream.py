"""Many rollouts out of a bucket, in the order of their keys, read ahead in parallel in bounded memory.

The rule of this module: how much is read ahead is counted in bytes, which a LIST tells before anything is read, so ten
thousand short rollouts keep every connection busy and one of a gigabyte is alone in memory; and one that is larger than
the bound still passes. Leaving a replay early ends its threads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Self, Unpack

from s3capture.endpoint import SettingsKwargs
from s3capture.errors import SettingsError
from s3capture.ids import validate_rollout_id
from s3capture.inspection import State
from s3capture.keys import RunKeys, shard
from s3capture.protocol.freezing import ONE_PAGE
from s3capture.reader import Reader
from s3capture.replay.model import Problem, ProblemKind, ReplayedRollout
from s3capture.replay.reading import Judged, Verdict, read_rollout
from s3capture.settings import Settings
from s3capture.store.base import Store
from s3capture.stored import Selection, StoredRollout, StoredRun
from s3capture.stored.run import SHARDS, SHARDS_AHEAD
from s3capture.stored.selection import globs_of, instant

DEFAULT_STATES = (State.FROZEN, State.RETIRED)
DEFAULT_BUDGET = 24 * 1024 * 1024
"""Bytes of stored objects that are read ahead; unpacked they are some 5 to 8 times as much."""
KEPT_PROBLEMS = 1000

_THREADS = 8
_AHEAD = 32
_EACH = 4096
"""Bytes that a rollout without calls is taken to weigh."""


@dataclass(slots=True)
class Counts:
    """What a replay has met so far. ``seen`` are the rollouts of the run whose id was asked for; of those ``given``
    were given, ``other`` were of another state or time, ``incomplete`` were passed over because complete ones were
    asked for, ``deleted`` were retired and their records are gone, and ``left_out`` could not be given: see the
    problems. ``calls``, ``refusals`` and ``bytes`` (as stored) are those of the given; ``problems`` are all there were.
    ``done`` of ``total`` parts of the key space are listed.
    """

    seen: int = 0
    given: int = 0
    other: int = 0
    incomplete: int = 0
    deleted: int = 0
    left_out: int = 0
    calls: int = 0
    refusals: int = 0
    bytes: int = 0
    problems: int = 0
    done: int = 0
    total: int = 0


class Replay:
    """An iterator over ``ReplayedRollout``, and a context manager; made by ``replay``.

    ``counts`` says what was met so far, ``problems`` what could not be given (the first 1,000; ``on_problem`` is told
    every one as it is met), ``absent`` which ids asked for by their full name hold nothing. Iterating raises
    ``StoreError``. It is for one thread, and is spent when it ends.
    """

    def __init__(
        self,
        run: StoredRun,
        selection: Selection,
        *,
        budget: int = DEFAULT_BUDGET,
        shards: Iterable[str] = SHARDS,
        on_problem: Callable[[Problem], None] = lambda _: None,
    ) -> None:
        self.run, self.selection = run, selection
        self.counts = Counts()
        self.problems: list[Problem] = []
        self.absent: list[str] = []
        self._budget, self._shards, self._on_problem = budget, frozenset(shards), on_problem
        self._owned = ExitStack()
        self._pool: ThreadPoolExecutor | None = None
        self._steps = self._iterate()

    def owning(self, owned: ExitStack) -> Self:
        """Close ``owned`` (the reader and the store) when this is closed."""
        self._owned = owned
        return self

    def __iter__(self) -> Iterator[ReplayedRollout]:
        return self

    def __next__(self) -> ReplayedRollout:
        try:
            return next(self._steps)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the threads and let go of the store. Idempotent; done at the end of the iteration anyway."""
        self._steps.close()
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
        self._owned.close()

    def _iterate(self) -> Generator[ReplayedRollout, None, None]:
        pool = self._pool = ThreadPoolExecutor(_THREADS, "s3capture-replay")
        waiting: deque[tuple[int, Future[Judged]]] = deque()
        held = 0
        for stored, paged in self._candidates():
            weight = _EACH + sum(row.size for row in stored.rows)
            while waiting and (held + weight > self._budget or len(waiting) >= _AHEAD):
                first, judged = waiting.popleft()
                yield from self._given(first, judged.result())
                held -= first
            held += weight
            reading = pool.submit(read_rollout, stored, self.selection, self.run.rollout, paged=paged)
            waiting.append((weight, reading))
        while waiting:
            first, judged = waiting.popleft()
            yield from self._given(first, judged.result())
        for _, text in sorted(self.run.problems().items()):
            self._tell(Problem("", None, ProblemKind.DAMAGED, text))

    def _given(self, size: int, judged: Judged) -> Iterator[ReplayedRollout]:
        for problem in judged.problems:
            self._tell(problem)
        counts = self.counts
        match judged.verdict:
            case Verdict.OTHER:
                counts.other += 1
            case Verdict.INCOMPLETE:
                counts.incomplete += 1
            case Verdict.DELETED:
                counts.deleted += 1
            case Verdict.LEFT_OUT:
                counts.left_out += 1
        if judged.rollout is not None:
            counts.given += 1
            counts.calls += len(judged.rollout.calls)
            counts.refusals += len(judged.rollout.refusals)
            counts.bytes += size - _EACH
            yield judged.rollout

    def _tell(self, problem: Problem) -> None:
        self.counts.problems += 1
        if len(self.problems) < KEPT_PROBLEMS:
            self.problems.append(problem)
        self._on_problem(problem)

    def _candidates(self) -> Iterator[tuple[StoredRollout, bool]]:
        """The rollouts whose ids are asked for, in the order of their keys: by shard, and by id within one.

        Each with whether it lies across two pages of a LIST.
        """
        reader, counts = self.run.reader, self.counts
        if self.selection.globs and not any(set(glob) & set("*?[") for glob in self.selection.globs):
            # Whole ids: there is no need to list the run.
            names = set(map(validate_rollout_id, self.selection.globs))
            ids = sorted(names, key=lambda name: (shard(name), name))
            ids = [name for name in ids if shard(name) in self._shards]
            counts.total = len(ids)
            for stored in reader.map(self.run.rollout, ids):
                counts.done += 1
                if stored.rows or stored.problem:
                    counts.seen += 1
                    yield stored, False
                else:
                    self.absent.append(stored.rollout_id)
            return
        shards = [hh for hh in self.run.shards() if hh in self._shards]
        counts.total = len(shards)
        for rollouts, strays in reader.map(self.run.shard, shards, ahead=SHARDS_AHEAD):
            across = _across_pages(rollouts, strays)
            for stored in rollouts:
                if self.selection.names(stored.rollout_id):
                    counts.seen += 1
                    yield stored, stored.rollout_id in across
            counts.done += 1


def _across_pages(rollouts: Iterable[StoredRollout], strays: Iterable[str]) -> frozenset[str]:
    """The rollouts of one LIST that a page of it ends in, as far as it shows: only those were not listed at one moment.

    Also those that seem to end there: what followed may have been deleted before the next page.
    """
    owners = [(row.key.encode(), stored.rollout_id) for stored in rollouts for row in stored.live]
    owners += ((key.encode(), "") for key in strays)
    owners.sort()
    return frozenset(owners[end - 1][1] for end in range(ONE_PAGE, len(owners) + 1, ONE_PAGE))


def selection_of(
    rollouts: Iterable[str] = (),
    states: Iterable[str] = DEFAULT_STATES,
    complete: bool | None = True,
    since: float | str | None = None,
    until: float | str | None = None,
) -> Selection:
    """Return the checked selection of ``replay``. Raise ``SettingsError`` naming the bad value."""
    known = frozenset(State)
    if strange := sorted({str(state) for state in states} - known):
        raise SettingsError(f"state {strange[0]!r} is not one of {', '.join(sorted(known))}")
    now = time.time()
    after, before = (instant(t, now) if isinstance(t, str) else t for t in (since, until))
    return Selection(globs_of(rollouts), frozenset(str(state) for state in states), complete, after, before)


def replay(
    *,
    rollouts: Iterable[str] = (),
    states: Iterable[str] = DEFAULT_STATES,
    complete: bool | None = True,
    since: float | str | None = None,
    until: float | str | None = None,
    budget: int = DEFAULT_BUDGET,
    on_problem: Callable[[Problem], None] = lambda _: None,
    store: Store | None = None,
    **settings: Unpack[SettingsKwargs],
) -> Replay:
    """Replay rollouts of one run: ``with replay(url="s3://bucket/prefix", run="run-7") as rollouts: ...``.

    ``rollouts`` are ids or shell patterns of them, none for all. ``states``: of a frozen rollout, or a retired one
    whose records were kept or archived, those calls are given that its freeze decided on; of an ``open`` or
    ``freezing`` one what is there now, which may change. ``complete`` True gives only rollouts that are whole, in the
    bucket and in the replay, and so may be trained on; False only the others, None both. ``since`` and ``until`` bound
    the last change, in Unix seconds or as text (``7d``, ``2026-12-01``). ``budget`` bounds what is read ahead, in bytes
    as stored.

    ``settings`` are the flat settings of the endpoints (``url`` and ``run`` are required); ``store`` replaces the
    bucket in tests. Raise ``SettingsError`` or ``InvalidIdError`` before anything is read; nothing is sent before the
    first ``next``. Damaged objects are problems (see ``Replay``), never errors.
    """
    given = Settings.of(**settings)
    patterns = tuple(rollouts)
    selection = selection_of(patterns, tuple(states), complete, since, until)
    if budget < 1:
        raise SettingsError(f"budget {budget!r} is not a positive number of bytes")
    with ExitStack() as owned:
        if store is None:
            from s3capture.store.boto import BotoStore  # noqa: PLC0415 - boto3 takes long to import

            store = BotoStore(given)
            owned.callback(store.close)
        reader = owned.enter_context(Reader(store))
        run = StoredRun(reader, RunKeys(given.prefix, given.run))
        return Replay(run, selection, budget=budget, on_problem=on_problem).owning(owned.pop_all())
