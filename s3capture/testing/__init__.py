"""What a user's own tests need: the conformance kits, the memory store, and the explorer."""

from __future__ import annotations

from s3capture.store.memory import MemoryStore
from s3capture.testing.conformance import (
    ConformanceError,
    Ending,
    ErrorKinds,
    Passed,
    Verdict,
    judge_transport,
    run_conformance,
)
from s3capture.testing.explorer import Actor, Op, Report, Scenario, Violation, explore
from s3capture.testing.ledger_conformance import judge_ledger, run_ledger_conformance

__all__ = [
    "Actor",
    "ConformanceError",
    "Ending",
    "ErrorKinds",
    "MemoryStore",
    "Op",
    "Passed",
    "Report",
    "Scenario",
    "Verdict",
    "Violation",
    "explore",
    "judge_ledger",
    "judge_transport",
    "run_conformance",
    "run_ledger_conformance",
]
