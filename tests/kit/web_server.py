"""A fake reward service and a fake chat endpoint: a real HTTP server that answers what a test wrote down.

It has no model. Real services are the user's, real engines are in relax/rollout.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Reply:
    """One answer: its status and body, or silence; `drip` sends the body a byte at a time until the test is over."""

    body: bytes = b"{}"
    status: int = 200
    silent: bool = False
    drip: bool = False


@dataclass
class FakeWeb:
    """What was asked, and the answers that are left; the last one is given for ever."""

    url: str
    replies: list[Reply]
    asked: list[tuple[str, dict, dict]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)


def chat_reply(text: str | None) -> Reply:
    """Return what an OpenAI-style endpoint sends when the model said `text`."""
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return Reply(json.dumps({"id": "x", "object": "chat.completion", "choices": [choice]}).encode())


@contextmanager
def fake_web(*replies: Reply) -> Iterator[FakeWeb]:
    """Serve these replies on a free port of 127.0.0.1."""
    web = FakeWeb("", list(replies))
    lock = threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                web.asked.append((self.path, dict(self.headers), body))
                reply = web.replies.pop(0) if len(web.replies) > 1 else web.replies[0]
            if reply.silent:
                web.over.wait(60)
                return
            try:
                self.send_response(reply.status)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                for byte in reply.body if reply.drip else ():
                    self.wfile.write(bytes([byte]))
                    if web.over.wait(0.02):
                        return
                if not reply.drip:
                    self.wfile.write(reply.body)
            except OSError:  # the caller hung up, as it should
                return

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        web.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield web
        finally:
            web.over.set()
            server.shutdown()
            thread.join(10)
