"""Every key of the bucket, built and parsed side by side.

The rule of this module: no other module joins or splits a key. ``parse`` is the inverse of the builders
(a property test holds them together), two different ids never share a key, no key is a folder of another
one, a path segment stays under 240 bytes and a whole key under 900.

Ids are escaped to a safe alphabet: ASCII letters, digits, ``.``, ``_`` and ``-`` stand for themselves,
every other byte of the UTF-8 form is ``!XX`` (upper-case hex). An id that would grow too long becomes a
readable head, ``!~`` and the SHA-256 of the whole id; the full id is then read from the object's body.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import ClassVar

_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
_HEAD = 100
# A rollout id of 200 characters whose leading dot is escaped still fits: a rollout segment is never shortened.
_MAX_ESCAPED = 202
_MAX_FINGERPRINT = 100  # a lineage key has one id more than the others, and stays under 900 bytes all the same
_SHORTENED = len("!~") + 64
_EMPTY = "!-"
_CONFLICT = "!conflict"
_HEX = frozenset("0123456789abcdef")


class Kind(StrEnum):
    """What an object is, as its key says."""

    INTENT = "intent"
    CALL = "call"
    CONFLICT = "conflict"
    MARK = "mark"
    CLOSING = "closing"
    FROZEN = "frozen"
    RETIRING = "retiring"
    DROP = "drop"
    RETIRED = "retired"
    LINEAGE = "lineage"
    LINEAGE_CONFLICT = "lineage-conflict"
    LEDGER_INTENT = "ledger-intent"
    LEDGER_CALL = "ledger-call"
    LEDGER_FAILURE = "ledger-failure"
    LEDGER_CLOSING = "ledger-closing"
    LEDGER_CLOSED = "ledger-closed"
    LEDGER_RETIRED = "ledger-retired"
    LEDGER_LINEAGE = "ledger-lineage"
    ARCHIVE_PACK = "archive-pack"
    ARCHIVE_INDEX = "archive-index"
    ARCHIVE_DONE = "archive-done"
    ARCHIVE_DELETED = "archive-deleted"
    PROBE = "probe"


def escape(text: str, limit: int = _MAX_ESCAPED) -> str:
    """Return one path segment of at most ``limit`` bytes for any string; injective for one limit."""
    raw = text.encode("utf-8", "surrogatepass")
    if not raw:
        return _EMPTY
    # A leading dot is escaped: some servers hide such names, and "." and ".." are no segments at all.
    parts = [chr(b) if b in _PLAIN and not (i == 0 and b == 0x2E) else f"!{b:02X}" for i, b in enumerate(raw)]
    segment = "".join(parts)
    if len(segment) <= limit:
        return segment
    head = ""
    for part in parts:
        if len(head) + len(part) > min(_HEAD, limit - _SHORTENED):
            break
        head += part
    return f"{head}!~{hashlib.sha256(raw).hexdigest()}"


def unescape(segment: str) -> str | None:
    """Return the id of a segment; None when it was shortened. Raise ``ValueError`` for foreign text."""
    if segment == _EMPTY:
        return ""
    if re.fullmatch(r"(?:[A-Za-z0-9._-]|![0-9A-F]{2})*!~[0-9a-f]{64}", segment):
        return None
    if not re.fullmatch(r"(?:[A-Za-z0-9._-]|![0-9A-F]{2})+", segment):
        raise ValueError(f"not an escaped id: {segment!r}")
    raw = re.sub(r"!([0-9A-F]{2})", lambda match: chr(int(match[1], 16)), segment).encode("latin-1")
    text = raw.decode("utf-8", "surrogatepass")
    if escape(text) != segment:
        raise ValueError(f"not an escaped id: {segment!r}")
    return text


def shard(rollout_id: str) -> str:
    """Return the two hex digits that spread rollouts over the key space."""
    return hashlib.sha256(rollout_id.encode("utf-8", "surrogatepass")).hexdigest()[:2]


@dataclass(frozen=True, slots=True)
class RunKeys:
    """The keys of one run: ``prefix`` as in the url (no outer slashes), ``run`` as validated."""

    prefix: str
    run: str

    @property
    def root(self) -> str:
        """Where everything of the run lives; ends in ``/``."""
        return f"{self.prefix}/{escape(self.run)}/" if self.prefix else f"{escape(self.run)}/"

    @property
    def parts(self) -> tuple[str, str, str]:
        """The folders that make a folder a run: it may have a ledger or an archive and no attempts."""
        return (self.attempts, f"{self.root}ledger/", self.archive.base)

    @property
    def attempts(self) -> str:
        """The prefix of all rollouts; ``attempts_shard`` splits it 256 ways."""
        return f"{self.root}attempts/"

    def attempts_shard(self, hh: str) -> str:
        """The prefix of the rollouts of one shard."""
        return f"{self.root}attempts/{hh}/"

    @property
    def lineage(self) -> str:
        """The prefix of all continuation markers."""
        return f"{self.root}lineage/"

    def lineage_shard(self, hh: str) -> str:
        """The prefix of the continuation markers of one shard."""
        return f"{self.lineage}{hh}/"

    @property
    def ledgers(self) -> str:
        """The prefix of the ledgers of all rollouts."""
        return f"{self.root}ledger/"

    @property
    def archive(self) -> ArchiveKeys:
        """The keys of what was packed."""
        return ArchiveKeys(self)

    @property
    def probes(self) -> str:
        """The prefix of all scratch keys."""
        return f"{self.root}probe/"

    def probe(self, nonce: str) -> str:
        """A scratch key that no reader takes for a capture."""
        return f"{self.probes}{escape(nonce)}"

    def rollout(self, rollout_id: str) -> RolloutKeys:
        """The keys of one rollout."""
        return RolloutKeys(self, rollout_id)

    def ledger(self, rollout_id: str) -> LedgerKeys:
        """The keys of the ledger of one rollout."""
        return LedgerKeys(self, rollout_id)


def position(rollout_id: str) -> str:
    """Return where a rollout stands in the order of the key space: 16 hex digits, of which the first two are its shard.

    Packs hold the rollouts of a span of positions, so that a rollout is looked for in few of them.
    """
    return hashlib.sha256(rollout_id.encode("utf-8", "surrogatepass")).hexdigest()[:16]


@dataclass(frozen=True, slots=True, order=True)
class PackName:
    """The name of a pack and of its index: the span of positions it holds, and the SHA-256 of its bytes."""

    first: str
    last: str
    digest: str

    def __str__(self) -> str:
        return f"{self.first}-{self.last}-{self.digest}"

    def covers(self, first: str, last: str) -> bool:
        """Whether the span has a position in common with ``first`` to ``last``, prefixes of positions, inclusive."""
        return self.first[: len(last)] <= last and self.last[: len(first)] >= first

    @classmethod
    def of(cls, text: str) -> PackName | None:
        """Return the name that ``text`` spells, or None."""
        spelled = re.fullmatch(r"([0-9a-f]{16})-([0-9a-f]{16})-([0-9a-f]{64})", text)
        return cls(*spelled.groups()) if spelled and spelled[1] <= spelled[2] else None


@dataclass(frozen=True, slots=True)
class ArchiveKeys:
    """The keys of the archive of one run: packs, their indexes, and what was decided about the rollouts in them."""

    of: RunKeys

    @property
    def base(self) -> str:
        """Where it all lives; ends in ``/``."""
        return f"{self.of.root}archive/"

    def pack(self, name: PackName) -> str:
        """A pack: the objects of many rollouts."""
        return f"{self.base}pack/{name}.parquet"

    def index(self, name: PackName) -> str:
        """What a pack holds; its creation is what makes the pack part of the archive."""
        return f"{self.base}index/{name}.parquet"

    def done(self, name: PackName, nonce: str) -> str:
        """The rollouts of a pack that were retired for it: from then on the archive speaks for them."""
        return f"{self.base}done/{name}/{escape(nonce)}"

    def deleted(self, rollout_id: str, digest: str) -> str:
        """A rollout that was deleted from the packs which the body names; ``digest`` is the SHA-256 of their names."""
        return f"{self.base}deleted/{shard(rollout_id)}/{escape(rollout_id)}/{digest}"


def run_folder(prefix: str) -> str:
    """The prefix whose sub-folders are the runs; empty or ending in ``/``."""
    return f"{prefix}/" if prefix else ""


@dataclass(frozen=True, slots=True)
class _Keys:
    """What the records and the ledger of one rollout attempt have in common: calls, fences, lineage.

    Calls are given by id; ``*_at`` takes an escaped segment, as a LIST gives it.
    """

    of: RunKeys
    rollout_id: str

    _FOLDER: ClassVar[str]

    @property
    def base(self) -> str:
        """Where it all lives; ends in ``/``, so no other rollout id shares it."""
        return f"{self.of.root}{self._FOLDER}/{self._place}/"

    @property
    def _place(self) -> str:
        return f"{shard(self.rollout_id)}/{escape(self.rollout_id)}"

    @property
    def lineage_base(self) -> str:
        """Where the continuation markers live."""
        return f"{self.base}lineage/"

    def intent(self, call: str) -> str:
        """The announcement of a call."""
        return f"{self.base}intent/{escape(call)}"

    def call(self, call: str) -> str:
        """The one outcome of a call."""
        return self.call_at(escape(call))

    def call_at(self, segment: str) -> str:
        """As ``call``, for a segment that a LIST gave."""
        return f"{self.calls}{segment}"

    @property
    def calls(self) -> str:
        """The prefix of all outcomes."""
        return f"{self.base}call/"

    @property
    def fences(self) -> str:
        """The prefix of all announcements and decisions."""
        return f"{self.base}fence/"

    @property
    def closing(self) -> str:
        """The announcement that the rollout closes, one way or the other."""
        return f"{self.fences}closing"

    @property
    def retired(self) -> str:
        """Unconditional retirement."""
        return f"{self.fences}retired"

    def lineage(self, fingerprint: str) -> str:
        """The prefix of the candidates for one fingerprint."""
        return f"{self.lineage_base}{escape(fingerprint, _MAX_FINGERPRINT)}/"

    def lineage_call(self, fingerprint: str, call: str) -> str:
        """The marker: this call's output has this fingerprint."""
        return f"{self.lineage(fingerprint)}{escape(call)}"


