"""A TLS front for a server that has none, such as the Redis of the tests, whose build lacks it."""

import asyncio
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from relaxd.rpc.tls import TlsFiles


@contextmanager
def tls_proxy(port: int, files: TlsFiles) -> Iterator[int]:
    """Listen on a free port of loopback, with `files`' certificate, and pass everything on to `port`."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.certificate, files.key)
    if files.client_ca:
        context.load_verify_locations(files.client_ca)
        context.verify_mode = ssl.CERT_REQUIRED

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            behind_reader, behind_writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(copy(reader, behind_writer), copy(behind_reader, writer))

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="TLS proxy", daemon=True)
    thread.start()
    starting = asyncio.start_server(connected, "127.0.0.1", 0, ssl=context)
    server = asyncio.run_coroutine_threadsafe(starting, loop).result(10)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
