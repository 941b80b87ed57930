"""Sizes that follow from a run's settings: its largest micro-batch, the work of a step, the models in its ranks."""

from relaxd.config import RunConfig
from relaxd.fitting.activations import MicroBatch
from relaxd.fitting.host import Models, mean_answer
from relaxd.fitting.speed import StepWork
from relaxd.models.folders import models_in_trainer, resolve_model
from relaxd.models.shape import read_shape

MAX_REPEAT = 2
"""Maximum tokens that attention sees over those of a row, as the trainer packs them."""


def read_models(config: RunConfig) -> Models:
    """Read the models in the trainer's ranks.

    Raises:
        DataError: a model has no usable config.json.
    """
    frozen = tuple(
        read_shape(folder, f"roles.{role}.model")
        for role, folders in models_in_trainer(config).items()
        for folder in folders.values()
    )
    folder = resolve_model(config.model.path, weights=False)
    has_critic = config.algorithm.needs_critic and config.roles.critic.placement == "trainer"
    return Models(read_shape(folder), has_critic, frozen)


def longest_sequence(config: RunConfig) -> int:
    """Return the tokens of the longest prompt with the longest answer."""
    return config.data.max_prompt_tokens + config.rollout.max_new_tokens


def micro_batch(config: RunConfig, budget: int) -> MicroBatch:
    """Return the largest micro-batch.

    Attention sees a prompt once for each sample that shares it: as often as with prompts of maximal and answers of mean
    length, and at most MAX_REPEAT times the tokens of the row.
    """
    prompt, samples, answer = config.data.max_prompt_tokens, config.rollout.samples_per_prompt, mean_answer(config)
    repeat = min(MAX_REPEAT, samples * (prompt + answer) / (prompt + samples * answer))
    tokens, bf16 = max(budget, longest_sequence(config)), config.trainer.dtype == "bfloat16"
    return MicroBatch(tokens, int(repeat * tokens), bf16, 2 if bf16 else 4, config.trainer.fp32_lm_head)


def step_work(config: RunConfig, models: Models) -> StepWork:
    """Return the work of a step with prompts of maximal and answers of mean length.

    A pass without gradients (a frozen model, log-probs before several updates) counts as a third of one with them, and
    a critic as much as the policy.
    """
    trainer, rollout = config.trainer, config.rollout
    prompt, answer, trained = config.data.max_prompt_tokens, mean_answer(config), 1 + models.critic
    # Of several teachers, one is asked about a group.
    forward_only = len(config.frozen_roles("trainer")) + (trained if trainer.updates_per_step > 1 else models.critic)
    return StepWork(
        tokens=trainer.groups_per_step * (prompt + rollout.samples_per_prompt * answer),
        attended=trainer.groups_per_step * rollout.samples_per_prompt * (prompt + answer) ** 2 / 2,
        micro_batch_tokens=config.micro_batch_tokens,
        mini_batches=trainer.mini_batches,
        updates=trainer.updates_per_step * trained,
        passes=trainer.epochs * trained + forward_only / 3,
    )
