"""``S3LineageResolver``: which recorded call does this request continue?

The rule of this module: never guess. A parent is RESOLVED only when the matcher proves it and its cumulative tokens,
rebuilt through any delta chain, have the digest that was recorded; everything doubtful is UNRESOLVED, which is
always a safe answer. Hashing is the matcher's: the native one, or nemo_gym's own through the same seam.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from s3capture.driver import Tally
from s3capture.endpoint import Endpoint, SettingsKwargs
from s3capture.errors import CorruptObjectError
from s3capture.ids import validate_rollout_id
from s3capture.keys import RolloutKeys, escape
from s3capture.matching import LineageCandidate, LineageMatcher, NativeMatcher
from s3capture.protocol import bodies, resolving
from s3capture.protocols import LineageMatch, LineageResolution
from s3capture.records import ParentResolutionStatus, TokenEntry, compute_digest
from s3capture.source import read_entry
from s3capture.store.base import Store

_log = logging.getLogger("s3capture")

UNREADABLE = "unreadable_candidate"
BROKEN_CHAIN = "broken_delta_chain"

_CALL_WEIGHT = 64
"""What a held call counts for beside its tokens, in tokens: a call without tokens takes memory too."""


@dataclass(frozen=True, slots=True)
class _Facts:
    """What a matcher, ours or nemo_gym's, reads of a record."""

    model_call_id: str
    digest: str | None
    cum_len: int | None
    continuation_fingerprint: str
    continuation_context_len: int
    continuation_context_digest: str
    fingerprint_version: int | None
    parent_call_id: str | None
    prompt_is_delta: bool


@dataclass(frozen=True, slots=True)
class _Held:
    """A call held in memory: its facts, and its cumulative tokens, packed: a tuple would take five times the memory."""

    facts: _Facts
    stamp: str
    tokens: Sequence[int]


class S3LineageResolver(Endpoint):
    """A ``LineageResolver`` over the records that sinks of the same run have put; read-only.

    Takes the settings of ``S3TokenSink``. ``matcher`` decides how requests are fingerprinted and verified; entries must
    have been stamped by the same one. Up to ``lineage_cache_tokens`` cumulative token ids are held in memory,
    8 bytes each, so that a continuation of a call held here costs one LIST and no read.
    """

    def __init__(
        self, *, matcher: LineageMatcher | None = None, store: Store | None = None, **settings: Unpack[SettingsKwargs]
    ) -> None:
        super().__init__(store, dict(settings))
        self._matcher: LineageMatcher = NativeMatcher() if matcher is None else matcher
        self._cache = _Cache(self.settings.lineage_cache_tokens)

    def is_process_shared(self) -> bool:
        """True: every worker reads the same bucket."""
        return True

    async def resolve(self, rollout_id: str, request_items: list[dict[str, Any]]) -> LineageResolution:
        """Return the parent decision for a request, given as the unmodified items of the harness.

        ROOT without any request to the store when the model authored none of the items. Raise
        ``UnrepresentableHistoryError`` for items that cannot be fingerprinted, ``StoreError`` when the store gave no
        answer in time.
        """
        self._check_open()
        rollout, items = validate_rollout_id(rollout_id), list(request_items)
        fingerprint = self._matcher.fingerprint(items)
        if not fingerprint:
            return LineageResolution(ParentResolutionStatus.ROOT)
        keys = self._runtime.rollout(rollout)

        def run(deadline: float, tally: Tally) -> LineageResolution:
            return _Resolution(self, keys, deadline, tally).resolve(fingerprint, items)

        return await self._result(self._runtime.work("resolve", self._what(rollout), run), self._what(rollout))

    def _what(self, rollout: str) -> str:
        return f"resolve in rollout {rollout!r}, run {self.settings.run!r}"

    def _renew_after_fork(self) -> None:
        super()._renew_after_fork()
        self._cache = _Cache(self.settings.lineage_cache_tokens)

    async def close(self) -> None:
        """Let go of the memory and the store. Idempotent; there is never pending work to flush."""
        await super().close()
        self._cache.clear()


