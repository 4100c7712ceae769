"""What is left of a run once all its rollouts are deleted, and the order in which that goes.

The rule of this module: what makes other keys readable goes before them (an index before its pack), so that a reader
never meets a promise without its object; and keys that are not ours stay and are told.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from s3capture.effects import ObjectInfo, Steps
from s3capture.keys import Kind, RunKeys, parse
from s3capture.reader import Reader
from s3capture.retention.listing import Tally, tally
from s3capture.retention.removing import Outcome, delete_keys, side_by_side
from s3capture.runtime import Runtime

_ORDER = (
    Kind.LINEAGE_CONFLICT,
    Kind.LINEAGE,
    Kind.ARCHIVE_INDEX,
    Kind.ARCHIVE_PACK,
    Kind.ARCHIVE_DONE,
    Kind.ARCHIVE_DELETED,
    Kind.PROBE,
)
_BATCH = 1000


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What lies below a run beside rollouts and ledgers. ``stages`` are keys by kind, in the order in which they go.

    ``captures`` counts objects of rollouts and ledgers, ``foreign`` are keys that are not ours: neither is in a stage.
    """

    stages: tuple[tuple[Kind, tuple[ObjectInfo, ...]], ...]
    captures: int
    foreign: tuple[str, ...]

    @property
    def tallies(self) -> dict[Kind, Tally]:
        """Objects and bytes of each kind."""
        return {kind: tally(rows) for kind, rows in self.stages}


def leftovers(reader: Reader, keys: RunKeys, *, without: frozenset[str] = frozenset()) -> Leftovers:
    """List the whole run; ``without`` are rollouts whose markers are counted elsewhere. Raise ``StoreError``."""
    found: dict[Kind, list[ObjectInfo]] = {}
    captures = 0
    foreign: list[str] = []
    for row in reader.list(keys.root, f"list of run {keys.run!r}"):
        parsed = parse(keys.root, row.key)
        if parsed is None:
            foreign.append(row.key)
        elif parsed.kind not in _ORDER:
            captures += 1
        elif not (parsed.kind in (Kind.LINEAGE, Kind.LINEAGE_CONFLICT) and parsed.rollout_id in without):
            found.setdefault(parsed.kind, []).append(row)
    stages = tuple((kind, tuple(found[kind])) for kind in _ORDER if kind in found)
    return Leftovers(stages, captures, tuple(foreign))


def ordered(keys: RunKeys, names: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    """Sort keys of the archive into the stages in which they go."""
    kinds = {name: parsed.kind for name in names if (parsed := parse(keys.root, name)) is not None}
    stages = (tuple(name for name in names if kinds.get(name) is kind) for kind in _ORDER)
    return tuple(stage for stage in stages if stage)


def clear(runtime: Runtime, stages: tuple[tuple[str, ...], ...]) -> Iterator[Outcome]:
    """Delete keys stage by stage; a stage begins when nothing of the one before is left, else the rest waits."""
    for stage in stages:
        batches = [stage[start : start + _BATCH] for start in range(0, len(stage), _BATCH)]
        whole = True
        for outcome in side_by_side(runtime, "delete", batches, _name, lambda batch: lambda: _steps(batch)):
            whole = whole and outcome.done
            yield outcome
        if not whole:
            return


def _name(batch: tuple[str, ...]) -> str:
    return batch[0] if len(batch) == 1 else f"{batch[0]} and {len(batch) - 1} more"


def _steps(batch: tuple[str, ...]) -> Steps[Outcome]:
    return Outcome(_name(batch), (yield from delete_keys(batch)))
