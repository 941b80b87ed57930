"""A wall clock that a fault can set: Python imports this at the start of every process whose PYTHONPATH has the folder.

The file that CHAOS_CLOCK names has the seconds by which the process's clock is ahead, as a float64; negative: behind.
Only Python's clock is set: time.time, time.time_ns, datetime.now. Redis, files' times and monotonic clocks go on.
gRPC has the true clock, too: its Python gives deadlines to its core, whose clock is not Python's.
"""

import ctypes
import datetime
import gc
import mmap
import os
import struct
import sys
import time
from typing import Any

VARIABLE = "CHAOS_CLOCK"
OFFSET = struct.Struct("d")


def install(path: str) -> None:
    """Shift this process's clock by what the file says at each moment."""
    with open(path, "rb") as file:
        shown = mmap.mmap(file.fileno(), OFFSET.size, prot=mmap.PROT_READ)
    real, real_ns = time.time, time.time_ns

    def seconds() -> float:
        if sys._getframe(1).f_globals.get("__name__", "").startswith("grpc."):
            return real()
        return real() + float(OFFSET.unpack_from(shown)[0])

    def nanoseconds() -> int:
        return real_ns() + int(OFFSET.unpack_from(shown)[0] * 1e9)

    def now(cls: Any, tz: Any = None) -> Any:
        return cls.fromtimestamp(seconds(), tz)

    def utcnow(cls: Any) -> Any:
        return cls.fromtimestamp(seconds(), datetime.UTC).replace(tzinfo=None)

    time.time, time.time_ns = seconds, nanoseconds
    # The methods of the type itself: pandas and others derive C types from it, which crash if it is a class of Python.
    (methods,) = gc.get_referents(vars(datetime.datetime))
    methods |= {"now": classmethod(now), "utcnow": classmethod(utcnow)}
    ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime.datetime))


if os.path.exists(os.environ.get(VARIABLE, "")):
    install(os.environ[VARIABLE])
