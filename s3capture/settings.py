"""The flat settings that every endpoint takes, checked before anything starts.

The rule of this module: a setting is a scalar (endpoints are built from YAML, where nested values arrive
as foreign containers), and a bad one is refused with its name, its value and what to do. No I/O here.
"""

from __future__ import annotations

import difflib
import math
import numbers
import os
import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self
from urllib.parse import SplitResult, urlsplit

from s3capture.codec import MAX_PAYLOAD
from s3capture.errors import InvalidIdError, SettingsError
from s3capture.ids import validate_prefix, validate_run

_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_CHOICES: dict[str, tuple[str | None, ...]] = {
    "retention": ("delete", "keep"),
    "addressing_style": ("auto", "path", "virtual"),
    "sse": (None, "AES256", "aws:kms", "aws:kms:dsse"),
}
_SECONDS = ("op_timeout_s", "mark_timeout_s", "connect_timeout_s", "read_timeout_s")
_COUNTS = {"max_concurrency": 1024, "max_object_bytes": MAX_PAYLOAD, "lineage_cache_tokens": 10**12}


@dataclass(frozen=True, slots=True)
class Settings:
    """Where a capture lives and how patient we are.

    Times are seconds. ``op_timeout_s`` bounds one operation from when a thread takes it, retries included;
    ``mark_timeout_s`` bounds the S3 part of ``mark_incomplete`` before it spills.
    ``max_concurrency`` bounds the operations of this process that talk to S3 at once.
    """

    url: str
    run: str
    endpoint_url: str | None = None
    region: str | None = None
    spill_dir: str | None = None
    expected_bucket_owner: str | None = None
    sse: str | None = None
    sse_kms_key_id: str | None = None
    retention: str = "delete"
    addressing_style: str = "auto"
    op_timeout_s: float = 30.0
    mark_timeout_s: float = 5.0
    connect_timeout_s: float = 3.0
    read_timeout_s: float = 12.0
    max_concurrency: int = 32
    max_object_bytes: int = 256 * 1024 * 1024
    lineage_cache_tokens: int = 8_000_000

    @property
    def bucket(self) -> str:
        """The bucket named by ``url``."""
        return urlsplit(self.url).netloc

    @property
    def prefix(self) -> str:
        """The key prefix named by ``url``, without slashes at its ends; may be empty."""
        return urlsplit(self.url).path.strip("/")

    @property
    def spill_path(self) -> Path:
        """The spill directory: ``spill_dir``, or one under the user's state directory."""
        try:
            return self._spill_path()
        except RuntimeError as error:
            raise SettingsError(f"no home directory to spill to ({error}); set spill_dir") from error

    def _spill_path(self) -> Path:
        if self.spill_dir is not None:
            return Path(self.spill_dir).expanduser()
        base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
        return Path(base).expanduser() / "s3capture" / "spill"

    @classmethod
    def of(cls, **given: Any) -> Self:
        """Check ``given`` and return the settings; raise ``SettingsError`` naming the first bad one."""
        known = [field.name for field in fields(cls)]
        for name in given:
            if name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"known settings: {', '.join(known)}"
                raise SettingsError(f"unknown setting {name!r}; {hint}")
        for name in ("url", "run"):
            if given.get(name) is None:
                raise SettingsError(f"setting {name!r} is required, for example {_EXAMPLES[name]!r}")
        for name in [key for key, value in given.items() if value is None and key in _NOT_NULL]:
            raise SettingsError(f"setting {name!r} is null; leave it out to use its default")
        for field in fields(cls):
            if field.name in given:
                given[field.name] = _scalar(field.name, given[field.name], str(field.type))
        settings = cls(**given)
        settings._check()
        return settings

    @property
    def address(self) -> str | None:
        """The store's address in one spelling, for telling stores apart; None for AWS itself.

        Without ``endpoint_url`` boto3 takes one from the environment, and so does this.
        """
        given = self.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
        return _one_spelling(given) if given else None

    def _check(self) -> None:
        parts = _split("url", self.url)
        if "@" in parts.netloc:
            raise SettingsError("url carries credentials; give them to boto3's own chain instead")
        if parts.scheme != "s3" or not parts.netloc or parts.query or parts.fragment:
            raise SettingsError(f"url {self.url!r} is not of the form s3://bucket/prefix")
        if not _BUCKET.fullmatch(parts.netloc):
            raise SettingsError(f"url {self.url!r} names bucket {parts.netloc!r}, which is no valid bucket name")
        try:
            validate_prefix(self.prefix)
            validate_run(self.run)
        except InvalidIdError as error:
            raise SettingsError(str(error)) from error
        if self.endpoint_url is not None:
            _check_endpoint(self.endpoint_url)
        if self.sse_kms_key_id is not None and not (self.sse or "").startswith("aws:kms"):
            raise SettingsError("sse_kms_key_id needs sse='aws:kms' or 'aws:kms:dsse'")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                words = ", ".join(repr(word) for word in allowed if word is not None)
                raise SettingsError(f"{name} {getattr(self, name)!r} is not one of {words}")
        for name in _SECONDS:
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise SettingsError(f"{name} {value!r} is not a positive number of seconds")
        for name, most in _COUNTS.items():
            if not 1 <= getattr(self, name) <= most:
                raise SettingsError(f"{name} {getattr(self, name)!r} is not between 1 and {most:,}")


def _split(name: str, url: str) -> SplitResult:
    try:
        return urlsplit(url)
    except ValueError as error:  # an open bracket; the text may hold credentials, so it is not repeated
        raise SettingsError(f"{name} is no valid address: {error}") from None


def _check_endpoint(endpoint_url: str) -> None:
    endpoint = _split("endpoint_url", endpoint_url)
    if "@" in endpoint.netloc:
        raise SettingsError("endpoint_url carries credentials; give them to boto3's own chain instead")
    if endpoint.scheme not in ("http", "https") or not endpoint.hostname:
        raise SettingsError(f"endpoint_url {endpoint_url!r} is not an http:// or https:// address")
    if endpoint.query or endpoint.fragment:
        raise SettingsError(f"endpoint_url {endpoint_url!r} has a query or fragment, which no endpoint takes")
    try:
        _ = endpoint.port
    except ValueError as error:
        raise SettingsError(f"endpoint_url {endpoint_url!r}: {error}") from error


def _one_spelling(endpoint_url: str) -> str:
    parts = urlsplit(endpoint_url)
    default = {"http": 80, "https": 443}.get(parts.scheme)
    port = f":{parts.port}" if parts.port not in (None, default) else ""
    return f"{parts.scheme}://{(parts.hostname or '').lower()}{port}{parts.path.rstrip('/')}"


_EXAMPLES = {"url": "s3://bucket/prefix", "run": "run-7"}
_NOT_NULL = frozenset(field.name for field in fields(Settings) if "None" not in str(field.type))


def _scalar(name: str, value: Any, declared: str) -> Any:
    """Return ``value`` as the declared scalar type, or refuse it by name."""
    if value is None:
        return None
    if declared.startswith("str"):
        if isinstance(value, Path):
            value = str(value)
        if not isinstance(value, str):
            raise SettingsError(f"{name} {value!r} is a {type(value).__name__}, not a string")
        return str(value)
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise SettingsError(f"{name} {value!r} is a {type(value).__name__}, not a number")
    try:
        number = float(value)
    except OverflowError as error:
        raise SettingsError(f"{name} {value!r} is out of range") from error
    if declared == "int":
        if not number.is_integer():
            raise SettingsError(f"{name} {value!r} is not a whole number")
        return int(number)
    return number
