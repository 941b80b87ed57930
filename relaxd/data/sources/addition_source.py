"""The addition source: generated sums of two numbers with a given number of digits."""

import numpy as np

from relaxd.data.examples import Example

MAX_PAIRS = 65_536
"""Maximum number of pairs of numbers. With three digits or more there are more pairs, so they are sampled."""
MAX_HELD_OUT = 1_000
SPLIT_SEED = 20_250_101
"""Seed of the split into training and held-out pairs. It is constant, so that runs with different seeds are
comparable."""


def addition(digits: int) -> tuple[list[Example], list[Example]]:
    """Return the training examples and the held-out examples, both in a fixed shuffled order.

    A pair is not trained on if it or its swapped twin is held out.
    """
    low = 0 if digits == 1 else 10 ** (digits - 1)
    numbers = 10**digits - low
    rng = np.random.default_rng(SPLIT_SEED)
    drawn = rng.choice(numbers * numbers, size=min(numbers * numbers, MAX_PAIRS), replace=False)
    pairs = [(low + int(code) // numbers, low + int(code) % numbers) for code in drawn]
    held_out = pairs[-min(len(pairs) // 5, MAX_HELD_OUT) :]
    unseen = {frozenset(pair) for pair in held_out}
    train = [pair for pair in pairs if frozenset(pair) not in unseen]
    return [_example(a, b) for a, b in train], [_example(a, b) for a, b in held_out]


def _example(a: int, b: int) -> Example:
    return Example(
        prompt=f"What is {a} + {b}? Answer with the number only.", answer=str(a + b), place=f"the sum {a} + {b}"
    )
