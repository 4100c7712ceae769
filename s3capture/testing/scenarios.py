"""The executions that must be explored: which processes meet, and what may go wrong while they do.

The rule of this module: operations are made by a ``Protocol``, the set of generators under test. The shipped one is
the default; a broken variant (``broken``) replaces one generator, and the same scenarios must then fail.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from s3capture import codec
from s3capture.effects import Steps
from s3capture.protocol import bodies, freezing, retiring, writing
from s3capture.protocol.bodies import Origin
from s3capture.testing.explorer import Actor, Op, Scenario, run_alone
from s3capture.testing.promises import (
    KEYS,
    PROMISES,
    Snapshot,
    a_half_deleted_rollout_refuses,
    bucket_is_quiet,
    p9_the_living_finish,
)


@dataclass(frozen=True, slots=True)
class Protocol:
    """The generators under test."""

    begin_call: Callable[..., Steps[bool]] = writing.begin_call
    put_outcome: Callable[..., Steps[None]] = writing.put_outcome
    mark_incomplete: Callable[..., Steps[None]] = writing.mark_incomplete
    freeze: Callable[..., Steps[Any]] = freezing.freeze
    drop: Callable[..., Steps[Any]] = retiring.drop
    retire: Callable[..., Steps[Any]] = retiring.retire
    delete: Callable[..., Steps[Any]] = retiring.delete


SHIPPED = Protocol()


_SETUP = Origin("setup", 0.0, "setup")


def _frozen() -> dict[str, bytes]:
    """The bucket of a rollout without calls that was frozen."""
    bucket: dict[str, bytes] = {}
    run_alone(freezing.freeze(KEYS, _SETUP), bucket)
    return bucket


_FROZEN = _frozen()


class Scripts:
    """Operations of one actor, on the rollout ``KEYS``."""

    def __init__(self, protocol: Protocol, name: str) -> None:
        self._protocol = protocol
        self._name = name

    def _origin(self, what: str) -> Origin:
        return Origin(self._name, 0.0, f"{self._name}-{what}")

    def actor(self, *ops: Op) -> Actor:
        """The actor that runs ``ops`` in order."""
        return Actor(self._name, ops)

    def begin(self, call: str) -> Op:
        """Begin ``call``; the result is whether the intent is ours."""
        return Op(f"begin:{call}", lambda _: self._protocol.begin_call(KEYS, call, self._origin("begin")))

    def put(self, call: str, payload: str = "a", *, begun: int | None = None, first: bool = True, tag: str = "") -> Op:
        """Put ``call``; ``begun`` is the index of this actor's begin, whose privilege the ``first`` put uses up.

        A begin that failed is followed by no put: a server does not generate then. The result is what the call
        came to: the identity of the outcome.
        """
        outcome = bodies.entry(KEYS, call, codec.canonical({"v": payload}), fingerprint="f", by=self._name)

        def start(results: tuple[Hashable, ...]) -> Steps[None] | None:
            if begun is not None and not isinstance(results[begun], bool):
                return None
            owned = first and begun is not None and results[begun] is True
            return self._protocol.put_outcome(KEYS, outcome, self._origin("put" + tag), owned=owned)

        return Op(f"put:{call}{':' + tag if tag else ''}", start, lambda _: outcome.identity)

    def refuse(self, call: str, code: str = "x", *, begun: int | None = None) -> Op:
        """Record a refusal of ``call``."""
        record = {"model_call_id": call, "code": code, "by": self._name}
        outcome = bodies.refusal(KEYS, call, record, by=self._name)

        def start(results: tuple[Hashable, ...]) -> Steps[None] | None:
            if begun is not None and not isinstance(results[begun], bool):
                return None
            return self._protocol.put_outcome(KEYS, outcome, self._origin("refuse"), owned=False)

        return Op(f"refuse:{call}", start, lambda _: outcome.identity)

    def mark(self, mark_id: str) -> Op:
        """Mark the rollout incomplete."""
        body = bodies.mark(KEYS, "", self._origin("mark"))
        return Op(f"mark:{mark_id}", lambda _: self._protocol.mark_incomplete(KEYS, "", mark_id, body))

    def freeze(self, tag: str = "") -> Op:
        """Freeze; the result is the ``Snapshot``."""
        name = f"freeze:{tag}" if tag else "freeze"
        return Op(name, lambda _: self._protocol.freeze(KEYS, self._origin("freeze" + tag)), Snapshot.of)

    def holds(self, bucket: dict[str, bytes]) -> Op:
        """Hold the snapshot of the frozen rollout in ``bucket``, which was read before everything else."""

        def start(_: tuple[Hashable, ...]) -> Steps[freezing.FrozenRollout]:
            held: freezing.FrozenRollout = run_alone(freezing.freeze(KEYS, self._origin("held")), dict(bucket))
            return held
            yield  # a generator that asks for nothing

        return Op("freeze:held", start, Snapshot.of)

    def drop(self, frozen: int, tag: str = "") -> Op:
        """Drop the snapshot of this actor's operation number ``frozen``; the result is True or False."""

        def start(results: tuple[Hashable, ...]) -> Steps[Any] | None:
            snapshot = results[frozen]
            if not isinstance(snapshot, Snapshot):
                return None
            args = (KEYS, snapshot.snapshot_id, snapshot.version, self._origin("drop" + tag))
            return self._protocol.drop(*args, keep=False)

        return Op(f"drop:{tag}" if tag else "drop", start, lambda dropped: dropped.retired)

    def retire(self) -> Op:
        """Retire the rollout."""
        return Op("retire", lambda _: self._protocol.retire(KEYS, self._origin("retire"), keep=False), lambda _: None)

    def delete(self) -> Op:
        """Delete the rollout."""
        return Op("delete", lambda _: self._protocol.delete(KEYS), lambda _: None)


