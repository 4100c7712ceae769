"""Which zstd level suits stored records: sizes and times of the levels on real records and on random ids.

    python tests/benchmarks/codec_levels.py records.jsonl[.gz] [--repeats 5] [--limit 200]

Each line of the file is one record as JSON with at least ``prompt_token_ids``, ``generation_token_ids`` and
``generation_log_probs``. A line with ``prompt_suffix_ids`` instead is a delta on its ``parent_call_id`` (its prompt is
the parent's prompt and generation, then the suffix) and is measured in both forms, whole and as a delta.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import zstandard

from s3capture import codec
from s3capture.records import TokenEntry

LEVELS = (-5, -1, 1, 2, 3, 4, 5, 6, 7, 9)
_RANDOM = 50
_KEPT = ("model", "output_items", "token_item_index", "response_id", "created_at")


def records(path: Path) -> Iterator[tuple[str, TokenEntry]]:
    """Yield ``(form, record)``, form being "whole" or "delta"."""
    sequences: dict[str, list[int]] = {}
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        for line in lines:
            row = json.loads(line)
            kept = {name: row[name] for name in _KEPT if row.get(name) is not None}
            ids = {"rollout_id": row["rollout_id"], "model_call_id": row["model_call_id"]}
            generated = {name: row[name] for name in ("generation_token_ids", "generation_log_probs")}
            suffix, parent = row.get("prompt_suffix_ids"), row.get("parent_call_id")
            before = sequences.get(parent, [])
            prompt = row["prompt_token_ids"] if suffix is None else before + suffix
            sequences[row["model_call_id"]] = prompt + row["generation_token_ids"]
            yield "whole", TokenEntry(prompt_token_ids=prompt, **ids, **generated, **kept)
            if suffix is not None and parent is not None:
                resolved = {"parent_call_id": parent, "parent_resolution": "resolved", "prompt_is_delta": True}
                yield "delta", TokenEntry(prompt_token_ids=suffix, **ids, **generated, **kept, **resolved)


def random_records(draw: random.Random) -> Iterator[TokenEntry]:
    """Records whose ids have no structure at all: the worst case."""
    for number in range(_RANDOM):
        generated = draw.choices(range(130_000), k=200)
        yield TokenEntry(
            rollout_id="random",
            model_call_id=f"{number:032x}",
            prompt_token_ids=draw.choices(range(130_000), k=8000),
            generation_token_ids=generated,
            generation_log_probs=[-draw.expovariate(2.0) for _ in generated],
        )


def measure(payloads: list[bytes], level: int, repeats: int) -> tuple[int, float, float]:
    """Return total bytes, and seconds to compress and to decompress all payloads: medians of ``repeats``."""
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=True, write_content_size=True)
    decompressor = zstandard.ZstdDecompressor()
    frames = [compressor.compress(payload) for payload in payloads]
    pack = _median(lambda: [compressor.compress(payload) for payload in payloads], repeats)
    unpack = _median(lambda: [decompressor.decompress(frame) for frame in frames], repeats)
    return sum(map(len, frames)), pack, unpack


def _median(work: Callable[[], Any], repeats: int) -> float:
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def main() -> None:
    """Print one table for each kind of record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("records", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--limit", type=int, default=200, help="at most so many records of each form")
    given = parser.parse_args()
    of_form: dict[str, list[bytes]] = {"whole": [], "delta": []}
    for form, record in records(given.records):
        if len(of_form[form]) < given.limit:
            of_form[form].append(codec.canonical(record.model_dump()).data)
    of_form["random"] = [codec.canonical(record.model_dump()).data for record in random_records(random.Random(1))]
    for form, payloads in of_form.items():
        if not payloads:
            continue
        plain = sum(map(len, payloads))
        base = measure(payloads, codec.LEVEL, given.repeats)
        middle = statistics.median(map(len, payloads))
        write = sys.stdout.write
        write(f"\n{form}: {len(payloads)} records, {plain:,} bytes of JSON, median {middle:,.0f}\n")
        write(" level       bytes  of JSON  of now  pack MB/s  ms each  unpack MB/s\n")
        for level in LEVELS:
            size, pack, unpack = measure(payloads, level, given.repeats)
            speeds = f"{plain / pack / 1e6:>10.0f} {pack / len(payloads) * 1e3:>8.2f} {plain / unpack / 1e6:>12.0f}"
            now = "*" if level == codec.LEVEL else " "
            write(f"{level:>5}{now} {size:>11,} {size / plain:>8.3f} {size / base[0]:>7.3f} {speeds}\n")


if __name__ == "__main__":
    main()
