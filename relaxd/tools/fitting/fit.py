"""Result of `relaxd fit`: memory of each role, whether it fits, and the trainer's layouts that fit, ranked by predicted
step time.
"""

from dataclasses import dataclass, replace

from relaxd.config import RunConfig
from relaxd.models.folders import resolve_model, routed_expert_bytes
from relaxd.models.layouts import Layout, possible_layouts, problem
from relaxd.roles import TRAINER
from relaxd.tools.fitting.gpu_memory import (
    ASLEEP,
    EngineMemory,
    check_layout,
    engines,
    in_turns,
    on_critic,
    on_engine,
    on_frozen,
    on_trainer,
)
from relaxd.tools.fitting.host_and_disk import (
    Models,
    checkpoint_bytes,
    critic_checkpoint_bytes,
    disk_bytes,
    host_bytes,
    longest_sequence,
    micro_batch,
    read_models,
    step_work,
)
from relaxd.tools.fitting.speed import Seconds, crossing_bytes, predict
from relaxd.tools.fitting.trainer_memory import Bytes, Hardware, Held


@dataclass(frozen=True)
class Candidate:
    """A parallel layout of the trainer that fits into the GPUs' memory, with its predicted speed."""

    layout: Layout
    bytes: int
    """Bytes used on the fullest GPU, those of other processes included."""
    seconds: float
    """Predicted seconds of the trainer's part of a step."""
    between_hosts: int
    """Bytes that a host sends to other hosts per step."""


def rank_layouts(config: RunConfig, models: Models, hardware: Hardware, taken: int) -> list[Candidate]:
    """Return the trainer's layouts that fit into the GPUs' memory, with the fastest predicted layout first.

    They have trainer.ranks ranks; if none fits, the next larger number of ranks with fitting layouts. With several
    hosts, tensor-parallel ranks must be on one host. The time of sending between hosts is not predicted.

    Args:
        config: the run.
        models: the models in the trainer's ranks.
        hardware: the GPUs.
        taken: bytes of each GPU that other processes hold, such as sleeping engines.
    """
    ranks, hosts = config.trainer.ranks, config.trainer.hosts
    while ranks <= hardware.gpus_per_node * hosts:
        if found := _fitting(config, models, hardware, ranks, taken):
            return sorted(found, key=lambda one: (one.seconds, one.bytes))
        if config.run.colocate:  # as many ranks as the engines have GPUs
            break
        ranks += hosts
    return []


def _fitting(config: RunConfig, models: Models, hardware: Hardware, ranks: int, taken: int) -> list[Candidate]:
    work, trainer = step_work(config, models), config.trainer
    element, found = micro_batch(config, config.micro_batch_tokens).element, []
    offload = element < 4 and trainer.optimizer.moments == "float32"
    for bare in possible_layouts(models.policy, ranks, trainer.groups_per_step, offload=offload):
        layout = replace(
            bare,
            activations_on_host=trainer.activation_offload_bytes,
            shard_gradients=trainer.shard_gradients,
            overlap_grad_reduce=trainer.overlap_grad_reduce,
        )
        if any(problem(layout, shape) for shape in models.frozen) or ranks // trainer.hosts % layout.tensor:
            continue
        ways = [layout]  # whole gradients first: they are faster
        if layout.data * layout.context > 1 and not layout.shard_gradients:
            ways.append(replace(layout, shard_gradients=True))
        for layout in ways:
            size = taken + max(held.total for held in on_trainer(config, models, layout, hardware))
            if size <= hardware.room:
                seconds = predict(models.policy, layout, work, element).total
                crossing = crossing_bytes(models.policy, layout, work, trainer.hosts, element)
                found.append(Candidate(layout, size, seconds, sum(crossing.values())))
                break
    return found


@dataclass(frozen=True)
class EngineFit:
    """Capacity of an engine's key-value cache for a run's sequences."""

    memory: EngineMemory
    longest: int
    """Maximum length of the engine's sequences (prompt and answer), in tokens."""
    running: int
    """Maximum number of sequences that the engine generates at the same time."""

    @property
    def answers(self) -> int:
        """Number of sequences of maximum length that fit into the key-value cache at once."""
        return self.memory.answers(self.longest)


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Result of `relaxd fit`: the memory, disk and time that a run needs, and the trainer's layouts that fit."""

    held: list[Held]
    engines: dict[str, EngineFit]
    layout: Layout
    """The trainer's parallel layout as configured."""
    seconds: Seconds
    """Predicted seconds of the trainer's part of a step."""
    layouts: list[Candidate]
    """The trainer's layouts that fit into the GPUs' memory, with the fastest predicted layout first."""
    host: Bytes
    """Bytes of host memory that a trainer's host needs, by purpose."""
    between_hosts: Bytes
    """Bytes that a trainer's host sends to the other hosts per step, by kind."""
    disk: Bytes

    @property
    def fits(self) -> bool:
        """True if no GPU is overfilled, and each engine's cache has room for a sequence of maximum length."""
        return all(one.fits for one in self.held) and all(one.answers for one in self.engines.values())


