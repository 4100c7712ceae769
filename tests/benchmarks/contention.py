"""What it costs when many processes create one key at the same moment.

    python tests/benchmarks/contention.py [--processes 2 4 8 16] [--rounds 20]

All processes wait for the same instant, then create the same new key; exactly one may win. The times of the losers say
what ``read_timeout_s`` must allow, since a loser that gives up earlier does not know whether it won.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from multiprocessing.synchronize import Barrier
from typing import Any

from s3capture.local import EmbeddedServer
from s3capture.settings import Settings
from s3capture.store.boto import BotoStore


def contend(barrier: Barrier, results: Any, settings: dict[str, Any], rounds: int) -> None:
    """One process: create the key of each round as soon as everyone is ready."""
    store = BotoStore(Settings.of(**settings))
    store.list("warm-up")
    for number in range(rounds):
        barrier.wait(120)
        start = time.perf_counter()
        won = store.create(f"contended/{number}", str(os.getpid()).encode())
        results.put((number, won, time.perf_counter() - start))
    store.close()


def main() -> int:
    """Print one line for each number of processes; the exit status is 1 when a round had not exactly one winner."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    context = multiprocessing.get_context("spawn")
    wrong = 0
    sys.stdout.write(f"{'processes':>9} {'winner p50':>11} {'loser p50':>10} {'loser p95':>10} {'longest':>8} (ms)\n")
    with EmbeddedServer() as server:
        os.environ.update(server.environment())
        for count in given.processes:
            bucket = f"contention-{count}"
            server.make_bucket(bucket)
            where = {"url": f"s3://{bucket}/p", "run": "r", "endpoint_url": server.endpoint_url}
            barrier, results = context.Barrier(count), context.Queue()
            arguments = (barrier, results, {**where, "read_timeout_s": 60.0}, given.rounds)
            crowd = [context.Process(target=contend, args=arguments) for _ in range(count)]
            for process in crowd:
                process.start()
            rows = [results.get(timeout=300) for _ in range(count * given.rounds)]
            for process in crowd:
                process.join()
            winners = sorted(seconds * 1000 for _, won, seconds in rows if won)
            losers = sorted(seconds * 1000 for _, won, seconds in rows if not won)
            wrong += sorted(number for number, won, _ in rows if won) != [*range(given.rounds)]
            sys.stdout.write(
                f"{count:>9} {winners[len(winners) // 2]:>11.0f} {losers[len(losers) // 2]:>10.0f}"
                f" {losers[int(len(losers) * 0.95)]:>10.0f} {max(losers[-1], winners[-1]):>8.0f}\n"
            )
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
