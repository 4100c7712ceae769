"""A relay before the S3 server that can hold one write: the moment in which a put is under way, made as long as needed.

The rule of this module: bytes and headers pass unchanged (requests are signed over the Host header too); only time is
added. It holds the create of a call's outcome in the rollouts it is told to.
"""

from __future__ import annotations

import http.client
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

from gym_e2e.holding import Hold, Holds

_OUTCOME = re.compile(r"/attempts/[^/]+/(?P<rollout>[^/]+)/call/")
_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "expect"}


class Relay:
    """Passes requests on to ``endpoint_url``; endpoints under test use ``self.endpoint_url`` instead."""

    def __init__(self, endpoint_url: str) -> None:
        self.to = urlsplit(endpoint_url).netloc
        self.holds = Holds()
        self.held_rollouts: set[str] = set()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        self.endpoint_url = f"http://127.0.0.1:{self._http.server_address[1]}"

    @contextmanager
    def running(self) -> Iterator[Relay]:
        """Pass on until the block is left."""
        thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), name="s3-relay")
        thread.start()
        try:
            yield self
        finally:
            self.holds.release_all()
            self._http.shutdown()
            thread.join()
            self._http.server_close()

    def hold_outcomes_of(self, rollout: str) -> Hold:
        """Hold every create of an outcome in ``rollout`` from now on, until the hold is released."""
        self.held_rollouts.add(rollout)
        return self.holds.at(rollout)


def _handler(relay: Relay) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _pass(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            outcome = _OUTCOME.search(self.path)
            if self.command == "PUT" and outcome is not None and outcome["rollout"] in relay.held_rollouts:
                relay.holds.wait(outcome["rollout"], self.connection)
            onward = http.client.HTTPConnection(relay.to, timeout=60)
            try:
                onward.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    if name.lower() not in _HOP_BY_HOP:
                        onward.putheader(name, value)
                onward.endheaders(body)
                answer = onward.getresponse()
                data = answer.read()
            finally:
                onward.close()
            try:
                self.send_response_only(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in {*_HOP_BY_HOP, "content-length"}:
                        self.send_header(name, value)
                length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
                self.send_header("Content-Length", length or "0")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)
            except ConnectionError:
                self.close_connection = True

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _pass

        def log_message(self, format: str, *args: object) -> None:
            del format, args

    return Handler
