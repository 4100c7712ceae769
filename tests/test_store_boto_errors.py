"""What each failure of boto3 means: the whole table, row by row."""

from __future__ import annotations

import inspect
import ssl
from typing import Any

import pytest
import urllib3.exceptions
from botocore import exceptions as aws

from s3capture.errors import StoreAccessError, StoreConfigError, StoreError, UnsupportedStoreError
from s3capture.store.base import ContendedError, TransientStoreError
from s3capture.store.boto_errors import classify, is_denied, needs_new_credentials, one_line

STORE = "s3://capture/p at http://127.0.0.1:1"
DOUBTFUL, SURE = True, False

CREATE_REPLIES: list[tuple[int, str, type[StoreError], bool | None]] = [
    # Throttles that carry an S3 code: the store surely did nothing.
    (503, "SlowDown", TransientStoreError, SURE),
    (503, "ServiceUnavailable", TransientStoreError, SURE),
    (503, "XMinioServerNotInitialized", TransientStoreError, SURE),
    (400, "ThrottlingException", TransientStoreError, SURE),
    (400, "KMS.ThrottlingException", TransientStoreError, SURE),
    (429, "", TransientStoreError, SURE),
    (429, "TooManyRequests", TransientStoreError, SURE),
    (507, "", TransientStoreError, SURE),
    (507, "XMinioStorageFull", TransientStoreError, SURE),
    (400, "RequestTimeout", TransientStoreError, SURE),
    # A bare 503 is a proxy's, which may have lost a store that applied the request.
    (503, "503", TransientStoreError, DOUBTFUL),
    (503, "", TransientStoreError, DOUBTFUL),
    (500, "InternalError", TransientStoreError, DOUBTFUL),
    (500, "500", TransientStoreError, DOUBTFUL),
    (502, "", TransientStoreError, DOUBTFUL),
    (504, "", TransientStoreError, DOUBTFUL),
    (520, "520", TransientStoreError, DOUBTFUL),
    (408, "408", TransientStoreError, DOUBTFUL),
    # Competing requests: ask again.
    (409, "ConditionalRequestConflict", ContendedError, DOUBTFUL),
    (409, "OperationAborted", ContendedError, DOUBTFUL),
    (409, "ConcurrentModification", ContendedError, DOUBTFUL),
    (409, "", ContendedError, DOUBTFUL),
    # Credentials and clocks that pass with time.
    (400, "ExpiredToken", TransientStoreError, SURE),
    (403, "ExpiredTokenException", TransientStoreError, SURE),
    (400, "TokenRefreshRequired", TransientStoreError, SURE),
    (403, "RequestTimeTooSkewed", TransientStoreError, SURE),
    (403, "RequestExpired", TransientStoreError, SURE),
    # A person must act.
    (403, "AccessDenied", StoreAccessError, None),
    (403, "403", StoreAccessError, None),
    (403, "SomethingNew", StoreAccessError, None),
    (401, "", StoreAccessError, None),
    (403, "SignatureDoesNotMatch", StoreAccessError, None),
    (403, "InvalidAccessKeyId", StoreAccessError, None),
    (400, "InvalidToken", StoreAccessError, None),
    (404, "NoSuchBucket", StoreConfigError, None),
    (404, "404", StoreConfigError, None),
    (301, "PermanentRedirect", StoreConfigError, None),
    (307, "TemporaryRedirect", StoreConfigError, None),
    (400, "AuthorizationHeaderMalformed", StoreConfigError, None),
    (400, "IllegalLocationConstraintException", StoreConfigError, None),
    (400, "KMS.DisabledException", StoreConfigError, None),
    (400, "InvalidArgument", StoreConfigError, None),
    (400, "KeyTooLongError", StoreConfigError, None),
    (405, "MethodNotAllowed", StoreConfigError, None),
    (411, "MissingContentLength", StoreConfigError, None),
    (501, "NotImplemented", UnsupportedStoreError, None),
    (501, "", UnsupportedStoreError, None),
    (400, "NotImplemented", UnsupportedStoreError, None),
]

