"""What a replay gives: rollouts, their calls with full prompts, and what could not be given.

The rule of this module: a call is held as it is stored, its tokens packed, and a delta knows the call it continues; the
full prompt is put together when it is asked for. A long rollout of deltas is small in the bucket and large in full, and
so many of them can wait in memory for their turn.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from s3capture.records import EngineRefusal, TokenEntry


class ProblemKind(StrEnum):
    """Why a call, or a whole rollout, could not be given as it was recorded."""

    DAMAGED = "damaged"
    """A stored object is broken, is not what its key says, or is of a newer version."""
    MISSING = "missing"
    """The snapshot names the call, and it is not there."""
    CONFLICT = "conflict"
    """Two payloads under one call id."""
    BROKEN_CHAIN = "broken-chain"
    """A delta whose parent is not there, or was left out itself."""
    MISMATCH = "mismatch"
    """The tokens do not have the digest or the length that was recorded with them."""
    UNPROVEN = "unproven"
    """A delta without a digest: nothing proves what is rebuilt."""
    CYCLE = "cycle"
    """Calls that are each other's ancestors."""
    ORPHAN = "orphan"
    """The call is given, as it stores its prompt in full; the parent that it names was never part of the rollout."""
    INEXPRESSIBLE = "inexpressible"
    """The call is sound, and the output format has no form for it."""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that could not be given. ``call`` is None where the whole rollout is concerned, and ``rollout`` is
    empty where the archive of the run is damaged, and nobody can say which rollouts that hides.

    ``left_out`` is whether something is missing from the output for it. ``text`` is a sentence; it never holds tokens.
    """

    rollout: str
    call: str | None
    kind: ProblemKind
    text: str
    left_out: bool = True

    def __str__(self) -> str:
        if not self.rollout:
            return f"archive: {self.kind}: {self.text}"
        where = f"rollout {self.rollout!r}" if self.call is None else f"rollout {self.rollout!r}, call {self.call!r}"
        return f"{where}: {self.kind}: {self.text}"


@dataclass(frozen=True, slots=True)
class Packed:
    """One record as it is stored: ``facts`` are its fields, with the three token arrays empty, and those are packed.

    ``prompt`` is what is stored: for a delta (``facts.prompt_is_delta``) only what follows the parent.
    """

    facts: TokenEntry
    prompt: Sequence[int]
    generation: Sequence[int]
    log_probs: array[float]


_EMPTY: dict[str, list[int]] = {"prompt_token_ids": [], "generation_token_ids": [], "generation_log_probs": []}


def pack(entry: TokenEntry) -> Packed:
    """Return ``entry`` packed: 8 bytes for each token in place of 36."""
    return Packed(
        facts=entry.model_copy(update=_EMPTY),
        prompt=_packed(entry.prompt_token_ids),
        generation=_packed(entry.generation_token_ids),
        log_probs=array("d", entry.generation_log_probs),
    )


def _packed(tokens: list[int]) -> Sequence[int]:
    try:
        return array("Q", tokens)
    except OverflowError:  # the record allows any int, and keeps it
        return tokens


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedCall:
    """One call. ``parent`` and ``children`` are call ids of the same replay; a call that was left out is neither.

    ``facts`` holds every field of the record but the token arrays, which are empty there: take those from the methods.
    ``facts.parent_call_id`` is the parent as recorded. ``position`` is the place among the calls of the rollout, from
    0. ``prompt_tokens`` counts the full prompt.
    """

    facts: TokenEntry
    position: int
    parent: str | None
    children: tuple[str, ...]
    prompt_tokens: int
    packed: Packed = field(repr=False)
    before: ReplayedCall | None = field(repr=False)
    """The call whose tokens stand before those of a delta; None for a full prompt."""

    @property
    def call_id(self) -> str:
        """The model call id."""
        return self.facts.model_call_id

    @property
    def terminal(self) -> bool:
        """Whether no replayed call continues this one."""
        return not self.children

    @property
    def prompt_was_delta(self) -> bool:
        """Whether the bucket holds only what follows the parent's tokens."""
        return self.packed.facts.prompt_is_delta

    @property
    def stored_prompt_tokens(self) -> int:
        """How many prompt tokens the bucket holds of this call."""
        return len(self.packed.prompt)

    @property
    def generated_tokens(self) -> int:
        """How many tokens the model generated."""
        return len(self.packed.generation)

    def prompt_token_ids(self) -> list[int]:
        """The full prompt; put together anew at each call, in time proportional to its length."""
        return list(self.packed_prompt())

    def generation_token_ids(self) -> list[int]:
        """The generated tokens."""
        return list(self.packed.generation)

    def generation_log_probs(self) -> list[float]:
        """The log probability of each generated token, to the bit."""
        return self.packed.log_probs.tolist()

    def entry(self) -> TokenEntry:
        """The record with its prompt in full, made anew at each call; ``prompt_is_delta`` is False then."""
        return self._entry(self.prompt_token_ids(), delta=False)

    def stored_entry(self) -> TokenEntry:
        """The record as it is stored: a delta stays one. Made anew at each call."""
        return self._entry(list(self.packed.prompt), delta=self.prompt_was_delta)

    def packed_prompt(self) -> Sequence[int]:
        """The full prompt as an ``array('Q')``, or a list where an id needs more than 64 bits."""
        return _joined([*_before(self), self.packed.prompt])

    def packed_cumulative(self) -> Sequence[int]:
        """Prompt and generation in full, as ``packed_prompt``."""
        return _joined([*_before(self), self.packed.prompt, self.packed.generation])

    def _entry(self, prompt: list[int], *, delta: bool) -> TokenEntry:
        arrays = {
            "prompt_token_ids": prompt,
            "generation_token_ids": self.generation_token_ids(),
            "generation_log_probs": self.generation_log_probs(),
            "prompt_is_delta": delta,
        }
        return self.facts.model_copy(update=arrays)


