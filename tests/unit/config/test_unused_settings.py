"""Settings that count for nothing beside others: refused, unless they are as by default."""

from pathlib import Path

import pytest

from relaxd.config.load_toml import ConfigError, load_file
from tests.kit.cases import each

EXAMPLE = Path(__file__).parents[3] / "examples" / "addition.toml"
TIS = "algorithm.old_logprobs=current algorithm.correction=tis"
ICEPOP = "algorithm.old_logprobs=current algorithm.correction=icepop"
CASES = [
    # what is set, what makes it count, why it doesn't without
    (
        "algorithm.tis_clip=3",
        "algorithm.correction=tis algorithm.old_logprobs=current",
        'algorithm.correction is "none"',
    ),
    ("algorithm.tis_clip_low=1", "algorithm.correction=tis algorithm.old_logprobs=current", 'set "tis"'),
    ("algorithm.icepop_low=0.1", "algorithm.correction=icepop algorithm.old_logprobs=current", 'set "icepop"'),
    ("algorithm.icepop_high=9", "algorithm.correction=icepop algorithm.old_logprobs=current", 'set "icepop"'),
    ("algorithm.overlong_limit=12", "algorithm.overlong_buffer=4", "algorithm.overlong_buffer is 0"),
    ("algorithm.overlong_penalty=2", "algorithm.overlong_buffer=4 algorithm.overlong_limit=12", "turns shaping off"),
    ("algorithm.veto_sequences=true algorithm.veto_high=0", "algorithm.veto_low=0.1", "algorithm.veto_low are 0"),
    ("algorithm.kl_estimator=k1", "algorithm.kl_coef=0.1", "algorithm.kl_coef is 0: set kl_coef"),
    ("algorithm.kl_estimator=k1", "algorithm.kl_reward_coef=0.1", "algorithm.kl_coef is 0: set kl_coef"),
    ("algorithm.kl_unbiased=true", "algorithm.kl_coef=0.1", "algorithm.kl_coef is 0: set kl_coef"),
    (
        "algorithm.distill_estimator=k3",
        "algorithm.distill_loss_coef=1 roles.teacher.model=big",
        "algorithm.distill_loss_coef is 0",
    ),
    ("algorithm.constant_length=12", "algorithm.loss_aggregation=constant_length", 'is "token_mean": set'),
    ("algorithm.std_epsilon=1 algorithm.normalize_std=false", "algorithm.normalize_std=true", "normalize_std is false"),
    (
        "algorithm.name=opd roles.teacher.model=big algorithm.normalize_std=false",
        "algorithm.reward_coef=1",
        "algorithm.reward_coef is 0: set reward_coef",
    ),
    ("reward.max_retries=5", "reward.on_failure=retry", 'reward.on_failure is "drop": set "retry"'),
    ("reward.sandbox=off reward.network=true", "reward.sandbox=auto", 'reward.sandbox is "off"'),
    ("reward.sandbox=off reward.worker_memory_bytes=9", "reward.sandbox=required", 'reward.sandbox is "off"'),
    (
        "run.stop_early.patience=9",
        "run.stop_early.metric=eval.held_out.reward eval.prompts=2 eval.interval=4",
        "metric is empty: set it",
    ),
    ("eval.engine_share=0.5", "eval.interval=4 eval.prompts=2", "eval.interval is 0"),
    ("roles.teacher.threads=2", "algorithm.name=opd roles.teacher.model=big", "the run has no teacher"),
    ("trainer.optimizer.min_lr=1e-7", "trainer.optimizer.schedule=cosine", 'schedule is "constant"'),
    ("trainer.recompute_layers=2", "trainer.recompute=full", 'trainer.recompute is "none"'),
    ("trainer.fp32_lm_head=true", "trainer.dtype=bfloat16", 'trainer.dtype is "float32"'),
    ("run.switch_timeout_seconds=5", "run.colocate=true board.max_staleness=0", "run.colocate is false"),
    ("trainer.offload=false", "run.colocate=true board.max_staleness=0", "run.colocate is false"),
    (
        "algorithm.kl_coef=0.1 roles.reference.tensor_parallel=2",
        "roles.reference.placement=service",
        'roles.reference.placement is "trainer", whose ranks have the sizes of [trainer]',
    ),
    ("algorithm.name=ppo roles.critic.threads=2", "roles.critic.placement=service", 'placement is "trainer"'),
    (
        "algorithm.name=opd roles.teacher.model=big roles.teacher.privileged_template={prompt}{privileged}",
        "roles.teacher.privileged_key=answer",
        "without privileged_key",
    ),
]


def load(words: str) -> None:
    load_file(EXAMPLE, [f"--{word}" for word in words.split()])


@each(("given", "counts", "reason"), CASES)
def test_what_counts_for_nothing_is_refused(given: str, counts: str, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(given)
    assert any(f"{word.partition('=')[0]} is " in str(caught.value) for word in given.split())
    assert reason in str(caught.value)
    load(f"{given} {counts}")


@pytest.mark.parametrize("setting", ["max_in_flight=3", "outage_seconds=5"])
def test_limits_of_calls_are_for_services_at_an_address(setting: str) -> None:
    with pytest.raises(ConfigError, match=r"reward\.\w+ is [\d.]+, but no reward is a service at an address"):
        load(f"reward.{setting}")
    load(f"reward.{setting} reward.name= reward.address=localhost:1")
    load(f'reward.{setting} eval.sets=[{{name="own",path="p.jsonl",reward_address="localhost:1"}}]')


def test_defaults_that_are_written_out_are_no_mistake() -> None:
    load("algorithm.tis_clip=2.0 algorithm.kl_estimator=low_var_kl algorithm.overlong_limit=0 reward.max_retries=3")


@pytest.mark.parametrize(("limit", "accepted"), [(12, True), (15, True), (16, False), (16384, False)])
def test_shaping_begins_before_the_longest_answer_ends(limit: int, accepted: bool) -> None:
    words = f"rollout.max_new_tokens=12 algorithm.overlong_buffer=4 algorithm.overlong_limit={limit}"
    if accepted:
        load(words)
        return
    with pytest.raises(
        ConfigError, match=rf"overlong_limit is {limit}, so that shaping begins after {limit - 4} tokens"
    ):
        load(words)
