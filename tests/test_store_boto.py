"""The boto3 store against a server whose faults are scripted, and its plain behaviour against real ones."""

from __future__ import annotations

import hashlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import boto3
import pytest
from fakes3 import Cut, Exchange, FakeS3, Hold, LoseReply, Reply, Request, Response, Rewrite, on

from s3capture.errors import ClosedError, StoreAccessError, StoreConfigError, StoreError, UnsupportedStoreError
from s3capture.settings import Settings
from s3capture.store.base import ContendedError, Store, TransientStoreError
from s3capture.store.boto import BotoStore


@pytest.fixture(autouse=True)
def _own_credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Shield the tests from the machine's own AWS settings and proxies."""
    for name in [name for name in os.environ if name.startswith("AWS_") or name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "first")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-of-first")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "no-config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))


@pytest.fixture
def s3() -> Iterator[FakeS3]:
    with FakeS3() as server:
        yield server


def _settings(s3: FakeS3, **more: Any) -> Settings:
    given = {"endpoint_url": s3.endpoint_url, "region": "us-east-1", "read_timeout_s": 5.0, **more}
    return Settings.of(url=f"s3://{s3.bucket}/p", run="r", **given)


def _store(s3: FakeS3, **more: Any) -> BotoStore:
    return BotoStore(_settings(s3, **more))


# One wire attempt


@pytest.mark.parametrize(
    ("behaviour", "doubtful"),
    [
        (Reply(500, "InternalError"), True),
        (Reply(502), True),
        (Reply(504, body=b"<html>gateway</html>"), True),
        (Reply(503, body=b"upstream connect error"), True),
        (Reply(503, "SlowDown"), False),
        (Reply(429, "TooManyRequests"), False),
        (Reply(507), False),
        (Reply(400, "RequestTimeout"), False),
        (LoseReply("close"), True),
        (LoseReply("reset"), True),
        (LoseReply("hang"), True),
    ],
)
def test_a_failed_create_was_sent_exactly_once(
    s3: FakeS3, monkeypatch: pytest.MonkeyPatch, behaviour: Any, doubtful: bool
) -> None:
    """Whatever goes wrong, one request leaves this machine, and the error tells whether it may have been applied."""
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "5")
    s3.script(on("PutObject"), behaviour)
    with pytest.raises(TransientStoreError) as caught:
        _store(s3, read_timeout_s=0.4).create("p/k", b"x")
    assert caught.value.doubtful is doubtful
    assert len(s3.requests) == 1


@pytest.mark.parametrize("mode", ["legacy", "standard", "adaptive"])
def test_the_users_own_retry_settings_change_nothing(
    s3: FakeS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: str
) -> None:
    """Neither the environment nor the profile can turn the SDK's retries on again."""
    (tmp_path / "config").write_text(f"[default]\nretry_mode = {mode}\nmax_attempts = 4\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_RETRY_MODE", mode)
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "5")
    s3.script(on("PutObject"), Reply(500, "InternalError"))
    with pytest.raises(TransientStoreError):
        _store(s3).create("p/k", b"x")
    assert len(s3.requests) == 1


@pytest.mark.parametrize("action", ["get", "list", "delete"])
@pytest.mark.parametrize("behaviour", [Reply(500, "InternalError"), LoseReply("close"), LoseReply("hang")])
def test_other_requests_are_sent_exactly_once_too(s3: FakeS3, action: str, behaviour: Any) -> None:
    """Only the driver repeats; a read that failed is in no doubt, a delete is."""
    s3.script(on(), behaviour)
    store = _store(s3, read_timeout_s=0.4)
    with pytest.raises(TransientStoreError) as caught:
        {"get": store.get, "list": store.list, "delete": lambda key: store.delete([key])}[action]("p/k")
    assert caught.value.doubtful is (action == "delete")
    assert len(s3.requests) == 1


@pytest.mark.parametrize("how", ["close", "reset", "hang"])
def test_a_create_whose_reply_was_lost_is_doubtful_and_the_next_one_says_exists(s3: FakeS3, how: str) -> None:
    """The lost success is never turned into a 412 behind our back: doubt first, then "exists" with our own body."""
    s3.script(on("PutObject"), LoseReply(how))
    store = _store(s3, read_timeout_s=0.4)
    with pytest.raises(TransientStoreError) as caught:
        store.create("p/k", b"ours")
    assert caught.value.doubtful
    assert store.create("p/k", b"ours") is False
    assert store.get("p/k") == b"ours"


