"""Errors that are ours and, where it has them, the installed nemo_gym's own.

The rule of this module: code written for either catches them. A class is made for each pair of bases when first needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from s3capture.errors import RolloutRetiredError, TokenCaptureFrozenError, TokenCaptureRetiredError
from s3capture.gym.upstream import Upstream


@contextmanager
def translated(gym: Upstream) -> Iterator[None]:
    """Re-raise our contract errors as errors that are the installed package's own as well."""
    try:
        yield
    except TokenCaptureRetiredError as error:
        raise _both(type(error), gym.retired_error)(str(error)) from error
    except TokenCaptureFrozenError as error:
        raise _both(type(error), gym.frozen_error)(str(error)) from error
    except RolloutRetiredError as error:
        raise _both(type(error), gym.ledger_retired_error)(str(error)) from error


_made: dict[tuple[type[Exception], type[Exception]], type[Exception]] = {}


def _both(ours: type[Exception], theirs: type[Exception] | None) -> type[Exception]:
    if theirs is None or issubclass(ours, theirs):
        return ours
    if (ours, theirs) not in _made:
        _made[ours, theirs] = type(ours.__name__, (ours, theirs), {"__doc__": ours.__doc__, "__module__": __name__})
    return _made[ours, theirs]
