"""Gives memory back to the system that the C library keeps for later."""

import ctypes

GIVE_BACK_STEPS = 100
"""Optimizer steps between two times."""


def give_back() -> None:
    """Return free pages of the heap; does nothing where the C library can't (glibc can).

    A step's tensors come and go in all sizes, between small things that stay: glibc's heap gets holes that it fills
    again, but not all of them. A learner of a tiny model grew by 21 kB a step, with this by 3 kB.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
