"""Where a demo is played: an embedded server of its own, or a bucket that the user names.

The rule of this module: a place is asked before anything is played whether it answers, takes our credentials, honours
create-if-absent and holds nothing under the run's name; and what was set up here (server, environment, spill directory)
is gone when the place is left, however it is left.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from s3capture.errors import SettingsError
from s3capture.local import EmbeddedServer
from s3capture.settings import Settings
from s3capture.source import S3TokenSource

EMBEDDED_BUCKET = "s3capture-demo"
_PROBE_S = 15.0


@dataclass(frozen=True, slots=True)
class Place:
    """An open place; ``server`` is None for a bucket of the user's."""

    url: str
    run: str
    endpoint_url: str | None
    spill_dir: Path
    server: EmbeddedServer | None
    region: str | None = None

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of every endpoint of the demo."""
        return {
            "url": self.url,
            "run": self.run,
            "endpoint_url": self.endpoint_url,
            "region": self.region,
            "spill_dir": str(self.spill_dir),
        }

    def describe(self) -> str:
        """Name the server for a person."""
        if self.server is not None:
            return f"{self.endpoint_url}, an embedded server that is removed at the end"
        return self.endpoint_url or "the endpoint of the AWS environment or profile"


def new_run() -> str:
    """A run name that nobody used before."""
    return f"demo-{time.strftime('%Y%m%d-%H%M%S', time.gmtime())}-{uuid.uuid4().hex[:6]}"


@contextmanager
def open_place(
    *, url: str | None, run: str | None, endpoint_url: str | None, region: str | None = None
) -> Iterator[Place]:
    """Open the bucket ``url``, or without one start an embedded server; raise ``SettingsError`` before that.

    ``LocalServerError`` when the embedded server cannot be started.
    """
    for name, given in (("--endpoint-url", endpoint_url), ("--region", region)):
        if url is None and given is not None:
            raise SettingsError(f"{name} needs --url s3://bucket/prefix; without both, a server is started for you")
    run = run or new_run()
    Settings.of(url=url or f"s3://{EMBEDDED_BUCKET}", run=run, endpoint_url=endpoint_url, region=region)
    with ExitStack() as stack:
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="s3capture-demo-"))
        spill_dir = Path(scratch) / "spill"
        if url is not None:
            yield Place(url, run, endpoint_url, spill_dir, None, region)
            return
        server = stack.enter_context(EmbeddedServer())
        server.make_bucket(EMBEDDED_BUCKET)
        stack.enter_context(_credentials_of(server))
        yield Place(f"s3://{EMBEDDED_BUCKET}", run, server.endpoint_url, spill_dir, server)


@contextmanager
def _credentials_of(server: EmbeddedServer) -> Iterator[None]:
    """Give boto3's chain, here and in the processes started here, this server's keys and nothing else."""
    before = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    proxies = {name: os.environ.get(name) for name in ("NO_PROXY", "no_proxy")}
    for name in before:
        del os.environ[name]
    os.environ.update(server.environment())
    os.environ.update(AWS_CONFIG_FILE=os.devnull, AWS_SHARED_CREDENTIALS_FILE=os.devnull)
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            del os.environ[name]
        os.environ.update(before)
        for name, value in proxies.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


async def check(place: Place, source: S3TokenSource) -> None:
    """Raise unless the place can be played on: a ``StoreError`` that says why, or ``SettingsError`` for a used run."""
    await asyncio.to_thread(_check, place, source)


def _check(place: Place, source: S3TokenSource) -> None:
    runtime = source._runtime
    # Asked once, not until a deadline: a person who mistyped the endpoint should not wait for patience to run out.
    if runtime.store.list_folders(runtime.keys.attempts):
        raise SettingsError(
            f"run {place.run!r} in {place.url} holds records already, and a demo needs fresh rollout ids; choose "
            "another --run, or leave it out"
        )
    runtime._ensure_probed(time.monotonic() + _PROBE_S)
