"""An HTTP server with files, redirects and faults, for media that are fetched."""

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any


class MediaServer(ThreadingHTTPServer):
    """Answers a path with the file of that name, with a redirect, or with a status code.

    `hangs` sends a part of its body, `endless` one without a length, `brief` less than its length, and `late` is
    answered, with its file, once `released` is set.
    """

    daemon_threads = True

    def __init__(self, port: int = 0, files: Mapping[str, bytes] | None = None) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.files = dict(files or {})
        self.redirects: dict[str, str] = {}
        self.statuses: dict[str, list[int]] = {}
        """Status codes of the next answers to a path, after which its file is."""
        self.asked: Counter[str] = Counter()
        """Requests by path."""
        self.headers: list[dict[str, str]] = []
        """Headers of all requests."""
        self.released = Event()
        self.stopping = Event()
        self._lock = Lock()

    def next_status(self, name: str) -> int:
        """Return the status code that a path is answered with next; 0: its file is."""
        with self._lock:
            codes = self.statuses.get(name)
            return codes.pop(0) if codes else 0

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server_port}"

    @property
    def url(self) -> str:
        return f"http://{self.host}"


class _Handler(BaseHTTPRequestHandler):
    server: MediaServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        name = self.path.lstrip("/").partition("?")[0]
        server = self.server
        server.asked[name] += 1
        server.headers.append(dict(self.headers))
        if name == "late":
            server.released.wait(60)
        if name in server.redirects:
            self._begin(302, Location=server.redirects[name], Content_Length="0")
        elif status := server.next_status(name):
            self._begin(status, Content_Length="0")
        elif name in ("hangs", "brief"):
            self._begin(200, Content_Length="100")
            self.wfile.write(b"x")
            if name == "hangs":
                server.stopping.wait(60)
            self.close_connection = True
        elif name == "endless":
            self._begin(200, Connection="close")
            while not server.stopping.is_set():
                try:
                    self.wfile.write(b"x" * 4096)
                except OSError:
                    return
        elif name == "huge":
            self._begin(200, Content_Length=str(1 << 40))
            self.close_connection = True
        elif name in server.files:
            self._begin(200, Content_Length=str(len(server.files[name])))
            self.wfile.write(server.files[name])
        else:
            self._begin(404, Content_Length="0")

    def _begin(self, status: int, **headers: str) -> None:
        self.send_response(status)
        for header, value in headers.items():
            self.send_header(header.replace("_", "-"), value)
        self.end_headers()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


@contextmanager
def media_server(port: int = 0, files: Mapping[str, bytes] | None = None) -> Iterator[MediaServer]:
    with MediaServer(port, files) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.released.set()
            server.stopping.set()
            server.shutdown()
            thread.join(10)
