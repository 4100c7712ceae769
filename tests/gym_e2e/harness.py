"""An agent's side of a rollout: a conversation in one of Gym's dialects, every call on a connection of its own.

The rule of this module: it knows HTTP and nothing of capture. A new connection for each call lets the kernel hand the
calls of one rollout to any worker.
"""

from __future__ import annotations

import http.client
import json
import socket
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "anthropic": "/v1/messages"}


@dataclass(frozen=True, slots=True)
class Answer:
    """What came back: ``body`` is the JSON answer, put together from the events when it was streamed."""

    status: int
    text: str
    body: Any


def path_of(rollout: str, dialect: str = "chat") -> str:
    """The path that tags a call with its rollout, the id escaped as one segment."""
    return f"/ng-rollout/{quote(rollout, safe='')}/training-token-capture{PATHS[dialect]}"


def post(port: int, path: str, body: dict[str, Any], *, timeout: float = 60.0) -> Answer:
    """One call on a new connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json", "Connection": "close"})
        response = connection.getresponse()
        text = response.read().decode()
        streamed = (response.getheader("Content-Type") or "").startswith("text/event-stream")
    finally:
        connection.close()
    return Answer(response.status, text, _joined(text) if streamed else json.loads(text))


def send_and_keep(port: int, path: str, body: dict[str, Any]) -> socket.socket:
    """Send a call and return the connection without reading: closing it is how a client disconnects."""
    data = json.dumps(body).encode()
    lines = [
        f"POST {path} HTTP/1.1",
        "Host: 127.0.0.1",
        "Content-Type: application/json",
        f"Content-Length: {len(data)}",
    ]
    head = "".join(f"{line}\r\n" for line in [*lines, ""])
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.sendall(head.encode() + data)
    return connection


@dataclass
class Conversation:
    """One rollout's history as its harness echoes it, item for item."""

    port: int
    rollout: str
    dialect: str = "chat"
    history: list[dict[str, Any]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)
    last: Any = None

    def ask(self, text: str, *, stream: bool = False) -> str:
        """Say ``text`` as the user and return what the model said; anything but a 200 is an error here."""
        self.history.append({"role": "user", "content": text})
        answer = post(self.port, path_of(self.rollout, self.dialect), self.body(stream=stream))
        assert answer.status == 200, f"rollout {self.rollout}: HTTP {answer.status}: {answer.text}"
        self.last = answer.body
        items = self._output(answer.body)
        self.history += items
        self.said.append(_text_of(items))
        return self.said[-1]

    def body(self, *, stream: bool = False) -> dict[str, Any]:
        """The request of the next call."""
        body: dict[str, Any] = {"input" if self.dialect == "responses" else "messages": self.history}
        if self.dialect == "anthropic":
            body |= {"model": "stand-in", "max_tokens": 64}
        return body | ({"stream": True} if stream else {})

    def result(self) -> dict[str, Any]:
        """The finished rollout as Gym's collector has it: its id and the response that was scored."""
        content = [{"type": "output_text", "text": self.said[-1], "annotations": []}]
        message = {"id": "msg_1", "type": "message", "role": "assistant", "status": "completed", "content": content}
        response = {"id": self.last["id"], "model": "stand-in", "object": "response", "output": [message]}
        return {"_ng_rollout_id": self.rollout, "response": response, "reward": 1.0}

    def _output(self, body: Any) -> list[dict[str, Any]]:
        if self.dialect == "responses":
            return list(body["output"])
        if self.dialect == "anthropic":
            return [{"role": "assistant", "content": body["content"]}]
        message = body["choices"][0]["message"]
        return [{key: value for key, value in message.items() if value is not None}]


def _text_of(items: list[dict[str, Any]]) -> str:
    content = items[-1]["content"]
    return content if isinstance(content, str) else "".join(block.get("text") or "" for block in content)


def _joined(events: str) -> dict[str, Any]:
    """A chat stream as the completion it stands for; an error event as ``{"error": ...}``."""
    said, message_id = "", ""
    for line in events.splitlines():
        if not line.startswith("data: ") or line == "data: [DONE]":
            continue
        chunk = json.loads(line.removeprefix("data: "))
        if "error" in chunk:
            return {"error": chunk["error"]}
        message_id = chunk.get("id") or message_id
        for choice in chunk.get("choices") or []:
            said += choice["delta"].get("content") or ""
    return {"id": message_id, "choices": [{"message": {"role": "assistant", "content": said}}]}
