"""Which names may become part of a key, and how an attempt gets its own.

The rule of this module: an id is checked before any I/O, and two different ids never become one.
The rollout rule is upstream's (``validate_rollout_id`` of nemo-gym 0.7.0, and contract.md): ASCII letters,
digits, ``.``, ``_``, ``-``; not ``.`` or ``..``; at most 200 characters. A model call id may be any string.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from s3capture.errors import InvalidIdError

MAX_ROLLOUT_ID = 200
MAX_RUN = 128
MAX_PREFIX = 240

_SAFE = re.compile(r"[A-Za-z0-9._-]+")
_PREFIX_SEGMENT = re.compile(r"[A-Za-z0-9._=+-]+")


def _checked(kind: str, value: object, limit: int) -> str:
    if not isinstance(value, str):
        raise InvalidIdError(f"{kind} {value!r} is a {type(value).__name__}, not a string")
    if len(value) > limit:
        raise InvalidIdError(f"{kind} {value[:40]!r}... has {len(value)} characters; at most {limit} are allowed")
    if not value:
        raise InvalidIdError(f"empty {kind}: use at least one of ASCII letters, digits, '.', '_' and '-'")
    if not _SAFE.fullmatch(value) or value in (".", ".."):
        raise InvalidIdError(
            f"invalid {kind} {value!r}: use ASCII letters, digits, '.', '_' and '-', and not '.' or '..' alone"
        )
    return value


def validate_rollout_id(rollout_id: object) -> str:
    """Return ``rollout_id`` or raise ``InvalidIdError`` (a ``ValueError``) before anything changed."""
    return _checked("rollout id", rollout_id, MAX_ROLLOUT_ID)


def validate_run(run: object) -> str:
    """Return ``run`` or raise ``InvalidIdError``; a run obeys the rule of a rollout id."""
    return _checked("run", run, MAX_RUN)


def validate_call_id(call_id: object) -> str:
    """Return ``call_id``: any string, the empty one included."""
    if not isinstance(call_id, str):
        raise InvalidIdError(f"model call id {call_id!r} is a {type(call_id).__name__}, not a string")
    return call_id


def validate_prefix(prefix: str) -> str:
    """Return a key prefix (segments joined by ``/``, no slash at the ends; may be empty)."""
    if len(prefix) > MAX_PREFIX:
        raise InvalidIdError(
            f"prefix {prefix[:40]!r}... has {len(prefix)} characters; at most {MAX_PREFIX} are allowed"
        )
    for segment in prefix.split("/") if prefix else ():
        if not _PREFIX_SEGMENT.fullmatch(segment) or segment in (".", ".."):
            raise InvalidIdError(
                f"invalid prefix {prefix!r}: segment {segment!r} must be of ASCII letters, digits, "
                "'.', '_', '-', '=' and '+', and not empty, '.' or '..'"
            )
    return prefix


def validate_batch(rollout_ids: object) -> list[str]:
    """Return the distinct ids of a batch in order, all checked; a bare string is a ``TypeError``."""
    if isinstance(rollout_ids, (str, bytes)) or not isinstance(rollout_ids, Iterable):
        raise TypeError(
            f"rollout_ids must be a sequence of rollout ids, got {type(rollout_ids).__name__} {rollout_ids!r}"
        )
    return list(dict.fromkeys(validate_rollout_id(rollout_id) for rollout_id in rollout_ids))


def attempt_id(rollout_id: str, attempt: int) -> str:
    """Return the attempt-scoped rollout id: ``attempt_id("7-3", 1) == "7-3-a1"``; attempt 0 adds nothing.

    The naming is upstream's. Attempt-scoped ids are the contract's strategy for retirement without
    compare-and-swap, so a retry never writes under the id of the attempt before it.
    """
    if isinstance(attempt, bool) or not isinstance(attempt, int) or attempt < 0:
        raise InvalidIdError(f"attempt {attempt!r} is not a whole number of at least 0")
    validate_rollout_id(rollout_id)
    return validate_rollout_id(rollout_id if attempt == 0 else f"{rollout_id}-a{attempt}")
