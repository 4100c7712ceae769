"""The built-in workload: two dozen agent rollouts made from a seed, eight of which meet trouble.

The rule of this module: the same seed makes the same script, to the last token, whatever machine or day it is; so
nothing here reads a clock, and every draw comes from the one generator. Texts are made up of a small vocabulary;
token ids follow Zipf's law over 150,000 words, log probabilities are float32 values as engines give them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from s3capture.demo.script import Call, Rollout, Script, Twist

DEFAULT_SEED = 7
VOCABULARY = 150_000
REFUSAL_CODE = "context_length_exceeded"

_MODEL = "demo-policy"
_START = 1_750_000_000.0  # seconds since the epoch; not today, so that two runs of one seed are the same
_TASKS, _PER_TASK = 6, 4
_PROSE = (
    "check read write open close count parse split merge sort index cache retry token value field error "
    "branch commit test build path file line loop guard lock queue batch shard key hash digest limit bound "
    "first last next other same late early empty full fast slow safe plain small large the a of in on with and "
    "then so because this that each every no only still again here there now look try keep drop move find fix run"
)
_WORDS = _PROSE.split()
_TOOLS = ("read_file", "search", "edit_file", "run_tests", "list_folder")


class _Story(StrEnum):
    """What happens in a rollout as a whole."""

    PLAIN = "plain"
    BRANCHES = "branches"
    RETRY = "retry"
    CONFLICT = "conflict"
    REFUSED = "refused"
    DIES = "dies"
    LATE = "late"
    OUTAGE = "outage"


_TROUBLE = (
    _Story.BRANCHES, _Story.BRANCHES, _Story.RETRY, _Story.CONFLICT,
    _Story.REFUSED, _Story.DIES, _Story.LATE, _Story.OUTAGE,
)  # fmt: skip
_LAST_CALL = {_Story.REFUSED: Twist.REFUSED, _Story.DIES: Twist.DIES, _Story.OUTAGE: Twist.OUTAGE}
_MIDDLE_CALL = {_Story.RETRY: Twist.RETRY, _Story.CONFLICT: Twist.CONFLICT}


@dataclass(frozen=True, slots=True)
class _Size:
    """Ranges of token counts: the root prompt, what a turn adds to it, and a generation."""

    root: tuple[int, int]
    turn: tuple[int, int]
    generation: tuple[int, int]
    calls: tuple[int, int]


_SMALL = _Size((250, 700), (40, 260), (30, 220), (3, 12))
_MEDIUM = _Size((2_000, 4_000), (100, 600), (100, 400), (4, 8))
_LONG = _Size((8_000, 8_400), (200, 800), (400, 1_000), (3, 4))
_HUGE = _Size((32_000, 33_000), (200, 800), (800, 1_000), (3, 3))
_SIZES = (_HUGE, _LONG, _MEDIUM, _MEDIUM, _MEDIUM)


def built_in(seed: int = DEFAULT_SEED, *, rollouts: int | None = None, outage: bool = True) -> Script:
    """Return the script of ``seed``: 24 rollouts of 3 to 12 calls.

    ``rollouts`` cuts it short, keeping those with trouble first (at least 8). Without ``outage`` that rollout is
    played without one, and ``skipped`` says so.
    """
    rng = random.Random(f"s3capture demo {seed}")
    ids = [f"{task}-{number}" for task in range(_TASKS) for number in range(_PER_TASK)]
    ids[-1] += "-a1"  # the second attempt of its task, as upstream names it
    stories: list[_Story] = [*_TROUBLE, *[_Story.PLAIN] * (len(ids) - len(_TROUBLE))]
    sizes = [_SMALL] * (len(ids) - len(_SIZES)) + [*_SIZES]
    order = [*range(len(ids))]
    rng.shuffle(order)
    made = [_rollout(rng, ids[place], stories[rank], sizes[rank], outage) for rank, place in enumerate(order)]
    if rollouts is not None:
        made = made[: max(rollouts, len(_TROUBLE))]
    made.sort(key=lambda rollout: rollout.rollout_id)
    skipped = () if outage else ("an outage of S3, since only the embedded server can be stopped for one",)
    return Script(f"built-in workload, seed {seed}", _half_as_deltas(made), skipped)


def _half_as_deltas(rollouts: list[Rollout]) -> list[Rollout]:
    """Ask for a delta record at every second call that has a parent."""
    count, chosen = 0, []
    for rollout in rollouts:
        calls = []
        for call in rollout.calls:
            count += call.parent is not None
            calls.append(dataclasses.replace(call, delta=call.parent is not None and count % 2 == 0))
        chosen.append(dataclasses.replace(rollout, calls=calls))
    return chosen


def _rollout(rng: random.Random, rollout_id: str, story: _Story, size: _Size, outage: bool) -> Rollout:
    turns = _Turns(rng, size)
    length = max(rng.randint(*size.calls), 4 if story in _MIDDLE_CALL or story is _Story.BRANCHES else 3)
    if story is _Story.BRANCHES:
        length = min(length, _SMALL.calls[1] - 2)  # the branch adds two
    calls = [turns.call(None)]
    while len(calls) < length:
        calls.append(turns.call(calls[-1]))
    if story is _Story.BRANCHES:
        # Another continuation of an earlier call: the harness asked twice from the same point.
        tip = turns.call(calls[rng.randrange(1, len(calls) - 1)])
        calls += [tip, turns.call(tip)]
    if story in _MIDDLE_CALL:
        place = rng.randrange(1, len(calls) - 1)
        calls[place] = dataclasses.replace(calls[place], twist=_MIDDLE_CALL[story])
    if story in _LAST_CALL and (outage or story is not _Story.OUTAGE):
        calls[-1] = dataclasses.replace(calls[-1], twist=_LAST_CALL[story])
    return Rollout(rollout_id, calls, turns.call(calls[-1]) if story is _Story.LATE else None)


class _Turns:
    """Makes the calls of one rollout, each continuing another."""

    def __init__(self, rng: random.Random, size: _Size) -> None:
        self._rng = rng
        self._size = size
        self._now = _START + rng.random() * 3_600

    def call(self, parent: Call | None) -> Call:
        rng, size = self._rng, self._size
        generated = rng.randint(*size.generation)
        self._now += 0.5 + generated * 0.02 + rng.random()
        suffix = rng.randint(*(size.root if parent is None else size.turn))
        return Call(
            call_id=f"{rng.getrandbits(128):032x}",
            parent=None if parent is None else parent.call_id,
            new_items=self._question(suffix) if parent is None else self._answers(parent, suffix),
            output_items=self._output(generated),
            token_item_index=0,
            suffix_ids=self._tokens(suffix),
            generation_ids=self._tokens(generated),
            log_probs=[self._log_prob() for _ in range(generated)],
            response_id=f"resp_{rng.getrandbits(96):024x}",
            created_at=round(self._now, 6),
            model=_MODEL,
        )

    def _question(self, tokens: int) -> list[dict[str, Any]]:
        return [
            {"role": "system", "content": "You are an agent with tools. " + self._text(20)},
            {"role": "user", "content": self._text(tokens)},
        ]

    def _answers(self, parent: Call, tokens: int) -> list[dict[str, Any]]:
        """What the harness adds: the result of each tool call, or a word of the user when there was none."""
        called = [item for item in parent.output_items if item["type"] == "function_call"]
        if not called:
            return [{"role": "user", "content": self._text(tokens)}]
        return [
            {
                "type": "function_call_output",
                "call_id": item["call_id"],
                "output": json.dumps({"exit_code": self._rng.choice((0, 0, 0, 1)), "output": self._text(tokens)}),
            }
            for item in called
        ]

    def _output(self, tokens: int) -> list[dict[str, Any]]:
        rng = self._rng
        text = {"type": "output_text", "text": self._text(tokens), "annotations": []}
        items: list[dict[str, Any]] = [
            {"type": "message", "role": "assistant", "id": f"msg_{rng.getrandbits(64):016x}", "content": [text]}
        ]
        for _ in range(rng.choice((0, 1, 1, 1, 2))):
            arguments = {"path": f"src/{rng.choice(_WORDS)}_{rng.choice(_WORDS)}.py", "line": rng.randrange(1, 900)}
            items.append(
                {
                    "type": "function_call",
                    "call_id": f"call_{rng.getrandbits(96):024x}",
                    "name": rng.choice(_TOOLS),
                    "arguments": json.dumps(arguments),
                }
            )
        return items

    def _text(self, tokens: int) -> str:
        return " ".join(self._rng.choices(_WORDS, k=max(3, tokens * 3 // 4))).capitalize() + "."

    def _tokens(self, count: int) -> list[int]:
        # Uniform in the logarithm of the rank is Zipf's law with exponent 1.
        return [int(VOCABULARY ** self._rng.random()) for _ in range(count)]

    def _log_prob(self) -> float:
        kind = self._rng.random()
        if kind < 0.002:
            return -math.inf  # a token outside the sampler's mask, as engines report it
        value = -self._rng.expovariate(1.6 if kind < 0.4 else 400.0)
        rounded: float = struct.unpack("f", struct.pack("f", value))[0]
        return rounded