class _Resolution:
    """One resolve, in a worker thread."""

    def __init__(self, of: S3LineageResolver, keys: RolloutKeys, deadline: float, tally: Tally) -> None:
        self._matcher = of._matcher
        self._cache = of._cache
        self._keys = keys
        self._what = of._what(keys.rollout_id)
        self._held: dict[str, _Held] = {}
        driver = of._runtime.driver
        self._run: Callable[[Any], Any] = lambda steps: driver.run(
            steps, deadline=deadline, what=self._what, tally=tally
        )

    def resolve(self, fingerprint: str, items: list[dict[str, Any]]) -> LineageResolution:
        found = self._run(resolving.candidates(self._keys, fingerprint, self._is_held))
        read: dict[str, TokenEntry] = {}
        facts: list[LineageCandidate] = []
        stamps: dict[str, str] = {}
        for candidate in found:
            stamps[candidate.segment] = candidate.stamp
            if candidate.body is None:
                facts.append(self._held[candidate.segment].facts)
                continue
            try:
                entry = _entry(self._keys, candidate.segment, candidate.body)
            except CorruptObjectError as error:
                # The damaged one may be the true parent, so no other may be chosen.
                _log.error("%s: %s", self._what, error)
                return self._unresolved(UNREADABLE)
            if entry is not None:
                read[candidate.segment] = entry
                facts.append(entry)
        decision = self._matcher.decide(facts, items)
        if decision.model_call_id is None:
            return self._unresolved(decision.reason)
        return self._resolved(decision.model_call_id, read, stamps)

    def _resolved(self, call: str, read: dict[str, TokenEntry], stamps: dict[str, str]) -> LineageResolution:
        segment = escape(call)
        held = self._held.get(segment)
        if held is not None:
            digest, tokens = held.facts.digest or "", tuple(held.tokens)
        else:
            entry = read[segment]
            try:
                tokens = self._materialize(entry)
            except _BrokenChainError as error:
                _log.error("%s: call %r: %s", self._what, call, error)
                return self._unresolved(BROKEN_CHAIN)
            digest = entry.digest or ""
            self._cache.put(self._keys, segment, _Held(_facts(entry), stamps[segment], _packed(tokens)))
        match = LineageMatch(model_call_id=call, cumulative_token_ids=tokens, digest=digest)
        return LineageResolution(ParentResolutionStatus.RESOLVED, match)

    def _is_held(self, segment: str, stamp: str) -> bool:
        """Whether memory answers for a call; what it says now is kept, since it may be evicted at any moment."""
        held = self._cache.get(self._keys, segment)
        if held is None or not stamp or held.stamp != stamp:
            return False
        self._held[segment] = held
        return True

    def _unresolved(self, reason: str) -> LineageResolution:
        return LineageResolution(ParentResolutionStatus.UNRESOLVED, reason=reason)

    def _materialize(self, entry: TokenEntry) -> tuple[int, ...]:
        """The cumulative tokens of ``entry``, verified by digest; raise ``_BrokenChainError``."""
        if not entry.prompt_is_delta:
            return _verified(entry, (*entry.prompt_token_ids, *entry.generation_token_ids))
        if not entry.digest:
            raise _BrokenChainError("its record has no digest, so tokens rebuilt from a delta chain prove nothing")
        parent = self._cache.get(self._keys, escape(entry.parent_call_id or ""))
        if parent is not None:
            try:
                return _verified(entry, (*parent.tokens, *entry.prompt_token_ids, *entry.generation_token_ids))
            except _BrokenChainError:
                pass  # the id may have been deleted and used anew since: read the chain itself
        bodies_ = self._run(resolving.chain(self._keys, lambda segment: segment == escape(entry.model_call_id)))
        return _verified(entry, self._walk(entry, bodies_))

    def _walk(self, entry: TokenEntry, stored: dict[str, bytes]) -> tuple[int, ...]:
        suffixes: list[TokenEntry] = [entry]
        seen = {entry.model_call_id}
        while suffixes[-1].prompt_is_delta:
            parent = suffixes[-1].parent_call_id or ""
            if parent in seen:
                raise _BrokenChainError(f"its delta chain runs in a circle at call {parent!r}")
            seen.add(parent)
            body = stored.get(escape(parent))
            try:
                ancestor = None if body is None else _entry(self._keys, escape(parent), body)
            except CorruptObjectError as error:
                raise _BrokenChainError(str(error)) from error
            if ancestor is None:
                raise _BrokenChainError(f"call {parent!r} of its delta chain is not in the bucket")
            suffixes.append(ancestor)
        return tuple(_tokens(reversed(suffixes)))


