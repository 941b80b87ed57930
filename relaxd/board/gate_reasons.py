"""Explanations of the replies of lua/library/admission.lua."""

from collections.abc import Callable

from relaxd.amounts import byte_amount


def explain_limit(answer: str) -> tuple[str, str]:
    """Split a reply, a word and numbers, into the word and a sentence that explains it."""
    word, *texts = answer.split()
    numbers = [int(float(text)) for text in texts]
    return word, _SENTENCES[word](*numbers)


def _closed() -> str:
    return "the coordinator keeps the gate closed"


def _weights() -> str:
    return "no engine has weights yet"


def _staleness(limit: int, version: int) -> str:
    return f"all {limit} groups that engines at weight version {version} may answer are published"


def _complete(needed: int) -> str:
    return f"all {needed} groups that the run needs are published"


def _memory(stored: int, reserved: int, each: int, high_water: int) -> str:
    return (
        f"open groups have stored {byte_amount(stored)} in Redis and may need {byte_amount(reserved)} more; another "
        f"group of up to {byte_amount(each)} would exceed the high-water mark of {byte_amount(high_water)} "
        "(board.high_water_bytes; unless set, four fifths of the maxmemory of Redis, or of the data nodes)"
    )


def _full(used: int, most: int, on_nodes: int = 0) -> str:
    what = "the fullest data node is full (all count like it): they use" if on_nodes else "Redis is full: it uses"
    return (
        f"{what} {byte_amount(used)} of {byte_amount(most)}. If no step makes room, raise its maxmemory "
        "(redis-cli CONFIG SET maxmemory ...)"
    )


_SENTENCES: dict[str, Callable[..., str]] = {
    "closed": _closed,
    "weights": _weights,
    "staleness": _staleness,
    "complete": _complete,
    "memory": _memory,
    "full": _full,
}
