"""A bucket behind boto3: each method sends its request once and says what came of it.

The rule of this module: one call, one wire attempt. boto3's retries are off (see
docs/decisions/0003-one-wire-attempt.md), and so is its region redirect, because a resent create meets its own first
success as "exists". An answer that cannot be told from a cut one is not believed, and only an explicit NoSuchKey means
that a key is absent: puts are acknowledged, and records deleted, on what these methods return.
"""

from __future__ import annotations

import base64
import hashlib
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, TypeVar

from botocore.exceptions import ClientError

from s3capture.effects import ObjectInfo
from s3capture.errors import CaptureError, StoreConfigError
from s3capture.settings import Settings
from s3capture.store.base import TransientStoreError
from s3capture.store.boto_client import ClientBox
from s3capture.store.boto_errors import classify, code_of, is_denied, needs_new_credentials, one_line, status_of
from s3capture.store.boto_list import pages

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client
    from mypy_boto3_s3.type_defs import DeleteObjectsOutputTypeDef, ListObjectsV2OutputTypeDef

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

MAX_DELETE_BATCH = 1000
"""Keys in one DeleteObjects request: S3's own limit; some servers accept more, some answer MalformedXML."""

_BATCH_REFUSALS = frozenset(
    {"MissingContentMD5", "InvalidRequest", "InvalidDigest", "BadDigest", "XAmzContentSHA256Mismatch",
     "MissingContentLength", "MalformedXML", "InvalidArgument", "NotImplemented", "MethodNotAllowed", "400"}
)  # fmt: skip
"""Codes by which stores refuse DeleteObjects as such, mostly for want of the one checksum that they accept."""

_CHECKSUM_REFUSALS = frozenset({"InvalidRequest", "MissingContentMD5", "MissingUploadObjectWithObjectLockHeaders"})
"""Codes by which AWS and moto refuse a PUT without a checksum, as they do where Object Lock has a default retention."""

_GONE = frozenset({"NoSuchKey", "NoSuchVersion"})
"""Codes of some stores for deleting an absent key, which is no failure."""


