"""A run of any size as the endpoints would have left it, made object by object without them.

The rule of this module: every body comes from the functions that the protocol writes with, so that only the requests
are saved; ``differences`` holds a made rollout against what the real endpoints write for the same records, and is what
makes the shortcut honest. A seed decides all of it, rollout by rollout, so any part can be made anywhere.

Sizes follow recorded agent rollouts: prompts grow to some ten thousand tokens, nearly all stored as deltas; a stored
record has a few kB, most of it log probabilities. Token ids follow Zipf's law, log probabilities are float32 values.
"""

from __future__ import annotations

import asyncio
import http.client
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from multiprocessing import get_context
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials

from s3capture import S3TokenSink, S3TokenSource, codec
from s3capture.audit import Kind
from s3capture.errors import ConflictingPayloadError
from s3capture.keys import Kind as KeyKind
from s3capture.keys import RolloutKeys, RunKeys, escape, parse
from s3capture.matching import FINGERPRINT_VERSION
from s3capture.protocol import bodies
from s3capture.protocol.bodies import Manifest, Origin
from s3capture.records import EngineRefusal, ParentResolutionStatus, TokenEntry, stamp_lineage
from s3capture.seaweed import REGION
from s3capture.sink import entry_payload
from s3capture.store.memory import MemoryStore

_VOCABULARY, _START = 150_000, 1_750_000_000.0
_LONGEST = 6_000
_PROSE = (
    "check read write open close count parse split merge sort index cache retry token value field error branch commit "
    "test build path file line loop guard queue batch shard key hash digest limit bound first last next then because "
    "this that each every only still again here look try keep drop move find fix run"
)
_WORDS = _PROSE.split()
_BRANCHES, _WHOLE = 0.06, 0.04
"""Shares of calls that continue an earlier call than the last, and that store a whole prompt although they continue."""

_THREADS, _AT_ONCE = 8, 5
_PATIENCE = 5


class Story(StrEnum):
    """What happened in a rollout; the first three make it incomplete."""

    MARKED = "marked"
    CONFLICTED = "conflicted"
    SEALED = "sealed"
    REFUSED = "refused"
    OPEN = "open"
    PLAIN = "plain"


class End(StrEnum):
    """How far a rollout came. What was dropped or retired was so with ``retention="keep"``."""

    OPEN = "open"
    FROZEN = "frozen"
    DROPPED = "dropped"
    RETIRED = "retired"


_INCOMPLETE = (Story.MARKED, Story.CONFLICTED, Story.SEALED)


@dataclass(frozen=True, slots=True)
class Plan:
    """A run of ``rollouts`` rollouts with ``calls`` records each, below ``prefix``."""

    prefix: str
    run: str
    rollouts: int
    calls: int
    seed: int = 7

    @property
    def keys(self) -> RunKeys:
        """The keys of the run."""
        return RunKeys(self.prefix, self.run)

    def rollout_id(self, index: int) -> str:
        """Eight rollouts of a task, as Gym names them."""
        return f"{index // 8}-{index % 8}-a{self.seed}"

    def story(self, index: int) -> Story:
        """One rollout in 200 is incomplete, one in 100 has a refusal, one in 100 is open; at least one of each kind."""
        for story, share in ((Story.MARKED, 600), (Story.CONFLICTED, 600), (Story.SEALED, 600), (Story.REFUSED, 100),
                             (Story.OPEN, 100)):  # fmt: skip
            index -= max(1, round(self.rollouts / share))
            if index < 0:
                return story
        return Story.PLAIN

    def end(self, index: int) -> End:
        """A quarter was consumed and dropped, a tenth retired unconsumed, the rest is frozen."""
        if self.story(index) is Story.OPEN:
            return End.OPEN
        return End.RETIRED if index % 10 == 3 else End.DROPPED if index % 4 == 1 else End.FROZEN

    def complete(self) -> int:
        """How many rollouts are decided and complete: what a replay gives unless told otherwise."""
        return sum(self.story(i) not in (*_INCOMPLETE, Story.OPEN) for i in range(self.rollouts))

    def findings(self, *, archived: bool = False) -> Counter[str]:
        """How many findings of each kind an audit must come to."""
        of_story = {
            Story.MARKED: [Kind.MARK],
            Story.CONFLICTED: [Kind.CONFLICT],
            Story.SEALED: [Kind.SEALED_CALL],
            Story.REFUSED: [Kind.REFUSAL],
            Story.OPEN: [Kind.OPEN, Kind.OPEN_CALL],
            Story.PLAIN: [],
        }
        of_end = {End.FROZEN: Kind.UNDELIVERED, End.DROPPED: Kind.RETAINED, End.RETIRED: Kind.RETAINED}
        found = Counter[str]()
        for index in range(self.rollouts):
            found.update(map(str, of_story[self.story(index)]))
            if (end := self.end(index)) is not End.OPEN:
                found[str(Kind.ARCHIVED if archived else of_end[end])] += 1
        return found


