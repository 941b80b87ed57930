"""Which groups the trainer takes in where no advantage stage has filtered them."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relaxd.algorithms import GRPO, AlgorithmError, create
from relaxd.board import stages_for
from relaxd.config import RunConfig
from services.trainer.batch.groups import TrainGroup, check_group
from services.trainer.loop.training_queue import GroupRefusals
from tests.integration.trainer.service_kit import make_config
from tests.kit.cases import each

IN_REWARD = {"kl_reward_coef": 0.1}


class Longer(GRPO):
    """A class whose weights are for another group."""

    def token_weights(self, mask: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """One weight too many."""
        return np.append(super().token_weights(mask, lengths), np.float32(0))


def config_of(algorithm: dict[str, Any], **data: Any) -> RunConfig:
    return make_config(Path("model"), algorithm=algorithm, data=data)


def group_of(config: RunConfig, rewards: list[float], finish: str = "stop", length: int = 3) -> TrainGroup:
    n = len(rewards)
    columns = {
        "prompt_tokens": np.array([1, 2], np.int32),
        "prompt": {"text": "2 + 2 = ", "answer": "4", "metadata": {}, "index": 0},
        "tokens": np.arange(n * length, dtype=np.int32),
        "sample_of_sequence": np.arange(n, dtype=np.int32),
        "lengths": np.full(n, length, np.int32),
        "shares_prompt": np.ones(n, np.uint8),
        "loss_mask": np.ones(n * length, np.uint8),
        "rollout_logprobs": np.zeros(n * length, np.float32),
        "versions": np.zeros(n * length, np.int64),
        "finish": [finish] * n,
        "text": [f"answer {i}" for i in range(n)],
        "spans_weight_update": np.zeros(n, np.uint8),
        "reward": np.array(rewards),
        "reward_parts": {},
        "advantages": np.ones(n * length, np.float32),
    }
    return check_group("g", columns, stages_for(config)[-1].needs)


@each(
    ("algorithm", "rewards", "finish", "reason"),
    [
        (IN_REWARD, [0.0, 1.0], "stop", None),
        (IN_REWARD, [0.5, 0.5], "stop", "zero_variance"),
        (IN_REWARD, [0.5], "stop", None),
        ({**IN_REWARD, "drop_zero_variance": False}, [0.5, 0.5], "stop", None),
        ({**IN_REWARD, "mask_truncated": True}, [0.0, 1.0], "length", "all_truncated"),
        ({**IN_REWARD, "mask_truncated": True}, [0.0, 0.0], "length", "all_truncated"),
        ({**IN_REWARD, "mask_truncated": True}, [0.0, 0.0], "stop", "zero_variance"),
        ({}, [0.5, 0.5], "stop", None),  # the advantage stage has judged it
    ],
)
def test_the_algorithm_filters_before_a_group_is_part_of_a_step(
    algorithm: dict[str, Any], rewards: list[float], finish: str, reason: str | None
) -> None:
    config = config_of(algorithm)
    refused = GroupRefusals(config, create(config.algorithm)).refusal(group_of(config, rewards, finish))
    assert (refused and refused.reason) == reason
    assert refused is None or (refused.filtered and refused.counts == "filtered")


def test_overlong_shaping_comes_before_the_comparison() -> None:
    config = config_of({**IN_REWARD, "overlong_buffer": 4, "overlong_limit": 6})
    refusals = GroupRefusals(config, create(config.algorithm))
    group = group_of(config, [1.0, 1.0])
    assert refusals.refusal(group) is not None
    longer = {**group.columns, "lengths": np.array([5, 1], np.int32)}
    assert refusals.refusal(TrainGroup("g", longer)) is None


def test_the_runs_own_filter_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_filter.py").write_text(
        "def short(samples):\n    return samples[0].tokens < 3 if samples[0].reward < 9 else 1\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = config_of(IN_REWARD, curriculum={"filter": "own_filter:short"})
    refusals = GroupRefusals(config, create(config.algorithm))
    assert refusals.refusal(group_of(config, [0.0, 1.0], length=2)) is None
    refused = refusals.refusal(group_of(config, [0.0, 1.0]))
    assert refused is not None
    assert (refused.reason, refused.filtered) == ("filtered", True)
    refused = refusals.refusal(group_of(config, [9.0, 1.0]))
    assert refused is not None
    assert (refused.reason, refused.filtered) == ("filter_failed", False)
    assert 'the filter "own_filter:short" failed: TypeError: it returned 1' in refused.detail
    sys.modules.pop("own_filter", None)


def test_weights_of_another_length_are_refused_and_never_cut_to_fit() -> None:
    config = config_of({"name": f"{__name__}:Longer"})
    algorithm = create(config.algorithm)
    group = group_of(config, [0.0, 1.0])
    said = f"{__name__}:Longer: token_weights() returned float32 [7]: they must be float32 [6], one for each token"
    refused = GroupRefusals(config, algorithm).refusal(group)
    assert refused is not None
    assert (refused.reason, refused.filtered, refused.detail) == ("algorithm_failed", False, said)
    with pytest.raises(AlgorithmError) as error:
        group.sequences([0], ["advantages"], algorithm, 1.0, version=0)
    assert str(error.value) == said


def test_a_token_that_a_model_in_the_ranks_does_not_have_drops_its_group() -> None:
    """Its embedding has no row for it."""
    config = config_of({"kl_coef": 0.1})
    algorithm, group = create(config.algorithm), group_of(config, [0.0, 1.0])
    assert GroupRefusals(config, algorithm, {"reference": 6}).refusal(group) is None
    refused = GroupRefusals(config, algorithm, {"reference": 6, "teacher": 5}).refusal(group)
    assert refused is not None
    assert (refused.reason, refused.detail) == ("no_logprobs", "it has token 5, but the teacher has only 5 tokens")
