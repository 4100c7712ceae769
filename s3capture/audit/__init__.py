"""What went wrong in a run, and what is left of it: every object read, every digest checked, every doubt told.

The rule of this package: it reads the bucket and never creates, so an audit may run beside its run and as often as one
likes; it believes nothing that it can count or hash again; and one bad object is one finding, never the end of the
report. ``RunAudit`` streams, so a run of any size costs the memory of the few rollouts that are being judged.
"""

from __future__ import annotations

from s3capture.audit.findings import MEANING, SEVERITY, Finding, Kind, Severity
from s3capture.audit.rollout import RolloutAudit
from s3capture.audit.run import RunAudit
from s3capture.audit.totals import Totals

__all__ = ["MEANING", "SEVERITY", "Finding", "Kind", "RolloutAudit", "RunAudit", "Severity", "Totals"]
