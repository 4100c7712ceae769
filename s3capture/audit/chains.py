"""Whether the records of one rollout can be rebuilt: every chain of deltas closed, every stated digest true.

The rule of this module: tokens are counted and hashed from what is stored, along the very chain that a reader would
follow, and never believed. Of a chain only the tokens on the way from the root are held, packed, so a rollout of any
shape costs the memory of its longest prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from s3capture.audit.findings import Finding, Kind, many
from s3capture.codec import StoredObject
from s3capture.errors import CorruptObjectError, UnstorableValueError
from s3capture.keys import RolloutKeys, escape
from s3capture.protocol import bodies
from s3capture.records import ParentResolutionStatus, TokenEntry, check_entry, compute_digest
from s3capture.source import read_entry


@dataclass(frozen=True, slots=True)
class _Link:
    """What a chain needs to know of one record."""

    segment: str
    parent: str | None
    resolved: bool
    is_delta: bool
    cum_len: int | None
    digest: str | None


@dataclass(frozen=True, slots=True)
class Marked:
    """What the lineage markers of a call must say: its continuation fingerprint and its identity."""

    fingerprint: str
    identity: str


class Chains:
    """The records of one rollout, taken in one by one and then judged together."""

    def __init__(self, keys: RolloutKeys, stored: Mapping[str, bytes]) -> None:
        self._keys, self._stored = keys, stored
        self._links: dict[str, _Link] = {}
        self._wrong: list[Finding] = []
        self.broken: dict[str, str] = {}
        """The objects whose record breaks the contract, by key, and how."""
        self.marked: dict[str, Marked] = {}
        """By call segment: what was read of the entries."""

    def read_entry(self, keys: RolloutKeys, segment: str, stored: StoredObject) -> TokenEntry:
        """As ``source.read_entry``, which it calls; takes the record in, and holds it to the whole contract."""
        fingerprint, identity = stored.header.get("fingerprint"), stored.header.get("identity")
        self.marked[segment] = Marked(str(fingerprint or ""), str(identity or ""))
        key = keys.call_at(segment)
        try:
            entry = read_entry(keys, segment, stored)
            # The validation just made is lax, as a reader's must be: "7" passes for 7. What was put was not.
            check_entry(TokenEntry.model_construct(None, **stored.value()))
        except (CorruptObjectError, UnstorableValueError, TypeError, RecursionError) as error:
            self.broken[key] = str(error)
            raise CorruptObjectError(str(error)) from error
        link = _link(segment, entry)
        self._links[entry.model_call_id] = link
        if not entry.prompt_is_delta:
            self._judge(entry.model_call_id, link, [*entry.prompt_token_ids, *entry.generation_token_ids])
        return entry

    def findings(self, *, swept: bool) -> Iterator[Finding]:
        """Yield what is wrong; in a ``swept`` rollout records are gone by intent, so nobody misses a parent."""
        children: dict[str, list[str]] = {}
        for call, link in self._links.items():
            if link.is_delta:
                children.setdefault(link.parent or "", []).append(call)
        reached: set[str] = set()
        for root, link in self._links.items():
            if not link.is_delta and root in children:
                self._descend(root, children, reached)
        yield from self._wrong
        if swept:
            return
        for call, link in self._links.items():
            if link.is_delta and call not in reached:
                yield self._finding(Kind.BROKEN_CHAIN, call, link, self._cause(call), {"parent": link.parent})
            elif link.resolved and not link.is_delta and not self._is_there(link.parent):
                sentence = f"continues call {link.parent!r}, which is not in the rollout"
                yield self._finding(Kind.MISSING_PARENT, call, link, sentence, {"parent": link.parent})

    def _descend(self, root: str, children: Mapping[str, list[str]], reached: set[str]) -> None:
        """Rebuild everything below ``root``, depth first, on one array that is cut back at every branch."""
        path = array("Q")
        waiting = [(root, 0)]
        while waiting:
            call, before = waiting.pop()
            link = self._links[call]
            reached.add(call)
            del path[before:]
            try:
                path.extend(self._own_tokens(link))
            except (OverflowError, TypeError):
                if link.is_delta:
                    self._unprovable(call, link, "it holds token ids that no digest covers")
                for below in self._below(call, children):
                    reached.add(below)
                    self._unprovable(below, self._links[below], f"call {call!r} holds token ids that no digest covers")
                continue
            if link.is_delta:
                if link.digest:
                    self._judge(call, link, path)
                else:
                    self._unprovable(call, link, "it states no digest")
            waiting.extend((child, len(path)) for child in children.get(call, ()))

    def _unprovable(self, call: str, link: _Link, why: str) -> None:
        sentence = f"is a delta that cannot be proved: {why}"
        self._wrong.append(self._finding(Kind.BROKEN_CHAIN, call, link, sentence, {"parent": link.parent}))

    @staticmethod
    def _below(call: str, children: Mapping[str, list[str]]) -> Iterator[str]:
        waiting = list(children.get(call, ()))
        while waiting:
            below = waiting.pop()
            yield below
            waiting.extend(children.get(below, ()))

    def _own_tokens(self, link: _Link) -> list[int]:
        # Read again, and not kept from the first reading: only what is in a chain of deltas is needed twice.
        body = self._stored[self._keys.call_at(link.segment)]
        value = bodies.read_outcome(self._keys, link.segment, body).value()
        return [*value["prompt_token_ids"], *value["generation_token_ids"]]

    def _judge(self, call: str, link: _Link, tokens: list[int] | array[int]) -> None:
        stated: dict[str, object] = {"stated_len": link.cum_len, "found_len": len(tokens)}
        if link.cum_len is not None and link.cum_len != len(tokens):
            sentence = f"has {many(len(tokens), 'token')} with those before it, and its record says {link.cum_len:,}"
            self._wrong.append(self._finding(Kind.WRONG_TOKENS, call, link, sentence, stated))
        elif link.digest:
            try:
                found = compute_digest(tokens)
            except UnstorableValueError as error:
                sentence = f"states a digest of tokens that have none: {error}"
                self._wrong.append(self._finding(Kind.WRONG_TOKENS, call, link, sentence, stated))
                return
            if found != link.digest:
                sentence = f"has {many(len(tokens), 'token')} whose digest is {found}; its record says {link.digest}"
                digests = {"stated_digest": link.digest, "found_digest": found}
                self._wrong.append(self._finding(Kind.WRONG_TOKENS, call, link, sentence, stated | digests))

    def _cause(self, call: str) -> str:
        """Why a delta was not reached from any full prompt."""
        seen = [call]
        while True:
            parent = self._links[seen[-1]].parent or ""
            if parent in seen:
                return f"is a delta whose chain runs in a circle at call {parent!r}"
            if parent not in self._links:
                between = "" if len(seen) == 1 else f", {many(len(seen) - 1, 'call')} further up,"
                damaged = self._keys.call_at(escape(parent)) in self._stored
                what = "is no entry that can be read" if damaged else "is not in the rollout"
                return f"is a delta, and call {parent!r}{between} {what}"
            seen.append(parent)

    def _is_there(self, parent: str | None) -> bool:
        # A record that is damaged is there, and is a finding of its own.
        return parent in self._links or self._keys.call_at(escape(parent or "")) in self._stored

    def _finding(self, kind: Kind, call: str, link: _Link, sentence: str, details: Mapping[str, object]) -> Finding:
        key = self._keys.call_at(link.segment)
        return Finding(kind, f"call {call!r} {sentence}", self._keys.rollout_id, call, key, details=details)


def _link(segment: str, entry: TokenEntry) -> _Link:
    return _Link(
        segment=segment,
        parent=entry.parent_call_id,
        resolved=entry.parent_resolution == ParentResolutionStatus.RESOLVED,
        is_delta=entry.prompt_is_delta,
        cum_len=entry.cum_len,
        digest=entry.digest,
    )
