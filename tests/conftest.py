"""Servers and surroundings that tests share.

The rule of this module: a test that asks for a server gets a real one or fails, never skips; and no test sees
the credentials, profiles, proxies or state of the person who runs it.
"""

from __future__ import annotations

import os
import secrets
import uuid
from collections.abc import Iterator

import pytest
from moto.server import ThreadedMotoServer

from s3capture.local import EmbeddedServer
from s3capture.seaweed import connect


@pytest.fixture(scope="session")
def unstarted_seaweed() -> EmbeddedServer:
    """The session's server before its start, so that its keys are known to tests that never need it."""
    return EmbeddedServer(access_key=f"TEST{secrets.token_hex(6).upper()}", secret_key=secrets.token_hex(20))


@pytest.fixture(scope="session", autouse=True)
def surroundings(unstarted_seaweed: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give boto3's own chain the test server's keys (moto takes any) and nothing else, and state a place of its own."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("AWS_")]:
            patch.delenv(name)
        for name, value in unstarted_seaweed.environment().items():
            patch.setenv(name, value)
        patch.setenv("AWS_CONFIG_FILE", os.devnull)
        patch.setenv("AWS_SHARED_CREDENTIALS_FILE", os.devnull)
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(scope="session")
def seaweed(unstarted_seaweed: EmbeddedServer) -> Iterator[EmbeddedServer]:
    """The session's SeaweedFS. A test that kills a server starts one of its own instead."""
    with unstarted_seaweed as server:
        yield server


@pytest.fixture
def bucket(seaweed: EmbeddedServer) -> Iterator[str]:
    """A fresh bucket on SeaweedFS, deleted afterwards with all in it (each holds volumes of its own)."""
    name = f"test-{uuid.uuid4().hex[:20]}"
    seaweed.make_bucket(name)
    yield name
    client = connect(seaweed.endpoint_url, seaweed.access_key, seaweed.secret_key)
    client.delete_bucket(Bucket=name)
    client.close()


@pytest.fixture(scope="session")
def moto_server() -> Iterator[str]:
    """The address of moto's S3 server: for what goes over the wire, no judge of races."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        yield f"http://{host}:{port}"
    finally:
        server.stop()


@pytest.fixture
def moto_bucket(moto_server: str, unstarted_seaweed: EmbeddedServer) -> str:
    """A fresh bucket on moto's server."""
    name = f"test-{uuid.uuid4().hex[:20]}"
    client = connect(moto_server, unstarted_seaweed.access_key, unstarted_seaweed.secret_key)
    client.create_bucket(Bucket=name)
    client.close()
    return name
