"""What a resolver answers: one proved parent, or nothing; from the bucket and from memory alike.

Every test says which call a request continues, or that none may be named, and with which reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from captures import QUESTION, ROLLOUT, answered, continued, entry, on_fake, said
from fakes3 import FakeS3, Hold, on

from s3capture import S3LineageResolver, S3TokenSink, S3TokenSource
from s3capture.errors import ConflictingPayloadError, StoreError, UnrepresentableHistoryError
from s3capture.local import EmbeddedServer
from s3capture.protocols import LineageResolution
from s3capture.records import TokenEntry
from s3capture.store.memory import MemoryStore


@pytest.fixture
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def given(store: MemoryStore) -> dict[str, Any]:
    return {"url": "s3://capture/p", "run": "r", "store": store}


def _put(given: dict[str, Any], *entries: TokenEntry) -> None:
    async def run() -> None:
        sink = S3TokenSink(**given)
        for made in entries:
            await sink.put(made)

    asyncio.run(run())


def _resolve(
    resolver: S3LineageResolver, items: list[dict[str, Any]] | None = None, rollout: str = ROLLOUT
) -> LineageResolution:
    return asyncio.run(resolver.resolve(rollout, continued() if items is None else items))


def _parent(answer: LineageResolution) -> tuple[str, tuple[int, ...]]:
    assert answer.status == "resolved", answer.reason
    assert answer.match is not None
    return answer.match.model_call_id, answer.match.cumulative_token_ids


def _unresolved(answer: LineageResolution, reason: str) -> None:
    assert (answer.status, answer.match, answer.reason) == ("unresolved", None, reason)


class Chain:
    """A conversation of ``length`` calls, all but the first stored as deltas."""

    def __init__(self, length: int) -> None:
        self.entries: list[TokenEntry] = []
        self.tokens: list[tuple[int, ...]] = []
        self.requests: list[list[dict[str, Any]]] = []
        request, total = list(QUESTION), tuple[int, ...]()
        for number in range(length):
            text = f"answer {number}"
            made = answered(
                f"c{number:03}",
                request,
                text,
                prompt=[1000 + number, 2000 + number],
                generation=[3000 + number],
                parent=self.entries[-1] if self.entries else None,
                before=total if self.entries else None,
            )
            total = (*total, *made.prompt_token_ids, *made.generation_token_ids)
            request = continued(request, text)
            self.entries.append(made)
            self.tokens.append(total)
            self.requests.append(request)


# Chains


@pytest.mark.parametrize("length", [1, 2, 3, 17, 60])
def test_a_cold_delta_chain(given: dict[str, Any], length: int) -> None:
    """A fresh resolver rebuilds the tokens of any call of a chain, in two trips more than for a full record."""
    chain = Chain(length)
    _put(given, *chain.entries)
    for number in {0, length // 2, length - 1}:
        resolver = S3LineageResolver(**{**given, "op_timeout_s": 30.0 + number})
        before = resolver.stats().get("resolve")
        assert before is None, "each resolver of this test has a runtime of its own"
        answer = _resolve(resolver, chain.requests[number])
        assert _parent(answer) == (f"c{number:03}", chain.tokens[number])
        assert answer.match is not None
        assert answer.match.digest == chain.entries[number].digest
        assert resolver.stats()["resolve"].trips == (2 if number == 0 else 4)


def test_a_warm_delta_chain_is_followed_step_by_step(given: dict[str, Any]) -> None:
    """A resolver that met each call in turn never reads the chain again: two trips at any depth."""
    chain = Chain(20)
    resolver = S3LineageResolver(**given)
    for number, made in enumerate(chain.entries):
        _put(given, made)
        before = resolver.stats()["resolve"].trips if number else 0
        assert _parent(_resolve(resolver, chain.requests[number])) == (f"c{number:03}", chain.tokens[number])
        assert resolver.stats()["resolve"].trips - before == 2


def _rewrite(given: dict[str, Any], store: MemoryStore, made: TokenEntry) -> None:
    """Store ``made`` in place of what is there, as valid bytes: a writer with a bug, not a broken disk."""
    other = MemoryStore()
    _put({**given, "store": other}, made)
    for row in other.list("p/r/attempts"):
        store.overwrite(row.key, other.get(row.key) or b"")


def _call_key(store: MemoryStore, call: str) -> str:
    (key,) = [row.key for row in store.list("") if row.key.endswith(f"/call/{call}")]
    return key


def _missing(given: dict[str, Any], store: MemoryStore, chain: Chain) -> None:
    del given, chain
    store.delete([_call_key(store, "c001")])


def _damaged(given: dict[str, Any], store: MemoryStore, chain: Chain) -> None:
    del given, chain
    key = _call_key(store, "c001")
    body = store.get(key) or b""
    store.overwrite(key, body[:-20] + bytes(20))


def _cyclic(given: dict[str, Any], store: MemoryStore, chain: Chain) -> None:
    made = chain.entries[1].model_copy(update={"parent_call_id": "c002"})
    _rewrite(given, store, made)


def _other_tokens(given: dict[str, Any], store: MemoryStore, chain: Chain) -> None:
    made = chain.entries[1].model_copy(update={"prompt_token_ids": [1001, 2002]})
    _rewrite(given, store, made)


def _other_length(given: dict[str, Any], store: MemoryStore, chain: Chain) -> None:
    made = chain.entries[1].model_copy(update={"prompt_token_ids": [1001, 2001, 5]})
    _rewrite(given, store, made)


def _a_seal(given: dict[str, Any], store: MemoryStore, chain: Chain) -> None:
    del chain
    store.delete([_call_key(store, "c001")])
    asyncio.run(S3TokenSink(**given).record_engine_refusal(ROLLOUT, model_call_id="c001", code="x"))


def _no_digest(given: dict[str, Any], store: MemoryStore, chain: Chain) -> None:
    _rewrite(given, store, chain.entries[3].model_copy(update={"digest": None, "cum_len": None}))


@pytest.mark.parametrize(
    "fault", [_missing, _damaged, _cyclic, _other_tokens, _other_length, _a_seal, _no_digest], ids=lambda f: f.__name__
)
def test_a_broken_chain_is_no_parent(
    given: dict[str, Any], store: MemoryStore, fault: Callable[[dict[str, Any], MemoryStore, Chain], None]
) -> None:
    """A chain that does not lead to the recorded digest names no parent; calls before the break still resolve."""
    chain = Chain(4)
    _put(given, *chain.entries)
    fault(given, store, chain)
    resolver = S3LineageResolver(**given)
    _unresolved(_resolve(resolver, chain.requests[3]), "broken_delta_chain")
    assert _parent(_resolve(resolver, chain.requests[0])) == ("c000", chain.tokens[0])


def test_a_delta_without_digest_is_not_proved_from_memory(given: dict[str, Any]) -> None:
    """Tokens held for the parent do not make up for the digest that the record lacks."""
    chain = Chain(2)
    resolver = S3LineageResolver(**given)
    _put(given, chain.entries[0], chain.entries[1].model_copy(update={"digest": None, "cum_len": None}))
    assert _resolve(resolver, chain.requests[0]).status == "resolved"
    _unresolved(_resolve(resolver, chain.requests[1]), "broken_delta_chain")


def test_a_full_record_whose_digest_lies_is_no_parent(given: dict[str, Any]) -> None:
    """The recorded digest is checked for full prompts too."""
    _put(given, answered("c1").model_copy(update={"digest": "0" * 64}))
    _unresolved(_resolve(S3LineageResolver(**given)), "broken_delta_chain")


# Candidates


def test_a_damaged_candidate_leaves_no_choice(given: dict[str, Any], store: MemoryStore) -> None:
    """When one of two candidates cannot be read, it may be the true one, so the other is not named either."""
    _put(given, answered("c1"), answered("c2"))
    key = _call_key(store, "c2")
    store.overwrite(key, (store.get(key) or b"")[:-1])
    _unresolved(_resolve(S3LineageResolver(**given)), "unreadable_candidate")


def test_candidates_with_the_same_tokens_are_interchangeable(given: dict[str, Any]) -> None:
    """Two calls of one question, one answer and the same tokens: the smaller id stands for both."""
    _put(given, answered("c2", created_at=2.0), answered("c1", created_at=1.0))
    assert _parent(_resolve(S3LineageResolver(**given)))[0] == "c1"


def test_candidates_with_different_tokens_are_ambiguous(given: dict[str, Any]) -> None:
    """The same words from different tokens: no parent, cold or warm, as soon as the second is there."""
    warm = S3LineageResolver(**given)
    _put(given, answered("c1"))
    assert _resolve(warm).status == "resolved"
    _put(given, answered("c2", generation=[4, 6]))
    for resolver in (warm, S3LineageResolver(**given)):
        _unresolved(_resolve(resolver), "ambiguous")


def test_another_context_is_no_parent(given: dict[str, Any]) -> None:
    """The same words of the model behind other words of the user continue nothing that was recorded."""
    _put(given, answered("c1"))
    resolver = S3LineageResolver(**given)
    _unresolved(_resolve(resolver, continued([{"role": "user", "content": "REWRITTEN"}])), "no_match")
    _unresolved(_resolve(resolver, [said("It is sunny.")]), "no_match")


def test_another_rollout_and_another_run_are_no_parents(given: dict[str, Any]) -> None:
    """A call answers in its own rollout of its own run only, also where one id begins with the other."""
    _put(given, answered("c1"))
    for rollout in ("7-30", "7", "7-3-a1"):
        _unresolved(_resolve(S3LineageResolver(**given), rollout=rollout), "no_match")
    for run in ("r2", "R"):
        _unresolved(_resolve(S3LineageResolver(**{**given, "run": run})), "no_match")


def test_refusals_and_seals_are_no_parents(given: dict[str, Any]) -> None:
    """A call that came to a refusal or a seal is no candidate, though its late put left a lineage marker."""

    async def run() -> None:
        sink, source = S3TokenSink(**given), S3TokenSource(**given)
        await sink.begin_call("sealed", "c1")
        await source.freeze("sealed")
        with pytest.raises(RuntimeError):
            await sink.put(answered("c1", rollout="sealed"))
        await sink.record_engine_refusal("refused", model_call_id="c1", code="x")
        with pytest.raises(ConflictingPayloadError):
            await sink.put(answered("c1", rollout="refused"))
        resolver = S3LineageResolver(**given)
        for rollout in ("sealed", "refused"):
            _unresolved(await resolver.resolve(rollout, continued()), "no_match")

    asyncio.run(run())


def test_unstamped_and_foreign_stamps_are_invisible(given: dict[str, Any]) -> None:
    """A record without a stamp, or with one of another fingerprint version, is no candidate."""
    _put(
        given,
        entry("c1", output_items=[said("It is sunny.")]),
        answered("c2").model_copy(update={"fingerprint_version": 2}),
    )
    _unresolved(_resolve(S3LineageResolver(**given)), "no_match")


def test_roots_and_history_that_cannot_be_represented_send_nothing(tmp_path: Path) -> None:
    """Neither a root nor a refused history needs the store, which is out of reach here."""
    with FakeS3() as gone:
        nowhere = on_fake(gone, tmp_path, op_timeout_s=0.5)
    resolver = S3LineageResolver(**nowhere)
    assert _resolve(resolver, QUESTION).status == "root"
    assert _resolve(resolver, []).status == "root"
    with pytest.raises(UnrepresentableHistoryError):
        _resolve(resolver, [said("x"), {"role": "user", "content": {1, 2}}])
    with pytest.raises(StoreError):
        _resolve(resolver)


# Memory


def _reuse(given: dict[str, Any]) -> None:
    """Delete the rollout, and use its id and call id again for the same words and other tokens."""

    async def run() -> None:
        sink, source = S3TokenSink(**given), S3TokenSource(**given)
        resolver = S3LineageResolver(**given)
        await sink.put(answered("c1"))
        assert _parent(await resolver.resolve(ROLLOUT, continued()))[1] == (1, 2, 3, 4, 5)
        await source.delete([ROLLOUT])
        _unresolved(await resolver.resolve(ROLLOUT, continued()), "no_match")
        await sink.put(answered("c1", generation=[8, 9]))
        assert _parent(await resolver.resolve(ROLLOUT, continued())) == ("c1", (1, 2, 3, 8, 9))

    asyncio.run(run())


def test_an_id_used_anew_is_never_answered_from_memory(given: dict[str, Any]) -> None:
    """After delete and reuse the tokens are the new ones."""
    _reuse(given)


def test_an_id_used_anew_on_a_real_server(seaweed: EmbeddedServer, bucket: str, tmp_path: Path) -> None:
    """The same within one second, which is all that the times in a LIST can tell apart."""
    url = f"s3://{bucket}/p"
    _reuse({"url": url, "run": "r", "endpoint_url": seaweed.endpoint_url, "spill_dir": str(tmp_path)})


@pytest.mark.parametrize("etag", ["md5", "none"])
def test_an_id_used_anew_where_times_stand_still(tmp_path: Path, etag: str) -> None:
    """The same where every object has one and the same time, with an ETag that follows the content or with none."""
    with FakeS3() if etag == "md5" else FakeS3(etag=lambda _: None) as s3:
        _reuse(on_fake(s3, tmp_path))


def test_a_parent_in_a_chain_used_anew_is_not_taken_from_memory(given: dict[str, Any]) -> None:
    """A delta whose parent is held with tokens of an earlier use of the id is rebuilt from the bucket."""
    old, new = Chain(2), Chain(2)
    new.entries[0] = answered("c000", QUESTION, "answer 0", prompt=[7, 7], generation=[7])
    new.entries[1] = answered(
        "c001", old.requests[0], "answer 1", prompt=[8], generation=[9], parent=new.entries[0], before=[7, 7, 7]
    )
    resolver = S3LineageResolver(**given)
    _put(given, *old.entries)
    assert _parent(_resolve(resolver, old.requests[1]))[1] == old.tokens[1]
    assert _parent(_resolve(resolver, old.requests[0]))[1] == old.tokens[0]
    asyncio.run(S3TokenSource(**given).delete([ROLLOUT]))
    _put(given, *new.entries)
    assert _parent(_resolve(resolver, old.requests[1])) == ("c001", (7, 7, 7, 8, 9))


def test_a_retired_rollout_has_no_parents(given: dict[str, Any]) -> None:
    """Retirement takes the candidates away, also from a resolver that holds them."""
    resolver = S3LineageResolver(**given)
    _put(given, answered("c1"))
    assert _resolve(resolver).status == "resolved"
    asyncio.run(S3TokenSource(**given).retire([ROLLOUT]))
    _unresolved(_resolve(resolver), "no_match")


def _requests(resolver: S3LineageResolver, text: str) -> int:
    before = resolver.stats()["resolve"].requests
    assert _resolve(resolver, continued(text=text)).status == "resolved"
    return resolver.stats()["resolve"].requests - before


def test_memory_is_bounded_by_tokens_and_the_newest_stay(given: dict[str, Any]) -> None:
    """Beyond lineage_cache_tokens the calls used least recently are read again, and answers stay right."""
    texts = [f"answer {number}" for number in range(5)]
    _put(given, *(answered(f"c{n}", text=text, prompt=[n] * 90, generation=[n] * 10) for n, text in enumerate(texts)))
    # Each call counts for its 100 tokens and a little for itself: two fit, three do not.
    resolver = S3LineageResolver(**{**given, "lineage_cache_tokens": 400})
    for number, text in enumerate(texts):
        assert _parent(_resolve(resolver, continued(text=text))) == (f"c{number}", (number,) * 100)
    assert [_requests(resolver, text) for text in texts[3:]] == [1, 1]
    assert _requests(resolver, texts[0]) == 2


def test_a_call_larger_than_the_memory_is_answered_all_the_same(given: dict[str, Any]) -> None:
    """A bound of one token holds nothing, and costs only the reads."""
    _put(given, answered("c1"))
    resolver = S3LineageResolver(**{**given, "lineage_cache_tokens": 1})
    for _ in range(2):
        assert _parent(_resolve(resolver)) == ("c1", (1, 2, 3, 4, 5))
    assert resolver.stats()["resolve"].requests == 4


def test_a_call_evicted_in_the_middle_of_a_resolve_is_still_answered(tmp_path: Path) -> None:
    """What memory said when the LIST was read holds for this answer, whatever other threads evict meanwhile."""
    with FakeS3() as s3:
        given = on_fake(s3, tmp_path, lineage_cache_tokens=8, read_timeout_s=20.0)
        _put(given, answered("c1"), answered("c2", created_at=5.0), answered("other", text="other"))
        resolver = S3LineageResolver(**given)

        async def run() -> None:
            # c1 and c2 are candidates; only the winner c1 is held, so a resolve reads c2 behind its LIST.
            assert _parent(await resolver.resolve(ROLLOUT, continued()))[0] == "c1"
            hold = Hold()
            s3.script(on("GetObject", "*/call/c2"), hold)
            resolving = asyncio.ensure_future(resolver.resolve(ROLLOUT, continued()))
            await asyncio.to_thread(hold.arrived.wait, 20)
            assert _parent(await resolver.resolve(ROLLOUT, continued(text="other")))[0] == "other"
            hold.release.set()
            assert _parent(await resolving) == ("c1", (1, 2, 3, 4, 5))

        asyncio.run(run())


# Elsewhere


@pytest.fixture
def s3() -> Iterator[FakeS3]:
    with FakeS3() as server:
        yield server


def test_a_put_is_visible_to_a_resolver_of_another_runtime_at_once(s3: FakeS3, tmp_path: Path) -> None:
    """Two runtimes that share nothing but the bucket: what one put, the other resolves, before and after a miss."""
    here, there = on_fake(s3, tmp_path / "a"), on_fake(s3, tmp_path / "b")
    resolver = S3LineageResolver(**there)
    for number in range(3):
        text = f"answer {number}"
        _unresolved(_resolve(resolver, continued(text=text)), "no_match")
        _put(here, answered(f"c{number}", text=text))
        assert _parent(_resolve(resolver, continued(text=text)))[0] == f"c{number}"
    assert resolver.is_process_shared()
