"""One rollout in full: every call, mark, fence and conflict, with who and when.

The rule of this module: every object of the rollout is read and judged on its own, so a damaged one is named and
the rest still shown. Damaged objects are kept from the invariants, which would otherwise stop at the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from s3capture.codec import StoredObject
from s3capture.effects import ObjectInfo
from s3capture.errors import CorruptObjectError
from s3capture.inspection.standing import DamagedObject, Judge, archived_of, rows_of, standing
from s3capture.inspection.summary import RolloutSummary, summarize
from s3capture.invariants import ALWAYS, Contents
from s3capture.keys import Kind, RolloutKeys, parse, unescape
from s3capture.protocol import bodies
from s3capture.protocol.survey import survey
from s3capture.reader import Reader
from s3capture.records import TokenEntry
from s3capture.source import read_entry, read_refusal
from s3capture.stored import StoredRollout, StoredRun


@dataclass(frozen=True, slots=True)
class ConflictDetail:
    """A payload that lost to the outcome of its call."""

    digest: str
    kind: str
    by: str | None
    bytes: int


@dataclass(frozen=True, slots=True)
class CallDetail:
    """One call. ``kind`` is entry, refusal, seal, open (begun, no outcome), late or damaged.

    ``late`` is a call whose begin came behind the freeze or the retirement and was refused.

    ``digest`` is the SHA-256 of the payload. ``prompt_tokens`` and ``generated_tokens`` count what is stored: for a
    delta (``prompt_is_delta``) the prompt is only what follows the parent. ``in_snapshot`` is None before the
    freeze. ``created_at`` is the record's own time, ``begun_at`` that of the intent; both are Unix seconds.
    """

    call: str
    kind: str
    digest: str | None = None
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    prompt_is_delta: bool | None = None
    parent_call: str | None = None
    parent_resolution: str | None = None
    code: str | None = None
    created_at: float | None = None
    by: str | None = None
    begun_at: float | None = None
    begun_by: str | None = None
    in_snapshot: bool | None = None
    bytes: int = 0
    conflicts: tuple[ConflictDetail, ...] = ()


@dataclass(frozen=True, slots=True)
class MarkDetail:
    """One incomplete marker; ``call`` may be empty, ``at`` is in Unix seconds.

    ``late`` marks came behind the retirement and were refused.
    """

    mark: str
    call: str
    by: str | None
    at: float | None
    reason: str
    in_snapshot: bool | None
    late: bool = False


@dataclass(frozen=True, slots=True)
class FenceDetail:
    """One announcement or decision. ``decision`` says what was decided, in words; empty for an announcement."""

    fence: str
    by: str | None
    at: float | None
    decision: str


@dataclass(frozen=True, slots=True)
class RolloutDetail:
    """One rollout in full. ``breaches`` are the sentences of the invariants that do not hold."""

    summary: RolloutSummary
    snapshot_id: str | None
    calls: tuple[CallDetail, ...]
    marks: tuple[MarkDetail, ...]
    fences: tuple[FenceDetail, ...]
    damaged: tuple[DamagedObject, ...]
    breaches: tuple[str, ...]
    lineage_markers: int

    @property
    def exists(self) -> bool:
        """Whether anything at all is stored under this rollout id."""
        return bool(self.calls or self.marks or self.fences or self.breaches or self.damaged)

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged and no invariant is breached."""
        return not self.damaged and not self.breaches


ReadEntry = Callable[[RolloutKeys, str, StoredObject], TokenEntry]
"""Makes the record of a stored entry, or raises ``CorruptObjectError``: see ``source.read_entry``."""

_OF_CALLS = (Kind.INTENT, Kind.CALL, Kind.CONFLICT)
_FENCES = (Kind.CLOSING, Kind.FROZEN, Kind.RETIRING, Kind.DROP, Kind.RETIRED)


def inspect_rollout(reader: Reader, keys: RolloutKeys) -> RolloutDetail:
    """Return everything that is stored of one rollout; its objects are read in parallel, nothing is created.

    Raise ``StoreError``; what is damaged is in the answer. Where nothing is stored, ``exists`` is False.
    """
    return detail_of(StoredRun(reader, keys.of).rollout(keys.rollout_id))


def detail_of(rollout: StoredRollout) -> RolloutDetail:
    """As ``inspect_rollout``, for a rollout that was listed; not from within ``Reader.map``."""
    wanted, unread = bodies_of(rollout), dict[str, str]()
    try:
        stored = rollout.read_in_parallel(wanted)
    except CorruptObjectError:
        # A pack, or its index: one after another, so that what can be read is shown.
        stored = {}
        for key in wanted:
            try:
                stored |= rollout.read((key,))
            except CorruptObjectError as error:
                unread[key] = str(error)
    return judge_rollout(rollout, stored, unread=unread)