def test_a_wrong_region_is_an_error_that_names_the_right_one_after_one_request(s3: FakeS3) -> None:
    """botocore's own redirect, with its HeadBucket and its second PUT, stays off."""
    s3.script(on(), Reply(301, "PermanentRedirect", headers={"x-amz-bucket-region": "eu-west-1"}), times=None)
    with pytest.raises(StoreConfigError, match="eu-west-1"):
        _store(s3).create("p/k", b"x")
    assert [request.operation for request in s3.requests] == ["PutObject"]


def test_a_refused_connection_did_surely_nothing() -> None:
    """Nobody listens: transient, and no doubt."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    store = BotoStore(Settings.of(url="s3://capture/p", run="r", endpoint_url=f"http://127.0.0.1:{port}"))
    with pytest.raises(TransientStoreError, match=f"p/k.*s3://capture/p at http://127.0.0.1:{port}") as caught:
        store.create("p/k", b"x")
    assert caught.value.doubtful is False


# Create


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (412, "PreconditionFailed", False),
        (412, "", False),
        (412, "SomethingElse", False),
        (304, "", False),
        (409, "ConditionalRequestConflict", ContendedError),
        (409, "OperationAborted", ContendedError),
        (409, "ConcurrentModification", ContendedError),
    ],
)
def test_the_status_and_not_the_code_says_that_a_key_exists(s3: FakeS3, status: int, code: str, expected: Any) -> None:
    """412 and 304 are refusals in every spelling; 409 asks to look again and never means "exists"."""
    s3.script(on("PutObject"), Reply(status, code))
    store = _store(s3)
    if expected is False:
        assert store.create("p/k", b"x") is False
    else:
        with pytest.raises(expected):
            store.create("p/k", b"x")
    assert s3.objects == {}


def test_a_create_is_one_conditional_put_however_large_the_body(s3: FakeS3) -> None:
    """Nine megabytes, beyond the SDK's multipart threshold, still go as one PutObject with If-None-Match."""
    body = os.urandom(9 << 20)
    assert _store(s3).create("p/k", body) is True
    assert [request.operation for request in s3.requests] == ["PutObject"]
    assert s3.requests[0].headers["if-none-match"] == "*"
    assert s3.requests[0].headers["content-type"] == "application/zstd"
    assert s3.objects["p/k"] == body


def test_a_body_above_the_limit_is_refused_before_anything_is_sent(s3: FakeS3) -> None:
    """The error names the key and both sizes; no connection was made."""
    with pytest.raises(StoreConfigError, match=r"p/k.*1,001 bytes.*1,000"):
        _store(s3, max_object_bytes=1000).create("p/k", b"x" * 1001)
    assert s3.connections == 0


def test_an_empty_body_is_created_and_read_back_as_itself(s3: FakeS3) -> None:
    """Empty is not absent."""
    store = _store(s3)
    assert store.create("p/k", b"") is True
    assert s3.requests[0].headers["content-type"] == "application/octet-stream"
    assert store.create("p/k", b"") is False
    assert store.get("p/k") == b""


def test_owner_and_encryption_settings_reach_the_wire(s3: FakeS3) -> None:
    """A put carries the owner it expects and the key to encrypt with; a read the owner."""
    more = {"expected_bucket_owner": "123456789012", "sse": "aws:kms", "sse_kms_key_id": "key-1"}
    store = _store(s3, **more)
    store.create("p/k", b"x")
    store.get("p/k")
    store.list("p/")
    store.delete(["p/k"])
    assert s3.requests[0].headers["x-amz-server-side-encryption"] == "aws:kms"
    assert s3.requests[0].headers["x-amz-server-side-encryption-aws-kms-key-id"] == "key-1"
    assert {request.headers["x-amz-expected-bucket-owner"] for request in s3.requests} == {"123456789012"}


def test_a_store_that_ignores_the_condition_says_created_twice() -> None:
    """The store reports what it was told, so that a probe can see the missing feature."""
    with FakeS3(ignores_conditions=True) as s3:
        store = _store(s3)
        assert [store.create("p/k", b"1"), store.create("p/k", b"2")] == [True, True]
        assert store.get("p/k") == b"2"


@pytest.mark.parametrize("code", ["NotImplemented", ""])
def test_a_conditional_put_answered_501_means_an_unsupported_store(s3: FakeS3, code: str) -> None:
    """501 on a create is not a matter of trying again; on a read it says nothing about conditions."""
    s3.script(on(), Reply(501, code), times=None)
    store = _store(s3)
    with pytest.raises(UnsupportedStoreError, match="create-if-absent"):
        store.create("p/k", b"x")
    with pytest.raises(StoreConfigError) as caught:
        store.get("p/k")
    assert not isinstance(caught.value, UnsupportedStoreError)


