"""Stop strings that begin in tokens from before a request, and end in its own."""

from collections.abc import Callable, Collection, Sequence


def end_across(
    tokens: Sequence[int],
    begun: int,
    checked: int,
    stop: Collection[str],
    min_tokens: int,
    decode: Callable[[list[int]], str],
) -> tuple[int, str] | None:
    """Return (tokens, stop string) of an answer that ends at a stop string begun before the request.

    None if there is no such string. SGLang looks for stop strings only in what a request generates.

    Args:
        tokens: all tokens of the answer so far.
        begun: number of tokens from before the request; no stop string ended in them.
        checked: number of tokens up to which the caller has looked already; at least `begun`.
        stop: stop strings.
        min_tokens: minimum tokens of an answer.
        decode: text of tokens.
    """
    if not begun or not stop:
        return None
    # Each token has a byte or more, so a string that began before the request ends within so many tokens of it.
    longest = max(len(each.encode()) for each in stop)
    first = max(0, begun - longest)
    for count in range(max(checked + 1, min_tokens), min(len(tokens), begun + longest) + 1):
        text = decode(list(tokens[first:count]))
        for each in stop:
            if each in text:
                return count, each
    return None