def scenarios(protocol: Protocol = SHIPPED, *, deep: bool = False) -> dict[str, Scenario]:
    """The scenarios that CI explores, by name; ``deep`` adds those that take minutes."""

    def of(name: str) -> Scripts:
        return Scripts(protocol, name)

    a, b, c, d = of("A"), of("B"), of("C"), of("D")
    made: list[Scenario] = []

    def add(
        name: str,
        *actors: Actor,
        crashes: int = 1,
        losses: int = 1,
        list_pages: int = 1,
        setup: dict[str, bytes] | None = None,
    ) -> None:
        made.append(Scenario(name, actors, PROMISES, crashes, losses, list_pages, setup or {}))

    add("begun put meets freeze", a.actor(a.begin("c"), a.put("c", begun=0)), b.actor(b.freeze(), b.drop(0)))
    add("put meets freeze and drop", a.actor(a.put("c")), b.actor(b.freeze(), b.drop(0)), list_pages=2)
    add(
        "begun put is sent twice",
        a.actor(a.begin("c"), a.put("c", begun=0), a.put("c", begun=0, first=False, tag="again")),
        b.actor(b.freeze(), b.drop(0)),
        crashes=0,
    )
    if deep:
        add(
            "begun put is sent twice, also after a failed begin",
            a.actor(a.begin("c"), a.put("c", begun=0), a.put("c", tag="again")),
            b.actor(b.freeze(), b.drop(0)),
            crashes=0,
        )
    add(
        "two freezers meet a begun put",
        a.actor(a.begin("c"), a.put("c", begun=0)),
        b.actor(b.freeze()),
        c.actor(c.freeze()),
        losses=0,
    )
    add("put meets two freezers", a.actor(a.put("c")), b.actor(b.freeze()), c.actor(c.freeze()), crashes=0, losses=0)
    add("mark meets freeze and drop", a.actor(a.mark("m")), b.actor(b.freeze(), b.drop(0)), list_pages=2)
    add(
        "mark meets a drop that dies",
        a.actor(a.mark("m")),
        b.actor(b.freeze(), b.drop(0)),
        c.actor(c.mark("n")),
        losses=0,
    )
    add("two drops of one snapshot", a.actor(a.freeze(), a.drop(0)), b.actor(b.freeze(), b.drop(0)), losses=0)
    add("two drops and a mark", a.actor(a.freeze(), a.drop(0)), b.actor(b.mark("m"), b.freeze(), b.drop(1)), losses=0)
    if deep:
        add(
            "two drops and a mark of a third",
            a.actor(a.freeze(), a.drop(0)),
            b.actor(b.freeze(), b.drop(0)),
            c.actor(c.mark("m")),
            crashes=0,
            losses=0,
        )
    add(
        "conflicting puts meet freeze",
        a.actor(a.put("c", "a")),
        b.actor(b.put("c", "b")),
        c.actor(c.freeze()),
        crashes=0,
        losses=0,
    )
    add("conflicting puts", a.actor(a.put("c", "a")), b.actor(b.put("c", "b"), b.freeze()))
    add(
        "the same put twice meets freeze",
        a.actor(a.put("c")),
        b.actor(b.put("c")),
        c.actor(c.freeze()),
        crashes=0,
        losses=0,
    )
    add("the same put twice", a.actor(a.put("c")), b.actor(b.put("c"), b.freeze()))
    add("refusal meets freeze", a.actor(a.begin("c"), a.refuse("c", begun=0)), b.actor(b.freeze(), b.drop(0)))
    add("late refusal", a.actor(a.refuse("c")), b.actor(b.freeze(), b.freeze("2")))
    add("refusal meets put", a.actor(a.refuse("c")), b.actor(b.put("c")), c.actor(c.freeze()), crashes=0, losses=0)
    add("retire meets a begun put", a.actor(a.begin("c"), a.put("c", begun=0)), b.actor(b.retire()))
    add("retire meets a put", a.actor(a.put("c"), a.put("d")), b.actor(b.retire()))
    add(
        "retire meets mark and freeze",
        a.actor(a.mark("m")),
        b.actor(b.retire()),
        c.actor(c.freeze()),
        crashes=0,
        losses=0,
    )
    add(
        "two retires and a begun put",
        a.actor(a.begin("c"), a.put("c", begun=0)),
        b.actor(b.retire()),
        c.actor(c.retire()),
        losses=0,
    )
    add(
        "retire meets drop",
        a.actor(a.put("c")),
        b.actor(b.freeze(), b.drop(0)),
        c.actor(c.retire()),
        crashes=0,
        losses=0,
    )
    add("begin meets freeze", a.actor(a.begin("c")), b.actor(b.freeze(), b.freeze("2")), list_pages=2)
    add(
        "four at once",
        a.actor(a.begin("c")),
        b.actor(b.mark("m")),
        c.actor(c.freeze()),
        d.actor(d.put("d")),
        crashes=0,
        losses=0,
    )
    if deep:
        add(
            "four at once, begun",
            a.actor(a.begin("c"), a.put("c", begun=0)),
            b.actor(b.mark("m")),
            c.actor(c.freeze()),
            d.actor(d.freeze()),
            crashes=0,
            losses=0,
        )
    add(
        "begun put is put again",
        a.actor(a.begin("c"), a.put("c", begun=0), a.put("c", begun=0, first=False, tag="again")),
        b.actor(b.freeze(), b.drop(0)),
        crashes=0,
        losses=0,
    )
    add(
        "two drops of a frozen rollout and a mark",
        a.actor(a.holds(_FROZEN), a.drop(0)),
        b.actor(b.freeze(), b.drop(0)),
        c.actor(c.mark("m")),
        crashes=0,
        losses=0,
        setup=_FROZEN,
    )
    quiet = Scenario(
        "conflicting puts that live",
        (a.actor(a.put("c", "a")), b.actor(b.put("c", "b"))),
        (*PROMISES, bucket_is_quiet),
        crashes=0,
    )
    dying = Scenario(
        "delete dies on the way",
        (a.actor(a.begin("late")), b.actor(b.delete())),
        (a_half_deleted_rollout_refuses, p9_the_living_finish),
        losses=0,
        setup=_retired_and_kept(),
    )
    made.extend((quiet, dying))
    return {scenario.name: scenario for scenario in made}


def known_limit(protocol: Protocol = SHIPPED) -> Scenario:
    """What the protocol does not promise (docs/protocol.md): a begun call whose first put another process made."""
    a, b = Scripts(protocol, "A"), Scripts(protocol, "B")
    actors = (a.actor(a.begin("c"), a.put("c", "a", begun=0)), b.actor(b.put("c", "b"), b.freeze(), b.drop(1)))
    return Scenario("a begun call is put first by another process", actors, PROMISES, crashes=0, losses=0)


KNOWN_LIMIT = known_limit()


def _retired_and_kept() -> dict[str, bytes]:
    """The bucket of a rollout that was put, frozen and retired, with its records retained."""
    bucket: dict[str, bytes] = {}
    kept = bodies.entry(KEYS, "c", codec.canonical({"v": "a"}), fingerprint="f", by="setup")
    run_alone(writing.put_outcome(KEYS, kept, _SETUP, owned=False), bucket)
    run_alone(freezing.freeze(KEYS, _SETUP), bucket)
    run_alone(retiring.retire(KEYS, _SETUP, keep=True), bucket)
    return bucket
