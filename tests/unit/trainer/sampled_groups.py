"""Groups with samples of several sources, as the trainer takes them."""

from typing import Any

import numpy as np

from services.trainer.batch.groups import TrainGroup

SAMPLES = [  # by group: source, and reward, length, finish reason, text of each sample
    ("math", [(1.0, 10, "stop", "ab"), (0.0, 30, "length", "so " * 4000), (0.25, 5, "stop", "c")]),
    ("a b/c", [(1.5, 7, "stop", "d"), (0.0, 8, "abort", "e")]),
    (None, [(-1.0, 100, "length", "f"), (1.0, 2, "stop", "g")]),
]


def make_group(number: int, source: Any, samples: list[tuple[float, int, str, str]]) -> TrainGroup:
    rewards, lengths, finishes, texts = map(list, zip(*samples, strict=True))
    tokens = sum(lengths)
    columns = {
        "prompt_tokens": np.zeros(3, np.int32),
        "prompt": {"text": "?", "metadata": {} if source is None else {"data_source": source}},
        "lengths": np.array(lengths, np.int32),
        "sample_of_sequence": np.arange(len(samples), dtype=np.int32),
        "shares_prompt": np.ones(len(samples), np.uint8),
        "tokens": np.arange(tokens, dtype=np.int32),
        "loss_mask": np.ones(tokens, np.uint8),
        "rollout_logprobs": np.linspace(-2.0, -0.1, tokens, dtype=np.float32),
        "versions": np.zeros(tokens, np.int64),
        "advantages": np.zeros(tokens, np.float32),
        "reward": np.array(rewards),
        "reward_parts": {"max": [9.0] * len(samples), "style": [0.5] * len(samples)},
        "finish": finishes,
        "text": texts,
    }
    return TrainGroup(f"g{number}", columns)
