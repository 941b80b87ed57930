"""Which sequences go into one call of cuDNN."""

import numpy as np
import torch

from services.trainer.transformer.sequence_layout import (
    MAX_LENGTH_RATIO,
    MIN_LENGTH,
    MIN_SEQUENCES,
    cudnn_batches,
    rounded_up,
)
from tests.kit.cases import each

CPU = torch.device("cpu")


@each("seed", range(20))
def test_every_sequence_is_in_one_run_with_its_place_and_length(seed: int) -> None:
    rng = np.random.default_rng(seed)
    lengths = [int(2 ** rng.uniform(0, 15)) for _ in range(int(rng.integers(1, 80)))]
    begins = np.cumsum([0, *lengths])
    found = []
    for run in cudnn_batches(lengths, CPU):
        assert len(run.lengths) == run.count
        assert len(run.begins) == run.count + 1
        here = [(int(b), int(n)) for b, n in zip(run.begins, run.lengths, strict=False) if n]
        assert all(int(b) == begins[-1] for b in run.begins[len(here) :])  # what was added has no tokens
        assert run.count <= max(2 * len(here), 1)
        assert max(n for _, n in here) <= run.longest
        short = [n for _, n in here if n * MAX_LENGTH_RATIO < run.longest]
        assert run.longest == MIN_LENGTH or len(short) < MIN_SEQUENCES
        found += here
    assert sorted(found) == sorted(zip(begins[:-1].tolist(), lengths, strict=True))


def test_a_thousand_lengths_need_few_plans() -> None:
    rng = np.random.default_rng(0)
    shapes = set()
    for _ in range(1000):
        lengths = [int(n) for n in rng.integers(100, 2000, 16)]
        shapes |= {(run.count, run.longest) for run in cudnn_batches(lengths, CPU)}
    assert len(shapes) <= 4


def test_rounding_up_wastes_at_most_a_step() -> None:
    for steps in (2, 4):
        rounded = [rounded_up(number, steps) for number in range(1, 5000)]
        assert all(number <= up <= number * (1 + 1 / steps) + 1 for number, up in enumerate(rounded, 1))
        assert len(set(rounded)) <= 13 * steps
