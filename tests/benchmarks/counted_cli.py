"""The command line, with its requests and memory counted.

    python tests/benchmarks/counted_cli.py FACTS.json COMMAND [OPTIONS]

Runs ``s3capture COMMAND`` in this process and leaves in FACTS.json how many requests of each operation went out (by
the name that S3 gives it, every attempt and every page), the seconds of processor time, and the most memory that the
process held. The exit status is the command's own.
"""

from __future__ import annotations

import json
import re
import resource
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from s3capture.cli import main
from s3capture.store import boto_client


def counting() -> Counter[str]:
    """Return a counter of the requests of every client that is made from now on."""
    requests = Counter[str]()
    make = boto_client.make_client

    def make_counting(settings: Any) -> Any:
        client = make(settings)
        client.meta.events.register("before-send.s3", count)
        return client

    def count(event_name: str, **_: Any) -> None:
        requests[event_name.rpartition(".")[2]] += 1

    boto_client.make_client = make_counting
    return requests


def peak_bytes() -> int:
    """The most memory that this process held, in bytes."""
    # Not ru_maxrss where it can be helped: Linux counts what the parent held when it forked.
    try:
        status = Path("/proc/self/status").read_text("ascii")
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return int(re.findall(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)[0]) * 1024


def run(facts: Path, arguments: list[str]) -> int:
    """Run one command and write down its facts."""
    requests = counting()
    status = main(arguments)
    used = resource.getrusage(resource.RUSAGE_SELF)
    told = {"status": status, "requests": requests, "cpu_s": used.ru_utime + used.ru_stime, "peak_bytes": peak_bytes()}
    facts.write_text(json.dumps(told))
    return status


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
