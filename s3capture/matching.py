"""Which recorded call does a request continue: the seam for matchers, and this project's own.

The rule of this module: a match is proved, never guessed, and two different conversations never share a
hash. What is hashed are the events of ``dialects``, encoded by ``_encode`` alone, which tags and counts every
value, so that no text can pass for a neighbouring field. Change the events or the encoding, and
``FINGERPRINT_VERSION`` must change too: entries stamped before would silently stop matching, or match what
they should not.

Meaning (contract.md, "Lineage"): the *fingerprint* covers the model-authored items in order and is the key
that a parent is looked up by. Item boundaries leave no trace in it, since one chat message is several
Responses items. The *context digest* covers, item by item, the request that led to a call.

With nemo_gym installed its own matcher is used instead (``s3capture.gym``). Its hashes can never meet ours:
another domain, and a version number that it will not use.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

from s3capture.dialects import Unrepresentable, context_event, is_model_authored, item_events
from s3capture.errors import UnrepresentableHistoryError

FINGERPRINT_VERSION = 1_000_001
"""Version of the native hashes; far above any number that upstream counts up to."""

NO_MATCH = "no_match"
AMBIGUOUS = "ambiguous"

_FINGERPRINT_DOMAIN = b"s3capture/fingerprint/1\n"
_CONTEXT_DOMAIN = b"s3capture/context/1\n"
Items: TypeAlias = Sequence[dict[str, Any]]


class LineageCandidate(Protocol):
    """What a matcher reads of a committed entry."""

    @property
    def model_call_id(self) -> str: ...
    @property
    def digest(self) -> str | None: ...
    @property
    def cum_len(self) -> int | None: ...
    @property
    def continuation_fingerprint(self) -> str: ...
    @property
    def continuation_context_len(self) -> int: ...
    @property
    def continuation_context_digest(self) -> str: ...
    @property
    def fingerprint_version(self) -> int | None: ...


class Stampable(Protocol):
    """What a matcher reads of, and writes to, an entry before it is committed."""

    output_items: list[dict[str, Any]]
    continuation_fingerprint: str
    continuation_context_len: int
    continuation_context_digest: str
    fingerprint_version: int | None


_S = TypeVar("_S", bound=Stampable)


@dataclass(frozen=True, slots=True)
class ParentDecision:
    """A call id when one parent is proved; else None with the reason ``no_match`` or ``ambiguous``."""

    model_call_id: str | None
    reason: str = ""


class LineageMatcher(Protocol):
    """How requests are matched to the calls they continue; pure, and safe to call from many threads."""

    def fingerprint(self, request_items: Items) -> str:
        """Return the lookup key of a request; "" means ROOT, a request without model-authored items.

        Raises ``UnrepresentableHistoryError`` naming the item that cannot be represented.
        """
        ...

    def decide(self, candidates: Sequence[LineageCandidate], request_items: Items) -> ParentDecision:
        """Return the one candidate that the request provably continues. Raises like ``fingerprint``."""
        ...

    def stamp_continuation(self, entry: _S, request_items: Items) -> _S:
        """Write into ``entry``, and return it, what later requests are matched by. Raises like ``fingerprint``."""
        ...


class NativeMatcher:
    """The matcher of this project, for use without nemo_gym. Holds no state."""

    def fingerprint(self, request_items: Items) -> str:
        """Return 64 hex digits over the model-authored items in order, or "" when there are none."""
        return _fingerprint(request_items, ())

    def decide(self, candidates: Sequence[LineageCandidate], request_items: Items) -> ParentDecision:
        """Return the candidate whose fingerprint and recorded context the request repeats.

        An entry stamped by another matcher, or without a context digest, or with more context than the request
        has items, is no candidate. A call id that comes with two different stamps counts as none at all.
        Candidates of one non-empty (digest, cum_len) carry the same tokens: the smallest call id stands for all.
        """
        fingerprint = self.fingerprint(request_items)
        stamps: dict[str, tuple[object, ...]] = {}
        matching: dict[str, LineageCandidate] = {}
        conflicting: set[str] = set()
        contexts: dict[int, str] = {}
        for candidate in candidates:
            call_id, stamp = candidate.model_call_id, _stamp_of(candidate)
            if stamps.setdefault(call_id, stamp) != stamp:
                conflicting.add(call_id)
            if not fingerprint or not _is_comparable(candidate, fingerprint, len(request_items)):
                continue
            length = candidate.continuation_context_len
            if length not in contexts:
                contexts[length] = context_digest(request_items[:length])
            if candidate.continuation_context_digest == contexts[length]:
                matching[call_id] = candidate
        parents = [candidate for call_id, candidate in matching.items() if call_id not in conflicting]
        if not parents:
            return ParentDecision(None, NO_MATCH)
        tokens = {(parent.digest, parent.cum_len) for parent in parents}
        if len(parents) > 1 and (len(tokens) > 1 or not parents[0].digest):
            return ParentDecision(None, AMBIGUOUS)
        return ParentDecision(min(parent.model_call_id for parent in parents))

    def stamp_continuation(self, entry: _S, request_items: Items) -> _S:
        """Write fingerprint, context length, context digest and version into ``entry``, and return it.

        The context length counts request items. Nothing is written when an item cannot be represented.
        """
        fingerprint = _fingerprint(request_items, entry.output_items)
        context = context_digest(request_items)
        entry.continuation_fingerprint = fingerprint
        entry.continuation_context_len = len(request_items)
        entry.continuation_context_digest = context
        entry.fingerprint_version = FINGERPRINT_VERSION
        return entry


def stamp_continuation(entry: _S, request_items: Items) -> _S:
    """Stamp ``entry`` with the native matcher; see ``NativeMatcher.stamp_continuation``."""
    return NativeMatcher().stamp_continuation(entry, request_items)


def context_digest(request_items: Items) -> str:
    """Return 64 hex digits over all ``request_items``, item by item. Raises ``UnrepresentableHistoryError``."""
    hasher = hashlib.sha256(_CONTEXT_DOMAIN)
    for index, item in enumerate(request_items):
        with _naming("request", index):
            hasher.update(_encode(context_event(item)))
    return hasher.hexdigest()


@contextmanager
def _naming(where: str, index: int) -> Iterator[None]:
    """Turn ``Unrepresentable`` into the public error, with the list and the index of the item at fault."""
    try:
        yield
    except Unrepresentable as problem:
        raise UnrepresentableHistoryError(
            f"{where} item {index} cannot be represented in captured history: {problem}"
        ) from None


def _is_comparable(candidate: LineageCandidate, fingerprint: str, request_len: int) -> bool:
    """Whether only the context, which costs hashing, is left to compare."""
    return (
        candidate.fingerprint_version == FINGERPRINT_VERSION
        and candidate.continuation_fingerprint == fingerprint
        and 0 <= candidate.continuation_context_len <= request_len
    )


def _stamp_of(candidate: LineageCandidate) -> tuple[object, ...]:
    return (
        candidate.fingerprint_version,
        candidate.continuation_fingerprint,
        candidate.continuation_context_len,
        candidate.continuation_context_digest,
        candidate.digest,
        candidate.cum_len,
    )


def _fingerprint(request_items: Items, output_items: Items) -> str:
    hasher = hashlib.sha256(_FINGERPRINT_DOMAIN)
    authored = False
    for where, items in (("request", request_items), ("output", output_items)):
        for index, item in enumerate(items):
            with _naming(where, index):
                # Items of all roles are spelled out, so that a request is refused before it is generated
                # and not when its entry is stamped.
                events = list(item_events(item))
                if is_model_authored(item):
                    authored = True
                    for event in events:
                        hasher.update(_encode(event))
    return hasher.hexdigest() if authored else ""


def _encode(value: object) -> bytes:
    """Return bytes from which ``value`` could be read back: every value tagged, every length written down.

    Covers what JSON can hold, and lone surrogates, NaN and ints of any size besides; object keys are sorted.
    Iterative, because a conversation may nest deeper than Python's stack.
    """
    parts: list[bytes] = []
    pending: list[object] = [value]
    while pending:
        this = pending.pop()
        if this is None:
            parts.append(b"n")
        elif isinstance(this, bool):
            parts.append(b"t" if this else b"f")
        elif isinstance(this, str):
            parts += _framed(b"s", this.encode("utf-8", "surrogatepass"))
        elif isinstance(this, int):
            parts += _framed(b"i", int(this).to_bytes(this.bit_length() // 8 + 1, "big", signed=True))
        elif isinstance(this, float):
            # Every NaN is one value here: JSON spells them all alike.
            parts += (b"d", struct.pack(">d", math.nan if math.isnan(this) else this))
        elif isinstance(this, (list, tuple)):
            parts += (b"l", len(this).to_bytes(8, "big"))
            pending.extend(reversed(this))
        elif isinstance(this, dict):
            if strange := [type(key).__name__ for key in this if not isinstance(key, str)]:
                raise Unrepresentable(f"an object in it has a key of type {strange[0]}, not a string")
            parts += (b"o", len(this).to_bytes(8, "big"))
            for key in sorted(this, reverse=True):
                pending += (this[key], key)
        else:
            raise Unrepresentable(f"it holds a {type(this).__name__}, which JSON has no form for")
    return b"".join(parts)


def _framed(tag: bytes, payload: bytes) -> tuple[bytes, bytes, bytes]:
    return tag, len(payload).to_bytes(8, "big"), payload
