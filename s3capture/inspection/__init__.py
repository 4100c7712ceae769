"""What is in the bucket, for people and tools that look: runs, rollouts, and one rollout in full.

The rule of this package: it reads and never creates, so looking at a rollout cannot freeze it; and a stored object
that is damaged is one line of the answer, never the end of it. What a state *means* is the protocol's (``survey``,
``bodies``): this package only counts and describes. All times are Unix seconds.
"""

from __future__ import annotations

from s3capture.inspection.detail import (
    CallDetail,
    ConflictDetail,
    FenceDetail,
    MarkDetail,
    RolloutDetail,
    detail_of,
    inspect_rollout,
    judge_rollout,
)
from s3capture.inspection.standing import DamagedObject, State, stored_at
from s3capture.inspection.summary import (
    Reason,
    RolloutSummary,
    RunSummary,
    list_rollouts,
    list_runs,
    run_exists,
    summary_of,
)

__all__ = [
    "CallDetail",
    "ConflictDetail",
    "DamagedObject",
    "FenceDetail",
    "MarkDetail",
    "Reason",
    "RolloutDetail",
    "RolloutSummary",
    "RunSummary",
    "State",
    "detail_of",
    "inspect_rollout",
    "judge_rollout",
    "list_rollouts",
    "list_runs",
    "run_exists",
    "stored_at",
    "summary_of",
]
