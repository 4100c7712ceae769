"""Retire or delete a batch of rollouts, for the source and the ledger alike.

The rule of this module: the whole batch is checked before anything changes, every rollout of it is tried, and what
could not be done is an error that says how many and which came first; repeating the batch is always safe.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

from s3capture.effects import Steps
from s3capture.errors import StoreAccessError
from s3capture.ids import validate_batch
from s3capture.protocols import RolloutRemoval

if TYPE_CHECKING:
    from s3capture.endpoint import Endpoint

_log = logging.getLogger("s3capture")


class Removed(Protocol):
    """What the removal steps of one rollout return."""

    @property
    def had_records(self) -> bool: ...
    @property
    def left(self) -> tuple[tuple[str, str], ...]: ...


_R = TypeVar("_R", bound=Removed)


async def remove_each(
    endpoint: Endpoint, op: str, rollout_ids: Sequence[str], steps: Callable[[str], Steps[_R]]
) -> RolloutRemoval:
    """Run ``steps`` for each distinct rollout, side by side; ``op`` is named in errors and statistics.

    Raise ``TypeError`` / ``InvalidIdError`` before anything changed, the first ``StoreError`` of a rollout (with a note
    that counts them), and, for a delete, ``StoreAccessError`` when the bucket keeps something.
    """
    batch, runtime, run = validate_batch(rollout_ids), endpoint._runtime, endpoint.settings.run

    # The clock of an operation runs while it waits for a thread, so a rollout is started when there is one for it.
    room = asyncio.Semaphore(endpoint.settings.max_concurrency)

    async def remove(rollout: str) -> _R:
        what = f"{op} of rollout {rollout!r}, run {run!r}"
        async with room:
            # What was spilled here must not come back into what is being deleted.
            publishes = not op.endswith("delete")
            operation = runtime.submit(op, what, lambda: steps(rollout), patient=True, publishes=publishes)
            return await endpoint._result(operation, what)

    results = await asyncio.gather(*(remove(rollout) for rollout in batch), return_exceptions=True)
    done: list[tuple[str, Removed]] = []
    failed: list[tuple[str, BaseException]] = []
    for rollout, result in zip(batch, results, strict=True):
        if isinstance(result, BaseException):
            failed.append((rollout, result))
        else:
            done.append((rollout, result))
    left = [(rollout, removed.left) for rollout, removed in done if removed.left]
    for rollout, keys in left:
        report_left(run, rollout, op, keys)
    if failed:
        rollout, error = failed[0]
        error.add_note(f"{len(failed)} of {len(batch)} rollouts failed, the first is {rollout!r}; repeat the batch")
        raise error
    if left and op.endswith("delete"):
        rollout, keys = left[0]
        raise StoreAccessError(
            f"{op} of rollout {rollout!r}, run {run!r}: {len(keys)} objects are still there, the first is "
            f"{keys[0][0]} ({keys[0][1]}); {len(left)} of {len(batch)} rollouts are affected. Repeat it, with "
            "permission to s3:DeleteObject where that is what was refused"
        )
    return RolloutRemoval(
        removed=[rollout for rollout, removed in done if removed.had_records],
        absent=[rollout for rollout, removed in done if not removed.had_records],
    )


def report_left(run: str, rollout: str, op: str, left: tuple[tuple[str, str], ...]) -> None:
    """Log what housekeeping could not delete; the rollout is retired all the same."""
    _log.warning("run %s, rollout %r: %s left %d objects in the bucket, the first is %s (%s)",
                 run, rollout, op, len(left), *left[0])  # fmt: skip
