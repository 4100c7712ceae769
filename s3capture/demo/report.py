"""The outcome of a demo as one JSON object.

The rule of this module: it is made from ``Outcome`` alone, and it is an interface: keys are only ever added. Sizes are
bytes and times are seconds; docs/recording-format.md says what each key means.
"""

from __future__ import annotations

from typing import Any

from s3capture.demo.observing import percentile
from s3capture.demo.outcome import Fate, Outcome
from s3capture.records import ParentResolutionStatus
from s3capture.stats import OpStats

_PERCENTILES = (50, 95, 99)


def to_json(outcome: Outcome) -> dict[str, Any]:
    """Return the documented object of ``s3capture demo --json``."""
    tokens, sizes, troubles, lineage = outcome.tokens, outcome.sizes, outcome.troubles, outcome.lineage
    return {
        "ok": outcome.ok,
        "title": outcome.title,
        "url": outcome.url,
        "run": outcome.run,
        "embedded": outcome.embedded,
        "workers": outcome.workers,
        "seconds": round(outcome.seconds, 3),
        "skipped": [*outcome.skipped],
        "rollouts": {
            "played": len(outcome.rollouts),
            "complete": sum(rollout.complete for rollout in outcome.rollouts),
            "incomplete": sum(not rollout.complete for rollout in outcome.rollouts),
            "dropped": len(outcome.of_fate(Fate.DROPPED)),
            "retained": len(outcome.of_fate(Fate.RETAINED)),
        },
        "calls": {"planned": outcome.calls, "put": outcome.puts},
        "tokens": {
            "prompt": tokens.prompt,
            "stored_prompt": tokens.stored_prompt,
            "generated": tokens.generated,
        },
        "bytes": {
            "raw": sizes.raw,
            "stored_records": sizes.records,
            "stored_all": sizes.all_objects,
            "objects": sizes.objects,
            "left": sizes.left,
            "objects_left": sizes.objects_left,
        },
        "lineage": {
            **{str(status): lineage.by_status[status] for status in ParentResolutionStatus},
            "crossed_processes": lineage.crossed,
            "deltas": sum(rollout.deltas for rollout in outcome.rollouts),
        },
        "verified_entries": outcome.verified,
        "troubles": {
            "retries": troubles.retries,
            "conflicts": troubles.conflicts,
            "refusals": troubles.refusals,
            "deaths": troubles.deaths,
            "late_writes": troubles.late_writes,
            "spilled": troubles.spilled,
            "drained": troubles.drained,
            "outage_seconds": round(troubles.down_s, 3),
        },
        "incomplete": [
            {
                "rollout": rollout.rollout,
                "reasons": [{"reason": str(why.reason), "call": why.call} for why in rollout.reasons],
            }
            for rollout in outcome.rollouts
            if not rollout.complete
        ],
        "retained": [{"rollout": one.rollout, "why": one.why} for one in outcome.of_fate(Fate.RETAINED)],
        "operations": {op: _operation(stats) for op, stats in sorted(outcome.operations.items())},
        "differences": [{"rollout": one.rollout, "what": one.what} for one in outcome.differences],
        "log": [*outcome.log],
    }


def _operation(stats: OpStats) -> dict[str, Any]:
    seconds = {f"p{percent}": round(percentile(stats.seconds, percent), 6) for percent in _PERCENTILES}
    return {
        "count": stats.count,
        "failures": dict(sorted(stats.failures.items())),
        "round_trips": stats.trips,
        "requests": stats.requests,
        "retries": stats.retries,
        "seconds": {**seconds, "max": round(max(stats.seconds, default=0.0), 6)},
    }
