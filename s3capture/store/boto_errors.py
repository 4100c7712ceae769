"""What each failure of boto3, botocore or urllib3 means: one table, one function.

The rule of this module: a failure is judged by its type, by the S3 error code and by the HTTP status, never
by words in a message, and becomes one of the kinds in ``errors`` and ``store.base``. If a row is wrong, a
write that may have landed counts as surely lost, or a wrong password is asked again until the deadline.

``doubtful`` errs on the side of doubt: a wrong True costs a read, a wrong False costs the safety of a put.
That is why a 503 counts as a throttle only if an S3 error code came with it. A bare one is written by a proxy,
and proxies also write it when they lose the store in the middle of a request that it may have applied.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator
from dataclasses import dataclass, replace

import urllib3.exceptions
from botocore import exceptions as aws

from s3capture.errors import StoreAccessError, StoreConfigError, StoreError, UnsupportedStoreError
from s3capture.store.base import ContendedError, TransientStoreError


@dataclass(frozen=True, slots=True)
class Rule:
    """One row: the kind to raise, what to do next, and what else follows from the failure.

    ``doubtful`` matters for the transient kinds only. ``stale`` says that a new session, which reads
    files and environment again, may succeed where this one failed. ``mid_run`` replaces the kind by a
    transient one when the store had accepted these credentials before.
    """

    kind: type[StoreError]
    remedy: str
    doubtful: bool = False
    stale: bool = False
    mid_run: bool = False


_LATER = "the same request may be sent again"
_PERMISSIONS = (
    "let this identity use s3:PutObject, s3:GetObject, s3:DeleteObject and s3:ListBucket here (without the last, a "
    "missing key reads as 403), and the KMS key if there is one; check expected_bucket_owner if it is set"
)
_CHAIN = (
    "boto3 looks in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, in the AWS_PROFILE of ~/.aws/credentials and "
    "~/.aws/config, then for a web identity, container or instance role: provide one of them"
)

_THROTTLED = Rule(TransientStoreError, f"the store asks for fewer requests; {_LATER} later")
_FULL = Rule(TransientStoreError, f"free or add space on the store; {_LATER} then")
_SLOW_UPLOAD = Rule(TransientStoreError, f"the store gave up waiting for the request; {_LATER}")
_BROKEN = Rule(TransientStoreError, f"the store or something before it failed; {_LATER}", doubtful=True)
_LOST = Rule(TransientStoreError, f"no whole reply came; {_LATER}", doubtful=True)
_UNREACHED = Rule(TransientStoreError, "check that the endpoint is right and running, and the way to it")
_BAD_CERTIFICATE = Rule(TransientStoreError, "check the endpoint's name, or point AWS_CA_BUNDLE at its authority")
_CONTENDED = Rule(ContendedError, f"another request on this key was under way; {_LATER}", doubtful=True)
_EXPIRED = Rule(
    TransientStoreError, "renew the credentials where boto3 found them; they are read again each time", stale=True
)
_SKEWED = Rule(TransientStoreError, "the clock of this machine or of the store is wrong: set it right (NTP)")
_NO_CREDENTIALS = Rule(StoreAccessError, _CHAIN, stale=True, mid_run=True)
_WRONG_CREDENTIALS = Rule(StoreAccessError, f"the access key, secret or token is not the store's; {_CHAIN}", stale=True)
_DENIED = Rule(StoreAccessError, _PERMISSIONS)
_NO_BUCKET = Rule(StoreConfigError, "make the bucket, or correct url, region or endpoint_url")
_WRONG_REGION = Rule(StoreConfigError, "the bucket is elsewhere: set region (or endpoint_url) to where it is")
_KMS = Rule(StoreConfigError, "check sse_kms_key_id and the state of that key")
_NOT_CONDITIONAL = Rule(
    UnsupportedStoreError,
    "it does not support create-if-absent (If-None-Match: *), without which no capture is safe; use another store",
)
_REFUSED = Rule(StoreConfigError, "check bucket, region, endpoint_url and whether this store speaks this part of S3")
_SETUP = Rule(StoreConfigError, "check the settings, the AWS_* environment and ~/.aws/config")

_BY_CODE: dict[str, Rule] = {
    **dict.fromkeys(
        (
            "SlowDown", "SlowDownRead", "SlowDownWrite", "ServiceUnavailable", "Throttling", "ThrottlingException",
            "ThrottledException", "RequestThrottled", "RequestThrottledException", "RequestLimitExceeded",
            "BandwidthLimitExceeded", "TooManyRequests", "TooManyRequestsException", "KMS.ThrottlingException",
        ),
        _THROTTLED,
    ),
    "RequestTimeout": _SLOW_UPLOAD,
    "IncompleteBody": _SLOW_UPLOAD,
    "InternalError": _BROKEN,
    **dict.fromkeys(("XMinioStorageFull", "InsufficientStorage", "QuotaExceeded"), _FULL),
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired"), _EXPIRED),
    **dict.fromkeys(("RequestTimeTooSkewed", "RequestExpired"), _SKEWED),
    **dict.fromkeys(("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken"), _WRONG_CREDENTIALS),
    **dict.fromkeys(("AccessDenied", "AllAccessDisabled", "AccountProblem", "NotSignedUp"), _DENIED),
    **dict.fromkeys(("NoSuchBucket", "InvalidBucketName"), _NO_BUCKET),
    **dict.fromkeys(
        (
            "PermanentRedirect", "TemporaryRedirect", "Redirect", "AuthorizationHeaderMalformed",
            "IllegalLocationConstraintException",
        ),
        _WRONG_REGION,
    ),
    **dict.fromkeys(
        ("KMS.DisabledException", "KMS.NotFoundException", "KMS.KMSInvalidStateException"),
        _KMS,
    ),
}  # fmt: skip

_BY_STATUS: dict[int, Rule] = {
    **dict.fromkeys((301, 302, 307, 308), _WRONG_REGION),
    401: _WRONG_CREDENTIALS,
    403: _DENIED,
    408: _LOST,
    409: _CONTENDED,
    429: _THROTTLED,
    507: _FULL,
}

# First match wins, so a subclass stands before its base.
_BY_TYPE: tuple[tuple[type[BaseException], Rule], ...] = (
    (aws.ConnectTimeoutError, _UNREACHED),
    (aws.EndpointConnectionError, _UNREACHED),
    (aws.ProxyConnectionError, _UNREACHED),
    (aws.ConnectionError, _LOST),
    (aws.HTTPClientError, _LOST),
    (aws.IncompleteReadError, _LOST),
    (aws.ChecksumError, _LOST),
    (aws.FlexibleChecksumError, _LOST),
    (aws.NoCredentialsError, _NO_CREDENTIALS),
    (aws.PartialCredentialsError, _NO_CREDENTIALS),
    (aws.CredentialRetrievalError, _NO_CREDENTIALS),
    (aws.MetadataRetrievalError, _NO_CREDENTIALS),
    (aws.NoAuthTokenError, _NO_CREDENTIALS),
    (aws.TokenRetrievalError, _NO_CREDENTIALS),
    (aws.SSOError, _NO_CREDENTIALS),
    # botocore grew this one late; older versions that we accept do not have it.
    *((kind, _NO_CREDENTIALS) for kind in (getattr(aws, "LoginError", None),) if kind is not None),
    (urllib3.exceptions.HTTPError, _LOST),
    (FileNotFoundError, _SETUP),
    (PermissionError, _SETUP),
    (OSError, _LOST),
)

_OURS = frozenset({"PutObject", "GetObject", "ListObjectsV2", "DeleteObjects", "DeleteObject", "CreateSession"})
_VERBS = {"create": "create", "get": "read", "list": "list", "delete": "delete"}
_CHANGES = frozenset({"create", "delete"})
_USER_INFO = re.compile(r"//[^/@\s]*@")


def status_of(error: aws.ClientError) -> int:
    """Return the HTTP status of the reply, 0 if there was none."""
    return int(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0))


def code_of(error: aws.ClientError) -> str:
    """Return the S3 error code, or what botocore puts in its place: the status in digits, or nothing."""
    return str(error.response.get("Error", {}).get("Code") or "")


def needs_new_credentials(error: BaseException, *, action: str) -> bool:
    """Say whether a session that reads the credentials anew may succeed where this one failed."""
    return _rule(error, action).stale


def is_denied(error: BaseException) -> bool:
    """Say whether the store knows us but does not allow this: a policy, a role, or a locked object."""
    return _rule(error, "delete") is _DENIED


def one_line(text: object, limit: int = 300) -> str:
    """Return ``text`` on one line, shortened, without the user part of any address in it."""
    line = _USER_INFO.sub("//", " ".join(str(text).split()))
    return line if len(line) <= limit else line[: limit - 3] + "..."


def classify(error: BaseException, *, action: str, key: str, store: str, answered: bool = False) -> StoreError:
    """Return the error of ours that ``error`` means; the caller raises it ``from`` the original.

    ``action`` is create, get, list or delete; ``key`` the key or prefix; ``store`` its description.
    ``answered`` says that this store has accepted the same process's credentials before: credentials that are
    missing only now are about to be renewed (transient), while missing at first use they never were there.
    A read changes nothing, so it is never ``doubtful``. Refused conditions (412, 304) and a missing key
    are answers, not errors: the store looks for those first.
    """
    rule = _rule(error, action)
    if rule.mid_run and answered:
        rule = replace(rule, kind=TransientStoreError)
    what = f"cannot {_VERBS[action]} {key!r} in {store}: {_what(error)}"
    advice = f"{rule.remedy}{_region_hint(error, rule)}"
    if not issubclass(rule.kind, TransientStoreError):
        return rule.kind(f"{what}; {advice}")
    doubtful = rule.doubtful and action in _CHANGES
    return rule.kind(f"{what}; {'it may have been applied; ' if doubtful else ''}{advice}", doubtful=doubtful)


def _rule(error: BaseException, action: str) -> Rule:
    if isinstance(error, aws.ClientError):
        if error.operation_name not in _OURS:
            return _credential_service_rule(error)
        return _reply_rule(code_of(error), status_of(error), action)
    if isinstance(error, aws.SSLError) and any(isinstance(e, ssl.SSLCertVerificationError) for e in _nested(error)):
        return _BAD_CERTIFICATE
    return next((rule for kind, rule in _BY_TYPE if isinstance(error, kind)), _SETUP)


def _reply_rule(code: str, status: int, action: str) -> Rule:
    if action == "create" and (status == 501 or code == "NotImplemented"):
        return _NOT_CONDITIONAL
    if code in _BY_CODE:
        return _BY_CODE[code]
    if status in _BY_STATUS:
        return _BY_STATUS[status]
    if status == 503 and code and not code.isdigit():
        return _THROTTLED
    return _BROKEN if status >= 500 and status != 501 else _REFUSED


def _credential_service_rule(error: aws.ClientError) -> Rule:
    """Judge a refusal by STS or SSO, which botocore asks on its way to signing: nothing reached the store."""
    rule = _reply_rule(code_of(error), status_of(error), "get")
    if issubclass(rule.kind, TransientStoreError):
        return replace(rule, doubtful=False, stale=True)
    return _NO_CREDENTIALS


def _nested(error: BaseException) -> Iterator[BaseException]:
    """Walk the exceptions that botocore and urllib3 wrapped into one another."""
    queue: list[object] = [error]
    seen: set[int] = set()
    while queue:
        item = queue.pop()
        if not isinstance(item, BaseException) or id(item) in seen:
            continue
        seen.add(id(item))
        yield item
        queue += [item.__cause__, item.__context__, *item.args]
        queue += getattr(item, "kwargs", {}).values()


def _what(error: BaseException) -> str:
    if not isinstance(error, aws.ClientError):
        return f"{type(error).__name__}: {one_line(error)}"
    code, status = code_of(error), status_of(error)
    said = one_line(error.response.get("Error", {}).get("Message") or "no reason given", 200)
    head = str(status) if code in ("", str(status)) else f"{status} {code}"
    source = "" if error.operation_name in _OURS else f" from {error.operation_name}"
    request_id = error.response.get("ResponseMetadata", {}).get("RequestId")
    return f"{head}{source} ({said})" + (f" [request {one_line(request_id, 80)}]" if request_id else "")


def _region_hint(error: BaseException, rule: Rule) -> str:
    """Name the right region when the store told it, in a header or in the error body."""
    if rule is not _WRONG_REGION or not isinstance(error, aws.ClientError):
        return ""
    headers = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {})
    told = headers.get("x-amz-bucket-region") or error.response.get("Error", {}).get("Region")
    return f"; the store says region={one_line(told, 40)!r}" if told else ""