@dataclass(frozen=True, slots=True)
class Rollout:
    """What happened in one rollout: ``lost`` was begun and never ended, ``loser`` is the second payload of a call."""

    keys: RolloutKeys
    story: Story
    end: End
    entries: tuple[TokenEntry, ...]
    lost: str = ""
    loser: TokenEntry | None = None
    refused: str = ""


def made(plan: Plan, index: int) -> Rollout:
    """Make one rollout of ``plan``."""
    draw = np.random.default_rng([plan.seed, index])
    keys, story = plan.keys.rollout(plan.rollout_id(index)), plan.story(index)
    entries = tuple(_entries(draw, keys.rollout_id, plan.calls, _START + 7.2 * index))
    extra = draw.bytes(16).hex()
    loser = None
    if story is Story.CONFLICTED:
        first = entries[0]
        loser = first.model_copy(update={"generation_log_probs": [-1.0, *first.generation_log_probs[1:]]})
    return Rollout(
        keys=keys,
        story=story,
        end=plan.end(index),
        entries=entries,
        lost=extra if story in (Story.SEALED, Story.OPEN) else "",
        loser=loser,
        refused=extra if story is Story.REFUSED else "",
    )


def _entries(draw: np.random.Generator, rollout: str, calls: int, start: float) -> Iterator[TokenEntry]:
    before: list[tuple[str, list[int]]] = []
    for number in range(calls):
        call, at = draw.bytes(16).hex(), start + 9.0 * number + float(draw.random())
        generated = _tokens(draw, 180, 1.0)
        fields: dict[str, Any] = {"parent_resolution": ParentResolutionStatus.ROOT}
        whole: list[int] = []
        if before:
            parent, whole = before[-1 if draw.random() >= _BRANCHES else int(draw.integers(len(before)))]
            fields = {"parent_resolution": ParentResolutionStatus.RESOLVED, "parent_call_id": parent}
        fields["prompt_is_delta"] = bool(whole) and draw.random() >= _WHOLE
        suffix = _tokens(draw, 160 if before else 1_500, 1.1 if before else 0.5)
        entry = TokenEntry(
            rollout_id=rollout,
            model_call_id=call,
            model="policy-8b",
            prompt_token_ids=suffix if fields["prompt_is_delta"] else [*whole, *suffix],
            generation_token_ids=generated,
            generation_log_probs=_log_probs(draw, len(generated)),
            output_items=[_said(draw, call, len(generated))],
            token_item_index=0,
            response_id=f"resp_{call}",
            created_at=at,
            continuation_fingerprint=draw.bytes(32).hex(),
            continuation_context_len=2 * number + 1,
            continuation_context_digest=draw.bytes(32).hex(),
            fingerprint_version=FINGERPRINT_VERSION,
            **fields,
        )
        whole = [*whole, *suffix, *generated]
        before.append((call, whole))
        parent_id, resolution = fields.get("parent_call_id"), fields["parent_resolution"]
        yield stamp_lineage(entry, parent_id, parent_resolution=resolution, cumulative=whole)