TYPES: dict[type[BaseException], tuple[type[StoreError], bool | None]] = {
    aws.ConnectTimeoutError: (TransientStoreError, SURE),
    aws.EndpointConnectionError: (TransientStoreError, SURE),
    aws.ProxyConnectionError: (TransientStoreError, SURE),
    aws.ConnectionError: (TransientStoreError, DOUBTFUL),
    aws.SSLError: (TransientStoreError, DOUBTFUL),
    aws.HTTPClientError: (TransientStoreError, DOUBTFUL),
    aws.ConnectionClosedError: (TransientStoreError, DOUBTFUL),
    aws.ReadTimeoutError: (TransientStoreError, DOUBTFUL),
    aws.ResponseStreamingError: (TransientStoreError, DOUBTFUL),
    aws.IncompleteReadError: (TransientStoreError, DOUBTFUL),
    aws.ChecksumError: (TransientStoreError, DOUBTFUL),
    aws.FlexibleChecksumError: (TransientStoreError, DOUBTFUL),
    **dict.fromkeys(
        (
            aws.NoCredentialsError,
            aws.PartialCredentialsError,
            aws.CredentialRetrievalError,
            aws.MetadataRetrievalError,
            aws.NoAuthTokenError,
            aws.TokenRetrievalError,
            aws.SSOError,
            aws.SSOTokenLoadError,
            aws.UnauthorizedSSOTokenError,
        ),
        (StoreAccessError, None),
    ),
}


def _reply(status: int, code: str, operation: str = "PutObject", **more: Any) -> aws.ClientError:
    response: Any = {
        "Error": {"Code": code, "Message": "the store's words", **more.get("error", {})},
        "ResponseMetadata": {"HTTPStatusCode": status, "RequestId": "R1", "HTTPHeaders": more.get("headers", {})},
    }
    return aws.ClientError(response, operation)


def _botocore_types() -> list[type[BaseException]]:
    found = [
        kind
        for _, kind in inspect.getmembers(aws, inspect.isclass)
        if issubclass(kind, Exception) and not issubclass(kind, (Warning, aws.ClientError))
    ]
    return [*found, RuntimeError, KeyError]


@pytest.mark.parametrize(("status", "code", "kind", "doubtful"), CREATE_REPLIES)
def test_every_reply_to_a_create_has_its_kind_and_doubt(
    status: int, code: str, kind: type[StoreError], doubtful: bool | None
) -> None:
    """A status and code become exactly the kind of the table, with the truth about whether it may have been applied."""
    error = classify(_reply(status, code), action="create", key="p/k", store=STORE)
    assert type(error) is kind
    assert getattr(error, "doubtful", None) is doubtful
    for part in ("p/k", STORE, "create", str(status), "the store's words", "R1"):
        assert part in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize("action", ["get", "list"])
@pytest.mark.parametrize(("status", "code", "kind", "doubtful"), CREATE_REPLIES)
def test_a_read_is_never_in_doubt_and_never_judges_conditional_creates(
    action: str, status: int, code: str, kind: type[StoreError], doubtful: bool | None
) -> None:
    """The same replies to a read keep their kind, but change nothing, and say nothing about create-if-absent."""
    error = classify(_reply(status, code, "GetObject"), action=action, key="p/k", store=STORE)
    assert type(error) is (StoreConfigError if kind is UnsupportedStoreError else kind)
    assert getattr(error, "doubtful", None) is (None if doubtful is None else False)


@pytest.mark.parametrize("kind", _botocore_types(), ids=lambda kind: kind.__name__)
def test_every_exception_type_of_botocore_becomes_one_of_our_kinds(kind: type[BaseException]) -> None:
    """Connection troubles are transient, missing credentials ask for a person, and the unforeseen is a setup error."""
    login = getattr(aws, "LoginError", None)
    expected = TYPES.get(kind, (StoreConfigError, None))
    if login is not None and issubclass(kind, login):
        expected = (StoreAccessError, None)
    error = classify(kind.__new__(kind), action="create", key="p/k", store=STORE)
    assert (type(error), getattr(error, "doubtful", None)) == expected
    assert kind.__name__ in str(error)