def fit(config: RunConfig, hardware: Hardware, judges: int = 1) -> Fit:
    """Compute the memory and disk that a run needs, and the trainer's layouts that fit.

    Args:
        config: the run.
        hardware: its GPUs.
        judges: replicas of the judge; if they share the trainer's GPUs, their weights sleep on its host.

    Raises:
        DataError: a model has no usable config.json.
        FitError: a model can't be divided as configured, or a node has too few GPUs.
    """
    models, layout = read_models(config), Layout.of_trainer(config.trainer)
    check_layout(layout, (models.policy, *models.frozen), TRAINER, hardware, config.trainer.hosts)
    trainer, own_engines = on_trainer(config, models, layout, hardware), engines(config, hardware)
    held, judge_weights = list(trainer), 0
    sleepers: list[str] = []
    if config.run.colocate and "rollout" in own_engines:
        judge = own_engines.get("judge") if config.roles.judge.shares_gpus else None
        held = in_turns(
            trainer,
            own_engines["rollout"],
            hardware,
            config.weights.bucket_bytes,
            judge,
            offload=config.trainer.offload,
        )
        sleepers = ["rollout"] if judge is None else ["rollout", "judge"]
        if judge is not None:
            judge_weights = judges * judge.weights * config.roles.judge.tensor_parallel
    taken = ASLEEP["rollout"] * len(sleepers)
    held += [on_engine(role, one, hardware) for role, one in own_engines.items() if role not in sleepers]
    for role in config.frozen_roles("service"):
        held += on_frozen(config, role, hardware) if role not in own_engines else []
    if config.algorithm.needs_critic and not models.critic:
        held += on_critic(config, models, hardware)
    element, expert_bytes = _element_and_expert_bytes(config)
    work = step_work(config, models)
    return Fit(
        held=held,
        engines={role: _engine(config, role, memory) for role, memory in own_engines.items()},
        layout=layout,
        seconds=predict(models.policy, layout, work, element),
        layouts=rank_layouts(config, models, hardware, taken),
        host=host_bytes(config, models, element, expert_bytes, judge_weights),
        between_hosts=crossing_bytes(models.policy, layout, work, config.trainer.hosts, element),
        disk=disk_bytes(config, models, element, expert_bytes),
    )


def written(config: RunConfig) -> Bytes:
    """Return the bytes that a run will write into its folder, by purpose.

    Raises DataError if a model has no usable config.json.
    """
    return disk_bytes(config, read_models(config), *_element_and_expert_bytes(config))


def budget_problem(config: RunConfig) -> str:
    """Return why a run's checkpoints can't stay within trainer.checkpoint.max_bytes, "" if they can.

    Raises DataError if a model has no usable config.json.
    """
    limit, models = config.trainer.checkpoint.max_bytes, read_models(config)
    # The limit applies to a critic service's checkpoints separately.
    largest = max(checkpoint_bytes(config, models), critic_checkpoint_bytes(config, models))
    count, beside = (3, " and the best one stay") if config.trainer.checkpoint.keep_best else (2, " stays")
    if not limit or limit >= count * largest:
        return ""
    needed = f"{'three' if count == 3 else 'two'} checkpoints take, {count * largest}"
    return f"= {limit} is less than {needed}: the newest{beside} while the next is written"


def _element_and_expert_bytes(config: RunConfig) -> tuple[int, int]:
    """Return the bytes per weight in the trainer, and the bytes per token that record its routed experts (0 if they
    aren't recorded)."""
    folder = resolve_model(config.model.path, weights=False)
    expert_bytes = routed_expert_bytes(folder) if config.rollout.return_routed_experts else 0
    return micro_batch(config, config.micro_batch_tokens).element, expert_bytes


def _engine(config: RunConfig, role: str, memory: EngineMemory) -> EngineFit:
    if role == "rollout":
        return EngineFit(memory, longest_sequence(config), config.rollout.max_running_samples)
    if role == "teacher":
        longest = config.teacher_prompt_tokens + config.rollout.max_new_tokens
        return EngineFit(memory, longest, config.teacher_engine.max_running_samples)
    judge = config.roles.judge
    return EngineFit(memory, longest_sequence(config) + judge.max_new_tokens, judge.max_running_samples)
