"""Run the load, the server kills, and the duels at any size, on a SeaweedFS of its own.

python -m tests.stress --seeds 3 --calls 5000
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from s3capture.local import EmbeddedServer
from stress import scenarios  # importable under this name only now
from stress.run import Report


def main() -> int:
    """Print a report for each run; the exit status is 1 when any promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds (default: 3)")
    parser.add_argument("--first-seed", type=int, default=1)
    parser.add_argument("--calls", type=int, default=5000, help="calls in a load run (default: 5000)")
    parser.add_argument("--duels", type=int, default=100, help="rollouts in a run of duels (default: 100)")
    parser.add_argument("--only", choices=("load", "kills", "duels"), help="one scenario instead of all")
    given = parser.parse_args()
    runs: dict[str, Callable[[EmbeddedServer, int], Report]] = {
        "load": lambda server, seed: scenarios.load(server, seed, calls=given.calls),
        "kills": lambda server, seed: scenarios.server_kills(server, seed, calls=given.calls // 4),
        "duels": lambda server, seed: scenarios.duels(server, seed, rollouts=given.duels),
    }
    broken = False
    for name, run in runs.items():
        if given.only not in (None, name):
            continue
        for seed in range(given.first_seed, given.first_seed + given.seeds):
            with EmbeddedServer() as server:
                os.environ.update(server.environment())
                report = run(server, seed)
            broken = broken or bool(report.breaches)
            sys.stdout.write(f"{name}, seed {seed}: " + "\n".join(report.lines()) + "\n")
            sys.stdout.flush()
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
