"""Do the tokens of a rollout add up? Each call is rebuilt from its chain of deltas, as a trainer would.

The rule of this module: a call is sound when the whole of it has the length and the digest that its record names. It
holds the token ids of one rollout, 8 bytes each, while that rollout is checked.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from s3capture.records import TokenEntry, compute_digest


@dataclass(frozen=True, slots=True)
class Broken:
    """A call that does not add up. ``number`` is the line of its record; ``rootless``: what it rests on is lost."""

    number: int
    problem: str
    rootless: bool = False


@dataclass(frozen=True, slots=True)
class _Call:
    """``tokens`` is None for ids beyond 64 bits, ``parent`` the call whose tokens come before those of a delta."""

    number: int
    tokens: array[int] | None
    parent: str | None
    digest: str | None
    cum_len: int | None


@dataclass(slots=True)
class Chains:
    """The calls of one rollout, in any order."""

    _calls: dict[str, _Call] = field(default_factory=dict)

    def add(self, number: int, entry: TokenEntry) -> None:
        """Take the record that stands on line ``number``."""
        try:
            tokens = array("Q", (*entry.prompt_token_ids, *entry.generation_token_ids))
        except OverflowError:
            tokens = None
        parent = entry.parent_call_id if entry.prompt_is_delta else None
        self._calls[entry.model_call_id] = _Call(number, tokens, parent, entry.digest, entry.cum_len)

    def broken(self) -> Iterator[Broken]:
        """Yield every call that does not add up."""
        for call, facts in self._calls.items():
            try:
                tokens = self._whole(call)
            except LookupError as error:
                problem = f"call {call!r} is a delta and {error.args[0]}, so its prompt cannot be rebuilt"
                yield Broken(facts.number, problem, rootless=True)
                continue
            if tokens is None:
                if facts.digest is not None:
                    yield Broken(facts.number, f"call {call!r} holds token ids that no digest can be made of")
            elif facts.cum_len not in (None, len(tokens)):
                yield Broken(facts.number, f"call {call!r} has {len(tokens)} tokens and says {facts.cum_len}")
            elif facts.digest is not None and compute_digest(tokens) != facts.digest:
                yield Broken(facts.number, f"the tokens of call {call!r} do not have the digest that it names")

    def _whole(self, call: str) -> array[int] | None:
        chain = {call: None}
        last = call
        while (parent := self._calls[last].parent) is not None:
            if parent in chain:
                raise LookupError(f"its chain of parents is a circle by way of {parent!r}")
            if parent not in self._calls:
                raise LookupError(f"call {parent!r}, which it rests on, is not there")
            chain[parent] = None
            last = parent
        whole = array("Q")
        for each in reversed(chain):
            part = self._calls[each].tokens
            if part is None:
                return None
            whole += part
        return whole
