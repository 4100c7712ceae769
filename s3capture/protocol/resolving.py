"""Find the recorded calls that a request may continue: LIST the fingerprint, read each candidate.

The rule of this module: reading only. A candidate with a conflict marker counts as zero, and so does a marker
whose call has no entry (its put was never acknowledged). Which candidate it is, the matcher decides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from s3capture.effects import Get, List, Steps
from s3capture.keys import Kind, RolloutKeys, parse
from s3capture.protocol.steps import found, listed


@dataclass(frozen=True, slots=True)
class Candidate:
    """One call whose output has the fingerprint. ``body`` is None when ``known`` said it is held already."""

    segment: str
    stamp: str
    body: bytes | None


def candidates(keys: RolloutKeys, fingerprint: str, known: Callable[[str, str], bool]) -> Steps[tuple[Candidate, ...]]:
    """Return the candidates for one fingerprint; ``known(segment, stamp)`` spares the read of those held."""
    (answer,) = yield (List(keys.lineage(fingerprint)),)
    stamps: dict[str, str] = {}
    conflicted: set[str] = set()
    for row in listed(answer):
        parsed = parse(keys.of.root, row.key)
        if parsed is not None and parsed.kind is Kind.LINEAGE:
            stamps[parsed.call] = row.stamp
        elif parsed is not None and parsed.kind is Kind.LINEAGE_CONFLICT:
            conflicted.add(parsed.call)
    stamps = {segment: stamp for segment, stamp in stamps.items() if segment not in conflicted}
    held = [Candidate(segment, stamp, None) for segment, stamp in stamps.items() if known(segment, stamp)]
    unread = sorted(stamps.keys() - {candidate.segment for candidate in held})
    bodies = yield from _read(keys, unread)
    read = [Candidate(segment, stamps[segment], body) for segment, body in bodies.items()]
    return tuple(sorted((*held, *read), key=lambda candidate: candidate.segment))


def chain(keys: RolloutKeys, known: Callable[[str], bool]) -> Steps[dict[str, bytes]]:
    """Read every outcome of the rollout that is not held yet: two trips, however long the delta chain is."""
    (answer,) = yield (List(keys.calls),)
    rows = listed(answer)
    parsed = (parse(keys.of.root, row.key) for row in rows)
    unread = sorted(found.call for found in parsed if found is not None and not known(found.call))
    return (yield from _read(keys, unread))


def _read(keys: RolloutKeys, segments: list[str]) -> Steps[dict[str, bytes]]:
    if not segments:
        return {}
    answers = yield tuple(Get(keys.call_at(segment)) for segment in segments)
    bodies = {segment: found(answer) for segment, answer in zip(segments, answers, strict=True)}
    return {segment: body for segment, body in bodies.items() if body is not None}
