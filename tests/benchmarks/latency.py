"""How long each operation takes, what it requests, and how that compares with bare boto3 PUTs of the same bytes.

    python tests/benchmarks/latency.py [--calls 300] [--tasks 1] [--tokens 2000] [--endpoint-url URL --url s3://bucket/p]

Without an endpoint it starts a SeaweedFS of its own. The bare PUTs alternate with the operations in the same run, on a
client made the same way, so that whatever else the machine does burdens both.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from s3capture import S3TokenSink, S3TokenSource
from s3capture.keys import RunKeys
from s3capture.local import EmbeddedServer
from s3capture.protocol import bodies
from s3capture.records import TokenEntry
from s3capture.settings import Settings
from s3capture.sink import entry_payload
from s3capture.stats import OpStats
from s3capture.store.boto_client import make_client

_CALLS_EACH = 10


@contextmanager
def target(endpoint_url: str | None, url: str | None) -> Iterator[dict[str, Any]]:
    """Settings of the bucket to measure."""
    with tempfile.TemporaryDirectory(prefix="latency-") as spill:
        common = {"run": f"latency-{uuid.uuid4().hex[:8]}", "spill_dir": f"{spill}/spill"}
        if url is not None:
            yield {"url": url, "endpoint_url": endpoint_url, **common}
            return
        with EmbeddedServer() as server:
            os.environ.update(server.environment())
            server.make_bucket("latency")
            yield {"url": "s3://latency/p", "endpoint_url": server.endpoint_url, **common}


def record(draw: random.Random, rollout: str, call: str, tokens: int) -> TokenEntry:
    """A record of ``tokens`` prompt tokens and a tenth as many generated ones."""
    generated = draw.choices(range(130_000), k=max(1, tokens // 10))
    return TokenEntry(
        rollout_id=rollout,
        model_call_id=call,
        prompt_token_ids=draw.choices(range(130_000), k=tokens),
        generation_token_ids=generated,
        generation_log_probs=[-draw.expovariate(2.0) for _ in generated],
        continuation_fingerprint=f"{draw.getrandbits(256):064x}",
    )


async def measure(
    settings: dict[str, Any], *, calls: int, tasks: int, tokens: int
) -> tuple[dict[str, OpStats], list[float]]:
    """Run the calls, ``tasks`` at a time; return the sink's own statistics and the seconds of the bare PUTs."""
    sink, source = S3TokenSink(**settings), S3TokenSource(**settings)
    checked = Settings.of(**settings)
    client = make_client(checked)
    bare: list[float] = []
    draw = random.Random(1)
    rollouts = [f"r{number}" for number in range(-(-calls // _CALLS_EACH))]
    waiting = iter([(rollout, f"{index:032x}") for rollout in rollouts for index in range(_CALLS_EACH)][:calls])

    def put_bare(body: bytes) -> None:
        start = time.perf_counter()
        client.put_object(Bucket=checked.bucket, Key=f"bare/{uuid.uuid4().hex}", Body=body)
        bare.append(time.perf_counter() - start)

    async def one() -> None:
        for rollout, call in waiting:
            entry = record(draw, rollout, call, tokens)
            keys = RunKeys(checked.prefix, checked.run).rollout(rollout)
            body = bodies.entry(keys, call, entry_payload(entry), fingerprint="", by="bench").body
            await sink.begin_call(rollout, call)
            await asyncio.to_thread(put_bare, body)
            await sink.put(entry)

    await sink.mark_incomplete("warm-up")  # the client, the check of the store, the first connections
    await asyncio.to_thread(put_bare, b"x")
    bare.clear()
    await asyncio.gather(*(one() for _ in range(tasks)))
    for rollout in rollouts:
        snapshot = await source.freeze(rollout)
        await source.drop(rollout, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        await sink.mark_incomplete(f"{rollout}-marked")
    stats = sink.stats()
    await sink.close()
    await source.close()
    return stats, bare


def percentile(seconds: Sequence[float], share: float) -> float:
    """Milliseconds below which ``share`` of the samples lie."""
    return sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))] * 1000


def main() -> None:
    """Print one line for each operation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--tasks", type=int, default=1, help="calls under way at once")
    parser.add_argument("--tokens", type=int, default=2000, help="prompt tokens of a record")
    parser.add_argument("--endpoint-url")
    parser.add_argument("--url")
    given = parser.parse_args()
    with target(given.endpoint_url, given.url) as settings:
        stats, bare = asyncio.run(measure(settings, calls=given.calls, tasks=given.tasks, tokens=given.tokens))
    base = percentile(bare, 0.5)
    sys.stdout.write("       operation  count   p50 ms   p95 ms   p99 ms  x bare trips requests\n")
    rows: list[tuple[str, int, Sequence[float], float, float]] = [("bare PUT", len(bare), bare, 1.0, 1.0)]
    rows += [(op, s.count, s.seconds, s.trips / s.count, s.requests / s.count) for op, s in stats.items()]
    for name, count, seconds, trips, requests in rows:
        p50, p95, p99 = (percentile(seconds, share) for share in (0.5, 0.95, 0.99))
        times = f"{p50:>8.1f} {p95:>8.1f} {p99:>8.1f} {p50 / base:>7.2f}"
        sys.stdout.write(f"{name:>16} {count:>6} {times} {trips:>5.1f} {requests:>8.1f}\n")


if __name__ == "__main__":
    main()
