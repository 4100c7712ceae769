"""Who does what in a run: a function of the seed alone.

The rule of this module: every process computes the same plan, so nothing but the seed travels between them, and the
judge can make the payload of any call anew, also of one whose writer died before it could log anything.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from s3capture.records import TokenEntry

# A writer's day: mostly begin and put, and now and then everything that goes wrong.
_KINDS = {"put": 66, "bare": 8, "lost": 5, "refusal": 7, "mark": 6, "twice": 4, "conflict": 4}
CONFLICT = "conflict"


@dataclass(frozen=True, slots=True)
class Load:
    """The size and shape of one run; ``settings`` are those of every endpoint in it."""

    seed: int
    settings: dict[str, Any]
    writers: int = 8
    tasks: int = 50
    consumers: int = 2
    rollouts: int = 100
    calls: int = 20
    conflicts: bool = True
    kinds: dict[str, int] = field(default_factory=lambda: dict(_KINDS))

    def to_json(self) -> str:
        """For the command line of a worker."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The other end of ``to_json``."""
        return cls(**json.loads(text))

    @property
    def names(self) -> list[str]:
        """The rollout ids."""
        return [f"load-{self.seed}-{index}" for index in range(self.rollouts)]


@dataclass(frozen=True, slots=True)
class Job:
    """One call as one writer handles it; ``variant`` tells the two payloads of a conflict apart."""

    rollout: str
    call: str
    kind: str
    variant: int = 0


def jobs(load: Load, writer: int) -> Iterator[Job]:
    """The calls of one writer process, in the order in which it takes them."""
    for rollout in load.names:
        for index in range(load.calls):
            draw = random.Random(f"{load.seed}/{rollout}/{index}")
            (kind,) = draw.choices([*load.kinds], [*load.kinds.values()])
            if kind == CONFLICT and not load.conflicts:
                kind = "put"
            call, owner = f"c{index:03d}-{kind}", draw.randrange(load.writers)
            if owner == writer:
                yield Job(rollout, call, kind)
            elif kind in ("twice", CONFLICT) and (owner + 1) % load.writers == writer:
                yield Job(rollout, call, kind, variant=1 if kind == CONFLICT else 0)


def entry(seed: int, rollout: str, call: str, variant: int = 0) -> TokenEntry:
    """The record of a call, about 5 KB of JSON."""
    draw = random.Random(f"{seed}/{rollout}/{call}/{variant}")
    generated = draw.choices(range(130_000), k=60)
    return TokenEntry(
        rollout_id=rollout,
        model_call_id=call,
        model="stress",
        prompt_token_ids=draw.choices(range(130_000), k=300),
        generation_token_ids=generated,
        generation_log_probs=[-draw.expovariate(2.0) for _ in generated],
        created_at=float(draw.randrange(10**9)),
        continuation_fingerprint=hashlib.sha256(f"{rollout}/{call}".encode()).hexdigest()
        if draw.random() < 0.3
        else "",
    )


def digest(record: TokenEntry) -> str:
    """Identify a record by its values; made here anew, so that a fault in the codec cannot hide in it."""
    return hashlib.sha256(json.dumps(record.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def digests(seed: int, rollout: str, call: str) -> set[str]:
    """All payloads that anyone may have sent for a call."""
    return {digest(entry(seed, rollout, call, variant)) for variant in (0, 1)}
