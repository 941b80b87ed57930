"""Bytes that a run needs on the trainer's hosts and on disk, and sizes derived from its settings."""

from dataclasses import dataclass

from relaxd.board.sizes import media_bytes, sample_tokens, worst_bytes
from relaxd.config import RunConfig
from relaxd.models.flops import audio_flops, vision_flops
from relaxd.models.folders import models_in_trainer, resolve_model
from relaxd.models.layouts import Layout, model_parameters, stage_parameters
from relaxd.models.shape import ModelShape, read_shape
from relaxd.tools.fitting.activations import MicroBatch
from relaxd.tools.fitting.speed import StepWork
from relaxd.tools.fitting.trainer_memory import Bytes
from relaxd.tools.rehearsal.assumptions import mean_tokens, mean_turns

RANK_BYTES = 4 << 30
"""Assumed host memory of a trainer rank's process without tensors, in bytes: torch, CUDA's libraries, Megatron."""
SPARE_RANK_BYTES = 1 << 30
"""Assumed host memory of a spare rank's process, in bytes; it has loaded its code and uses no GPU."""

PINNED_SHARE = 4 / 3
"""Assumed ratio of the host memory that pinned tensors take to their bytes; each tensor's memory is rounded up to a
power of two."""


@dataclass(frozen=True)
class Models:
    """The models that the trainer's ranks hold: the policy, perhaps a critic, and frozen models."""

    policy: ModelShape
    critic: bool
    """True if the trainer's ranks also train a critic, which has the policy's architecture."""
    frozen: tuple[ModelShape, ...]
    trains_vision: bool = False
    """True if the policy's media towers (for images, videos, sounds) are trained, at least in part."""

    @property
    def trained(self) -> list[int]:
        """Numbers of trained parameters: the policy's, then the critic's if the ranks have one."""
        return [
            stage_parameters(self.policy, Layout(1), 0).trained(vision=self.trains_vision).all,
            *([critic_parameters(self)] if self.critic else []),
        ]


def critic_parameters(models: Models) -> int:
    """Return the number of a critic's trained parameters, in the trainer or in a service."""
    return stage_parameters(models.policy, Layout(1), 0, critic=True).trained(vision=False).all


def step_bytes(config: RunConfig, expert_bytes: int) -> int:
    """Return the bytes of a step's groups, with answers of mean length and the maximum number of media tokens.

    In conversations, the environment's messages count as media. `expert_bytes` is the size of a token's routed experts.
    """
    prompt, samples = config.published_prompt_tokens, config.rollout.samples_per_prompt
    worst = worst_bytes(config, prompt, expert_bytes=expert_bytes)
    mean = mean_tokens(config) + sample_tokens(config) - config.rollout.max_new_tokens
    mean_share = (prompt + samples * mean) / (prompt + samples * sample_tokens(config))
    media = media_bytes(config, round(media_tokens(config)))
    return int(config.trainer.groups_per_step * (worst * mean_share + media))


def media_tokens(config: RunConfig) -> float:
    """Return the maximum number of a group's media tokens: those of the prompt and of the environment's messages."""
    seen = float(config.data.max_prompt_tokens)
    if config.agent.is_there:
        seen += config.rollout.samples_per_prompt * mean_turns(config) * config.rehearsal.observation_tokens
    return seen


def state_bytes(config: RunConfig, models: Models, fixed: int, *, saved: bool = False) -> int:
    """Return the bytes of all trained parameters and their optimizer moments; `fixed` is the bytes per parameter.

    If `saved`, moments count with their size in checkpoints, else with their size in memory.
    """
    optimizers = (config.trainer.optimizer, config.roles.critic.optimizer)
    moments = [one.saved_moment_bytes if saved else one.moment_bytes for one in optimizers]
    if saved and not config.trainer.checkpoint.moments:
        moments = [0] * len(moments)
    return sum(int(count * (fixed + size)) for count, size in zip(models.trained, moments, strict=False))


def checkpoint_bytes(config: RunConfig, models: Models) -> int:
    """Return the bytes of a trainer's checkpoint: float32 main weights and two moments, also of a critic in its
    ranks."""
    return state_bytes(config, models, 4, saved=True)


