"""Bytes that a run needs on the trainer's host and on disk."""

from dataclasses import dataclass

from relaxd.board import worst_bytes
from relaxd.config import RunConfig
from relaxd.fitting.trainer import Bytes
from relaxd.models.layouts import Layout, stage_parameters
from relaxd.models.shape import ModelShape

RANK_BYTES = 4 << 30
"""Resident memory of a rank's process without tensors: torch, CUDA's libraries, Megatron. Assumed."""
MEAN_OF_MEDIAN = 1.5
"""Mean length of an answer over the median, as rehearsals assume."""


@dataclass(frozen=True)
class Models:
    """The models in the trainer's ranks."""

    policy: ModelShape
    critic: bool
    """True if a critic is in these ranks. It has the policy's architecture."""
    frozen: tuple[ModelShape, ...]

    @property
    def trained(self) -> list[int]:
        """Parameters of the policy, then of the critic if the run has one."""
        return [
            stage_parameters(self.policy, Layout(1), 0).all,
            *([critic_parameters(self)] if self.critic else []),
        ]


def critic_parameters(models: Models) -> int:
    """Return the parameters of a critic, wherever it is."""
    return stage_parameters(models.policy, Layout(1), 0, critic=True).all


def mean_answer(config: RunConfig) -> float:
    """Return the tokens of an answer on average, from rehearsal.median_tokens or its default."""
    most = config.rollout.max_new_tokens
    return float(min(most, MEAN_OF_MEDIAN * (config.rehearsal.median_tokens or max(1.0, most / 8))))


def step_bytes(config: RunConfig, expert_bytes: int) -> int:
    """Return the bytes of a step's groups, with answers of mean length. `expert_bytes` are a token's routed experts."""
    prompt, samples = config.published_prompt_tokens, config.rollout.samples_per_prompt
    worst = worst_bytes(config, prompt, expert_bytes=expert_bytes)
    mean_share = (prompt + samples * mean_answer(config)) / (prompt + samples * config.rollout.max_new_tokens)
    return int(config.trainer.groups_per_step * worst * mean_share)


def state_bytes(config: RunConfig, models: Models, fixed: int, *, saved: bool = False) -> int:
    """Return the bytes of all trained parameters: their moments, perhaps as saved, and `fixed` bytes of each."""
    optimizers = (config.trainer.optimizer, config.roles.critic.optimizer)
    moments = [one.saved_moment_bytes if saved else one.moment_bytes for one in optimizers]
    return sum(int(count * (fixed + size)) for count, size in zip(models.trained, moments, strict=False))


def checkpoint_bytes(config: RunConfig, models: Models) -> int:
    """Return the bytes of a checkpoint, with a critic in the trainer's ranks: float32 main weights and two moments."""
    return state_bytes(config, models, 4, saved=True)


def critic_checkpoint_bytes(config: RunConfig, models: Models) -> int:
    """Return the bytes of a checkpoint of a critic service, 0 if there is none."""
    critic = config.roles.critic
    if not config.algorithm.needs_critic or critic.placement != "service":
        return 0
    return critic_parameters(models) * (4 + critic.optimizer.saved_moment_bytes)


def kept_checkpoints(config: RunConfig, models: Models) -> int:
    """Return the number of kept checkpoints: trainer.checkpoint's number, within its limit of bytes."""
    settings, size = config.trainer.checkpoint, checkpoint_bytes(config, models)
    if not settings.max_bytes:
        return settings.keep
    return min(settings.keep, max(1, settings.max_bytes // size - 1))


def host_bytes(config: RunConfig, models: Models, element: int, expert_bytes: int, judge_weights: int = 0) -> Bytes:
    """Return the memory that the trainer's host needs. `judge_weights` are those of all judges that sleep there."""
    trainer = config.trainer
    found = {
        "the ranks' processes": trainer.ranks * RANK_BYTES,
        "groups of two steps": 2 * step_bytes(config, expert_bytes),
    }
    offloads = (trainer.optimizer.cpu_offload, config.roles.critic.optimizer.cpu_offload)
    if offloaded := sum(count for count, offload in zip(models.trained, offloads, strict=False) if offload):
        found["offloaded optimizer"] = 16 * offloaded  # main weights, moments, gradients
    if trainer.activation_offload_bytes:
        found["activations"] = trainer.ranks * trainer.activation_offload_bytes
    if trainer.checkpoint.every:
        found["a checkpoint being written"] = checkpoint_bytes(config, models)
    if config.run.colocate:
        state = state_bytes(config, models, element + (4 if element < 4 else 0))
        weights = element * sum(stage_parameters(shape, Layout(1), 0).all for shape in models.frozen)
        found["the sleeping trainer"] = state + weights
    if judge_weights:
        found["sleeping judges' weights"] = judge_weights
    return found


def disk_bytes(config: RunConfig, models: Models, element: int, expert_bytes: int) -> Bytes:
    """Return the disk that the run's folder needs."""
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
    weights = element * models.trained[0]
    of_critic = critic_checkpoint_bytes(config, models)
    return {
        f"{kept} checkpoint{'s' if kept > 1 else ''}, and one being written": (kept + 1)
        * checkpoint_bytes(config, models),
        **({f"{kept} of the critic, and one being written": (kept + 1) * of_critic} if of_critic else {}),
        f"step files of {files} steps": files * step_bytes(config, expert_bytes),
        **({"2 weights of the reference, and those being written": 3 * weights} if refreshed else {}),
        "the trained model": weights,
    }
