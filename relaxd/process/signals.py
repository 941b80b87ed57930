"""SIGTERM and SIGINT: the first requests a graceful end, the second ends at once."""

import asyncio
import logging
import os
import signal

_log = logging.getLogger(__name__)


def stop_signals() -> asyncio.Event:
    """Return an event that the first SIGTERM or SIGINT sets; a second one ends the process at once, with code 1.

    Call it in the main thread, inside the event loop.
    """
    requested = asyncio.Event()

    def on_signal(name: str) -> None:
        if requested.is_set():
            _log.warning("%s again: exiting now", name)
            os._exit(1)
        _log.info("%s: shutting down (again to exit now)", name)
        requested.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    return requested