# Over TLS


def test_over_tls_nothing_is_chunked_and_no_checksum_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wire form of production: a server that refuses chunked bodies and checksum headers serves every method."""

    def modern(request: Request) -> bool:
        return "transfer-encoding" in request.headers or any(
            name.startswith(("x-amz-checksum", "x-amz-sdk-checksum", "x-amz-trailer")) for name in request.headers
        )

    with FakeS3(tls=True) as s3:
        monkeypatch.setenv("AWS_CA_BUNDLE", str(s3.ca_file))
        s3.script(modern, Reply(400, "InvalidRequest"), times=None)
        store = _store(s3)
        assert store.create("p/a", b"body") is True
        assert store.create("p/a", b"body") is False
        assert store.get("p/a") == b"body"
        assert [row.key for row in store.list("p/")] == ["p/a"]
        assert store.list_folders("") == ["p/"]
        assert store.delete(["p/a"]) == {}
        assert s3.objects == {}
        for put in s3.seen("PutObject"):
            assert put.headers["content-length"] == "4"
            assert put.body == b"body"
            assert not modern(put)


def test_an_untrusted_certificate_is_told_with_its_remedy() -> None:
    """Nothing was sent, so nothing is in doubt."""
    with FakeS3(tls=True) as s3, pytest.raises(TransientStoreError, match="AWS_CA_BUNDLE") as caught:
        _store(s3).create("p/k", b"x")
    assert caught.value.doubtful is False


# Get


@pytest.mark.parametrize(
    "behaviour",
    [Cut(3), Cut(0), Cut(3, "reset"), Cut(3, "hang"), Cut(3, chunked=True), Cut(3, "hang", chunked=True)],
)
def test_a_body_that_was_cut_is_never_returned(s3: FakeS3, behaviour: Cut) -> None:
    """However the connection dies in the middle of a body, the read fails, without doubt, and the next one works."""
    s3.objects["p/k"] = b"0123456789"
    s3.script(on("GetObject"), behaviour)
    store = _store(s3, read_timeout_s=0.4)
    with pytest.raises(TransientStoreError) as caught:
        store.get("p/k")
    assert caught.value.doubtful is False
    assert store.get("p/k") == b"0123456789"


def test_only_an_explicit_no_such_key_means_absent(s3: FakeS3) -> None:
    """A missing bucket or a web server's own 404 is an error: puts are acknowledged on "absent"."""
    store = _store(s3)
    assert store.get("p/k") is None
    s3.script(on("GetObject"), Reply(404, body=b"<html><body>no such page</body></html>"))
    with pytest.raises(StoreConfigError):
        store.get("p/k")
    s3.script(on("GetObject"), Reply(404))
    with pytest.raises(StoreConfigError):
        store.get("p/k")
    elsewhere = BotoStore(replace(_settings(s3), url="s3://another/p"))
    for call in (lambda: elsewhere.get("p/k"), lambda: elsewhere.create("p/k", b""), lambda: elsewhere.list("p/")):
        with pytest.raises(StoreConfigError, match=r"s3://another/p.*NoSuchBucket"):
            call()


@pytest.mark.parametrize("chunked", [False, True])
def test_an_object_far_above_the_limit_is_not_read_into_memory(s3: FakeS3, chunked: bool) -> None:
    """Twice max_object_bytes is read, one byte more is refused, with or without a declared length."""

    def as_chunks(answer: Response) -> Response:
        body = f"{len(answer.body):x}\r\n".encode() + answer.body + b"\r\n0\r\n\r\n"
        return Response(200, body, {"Transfer-Encoding": "chunked"})

    if chunked:
        s3.script(on("GetObject"), Rewrite(as_chunks), times=None)
    s3.objects |= {"p/fits": b"x" * 2000, "p/large": b"x" * 2001}
    store = _store(s3, max_object_bytes=1000)
    assert store.get("p/fits") == b"x" * 2000
    with pytest.raises(StoreConfigError, match=r"p/large.*max_object_bytes"):
        store.get("p/large")


# List


