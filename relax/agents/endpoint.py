"""The chat endpoint of agent programs: `POST /sessions/<id>/v1/chat/completions`, on this machine alone.

Each request waits in a queue until the program driver has an answer for it. An id is a secret that the program of one
episode knows. It samples nothing itself.
"""

from __future__ import annotations

import json
import queue
import secrets
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import structlog

from relax.agents.chat import Conversation
from relax.agents.chat_messages import ChatRequestError

LOG = structlog.get_logger("relax.agents")

MAX_BODY_BYTES = 256 << 20
SOCKET_LIMIT_S = 60.0
"""Longest wait for the next bytes of a request."""


@dataclass(eq=False)
class Asked:
    """A request that waits for its answer."""

    conversation: Conversation
    max_tokens: int
    """Longest answer that the program wants; 0: no limit of its own."""
    done: threading.Event = field(default_factory=threading.Event)
    answer: dict[str, Any] | None = None

    def give(self, answer: dict[str, Any] | None) -> None:
        """Answer it; None: there will be no answer."""
        self.answer = answer
        self.done.set()


class ChatEndpoint:
    """An HTTP server on 127.0.0.1 with a base URL for each open session.

    Args:
        limit_s: Longest time that a request waits for its answer, in seconds.
    """

    def __init__(self, limit_s: float) -> None:
        self.asked: queue.Queue[Asked] = queue.Queue()
        """Requests in the order in which they came."""
        self._limit_s = limit_s
        self._sessions: dict[str, tuple[Conversation, threading.Lock]] = {}
        endpoint = self

        class Handler(_Handler):
            def reply_to(self, path: str, body: Any) -> dict[str, Any]:
                return endpoint._answer(path, body)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, name="agent-endpoint", daemon=True)
        self._thread.start()

    def open(self, conversation: Conversation) -> str:
        """Open a session and return its base URL, which ends with `/v1`."""
        name = secrets.token_urlsafe(16)
        self._sessions[name] = (conversation, threading.Lock())
        return f"http://127.0.0.1:{self._server.server_port}/sessions/{name}/v1"

    def close_session(self, base_url: str) -> None:
        """End a session: its URL leads nowhere from here on."""
        self._sessions.pop(_session_of(base_url), None)

    def close(self) -> None:
        """Stop serving; idempotent."""
        self._sessions.clear()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5.0)

    def _answer(self, path: str, body: Any) -> dict[str, Any]:
        found = self._sessions.get(_session_of(path))
        if found is None:
            raise ChatRequestError("session: must be one that is open", status=404, code="session_not_found")
        if path.endswith("/v1/models"):
            return {"object": "list", "data": [{"id": "policy", "object": "model", "owned_by": "relax"}]}
        if not path.endswith("/v1/chat/completions"):
            raise ChatRequestError(f"path: must be /v1/chat/completions, got {path[-40:]!r}", status=404)
        conversation, lock = found
        if not lock.acquire(blocking=False):
            raise ChatRequestError("session: must have one request at a time, got another", status=409)
        try:
            if not conversation.episode.is_live:
                raise ChatRequestError("session: the episode is over", status=410, code="episode_over")
            asked = Asked(conversation, conversation.ask(body))
            self.asked.put(asked)
            if not asked.done.wait(self._limit_s) or asked.answer is None:
                raise ChatRequestError("session: there is no answer", status=503, code="no_answer")
            return asked.answer
        finally:
            lock.release()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = SOCKET_LIMIT_S

    def reply_to(self, path: str, body: Any) -> dict[str, Any]:
        raise NotImplementedError

    def do_GET(self) -> None:
        self._reply(None)

    def do_POST(self) -> None:
        try:
            size = int(self.headers.get("Content-Length") or 0)
        except ValueError:
            size = -1
        if not 0 <= size <= MAX_BODY_BYTES:
            self.close_connection = True
            self._send(413, _error(f"request: must have at most {MAX_BODY_BYTES} bytes", "too_large"))
            return
        try:
            body = json.loads(self.rfile.read(size) or b"null")
        except ValueError as error:
            self._send(400, _error(f"request: must be JSON, got {error}", "invalid_request_error"))
            return
        self._reply(body)

    def _reply(self, body: Any) -> None:
        try:
            answer = self.reply_to(self.path.partition("?")[0], body)
        except ChatRequestError as error:
            self._send(error.status, _error(str(error), error.code))
            return
        except Exception:  # the boundary to foreign requests: one of them must not end unheard
            LOG.exception("request of an agent program")
            self._send(
                500, _error("request: must be one that can be answered, got an error", "internal_error")
            )
            return
        if isinstance(body, dict) and body.get("stream"):
            self._send_stream(answer)
        else:
            self._send(200, answer)

    def _send(self, status: int, answer: dict[str, Any]) -> None:
        self._write(status, "application/json", json.dumps(answer).encode())

    def _send_stream(self, answer: dict[str, Any]) -> None:
        """Send the whole answer as one chunk of a stream, for programs that ask for one."""
        choice = answer["choices"][0]
        calls = [{"index": at, **call} for at, call in enumerate(choice["message"].get("tool_calls", ()))]
        delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
        chunk = {
            **{name: answer[name] for name in ("id", "created", "model", "usage")},
            "object": "chat.completion.chunk",
            "choices": [{"index": 0, "delta": delta, "finish_reason": choice["finish_reason"]}],
        }
        self._write(200, "text/event-stream", f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())

    def _write(self, status: int, content_type: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing; what matters is in the metrics."""


def _session_of(path: str) -> str:
    """Return the session of a path or base URL, '' for none."""
    _, found, rest = path.partition("/sessions/")
    return rest.partition("/")[0] if found else ""


def _error(message: str, code: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "code": code, "param": None}}