def bodies_of(rollout: StoredRollout) -> tuple[str, ...]:
    """The keys whose bodies ``judge_rollout`` asks for: our rows, and what retired the rollout for the archive."""
    own = tuple(row.key for row in rows_of(rollout) if parse(rollout.keys.of.root, row.key) is not None)
    archived = archived_of(rollout)
    return own if archived is None else (*own, *archived.decisions(rollout.keys))


def judge_rollout(
    rollout: StoredRollout,
    stored: dict[str, bytes],
    *,
    lineage_markers: int | None = None,
    read_entry: ReadEntry = read_entry,
    unread: Mapping[str, str] | None = None,
) -> RolloutDetail:
    """As ``inspect_rollout``, for a rollout whose bodies (``bodies_of``) were read already, by key.

    One LIST, unless ``lineage_markers`` says what it would count. ``unread`` names keys whose bodies the archive could
    not give, with the reason: they are damaged. ``read_entry`` may ask more of a record than a reader
    does: what it refuses with ``CorruptObjectError`` is damaged.
    """
    count = len(rollout.lineage()) if lineage_markers is None else lineage_markers
    return _Inspection(rollout, stored, read_entry, unread or {}).detail(count)


class _Inspection:
    """The objects of one rollout, being judged."""

    def __init__(
        self, rollout: StoredRollout, stored: dict[str, bytes], read_entry: ReadEntry, unread: Mapping[str, str]
    ) -> None:
        keys, rows = rollout.keys, rows_of(rollout)
        self._read_entry = read_entry
        self._keys, self._rows, self._stored, self._unread = keys, rows, stored, unread
        self._archived, self._problem = archived_of(rollout), rollout.problem
        self._seen = survey(keys, rows)
        self._judge = Judge(self._get)
        self._judge.damaged |= unread
        if self._problem:
            self._judge.damaged[keys.of.archive.base] = self._problem
        self._stands = standing(keys, self._seen, self._judge, self._archived)
        self._manifest = self._stands.manifest
        # By what the key says, since a segment may stand for an id that is too long for a key.
        self._listed: dict[Kind, dict[tuple[str, str], ObjectInfo]] = {kind: {} for kind in Kind}
        for row in rows:
            if (parsed := parse(keys.of.root, row.key)) is not None:
                self._listed[parsed.kind][parsed.call, parsed.detail] = row

    def _get(self, key: str) -> bytes | None:
        if key in self._unread:
            raise CorruptObjectError(self._unread[key])
        return self._stored.get(key)

    def detail(self, lineage_markers: int) -> RolloutDetail:
        """Everything that was read, judged."""
        segments = sorted({call for kind in _OF_CALLS for call, _ in self._listed[kind]})
        calls = sorted(map(self._call, segments), key=lambda call: (call.created_at or call.begun_at or 0.0, call.call))
        marks = sorted(map(self._mark, self._listed[Kind.MARK].items()), key=lambda mark: (mark.at or 0.0, mark.mark))
        fences = [
            self._fence(kind, detail, row)
            for kind in _FENCES
            for (_, detail), row in sorted(self._listed[kind].items(), key=lambda item: int(item[0][1] or 0))
        ]
        # Last, because everything that is damaged must be known before the invariants see what is left.
        sound = {key: body for key, body in self._stored.items() if key not in self._judge.damaged}
        contents = Contents(self._keys, self._seen, sound)
        # Where the archive lost a part of the rollout, whatever misses it would only say so once more.
        invariants = () if self._problem else ALWAYS
        return RolloutDetail(
            summary=summarize(self._keys, self._rows, self._get, archived=self._archived, problem=self._problem),
            snapshot_id=None if self._manifest is None else self._manifest.snapshot_id,
            calls=tuple(calls),
            marks=tuple(marks),
            fences=tuple(fences),
            damaged=self._judge.list(),
            breaches=tuple(sentence for invariant in invariants for sentence in invariant(contents)),
            lineage_markers=lineage_markers,
        )

    def _call(self, segment: str) -> CallDetail:
        intent = self._listed[Kind.INTENT].get((segment, ""))
        begun = self._fields(intent.key, "intent") if intent else {}
        row = self._listed[Kind.CALL].get((segment, ""))
        without = "late" if segment in self._stands.late_begins else "open"
        outcome = self._judge.read(row.key, lambda body: self._outcome(segment, body)) if row else {"kind": without}
        names = ((outcome or {}).get("call"), begun.get("call"), unescape(segment))
        described: dict[str, Any] = {
            "kind": "damaged",
            "begun_at": _time(begun.get("at")),
            "begun_by": _text(begun.get("by")),
            "in_snapshot": None if self._manifest is None else segment in self._manifest.outcomes,
            "bytes": row.size if row else 0,
            "conflicts": tuple(
                self._conflict(digest, lost)
                for (call, digest), lost in sorted(self._listed[Kind.CONFLICT].items())
                if call == segment
            ),
            **(outcome or {}),
            "call": next((name for name in names if isinstance(name, str)), segment),
        }
        return CallDetail(**described)

    def _outcome(self, segment: str, body: bytes) -> dict[str, Any]:
        stored = bodies.read_outcome(self._keys, segment, body)
        found: dict[str, Any] = {"kind": stored.kind, "digest": stored.digest, "by": _text(stored.header.get("by"))}
        if stored.kind == bodies.SEAL:
            seal = _mapping(stored, self._keys.call_at(segment))
            return {**found, "by": _text(seal.get("by")), "created_at": _time(seal.get("at"))}
        found["call"] = stored.header["call"]
        if stored.kind == bodies.REFUSAL:
            refusal = read_refusal(self._keys, segment, stored)
            parent, resolution = refusal.parent_call_id, refusal.parent_resolution
            found |= {"code": refusal.code, "created_at": _time(refusal.created_at)}
        else:
            entry = self._read_entry(self._keys, segment, stored)
            parent, resolution = entry.parent_call_id, entry.parent_resolution
            found |= {
                "prompt_tokens": len(entry.prompt_token_ids),
                "generated_tokens": len(entry.generation_token_ids),
                "prompt_is_delta": entry.prompt_is_delta,
                "created_at": _time(entry.created_at),
            }
        return {**found, "parent_call": parent, "parent_resolution": None if resolution is None else str(resolution)}

    def _conflict(self, digest: str, row: ObjectInfo) -> ConflictDetail:
        def decode(body: bytes) -> tuple[str, str | None]:
            stored = bodies.read(row.key, body, bodies.ENTRY, bodies.REFUSAL)
            if stored.digest != digest:
                raise CorruptObjectError(f"{row.key}: holds the payload {stored.digest}")
            return stored.kind, _text(stored.header.get("by"))

        kind, by = self._judge.read(row.key, decode) or ("damaged", None)
        return ConflictDetail(digest, kind, by, row.size)

    def _mark(self, item: tuple[tuple[str, str], ObjectInfo]) -> MarkDetail:
        (_, segment), row = item
        fields = self._fields(row.key, "mark")
        return MarkDetail(
            mark=unescape(segment) or segment,
            call=_text(fields.get("call")) or "",
            by=_text(fields.get("by")),
            at=_time(fields.get("at")),
            reason=_text(fields.get("reason")) or "",
            in_snapshot=None if self._manifest is None else segment in self._manifest.marks,
            late=segment in self._stands.late_marks,
        )

    def _fence(self, kind: Kind, version: str, row: ObjectInfo) -> FenceDetail:
        fields = self._fields(row.key, str(kind))
        match kind:
            case Kind.FROZEN if self._manifest is not None:
                parts = (self._manifest.outcomes, self._manifest.conflicts, self._manifest.marks)
                counts = zip(map(len, parts), ("outcome", "conflict", "mark"), strict=True)
                decision = "snapshot of " + ", ".join(f"{n} {word}{'' if n == 1 else 's'}" for n, word in counts)
            case Kind.DROP:
                decision = "retired" if fields.get("retired") is True else "refused: the rollout had changed"
            case Kind.RETIRED:
                decision = "retired"
            case _:
                decision = ""
        # A drop decision carries no name and no time, so that every process that makes it makes the same one.
        named = kind is not Kind.DROP
        return FenceDetail(
            fence=f"{kind}-{version}" if version else str(kind),
            by=_text(fields.get("by")) if named else None,
            at=_time(fields.get("at")) if named else None,
            decision=decision if row.key not in self._judge.damaged else "damaged",
        )

    def _fields(self, key: str, kind: str) -> dict[str, Any]:
        """The payload of a small object, with the call that its header names; empty when gone or damaged."""

        def decode(body: bytes) -> dict[str, Any]:
            stored = bodies.read(key, body, kind)
            return {**_mapping(stored, key), "call": stored.header.get("call")}

        return self._judge.read(key, decode) or {}


def _mapping(stored: StoredObject, key: str) -> dict[str, Any]:
    value = stored.value()
    if not isinstance(value, dict):
        raise CorruptObjectError(f"{key}: holds a {type(value).__name__} where fields are due")
    return value


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _time(value: object) -> float | None:
    """Unix seconds, or None for what is no time: records carry whatever their writer gave them, and 0 is a default."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0:
        return float(value)
    return None
