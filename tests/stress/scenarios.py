"""The three runs: load, a server that is killed, a process that is killed.

The rule of this module: sizes are arguments, everything else about a run is fixed here, so that the small form in CI
and the full form by hand are the same run.
"""

from __future__ import annotations

import json
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from s3capture import invariants
from s3capture.local import EmbeddedServer
from stress import duel
from stress.gate import gate
from stress.plan import Load
from stress.run import Report, all_ended, conclude, run_load, wait_until, workers

# What a caller may wait beyond the deadline of its operation: nothing of it is the package's, all is for busy cores.
GRACE_S = 10.0


@contextmanager
def _settings(server: EmbeddedServer, **more: Any) -> Iterator[dict[str, Any]]:
    """Settings of a fresh bucket and a fresh spill directory."""
    bucket = f"stress-{uuid.uuid4().hex[:16]}"
    server.make_bucket(bucket)
    with tempfile.TemporaryDirectory(prefix="stress-spill-") as spill:
        Path(spill).chmod(0o700)
        yield {
            "url": f"s3://{bucket}/stress",
            "run": "run-1",
            "endpoint_url": server.endpoint_url,
            "spill_dir": spill,
            **more,
        }


def load(server: EmbeddedServer, seed: int, *, calls: int) -> Report:
    """8 processes of 50 writers against 2 processes that freeze, drop and retire behind them."""
    with _settings(server, max_concurrency=4, op_timeout_s=60.0, read_timeout_s=30.0, mark_timeout_s=60.0) as settings:
        return run_load(server, Load(seed=seed, settings=settings, rollouts=max(1, calls // 20)))


def server_kills(server: EmbeddedServer, seed: int, *, calls: int, kills: int = 5) -> Report:
    """3 processes of 50 writers and 1 consumer; the server is killed and restarted ``kills`` times, behind a gate."""
    patience = {"op_timeout_s": 4.0, "read_timeout_s": 3.0, "connect_timeout_s": 1.0, "mark_timeout_s": 1.5}
    bounds = dict.fromkeys(("begin", "put", "refuse", "freeze", "drop"), patience["op_timeout_s"] + GRACE_S) | {
        "mark": patience["mark_timeout_s"] + GRACE_S
    }
    with gate(server.endpoint_url) as door, _settings(server, max_concurrency=8, **patience) as settings:
        settings["endpoint_url"] = door.endpoint_url
        size = Load(
            seed=seed,
            settings=settings,
            writers=3,
            consumers=1,
            rollouts=max(1, calls // 20),
            # A conflict reported by nobody, since the store went away, may lack its mark in the lineage.
            conflicts=False,
        )
        return run_load(server, size, kills=kills, gate=door, bounds=bounds)


def duels(server: EmbeddedServer, seed: int, *, rollouts: int, limit_s: float = 900.0) -> Report:
    """Rounds of two processes on five rollouts, one of which is killed; both cores fight rounds of their own."""
    rounds = max(2, rollouts // duel.ROLLOUTS)
    halves = ((0, rounds // 2), (rounds // 2, rounds))
    started = time.monotonic()
    with _settings(server, max_concurrency=8) as settings, tempfile.TemporaryDirectory(prefix="duel-") as folder:
        arguments = [folder, str(seed)]
        commands = [["stress.duel", *arguments, str(a), str(b), json.dumps(settings)] for a, b in halves]
        with workers(commands, server.environment(), stdout=subprocess.PIPE) as running:
            wait_until(lambda: all_ended(running), limit_s, "the last round is over")
            printed = [process.communicate()[0] for process in running]
        names = [name for number in range(rounds) for name in duel.names(seed, number)]
        # A conflict whose writer was killed may lack its mark in the lineage: no more is asked than holds always.
        report = conclude(seed, settings, names, Path(folder), rules=invariants.ALWAYS)
    report.seconds, report.deaths = time.monotonic() - started, sum(int(line) for line in printed)
    return report