def test_shuffled_pages_with_repeated_keys_give_every_key_once() -> None:
    """A store without order that repeats a key across pages lists as a sorted one does."""
    objects = {f"p/{number:03}": bytes(number) for number in range(50)}
    with FakeS3(page_size=7) as plain, FakeS3(page_size=7, shuffle=3, repeat=True) as odd:
        plain.objects, odd.objects = dict(objects), dict(objects)
        rows = [_store(s3).list("p/") for s3 in (plain, odd)]
        assert len(rows[1]) == len(objects)
        assert set(rows[0]) == set(rows[1])
        assert {row.key: row.size for row in rows[1]} == {key: len(body) for key, body in objects.items()}
        assert all("start-after" not in request.query for request in [*plain.requests, *odd.requests])


@pytest.mark.parametrize("encoding", ["url", "plus", "raw"])
def test_keys_of_the_safe_alphabet_come_back_as_they_were_put(encoding: str) -> None:
    """Whichever way a server answers encoding-type, put, list and get agree on the key."""
    keys = {"p/Az09._-/call/x", "p/a=b+c/y!conflict", "p/a~b/z"}
    with FakeS3(encoding=encoding) as s3:
        store = _store(s3)
        assert all(store.create(key, key.encode()) for key in keys)
        assert {row.key for row in store.list("p/")} == keys
        assert {store.get(row.key) for row in store.list("p/")} == {key.encode() for key in keys}


def test_keys_that_come_back_changed_or_from_elsewhere_are_refused(s3: FakeS3) -> None:
    """A listing outside its prefix is an error: it would be read, counted and deleted."""
    s3.objects = {"p+q/k": b""}
    store = _store(s3)
    s3.script(on("ListObjectsV2"), Rewrite(lambda answer: replace(answer, body=answer.body.replace(b"%2B", b"+"))))
    with pytest.raises(StoreConfigError, match="outside"):
        store.list("p+q/")
    s3.script(on("ListObjectsV2"), Rewrite(lambda answer: replace(answer, body=answer.body.replace(b"p%2Bq", b"zz"))))
    with pytest.raises(StoreConfigError, match="outside"):
        store.list("p+q/")


@pytest.mark.parametrize(
    ("etag", "stamp"),
    [
        (None, ""),
        ("unquoted", "2030-01-02T03:04:05+00:00/unquoted"),
        ('W/"weak"', '2030-01-02T03:04:05+00:00/W/"weak"'),
        ('"0123-2"', '2030-01-02T03:04:05+00:00/"0123-2"'),
    ],
)
def test_an_odd_or_absent_etag_changes_nothing_but_the_stamp(etag: str | None, stamp: str) -> None:
    """ETags are no digests; nothing breaks where there is none, and a time to the second is then no stamp."""
    with FakeS3(etag=lambda _: etag) as s3:
        store = _store(s3)
        assert store.create("p/k", b"abc") is True
        assert store.get("p/k") == b"abc"
        assert [(row.key, row.size, row.stamp) for row in store.list("p/")] == [("p/k", 3, stamp)]


def test_a_row_with_a_key_alone_is_listed(s3: FakeS3) -> None:
    """Size, time and ETag are optional in what a store sends."""
    row = b"<Contents><Key>p/k</Key></Contents>"
    page = b"<ListBucketResult><IsTruncated>false</IsTruncated>" + row + b"</ListBucketResult>"
    s3.script(on("ListObjectsV2"), Reply(200, body=page))
    assert [(row.key, row.size, row.stamp) for row in _store(s3).list("p/")] == [("p/k", 0, "")]


@pytest.mark.parametrize(
    "sent",
    [
        "2026-12-01T15:05:09Z",
        "2026-12-01T15:05:09.123Z",
        "2026-12-01T15:05:09.123456789Z",
        "20261201T150509Z",
        "2026-12-01T15:05:09+02:00",
        "Tue, 01 Dec 2026 15:05:09 GMT",
        "1764601509",
    ],
)
def test_a_time_is_read_as_boto3_reads_it(s3: FakeS3, sent: str) -> None:
    """Whatever form a server gives times in, the stamp of a row holds what a plain boto3 client makes of it."""
    row = f"<Contents><Key>p/k</Key><LastModified>{sent}</LastModified><ETag>e</ETag></Contents>"
    page = f"<ListBucketResult><IsTruncated>false</IsTruncated>{row}</ListBucketResult>".encode()
    s3.script(on("ListObjectsV2"), Reply(200, body=page), times=2)
    plain: Any = boto3.session.Session().client("s3", endpoint_url=s3.endpoint_url, region_name="us-east-1")
    wanted = plain.list_objects_v2(Bucket=s3.bucket)["Contents"][0]["LastModified"].isoformat()
    assert [row.stamp for row in _store(s3).list("p/")] == [f"{wanted}/e"]