def critic_checkpoint_bytes(config: RunConfig, models: Models) -> int:
    """Return the bytes of a critic service's checkpoint; 0 if the run has no critic service."""
    critic = config.roles.critic
    if not config.algorithm.needs_critic or critic.placement != "service":
        return 0
    moments = critic.optimizer.saved_moment_bytes if config.trainer.checkpoint.moments else 0
    return critic_parameters(models) * (4 + moments)


def kept_checkpoints(config: RunConfig, models: Models) -> int:
    """Return the number of checkpoints that a run keeps: trainer.checkpoint.keep, or fewer because of max_bytes."""
    settings, size = config.trainer.checkpoint, checkpoint_bytes(config, models)
    if not settings.max_bytes:
        return settings.keep
    return min(settings.keep, max(1, settings.max_bytes // size - 1))


def host_bytes(config: RunConfig, models: Models, element: int, expert_bytes: int, judge_weights: int = 0) -> Bytes:
    """Return the bytes of host memory that the trainer's host needs, by purpose.

    If there are several hosts, this is the first, which holds the groups. `judge_weights` is the size of the weights of
    all judges that sleep on the host, in bytes.
    """
    trainer, hosts = config.trainer, config.trainer.hosts
    found = {
        "the ranks' processes": trainer.ranks_per_host * RANK_BYTES,
        "groups of two steps": 2 * step_bytes(config, expert_bytes),
    }
    if hosts > 1:
        found["spare ranks' processes"] = trainer.ranks_per_host * SPARE_RANK_BYTES
    offloads = (trainer.optimizer.cpu_offload, config.roles.critic.optimizer.cpu_offload)
    if offloaded := sum(count for count, offload in zip(models.trained, offloads, strict=False) if offload):
        found["offloaded optimizer"] = 16 * offloaded // hosts  # main weights, moments, gradients
    if trainer.activation_offload_bytes:
        found["activations"] = trainer.ranks_per_host * trainer.activation_offload_bytes
    if trainer.checkpoint.every:
        found["a checkpoint being written"] = checkpoint_bytes(config, models) // hosts
    if config.run.colocate and config.trainer.offload:
        state = state_bytes(config, models, element + (4 if element < 4 else 0))
        weights = element * sum(stage_parameters(shape, Layout(1), 0).all for shape in models.frozen)
        found["the sleeping trainer"] = state + weights
    if config.trainer.mini_batches * config.trainer.epochs > 1 and not config.run.colocate:
        found["weights for engines that join"] = int(PINNED_SHARE * element * model_parameters(models.policy))
    if judge_weights:
        found["sleeping judges' weights"] = judge_weights
    return found


def disk_bytes(config: RunConfig, models: Models, element: int, expert_bytes: int) -> Bytes:
    """Return the bytes of disk space that a run's folder needs, by purpose."""
    checkpoint, steps = config.trainer.checkpoint, config.run.steps
    kept = kept_checkpoints(config, models)
    files = steps
    if checkpoint.keep_step_files == "until_checkpoint" and checkpoint.every:
        files = min(steps, checkpoint.every * (kept + 1))
        if checkpoint.replay_bytes:
            between = checkpoint.replay_bytes // step_bytes(config, expert_bytes) + 1
            files = min(files, between * (kept + 1))
    reference = config.roles.reference
    refreshed = reference.placement == "service" and reference.refresh_every
    weights = element * model_parameters(models.policy)
    of_critic = critic_checkpoint_bytes(config, models)
    exported = steps // checkpoint.export_every if checkpoint.export_every else 0
    return {
        f"{kept} checkpoint{'s' if kept > 1 else ''}, and one being written": (kept + 1)
        * checkpoint_bytes(config, models),
        **({"the best checkpoint": checkpoint_bytes(config, models) + of_critic} if checkpoint.keep_best else {}),
        **({f"{kept} of the critic, and one being written": (kept + 1) * of_critic} if of_critic else {}),
        f"step files of {files} steps": files * step_bytes(config, expert_bytes),
        **({"2 weights of the reference, and those being written": 3 * weights} if refreshed else {}),
        **({f"models of {exported} steps": exported * weights} if exported else {}),
        "the trained model": weights,
    }


MAX_REPEAT = 2
"""Maximum ratio of the tokens that attention processes to the tokens in the row; equals the limit in the trainer's
packing."""


def read_models(config: RunConfig) -> Models:
    """Read the architectures of the models that the trainer's ranks hold, from their config.json.

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
    policy = read_shape(folder)
    return Models(policy, has_critic, frozen, config.trainer.trains_towers(hears=policy.audio is not None))


def longest_sequence(config: RunConfig) -> int:
    """Return the maximum length of a prompt with its answer, in tokens."""
    return config.data.max_prompt_tokens + config.rollout.max_new_tokens


def micro_batch(config: RunConfig, budget: int) -> MicroBatch:
    """Return the size of a run's largest micro-batch: `budget` tokens, or the longest sequence if longer.

    Attention processes a shared prompt once per sample. How many tokens this adds is estimated with prompts of maximum
    and answers of mean length, and limited by MAX_REPEAT.
    """
    prompt, samples, answer = config.data.max_prompt_tokens, config.rollout.samples_per_prompt, mean_tokens(config)
    repeat = min(MAX_REPEAT, samples * (prompt + answer) / (prompt + samples * answer))
    tokens, bf16 = max(budget, longest_sequence(config)), config.trainer.dtype == "bfloat16"
    return MicroBatch(tokens, int(repeat * tokens), bf16, 2 if bf16 else 4, config.trainer.fp32_lm_head)


def step_work(config: RunConfig, models: Models) -> StepWork:
    """Return the trainer's work in a step, with prompts of maximum and answers of mean length.

    A forward pass alone (of a frozen model, or for log-probs before several updates) counts as a third of a training
    pass. A critic counts as much as the policy.
    """
    trainer, rollout = config.trainer, config.rollout
    prompt, answer, trained = config.data.max_prompt_tokens, mean_tokens(config), 1 + models.critic
    # Of several teachers, one is asked about a group.
    forward_only = len(config.frozen_roles("trainer")) + (trained if trainer.updates_per_step > 1 else models.critic)
    return StepWork(
        tokens=trainer.groups_per_step * (prompt + rollout.samples_per_prompt * answer),
        attended=trainer.groups_per_step * rollout.samples_per_prompt * (prompt + answer) ** 2 / 2,
        micro_batch_tokens=config.micro_batch_tokens,
        mini_batches=trainer.mini_batches,
        updates=trainer.updates_per_step * trained,
        passes=trainer.epochs * trained + forward_only / 3,
        tower_flops=_tower_flops(config, models),
    )


def _tower_flops(config: RunConfig, models: Models) -> float:
    """Return the FLOPs of all media towers in a step whose groups have the maximum number of media tokens.

    An untrained tower runs once for a group's media, because its outputs are kept. A trained tower runs in each pass,
    and its backward pass counts twice. The towers of each frozen model and of a critic run once.
    """
    trainer = config.trainer
    once = trainer.groups_per_step * media_tokens(config) * _flops_of_media_token(config, models.policy)
    own = 3 * trainer.epochs + (trainer.updates_per_step > 1) if models.trains_vision else 1
    return once * (own + len(config.frozen_roles("trainer")) + models.critic)


def _flops_of_media_token(config: RunConfig, shape: ModelShape) -> float:
    """Return the FLOPs per media token of a media tower's forward pass, for the run's most expensive kind of media.

    Without limits in [data], an image fills a prompt, and a video has two time steps that fill half a prompt each.
    """
    data = config.data
    image = min(data.max_prompt_tokens, data.max_image_tokens or data.max_prompt_tokens)
    video = min(data.max_prompt_tokens, data.max_video_tokens or data.max_prompt_tokens)
    seen = {"image": image, "video": video / max(2, data.max_video_frames // 2)}
    found = [0.0]
    if shape.vision is not None:
        found += [
            vision_flops(shape.vision, tokens) / tokens for kind, tokens in seen.items() if kind in config.media_kinds
        ]
    if shape.audio is not None and (data.video_sound or "audio" in config.media_kinds):
        found.append(audio_flops(shape.audio, 1))
    return max(found)