def _before(call: ReplayedCall) -> list[Sequence[int]]:
    """The pieces before the stored prompt of ``call``; iterative, since chains are longer than Python's stack."""
    pieces: list[Sequence[int]] = []
    parent = call.before
    while parent is not None:
        pieces += (parent.packed.generation, parent.packed.prompt)
        parent = parent.before
    return pieces[::-1]


def _joined(pieces: list[Sequence[int]]) -> Sequence[int]:
    if all(isinstance(piece, array) for piece in pieces):
        whole = array("Q")
        for piece in pieces:
            whole.extend(piece)
        return whole
    return [token for piece in pieces for token in piece]


@dataclass(frozen=True, slots=True, eq=False)
class ReplayedRollout:
    """One rollout. ``calls`` have parents before children, else by ``created_at`` and id; ``refusals`` have no tokens.

    ``incomplete`` rollouts must be masked in training; ``reasons`` says why: those of ``s3capture ls``, and
    ``left-out-calls`` (see ``problems``) and ``no-snapshot`` (retired and never frozen). ``snapshot_id`` is None
    without a freeze, ``version`` also once it is retired. ``last_modified`` is in Unix seconds, None where the store
    has no times.
    """

    run: str
    rollout_id: str
    state: str
    archived: bool
    incomplete: bool
    reasons: tuple[str, ...]
    snapshot_id: str | None
    version: int | None
    last_modified: float | None
    calls: tuple[ReplayedCall, ...]
    refusals: tuple[EngineRefusal, ...]
    problems: tuple[Problem, ...]

    @property
    def terminal_calls(self) -> tuple[str, ...]:
        """The ids of the calls that nothing continues: one for each chain."""
        return tuple(call.call_id for call in self.calls if call.terminal)

    @property
    def chains(self) -> tuple[tuple[str, ...], ...]:
        """The call ids from a root to each terminal call, in the order of the terminal calls."""
        parents = {call.call_id: call.parent for call in self.calls}
        found: list[tuple[str, ...]] = []
        for terminal in self.terminal_calls:
            path: list[str] = []
            call: str | None = terminal
            while call is not None:
                path.append(call)
                call = parents[call]
            found.append(tuple(reversed(path)))
        return tuple(found)
