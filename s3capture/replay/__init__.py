"""Replay: rollouts out of a bucket, as they were captured, for training, analysis, or another run.

The rule of this package: what is given was proven against the digests that were recorded when it was captured; what
cannot be proven is named and left out, and never repaired. It reads and never creates. See docs/replay.md.
"""

from __future__ import annotations

from s3capture.replay.model import Problem, ProblemKind, ReplayedCall, ReplayedRollout
from s3capture.replay.recapture import recapture
from s3capture.replay.stream import Counts, Replay, replay

__all__ = ["Counts", "Problem", "ProblemKind", "Replay", "ReplayedCall", "ReplayedRollout", "recapture", "replay"]
