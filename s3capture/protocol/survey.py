"""What a LIST of one rollout says, and the judgements that rest on it alone.

The rule of this module: a survey is a set of keys, never an order. The version of a frozen rollout is
1 + outcomes in the manifest + conflicts + marks; what lands later can raise it, nothing lowers it, and late
outcomes do not count: they are evidence, never data.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from s3capture.effects import ObjectInfo
from s3capture.keys import Kind, RolloutKeys, parse
from s3capture.protocol.bodies import SEAL_LIMIT, Manifest


@dataclass(frozen=True, slots=True)
class Survey:
    """One rollout as listed. Calls are key segments; ``foreign`` are keys this project never writes."""

    intents: frozenset[str]
    outcomes: dict[str, ObjectInfo]
    conflicts: frozenset[tuple[str, str]]
    marks: frozenset[str]
    fences: frozenset[Kind]
    retiring: frozenset[int]
    drops: frozenset[int]
    objects: tuple[ObjectInfo, ...] = ()
    foreign: tuple[str, ...] = field(default=())

    @property
    def closing(self) -> bool:
        """Whether a freeze or a retirement was announced."""
        return Kind.CLOSING in self.fences

    @property
    def frozen(self) -> bool:
        """Whether the freeze was decided."""
        return Kind.FROZEN in self.fences

    @property
    def retired(self) -> bool:
        """Whether the rollout was retired unconditionally (a drop retires by its own decision)."""
        return Kind.RETIRED in self.fences

    @property
    def open_calls(self) -> frozenset[str]:
        """The begun calls without an outcome."""
        return self.intents - self.outcomes.keys()

    @property
    def small_outcomes(self) -> tuple[str, ...]:
        """The outcomes that may be seals, judged by size."""
        return tuple(sorted(seg for seg, info in self.outcomes.items() if info.size <= SEAL_LIMIT))

    def conflicts_with(self, manifest: Manifest) -> frozenset[tuple[str, str]]:
        """All conflicts: those decided on, and those that landed since."""
        return manifest.conflicts | self.conflicts

    def marks_with(self, manifest: Manifest) -> frozenset[str]:
        """All marks: those decided on, and those that landed since."""
        return manifest.marks | self.marks

    def version(self, manifest: Manifest) -> int:
        """The version of the frozen rollout as this survey shows it."""
        return 1 + len(manifest.outcomes) + len(self.conflicts_with(manifest)) + len(self.marks_with(manifest))


def survey(keys: RolloutKeys, objects: Iterable[ObjectInfo]) -> Survey:
    """Sort the rows of a LIST of ``keys.base`` (or of ``keys.fences``) by what they are."""
    root = keys.of.root
    rows = tuple(objects)
    intents: set[str] = set()
    outcomes: dict[str, ObjectInfo] = {}
    conflicts: set[tuple[str, str]] = set()
    marks: set[str] = set()
    fences: set[Kind] = set()
    numbered: dict[Kind, set[int]] = {Kind.RETIRING: set(), Kind.DROP: set()}
    foreign: list[str] = []
    for row in rows:
        parsed = parse(root, row.key)
        match parsed.kind if parsed else None:
            case Kind.INTENT if parsed:
                intents.add(parsed.call)
            case Kind.CALL if parsed:
                outcomes[parsed.call] = row
            case Kind.CONFLICT if parsed:
                conflicts.add((parsed.call, parsed.detail))
            case Kind.MARK if parsed:
                marks.add(parsed.detail)
            case Kind.CLOSING | Kind.FROZEN | Kind.RETIRED if parsed:
                fences.add(parsed.kind)
            case Kind.RETIRING | Kind.DROP if parsed:
                numbered[parsed.kind].add(int(parsed.detail))
            case _:
                foreign.append(row.key)
    return Survey(
        intents=frozenset(intents),
        outcomes=outcomes,
        conflicts=frozenset(conflicts),
        marks=frozenset(marks),
        fences=frozenset(fences),
        retiring=frozenset(numbered[Kind.RETIRING]),
        drops=frozenset(numbered[Kind.DROP]),
        objects=rows,
        foreign=tuple(foreign),
    )
