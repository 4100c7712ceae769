"""What import-gym and export-gym cost: requests, seconds and memory, on a made capture directory.

    python tests/benchmarks/gym_directories.py [--rollouts 300] [--calls 20] [--tokens 300]

Writes a capture directory of that size, starts a SeaweedFS of its own, and runs each command in a process of its own
(counted_cli.py). Seconds are of this machine, where server and command share the processors; requests are not. The exit
status is 1 when a command failed or needed more than 500 MB.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent.parent)]

from captures import entry  # noqa: E402 - the makers of the tests are beside us, and no package
from gymdirs import GymDirectory  # noqa: E402

from s3capture.local import EmbeddedServer  # noqa: E402
from s3capture.records import TokenEntry, stamp_lineage  # noqa: E402

MOST_BYTES = 500_000_000


def make(root: Path, rollouts: int, calls: int, tokens: int) -> None:
    """Write a directory; every second rollout is frozen, and half of the tokens of a call are generated."""
    directory, chance = GymDirectory(root), random.Random(7)
    for number in range(rollouts):
        records = [_record(f"{number}-0", f"call-{number}-{call:04d}", tokens // 2, chance) for call in range(calls)]
        intents = [record.model_call_id for record in records]
        directory.rollout(f"{number}-0", records, intents=intents, frozen=number % 2 == 0)


def _record(rollout: str, call: str, count: int, chance: random.Random) -> TokenEntry:
    made = entry(
        call,
        rollout,
        prompt_token_ids=[chance.randrange(150_000) for _ in range(count)],
        generation_token_ids=[chance.randrange(150_000) for _ in range(count)],
        generation_log_probs=[-chance.random() for _ in range(count)],
        continuation_fingerprint=hashlib.sha256(call.encode()).hexdigest(),
        continuation_context_digest="0" * 64,
        fingerprint_version=2,
    )
    return stamp_lineage(made, None)


def main() -> int:
    """Run it all and print one line for each command."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rollouts", 300), ("calls", 20), ("tokens", 300)):
        options.add_argument(f"--{name}", type=int, default=default)
    given = options.parse_args()
    sound = True
    with tempfile.TemporaryDirectory() as scratch, EmbeddedServer() as server:
        place = Path(scratch)
        make(place / "captures", given.rollouts, given.calls, given.tokens)
        size = sum(path.stat().st_size for path in (place / "captures").iterdir())
        _say(f"{given.rollouts:,} rollouts of {given.calls} calls of {given.tokens} tokens, {size / 1e6:.0f} MB")
        server.make_bucket("gym-directories")
        where = ["s3://gym-directories/p", "--run", "r", "--endpoint-url", server.endpoint_url]
        imported = ["import-gym", str(place / "captures"), *where]
        commands = {
            "check only": [*imported, "--dry-run"],
            "import": imported,
            "import again": imported,
            "export": ["export-gym", where[0], str(place / "back"), *where[1:]],
        }
        for name, command in commands.items():
            sound &= _run(name, command, place / "facts.json", server.environment(), given.rollouts * given.calls)
    return 0 if sound else 1


def _run(name: str, command: list[str], facts: Path, environment: dict[str, str], calls: int) -> bool:
    start = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(HERE / "counted_cli.py"), str(facts), *command],
        env={**os.environ, **environment, "PYTHONPATH": str(HERE.parent.parent)},
        stdout=subprocess.DEVNULL,
        check=False,
    )
    seconds, told = time.monotonic() - start, json.loads(facts.read_text())
    requests, peak = sum(told["requests"].values()), told["peak_bytes"]
    _say(
        f"{name:<13} {seconds:6.1f} s, {told['cpu_s']:6.1f} s of processor, {requests:,} requests "
        f"({requests / calls:.1f} a call), {peak / 1e6:.0f} MB"
    )
    return done.returncode == 0 and peak <= MOST_BYTES


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
