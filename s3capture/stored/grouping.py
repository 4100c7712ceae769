"""Rows of a LIST by the rollout that they belong to.

The rule of this module: the key alone decides, and a key that names no rollout belongs to none.
"""

from __future__ import annotations

from collections.abc import Iterable

from s3capture.effects import ObjectInfo
from s3capture.keys import RunKeys, parse


def by_rollout(keys: RunKeys, rows: Iterable[ObjectInfo]) -> tuple[dict[str, list[ObjectInfo]], list[ObjectInfo]]:
    """Return the rows by the rollout that their keys name, and the rows whose keys name none."""
    grouped: dict[str, list[ObjectInfo]] = {}
    strays: list[ObjectInfo] = []
    for row in rows:
        parsed = parse(keys.root, row.key)
        if parsed is None or not parsed.rollout:
            strays.append(row)
        else:
            grouped.setdefault(parsed.rollout_id, []).append(row)
    return grouped, strays
