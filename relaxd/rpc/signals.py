"""SIGTERM and SIGINT: the first asks to end, the second insists."""

import asyncio
import logging
import os
import signal

_log = logging.getLogger(__name__)


def stop_signals() -> asyncio.Event:
    """An event that is set by the first SIGTERM or SIGINT; a second one ends the process at once, with code 1.

    Call it in the main thread, inside the event loop.
    """
    requested = asyncio.Event()

    def on_signal(name: str) -> None:
        if requested.is_set():
            _log.warning("%s again: ending at once", name)
            os._exit(1)
        _log.info("%s: ending (once more to end at once)", name)
        requested.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    return requested
