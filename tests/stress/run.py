"""A whole run: start the workers, disturb them, wait for their end, take the last snapshots, and call the judge.

The rule of this module: a run ends, with a report or an error; every process it started is gone then.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import s3capture
from s3capture import codec, invariants
from s3capture.keys import Kind, RunKeys, parse
from s3capture.local import EmbeddedServer
from s3capture.settings import Settings
from s3capture.spill import Spill
from s3capture.store.boto import BotoStore
from stress import history, judge
from stress.gate import Gate
from stress.history import Event, Log, Tail
from stress.plan import Load
from stress.worker import Actor

# A worker finds this package and the s3capture under test wherever its parent found them.
_PATH = os.pathsep.join(str(Path(str(file)).resolve().parent.parent) for file in (__file__, s3capture.__file__))
_POLL_S = 0.05
# What the judge reads back at the end; of the other objects the key says it all.
_READ = (Kind.CALL, Kind.MARK, Kind.FROZEN, Kind.DROP)


class RunError(Exception):
    """The run did not come to its end by itself, or a worker crashed."""


@dataclass(slots=True)
class Report:
    """What happened, in numbers, and what should not have."""

    seconds: float = 0.0
    breaches: list[str] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    # Of each rollout with a breach: its operations and what lies in the bucket. The server is gone when one reads it.
    evidence: list[str] = field(default_factory=list)
    spilled_late: int = 0
    deaths: int = 0

    def count(self, op: str) -> Counter[str]:
        """How the operations of one kind ended; "ok" or the error."""
        return Counter(event.error or "ok" for event in self.events if event.op == op)

    def lines(self) -> Iterator[str]:
        """The report for a person."""
        writes = sum(event.op in ("begin", "put", "refuse", "mark") for event in self.events)
        yield f"{len(self.events)} operations, {writes} of them writes, in {self.seconds:.1f} s"
        for op in dict.fromkeys(event.op for event in self.events):
            ended = ", ".join(f"{count} {how}" for how, count in sorted(self.count(op).items()))
            taken = sorted(e.seconds for e in self.events if e.op == op and e.error != history.UNFINISHED)
            if taken:
                yield f"  {op}: {ended}; median {taken[len(taken) // 2] * 1000:.0f} ms, longest {taken[-1]:.2f} s"
        dropped = sum(event.acked and event.result["dropped"] for event in self.events if event.op == "drop")
        yield f"  drops granted: {dropped}; late spilled marks: {self.spilled_late}; processes killed: {self.deaths}"
        yield f"  breaches: {len(self.breaches)}"
        yield from (f"    {breach}" for breach in self.breaches[:20])
        yield from (f"    {line}" for line in self.evidence[:400])


@contextmanager
def workers(
    commands: Sequence[Sequence[str]], env: dict[str, str], *, stdout: int | None = None
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start ``python -m <command>`` for each command; whoever is left at the end is killed."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            argv = [sys.executable, "-m", *command]
            running.append(subprocess.Popen(argv, env={**os.environ, **env, "PYTHONPATH": _PATH}, stdout=stdout))
        yield running
    finally:
        for process in running:
            process.kill()
            process.wait()


def all_ended(running: Sequence[subprocess.Popen[bytes]]) -> bool:
    """Whether every worker is done; ``RunError`` as soon as one has crashed, since others may wait for its log."""
    for process in running:
        if process.poll() not in (None, 0):
            raise RunError(f"a worker crashed (status {process.returncode}): {process.args!r:.200}; see its stderr")
    return all(process.poll() == 0 for process in running)


def wait_until(condition: Callable[[], bool], limit_s: float, what: str) -> None:
    """Poll until ``condition`` holds; ``RunError`` after ``limit_s``, which is there for hangs alone."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise RunError(f"after {limit_s:.0f} s still waiting until {what}")
        time.sleep(_POLL_S)


def run_load(
    server: EmbeddedServer,
    load: Load,
    *,
    kills: int = 0,
    gate: Gate | None = None,
    bounds: dict[str, float] | None = None,
    limit_s: float = 600.0,
) -> Report:
    """Run writers and consumers on ``server``; SIGKILL and restart it ``kills`` times on the way, behind ``gate``."""
    commands = [
        ["stress.worker", role, str(number)]
        for role, count in (("writer", load.writers), ("consumer", load.consumers))
        for number in range(count)
    ]
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="stress-") as name:
        folder = Path(name)
        with workers([[*c, name, load.to_json()] for c in commands], server.environment()) as running:
            if kills and gate is not None:
                _Disturbance(load, folder, running, limit_s).run(server, gate, kills)
            wait_until(lambda: all_ended(running), limit_s, "the workers have ended")
        allowed = judge.UNAVAILABLE if kills else frozenset[str]()
        report = conclude(load.seed, load.settings, load.names, folder, allowed=allowed, bounds=bounds or {})
    report.seconds = time.monotonic() - started
    return report


SETTLING_S = 2.0
"""How long a started server gets no traffic: twice what tests/benchmarks/start_window.py has seen go wrong."""


