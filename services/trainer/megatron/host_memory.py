"""Host memory of a rank: Python's garbage collector and glibc's heap."""

import ctypes
import gc

TRIM_EVERY_STEPS = 100
"""Optimizer steps between two calls of `trim_heap`."""


def freeze_objects() -> None:
    """Exempt all current objects from garbage collection. Call it once the model is loaded.

    Each checkpoint leaves 100 kB of cyclic garbage, and Megatron then runs a collection. Over all objects of the
    imported modules it would take a quarter of a second.
    """
    gc.collect()
    gc.freeze()


def trim_heap() -> None:
    """Return free pages of the heap to the system. Does nothing without glibc.

    A step allocates tensors of all sizes between small long-lived objects, which fragments the heap. A learner with a
    tiny model grew by 21 kB a step without this and by 3 kB with it.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