@dataclass(frozen=True, slots=True)
class RolloutKeys(_Keys):
    """The keys of the records of one rollout attempt."""

    _FOLDER: ClassVar[str] = "attempts"

    @property
    def lineage_base(self) -> str:
        """Where the continuation markers live: beside the attempts, so that a LIST of one shows none of the other."""
        return f"{self.of.lineage}{self._place}/"

    def conflict(self, call: str, digest: str) -> str:
        """A payload that lost to another one of the same call."""
        return f"{self.base}conflict/{escape(call)}/{digest}"

    def place(self, key: str) -> str | None:
        """Return what ``key`` is called within the rollout, whatever its run is named; None for a key of another."""
        if key.startswith(self.base):
            return key[len(self.base) :]
        return f"lineage/{key[len(self.lineage_base) :]}" if key.startswith(self.lineage_base) else None

    def at(self, place: str) -> str:
        """The inverse of ``place``."""
        lineage = place.removeprefix("lineage/")
        return f"{self.base}{place}" if lineage == place else f"{self.lineage_base}{lineage}"

    def mark(self, mark_id: str) -> str:
        """One incomplete marker."""
        return f"{self.base}mark/{escape(mark_id)}"

    @property
    def frozen(self) -> str:
        """The freeze decision: the manifest."""
        return f"{self.fences}frozen"

    def retiring(self, version: int) -> str:
        """The announcement of a drop at ``version``."""
        return f"{self.fences}retiring-{version}"

    def drop(self, version: int) -> str:
        """The decision of a drop at ``version``."""
        return f"{self.fences}drop-{version}"

    def lineage_conflict(self, fingerprint: str, call: str) -> str:
        """The marker that takes a conflicted call out of the candidates."""
        return f"{self.lineage_call(fingerprint, call)}{_CONFLICT}"


