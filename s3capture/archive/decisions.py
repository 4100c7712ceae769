"""The small objects of an archive: for which rollouts it speaks, and which were deleted from it.

The rule of this module: a rollout is listed as done only after it was retired for the pack, and before anything of it
is deleted; from then on the pack is what the rollout is. Deleting it again, by name, is a tombstone, since a pack does
not change.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from s3capture import codec
from s3capture.errors import CorruptObjectError
from s3capture.keys import PackName, RunKeys
from s3capture.protocol import bodies
from s3capture.protocol.bodies import Origin

_DONE, _DELETED = "archive-done", "archive-deleted"


def done(keys: RunKeys, rollouts: Mapping[str, Iterable[PackName]], origin: Origin) -> bytes:
    """The body that lists rollouts, each with all the packs that hold it: from then on those speak for it."""
    value = {
        "rollouts": {rollout: sorted(map(str, names)) for rollout, names in rollouts.items()},
        "by": origin.by,
        "at": origin.at,
    }
    return codec.encode(_DONE, {"run": keys.run}, codec.canonical(value))


def read_done(key: str, body: bytes) -> dict[str, list[str]]:
    """The rollouts that ``body`` lists, each with the names of its packs. Raise ``CorruptObjectError``."""
    value = bodies.read(key, body, _DONE).value()
    listed = value.get("rollouts") if isinstance(value, dict) else None
    if not isinstance(listed, dict):
        raise CorruptObjectError(f"{key}: holds no rollouts")
    return {rollout: _strings(key, listed, rollout) for rollout in listed}


def deleted(keys: RunKeys, rollout_id: str, packs: Iterable[PackName], origin: Origin) -> tuple[str, bytes]:
    """The key and body of the tombstone of a rollout in ``packs``."""
    names = sorted(map(str, packs))
    value = {"packs": names, "by": origin.by, "at": origin.at}
    digest = hashlib.sha256("\n".join(names).encode("ascii")).hexdigest()
    fields = {"run": keys.run, "rollout": rollout_id}
    return keys.archive.deleted(rollout_id, digest), codec.encode(_DELETED, fields, codec.canonical(value))


def read_deleted(key: str, body: bytes) -> frozenset[str]:
    """The names of the packs that a tombstone names. Raise ``CorruptObjectError``."""
    return frozenset(_strings(key, bodies.read(key, body, _DELETED).value(), "packs"))


def _strings(key: str, value: Any, field: str) -> list[str]:
    found = value.get(field) if isinstance(value, dict) else None
    if not isinstance(found, list) or not all(isinstance(item, str) for item in found):
        raise CorruptObjectError(f"{key}: holds no list under {field!r}")
    return found
