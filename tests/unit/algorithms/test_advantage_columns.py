"""What the advantage stage says about columns that other stages wrote."""

import numpy as np

from services.advantage.service import column_problem

NAMES = ("loss_mask", "rollout_logprobs", "teacher_logprobs", "finish")


def test_columns_of_another_length_or_without_a_log_prob_are_named() -> None:
    columns = {
        "loss_mask": np.array([1, 0, 1], np.uint8),
        "rollout_logprobs": np.zeros(3, np.float32),
        "teacher_logprobs": np.array([-1.0, np.nan, -2.0], np.float32),  # where nothing is trained
        "finish": ["stop"],
    }
    assert column_problem(columns, NAMES, 3) == ""
    short = columns | {"teacher_logprobs": np.zeros(2, np.float32)}
    expected = "teacher_logprobs, which stage teacher writes, has 2 values for 3 tokens"
    assert column_problem(short, NAMES, 3) == expected
    columns["teacher_logprobs"] = np.array([-1.0, 0.0, -np.inf], np.float32)
    expected = "teacher_logprobs, which stage teacher writes, is NaN or infinite at a trained token"
    assert column_problem(columns, NAMES, 3) == expected
    assert column_problem(columns, NAMES[:2], 3) == ""