@dataclass(frozen=True, slots=True)
class LedgerKeys(_Keys):
    """The keys of the ledger of one rollout attempt: rows about calls whose tokens are staged elsewhere."""

    _FOLDER: ClassVar[str] = "ledger"

    def failure(self, call: str, digest: str) -> str:
        """One failure row; ``digest`` is the SHA-256 of its reason, so the same reason twice is one row."""
        return self.failure_at(escape(call), digest)

    def failure_at(self, segment: str, digest: str) -> str:
        """As ``failure``, for a segment that a LIST gave."""
        return f"{self.base}failure/{segment}/{digest}"

    def intent_at(self, segment: str) -> str:
        """As ``intent``, for a segment that a LIST gave."""
        return f"{self.base}intent/{segment}"

    @property
    def closed(self) -> str:
        """The decision which calls were admitted."""
        return f"{self.fences}closed"


@dataclass(frozen=True, slots=True)
class ParsedKey:
    """What a key says. ``rollout`` and ``call`` are segments; ``unescape`` turns them into ids.

    ``detail`` is the payload digest of a conflict, the mark id, the version of a drop, the fingerprint segment of a
    lineage marker, or the name of a pack.
    """

    kind: Kind
    rollout: str = ""
    call: str = ""
    detail: str = ""

    @property
    def rollout_id(self) -> str:
        """The rollout id; never shortened, since it has at most 200 characters of the plain alphabet."""
        return unescape(self.rollout) or ""


