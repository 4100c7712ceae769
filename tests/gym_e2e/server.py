"""Gym's processes as children of the test: the model server with its workers, and a collector.

The rule of this module: ready is what the server says, never a guess in seconds; and a server that died fails the test
with its own last words.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

from gym_env import GymPlace

_START_S = 240.0  # seconds on an idle machine; every worker imports all of Gym
_LOG_S = 30.0


def free_ports(count: int) -> list[int]:
    """Ports that are free now, all different."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class GymServer:
    """One model server with ``workers`` processes; use it as a context manager."""

    def __init__(self, gym: GymPlace, engine_url: str, log: Path, environment: dict[str, str], workers: int = 3):
        self.workers = workers
        self.port, head_port = free_ports(2)
        self._log_path = log
        arguments = [str(self.port), str(head_port), engine_url, str(workers)]
        self._command = [str(gym.python), "-m", "gym_e2e.launch", *arguments]
        self._environment = gym.environment(**environment)

    def __enter__(self) -> Self:
        with self._log_path.open("w") as log:
            self._process = subprocess.Popen(
                self._command,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._environment,
                cwd=self._log_path.parent,
                start_new_session=True,
            )
        try:
            ready = "Application startup complete"
            self.await_log(lambda log: log.count(ready) == self.workers, f"{self.workers} x {ready}", _START_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        # The process leads a session of its own, so that its group is exactly what it started.
        for how in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._process.pid, how)
            except ProcessLookupError:
                break
            try:
                self._process.wait(10)
            except subprocess.TimeoutExpired:
                continue
        self._process.wait()

    def log(self) -> str:
        """All that the server and its workers have said."""
        return self._log_path.read_text(errors="replace")

    def await_log(self, found: Callable[[str], bool], what: str, patience_s: float = _LOG_S) -> None:
        """Return when the log is as wanted; fail with its end when the server died or kept silent."""
        until = time.monotonic() + patience_s
        while not found(self.log()):
            died = self._process.poll() is not None
            if died or time.monotonic() > until:
                state = f"ended with {self._process.returncode}" if died else f"said nothing for {patience_s:g} s"
                raise AssertionError(f"waiting for {what}: the server {state}:\n{self.log()[-6000:]}")
            time.sleep(0.02)

    def await_hangup(self, rollout: str) -> None:
        """Return when the server has noticed that the client of a call in ``rollout`` disconnected."""
        pattern = re.compile(rf"/ng-rollout/{re.escape(rollout)}/\S+\" 499 CLIENT DISCONNECTED")
        self.await_log(lambda log: pattern.search(log) is not None, f"the hang-up in {rollout}")


class Collector:
    """A process that runs Gym's finalizer over an installed source of ours; use it as a context manager."""

    def __init__(self, gym: GymPlace, settings: dict[str, Any], log: Path) -> None:
        self._command = [str(gym.python), "-m", "gym_e2e.collect"]
        self._environment = gym.environment()
        self._settings = settings
        self._log_path = log

    def __enter__(self) -> Self:
        with self._log_path.open("w") as log:
            self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=self._environment,
                text=True,
            )
        self._say(self._settings)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Have one order done and return its answers."""
        self._say(order)
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        assert answer, f"the collector ended:\n{self._log_path.read_text()[-6000:]}"
        found: dict[str, Any] = json.loads(answer)
        return found

    def _say(self, order: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{json.dumps(order)}\n")
        self._process.stdin.flush()
