"""Whether the lineage markers of a rollout say what its outcomes say.

The rule of this module: a marker is judged against every payload that came under its call id, since the loser of a
conflict may have been the one to create it; and what looks amiss is looked at again, because a put creates outcome and
marker side by side, and an audit may come between the two.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

from s3capture.audit.chains import Marked
from s3capture.audit.findings import Finding, Kind
from s3capture.effects import ObjectInfo
from s3capture.errors import CorruptObjectError
from s3capture.keys import Kind as KeyKind
from s3capture.keys import parse, unescape
from s3capture.stored import StoredRollout


@dataclass(frozen=True, slots=True)
class Payloads:
    """What came under the call ids of one rollout, by segment.

    ``stored`` are the entries that stand, ``refused`` those that lost to another payload, ``others`` the outcomes that
    are no entries, ``damaged`` those that cannot be read, and ``begun`` the calls with an intent.
    """

    stored: Mapping[str, Marked]
    refused: Mapping[str, tuple[Marked, ...]]
    others: Collection[str]
    damaged: Collection[str]
    begun: Collection[str]


@dataclass(slots=True)
class Markers:
    """The markers of one rollout; ``rows`` are those listed (live) and packed."""

    rollout: StoredRollout
    rows: tuple[ObjectInfo, ...]
    late: list[str] = field(default_factory=list)
    """Markers of outcomes that were refused behind a fence."""

    def findings(self, payloads: Payloads, *, closed: bool, swept: bool) -> Iterator[Finding]:
        """Yield what does not agree; ``closed`` says that a fence stands, behind which puts leave markers.

        In a ``swept`` rollout markers are gone by intent, and none is missed.
        """
        found: dict[tuple[str, str], ObjectInfo] = {}
        conflicted: set[tuple[str, str]] = set()
        for row in self.rows:
            parsed = parse(self.rollout.keys.of.root, row.key)
            if parsed is None:
                continue
            if parsed.kind is KeyKind.LINEAGE_CONFLICT:
                conflicted.add((parsed.detail, parsed.call))
            else:
                found[parsed.detail, parsed.call] = row
        for (_, segment), row in sorted(found.items(), key=lambda item: item[0]):
            yield from self._marker(segment, row, payloads, closed=closed)
        for segment, marked in () if swept else sorted(payloads.stored.items(), key=lambda item: item[0]):
            yield from self._missing(segment, marked, payloads, found, conflicted)

    def _marker(self, segment: str, row: ObjectInfo, payloads: Payloads, *, closed: bool) -> Iterator[Finding]:
        if segment in payloads.damaged:
            return  # nothing to compare with, and a finding of its own
        if segment in payloads.stored or segment in payloads.refused:
            own = payloads.stored.get(segment)
            known = [marked for marked in (own, *payloads.refused.get(segment, ())) if marked is not None]
            if any(self._says(row, marked) for marked in known):
                return
            body = self._get(row.key)
            if body is None or any(body == marked.identity.encode() for marked in known):
                return
            own_ids = " or ".join(marked.identity for marked in known)
            what = f"has a lineage marker that holds {body[:80]!r} in place of {own_ids}"
            yield self._finding(Kind.WRONG_MARKER, segment, row.key, what)
        elif segment in payloads.others or closed:
            if self._get(row.key) is not None:  # or it went with its rollout, after it was listed
                self.late.append(row.key)
        elif segment not in payloads.begun and self._get(self.rollout.keys.call_at(segment)) is None:
            what = "has a lineage marker and nothing else: a put began and never came to its end"
            yield self._finding(Kind.STRAY_MARKER, segment, row.key, what)

    def _get(self, key: str) -> bytes | None:
        try:
            return self.rollout.get(key)
        except CorruptObjectError:
            return None  # it lies in a damaged pack, which is a finding of its own

    def _says(self, row: ObjectInfo, marked: Marked) -> bool:
        """Whether the row alone shows what the marker holds: where the ETag is an MD5, nothing need be read."""
        identity = marked.identity.encode()
        etag = row.stamp.partition("/")[2].strip('"')
        return row.size == len(identity) and etag == hashlib.md5(identity, usedforsecurity=False).hexdigest()

    def _missing(
        self,
        segment: str,
        marked: Marked,
        payloads: Payloads,
        found: Mapping[tuple[str, str], ObjectInfo],
        conflicted: Collection[tuple[str, str]],
    ) -> Iterator[Finding]:
        if not marked.fingerprint:
            return
        call = unescape(segment) or segment
        wanted = self.rollout.keys.lineage_call(marked.fingerprint, call)
        place = self._place(wanted)
        if place not in found and self._get(wanted) is None:
            what = "has a continuation fingerprint and no lineage marker: resolve cannot find it"
            yield self._finding(Kind.MISSING_MARKER, segment, wanted, what)
        if segment in payloads.refused and place not in conflicted:
            wanted = self.rollout.keys.lineage_conflict(marked.fingerprint, call)
            if self._get(wanted) is None:
                what = "is in conflict and still a candidate: resolve may name it as a parent"
                yield self._finding(Kind.MISSING_MARKER, segment, wanted, what)

    def _place(self, key: str) -> tuple[str, str]:
        parsed = parse(self.rollout.keys.of.root, key)
        return ("", "") if parsed is None else (parsed.detail, parsed.call)

    def _finding(self, kind: Kind, segment: str, key: str, what: str) -> Finding:
        call = unescape(segment) or segment
        return Finding(kind, f"call {call!r} {what}", self.rollout.rollout_id, call, key)