class BotoStore:
    """The ``Store`` of one bucket. Safe to share between threads and across forks; the constructor does no I/O.

    The client is made at first use, one for each process, from a session of its own: boto3's default
    session is not safe to use from threads. It is made anew when its credentials have expired.
    """

    def __init__(self, settings: Settings, *, storage_class: str | None = None) -> None:
        """Take checked settings; ``storage_class`` is S3's name of the class that objects are created in."""
        self._settings = settings
        self._box = ClientBox(settings)
        self._answered = False
        self._single_deletes = False
        self._sends_checksums = False
        owner = settings.expected_bucket_owner
        self._common: dict[str, Any] = {"Bucket": settings.bucket} | ({"ExpectedBucketOwner": owner} if owner else {})
        self._as_stored: dict[str, Any] = {
            name: value
            for name, value in (
                ("ServerSideEncryption", settings.sse),
                ("SSEKMSKeyId", settings.sse_kms_key_id),
                ("StorageClass", storage_class),
            )
            if value is not None
        }

    def create(self, key: str, body: bytes) -> bool:
        """Create ``key`` if absent: True when this request did it, False when the store says it exists.

        412 and 304 are the store's refusals, whatever their error code. A 409 is a ``ContendedError``: ask
        again. Never multipart, where the condition does not hold everywhere; so a body above
        ``max_object_bytes`` is a ``StoreConfigError`` before anything is sent.

        A store that refuses a PUT without a checksum gets Content-MD5 from then on: the refused request is a
        ``TransientStoreError``, in no doubt.
        """
        limit = self._settings.max_object_bytes
        if len(body) > limit:
            raise StoreConfigError(
                f"cannot create {key!r} in {self.describe()}: its body has {len(body):,} bytes and max_object_bytes "
                f"is {limit:,}; nothing was sent; raise max_object_bytes or store less in one record"
            )

        def put(client: S3Client) -> bool:
            checked = self._sends_checksums
            try:
                client.put_object(
                    Key=key,
                    Body=body,
                    IfNoneMatch="*",
                    ContentType=_content_type(key, body),
                    **(_checksum(body) if checked else {}),
                    **self._as_stored,
                    **self._common,
                )
            except ClientError as error:
                if status_of(error) in (412, 304):
                    return False
                if not checked and status_of(error) == 400 and code_of(error) in _CHECKSUM_REFUSALS:
                    self._sends_checksums = True
                    raise TransientStoreError(
                        f"cannot create {key!r} in {self.describe()}: 400 {code_of(error)}, perhaps for want of a "
                        "checksum; the next attempt sends one",
                        doubtful=False,
                    ) from error
                raise
            return True

        return self._perform("create", key, put)

    def get(self, key: str) -> bytes | None:
        """Return the body of ``key``, or None when the store says NoSuchKey.

        Any other 404 is a ``StoreConfigError``: a web server that is no S3 says 404 to everything, and
        "absent" is an answer that puts are acknowledged on. An object above twice ``max_object_bytes`` is a
        ``StoreConfigError`` too, raised before it fills the memory; no setting of ours wrote it.
        """
        limit = 2 * self._settings.max_object_bytes

        def read(client: S3Client) -> bytes | None:
            try:
                reply = client.get_object(Key=key, **self._common)
            except ClientError as error:
                if code_of(error) == "NoSuchKey" and status_of(error) == 404:
                    return None
                raise
            with closing(reply["Body"]) as stream:
                # With a Content-Length, read() to the end is what makes botocore notice a cut body.
                declared = reply.get("ContentLength")
                if declared is None:
                    body = _read_at_most(stream.read, limit)
                else:
                    body = stream.read() if declared <= limit else None
            if body is None:
                raise StoreConfigError(
                    f"cannot read {key!r} in {self.describe()}: it has {declared or 'more than the allowed'} bytes, "
                    f"above {limit:,}, twice max_object_bytes; raise max_object_bytes if the object is ours"
                )
            return body

        return self._perform("get", key, read)

    def get_range(self, key: str, start: int, length: int) -> bytes | None:
        """Return ``length`` bytes of ``key`` from ``start``, or None when the store says NoSuchKey.

        A store that knows no ranges sends the whole object, which is then read as far as the range goes. Anything but
        exactly the range is a ``TransientStoreError``.
        """

        def read(client: S3Client) -> bytes | None:
            try:
                reply = client.get_object(Key=key, Range=f"bytes={start}-{start + length - 1}", **self._common)
            except ClientError as error:
                if code_of(error) == "NoSuchKey" and status_of(error) == 404:
                    return None
                raise
            told = str(reply.get("ContentRange") or "")
            with closing(reply["Body"]) as stream:
                body = stream.read(length) if told else stream.read(start + length)[start:]
            if len(body) != length or not told.startswith(f"bytes {start}-" if told else ""):
                raise TransientStoreError(
                    f"cannot read bytes {start:,} to {start + length:,} of {key!r} in {self.describe()}: the reply "
                    f"holds {len(body):,} of them, from {told!r}"
                )
            return body

        return self._perform("get", key, read)

    def list(self, prefix: str) -> Sequence[ObjectInfo]:
        """Return every key under ``prefix`` once, in no order, over all pages.

        ``stamp`` is the time of the last change and the ETag, empty if the store sends no ETag: times are to the
        second, in which a key may be deleted and made anew. ``size`` is 0 if it sends none. One request for each
        page; an error on any page fails the whole LIST.
        """
        rows: dict[str, ObjectInfo] = {}
        for page in self._pages(prefix):
            for item in page.get("Contents", ()):
                key = item["Key"]
                changed = item.get("LastModified")
                etag = item.get("ETag")
                stamp = f"{changed.isoformat() if changed else ''}/{etag}" if etag else ""
                rows[key] = ObjectInfo(key, item.get("Size") or 0, stamp)
        return [*rows.values()]

    def list_folders(self, prefix: str) -> Sequence[str]:
        """Return the common prefixes directly below ``prefix``, each once and ending in ``/``."""
        folders: dict[str, None] = {}
        for page in self._pages(prefix, Delimiter="/"):
            for item in page.get("CommonPrefixes", ()):
                folders[item["Prefix"]] = None
        return [*folders]

    def list_loose(self, prefix: str) -> Sequence[str]:
        """Return the keys directly below ``prefix``, each once; those in its folders are left out."""
        keys: dict[str, None] = {}
        for page in self._pages(prefix, Delimiter="/"):
            for item in page.get("Contents", ()):
                keys[item["Key"]] = None
        return [*keys]

    def delete(self, keys: Sequence[str]) -> dict[str, str]:
        """Delete ``keys`` and return those that the store says it kept, each with its code and words.

        A refusal for want of permission is returned like any other; a failed connection is a
        ``TransientStoreError``, after which any subset may be gone. Where the store refuses DeleteObjects as
        such, keys are deleted one by one from then on.
        """
        failed: dict[str, str] = {}
        distinct = [*dict.fromkeys(keys)]
        for start in range(0, len(distinct), MAX_DELETE_BATCH):
            batch = distinct[start : start + MAX_DELETE_BATCH]
            failed |= self._delete_each(batch) if self._single_deletes else self._delete_batch(batch)
        return failed

    def describe(self) -> str:
        """Return ``s3://bucket/prefix at <endpoint or AWS region>``; exact once the first request was made."""
        return self._box.describe()

    def close(self) -> None:
        """Release the connections of this process; later calls raise ``ClosedError``. Idempotent."""
        self._box.close()

    def _perform(self, action: str, key: str, call: Callable[[S3Client], _T]) -> _T:
        """Run ``call`` once and turn whatever it raises into one of our kinds."""
        client: S3Client | None = None
        try:
            client = self._box.client()
            answer = call(client)
        except (CaptureError, MemoryError):
            raise
        except Exception as error:
            store = self.describe()
            if client is not None and needs_new_credentials(error, action=action):
                self._box.forget(client)
            raise classify(error, action=action, key=key, store=store, answered=self._answered) from error
        self._answered = True
        return answer

    def _pages(self, prefix: str, **extra: str) -> Iterator[ListObjectsV2OutputTypeDef]:
        def fetch(token: str | None) -> ListObjectsV2OutputTypeDef:
            request: dict[str, Any] = {"Prefix": prefix, **extra, **self._common}
            if token is not None:
                request["ContinuationToken"] = token
            return self._perform("list", prefix, lambda client: client.list_objects_v2(**request))

        return pages(fetch, prefix=prefix, store=self.describe())

    def _delete_batch(self, batch: Sequence[str]) -> dict[str, str]:
        # Not quiet: in quiet mode, success looks the same as a reply that was cut before its first error.
        request: Any = {"Objects": [{"Key": key} for key in batch], "Quiet": False}

        def send(client: S3Client) -> DeleteObjectsOutputTypeDef | str | None:
            try:
                return client.delete_objects(Delete=request, **self._common)
            except ClientError as error:
                if is_denied(error):
                    return _reason(error.response.get("Error", {}))
                if not _refuses_batches(error):
                    raise
                self._delete_singly_from_now_on(error)
                return None

        reply = self._perform("delete", _some(batch), send)
        if isinstance(reply, str):
            return dict.fromkeys(batch, reply)
        if reply is None:
            return self._delete_each(batch)
        deleted = {row.get("Key", "") for row in reply.get("Deleted", ())}
        errors = {row.get("Key", ""): row for row in reply.get("Errors", ())}
        failed = {key: _reason(errors[key]) for key in batch if key in errors and errors[key].get("Code") not in _GONE}
        # Keys that the reply does not mention are in doubt; deleting twice is harmless, believing silence is not.
        return failed | self._delete_each([key for key in batch if key not in deleted and key not in errors])

    def _delete_each(self, keys: Sequence[str]) -> dict[str, str]:
        reasons = {key: self._delete_one(key) for key in keys}
        return {key: reason for key, reason in reasons.items() if reason is not None}

    def _delete_one(self, key: str) -> str | None:
        """Delete one key; return the store's reason when it may not be deleted."""

        def send(client: S3Client) -> str | None:
            try:
                client.delete_object(Key=key, **self._common)
            except ClientError as error:
                if is_denied(error):
                    return _reason(error.response.get("Error", {}))
                if code_of(error) not in _GONE:
                    raise
            return None

        return self._perform("delete", key, send)

    def _delete_singly_from_now_on(self, error: ClientError) -> None:
        if not self._single_deletes:
            self._single_deletes = True
            _log.warning(
                "%s refuses DeleteObjects (%s %s); deleting key by key instead, which is slower",
                *(self.describe(), status_of(error), code_of(error)),
            )


