"""A small S3 server whose wire faults are scripted: the server of every test about what goes wrong in between.

The rule of this module: it speaks raw HTTP/1.1 on a socket of loopback, so that a test decides what bytes travel and
when a connection dies, and it records what really came over the wire. Create-if-absent is atomic under one lock.
It checks no signatures and knows one bucket; for S3 as servers speak it, use the real ones.

    with FakeS3() as s3:
        s3.script(on("PutObject", "p/*"), LoseReply())              # once: applied, then the connection closes
        s3.script(on("ListObjectsV2"), Reply(503, "SlowDown"), times=3)
        s3.script(on("GetObject"), Cut(10), times=None)             # for ever
        store = BotoStore(Settings.of(url=f"s3://{s3.bucket}/p", run="r", endpoint_url=s3.endpoint_url))

A behaviour is a function ``(exchange) -> None`` as well: it may call ``exchange.apply()`` (perform the request, get the
``Response``), ``exchange.send(response)``, ``exchange.close()`` and ``exchange.hang()``. Scripts are tried in the order
in which they were added; the first whose matcher accepts the request and which has times left is used.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import ipaddress
import itertools
import random
import socket
import ssl
import struct
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO, Self
from urllib.parse import parse_qsl, quote, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

_NS = "http://s3.amazonaws.com/doc/2006-03-01/"
_MODIFIED = "2030-01-02T03:04:05.000Z"


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it came over the wire. Header names are lower case; ``connection`` counts from 1."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    connection: int

    @property
    def query(self) -> dict[str, str]:
        """The query parameters, empty ones included."""
        return dict(parse_qsl(urlsplit(self.path).query, keep_blank_values=True))

    @property
    def bucket(self) -> str:
        """The bucket of a path-style request."""
        return unquote(urlsplit(self.path).path).lstrip("/").partition("/")[0]

    @property
    def key(self) -> str:
        """The key of a path-style request; for a LIST its prefix."""
        key = unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2]
        return key or self.query.get("prefix", "")

    @property
    def operation(self) -> str:
        """S3's own name of the operation, such as PutObject."""
        query, on_key = self.query, bool(unquote(urlsplit(self.path).path).lstrip("/").partition("/")[2])
        if on_key:
            if "uploads" in query:
                return "CreateMultipartUpload"
            if "uploadId" in query:
                return {"PUT": "UploadPart", "POST": "CompleteMultipartUpload"}.get(self.method, "AbortMultipartUpload")
            return f"{self.method.title()}Object"
        if self.method == "POST" and "delete" in query:
            return "DeleteObjects"
        if self.method == "GET":
            return "ListObjectsV2" if query.get("list-type") == "2" else "ListObjects"
        return {"PUT": "CreateBucket"}.get(self.method, f"{self.method.title()}Bucket")


@dataclass(frozen=True, slots=True)
class Response:
    """What goes back; Content-Length is added, unless ``headers`` has a Transfer-Encoding."""

    status: int = 200
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    def encode(self, *, head: bool) -> bytes:
        """Return the bytes of the response; a reply to HEAD has no body."""
        headers = {"x-amz-request-id": "FAKE0000", "Server": "FakeS3", **self.headers}
        if "Transfer-Encoding" not in headers and self.status not in (204, 304):
            headers.setdefault("Content-Length", str(len(self.body)))
        lines = [f"HTTP/1.1 {self.status} Fake", *(f"{name}: {value}" for name, value in headers.items())]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + (b"" if head else self.body)


def error_response(status: int, code: str, message: str = "scripted", **fields: str) -> Response:
    """Return an S3 error; an empty ``code`` gives an empty body. ``fields`` are more elements, such as Region."""
    if not code:
        return Response(status)
    more = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in fields.items())
    body = f"<Error><Code>{escape(code)}</Code><Message>{escape(message)}</Message>{more}</Error>"
    return Response(status, body.encode(), {"Content-Type": "application/xml"})


Matcher = Callable[[Request], bool]
Behaviour = Callable[["Exchange"], None]


def on(operation: str = "*", key: str = "*") -> Matcher:
    """Match by operation and key (for a LIST: its prefix), both with shell wildcards; ``*`` crosses slashes."""
    return lambda request: fnmatchcase(request.operation, operation) and fnmatchcase(request.key, key)


