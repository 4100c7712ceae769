"""``S3CaptureLedger``: what its manifest says, what it refuses, what it leaves behind, and what each operation costs.

What every ledger must do is in the conformance kit; here is what the contract leaves open and this one promises.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from captures import QUESTION, ROLLOUT, answered, continued, said

from s3capture import S3CaptureLedger, S3TokenSink, S3TokenSource
from s3capture.codec import decode
from s3capture.errors import (
    CaptureAdmissionError,
    ClosedError,
    ConflictingPayloadError,
    CorruptObjectError,
    RetiredAdmissionError,
    RolloutRetiredError,
    TokenCaptureFrozenError,
)
from s3capture.keys import RunKeys
from s3capture.ledger_records import (
    ENGINE_REFUSED_REASON,
    ROW_MISSING_CHAIN_HASH_REASON,
    ROW_MISSING_RESPONSE_ID_REASON,
    UNCOMMITTED_CALL_REASON,
    CaptureLedgerCommit,
    RolloutManifest,
)
from s3capture.local import EmbeddedServer
from s3capture.protocols import AdmissionLedger
from s3capture.settings import Settings
from s3capture.store.base import Store
from s3capture.store.boto import BotoStore
from s3capture.store.memory import MemoryStore

KEYS = RunKeys("p", "r").ledger(ROLLOUT)


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def commit(
    call: str = "c1", request: Any = QUESTION, text: str = "It is sunny.", *, parent: str | None = None, **record: Any
) -> CaptureLedgerCommit:
    """A commit of 5 new tokens, behind 10 of ``parent`` if there is one; ``record`` are fields of its record."""
    before = 0 if parent is None else 10
    fields: dict[str, Any] = {
        "model_call_id": call,
        "parent_call_id": parent,
        "prev_len": before,
        "delta_len": 5,
        "cum_len": before + 5,
        "weight_version": 1,
        "digest": digest(f"digest {call}"),
        "extras_digest": digest("extras"),
        "staging_key": f"stage/{call}",
        "mode": "text" if parent is None else "token_in",
        "chain_hash": digest(f"chain {call}"),
        "cumulative_hash": digest(f"cumulative {call}"),
        "response_id": f"resp-{call}",
        **record,
    }
    chain = [*([] if parent is None else [f"stage/{parent}"]), fields["staging_key"]]
    value = {"rollout_id": ROLLOUT, "record": fields, "staging_chain": chain}
    return CaptureLedgerCommit.model_validate({**value, "request_items": list(request), "response_items": [said(text)]})


def without(made: CaptureLedgerCommit, *names: str) -> CaptureLedgerCommit:
    """``made`` as an older worker sent it: some fields of its record are None."""
    return made.model_copy(update={"record": made.record.model_copy(update=dict.fromkeys(names))})


@pytest.fixture(params=["memory", "seaweed"])
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, Any]:
    """Settings of endpoints on each store."""
    given: dict[str, Any] = {"run": "r", "spill_dir": str(tmp_path)}
    if request.param == "memory":
        return {**given, "url": "s3://capture/p", "store": MemoryStore()}
    server: EmbeddedServer = request.getfixturevalue("seaweed")
    return {**given, "url": f"s3://{request.getfixturevalue('bucket')}/p", "endpoint_url": server.endpoint_url}


@pytest.fixture
def ledger(settings: dict[str, Any]) -> S3CaptureLedger:
    return S3CaptureLedger(**settings)


@pytest.fixture
def bucket_of(settings: dict[str, Any]) -> Iterator[Store]:
    """The store behind ``settings``, to look at and to damage."""
    if "store" in settings:
        yield settings["store"]
        return
    store = BotoStore(Settings.of(**settings))
    yield store
    store.close()


def do(*actions: Awaitable[Any]) -> Any:
    """Run the actions one after the other and return what the last one did."""

    async def run() -> Any:
        result = None
        for action in actions:
            result = await action
        return result

    return asyncio.run(run())


def failures(manifest: dict[str, Any]) -> list[tuple[str, str]]:
    return [(failure["model_call_id"], failure["reason"]) for failure in manifest["failures"]]


# -- the manifest ---------------------------------------------------------------------------------------------


def test_it_is_an_admission_ledger(ledger: S3CaptureLedger) -> None:
    """It has every method of the contract and its extensions, and its rows are shared between processes."""
    assert isinstance(ledger, AdmissionLedger)
    assert ledger.is_process_shared() is True


def test_the_manifest_is_wire_data_in_order(ledger: S3CaptureLedger) -> None:
    """Rows come by length, then call id, as plain JSON that validates, field for field what was recorded."""
    child, other, root = commit("a", continued(), "Rain.", parent="z"), commit("m", text="Snow."), commit("z")
    manifest = do(*(ledger.record(one) for one in (child, other, root)), ledger.manifest(ROLLOUT))
    assert manifest["records"] == [one.record.model_dump(mode="json") for one in (other, root, child)]
    assert manifest["failures"] == []
    assert RolloutManifest.model_validate(manifest).rollout_id == ROLLOUT


@pytest.mark.parametrize(
    ("missing", "reason"),
    [
        ("response_id", ROW_MISSING_RESPONSE_ID_REASON),
        ("chain_hash", ROW_MISSING_CHAIN_HASH_REASON),
        ("cumulative_hash", ROW_MISSING_CHAIN_HASH_REASON),
    ],
)
def test_a_row_that_lacks_a_field_is_a_failure(ledger: S3CaptureLedger, missing: str, reason: str) -> None:
    """A row without response id or chain digests is reported as a failure of its call, beside the whole ones."""
    broken = without(commit("c2", text="Rain."), missing)
    manifest = do(ledger.record(commit()), ledger.record(broken), ledger.manifest(ROLLOUT))
    assert [row["model_call_id"] for row in manifest["records"]] == ["c1"]
    assert failures(manifest) == [("c2", reason)]


def test_open_calls_are_failures_until_they_are_settled(ledger: S3CaptureLedger) -> None:
    """An admitted call without an outcome stands in the manifest; a row, a failure or a refusal replaces that."""
    begun = [ledger.begin_call(ROLLOUT, call) for call in ("c1", "c2", "c3")]
    manifest = do(*begun, ledger.close_admissions(ROLLOUT))
    assert failures(manifest) == [(call, UNCOMMITTED_CALL_REASON) for call in ("c1", "c2", "c3")]
    settled = [
        ledger.record(commit()),
        ledger.record_failure(ROLLOUT, "c2", ENGINE_REFUSED_REASON),
        ledger.refuse_call(ROLLOUT, "c3"),
    ]
    manifest = do(*settled, ledger.manifest(ROLLOUT))
    assert [row["model_call_id"] for row in manifest["records"]] == ["c1"]
    assert failures(manifest) == [("c2", ENGINE_REFUSED_REASON)]


def test_a_call_that_was_never_admitted_is_not_in_the_manifest(ledger: S3CaptureLedger) -> None:
    """The intent of a begin that was refused leaves no failure, however often the manifest is read."""
    do(ledger.begin_call(ROLLOUT, "c1"), ledger.record(commit()), ledger.close_admissions(ROLLOUT))
    with pytest.raises(CaptureAdmissionError, match=ROLLOUT):
        do(ledger.begin_call(ROLLOUT, "late"))
    for read in (ledger.manifest, ledger.close_admissions):
        assert failures(do(read(ROLLOUT))) == []


def test_an_admitted_call_may_be_begun_again_after_the_close(ledger: S3CaptureLedger) -> None:
    """Repeating an admitted begin returns: a retry of the same request is no new call."""
    do(ledger.begin_call(ROLLOUT, "c1"), ledger.close_admissions(ROLLOUT), ledger.begin_call(ROLLOUT, "c1"))


def test_a_failure_beside_a_row_keeps_both(ledger: S3CaptureLedger) -> None:
    """A call that committed and also failed is in both lists, and its row still resolves."""
    do(ledger.record(commit()), ledger.record_failure(ROLLOUT, "c1", "why"))
    manifest = do(ledger.manifest(ROLLOUT))
    assert [row["model_call_id"] for row in manifest["records"]] == ["c1"]
    assert failures(manifest) == [("c1", "why")]
    assert do(ledger.resolve(ROLLOUT, continued())).match.model_call_id == "c1"


def test_a_refused_call_stays_in_the_bucket(ledger: S3CaptureLedger, bucket_of: Store) -> None:
    """Refusals are kept for the audit, are no rows, and cannot meet a row of the same call."""
    do(ledger.begin_call(ROLLOUT, "c1"), ledger.refuse_call(ROLLOUT, "c1"))
    assert bucket_of.get(KEYS.call("c1")) is not None
    assert do(ledger.has_rows(ROLLOUT)) is False
    with pytest.raises(ConflictingPayloadError):
        do(ledger.record(commit()))
    do(ledger.record(commit("c2", text="Rain.")))
    with pytest.raises(ConflictingPayloadError):
        do(ledger.refuse_call(ROLLOUT, "c2"))
    assert do(ledger.has_rows(ROLLOUT)) is True


def test_the_conversation_is_not_stored(ledger: S3CaptureLedger, bucket_of: Store) -> None:
    """Of request and response only hashes reach the bucket."""
    secret = "a very particular sentence"
    do(ledger.record(commit("c1", [{"role": "user", "content": secret}], secret)))
    body = bucket_of.get(KEYS.call("c1"))
    assert body is not None
    stored = decode("row", body)
    assert secret not in str(stored.header) + str(stored.value())
    assert "staging_chain" in stored.value()


# -- lineage --------------------------------------------------------------------------------------------------


def test_a_match_says_where_the_tokens_are(ledger: S3CaptureLedger) -> None:
    """A match has no token ids; chain, length and hashes are those of the row that the request continues."""
    child = commit("c2", continued(), "Rain.", parent="c1")
    do(ledger.record(commit()), ledger.record(child))
    found = do(ledger.resolve(ROLLOUT, continued(continued(), "Rain.")))
    assert (found.status, found.match.model_call_id) == ("resolved", "c2")
    assert found.match.cumulative_token_ids == ()
    assert found.match.staging_chain == ("stage/c1", "stage/c2")
    assert (found.match.prev_len, found.match.chain_hash) == (15, child.record.chain_hash)
    assert found.match.digest == child.record.cumulative_hash


def test_interchangeable_rows_resolve_to_the_smallest(ledger: S3CaptureLedger) -> None:
    """Two calls of the same tokens are one parent, the smaller id; of different tokens they are ambiguous."""
    same = {"cumulative_hash": digest("same")}
    do(ledger.record(commit("c2", **same)), ledger.record(commit("c1", **same)))
    assert do(ledger.resolve(ROLLOUT, continued())).match.model_call_id == "c1"
    do(ledger.record(commit("c3")))
    found = do(ledger.resolve(ROLLOUT, continued()))
    assert (found.status, found.reason) == ("unresolved", "ambiguous")


# -- refusing and leaving -------------------------------------------------------------------------------------


def test_a_conflict_names_both_and_no_content(ledger: S3CaptureLedger) -> None:
    """The error says that payloads conflict, for which call and rollout, and nothing of the conversation."""
    do(ledger.record(commit()))
    with pytest.raises(ConflictingPayloadError, match="conflicting") as caught:
        do(ledger.record(commit(weight_version=2)))
    assert "'c1'" in str(caught.value) and ROLLOUT in str(caught.value)
    assert "sunny" not in str(caught.value)


def test_another_conversation_for_the_same_row_is_a_conflict(ledger: S3CaptureLedger) -> None:
    """The same record with other items would be found by other requests, so it is not the same commit."""
    do(ledger.record(commit()))
    with pytest.raises(ConflictingPayloadError):
        do(ledger.record(commit(text="It rains.")))


def test_late_rows_are_discarded_with_a_warning(ledger: S3CaptureLedger, caplog: pytest.LogCaptureFixture) -> None:
    """Behind the retirement each kind of row is discarded with a warning that names it, and none stays visible."""
    do(ledger.retire([ROLLOUT]))
    with caplog.at_level(logging.WARNING, "s3capture"):
        do(
            ledger.record(commit()),
            ledger.record_failure(ROLLOUT, "c2", "why"),
            ledger.refuse_call(ROLLOUT, "c3"),
        )
    texts = [record.getMessage() for record in caplog.records]
    assert len(texts) == 3
    assert "stage/c1" in texts[0] and "why" in texts[1] and "'c3'" in texts[2]
    assert all(ROLLOUT in text and "discarded" in text for text in texts)


def test_a_retired_admission_is_refused_for_both_readers(ledger: S3CaptureLedger) -> None:
    """A begin behind the retirement is an admission error and a retired one, a close is the retired one."""
    do(ledger.begin_call(ROLLOUT, "c1"), ledger.retire([ROLLOUT]))
    for call in ("c1", "c2"):
        with pytest.raises(RetiredAdmissionError) as caught:
            do(ledger.begin_call(ROLLOUT, call))
        assert isinstance(caught.value, CaptureAdmissionError) and isinstance(caught.value, RolloutRetiredError)
    with pytest.raises(RolloutRetiredError, match="read it before retiring"):
        do(ledger.close_admissions(ROLLOUT))


def test_retire_and_delete_say_what_there_was_and_leave_only_fences(ledger: S3CaptureLedger, bucket_of: Store) -> None:
    """Retire removes rows, intents and lineage but not the fences; delete removes those, and the id is fresh."""
    do(ledger.begin_call(ROLLOUT, "c1"), ledger.record(commit()), ledger.record_failure(ROLLOUT, "c2", "why"))
    assert do(ledger.retire([ROLLOUT, "other", ROLLOUT])) == {"removed": [ROLLOUT], "absent": ["other"]}
    assert {row.key for row in bucket_of.list(KEYS.base)} == {KEYS.closing, KEYS.retired}
    assert do(ledger.retire([ROLLOUT])) == {"removed": [], "absent": [ROLLOUT]}
    assert do(ledger.delete([ROLLOUT, "other"])) == {"removed": [], "absent": [ROLLOUT, "other"]}
    assert [row.key for row in bucket_of.list(KEYS.base)] == []
    do(ledger.begin_call(ROLLOUT, "c1"), ledger.record(commit(weight_version=9)))
    assert [row["weight_version"] for row in do(ledger.manifest(ROLLOUT))["records"]] == [9]


def test_with_retention_keep_nothing_is_deleted(settings: dict[str, Any], bucket_of: Store) -> None:
    """The fence alone retires where records are to be kept."""
    keeping = S3CaptureLedger(**settings, retention="keep")
    do(keeping.record(commit()), keeping.retire([ROLLOUT]))
    assert bucket_of.get(KEYS.call("c1")) is not None
    with pytest.raises(RolloutRetiredError):
        do(keeping.manifest(ROLLOUT))
    assert do(keeping.resolve(ROLLOUT, continued())).status == "unresolved"


def test_token_records_and_ledgers_leave_each_other_alone(settings: dict[str, Any], ledger: S3CaptureLedger) -> None:
    """Closing, retiring or deleting a ledger touches no captured tokens of that rollout, nor the other way round."""
    sink, source = S3TokenSink(**settings), S3TokenSource(**settings)
    do(sink.put(answered("c1")), ledger.record(commit()), ledger.close_admissions(ROLLOUT), ledger.retire([ROLLOUT]))
    do(sink.put(answered("c2", text="Rain.")), ledger.delete([ROLLOUT]))
    assert [entry.model_call_id for entry in do(source.freeze(ROLLOUT)).entries] == ["c1", "c2"]
    do(ledger.record(commit()), source.retire([ROLLOUT]))
    assert do(ledger.has_rows(ROLLOUT)) is True
    with pytest.raises(TokenCaptureFrozenError):
        do(sink.put(answered("c3")))


def test_a_closed_ledger_says_so(ledger: S3CaptureLedger) -> None:
    """Every method behind close raises ClosedError; closing again is fine."""
    do(ledger.record(commit()), ledger.close(), ledger.close())
    late: list[Callable[[], Awaitable[Any]]] = [
        lambda: ledger.record(commit()),
        lambda: ledger.manifest(ROLLOUT),
        lambda: ledger.begin_call(ROLLOUT, "c1"),
        lambda: ledger.retire([ROLLOUT]),
    ]
    for action in late:
        with pytest.raises(ClosedError):
            do(action())


def test_a_damaged_row_fails_the_manifest(tmp_path: Path) -> None:
    """A row that cannot be read is an error that names its key, never a gap in the manifest."""
    store = MemoryStore()
    ledger = S3CaptureLedger(url="s3://capture/p", run="r", store=store, spill_dir=str(tmp_path))
    do(ledger.record(commit()), ledger.record(commit("c2", text="Rain.")))
    store.overwrite(KEYS.call("c2"), b"damaged")
    with pytest.raises(CorruptObjectError, match="call/c2"):
        do(ledger.manifest(ROLLOUT))
    body = store.get(KEYS.call("c1"))
    assert body is not None
    store.overwrite(KEYS.call("c2"), body)
    store.delete([KEYS.call("c1")])
    other = RunKeys("p", "r").ledger("another")
    store.create(other.call("c1"), body)
    with pytest.raises(CorruptObjectError, match=ROLLOUT):
        do(ledger.manifest("another"))


# -- budgets --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 30])
def test_what_operations_cost(tmp_path: Path, length: int) -> None:
    """Round trips do not grow with the ledger; only a manifest's requests do, one for each row."""
    ledger = S3CaptureLedger(url="s3://capture/p", run="r", store=MemoryStore(), spill_dir=str(tmp_path))

    def cost(operation: Awaitable[Any]) -> tuple[int, int]:
        before = ledger.stats().values()
        trips, requests = sum(s.trips for s in before), sum(s.requests for s in before)
        do(operation)
        after = ledger.stats().values()
        return sum(s.trips for s in after) - trips, sum(s.requests for s in after) - requests

    for number in range(length):
        do(ledger.record(commit(f"n{number}", text=f"answer {number}")))
    assert cost(ledger.begin_call(ROLLOUT, "x")) == (2, 2)
    assert cost(ledger.record(commit("x"))) == (2, 3)
    assert cost(ledger.record(commit("x"))) == (3, 5), "a repeated row reads what stands and looks"
    assert cost(ledger.record_failure(ROLLOUT, "y", "why")) == (2, 2)
    assert cost(ledger.refuse_call(ROLLOUT, "z")) == (2, 2)
    assert cost(ledger.has_rows(ROLLOUT)) == (1, 1)
    assert cost(ledger.manifest(ROLLOUT)) == (2, 1 + length + 3)
    assert cost(ledger.resolve(ROLLOUT, QUESTION)) == (0, 0)
    assert cost(ledger.resolve(ROLLOUT, continued())) == (2, 3)
    assert cost(ledger.close_admissions(ROLLOUT)) == (5, 5 + length + 3)
    assert cost(ledger.close_admissions(ROLLOUT)) == (5, 5 + length + 3)
    assert cost(ledger.retire([ROLLOUT]))[0] == 4
    assert cost(ledger.delete([ROLLOUT]))[0] <= 4