@pytest.mark.parametrize(
    "behaviour",
    [
        Cut(0),
        Cut(200),
        Cut(0, chunked=True),
        Reply(200),
        Reply(200, body=b"<html><body>Sign in to the network</body></html>"),
        Reply(200, body=b"<Error><Code>InternalError</Code><Message>late</Message></Error>"),
        Reply(200, body=b"not xml at all"),
    ],
)
def test_a_reply_that_is_no_whole_listing_is_not_an_empty_bucket(s3: FakeS3, behaviour: Any) -> None:
    """A cut, empty or foreign page is a passing failure, never the answer "nothing is there"."""
    s3.objects = {f"p/{number}": b"" for number in range(20)}
    s3.script(on("ListObjectsV2"), behaviour)
    store = _store(s3)
    with pytest.raises(TransientStoreError):
        store.list("p/")
    assert len(store.list("p/")) == 20


def _page(token: Callable[[], str], keys: str = "<Contents><Key>p/k</Key></Contents>") -> Callable[[Exchange], None]:
    def answer(exchange: Exchange) -> None:
        body = f"<ListBucketResult><IsTruncated>true</IsTruncated>{token()}{keys}</ListBucketResult>"
        exchange.send(Response(200, body.encode()))

    return answer


def test_a_listing_that_never_ends_is_an_error_of_the_store(s3: FakeS3) -> None:
    """No token, one token for ever, or new tokens with the same page for ever: all end, naming the store."""
    fresh = iter(range(10_000))
    cases = {
        "no continuation token": _page(lambda: ""),
        "same continuation token": _page(lambda: "<NextContinuationToken>t</NextContinuationToken>"),
        "without a new key": _page(lambda: f"<NextContinuationToken>{next(fresh)}</NextContinuationToken>"),
    }
    store = _store(s3)
    for words, behaviour in cases.items():
        s3.clear_scripts()
        s3.script(on("ListObjectsV2"), behaviour, times=None)
        with pytest.raises(StoreConfigError, match=f"s3://capture/p at {s3.endpoint_url}.*{words}"):
            store.list("p/")


def test_empty_pages_in_the_middle_are_not_the_end(s3: FakeS3) -> None:
    """Where deleted versions fill whole pages, the keys after them are still found."""
    s3.objects = {"p/k": b""}
    fresh = iter(range(10_000))

    def empty() -> str:
        return f"<NextContinuationToken>{f'p/{next(fresh):04}'.encode().hex()}</NextContinuationToken>"

    s3.script(on("ListObjectsV2"), _page(empty, keys=""), times=150)
    assert [row.key for row in _store(s3).list("p/")] == ["p/k"]


def test_folders_are_listed_once_each_beside_many_objects() -> None:
    """Common prefixes over several pages, each once; the objects between them are not folders."""
    with FakeS3(page_size=2, repeat=True) as s3:
        s3.objects = {f"p/{name}/{leaf}": b"" for name in "abcde" for leaf in "xyz"}
        s3.objects |= {f"p/{number:03}": b"" for number in range(250)}
        assert sorted(_store(s3).list_folders("p/")) == [f"p/{name}/" for name in "abcde"]


# Delete


def test_deletes_go_in_batches_of_at_most_a_thousand(s3: FakeS3) -> None:
    """2,501 keys, some given twice, take three requests, and all are gone."""
    keys = [f"p/{number:04}" for number in range(2501)]
    s3.objects = dict.fromkeys(keys, b"")
    assert _store(s3).delete([*keys, *keys[:10]]) == {}
    assert s3.objects == {}
    assert [request.body.count(b"<Key>") for request in s3.seen("DeleteObjects")] == [1000, 1000, 501]
    assert len(s3.requests) == 3


def test_keys_that_may_not_be_deleted_are_returned_with_their_reason(s3: FakeS3) -> None:
    """A refused key inside a 200 is reported; the others, and absent ones, are gone."""
    s3.objects = dict.fromkeys(["p/a", "p/b", "p/c"], b"")
    s3.undeletable = {"p/b"}
    failed = _store(s3).delete(["p/a", "p/b", "p/c", "p/absent"])
    assert failed == {"p/b": "AccessDenied: Access Denied"}
    assert set(s3.objects) == {"p/b"}


