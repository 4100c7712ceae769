"""Two sides of one comparison: Gym's own stores and our endpoints, asked the same and answering in one language.

The rule of this module: answers are compared whole (statuses, entries, masks, parents, kinds of errors), and a
difference is a fault unless one of ``RULES`` names it. Versions are compared by what they do, never by number.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeAlias

from nemo_gym.token_id_capture.lineage import FileLineageStore
from nemo_gym.token_id_capture.store import TokenCaptureStore

from s3capture.errors import (
    ConflictingPayloadError,
    InvalidIdError,
    TokenCaptureFrozenError,
    TokenCaptureRetiredError,
    UnrepresentableHistoryError,
)
from s3capture.gym import GymCaptureLedger, GymLineageResolver, GymTokenSink, GymTokenSource
from s3capture.store.memory import MemoryStore

Answer: TypeAlias = tuple[str, Any]
"""``("ok", value)`` or ``("error", kind)``."""

Items: TypeAlias = list[dict[str, Any]]

RULES = {
    "repeated-put": (
        "a put behind the freeze that repeats, byte for byte, a record in the snapshot is acknowledged: the text "
        "makes a repetition a no-op, and a retry after a lost reply must not look like a loss"
    ),
    "late-mark": (
        "the mark that 0.7.0 sends after a put refused by a fence changes nothing: the newest text forbids the "
        "caller to mark there, since it would spoil the snapshot already delivered"
    ),
    "conflicted-parent": (
        "a call with conflicting payloads is no parent: the text counts it as zero candidates, the file store "
        "keeps resolving the payload that came first"
    ),
    "conflicted-entry": (
        "a call with conflicting payloads is not among the entries of the snapshot, which is incomplete on both "
        "sides: which payload came first says nothing about which is true"
    ),
    "late-residue": (
        "a put that a fence refused may leave its object behind, and a resolve after it may name it as parent: "
        "nothing can be begun behind the fence, so no call continues it"
    ),
    "broken-chain": (
        "a parent whose delta chain cannot be rebuilt is UNRESOLVED: the text wants that whenever one parent "
        "cannot be proven, the file store raises"
    ),
    "id-of-dots-or-length": (
        "'.', '..' and ids above 200 characters are refused as ids: the file store takes them, until a name is too"
        " long for the file system"
    ),
    "failure-then-row": (
        "a call that failed and then commits has both rows: failure rows sit beside a committed one, the file "
        "store takes the failure for a conflicting row"
    ),
    "non-finite": (
        "log probabilities of -inf, inf and NaN come back as themselves: the file store writes null and then "
        "cannot read the rollout at all"
    ),
    "rows-by-the-matcher": (
        "ledger rows are chosen by Gym's RolloutLineage, context included, as its in-memory store does; its file "
        "store gives up as soon as two rows share a fingerprint"
    ),
}


class Differences:
    """What was compared, which rules were needed, and what no rule explains."""

    def __init__(self) -> None:
        self.compared = 0
        self.by_rule: dict[str, int] = dict.fromkeys(RULES, 0)
        self.faults: list[str] = []

    def same(self, where: str, theirs: object, ours: object) -> None:
        """Count a comparison, and a fault if the two differ."""
        self.compared += 1
        if theirs != ours:
            self.fault(where, theirs, ours)

    def excused(self, rule: str) -> None:
        """Count a difference that ``rule`` names."""
        self.compared += 1
        self.by_rule[rule] += 1

    def fault(self, where: str, theirs: object, ours: object) -> None:
        """Count a difference that nothing names."""
        self.faults.append(f"{where}: upstream {str(theirs)[:400]}; ours {str(ours)[:400]}")


class Sides:
    """Both sides on fresh stores; ``theirs`` in a directory below ``root``."""

    _numbers = itertools.count()

    def __init__(self, root: Path) -> None:
        self.root = root / f"pair-{next(self._numbers)}"
        given: dict[str, Any] = {
            "url": "s3://bucket/p",
            "run": "r",
            "store": MemoryStore(),
            "spill_dir": str(self.root / "spill"),
        }
        self.their_store = TokenCaptureStore(self.root / "captures")
        self.sink, self.source = GymTokenSink(**given), GymTokenSource(**given)
        self.resolver, self.ledger = GymLineageResolver(**given), GymCaptureLedger(**given)
        self.fresh_eyes()

    def fresh_eyes(self) -> None:
        """A new reader on their side: its cache goes by inode, which a deleted and recreated file may share."""
        self.their_lineage = FileLineageStore(self.root / "captures")

    async def close(self) -> None:
        """Let go of everything."""
        for endpoint in (self.sink, self.source, self.resolver, self.ledger):
            await endpoint.close()
        shutil.rmtree(self.root)


async def answer(asked: Callable[[], Awaitable[Any]]) -> Answer:
    """What came of a call, in the language of the comparison."""
    try:
        return "ok", await asked()
    except Exception as error:  # noqa: BLE001 - every error is an answer here
        return "error", kind_of(error)


def kind_of(error: Exception) -> str:
    """Which refusal of the contract an error is; errors of 0.7.0 are told apart by their words alone."""
    ours = {
        TokenCaptureRetiredError: "retired",
        TokenCaptureFrozenError: "frozen",
        ConflictingPayloadError: "conflict",
        InvalidIdError: "invalid id",
        UnrepresentableHistoryError: "unrepresentable",
    }
    for known, kind in ours.items():
        if isinstance(error, known):
            return kind
    told, text = type(error), str(error)
    if told is RuntimeError:
        return "retired" if "is retired" in text else "frozen" if "already frozen" in text else text
    if told is ValueError:
        words = {
            "reused with a different payload": "conflict",
            "conflicting": "conflict",
            "Invalid rollout id": "invalid id",
            "is not an object": "unrepresentable",
            "unsupported": "unrepresentable",
            "no supported type": "unrepresentable",
            "no indexed parent": "broken chain",
        }
        return next((kind for word, kind in words.items() if word in text), f"ValueError: {text}")
    return f"{told.__name__}: {text[:200]}"


def resolution(found: Answer) -> Answer:
    """A parent decision as plain data."""
    if found[0] != "ok":
        return found
    match = found[1].match
    chosen = match and (
        match.model_call_id,
        tuple(match.cumulative_token_ids),
        match.digest,
        tuple(match.staging_chain),
        match.chain_hash,
    )
    return "ok", (str(found[1].status), found[1].reason, chosen)


def snapshot(found: Answer) -> Answer:
    """A snapshot as plain data, without its identity."""
    if found[0] != "ok":
        return found
    entries = {entry.model_call_id: entry.model_dump(mode="json") for entry in found[1].entries}
    return "ok", (found[1].rollout_id, len(found[1].entries), entries, found[1].incomplete)


class Speech:
    """Conversations over so few words that the same answers come up again and again."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def user(self) -> dict[str, Any]:
        """What a user or a tool says."""
        if self.rng.random() < 0.3:
            return {"role": "tool", "tool_call_id": "t1", "content": f"result {self.rng.randrange(3)}"}
        return {"role": "user", "content": f"question {self.rng.randrange(3)}"}

    def output(self) -> Items:
        """What the model says: text, a tool call, or both, in Responses or Chat items."""
        text = f"answer {self.rng.randrange(3)}"
        message = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}
        arguments = self.rng.choice(['{"a": 1, "b": 2}', '{"b": 2, "a": 1}', "not json"])
        call = {"type": "function_call", "call_id": "t1", "name": "look", "arguments": arguments}
        chat = {"role": "assistant", "content": text}
        return self.rng.choice([[message], [message], [call], [message, call], [chat]])

    def rewritten(self, items: Items) -> Items:
        """``items`` with one of them said in another way, or left out."""
        changed = [dict(item) for item in items]
        at = self.rng.randrange(len(changed))
        if self.rng.random() < 0.3:
            return [*changed[:at], *changed[at + 1 :]]
        changed[at] = {**changed[at], "content": "rewritten"}
        return changed

    def unrepresentable(self) -> Items:
        """A request that no fingerprint can cover."""
        broken = self.rng.choice([5, [7], [{"text": "no type"}]])
        return [{"role": "user", "content": "q"}, {"role": "assistant", "content": broken}]
