"""Which tokens' log-probs are compared with the engine's."""

import numpy as np

from relaxd.algorithms import create
from relaxd.board import STAGES
from relaxd.config import GRPOConfig
from services.trainer.batch.groups import check_group


def test_only_tokens_of_the_same_weights_and_cache_are_compared() -> None:
    columns = {
        "prompt_tokens": np.array([1, 2], np.int32),
        "prompt": {"text": "", "answer": "", "metadata": {}, "index": 0},
        "tokens": np.arange(6, dtype=np.int32),
        "sample_of_sequence": np.arange(3, dtype=np.int32),
        "lengths": np.array([3, 2, 1], np.int32),
        "shares_prompt": np.ones(3, np.uint8),
        "loss_mask": np.array([1, 1, 0, 1, 1, 1], np.uint8),
        "rollout_logprobs": np.zeros(6, np.float32),
        "versions": np.array([4, 5, 5, 4, 5, 5], np.int64),
        "finish": ["stop", "stop", "stop"],
        "text": ["", "", ""],
        "spans_weight_update": np.array([0, 1, 0], np.uint8),
        "reward": np.zeros(3),
        "reward_parts": {},
        "advantages": np.ones(6, np.float32),
    }
    group = check_group("g", columns, STAGES["train"].needs)
    samples = group.sequences([0, 1, 2], ["advantages"], create(GRPOConfig()), 1.0, version=5)
    # Behind two prompt tokens: an older token, one to compare, a masked one; a continued sample; one to compare.
    assert [sample.logprobs_comparable.tolist() for sample in samples] == [[0, 0, 0, 1, 0], [0, 0, 0, 0], [0, 0, 1]]