def test_passing_errors_inside_a_batch_are_returned_with_their_code(s3: FakeS3) -> None:
    """InternalError for one key is its reason, for the caller to repeat; NoSuchKey is no failure."""
    rows = b"<Error><Key>p/a</Key><Code>InternalError</Code></Error><Error><Key>p/b</Key><Code>NoSuchKey</Code></Error>"
    s3.script(on("DeleteObjects"), Reply(200, body=b"<DeleteResult>" + rows + b"</DeleteResult>"))
    assert _store(s3).delete(["p/a", "p/b"]) == {"p/a": "InternalError: no reason given"}


@pytest.mark.parametrize("behaviour", [Cut(0), Reply(200), Reply(200, body=b"<DeleteResult/>")])
def test_a_batch_reply_without_its_rows_is_not_success(s3: FakeS3, behaviour: Any) -> None:
    """Keys that the reply does not mention are deleted again one by one, and what is refused is told."""
    s3.objects = dict.fromkeys(["p/a", "p/b"], b"")
    s3.undeletable = {"p/b"}
    s3.script(on("DeleteObjects"), behaviour)
    assert _store(s3).delete(["p/a", "p/b"]) == {"p/b": "AccessDenied: Access Denied"}
    assert set(s3.objects) == {"p/b"}


@pytest.mark.parametrize(
    "refusal",
    [
        Reply(400, "MissingContentMD5"),
        Reply(400, "InvalidRequest"),
        Reply(400),
        Reply(405, "MethodNotAllowed"),
        Reply(411, "MissingContentLength"),
        Reply(501, "NotImplemented"),
    ],
)
def test_where_batches_are_refused_keys_are_deleted_one_by_one_from_then_on(
    s3: FakeS3, caplog: pytest.LogCaptureFixture, refusal: Reply
) -> None:
    """The refusal is met once, told once in the log, and remembered; a refused key is still returned."""
    s3.objects = dict.fromkeys(["p/a", "p/b", "p/c"], b"")
    s3.undeletable = {"p/b"}
    s3.script(on("DeleteObjects"), refusal, times=None)
    store = _store(s3)
    with caplog.at_level(logging.WARNING, "s3capture"):
        assert store.delete(["p/a", "p/b"]) == {"p/b": "AccessDenied: Access Denied"}
        assert store.delete(["p/c", "p/absent"]) == {}
    assert set(s3.objects) == {"p/b"}
    assert len(s3.seen("DeleteObjects")) == 1
    assert len([record for record in caplog.records if "DeleteObjects" in record.message]) == 1


def test_a_batch_that_is_denied_as_a_whole_returns_every_key(s3: FakeS3) -> None:
    """Without delete rights nothing is deleted, and that is an answer, not an exception."""
    s3.objects = dict.fromkeys(["p/a", "p/b"], b"")
    s3.script(on("DeleteObjects"), Reply(403, "AccessDenied", "no delete here"))
    failed = _store(s3).delete(["p/a", "p/b"])
    assert failed == dict.fromkeys(["p/a", "p/b"], "AccessDenied: no delete here")


def test_wrong_keys_are_an_error_of_the_whole_delete(s3: FakeS3) -> None:
    """A secret that the store does not know concerns no single key."""
    s3.script(on("DeleteObjects"), Reply(403, "SignatureDoesNotMatch"))
    with pytest.raises(StoreAccessError):
        _store(s3).delete(["p/a"])


def test_deleting_nothing_asks_nothing(s3: FakeS3) -> None:
    """No keys, no request."""
    assert _store(s3).delete([]) == {}
    assert s3.requests == []


# Credentials


def _signer(request: Request) -> str:
    return request.headers["authorization"].split("Credential=")[1].split("/")[0]


@pytest.mark.parametrize("code", ["ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"])
def test_an_expired_token_is_passing_and_the_next_request_is_signed_with_new_credentials(
    s3: FakeS3, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str
) -> None:
    """The credentials file is read again: what someone renewed is used without a restart."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    profile = "[default]\naws_access_key_id = {}\naws_secret_access_key = s\naws_session_token = t\n"
    (tmp_path / "credentials").write_text(profile.format("old"))
    s3.script(lambda request: _signer(request) == "old", Reply(400, code), times=None)
    store = _store(s3)
    with pytest.raises(TransientStoreError) as caught:
        store.create("p/k", b"x")
    assert caught.value.doubtful is False
    (tmp_path / "credentials").write_text(profile.format("new"))
    assert store.create("p/k", b"x") is True
    assert [_signer(request) for request in s3.requests] == ["old", "new"]


def test_no_credentials_at_first_use_tells_where_boto3_looks_and_finds_them_later(
    s3: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person must act; once that is done the same store works."""
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = _store(s3)
    with pytest.raises(StoreAccessError, match="AWS_ACCESS_KEY_ID"):
        store.create("p/k", b"x")
    assert s3.requests == []
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "late")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    assert store.create("p/k", b"x") is True


