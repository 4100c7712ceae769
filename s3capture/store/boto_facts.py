"""What boto3 can tell of a bucket beyond the ``Store``: for ``doctor``, which may ask more than a capture needs.

The rule of this module: a fact that the store refuses, or does not know, is None and never an error. Captures must
not need the permissions that these requests take.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Any

import boto3.session
from botocore.exceptions import BotoCoreError, ClientError

from s3capture.settings import Settings
from s3capture.store.boto_client import make_client

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


@dataclass(frozen=True, slots=True)
class BucketFacts:
    """``versioning`` is "enabled", "suspended" or "off"; ``skew_s`` is our clock minus the store's, in seconds.

    ``object_lock`` is "off", "on" (no default retention), or the default retention, such as "30 days (GOVERNANCE)".
    """

    versioning: str | None
    skew_s: float | None
    object_lock: str | None = None


def credential_source() -> str | None:
    """Return where boto3's chain finds credentials (its own word, such as "env"), or None if nowhere."""
    try:
        found = boto3.session.Session().get_credentials()
    except BotoCoreError:  # a profile that does not exist, half a pair of keys: the first request says it better
        return None
    return None if found is None else str(found.method or "unnamed")


def bucket_facts(settings: Settings) -> BucketFacts:
    """Ask for versioning and Object Lock, and read the store's clock off the first reply, whatever the reply is."""
    owner = settings.expected_bucket_owner
    request: dict[str, Any] = {"Bucket": settings.bucket} | ({"ExpectedBucketOwner": owner} if owner else {})
    with closing(make_client(settings)) as client:
        try:
            reply: Mapping[str, Any] = client.get_bucket_versioning(**request)
        except ClientError as error:
            return BucketFacts(None, _skew(error.response))
        except BotoCoreError:
            return BucketFacts(None, None)
        versioning = str(reply.get("Status") or "off").lower()
        # A bucket without versions cannot have locked ones.
        lock = "off" if versioning == "off" else _object_lock(client, request)
    return BucketFacts(versioning, _skew(reply), lock)


def _object_lock(client: S3Client, request: dict[str, Any]) -> str | None:
    try:
        reply: Mapping[str, Any] = client.get_object_lock_configuration(**request)
    except ClientError as error:
        code = str(error.response.get("Error", {}).get("Code") or "")
        return "off" if code == "ObjectLockConfigurationNotFoundError" else None
    except BotoCoreError:
        return None
    configuration = reply.get("ObjectLockConfiguration") or {}
    default = (configuration.get("Rule") or {}).get("DefaultRetention")
    if not default:
        return "on" if configuration.get("ObjectLockEnabled") == "Enabled" else "off"
    period = f"{default['Days']} days" if default.get("Days") else f"{default.get('Years')} years"
    return f"{period} ({default.get('Mode')})"


def _skew(reply: Mapping[str, Any]) -> float | None:
    now = datetime.now(UTC)
    date = reply.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date", "")
    try:
        theirs = parsedate_to_datetime(date)
    except ValueError:
        return None
    # A date without a zone is UTC by the rule of HTTP.
    return (now - (theirs if theirs.tzinfo else theirs.replace(tzinfo=UTC))).total_seconds()
