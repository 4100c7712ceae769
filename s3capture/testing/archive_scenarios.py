"""Archiving among writers, consumers and other archivers, through every interleaving and crash.

The rule of this module: the steps are the shipped ones of ``protocol/archiving.py`` in the order that ``archive``
keeps, for one rollout; a pack is a JSON object here. What must hold: whatever was acknowledged is live or in a pack
that was listed as done, and a pack that was listed as done has all of it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from s3capture import codec
from s3capture.archive import decisions
from s3capture.effects import Create, Get, Steps
from s3capture.keys import PackName, position
from s3capture.protocol import archiving, bodies, freezing, retiring, writing
from s3capture.protocol.bodies import Origin
from s3capture.protocol.steps import found
from s3capture.testing.explorer import Actor, End, Op, Scenario, run_alone
from s3capture.testing.promises import (
    KEYS,
    bucket_is_sound,
    p2_nothing_is_acknowledged_outside_the_decision,
    p3_one_snapshot_for_each_version,
    p4_a_drop_saw_everything,
    p5_acknowledged_marks_show,
    p9_the_living_finish,
)
from s3capture.testing.scenarios import SHIPPED, Protocol, Scripts

_SETUP = Origin("setup", 0.0, "setup")
_AT = position(KEYS.rollout_id)


@dataclass(frozen=True, slots=True)
class Archiving:
    """The generators under test, and the order they are run in; broken variants change one of them."""

    examine: Callable[..., Steps[Any]] = archiving.examine
    settle: Callable[..., Steps[bool]] = archiving.settle
    take_away: Callable[..., Steps[Any]] = archiving.take_away
    lists_as_done: bool = True
    waits_for_done: bool = True
    swept: Callable[..., Steps[frozenset[PackName]]] = archiving.swept
    takes: Callable[[archiving.Packable], frozenset[str]] = lambda packable: packable.records
    needs_all: bool = True


SHIPPED_ARCHIVING = Archiving()


def archive_alone(steps: Archiving, origin: Origin) -> Steps[bool]:
    """Archive the rollout ``KEYS``; True when the archive speaks for it."""
    packable = yield from steps.examine(KEYS)
    if not isinstance(packable, archiving.Packable):
        return False
    rows = sorted(packable.rows, key=lambda row: row.key)
    answers = yield tuple(Get(row.key) for row in rows)
    packed = {row.key: body for row, answer in zip(rows, answers, strict=True) if (body := found(answer)) is not None}
    # With a nonce, as every pack has: no two archivers make the same.
    pack = json.dumps({"": origin.nonce.encode().hex(), **{key: body.hex() for key, body in packed.items()}}).encode()
    name = PackName(_AT, _AT, hashlib.sha256(pack).hexdigest())
    yield (Create(KEYS.of.archive.pack(name), pack),)
    yield (Create(KEYS.of.archive.index(name), b""),)
    if steps.needs_all and len(packed) < len(rows):
        return False
    if not (yield from steps.settle(KEYS, packable, origin)):
        return False
    listing = Create(
        KEYS.of.archive.done(name, origin.nonce), decisions.done(KEYS.of, {KEYS.rollout_id: [name]}, origin)
    )
    if steps.lists_as_done and steps.waits_for_done:
        yield (listing,)
    if (yield from steps.swept(KEYS.of.archive, frozenset({name}))):
        return False
    yield from steps.take_away(steps.takes(packable) & packed.keys())
    if steps.lists_as_done and not steps.waits_for_done:
        yield (listing,)
    return True


def archived(end: End) -> dict[str, bytes] | None:
    """What the archive holds of the rollout, by key; None when it does not speak for it."""
    contents: dict[str, bytes] | None = None
    for key, body in end.bucket.items():
        if key.startswith(f"{KEYS.of.archive.base}done/"):
            for name in decisions.read_done(key, body)[KEYS.rollout_id]:
                parsed = PackName.of(name)
                packed = end.bucket.get(KEYS.of.archive.pack(parsed)) if parsed else None
                pack = json.loads(packed) if packed is not None else {}
                contents = {**(contents or {}), **{k: bytes.fromhex(v) for k, v in pack.items()}}
    return contents


def nothing_is_lost(end: End) -> Iterator[str]:
    """Everything acknowledged is live or archived; for scenarios without a consumer, who may take it."""
    kept = {**end.bucket, **(archived(end) or {})}
    for put in end.of("put"):
        if put.acked and KEYS.call(put.op.split(":")[1]) not in kept:
            yield f"{put.op} of {put.actor} was acknowledged and is neither live nor archived"
    for mark in end.of("mark"):
        if mark.acked and KEYS.mark(mark.op.split(":")[1]) not in kept:
            yield f"{mark.op} of {mark.actor} was acknowledged and is neither live nor archived"
    for key in _BEFORE:
        if key not in kept:
            yield f"{key} was there before everything and is neither live nor archived"


def the_archive_hides_nothing(end: End) -> Iterator[str]:
    """Where the archive speaks for the rollout, it holds every acknowledged mark and put, and the same snapshot."""
    holds = archived(end)
    if holds is None:
        return
    for outcome in end.outcomes:
        kind, _, name = outcome.op.partition(":")
        key = KEYS.call(name) if kind == "put" else KEYS.mark(name) if kind == "mark" else ""
        if key and outcome.acked and key not in holds:
            yield f"the archive speaks for the rollout without the acknowledged {outcome.op} of {outcome.actor}"
    for key in _BEFORE:
        if key not in holds:
            yield f"the archive speaks for the rollout without {key}"


def the_old_mark_is_archived(end: End) -> Iterator[str]:
    """Where the archive speaks for a rollout that was marked behind its freeze, it holds the mark."""
    holds = archived(end)
    if holds is not None and KEYS.mark("x") not in holds:
        yield "the archive speaks for the rollout without its mark"


def _frozen_with_a_record(*, retired: bool = False, marked: bool = False) -> dict[str, bytes]:
    bucket: dict[str, bytes] = {}
    kept = bodies.entry(KEYS, "c", codec.canonical({"v": "a"}), fingerprint="f", by="setup")
    run_alone(writing.put_outcome(KEYS, kept, _SETUP, owned=False), bucket)
    run_alone(freezing.freeze(KEYS, _SETUP), bucket)
    if marked:  # behind the freeze: the manifest does not know it
        run_alone(writing.mark_incomplete(KEYS, "", "x", bodies.mark(KEYS, "", _SETUP)), bucket)
    if retired:
        run_alone(retiring.retire(KEYS, _SETUP, keep=True), bucket)
    return bucket


_FROZEN = _frozen_with_a_record()
_KEPT = _frozen_with_a_record(retired=True)
_MARKED = _frozen_with_a_record(marked=True)
_BEFORE = frozenset(_FROZEN)

_ALWAYS = (
    the_archive_hides_nothing,
    p2_nothing_is_acknowledged_outside_the_decision,
    p3_one_snapshot_for_each_version,
    p4_a_drop_saw_everything,
    p5_acknowledged_marks_show,
    p9_the_living_finish,
    bucket_is_sound,
)


def archive_scenarios(
    steps: Archiving = SHIPPED_ARCHIVING, protocol: Protocol = SHIPPED, *, deep: bool = False
) -> dict[str, Scenario]:
    """The scenarios that CI explores, by name; ``deep`` adds one that takes minutes."""

    def archiver(name: str, times: int = 1) -> Actor:
        def op(nonce: str) -> Op:
            return Op(f"archive:{nonce}", lambda _: archive_alone(steps, Origin(name, 0.0, nonce)))

        return Actor(name, tuple(op(f"{name}-{number}") for number in range(times)))

    a, b = Scripts(protocol, "A"), Scripts(protocol, "B")
    alone = (*_ALWAYS, nothing_is_lost)
    marked = (*_ALWAYS, the_old_mark_is_archived)
    consumer = b.actor(b.freeze(), b.drop(0))
    made = [
        Scenario("archive dies and is repeated", (archiver("X"), archiver("Y")), alone, 1, 0, 1, _FROZEN),
        Scenario("archive loses a reply", (archiver("X", 2),), alone, 1, 1, 2, _FROZEN),
        Scenario("archive meets a mark", (archiver("X", 2), a.actor(a.mark("m"))), alone, 1, 0, 1, _FROZEN),
        Scenario("archive meets a late put", (archiver("X"), a.actor(a.put("d"))), alone, 1, 0, 1, _FROZEN),
        Scenario("archive meets a consumer", (archiver("X"), consumer), _ALWAYS, 1, 0, 1, _FROZEN),
        Scenario("archive meets a consumer of a marked rollout", (archiver("X"), consumer), marked, 1, 0, 1, _MARKED),
        Scenario("two archives of what was kept", (archiver("X"), archiver("Y")), alone, 1, 0, 1, _KEPT),
    ]
    if deep:
        three = (archiver("X"), archiver("Y"), a.actor(a.mark("m")))
        made.append(Scenario("two archives meet a mark", three, alone, 0, 0, 1, _FROZEN))
    return {scenario.name: scenario for scenario in made}
