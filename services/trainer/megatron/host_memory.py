"""The memory of a rank's own objects: garbage that Python has to look for, and pages that the C library keeps."""

import ctypes
import gc

GIVE_BACK_STEPS = 100
"""Optimizer steps between two times."""


def settle() -> None:
    """Exempt what there is now from all later searches for garbage. For a process whose model is loaded.

    Megatron searches with each checkpoint, whose pickled tensors leave 100 kB of cyclic garbage. Among all objects of
    the imported modules that takes a quarter of a second.
    """
    gc.collect()
    gc.freeze()


def give_back() -> None:
    """Return free pages of the heap; does nothing where the C library can't (glibc can).

    A step's tensors come and go in all sizes, between small things that stay: glibc's heap gets holes that it fills
    again, but not all of them. A learner of a tiny model grew by 21 kB a step, with this by 3 kB.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