class _Disturbance:
    """Kills the server at equal parts of the work and restarts it once a caller has noticed."""

    def __init__(self, load: Load, folder: Path, running: list[subprocess.Popen[bytes]], limit_s: float) -> None:
        self._tail = Tail(folder, "writer-*.log")
        self._load, self._running, self._limit_s = load, running, limit_s
        self._ended = 0
        # The marks begun since the last kill: the answer to one of them is a mark in the spill.
        self._marks: set[tuple[str, int]] = set()

    def run(self, server: EmbeddedServer, gate: Gate, kills: int) -> None:
        """Leave the server down until the first operation failed or, every other time, the first mark was taken."""
        for kill in range(kills):
            due = self._load.rollouts * self._load.calls * (kill + 1) / (kills + 1)
            self._wait(partial(self._reached, due), "the next kill is due")
            server.kill()
            gate.shut()
            self._reached(due)
            self._marks.clear()
            self._wait(self._failure if kill % 2 == 0 else self._spilled, "a caller noticed that the server is away")
            server.restart()
            # No condition tells when a started SeaweedFS has settled: see gate.py.
            time.sleep(SETTLING_S)
            gate.open()

    def _wait(self, condition: Callable[[], bool], what: str) -> None:
        wait_until(lambda: condition() or all_ended(self._running), self._limit_s, what)

    def _reached(self, due: float) -> bool:
        self._ended += sum("end" in row for row in self._tail.new())
        return self._ended >= due

    def _failure(self) -> bool:
        return any(row.get("error") in judge.UNAVAILABLE for row in self._tail.new())

    def _spilled(self) -> bool:
        rows = self._tail.new()
        self._marks |= {(row["actor"], row["n"]) for row in rows if row.get("op") == "mark"}
        return any("end" in row and not row["error"] and (row["actor"], row["n"]) in self._marks for row in rows)


def conclude(
    seed: int,
    settings: dict[str, Any],
    names: Sequence[str],
    folder: Path,
    *,
    allowed: frozenset[str] = frozenset(),
    bounds: dict[str, float] | None = None,
    rules: Iterable[invariants.RolloutInvariant] = invariants.WHEN_QUIET,
) -> Report:
    """Freeze what can still be frozen, read the bucket, and judge it all; the server must answer again."""
    asyncio.run(_freeze_all(folder, seed, {**settings, "op_timeout_s": 60.0, "read_timeout_s": 20.0}, names))
    events = history.read(folder)
    keys, objects = read_bucket(Settings.of(**settings))
    late = [mark for mark, _ in Spill(Settings.of(**settings).spill_path).late()]
    report = Report(events=events, spilled_late=len(late))
    by_rollout: dict[str, list[Event]] = {name: [] for name in names}
    for event in events:
        by_rollout[event.rollout].append(event)
    for name, of_rollout in by_rollout.items():
        found = invariants.contents(keys.rollout(name), objects)
        story = judge.Story(
            seed=seed,
            rollout=name,
            events=tuple(of_rollout),
            marks=judge.marks_in(found),
            late=frozenset(mark.call for mark in late if mark.rollout == name),
            allowed=allowed,
            bounds=bounds or {},
        )
        broken = judge.breaches(story) + judge.unsound(found, rules)
        report.breaches += broken
        if broken:
            report.evidence += _evidence(found, of_rollout)
    return report


def _evidence(found: invariants.Contents, events: Sequence[Event]) -> Iterator[str]:
    """What happened to a rollout, and what each object of it is: an acknowledged entry may turn out to be a seal."""
    yield f"evidence of {found.keys.rollout_id!r}, times in seconds from its first operation:"
    origin = events[0].start
    for event in events:
        said = {name: value for name, value in event.result.items() if name != "entries"} or event.text
        yield f"  {event.start - origin:.3f} to {event.end - origin:.3f} {event}: {event.error or 'ok'} {said}"
    for row in found.seen.objects:
        body = found.objects[row.key]
        stored = codec.decode(row.key, body) if body else None
        what = f"{stored.kind}, by {stored.header.get('by') or stored.payload[:200]!r}" if stored else "not read"
        yield f"  {row.key.removeprefix(found.keys.base)}: {what}"


async def _freeze_all(folder: Path, seed: int, settings: dict[str, Any], names: Sequence[str]) -> None:
    actor = Actor(Log(folder, "final"), seed, settings)
    done = await asyncio.gather(*(actor.freeze(name) for name in names))
    await actor.close()
    unanswered = [event for event in done if event.error not in ("", "TokenCaptureRetiredError")]
    if unanswered:
        raise RunError(f"the last {unanswered[0]} failed: {unanswered[0].text}")


def read_bucket(settings: Settings) -> tuple[RunKeys, dict[str, bytes]]:
    """Every key of the run, with the body where the judge reads it."""
    keys, store = RunKeys(settings.prefix, settings.run), BotoStore(settings)
    objects = {row.key: b"" for row in store.list(keys.root)}
    for key in objects:
        parsed = parse(keys.root, key)
        if parsed is not None and parsed.kind in _READ:
            objects[key] = store.get(key) or b""
    store.close()
    return keys, objects
