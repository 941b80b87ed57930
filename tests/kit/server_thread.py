"""A gRPC server in a thread, for tests of blocking clients."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from relaxd.rpc.server import start_server


@contextmanager
def serve_in_thread(services: Sequence[tuple[Any, Any, str]]) -> Iterator[int]:
    """Serve (function that adds a servicer, servicer, full name) each. Yields the port."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    server = asyncio.run_coroutine_threadsafe(start_server(services), loop).result(60)
    try:
        yield server.port
    finally:
        asyncio.run_coroutine_threadsafe(server.stop(), loop).result(60)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(60)
