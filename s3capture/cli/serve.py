"""``s3capture serve``: the embedded S3 server in the foreground, until a signal.

The rule of this module: stdout carries the settings and nothing else, once, when the server answers, so that a
script may read them and go on; everything said to a person goes to stderr.
"""

from __future__ import annotations

import json
import shlex
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from s3capture.cli.common import out, say
from s3capture.local import EmbeddedServer, LocalServerError
from s3capture.seaweed import check_bucket_name

_WATCH_INTERVAL_S = 0.2
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _StopRequested(BaseException):
    """A signal asked us to end; not an Exception, so that nothing on the way takes it for a failure."""


def serve(
    data: Annotated[
        Path | None,
        typer.Option(help="Keep data, credentials and ports here. Default: a temporary directory, removed at the end."),
    ] = None,
    port: Annotated[
        int | None, typer.Option(help="Port for S3; port + 10000 is used too. Default: a free one.")
    ] = None,
    bucket: Annotated[str, typer.Option(help="Bucket to make.")] = "s3capture",
    as_json: Annotated[bool, typer.Option("--json", help="Print the settings as one JSON object.")] = False,
) -> None:
    """Run an S3 server on loopback until Ctrl-C and print the settings that reach it.

    They are lines for a shell. AWS_... variables are boto3's, so whatever runs in that shell talks to this server, also
    where no endpoint is named. S3CAPTURE_ENDPOINT_URL is the default of --endpoint-url in these commands; together with
    S3CAPTURE_URL it is what the configuration of docs/nemo-gym.md reads.
    """
    check_bucket_name(bucket)
    server = EmbeddedServer(data, port=port)
    try:
        with _stop_on_signals():
            _run(server, bucket, as_json=as_json)
    except _StopRequested:
        say("stopped")


def _run(server: EmbeddedServer, bucket: str, *, as_json: bool) -> None:
    with server:
        server.make_bucket(bucket)
        out(_settings(server, bucket, as_json=as_json))  # flushed: a reader may be waiting for it
        kept = "removed at the end" if server.temporary else "kept"
        say(f"serving s3://{bucket} at {server.endpoint_url}; Ctrl-C stops it")
        say(f"data in {server.data_dir} ({kept}), log in {server.log_path}")
        while server.running:
            time.sleep(_WATCH_INTERVAL_S)
        raise LocalServerError(
            f"the server died by itself (exit status {server.exit_status}); last line of its log: {server.log_tail(1)}"
        )


def _settings(server: EmbeddedServer, bucket: str, *, as_json: bool) -> str:
    """Return what a client needs, as shell lines or as one JSON object."""
    url, environment = f"s3://{bucket}", server.environment() | {"AWS_ENDPOINT_URL": server.endpoint_url}
    if as_json:
        return json.dumps(
            {
                "url": url,
                "endpoint_url": server.endpoint_url,
                "region": server.region,
                "environment": environment,
                "data_dir": str(server.data_dir),
                "log_path": str(server.log_path),
                "pid": server.pid,
            }
        )
    exports = environment | {"S3CAPTURE_URL": url, "S3CAPTURE_ENDPOINT_URL": server.endpoint_url}
    return "\n".join(f"export {name}={shlex.quote(value)}" for name, value in exports.items())


@contextmanager
def _stop_on_signals() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into ``_StopRequested``; later ones must not disturb the stop."""

    def request_stop(_number: int, _frame: FrameType | None) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        raise _StopRequested

    before = {number: signal.signal(number, request_stop) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
