"""The addition source: sums of two numbers of so many digits, as a procedural data set."""

import numpy as np

from relaxd.data.examples import Example

MAX_PAIRS = 65_536
"""Numbers of three digits and more have more pairs than anyone trains on: this many are drawn."""
MAX_HELD_OUT = 1_000
SPLIT_SEED = 20_250_101
"""Which pairs are held out never depends on the run's seed, or seeds could not be compared."""


def addition(digits: int) -> tuple[list[Example], list[Example]]:
    """Make the training examples and the held-out ones, both in a fixed shuffled order.

    A pair whose swapped twin is held out is not trained on either, so held-out sums are really new.
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
