"""Random lives of rollouts on the token side: begun, put, put again, marked, frozen, dropped, resolved, in any order.

The rule of this module: an operation goes to both sides before the next is drawn, and what is drawn depends on the seed
and on Gym's own answers alone, so that a seed names one sequence for ever.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

from nemo_gym.token_id_capture.lineage import RolloutLineage, stamp_continuation
from nemo_gym.token_id_capture.records import ParentResolutionStatus, TokenEntry, stamp_lineage

from gym_e2e.pairs import Answer, Differences, Items, Sides, Speech, answer, resolution, snapshot

INVALID_IDS = ["", "a b", "a/b", "ünï", "../x", "語", "a\n"]
IDS_THAT_DIFFER = [".", "..", "x" * 201, "x" * 300]
WEIGHTS = {
    "put": 9,
    "resolve": 8,
    "begin": 4,
    "again": 3,
    "conflict": 1,
    "mark": 1,
    "freeze": 2,
    "drop": 2,
    "delete": 0.3,
    "stray": 0.7,
    "orphan": 0.4,
}


@dataclass
class Turn:
    """One call that was recorded: what was asked, what was said, and all tokens up to its end."""

    call: str
    request: Items
    output: Items
    tokens: list[int]

    @property
    def history(self) -> Items:
        """What a faithful harness echoes."""
        return [*self.request, *self.output]


@dataclass
class Life:
    """What the test knows of one rollout; ``over`` once the sides may rightly differ from there on."""

    rollout: str
    turns: list[Turn] = field(default_factory=list)
    records: dict[str, TokenEntry] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    conflicted: set[str] = field(default_factory=set)
    begun: list[str] = field(default_factory=list)
    intents: set[str] = field(default_factory=set)
    late: list[str] = field(default_factory=list)
    refused: dict[str, TokenEntry] = field(default_factory=dict)
    lost: list[Turn] = field(default_factory=list)
    frozen: list[tuple[Any, Any]] = field(default_factory=list)
    closed: bool = False
    retired: bool = False
    orphans: int = 0
    over: bool = False


class Capturing:
    """Plays lives of rollouts on both sides."""

    def __init__(self, sides: Sides, found: Differences, rng: random.Random) -> None:
        self.sides, self.found, self.rng = sides, found, rng
        self.speech = Speech(rng)
        self.operations = 0

    async def sequence(self, name: str) -> None:
        """One sequence over two rollouts."""
        lives = [Life(f"{name}-{number}") for number in range(2)]
        for _ in range(self.rng.randint(6, 22)):
            life = self.rng.choice(lives)
            if life.over:
                continue
            (chosen,) = self.rng.choices(list(WEIGHTS), list(WEIGHTS.values()))
            self.operations += 1
            await getattr(self, f"_{chosen}")(life)
        for life in lives:
            if not life.over:
                await self._freeze(life)

    # -- operations -----------------------------------------------------------------------------------------

    async def _put(self, life: Life) -> None:
        request, parent, faithful = self._request(life)
        theirs, _ = await self._resolved(life, request)
        if life.over or theirs[0] != "ok":
            return
        call = life.begun.pop() if life.begun and self.rng.random() < 0.7 else self._call()
        turn, entry = self._entry(life, call, request, theirs[1], parent if faithful else None)
        life.tokens[call] = turn.tokens
        if await self._put_both(life, entry, f"put in {life.rollout}"):
            life.turns.append(turn)
            life.records[call] = entry
        else:
            life.lost.append(turn)

    async def _again(self, life: Life) -> None:
        if life.records:
            await self._put_both(life, self.rng.choice(list(life.records.values())).model_copy(), "put again")

    async def _conflict(self, life: Life) -> None:
        known = [call for call in life.records if call not in life.conflicted]
        if not known:
            return
        other = life.records[self.rng.choice(known)].model_copy()
        if self.rng.random() < 0.5:
            other.created_at += 1.0
        else:
            other.output_items = self.speech.output()
            stamp_continuation(other, self._turn(life, other.model_call_id).request)
        if other == life.records[other.model_call_id]:
            return
        if not await self._put_both(life, other, "conflicting put") and not life.closed:
            life.conflicted.add(other.model_call_id)

    async def _begin(self, life: Life) -> None:
        # No call is begun after it was put: that is the known limit of docs/protocol.md, and no server does it.
        again = sorted(life.intents)
        call = self.rng.choice([*again, self._call(), self._call()])
        theirs, ours = await self._both("begin_call", life.rollout, call)
        self.found.same("begin", theirs, ours)
        if theirs[0] == "ok" and call not in life.intents:
            life.begun.append(call)
            life.intents.add(call)

    async def _mark(self, life: Life) -> None:
        late = bool(life.late) and self.rng.random() < 0.8
        call = life.late.pop() if late else self.rng.choice(["", self._call()])
        if late and not life.retired:
            await self._freeze(life)
        theirs, ours = await self._both("mark_incomplete", life.rollout, call)
        if not late:
            self.found.same("mark", theirs, ours)
            return
        # 0.7.0 marks here, and its store lets the mark spoil the snapshot, or refuses it when all is retired.
        self.found.same("late mark, ours", ("ok", None), ours)
        life.over = True
        if life.retired:
            self.found.same("late mark of a retired rollout, theirs", ("error", "retired"), theirs)
            self.found.excused("late-mark")
            return
        their_before, our_before = life.frozen[-1]
        await self._freeze(life, compare=False)
        their_after, our_after = life.frozen[-1]
        self.found.same("late mark, our snapshot", our_before, our_after)
        self.found.same("late mark, their incomplete", True, their_after.incomplete)
        self.found.same("late mark, their version", True, their_after.version != their_before.version)
        self.found.excused("late-mark")

    async def _freeze(self, life: Life, *, compare: bool = True) -> None:
        theirs = await answer(lambda: self.sides.their_store.freeze(life.rollout))
        ours = await answer(lambda: self.sides.source.freeze(life.rollout))
        if compare:
            plain = snapshot(theirs), snapshot(ours)
            if plain[0] != plain[1] and life.conflicted and plain[0][0] == "ok":
                rollout, _, entries, _ = plain[0][1]
                kept = {call: entry for call, entry in entries.items() if call not in life.conflicted}
                self.found.same("freeze beside a conflict", ("ok", (rollout, len(kept), kept, True)), plain[1])
                self.found.excused("conflicted-entry")
            else:
                self.found.same(f"freeze of {life.rollout}", *plain)
        if theirs[0] != "ok" or ours[0] != "ok":
            return
        if life.frozen and compare:
            before = life.frozen[-1]
            changed = [
                (now.version != then.version, now.snapshot_id != then.snapshot_id)
                for then, now in zip(before, (theirs[1], ours[1]), strict=True)
            ]
            self.found.same("change of version and identity between two freezes", *changed)
        life.closed = True
        life.frozen.append((theirs[1], ours[1]))

    async def _drop(self, life: Life) -> None:
        if not life.frozen or self.rng.random() < 0.15:
            unknown = {"snapshot_id": "none", "version": self.rng.randrange(4)}
            await self._drop_both(life, unknown, unknown)
            return
        theirs, ours = self.rng.choice([life.frozen[-1], life.frozen[-1], self.rng.choice(life.frozen)])
        exact = [{"snapshot_id": each.snapshot_id, "version": each.version} for each in (theirs, ours)]
        if self.rng.random() < 0.15:
            exact = [{**each, "version": each["version"] + 1} for each in exact]
        await self._drop_both(life, *exact)

    async def _delete(self, life: Life) -> None:
        self.sides.their_store.delete(life.rollout)
        self.sides.fresh_eyes()
        await self.sides.source.delete([life.rollout])
        life.__init__(life.rollout)  # type: ignore[misc]  # a new life under the same id

    async def _resolve(self, life: Life) -> None:
        if self.rng.random() < 0.08:
            await self._resolved(life, self.speech.unrepresentable())
        else:
            await self._resolved(life, self._request(life)[0])

    async def _stray(self, life: Life) -> None:
        """Ids that are none, whatever is asked of them."""
        differs = self.rng.random() < 0.4
        rollout = self.rng.choice(IDS_THAT_DIFFER if differs else INVALID_IDS)
        entry = self._entry(life, self._call(), [self.speech.user()], None, None)[1].model_copy()
        entry.rollout_id = rollout
        operation = self.rng.choice(["begin_call", "mark_incomplete", "put", "freeze", "resolve"])
        if operation == "put":
            theirs, ours = await self._both("put", entry)
        elif operation == "freeze":
            theirs = await answer(lambda: self.sides.their_store.freeze(rollout))
            ours = await answer(lambda: self.sides.source.freeze(rollout))
        elif operation == "resolve":
            items = [self.speech.user(), *self.speech.output()]
            theirs = await answer(lambda: self.sides.their_lineage.resolve(rollout, items))
            ours = await answer(lambda: self.sides.resolver.resolve(rollout, items))
        else:
            theirs, ours = await self._both(operation, rollout, self._call())
        if differs:
            self.found.same(f"{operation} of {rollout[:9]!r}", ("error", "invalid id"), ours)
            self.found.excused("id-of-dots-or-length")
            self.sides.their_store.delete(rollout) if len(rollout) < 201 else None
        else:
            self.found.same(f"{operation} of {rollout!r}", theirs, ours)

    async def _orphan(self, life: Life) -> None:
        """A delta whose parent is nowhere: legal to put, and nothing can continue it."""
        life.orphans += 1
        request = [self.speech.user(), {"role": "assistant", "content": f"lost {life.orphans}"}, self.speech.user()]
        turn, entry = self._entry(life, self._call(), request, None, None)
        entry.parent_call_id, entry.prompt_is_delta = self._call(), True
        entry.parent_resolution = ParentResolutionStatus.RESOLVED
        if not await self._put_both(life, entry, "put of an orphaned delta"):
            return
        continued = [*turn.history, self.speech.user()]
        theirs = resolution(await answer(lambda: self.sides.their_lineage.resolve(life.rollout, continued)))
        ours = resolution(await answer(lambda: self.sides.resolver.resolve(life.rollout, continued)))
        self.found.same("their broken chain", ("error", "broken chain"), theirs)
        self.found.same("our broken chain", ("ok", ("unresolved", "broken_delta_chain", None)), ours)
        self.found.excused("broken-chain")

    # -- both sides -----------------------------------------------------------------------------------------

    async def _both(self, method: str, *given: Any) -> tuple[Answer, Answer]:
        theirs = await answer(lambda: getattr(self.sides.their_store, method)(*given))
        ours = await answer(lambda: getattr(self.sides.sink, method)(*given))
        return theirs, ours

    async def _put_both(self, life: Life, entry: TokenEntry, what: str) -> bool:
        theirs, ours = await self._both("put", entry)
        recorded = life.records.get(entry.model_call_id)
        if theirs == ("error", "frozen") and ours[0] == "ok":
            # Only a record that is in the snapshot, and the same to the byte, may be acknowledged behind the freeze.
            self.found.same(f"{what} behind the freeze", recorded, entry)
            self.found.excused("repeated-put")
        else:
            self.found.same(what, theirs, ours)
        if ours in (("error", "frozen"), ("error", "retired")):
            life.late.append(entry.model_call_id)
            life.refused[entry.model_call_id] = entry
        return theirs[0] == "ok"

    async def _drop_both(self, life: Life, theirs: dict[str, Any], ours: dict[str, Any]) -> None:
        dropped = await answer(lambda: self.sides.their_store.drop(life.rollout, **theirs))
        self.found.same(
            f"drop of {life.rollout}", dropped, await answer(lambda: self.sides.source.drop(life.rollout, **ours))
        )
        life.retired = life.retired or dropped == ("ok", True)

    async def _resolved(self, life: Life, items: Items) -> tuple[Answer, Answer]:
        theirs = await answer(lambda: self.sides.their_lineage.resolve(life.rollout, items))
        ours = await answer(lambda: self.sides.resolver.resolve(life.rollout, items))
        plain = resolution(theirs), resolution(ours)
        if plain[0] == plain[1] or not (life.conflicted or life.refused):
            self.found.same(f"resolve in {life.rollout} of {json.dumps(items)[:300]}", *plain)
        elif life.conflicted and not life.retired and self._of_the_matcher(life, items, ()) == plain[1]:
            self.found.excused("conflicted-parent")
        else:
            # Whichever of the refused records left its object behind, the answer must be the matcher's over those.
            left = [
                tuple(chosen) for size in range(1, len(life.refused) + 1) for chosen in combinations(life.refused, size)
            ]
            possible = [self._of_the_matcher(life, items, chosen) for chosen in left]
            self.found.same(f"resolve beside residue: {plain[1]}", True, plain[1] in possible)
            self.found.excused("late-residue")
        return theirs, ours

    def _of_the_matcher(self, life: Life, items: Items, residue: tuple[str, ...]) -> Answer:
        """The decision of Gym's matcher over the records without conflicts and the refused ones of ``residue``."""
        lineage, found = RolloutLineage(), {} if life.retired else dict(life.records)
        found |= {call: life.refused[call] for call in residue}
        for call, entry in found.items():
            if call not in life.conflicted:
                lineage.add_entry(entry, store_tokens=False)
        status, node, reason = lineage.resolve_node(items)
        if node is None:
            return "ok", (str(status), reason, None)
        return "ok", (str(status), reason, (node.call_id, tuple(life.tokens[node.call_id]), node.digest, (), ""))

    # -- what is drawn --------------------------------------------------------------------------------------

    def _request(self, life: Life) -> tuple[Items, Turn | None, bool]:
        """A request, the call it continues, and whether it does so faithfully."""
        kind = self.rng.random()
        if not life.turns or kind < 0.12:
            return [self.speech.user()], None, True
        parent = self.rng.choice([life.turns[-1], life.turns[-1], self.rng.choice([*life.turns, *life.lost])])
        if kind < 0.22:
            return [*self.speech.rewritten(parent.history), self.speech.user()], parent, False
        return [*parent.history, self.speech.user()], parent, True

    def _entry(
        self, life: Life, call: str, request: Items, decision: Any, parent: Turn | None
    ) -> tuple[Turn, TokenEntry]:
        """A record as Gym's server makes it, stored as a delta when its prompt extends the resolved parent."""
        match = None if decision is None else decision.match
        suffix = [self.rng.randrange(1, 50) for _ in range(self.rng.randint(1, 3))]
        generated = [self.rng.randrange(1, 50) for _ in range(self.rng.randint(1, 3))]
        known = list(match.cumulative_token_ids) if match is not None else list(parent.tokens if parent else [])
        prompt = [*known, *suffix]
        delta = match is not None and bool(known) and self.rng.random() < 0.6
        entry = TokenEntry(
            rollout_id=life.rollout,
            model_call_id=call,
            model="policy",
            prompt_token_ids=suffix if delta else prompt,
            generation_token_ids=generated,
            generation_log_probs=[-self.rng.random() for _ in generated],
            output_items=self.speech.output(),
            token_item_index=0,
            response_id=f"r-{call}",
            created_at=1_750_000_000.0 + self.rng.random(),
        )
        stamp_continuation(entry, request)
        entry.parent_resolution_reason = "" if decision is None else decision.reason
        status = ParentResolutionStatus.ROOT if decision is None else decision.status
        tokens = [*prompt, *generated]
        entry.prompt_is_delta = delta
        stamp_lineage(entry, match and match.model_call_id, parent_resolution=status, cumulative=tokens)
        return Turn(call, request, entry.output_items, tokens), entry

    def _turn(self, life: Life, call: str) -> Turn:
        return next(turn for turn in life.turns if turn.call == call)

    def _call(self) -> str:
        return f"{self.rng.getrandbits(128):032x}"
