"""IAM policy documents judged as AWS would, for the few forms that infra/bucket.yaml uses, and enforced on boto3.

The rule of this module: a form that it does not know is an error, never "allowed": a test that rests on it must not
pass because the judge did not understand. moto evaluates neither resources nor conditions, so it cannot be the judge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any
from urllib.parse import unquote, urlsplit
from xml.etree import ElementTree

from botocore.awsrequest import AWSResponse

Document = Mapping[str, Any]

_ACTIONS = {
    "PutObject": "s3:PutObject",
    "GetObject": "s3:GetObject",
    "DeleteObject": "s3:DeleteObject",
    "DeleteObjects": "s3:DeleteObject",
    "ListObjectsV2": "s3:ListBucket",
    "GetBucketVersioning": "s3:GetBucketVersioning",
    "GetObjectLockConfiguration": "s3:GetBucketObjectLockConfiguration",
}
_ON_THE_BUCKET = ("s3:ListBucket", "s3:GetBucketVersioning", "s3:GetBucketObjectLockConfiguration")


def _several(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list) else [value]


def statements(document: Document) -> Sequence[Document]:
    """The statements of a policy document."""
    return _several(document["Statement"])


def actions(documents: Sequence[Document]) -> set[str]:
    """Every action that the documents allow."""
    return {
        action
        for document in documents
        for statement in statements(document)
        if statement["Effect"] == "Allow"
        for action in _several(statement["Action"])
    }


def _matches(pattern: str, value: str) -> bool:
    assert not set(pattern) & set("[]?"), f"not understood: {pattern}"
    return fnmatchcase(value, pattern)


def _holds(operator: str, key: str, expected: Any, context: Mapping[str, str]) -> bool:
    values, given = [str(one) for one in _several(expected)], context.get(key)
    match operator:
        case "Null":
            return ["true" if given is None else "false"] == values
        case "Bool" | "StringEquals":
            return given in values
        case "NumericLessThan":
            return given is not None and float(given) < float(values[0])
    raise AssertionError(f"condition operator {operator} is not understood")


def _applies(statement: Document, action: str, resource: str, context: Mapping[str, str]) -> bool:
    unknown = statement.keys() - {"Sid", "Effect", "Principal", "Action", "Resource", "Condition"}
    assert not unknown, f"not understood: {unknown}"
    assert statement.get("Principal", "*") == "*", "a principal other than everyone is not understood"
    return (
        any(_matches(pattern, action) for pattern in _several(statement["Action"]))
        and any(_matches(pattern, resource) for pattern in _several(statement["Resource"]))
        and all(
            _holds(operator, key, expected, context)
            for operator, keys in statement.get("Condition", {}).items()
            for key, expected in keys.items()
        )
    )


@dataclass
class Judge:
    """Decides the requests of one role on one bucket, as IAM does: a deny wins, and what nobody allows is denied."""

    bucket: str
    of_role: Sequence[Document]
    of_bucket: Document
    asked: set[str] = field(default_factory=set)
    denied: list[tuple[str, str]] = field(default_factory=list)

    def allows(self, action: str, key: str = "", **context: str) -> bool:
        """Whether ``action`` on ``key`` (empty: the bucket) is allowed; over TLS 1.3, unless ``context`` says else."""
        resource = f"arn:aws:s3:::{self.bucket}/{key}" if key else f"arn:aws:s3:::{self.bucket}"
        full = {"aws:SecureTransport": "true", "s3:TlsVersion": "1.3"} | {
            name.replace("__", ":").replace("_", "-"): value for name, value in context.items()
        }
        found = [
            statement["Effect"]
            for document in (*self.of_role, self.of_bucket)
            for statement in statements(document)
            if _applies(statement, action, resource, full)
        ]
        return "Deny" not in found and "Allow" in found

    def enforce(self, client: Any) -> Any:
        """Make ``client`` answer what is denied with 403, before anything is sent."""
        client.meta.events.register("before-call.s3", self._before_call)
        return client

    def _before_call(self, model: Any, params: Any, **_: Any) -> tuple[AWSResponse, dict[str, Any]] | None:
        action = _ACTIONS[model.name]
        key = unquote(urlsplit(params["url"]).path).lstrip("/").partition("/")[2]
        context = (
            {"s3__if_none_match": params["headers"]["If-None-Match"]} if "If-None-Match" in params["headers"] else {}
        )
        self.asked.add(action)
        if model.name == "DeleteObjects":
            return self._delete_objects(params["body"])
        allowed = self.allows(action, "" if action in _ON_THE_BUCKET else key, **context)
        if action == "s3:GetObject":
            # Without this a key that is absent would be 403 and not 404, which the protocol could not live with.
            allowed = allowed and self.allows("s3:ListBucket")
        if allowed:
            return None
        self.denied.append((action, key))
        return _answer(403, {"Error": {"Code": "AccessDenied", "Message": "denied by the policies of the test"}})

    def _delete_objects(self, body: Any) -> tuple[AWSResponse, dict[str, Any]] | None:
        raw = body.read() if hasattr(body, "read") else body
        keys = [
            found.text or "" for found in ElementTree.fromstring(raw).iter() if found.tag.rpartition("}")[2] == "Key"
        ]
        refused = [key for key in keys if not self.allows("s3:DeleteObject", key)]
        self.denied += [("s3:DeleteObject", key) for key in refused]
        if not refused:
            return None
        assert refused == keys, "a batch that is denied in part is not understood"
        errors = [{"Key": key, "Code": "AccessDenied", "Message": "denied by the policies"} for key in refused]
        return _answer(200, {"Errors": errors})


def _answer(status: int, parsed: dict[str, Any]) -> tuple[AWSResponse, dict[str, Any]]:
    metadata = {"HTTPStatusCode": status, "HTTPHeaders": {}, "RetryAttempts": 0, "RequestId": "judged"}
    return AWSResponse("", status, {}, None), {**parsed, "ResponseMetadata": metadata}


def enforced(make: Callable[..., Any], judge: Judge) -> Callable[..., Any]:
    """Return ``make_client`` with ``judge`` between its clients and the wire."""
    return lambda *args, **named: judge.enforce(make(*args, **named))
