"""What a user's own tests need: the explorer, the memory store, and (as they come) the conformance kits."""

from __future__ import annotations

from s3capture.store.memory import MemoryStore
from s3capture.testing.explorer import Actor, Op, Report, Scenario, Violation, explore

__all__ = ["Actor", "MemoryStore", "Op", "Report", "Scenario", "Violation", "explore"]
