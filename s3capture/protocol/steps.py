"""Small steps that every protocol shares: read one key, list one rollout, adopt what another process made.

The rule of this module: an answer has the type of its effect, and whatever exists is read before it is
believed (a store may say "exists" of a key that is not there).
"""

from __future__ import annotations

from s3capture.effects import Absent, Answer, Create, Exists, Found, Get, List, Listed, ObjectInfo, Steps
from s3capture.errors import StoreError
from s3capture.keys import RolloutKeys
from s3capture.protocol.survey import Survey, survey

# How often a create is repeated when the store says "exists" and shows nothing. Each turn is one more
# look, so only a store that contradicts itself, or a rollout deleted under our feet, gets this far.
PATIENCE = 4


def found(answer: Answer) -> bytes | None:
    """The body of an answered Get."""
    if isinstance(answer, Found):
        return answer.body
    if isinstance(answer, Absent):
        return None
    raise TypeError(f"a Get was answered with {answer!r}")


def listed(answer: Answer) -> tuple[ObjectInfo, ...]:
    """The rows of an answered List."""
    if isinstance(answer, Listed):
        return answer.objects
    raise TypeError(f"a List was answered with {answer!r}")


def rows(keys: RolloutKeys, answer: Answer) -> Survey:
    """The survey of an answered List."""
    return survey(keys, listed(answer))


def look(keys: RolloutKeys) -> Steps[Survey]:
    """List the whole rollout."""
    (answer,) = yield (List(keys.base),)
    return rows(keys, answer)


def create_or_adopt(key: str, body: bytes) -> Steps[bytes]:
    """Create ``key`` or read what is there; return the body that stands, ours or another's."""
    for _ in range(PATIENCE):
        (made,) = yield (Create(key, body),)
        if not isinstance(made, Exists):
            return body
        (answer,) = yield (Get(key),)
        standing = found(answer)
        if standing is not None:
            return standing
    raise contradiction(key)


def contradiction(key: str) -> StoreError:
    """The error for a key that exists when created and is absent when read, again and again."""
    return StoreError(
        f"{key}: the store says that it exists and shows nothing; it was deleted at this moment, "
        "or the store is not consistent (run s3capture doctor)"
    )
