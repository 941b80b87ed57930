"""Python's garbage collections in processes that live long and hold many objects."""

import gc


def freeze_objects() -> None:
    """Exempt all objects that exist now from garbage collections, after a last one.

    Call it once imports, configuration, prompts and models are loaded: a full collection of what they leave behind
    takes a tenth to a quarter of a second, which holds up heartbeats and steps. Each call also collects what earlier
    ones exempted.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
