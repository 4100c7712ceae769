"""What becomes of kept rollouts: retired, deleted, and swept, by plan and then by deed.

The rule of this package: a plan only reads, and what it says is what is done; nothing is deleted that was not verified
elsewhere or asked for by name; and whatever dies on the way, the same command again does the rest and no more. How a
rollout leaves is the protocol's (``protocol.retiring``): this package only chooses, in what order, and reports.
"""

from __future__ import annotations

from s3capture.retention.archives import ArchiveHand
from s3capture.retention.choosing import Act, Candidate, Plan, Request, choose
from s3capture.retention.listing import Tally
from s3capture.retention.remarks import remarks
from s3capture.retention.removing import Outcome, carry_out
from s3capture.retention.sweeping import SweepPlan, plan_sweep, sweep
from s3capture.retention.whole_run import Leftovers, clear, leftovers

__all__ = [
    "Act",
    "ArchiveHand",
    "Candidate",
    "Leftovers",
    "Outcome",
    "Plan",
    "Request",
    "SweepPlan",
    "Tally",
    "carry_out",
    "choose",
    "clear",
    "leftovers",
    "plan_sweep",
    "remarks",
    "sweep",
]
