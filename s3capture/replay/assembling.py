"""Stored records of one rollout put together: their order, their parents, and the proof of every token.

The rule of this module: nothing is guessed. A call is given only if its full tokens have the digest and the length that
were recorded when they were captured; what cannot be proven is left out and named, together with the deltas that rest
on it. Calls that store their prompt in full rest on nothing, and stay. It does no I/O.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from s3capture.errors import UnstorableValueError
from s3capture.keys import escape
from s3capture.records import compute_digest
from s3capture.replay.model import Packed, Problem, ProblemKind, ReplayedCall


def assemble(
    rollout: str, records: Mapping[str, Packed], left_out: Set[str]
) -> tuple[tuple[ReplayedCall, ...], list[Problem]]:
    """Return the calls that are proven, and what is wrong with the others.

    ``records`` are the sound records by call id, ``left_out`` the key segments of calls that were left out before.
    """
    return _Assembly(rollout, records, left_out).run()


@dataclass(slots=True)
class _Assembly:
    rollout: str
    records: Mapping[str, Packed]
    left_out: Set[str]
    problems: list[Problem] = field(default_factory=list)
    good: dict[str, ReplayedCall] = field(default_factory=dict)

    def run(self) -> tuple[tuple[ReplayedCall, ...], list[Problem]]:
        order = self._order()
        for call in sorted(self.records.keys() - set(order)):
            self._problem(call, ProblemKind.CYCLE, "it is its own ancestor, by the parents that the records name")
        for call in order:
            self._take(call)
        children: dict[str, list[str]] = {}
        for call, taken in self.good.items():
            if taken.parent is not None:
                children.setdefault(taken.parent, []).append(call)
        # Made anew, parents first: only now is it known which calls have children.
        made: dict[str, ReplayedCall] = {}
        for call, taken in self.good.items():
            made[call] = ReplayedCall(
                facts=taken.facts,
                position=len(made),
                parent=taken.parent,
                children=tuple(children.get(call, ())),
                prompt_tokens=taken.prompt_tokens,
                packed=taken.packed,
                before=None if taken.before is None else made[taken.before.call_id],
            )
        return tuple(made.values()), self.problems

    def _order(self) -> list[str]:
        """Every call that is in no circle: parents before children, else by time and id."""
        waiting: dict[str, list[str]] = {}
        ready: list[tuple[float, str]] = []
        on_circle = self._on_circles()
        for call, record in self.records.items():
            if call in on_circle:
                continue
            parent = record.facts.parent_call_id
            if parent is not None and parent in self.records and parent not in on_circle:
                waiting.setdefault(parent, []).append(call)
            else:
                ready.append(self._rank(call))
        heapq.heapify(ready)
        order = []
        while ready:
            _, call = heapq.heappop(ready)
            order.append(call)
            for child in waiting.pop(call, ()):
                heapq.heappush(ready, self._rank(child))
        return order

    def _rank(self, call: str) -> tuple[float, str]:
        created = self.records[call].facts.created_at
        return (math.inf if math.isnan(created) else created), call

    def _on_circles(self) -> set[str]:
        found: set[str] = set()
        done: set[str] = set()
        for start in self.records:
            path: dict[str, None] = {}
            call: str | None = start
            while call is not None and call in self.records and call not in done and call not in path:
                path[call] = None
                call = self.records[call].facts.parent_call_id
            if call is not None and call in path:
                walked = list(path)
                found.update(walked[walked.index(call) :])
            done.update(path)
        return found

    def _take(self, call: str) -> None:
        record = self.records[call]
        named = record.facts.parent_call_id
        parent = None if named is None else self.good.get(named)
        delta = record.facts.prompt_is_delta
        if delta and parent is None:
            gone = f"it is a delta behind call {named!r}, which {self._why_not(named or '')}"
            self._problem(call, ProblemKind.BROKEN_CHAIN, f"{gone}, so its prompt cannot be rebuilt")
            return
        before = parent.prompt_tokens + parent.generated_tokens if delta and parent is not None else 0
        taken = ReplayedCall(
            facts=record.facts,
            position=len(self.good),
            parent=None if parent is None else parent.call_id,
            children=(),
            prompt_tokens=before + len(record.prompt),
            packed=record,
            before=parent if delta else None,
        )
        if not self._proven(taken):
            return
        if named is not None and parent is None and not self._known(named):
            text = f"it names call {named!r} as its parent, which {self._why_not(named)}; its own prompt is whole"
            self._problem(call, ProblemKind.ORPHAN, text, left_out=False)
        self.good[call] = taken

    def _known(self, call: str) -> bool:
        """Whether it was told already what is wrong with ``call``."""
        return call in self.records or escape(call) in self.left_out

    def _why_not(self, call: str) -> str:
        return "was left out" if self._known(call) else "is not among the records of the rollout"

    def _proven(self, call: ReplayedCall) -> bool:
        facts, count = call.facts, call.prompt_tokens + call.generated_tokens
        if facts.cum_len is not None and facts.cum_len != count:
            text = f"prompt and generation are {count} tokens, and {facts.cum_len} were recorded"
            self._problem(call.call_id, ProblemKind.MISMATCH, text)
            return False
        if not facts.digest:
            if call.prompt_was_delta:
                text = "it is a delta without a digest, so nothing proves the prompt that would be rebuilt"
                self._problem(call.call_id, ProblemKind.UNPROVEN, text)
            return not call.prompt_was_delta
        try:
            digest = compute_digest(call.packed_cumulative())
        except UnstorableValueError as error:
            digest = str(error)
        if digest != facts.digest:
            text = "its prompt and generation do not have the token digest that was recorded with them"
            self._problem(call.call_id, ProblemKind.MISMATCH, text)
            return False
        return True

    def _problem(self, call: str, kind: ProblemKind, text: str, *, left_out: bool = True) -> None:
        self.problems.append(Problem(self.rollout, call, kind, text, left_out))
