"""A stand-in for the inference engine: OpenAI's chat endpoint with token ids, deterministic to the last token.

The rule of this module: rendering a conversation again gives the tokens of its parts, so that the prompt of a
continuation begins with exactly the prompt and the generation before it; that is what lineage and delta records rest
on. What happens to a call is written in its last message: ``[hold NAME]`` waits, ``[refuse CODE]`` is refused before
anything is generated. Gym's server never asks the engine for a stream: it streams to its clients by itself.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from gym_e2e.holding import Holds

VOCABULARY = 150_000
_END, _FIRST_WORD = 2, 100
_ROLES = {"system": 3, "user": 4, "assistant": 5, "tool": 6}
_WORDS = (
    "open", "read", "check", "merge", "count", "write", "close", "build", "test", "sort", "value", "path", "line",
    "field", "guard", "token", "retry",
)  # fmt: skip
_REFUSALS = {
    "context": "This model's maximum context length is 32768 tokens. However, you requested 40000 tokens.",
    "policy": "The request was rejected before generation.",
}


class StandInEngine:
    """The engine, on a free port of loopback, in threads of this process."""

    def __init__(self, seed: int = 7) -> None:
        self._seed = seed
        self.holds = Holds()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._http.daemon_threads = True
        self.base_url = f"http://127.0.0.1:{self._http.server_address[1]}/v1"

    @contextmanager
    def running(self) -> Iterator[StandInEngine]:
        """Serve until the block is left; calls still held are let go."""
        thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), name="stand-in-engine")
        thread.start()
        try:
            yield self
        finally:
            self.holds.release_all()
            self._http.shutdown()
            thread.join()
            self._http.server_close()

    def tokens(self, text: str) -> list[int]:
        """The tokens of a text: one for each word, seeded."""
        return [
            _FIRST_WORD + int.from_bytes(hashlib.sha256(f"{self._seed} {word}".encode()).digest()[:8]) % VOCABULARY
            for word in text.split()
        ]

    def generation(self, text: str) -> list[int]:
        """The tokens that the model wrote to say ``text``."""
        return [*self.tokens(text), _END]

    def prompt(self, messages: list[dict[str, Any]]) -> list[int]:
        """The rendered conversation, ready for the assistant to speak."""
        rendered: list[int] = []
        for message in messages:
            rendered += [_ROLES[message["role"]], *self.tokens(_text(message)), _END]
        return [*rendered, _ROLES["assistant"]]

    def answer(self, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """The body of a chat completion; the same conversation gives the same answer."""
        prompt = self.prompt(messages)
        draw = random.Random(f"{self._seed} {prompt}")
        text = " ".join(draw.choice(_WORDS) for _ in range(draw.randint(3, 12)))
        generated = self.generation(text)
        logprobs = [{"token": f"token_id:{token}", "logprob": -draw.random() * 5} for token in generated]
        return {
            "id": f"chatcmpl-{draw.getrandbits(64):016x}",
            "object": "chat.completion",
            "created": 1_750_000_000,
            "model": "stand-in",
            "prompt_token_ids": prompt,
            "choices": [
                {
                    "index": 0,
                    "finish_reason": "stop",
                    "message": {"role": "assistant", "content": text},
                    "token_ids": generated,
                    "logprobs": {"content": [{**one, "bytes": None, "top_logprobs": []} for one in logprobs]},
                }
            ],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": len(generated),
                "total_tokens": len(prompt) + len(generated),
            },
        }


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    return content if isinstance(content, str) else " ".join(part.get("text") or "" for part in content)


def _handler(engine: StandInEngine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self._reply(200, {"object": "list", "data": [{"id": "stand-in", "object": "model"}]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            messages = body["messages"]
            if self.path == "/tokenize":
                self._reply(200, {"tokens": engine.prompt(messages)})
                return
            said = _text(messages[-1])
            if (refusal := re.search(r"\[refuse (\w+)\]", said)) is not None:
                message = _REFUSALS[refusal[1]]
                self._reply(400, {"object": "error", "message": message, "type": "BadRequestError", "code": 400})
                return
            if (held := re.search(r"\[hold ([\w.-]+)\]", said)) is not None:
                engine.holds.wait(held[1], self.connection)
            self._reply(200, engine.answer(messages))

        def _reply(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)
            except ConnectionError:
                self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            del format, args

    return Handler
