"""An HTTP server that takes notifications, as a chat or a pager does."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any


class Webhook(ThreadingHTTPServer):
    """Keeps what was posted, and answers with `status`."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.status = 200
        self.posted: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        """The address for Apprise; its path and user are secrets."""
        return f"json://user:hunter2@127.0.0.1:{self.server_port}/hunter2"

    @property
    def titles(self) -> list[str]:
        return [one["title"] for one in self.posted]


class _Handler(BaseHTTPRequestHandler):
    server: Webhook

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.server.status == 200:
            self.server.posted.append(body)
        self.send_response(self.server.status)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


@contextmanager
def webhook() -> Iterator[Webhook]:
    with Webhook() as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(10)
