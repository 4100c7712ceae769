"""Replays as Parquet: ``calls.parquet`` and ``rollouts.parquet`` in one folder.

The rule of this module: memory is bounded by a row group, whatever the length of the run; the columns are ``table``'s.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from s3capture.archive.needs import give_back, parquet
from s3capture.replay.model import Problem, ReplayedRollout
from s3capture.replay.table import CallBatches, call_schema, rollout_row, rollout_schema, rollout_table

CALLS, ROLLOUTS = "calls.parquet", "rollouts.parquet"

_GROUP_TOKENS = 1_000_000
"""Tokens in a row group: 16 MB of ids, and as much of log probabilities where all are generated."""
_GROUP_ROWS = 20_000


class ParquetFolder:
    """Writes the two files into ``folder``; a context manager. Raise ``MissingExtraError`` without pyarrow."""

    def __init__(self, folder: Path) -> None:
        _, pq = parquet()
        self._files = ExitStack()
        self._calls = self._files.enter_context(_writer(pq, folder / CALLS, call_schema()))
        self._rollouts = self._files.enter_context(_writer(pq, folder / ROLLOUTS, rollout_schema()))
        self._batches = CallBatches(_GROUP_TOKENS, _GROUP_ROWS)
        self._rows: list[list[Any]] = []

    def write(self, rollout: ReplayedRollout) -> list[Problem]:
        """Add one rollout; return the calls that no table can hold, which are left out."""
        left_out: list[Problem] = []
        for table in self._batches.add(rollout, left_out):
            self._calls.write_table(table)
            del table  # before the next is made
            give_back()
        self._rows.append(rollout_row(rollout))
        if len(self._rows) >= _GROUP_ROWS:
            self._flush_rollouts()
        return left_out

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            if kind is None:
                for table in self._batches.rest():
                    self._calls.write_table(table)
                self._flush_rollouts()
        finally:
            self._files.__exit__(kind, error, at)

    def _flush_rollouts(self) -> None:
        if self._rows:
            self._rollouts.write_table(rollout_table(self._rows))
        self._rows = []


def _writer(pq: Any, path: Path, schema: Any) -> Any:
    return pq.ParquetWriter(path, schema, compression="zstd", write_page_checksum=True)
