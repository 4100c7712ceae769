"""Two processes on the same rollouts, one of which is killed in the middle of a request.

The rule of this module: where the victim dies is drawn by the seed, as the number of a wire request and the moment
around it: before it is sent, in its flight, or after its answer; so every step of every operation gets its turn, at
the speed of the machine. The other process lives on, and once the victim is dead it must be able to freeze and to drop
every rollout, whatever was left half done.

    python -m stress.duel FOLDER SEED FIRST LAST SETTINGS
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from s3capture.effects import ObjectInfo
from s3capture.settings import Settings
from s3capture.store.boto import BotoStore
from stress.history import Log
from stress.worker import Actor

_T = TypeVar("_T")

ROLLOUTS = 5
_CALLS = ("a-put", "b-put", "c-put", "d-conflict")
_MOMENTS = ("before", "flight", "after")


def names(seed: int, round_: int) -> list[str]:
    """The rollouts of one round."""
    return [f"duel-{seed}-{round_}-{index}" for index in range(ROLLOUTS)]


@dataclass(slots=True)
class DyingStore:
    """A store whose process is killed at its ``last`` request."""

    inner: BotoStore
    last: int
    moment: str
    flight_s: float
    _lock: threading.Lock
    _count: int = 0

    def create(self, key: str, body: bytes) -> bool:
        return self._one(lambda: self.inner.create(key, body))

    def get(self, key: str) -> bytes | None:
        return self._one(lambda: self.inner.get(key))

    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        return self._one(lambda: self.inner.list(prefix))

    def list_folders(self, prefix: str) -> Sequence[str]:
        return self._one(lambda: self.inner.list_folders(prefix))

    def delete(self, keys: Sequence[str]) -> dict[str, str]:
        return self._one(lambda: self.inner.delete(keys))

    def describe(self) -> str:
        return self.inner.describe()

    def close(self) -> None:
        self.inner.close()

    def _one(self, request: Callable[[], _T]) -> _T:
        with self._lock:
            self._count += 1
            mine = self._count == self.last
        if not mine:
            return request()
        if self.moment == "before":
            _die()
        elif self.moment == "flight":
            threading.Timer(self.flight_s, _die).start()
        answer = request()
        _die()
        return answer


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


async def _act(actor: Actor, rollouts: Sequence[str], draw: random.Random, tasks: int) -> None:
    """Do a random selection of all there is to do with each rollout, in random order."""
    todo: list[tuple[str, str, str]] = []
    for rollout in rollouts:
        for call in _CALLS:
            steps = draw.choice((["begin", "put"], ["begin", "put"], ["put"], ["begin"], ["begin", "refuse"], []))
            todo += [(rollout, step, call) for step in steps]
        todo += [(rollout, "freeze", "")] * draw.choice((0, 1, 1)) + [(rollout, "mark", "m")] * draw.choice((0, 0, 1))
        todo += [(rollout, "drop", "")] * draw.choice((0, 1)) + [(rollout, "retire", "")] * (draw.random() < 0.1)
    # In random order over all rollouts; the sort is stable, so the steps of one call stay in their order.
    rank: dict[tuple[str, str], float] = {}
    todo.sort(key=lambda item: rank.setdefault((item[0], item[2] or item[1]), draw.random()))
    waiting = iter([(step, draw.randrange(2)) for step in todo])

    async def one() -> None:
        for (rollout, step, call), variant in waiting:
            await _step(actor, rollout, step, call, variant)

    await asyncio.gather(*(one() for _ in range(tasks)))


async def _step(actor: Actor, rollout: str, step: str, call: str, variant: int) -> None:
    match step:
        case "begin":
            await actor.begin(rollout, call)
        case "put":
            await actor.put(rollout, call, variant if call.endswith("conflict") else 0)
        case "refuse":
            await actor.refuse(rollout, call)
        case "mark":
            await actor.mark(rollout, f"{call}-{actor.log.actor}")
        case "freeze":
            await actor.freeze(rollout)
        case "drop":
            frozen = await actor.freeze(rollout)
            if frozen.acked:
                # A mark at the same moment: either the drop sees it and says no, or the mark is refused.
                beside = [actor.mark(rollout, f"beside-{actor.log.actor}")] if variant else []
                await asyncio.gather(actor.drop(rollout, frozen.result), *beside)
        case "retire":
            await actor.retire(rollout)


async def victim(folder: Path, seed: int, round_: int, settings: dict[str, Any]) -> None:
    """Act until killed; with luck the work is over before."""
    draw = random.Random(f"{seed}/{round_}/victim")
    store = DyingStore(
        BotoStore(Settings.of(**settings)),
        last=draw.randint(3, 110),
        moment=draw.choice(_MOMENTS),
        flight_s=draw.random() * 0.004,
        _lock=threading.Lock(),
    )
    actor = Actor(Log(folder, f"victim-{round_}"), seed, settings, store=store)
    await _act(actor, names(seed, round_), draw, tasks=draw.choice((1, 4)))


async def survivor(folder: Path, seed: int, round_: int, settings: dict[str, Any], victim_ended: int) -> None:
    """Act beside the victim; when it is gone, freeze and drop every rollout."""
    draw = random.Random(f"{seed}/{round_}/survivor")
    actor = Actor(Log(folder, f"survivor-{round_}"), seed, settings)
    await _act(actor, names(seed, round_), draw, tasks=draw.choice((1, 4)))
    await asyncio.to_thread(os.read, victim_ended, 1)  # returns when the kernel closed the victim's end
    for rollout in names(seed, round_):
        frozen = await actor.freeze(rollout)
        if frozen.acked and draw.random() < 0.5:
            await actor.drop(rollout, frozen.result)
    await actor.close()


def fight(folder: Path, seed: int, round_: int, settings: dict[str, Any]) -> bool:
    """One round; return whether the victim was killed. Raise ``SystemExit`` when the survivor crashed."""
    mine, victims = os.pipe()
    killed = os.fork()
    if killed == 0:
        os.close(mine)
        _in_child(victim(folder, seed, round_, settings))
    os.close(victims)
    living = os.fork()
    if living == 0:
        _in_child(survivor(folder, seed, round_, settings, mine))
    os.close(mine)
    how = os.waitstatus_to_exitcode(os.waitpid(killed, 0)[1])
    status = os.waitstatus_to_exitcode(os.waitpid(living, 0)[1])
    if status != 0 or how not in (0, -signal.SIGKILL):
        raise SystemExit(f"round {round_}: the survivor ended with {status}, the victim with {how}")
    return how != 0


def _in_child(work: Any) -> None:
    status = 1
    try:
        asyncio.run(work)
        status = 0
    except BaseException:  # noqa: BLE001 - a fork must never run on in its parent's code
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


if __name__ == "__main__":
    where, which, first, last, given = sys.argv[1:]
    deaths = sum(fight(Path(where), int(which), number, json.loads(given)) for number in range(int(first), int(last)))
    sys.stdout.write(f"{deaths}\n")
