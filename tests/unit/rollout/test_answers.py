"""The answers of a group that several engines write, one after the other."""

from typing import Any

import numpy as np
import pytest

from relaxd.board import decode_columns, encode_columns, stages_for
from relaxd.weights.receipts import Receipt
from services.reward.samples import samples_of_columns
from services.rollout.engines.request_types import FinishReason, Output
from services.rollout.service.answers import Answers
from tests.unit.rollout.configs import run_config


def output(
    sample: int, tokens: range, version: int, finish: FinishReason | None = None, *, spans: bool = False
) -> Output:
    logprobs = [-token / 10 for token in tokens]
    likeliest = [[token, token + 1] for token in tokens]
    versions, receipts = [version] * len(tokens), [Receipt(version, f"digest {version}", f"rollout-{version % 2}")]
    return Output(
        sample, list(tokens), logprobs, versions, finish, "text", spans, receipts=receipts, likeliest=likeliest
    )


class Board:
    """Parts as the board has them, in its encoding."""

    def __init__(self) -> None:
        self.parts: list[dict[str, Any]] = []

    def moved(self, answers: Answers) -> Answers:
        """The answers as the next holder of their group gets them."""
        columns, _, mark = answers.unsaved()
        answers.mark_saved(mark)
        self.parts.append(decode_columns(encode_columns(columns)))
        successor = Answers(len(answers))
        successor.take_saved(self.parts)
        return successor


def test_nothing_of_an_answer_changes_on_its_way_over_three_engines() -> None:
    answers, board = Answers(3), Board()
    answers.take(output(0, range(4), 1, "stop"))
    answers.take(output(1, range(2), 1))
    answers.take(output(1, range(2, 5), 1, "abort", spans=True))
    answers = board.moved(answers)
    assert answers.begun == {1: (0, 1, 2, 3, 4), 2: ()}
    answers.go_on(2, mask_off_policy=False)
    assert answers.oldest_version() == 1
    answers.take(output(1, range(5, 6), 2, "abort"))
    answers.take(output(2, range(3), 2, "abort"))
    answers = board.moved(answers)
    answers.go_on(2, mask_off_policy=False)
    answers.take(output(1, range(6, 8), 3, "length"))
    answers.take(output(2, range(3, 4), 3, "stop"))
    assert answers.ended
    names = (*stages_for(run_config(partial={"enabled": True}))[0].writes, "student_candidates", "weight_receipts")
    columns = answers.columns(names)
    by_version = [Receipt(version, f"digest {version}", f"rollout-{version % 2}") for version in range(4)]
    assert columns["weight_receipts"] == [by_version[1:2], by_version[1:], by_version[2:]]
    assert columns["lengths"].tolist() == [4, 8, 4]  # type: ignore[union-attr]
    assert columns["tokens"].tolist() == [*range(4), *range(8), *range(4)]  # type: ignore[union-attr]
    expected = [-token / 10 for token in (*range(4), *range(8), *range(4))]
    np.testing.assert_array_equal(columns["rollout_logprobs"], np.array(expected, np.float32))
    tokens = columns["tokens"].tolist()  # type: ignore[union-attr]
    assert columns["student_candidates"].tolist() == [[token, token + 1] for token in tokens]  # type: ignore[union-attr]
    assert columns["versions"].tolist() == [1] * 4 + [1] * 5 + [2] + [3, 3] + [2] * 3 + [3]  # type: ignore[union-attr]
    assert columns["finish"] == ["stop", "length", "stop"]
    assert columns["spans_weight_update"].tolist() == [0, 1, 0]  # type: ignore[union-attr]
    assert columns["continued"].tolist() == [0, 2, 1]  # type: ignore[union-attr]
    assert columns["loss_mask"].all()  # type: ignore[union-attr]


def test_tokens_of_older_weights_are_masked_where_the_run_wants_it_and_count_for_the_reward() -> None:
    answers, board = Answers(2), Board()
    answers.take(output(0, range(4), 1, "stop"))
    answers.take(output(1, range(5), 1, "abort"))
    answers.go_on(1, mask_off_policy=True)  # the same weights
    answers.take(output(1, range(5, 6), 1, "abort"))
    answers = board.moved(answers)
    answers.go_on(2, mask_off_policy=True)
    assert answers.oldest_version() == 1  # of the first answer, which is complete
    answers.take(output(1, range(6, 9), 2, "stop"))
    config = run_config(partial={"enabled": True, "mask_off_policy": True})
    columns = answers.columns(stages_for(config)[0].writes)
    assert columns["off_policy_tokens"].tolist() == [0, 6]  # type: ignore[union-attr]
    assert columns["loss_mask"].tolist() == [1] * 4 + [0] * 6 + [1] * 3  # type: ignore[union-attr]
    reward = next(stage for stage in stages_for(config) if stage.name == "reward")
    everything = {**columns, "prompt": {"text": "?"}}
    assert [sample.tokens for sample in samples_of_columns({name: everything[name] for name in reward.needs})] == [4, 9]


def test_tokens_are_masked_by_the_weights_that_go_on_not_by_those_that_were_there_at_the_cut() -> None:
    """weights.pause = "abort": the answer is cut off before its engine has the next weights."""
    answers = Answers(1)
    answers.take(output(0, range(3), 7, "abort"))
    answers.go_on(7, mask_off_policy=True)
    answers.take(output(0, range(3, 5), 8, "stop"))
    config = run_config(partial={"enabled": True, "mask_off_policy": True})
    columns = answers.columns(stages_for(config)[0].writes)
    assert columns["off_policy_tokens"].tolist() == [3]  # type: ignore[union-attr]
    assert columns["loss_mask"].tolist() == [0, 0, 0, 1, 1]  # type: ignore[union-attr]


def test_what_is_saved_is_not_saved_again() -> None:
    answers = Answers(2)
    answers.take(output(0, range(4), 1))
    answers.take(output(1, range(2), 1))
    assert answers.unsaved_tokens == 4
    _, tokens, mark = answers.unsaved()
    answers.take(output(0, range(4, 5), 1))  # while it is saved
    answers.mark_saved(mark)
    assert (tokens, answers.unsaved_tokens) == (6, 1)
    columns, tokens, _ = answers.unsaved()
    assert (tokens, columns["sample"].tolist(), columns["tokens"].tolist()) == (1, [0], [4])  # type: ignore[union-attr]


def test_a_group_of_which_nothing_is_there_begins_together() -> None:
    answers = Answers(3)
    assert answers.begun == {}
    answers.take(Output(1, finish_reason="abort"))
    assert answers.begun == {}
    answers.go_on(3, mask_off_policy=True)
    assert answers.oldest_version() is None


def test_partial_rollout_needs_its_switch_and_no_experts() -> None:
    with pytest.raises(ValueError, match=r"rollout\.partial\.enabled is false"):
        run_config(partial={"mask_off_policy": True})
    with pytest.raises(ValueError, match=r"rollout\.return_routed_experts are both true"):
        run_config(engine="sglang", return_routed_experts=True, partial={"enabled": True})