class Exchange:
    """One request being answered; behaviours drive it."""

    def __init__(self, server: FakeS3, request: Request, connection: socket.socket) -> None:
        self.server, self.request = server, request
        self._socket = connection
        self.alive = True

    def apply(self) -> Response:
        """Perform the request on the objects and return the honest answer."""
        return self.server._answer(self.request)

    def send(self, response: Response) -> None:
        """Send a whole response."""
        self.send_bytes(response.encode(head=self.request.method == "HEAD"))

    def send_bytes(self, data: bytes) -> None:
        """Send raw bytes."""
        self._socket.sendall(data)

    def close(self, *, reset: bool = False) -> None:
        """End the connection, with a TCP reset if asked."""
        self.alive = False
        if reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        else:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def hang(self) -> None:
        """Say nothing until the server ends, then close."""
        self.server._ending.wait()
        self.close()


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer with a status and an S3 error code (or a raw ``body``), without applying the request.

    With ``apply=True`` the request is applied first: an answer that lies.
    """

    status: int
    code: str = ""
    message: str = "scripted"
    body: bytes | None = None
    headers: dict[str, str] = field(default_factory=dict)
    apply: bool = False

    def __call__(self, exchange: Exchange) -> None:
        if self.apply:
            exchange.apply()
        made = error_response(self.status, self.code, self.message)
        body = made.body if self.body is None else self.body
        exchange.send(Response(self.status, body, {**made.headers, **self.headers}))


@dataclass(frozen=True, slots=True)
class LoseReply:
    """Apply the request (unless ``apply=False``), then close, reset or hang instead of answering."""

    how: str = "close"
    apply: bool = True

    def __call__(self, exchange: Exchange) -> None:
        if self.apply:
            exchange.apply()
        if self.how == "hang":
            exchange.hang()
        else:
            exchange.close(reset=self.how == "reset")


@dataclass(frozen=True, slots=True)
class Cut:
    """Apply the request, send the head and ``after`` bytes of the body, then close, reset or hang.

    With ``chunked=True`` the body is announced as chunked instead of by its length.
    """

    after: int = 0
    how: str = "close"
    chunked: bool = False

    def __call__(self, exchange: Exchange) -> None:
        answer = exchange.apply()
        if self.chunked:
            headers = {**answer.headers, "Transfer-Encoding": "chunked"}
            head = Response(answer.status, b"", headers).encode(head=False)
            exchange.send_bytes(head + f"{len(answer.body):x}\r\n".encode() + answer.body[: self.after])
        else:
            data = answer.encode(head=False)
            exchange.send_bytes(data[: len(data) - len(answer.body) + self.after])
        if self.how == "hang":
            exchange.hang()
        else:
            exchange.close(reset=self.how == "reset")


@dataclass(frozen=True, slots=True)
class Rewrite:
    """Apply the request and send ``change(honest answer)``."""

    change: Callable[[Response], Response]

    def __call__(self, exchange: Exchange) -> None:
        exchange.send(self.change(exchange.apply()))


@dataclass(frozen=True, slots=True)
class Hold:
    """Stop before the request is applied (or, with ``after=True``, before it is answered) until released.

    ``arrived`` is set when a request is held, so a test can wait for it; set ``release`` to let it go on.
    """

    after: bool = False
    arrived: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)

    def __call__(self, exchange: Exchange) -> None:
        answer = exchange.apply() if self.after else None
        self.arrived.set()
        while not self.release.wait(0.05):
            if exchange.server._ending.is_set():
                exchange.close()
                return
        exchange.send(answer or exchange.apply())


@dataclass(slots=True)
class _Script:
    matcher: Matcher
    behaviour: Behaviour
    left: float


class FakeS3:
    """The server; use it as a context manager.

    ``ignores_conditions`` overwrites in spite of If-None-Match. ``page_size`` caps LIST pages; with
    ``shuffle`` (a seed) keys come in an order of no meaning; with ``repeat`` each later page starts with
    the last key of the one before. ``encoding`` is how LIST answers encoding-type=url: "url", "plus" (space
    as ``+``) or "raw" (ignored). ``etag`` makes the ETag header of a body, or None for no ETag at all.
    With ``tls`` the certificate's own authority is at ``ca_file`` (AWS_CA_BUNDLE).

    ``objects`` holds key -> body, ``requests`` every request in order, ``connections`` how many there were;
    keys in ``undeletable`` are refused with AccessDenied when deleted.
    """

    def __init__(
        self,
        *,
        bucket: str = "capture",
        tls: bool = False,
        ignores_conditions: bool = False,
        page_size: int = 1000,
        shuffle: int | None = None,
        repeat: bool = False,
        encoding: str = "url",
        etag: Callable[[bytes], str | None] = lambda body: f'"{hashlib.md5(body).hexdigest()}"',
    ) -> None:
        self.bucket = bucket
        self.objects: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.connections = 0
        self.undeletable: set[str] = set()
        self.ca_file: str | None = None
        self._ignores_conditions = ignores_conditions
        self._page_size, self._shuffle, self._repeat, self._encoding = page_size, shuffle, repeat, encoding
        self._etag = etag
        self._tls = tls
        self._scripts: list[_Script] = []
        self._lock = threading.RLock()
        self._ending = threading.Event()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._context: ssl.SSLContext | None = None

    def __enter__(self) -> Self:
        self._folder = tempfile.TemporaryDirectory()
        if self._tls:
            self._context = self._make_certificate(Path(self._folder.name))
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = int(self._listener.getsockname()[1])
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        self._ending.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            still_open = [*self._open]
        for connection in still_open:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        self._folder.cleanup()

    @property
    def endpoint_url(self) -> str:
        """The address for boto3."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    def script(self, matcher: Matcher, behaviour: Behaviour, times: int | None = 1) -> None:
        """Use ``behaviour`` for the next ``times`` requests that ``matcher`` accepts; None means for ever."""
        with self._lock:
            self._scripts.append(_Script(matcher, behaviour, float("inf") if times is None else times))

    def clear_scripts(self) -> None:
        """Be honest again."""
        with self._lock:
            self._scripts.clear()

    def seen(self, operation: str = "*", key: str = "*") -> list[Request]:
        """Return the requests so far that ``on(operation, key)`` accepts, in the order of their arrival."""
        with self._lock:
            return [request for request in self.requests if on(operation, key)(request)]

    # Connections

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        with self._lock:
            self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        for number in itertools.count(1):
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self.connections = number
                self._open.add(connection)
            self._start(self._serve, connection, number)

    def _serve(self, raw: socket.socket, number: int) -> None:
        connection = raw
        try:
            if self._context is not None:
                connection = self._context.wrap_socket(raw, server_side=True)
                with self._lock:
                    self._open.add(connection)
            with connection.makefile("rb") as stream:
                while (request := self._read(stream, connection, number)) is not None:
                    exchange = Exchange(self, request, connection)
                    self._behaviour_for(request)(exchange)
                    if not exchange.alive:
                        return
        except (OSError, ValueError):
            pass  # the client went away, or the server is ending
        finally:
            with self._lock:
                self._open -= {raw, connection}
            connection.close()

    def _read(self, stream: BinaryIO, connection: socket.socket, number: int) -> Request | None:
        line = stream.readline()
        if not line.strip():
            return None
        method, path, _ = line.decode("latin-1").split(" ", 2)
        headers: dict[str, str] = {}
        while field_line := stream.readline().decode("latin-1").strip():
            name, _, value = field_line.partition(":")
            headers[name.lower()] = value.strip()
        if headers.get("expect", "").lower() == "100-continue":
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        if "chunked" in headers.get("transfer-encoding", ""):
            body = b"".join(self._chunks(stream))
        else:
            body = stream.read(int(headers.get("content-length", 0)))
        request = Request(method, path, headers, body, number)
        with self._lock:
            self.requests.append(request)
        return request

    @staticmethod
    def _chunks(stream: BinaryIO) -> Iterator[bytes]:
        while size := int(stream.readline().split(b";")[0], 16):
            yield stream.read(size)
            stream.readline()
        while stream.readline().strip():
            pass

    def _behaviour_for(self, request: Request) -> Behaviour:
        with self._lock:
            for script in self._scripts:
                if script.left > 0 and script.matcher(request):
                    script.left -= 1
                    return script.behaviour
        return lambda exchange: exchange.send(exchange.apply())

    # S3

    def _answer(self, request: Request) -> Response:
        with self._lock:
            if request.bucket != self.bucket:
                return error_response(404, "NoSuchBucket", "The specified bucket does not exist")
            handlers: dict[str, Callable[[Request], Response]] = {
                "PutObject": self._put,
                "GetObject": self._get,
                "HeadObject": self._get,
                "DeleteObject": self._delete,
                "DeleteObjects": self._delete_many,
                "ListObjectsV2": self._list,
                "HeadBucket": lambda _: Response(),
                "CreateBucket": lambda _: Response(),
            }
            handler = handlers.get(request.operation)
            if handler is None:
                return error_response(501, "NotImplemented", f"{request.operation} is not part of this fake")
            return handler(request)

    def _put(self, request: Request) -> Response:
        if request.headers.get("if-none-match") == "*" and not self._ignores_conditions and request.key in self.objects:
            return error_response(412, "PreconditionFailed", "At least one of the pre-conditions did not hold")
        self.objects[request.key] = request.body
        return Response(200, headers=self._etag_header(request.body))

    def _get(self, request: Request) -> Response:
        body = self.objects.get(request.key)
        if body is None:
            return error_response(404, "NoSuchKey", "The specified key does not exist.")
        headers = {"Content-Type": "application/zstd", "Last-Modified": "Wed, 02 Jan 2030 03:04:05 GMT"}
        return Response(200, body, headers | self._etag_header(body))

    def _delete(self, request: Request) -> Response:
        if request.key in self.undeletable:
            return error_response(403, "AccessDenied", "Access Denied")
        self.objects.pop(request.key, None)
        return Response(204)

    def _delete_many(self, request: Request) -> Response:
        root = ElementTree.fromstring(request.body)
        keys = [node.text or "" for node in root.iter() if node.tag.endswith("Key")]
        quiet = any(node.tag.endswith("Quiet") and node.text == "true" for node in root.iter())
        if len(keys) > 1000:
            return error_response(400, "MalformedXML", "The XML you provided was not well-formed")
        rows = ""
        for key in keys:
            if key in self.undeletable:
                rows += (
                    f"<Error><Key>{escape(key)}</Key><Code>AccessDenied</Code><Message>Access Denied</Message></Error>"
                )
                continue
            self.objects.pop(key, None)
            rows += "" if quiet else f"<Deleted><Key>{escape(key)}</Key></Deleted>"
        return _xml(f'<DeleteResult xmlns="{_NS}">{rows}</DeleteResult>')

    def _list(self, request: Request) -> Response:
        query = request.query
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        rank = self._rank
        names: set[str] = set()
        for key in self.objects:
            if key.startswith(prefix):
                rest = key[len(prefix) :]
                folded = bool(delimiter) and delimiter in rest
                names.add(prefix + rest.split(delimiter, 1)[0] + delimiter if folded else key)
        ordered = sorted(names, key=rank)
        if token := query.get("continuation-token"):
            try:
                last = bytes.fromhex(token).decode()
            except ValueError:
                return error_response(400, "InvalidArgument", "The continuation token provided is incorrect")
            ordered = [name for name in ordered if rank(name) > rank(last) or (self._repeat and name == last)]
        size = min(int(query.get("max-keys", 1000)), self._page_size) + (1 if token and self._repeat else 0)
        page, more = ordered[:size], len(ordered) > size
        rows = "".join(
            f"<CommonPrefixes><Prefix>{self._encode(name)}</Prefix></CommonPrefixes>"
            if delimiter and name.endswith(delimiter)
            else self._row(name)
            for name in page
        )
        following = f"<NextContinuationToken>{page[-1].encode().hex()}</NextContinuationToken>" if more else ""
        kind = "" if self._encoding == "raw" else "<EncodingType>url</EncodingType>"
        return _xml(
            f'<ListBucketResult xmlns="{_NS}"><Name>{self.bucket}</Name><Prefix>{self._encode(prefix)}</Prefix>'
            f"<KeyCount>{len(page)}</KeyCount><MaxKeys>{size}</MaxKeys>{kind}"
            f"<IsTruncated>{str(more).lower()}</IsTruncated>{following}{rows}</ListBucketResult>"
        )

    def _row(self, key: str) -> str:
        etag = self._etag(self.objects[key])
        tag = f"<ETag>{escape(etag)}</ETag>" if etag is not None else ""
        return (
            f"<Contents><Key>{self._encode(key)}</Key><LastModified>{_MODIFIED}</LastModified>{tag}"
            f"<Size>{len(self.objects[key])}</Size></Contents>"
        )

    def _rank(self, name: str) -> tuple[float, str]:
        return (0.0 if self._shuffle is None else random.Random(f"{self._shuffle}{name}").random(), name)

    def _encode(self, name: str) -> str:
        if self._encoding == "raw":
            return escape(name)
        quoted = quote(name, safe="/")
        return escape(quoted.replace("%20", "+") if self._encoding == "plus" else quoted)

    def _etag_header(self, body: bytes) -> dict[str, str]:
        etag = self._etag(body)
        return {} if etag is None else {"ETag": etag}

    def _make_certificate(self, folder: Path) -> ssl.SSLContext:
        from cryptography import x509  # noqa: PLC0415 - only TLS tests need it
        from cryptography.hazmat.primitives import hashes, serialization  # noqa: PLC0415
        from cryptography.hazmat.primitives.asymmetric import ec  # noqa: PLC0415
        from cryptography.x509.oid import NameOID  # noqa: PLC0415

        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "FakeS3")])
        now = datetime.datetime.now(datetime.UTC)
        day = datetime.timedelta(days=1)
        alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        certificate = (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - day)
            .not_valid_after(now + day)
            .add_extension(alternative, critical=False)
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        ca_file, key_file = folder / "ca.pem", folder / "key.pem"
        ca_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        self.ca_file = str(ca_file)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(ca_file, key_file)
        return context


def _xml(text: str) -> Response:
    return Response(200, b'<?xml version="1.0" encoding="UTF-8"?>' + text.encode(), {"Content-Type": "application/xml"})