def test_credentials_that_vanish_in_mid_run_are_a_passing_failure(s3: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a success, missing credentials are about to be renewed: transient, nothing was sent."""
    store = _store(s3)
    store.create("p/1", b"x")
    s3.script(on("PutObject"), Reply(400, "ExpiredToken"))
    with pytest.raises(TransientStoreError):
        store.create("p/2", b"x")
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(TransientStoreError) as caught:
        store.create("p/2", b"x")
    assert caught.value.doubtful is False
    assert len(s3.requests) == 2


def test_a_denied_request_is_no_passing_failure(s3: FakeS3) -> None:
    """AccessDenied names the permissions; the error holds no secret."""
    s3.script(on(), Reply(403, "AccessDenied"), times=None)
    with pytest.raises(StoreAccessError, match="s3:PutObject") as caught:
        _store(s3).create("p/k", b"x")
    assert "secret-of-first" not in str(caught.value)


# Clients, threads, processes


def test_sixty_four_threads_at_first_use_share_one_client_of_an_own_session(
    s3: FakeS3, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A barrier releases all at once: no exception, one client, and boto3's default session untouched."""
    made: list[object] = []
    original = boto3.session.Session.client

    def counting(self: boto3.session.Session, *args: Any, **more: Any) -> Any:
        made.append(self)
        return original(self, *args, **more)

    monkeypatch.setattr(boto3.session.Session, "client", counting)
    default = boto3.DEFAULT_SESSION
    store, barrier, results = _store(s3), threading.Barrier(64), []

    def first_use(number: int) -> None:
        barrier.wait()
        results.append(store.create(f"p/{number}", b"x"))

    threads = [threading.Thread(target=first_use, args=(number,)) for number in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 64
    assert len(made) == 1
    assert boto3.DEFAULT_SESSION is default


def test_the_constructor_does_no_io_and_closing_twice_is_fine(s3: FakeS3) -> None:
    """Nothing is connected before the first request; after close every call says so."""
    store = _store(s3)
    assert s3.connections == 0
    store.close()
    used = _store(s3)
    used.create("p/k", b"x")
    for each in (store, used):
        each.close()
        each.close()
        with pytest.raises(ClosedError):
            each.get("p/k")


def test_connections_are_used_again_after_every_kind_of_answer(s3: FakeS3) -> None:
    """Reads, refusals, absences and listings leave the connection fit for the next request."""
    store = _store(s3)
    for _ in range(5):
        store.create("p/k", b"body")
        store.create("p/empty", b"")
        store.get("p/k")
        store.get("p/empty")
        store.get("p/absent")
        store.list("p/")
    assert s3.connections == 1


def test_more_requests_than_max_concurrency_keep_their_connections(s3: FakeS3) -> None:
    """The pool holds every connection that the executor can open, so none is thrown away and made again."""
    store, count = _store(s3, max_concurrency=12), 24
    s3.objects["p/k"] = b"x"
    for _ in range(2):
        holds = [Hold() for _ in range(count)]
        for hold in holds:
            s3.script(on("GetObject"), hold)
        threads = [threading.Thread(target=store.get, args=("p/k",)) for _ in range(count)]
        for thread in threads:
            thread.start()
        assert all(hold.arrived.wait(20) for hold in holds)
        for hold in holds:
            hold.release.set()
        for thread in threads:
            thread.join()
    assert s3.connections == count


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_makes_a_client_and_connections_of_its_own(s3: FakeS3) -> None:
    """Forked while another thread is making the client, under its lock, the child works and the parent goes on."""
    store = _store(s3)
    store.create("p/parent", b"x")
    store._box._lock().acquire()
    child = os.fork()
    if child == 0:
        status = 1
        signal.alarm(20)  # a deadlock ends the child, and so fails the test
        try:
            status = 0 if store.create("p/child", b"x") and store.get("p/parent") == b"x" else 2
        finally:
            os._exit(status)
    store._box._lock().release()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert store.create("p/parent", b"x") is False
    by_parent = {request.connection for request in s3.seen("PutObject", "p/parent")}
    by_child = {request.connection for request in s3.seen("PutObject", "p/child")}
    assert by_parent.isdisjoint(by_child)
    assert s3.connections == 2


def test_requests_name_this_library(s3: FakeS3) -> None:
    """An operator can tell in the store's log who wrote."""
    _store(s3).create("p/k", b"x")
    assert "s3capture/" in s3.requests[0].headers["user-agent"]


def test_describe_names_bucket_and_place_without_secrets(s3: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """An endpoint of the environment is named once known, without the password in it; AWS by its region."""
    assert _store(s3).describe() == f"s3://capture/p at {s3.endpoint_url}"
    aws = BotoStore(Settings.of(url="s3://capture/p", run="r", region="eu-west-1"))
    assert aws.describe() == "s3://capture/p at AWS eu-west-1"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://user:hunter2@127.0.0.1:{s3.port}")
    of_environment = BotoStore(Settings.of(url="s3://capture/p", run="r", region="us-east-1"))
    of_environment.create("p/k", b"x")
    assert of_environment.describe() == f"s3://capture/p at http://127.0.0.1:{s3.port}"


def test_a_wrong_profile_is_a_matter_of_configuration(s3: FakeS3, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails before the client exists is one of our kinds too, and the next call tries anew."""
    monkeypatch.setenv("AWS_PROFILE", "nowhere")
    store = _store(s3)
    with pytest.raises(StoreConfigError, match="nowhere"):
        store.create("p/k", b"x")
    monkeypatch.delenv("AWS_PROFILE")
    assert store.create("p/k", b"x") is True


# Plain behaviour, also on real servers


@pytest.fixture(params=["fake", "seaweed", "moto"])
def plain(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    if request.param == "fake":
        server = request.getfixturevalue("s3")
        endpoint_url, bucket = server.endpoint_url, server.bucket
    elif request.param == "seaweed":
        server = request.getfixturevalue("seaweed")
        endpoint_url, bucket = server.endpoint_url, request.getfixturevalue("bucket")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", server.access_key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", server.secret_key)
    else:
        endpoint_url, bucket = request.getfixturevalue("moto_server"), request.getfixturevalue("moto_bucket")
    settings = Settings.of(url=f"s3://{bucket}/p", run="r", endpoint_url=endpoint_url, region="us-east-1")
    store = BotoStore(settings)
    yield store
    store.close()


def test_a_key_is_created_once_read_listed_and_deleted(plain: Store) -> None:
    """The plain life of an object, the same on every server."""
    body = bytes(range(256)) * 40
    assert plain.get("p/r/a/k1") is None
    assert plain.create("p/r/a/k1", body) is True
    assert plain.create("p/r/a/k1", b"other") is False
    assert plain.create("p/r/b/k2", b"") is True
    assert plain.get("p/r/a/k1") == body
    assert plain.get("p/r/b/k2") == b""
    rows = {row.key: row for row in plain.list("p/r/")}
    assert {key: row.size for key, row in rows.items()} == {"p/r/a/k1": len(body), "p/r/b/k2": 0}
    assert all(row.stamp for row in rows.values())
    assert sorted(plain.list_folders("p/r/")) == ["p/r/a/", "p/r/b/"]
    assert plain.list_loose("p/r/") == []
    assert list(plain.list_loose("p/r/a/")) == ["p/r/a/k1"]
    assert plain.get_range("p/r/a/k1", 256, 3) == bytes([0, 1, 2])
    assert plain.get_range("p/r/a/k1", len(body) - 2, 2) == body[-2:]
    assert plain.get_range("p/r/a/never", 0, 1) is None
    assert plain.delete(["p/r/a/k1", "p/r/b/k2", "p/r/never"]) == {}
    assert plain.list("p/r/") == []
    assert plain.get("p/r/a/k1") is None


def test_more_than_one_page_is_listed_and_deleted_whole(plain: Store) -> None:
    """Twelve hundred keys of digests take two pages and two batches."""
    keys = {f"p/r/{hashlib.sha256(bytes([n % 256, n // 256])).hexdigest()[:12]}" for n in range(1200)}
    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(lambda key: plain.create(key, b""), keys))
    assert {row.key for row in plain.list("p/r/")} == keys
    assert plain.delete(sorted(keys)) == {}
    assert plain.list("p/r/") == []


def test_a_missing_bucket_is_named(plain: Store) -> None:
    """Reading where no bucket is tells the bucket; no server may make it look like an absent key."""
    nowhere = BotoStore(replace(plain._settings, url="s3://no-such-bucket-here/p"))  # type: ignore[attr-defined]
    with pytest.raises(StoreError, match="no-such-bucket-here"):
        nowhere.get("p/k")