@pytest.mark.parametrize(
    ("error", "kind", "doubtful"),
    [
        (urllib3.exceptions.ProtocolError("cut"), TransientStoreError, DOUBTFUL),
        (urllib3.exceptions.SSLError("eof"), TransientStoreError, DOUBTFUL),
        (ConnectionResetError(104, "reset"), TransientStoreError, DOUBTFUL),
        (TimeoutError("slow"), TransientStoreError, DOUBTFUL),
        (FileNotFoundError("ca.pem"), StoreConfigError, None),
        (PermissionError("credentials"), StoreConfigError, None),
        (aws.ParamValidationError(report="bad"), StoreConfigError, None),
        (aws.ProfileNotFound(profile="x"), StoreConfigError, None),
        (ValueError("Invalid endpoint: x"), StoreConfigError, None),
    ],
)
def test_errors_that_are_not_botocores_have_a_kind_too(
    error: BaseException, kind: type[StoreError], doubtful: bool | None
) -> None:
    """What leaks through boto3 unwrapped is judged by its type."""
    ours = classify(error, action="create", key="p/k", store=STORE)
    assert type(ours) is kind
    assert getattr(ours, "doubtful", None) is doubtful


def test_an_untrusted_certificate_was_never_sent_anything() -> None:
    """A failed verification, however deep it is wrapped, is sure, and the remedy names the CA bundle."""
    wrapped = urllib3.exceptions.SSLError(ssl.SSLCertVerificationError(1, "self-signed certificate"))
    error = classify(aws.SSLError(endpoint_url="https://h", error=wrapped), action="create", key="k", store=STORE)
    assert isinstance(error, TransientStoreError)
    assert error.doubtful is False
    assert "AWS_CA_BUNDLE" in str(error)


@pytest.mark.parametrize(
    "error",
    [
        _reply(301, "PermanentRedirect", headers={"x-amz-bucket-region": "eu-west-1"}),
        _reply(400, "AuthorizationHeaderMalformed", error={"Region": "eu-west-1"}),
    ],
)
def test_a_wrong_region_names_the_right_one(error: aws.ClientError) -> None:
    """Whether the store tells the region in a header or in the body, the message passes it on."""
    assert "region='eu-west-1'" in str(classify(error, action="list", key="p/", store=STORE))


def test_a_skewed_clock_is_said_to_be_one() -> None:
    """RequestTimeTooSkewed speaks of the clock, since the words of the store seldom help."""
    assert "clock" in str(classify(_reply(403, "RequestTimeTooSkewed"), action="get", key="k", store=STORE))


def test_missing_credentials_are_passing_only_after_they_worked_once() -> None:
    """Without credentials the first use needs a person; in the middle of a run they are about to be renewed."""
    error = aws.NoCredentialsError()
    first = classify(error, action="create", key="k", store=STORE)
    later = classify(error, action="create", key="k", store=STORE, answered=True)
    assert type(first) is StoreAccessError
    assert "AWS_ACCESS_KEY_ID" in str(first)
    assert isinstance(later, TransientStoreError)
    assert later.doubtful is False


def test_a_refusal_by_the_credential_service_is_not_the_stores() -> None:
    """STS saying no reached no bucket: a matter of credentials at first use, passing and sure in mid-run."""
    refused = _reply(403, "AccessDenied", "AssumeRoleWithWebIdentity")
    busy = _reply(503, "", "AssumeRole")
    assert type(classify(refused, action="create", key="k", store=STORE)) is StoreAccessError
    later = classify(refused, action="create", key="k", store=STORE, answered=True)
    throttled = classify(busy, action="create", key="k", store=STORE)
    assert isinstance(later, TransientStoreError)
    assert isinstance(throttled, TransientStoreError)
    assert not later.doubtful
    assert not throttled.doubtful
    assert "AssumeRoleWithWebIdentity" in str(later)
    assert not is_denied(refused)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (_reply(400, "ExpiredToken"), True),
        (_reply(400, "TokenRefreshRequired"), True),
        (_reply(403, "InvalidAccessKeyId"), True),
        (_reply(403, "SignatureDoesNotMatch"), True),
        (aws.NoCredentialsError(), True),
        (_reply(403, "AccessDenied"), False),
        (_reply(403, "RequestTimeTooSkewed"), False),
        (_reply(503, "SlowDown"), False),
    ],
)
def test_only_errors_of_the_credentials_ask_for_a_new_session(error: BaseException, expected: bool) -> None:
    """A new session costs a fifth of a second, so it is made where fresh credentials can help, and only there."""
    assert needs_new_credentials(error, action="create") is expected


def test_messages_keep_to_one_line_and_drop_the_user_part_of_addresses() -> None:
    """Foreign text is flattened, shortened and stripped of passwords."""
    text = one_line("Could not connect to\n http://user:hunter2@host:1/x " + "y" * 500)
    assert "hunter2" not in text
    assert "http://host:1/x" in text
    assert "\n" not in text
    assert len(text) == 300
