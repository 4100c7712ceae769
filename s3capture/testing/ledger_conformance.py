"""The conformance kit for a ``CaptureLedger``, with the admission extensions where a ledger has them.

The rule of this module: as in ``conformance``: the contract's names alone, fresh instances, rollout ids of its own for
each check.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from s3capture.ledger_records import CaptureLedgerCommit
from s3capture.testing.conformance.bench import Factory
from s3capture.testing.conformance.ledger_bench import LedgerCase, LedgerMakers
from s3capture.testing.conformance.ledger_checks import LEDGER_CHECKS
from s3capture.testing.conformance.verdicts import Closing, ErrorKinds, Passed, Verdict, judge, passed

__all__ = ["LEDGER_CHECKS", "judge_ledger", "run_ledger_conformance"]


async def run_ledger_conformance(
    ledger_factory: Factory,
    *,
    rollout_id: str = "conformance-ledger",
    races: bool = True,
    errors: ErrorKinds | None = None,
    commit_type: Any = None,
    fingerprint_version: int = 0,
) -> Passed:
    """Run every check on a ledger and return the names that passed; ``.skipped`` holds the others with the reason.

    ``ledger_factory`` returns fresh instances over one shared backend. ``commit_type`` is the pydantic model that
    ``record`` takes, by default this package's ``CaptureLedgerCommit``; its records name ``fingerprint_version`` (a
    ledger that embeds nemo_gym's matcher resolves only those that name its ``FINGERPRINT_VERSION``). Checks of
    ``begin_call`` and ``close_admissions``, and of ``refuse_call``, are skipped where the ledger lacks them.

    Raise ``ConformanceError`` at the first check that fails.
    """
    return await passed(
        judge_ledger(
            ledger_factory,
            rollout_id=rollout_id,
            races=races,
            errors=errors,
            commit_type=commit_type,
            fingerprint_version=fingerprint_version,
        )
    )


def judge_ledger(
    ledger_factory: Factory,
    *,
    rollout_id: str = "conformance-ledger",
    races: bool = True,
    errors: ErrorKinds | None = None,
    commit_type: Any = None,
    fingerprint_version: int = 0,
) -> AsyncGenerator[Verdict, None]:
    """As ``run_ledger_conformance``, but yield a ``Verdict`` for each check and go on after one that failed."""
    closing = Closing()
    ledger = closing.keep(ledger_factory())
    missing: dict[str, str] = {}
    if not all(callable(getattr(ledger, name, None)) for name in ("begin_call", "close_admissions")):
        missing["admissions"] = "the ledger has no begin_call and close_admissions"
    if not callable(getattr(ledger, "refuse_call", None)):
        missing["refuse_call"] = "the ledger has no refuse_call"
    if not races:
        missing["races"] = "races=False"
    makers = LedgerMakers(
        ledger_factory, errors or ErrorKinds(), commit_type or CaptureLedgerCommit, fingerprint_version
    )

    def case_of(name: str) -> LedgerCase:
        return LedgerCase(makers, f"{rollout_id}-{name.replace('_', '-')}", closing)

    return judge(LEDGER_CHECKS, case_of, missing, closing)
