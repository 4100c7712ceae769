"""What a check may say: it holds, it is broken and why, or it was not asked.

The rule of this module: a check says ``expect(condition, detail)`` and the runner names it, so that a fault is always
reported under the check that found it, also when the transport raised where it must not.
Errors are judged by their class or by the *name* of a class in their ancestry, because a transport may raise its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

from s3capture.errors import (
    CaptureAdmissionError,
    RolloutRetiredError,
    TokenCaptureFrozenError,
    TokenCaptureRetiredError,
)

_C = TypeVar("_C")
Kinds = tuple[type[Exception], ...]


class ConformanceError(AssertionError):
    """A transport breaks the contract: ``check`` names the check that found it, ``detail`` says what was seen."""

    def __init__(self, check: str, detail: str) -> None:
        self.check = check
        self.detail = detail
        super().__init__(f"{check}: {detail}")


class Fault(Exception):
    """What a check found to be wrong; the runner names the check and makes it a ``ConformanceError``."""


class Ending(StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Verdict:
    """One check and how it ended; ``detail`` is the fault, or why the check was skipped, or empty."""

    check: str
    ending: Ending
    detail: str = ""
    cause: Exception | None = None


class Passed(list[str]):
    """The names of the checks that passed, in order; ``skipped`` maps the others to the reason."""

    def __init__(self, names: Sequence[str] = (), skipped: Mapping[str, str] | None = None) -> None:
        super().__init__(names)
        self.skipped: dict[str, str] = dict(skipped or {})


@dataclass(frozen=True, slots=True)
class ErrorKinds:
    """Which classes a transport raises; an error also counts when a class in its ancestry has the same name.

    The defaults are the contract's names. A transport of an older contract gives its own, for example
    ``ErrorKinds(frozen=(RuntimeError,), retired=(RuntimeError,))``. ``retired`` errors must be ``frozen`` ones too.
    """

    frozen: Kinds = (TokenCaptureFrozenError,)
    retired: Kinds = (TokenCaptureRetiredError,)
    ledger_retired: Kinds = (RolloutRetiredError,)
    admission: Kinds = (CaptureAdmissionError,)
    conflict: Kinds = (ValueError,)

    def is_frozen(self, error: Exception) -> bool:
        """Whether code that handles the frozen error handles ``error``."""
        return _is(error, self.frozen)

    def is_retired(self, error: Exception) -> bool:
        """Whether ``error`` says that the capture was retired."""
        return _is(error, self.retired)

    def is_ledger_retired(self, error: Exception) -> bool:
        """Whether ``error`` says that the ledger was retired."""
        return _is(error, self.ledger_retired)

    def is_admission(self, error: Exception) -> bool:
        """Whether ``error`` refuses the admission of a call."""
        return _is(error, self.admission)

    def is_conflict(self, error: Exception) -> bool:
        """Whether ``error`` says that a call id was used with another payload, and not that a fence stands."""
        return _is(error, self.conflict) and not self.is_frozen(error)


def _is(error: Exception, kinds: Kinds) -> bool:
    names = {kind.__name__ for kind in kinds}
    return isinstance(error, kinds) or any(kind.__name__ in names for kind in type(error).__mro__)


def expect(condition: object, detail: str) -> None:
    """Raise ``Fault`` unless ``condition`` holds."""
    if not condition:
        raise Fault(detail)


async def refusal_of(action: Awaitable[Any]) -> Exception | None:
    """What ``action`` raised, or None when it returned."""
    try:
        await action
    except Exception as error:  # noqa: BLE001 - whatever a transport raises is what is judged
        return error
    return None


async def refusals_of_all(attempts: Sequence[tuple[str, Awaitable[Any]]]) -> list[tuple[str, Exception | None]]:
    """What each attempt raised, all tried one after the other before any is judged."""
    return [(what, await refusal_of(attempt)) for what, attempt in attempts]


def said(error: Exception | None) -> str:
    """An error in few words, for a detail; the text of a foreign error may hold anything, so it is cut."""
    if error is None:
        return "it returned normally"
    return f"it raised {type(error).__name__}: {str(error)[:200]}"


@dataclass(frozen=True, slots=True)
class Check(Generic[_C]):
    """One check: what it promises in one line, what it needs, and the coroutine that tries it on a case."""

    name: str
    promise: str
    run: Callable[[_C], Awaitable[None]]
    needs: tuple[str, ...] = ()


def check(run: Callable[[_C], Awaitable[None]], *needs: str) -> Check[_C]:
    """The check of the function ``run``: named like it, promising what its docstring says."""
    name, promise = getattr(run, "__name__", ""), (run.__doc__ or "").strip().splitlines()[0]
    return Check(name, promise, run, needs)


class Closing:
    """Makes instances and closes all of them at the end, whatever happened."""

    def __init__(self) -> None:
        self._made: list[Any] = []

    def keep(self, instance: _C) -> _C:
        """Remember ``instance`` for closing."""
        self._made.append(instance)
        return instance

    async def close(self) -> None:
        """Close everything, then raise what the first one that failed raised."""
        failed: list[Exception] = []
        for instance in self._made:
            error = await refusal_of(instance.close())
            if error is not None:
                failed.append(error)
        self._made.clear()
        if failed:
            raise failed[0]


async def judge(
    checks: Sequence[Check[_C]], case_of: Callable[[str], _C], missing: Mapping[str, str], closing: Closing
) -> AsyncGenerator[Verdict, None]:
    """Try each check on a case of its own and say how it ended; those that need what is ``missing`` are skipped."""
    closed = False
    try:
        for one in checks:
            why = next((missing[need] for need in one.needs if need in missing), None)
            yield Verdict(one.name, Ending.SKIPPED, why) if why else await _try(one, case_of(one.name))
        closed = True
        error = await refusal_of(closing.close())
        yield _closed(error)
    finally:
        if not closed:
            with contextlib.suppress(Exception):  # the verdict that ended the run says more
                await closing.close()


async def _try(one: Check[_C], case: _C) -> Verdict:
    try:
        await one.run(case)
    except Fault as fault:
        return Verdict(one.name, Ending.FAILED, str(fault))
    except Exception as error:  # noqa: BLE001 - a transport that raises where it must not is a finding, no crash
        return Verdict(one.name, Ending.FAILED, f"unexpected {type(error).__name__}: {str(error)[:300]}", error)
    return Verdict(one.name, Ending.PASSED)


CLOSE_CHECK = "close"


def _closed(error: Exception | None) -> Verdict:
    if error is None:
        return Verdict(CLOSE_CHECK, Ending.PASSED)
    return Verdict(CLOSE_CHECK, Ending.FAILED, f"closing an instance: {said(error)}", error)


async def passed(verdicts: AsyncGenerator[Verdict, None]) -> Passed:
    """The names that passed; raise ``ConformanceError`` at the first check that failed."""
    result = Passed()
    async with contextlib.aclosing(verdicts) as stream:
        async for verdict in stream:
            match verdict.ending:
                case Ending.PASSED:
                    result.append(verdict.check)
                case Ending.SKIPPED:
                    result.skipped[verdict.check] = verdict.detail
                case Ending.FAILED:
                    raise ConformanceError(verdict.check, verdict.detail) from verdict.cause
    return result