def parse(root: str, key: str) -> ParsedKey | None:
    """Return what ``key`` is below ``RunKeys.root``, or None for a key that this project never writes."""
    if not key.startswith(root):
        return None
    parts = key[len(root) :].split("/")
    match parts:
        case ["attempts", hh, rollout, *rest] if _is_rollout(hh, rollout):
            return _parse_attempt(rollout, rest)
        case ["lineage", hh, rollout, fingerprint, call] if _is_rollout(hh, rollout) and _is_id(fingerprint):
            kind = Kind.LINEAGE_CONFLICT if call.endswith(_CONFLICT) else Kind.LINEAGE
            call = call.removesuffix(_CONFLICT)
            return ParsedKey(kind, rollout, call, fingerprint) if _is_id(call) else None
        case ["ledger", hh, rollout, *rest] if _is_rollout(hh, rollout):
            return _parse_ledger(rollout, rest)
        case ["archive", *rest]:
            return _parse_archive(rest)
        case ["probe", nonce] if _is_id(nonce):
            return ParsedKey(Kind.PROBE, detail=nonce)
    return None


def _parse_attempt(rollout: str, rest: list[str]) -> ParsedKey | None:
    match rest:
        case ["intent", call] if _is_id(call):
            return ParsedKey(Kind.INTENT, rollout, call)
        case ["call", call] if _is_id(call):
            return ParsedKey(Kind.CALL, rollout, call)
        case ["conflict", call, digest] if _is_id(call) and len(digest) == 64 and _HEX.issuperset(digest):
            return ParsedKey(Kind.CONFLICT, rollout, call, digest)
        case ["mark", mark_id] if _is_id(mark_id):
            return ParsedKey(Kind.MARK, rollout, detail=mark_id)
        case ["fence", ("closing" | "frozen" | "retired") as name]:
            return ParsedKey(Kind(name), rollout)
        case ["fence", name]:
            found = re.fullmatch(r"(retiring|drop)-(0|[1-9][0-9]{0,17})", name)
            return ParsedKey(Kind(found[1]), rollout, detail=found[2]) if found else None
    return None


def _parse_archive(rest: list[str]) -> ParsedKey | None:
    match rest:
        case [("pack" | "index") as folder, file] if file.endswith(".parquet"):
            name = file.removesuffix(".parquet")
            return ParsedKey(Kind(f"archive-{folder}"), detail=name) if PackName.of(name) else None
        case ["done", name, nonce] if PackName.of(name) and _is_id(nonce):
            return ParsedKey(Kind.ARCHIVE_DONE, detail=name)
        case ["deleted", hh, rollout, digest] if _is_rollout(hh, rollout) and len(digest) == 64:
            return ParsedKey(Kind.ARCHIVE_DELETED, rollout, detail=digest) if _HEX.issuperset(digest) else None
    return None


def _parse_ledger(rollout: str, rest: list[str]) -> ParsedKey | None:
    match rest:
        case ["intent", call] if _is_id(call):
            return ParsedKey(Kind.LEDGER_INTENT, rollout, call)
        case ["call", call] if _is_id(call):
            return ParsedKey(Kind.LEDGER_CALL, rollout, call)
        case ["failure", call, digest] if _is_id(call) and len(digest) == 64 and _HEX.issuperset(digest):
            return ParsedKey(Kind.LEDGER_FAILURE, rollout, call, digest)
        case ["lineage", fingerprint, call] if _is_id(fingerprint) and _is_id(call):
            return ParsedKey(Kind.LEDGER_LINEAGE, rollout, call, fingerprint)
        case ["fence", ("closing" | "closed" | "retired") as name]:
            return ParsedKey(Kind(f"ledger-{name}"), rollout)
    return None


@lru_cache(maxsize=65536)
def _is_id(segment: str) -> bool:
    try:
        unescape(segment)
    except ValueError:
        return False
    return True


@lru_cache(maxsize=65536)
def _is_rollout(hh: str, segment: str) -> bool:
    try:
        rollout = unescape(segment)
    except ValueError:
        return False
    return bool(rollout) and shard(rollout or "") == hh
