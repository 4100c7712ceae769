"""Which rollouts of a run are meant: by id, state, age, and whether they are complete.

The rule of this module: every command that takes rollouts takes them by this one selection, so that what ``replay``
shows is what ``archive`` or ``delete`` would take under the same options. Times are Unix seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from s3capture.errors import SettingsError

if TYPE_CHECKING:
    from s3capture.inspection import RolloutSummary

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}


@dataclass(frozen=True, slots=True)
class Selection:
    """Rollouts by ``globs`` (any of them; none: all), ``states`` (none: all), and time of the last change.

    ``complete`` is True for complete ones only, False for incomplete ones only, None for both. ``since`` is inclusive
    and ``until`` exclusive; a rollout whose time the store does not say is taken by neither.
    """

    globs: tuple[str, ...] = ()
    states: frozenset[str] = frozenset()
    complete: bool | None = None
    since: float | None = None
    until: float | None = None

    def names(self, rollout_id: str) -> bool:
        """Whether the id alone passes: what can be said before anything of the rollout is read."""
        return not self.globs or any(fnmatchcase(rollout_id, glob) for glob in self.globs)

    def takes(self, summary: RolloutSummary) -> bool:
        """Whether the rollout is meant."""
        changed = summary.last_modified
        return (
            self.names(summary.rollout)
            and (not self.states or summary.state in self.states)
            and (self.complete is None or summary.incomplete is not self.complete)
            and (self.since is None or (changed is not None and changed >= self.since))
            and (self.until is None or (changed is not None and changed < self.until))
        )


def instant(text: str, now: float) -> float:
    """Return Unix seconds for an age (``90s``, ``30m``, ``12h``, ``7d``, ``2w``: that long before ``now``) or a time.

    A time is ISO 8601, in UTC where it names no zone. Raise ``SettingsError`` naming the value.
    """
    if age := re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text.strip()):
        return now - float(age[1]) * _UNITS[age[2]]
    try:
        moment = datetime.fromisoformat(text.strip())
    except ValueError:
        raise SettingsError(
            f"{text!r} is neither an age (90s, 30m, 12h, 7d, 2w) nor a time (2026-12-01 or 2026-12-01T08:30:00Z)"
        ) from None
    return (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp()


def globs_of(patterns: Iterable[str]) -> tuple[str, ...]:
    """Return checked patterns. Raise ``SettingsError`` for an empty one, which would match nothing."""
    found = tuple(patterns)
    for pattern in found:
        if not pattern:
            raise SettingsError("an empty rollout pattern matches nothing; leave it out to take all rollouts")
    return found