class _BrokenChainError(Exception):
    """A delta chain does not lead to the tokens it should."""


def _tokens(chain: Iterable[TokenEntry]) -> Iterable[int]:
    for entry in chain:
        yield from entry.prompt_token_ids
        yield from entry.generation_token_ids


def _verified(entry: TokenEntry, tokens: tuple[int, ...]) -> tuple[int, ...]:
    if entry.cum_len is not None and entry.cum_len != len(tokens):
        raise _BrokenChainError(f"it has {len(tokens)} cumulative tokens, its record says {entry.cum_len}")
    try:
        digest = compute_digest(tokens) if entry.digest else None
    except ValueError as error:
        raise _BrokenChainError(str(error)) from error
    if digest is not None and digest != entry.digest:
        raise _BrokenChainError("its cumulative tokens do not have the digest of its record")
    return tokens


def _entry(keys: RolloutKeys, segment: str, body: bytes) -> TokenEntry | None:
    """The record of an outcome; None for a refusal or a seal, which are no parents."""
    stored = bodies.read_outcome(keys, segment, body)
    return read_entry(keys, segment, stored) if stored.kind == bodies.ENTRY else None


def _facts(entry: TokenEntry) -> _Facts:
    """What a matcher reads of the entry; ``cum_len`` is filled in, since it can no longer be counted."""
    length = entry.cum_len
    if length is None:
        length = len(entry.prompt_token_ids) + len(entry.generation_token_ids)
    return _Facts(
        model_call_id=entry.model_call_id,
        digest=entry.digest,
        cum_len=length,
        continuation_fingerprint=entry.continuation_fingerprint,
        continuation_context_len=entry.continuation_context_len,
        continuation_context_digest=entry.continuation_context_digest,
        fingerprint_version=entry.fingerprint_version,
        parent_call_id=entry.parent_call_id,
        prompt_is_delta=entry.prompt_is_delta,
    )


def _packed(tokens: tuple[int, ...]) -> Sequence[int]:
    try:
        return array("Q", tokens)
    except (OverflowError, TypeError):  # ids that no tokenizer gives, and that no digest covers
        return tokens


def _weight(held: _Held) -> int:
    return _CALL_WEIGHT + len(held.tokens)


class _Cache:
    """The newest calls by key, bounded by the number of cumulative token ids. Shared by the threads of one resolver."""

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._held: OrderedDict[str, _Held] = OrderedDict()
        self._tokens = 0

    def get(self, keys: RolloutKeys, segment: str) -> _Held | None:
        key = keys.call_at(segment)
        with self._lock:
            held = self._held.get(key)
            if held is not None:
                self._held.move_to_end(key)
            return held

    def put(self, keys: RolloutKeys, segment: str, held: _Held) -> None:
        key = keys.call_at(segment)
        with self._lock:
            previous = self._held.pop(key, None)
            self._tokens += _weight(held) - (_weight(previous) if previous else 0)
            self._held[key] = held
            while self._tokens > self._max_tokens and self._held:
                _, oldest = self._held.popitem(last=False)
                self._tokens -= _weight(oldest)

    def clear(self) -> None:
        with self._lock:
            self._held.clear()
            self._tokens = 0