def _content_type(key: str, body: bytes) -> str:
    if key.endswith(".parquet"):
        return "application/vnd.apache.parquet"
    return "application/zstd" if body else "application/octet-stream"


def _checksum(body: bytes) -> dict[str, Any]:
    """Content-MD5, the one that every store knows; a header of its own, so that the body is not sent chunked."""
    return {"ContentMD5": base64.b64encode(hashlib.md5(body, usedforsecurity=False).digest()).decode("ascii")}


def _refuses_batches(error: ClientError) -> bool:
    return status_of(error) in (405, 411, 501) or (status_of(error) == 400 and code_of(error) in _BATCH_REFUSALS)


def _read_at_most(read: Callable[[int], bytes], limit: int) -> bytes | None:
    """Read a body of undeclared length, or return None once it exceeds ``limit`` bytes."""
    parts: list[bytes] = []
    total = 0
    while chunk := read(1 << 20):
        total += len(chunk)
        if total > limit:
            return None
        parts.append(chunk)
    return b"".join(parts)


def _reason(row: Any) -> str:
    """Return the code and words of one refused delete."""
    return one_line(f"{row.get('Code') or 'unknown error'}: {row.get('Message') or 'no reason given'}", 200)


def _some(keys: Sequence[str]) -> str:
    return keys[0] if len(keys) == 1 else f"{keys[0]} and {len(keys) - 1} more"