def _tokens(draw: np.random.Generator, median: int, spread: float) -> list[int]:
    count = min(_LONGEST, max(4, round(median * float(draw.lognormal(0.0, spread)))))
    return (_VOCABULARY ** draw.random(count)).astype(np.int64).tolist()  # log-uniform: Zipf's law


def _log_probs(draw: np.random.Generator, count: int) -> list[float]:
    # Of most tokens a policy is nearly sure.
    return (-0.2 * draw.exponential(1.0, count) ** 3).astype(np.float32).astype(np.float64).tolist()


def _said(draw: np.random.Generator, call: str, tokens: int) -> dict[str, Any]:
    text = " ".join(_WORDS[number] for number in draw.integers(len(_WORDS), size=max(3, tokens // 3)).tolist())
    content = [{"type": "output_text", "text": text, "annotations": []}]
    return {"type": "message", "id": f"msg_{call}", "role": "assistant", "status": "completed", "content": content}


# -- the objects ----------------------------------------------------------------------------------------------


def objects(rollout: Rollout) -> dict[str, bytes]:
    """Return what lies in the bucket, by key."""
    keys, by = rollout.keys, f"worker-{len(rollout.keys.rollout_id) % 4}:4711"
    found: dict[str, bytes] = {}
    outcomes = [
        bodies.entry(keys, e.model_call_id, entry_payload(e), fingerprint=e.continuation_fingerprint, by=by)
        for e in rollout.entries
    ]
    last = rollout.entries[-1].created_at
    if rollout.refused:
        record = EngineRefusal(model_call_id=rollout.refused, code="context_length_exceeded", created_at=last + 3.0)
        outcomes.append(bodies.refusal(keys, rollout.refused, record.model_dump(), by=by))
    for number, outcome in enumerate(outcomes):
        begun = Origin(by, rollout.entries[0].created_at + 9.0 * number - 4.0, "")
        found[keys.intent(outcome.call)] = bodies.intent(keys, outcome.call, begun)
        found[keys.call(outcome.call)] = outcome.body
        if outcome.fingerprint:
            found[keys.lineage_call(outcome.fingerprint, outcome.call)] = outcome.identity.encode()
    marks, conflicts = set[str](), set[tuple[str, str]]()
    if rollout.lost:
        found[keys.intent(rollout.lost)] = bodies.intent(keys, rollout.lost, Origin(by, last + 4.0, ""))
    if rollout.story is Story.MARKED:
        nonce, call = _nonce(keys, "mark"), rollout.entries[0].model_call_id
        found[keys.mark(nonce)] = bodies.mark(keys, call, Origin(by, last + 5.0, nonce), "marked by the caller")
        marks.add(nonce)
    if rollout.loser is not None:
        loser = rollout.loser
        call, fingerprint = loser.model_call_id, loser.continuation_fingerprint
        outcome = bodies.entry(keys, call, entry_payload(loser), fingerprint=fingerprint, by="worker-9:4711")
        key, found[key] = bodies.conflict(keys, outcome)[0], bodies.conflict(keys, outcome)[1]
        found[keys.lineage_conflict(fingerprint, call)] = b""
        conflicts.add((escape(call), outcome.digest))
    if rollout.end is not End.OPEN:
        segments = {escape(outcome.call) for outcome in outcomes}
        if rollout.lost:
            found[keys.call(rollout.lost)] = bodies.seal(keys, escape(rollout.lost), _trainer(keys, last + 30.0))
            segments.add(escape(rollout.lost))
        found |= _decisions(rollout, segments, conflicts, marks, last + 30.0)
    return found


def _decisions(
    rollout: Rollout, segments: set[str], conflicts: set[tuple[str, str]], marks: set[str], at: float
) -> dict[str, bytes]:
    keys, origin = rollout.keys, _trainer(rollout.keys, at)
    manifest = Manifest(
        snapshot_id=origin.nonce,
        outcomes=frozenset(segments),
        conflicts=frozenset(conflicts),
        marks=frozenset(marks),
        by=origin.by,
        at=origin.at,
    )
    found = {
        keys.closing: bodies.fence("closing", keys, origin, why="freeze"),
        keys.frozen: bodies.frozen(keys, manifest),
    }
    if rollout.end is End.DROPPED:
        version = 1 + len(segments) + len(conflicts) + len(marks)
        found[keys.retiring(version)] = bodies.fence("retiring", keys, replace(origin, at=at + 60.0))
        found[keys.drop(version)] = bodies.fence("drop", keys, Origin("", 0.0, ""), retired=True)
    if rollout.end is End.RETIRED:
        found[keys.retired] = bodies.fence("retired", keys, replace(origin, at=at + 60.0), keep=True)
    return found


def _trainer(keys: RolloutKeys, at: float) -> Origin:
    return Origin("trainer-0:88", at, _nonce(keys, "freeze"))


def _nonce(keys: RolloutKeys, what: str) -> str:
    return codec.canonical([keys.of.run, keys.rollout_id, what]).digest[:32]


# -- the proof ------------------------------------------------------------------------------------------------

_DREW = frozenset({"by", "at", "snapshot_id", "marks", "created_at"})
"""What an endpoint draws for itself, or takes from its own clock: fields of small objects, never of a record."""


async def differences(rollout: Rollout) -> list[str]:
    """Put the same records through the endpoints; return what they wrote and ``objects`` does not, or otherwise."""
    store = MemoryStore()
    await _captured(rollout, store)
    root = rollout.keys.of.root
    real = {info.key: store.get(info.key) or b"" for info in store.list(root)}
    real = {key: body for key, body in real.items() if "/probe/" not in key}
    wanted, found = _comparable(root, real), _comparable(root, objects(rollout))
    return [
        f"{name}: the endpoints write {wanted.get(name)!r:.200}, made was {found.get(name)!r:.200}"
        for name in sorted(wanted.keys() | found.keys())
        if wanted.get(name) != found.get(name)
    ]


async def _captured(rollout: Rollout, store: MemoryStore) -> None:
    keys, name = rollout.keys, rollout.keys.rollout_id
    with tempfile.TemporaryDirectory(prefix="made-run-") as spill:
        settings: dict[str, Any] = {"url": f"s3://bucket/{keys.of.prefix}", "run": keys.of.run, "spill_dir": spill}
        sink = S3TokenSink(store=store, **settings)
        source = S3TokenSource(store=store, **settings, retention="keep")
        for entry in rollout.entries:
            await sink.begin_call(name, entry.model_call_id)
            await sink.put(entry)
        if rollout.refused:
            await sink.begin_call(name, rollout.refused)
            await sink.record_engine_refusal(name, model_call_id=rollout.refused, code="context_length_exceeded")
        if rollout.lost:
            await sink.begin_call(name, rollout.lost)
        if rollout.story is Story.MARKED:
            await sink.mark_incomplete(name, rollout.entries[0].model_call_id)
        if rollout.loser is not None:
            with suppress(ConflictingPayloadError):
                await sink.put(rollout.loser)
        if rollout.end is not End.OPEN:
            snapshot = await source.freeze(name)
            if rollout.end is End.DROPPED:
                await source.drop(name, snapshot_id=snapshot.snapshot_id, version=snapshot.version)
        if rollout.end is End.RETIRED:
            await source.retire([name])
        await sink.close()
        await source.close()


def _comparable(root: str, stored: dict[str, bytes]) -> dict[str, Any]:
    """Objects as values, by key, without what the endpoints draw for themselves."""
    found: dict[str, Any] = {}
    for key, body in stored.items():
        parsed = parse(root, key)
        name = key if parsed is None or parsed.kind is not KeyKind.MARK else "a mark"
        if parsed is not None and parsed.kind in (KeyKind.LINEAGE, KeyKind.LINEAGE_CONFLICT):
            found[name] = body
            continue
        one = codec.decode(key, body)
        value, record = one.value(), one.kind == bodies.ENTRY
        header = {field: one.header[field] for field in one.header if field != "by" and (record or field != "sha256")}
        own = value if record else {field: value[field] for field in value if field not in _DREW}
        found[name] = (header, own, sorted(value))
    return found


# -- into a bucket --------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Place:
    """A bucket of an S3 server and the keys to it."""

    endpoint_url: str
    access_key: str
    secret_key: str
    bucket: str


class _Putter:
    """Plain signed PUTs over kept connections, one a thread: an SDK client takes several times as long for each."""

    def __init__(self, place: Place) -> None:
        self._place, self._local = place, threading.local()
        self._host = urlsplit(place.endpoint_url).netloc
        self._signer = S3SigV4Auth(Credentials(place.access_key, place.secret_key), "s3", REGION)

    def put(self, item: tuple[str, bytes]) -> int:
        key, body = item
        path = f"/{self._place.bucket}/{quote(key, safe='/-_.~')}"
        for left in reversed(range(_PATIENCE)):
            try:
                status, said = self._send(path, body)
            except (OSError, http.client.HTTPException) as error:
                status, said = 0, repr(error).encode()
                del self._local.connection
            if status == 200:
                return len(body)
            time.sleep(0.2)
            if not left or 400 <= status < 500:
                break
        raise RuntimeError(f"PUT {key}: {status} {said[:300]!r}")

    def _send(self, path: str, body: bytes) -> tuple[int, bytes]:
        request = AWSRequest("PUT", f"http://{self._host}{path}", headers={"X-Amz-Content-SHA256": "UNSIGNED-PAYLOAD"})
        self._signer.add_auth(request)
        if not hasattr(self._local, "connection"):
            self._local.connection = http.client.HTTPConnection(self._host, timeout=60)
        self._local.connection.request("PUT", path, body, dict(request.headers.items()))
        reply = self._local.connection.getresponse()
        return reply.status, reply.read()


@dataclass(frozen=True, slots=True)
class Stored:
    """How much was put."""

    rollouts: int = 0
    objects: int = 0
    bytes: int = 0

    def __add__(self, other: Stored) -> Stored:
        return Stored(self.rollouts + other.rollouts, self.objects + other.objects, self.bytes + other.bytes)


def put_rollouts(plan: Plan, place: Place, indexes: range) -> Stored:
    """Make some rollouts and put them; one rollout is made while the one before is on its way."""
    putter, total = _Putter(place), Stored()
    with ThreadPoolExecutor(_THREADS) as pool:
        under_way: list[Iterator[int]] = []
        for index in indexes:
            found = objects(made(plan, index))
            total += Stored(1, len(found))
            under_way.append(pool.map(putter.put, found.items()))
            if len(under_way) > 1:
                total += Stored(bytes=sum(under_way.pop(0)))
        for sizes in under_way:
            total += Stored(bytes=sum(sizes))
    return total


def put_run(plan: Plan, place: Place, *, processes: int, on_progress: Callable[[Stored], None]) -> Stored:
    """Put the whole run from several processes."""
    parts = [range(at, min(at + _AT_ONCE, plan.rollouts)) for at in range(0, plan.rollouts, _AT_ONCE)]
    total = Stored()
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for part in pool.map(partial(put_rollouts, plan, place), parts):
            total += part
            on_progress(total)
    return total


def proved(plan: Plan) -> int:
    """Hold the first rollout of each story and end against the endpoints; return how many. Raise ``AssertionError``."""
    firsts: dict[tuple[Story, End], int] = {}
    for index in range(plan.rollouts):
        firsts.setdefault((plan.story(index), plan.end(index)), index)
    for index in firsts.values():
        wrong = asyncio.run(differences(made(plan, index)))
        if wrong:
            raise AssertionError("\n".join(wrong))
    return len(firsts)
