"""Micro-batches per step: best fit over two rounds, as the trainer packs, beside next fit in order of arrival.

python -m benchmarks.packing
"""

import random
from collections.abc import Sequence

from benchmarks.reporting import report
from services.trainer.batch.micro_batch_division import Packer

STEPS = {
    "long-tailed, 128 x 16 up to 16k": (128, 16, 300, 1_820, 16_384, 32_768, 8),
    "long prompts, 32 x 8 of 8k": (32, 8, 8_192, 500, 4_096, 16_384, 2),
    "short, 128 x 8 up to 1k": (128, 8, 100, 120, 1_024, 8_192, 2),
}
"""Groups, samples, prompt tokens, median answer (log-normal), longest answer, budget, data-parallel ranks."""


def next_fit(groups: Sequence[tuple[int, Sequence[int]]], budget: int, ranks: int) -> int:
    """Return the micro-batches if each closes when the next sample, with its prompt, doesn't fit."""
    count, used = 1, 0
    for prompt, answers in groups:
        for tokens in (prompt + answer for answer in answers):
            if used + tokens > budget:
                count, used = count + 1, 0
            used += tokens
    return -(-count // ranks) * ranks


def best_fit(groups: Sequence[tuple[int, Sequence[int]]], budget: int, ranks: int) -> int:
    """Return the micro-batches that the trainer makes of a step whose groups arrive one by one."""
    packer, rounds = Packer(budget, ranks), []
    for number, (prompt, answers) in enumerate(groups):
        packer.add(f"g{number}", prompt, answers)
        while (entry := packer.full_round()) is not None:
            rounds.append(entry)
    if (rest := packer.rest()) is not None:
        rounds.append(rest)
    return sum(len(share) for entry in rounds for share in entry.micro_batches)


def main() -> None:
    """Compare the two on steps of three shapes."""
    rows = []
    for name, (groups, samples, prompt, median, longest, budget, ranks) in STEPS.items():
        rng = random.Random(0)
        step = [
            (prompt, [min(longest, max(1, int(rng.lognormvariate(0, 1) * median))) for _ in range(samples)])
            for _ in range(groups)
        ]
        once = sum(prompt + sum(answers) for prompt, answers in step)
        found, before = best_fit(step, budget, ranks), next_fit(step, budget, ranks)
        rows.append({"step": name, "full micro-batches of work": round(once / budget, 1), "next fit": before})
        rows[-1] |= {"best fit": found, "ratio": round(before / found, 2)}
    report("packing", rows)


if __name__ == "__main__":
    main()
