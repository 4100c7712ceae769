"""A run as a Ray dataset, for those whose run has outgrown one machine: ``s3capture.ray.read(url=..., run=...)``.

The rule of this module: a read task is a set of shards of the key space, and does what a replay does, no more: the
rows are those of the Parquet files, whichever worker made them. Nothing else in the package imports this, or Ray. Each
worker needs s3capture and credentials of its own, from boto3's chain.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Unpack

from s3capture.endpoint import SettingsKwargs
from s3capture.errors import CorruptObjectError, MissingExtraError, SettingsError
from s3capture.keys import RunKeys
from s3capture.reader import Reader
from s3capture.replay.model import Problem, ReplayedRollout
from s3capture.replay.stream import DEFAULT_BUDGET, DEFAULT_STATES, Replay, selection_of
from s3capture.replay.table import CallBatches, call_schema, rollout_row, rollout_schema, rollout_table
from s3capture.settings import Settings
from s3capture.store.boto import BotoStore
from s3capture.stored import Selection, StoredRun

try:
    import ray.data
    from ray.data.block import BlockMetadata
    from ray.data.datasource import Datasource, ReadTask
except ImportError as error:
    raise MissingExtraError(
        f"s3capture.ray needs Ray Data, which cannot be imported ({error}): pip install 's3capture[ray]'"
    ) from error

_log = logging.getLogger("s3capture")

_BLOCK_TOKENS = 2_000_000
_BLOCK_ROWS = 10_000


def read(
    *,
    table: Literal["calls", "rollouts"] = "calls",
    rollouts: Iterable[str] = (),
    states: Iterable[str] = DEFAULT_STATES,
    complete: bool | None = True,
    since: float | str | None = None,
    until: float | str | None = None,
    strict: bool = False,
    budget: int = DEFAULT_BUDGET,
    ray_options: dict[str, Any] | None = None,
    **settings: Unpack[SettingsKwargs],
) -> ray.data.Dataset:
    """Return a dataset with one row a call, or a rollout: the columns of ``calls.parquet`` and ``rollouts.parquet``.

    What is selected is said as in ``s3capture.replay.replay``. A call or rollout that cannot be given is left out and
    a warning in the log of the worker; with ``strict`` it fails the read instead (``CorruptObjectError``).
    ``ray_options`` go to ``ray.data.read_datasource``, for example ``{"override_num_blocks": 64}``: there are at most
    256 read tasks, the shards of a run. Rows come in no order that means something: order by ``rollout_id`` and
    ``position``.

    Asks the store for the shards at once, and raises ``StoreError``, ``SettingsError`` or ``InvalidIdError`` then.
    """
    source = CaptureDatasource(
        Settings.of(**settings),
        selection_of(tuple(rollouts), tuple(states), complete, since, until),
        table=table,
        strict=strict,
        budget=budget,
    )
    dataset: ray.data.Dataset = ray.data.read_datasource(source, **(ray_options or {}))
    return dataset


@dataclass(frozen=True, slots=True)
class _Reading:
    """What a worker needs to read its shards."""

    settings: Settings
    selection: Selection
    table: str
    strict: bool
    budget: int

    def tables(self, shards: tuple[str, ...]) -> Iterator[Any]:
        """Yield the tables of some shards; at least one, which tells the schema."""
        store = BotoStore(self.settings)
        try:
            with Reader(store) as reader:
                run = StoredRun(reader, RunKeys(self.settings.prefix, self.settings.run))
                with Replay(run, self.selection, budget=self.budget, shards=shards, on_problem=self._tell) as found:
                    yield from self._calls(found) if self.table == "calls" else self._rollouts(found)
        finally:
            store.close()

    def _calls(self, found: Iterable[ReplayedRollout]) -> Iterator[Any]:
        yield call_schema().empty_table()
        batches = CallBatches(_BLOCK_TOKENS, _BLOCK_ROWS)
        for rollout in found:
            left_out: list[Problem] = []
            yield from batches.add(rollout, left_out)
            for problem in left_out:
                self._tell(problem)
        yield from batches.rest()

    def _rollouts(self, found: Iterable[ReplayedRollout]) -> Iterator[Any]:
        rows: list[list[Any]] = []
        for rollout in found:
            rows.append(rollout_row(rollout))
            if len(rows) >= _BLOCK_ROWS:
                yield rollout_table(rows)
                rows = []
        yield rollout_table(rows)

    def _tell(self, problem: Problem) -> None:
        if self.strict:
            raise CorruptObjectError(f"run {self.settings.run!r}, {problem}")
        _log.warning("run %s, %s", self.settings.run, problem)


class CaptureDatasource(Datasource):
    """The rollouts of one run, for ``ray.data.read_datasource``; see ``read``."""

    def __init__(self, settings: Settings, selection: Selection, *, table: str, strict: bool, budget: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call] # Ray types its interface in part
        if table not in ("calls", "rollouts"):
            raise SettingsError(f"table {table!r} is not one of calls, rollouts")
        self._reading = _Reading(settings, selection, table, strict, budget)
        store = BotoStore(settings)
        try:
            with Reader(store) as reader:
                self._shards = StoredRun(reader, RunKeys(settings.prefix, settings.run)).shards()
        finally:
            store.close()

    def get_name(self) -> str:
        """See ``Datasource.get_name``."""
        return f"s3capture {self._reading.table}"

    def estimate_inmemory_data_size(self) -> int | None:
        """None: a LIST of the whole run would tell, and is what the tasks are for."""
        return None

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """See ``Datasource.get_read_tasks``; a task reads every n-th shard, and they are even, being hashes."""
        del data_context
        count = max(1, min(parallelism, len(self._shards)))
        schema = call_schema() if self._reading.table == "calls" else rollout_schema()
        return [
            ReadTask(
                _task(self._reading, self._shards[number::count]),
                BlockMetadata(num_rows=None, size_bytes=None, exec_stats=None),
                schema=schema,
                per_task_row_limit=per_task_row_limit,
            )
            for number in range(count)
        ]


def _task(reading: _Reading, shards: tuple[str, ...]) -> Callable[[], Iterator[Any]]:
    return lambda: reading.tables(shards)
