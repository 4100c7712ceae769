"""The conformance kit: try a sink, a source and a resolver against the newest capture contract.

The rule of this package: it knows transports by the contract's names alone, so it judges any of them, ours included; it
reads back through fresh instances, and every check has rollouts of its own. What the contract leaves open (a relaxed
fence, a conflict that the reader finds) is accepted in either form; what it demands is not.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Any

from s3capture.matching import stamp_continuation
from s3capture.records import TokenEntry
from s3capture.testing.conformance import capturing, leaving, racing, refusing, resolving
from s3capture.testing.conformance.bench import Case, Factory, Makers
from s3capture.testing.conformance.verdicts import (
    CLOSE_CHECK,
    Check,
    Closing,
    ConformanceError,
    Ending,
    ErrorKinds,
    Passed,
    Verdict,
    judge,
    passed,
)

__all__ = [
    "CHECKS",
    "CLOSE_CHECK",
    "Check",
    "ConformanceError",
    "Ending",
    "ErrorKinds",
    "Passed",
    "Verdict",
    "judge_transport",
    "run_conformance",
]

CHECKS: tuple[Check[Case], ...] = (
    *capturing.CHECKS,
    *leaving.CHECKS,
    *resolving.CHECKS,
    *refusing.CHECKS,
    *racing.CHECKS,
)
"""Every check in the order in which they run; a last one, ``close``, is that all instances close without an error."""


async def run_conformance(
    sink_factory: Factory,
    source_factory: Factory,
    lineage_factory: Factory | None = None,
    *,
    rollout_id: str = "conformance-rollout",
    races: bool = True,
    errors: ErrorKinds | None = None,
    entry_type: Callable[..., Any] | None = None,
    stamp: Callable[[Any, Any], Any] | None = None,
) -> Passed:
    """Run every check and return the names that passed; ``.skipped`` of the list maps the others to the reason.

    Factories take no arguments and return fresh instances over one shared backend; all instances are closed at the
    end. Each check uses rollout ids that start with ``{rollout_id}-{check}``. Without ``lineage_factory`` the lineage
    checks are skipped, and so are those of extensions that the sink lacks; ``races=False`` skips the races (for mock
    servers). ``errors`` names the classes that the transport raises. Records are of ``entry_type`` (by default this
    package's ``TokenEntry``), stamped for later lookup by ``stamp(entry, request_items)``.

    Raise ``ConformanceError`` at the first check that fails.
    """
    return await passed(
        judge_transport(
            sink_factory,
            source_factory,
            lineage_factory,
            rollout_id=rollout_id,
            races=races,
            errors=errors,
            entry_type=entry_type,
            stamp=stamp,
        )
    )


def judge_transport(
    sink_factory: Factory,
    source_factory: Factory,
    lineage_factory: Factory | None = None,
    *,
    rollout_id: str = "conformance-rollout",
    races: bool = True,
    errors: ErrorKinds | None = None,
    entry_type: Callable[..., Any] | None = None,
    stamp: Callable[[Any, Any], Any] | None = None,
) -> AsyncGenerator[Verdict, None]:
    """As ``run_conformance``, but yield a ``Verdict`` for each check, as it ends, and go on after one that failed."""
    closing = Closing()
    makers = Makers(
        sink_factory,
        source_factory,
        lineage_factory,
        errors or ErrorKinds(),
        entry_type or TokenEntry,
        stamp or stamp_continuation,
    )
    sink = closing.keep(sink_factory())
    missing: dict[str, str] = {}
    if lineage_factory is None:
        missing["lineage"] = "no lineage_factory was given"
    if not callable(getattr(sink, "begin_call", None)):
        missing["begin_call"] = "the sink has no begin_call"
    if not any(callable(getattr(sink, name, None)) for name in ("record_engine_refusal", "refuse_call")):
        missing["refusals"] = "the sink has neither record_engine_refusal nor refuse_call"
    if not races:
        missing["races"] = "races=False"

    def case_of(name: str) -> Case:
        return Case(makers, f"{rollout_id}-{name.replace('_', '-')}", closing)

    return judge(CHECKS, case_of, missing, closing)
