"""Whether a server that was just started lets two racing creates of one key both win, and for how long.

    python tests/benchmarks/start_window.py [--starts 16] [--delays 0 0.3 0.6 1 1.5] [--restart]

Each start is a SeaweedFS of its own. Some seconds after it is ready (a signed PUT and GET have worked), 72 keys are
created by two requests each, all patient: no client hangs up and nothing is sent twice. Two answers of 200 for one key
are two winners, and the object of one of them is gone.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

from botocore.exceptions import ClientError

from s3capture.local import EmbeddedServer
from s3capture.seaweed import connect

_KEYS, _BODY = 72, b"x" * 2500


def double_winners(delay: float, *, restart: bool) -> int:
    """Start a server, wait, race; return for how many keys both creates were answered with success."""
    with EmbeddedServer() as server, ExitStack() as stack:
        server.make_bucket("race")
        if restart:
            server.kill()
            server.restart()
        ready = time.monotonic()

        def client() -> Any:
            made = connect(server.endpoint_url, server.access_key, server.secret_key, read_timeout_s=60.0)
            return stack.enter_context(closing(made))

        rivals = (client(), client())

        def create(key: str, rival: int) -> str | None:
            try:
                rivals[rival].put_object(Bucket="race", Key=key, Body=_BODY, IfNoneMatch="*")
            except ClientError:
                return None
            return key

        crowd = stack.enter_context(ThreadPoolExecutor(48))
        time.sleep(max(0.0, ready + delay - time.monotonic()))
        races = [crowd.submit(create, f"key-{number}", rival) for number in range(_KEYS) for rival in (0, 1)]
        won = Counter(race.result() for race in races)
    return sum(count > 1 for key, count in won.items() if key is not None)


def main() -> None:
    """Print one line for each delay."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=16)
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 0.3, 0.6, 1.0, 1.5])
    parser.add_argument("--restart", action="store_true", help="kill and restart the server before the race")
    given = parser.parse_args()
    for delay in given.delays:
        found = [double_winners(delay, restart=given.restart) for _ in range(given.starts)]
        bad = sum(count > 0 for count in found)
        sys.stdout.write(
            f"{delay:.1f} s after ready: two winners in {bad} of {given.starts} starts, {sum(found)} keys\n"
        )
        sys.stdout.flush()


if __name__ == "__main__":
    main()
