"""The executions of the capture ledger that must be explored.

The rule of this module: as in ``scenarios``: the generators under test come in one value, so that a broken variant
replaces one of them and the same scenarios must then fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from s3capture.effects import Steps
from s3capture.protocol import ledger, ledger_bodies
from s3capture.protocol.bodies import Origin
from s3capture.testing.explorer import Actor, Op, Scenario
from s3capture.testing.ledger_promises import LEDGER, LEDGER_PROMISES, Ledger


@dataclass(frozen=True, slots=True)
class LedgerProtocol:
    """The generators under test."""

    begin_call: Callable[..., Steps[None]] = ledger.begin_call
    close_admissions: Callable[..., Steps[Any]] = ledger.close_admissions
    settle_call: Callable[..., Steps[bool]] = ledger.settle_call
    record_failure: Callable[..., Steps[bool]] = ledger.record_failure
    contents: Callable[..., Steps[Any]] = ledger.contents
    retire: Callable[..., Steps[Any]] = ledger.retire


SHIPPED_LEDGER = LedgerProtocol()


class LedgerScripts:
    """Operations of one actor, on the ledger ``LEDGER``."""

    def __init__(self, protocol: LedgerProtocol, name: str) -> None:
        self._protocol = protocol
        self._name = name

    def _origin(self) -> Origin:
        return Origin(self._name, 0.0, self._name)

    def actor(self, *ops: Op) -> Actor:
        """The actor that runs ``ops`` in order."""
        return Actor(self._name, ops)

    def begin(self, call: str) -> Op:
        """Ask for admission."""
        return Op(f"begin:{call}", lambda _: self._protocol.begin_call(LEDGER, call, self._origin()))

    def record(self, call: str, value: str = "a", *, begun: int | None = None) -> Op:
        """Commit a row; ``begun`` is the index of this actor's begin, without whose admission nothing is recorded."""
        row = ledger_bodies.row(LEDGER, call, {"v": value}, fingerprint="f", by=self._name)
        return Op(
            f"record:{call}:{value}",
            lambda results: (
                None if begun is not None and results[begun] is not None else self._protocol.settle_call(LEDGER, row)
            ),
        )

    def refuse(self, call: str) -> Op:
        """Settle a call as refused."""
        outcome = ledger_bodies.refusal(LEDGER, call, self._origin())
        return Op(f"refuse:{call}", lambda _: self._protocol.settle_call(LEDGER, outcome))

    def failure(self, call: str) -> Op:
        """Record a failure."""
        return Op(f"failure:{call}", lambda _: self._protocol.record_failure(LEDGER, call, "why", self._origin()))

    def close(self, tag: str = "") -> Op:
        """Close the admissions; the result is the ``Ledger``."""
        name = f"close:{tag}" if tag else "close"
        return Op(name, lambda _: self._protocol.close_admissions(LEDGER, self._origin()), Ledger.of)

    def manifest(self) -> Op:
        """Read the ledger."""
        return Op("manifest", lambda _: self._protocol.contents(LEDGER), Ledger.of)

    def retire(self) -> Op:
        """Retire the ledger."""
        return Op("retire", lambda _: self._protocol.retire(LEDGER, self._origin(), keep=False), lambda _: None)


def ledger_scenarios(protocol: LedgerProtocol = SHIPPED_LEDGER) -> dict[str, Scenario]:
    """The scenarios of the ledger that CI explores, by name."""
    a, b, c = (LedgerScripts(protocol, name) for name in "ABC")
    made: list[Scenario] = []

    def add(name: str, *actors: Actor, crashes: int = 1, losses: int = 1, list_pages: int = 1) -> None:
        made.append(Scenario(name, actors, LEDGER_PROMISES, crashes, losses, list_pages))

    add("admission meets close", a.actor(a.begin("c"), a.record("c", begun=0)), b.actor(b.close(), b.close("2")))
    add("two admissions meet close", a.actor(a.begin("c")), b.actor(b.begin("d")), c.actor(c.close()), losses=0)
    add("two closes meet an admission", a.actor(a.begin("c")), b.actor(b.close()), c.actor(c.close()), losses=0)
    add("paged close", a.actor(a.begin("c"), a.begin("d")), b.actor(b.close()), list_pages=2)
    add("record meets manifest", a.actor(a.record("c"), a.record("c")), b.actor(b.manifest(), b.manifest()))
    add("conflicting rows", a.actor(a.record("c", "a")), b.actor(b.record("c", "b"), b.manifest()))
    add("refusal meets record", a.actor(a.begin("c"), a.refuse("c")), b.actor(b.record("c"), b.close()), losses=0)
    add("record meets retire", a.actor(a.begin("c"), a.record("c", begun=0)), b.actor(b.retire()))
    add("failure meets retire", a.actor(a.failure("c"), a.manifest()), b.actor(b.retire()))
    add("close meets retire", a.actor(a.begin("c")), b.actor(b.close()), c.actor(c.retire()), losses=0)
    add("two retires", a.actor(a.record("c")), b.actor(b.retire()), c.actor(c.retire(), c.manifest()), losses=0)
    return {scenario.name: scenario for scenario in made}
