"""Audits of made-up rollouts, for what must hold at sizes that no test can capture.

The rule of this module: it makes the same objects that an audit yields, so that the page is built as it always is; a
seed decides all of it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from s3capture.audit import Finding, Kind, RolloutAudit, Totals
from s3capture.audit.page import PageData
from s3capture.effects import ObjectInfo
from s3capture.inspection import CallDetail, FenceDetail, MarkDetail, RolloutDetail, RolloutSummary, State
from s3capture.keys import RunKeys
from s3capture.reader import Reader
from s3capture.store.memory import MemoryStore
from s3capture.stored import StoredRollout

KEYS = RunKeys("exp", "large")
START = 1_790_000_000.0


def rollouts(number: int, calls: int, seed: int = 7) -> Iterator[RolloutAudit]:
    """Yield ``number`` rollouts of ``calls`` calls on average; one in nine has findings that fail."""
    rng = random.Random(seed)
    with Reader(MemoryStore()) as reader:
        for index in range(number):
            yield _rollout(rng, reader, index, max(1, round(rng.gauss(calls, calls / 3))), number)


def _rollout(rng: random.Random, reader: Reader, index: int, count: int, number: int) -> RolloutAudit:
    keys = KEYS.rollout(f"task-{index // 8}-{index % 8}")
    begun = START + 36_000 * index / number + rng.uniform(0, 300)
    state = rng.choices([*State], [6, 1, 30, 63])[0] if index > number * 0.9 else State.RETIRED
    calls, findings = [], []
    for step in range(count):
        at = begun + 20 * step + rng.uniform(0, 5)
        took = rng.lognormvariate(1.2, 0.8)
        # Mostly a chain, and now and then a branch.
        parent = None if step == 0 else f"call-{index}-{(step - 1 if rng.random() < 0.9 else rng.randrange(step)):03d}"
        calls.append(
            CallDetail(
                call=f"call-{index}-{step:03d}",
                kind="entry",
                digest=f"{rng.getrandbits(256):064x}",
                prompt_tokens=rng.randrange(50, 900) if step else rng.randrange(800, 6000),
                generated_tokens=rng.randrange(10, 700),
                prompt_is_delta=step > 0,
                parent_call=parent,
                created_at=at + took,
                by=f"host-{index % 16}:41",
                begun_at=at,
                begun_by=f"host-{index % 16}:41",
                in_snapshot=True,
                bytes=rng.randrange(900, 9000),
            )
        )
    marks: tuple[MarkDetail, ...] = ()
    odd = rng.random()
    if odd < 0.05:
        last = calls[-1]
        calls[-1] = CallDetail(call=last.call, kind="seal", parent_call=last.parent_call, begun_at=last.begun_at)
        findings.append(Finding(Kind.SEALED_CALL, f"call {last.call!r} was begun and had no outcome when it was sealed",
                                keys.rollout_id, last.call, at=last.begun_at))  # fmt: skip
    elif odd < 0.08:
        at = begun + 20 * count
        marks = (MarkDetail("m", calls[0].call, "host:1", at, "S3 was away", True),)
        findings.append(Finding(Kind.MARK, f"call {calls[0].call!r} was marked incomplete: S3 was away",
                                keys.rollout_id, calls[0].call, at=at))  # fmt: skip
    elif odd < 0.11:
        call = calls[rng.randrange(count)]
        details = {
            "stored": {"kind": "entry", "digest": call.digest, "by": call.by},
            "refused": {"kind": "entry", "digest": f"{rng.getrandbits(256):064x}", "by": "host-3:77"},
            "differences": [{"path": "generation_token_ids", "stored": "512 values", "refused": "498 values"}],
            "more": 0,
        }  # fmt: skip
        findings.append(Finding(Kind.CONFLICT, f"call {call.call!r} holds two payloads", keys.rollout_id, call.call,
                                at=call.created_at, details=details))  # fmt: skip
    incomplete = bool(findings)
    end = begun + 20 * count + rng.uniform(5, 200)
    if state is State.FROZEN:
        findings.append(
            Finding(Kind.UNDELIVERED, "was frozen and neither dropped nor retired", keys.rollout_id, at=end)
        )
    elif state is State.OPEN:
        findings.append(Finding(Kind.OPEN, "is not frozen", keys.rollout_id, at=end))
    fences = [FenceDetail("frozen", "trainer:1", end, "snapshot")] if state in (State.FROZEN, State.RETIRED) else []
    if state is State.RETIRED:
        fences += [
            FenceDetail("retiring-9", "trainer:1", end + 4, ""),
            FenceDetail("drop-9", None, end + 5, "retired"),
        ]
    entries = sum(call.kind == "entry" for call in calls)
    summary = RolloutSummary(
        rollout=keys.rollout_id, state=state, calls=entries, refusals=0, open_calls=0, sealed=count - entries,
        conflicts=0, marks=len(marks), late=0, late_begins=0, late_conflicts=0, late_marks=0,
        bytes=sum(call.bytes for call in calls), version=9 if state is State.FROZEN else None, incomplete=incomplete,
        incomplete_reasons=(), last_modified=end, damaged=(), foreign=(),
    )  # fmt: skip
    detail = RolloutDetail(summary, "s" * 32, tuple(calls), marks, tuple(fences), (), (), 0)
    stored = StoredRollout(keys, (ObjectInfo(keys.closing, 100),), reader)
    return RolloutAudit(stored, detail, tuple(findings), {})


def data_of(audits: Iterator[RolloutAudit], failing: frozenset[Kind]) -> tuple[str, Totals]:
    """The data of the page for some audits, and their totals."""
    page, totals = PageData(), Totals()
    for audit in audits:
        page.take(audit)
        totals.take(audit)
    head = {"run": KEYS.run, "url": "s3://bucket/exp", "made_at": START + 40_000, "version": "0", "selection": ""}
    return page.dump(head=head, totals=totals, run=(), failing=failing), totals
