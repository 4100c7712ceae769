"""One boto3 client for each process, made at first use, and how it is configured.

The rule of this module: the client sends a request once, from a session of its own, and never shares a socket
with another process. boto3's default session is not safe to use from threads; a client that crosses a fork mixes
two processes' replies; a client that resends on its own makes a create meet its own first success.
"""

from __future__ import annotations

import os
import threading
from datetime import datetime
from importlib import metadata
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import boto3.session
import botocore.session
from botocore.config import Config
from botocore.utils import parse_timestamp

from s3capture.errors import ClosedError
from s3capture.settings import Settings

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client


class ClientBox:
    """Holds the client of this process. Safe to use from many threads; the constructor does no I/O."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        # Both are keyed by process id. A lock that some thread held during a fork stays locked in the child for ever.
        # The parent's client is left alone in the child, not even closed, since the sockets are the parent's.
        self._locks: dict[int, threading.Lock] = {}
        self._clients: dict[int, S3Client] = {}
        self._closed = False

    def client(self) -> S3Client:
        """Return the client of this process; make it if there is none. Raises what boto3 raises, and ClosedError."""
        client = self._clients.get(os.getpid())
        if client is not None:
            return client
        with self._lock():
            if self._closed:
                raise ClosedError(f"the store {self._settings.url} was closed; make a new endpoint")
            client = self._clients.get(os.getpid())
            if client is None:
                client = self._clients[os.getpid()] = make_client(self._settings)
            return client

    def forget(self, client: S3Client) -> None:
        """Let the next call make a new client, which reads credentials anew, unless another thread did so already.

        The old client is not closed: other threads may be in the middle of a request with it.
        """
        with self._lock():
            if self._clients.get(os.getpid()) is client:
                del self._clients[os.getpid()]

    def close(self) -> None:
        """Release the connections of this process; ``client`` raises ``ClosedError`` from now on. Idempotent."""
        with self._lock():
            self._closed = True
            client = self._clients.pop(os.getpid(), None)
        if client is not None:
            client.close()

    def describe(self) -> str:
        """Return ``s3://bucket/prefix at <endpoint or AWS region>``, without secrets.

        Exact while there is a client: only boto3 knows the endpoint and region that a profile sets.
        """
        client = self._clients.get(os.getpid())
        address = urlsplit(client.meta.endpoint_url if client else self._settings.endpoint_url or "")
        host = address.hostname or ""
        if not host or host.endswith((".amazonaws.com", ".amazonaws.com.cn")):
            region = client.meta.region_name if client else self._settings.region
            where = f"AWS {region}" if region else "AWS"
        else:
            shown = f"[{host}]" if ":" in host else host
            where = f"{address.scheme}://{shown}" + (f":{address.port}" if address.port else "")
        return f"{self._settings.url.rstrip('/')} at {where}"

    def _lock(self) -> threading.Lock:
        # setdefault is atomic: threads that come first together get the same lock.
        return self._locks.setdefault(os.getpid(), threading.Lock())


def make_client(settings: Settings) -> S3Client:
    """Make a client from a new session: credentials, profile and environment are read now."""
    config = Config(
        # The mode is given too: AWS_RETRY_MODE=adaptive would sleep inside the client before sending.
        retries={"total_max_attempts": 1, "mode": "standard"},
        max_pool_connections=2 * settings.max_concurrency + 16,
        connect_timeout=settings.connect_timeout_s,
        read_timeout=settings.read_timeout_s,
        # The default checksums make boto3 send chunked bodies over https, which stores refuse or, worse, keep.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        signature_version="s3v4",
        user_agent_extra=f"s3capture/{_version()}",
        tcp_keepalive=True,
    )
    if settings.addressing_style != "auto":
        # Left out when automatic, so that the style in the user's own AWS profile stands.
        style: Any = {"addressing_style": settings.addressing_style}
        config = config.merge(Config(s3=style))
    core = botocore.session.get_session()
    core.get_component("response_parser_factory").set_parser_defaults(timestamp_parser=_timestamp)
    client: S3Client = boto3.session.Session(botocore_session=core).client(
        "s3", region_name=settings.region, endpoint_url=settings.endpoint_url, config=config
    )
    client.meta.events.register("before-call.s3", _no_redirect)
    return client


def _timestamp(value: Any) -> datetime:
    """A time of a reply. botocore's own parser takes most of the processor time of reading a LIST."""
    if isinstance(value, str) and "T" in value and value.endswith("Z"):
        try:
            return datetime.fromisoformat(value)
        except ValueError:
            pass
    return parse_timestamp(value)


def _no_redirect(context: dict[str, Any], **_: Any) -> None:
    """Tell botocore's region redirector, which no setting turns off, that this request had its turn.

    It would ask HeadBucket and send the request a second time, behind the driver's back.
    """
    if "s3_redirect" in context:
        context["s3_redirect"]["redirected"] = True


def _version() -> str:
    try:
        return metadata.version("s3capture")
    except metadata.PackageNotFoundError:
        return "unknown"
