"""Marks of a run that are on this machine's disk, and so not in the bucket.

The rule of this module: a rollout with such a mark looks complete and is not, so anything of the run in the spill is
told, a file that cannot be read included. Looking sets damaged files aside, as every reader of a spill does.
"""

from __future__ import annotations

from s3capture.audit.findings import Finding, Kind, stated
from s3capture.silence import unlogged
from s3capture.spill import Spill, SpilledMark, Target


def spilled(spill: Spill, target: Target) -> list[Finding]:
    """Return what the spill holds of the run of ``target``. Raise ``SpillError`` when it cannot be read."""
    with unlogged("s3capture.spill"):  # each of its files is a finding
        scan = spill.pending()
        found = [_waiting(mark, target) for mark in scan.marks if _same_run(mark.target, target)]
        found += [_late(mark, why) for mark, why in spill.late() if _same_run(mark.target, target)]
        for path in spill.damaged(target=target):
            sentence = f"{path}: a damaged file of this run: it was a mark, of a rollout that it no longer names"
            found.append(Finding(Kind.SPILL_DAMAGE, sentence, details={"path": str(path)}))
        for unread in scan.unread:
            sentence = f"{unread.path}: cannot be judged ({unread.why}), and may be a mark of this run"
            found.append(Finding(Kind.SPILL_DAMAGE, sentence, details={"path": str(unread.path)}))
    return found


def _waiting(mark: SpilledMark, target: Target) -> Finding:
    details = {"mark": mark.mark_id, "reason": mark.reason, "endpoint_url": mark.endpoint_url, "state": "waiting"}
    whose = f"a mark of rollout {mark.rollout!r}, {_call(mark)}, made{stated(mark.by, mark.at)}"
    if mark.target == target:
        sentence = f"{whose}, waits in the local spill: the bucket does not know of it; 's3capture spill drain'"
        return _finding(Kind.SPILLED_MARK, mark, sentence, details)
    where = f"under {mark.endpoint_url}" if mark.endpoint_url else "without an --endpoint-url"
    sentence = f"{whose}, was spilled {where}: if that is this same bucket, 's3capture spill drain --any-endpoint'"
    return _finding(Kind.SPILLED_ELSEWHERE, mark, sentence, details)


def _late(mark: SpilledMark, why: str) -> Finding:
    details: dict[str, str | None] = {"mark": mark.mark_id, "reason": mark.reason, "why": why, "state": "late"}
    sentence = (
        f"a mark of rollout {mark.rollout!r}, {_call(mark)}, made{stated(mark.by, mark.at)}, came when that was "
        "retired: it may have been trained on with a hole"
    )
    return _finding(Kind.SPILLED_MARK, mark, sentence, details)


def _finding(kind: Kind, mark: SpilledMark, sentence: str, details: dict[str, str | None]) -> Finding:
    return Finding(kind, sentence, mark.rollout, mark.call or None, None, mark.by, mark.at, details)


def _call(mark: SpilledMark) -> str:
    return f"call {mark.call!r}" if mark.call else "any call"


def _same_run(one: Target, other: Target) -> bool:
    return (one.bucket, one.prefix, one.run) == (other.bucket, other.prefix, other.run)
